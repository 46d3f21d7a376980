// sweep.cu: see sweep.h. The volume lives in the arena, which holds nothing between calls: costs of a byte, sums over the paths of two.
#include "context.h"
#include "../sweep.h"

namespace spl {

struct Photos {  // passed by value
  Warp warp[SPL_MAX_PHOTOS];
  const uint8_t* gray[SPL_MAX_PHOTOS];
  uint32_t* quad[SPL_MAX_PHOTOS];
  int n;
};

struct Volume {  // [height][width][words], each of 4 planes; beyond the last one a plane costs UNSEEN, more than any other: no path goes there
  int width, height, planes, words;
  uint32_t* cost;
  uint2* sum;
};

__global__ void quads_kernel(const __grid_constant__ Photos photos) {
  const int j = blockIdx.y, width = photos.warp[j].width, height = photos.warp[j].height;
  const int64_t i = thread_id();
  if (i < (int64_t)width * height) photos.quad[j][i] = quad_at(photos.gray[j], width, height, (int)(i % width), (int)(i / width));
}

// ---- cost --------------------------------------------------------------------------------------------------------------
// A warp goes down a strip of the image for one plane and one view after the other. Each lane warps one pixel of a row and keeps what it adds to
// the sums of the last five rows; sums over five columns come from its neighbours. Levels are taken less 128, which changes no covariance: the
// sums of levels and of squares then fit in one word.
constexpr int ROWS = 16, COLUMNS = 32 - 2 * R, WARPS = 8, TALL = ROWS + 2 * R, SIDE = 2 * R + 1;
constexpr int GRAY = 128, SUM_BITS = 13;
static_assert(R == 2 && TALL % SIDE == 0 && N * GRAY < 1 << (SUM_BITS - 1) && N * GRAY * GRAY < 1 << (32 - SUM_BITS), "see across, add_view");

struct Window { int sum; float var; };  // of the reference

// KEPT: words of four costs, of the lowest of a pixel; lane: its column. Few enough planes at once for 48 KiB.
template <int KEPT> struct Tile {
  static constexpr int PLANES = 32 / KEPT, WORDS = PLANES / 4 + 1;  // one is spare: no bank conflicts
  int8_t ref[TALL][32];
  Window window[ROWS][32];
  uint32_t best[WARPS][ROWS][KEPT][32];
  uint32_t cost[ROWS][COLUMNS][WORDS];
};

template <int KEPT> __device__ __forceinline__ void read_reference(Tile<KEPT>& tile, const uint8_t* gray, int width, int height, int x0, int y0) {
  for (int i = threadIdx.x; i < TALL * 32; i += 32 * WARPS) {
    const int x = min(max(x0 - R + i % 32, 0), width - 1), y = min(max(y0 - R + i / 32, 0), height - 1);
    tile.ref[i / 32][i % 32] = (int8_t)(gray[(int64_t)y * width + x] - GRAY);
  }
  for (int i = threadIdx.x; i < ROWS * COLUMNS * tile.WORDS; i += 32 * WARPS) tile.cost[0][0][i] = ~0u;
  __syncthreads();
  for (int i = threadIdx.x; i < ROWS * COLUMNS; i += 32 * WARPS) {
    const int x = i % COLUMNS, y = i / COLUMNS;
    int sum = 0, squares = 0;
    for (int k = 0; k < N; ++k) { const int a = tile.ref[y + k / SIDE][x + k % SIDE]; sum += a; squares += a * a; }
    tile.window[y][x] = {sum, variance(sum, squares)};
  }
  __syncthreads();
}

template <class T> __device__ __forceinline__ T across(T x) {  // the sum of this lane and the four after it
  const T two = x + __shfl_down_sync(ALL_LANES, x, 1), four = two + __shfl_down_sync(ALL_LANES, two, 2);
  return four + __shfl_down_sync(ALL_LANES, x, 4);
}

// Into a sorted list of 4 * KEPT bytes, whose last one goes: each becomes max(the one before it, min(itself, cost)), two at a time.
template <int KEPT> __device__ __forceinline__ void insert_cost(uint32_t (*best)[32], bool empty, uint32_t cost) {
  uint32_t before = 0;
#pragma unroll
  for (int k = 0; k < KEPT; ++k) {
    const uint32_t word = empty ? ~0u : best[k][lane_id()], both = cost * 0x10001u;
    const uint32_t low = __byte_perm(word, 0, 0x4140), high = __byte_perm(word, 0, 0x4342);
    const uint32_t next_low = __vmaxu2(__byte_perm(before, low, 0x5432), __vminu2(low, both));
    const uint32_t next_high = __vmaxu2(__byte_perm(low, high, 0x5432), __vminu2(high, both));
    best[k][lane_id()] = __byte_perm(next_low, next_high, 0x6420);
    before = high;
  }
}

// The costs of one view and plane into the lists. This lane warps column x, and has the window whose first column that is.
template <int KEPT> __device__ __forceinline__ void add_view(Tile<KEPT>& tile, const Warp& m, const uint32_t* quad, float inv, int x, int y0, int height, bool first) {
  const Vec3 column = warp_column(m, inv, x + 0.5f), down = {m.A[1], m.A[4], m.A[7]};
  uint32_t (*best)[KEPT][32] = tile.best[threadIdx.x / 32];
  uint32_t own[SIDE] = {}, sums = 0, seen[SIDE] = {};  // of a row: squares << SUM_BITS + level; the lanes that the view sees
  int product[SIDE] = {}, products = 0;
  for (int top = 0; top < TALL; top += SIDE) {
#pragma unroll
    for (int j = 0; j < SIDE; ++j) {
      const int i = top + j, y = i - 2 * R;
      const float v = between(y0 + (i - R + 0.5f), 0.5f, height - 0.5f);
      bool in;
      const int level = warped(m, quad, column + down * v, in) - GRAY;
      const uint32_t added = (uint32_t)(level * ((1 << SUM_BITS) * level + 1));
      const int multiplied = level * tile.ref[i][lane_id()];
      sums += added - own[j]; own[j] = added;
      products += multiplied - product[j]; product[j] = multiplied;
      seen[j] = __ballot_sync(ALL_LANES, in);
      if (y < 0) continue;
      const uint32_t packed = across(sums);
      const int sum = (int)(packed << (32 - SUM_BITS)) >> (32 - SUM_BITS), squares = (int)((packed - (uint32_t)sum) >> SUM_BITS), ab = across(products);
      const Window w = tile.window[y][lane_id()];
      const int cost = cost_of(N * ab - w.sum * sum, w.var, variance(sum, squares));
      const bool visible = seen[(j + SIDE - R) % SIDE] >> R >> lane_id() & 1;
      insert_cost<KEPT>(best[y], first, visible ? cost : UNSEEN);
    }
  }
}

template <int KEPT> __device__ __forceinline__ int mean_of(const uint32_t (*best)[32], int keep) {
  int sum = 0, n = 0;
#pragma unroll
  for (int k = 0; k < 4 * KEPT; ++k) {
    const int cost = best[k / 4][lane_id()] >> 8 * (k % 4) & 255;
    if (k < keep && cost != UNSEEN) { sum += cost; ++n; }
  }
  return n ? mean_cost(sum, n) : COST_MAX;  // where no view sees the plane, that says nothing
}

template <int KEPT> __global__ void __launch_bounds__(32 * WARPS, 4) cost_kernel(const __grid_constant__ Photos photos, spl_sweep_params p, Volume v, const uint8_t* gray) {
  __shared__ Tile<KEPT> tile;
  const int x0 = blockIdx.x * COLUMNS, y0 = blockIdx.y * ROWS, plane0 = blockIdx.z * tile.PLANES, lane = lane_id(), warp = threadIdx.x / 32;
  read_reference(tile, gray, v.width, v.height, x0, y0);
  const int x = min(max(x0 - R + lane, 0), v.width - 1);
  for (int k = warp; k < tile.PLANES && plane0 + k < v.planes; k += WARPS) {
    const float inv = inverse_depth(p, (float)(plane0 + k));
    for (int j = 0; j < photos.n; ++j) add_view(tile, photos.warp[j], photos.quad[j], inv, x, y0, v.height, j == 0);
    if (lane < COLUMNS)
      for (int y = 0; y < ROWS; ++y) ((uint8_t*)tile.cost[y][lane])[k] = (uint8_t)mean_of<KEPT>(tile.best[warp][y], (photos.n + 1) / 2);
  }
  __syncthreads();
  constexpr int WORDS = Tile<KEPT>::PLANES / 4;
  for (int i = threadIdx.x; i < ROWS * COLUMNS * WORDS; i += 32 * WARPS) {
    const int word = i % WORDS, column = i / WORDS % COLUMNS, row = i / WORDS / COLUMNS;
    if (x0 + column < v.width && y0 + row < v.height && plane0 / 4 + word < v.words)
      v.cost[((int64_t)(y0 + row) * v.width + x0 + column) * v.words + plane0 / 4 + word] = tile.cost[row][column][word];
  }
}

// ---- aggregation ---------------------------------------------------------------------------------------------------------
// A block of two warps a line of pixels. One goes along it, one comes towards it: up to the middle each has its half for itself, beyond it each adds
// to what the other left. A lane has G words of planes; what it reads of the next steps is on its way while it works on these.
struct Line { int n; int64_t step, apart; bool add; };  // pixels of it; to the next one, to the next line; false: the sums are made here

template <int G> struct Ahead {
  static constexpr int STEPS = G == 1 ? 8 : 16 / G;
  uint32_t cost[STEPS][G];
  uint2 sum[STEPS][G];
  int jump;  // of the step of this lane's number
};

template <int G> struct Path {
  const Volume& v;
  const uint8_t* gray;
  const int64_t first, step;  // pixels
  int last[4 * G], least = 0;  // FAR beyond the last plane

  __device__ __forceinline__ bool exists(int g) const { return (int)lane_id() * G + g < v.words; }
  __device__ __forceinline__ int64_t at(int t, int g) const { return (first + t * step) * v.words + lane_id() * G + g; }

  __device__ __forceinline__ void read(Ahead<G>& a, int begin, int end, bool add) const {
#pragma unroll
    for (int s = 0; s < a.STEPS; ++s)
#pragma unroll
      for (int g = 0; g < G; ++g) {
        const bool there = begin + s < end && exists(g);
        a.cost[s][g] = there ? __ldg(v.cost + at(begin + s, g)) : 0;
        a.sum[s][g] = there && add ? v.sum[at(begin + s, g)] : uint2{0, 0};
      }
    const int t = begin + lane_id();
    const int64_t i = first + t * step;
    a.jump = t > 0 && t < end && (int)lane_id() < a.STEPS ? jump_at(gray[i], gray[i - step]) : 0;
  }

  __device__ __forceinline__ void advance(const uint32_t (&cost)[G], int jump) {
    int below = __shfl_up_sync(ALL_LANES, last[4 * G - 1], 1), above = __shfl_down_sync(ALL_LANES, last[0], 1), low = FAR;
    if (lane_id() == 0) below = FAR;
    if (lane_id() == 31) above = FAR;
#pragma unroll
    for (int k = 0; k < 4 * G; ++k) {
      const int here = last[k], side = min(below, k + 1 < 4 * G ? last[k + 1] : above) + P1, c = cost[k / 4] >> 8 * (k % 4) & 255;
      last[k] = exists(k / 4) ? c + min(min(here, side) - least, jump) : FAR;
      low = min(low, last[k]);
      below = here;
    }
    least = warp_min(low);
  }

  __device__ __forceinline__ void walk(int begin, int end, bool add) {
    Ahead<G> now, next;
    read(now, begin, end, add);
    for (int t = begin; t < end; t += now.STEPS, now = next) {
      read(next, t + now.STEPS, end, add);
#pragma unroll
      for (int s = 0; s < now.STEPS; ++s) {
        if (t + s >= end) break;
        advance(now.cost[s], __shfl_sync(ALL_LANES, now.jump, s));
#pragma unroll
        for (int g = 0; g < G; ++g) {
          const int* c = last + 4 * g;
          const uint2 before = now.sum[s][g];
          if (exists(g)) v.sum[at(t + s, g)] = {before.x + (c[0] | c[1] << 16), before.y + (c[2] | c[3] << 16)};
        }
      }
    }
  }
};

template <int G> __global__ void __launch_bounds__(64) paths_kernel(const __grid_constant__ Volume v, const uint8_t* gray, Line line) {
  const bool back = threadIdx.x >= 32;
  Path<G> path{v, gray, blockIdx.x * line.apart + (back ? (line.n - 1) * line.step : 0), back ? -line.step : line.step};
#pragma unroll
  for (int k = 0; k < 4 * G; ++k) path.last[k] = path.exists(k / 4) ? 0 : FAR;
  const int half = back ? line.n - line.n / 2 : line.n / 2;
  for (int part = 0; part < 2; ++part) {
    path.walk(part ? half : 0, part ? line.n : half, part || line.add);
    __syncthreads();
  }
}

// ---- choice --------------------------------------------------------------------------------------------------------------
constexpr int PLANE_BITS = 10;
static_assert(SPL_MAX_PLANES <= 1 << PLANE_BITS, "a sum and its plane in one int");

__global__ void choose_kernel(Volume v, spl_sweep_params p, float* depth_m, float* confidence) {  // a warp a pixel
  const int64_t pixel = thread_id() / 32;
  if (pixel >= (int64_t)v.width * v.height) return;
  const uint16_t* sum = (const uint16_t*)(v.sum + pixel * v.words);
  int best = INT_MAX, second = FAR;
  for (int k = lane_id(); k < v.planes; k += 32) best = min(best, sum[k] << PLANE_BITS | k);
  const int plane = warp_min(best) & ((1 << PLANE_BITS) - 1);
  for (int k = lane_id(); k < v.planes; k += 32) if (k < plane - 1 || k > plane + 1) second = min(second, (int)sum[k]);
  second = warp_min(second);
  if (lane_id()) return;
  const Choice chosen = choice(p, plane, second, sum, (const uint8_t*)(v.cost + pixel * v.words));
  depth_m[pixel] = chosen.depth_m;
  confidence[pixel] = chosen.confidence;
}

// ---- the host's part --------------------------------------------------------------------------------------------------------
static int64_t pixels_of(const spl_photo& p) { return (int64_t)p.width * p.height; }

struct Images {  // the reference, then the views, each at a multiple of ARENA_ALIGN: on the device as in pinned memory
  int64_t at[SPL_MAX_PHOTOS + 1], bytes = 0;
  Images(const spl_photo& ref, int n, const spl_photo* views, int64_t per_pixel) {
    for (int j = 0; j <= n; ++j) { at[j] = bytes; bytes += align_up(pixels_of(j ? views[j - 1] : ref) * per_pixel, ARENA_ALIGN); }
  }
};

template <class T> static void bring(spl_ctx& c, const Images& images, const spl_photo& ref, int n, const spl_photo* views, const T* spl_photo::*image, uint8_t* pinned, uint8_t* to) {
  for (int j = 0; j <= n; ++j) {
    const spl_photo& p = j ? views[j - 1] : ref;
    memcpy(pinned + images.at[j], p.*image, pixels_of(p) * sizeof(T));
  }
  check(cudaMemcpyAsync(to, pinned, images.bytes, cudaMemcpyHostToDevice, c.stream), "copying images");
}

static void fetch(spl_ctx& c, uint8_t* pinned, const void* from, int64_t bytes) {  // all work of the call is done then
  check(cudaMemcpyAsync(pinned, from, bytes, cudaMemcpyDeviceToHost, c.stream), "copying depth");
  check(cudaStreamSynchronize(c.stream), "depth from several images");
  c.staging_used = 0;
}

struct Room {  // the arena while a sweep works: the views' images until there are quads, those until there are costs
  uint8_t* images;
  Volume v;
  uint32_t* quads;
  float* found;  // depth_m, then confidence
  int64_t bytes;
};

static Room room_of(uint8_t* base, const Images& images, const spl_photo& ref, int n, const spl_photo* views, int planes) {
  int64_t at = 0, seen = 0;
  auto take = [&](int64_t bytes) { uint8_t* here = base + at; at += align_up(bytes, ARENA_ALIGN); return here; };
  for (int j = 0; j < n; ++j) seen += pixels_of(views[j]);
  const int words = (planes + 3) / 4;
  const int64_t pixels = pixels_of(ref), cells = 4 * words * pixels, own = align_up(pixels, ARENA_ALIGN);
  Room r{};
  r.images = take(own);
  r.v = {ref.width, ref.height, planes, words, (uint32_t*)take(std::max(cells, images.bytes - own)), nullptr};
  r.quads = (uint32_t*)take(std::max(2 * cells, 4 * seen));
  r.v.sum = (uint2*)r.quads;
  r.found = (float*)take(8 * pixels);
  r.bytes = at;
  return r;
}

static void find_costs(spl_ctx& c, const Room& r, const Images& images, const spl_photo& ref, int n, const spl_photo* views, const spl_sweep_params& p) {
  Photos photos{};
  photos.n = n;
  int64_t largest = 0;
  uint32_t* quad = r.quads;
  for (int j = 0; j < n; ++j) {
    photos.warp[j] = warp_of(ref, views[j]);
    photos.gray[j] = r.images + images.at[j + 1];
    photos.quad[j] = quad;
    quad += pixels_of(views[j]);
    largest = std::max(largest, pixels_of(views[j]));
  }
  quads_kernel<<<dim3(blocks_for(largest, 256), n), 256, 0, c.stream>>>(photos);
  launched("quads_kernel");
  auto blocks = [&](int planes) { return dim3((r.v.width + COLUMNS - 1) / COLUMNS, (r.v.height + ROWS - 1) / ROWS, (r.v.planes + planes - 1) / planes); };
  if ((n + 1) / 2 <= 4) cost_kernel<1><<<blocks(Tile<1>::PLANES), 32 * WARPS, 0, c.stream>>>(photos, p, r.v, r.images);
  else cost_kernel<2><<<blocks(Tile<2>::PLANES), 32 * WARPS, 0, c.stream>>>(photos, p, r.v, r.images);
  launched("cost_kernel");
}

template <int G> static void add_paths(spl_ctx& c, const Volume& v, const uint8_t* gray) {
  const Line row{v.width, 1, v.width, false}, column{v.height, v.width, 1, true};
  paths_kernel<G><<<v.height, 64, 0, c.stream>>>(v, gray, row);
  paths_kernel<G><<<v.width, 64, 0, c.stream>>>(v, gray, column);
  launched("paths_kernel");
}

void sweep(spl_ctx& c, const spl_photo& ref, int n_views, const spl_photo* views, const spl_sweep_params& p, float* depth_m, float* confidence) {
  const Images images(ref, n_views, views, 1);
  char what[96];
  snprintf(what, sizeof what, "a sweep of %dx%d pixels, %d planes and %d views", ref.width, ref.height, p.n_planes, n_views);
  BorrowedArena arena(c, room_of(nullptr, images, ref, n_views, views, p.n_planes).bytes, what, "send smaller images, or depth");
  const Room r = room_of(c.arena.base, images, ref, n_views, views, p.n_planes);
  const int64_t pixels = pixels_of(ref);
  uint8_t* pinned = staged(c, std::max(images.bytes, 8 * pixels));
  bring(c, images, ref, n_views, views, &spl_photo::gray, pinned, r.images);
  find_costs(c, r, images, ref, n_views, views, p);
  (r.v.words <= 32 ? add_paths<1> : r.v.words <= 64 ? add_paths<2> : r.v.words <= 128 ? add_paths<4> : add_paths<8>)(c, r.v, r.images);
  choose_kernel<<<blocks_for(32 * pixels, 256), 256, 0, c.stream>>>(r.v, p, r.found, r.found + pixels);
  launched("choose_kernel");
  fetch(c, pinned, r.found, 8 * pixels);
  memcpy(depth_m, pinned, 4 * pixels);
  memcpy(confidence, pinned + 4 * pixels, 4 * pixels);
  arena.keep();
}

// ---- agreement -----------------------------------------------------------------------------------------------------------
struct Depths {  // passed by value
  DepthPhoto ref, view[SPL_MAX_PHOTOS];
  int n;
};

__global__ void agree_kernel(const __grid_constant__ Depths depths, float tolerance, float* depth_m, uint8_t* count) {
  const int64_t i = thread_id();
  const int width = depths.ref.width;
  if (i < (int64_t)width * depths.ref.height) depth_m[i] = agreed(depths.ref, depths.view, depths.n, (int)(i % width), (int)(i / width), tolerance, count[i]);
}

void agree(spl_ctx& c, const spl_photo& ref, int n_views, const spl_photo* views, float tolerance, float* depth_m, uint8_t* count) {
  const Images images(ref, n_views, views, 4);
  const int64_t pixels = pixels_of(ref);
  char what[96];
  snprintf(what, sizeof what, "comparing the depth of %dx%d pixels with %d views", ref.width, ref.height, n_views);
  BorrowedArena arena(c, images.bytes + 5 * pixels, what, "send smaller images, or depth");
  uint8_t *pinned = staged(c, std::max(images.bytes, 5 * pixels)), *base = c.arena.base, *found = base + images.bytes;
  bring(c, images, ref, n_views, views, &spl_photo::depth, pinned, base);
  Depths depths{};
  depths.n = n_views;
  depths.ref = depth_photo(ref, (const float*)base);
  for (int j = 0; j < n_views; ++j) depths.view[j] = depth_photo(views[j], (const float*)(base + images.at[j + 1]));
  agree_kernel<<<blocks_for(pixels, 256), 256, 0, c.stream>>>(depths, tolerance, (float*)found, found + 4 * pixels);
  launched("agree_kernel");
  fetch(c, pinned, found, 5 * pixels);
  memcpy(depth_m, pinned, 4 * pixels);
  memcpy(count, pinned + 4 * pixels, pixels);
  arena.keep();
}

}  // namespace spl
