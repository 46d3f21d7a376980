// sweep.h: depth of one image from others with known poses: a plane sweep (Collins 1996) with semi-global aggregation (Hirschmueller 2008), and the
// check that the depths of several images agree. Of both backends: constants, and what happens at one pixel. The cost of a plane at a pixel is 1 - ZNCC
// of 5x5 windows, which knows neither gain nor offset of the exposure, averaged over the better half of the views, which leaves out those that do not
// see the surface. Sums are integers, so that nothing depends on their order; the backends differ by the float rounding of the warp and of ZNCC alone.
#pragma once
#include "math.h"
#include "spirula.h"

namespace spl {

constexpr int R = 2, N = (2 * R + 1) * (2 * R + 1);  // half of the window, its pixels
constexpr int COST_MAX = 254, UNSEEN = 255;          // of one view: ZNCC <= 0; the pixel is outside of it
constexpr float NOISE = 2.0f;                        // levels: variance of an image that is no texture
constexpr float FLOOR = N * N * NOISE * NOISE;       // .. in the units of N * sum of squares - sum^2
constexpr int P1 = 16, P2 = 96;                      // a step of one plane, of more, where the image has no edge
constexpr uint16_t FAR = 0x3fff;                     // more than any path costs
constexpr float BACK_PX = 2.0f;                      // by which a depth that agrees may miss its pixel on the way back

// ---- conversions: CUDA makes them at a part of the rate of additions; adding 2^23 needs none -----------------------------------------------
struct Whole { int i; float f; };
#if defined(__CUDA_ARCH__)
constexpr float TWO_23 = 8388608.0f;
constexpr uint32_t BITS_23 = 0x4b000000u;  // of that; an integer below it is added to the bits
SPL_FN Whole whole(float x) {
  const float up = __fadd_rz(x, TWO_23);
  return {(int)(__float_as_uint(up) - BITS_23), up - TWO_23};
}
SPL_FN float byte_of(uint32_t word, int k) { return __uint_as_float(__byte_perm(word, BITS_23, 0x7440 + k)) - TWO_23; }
SPL_FN float inverse(float x) { float y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }  // to 1 ulp, as the next
SPL_FN float over_root(float x, float y) { float r; asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(y)); return x * r; }
#else
SPL_FN Whole whole(float x) { return {(int)x, (float)(int)x}; }  // of 0 <= x < 2^22
SPL_FN float byte_of(uint32_t word, int k) { return (float)(int)(word >> 8 * k & 255); }
SPL_FN float inverse(float x) { return 1.0f / x; }
SPL_FN float over_root(float x, float y) { return x / sqrtf(y); }
#endif

// ---- warping -----------------------------------------------------------------------------------------------------------
struct Warp {  // pixel (x, y) of the reference at inverse depth w -> (A (x, y, 1) + b w), homogeneous
  float A[9], b[3];
  int width, height;
};

inline Warp warp_of(const spl_photo& ref, const spl_photo& view) {
  const float *K = view.K, *k = ref.K, *T = view.T_photo_ref;
  Warp out;
  for (int c = 0; c < 4; ++c) {
    const float X = T[c], Y = T[4 + c], Z = T[8 + c];
    const float column[3] = {K[0] * X + K[1] * Y + K[2] * Z, K[4] * Y + K[5] * Z, Z};
    for (int r = 0; r < 3; ++r) (c < 3 ? out.A[3 * r + c] : out.b[r]) = column[r];
  }
  for (int r = 0; r < 3; ++r) {  // times the inverse of k
    float* a = out.A + 3 * r;
    const float x = a[0] / k[0], y = (a[1] - x * k[1]) / k[4];
    a[2] -= x * k[2] + y * k[5]; a[0] = x; a[1] = y;
  }
  out.width = view.width; out.height = view.height;
  return out;
}

SPL_FN float inverse_depth(const spl_sweep_params& p, float plane) { return p.min_inv + (p.max_inv - p.min_inv) * plane / (p.n_planes - 1); }

