// tiles.cuh: the exact ellipse-tile test, spread evenly over the lanes of a warp: a splat of one tile beside one that
// covers the image costs what their tiles cost together.
#pragma once
#include "context.h"

namespace spl {

struct Reach { Screen s; float q; int x0, y0, columns, tiles; };  // of one splat; tiles: candidates

__device__ __forceinline__ Reach reach_of(const Screen& s, Box16 box, const Dims& v) {
  const TileRange r = tile_range(decode_box(box, (float)v.width, (float)v.height), v.tiles_x, v.tiles_y);
  const int columns = max(r.x1 - r.x0, 0), rows = max(r.y1 - r.y0, 0);
  return {s, cutoff(fminf(s.opacity, 1.0f)), r.x0, r.y0, columns, columns * rows};
}

__device__ __forceinline__ int inclusive_sum(int x) {
  for (int step = 1; step < 32; step *= 2) {
    const int y = __shfl_up_sync(ALL_LANES, x, step);
    if (lane_id() >= step) x += y;
  }
  return x;
}

// Whole warp. Each lane brings its splat (tiles = 0: none). f(owner, first, hit, tx, ty) is called by all lanes once per
// 32 candidates: the lane that owns the splat, the index of the warp's first candidate, and the tile, if hit.
template <class F> __device__ __forceinline__ void for_candidates(const Reach& mine, int ends_at, const Dims& v, F&& f) {
  const int total = __shfl_sync(ALL_LANES, ends_at, 31);
  for (int first = 0; first < total; first += 32) {
    const int i = first + lane_id();
    int owner = 0;  // how many splats end at or before i
    for (int step = 16; step; step >>= 1)
      if (__shfl_sync(ALL_LANES, ends_at, owner + step - 1) <= i) owner += step;
    Screen s{};
    s.x = __shfl_sync(ALL_LANES, mine.s.x, owner);
    s.y = __shfl_sync(ALL_LANES, mine.s.y, owner);
    s.a = __shfl_sync(ALL_LANES, mine.s.a, owner);
    s.b = __shfl_sync(ALL_LANES, mine.s.b, owner);
    s.c = __shfl_sync(ALL_LANES, mine.s.c, owner);
    const float q = __shfl_sync(ALL_LANES, mine.q, owner);
    const int columns = max(__shfl_sync(ALL_LANES, mine.columns, owner), 1);
    const int begin = __shfl_sync(ALL_LANES, ends_at - mine.tiles, owner);
    const int x0 = __shfl_sync(ALL_LANES, mine.x0, owner), y0 = __shfl_sync(ALL_LANES, mine.y0, owner);
    const int k = i - begin, row = k / columns, tx = x0 + k - row * columns, ty = y0 + row;
    const bool hit = i < total && tile_hit(s, q, tx, ty, (float)v.width, (float)v.height);
    f(owner, first, hit, tx, ty);
  }
}

}  // namespace spl
