// math.h: the inline maths of the engine, one definition for the CPU loops and the CUDA kernels.
// Projection follows EWA splatting (Zwicker et al. 2001) as in 3D Gaussian Splatting (Kerbl et al. 2023); camera and
// clamping conventions are gsplat's. Every backward function is the exact derivative of the forward one beside it.
#pragma once
#include <cmath>
#include <cstdint>
#include "layout.h"

#if defined(__CUDACC__)
#define SPL_FN __host__ __device__ __forceinline__
#define SPL_UNROLL _Pragma("unroll")
#else
#define SPL_FN inline __attribute__((always_inline))
#define SPL_UNROLL
#endif

namespace spl {

struct Vec3 { float x, y, z; };
struct Mat3 { float m[9]; };  // row-major
SPL_FN Vec3 operator+(Vec3 a, Vec3 b) { return {a.x + b.x, a.y + b.y, a.z + b.z}; }
SPL_FN Vec3 operator-(Vec3 a, Vec3 b) { return {a.x - b.x, a.y - b.y, a.z - b.z}; }
SPL_FN Vec3 operator*(Vec3 a, float s) { return {a.x * s, a.y * s, a.z * s}; }
SPL_FN float dot(Vec3 a, Vec3 b) { return a.x * b.x + a.y * b.y + a.z * b.z; }
SPL_FN Vec3 cross(Vec3 a, Vec3 b) { return {a.y * b.z - a.z * b.y, a.z * b.x - a.x * b.z, a.x * b.y - a.y * b.x}; }
SPL_FN Vec3 mul(const Mat3& A, Vec3 v) {
  return {A.m[0] * v.x + A.m[1] * v.y + A.m[2] * v.z, A.m[3] * v.x + A.m[4] * v.y + A.m[5] * v.z, A.m[6] * v.x + A.m[7] * v.y + A.m[8] * v.z};
}
SPL_FN Vec3 mul_t(const Mat3& A, Vec3 v) {  // A^T v
  return {A.m[0] * v.x + A.m[3] * v.y + A.m[6] * v.z, A.m[1] * v.x + A.m[4] * v.y + A.m[7] * v.z, A.m[2] * v.x + A.m[5] * v.y + A.m[8] * v.z};
}
SPL_FN Mat3 mul(const Mat3& A, const Mat3& B) {
  Mat3 C;
  for (int i = 0; i < 3; ++i)
    for (int j = 0; j < 3; ++j) C.m[3 * i + j] = A.m[3 * i] * B.m[j] + A.m[3 * i + 1] * B.m[3 + j] + A.m[3 * i + 2] * B.m[6 + j];
  return C;
}
SPL_FN Mat3 mul_t(const Mat3& A, const Mat3& B) {  // A^T B
  Mat3 C;
  for (int i = 0; i < 3; ++i)
    for (int j = 0; j < 3; ++j) C.m[3 * i + j] = A.m[i] * B.m[j] + A.m[3 + i] * B.m[3 + j] + A.m[6 + i] * B.m[6 + j];
  return C;
}
#if defined(__CUDA_ARCH__)
SPL_FN float least(float a, float b) { return fminf(a, b); }
SPL_FN float most(float a, float b) { return fmaxf(a, b); }
#else  // fminf is a call on some CPUs. The first argument is the one that may be NaN: then the second is taken.
SPL_FN float least(float a, float b) { return a < b ? a : b; }
SPL_FN float most(float a, float b) { return a > b ? a : b; }
#endif
SPL_FN float between(float x, float low, float high) { return least(most(x, low), high); }
SPL_FN float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
SPL_FN bool finite(float x) { return fabsf(x) <= 3.402823466e38f; }  // false for NaN and infinity

// ---- camera ---------------------------------------------------------------------------------------------------------
struct Clamp { float x0, x1, y0, y1; };  // limits of t.x/t.z and t.y/t.z inside the Jacobian: 30 % beyond the image
struct Camera {
  Mat3 R;      // T_cam_world
  Vec3 t;
  Vec3 center; // of the camera, world
  float fx, fy, cx, cy, width, height;
  float blur, near_m;
  bool antialiased;
  Clamp clamp;
  float reach_x, reach_y, slack;  // pixels per (radius / z) and beside it, for surely_outside
};
inline Camera make_camera(const float* viewmat, const float* K, int width, int height, float blur, float near_m, bool antialiased) {
  Camera c;
  for (int i = 0; i < 3; ++i)
    for (int j = 0; j < 3; ++j) c.R.m[3 * i + j] = viewmat[4 * i + j];
  c.t = {viewmat[3], viewmat[7], viewmat[11]};
  c.center = mul_t(c.R, c.t) * -1.0f;
  c.fx = K[0]; c.fy = K[4]; c.cx = K[2]; c.cy = K[5];
  c.width = (float)width; c.height = (float)height;
  c.blur = blur; c.near_m = near_m; c.antialiased = antialiased;
  const float mx = 0.15f * c.width / c.fx, my = 0.15f * c.height / c.fy;
  c.clamp = {-c.cx / c.fx - mx, (c.width - c.cx) / c.fx + mx, -c.cy / c.fy - my, (c.height - c.cy) / c.fy + my};
  // the box is made with the clamped Jacobian; its norm is at most f/z * sqrt(1 + tan^2)
  const float tx = most(fabsf(c.clamp.x0), fabsf(c.clamp.x1)), ty = most(fabsf(c.clamp.y0), fabsf(c.clamp.y1));
  c.reach_x = 3.34f * c.fx * sqrtf(1 + tx * tx);
  c.reach_y = 3.34f * c.fy * sqrtf(1 + ty * ty);
  c.slack = 3.34f * sqrtf(blur) + 1.0f;
  return c;
}

// ---- rotation ---------------------------------------------------------------------------------------------------------
struct Quat { float w, x, y, z; };
SPL_FN float quat_norm2(Quat q) { return q.w * q.w + q.x * q.x + q.y * q.y + q.z * q.z; }
SPL_FN Mat3 rotation(Quat q) {  // of the normalised quaternion
  const float s = 1.0f / sqrtf(quat_norm2(q)), w = q.w * s, x = q.x * s, y = q.y * s, z = q.z * s;
  return {{1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y), 2 * (x * y + w * z), 1 - 2 * (x * x + z * z),
           2 * (y * z - w * x), 2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)}};
}
SPL_FN Quat rotation_bwd(Quat q, const Mat3& v) {  // v = dL/dR -> dL/dq through the normalisation
  const float s = 1.0f / sqrtf(quat_norm2(q)), w = q.w * s, x = q.x * s, y = q.y * s, z = q.z * s;
  const float* g = v.m;
  const Quat u = {2 * (x * (g[7] - g[5]) + y * (g[2] - g[6]) + z * (g[3] - g[1])),
                  2 * (-2 * x * (g[4] + g[8]) + y * (g[1] + g[3]) + z * (g[2] + g[6]) + w * (g[7] - g[5])),
                  2 * (x * (g[1] + g[3]) - 2 * y * (g[0] + g[8]) + z * (g[5] + g[7]) + w * (g[2] - g[6])),
                  2 * (x * (g[2] + g[6]) + y * (g[5] + g[7]) - 2 * z * (g[0] + g[4]) + w * (g[3] - g[1]))};
  const float along = u.w * w + u.x * x + u.y * y + u.z * z;
  return {(u.w - along * w) * s, (u.x - along * x) * s, (u.y - along * y) * s, (u.z - along * z) * s};
}

