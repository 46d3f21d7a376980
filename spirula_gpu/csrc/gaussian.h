// gaussian.h: one Gaussian of a Source: loading, a cheap cull, its colour on the screen. Shared by both backends.
#pragma once
#include "codec.h"
#include "host.h"

namespace spl {

// ---- a compact map: its codes as floats -------------------------------------------------------------------------------------
template <int K> SPL_FN void decode_row(const int16_t* codes, int64_t i, float step, float* x) {
  for (int k = 0; k < K; ++k) x[k] = decode(codes[place(i, k, K)], step);
}
struct Raw { float quat[4], log_scale[3], opacity; };  // what a compact map stores of the geometry, beside the fp32 mean
SPL_FN Raw decode_raw(const Codes& c, int64_t i) {
  const int8_t* e = exponents_of(c.exponents, i);
  Raw o;
  decode_row<4>(c.quat, i, step_of(e[SPL_G_QUAT]), o.quat);
  decode_row<3>(c.log_scale, i, step_of(e[SPL_G_LOG_SCALE]), o.log_scale);
  decode_row<1>(c.opacity, i, step_of(e[SPL_G_OPACITY]), &o.opacity);
  return o;
}
// The first 3 (degree+1)^2 SH coefficients.
SPL_FN void decode_sh(const Codes& c, int64_t i, int degree, float* x) {
  decode_row<3>(c.sh0, i, step_of(exponents_of(c.exponents, i)[SPL_G_SH]), x);
  decode_rest(c.rest + i * c.words, degree, x);
}

// ---- any Source -----------------------------------------------------------------------------------------------------------------
SPL_FN bool make_gaussian(const float* mean, const float* q, const float* k, float opacity, bool activated, Gaussian& g) {
  g.mean = {mean[0], mean[1], mean[2]};
  g.quat = {q[0], q[1], q[2], q[3]};
  g.scale = activated ? Vec3{k[0], k[1], k[2]} : Vec3{expf(k[0]), expf(k[1]), expf(k[2])};
  g.opacity = activated ? opacity : sigmoid(opacity);
  const float n2 = quat_norm2(g.quat);
  return n2 > 1e-20f && n2 < 1e20f;  // false for NaN
}
SPL_FN bool load(const Source& s, int64_t i, Gaussian& g) {
  if (!s.codes.exponents) return make_gaussian(s.mean + 3 * i, s.quat + 4 * i, s.scale + 3 * i, s.opacity[i], s.activated, g);
  const Raw raw = decode_raw(s.codes, i);
  return make_gaussian(s.mean + 3 * i, raw.quat, raw.log_scale, raw.opacity, false, g);
}

// SH coefficients of Gaussian i up to `degree`: where they are, or decoded into `room` [3 (degree+1)^2].
SPL_FN const float* sh_of(const Source& s, int64_t i, int degree, float* room) {
  if (!s.codes.exponents) return s.sh + i * s.sh_floats;
  decode_sh(s.codes, i, degree, room);
  return room;
}

// Cheap and conservative: is the sphere of 3.34 sigma around the centre certainly off the image?
SPL_FN bool surely_outside(const Source& s, int64_t i, const Camera& cam, Vec3& p) {
  const float* m = s.mean + 3 * i;
  if (!project_center({m[0], m[1], m[2]}, cam, p)) return true;
  float k[3];
  if (s.codes.exponents) decode_row<3>(s.codes.log_scale, i, step_of(exponents_of(s.codes.exponents, i)[SPL_G_LOG_SCALE]), k);
  else for (int j = 0; j < 3; ++j) k[j] = s.scale[3 * i + j];
  const float largest = most(k[0], most(k[1], k[2]));
  const float rz = 1.0f / p.z, size = (s.activated ? largest : expf(largest)) * rz;
  const float ex = cam.reach_x * size + cam.slack, ey = cam.reach_y * size + cam.slack;
  const float x = cam.fx * p.x * rz + cam.cx, y = cam.fy * p.y * rz + cam.cy;
  return x + ex < 0 || x - ex > cam.width || y + ey < 0 || y - ey > cam.height;
}

// What proj.camera holds: the camera, and which channels were clamped at 0 and pass no gradient on.
SPL_FN uint16_t camera_bits(int camera, const Screen& s) {
  return (uint16_t)(camera | (!(s.r > 0) << SPL_DARK_SHIFT) | (!(s.g > 0) << (SPL_DARK_SHIFT + 1)) | (!(s.b_ > 0) << (SPL_DARK_SHIFT + 2)));
}
SPL_FN int camera_of(uint16_t bits) { return bits & ((1 << SPL_DARK_SHIFT) - 1); }
SPL_FN Vec3 lit(uint16_t bits, const float* v) {
  return {bits >> SPL_DARK_SHIFT & 1 ? 0.0f : v[0], bits >> (SPL_DARK_SHIFT + 1) & 1 ? 0.0f : v[1], bits >> (SPL_DARK_SHIFT + 2) & 1 ? 0.0f : v[2]};
}

// The colour of a screen row. What is not sane hits no tile.
SPL_FN void paint(Vec3 color, bool direct_rgb, Screen& s) {
  s.r = direct_rgb ? color.x : clamp0(color.x);
  s.g = direct_rgb ? color.y : clamp0(color.y);
  s.b_ = direct_rgb ? color.z : clamp0(color.z);
  const bool sane = fabsf(color.x) <= SPL_COLOR_MAX && fabsf(color.y) <= SPL_COLOR_MAX && fabsf(color.z) <= SPL_COLOR_MAX;
  if (!sane) s.opacity = 0;
}

}  // namespace spl
