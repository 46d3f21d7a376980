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
  const float largest = fmaxf(k[0], fmaxf(k[1], k[2]));
  const float r = 3.34f * (s.activated ? largest : expf(largest));
  // the box is made with the clamped Jacobian; its norm is at most f/z * sqrt(1 + tan^2)
  const Clamp lim = jacobian_clamp(cam);
  const float tx = fmaxf(fabsf(lim.x0), fabsf(lim.x1)), ty = fmaxf(fabsf(lim.y0), fabsf(lim.y1));
  const float rz = 1.0f / p.z, slack = 3.34f * sqrtf(cam.blur) + 1.0f;
  const float ex = cam.fx * rz * r * sqrtf(1 + tx * tx) + slack, ey = cam.fy * rz * r * sqrtf(1 + ty * ty) + slack;
  const float x = cam.fx * p.x * rz + cam.cx, y = cam.fy * p.y * rz + cam.cy;
  return x + ex < 0 || x - ex > cam.width || y + ey < 0 || y - ey > cam.height;
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
