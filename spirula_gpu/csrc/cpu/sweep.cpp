// sweep.cpp: see sweep.h. No job reads what another writes, so that nothing depends on the threads.
#include "context.h"
#include "../sweep.h"
#include <atomic>
#include <cmath>
#include <exception>
#include <thread>

namespace spl {

constexpr int BAND = 16;  // rows of a job

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
static std::vector<uint32_t> quads(const spl_photo& p) {
  std::vector<uint32_t> out((size_t)p.width * p.height);
  for (int y = 0; y < p.height; ++y)
    for (int x = 0; x < p.width; ++x) out[(int64_t)y * p.width + x] = quad_at(p.gray, p.width, p.height, x, y);
  return out;
}

// Row y of the view, seen through the plane at inverse depth w. outside: 255 where the view does not see it, else 0.
SPL_HOT static void warp_pixels(const Warp& m, const uint32_t* __restrict quad, float w, int y, int width, uint8_t* __restrict out, uint8_t* __restrict outside) {
  const Vec3 row = warp_row(m, w, y + 0.5f);
  for (int i = 0; i < width; ++i) {
    const float u = i + 0.5f;
    bool in;
    out[i] = (uint8_t)warped(m, quad, {row.x + m.A[0] * u, row.y + m.A[3] * u, row.z + m.A[6] * u}, in);
    outside[i] = in ? 0 : 255;
  }
}

// ---- cost --------------------------------------------------------------------------------------------------------------
struct Band {  // what a thread works with; rows are those of a band with R more on either side
  int width, stride, keep;
  std::vector<uint8_t> rows, warped;   // [BAND + 2R][stride], R columns repeated at the edges: of the reference, of a view
  std::vector<int32_t> sum;            // [BAND][width], of the reference's windows ..
  std::vector<float> var;              // .. and their variance
  std::vector<uint8_t> outside, cost, best;  // [BAND + 2R][width], [width], [keep][BAND][width]
  std::vector<int32_t> columns;        // [3][stride]
  Band(int width, int keep) : width(width), stride(width + 2 * R), keep(keep), rows((size_t)(BAND + 2 * R) * stride), warped(rows.size()), sum((size_t)BAND * width), var(sum.size()),
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

SPL_HOT static void zncc_row(const int32_t* __restrict sb, const int32_t* __restrict sbb, const int32_t* __restrict sab, const int32_t* __restrict sa, const float* __restrict var, const uint8_t* __restrict outside, int width, uint8_t* __restrict cost) {
  for (int i = 0; i < width; ++i) {
    int32_t b = 0, bb = 0, ab = 0;
    for (int k = 0; k <= 2 * R; ++k) { b += sb[i + k]; bb += sbb[i + k]; ab += sab[i + k]; }
    const int c = cost_of(N * ab - sa[i] * b, var[i], variance(b, bb));
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

SPL_HOT static void mean_costs(const uint8_t* best, int width, int keep, int64_t stride, uint8_t* __restrict out) {
  int16_t sum[64], n[64];
  for (int x = 0; x < width; x += 64) {
    const int w = std::min(64, width - x);
    memset(sum, 0, sizeof sum); memset(n, 0, sizeof n);
    for (int k = 0; k < keep; ++k)
      for (int i = 0; i < w; ++i) { const int16_t c = best[k * stride + x + i], on = c != UNSEEN; sum[i] += on ? c : (int16_t)0; n[i] += on; }
    for (int i = 0; i < w; ++i) out[x + i] = n[i] ? (uint8_t)mean_cost(sum[i], n[i]) : UNSEEN;
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
      sum[(size_t)y * width + x] = s; var[(size_t)y * width + x] = variance(s, ss);
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
        warp_pixels(s.warps[j], s.quad[j].data(), inverse_depth(s.p, (float)k), std::clamp(y0 - R + i, 0, v.height - 1), W, row + R, &band.outside[(size_t)i * W]);
        pad_row(row, W);
      }
      memset(band.columns.data(), 0, band.columns.size() * 4);
      for (int i = 0; i < 2 * R; ++i) add_row(&band.rows[(size_t)i * band.stride], &band.warped[(size_t)i * band.stride], band.stride, 1, sb, sbb, sab);
      for (int y = 0; y < rows; ++y) {
        add_row(&band.rows[(size_t)(y + 2 * R) * band.stride], &band.warped[(size_t)(y + 2 * R) * band.stride], band.stride, 1, sb, sbb, sab);
        zncc_row(sb, sbb, sab, &band.sum[(size_t)y * W], &band.var[(size_t)y * W], &band.outside[(size_t)(y + R) * W], W, band.cost.data());
        add_row(&band.rows[(size_t)y * band.stride], &band.warped[(size_t)y * band.stride], band.stride, -1, sb, sbb, sab);
        insert_cost(band.cost.data(), W, keep, &band.best[(size_t)y * W], (int64_t)BAND * W);
      }
    }
    for (int y = 0; y < rows; ++y) {
      mean_costs(&band.best[(size_t)y * W], W, keep, (int64_t)BAND * W, band.cost.data());
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
static void choose_row(const spl_sweep_params& p, const Volume& v, int y, float* depth_m, float* confidence) {
  const int n = v.planes;
  for (int x = 0; x < v.width; ++x) {
    const uint16_t* c = &v.sum[v.at(x, y)];
    const int k = (int)(std::min_element(c, c + n) - c);
    int second = FAR;
    for (int j = 0; j < n; ++j) if (j < k - 1 || j > k + 1) second = std::min<int>(second, c[j]);
    const Choice chosen = choice(p, k, second, c, &v.cost[v.at(x, y)]);
    depth_m[(int64_t)y * v.width + x] = chosen.depth_m;
    confidence[(int64_t)y * v.width + x] = chosen.confidence;
  }
}

void sweep(spl_ctx& c, const spl_photo& ref, int n_views, const spl_photo* views, const spl_sweep_params& p, float* depth_m, float* confidence) {
  const int threads = c.threads;
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
  parallel(threads, v.height, [&](int64_t y) { choose_row(p, v, (int)y, depth_m, confidence); });
}

void agree(spl_ctx& c, const spl_photo& ref, int n_views, const spl_photo* views, float tolerance, float* depth_m, uint8_t* count) {
  const DepthPhoto own = depth_photo(ref, ref.depth);
  DepthPhoto others[SPL_MAX_PHOTOS];
  for (int j = 0; j < n_views; ++j) others[j] = depth_photo(views[j], views[j].depth);
  parallel(c.threads, ref.height, [&](int64_t y) {
    for (int64_t x = 0, i = y * ref.width; x < ref.width; ++x, ++i) depth_m[i] = agreed(own, others, n_views, (int)x, (int)y, tolerance, count[i]);
  });
}

}  // namespace spl
