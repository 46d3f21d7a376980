// tiles.cuh: which tiles an ellipse reaches, row of tiles by row of tiles. The part of an ellipse inside a row is convex,
// so the tiles that it reaches are consecutive: their ends come in closed form, where tile_hit (math.h) tests each tile.
// The rows of 32 splats are spread evenly over the lanes of a warp, so that a splat of one row and one that covers the
// image cost what their rows cost together.
#pragma once
#include "context.h"

namespace spl {

// The ellipse a X^2 + 2 b X Y + c Y^2 <= Q around (x, y). At height Y it spans (-b Y -+ sqrt(a Q - det Y^2)) / a; it is
// widest to the right at Y = y_right, to the left at -y_right, and ends at |Y| = y_end.
struct Reach { float x, y, slope, inv_a, aQ, det, y_right, y_end; int column0, column1, row0, rows; };

__device__ __forceinline__ Reach reach_of(const Screen& s, Box16 box, const Dims& v) {
  const TileRange r = tile_range(decode_box(box, (float)v.width, (float)v.height), v.tiles_x, v.tiles_y);
  const float Q = cutoff(fminf(s.opacity, 1.0f)) * 1.0001f + 1e-4f;  // the slack of tile_hit
  Reach o = {s.x, s.y, -s.b / s.a, 1.0f / s.a, s.a * Q, 0, 0, 0, r.x0, r.x1, r.y0, r.x1 > r.x0 && Q > 0 ? max(r.y1 - r.y0, 0) : 0};
  const float bb = s.b * s.b;  // ac - b^2 without cancellation (Kahan): needles are nearly singular
  o.det = fmaf(s.a, s.c, -bb) + fmaf(-s.b, s.b, bb);
  const float x_end = sqrtf(Q * s.c / o.det);
  o.y_right = -s.b / s.c * x_end;
  o.y_end = sqrtf(o.aQ / o.det);
  if (!(o.det > 0 && finite(x_end) && finite(o.y_right) && finite(o.y_end))) o.det = -1;  // too thin for float: all tiles of the box
  return o;
}

struct Columns { int first, count; };
__device__ __forceinline__ Columns columns_of(const Reach& o, int row, const Dims& v) {
  if (!(o.det > 0)) return {o.column0, o.column1 - o.column0};
  const float y0 = row * (float)SPL_TILE_PX + 0.5f - o.y, y1 = fminf(y0 + (SPL_TILE_PX - 1), v.height - 0.5f - o.y);
  if (y0 > o.y_end || y1 < -o.y_end) return {0, 0};
  const float yr = fminf(fmaxf(o.y_right, y0), y1), yl = fminf(fmaxf(-o.y_right, y0), y1);
  const float right = o.x + o.slope * yr + sqrtf(fmaxf(o.aQ - o.det * yr * yr, 0.0f)) * o.inv_a;
  const float left = o.x + o.slope * yl - sqrtf(fmaxf(o.aQ - o.det * yl * yl, 0.0f)) * o.inv_a;
  if (left > v.width - 0.5f) return {0, 0};
  constexpr float TILE = 1.0f / SPL_TILE_PX;
  const int first = max((int)ceilf(fmaxf((left - (SPL_TILE_PX - 0.5f)) * TILE, -1.0f)), o.column0);
  const int last = min((int)floorf(fminf((right - 0.5f) * TILE, 65536.0f)), o.column1 - 1);
  return {first, max(last - first + 1, 0)};
}

__device__ __forceinline__ int inclusive_sum(int x) {
  for (int step = 1; step < 32; step *= 2) {
    const int y = __shfl_up_sync(ALL_LANES, x, step);
    if (lane_id() >= step) x += y;
  }
  return x;
}

// How many of the warp's 32 ascending `ends` lie at or below i: the lane that owns item i.
__device__ __forceinline__ int owner_of(int i, int ends) {
  int owner = 0;
  for (int step = 16; step; step >>= 1)
    if (__shfl_sync(ALL_LANES, ends, owner + step - 1) <= i) owner += step;
  return owner;
}

// Whole warp. Each lane brings its splat (rows = 0: none). f(owner, item, row, columns) is called by all lanes once per 32
// rows of tiles: the lane that owns the splat, the index of the warp's first row, and what is reached (count 0: nothing);
// false from it ends the loop.
template <class F> __device__ __forceinline__ void for_rows(const Reach& mine, int ends, const Dims& v, F&& f) {
  const int total = __shfl_sync(ALL_LANES, ends, 31);
  for (int item = 0; item < total; item += 32) {
    const int i = item + lane_id(), owner = owner_of(i, ends);
    Reach o;
    o.x = __shfl_sync(ALL_LANES, mine.x, owner); o.y = __shfl_sync(ALL_LANES, mine.y, owner);
    o.slope = __shfl_sync(ALL_LANES, mine.slope, owner); o.inv_a = __shfl_sync(ALL_LANES, mine.inv_a, owner);
    o.aQ = __shfl_sync(ALL_LANES, mine.aQ, owner); o.det = __shfl_sync(ALL_LANES, mine.det, owner);
    o.y_right = __shfl_sync(ALL_LANES, mine.y_right, owner); o.y_end = __shfl_sync(ALL_LANES, mine.y_end, owner);
    o.column0 = __shfl_sync(ALL_LANES, mine.column0, owner); o.column1 = __shfl_sync(ALL_LANES, mine.column1, owner);
    const int row = __shfl_sync(ALL_LANES, mine.row0 - ends + mine.rows, owner) + i;
    const Columns columns = i < total ? columns_of(o, row, v) : Columns{0, 0};
    if (!f(owner, item, row, columns)) return;
  }
}

}  // namespace spl
