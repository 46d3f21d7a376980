// loss.cu: the loss and its gradient; see cpu/loss.cpp. One block a tile, the halo in shared memory, all channels at once.
// In both directions of the window a thread makes four outputs from fourteen inputs.
#include "context.h"

namespace spl {

constexpr int L = SPL_TILE_PX, HALO = 5, TAPS = 11, PATCH = L + 2 * HALO, THREADS = L * L, RUN = 4, INPUTS = RUN + TAPS - 1;
constexpr int STRIDE_IN = 28, STRIDE_OUT = 20;  // of rows in shared memory: 16-byte aligned; no bank conflicts down the columns
constexpr float C1 = 0.01f * 0.01f, C2 = 0.03f * 0.03f;
__constant__ float WINDOW[TAPS] = {0.00102838008f, 0.00759875814f, 0.03600077213f, 0.10936068951f, 0.21300553771f, 0.26601172486f,
                                   0.21300553771f, 0.10936068951f, 0.03600077213f, 0.00759875814f, 0.00102838008f};

struct Images {
  const float *rgb, *depth, *T;
  const uint8_t *target, *mask; const float* target_depth;
  float *partials, *v_rgb, *v_depth, *v_alpha, *error;
  double* sums;  // [tiles][4]: SSIM, L1, depth
};
struct Spot { int x0, y0; int64_t image; };

__device__ __forceinline__ Spot spot_of(const Dims& v) {
  const int per = v.tiles_x * v.tiles_y, camera = blockIdx.x / per, rest = blockIdx.x - camera * per;
  return {rest % v.tiles_x * L, rest / v.tiles_x * L, (int64_t)camera * v.width * v.height};
}
__device__ __forceinline__ bool shown(const Images& im, int64_t at) { return !im.mask || im.mask[at]; }
__device__ __forceinline__ bool known(float depth) { return depth >= SPL_DEPTH_MIN && finite(depth); }

__device__ __forceinline__ double block_sum(double x, double* parts) {  // in thread 0
  for (int step = 16; step; step >>= 1) x += __shfl_down_sync(ALL_LANES, x, step);
  __syncthreads();
  if (lane_id() == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  if (threadIdx.x) return 0;
  for (int w = 1; w < THREADS / 32; ++w) x += parts[w];
  return x;
}

// Pixels that count, for the means.
__global__ void count_kernel(Images im, int64_t pixels, Counters* counters) {
  const int64_t at = thread_id();
  const bool s = at < pixels && shown(im, at), d = s && im.target_depth && known(im.target_depth[at]);
  const int n_shown = __syncthreads_count(s), n_known = __syncthreads_count(d);
  if (threadIdx.x) return;
  atomicAdd(&counters->shown_px, (unsigned long long)n_shown);
  atomicAdd(&counters->depth_px, (unsigned long long)n_known);
}

// RUN neighbouring outputs of the window from INPUTS inputs, for N quantities.
template <int N, class Get> __device__ __forceinline__ void convolve(float (&out)[N][RUN], Get&& get) {  // get(input, values[N])
#pragma unroll
  for (int i = 0; i < INPUTS; ++i) {
    float value[N];
    get(i, value);
#pragma unroll
    for (int r = 0; r < RUN; ++r) {
      const int tap = i - r;
      if (tap < 0 || tap >= TAPS) continue;
#pragma unroll
      for (int n = 0; n < N; ++n) out[n][r] += WINDOW[tap] * value[n];
    }
  }
}

__device__ __forceinline__ void load_run(const float* row, float* out) {
#pragma unroll
  for (int k = 0; k < 4; ++k) *(float4*)(out + 4 * k) = ((const float4*)row)[k];
}

// SSIM of a pixel from its moments x, y, xx, yy, xy, and its derivatives by mu1, sigma1^2, sigma12.
__device__ __forceinline__ float ssim_of(const float* m, float* d) {
  const float mu1 = m[0], mu2 = m[1], s1 = m[2] - mu1 * mu1, s2 = m[3] - mu2 * mu2, s12 = m[4] - mu1 * mu2;
  const float A = 2 * mu1 * mu2 + C1, B = 2 * s12 + C2, C = mu1 * mu1 + mu2 * mu2 + C1, D = s1 + s2 + C2;
  const float iCD = 1.0f / (C * D), ssim = A * B * iCD;
  d[1] = -ssim / D;
  d[2] = 2 * A * iCD;
  d[0] = 2 * mu2 * B * iCD - 2 * mu1 * ssim / C - 2 * mu1 * d[1] - mu2 * d[2];
  return ssim;
}

__global__ void __launch_bounds__(THREADS) ssim_kernel(Dims v, Images im) {
  __shared__ alignas(16) float x[3][PATCH][STRIDE_IN], y[3][PATCH][STRIDE_IN], moment[3][5][PATCH][STRIDE_OUT];
  __shared__ double parts[THREADS / 32];
  const Spot t = spot_of(v);
  for (int i = threadIdx.x; i < PATCH * STRIDE_IN; i += THREADS) {
    const int r = i / STRIDE_IN, k = i % STRIDE_IN, py = t.y0 + r - HALO, px = t.x0 + k - HALO;
    const int64_t at = t.image + (int64_t)py * v.width + px;
    const bool inside = py >= 0 && py < v.height && px >= 0 && px < v.width && shown(im, at);
#pragma unroll
    for (int c = 0; c < 3; ++c) {
      x[c][r][k] = inside ? im.rgb[3 * at + c] : 0.0f;
      y[c][r][k] = inside ? im.target[3 * at + c] * (1.0f / 255.0f) : 0.0f;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 3 * PATCH * (L / RUN); i += THREADS) {
    const int k = i % (L / RUN) * RUN, r = i / (L / RUN) % PATCH, c = i / (L / RUN) / PATCH;
    float xs[16], ys[16], out[5][RUN] = {};
    load_run(&x[c][r][k], xs);
    load_run(&y[c][r][k], ys);
    convolve(out, [&](int j, float* m) { m[0] = xs[j]; m[1] = ys[j]; m[2] = xs[j] * xs[j]; m[3] = ys[j] * ys[j]; m[4] = xs[j] * ys[j]; });
#pragma unroll
    for (int m = 0; m < 5; ++m) *(float4*)&moment[c][m][r][k] = make_float4(out[m][0], out[m][1], out[m][2], out[m][3]);
  }
  __syncthreads();
  double sum = 0;
  if (threadIdx.x < 3 * L * (L / RUN)) {
    const int column = threadIdx.x % L, row = threadIdx.x / L % (L / RUN) * RUN, c = threadIdx.x / L / (L / RUN);
    float out[5][RUN] = {};
    convolve(out, [&](int j, float* m) { for (int k = 0; k < 5; ++k) m[k] = moment[c][k][row + j][column]; });
#pragma unroll
    for (int r = 0; r < RUN; ++r) {
      if (t.y0 + row + r >= v.height || t.x0 + column >= v.width) continue;
      const float m[5] = {out[0][r], out[1][r], out[2][r], out[3][r], out[4][r]};
      sum += ssim_of(m, im.partials + 9 * (t.image + (int64_t)(t.y0 + row + r) * v.width + t.x0 + column) + 3 * c);
    }
  }
  sum = block_sum(sum, parts);
  if (threadIdx.x == 0) im.sums[4 * (int64_t)blockIdx.x] = sum;
}

struct Weights { float l1, ssim, depth; };  // of one unit of loss per pixel (and channel)

__device__ __forceinline__ float sign(float x) { return x > 0 ? 1.0f : x < 0 ? -1.0f : 0.0f; }

// The depth term: D - alpha d is linear in both outputs and needs no division by alpha.
__device__ __forceinline__ float depth_term(const Images& im, float weight, int64_t at) {
  const float measured = im.target_depth && shown(im, at) ? im.target_depth[at] : 0.0f, d = known(measured) ? measured : 0.0f;
  float e = 0, g = 0;
  if (d > 0) {
    e = im.depth[at] - (1.0f - im.T[at]) * d;
    g = weight * sign(e) / d;
  }
  im.v_depth[at] = g;
  im.v_alpha[at] = -g * d;
  return d > 0 ? fabsf(e) / d : 0.0f;
}

// d loss / d rgb of the tile.
__device__ __forceinline__ void color_gradient(const Dims& v, const Images& im, const Spot& t, float w_l1, float w_ssim) {
  __shared__ alignas(16) float p[9][PATCH][STRIDE_IN], across[9][PATCH][STRIDE_OUT];  // 3 channels x 3 derivatives
  if (w_ssim != 0) {
    for (int i = threadIdx.x; i < PATCH * STRIDE_IN; i += THREADS) {
      const int r = i / STRIDE_IN, k = i % STRIDE_IN, py = t.y0 + r - HALO, px = t.x0 + k - HALO;
      const bool inside = py >= 0 && py < v.height && px >= 0 && px < v.width;
      const float* in = im.partials + 9 * (t.image + (int64_t)py * v.width + px);
#pragma unroll
      for (int j = 0; j < 9; ++j) p[j][r][k] = inside ? in[j] : 0.0f;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 9 * PATCH * (L / RUN); i += THREADS) {
      const int k = i % (L / RUN) * RUN, r = i / (L / RUN) % PATCH, j = i / (L / RUN) / PATCH;
      float in[16], out[1][RUN] = {};
      load_run(&p[j][r][k], in);
      convolve(out, [&](int i, float* m) { m[0] = in[i]; });
      *(float4*)&across[j][r][k] = make_float4(out[0][0], out[0][1], out[0][2], out[0][3]);
    }
    __syncthreads();
  }
  if (threadIdx.x >= 3 * L * (L / RUN)) return;
  const int column = threadIdx.x % L, row = threadIdx.x / L % (L / RUN) * RUN, c = threadIdx.x / L / (L / RUN);
  float d[3][RUN] = {};
  if (w_ssim != 0) convolve(d, [&](int i, float* m) { for (int j = 0; j < 3; ++j) m[j] = across[3 * c + j][row + i][column]; });
#pragma unroll
  for (int r = 0; r < RUN; ++r) {
    if (t.y0 + row + r >= v.height || t.x0 + column >= v.width) continue;
    const int64_t at = t.image + (int64_t)(t.y0 + row + r) * v.width + t.x0 + column;
    const float x = im.rgb[3 * at + c], y = im.target[3 * at + c] * (1.0f / 255.0f);
    im.v_rgb[3 * at + c] = shown(im, at) ? w_l1 * sign(x - y) - w_ssim * (d[0][r] + 2 * x * d[1][r] + y * d[2][r]) : 0.0f;
  }
}

__global__ void __launch_bounds__(THREADS) loss_bwd_kernel(Dims v, Images im, Weights unit, const Counters* counters) {
  __shared__ double parts[THREADS / 32];
  const Spot t = spot_of(v);
  color_gradient(v, im, t, unit.l1 / (3.0f * (float)max(counters->shown_px, 1ull)), unit.ssim);
  const int row = threadIdx.x / L, column = threadIdx.x % L;
  const int64_t at = t.image + (int64_t)(t.y0 + row) * v.width + t.x0 + column;
  float l1 = 0, depth = 0;
  if (t.y0 + row < v.height && t.x0 + column < v.width) {
    if (shown(im, at)) for (int c = 0; c < 3; ++c) l1 += fabsf(im.rgb[3 * at + c] - im.target[3 * at + c] * (1.0f / 255.0f));
    depth = depth_term(im, unit.depth / (float)max(counters->depth_px, 1ull), at);
    im.error[at] = l1 * (1.0f / 3.0f);
  }
  const double l1_sum = block_sum(l1, parts), depth_sum = block_sum(depth, parts);
  if (threadIdx.x) return;
  im.sums[4 * (int64_t)blockIdx.x + 1] = l1_sum;
  im.sums[4 * (int64_t)blockIdx.x + 2] = depth_sum;
}

__global__ void __launch_bounds__(THREADS) sum_tiles_kernel(const double* sums, int64_t tiles, double* total) {  // one block per sum: the same every time
  __shared__ double parts[THREADS / 32];
  double sum = 0;
  for (int64_t i = threadIdx.x; i < tiles; i += THREADS) sum += sums[4 * i + blockIdx.x];
  sum = block_sum(sum, parts);
  if (threadIdx.x == 0) total[blockIdx.x] = sum;
}

void loss(spl_ctx& c, const View& v, const spl_target& target, const spl_hyper& h) {
  begin_phase(c, SPL_LOSS);
  const int64_t pixels = v.pixels(), tiles = v.tiles();
  const Images im = {c.row<float>(R_RGB), c.row<float>(R_DEPTH), c.row<float>(R_T),
                     (const uint8_t*)resident(c, c.row<void>(R_TARGET_RGB), target.rgb, pixels * 3), (const uint8_t*)resident(c, c.row<void>(R_TARGET_MASK), target.mask, pixels),
                     (const float*)resident(c, c.row<void>(R_TARGET_DEPTH), target.depth, pixels * 4), c.row<float>(R_SSIM),
                     c.row<float>(R_V_RGB), c.row<float>(R_V_DEPTH), c.row<float>(R_V_ALPHA), c.row<float>(R_PX_ERROR), c.row<double>(R_SUMS)};
  const Dims dims = dims_of(v);
  const Weights unit = {1 - h.ssim_weight, (float)(h.ssim_weight / (3.0 * pixels)), h.depth_weight};
  count_kernel<<<blocks_for(pixels, 1024), 1024, 0, c.stream>>>(im, pixels, c.counters());
  launched("count_kernel");
  check(cudaMemsetAsync(im.sums, 0, (tiles + 1) * 32, c.stream), "clearing sums");
  if (h.ssim_weight != 0) ssim_kernel<<<(unsigned)tiles, THREADS, 0, c.stream>>>(dims, im);
  launched("ssim_kernel");
  loss_bwd_kernel<<<(unsigned)tiles, THREADS, 0, c.stream>>>(dims, im, unit, c.counters());
  launched("loss_bwd_kernel");
  double* total = im.sums + 4 * tiles;
  sum_tiles_kernel<<<3, THREADS, 0, c.stream>>>(im.sums, tiles, total);
  launched("sum_tiles_kernel");
  check(cudaMemcpyAsync(c.readback->sums, total, sizeof c.readback->sums, cudaMemcpyDeviceToHost, c.stream), "reading the loss");
  check(cudaMemcpyAsync(&c.readback->lost, c.counters(), sizeof(Counters), cudaMemcpyDeviceToHost, c.stream), "reading counters");
}

}  // namespace spl
