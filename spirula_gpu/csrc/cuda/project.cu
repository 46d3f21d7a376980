// project.cu: packed projection in two passes over 128-pair blocks; see cpu/project.cpp.
// The second pass also counts tiles. Its writes are clamped to the capacities, so that both totals are read back once.
#include "context.h"
#include "../gaussian.h"
#include "sh.cuh"
#include "tiles.cuh"

namespace spl {

static_assert(SPL_MASK_BLOCK == 128 && SPL_MASK_WORDS == 4, "one word a warp");

__device__ __forceinline__ void split(int64_t pair, int n_cameras, int64_t& gaussian, int& camera) {
  if (n_cameras == 1) { gaussian = pair; camera = 0; return; }
  gaussian = pair / n_cameras;
  camera = (int)(pair - gaussian * n_cameras);
}

__global__ void __launch_bounds__(SPL_MASK_BLOCK) mask_kernel(Source s, const __grid_constant__ Cameras cameras, int64_t pairs, uint32_t* words, int64_t* counts) {
  const int64_t p = thread_id();
  bool visible = false;
  if (p < pairs) {
    int64_t gi;
    int ci;
    split(p, cameras.n, gi, ci);
    const Camera& cam = cameras[ci];
    Vec3 center;
    Gaussian g;
    Screen screen;
    Box box;
    visible = !surely_outside(s, gi, cam, center) && load(s, gi, g) && project(g, cam, screen, box);
  }
  const uint32_t word = __ballot_sync(ALL_LANES, visible);
  if (lane_id() == 0) words[blockIdx.x * (int64_t)SPL_MASK_WORDS + threadIdx.x / 32] = word;
  const int total = __syncthreads_count(visible);
  if (threadIdx.x == 0) counts[blockIdx.x] = total;
}

struct PairRows { uint32_t* gaussian; uint16_t* camera; Screen* screen; Box16* box; uint32_t *tiles, *depth_key, *order; int64_t capacity; };

template <int D> __device__ __forceinline__ Vec3 color_of(const Source& s, bool aligned, int64_t gi, Vec3 mean, Vec3 center) {
  const float* sh = s.sh + gi * s.sh_floats;
  if constexpr (D < 0) {
    return {sh[0], sh[1], sh[2]};
  } else {
    alignas(16) float x[3 * (D + 1) * (D + 1)];
    if (s.codes.exponents) decode_sh(s.codes, gi, D, x); else load_sh<D>(sh, aligned, x);
    return sh_color(D, x, mean, center);
  }
}

template <int D> __device__ __forceinline__ void compact_pair(const Source& s, const Cameras& cameras, bool aligned, int64_t p, Screen& screen, Box16& q, int64_t& gi, int& ci) {
  split(p, cameras.n, gi, ci);
  const Camera& cam = cameras[ci];
  Gaussian g;
  Box box{};
  screen = Screen{};  // pass 1 decides; if rounding made pass 2 differ, this splat is empty, not garbage
  load(s, gi, g);
  project(g, cam, screen, box);
  paint(color_of<D>(s, aligned, gi, g.mean, cam.center), D < 0, screen);
  q = encode_box(box, cam.width, cam.height);
}

template <int D> __global__ void __launch_bounds__(SPL_MASK_BLOCK)
compact_kernel(Source s, const __grid_constant__ Cameras cameras, Dims v, bool aligned, const uint32_t* words, const int64_t* scan, PairRows out, Counters* counters) {
  __shared__ int block_tiles;
  const int warp = threadIdx.x / 32;
  const uint32_t *mine = words + blockIdx.x * (int64_t)SPL_MASK_WORDS, word = mine[warp];
  const bool visible = word >> lane_id() & 1;
  if (threadIdx.x == 0) block_tiles = 0;
  __syncthreads();
  if (word) {
    int64_t slot = scan[blockIdx.x] + __popc(word & ((1u << lane_id()) - 1)), gi = 0;
    for (int w = 0; w < warp; ++w) slot += __popc(mine[w]);
    int ci = 0;
    Reach reach{};
    Screen screen{};
    Box16 box{};
    if (visible) {
      compact_pair<D>(s, cameras, aligned, thread_id(), screen, box, gi, ci);
      reach = reach_of(screen, box, v);
    }
    const int ends = inclusive_sum(reach.rows), begins = ends - reach.rows;
    int tiles = 0;
    for_rows(reach, ends, v, [&](int, int item, int, Columns columns) {
      const int before = inclusive_sum(columns.count);  // of the rows up to and with this lane's
      const int from = begins - item, to = min(ends - item, 32);  // my rows among these 32: [from, to)
      const int low = __shfl_sync(ALL_LANES, before, max(from, 1) - 1), high = __shfl_sync(ALL_LANES, before, max(to, 1) - 1);
      if (from < 32 && to > 0 && to > from) tiles += high - (from > 0 ? low : 0);
      return true;
    });
    if (visible && slot < out.capacity) {
      out.gaussian[slot] = (uint32_t)gi;
      out.camera[slot] = camera_bits(ci, screen);
      out.screen[slot] = screen;
      out.box[slot] = box;
      out.tiles[slot] = tiles;
      out.depth_key[slot] = depth_bits(screen.depth);
      out.order[slot] = (uint32_t)slot;
    }
    const int sum = warp_sum(tiles);
    if (lane_id() == 0) atomicAdd(&block_tiles, sum);
  }
  __syncthreads();
  if (threadIdx.x == 0 && block_tiles) atomicAdd(&counters->isects, (unsigned long long)(unsigned)block_tiles);
}

__global__ void store_total_kernel(const int64_t* total, Counters* counters) { counters->nnz = *total; }

static_assert(sizeof(Camera) == SPL_CAMERA_BYTES && sizeof(Counters) <= SPL_CAMERA_BYTES, "view.cameras");

static void upload_view(spl_ctx& c, const View& v) {
  check(cudaMemsetAsync(c.counters(), 0, sizeof(Counters), c.stream), "clearing counters");
  Camera* many = (Camera*)(c.row<uint8_t>(R_CAMERAS) + row_info(R_CAMERAS, 0).item_bytes);
  c.cameras = {v.cameras[0], many, v.n_cameras};
  if (v.n_cameras > 1) check(cudaMemcpyAsync(many, v.cameras.data(), v.n_cameras * sizeof(Camera), cudaMemcpyHostToDevice, c.stream), "copying cameras");
}

static int64_t caller_floats(const Source& s) {  // every array starts at a multiple of 256 bytes
  auto room = [](int64_t floats) { return align_up(floats, 64); };
  return room(3 * s.n) + room(4 * s.n) + room(3 * s.n) + room(s.n) + room(s.n * s.sh_floats);
}

// The Gaussians where kernels can read them: the map's rows, the caller's device arrays, or copies of its host arrays.
static Source on_the_device(spl_ctx& c, const Source& s) {
  if (!s.n || s.mean == c.row<float>(R_MEAN)) return s;
  Source out = s;
  float* at = c.row<float>(R_CALLER);
  auto bring = [&](const float*& p, int64_t floats) {
    if (!on_device(p)) {
      check(cudaMemcpyAsync(at, p, floats * 4, cudaMemcpyHostToDevice, c.stream), "copying Gaussians");
      p = at;
    }
    at += align_up(floats, 64);
  };
  bring(out.mean, 3 * s.n); bring(out.quat, 4 * s.n); bring(out.scale, 3 * s.n); bring(out.opacity, s.n); bring(out.sh, s.n * s.sh_floats);
  return out;
}

static void run_compact(spl_ctx& c, const View& v, int64_t blocks) {
  const Source& s = c.source;
  const PairRows out = {c.row<uint32_t>(R_GAUSSIAN), c.row<uint16_t>(R_CAMERA), c.row<Screen>(R_SCREEN), c.row<Box16>(R_BOX), c.row<uint32_t>(R_COUNT),
                        c.row<uint32_t>(R_DEPTH_KEY), c.row<uint32_t>(R_ORDER), c.capacity[SPL_PAIRS] - 1};
  auto* kernel = s.direct_rgb ? compact_kernel<-1> : v.sh_degree == 0 ? compact_kernel<0> : v.sh_degree == 1 ? compact_kernel<1> : v.sh_degree == 2 ? compact_kernel<2> : compact_kernel<3>;
  kernel<<<(unsigned)blocks, SPL_MASK_BLOCK, 0, c.stream>>>(s, c.cameras, dims_of(v), aligned_sh(s), c.row<uint32_t>(R_MASK), c.row<int64_t>(R_SCAN), out, c.counters());
  launched("compact_kernel");
}

// Both passes. Their numbers are awaited while the device orders as many pairs as there probably are: it is never idle.
static Counters passes(spl_ctx& c, const Source& given, const View& v, int64_t pairs, int64_t blocks) {
  const int64_t expected = blocks ? std::min(c.expected_pairs, c.capacity[SPL_PAIRS] - 1) : 0;
  upload_view(c, v);
  check(cudaMemsetAsync(c.row<void>(R_DEPTH_KEY), 0xFF, expected * 4, c.stream), "clearing keys");
  c.source = on_the_device(c, given);
  int64_t* counts = c.row<int64_t>(R_SCAN);
  if (blocks) {
    mask_kernel<<<(unsigned)blocks, SPL_MASK_BLOCK, 0, c.stream>>>(c.source, c.cameras, pairs, c.row<uint32_t>(R_MASK), counts);
    launched("mask_kernel");
  }
  check(cudaMemsetAsync(counts + blocks, 0, 8, c.stream), "clearing counters");
  scan(c, counts, blocks + 1);
  store_total_kernel<<<1, 1, 0, c.stream>>>(counts + blocks, c.counters());
  launched("store_total_kernel");
  if (blocks) run_compact(c, v, blocks);
  check(cudaMemcpyAsync(&c.readback->projected, c.counters(), sizeof(Counters), cudaMemcpyDeviceToHost, c.stream), "reading counters");
  check(cudaEventRecord(c.counted, c.stream), "cudaEventRecord");
  begin_phase(c, SPL_ORDER);
  if (expected) order_pairs(c, expected);
  await_counters(c);
  const Counters found = c.readback->projected;
  if (found.nnz > expected && found.nnz < c.capacity[SPL_PAIRS]) order_pairs(c, found.nnz);
  c.expected_pairs = std::max(found.nnz + found.nnz / 16, c.expected_pairs - c.expected_pairs / 16);
  return found;
}

Counts needs_of(const spl_create_params&, const Counts& have, const View& v, int64_t gaussians, int64_t caller_floats, const Found& found) {
  Counts need = common_needs(v, gaussians, found);
  need[SPL_CAMERAS] = v.n_cameras + 1;
  need[SPL_CALLER] = caller_floats;
  need[SPL_KEY_BYTES] = need[SPL_ISECTS] * key_bytes(v);
  need[SPL_BINS] = std::max<int64_t>(have[SPL_BINS], 1);
  for (int k : {SPL_BLOCKS, SPL_PAIRS, SPL_ISECTS, SPL_PIXELS})
    if (need[k] > have[k]) need[SPL_BINS] = scratch_words(with_headroom(need[SPL_BLOCKS]), with_headroom(need[SPL_PAIRS]), with_headroom(need[SPL_ISECTS]), need[SPL_PIXELS]);
  return need;
}

void project(spl_ctx& c, const Source& s, const View& v, int last) {
  const int64_t pairs = s.n * v.n_cameras, blocks = (pairs + SPL_MASK_BLOCK - 1) / SPL_MASK_BLOCK;
  if (blocks > INT32_MAX) fail(SPL_E_CAPACITY, "%lld camera-Gaussian pairs > %lld: fewer cameras per call", (long long)pairs, (long long)INT32_MAX * SPL_MASK_BLOCK);
  const bool mine = s.n && s.mean == c.row<float>(R_MEAN);
  const int64_t given_floats = s.n && !mine ? caller_floats(s) : 0;
  Counts need = needs_of(c.params, c.capacity, v, s.n, given_floats, {});
  for (;;) {
    c.phase = SPL_PHASE_ALWAYS;
    fit_arena(c, need, last);
    begin_phase(c, SPL_PROJECT);
    const Counters found = passes(c, s, v, pairs, blocks);
    if (found.nnz >= UINT32_MAX) fail(SPL_E_CAPACITY, "%lld visible pairs > %u: fewer cameras per call", (long long)found.nnz, UINT32_MAX);
    c.n_isects = (int64_t)found.isects;
    need = needs_of(c.params, c.capacity, v, s.n, given_floats, {found.nnz, c.n_isects});
    if (c.holds(need, last)) break;
  }
  c.counts = need;
}

}  // namespace spl
