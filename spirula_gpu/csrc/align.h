// align.h: one pyramid level of direct alignment (align.py): Gauss-Newton on SE(3) with robust weights, grey levels and depth. Host code of both backends:
// a few thousand points, so the arithmetic takes less time than their way to a device and back would.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "host.h"

namespace spl {

struct Pose { double R[9], t[3]; };
inline Pose pose_of(const double* T) { return {{T[0], T[1], T[2], T[4], T[5], T[6], T[8], T[9], T[10]}, {T[3], T[7], T[11]}}; }
inline void write_pose(const Pose& p, double* T) {
  for (int r = 0; r < 3; ++r) {
    for (int k = 0; k < 3; ++k) T[4 * r + k] = p.R[3 * r + k];
    T[4 * r + 3] = p.t[r];
    T[12 + r] = 0;
  }
  T[15] = 1;
}
inline Pose operator*(const Pose& a, const Pose& b) {
  Pose o;
  for (int r = 0; r < 3; ++r) {
    o.t[r] = a.t[r];
    for (int k = 0; k < 3; ++k) {
      o.t[r] += a.R[3 * r + k] * b.t[k];
      o.R[3 * r + k] = a.R[3 * r] * b.R[k] + a.R[3 * r + 1] * b.R[3 + k] + a.R[3 * r + 2] * b.R[6 + k];
    }
  }
  return o;
}
inline Pose inverse_of(const Pose& p) {
  Pose o;
  for (int r = 0; r < 3; ++r) {
    o.t[r] = 0;
    for (int k = 0; k < 3; ++k) { o.R[3 * r + k] = p.R[3 * k + r]; o.t[r] -= p.R[3 * k + r] * p.t[k]; }
  }
  return o;
}
// (translation, rotation vector); the translation is that of the matrix, as in align.py.
inline Pose exp_se3(const double* x) {
  const double wx = x[3], wy = x[4], wz = x[5], a2 = wx * wx + wy * wy + wz * wz, a = std::sqrt(a2);
  const double s = a > 1e-8 ? std::sin(a) / a : 1 - a2 / 6, c = a > 1e-8 ? (1 - std::cos(a)) / a2 : 0.5 - a2 / 24, cos_a = std::cos(a);
  return {{cos_a + c * wx * wx, c * wx * wy - s * wz, c * wx * wz + s * wy,
           c * wx * wy + s * wz, cos_a + c * wy * wy, c * wy * wz - s * wx,
           c * wx * wz - s * wy, c * wy * wz + s * wx, cos_a + c * wz * wz}, {x[0], x[1], x[2]}};
}
inline void log_se3(const Pose& p, double* x) {  // of rotations by less than half a turn
  const double v[3] = {p.R[7] - p.R[5], p.R[2] - p.R[6], p.R[3] - p.R[1]}, s = std::sqrt(v[0] * v[0] + v[1] * v[1] + v[2] * v[2]);
  const double angle = std::atan2(s, p.R[0] + p.R[4] + p.R[8] - 1), f = s > 1e-12 ? angle / s : 0.5;
  for (int k = 0; k < 3; ++k) { x[k] = p.t[k]; x[3 + k] = f * v[k]; }
}

// x of A x = b, A [n,n] symmetric and positive; false where it is not.
inline bool solve_symmetric(double* A, double* b, int n) {
  for (int j = 0; j < n; ++j) {  // Cholesky, in place
    double d = A[n * j + j];
    for (int k = 0; k < j; ++k) d -= A[n * j + k] * A[n * j + k];
    if (!(d > 0)) return false;
    A[n * j + j] = d = std::sqrt(d);
    for (int i = j + 1; i < n; ++i) {
      double s = A[n * i + j];
      for (int k = 0; k < j; ++k) s -= A[n * i + k] * A[n * j + k];
      A[n * i + j] = s / d;
    }
  }
  for (int i = 0; i < n; ++i) { for (int k = 0; k < i; ++k) b[i] -= A[n * i + k] * b[k]; b[i] /= A[n * i + i]; }
  for (int i = n - 1; i >= 0; --i) { for (int k = i + 1; k < n; ++k) b[i] -= A[n * k + i] * b[k]; b[i] /= A[n * i + i]; }
  return true;
}

constexpr double T_DOF = 5;                             // of the t-distribution of residuals (Kerl et al. 2013)
constexpr double CORRELATED = 100;                      // residuals of neighbours go together (the map is wrong in patches): so many of the points say as much as one would alone
constexpr double LEAST_GREY = 2, LEAST_DEPTH = 0.005;   // floor of their spread: grey levels; share of the depth
constexpr double SETTLED = 0.01;                         // a step below this share of the noise of a pose is the last
constexpr float DEPTH_EDGE = 0.05f;                     // relative step of depth: no gradient across one
constexpr int LEAST_POINTS = 40;

class Alignment {
 public:
  explicit Alignment(spl_alignment& alignment) : c(alignment) {}
  // Descends from T; false: too few points fall into the image, and T is where that was seen.
  bool descend() {
    spl_alignment& io = c;
    const Pose prior_inverse = inverse_of(pose_of(io.T_prior));
    const double W[2] = {1 / (io.sigma_m * io.sigma_m), 1 / (io.sigma_rad * io.sigma_rad)};
    const double given[2] = {io.scales[0], io.scales[1]};
    Pose T = pose_of(io.T);
    for (int i = 0;; ++i) {
      if (!look(T, given)) {
        if (i > 0 && settled) break;  // the last step left the image: what was known before it counts
        write_pose(T, io.T);
        return false;
      }
      if (i >= io.iterations || settled) break;
      double A[36], step[6], e[6];
      log_se3(T * prior_inverse, e);
      for (int k = 0; k < 36; ++k) A[k] = H[k];
      for (int k = 0; k < 6; ++k) { A[7 * k] += W[k / 3]; step[k] = -(g[k] + W[k / 3] * e[k]); }
      if (!solve_symmetric(A, step, 6)) break;
      T = exp_se3(step) * T;
      settled = true;
      for (int k = 0; k < 6; ++k) settled &= std::abs(step[k]) < SETTLED * (k < 3 ? io.sigma_m : io.sigma_rad);
    }
    write_pose(T, io.T);
    for (int k = 0; k < 36; ++k) io.information[k] = H[k];
    io.cost = cost; io.gain = gain; io.scales[0] = s_grey; io.scales[1] = s_depth;
    return true;
  }