// ---- projection ---------------------------------------------------------------------------------------------------------
struct Gaussian { Vec3 mean; Quat quat; Vec3 scale; float opacity; };  // activated: scale in m, opacity in 0..1
struct Screen { float x, y, a, b, c, opacity, depth, r, g, b_; };      // conic [[a, b], [b, c]]; SPL_SCREEN_FLOATS
static_assert(sizeof(Screen) == SPL_SCREEN_FLOATS * 4, "one row of proj.screen");
struct Box { float x0, y0, x1, y1; };                                   // pixels

struct Projection {  // what forward and backward share
  Vec3 p;            // camera frame
  float tx, ty;      // p.x, p.y after the clamp
  bool clamp_x, clamp_y;
  Mat3 R, W;         // rotation of the Gaussian; R_cam R S
  float A[6];        // J W, 2x3
  float cxx, cxy, cyy;
};

SPL_FN bool project_center(Vec3 mean, const Camera& cam, Vec3& p) {
  p = mul(cam.R, mean) + cam.t;
  return p.z > cam.near_m && finite(p.x) && finite(p.y) && finite(p.z);
}

SPL_FN void project_covariance(const Gaussian& g, const Camera& cam, Projection& o) {
  const float rz = 1.0f / o.p.z;
  const Clamp lim = cam.clamp;
  const float ux = o.p.x * rz, uy = o.p.y * rz;
  o.clamp_x = ux < lim.x0 || ux > lim.x1;
  o.clamp_y = uy < lim.y0 || uy > lim.y1;
  o.tx = o.p.z * between(ux, lim.x0, lim.x1);
  o.ty = o.p.z * between(uy, lim.y0, lim.y1);
  o.R = rotation(g.quat);
  Mat3 M = o.R;
  for (int i = 0; i < 3; ++i) { M.m[3 * i] *= g.scale.x; M.m[3 * i + 1] *= g.scale.y; M.m[3 * i + 2] *= g.scale.z; }
  o.W = mul(cam.R, M);
  const float j00 = cam.fx * rz, j02 = -cam.fx * o.tx * rz * rz, j11 = cam.fy * rz, j12 = -cam.fy * o.ty * rz * rz;
  for (int k = 0; k < 3; ++k) {
    o.A[k] = j00 * o.W.m[k] + j02 * o.W.m[6 + k];
    o.A[3 + k] = j11 * o.W.m[3 + k] + j12 * o.W.m[6 + k];
  }
  o.cxx = o.A[0] * o.A[0] + o.A[1] * o.A[1] + o.A[2] * o.A[2] + cam.blur;
  o.cxy = o.A[0] * o.A[3] + o.A[1] * o.A[4] + o.A[2] * o.A[5];
  o.cyy = o.A[3] * o.A[3] + o.A[4] * o.A[4] + o.A[5] * o.A[5] + cam.blur;
}

