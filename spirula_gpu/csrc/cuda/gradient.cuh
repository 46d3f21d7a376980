// gradient.cuh: what the two kernels of projection backward share: the gradients of one Gaussian, and what precedes its Adam step.
#pragma once
#include "context.h"
#include "../gaussian.h"

namespace spl {

struct Total { GaussianGrad g; float weight, error, nearest_z; };  // over the pairs of a Gaussian
__device__ __forceinline__ Total no_pairs() {
  Total t{};
  t.nearest_z = 1e30f;
  return t;
}

struct alignas(16) ScreenGrad { float f[SPL_VGRAD_FLOATS]; };  // of one pair, in the order of proj.screen, then weight and error
__device__ __forceinline__ ScreenGrad load_screen_grad(const float* rows, int64_t pair) {
  ScreenGrad v;
#pragma unroll
  for (int k = 0; k < SPL_VGRAD_FLOATS / 4; ++k) *(float4*)(v.f + 4 * k) = ((const float4*)(rows + pair * SPL_VGRAD_FLOATS))[k];
  return v;
}

__device__ __forceinline__ float depth_of(const Camera& cam, Vec3 mean) { return dot({cam.R.m[6], cam.R.m[7], cam.R.m[8]}, mean) + cam.t.z; }

__device__ __forceinline__ bool all_finite(const GaussianGrad& g) {
  return finite(g.mean.x + g.mean.y + g.mean.z + g.quat.w + g.quat.x + g.quat.y + g.quat.z + g.scale.x + g.scale.y + g.scale.z + g.opacity);
}

// The gradients of the raw parameters, 11 floats: mean, quat, scale, opacity.
__device__ __forceinline__ void raw_gradient(const Gaussian& g, const GaussianGrad& v, bool activated, float* out) {
  const Vec3 ds = activated ? Vec3{1, 1, 1} : g.scale;
  out[0] = v.mean.x; out[1] = v.mean.y; out[2] = v.mean.z;
  out[3] = v.quat.w; out[4] = v.quat.x; out[5] = v.quat.y; out[6] = v.quat.z;
  out[7] = v.scale.x * ds.x; out[8] = v.scale.y * ds.y; out[9] = v.scale.z * ds.z;
  out[10] = v.opacity * (activated ? 1.0f : g.opacity * (1 - g.opacity));
}

struct Optimiser {
  spl_hyper h;
  float log_beta1, log_beta2, share;  // share: of one of the visible pairs in a mean over them
  float *weight, *error;
  int32_t* steps;
};
inline Optimiser optimiser_of(spl_ctx& c, const spl_hyper& h, int64_t nnz) {
  return {h, (float)log((double)h.beta1), (float)log((double)h.beta2), 1.0f / (float)nnz, c.row<float>(R_WEIGHT), c.row<float>(R_ERROR), c.row<int32_t>(R_STEPS)};
}

struct Statistics { float weight, error; int steps; };  // of one Gaussian, before this step
__device__ __forceinline__ Statistics load_statistics(const Optimiser& o, int64_t gi) { return {o.weight[gi], o.error[gi], o.steps[gi]}; }

struct Stride { int steps; float c1, c2, lr_mean; };  // what follows from a Gaussian's step count
// Statistics, regularisers and the step count of one Gaussian. False: a non-finite gradient, which must not poison the moments.
__device__ __forceinline__ bool begin_adam(const Optimiser& o, int64_t gi, const Gaussian& g, const Statistics& was, Total& t, bool sane, Stride& s) {
  const spl_hyper& h = o.h;
  o.weight[gi] = fmaxf(was.weight, t.weight);
  if (t.weight > 1e-6f) o.error[gi] = 0.8f * was.error + 0.2f * t.error;
  if (!sane) return false;
  const float reg = __fdividef(h.scale_reg * o.share, fmaxf(t.nearest_z, 1e-3f));
  t.g.opacity += h.opacity_reg * o.share;
  t.g.scale = t.g.scale + Vec3{reg, reg, reg};
  o.steps[gi] = s.steps = was.steps + 1;
  s.c1 = __fdividef(-1.0f, expm1f(s.steps * o.log_beta1));  // 1 / (1 - beta^steps)
  s.c2 = __fdividef(-1.0f, expm1f(s.steps * o.log_beta2));
  const float age = h.lr_decay_steps > 0 ? fminf(s.steps / h.lr_decay_steps, 1.0f) : 0.0f;
  s.lr_mean = age > 0 && h.lr_mean > 0 ? h.lr_mean * powf(h.lr_mean_final / h.lr_mean, age) : h.lr_mean;
  return true;
}

}  // namespace spl