 private:
  spl_alignment& c;
  std::vector<float> X, Y, Z, u, v_, grey, gx, gy, ours, r, w;  // of the points in the image
  double H[36], g[6], cost = 0, gain = 1, s_grey = 0, s_depth = 0;
  bool settled = false;

  float at(int x, int y) const { return c.grey[(int64_t)y * c.width + x]; }

  // Normal equations at T; false: too few points in the image.
  bool look(const Pose& T, const double* given) {
    sample(T);
    if ((int64_t)X.size() < std::max<int64_t>(LEAST_POINTS, (int64_t)(0.3 * c.n))) return false;
    photometric(given[0]);
    if (c.depth) geometric(given[1]); else s_depth = 0;
    return true;
  }

  void sample(const Pose& T) {
    for (auto* v : {&X, &Y, &Z, &u, &v_, &grey, &gx, &gy, &ours}) v->clear();
    float R[9], t[3];
    for (int k = 0; k < 9; ++k) R[k] = (float)T.R[k];
    for (int k = 0; k < 3; ++k) t[k] = (float)T.t[k];
    for (int64_t i = 0; i < c.n; ++i) {
      const float* p = c.points + 4 * i;
      const float x = R[0] * p[0] + R[1] * p[1] + R[2] * p[2] + t[0], y = R[3] * p[0] + R[4] * p[1] + R[5] * p[2] + t[1], z = R[6] * p[0] + R[7] * p[1] + R[8] * p[2] + t[2];
      if (!(z > 1e-6f)) continue;
      const float px = c.fx * x / z + c.cx - 0.5f, py = c.fy * y / z + c.cy - 0.5f;  // pixel centres are whole
      if (!(px >= 1 && py >= 1 && px <= c.width - 2 && py <= c.height - 2)) continue;
      const int x0 = std::min((int)px, c.width - 3), y0 = std::min((int)py, c.height - 3);
      const uint8_t* ok = c.valid + (int64_t)y0 * c.width + x0;
      if (!(ok[0] && ok[1] && ok[c.width] && ok[c.width + 1])) continue;
      const float a = px - x0, b = py - y0;
      float rows[4][2], columns[4][2];  // four rows of the two columns, four columns of the two rows
      for (int k = 0; k < 4; ++k)
        for (int j = 0; j < 2; ++j) { rows[k][j] = at(x0 + j, y0 - 1 + k); columns[k][j] = at(x0 - 1 + k, y0 + j); }
      auto across = [&](int k) { return (1 - a) * rows[k][0] + a * rows[k][1]; };
      auto down = [&](int k) { return (1 - b) * columns[k][0] + b * columns[k][1]; };
      if (!std::isfinite(across(0) + across(1) + across(2) + across(3) + down(0) + down(3) + p[3])) continue;
      X.push_back(x); Y.push_back(y); Z.push_back(z); u.push_back(px); v_.push_back(py); ours.push_back(p[3]);
      grey.push_back((1 - b) * across(1) + b * across(2));
      gx.push_back(0.5f * ((1 - a) * (down(2) - down(0)) + a * (down(3) - down(1))));  // central differences, between the pixels
      gy.push_back(0.5f * ((1 - b) * (across(2) - across(0)) + b * (across(3) - across(1))));
    }
  }

