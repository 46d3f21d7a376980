// project_bwd.cpp: from the gradients of the screen rows to those of the parameters, either into arrays or straight into
// Adam, so that in training they never reach memory. One thread handles a Gaussian with all its pairs; the optimiser
// visits only Gaussians that some camera sees.
#include "context.h"
#include "../gaussian.h"
#include <cmath>
#include <cstring>
#include <numeric>

namespace spl {

struct Work {
  const Source& s; const View& v; const Sink& sink;
  const uint32_t* gaussian; const uint16_t* camera; const int64_t* first; const float* v_isect;
  int64_t nnz;
  spl_ctx& c;
};

static SPL_FN void add_slots(const Work& w, int64_t pair, float* v) {  // sum over the pair's intersections
  for (int k = 0; k < SPL_VGRAD_FLOATS; ++k) v[k] = 0;
  for (int64_t i = w.first[pair]; i < w.first[pair + 1]; ++i)
    for (int k = 0; k < SPL_VGRAD_FLOATS; ++k) v[k] += w.v_isect[i * SPL_VGRAD_FLOATS + k];
}

struct Total { GaussianGrad g; float sh[48]; float weight, error, nearest_z; };

static SPL_FN bool all_finite(const CameraGrad& v) {
  float sum = v.t.x + v.t.y + v.t.z;
  for (int k = 0; k < 9; ++k) sum += v.R.m[k];
  return finite(sum);
}

static SPL_FN void add(CameraGrad& to, const CameraGrad& v) {
  for (int k = 0; k < 9; ++k) to.R.m[k] += v.R.m[k];
  to.t = to.t + v.t;
}

// All pairs [begin, end) of one Gaussian. v_cam: [C] or null.
static SPL_FN void gather(const Work& w, const Gaussian& g, int64_t begin, int64_t end, Total& t, CameraGrad* v_cam) {
  const int64_t gi = w.gaussian[begin];
  const float* sh = w.s.sh + gi * w.s.sh_floats;
  for (int64_t p = begin; p < end; ++p) {
    const int ci = camera_of(w.camera[p]);
    const Camera& cam = w.v.cameras[ci];
    t.nearest_z = least(dot({cam.R.m[6], cam.R.m[7], cam.R.m[8]}, g.mean) + cam.t.z, t.nearest_z);
    if (w.first[p] == w.first[p + 1]) continue;  // its box holds no pixel centre that it reaches
    float v[SPL_VGRAD_FLOATS];
    add_slots(w, p, v);
    CameraGrad by_camera{};
    t.weight += v[10];
    t.error += v[11];
    project_bwd(g, cam, v, t.g, v_cam ? &by_camera : nullptr);
    if (w.s.direct_rgb) {
      for (int k = 0; k < 3; ++k) t.sh[k] += v[7 + k];
      if (v_cam && all_finite(by_camera)) add(v_cam[ci], by_camera);
      continue;
    }
    const Vec3 vm = sh_color_bwd(w.v.sh_degree, sh, g.mean, cam.center, lit(w.camera[p], v + 7), t.sh);
    t.g.mean = t.g.mean + vm;
    if (!v_cam) continue;
    center_bwd(cam, vm, by_camera);
    if (all_finite(by_camera)) add(v_cam[ci], by_camera);
  }
}

static SPL_FN bool all_finite(const GaussianGrad& g) {
  return finite(g.mean.x + g.mean.y + g.mean.z + g.quat.w + g.quat.x + g.quat.y + g.quat.z + g.scale.x + g.scale.y + g.scale.z + g.opacity);
}

static SPL_FN void write_grads(const Work& w, int64_t gi, const Gaussian& g, const Total& t) {
  if (!all_finite(t.g) || !finite(std::accumulate(t.sh, t.sh + w.s.sh_floats, 0.0f))) return;  // stays 0, as cleared
  const spl_gaussian_grads& o = w.sink.grads;
  const float ds[3] = {w.s.activated ? 1 : g.scale.x, w.s.activated ? 1 : g.scale.y, w.s.activated ? 1 : g.scale.z};
  const float mean[3] = {t.g.mean.x, t.g.mean.y, t.g.mean.z}, scale[3] = {t.g.scale.x * ds[0], t.g.scale.y * ds[1], t.g.scale.z * ds[2]};
  const float quat[4] = {t.g.quat.w, t.g.quat.x, t.g.quat.y, t.g.quat.z};
  memcpy(o.means + 3 * gi, mean, sizeof mean);
  memcpy(o.quats + 4 * gi, quat, sizeof quat);
  memcpy(o.log_scales + 3 * gi, scale, sizeof scale);
  o.logit_opacities[gi] = t.g.opacity * (w.s.activated ? 1.0f : g.opacity * (1 - g.opacity));
  memcpy(o.sh + gi * w.s.sh_floats, t.sh, w.s.sh_floats * sizeof(float));
}

static float correction(float beta, int steps) { return (float)(1.0 / (1.0 - std::pow((double)beta, steps))); }

static SPL_FN AdamStep adam_step(const spl_ctx& c, const spl_hyper& h, int steps) {
  if ((size_t)steps < c.adam_c1.size()) return {h.beta1, h.beta2, h.eps, c.adam_c1[steps], c.adam_c2[steps]};
  return {h.beta1, h.beta2, h.eps, correction(h.beta1, steps), correction(h.beta2, steps)};
}

static SPL_FN void adam_update(const Work& w, int64_t gi, const Gaussian& g, Total& t) {
  spl_ctx& c = w.c;
  const spl_hyper& h = *w.sink.hyper;
  c.row<float>(R_WEIGHT)[gi] = most(t.weight, c.row<float>(R_WEIGHT)[gi]);
  c.row<float>(R_ERROR)[gi] = t.weight > 1e-6f ? 0.8f * c.row<float>(R_ERROR)[gi] + 0.2f * t.error : c.row<float>(R_ERROR)[gi];
  float squares[4];  // of the SH gradients, by degree
  for (int l = 0; l <= w.v.sh_degree; ++l) {
    squares[l] = 0;
    for (int i = band_begin(l); i < band_begin(l + 1); ++i) squares[l] += t.sh[i] * t.sh[i];
  }
  if (!all_finite(t.g) || !finite(std::accumulate(squares, squares + w.v.sh_degree + 1, 0.0f))) return;  // it would poison the moments
  const float share = 1.0f / (float)w.nnz;
  t.g.opacity += h.opacity_reg * share;
  const float reg = h.scale_reg * share / most(t.nearest_z, 1e-3f);
  t.g.scale = t.g.scale + Vec3{reg, reg, reg};
  int32_t& steps = c.row<int32_t>(R_STEPS)[gi];
  const AdamStep a = adam_step(c, h, ++steps);
  auto update = [&](int row, int m_row, int v_row, int size, const float* grad, float lr) {
    float *x = c.row<float>(row) + gi * size, *m = c.row<float>(m_row) + gi * size, *v = c.row<float>(v_row) + gi * size;
    for (int i = 0; i < size; ++i) adam(x[i], m[i], v[i], grad[i], lr, a);
  };
  const float mean[3] = {t.g.mean.x, t.g.mean.y, t.g.mean.z}, quat[4] = {t.g.quat.w, t.g.quat.x, t.g.quat.y, t.g.quat.z};
  const float scale[3] = {t.g.scale.x * g.scale.x, t.g.scale.y * g.scale.y, t.g.scale.z * g.scale.z};
  const float opacity = t.g.opacity * g.opacity * (1 - g.opacity);
  const float age = h.lr_decay_steps > 0 ? least(steps / h.lr_decay_steps, 1.0f) : 0.0f;
  const float lr_mean = age > 0 && h.lr_mean > 0 ? h.lr_mean * powf(h.lr_mean_final / h.lr_mean, age) : h.lr_mean;
  update(R_MEAN, R_M_MEAN, R_V_MEAN, 3, mean, lr_mean);
  update(R_QUAT, R_M_QUAT, R_V_QUAT, 4, quat, h.lr_quat);
  update(R_LOG_SCALE, R_M_LOG_SCALE, R_V_LOG_SCALE, 3, scale, h.lr_log_scale);
  update(R_OPACITY, R_M_OPACITY, R_V_OPACITY, 1, &opacity, h.lr_logit_opacity);
  float *x = c.row<float>(R_SH) + gi * w.s.sh_floats, *m = c.row<float>(R_M_SH) + gi * w.s.sh_floats, *v = c.row<float>(R_V_SH) + gi * (c.params.sh_degree + 1);
  for (int l = 0; l <= w.v.sh_degree; ++l) {
    const float rate = adam_band(v[l], squares[l], l, l ? h.lr_sh_rest : h.lr_sh0, a);
#pragma GCC ivdep
    for (int i = band_begin(l); i < band_begin(l + 1); ++i) adam_in_band(x[i], m[i], t.sh[i], rate, a);
  }
  if (!(h.noise > 0) || !noisy(g.opacity)) return;
  const Vec3 noise = position_noise(g, h.noise * lr_mean, h.seed, (uint32_t)gi, (uint32_t)steps);
  float* moved = c.row<float>(R_MEAN) + 3 * gi;
  moved[0] += noise.x; moved[1] += noise.y; moved[2] += noise.z;
}

// Pairs [begin, end), which start and end at Gaussian boundaries.
SPL_HOT static void backprop_pairs(const Work& w, int64_t begin, int64_t end, CameraGrad* v_cam) {
  for (int64_t p = begin; p < end;) {
    const int64_t gi = w.gaussian[p];
    int64_t q = p + 1;
    while (q < end && w.gaussian[q] == gi) ++q;
    Gaussian g;
    load(w.s, gi, g);
    Total t{};
    t.nearest_z = 1e30f;
    gather(w, g, p, q, t, v_cam);
    if (w.sink.hyper) adam_update(w, gi, g, t); else write_grads(w, gi, g, t);
    p = q;
  }
}

static void prepare_adam(spl_ctx& c, const spl_hyper& h) {
  if (c.adam_beta1 == h.beta1 && c.adam_beta2 == h.beta2) return;
  const int n = 1 << 14;  // a table for most; adam_step computes the rest
  c.adam_c1.resize(n); c.adam_c2.resize(n);
  for (int t = 1; t < n; ++t) {
    c.adam_c1[t] = correction(h.beta1, t);
    c.adam_c2[t] = correction(h.beta2, t);
  }
  c.adam_beta1 = h.beta1; c.adam_beta2 = h.beta2;
}

static void clear_grads(const Source& s, const View& v, const spl_gaussian_grads& o) {
  memset(o.means, 0, s.n * 12); memset(o.quats, 0, s.n * 16); memset(o.log_scales, 0, s.n * 12); memset(o.logit_opacities, 0, s.n * 4);
  memset(o.sh, 0, s.n * s.sh_floats * sizeof(float));
  if (o.viewmats) memset(o.viewmats, 0, (size_t)v.n_cameras * 64);
}

void project_bwd(spl_ctx& c, const Source& s, const View& v, const Sink& sink) {
  begin_phase(c, SPL_PROJECT_BWD);
  const Work w = {s, v, sink, c.row<uint32_t>(R_GAUSSIAN), c.row<uint16_t>(R_CAMERA), c.row<int64_t>(R_FIRST), c.row<float>(R_V_ISECT), c.counts[SPL_PAIRS] - 1, c};
  if (sink.hyper) prepare_adam(c, *sink.hyper); else clear_grads(s, v, sink.grads);
  const int64_t blocks = (w.nnz + SPL_OPT_BLOCK - 1) / SPL_OPT_BLOCK;
  const bool cameras = !sink.hyper && sink.grads.viewmats;
  std::vector<CameraGrad> v_cam(cameras ? blocks * v.n_cameras : 0);  // per block, added in order
  auto boundary = [&](int64_t p) {  // the first pair at or after p that begins a Gaussian
    while (p > 0 && p < w.nnz && w.gaussian[p] == w.gaussian[p - 1]) ++p;
    return std::min(p, w.nnz);
  };
#pragma omp parallel for schedule(dynamic, 4) num_threads(c.threads)
  for (int64_t b = 0; b < blocks; ++b)
    backprop_pairs(w, boundary(b * SPL_OPT_BLOCK), boundary((b + 1) * SPL_OPT_BLOCK), cameras ? v_cam.data() + b * v.n_cameras : nullptr);
  for (size_t i = 0; i < v_cam.size(); ++i) {
    float* o = sink.grads.viewmats + i % v.n_cameras * 16;
    for (int r = 0; r < 3; ++r)
      for (int k = 0; k < 3; ++k) o[4 * r + k] += v_cam[i].R.m[3 * r + k];
    o[3] += v_cam[i].t.x; o[7] += v_cam[i].t.y; o[11] += v_cam[i].t.z;
  }
}

}  // namespace spl