// The 2D mip filter (Yu et al. 2024, Mip-Splatting, eq. 9): what the blur spreads over more pixels is made fainter, by the factor sqrt(det(cov) / det(cov + blur I)).
// det(cov) of cov = A A^T is the square of the cross product of its rows: never negative, and exact for a splat that is a line.
// det(cov + blur I) is a difference, in which rounding takes more than all of a line: the share of light ends at 1.
SPL_FN float sharp_det(Vec3 row0, Vec3 row1) { const Vec3 n = cross(row0, row1); return dot(n, n); }
SPL_FN float light_kept(float share) { return share > 1.0f ? 1.0f : sqrtf(share); }  // share: of the determinants; NaN stays

// Twice the exponent at which alpha falls to 1/255: points with d^T conic d above it are not drawn.
SPL_FN float cutoff(float opacity) { return 2.0f * logf(opacity * (1.0f / SPL_ALPHA_MIN)); }

// Everything of the screen row but the colour, and the float box of the pixels that can reach alpha 1/255.
// False: not visible. Anything non-finite is not visible.
SPL_FN bool project(const Gaussian& g, const Camera& cam, Screen& s, Box& box) {
  Projection o;
  if (!(g.opacity >= SPL_ALPHA_MIN) || !finite(g.opacity) || !project_center(g.mean, cam, o.p)) return false;
  const float rz = 1.0f / o.p.z;
  s.x = cam.fx * o.p.x * rz + cam.cx;
  s.y = cam.fy * o.p.y * rz + cam.cy;
  const float smax = most(g.scale.x, most(g.scale.y, g.scale.z));
  if (!(smax <= 1e15f)) return false;
  project_covariance(g, cam, o);
  const float det = o.cxx * o.cyy - o.cxy * o.cxy;
  if (!(det > 0) || !finite(o.cxx * o.cyy)) return false;
  const float id = 1.0f / det;
  s.a = o.cyy * id; s.b = -o.cxy * id; s.c = o.cxx * id;
  s.opacity = g.opacity; s.depth = o.p.z;
  if (cam.antialiased) {
    s.opacity *= light_kept(sharp_det({o.A[0], o.A[1], o.A[2]}, {o.A[3], o.A[4], o.A[5]}) * id);
    if (!(s.opacity >= SPL_ALPHA_MIN)) return false;
  }
  const float q = cutoff(least(s.opacity, 1.0f)), ex = sqrtf(q * o.cxx), ey = sqrtf(q * o.cyy);
  box = {s.x - ex, s.y - ey, s.x + ex, s.y + ey};
  if (!(finite(box.x0) && finite(box.x1) && finite(box.y0) && finite(box.y1) && finite(s.a) && finite(s.b) && finite(s.c))) return false;
  return least(box.x1, cam.width) > most(box.x0, 0.0f) && least(box.y1, cam.height) > most(box.y0, 0.0f);
}

