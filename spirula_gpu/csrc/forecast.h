// forecast.h: what a context will hold for a workload, from the functions that lay its memory out (host.h, arena.h); nothing is
// allocated and no device is opened. And the list of rows, of a context or of a forecast.
#pragma once
#include <cmath>
#include "ops.h"

namespace spl {

// Estimates for a caller that knows neither pairs nor intersections: a camera sees half of the map, and the squares around what it sees
// cover the image COVERAGE times. A square of edge e reaches (1 + e / tile)^2 tiles on average. The synthetic room, mapped: 30 to 45 % visible,
// coverage 20 to 35; a scene that is looked at from outside: 60 %, 60.
constexpr double VISIBLE_SHARE = 0.5, COVERAGE = 30;

inline Found expected(const spl_workload& w, const View& v) {
  Found f = {w.pairs, w.isects};
  if (!f.pairs) f.pairs = (int64_t)std::ceil(VISIBLE_SHARE * (double)w.gaussians * v.n_cameras);
  if (!f.isects && f.pairs) {
    const double edge_px = std::sqrt(COVERAGE * (double)v.pixels() / (double)f.pairs), tiles = 1 + edge_px / SPL_TILE_PX;
    f.isects = (int64_t)std::ceil((double)f.pairs * std::min(tiles * tiles, (double)v.tiles() / v.n_cameras));
  }
  if (f.pairs >= UINT32_MAX || f.isects >= UINT32_MAX)
    fail(SPL_E_CAPACITY, "about %lld visible pairs and %lld intersections, must be below %u: fewer Gaussians, fewer cameras per call or smaller images", (long long)f.pairs, (long long)f.isects, UINT32_MAX);
  return f;
}

// A context in figures: it holds nothing, and its rows list what one would hold after such a call.
inline Context forecast(const spl_create_params& params, const spl_workload& w) {
  if (w.gaussians < 0 || w.gaussians > params.max_gaussians) fail(SPL_E_ARGUMENT, "gaussians %lld: must be 0..max_gaussians %lld", (long long)w.gaussians, (long long)params.max_gaussians);
  if (w.pairs < 0 || w.pairs >= UINT32_MAX || w.isects < 0 || w.isects >= UINT32_MAX)
    fail(SPL_E_ARGUMENT, "pairs %lld, isects %lld: must be 0 (estimated) .. %u", (long long)w.pairs, (long long)w.isects, UINT32_MAX - 1);
  const View v = sized_view(w.n_cameras, w.width, w.height);
  const Found all = expected(w, v);
  Context c;
  c.params = params;
  c.n = w.gaussians;
  c.n_capacity = c.map_capacity(c.n);
  for (int r = 0; r < SPL_N_OWN_ROWS; ++r) c.map[r].committed = Region::rounded(c.map_bytes(r, c.n_capacity));
  const int last = w.train ? SPL_PROJECT_BWD : SPL_RASTER;
  for (const Found& known : {Found{}, Found{all.pairs, SPL_FOUND_AT_ONCE ? all.isects : 0}, all}) {  // as projection learns them
    c.counts = needs_of(params, c.capacity, v, c.n, 0, known);
    if (c.holds(c.counts, last)) continue;
    (Layout&)c = next_layout(c, c.counts, last);
    c.arena.committed = Region::rounded(c.plan.total);
  }
  return c;
}

// All rows that exist, then the arena; returns how many.
inline int32_t list_rows(const Context& c, spl_row* rows) {
  int32_t n = 0;
  for (int r = 0; r < SPL_N_ROWS; ++r) {
    const RowInfo info = c.info(r);
    if (!info.item_bytes) continue;
    spl_row& o = rows[n++];
    o = {};
    snprintf(o.name, sizeof o.name, "%s", info.name);
    o.category = info.category; o.count = info.count; o.first_phase = info.first; o.last_phase = info.last;
    o.saved = info.saved; o.aliased = info.arena(); o.item_bytes = info.item_bytes;
    o.used_bytes = c.used_bytes(r);
    o.capacity_bytes = r < SPL_N_OWN_ROWS ? c.map[r].committed : 0;
  }
  spl_row& arena = rows[n++];
  arena = {};
  snprintf(arena.name, sizeof arena.name, "arena");
  arena.category = SPL_OTHER;
  arena.used_bytes = c.plan.separate;  // what the rows would take with a buffer each
  arena.capacity_bytes = c.arena.committed;
  return n;
}

}  // namespace spl
