// raster.cu: alpha blending per 16x16 tile, front to back; and its backward pass, back to front.
// A warp owns a patch of 8 x (4 PX) pixels, PX pixels a lane. The block loads splats into shared memory in batches; each
// warp tests 32 of them at once against its patch (one a lane) and visits only those that reach it. In the backward pass
// a warp adds its 12 sums to the pair's row with one atomic instruction, after a reduce-scatter of 13 shuffles.
#include "context.h"

namespace spl {

constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
static_assert(SPL_TILE_PX == 16, "two patches of 8 pixels side by side");
__host__ __device__ constexpr int threads_of(int px) { return SPL_TILE_PX * SPL_TILE_PX / px; }  // of a block = splats of a batch

// A splat in shared memory; the form is in powers of two: alpha = opacity * 2^-((a dx + b dy) dx + c dy^2).
template <int PX> struct Batch {
  float4 shape[threads_of(PX)];  // x, y, a, b
  float4 more[threads_of(PX)];   // c, opacity, depth, the form's value where alpha falls to 1/255
  float4 color[threads_of(PX)];  // r, g, b, pair (bits)
};

template <int PX> __device__ __forceinline__ void load_splat(Batch<PX>& s, int k, const Screen* screen, uint32_t pair) {
  const float2* row = (const float2*)(screen + pair);
  const float2 xy = row[0], ab = row[1], co = row[2], dr = row[3], gb = row[4];
  const float reach = __log2f(fminf(co.y, 1.0f) * (1.0f / SPL_ALPHA_MIN));
  s.shape[k] = make_float4(xy.x, xy.y, 0.5f * LOG2E * ab.x, LOG2E * ab.y);
  s.more[k] = make_float4(0.5f * LOG2E * co.x, co.y, dr.x, reach * 1.0001f + 1e-4f);
  s.color[k] = make_float4(dr.y, gb.x, gb.y, __uint_as_float(pair));
}

// Does the ellipse reach a pixel centre of the patch [x0, x0 + 7] x [y0, y0 + 4 PX - 1]? As nearest_form of math.h.
template <int PX> __device__ __forceinline__ bool reaches(const float4& p, const float4& m, float x0, float y0) {
  const float ax = x0 - p.x, bx = ax + 7, ay = y0 - p.y, by = ay + (4 * PX - 1);
  const bool in_x = ax <= 0 && bx >= 0, in_y = ay <= 0 && by >= 0;
  float best = in_x && in_y ? 0.0f : 3.4e38f;
  if (!in_x) {
    const float dx = ax > 0 ? ax : bx, dy = fminf(fmaxf(__fdividef(-0.5f * p.w * dx, m.x), ay), by);
    best = fminf(best, (p.z * dx + p.w * dy) * dx + m.x * dy * dy);
  }
  if (!in_y) {
    const float dy = ay > 0 ? ay : by, dx = fminf(fmaxf(__fdividef(-0.5f * p.w * dy, p.z), ax), bx);
    best = fminf(best, (p.z * dx + p.w * dy) * dx + m.x * dy * dy);
  }
  return best <= m.w;
}

__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// alpha, 0 where it does not reach 1/255; vis = 2^-form.
__device__ __forceinline__ float alpha_at(const float4& p, const float4& m, float dx, float dy, float& vis) {
  const float form = (p.z * dx + p.w * dy) * dx + m.x * dy * dy;
  vis = power_of_two(-form);
  const float alpha = fminf(m.y * vis, SPL_ALPHA_MAX);
  return form >= 0 && alpha >= SPL_ALPHA_MIN ? alpha : 0.0f;
}

struct RasterRows {
  const Screen* screen; const uint32_t* pair; const int64_t* start;
  float *rgb, *depth, *alpha, *T; int32_t* last;  // alpha: may be null
  const float *v_rgb, *v_depth, *v_alpha, *error;
  float* v_screen;
};

struct Patch { int64_t begin; int64_t image; int count, x, y; float x0, y0; };  // x, y: of the lane's first pixel; x0, y0: first centre
template <int PX> __device__ __forceinline__ Patch patch_of(const Dims& v, const int64_t* start) {
  const int tile = blockIdx.x, per = v.tiles_x * v.tiles_y, camera = tile / per, rest = tile - camera * per;
  const int warp = threadIdx.x / 32, x0 = rest % v.tiles_x * SPL_TILE_PX + (warp & 1) * 8, y0 = rest / v.tiles_x * SPL_TILE_PX + (warp >> 1) * (4 * PX);
  return {start[tile], (int64_t)camera * v.width * v.height, (int)(start[tile + 1] - start[tile]), x0 + (int)(lane_id() & 7), y0 + (int)(lane_id() >> 3), x0 + 0.5f, y0 + 0.5f};
}

struct Pixel { float T, r, g, b, depth; int32_t last; bool open; };

template <int PX> __device__ __forceinline__ bool blend(const Batch<PX>& s, int k, int index, const Patch& t, Pixel* px) {  // false: the lane is finished
  const float4 p = s.shape[k], m = s.more[k], c = s.color[k];
  const float dx = p.x - (t.x + 0.5f);
  bool any = false;
#pragma unroll
  for (int j = 0; j < PX; ++j) {
    float vis;
    const float a = alpha_at(p, m, dx, p.y - (t.y + 4 * j + 0.5f), vis), next = px[j].T * (1 - a);
    if (a > 0 && px[j].open) {
      px[j].open = next > SPL_T_MIN;
      if (px[j].open) {
        const float w = a * px[j].T;
        px[j].r += w * c.x; px[j].g += w * c.y; px[j].b += w * c.z; px[j].depth += w * m.z;
        px[j].T = next;
        px[j].last = index;
      }
    }
    any |= px[j].open;
  }
  return any;
}

template <int PX> __global__ void __launch_bounds__(threads_of(PX)) raster_kernel(Dims v, RasterRows rows) {
  constexpr int BATCH = threads_of(PX);
  __shared__ Batch<PX> s;
  const Patch t = patch_of<PX>(v, rows.start);
  Pixel px[PX];
#pragma unroll
  for (int j = 0; j < PX; ++j) px[j] = {1, 0, 0, 0, 0, 0, t.x < v.width && t.y + 4 * j < v.height};
  bool busy = true;  // of this warp
  for (int base = 0; base < t.count; base += BATCH) {
    if (__syncthreads_count(busy) == 0) break;
    const int n = min(BATCH, t.count - base);
    if (threadIdx.x < n) load_splat(s, threadIdx.x, rows.screen, rows.pair[t.begin + base + threadIdx.x]);
    __syncthreads();
    for (int sub = 0; busy && sub < n; sub += 32) {
      const int k = sub + lane_id();
      uint32_t left = __ballot_sync(ALL_LANES, k < n && reaches<PX>(s.shape[k], s.more[k], t.x0, t.y0));
      while (left) {
        const int at = sub + __ffs(left) - 1;
        left &= left - 1;
        if (__any_sync(ALL_LANES, blend(s, at, base + at + 1, t, px))) continue;
        busy = false;
        break;
      }
    }
  }
#pragma unroll
  for (int j = 0; j < PX; ++j) {
    const int y = t.y + 4 * j;
    if (t.x >= v.width || y >= v.height) continue;
    const int64_t at = t.image + (int64_t)y * v.width + t.x;
    rows.rgb[3 * at] = px[j].r + px[j].T * v.background[0];
    rows.rgb[3 * at + 1] = px[j].g + px[j].T * v.background[1];
    rows.rgb[3 * at + 2] = px[j].b + px[j].T * v.background[2];
    rows.depth[at] = px[j].depth;
    if (rows.alpha) rows.alpha[at] = 1 - px[j].T;
    rows.T[at] = px[j].T;
    rows.last[at] = px[j].last;
  }
}

struct Upstream { float T, behind, r, g, b, depth, error; int32_t last; };  // of one pixel

__device__ __forceinline__ Upstream upstream_at(const Dims& v, const RasterRows& rows, const Patch& t, int y) {
  if (t.x >= v.width || y >= v.height) return {};
  const int64_t at = t.image + (int64_t)y * v.width + t.x;
  const float r = rows.v_rgb[3 * at], g = rows.v_rgb[3 * at + 1], b = rows.v_rgb[3 * at + 2], T = rows.T[at];
  // d/dT of T * background and of alpha = 1 - T, carried like one more splat behind all others
  return {T, T * (r * v.background[0] + g * v.background[1] + b * v.background[2] - rows.v_alpha[at]), r, g, b, rows.v_depth[at], rows.error[at], rows.last[at]};
}

// Sums 12 values over the warp; lane l gets the sum of value column(l), every column in one even lane.
__device__ __forceinline__ int column(int lane) { return (lane & 16 ? 6 : 0) + (lane & 8 ? 3 : 0) + (lane & 4 ? 2 : lane & 2 ? 1 : 0); }
__device__ __forceinline__ bool holds_column(int lane) { return !(lane & 1) && (lane & 6) != 6; }
template <int N> __device__ __forceinline__ void halve(float* v, int bit) {  // N values -> N / 2, by exchange with lane ^ bit
  const bool upper = lane_id() & bit;
#pragma unroll
  for (int k = 0; k < N / 2; ++k) {
    const float sent = upper ? v[k] : v[k + N / 2], kept = upper ? v[k + N / 2] : v[k];
    v[k] = kept + __shfl_xor_sync(ALL_LANES, sent, bit);
  }
}
__device__ __forceinline__ float reduce_scatter(float* v) {
  halve<12>(v, 16);
  halve<6>(v, 8);
  v[3] = 0;
  halve<4>(v, 4);
  halve<2>(v, 2);
  return v[0] + __shfl_xor_sync(ALL_LANES, v[0], 1);
}

// The 12 values of a v_screen row for the lane's pixels; false if the splat is drawn at none of them.
template <int PX> __device__ __forceinline__ bool backprop(const Batch<PX>& s, int k, int index, const Patch& t, Upstream* up, float* v) {
  const float4 p = s.shape[k], m = s.more[k], c = s.color[k];
  const float dx = p.x - (t.x + 0.5f);
  float sum = 0, sum_y = 0, sum_yy = 0;  // of v_vis, times dy, times dy^2
#pragma unroll
  for (int i = 6; i < 12; ++i) v[i] = 0;
  bool drawn = false;
#pragma unroll
  for (int j = 0; j < PX; ++j) {
    Upstream& u = up[j];
    float vis;
    const float dy = p.y - (t.y + 4 * j + 0.5f), a = alpha_at(p, m, dx, dy, vis);
    if (!(a > 0) || index > u.last) continue;
    drawn = true;
    const float open = __fdividef(1.0f, 1 - a), T = u.T * open, w = a * T;
    const float along = u.r * c.x + u.g * c.y + u.b * c.z + u.depth * m.z;
    const float v_alpha = T * along - u.behind * open;
    u.behind += w * along;
    u.T = T;
    v[6] += w * u.depth; v[7] += w * u.r; v[8] += w * u.g; v[9] += w * u.b;
    v[10] += w; v[11] += w * u.error;
    const float v_vis = m.y * vis <= SPL_ALPHA_MAX ? v_alpha * vis : 0.0f;  // no gradient through the clamp
    sum += v_vis; sum_y += v_vis * dy; sum_yy += v_vis * dy * dy;
  }
  const float power = -m.y;  // v_power = -opacity * v_vis
  const float g = power * sum, gx = g * dx, gy = power * sum_y;
  v[0] = LN2 * (2 * p.z * gx + p.w * gy);
  v[1] = LN2 * (p.w * gx + 2 * m.x * gy);
  v[2] = 0.5f * gx * dx; v[3] = gy * dx; v[4] = 0.5f * power * sum_yy;
  v[5] = sum;
  return drawn;
}

template <int PX> __global__ void __launch_bounds__(threads_of(PX)) raster_bwd_kernel(Dims v, RasterRows rows) {
  constexpr int BATCH = threads_of(PX);
  __shared__ Batch<PX> s;
  __shared__ int deepest;
  const Patch t = patch_of<PX>(v, rows.start);
  Upstream up[PX];
  int last = 0;
#pragma unroll
  for (int j = 0; j < PX; ++j) {
    up[j] = upstream_at(v, rows, t, t.y + 4 * j);
    last = max(last, up[j].last);
  }
  if (threadIdx.x == 0) deepest = 0;
  __syncthreads();
  const int warp_last = warp_max(last);
  if (lane_id() == 0) atomicMax(&deepest, warp_last);
  __syncthreads();
  const int lane_column = column(lane_id());
  for (int end = deepest; end > 0; end -= BATCH) {
    const int base = max(end - BATCH, 0), n = end - base;
    __syncthreads();
    if (threadIdx.x < n) load_splat(s, threadIdx.x, rows.screen, rows.pair[t.begin + base + threadIdx.x]);
    __syncthreads();
    for (int sub = (n - 1) / 32 * 32; sub >= 0; sub -= 32) {
      const int k = sub + lane_id();
      uint32_t left = __ballot_sync(ALL_LANES, k < n && base + k < warp_last && reaches<PX>(s.shape[k], s.more[k], t.x0, t.y0));
      while (left) {
        const int at = sub + 31 - __clz(left);
        left ^= 1u << (at - sub);
        float g[12];
        if (!__any_sync(ALL_LANES, backprop(s, at, base + at + 1, t, up, g))) continue;
        const float sum = reduce_scatter(g);
        if (holds_column(lane_id())) atomicAdd(rows.v_screen + (int64_t)__float_as_uint(s.color[at].w) * SPL_VGRAD_FLOATS + lane_column, sum);
      }
    }
  }
}

static RasterRows rows_of(spl_ctx& c) {
  return {c.row<Screen>(R_SCREEN), c.row<uint32_t>(R_PAIR), c.row<int64_t>(R_TILE_START),
          c.row<float>(R_RGB), c.row<float>(R_DEPTH), nullptr, c.row<float>(R_T), c.row<int32_t>(R_LAST),
          c.row<float>(R_V_RGB), c.row<float>(R_V_DEPTH), c.row<float>(R_V_ALPHA), c.row<float>(R_PX_ERROR), c.row<float>(R_V_SCREEN)};
}

// Small splats favour small patches, which fewer of them reach; large ones favour many pixels a lane.
static double tiles_per_pair(const spl_ctx& c) { return (double)c.counts[SPL_ISECTS] / c.counts[SPL_PAIRS]; }

void raster(spl_ctx& c, const View& v, const spl_image* direct) {
  begin_phase(c, SPL_RASTER);
  RasterRows rows = rows_of(c);
  if (direct) {
    if (on_device(direct->rgb)) rows.rgb = direct->rgb;
    if (on_device(direct->depth)) rows.depth = direct->depth;
    if (on_device(direct->alpha)) rows.alpha = direct->alpha;
  }
  auto* kernel = tiles_per_pair(c) < 7 ? raster_kernel<1> : raster_kernel<2>;
  kernel<<<(unsigned)v.tiles(), threads_of(tiles_per_pair(c) < 7 ? 1 : 2), 0, c.stream>>>(dims_of(v), rows);
  launched("raster_kernel");
}

void raster_bwd(spl_ctx& c, const View& v) {
  begin_phase(c, SPL_RASTER_BWD);
  check(cudaMemsetAsync(c.row<float>(R_V_SCREEN), 0, c.counts[SPL_PAIRS] * row_info(R_V_SCREEN, 0).item_bytes, c.stream), "clearing gradients");
  auto* kernel = tiles_per_pair(c) < 12 ? raster_bwd_kernel<2> : raster_bwd_kernel<4>;
  kernel<<<(unsigned)v.tiles(), threads_of(tiles_per_pair(c) < 12 ? 2 : 4), 0, c.stream>>>(dims_of(v), rows_of(c));
  launched("raster_bwd_kernel");
}

}  // namespace spl