struct GaussianGrad { Vec3 mean; Quat quat; Vec3 scale; float opacity; };  // d/d activated values
struct CameraGrad { Mat3 R; Vec3 t; };

// The camera centre is that of the inverse of T_cam_world, c = -R^-1 t; v_mean: dL/d mean through the viewing direction = -dL/dc.
SPL_FN void center_bwd(const Camera& cam, Vec3 v_mean, CameraGrad& out) {
  const Vec3 v = mul(cam.R, v_mean);
  const float rows[3] = {v.x, v.y, v.z}, c[3] = {cam.center.x, cam.center.y, cam.center.z};
  for (int i = 0; i < 3; ++i)
    for (int j = 0; j < 3; ++j) out.R.m[3 * i + j] += rows[i] * c[j];
  out.t = out.t + v;
}

// v: gradients of the screen row in its order (x y a b c opacity depth ...). Adds to `out` and, if given, to `v_cam`. MIP: that of the camera,
// known when it is compiled: the filter's derivative takes registers that a kernel without it needs for other things.
template <bool MIP> SPL_FN void project_bwd(const Gaussian& g, const Camera& cam, const float* v, GaussianGrad& out, CameraGrad* v_cam) {
  Projection o;
  project_center(g.mean, cam, o.p);
  project_covariance(g, cam, o);
  const float rz = 1.0f / o.p.z, rz2 = rz * rz, rz3 = rz2 * rz;
  const float id = 1.0f / (o.cxx * o.cyy - o.cxy * o.cxy);
  const float a = o.cyy * id, b = -o.cxy * id, c = o.cxx * id;
  // conic = cov^-1: dL/dcov = -X V X with V = [[va, vb/2], [vb/2, vc]]
  const float va = v[2], vb = 0.5f * v[3], vc = v[4];
  const float t00 = a * va + b * vb, t01 = a * vb + b * vc, t10 = b * va + c * vb, t11 = b * vb + c * vc;
  float gxx = -(t00 * a + t01 * b), gxy = -(t00 * b + t01 * c), gyy = -(t10 * b + t11 * c), v_opacity = v[5];
  if constexpr (MIP) {  // d factor / d cov = factor / 2 * (cov^-1 - (cov + blur I)^-1)
    const Vec3 row0 = {o.A[0], o.A[1], o.A[2]}, row1 = {o.A[3], o.A[4], o.A[5]};
    const float det = sharp_det(row0, row1), factor = light_kept(det * id), h = det * id > 1.0f ? 0.0f : 0.5f * g.opacity * v[5] * factor, k = h / det;  // det > 0: what is drawn has alpha
    gxx += k * dot(row1, row1) - h * a; gxy -= k * dot(row0, row1) + h * b; gyy += k * dot(row0, row0) - h * c;
    v_opacity *= factor;
  }
  float vA[6];  // cov = A A^T
  for (int k = 0; k < 3; ++k) {
    vA[k] = 2 * (gxx * o.A[k] + gxy * o.A[3 + k]);
    vA[3 + k] = 2 * (gxy * o.A[k] + gyy * o.A[3 + k]);
  }
  const float j00 = cam.fx * rz, j02 = -cam.fx * o.tx * rz2, j11 = cam.fy * rz, j12 = -cam.fy * o.ty * rz2;
  Mat3 vW;
  float v00 = 0, v02 = 0, v11 = 0, v12 = 0;  // dL/dJ
  for (int k = 0; k < 3; ++k) {
    vW.m[k] = j00 * vA[k];
    vW.m[3 + k] = j11 * vA[3 + k];
    vW.m[6 + k] = j02 * vA[k] + j12 * vA[3 + k];
    v00 += vA[k] * o.W.m[k]; v02 += vA[k] * o.W.m[6 + k];
    v11 += vA[3 + k] * o.W.m[3 + k]; v12 += vA[3 + k] * o.W.m[6 + k];
  }
  Vec3 vp = {cam.fx * rz * v[0], cam.fy * rz * v[1], v[6]};
  vp.z -= (cam.fx * o.p.x * v[0] + cam.fy * o.p.y * v[1]) * rz2;
  vp.z += -cam.fx * rz2 * v00 - cam.fy * rz2 * v11 + 2 * cam.fx * o.tx * rz3 * v02 + 2 * cam.fy * o.ty * rz3 * v12;
  if (o.clamp_x) vp.z -= cam.fx * o.tx * rz3 * v02; else vp.x -= cam.fx * rz2 * v02;
  if (o.clamp_y) vp.z -= cam.fy * o.ty * rz3 * v12; else vp.y -= cam.fy * rz2 * v12;
  out.mean = out.mean + mul_t(cam.R, vp);
  const Mat3 vM = mul_t(cam.R, vW);
  const float s[3] = {g.scale.x, g.scale.y, g.scale.z};
  float vs[3] = {0, 0, 0};
  Mat3 vR;
  for (int i = 0; i < 3; ++i)
    for (int j = 0; j < 3; ++j) { vs[j] += vM.m[3 * i + j] * o.R.m[3 * i + j]; vR.m[3 * i + j] = vM.m[3 * i + j] * s[j]; }
  const Quat vq = rotation_bwd(g.quat, vR);
  out.quat = {out.quat.w + vq.w, out.quat.x + vq.x, out.quat.y + vq.y, out.quat.z + vq.z};
  out.scale = out.scale + Vec3{vs[0], vs[1], vs[2]};
  out.opacity += v_opacity;
  if (!v_cam) return;
  const float pm[3] = {g.mean.x, g.mean.y, g.mean.z}, vpa[3] = {vp.x, vp.y, vp.z};
  for (int i = 0; i < 3; ++i)
    for (int j = 0; j < 3; ++j) {
      float r = vpa[i] * pm[j];
      for (int k = 0; k < 3; ++k) r += vW.m[3 * i + k] * o.R.m[3 * j + k] * s[k];
      v_cam->R.m[3 * i + j] += r;
    }
  v_cam->t = v_cam->t + vp;
}
SPL_FN void project_bwd(const Gaussian& g, const Camera& cam, const float* v, GaussianGrad& out, CameraGrad* v_cam) {
  if (cam.antialiased) project_bwd<true>(g, cam, v, out, v_cam); else project_bwd<false>(g, cam, v, out, v_cam);
}

