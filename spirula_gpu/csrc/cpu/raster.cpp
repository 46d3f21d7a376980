// raster.cpp: alpha blending per 16x16 tile, 8 pixels per vector, front to back; and its backward pass, back to front.
// Each intersection's gradient goes to its own slot of v_isect, so nothing is atomic and the sum over a pair's slots
// does not depend on the number of threads.
// Vector comparisons appear only as the condition of ?: - stored as values, GCC turns them into scalar code.
#include "context.h"
#include <cstring>

namespace spl {

constexpr int L = SPL_TILE_PX, W = 8, HALVES = L / W;  // a tile is HALVES columns of vectors, W pixels wide
typedef float VF __attribute__((vector_size(4 * W)));
typedef int32_t VI __attribute__((vector_size(4 * W)));
typedef float VF4 __attribute__((vector_size(16)));

static SPL_FN VF splat(float x) { return x - VF{}; }
static SPL_FN float sum(VF v) {
  union { VF v; VF4 h[2]; } a = {v};
  const VF4 s = a.h[0] + a.h[1];
  return (s[0] + s[2]) + (s[1] + s[3]);
}

// exp(x) for x in [-20, 0]: 2^k times a polynomial on [-0.5, 0.5] (relative error 2e-7).
static SPL_FN VF exp_neg(VF x) {
  const VF y = x * 1.44269504088896f, rounder = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const VF shifted = y + rounder, f = y - (shifted - rounder);
  VF p = 1.535336188e-4f * f + 1.339887440e-3f;
  p = p * f + 9.618437357e-3f;
  p = p * f + 5.550332471e-2f;
  p = p * f + 2.402264791e-1f;
  p = p * f + 6.931472028e-1f;
  p = p * f + 1.0f;
  union { VF f; VI i; } k = {shifted}, scale;  // the low mantissa bits of `shifted` are k
  scale.i = (k.i + 127) << 23;
  return p * scale.f;
}

// alpha of one splat at W pixels of a row; 0 where it does not reach 1/255. vis = exp(-power).
static SPL_FN VF alpha_row(const Screen& s, VF dx, float dy, VF& vis) {
  const VF power = (0.5f * s.a * dx + s.b * dy) * dx + 0.5f * s.c * dy * dy;
  const VF low = power > 0.0f ? power : VF{};
  vis = exp_neg(-(low < 20.0f ? low : splat(20.0f)));
  const VF full = s.opacity * vis;
  const VF alpha = full < SPL_ALPHA_MAX ? full : splat(SPL_ALPHA_MAX);
  const VF drawn = alpha >= SPL_ALPHA_MIN ? alpha : VF{};
  return power >= 0.0f ? drawn : VF{};
}

struct Tile { int camera, x0, y0, rows; int64_t begin, end; };
static Tile tile_at(const View& v, int64_t tile, const int64_t* start) {
  const int per = v.tiles_x * v.tiles_y, camera = (int)(tile / per), rest = (int)(tile % per);
  const int x0 = rest % v.tiles_x * L, y0 = rest / v.tiles_x * L;
  return {camera, x0, y0, std::min(L, v.height - y0), start[tile], start[tile + 1]};
}
struct Span { int h0, h1, y0, y1; };  // halves and rows of the tile that the box reaches
static SPL_FN Span span_of(Box16 q, const View& v, const Tile& t) {
  const Box b = decode_box(q, (float)v.width, (float)v.height);
  return {(int)ceilf(b.x0 - 0.5f) - t.x0 >= W ? 1 : 0, (int)floorf(b.x1 - 0.5f) - t.x0 < W ? 1 : HALVES,
          std::max((int)ceilf(b.y0 - 0.5f) - t.y0, 0), std::min((int)floorf(b.y1 - 0.5f) - t.y0 + 1, t.rows)};
}
static_assert(HALVES == 2, "span_of knows two halves");
static SPL_FN VF pixel_x(const Tile& t, int half) {
  VF x;
  for (int i = 0; i < W; ++i) x[i] = t.x0 + half * W + i + 0.5f;
  return x;
}

struct Rows {
  const Screen* screen; const Box16* box; const uint32_t *slot, *pair; const int64_t* start;
  float *rgb, *depth, *T; int32_t* last;
  const float *v_rgb, *v_depth, *v_alpha, *error;
  float* v_isect;
};
static Rows rows_of(spl_ctx& c) {
  return {c.row<Screen>(R_SCREEN), c.row<Box16>(R_BOX), c.row<uint32_t>(R_SLOT), c.row<uint32_t>(R_PAIR), c.row<int64_t>(R_TILE_START),
          c.row<float>(R_RGB), c.row<float>(R_DEPTH), c.row<float>(R_T), c.row<int32_t>(R_LAST),
          c.row<float>(R_V_RGB), c.row<float>(R_V_DEPTH), c.row<float>(R_V_ALPHA), c.row<float>(R_PX_ERROR), c.row<float>(R_V_ISECT)};
}

struct Blend {  // the pixels of one half of a tile; index: row
  VF run[L], T[L];  // run: transmittance, 0 once the pixel is finished; T: its value at the end
  VF r[L], g[L], b[L], depth[L];
  VI last[L];
};

static SPL_FN void blend_row(const Screen& k, VF dx, float dy, int32_t index, Blend& s, int y) {
  VF vis;
  const VF a = alpha_row(k, dx, dy, vis);
  const VF next = s.run[y] * (1.0f - a), w = next > SPL_T_MIN ? a * s.run[y] : VF{};
  s.r[y] += w * k.r; s.g[y] += w * k.g; s.b[y] += w * k.b_;
  s.depth[y] += w * k.depth;
  s.T[y] = next > SPL_T_MIN ? next : s.T[y];
  s.run[y] = next > SPL_T_MIN ? next : VF{};
  s.last[y] = w > 0.0f ? index - VI{} : s.last[y];
}

static bool finished(const Blend* s, int rows) {
  VF most{};
  for (int h = 0; h < HALVES; ++h)
    for (int y = 0; y < rows; ++y) most += s[h].run[y];
  return sum(most) == 0.0f;
}

SPL_HOT static void blend_tile(const View& v, const Rows& rows, const Tile& t, Blend* s) {
  const VF px[HALVES] = {pixel_x(t, 0), pixel_x(t, 1)};
  for (int h = 0; h < HALVES; ++h)
    for (int y = 0; y < L; ++y) {
      s[h].run[y] = s[h].T[y] = splat(1.0f);
      s[h].r[y] = s[h].g[y] = s[h].b[y] = s[h].depth[y] = VF{};
      s[h].last[y] = VI{};
    }
  for (int64_t i = t.begin; i < t.end; ++i) {
    const uint32_t pair = rows.pair[rows.slot[i]];
    const Screen k = rows.screen[pair];
    const Span r = span_of(rows.box[pair], v, t);
    const int32_t index = (int32_t)(i - t.begin) + 1;
    for (int h = r.h0; h < r.h1; ++h) {
      const VF dx = k.x - px[h];
      for (int y = r.y0; y < r.y1; ++y) blend_row(k, dx, k.y - (t.y0 + y + 0.5f), index, s[h], y);
    }
    if ((index & 15) == 0 && finished(s, t.rows)) break;
  }
}

static void store_tile(const View& v, const Rows& rows, const Tile& t, const Blend* blend) {
  const int columns = std::min(L, v.width - t.x0);
  for (int y = 0; y < t.rows; ++y) {
    const int64_t at = ((int64_t)t.camera * v.height + t.y0 + y) * v.width + t.x0;
    for (int x = 0; x < columns; ++x) {
      const Blend& s = blend[x / W];
      const int lane = x % W;
      const float T = s.T[y][lane];
      rows.rgb[3 * (at + x)] = s.r[y][lane] + T * v.background[0];
      rows.rgb[3 * (at + x) + 1] = s.g[y][lane] + T * v.background[1];
      rows.rgb[3 * (at + x) + 2] = s.b[y][lane] + T * v.background[2];
      rows.depth[at + x] = s.depth[y][lane];
      rows.T[at + x] = T;
      rows.last[at + x] = s.last[y][lane];
    }
  }
}

void raster(spl_ctx& c, const View& v, const spl_image*) {
  begin_phase(c, SPL_RASTER);
  const Rows rows = rows_of(c);
  const int64_t tiles = v.tiles();
#pragma omp parallel for schedule(dynamic, 1) num_threads(c.threads)
  for (int64_t i = 0; i < tiles; ++i) {
    const Tile t = tile_at(v, i, rows.start);
    Blend state[HALVES];
    blend_tile(v, rows, t, state);
    store_tile(v, rows, t, state);
  }
}

struct Upstream {  // what the loss asks of one half of a tile; index: row
  VF r[L], g[L], b[L], depth[L], error[L];
  VF T[L], behind[L];  // transmittance and, in units of the loss, what lies behind the current splat
  VI last[L];
};

static int32_t load_tile(const View& v, const Rows& rows, const Tile& t, Upstream* up) {  // returns the largest `last`
  memset(up, 0, HALVES * sizeof *up);
  int32_t deepest = 0;
  const int columns = std::min(L, v.width - t.x0);
  for (int y = 0; y < t.rows; ++y) {
    const int64_t at = ((int64_t)t.camera * v.height + t.y0 + y) * v.width + t.x0;
    for (int x = 0; x < columns; ++x) {
      Upstream& u = up[x / W];
      const int lane = x % W;
      const float* g = rows.v_rgb + 3 * (at + x);
      const float T = rows.T[at + x];
      u.r[y][lane] = g[0]; u.g[y][lane] = g[1]; u.b[y][lane] = g[2];
      u.depth[y][lane] = rows.v_depth[at + x];
      u.error[y][lane] = rows.error[at + x];
      u.T[y][lane] = T;
      // d/dT of T * background and of alpha = 1 - T, carried like one more splat behind all others
      u.behind[y][lane] = T * (g[0] * v.background[0] + g[1] * v.background[1] + g[2] * v.background[2] - rows.v_alpha[at + x]);
      u.last[y][lane] = rows.last[at + x];
      deepest = std::max(deepest, rows.last[at + x]);
    }
  }
  return deepest;
}

struct Gradient { VF x, y, a, b, c, opacity, depth, r, g, b_, weight, error; };  // order of a v_isect row

static SPL_FN void backprop_row(const Screen& k, VF dx, float dy, int32_t index, Upstream& u, int y, Gradient& v) {
  VF vis;
  const VF here = alpha_row(k, dx, dy, vis), a = u.last[y] >= index ? here : VF{};
  const VF open = 1.0f / (1.0f - a), T = u.T[y] * open, w = a * T;
  const VF along = u.r[y] * k.r + u.g[y] * k.g + u.b[y] * k.b_ + u.depth[y] * k.depth;
  const VF v_alpha = T * along - u.behind[y] * open;
  u.behind[y] += w * along;
  u.T[y] = T;
  v.r += w * u.r[y]; v.g += w * u.g[y]; v.b_ += w * u.b[y]; v.depth += w * u.depth[y];
  v.weight += w; v.error += w * u.error[y];
  const VF through = k.opacity * vis <= SPL_ALPHA_MAX ? v_alpha * vis : VF{};  // no gradient through the clamp
  const VF v_vis = a > 0.0f ? through : VF{}, v_power = -k.opacity * v_vis;
  v.opacity += v_vis;
  v.a += v_power * dx * dx; v.b += v_power * dx * dy; v.c += v_power * dy * dy;
  v.x += v_power * (k.a * dx + k.b * dy); v.y += v_power * (k.b * dx + k.c * dy);
}

static SPL_FN void clear_slot(const Rows& rows, int64_t i) {
  memset(rows.v_isect + (int64_t)rows.slot[i] * SPL_VGRAD_FLOATS, 0, SPL_VGRAD_FLOATS * 4);
}

SPL_HOT static void backprop_tile(const View& v, const Rows& rows, const Tile& t, Upstream* u, int32_t deepest) {
  const VF px[HALVES] = {pixel_x(t, 0), pixel_x(t, 1)};
  for (int64_t i = t.begin + deepest; i < t.end; ++i) clear_slot(rows, i);
  for (int64_t i = t.begin + deepest - 1; i >= t.begin; --i) {
    const uint32_t slot = rows.slot[i], pair = rows.pair[slot];
    const Screen k = rows.screen[pair];
    const Span r = span_of(rows.box[pair], v, t);
    const int32_t index = (int32_t)(i - t.begin) + 1;
    Gradient g{};
    for (int h = r.h0; h < r.h1; ++h) {
      const VF dx = k.x - px[h];
      for (int y = r.y0; y < r.y1; ++y) backprop_row(k, dx, k.y - (t.y0 + y + 0.5f), index, u[h], y, g);
    }
    float* out = rows.v_isect + (int64_t)slot * SPL_VGRAD_FLOATS;
    out[0] = sum(g.x); out[1] = sum(g.y);
    out[2] = 0.5f * sum(g.a); out[3] = sum(g.b); out[4] = 0.5f * sum(g.c);
    out[5] = sum(g.opacity); out[6] = sum(g.depth);
    out[7] = sum(g.r); out[8] = sum(g.g); out[9] = sum(g.b_);
    out[10] = sum(g.weight); out[11] = sum(g.error);
  }
}

void raster_bwd(spl_ctx& c, const View& v) {
  begin_phase(c, SPL_RASTER_BWD);
  const Rows rows = rows_of(c);
  const int64_t tiles = v.tiles(), n = rows.start[tiles], all = c.row<int64_t>(R_FIRST)[c.counts[SPL_PAIRS] - 1];
  for (int64_t i = n; i < all; ++i) clear_slot(rows, i);  // intersections without a tile (see write_pair)
#pragma omp parallel for schedule(dynamic, 1) num_threads(c.threads)
  for (int64_t i = 0; i < tiles; ++i) {
    const Tile t = tile_at(v, i, rows.start);
    Upstream upstream[HALVES];
    backprop_tile(v, rows, t, upstream, load_tile(v, rows, t, upstream));
  }
}

}  // namespace spl