  // Change of a sampled value with gradient (dx, dy) in pixels as point i moves by v + w x X.
  void motion(size_t i, float dx, float dy, double* J) const {
    const double iz = 1.0 / Z[i], a = dx * c.fx * iz, b = dy * c.fy * iz, d = -(a * X[i] + b * Y[i]) * iz;
    J[0] = a; J[1] = b; J[2] = d;
    J[3] = Y[i] * d - Z[i] * b; J[4] = Z[i] * a - X[i] * d; J[5] = X[i] * b - Y[i] * a;
  }
  static double spread(std::vector<float>& magnitudes, double least) {  // robust standard deviation
    const size_t half = magnitudes.size() / 2;
    std::nth_element(magnitudes.begin(), magnitudes.begin() + half, magnitudes.end());
    return std::max(1.4826 * magnitudes[half], least);
  }
  static double weight_of(double r, double s) { return (T_DOF + 1) / (T_DOF + r * r / (s * s)); }
  static double cost_of(double r, double s) { return std::log1p(r * r / (s * s) / T_DOF) * (T_DOF + 1) / 2; }

  // Residuals after the best gain and offset, which go their own way in the normal equations.
  void photometric(double given) {
    const size_t m = X.size();
    w.assign(m, 1.0f);
    r.resize(m);
    for (int round = 0; round < 2; ++round) {
      double a = 1e-9, b = 0, d = 1e-9, e = 0, f = 0;
      for (size_t i = 0; i < m; ++i) { const double k = w[i] * ours[i]; a += k * ours[i]; b += k; d += w[i]; e += k * grey[i]; f += w[i] * grey[i]; }
      const double det = a * d - b * b;
      gain = (d * e - b * f) / det;
      const double offset = (a * f - b * e) / det;
      std::vector<float> magnitudes(m);
      for (size_t i = 0; i < m; ++i) magnitudes[i] = std::abs(r[i] = (float)(grey[i] - gain * ours[i] - offset));
      s_grey = given > 0 ? given : spread(magnitudes, LEAST_GREY);
      for (size_t i = 0; i < m; ++i) w[i] = (float)weight_of(r[i], s_grey);
    }
    double sum[8][8] = {}, right[6] = {}, J[8];
    cost = 0;
    for (size_t i = 0; i < m; ++i) {
      motion(i, gx[i], gy[i], J);
      J[6] = ours[i]; J[7] = 1;
      for (int p = 0; p < 8; ++p) for (int q = 0; q <= p; ++q) sum[p][q] += w[i] * J[p] * J[q];
      for (int p = 0; p < 6; ++p) right[p] += w[i] * J[p] * r[i];
      cost += cost_of(r[i], s_grey);
    }
    cost /= m;
    const double a = sum[6][6] + 1e-9, b = sum[7][6], d = sum[7][7] + 1e-9, det = a * d - b * b, unit = 1 / (s_grey * s_grey * CORRELATED);
    for (int p = 0; p < 6; ++p) {
      g[p] = right[p] * unit;
      const double x = (d * sum[6][p] - b * sum[7][p]) / det, y = (a * sum[7][p] - b * sum[6][p]) / det;
      for (int q = 0; q <= p; ++q) H[6 * p + q] = H[6 * q + p] = (sum[p][q] - x * sum[6][q] - y * sum[7][q]) * unit;
    }
  }

