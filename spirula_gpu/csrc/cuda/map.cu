// map.cu: the Gaussians themselves: append, compact, move. See cpu/map.cpp.
#include "codes.h"

namespace spl {

__global__ void fill_owner_kernel(int32_t* owner, int64_t n, int32_t value) {
  const int64_t i = thread_id();
  if (i < n) owner[i] = value;
}

__global__ void deactivate_kernel(float* scale, float* opacity, int64_t n) {
  const int64_t i = thread_id();
  if (i >= n) return;
  for (int k = 0; k < 3; ++k) scale[3 * i + k] = logf(scale[3 * i + k]);
  opacity[i] = logf(opacity[i] / (1 - opacity[i]));
}

// Between calls the arena holds nothing; here it serves as scratch.
uint8_t* scratch(spl_ctx& c, int64_t& bytes) {
  constexpr int64_t LEAST = 65536;
  if (c.arena.committed >= bytes) return c.arena.base;
  const int64_t room = c.budget() - (held_bytes(c) - c.arena.committed);
  if (Region::rounded(bytes) <= room) {
    try {
      resize_arena(c, bytes);
    } catch (const Failure& f) {
      if (f.status != SPL_E_MEMORY || c.arena.committed < LEAST) throw;
    }
  } else if (c.arena.committed < LEAST) {
    fail(SPL_E_CAPACITY, "no scratch memory is left below the budget of %lld MiB; raise engine.vram_budget_mb", (long long)(c.budget() >> 20));
  }
  bytes = std::min(bytes, c.arena.committed);
  return c.arena.base;
}
constexpr int64_t SCRATCH_BYTES = 32ll << 20;

static void append_parameters(spl_ctx& c, const Source& s) {
  auto behind = [&](int r) { return c.row<uint8_t>(r) + c.n * c.item_bytes(r); };
  auto copy = [&](int r, const float* from) { check(cudaMemcpyAsync(behind(r), from, s.n * c.item_bytes(r), cudaMemcpyDefault, c.stream), "copying Gaussians"); };
  copy(R_QUAT, s.quat); copy(R_LOG_SCALE, s.scale); copy(R_OPACITY, s.opacity);
  check(cudaMemcpy2DAsync(behind(R_SH), c.item_bytes(R_SH), s.sh, s.sh_floats * 4, s.sh_floats * 4, s.n, cudaMemcpyDefault, c.stream), "copying Gaussians");
  if (s.activated) deactivate_kernel<<<blocks_for(s.n, 256), 256, 0, c.stream>>>((float*)behind(R_LOG_SCALE), (float*)behind(R_OPACITY), s.n);
  launched("deactivate_kernel");
}

// Through scratch memory, some whole blocks at a time, so that each is encoded once.
static void append_codes(spl_ctx& c, const Source& s) {
  const int64_t floats = 4 + 3 + 1 + s.sh_floats;
  int64_t bytes = std::min(SCRATCH_BYTES, s.n * floats * 4);
  float* base = (float*)scratch(c, bytes);
  const int64_t room = bytes / (floats * 4);
  for (int64_t at = 0, end; at < s.n; at = end) {
    end = std::min(s.n, at + room);
    if (end < s.n) end -= (c.n + end) % SPL_OPT_BLOCK;
    float* to = base;
    auto bring = [&](const float* from, int per) {
      float* here = to;
      check(cudaMemcpyAsync(here, from + at * per, (end - at) * per * 4, cudaMemcpyDefault, c.stream), "copying Gaussians");
      to += (end - at) * per;
      return here;
    };
    const float *quat = bring(s.quat, 4), *scale = bring(s.scale, 3), *opacity = bring(s.opacity, 1), *sh = bring(s.sh, s.sh_floats);
    encode_new(c, {quat, scale, opacity, sh, c.n + at, s.sh_floats, s.activated}, end - at);
  }
}

// Rows of zeros behind the first c.n, but for coded parameters, which encode_new writes.
void clear_new(spl_ctx& c, int64_t n) {
  for (int r = 0; r < SPL_N_MAP_ROWS; ++r) {
    if (!c.item_bytes(r)) continue;
    if (!c.info(r).coded) check(cudaMemsetAsync(c.row<uint8_t>(r) + c.n * c.item_bytes(r), 0, n * c.item_bytes(r), c.stream), "clearing new Gaussians");
    else if (r > R_SH) clear_codes(c, r, c.n, n);
  }
}

void append_rows(spl_ctx& c, const Source& s, int32_t owner) {
  if (!s.n) return;
  clear_new(c, s.n);
  check(cudaMemcpyAsync(c.row<float>(R_MEAN) + 3 * c.n, s.mean, s.n * 12, cudaMemcpyDefault, c.stream), "copying Gaussians");
  if (c.compact()) append_codes(c, s); else append_parameters(c, s);
  fill_owner_kernel<<<blocks_for(s.n, 256), 256, 0, c.stream>>>(c.row<int32_t>(R_OWNER) + c.n, s.n, owner);
  launched("fill_owner_kernel");
  check(cudaStreamSynchronize(c.stream), "appending");
}

__global__ void gather_kernel(const uint32_t* row, int words, const uint32_t* index, int64_t n, uint32_t* out) {
  const int64_t i = thread_id();
  if (i < n * words) out[i] = row[(int64_t)index[i / words] * words + i % words];
}

// Gaussians index[0..n) to places to, to + 1, ..; index[k] >= to + k, so that nothing is overwritten before it is read.
static void gather_rows(spl_ctx& c, const uint32_t* index, int64_t n, int64_t to, uint32_t* temp) {
  for (int r = 0; r < SPL_N_MAP_ROWS; ++r) {
    const int words = (int)c.item_bytes(r) / 4;
    if (c.info(r).coded || !words) continue;
    gather_kernel<<<blocks_for(n * words, 256), 256, 0, c.stream>>>(c.row<uint32_t>(r), words, index, n, temp);
    launched("gather_kernel");
    check(cudaMemcpyAsync(c.row<uint32_t>(r) + to * words, temp, n * words * 4, cudaMemcpyDeviceToDevice, c.stream), "moving Gaussians");
  }
}

int64_t keep_rows(spl_ctx& c, const uint8_t* given) {
  std::vector<uint8_t> keep(c.n);
  get(c, keep.data(), given, c.n);
  int64_t first = 0;
  while (first < c.n && keep[first]) ++first;
  std::vector<uint32_t> index;  // of those that move
  for (int64_t i = first; i < c.n; ++i) if (keep[i]) index.push_back((uint32_t)i);
  const int64_t most = std::max({c.item_bytes(R_SH), c.item_bytes(R_SH_REST), c.item_bytes(R_QUAT)}), total = (int64_t)index.size();
  if (!total) return first;
  if (c.compact()) keep_codes(c, first, index);
  int64_t bytes = SCRATCH_BYTES;
  uint8_t* base = scratch(c, bytes);
  const int64_t chunk = bytes / (most + 8);
  uint32_t *on_device = (uint32_t*)base, *temp = (uint32_t*)(base + align_up(chunk * 4, 4));
  for (int64_t at = 0; at < total; at += chunk) {
    const int64_t n = std::min(chunk, total - at);
    check(cudaMemcpyAsync(on_device, index.data() + at, n * 4, cudaMemcpyHostToDevice, c.stream), "copying indices");
    gather_rows(c, on_device, n, first + at, temp);
  }
  check(cudaStreamSynchronize(c.stream), "compacting");
  return first + total;
}

__global__ void relocate_kernel(float* opacity, float* log_scale, const int32_t* pairs, int64_t n, float min_opacity) {  // pairs: Gaussian, times
  const int64_t i = thread_id();
  if (i < n) relocate(opacity[(uint32_t)pairs[2 * i]], log_scale + 3 * (int64_t)(uint32_t)pairs[2 * i], pairs[2 * i + 1], min_opacity);
}

__global__ void move_kernel(uint32_t* row, int words, const int64_t* dst, const int64_t* src, int64_t n, bool clear) {
  const int64_t i = thread_id(), k = i / words, word = i % words;
  if (k < n) row[dst[k] * words + word] = clear ? 0 : row[src[k] * words + word];
}

static void relocate_parameters(spl_ctx& c, const std::vector<int>& times, float min_opacity) {
  std::vector<int32_t> sources;
  for (int64_t i = 0; i < c.n; ++i) if (times[i] > 1) { sources.push_back((int32_t)(uint32_t)i); sources.push_back(times[i]); }
  int64_t bytes = SCRATCH_BYTES;
  uint8_t* base = scratch(c, bytes);
  const int64_t chunk = bytes / 8, n_sources = (int64_t)sources.size() / 2;
  for (int64_t at = 0; at < n_sources; at += chunk) {
    const int64_t n = std::min(chunk, n_sources - at);
    put(c, base, sources.data() + 2 * at, n * 8);
    relocate_kernel<<<blocks_for(n, 128), 128, 0, c.stream>>>(c.row<float>(R_OPACITY), c.row<float>(R_LOG_SCALE), (const int32_t*)base, n, min_opacity);
    launched("relocate_kernel");
  }
}

void move_rows(spl_ctx& c, const std::vector<int>& times, int64_t n_moves, const int64_t* dst, const int64_t* src, float min_opacity) {
  if (!n_moves) return;
  if (c.compact()) move_codes(c, times, n_moves, dst, src, min_opacity); else relocate_parameters(c, times, min_opacity);
  int64_t bytes = SCRATCH_BYTES;
  uint8_t* base = scratch(c, bytes);
  const int64_t chunk = bytes / 16;
  for (int64_t at = 0; at < n_moves; at += chunk) {
    const int64_t n = std::min(chunk, n_moves - at);
    put(c, base, dst + at, n * 8);
    put(c, base + n * 8, src + at, n * 8);
    for (int r = 0; r < SPL_N_MAP_ROWS; ++r) {
      const int words = (int)c.item_bytes(r) / 4;
      if (c.info(r).coded || !words) continue;
      move_kernel<<<blocks_for(n * words, 256), 256, 0, c.stream>>>(c.row<uint32_t>(r), words, (const int64_t*)base, (const int64_t*)base + n, n, !(r <= R_SH_REST || r == R_OWNER));
      launched("move_kernel");
    }
  }
  check(cudaStreamSynchronize(c.stream), "relocating");
}

}  // namespace spl
