// sweep.cpp: see sweep.h. The cost of a plane at a pixel is 1 - ZNCC of 5x5 windows, which knows neither gain nor offset of the exposure, averaged over
// the better half of the views, which leaves out those that do not see the surface. Sums are integers and no job reads what another writes, so that nothing depends on the threads.
#include "sweep.h"
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <exception>
#include <thread>
#include "hot.h"

namespace spl {

constexpr int R = 2, N = (2 * R + 1) * (2 * R + 1), BAND = 16;  // half of the window, its pixels; rows of a job
constexpr int COST_MAX = 254, UNSEEN = 255;  // of one view: ZNCC <= 0; the pixel is outside of it
constexpr float NOISE = 2.0f;             // levels: variance of an image that is no texture
constexpr int P1 = 16, P2 = 96;           // a step of one plane, of more, where the image has no edge

// f(0, s) .. f(n - 1, s) on as many threads as there are scratches s. f takes no memory: in a thread of its own there may not even be enough to throw.
template <class S, class F> static void parallel(std::vector<S>& scratch, int64_t n, F&& f) {
  std::atomic<int64_t> next{0};
  const auto work = [&](S* s) { for (int64_t i; (i = next++) < n;) f(i, *s); };
  std::vector<std::thread> others;
  others.reserve(scratch.size());
  try {
    for (size_t k = 1; k < scratch.size() && (int64_t)k < n; ++k) others.emplace_back(work, &scratch[k]);
  } catch (const std::exception&) {}  // the system gives no more threads: these do it
  work(&scratch[0]);
  for (std::thread& t : others) t.join();
}

template <class F> static void parallel(int threads, int64_t n, F&& f) {
  std::vector<char> none(std::min<int64_t>(threads, n));
  parallel(none, n, [&](int64_t i, char&) { f(i); });
}

// ---- warping -----------------------------------------------------------------------------------------------------------
struct Warp {  // pixel (x, y) of the reference at inverse depth w -> (A (x, y, 1) + b w), homogeneous
  float A[9], b[3];
  int width, height;
};

static Warp warp_of(const spl_photo& ref, const spl_photo& view) {
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

// The four taps of the bilinear sample at each pixel in one word: one gather instead of four.
static std::vector<uint32_t> quads(const spl_photo& p) {
  std::vector<uint32_t> out((size_t)p.width * p.height);
  for (int y = 0; y < p.height; ++y) {
    const uint8_t *a = p.gray + (int64_t)y * p.width, *b = y + 1 < p.height ? a + p.width : a;
    for (int x = 0; x < p.width; ++x) {
      const int r = x + 1 < p.width ? x + 1 : x;
      out[(int64_t)y * p.width + x] = a[x] | a[r] << 8 | b[x] << 16 | (uint32_t)b[r] << 24;
    }
  }
  return out;
}

// Row y of the view, seen through the plane at inverse depth w. outside: 255 where the view does not see it, else 0.
SPL_HOT static void warp_row(const Warp& m, const uint32_t* __restrict quad, float w, int y, int width, uint8_t* __restrict out, uint8_t* __restrict outside) {
  const float v = y + 0.5f;
  const float x0 = m.A[1] * v + m.A[2] + m.b[0] * w, y0 = m.A[4] * v + m.A[5] + m.b[1] * w, z0 = m.A[7] * v + m.A[8] + m.b[2] * w;
  const float dx = m.A[0], dy = m.A[3], dz = m.A[6], right = m.width - 1.0f, bottom = m.height - 1.0f;
  const int stride = m.width;
  for (int i = 0; i < width; ++i) {
    const float u = i + 0.5f, z = z0 + dz * u, inv = 1.0f / z;
    const float px = (x0 + dx * u) * inv - 0.5f, py = (y0 + dy * u) * inv - 0.5f;
    float cx = px > 0.0f ? px : 0.0f, cy = py > 0.0f ? py : 0.0f;
    cx = cx < right ? cx : right; cy = cy < bottom ? cy : bottom;
    const int ix = (int)cx, iy = (int)cy;
    const float a = cx - ix, b = cy - iy;
    const uint32_t q = quad[iy * stride + ix];
    const float t00 = (float)(int)(q & 255), t01 = (float)(int)(q >> 8 & 255), t10 = (float)(int)(q >> 16 & 255), t11 = (float)(int)(q >> 24);
    const float top = t00 + a * (t01 - t00), low = t10 + a * (t11 - t10);
    out[i] = (uint8_t)(int)(top + b * (low - top) + 0.5f);
    const bool in = (z > 0.0f) & (cx == px) & (cy == py);
    outside[i] = in ? 0 : 255;
  }
}

// ---- cost --------------------------------------------------------------------------------------------------------------
struct Band {  // what a thread works with; rows are those of a band with R more on either side
  int width, stride, keep;
  std::vector<uint8_t> rows, warped;   // [BAND + 2R][stride], R columns repeated at the edges: of the reference, of a view
  std::vector<int32_t> sum, spread;    // [BAND][width], of the reference's windows: sum, and n * sum of squares - sum^2
  std::vector<uint8_t> outside, cost, best;  // [BAND + 2R][width], [width], [keep][BAND][width]
  std::vector<int32_t> columns;        // [3][stride]
  Band(int width, int keep) : width(width), stride(width + 2 * R), keep(keep), rows((size_t)(BAND + 2 * R) * stride), warped(rows.size()), sum((size_t)BAND * width), spread(sum.size()),
      outside((size_t)(BAND + 2 * R) * width), cost(width), best((size_t)keep * BAND * width), columns(3 * (size_t)stride) {}
  void read(const spl_photo& ref, int y0);
};

static void pad_row(uint8_t* row, int width) {  // the row begins at row + R
  memset(row, row[R], R);
  memset(row + R + width, row[R + width - 1], R);
}

SPL_HOT static void add_row(const uint8_t* __restrict a, const uint8_t* __restrict b, int n, int sign, int32_t* __restrict sb, int32_t* __restrict sbb, int32_t* __restrict sab) {
  for (int i = 0; i < n; ++i) {
    const int32_t p = a[i], q = sign * (int32_t)b[i];
    sb[i] += q; sbb[i] += q * b[i]; sab[i] += q * p;
  }
}

SPL_HOT static void zncc_row(const int32_t* __restrict sb, const int32_t* __restrict sbb, const int32_t* __restrict sab, const int32_t* __restrict sa, const int32_t* __restrict spread, const uint8_t* __restrict outside, int width, uint8_t* __restrict cost) {
  constexpr float floor = N * N * NOISE * NOISE;
  for (int i = 0; i < width; ++i) {
    int32_t b = 0, bb = 0, ab = 0;
    for (int k = 0; k <= 2 * R; ++k) { b += sb[i + k]; bb += sbb[i + k]; ab += sab[i + k]; }
    const float cov = (float)(N * ab - sa[i] * b), va = (float)spread[i] + floor, vb = (float)(N * bb - b * b) + floor;
    const float ncc = cov / sqrtf(va * vb);
    const float good = ncc > 0.0f ? ncc : 0.0f;
    const int c = (int)(COST_MAX * (1.0f - good) + 0.5f);
    cost[i] = (uint8_t)(c | outside[i]);
  }
}

// Keeps the `keep` lowest costs of each pixel in order; best [keep][width].
SPL_HOT static void insert_cost(uint8_t* __restrict cost, int width, int keep, uint8_t* best, int64_t stride) {
  for (int k = 0; k < keep; ++k) {
    uint8_t* __restrict b = best + k * stride;
    for (int i = 0; i < width; ++i) {
      const uint8_t low = std::min(b[i], cost[i]), high = std::max(b[i], cost[i]);
      b[i] = low; cost[i] = high;
    }
  }
}

SPL_HOT static void mean_cost(const uint8_t* best, int width, int keep, int64_t stride, uint8_t* __restrict out) {
  int16_t sum[64], n[64];
  for (int x = 0; x < width; x += 64) {
    const int w = std::min(64, width - x);
    memset(sum, 0, sizeof sum); memset(n, 0, sizeof n);
    for (int k = 0; k < keep; ++k)
      for (int i = 0; i < w; ++i) { const int16_t c = best[k * stride + x + i], on = c != UNSEEN; sum[i] += on ? c : (int16_t)0; n[i] += on; }
    for (int i = 0; i < w; ++i) out[x + i] = n[i] ? (uint8_t)((float)sum[i] / n[i] + 0.5f) : UNSEEN;
  }
}

struct Volume {  // [height][width][depth], depth a multiple of 16
  int width, height, planes, depth;
  std::vector<uint8_t> cost;
  std::vector<uint16_t> sum;
  int64_t at(int x, int y) const { return ((int64_t)y * width + x) * depth; }
};

struct Sweep {
  const spl_photo& ref;
  const spl_sweep_params& p;
  std::vector<Warp> warps;
  std::vector<std::vector<uint32_t>> quad;
  float inv(float plane) const { return p.min_inv + (p.max_inv - p.min_inv) * plane / (p.n_planes - 1); }
};

void Band::read(const spl_photo& ref, int y0) {
  for (int i = 0; i < BAND + 2 * R; ++i) {
    uint8_t* row = &rows[(size_t)i * stride];
    memcpy(row + R, ref.gray + (int64_t)std::clamp(y0 - R + i, 0, ref.height - 1) * width, width);
    pad_row(row, width);
  }
  for (int y = 0; y < BAND; ++y)
    for (int x = 0; x < width; ++x) {
      int32_t s = 0, ss = 0;
      for (int dy = 0; dy <= 2 * R; ++dy)
        for (int dx = 0; dx <= 2 * R; ++dx) { const int32_t a = rows[(size_t)(y + dy) * stride + x + dx]; s += a; ss += a * a; }
      sum[(size_t)y * width + x] = s; spread[(size_t)y * width + x] = N * ss - s * s;
    }
}

// The costs of rows y0 .. y0 + BAND - 1 at all planes.
static void cost_band(const Sweep& s, int y0, Band& band, Volume& v) {
  const int W = v.width, rows = std::min(BAND, v.height - y0), n = (int)s.warps.size(), keep = band.keep;
  band.read(s.ref, y0);
  int32_t *sb = band.columns.data(), *sbb = sb + band.stride, *sab = sbb + band.stride;
  for (int k = 0; k < v.planes; ++k) {
    memset(band.best.data(), UNSEEN, band.best.size());
    for (int j = 0; j < n; ++j) {
      for (int i = 0; i < rows + 2 * R; ++i) {
        uint8_t* row = &band.warped[(size_t)i * band.stride];
        warp_row(s.warps[j], s.quad[j].data(), s.inv((float)k), std::clamp(y0 - R + i, 0, v.height - 1), W, row + R, &band.outside[(size_t)i * W]);
        pad_row(row, W);
      }
      memset(band.columns.data(), 0, band.columns.size() * 4);
      for (int i = 0; i < 2 * R; ++i) add_row(&band.rows[(size_t)i * band.stride], &band.warped[(size_t)i * band.stride], band.stride, 1, sb, sbb, sab);
      for (int y = 0; y < rows; ++y) {
        add_row(&band.rows[(size_t)(y + 2 * R) * band.stride], &band.warped[(size_t)(y + 2 * R) * band.stride], band.stride, 1, sb, sbb, sab);
        zncc_row(sb, sbb, sab, &band.sum[(size_t)y * W], &band.spread[(size_t)y * W], &band.outside[(size_t)(y + R) * W], W, band.cost.data());
        add_row(&band.rows[(size_t)y * band.stride], &band.warped[(size_t)y * band.stride], band.stride, -1, sb, sbb, sab);
        insert_cost(band.cost.data(), W, keep, &band.best[(size_t)y * W], (int64_t)BAND * W);
      }
    }
    for (int y = 0; y < rows; ++y) {
      mean_cost(&band.best[(size_t)y * W], W, keep, (int64_t)BAND * W, band.cost.data());
      uint8_t* to = &v.cost[v.at(0, y0 + y) + k];
      for (int x = 0; x < W; ++x) to[(int64_t)x * v.depth] = band.cost[x];
    }
  }
}

// Costs where no view sees the plane say nothing.
static void fill_unseen(Volume& v, int y) {
  for (int x = 0; x < v.width; ++x) {
    uint8_t* c = &v.cost[v.at(x, y)];
    for (int k = 0; k < v.planes; ++k) if (c[k] == UNSEEN) c[k] = COST_MAX;
  }
}

// ---- aggregation ---------------------------------------------------------------------------------------------------------
constexpr uint16_t FAR = 0x3fff;

SPL_HOT static void step_path(const uint8_t* __restrict cost, const uint16_t* __restrict last, uint16_t least, int jump, int depth, uint16_t* __restrict next, uint16_t* __restrict sum, uint16_t* least_out) {
  const uint16_t any = (uint16_t)(least + jump);
  uint16_t low = FAR;
  for (int k = 0; k < depth; ++k) {
    const uint16_t side = (uint16_t)(std::min(last[k - 1], last[k + 1]) + P1);
    const uint16_t c = (uint16_t)(cost[k] + std::min(std::min(last[k], any), side) - least);
    next[k] = c;
    sum[k] = (uint16_t)(sum[k] + c);
    low = std::min(low, c);
  }
  *least_out = low;
}

static int jump_at(int a, int b) {  // depth may jump where the image does
  return std::max(P1 + 8, P2 * 8 / (8 + std::abs(a - b)));
}

// One path over pixels (x, y), (x + dx, y + dy), ...
struct Walk {
  std::vector<uint16_t> lines;  // two, with 16 more on either side
  int depth;
  uint16_t least = 0;
  bool begun = false, odd = false;
  explicit Walk(int depth) : lines(2 * (size_t)(depth + 32), FAR), depth(depth) {}
  void begin() { begun = false; }
  void step(Volume& v, const uint8_t* gray, int x, int y, int from) {  // from: index of the pixel before
    uint16_t *a = &lines[16], *b = a + depth + 32;
    if (odd) std::swap(a, b);
    const int64_t i = (int64_t)y * v.width + x;
    if (!begun) { std::fill(a, a + depth, 0); least = 0; }
    step_path(&v.cost[v.at(x, y)], a, least, begun ? jump_at(gray[i], gray[from]) : 0, depth, b, &v.sum[v.at(x, y)], &least);
    odd = !odd; begun = true;
  }
};

static void aggregate(const spl_photo& ref, int threads, Volume& v) {
  constexpr int COLUMNS = 16;
  std::vector<std::vector<Walk>> scratch(threads, std::vector<Walk>(COLUMNS, Walk(v.depth)));
  parallel(scratch, v.height, [&](int64_t y, std::vector<Walk>& walks) {
    Walk& walk = walks[0];
    walk.begin();
    for (int x = 0; x < v.width; ++x) walk.step(v, ref.gray, x, (int)y, (int)(y * v.width + x - 1));
    walk.begin();
    for (int x = v.width - 1; x >= 0; --x) walk.step(v, ref.gray, x, (int)y, (int)(y * v.width + x + 1));
  });
  parallel(scratch, (v.width + COLUMNS - 1) / COLUMNS, [&](int64_t block, std::vector<Walk>& walks) {
    const int x0 = (int)block * COLUMNS, n = std::min(COLUMNS, v.width - x0);
    for (Walk& w : walks) w.begin();
    for (int y = 0; y < v.height; ++y) for (int i = 0; i < n; ++i) walks[i].step(v, ref.gray, x0 + i, y, (y - 1) * v.width + x0 + i);
    for (Walk& w : walks) w.begin();
    for (int y = v.height - 1; y >= 0; --y) for (int i = 0; i < n; ++i) walks[i].step(v, ref.gray, x0 + i, y, (y + 1) * v.width + x0 + i);
  });
}

// ---- choice --------------------------------------------------------------------------------------------------------------
// The best plane of each pixel of a row, to a part of a plane; 0 where the images do not say.
static void choose_row(const Sweep& s, const Volume& v, int y, float* depth_m, float* confidence) {
  const int n = v.planes;
  for (int x = 0; x < v.width; ++x) {
    const uint16_t* c = &v.sum[v.at(x, y)];
    const uint8_t* raw = &v.cost[v.at(x, y)];
    const int64_t i = (int64_t)y * v.width + x;
    depth_m[i] = confidence[i] = 0;
    const int k = (int)(std::min_element(c, c + n) - c);
    if (k == 0 || k == n - 1) continue;  // it may lie beyond the range
    int second = FAR;
    for (int j = 0; j < n; ++j) if (j < k - 1 || j > k + 1) second = std::min<int>(second, c[j]);
    const float ncc = 1.0f - raw[k] / (float)COST_MAX, margin = (second - c[k]) / (4.0f * COST_MAX);
    if (ncc < s.p.min_ncc || margin < s.p.min_margin) continue;
    // paths prefer whole planes and pull towards neighbours: the part of a plane is that of the pixel's own costs, where they have their valley here
    float a = raw[k - 1], b = raw[k], d = raw[k + 1];
    if (b > a || b > d) { a = c[k - 1]; b = c[k]; d = c[k + 1]; }
    const float bend = a + d - 2 * b;
    if (!(bend > 0)) continue;
    const float w = s.inv(k + std::clamp(0.5f * (a - d) / bend, -0.5f, 0.5f));
    if (!(w > 0)) continue;
    depth_m[i] = 1 / w;
    confidence[i] = ncc * std::min(1.0f, margin * 4);
  }
}

void sweep(const spl_photo& ref, int n_views, const spl_photo* views, const spl_sweep_params& p, int threads, float* depth_m, float* confidence) {
  Sweep s{ref, p, {}, {}};
  for (int j = 0; j < n_views; ++j) {
    s.warps.push_back(warp_of(ref, views[j]));
    s.quad.push_back(quads(views[j]));
  }
  Volume v{ref.width, ref.height, p.n_planes, (p.n_planes + 15) / 16 * 16, {}, {}};
  v.cost.assign((size_t)v.width * v.height * v.depth, UNSEEN);
  v.sum.assign(v.cost.size(), 0);
  const int n_bands = (v.height + BAND - 1) / BAND;
  std::vector<Band> bands(std::min(threads, n_bands), Band(v.width, (n_views + 1) / 2));
  parallel(bands, n_bands, [&](int64_t b, Band& band) { cost_band(s, (int)b * BAND, band, v); });
  parallel(threads, v.height, [&](int64_t y) { fill_unseen(v, (int)y); });
  aggregate(ref, threads, v);
  parallel(threads, v.height, [&](int64_t y) { choose_row(s, v, (int)y, depth_m, confidence); });
}

// ---- agreement -----------------------------------------------------------------------------------------------------------
constexpr float BACK_PX = 2.0f;

struct Point { float x, y, z; };
static Point at_pixel(const float* K, float u, float v, float z) {
  const float y = (v - K[5]) / K[4];
  return {((u - K[2]) - K[1] * y) / K[0] * z, y * z, z};
}
static Point moved(const float* T, Point p) {
  return {T[0] * p.x + T[1] * p.y + T[2] * p.z + T[3], T[4] * p.x + T[5] * p.y + T[6] * p.z + T[7], T[8] * p.x + T[9] * p.y + T[10] * p.z + T[11]};
}
static Point moved_back(const float* T, Point p) {
  const float x = p.x - T[3], y = p.y - T[7], z = p.z - T[11];
  return {T[0] * x + T[4] * y + T[8] * z, T[1] * x + T[5] * y + T[9] * z, T[2] * x + T[6] * y + T[10] * z};
}

void agree(const spl_photo& ref, int n_views, const spl_photo* views, float tolerance, int threads, float* depth_m, uint8_t* count) {
  parallel(threads, ref.height, [&](int64_t y) {
    for (int x = 0; x < ref.width; ++x) {
      const int64_t i = y * ref.width + x;
      const float z = ref.depth[i];
      float sum = 1 / z;
      int n = 0;
      depth_m[i] = 0; count[i] = 0;
      if (!(z > 0)) continue;
      for (int j = 0; j < n_views; ++j) {
        const spl_photo& view = views[j];
        const Point p = moved(view.T_photo_ref, at_pixel(ref.K, x + 0.5f, y + 0.5f, z));
        if (!(p.z > 0)) continue;
        const float u = (view.K[0] * p.x + view.K[1] * p.y) / p.z + view.K[2], v = view.K[4] * p.y / p.z + view.K[5];
        if (!(u >= 0 && v >= 0 && u < view.width && v < view.height)) continue;
        const float there = view.depth[(int64_t)v * view.width + (int)u];
        if (!(there > 0)) continue;
        const Point q = moved_back(view.T_photo_ref, at_pixel(view.K, u, v, there));
        if (!(q.z > 0)) continue;
        const float du = (ref.K[0] * q.x + ref.K[1] * q.y) / q.z + ref.K[2] - (x + 0.5f), dv = ref.K[4] * q.y / q.z + ref.K[5] - (y + 0.5f);
        if (du * du + dv * dv > BACK_PX * BACK_PX || !(fabsf(q.z - z) <= tolerance * z)) continue;
        sum += 1 / q.z;
        ++n;
      }
      count[i] = (uint8_t)n;
      if (n) depth_m[i] = (n + 1) / sum;
    }
  });
}

}  // namespace spl
