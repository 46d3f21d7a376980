// gaussian.h: one Gaussian of a Source: loading, a cheap cull, its colour on the screen. Shared by both backends.
#pragma once
#include "host.h"

namespace spl {

SPL_FN bool load(const Source& s, int64_t i, Gaussian& g) {
  const float *m = s.mean + 3 * i, *q = s.quat + 4 * i, *k = s.scale + 3 * i;
  g.mean = {m[0], m[1], m[2]};
  g.quat = {q[0], q[1], q[2], q[3]};
  g.scale = s.activated ? Vec3{k[0], k[1], k[2]} : Vec3{expf(k[0]), expf(k[1]), expf(k[2])};
  g.opacity = s.activated ? s.opacity[i] : sigmoid(s.opacity[i]);
  const float n2 = quat_norm2(g.quat);
  return n2 > 1e-20f && n2 < 1e20f;  // false for NaN
}

// Cheap and conservative: is the sphere of 3.34 sigma around the centre certainly off the image?
SPL_FN bool surely_outside(const Source& s, int64_t i, const Camera& cam, Vec3& p) {
  const float *m = s.mean + 3 * i, *k = s.scale + 3 * i;
  if (!project_center({m[0], m[1], m[2]}, cam, p)) return true;
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
