// insert.h: new Gaussians from a depth image, where the map lacks something: near-converged at birth. Both backends.
// Rendered alpha low, or the measurement in front of the rendered depth: fill it. Else, where the image has more detail
// than the render (difference of |Laplacian|, after Meuleman et al. 2025), add some of it. The density is a probability
// per pixel; a low-discrepancy sequence spreads the samples evenly, and the size follows from the density.
#pragma once
#include "math.h"
#include "spirula.h"

namespace spl {

SPL_FN float luma(const float* c) { return 0.299f * c[0] + 0.587f * c[1] + 0.114f * c[2]; }

template <class Get> SPL_FN float laplacian(int width, int height, int x, int y, Get&& get) {  // 4-neighbour, edges repeated
  const int l = x > 0 ? x - 1 : 0, r = x + 1 < width ? x + 1 : x, u = y > 0 ? y - 1 : 0, d = y + 1 < height ? y + 1 : y;
  return fabsf(get(l, y) + get(r, y) + get(x, u) + get(x, d) - 4 * get(x, y));
}

struct Scene { int width, height; Camera cam; spl_target t; spl_insert_params p; double shift; const float *rgb, *depth, *T; };  // t, rgb..: where the caller of density() runs

// Density of new Gaussians at a pixel: samples per pixel, 0..1.
SPL_FN float density(const Scene& s, int x, int y) {
  const int64_t at = (int64_t)y * s.width + x;
  const float d = s.t.depth[at];
  if (!(d >= s.p.min_depth_m && d <= s.p.max_depth_m) || (s.t.mask && !s.t.mask[at])) return 0;
  auto truth = [&](int i, int j) {
    const uint8_t* c = s.t.rgb + 3 * ((int64_t)j * s.width + i);
    return (0.299f * c[0] + 0.587f * c[1] + 0.114f * c[2]) * (1.0f / 255.0f);
  };
  auto render = [&](int i, int j) { return luma(s.rgb + 3 * ((int64_t)j * s.width + i)); };
  const float alpha = 1 - s.T[at];
  const bool hole = alpha < s.p.alpha_below;
  const bool in_front = !hole && s.depth[at] - alpha * d > s.p.depth_error * d * alpha;
  const float have = hole ? 0.0f : laplacian(s.width, s.height, x, y, render);
  const float detail = s.p.detail_gain * (laplacian(s.width, s.height, x, y, truth) - have);
  const float least = hole || in_front ? 1.0f / (s.p.hole_spacing_px * s.p.hole_spacing_px) : 0.0f;
  return fminf(fmaxf(detail, least), 1.0f);
}

// R2 sequence (Roberts 2018): thresholds whose low values are evenly spread; the seed shifts it.
inline double seed_shift(uint64_t seed) { return (double)(seed * 0x9E3779B97F4A7C15ull >> 11) / (double)(1ull << 53); }
SPL_FN bool chosen(const Scene& s, int x, int y, float density) {
  const double r = x * 0.7548776662466927 + y * 0.5698402909980532 + s.shift;
  return density > 0 && (float)(r - floor(r)) < density;
}

struct Seed { Vec3 mean; float log_scale, logit_opacity; Vec3 sh0; };  // isotropic, unit quaternion
SPL_FN Seed seed_at(const Scene& s, int x, int y, float density) {
  const int64_t at = (int64_t)y * s.width + x;
  const float d = s.t.depth[at];
  const Vec3 local = {(x + 0.5f - s.cam.cx) / s.cam.fx * d, (y + 0.5f - s.cam.cy) / s.cam.fy * d, d};
  const float spacing = fminf(1.0f / sqrtf(density), 8.0f);  // px between samples of this density
  const uint8_t* c = s.t.rgb + 3 * at;
  auto sh0 = [](uint8_t level) { return (level * (1.0f / 255.0f) - 0.5f) / SH0; };
  return {mul_t(s.cam.R, local - s.cam.t), logf(s.p.size * spacing * d / sqrtf(s.cam.fx * s.cam.fy)), logf(s.p.opacity / (1 - s.p.opacity)),
          {sh0(c[0]), sh0(c[1]), sh0(c[2])}};
}

}  // namespace spl