// ---- AABB16: four 16-bit edges, uniform steps of [0, extent]; the decoded box contains the float box -----------------
struct Box16 { uint16_t x0, y0, x1, y1; };
SPL_FN float decode16(uint16_t q, float extent) { return (float)q * (extent * (1.0f / 65535.0f)); }
SPL_FN uint16_t encode16_down(float v, float extent) {
  float q = floorf(v * (65535.0f / extent));
  int i = q >= 65535.0f ? 65535 : q > 0.0f ? (int)q : 0;
  while (i > 0 && decode16((uint16_t)i, extent) > v) --i;  // floor alone can lose one ulp
  return (uint16_t)i;
}
SPL_FN uint16_t encode16_up(float v, float extent) {
  float q = ceilf(v * (65535.0f / extent));
  int i = q >= 65535.0f ? 65535 : q > 0.0f ? (int)q : 0;
  while (i < 65535 && decode16((uint16_t)i, extent) < v) ++i;
  return (uint16_t)i;
}
SPL_FN Box16 encode_box(const Box& b, float width, float height) {
  return {encode16_down(b.x0, width), encode16_down(b.y0, height), encode16_up(b.x1, width), encode16_up(b.y1, height)};
}
SPL_FN Box decode_box(Box16 q, float width, float height) {
  return {decode16(q.x0, width), decode16(q.y0, height), decode16(q.x1, width), decode16(q.y1, height)};
}
SPL_FN bool empty(Box16 q) { return q.x1 <= q.x0 || q.y1 <= q.y0; }

