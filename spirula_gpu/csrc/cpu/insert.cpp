// insert.cpp: new Gaussians from a depth image, where the map lacks something: near-converged at birth.
// Rendered alpha low, or the measurement in front of the rendered depth: fill it. Else, where the image has more detail
// than the render (difference of |Laplacian|, after Meuleman et al. 2025), add some of it. The density is a probability
// per pixel; a low-discrepancy sequence spreads the samples evenly, and the size follows from the density.
#include "abi.h"
#include <cmath>
#include <cstring>

using namespace spl;

namespace spl {

static SPL_FN float luma(const float* c) { return 0.299f * c[0] + 0.587f * c[1] + 0.114f * c[2]; }

template <class Get> static SPL_FN float laplacian(const View& v, int x, int y, Get&& get) {  // 4-neighbour, edges repeated
  const int l = std::max(x - 1, 0), r = std::min(x + 1, v.width - 1), u = std::max(y - 1, 0), d = std::min(y + 1, v.height - 1);
  return fabsf(get(l, y) + get(r, y) + get(x, u) + get(x, d) - 4 * get(x, y));
}

struct Scene { const View& v; const spl_target& t; const spl_insert_params& p; const float *rgb, *depth, *T; };

// Density of new Gaussians at a pixel: samples per pixel, 0..1.
static SPL_FN float density(const Scene& s, int x, int y) {
  const int64_t at = (int64_t)y * s.v.width + x;
  const float d = s.t.depth[at];
  if (!(d >= s.p.min_depth_m && d <= s.p.max_depth_m) || (s.t.mask && !s.t.mask[at])) return 0;
  auto truth = [&](int i, int j) {
    const uint8_t* c = s.t.rgb + 3 * ((int64_t)j * s.v.width + i);
    return (0.299f * c[0] + 0.587f * c[1] + 0.114f * c[2]) * (1.0f / 255.0f);
  };
  auto render = [&](int i, int j) { return luma(s.rgb + 3 * ((int64_t)j * s.v.width + i)); };
  const float alpha = 1 - s.T[at];
  const bool hole = alpha < s.p.alpha_below;
  const bool in_front = !hole && s.depth[at] - alpha * d > s.p.depth_error * d * alpha;
  const float have = hole ? 0.0f : laplacian(s.v, x, y, render);
  const float detail = s.p.detail_gain * (laplacian(s.v, x, y, truth) - have);
  const float least = hole || in_front ? 1.0f / (s.p.hole_spacing_px * s.p.hole_spacing_px) : 0.0f;
  return fminf(fmaxf(detail, least), 1.0f);
}

struct Seeds { std::vector<float> mean, quat, scale, opacity, sh; };

static void add_seed(const Scene& s, int x, int y, float p, Seeds& out) {
  const Camera& cam = s.v.cameras[0];
  const int64_t at = (int64_t)y * s.v.width + x;
  const float d = s.t.depth[at];
  const Vec3 local = {(x + 0.5f - cam.cx) / cam.fx * d, (y + 0.5f - cam.cy) / cam.fy * d, d};
  const Vec3 world = mul_t(cam.R, local - cam.t);
  const float spacing = fminf(1.0f / sqrtf(p), 8.0f);  // px between samples of this density
  const float sigma = logf(s.p.size * spacing * d / sqrtf(cam.fx * cam.fy));
  out.mean.insert(out.mean.end(), {world.x, world.y, world.z});
  out.quat.insert(out.quat.end(), {1, 0, 0, 0});
  out.scale.insert(out.scale.end(), {sigma, sigma, sigma});
  out.opacity.push_back(logf(s.p.opacity / (1 - s.p.opacity)));
  for (int k = 0; k < 3; ++k) out.sh.push_back((s.t.rgb[3 * at + k] * (1.0f / 255.0f) - 0.5f) / SH0);
}

static void choose(const Scene& s, Seeds& out) {
  // R2 sequence (Roberts 2018): thresholds whose low values are evenly spread; the seed shifts it
  const double shift = (double)(s.p.seed * 0x9E3779B97F4A7C15ull >> 11) / (double)(1ull << 53);
  for (int y = 0; y < s.v.height; ++y)
    for (int x = 0; x < s.v.width; ++x) {
      const float p = density(s, x, y);
      const double r = x * 0.7548776662466927 + y * 0.5698402909980532 + shift;
      if (p > 0 && (float)(r - std::floor(r)) < p) add_seed(s, x, y, p, out);
    }
}

}  // namespace spl

int spl_insert(spl_ctx* ctx, const spl_view* view, const spl_target* target, const spl_insert_params* params, int64_t* n_new) {
  Seeds seeds;
  int status = guarded(ctx, [&](spl_ctx& c) {
    const View v = make_view(c, view, c.params.sh_degree);
    const spl_target& t = checked(target, "spl_target");
    const spl_insert_params& p = checked(params, "spl_insert_params");
    if (v.n_cameras != 1) fail(SPL_E_ARGUMENT, "spl_insert takes one camera, not %d", v.n_cameras);
    if (!t.rgb || !t.depth || !n_new) fail(SPL_E_ARGUMENT, "spl_insert needs rgb and depth of the target, and n_new");
    if (!(p.hole_spacing_px >= 1) || !(p.size > 0) || !(p.opacity > 0 && p.opacity < 1) || !(p.min_depth_m > 0))
      fail(SPL_E_ARGUMENT, "spl_insert: hole_spacing_px %g must be >= 1, size %g > 0, opacity %g in (0, 1), min_depth_m %g > 0", p.hole_spacing_px, p.size, p.opacity, p.min_depth_m);
    begin_step(c);
    forward(c, map_source(c), v);
    choose({v, t, p, c.row<float>(R_RGB), c.row<float>(R_DEPTH), c.row<float>(R_T)}, seeds);
    end_phases(c);
  });
  if (status) return status;
  const spl_gaussians g = {sizeof g, 0, (int64_t)seeds.opacity.size(), 0, seeds.mean.data(), seeds.quat.data(), seeds.scale.data(), seeds.opacity.data(), seeds.sh.data()};
  status = spl_map_append(ctx, &g, params->owner);
  if (!status) *n_new = g.n;
  return status;
}