  // The same of relative depth, measured against the map's.
  void geometric(double given) {
    s_depth = 0;
    std::vector<float> rd, magnitudes;
    std::vector<uint32_t> which;
    std::vector<float> slope_x, slope_y;
    for (size_t i = 0; i < X.size(); ++i) {
      const int x = (int)std::lrint(u[i]), y = (int)std::lrint(v_[i]);
      const float* z = c.depth + (int64_t)y * c.width + x;
      float low = z[0], high = z[0];
      for (int dy = -1; dy <= 1; ++dy)
        for (int dx = -1; dx <= 1; ++dx) { const float o = z[(int64_t)dy * c.width + dx]; low = std::min(low, o); high = std::max(high, o); }
      if (!(low > 0 && high - low < DEPTH_EDGE * z[0])) continue;
      const float dx = 0.5f * (z[1] - z[-1]), dy = 0.5f * (z[c.width] - z[-c.width]);
      const float residual = (z[0] + dx * (u[i] - x) + dy * (v_[i] - y) - Z[i]) / Z[i];
      if (!(std::abs(residual) < 4 * DEPTH_EDGE)) continue;
      which.push_back((uint32_t)i); slope_x.push_back(dx); slope_y.push_back(dy); rd.push_back(residual); magnitudes.push_back(std::abs(residual));
    }
    if ((int)which.size() < LEAST_POINTS) return;
    s_depth = given > 0 ? given : spread(magnitudes, LEAST_DEPTH);
    double J[6], sum[6][6] = {}, costs = 0;
    for (size_t k = 0; k < which.size(); ++k) {
      const size_t i = which[k];
      motion(i, slope_x[k], slope_y[k], J);
      J[2] -= 1; J[3] -= Y[i]; J[4] += X[i];  // e_z . (w x X) = w . (X x e_z)
      const double weight = weight_of(rd[k], s_depth) / (s_depth * s_depth * CORRELATED), iz = 1.0 / Z[i];
      for (double& x : J) x *= iz;
      for (int p = 0; p < 6; ++p) {
        for (int q = 0; q <= p; ++q) sum[p][q] += weight * J[p] * J[q];
        g[p] += weight * J[p] * rd[k];
      }
      costs += cost_of(rd[k], s_depth);
    }
    for (int p = 0; p < 6; ++p)
      for (int q = 0; q <= p; ++q) { H[6 * p + q] += sum[p][q]; if (q < p) H[6 * q + p] += sum[p][q]; }
    cost += costs / which.size();
  }
};

}  // namespace spl