// ---- tiles -----------------------------------------------------------------------------------------------------------------
// Smallest d^T conic d over the rectangle [x0,x1] x [y0,y1], relative to the centre of the Gaussian. The minimum of a
// convex form over a box that excludes its centre lies on an edge that faces the centre.
SPL_FN float nearest_form(const Screen& s, float x0, float y0, float x1, float y1) {
  const float ax = x0 - s.x, bx = x1 - s.x, ay = y0 - s.y, by = y1 - s.y;
  const bool in_x = ax <= 0 && bx >= 0, in_y = ay <= 0 && by >= 0;
  if (in_x && in_y) return 0;
  float best = 3.4e38f;
  if (!in_x) {
    const float dx = ax > 0 ? ax : bx, dy = between(-s.b * dx / s.c, ay, by);
    best = least(s.a * dx * dx + 2 * s.b * dx * dy + s.c * dy * dy, best);
  }
  if (!in_y) {
    const float dy = ay > 0 ? ay : by, dx = between(-s.b * dy / s.a, ax, bx);
    best = least(s.a * dx * dx + 2 * s.b * dx * dy + s.c * dy * dy, best);
  }
  return best;
}
struct TileRange { int x0, y0, x1, y1; };  // tiles whose pixel centres the box reaches; x1, y1 exclusive
SPL_FN TileRange tile_range(const Box& b, int tiles_x, int tiles_y) {
  const float inv = 1.0f / SPL_TILE_PX;
  TileRange r = {(int)floorf(ceilf(b.x0 - 0.5f) * inv), (int)floorf(ceilf(b.y0 - 0.5f) * inv),
                 (int)floorf(floorf(b.x1 - 0.5f) * inv) + 1, (int)floorf(floorf(b.y1 - 0.5f) * inv) + 1};
  r.x0 = r.x0 < 0 ? 0 : r.x0; r.y0 = r.y0 < 0 ? 0 : r.y0;
  r.x1 = r.x1 > tiles_x ? tiles_x : r.x1; r.y1 = r.y1 > tiles_y ? tiles_y : r.y1;
  return r;
}
// The ellipse alpha >= 1/255 against the pixel centres of one tile, with a hair of slack: the rasteriser tests alpha again.
SPL_FN bool tile_hit(const Screen& s, float q, int tx, int ty, float width, float height) {
  const float x0 = tx * (float)SPL_TILE_PX + 0.5f, y0 = ty * (float)SPL_TILE_PX + 0.5f;
  const float x1 = least(x0 + SPL_TILE_PX - 1, width - 0.5f), y1 = least(y0 + SPL_TILE_PX - 1, height - 0.5f);
  return nearest_form(s, x0, y0, x1, y1) <= q * 1.0001f + 1e-4f;
}
SPL_FN uint32_t depth_bits(float depth) {  // order-preserving for positive and negative floats
  union { float f; uint32_t u; } b = {depth};
  return b.u ^ ((b.u >> 31) ? 0xffffffffu : 0x80000000u);
}

