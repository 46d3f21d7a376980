// raster.cpp: alpha blending per 16x16 tile, one row of 16 pixels per vector, front to back; and its backward pass,
// back to front. Each intersection's gradient goes to its own slot of v_isect, so nothing is atomic and the sum over
// a pair's slots does not depend on the number of threads.
#include "context.h"
#include <cstring>

namespace spl {

constexpr int L = SPL_TILE_PX;
typedef float VF __attribute__((vector_size(4 * L)));
typedef int32_t VI __attribute__((vector_size(4 * L)));
typedef float VF8 __attribute__((vector_size(32)));
typedef float VF4 __attribute__((vector_size(16)));

static SPL_FN VF splat(float x) { return x - VF{}; }
static SPL_FN float sum(VF v) {
  union { VF v; VF8 h[2]; } a = {v};
  union { VF8 v; VF4 h[2]; } b = {a.h[0] + a.h[1]};
  const VF4 s = b.h[0] + b.h[1];
  return (s[0] + s[2]) + (s[1] + s[3]);
}

// exp(x) for x in [-20, 0]: 2^k times a polynomial on [-0.5, 0.5] (relative error 2e-7).
static SPL_FN VF exp_neg(VF x) {
  const VF y = x * 1.44269504088896f, magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds
  const VF k = (y + magic) - magic, f = y - k;
  VF p = 1.535336188e-4f * f + 1.339887440e-3f;
  p = p * f + 9.618437357e-3f;
  p = p * f + 5.550332471e-2f;
  p = p * f + 2.402264791e-1f;
  p = p * f + 6.931472028e-1f;
  p = p * f + 1.0f;
  const VI bits = (__builtin_convertvector(k, VI) + 127) << 23;
  union { VI i; VF f; } scale = {bits};
  return p * scale.f;
}

// alpha of one splat at 16 pixels of a row; 0 where it does not reach 1/255. vis = exp(-power).
static SPL_FN VF alpha_row(const Screen& s, VF dx, float dy, VF& vis) {
  const VF power = (0.5f * s.a * dx + s.b * dy) * dx + 0.5f * s.c * dy * dy;
  const VF bounded = power < 20.0f ? (power > 0.0f ? power : splat(0)) : splat(20.0f);
  vis = exp_neg(-bounded);
  VF alpha = s.opacity * vis;
  alpha = alpha < SPL_ALPHA_MAX ? alpha : splat(SPL_ALPHA_MAX);
  const VI drawn = (alpha >= SPL_ALPHA_MIN) & (power >= 0.0f);
  return drawn ? alpha : splat(0);
}

struct Tile { int camera, x0, y0, rows; int64_t begin, end; };
static Tile tile_at(const View& v, int64_t tile, const int64_t* start) {
  const int per = v.tiles_x * v.tiles_y, camera = (int)(tile / per), rest = (int)(tile % per);
  const int x0 = rest % v.tiles_x * L, y0 = rest / v.tiles_x * L;
  return {camera, x0, y0, std::min(L, v.height - y0), start[tile], start[tile + 1]};
}
static SPL_FN void row_range(Box16 q, const View& v, const Tile& t, int& y0, int& y1) {  // rows of the tile the box reaches
  const Box b = decode_box(q, (float)v.width, (float)v.height);
  y0 = std::max((int)ceilf(b.y0 - 0.5f) - t.y0, 0);
  y1 = std::min((int)floorf(b.y1 - 0.5f) - t.y0 + 1, t.rows);
}
static SPL_FN VF pixel_x(const Tile& t) {
  VF x;
  for (int i = 0; i < L; ++i) x[i] = t.x0 + i + 0.5f;
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

struct Blend {  // the state of 16 rows of pixels
  VF run[L], T[L];  // run: transmittance, 0 once the pixel is finished; T: its value at the end
  VF r[L], g[L], b[L], depth[L];
  VI last[L];
};

SPL_HOT static void blend_tile(const View& v, const Rows& rows, const Tile& t, Blend& s) {
  const VF px = pixel_x(t);
  for (int y = 0; y < L; ++y) {
    s.run[y] = s.T[y] = splat(1.0f);
    s.r[y] = s.g[y] = s.b[y] = s.depth[y] = VF{};
    s.last[y] = VI{};
  }
  for (int64_t i = t.begin; i < t.end; ++i) {
    const uint32_t pair = rows.pair[rows.slot[i]];
    const Screen& k = rows.screen[pair];
    int y0, y1;
    row_range(rows.box[pair], v, t, y0, y1);
    const VF dx = k.x - px;
    const int32_t index = (int32_t)(i - t.begin) + 1;
    for (int y = y0; y < y1; ++y) {
      VF vis;
      const VF a = alpha_row(k, dx, k.y - (t.y0 + y + 0.5f), vis);
      const VF next = s.run[y] * (1.0f - a);
      const VI open = next > SPL_T_MIN;
      const VF w = open ? a * s.run[y] : VF{};
      s.r[y] += w * k.r; s.g[y] += w * k.g; s.b[y] += w * k.b_;
      s.depth[y] += w * k.depth;
      s.run[y] = open ? next : VF{};
      s.T[y] = open ? next : s.T[y];
      s.last[y] = w > 0.0f ? index - VI{} : s.last[y];
    }
    if ((index & 15) == 0) {  // all pixels finished?
      VF most = VF{};
      for (int y = 0; y < t.rows; ++y) most += s.run[y];
      if (sum(most) == 0.0f) break;
    }
  }
}

static void store_tile(const View& v, const Rows& rows, const Tile& t, const Blend& s) {
  const int columns = std::min(L, v.width - t.x0);
  for (int y = 0; y < t.rows; ++y) {
    const int64_t at = ((int64_t)t.camera * v.height + t.y0 + y) * v.width + t.x0;
    for (int x = 0; x < columns; ++x) {
      const float T = s.T[y][x];
      rows.rgb[3 * (at + x)] = s.r[y][x] + T * v.background[0];
      rows.rgb[3 * (at + x) + 1] = s.g[y][x] + T * v.background[1];
      rows.rgb[3 * (at + x) + 2] = s.b[y][x] + T * v.background[2];
      rows.depth[at + x] = s.depth[y][x];
      rows.T[at + x] = T;
      rows.last[at + x] = s.last[y][x];
    }
  }
}

void raster(spl_ctx& c, const View& v) {
  begin_phase(c, SPL_RASTER);
  const Rows rows = rows_of(c);
  const int64_t tiles = v.tiles();
#pragma omp parallel for schedule(dynamic, 1) num_threads(c.threads)
  for (int64_t i = 0; i < tiles; ++i) {
    const Tile t = tile_at(v, i, rows.start);
    Blend state;
    blend_tile(v, rows, t, state);
    store_tile(v, rows, t, state);
  }
}

struct Upstream {  // what the loss asks of 16 rows of pixels
  VF r[L], g[L], b[L], depth[L], error[L];
  VF T[L], behind[L];  // transmittance and, in units of the loss, what lies behind the current splat
  VI last[L];
  int32_t deepest;
};

static void load_tile(const View& v, const Rows& rows, const Tile& t, Upstream& u) {
  memset(&u, 0, sizeof u);
  const int columns = std::min(L, v.width - t.x0);
  for (int y = 0; y < t.rows; ++y) {
    const int64_t at = ((int64_t)t.camera * v.height + t.y0 + y) * v.width + t.x0;
    for (int x = 0; x < columns; ++x) {
      const float* g = rows.v_rgb + 3 * (at + x);
      const float T = rows.T[at + x];
      u.r[y][x] = g[0]; u.g[y][x] = g[1]; u.b[y][x] = g[2];
      u.depth[y][x] = rows.v_depth[at + x];
      u.error[y][x] = rows.error[at + x];
      u.T[y][x] = T;
      // d/dT of T * background and of alpha = 1 - T, carried like one more splat behind all others
      u.behind[y][x] = T * (g[0] * v.background[0] + g[1] * v.background[1] + g[2] * v.background[2] - rows.v_alpha[at + x]);
      u.last[y][x] = rows.last[at + x];
      u.deepest = std::max(u.deepest, rows.last[at + x]);
    }
  }
}

SPL_HOT static void backprop_tile(const View& v, const Rows& rows, const Tile& t, Upstream& u) {
  const VF px = pixel_x(t);
  for (int64_t i = t.begin + u.deepest; i < t.end; ++i) memset(rows.v_isect + (int64_t)rows.slot[i] * SPL_VGRAD_FLOATS, 0, SPL_VGRAD_FLOATS * 4);
  for (int64_t i = t.begin + u.deepest - 1; i >= t.begin; --i) {
    const uint32_t slot = rows.slot[i], pair = rows.pair[slot];
    const Screen k = rows.screen[pair];
    int y0, y1;
    row_range(rows.box[pair], v, t, y0, y1);
    const VF dx = k.x - px;
    const int32_t index = (int32_t)(i - t.begin) + 1;
    VF vx{}, vy{}, va{}, vb{}, vc{}, vo{}, vr{}, vg{}, vbl{}, vd{}, weight{}, error{};
    for (int y = y0; y < y1; ++y) {
      const float dy = k.y - (t.y0 + y + 0.5f);
      VF vis;
      VF a = alpha_row(k, dx, dy, vis);
      a = u.last[y] >= index ? a : VF{};
      const VF open = 1.0f / (1.0f - a), T = u.T[y] * open, w = a * T;
      const VF along = u.r[y] * k.r + u.g[y] * k.g + u.b[y] * k.b_ + u.depth[y] * k.depth;
      const VF v_alpha = a > 0.0f ? T * along - u.behind[y] * open : VF{};
      u.behind[y] += w * along;
      u.T[y] = T;
      vr += w * u.r[y]; vg += w * u.g[y]; vbl += w * u.b[y]; vd += w * u.depth[y];
      weight += w; error += w * u.error[y];
      const VF v_vis = k.opacity * vis <= SPL_ALPHA_MAX ? v_alpha * vis : VF{};  // no gradient through the clamp
      vo += v_vis;
      const VF v_power = -k.opacity * v_vis;
      va += v_power * dx * dx; vb += v_power * dx * dy; vc += v_power * dy * dy;
      vx += v_power * (k.a * dx + k.b * dy); vy += v_power * (k.b * dx + k.c * dy);
    }
    float* out = rows.v_isect + (int64_t)slot * SPL_VGRAD_FLOATS;
    out[0] = sum(vx); out[1] = sum(vy);
    out[2] = 0.5f * sum(va); out[3] = sum(vb); out[4] = 0.5f * sum(vc);
    out[5] = sum(vo); out[6] = sum(vd);
    out[7] = sum(vr); out[8] = sum(vg); out[9] = sum(vbl);
    out[10] = sum(weight); out[11] = sum(error);
  }
}

void raster_bwd(spl_ctx& c, const View& v) {
  begin_phase(c, SPL_RASTER_BWD);
  const Rows rows = rows_of(c);
  const int64_t tiles = v.tiles();
#pragma omp parallel for schedule(dynamic, 1) num_threads(c.threads)
  for (int64_t i = 0; i < tiles; ++i) {
    const Tile t = tile_at(v, i, rows.start);
    Upstream u;
    load_tile(v, rows, t, u);
    backprop_tile(v, rows, t, u);
  }
}

}  // namespace spl
