// loss.cpp: (1-w) L1 + w (1-SSIM) + depth_weight * mean |D - alpha d| / d, fused with its gradient.
// SSIM (Wang et al. 2004): 11x11 Gaussian window, sigma 1.5, zero padding, mean over pixels and channels. Two passes per
// 16x16 tile with a halo of 5: the first leaves the three partial derivatives of SSIM by the window's moments, the
// second convolves them back. The window is symmetric, so the adjoint of the convolution is the convolution.
#include "context.h"
#include <cmath>
#include <cstring>

namespace spl {

constexpr int L = SPL_TILE_PX, HALO = 5, TAPS = 11, PATCH = L + 2 * HALO, STRIDE = 32;
typedef float VF __attribute__((vector_size(4 * L)));
constexpr float C1 = 0.01f * 0.01f, C2 = 0.03f * 0.03f;
constexpr float WINDOW[TAPS] = {0.00102838008f, 0.00759875814f, 0.03600077213f, 0.10936068951f, 0.21300553771f, 0.26601172486f,
                                0.21300553771f, 0.10936068951f, 0.03600077213f, 0.00759875814f, 0.00102838008f};

static SPL_FN VF load(const float* p) {
  VF v;
  memcpy(&v, p, sizeof v);
  return v;
}
static SPL_FN VF splat(float x) { return x - VF{}; }

struct Images { const float *rgb, *depth, *T; const spl_target* target; float *partials, *v_rgb, *v_depth, *v_alpha, *error; };
struct Weights { float l1, ssim, depth; };  // of one unit of loss per pixel (and channel)

static SPL_FN bool shown(const spl_target& t, int64_t pixel) { return !t.mask || t.mask[pixel]; }

SPL_FN static bool known(float depth) { return depth >= SPL_DEPTH_MIN && finite(depth); }

// Pass 1: SSIM of one channel of one tile; returns the sum over its pixels.
SPL_HOT static double ssim_tile(const View& v, const Images& im, int camera, int x0, int y0, int channel) {
  float x[PATCH][STRIDE] = {}, y[PATCH][STRIDE] = {};
  for (int r = std::max(0, HALO - y0); r < PATCH && y0 + r - HALO < v.height; ++r)
    for (int k = std::max(0, HALO - x0); k < PATCH && x0 + k - HALO < v.width; ++k) {
      const int64_t at = ((int64_t)camera * v.height + y0 + r - HALO) * v.width + x0 + k - HALO;
      if (!shown(*im.target, at)) continue;
      x[r][k] = im.rgb[3 * at + channel];
      y[r][k] = im.target->rgb[3 * at + channel] * (1.0f / 255.0f);
    }
  VF moment[5][PATCH];  // x, y, xx, yy, xy after the horizontal pass
  for (int r = 0; r < PATCH; ++r) {
    VF a{}, b{}, aa{}, bb{}, ab{};
    for (int k = 0; k < TAPS; ++k) {
      const VF p = load(&x[r][k]), q = load(&y[r][k]), wp = WINDOW[k] * p, wq = WINDOW[k] * q;
      a += wp; b += wq; aa += wp * p; bb += wq * q; ab += wp * q;
    }
    moment[0][r] = a; moment[1][r] = b; moment[2][r] = aa; moment[3][r] = bb; moment[4][r] = ab;
  }
  double sum = 0;
  const int columns = std::min(L, v.width - x0);
  for (int r = 0; r < L && y0 + r < v.height; ++r) {
    VF m[5] = {};
    for (int k = 0; k < TAPS; ++k)
      for (int j = 0; j < 5; ++j) m[j] += WINDOW[k] * moment[j][r + k];
    const VF mu1 = m[0], mu2 = m[1], s1 = m[2] - mu1 * mu1, s2 = m[3] - mu2 * mu2, s12 = m[4] - mu1 * mu2;
    const VF A = 2.0f * mu1 * mu2 + C1, B = 2.0f * s12 + C2, C = mu1 * mu1 + mu2 * mu2 + C1, D = s1 + s2 + C2;
    const VF iCD = 1.0f / (C * D), ssim = A * B * iCD;
    const VF d_s1 = -ssim / D, d_s12 = 2.0f * A * iCD;
    const VF d_mu1 = 2.0f * mu2 * B * iCD - 2.0f * mu1 * ssim / C - 2.0f * mu1 * d_s1 - mu2 * d_s12;
    for (int k = 0; k < columns; ++k) {
      const int64_t at = ((int64_t)camera * v.height + y0 + r) * v.width + x0 + k;
      float* out = im.partials + 9 * at + 3 * channel;
      out[0] = d_mu1[k]; out[1] = d_s1[k]; out[2] = d_s12[k];
      sum += ssim[k];
    }
  }
  return sum;
}

// Pass 2: d loss / d rgb of one channel of one tile, and its share of the L1 sum.
SPL_HOT static double color_bwd_tile(const View& v, const Images& im, const Weights& w, int camera, int x0, int y0, int channel) {
  float p[3][PATCH][STRIDE] = {};
  if (w.ssim != 0)
    for (int r = std::max(0, HALO - y0); r < PATCH && y0 + r - HALO < v.height; ++r)
      for (int k = std::max(0, HALO - x0); k < PATCH && x0 + k - HALO < v.width; ++k) {
        const float* in = im.partials + 9 * (((int64_t)camera * v.height + y0 + r - HALO) * v.width + x0 + k - HALO) + 3 * channel;
        p[0][r][k] = in[0]; p[1][r][k] = in[1]; p[2][r][k] = in[2];
      }
  VF row[3][PATCH];
  for (int j = 0; j < 3; ++j)
    for (int r = 0; r < PATCH; ++r) {
      VF a{};
      for (int k = 0; k < TAPS; ++k) a += WINDOW[k] * load(&p[j][r][k]);
      row[j][r] = a;
    }
  double l1 = 0;
  const int columns = std::min(L, v.width - x0);
  for (int r = 0; r < L && y0 + r < v.height; ++r) {
    VF d[3] = {};
    for (int k = 0; k < TAPS; ++k)
      for (int j = 0; j < 3; ++j) d[j] += WINDOW[k] * row[j][r + k];
    for (int k = 0; k < columns; ++k) {
      const int64_t at = ((int64_t)camera * v.height + y0 + r) * v.width + x0 + k;
      float g = 0, residual = 0;
      if (shown(*im.target, at)) {
        const float x = im.rgb[3 * at + channel], y = im.target->rgb[3 * at + channel] * (1.0f / 255.0f);
        residual = x - y;
        g = w.l1 * (residual > 0 ? 1.0f : residual < 0 ? -1.0f : 0.0f) - w.ssim * (d[0][k] + 2 * x * d[1][k] + y * d[2][k]);
      }
      im.v_rgb[3 * at + channel] = g;
      im.error[at] = (channel ? im.error[at] : 0.0f) + fabsf(residual) * (1.0f / 3.0f);
      l1 += fabsf(residual);
    }
  }
  return l1;
}

// The depth term of one tile: D - alpha d is linear in both outputs and needs no division by alpha.
static double depth_tile(const View& v, const Images& im, const Weights& w, int camera, int x0, int y0) {
  double sum = 0;
  for (int y = y0; y < std::min(y0 + L, v.height); ++y)
    for (int x = x0; x < std::min(x0 + L, v.width); ++x) {
      const int64_t at = ((int64_t)camera * v.height + y) * v.width + x;
      const float measured = im.target->depth && shown(*im.target, at) ? im.target->depth[at] : 0.0f;
      const float d = known(measured) ? measured : 0.0f;
      float g = 0;
      if (d > 0) {
        const float e = im.depth[at] - (1.0f - im.T[at]) * d;
        sum += fabsf(e) / d;
        g = w.depth * (e > 0 ? 1.0f : e < 0 ? -1.0f : 0.0f) / d;
      }
      im.v_depth[at] = g;
      im.v_alpha[at] = -g * d;
    }
  return sum;
}

static void count_pixels(const spl_ctx& c, const View& v, const spl_target& t, int64_t& shown_px, int64_t& depth_px) {
  int64_t n = 0, m = 0;
  const int64_t pixels = v.pixels();
#pragma omp parallel for schedule(static) num_threads(c.threads) reduction(+:n, m)
  for (int64_t i = 0; i < pixels; ++i) {
    const bool s = shown(t, i);
    n += s;
    m += s && t.depth && known(t.depth[i]);
  }
  shown_px = n; depth_px = m;
}

void loss(spl_ctx& c, const View& v, const spl_target& target, const spl_hyper& h) {
  begin_phase(c, SPL_LOSS);
  const Images im = {c.row<float>(R_RGB), c.row<float>(R_DEPTH), c.row<float>(R_T), &target, c.row<float>(R_SSIM),
                     c.row<float>(R_V_RGB), c.row<float>(R_V_DEPTH), c.row<float>(R_V_ALPHA), c.row<float>(R_PX_ERROR)};
  int64_t shown_px, depth_px;
  count_pixels(c, v, target, shown_px, depth_px);
  const double n_l1 = 3.0 * std::max<int64_t>(shown_px, 1), n_ssim = 3.0 * v.pixels(), n_depth = (double)std::max<int64_t>(depth_px, 1);
  const Weights w = {(float)((1 - h.ssim_weight) / n_l1), (float)(h.ssim_weight / n_ssim), (float)(h.depth_weight / n_depth)};
  const int64_t tiles = v.tiles(), per = (int64_t)v.tiles_x * v.tiles_y;
  double* sums = c.row<double>(R_SUMS);  // per tile, added in tile order: the same for any number of threads
  auto origin = [&](int64_t i, int& camera, int& x0, int& y0) {
    camera = (int)(i / per); x0 = (int)(i % per) % v.tiles_x * L; y0 = (int)(i % per) / v.tiles_x * L;
  };
#pragma omp parallel for schedule(dynamic, 4) num_threads(c.threads)
  for (int64_t i = 0; i < tiles; ++i) {
    int camera, x0, y0;
    origin(i, camera, x0, y0);
    sums[4 * i] = 0;
    if (w.ssim != 0) for (int k = 0; k < 3; ++k) sums[4 * i] += ssim_tile(v, im, camera, x0, y0, k);
  }
#pragma omp parallel for schedule(dynamic, 4) num_threads(c.threads)
  for (int64_t i = 0; i < tiles; ++i) {
    int camera, x0, y0;
    origin(i, camera, x0, y0);
    sums[4 * i + 1] = 0;
    for (int k = 0; k < 3; ++k) sums[4 * i + 1] += color_bwd_tile(v, im, w, camera, x0, y0, k);
    sums[4 * i + 2] = depth_tile(v, im, w, camera, x0, y0);
  }
  double ssim = 0, l1 = 0, depth = 0;
  for (int64_t i = 0; i < tiles; ++i) { ssim += sums[4 * i]; l1 += sums[4 * i + 1]; depth += sums[4 * i + 2]; }
  c.sums = {ssim, l1, depth, shown_px, depth_px};
}

}  // namespace spl
