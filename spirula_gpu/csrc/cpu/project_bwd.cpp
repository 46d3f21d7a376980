// project_bwd.cpp: from the gradients of the screen rows to those of the parameters, either into arrays or straight into
// Adam, so that in training they never reach memory. One thread handles a block of 256 Gaussians, one after the other with
// all its pairs; the optimiser visits only Gaussians that some camera sees. In compact precision it decodes what it
// visits, and encodes the parameters when all of the block are known.
#include "context.h"
#include "../coded.h"
#include "../gaussian.h"
#include <cmath>
#include <cstring>
#include <numeric>

namespace spl {

#define SPL_INLINE __attribute__((always_inline))  // after a lambda's arguments, so that it is compiled for the instruction set of its SPL_HOT function

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
static SPL_FN void gather(const Work& w, const Gaussian& g, const float* sh, int64_t begin, int64_t end, Total& t, CameraGrad* v_cam) {
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

// Parameters and moments of one Gaussian in fp32: mean, quat, log scale, opacity, SH. Of SH m holds degree 0, v one a degree.
constexpr int N_PARAMETERS = R_SH + 1;
static_assert(R_MEAN == 0 && R_V_MEAN == R_M_MEAN + N_PARAMETERS, "rows in this order");
struct State { float *x[N_PARAMETERS], *m[N_PARAMETERS], *v[N_PARAMETERS]; };
struct Sizes { int x[N_PARAMETERS], m[N_PARAMETERS], v[N_PARAMETERS], element[N_PARAMETERS]; };  // element: the number of a row's first, among x, m and v alike
static SPL_FN Sizes sizes_of(const Work& w) {
  return {{3, 4, 3, 1, w.s.sh_floats}, {3, 4, 3, 1, 3}, {3, 4, 3, 1, w.c.params.sh_degree + 1}, {0, 3, 7, 10, FIRST_SH_ELEMENT}};
}

static SPL_FN State state_in_rows(const Work& w, int64_t gi) {
  const Sizes size = sizes_of(w);
  State s;
  for (int r = 0; r < N_PARAMETERS; ++r) {
    s.x[r] = w.c.row<float>(R_MEAN + r) + gi * size.x[r];
    s.m[r] = w.c.row<float>(R_M_MEAN + r) + gi * size.m[r];
    s.v[r] = w.c.row<float>(R_V_MEAN + r) + gi * size.v[r];
  }
  return s;
}

// False: a non-finite gradient, which would poison the moments; the state is as before.
static SPL_FN bool adam_update(const Work& w, int64_t gi, const Gaussian& g, Total& t, const State& s) {
  spl_ctx& c = w.c;
  const spl_hyper& h = *w.sink.hyper;
  c.row<float>(R_WEIGHT)[gi] = most(t.weight, c.row<float>(R_WEIGHT)[gi]);
  c.row<float>(R_ERROR)[gi] = t.weight > 1e-6f ? 0.8f * c.row<float>(R_ERROR)[gi] + 0.2f * t.error : c.row<float>(R_ERROR)[gi];
  float squares[4];  // of the SH gradients, by degree
  for (int l = 0; l <= w.v.sh_degree; ++l) {
    squares[l] = 0;
    for (int i = band_begin(l); i < band_begin(l + 1); ++i) squares[l] += t.sh[i] * t.sh[i];
  }
  if (!all_finite(t.g) || !finite(std::accumulate(squares, squares + w.v.sh_degree + 1, 0.0f))) return false;
  const float share = 1.0f / (float)w.nnz;
  t.g.opacity += h.opacity_reg * share;
  const float reg = h.scale_reg * share / most(t.nearest_z, 1e-3f);
  t.g.scale = t.g.scale + Vec3{reg, reg, reg};
  int32_t& steps = c.row<int32_t>(R_STEPS)[gi];
  const AdamStep a = adam_step(c, h, ++steps);
  auto update = [&](int r, int size, const float* grad, float lr) {
    for (int i = 0; i < size; ++i) adam(s.x[r][i], s.m[r][i], s.v[r][i], grad[i], lr, a);
  };
  const float mean[3] = {t.g.mean.x, t.g.mean.y, t.g.mean.z}, quat[4] = {t.g.quat.w, t.g.quat.x, t.g.quat.y, t.g.quat.z};
  const float scale[3] = {t.g.scale.x * g.scale.x, t.g.scale.y * g.scale.y, t.g.scale.z * g.scale.z};
  const float opacity = t.g.opacity * g.opacity * (1 - g.opacity);
  const float age = h.lr_decay_steps > 0 ? least(steps / h.lr_decay_steps, 1.0f) : 0.0f;
  const float lr_mean = age > 0 && h.lr_mean > 0 ? h.lr_mean * powf(h.lr_mean_final / h.lr_mean, age) : h.lr_mean;
  update(R_MEAN, 3, mean, lr_mean);
  update(R_QUAT, 4, quat, h.lr_quat);
  update(R_LOG_SCALE, 3, scale, h.lr_log_scale);
  update(R_OPACITY, 1, &opacity, h.lr_logit_opacity);
  float *x = s.x[R_SH], *m = s.m[R_SH], *v = s.v[R_SH];
  for (int l = 0; l <= w.v.sh_degree; ++l) {
    const float rate = adam_band(v[l], squares[l], l, l ? h.lr_sh_rest : h.lr_sh0, a);
    if (l == 0) for (int i = 0; i < 3; ++i) t.sh[i] = m[i] = a.beta1 * m[i] + (1 - a.beta1) * t.sh[i];
#pragma GCC ivdep
    for (int i = band_begin(l); i < band_begin(l + 1); ++i) x[i] -= rate * t.sh[i];
  }
  if (!(h.noise > 0) || !noisy(g.opacity)) return true;
  const Vec3 noise = position_noise(g, h.noise * lr_mean, h.seed, (uint32_t)gi, (uint32_t)steps);
  float* moved = s.x[R_MEAN];
  moved[0] += noise.x; moved[1] += noise.y; moved[2] += noise.z;
  return true;
}

// ---- compact precision ------------------------------------------------------------------------------------------------------------
constexpr int ELEMENTS = FIRST_SH_ELEMENT + 48, V_ELEMENTS = FIRST_SH_ELEMENT + 4;

struct BlockState {  // of one block: the new parameters of the Gaussians that were updated, and the moments of the newest
  float x[SPL_OPT_BLOCK][ELEMENTS], m[ELEMENTS], v[V_ELEMENTS];
  uint8_t changed[SPL_OPT_BLOCK];
};

static SPL_FN State decode_state(const Work& w, int64_t gi, const Sizes& size, BlockState& b) {
  float* x = b.x[gi % SPL_OPT_BLOCK];
  State s;
  for (int r = 0; r < N_PARAMETERS; ++r) {
    s.x[r] = x + size.element[r];
    s.m[r] = b.m + size.element[r];
    s.v[r] = b.v + size.element[r];
    const uint16_t* roots = w.c.row<uint16_t>(R_V_MEAN + r);
    const uint8_t* firsts = w.c.row<uint8_t>(R_M_MEAN + r);
    for (int k = 0; k < size.v[r]; ++k) s.v[r][k] = decode_f16u(roots[place(gi, k, size.v[r])]);
    for (int k = 0; k < size.m[r]; ++k) s.m[r][k] = decode_f8(firsts[place(gi, k, size.m[r])]) * s.v[r][v_element(r == R_SH, k)];
    for (int k = 0; k < size.v[r]; ++k) s.v[r][k] *= s.v[r][k];
  }
  s.x[R_MEAN] = w.c.row<float>(R_MEAN) + 3 * gi;
  const Raw raw = decode_raw(w.s.codes, gi);
  memcpy(s.x[R_QUAT], &raw, sizeof raw);  // and what follows
  decode_sh(w.s.codes, gi, w.v.sh_degree, s.x[R_SH]);
  return s;
}

static SPL_FN uint32_t key_of(const Work& w, int64_t gi) { return random_key(w.sink.hyper->seed, (uint32_t)gi, (uint32_t)w.c.row<int32_t>(R_STEPS)[gi]); }

static SPL_FN void encode_moments(const Work& w, int64_t gi, const Sizes& size, const State& s) {
  const uint32_t key = key_of(w, gi);
  for (int r = 0; r < N_PARAMETERS; ++r) {
    uint16_t* roots = w.c.row<uint16_t>(R_V_MEAN + r);
    uint8_t* firsts = w.c.row<uint8_t>(R_M_MEAN + r);
    float root[4];
    for (int k = 0; k < (r == R_SH ? w.v.sh_degree + 1 : size.v[r]); ++k) {  // higher degrees wait for their turn
      const uint16_t code = encode_f16u(sqrtf(s.v[r][k]), bits_for_v(key, size.element[r] + k));
      roots[place(gi, k, size.v[r])] = code;
      root[k] = decode_f16u(code);
    }
    for (int k = 0; k < size.m[r]; ++k)
      firsts[place(gi, k, size.m[r])] = encode_first(s.m[r][k], root[v_element(r == R_SH, k)], bits_for_m(random_word(key, size.element[r] + k)));
  }
}

// The block's exponents follow from all of its Gaussians.
static SPL_FN void encode_parameters(const Work& w, int64_t block, const Sizes& size, const BlockState& b) {
  const int lanes = (int)std::min<int64_t>(SPL_OPT_BLOCK, w.s.n - block * SPL_OPT_BLOCK);
  uint32_t key[SPL_OPT_BLOCK];
  for (int lane = 0; lane < lanes; ++lane) key[lane] = key_of(w, block * SPL_OPT_BLOCK + lane);
  for (int g = 0; g < SPL_N_GROUPS; ++g) {
    const int row = GROUPS[g].row, element = size.element[row];
    const CodedBlock codes = {w.c.row<int16_t>(row) + block * SPL_OPT_BLOCK * GROUPS[g].count, exponents_of(w.c.row<int8_t>(R_EXPONENTS), block * SPL_OPT_BLOCK), lanes};
    encode_group(codes, g, b.changed, b.x[0] + element, ELEMENTS, [&](int lane, int k) SPL_INLINE { return bits_for_x(random_word(key[lane], element + k)); });
  }
}

// ---- all pairs of a block ------------------------------------------------------------------------------------------------------------
// f(Gaussian, its index, its gradients), for all that have pairs among [begin, end).
template <class F> static SPL_FN void for_gaussians(const Work& w, int64_t begin, int64_t end, CameraGrad* v_cam, F&& f) {
  for (int64_t p = begin; p < end;) {
    const int64_t gi = w.gaussian[p];
    int64_t q = p + 1;
    while (q < end && w.gaussian[q] == gi) ++q;
    Gaussian g;
    load(w.s, gi, g);
    Total t{};
    t.nearest_z = 1e30f;
    float room[48];
    gather(w, g, sh_of(w.s, gi, w.v.sh_degree, room), p, q, t, v_cam);
    f(g, gi, t);
    p = q;
  }
}

SPL_HOT static void write_block(const Work& w, int64_t begin, int64_t end, CameraGrad* v_cam) {
  for_gaussians(w, begin, end, v_cam, [&](const Gaussian& g, int64_t gi, const Total& t) SPL_INLINE { write_grads(w, gi, g, t); });
}

SPL_HOT static void train_block(const Work& w, int64_t begin, int64_t end) {
  for_gaussians(w, begin, end, nullptr, [&](const Gaussian& g, int64_t gi, Total& t) SPL_INLINE { adam_update(w, gi, g, t, state_in_rows(w, gi)); });
}

SPL_HOT static void train_compact_block(const Work& w, int64_t begin, int64_t end) {
  const Sizes size = sizes_of(w);
  BlockState b{};
  for_gaussians(w, begin, end, nullptr, [&](const Gaussian& g, int64_t gi, Total& t) SPL_INLINE {
    const State s = decode_state(w, gi, size, b);
    if (!adam_update(w, gi, g, t, s)) return;
    encode_moments(w, gi, size, s);
    const uint32_t key = key_of(w, gi);
    encode_rest(w.c.row<uint32_t>(R_SH_REST) + gi * w.s.codes.words, w.v.sh_degree, s.x[R_SH], [&](int k) SPL_INLINE { return bits_for_x(random_word(key, FIRST_SH_ELEMENT + k)); });
    b.changed[gi % SPL_OPT_BLOCK] = 1;
  });
  encode_parameters(w, w.gaussian[begin] / SPL_OPT_BLOCK, size, b);
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

// Where the pairs of every block begin that has any, and their end. Pairs are Gaussian-major: a block's are a whole number of mask blocks.
static std::vector<int64_t> seen_blocks(spl_ctx& c, const Source& s, const View& v) {
  const int64_t* scan = c.row<int64_t>(R_SCAN);
  const int64_t masks = (s.n * v.n_cameras + SPL_MASK_BLOCK - 1) / SPL_MASK_BLOCK, stride = (int64_t)v.n_cameras * (SPL_OPT_BLOCK / SPL_MASK_BLOCK);
  std::vector<int64_t> begin;
  for (int64_t at = 0; at < masks; at += stride)
    if (scan[at] < scan[std::min(at + stride, masks)]) begin.push_back(scan[at]);
  begin.push_back(scan[masks]);
  return begin;
}

void project_bwd(spl_ctx& c, const Source& s, const View& v, const Sink& sink) {
  begin_phase(c, SPL_PROJECT_BWD);
  const Work w = {s, v, sink, c.row<uint32_t>(R_GAUSSIAN), c.row<uint16_t>(R_CAMERA), c.row<int64_t>(R_FIRST), c.row<float>(R_V_ISECT), c.counts[SPL_PAIRS] - 1, c};
  if (sink.hyper) prepare_adam(c, *sink.hyper); else clear_grads(s, v, sink.grads);
  const std::vector<int64_t> begin = seen_blocks(c, s, v);
  const int64_t blocks = (int64_t)begin.size() - 1;
  const bool cameras = !sink.hyper && sink.grads.viewmats;
  std::vector<CameraGrad> v_cam(cameras ? blocks * v.n_cameras : 0);  // per block, added in order
#pragma omp parallel for schedule(dynamic, 4) num_threads(c.threads)
  for (int64_t b = 0; b < blocks; ++b) {
    if (!sink.hyper) write_block(w, begin[b], begin[b + 1], cameras ? v_cam.data() + b * v.n_cameras : nullptr);
    else if (c.compact()) train_compact_block(w, begin[b], begin[b + 1]);
    else train_block(w, begin[b], begin[b + 1]);
  }
  for (size_t i = 0; i < v_cam.size(); ++i) {
    float* o = sink.grads.viewmats + i % v.n_cameras * 16;
    for (int r = 0; r < 3; ++r)
      for (int k = 0; k < 3; ++k) o[4 * r + k] += v_cam[i].R.m[3 * r + k];
    o[3] += v_cam[i].t.x; o[7] += v_cam[i].t.y; o[11] += v_cam[i].t.z;
  }
}

}  // namespace spl