// ---- spherical harmonics (real, degree 0..3; signs and constants of Kerbl et al. 2023) ---------------------------------
constexpr float SH0 = 0.28209479177387814f;
template <class F> SPL_FN void sh_basis(int degree, float x, float y, float z, F&& put) {  // put(k, value, d/dx, d/dy, d/dz)
  put(0, SH0, 0.f, 0.f, 0.f);
  if (degree < 1) return;
  const float c1 = 0.4886025119029199f;
  put(1, -c1 * y, 0.f, -c1, 0.f); put(2, c1 * z, 0.f, 0.f, c1); put(3, -c1 * x, -c1, 0.f, 0.f);
  if (degree < 2) return;
  const float xx = x * x, yy = y * y, zz = z * z, xy = x * y, yz = y * z, xz = x * z;
  const float c2 = 1.0925484305920792f, c20 = 0.31539156525252005f, c22 = 0.5462742152960396f;
  put(4, c2 * xy, c2 * y, c2 * x, 0.f);
  put(5, -c2 * yz, 0.f, -c2 * z, -c2 * y);
  put(6, c20 * (2 * zz - xx - yy), -2 * c20 * x, -2 * c20 * y, 4 * c20 * z);
  put(7, -c2 * xz, -c2 * z, 0.f, -c2 * x);
  put(8, c22 * (xx - yy), 2 * c22 * x, -2 * c22 * y, 0.f);
  if (degree < 3) return;
  const float c33 = 0.5900435899266435f, c32 = 2.890611442640554f, c31 = 0.4570457994644658f, c30 = 0.3731763325901154f, c3b = 1.445305721320277f;
  put(9, -c33 * y * (3 * xx - yy), -6 * c33 * xy, -c33 * (3 * xx - 3 * yy), 0.f);
  put(10, c32 * xy * z, c32 * yz, c32 * xz, c32 * xy);
  put(11, -c31 * y * (4 * zz - xx - yy), 2 * c31 * xy, -c31 * (4 * zz - xx - 3 * yy), -8 * c31 * yz);
  put(12, c30 * z * (2 * zz - 3 * xx - 3 * yy), -6 * c30 * xz, -6 * c30 * yz, c30 * (6 * zz - 3 * xx - 3 * yy));
  put(13, -c31 * x * (4 * zz - xx - yy), -c31 * (4 * zz - 3 * xx - yy), 2 * c31 * xy, -8 * c31 * xz);
  put(14, c3b * z * (xx - yy), 2 * c3b * xz, -2 * c3b * yz, c3b * (xx - yy));
  put(15, -c33 * x * (xx - 3 * yy), -c33 * (3 * xx - 3 * yy), 6 * c33 * xy, 0.f);
}
SPL_FN Vec3 sh_direction(Vec3 mean, Vec3 center, float& inv_norm) {
  const Vec3 d = mean - center;
  inv_norm = 1.0f / sqrtf(most(dot(d, d), 1e-24f));
  return d * inv_norm;
}
SPL_FN Vec3 sh_color(int degree, const float* sh, Vec3 mean, Vec3 center) {  // before the clamp at 0; sh [K,3]
  float inv;
  const Vec3 d = sh_direction(mean, center, inv);
  Vec3 c = {0.5f, 0.5f, 0.5f};
  sh_basis(degree, d.x, d.y, d.z, [&](int k, float b, float, float, float) { c = c + Vec3{sh[3 * k], sh[3 * k + 1], sh[3 * k + 2]} * b; });
  return c;
}
// v: dL/d colour before the clamp. Adds to v_sh [K,3]; returns dL/d mean (= -dL/d camera centre).
SPL_FN Vec3 sh_color_bwd(int degree, const float* sh, Vec3 mean, Vec3 center, Vec3 v, float* v_sh) {
  float inv;
  const Vec3 d = sh_direction(mean, center, inv);
  Vec3 vd = {0, 0, 0};
  sh_basis(degree, d.x, d.y, d.z, [&](int k, float b, float bx, float by, float bz) {
    v_sh[3 * k] += b * v.x; v_sh[3 * k + 1] += b * v.y; v_sh[3 * k + 2] += b * v.z;
    const float along = sh[3 * k] * v.x + sh[3 * k + 1] * v.y + sh[3 * k + 2] * v.z;
    vd = vd + Vec3{bx, by, bz} * along;
  });
  return (vd - d * dot(vd, d)) * inv;
}
SPL_FN float clamp0(float x) { return x > 0 ? x : 0; }  // also removes NaN

// ---- Adam (Kingma & Ba 2015), bias-corrected with the Gaussian's own step count ------------------------------------------
struct AdamStep { float beta1, beta2, eps, c1, c2; };  // c1 = 1/(1-beta1^t), c2 = 1/(1-beta2^t)
SPL_FN float adam_quotient(float x, float v, const AdamStep& a) {  // x / (sqrt(v c2) + eps)
#if defined(__CUDA_ARCH__)  // to 2 ulp, at a tenth of the instructions
  float root;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(v * a.c2));
  return __fdividef(x, root + a.eps);
#else
  return x / (sqrtf(v * a.c2) + a.eps);