// The four taps of the bilinear sample at a pixel in one word: one gather instead of four.
SPL_FN uint32_t quad_at(const uint8_t* gray, int width, int height, int x, int y) {
  const uint8_t *a = gray + (int64_t)y * width, *b = y + 1 < height ? a + width : a;
  const int r = x + 1 < width ? x + 1 : x;
  return a[x] | a[r] << 8 | b[x] << 16 | (uint32_t)b[r] << 24;
}

SPL_FN Vec3 warp_row(const Warp& m, float w, float v) {  // of the row at v, but for the part of x: + A[0, 3, 6] u
  return {m.A[1] * v + m.A[2] + m.b[0] * w, m.A[4] * v + m.A[5] + m.b[1] * w, m.A[7] * v + m.A[8] + m.b[2] * w};
}
SPL_FN Vec3 warp_column(const Warp& m, float w, float u) {  // of the column at u, but for the part of y: + A[1, 4, 7] v
  return {m.A[0] * u + m.A[2] + m.b[0] * w, m.A[3] * u + m.A[5] + m.b[1] * w, m.A[6] * u + m.A[8] + m.b[2] * w};
}

// The level of the view, of those quads, at a homogeneous point. in: does the view see it? If not, the level is one at its edge.
SPL_FN int warped(const Warp& m, const uint32_t* quad, Vec3 p, bool& in) {
  const float inv = inverse(p.z), px = p.x * inv - 0.5f, py = p.y * inv - 0.5f;
  const float cx = least(most(px, 0.0f), m.width - 1.0f), cy = least(most(py, 0.0f), m.height - 1.0f);
  const Whole ix = whole(cx), iy = whole(cy);
  const float a = cx - ix.f, b = cy - iy.f;
  const uint32_t q = quad[iy.i * m.width + ix.i];
  const float t00 = byte_of(q, 0), t01 = byte_of(q, 1), t10 = byte_of(q, 2), t11 = byte_of(q, 3);
  const float top = t00 + a * (t01 - t00), low = t10 + a * (t11 - t10);
  in = (p.z > 0.0f) & (cx == px) & (cy == py);
  return whole(top + b * (low - top) + 0.5f).i;
}

// ---- cost --------------------------------------------------------------------------------------------------------------
// Of two windows: covariance and variances in the units of FLOOR, which those of the variances contain.
SPL_FN int cost_of(int cov, float var_a, float var_b) {
  const float ncc = over_root((float)cov, var_a * var_b);
  return whole(COST_MAX * (1.0f - most(ncc, 0.0f)) + 0.5f).i;
}
SPL_FN float variance(int sum, int squares) { return (float)(N * squares - sum * sum) + FLOOR; }
SPL_FN int mean_cost(int sum, int n) { return (int)((float)sum / n + 0.5f); }

// ---- aggregation and choice ------------------------------------------------------------------------------------------------
SPL_FN int jump_at(int a, int b) {  // what depth pays to jump between pixels of these levels: it may where the image does
  const int edge = a > b ? a - b : b - a, cost = P2 * 8 / (8 + edge);
  return cost > P1 + 8 ? cost : P1 + 8;
}

struct Choice { float depth_m, confidence; };  // 0: the images do not say

// k: the best plane of a pixel by its sums [planes] over the paths, second: the best of those not beside it; raw: its own costs [planes].
SPL_FN Choice choice(const spl_sweep_params& p, int k, int second, const uint16_t* sum, const uint8_t* raw) {
  if (k == 0 || k == p.n_planes - 1) return {0, 0};  // it may lie beyond the range
  const float ncc = 1.0f - raw[k] / (float)COST_MAX, margin = (second - sum[k]) / (4.0f * COST_MAX);
  if (ncc < p.min_ncc || margin < p.min_margin) return {0, 0};
  // paths prefer whole planes and pull towards neighbours: the part of a plane is that of the pixel's own costs, where they have their valley here
  float a = raw[k - 1], b = raw[k], d = raw[k + 1];
  if (b > a || b > d) { a = sum[k - 1]; b = sum[k]; d = sum[k + 1]; }
  const float bend = a + d - 2 * b;
  if (!(bend > 0)) return {0, 0};
  const float w = inverse_depth(p, k + between(0.5f * (a - d) / bend, -0.5f, 0.5f));
  if (!(w > 0)) return {0, 0};
  return {1 / w, ncc * least(1.0f, margin * 4)};
}

