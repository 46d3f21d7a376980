// codes.cu: the coded rows of a compact map: one block of threads per block of the map finds the exponents of a row and
// encodes it to the nearest codes. Where parameters come from other blocks, the codes are made in scratch memory first.
#include "codes.h"
#include "../coded.h"
#include "../gaussian.h"
#include "../order.h"

namespace spl {

constexpr int THREADS = SPL_OPT_BLOCK;
constexpr uint32_t NOTHING = UINT32_MAX;  // in a table of Gaussians

struct ParameterRow {
  int16_t* codes; int8_t* exponents;
  int K, group;  // elements, exponent
  __device__ int16_t* block(int64_t b) const { return codes + b * K * THREADS + threadIdx.x; }  // element 0 of this thread; the next follow every THREADS
  __device__ float decoded(int64_t i, int k) const { return decode(codes[place(i, k, K)], step_of(exponents_of(exponents, i)[group])); }
};
constexpr int PARAMETER_ROWS[] = {R_QUAT, R_LOG_SCALE, R_OPACITY, R_SH};

static ParameterRow parameter_row(spl_ctx& c, int r) {
  return {c.row<int16_t>(r), c.row<int8_t>(R_EXPONENTS), (int)c.item_bytes(r) / 2, group_of(r)};
}

__device__ __forceinline__ float block_max(float x, float* by_warp) {  // of values >= 0
  const int most = warp_max(__float_as_int(x));
  if (lane_id() == 0) by_warp[threadIdx.x / 32] = __int_as_float(most);
  __syncthreads();
  float all = 0;
  for (int k = 0; k < THREADS / 32; ++k) all = fmaxf(all, by_warp[k]);
  return all;
}

// change.block(): of the map, to change; change.target(): of `to`, to write. change.begin(i): does Gaussian i get new parameters?
// Then change.value(k) are they. Gaussians without keep their codes, unless the block needs another exponent; where all
// change, the exponents follow from them alone.
template <class Change> __global__ void __launch_bounds__(THREADS) encode_kernel(ParameterRow row, ParameterRow to, int64_t n, Change change) {
  __shared__ float by_warp[THREADS / 32];
  const int64_t block = change.block(), i = block * THREADS + threadIdx.x;
  const bool exists = i < n, changed = exists && change.begin(i), whole = __syncthreads_and(changed || !exists);
  const int16_t* from = row.block(block);
  int16_t* out = to.block(change.target());
  const int e = row.exponents[block * SPL_EXPONENTS + row.group];
  auto value = [&](int k) { return changed ? change.value(k) : exists ? decode(from[k * THREADS], step_of(e)) : 0.0f; };
  float largest = 0;
  for (int k = 0; k < row.K; ++k) largest = fmaxf(largest, fabsf(value(k)));
  const int next = next_exponent(whole ? EXPONENT_MIN : e, block_max(largest, by_warp), row.group);
  for (int k = 0; k < row.K; ++k) out[k * THREADS] = encode(value(k), inverse_step_of(next), NEAREST);
  if (threadIdx.x == 0) to.exponents[change.target() * SPL_EXPONENTS + row.group] = (int8_t)next;
}

// ---- new Gaussians -----------------------------------------------------------------------------------------------------------------
struct Appended {
  NewGaussians g;
  int row;
  int64_t first_block, j;
  float quat[4];
  __device__ int64_t block() const { return first_block + blockIdx.x; }
  __device__ int64_t target() const { return block(); }
  __device__ float log_scale(int k) const { return g.activated ? logf(g.scale[3 * j + k]) : g.scale[3 * j + k]; }
  __device__ float logit_opacity() const { return g.activated ? logf(g.opacity[j] / (1 - g.opacity[j])) : g.opacity[j]; }
  __device__ bool begin(int64_t i) {
    j = i - g.first;
    if (j < 0) return false;
    if (row != R_QUAT) return true;
    for (int k = 0; k < 4; ++k) quat[k] = g.quat ? g.quat[4 * j + k] : k == 0;
    const float scales[3] = {log_scale(0), log_scale(1), log_scale(2)};
    make_storable(quat, scales, logit_opacity(), g.sh + j * g.sh_floats, g.sh_floats);
    return true;
  }
  __device__ float value(int k) const {
    if (row == R_QUAT) return k == 0 ? quat[0] : k == 1 ? quat[1] : k == 2 ? quat[2] : quat[3];
    if (row == R_LOG_SCALE) return log_scale(k);
    if (row == R_OPACITY) return logit_opacity();
    return storable_sh(g.sh[j * g.sh_floats + k]);
  }
};

// SH from degree 1 on; they were cleared.
__global__ void encode_rest_kernel(NewGaussians g, int64_t n, int degree, uint32_t* rest) {
  const int64_t j = thread_id();
  if (j >= n) return;
  float sh[48];
  for (int k = 0; k < 48; ++k) sh[k] = k < g.sh_floats ? storable_sh(g.sh[j * g.sh_floats + k]) : 0.0f;
  encode_rest(rest + (g.first + j) * rest_words(degree), degree, sh, Nearest{});
}

void encode_new(spl_ctx& c, const NewGaussians& g, int64_t n) {
  const int64_t first_block = g.first / THREADS, blocks = (g.first + n + THREADS - 1) / THREADS - first_block;
  for (int r : PARAMETER_ROWS) {
    const ParameterRow row = parameter_row(c, r);
    encode_kernel<<<(unsigned)blocks, THREADS, 0, c.stream>>>(row, row, g.first + n, Appended{g, r, first_block});
    launched("encode_kernel");
  }
  if (g.sh_floats == 3) return;
  encode_rest_kernel<<<blocks_for(n, 128), 128, 0, c.stream>>>(g, n, c.params.sh_degree, c.row<uint32_t>(R_SH_REST));
  launched("encode_rest_kernel");
}

template <class T> __global__ void clear_kernel(T* row, int K, int64_t first, int64_t count) {
  const int64_t at = thread_id();
  if (at < count * K) row[place(first + at % count, (int)(at / count), K)] = 0;
}

// f(address, elements, zero of their type): of a row of moments.
template <class F> static void with_moments(spl_ctx& c, int r, F&& f) {
  if (r >= R_V_MEAN) f(c.row<uint16_t>(r), (int)c.item_bytes(r) / 2); else f(c.row<uint8_t>(r), (int)c.item_bytes(r));
}

void clear_codes(spl_ctx& c, int r, int64_t first, int64_t count) {
  with_moments(c, r, [&](auto* row, int K) {
    clear_kernel<<<blocks_for(count * K, 256), 256, 0, c.stream>>>(row, K, first, count);
    launched("clear_kernel");
  });
}

// ---- Gaussians from other places ----------------------------------------------------------------------------------------------------
struct Moved {
  ParameterRow row;
  const uint32_t* blocks;   // of the map, or null: first_block and those after it
  int64_t first_block;
  const uint32_t* sources;  // [blocks][THREADS], NOTHING: as it was
  uint32_t source;
  __device__ int64_t block() const { return blocks ? blocks[blockIdx.x] : first_block + blockIdx.x; }
  __device__ int64_t target() const { return blockIdx.x; }
  __device__ bool begin(int64_t) { source = sources[thread_id()]; return source != NOTHING; }
  __device__ float value(int k) const { return row.decoded(source, k); }
};

__global__ void __launch_bounds__(THREADS) store_kernel(ParameterRow from, ParameterRow row, const uint32_t* blocks, int64_t first_block) {
  const int64_t block = blocks ? blocks[blockIdx.x] : first_block + blockIdx.x;
  const int16_t* codes = from.block(blockIdx.x);
  int16_t* out = row.block(block);
  for (int k = 0; k < row.K; ++k) out[k * THREADS] = codes[k * THREADS];
  if (threadIdx.x == 0) row.exponents[block * SPL_EXPONENTS + row.group] = from.exponents[blockIdx.x * (int64_t)SPL_EXPONENTS + row.group];
}

// Room for some blocks at once: a table of their Gaussians, their own numbers, and the codes and exponents of one row.
struct Pieces {
  uint32_t *table, *numbers;
  uint8_t* codes;
  int8_t* exponents;
  int64_t blocks;
};
static Pieces pieces_for(spl_ctx& c, int64_t blocks) {
  const int64_t row_bytes = std::max(c.item_bytes(R_SH), c.item_bytes(R_QUAT)) * THREADS, each = THREADS * 4 + 4 + row_bytes + SPL_EXPONENTS;
  int64_t bytes = std::min<int64_t>(32ll << 20, blocks * each + 4 * 256);
  uint8_t* at = scratch(c, bytes);
  Pieces p{};
  p.blocks = (bytes - 4 * 256) / each;
  auto take = [&](int64_t size) { uint8_t* here = at; at += align_up(size, 256); return here; };
  p.table = (uint32_t*)take(p.blocks * THREADS * 4);
  p.numbers = (uint32_t*)take(p.blocks * 4);
  p.exponents = (int8_t*)take(p.blocks * SPL_EXPONENTS);
  p.codes = take(p.blocks * row_bytes);
  return p;
}

static void move_parameters(spl_ctx& c, const Pieces& p, const uint32_t* numbers, int64_t first_block, int64_t blocks, int64_t n) {
  for (int r : PARAMETER_ROWS) {
    const ParameterRow row = parameter_row(c, r);
    ParameterRow made = row;
    made.codes = (int16_t*)p.codes;
    made.exponents = p.exponents;
    encode_kernel<<<(unsigned)blocks, THREADS, 0, c.stream>>>(row, made, n, Moved{row, numbers, first_block, p.table});
    launched("encode_kernel");
    store_kernel<<<(unsigned)blocks, THREADS, 0, c.stream>>>(made, row, numbers, first_block);
    launched("store_kernel");
  }
}

template <class T> __global__ void gather_codes_kernel(const T* row, int K, const uint32_t* sources, int64_t first_block, T* out) {  // a block of threads an element
  const int64_t block = blockIdx.x / K, i = (first_block + block) * THREADS + threadIdx.x;
  const uint32_t source = sources[block * THREADS + threadIdx.x];
  out[thread_id()] = row[place(source != NOTHING ? source : i, (int)(blockIdx.x % K), K)];
}

void keep_codes(spl_ctx& c, int64_t first, const std::vector<uint32_t>& sources) {
  const int64_t first_block = first / THREADS, n = first + (int64_t)sources.size(), end = (n + THREADS - 1) / THREADS;
  const Pieces p = pieces_for(c, end - first_block);
  std::vector<uint32_t> table;
  for (int64_t at = first_block; at < end; at += p.blocks) {
    const int64_t blocks = std::min(p.blocks, end - at);
    table.assign(blocks * THREADS, NOTHING);
    for (int64_t i = std::max(first, at * THREADS); i < std::min(n, (at + blocks) * THREADS); ++i) table[i - at * THREADS] = sources[i - first];
    put(c, p.table, table.data(), table.size() * 4);
    move_parameters(c, p, nullptr, at, blocks, n);
    for (int r = R_M_MEAN; r <= R_V_SH; ++r)
      with_moments(c, r, [&](auto* row, int K) {
        auto* out = (decltype(row))p.codes;
        gather_codes_kernel<<<(unsigned)(blocks * K), THREADS, 0, c.stream>>>(row, K, p.table, at, out);
        launched("gather_codes_kernel");
        check(cudaMemcpyAsync(row + at * K * THREADS, out, blocks * K * THREADS * sizeof *row, cudaMemcpyDeviceToDevice, c.stream), "moving Gaussians");
      });
  }
}

// ---- relocation -------------------------------------------------------------------------------------------------------------------------
struct Relocated {  // in place: reads nothing but its own Gaussian, before anything is written
  ParameterRow log_scale, opacity;
  const uint32_t *blocks, *times;  // times [blocks][THREADS], NOTHING: as it was
  float min_opacity;
  bool scales;                     // which row is changed; opacity comes last
  float x[4];
  __device__ int64_t block() const { return blocks[blockIdx.x]; }
  __device__ int64_t target() const { return block(); }
  __device__ bool begin(int64_t i) {
    const uint32_t n = times[thread_id()];
    if (n == NOTHING) return false;
    for (int k = 0; k < 3; ++k) x[k] = scales ? log_scale.decoded(i, k) : 0;
    x[3] = opacity.decoded(i, 0);
    relocate(x[3], x, (int)n, min_opacity);
    return true;
  }
  __device__ float value(int k) const { return !scales ? x[3] : k == 0 ? x[0] : k == 1 ? x[1] : x[2]; }
};

// The blocks of the map in which value(i) names something, piece by piece: f(how many), with p.numbers and p.table filled.
template <class Value, class F> static void for_touched(spl_ctx& c, const Pieces& p, Value&& value, F&& f) {
  std::vector<uint32_t> numbers, table;
  auto flush = [&] {
    if (numbers.empty()) return;
    put(c, p.numbers, numbers.data(), numbers.size() * 4);
    put(c, p.table, table.data(), table.size() * 4);
    f((int64_t)numbers.size());
    numbers.clear();
    table.clear();
  };
  uint32_t lanes[THREADS];
  for (int64_t begin = 0; begin < c.n; begin += THREADS) {
    bool any = false;
    for (int t = 0; t < THREADS; ++t) {
      lanes[t] = begin + t < c.n ? value(begin + t) : NOTHING;
      any |= lanes[t] != NOTHING;
    }
    if (!any) continue;
    numbers.push_back((uint32_t)(begin / THREADS));
    table.insert(table.end(), lanes, lanes + THREADS);
    if ((int64_t)numbers.size() == p.blocks) flush();
  }
  flush();
}

template <class T> __global__ void clear_some_kernel(T* row, int K, const uint32_t* numbers, const uint32_t* table) {  // a block of threads an element
  const int64_t block = blockIdx.x / K;
  if (table[block * THREADS + threadIdx.x] != NOTHING) row[((int64_t)numbers[block] * K + blockIdx.x % K) * THREADS + threadIdx.x] = 0;
}

void move_codes(spl_ctx& c, const std::vector<int>& times, int64_t n_moves, const int64_t* dst, const int64_t* src, float min_opacity) {
  const Pieces p = pieces_for(c, std::min<int64_t>(n_moves, (c.n + THREADS - 1) / THREADS));
  for_touched(c, p, [&](int64_t i) { return times[i] > 1 ? (uint32_t)times[i] : NOTHING; }, [&](int64_t blocks) {
    const ParameterRow log_scale = parameter_row(c, R_LOG_SCALE), opacity = parameter_row(c, R_OPACITY);
    for (bool scales : {true, false}) {
      const ParameterRow& row = scales ? log_scale : opacity;
      encode_kernel<<<(unsigned)blocks, THREADS, 0, c.stream>>>(row, row, c.n, Relocated{log_scale, opacity, p.numbers, p.table, min_opacity, scales});
      launched("encode_kernel");
    }
  });
  std::vector<uint32_t> from(c.n, NOTHING);
  for (int64_t i = 0; i < n_moves; ++i) from[dst[i]] = (uint32_t)src[i];
  for_touched(c, p, [&](int64_t i) { return from[i]; }, [&](int64_t blocks) {
    move_parameters(c, p, p.numbers, 0, blocks, c.n);
    for (int r = R_M_MEAN; r <= R_V_SH; ++r)
      with_moments(c, r, [&](auto* row, int K) {
        clear_some_kernel<<<(unsigned)(blocks * K), THREADS, 0, c.stream>>>(row, K, p.numbers, p.table);
        launched("clear_some_kernel");
      });
  });
}

// ---- another order ------------------------------------------------------------------------------------------------------------------------
// `after` holds the exponents as they are; of blocks in which something comes from elsewhere they become as small as their Gaussians allow.
__global__ void __launch_bounds__(THREADS) sorted_exponents_kernel(ParameterRow row, const uint32_t* order, int64_t n, int8_t* after) {
  __shared__ float by_warp[THREADS / 32];
  const int64_t i = thread_id(), source = i < n ? order[i] : i;
  if (!__syncthreads_or(source != i)) return;
  float largest = 0;
  if (i < n) for (int k = 0; k < row.K; ++k) largest = fmaxf(largest, fabsf(row.decoded(source, k)));
  largest = block_max(largest, by_warp);
  if (threadIdx.x == 0) after[blockIdx.x * (int64_t)SPL_EXPONENTS + row.group] = (int8_t)exponent_for(largest, row.group);
}

// Elements first .. first + count of K, of all Gaussians in order, to `out` as if a row had `count`; a block of threads per block.
template <class T, class Change>
__global__ void __launch_bounds__(THREADS) sorted_elements_kernel(const T* row, int K, int first, int count, const uint32_t* order, int64_t n, T* out, Change change) {
  const int64_t i = thread_id();
  if (i >= n) return;
  const int64_t source = order[i];
  for (int k = 0; k < count; ++k) out[place(i, k, count)] = change(row[place(source, first + k, K)], source, i);
}
template <class T> __global__ void __launch_bounds__(THREADS) store_elements_kernel(const T* from, int count, int64_t n, T* row, int K, int first) {
  const int64_t i = thread_id();
  if (i < n) for (int k = 0; k < count; ++k) row[place(i, first + k, K)] = from[place(i, k, count)];
}

template <class T, class Change> static void sort_elements(spl_ctx& c, T* row, int K, const uint32_t* order, uint8_t* room, int64_t room_bytes, Change change) {
  const unsigned blocks = (unsigned)blocks_of(c.n);
  const int step = at_a_time(room_bytes, blocks * (int64_t)THREADS * sizeof(T), K);
  for (int first = 0; first < K; first += step) {
    const int count = std::min(step, K - first);
    sorted_elements_kernel<<<blocks, THREADS, 0, c.stream>>>(row, K, first, count, order, c.n, (T*)room, change);
    launched("sorted_elements_kernel");
    store_elements_kernel<<<blocks, THREADS, 0, c.stream>>>((const T*)room, count, c.n, row, K, first);
    launched("store_elements_kernel");
  }
}

void sort_codes(spl_ctx& c, const uint32_t* order, int8_t* after, uint8_t* room, int64_t room_bytes) {
  int8_t* before = c.row<int8_t>(R_EXPONENTS);
  const int64_t bytes = c.map_bytes(R_EXPONENTS, c.n);
  check(cudaMemcpyAsync(after, before, bytes, cudaMemcpyDeviceToDevice, c.stream), "copying exponents");
  for (int r : PARAMETER_ROWS) {
    const ParameterRow row = parameter_row(c, r);
    sorted_exponents_kernel<<<(unsigned)blocks_of(c.n), THREADS, 0, c.stream>>>(row, order, c.n, after);
    launched("sorted_exponents_kernel");
    sort_elements(c, row.codes, row.K, order, room, room_bytes, Recode{before, after, row.group});
  }
  check(cudaMemcpyAsync(before, after, bytes, cudaMemcpyDeviceToDevice, c.stream), "copying exponents");
  for (int r = R_M_MEAN; r <= R_V_SH; ++r)
    with_moments(c, r, [&](auto* row, int K) { sort_elements(c, row, K, order, room, room_bytes, AsItIs{}); });
}

}  // namespace spl