#endif
}
SPL_FN void adam(float& x, float& m, float& v, float g, float lr, const AdamStep& a) {
  m = a.beta1 * m + (1 - a.beta1) * g;
  v = a.beta2 * v + (1 - a.beta2) * g * g;
  x -= adam_quotient(lr * (m * a.c1), v, a);
}
// SH coefficients: one second moment a degree l, of the mean of its 3 (2 l + 1) squares g2. Returns what multiplies their first moments,
// or, from degree 1 on, their gradients: these have none. A first moment spreads a gradient over the next steps and keeps its sum; with steps
// as small as theirs the map is the same.
SPL_FN float adam_band(float& v, float g2_sum, int l, float lr, const AdamStep& a) {
  v = a.beta2 * v + (1 - a.beta2) * (g2_sum * (1.0f / (3 * (2 * l + 1))));
  return adam_quotient(l ? lr : lr * a.c1, v, a);
}
SPL_FN constexpr int band_begin(int l) { return 3 * l * l; }  // the first float of degree l in [K,3]
SPL_FN int band_of(int k) { return (k >= band_begin(1)) + (k >= band_begin(2)) + (k >= band_begin(3)); }  // the degree of float k

// ---- position noise (Kheradmand et al. 2024, eq. 8): covariance * normal * rate, for nearly transparent Gaussians only --------
SPL_FN uint32_t mixed(uint32_t x) {  // lowbias32 (Wellons 2018)
  x ^= x >> 16; x *= 0x7feb352du;
  x ^= x >> 15; x *= 0x846ca68bu;
  return x ^ x >> 16;
}
SPL_FN uint32_t random_key(uint32_t seed, uint32_t gaussian, uint32_t step) { return mixed(seed ^ mixed(gaussian ^ mixed(step))); }  // of one step of one Gaussian
SPL_FN Vec3 normals(uint32_t seed, uint32_t gaussian, uint32_t step) {  // Box and Muller
  const uint32_t key = random_key(seed, gaussian, step);
  float r[2], angle[2];
  for (int k = 0; k < 2; ++k) {
    r[k] = sqrtf(-2 * logf(((mixed(key + 2 * k) >> 8) + 0.5f) * (1.0f / 16777216.0f)));
    angle[k] = 6.283185307179586f * ((mixed(key + 2 * k + 1) >> 8) * (1.0f / 16777216.0f));
  }
  return {r[0] * cosf(angle[0]), r[0] * sinf(angle[0]), r[1] * cosf(angle[1])};
}
SPL_FN bool noisy(float opacity) { return opacity < 0.15f; }  // beyond it the factor below is under 1e-6
SPL_FN Vec3 position_noise(const Gaussian& g, float rate, uint32_t seed, uint32_t gaussian, uint32_t step) {
  const Mat3 R = rotation(g.quat);
  Vec3 n = mul_t(R, normals(seed, gaussian, step));
  n = {n.x * g.scale.x * g.scale.x, n.y * g.scale.y * g.scale.y, n.z * g.scale.z * g.scale.z};
  return mul(R, n) * (rate * sigmoid(-100.0f * (g.opacity - 0.005f)));
}

// ---- relocation: opacity and scales of a Gaussian that is drawn `times` times in place of once ----------------------------
// (Kheradmand et al. 2024, 3DGS as Markov Chain Monte Carlo, eq. 9; more than 51 copies count as 51)
SPL_FN void relocate(float& logit_opacity, float* log_scale, int times, float min_opacity) {
  const int n = times < 51 ? times : 51;
  const float opaque = least(sigmoid(logit_opacity), 0.999f);
  const double o = opaque, p = 1 - pow(1 - o, 1.0 / n);
  double sum = 0;
  for (int i = 1; i <= n; ++i) {
    double binomial = 1, power = p;
    for (int k = 0; k < i; ++k) {
      sum += binomial * (k % 2 ? -1 : 1) * power / sqrt(k + 1.0);
      binomial *= (double)(i - 1 - k) / (k + 1);
      power *= p;
    }
  }
  const float opacity = most((float)p, min_opacity), shift = logf((float)(o / sum));
  logit_opacity = logf(opacity / (1 - opacity));
  for (int k = 0; k < 3; ++k) log_scale[k] += shift;
}

}  // namespace spl