// ---- agreement -----------------------------------------------------------------------------------------------------------
struct DepthPhoto {
  const float* depth;
  int width, height;
  float K[9], T[12];  // T_photo_ref; not of the reference itself
};
inline DepthPhoto depth_photo(const spl_photo& p, const float* depth) {
  DepthPhoto out{depth, p.width, p.height, {}, {}};
  for (int k = 0; k < 9; ++k) out.K[k] = p.K[k];
  for (int k = 0; p.T_photo_ref && k < 12; ++k) out.T[k] = p.T_photo_ref[k];
  return out;
}

SPL_FN Vec3 at_pixel(const float* K, float u, float v, float z) {
  const float y = (v - K[5]) / K[4];
  return {((u - K[2]) - K[1] * y) / K[0] * z, y * z, z};
}
SPL_FN Vec3 moved(const float* T, Vec3 p) {
  return {T[0] * p.x + T[1] * p.y + T[2] * p.z + T[3], T[4] * p.x + T[5] * p.y + T[6] * p.z + T[7], T[8] * p.x + T[9] * p.y + T[10] * p.z + T[11]};
}
SPL_FN Vec3 moved_back(const float* T, Vec3 p) {
  const float x = p.x - T[3], y = p.y - T[7], z = p.z - T[11];
  return {T[0] * x + T[4] * y + T[8] * z, T[1] * x + T[5] * y + T[9] * z, T[2] * x + T[6] * y + T[10] * z};
}

// The depth that the view knows at pixel (x, y) of the reference, of depth z there, in the reference's camera; 0: none that agrees.
SPL_FN float seen_from(const DepthPhoto& ref, const DepthPhoto& view, int x, int y, float z, float tolerance) {
  const Vec3 p = moved(view.T, at_pixel(ref.K, x + 0.5f, y + 0.5f, z));
  if (!(p.z > 0)) return 0;
  const float u = (view.K[0] * p.x + view.K[1] * p.y) / p.z + view.K[2], v = view.K[4] * p.y / p.z + view.K[5];
  if (!(u >= 0 && v >= 0 && u < view.width && v < view.height)) return 0;
  const float there = view.depth[(int64_t)v * view.width + (int)u];
  if (!(there > 0)) return 0;
  const Vec3 q = moved_back(view.T, at_pixel(view.K, u, v, there));
  if (!(q.z > 0)) return 0;
  const float du = (ref.K[0] * q.x + ref.K[1] * q.y) / q.z + ref.K[2] - (x + 0.5f), dv = ref.K[4] * q.y / q.z + ref.K[5] - (y + 0.5f);
  return du * du + dv * dv > BACK_PX * BACK_PX || !(fabsf(q.z - z) <= tolerance * z) ? 0 : q.z;
}

// The harmonic mean of the reference's depth and those that agree with it, 0 where none does; and how many do.
SPL_FN float agreed(const DepthPhoto& ref, const DepthPhoto* views, int n_views, int x, int y, float tolerance, uint8_t& count) {
  const float z = ref.depth[(int64_t)y * ref.width + x];
  float sum = 1 / z;
  int n = 0;
  for (int j = 0; j < n_views && z > 0; ++j) {
    const float there = seen_from(ref, views[j], x, y, z, tolerance);
    if (there > 0) { sum += 1 / there; ++n; }
  }
  count = (uint8_t)n;
  return n ? (n + 1) / sum : 0.0f;
}

}  // namespace spl
