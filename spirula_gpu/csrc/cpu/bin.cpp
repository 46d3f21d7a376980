// bin.cpp: splat-tile intersections as 64-bit keys (tile << 32 | depth), radix sort over the bits in use, tile ranges.
#include "context.h"
#include "../gaussian.h"
#include <cstring>
#include <omp.h>

namespace spl {

constexpr int RADIX_BITS = 11, RADIX = 1 << RADIX_BITS;

struct Keys { uint64_t* key; uint32_t *slot, *pair; uint64_t any, all; };  // any, all: OR and AND of the keys

// The intersections of one pair, in its window [at, end). Counting and writing may round differently: what does not fit
// is left out (it costs pixels, not memory), and what is missing is filled with a tile behind the last one.
SPL_HOT static void write_pair(const Screen& s, Box16 box, const View& v, int64_t first_tile, uint32_t p, int64_t at, int64_t end, Keys& k) {
  const TileRange r = tile_range(decode_box(box, (float)v.width, (float)v.height), v.tiles_x, v.tiles_y);
  const float q = cutoff(least(s.opacity, 1.0f));
  const uint64_t depth = depth_bits(s.depth);
  auto put = [&](uint64_t key) {
    k.key[at] = key; k.slot[at] = (uint32_t)at; k.pair[at] = p;
    k.any |= key; k.all &= key;
    ++at;
  };
  for (int ty = r.y0; ty < r.y1; ++ty)
    for (int tx = r.x0; tx < r.x1; ++tx)
      if (at < end && tile_hit(s, q, tx, ty, (float)v.width, (float)v.height)) put((uint64_t)(first_tile + (int64_t)ty * v.tiles_x + tx) << 32 | depth);
  while (at < end) put((uint64_t)v.tiles() << 32 | 0xffffffffu);
}

static void write_keys(spl_ctx& c, const View& v, uint64_t* key, uint32_t* slot, uint64_t& any, uint64_t& all) {
  const Screen* screen = c.row<Screen>(R_SCREEN);
  const Box16* box = c.row<Box16>(R_BOX);
  const uint16_t* camera = c.row<uint16_t>(R_CAMERA);
  const int64_t* first = c.row<int64_t>(R_FIRST);
  const int64_t nnz = c.counts[SPL_PAIRS] - 1, room = c.capacity[SPL_ISECTS], per_camera = (int64_t)v.tiles_x * v.tiles_y;
  uint64_t or_bits = 0, and_bits = ~0ull;
#pragma omp parallel num_threads(c.threads) reduction(|:or_bits) reduction(&:and_bits)
  {
    Keys k = {key, slot, c.row<uint32_t>(R_PAIR), 0, ~0ull};
#pragma omp for schedule(static)
    for (int64_t p = 0; p < nnz; ++p) write_pair(screen[p], box[p], v, camera_of(camera[p]) * per_camera, (uint32_t)p, first[p], std::min(first[p + 1], room), k);
    or_bits |= k.any; and_bits &= k.all;
  }
  any = or_bits; all = and_bits;
}

// One stable pass of an LSD radix sort; each thread owns one contiguous part of the input.
static void radix_pass(spl_ctx& c, int64_t n, int shift, const uint64_t* key, const uint32_t* slot, uint64_t* key_out, uint32_t* slot_out) {
  uint64_t* histogram = c.row<uint64_t>(R_HISTOGRAM);
#pragma omp parallel num_threads(c.threads)
  {
    const int t = omp_get_thread_num(), threads = omp_get_num_threads();
    const int64_t begin = n * t / threads, end = n * (t + 1) / threads;
    uint64_t* mine = histogram + (int64_t)t * RADIX;
    memset(mine, 0, RADIX * sizeof *mine);
    for (int64_t i = begin; i < end; ++i) ++mine[key[i] >> shift & (RADIX - 1)];
#pragma omp barrier
#pragma omp single
    {
      uint64_t sum = 0;
      for (int digit = 0; digit < RADIX; ++digit)
        for (int k = 0; k < threads; ++k) {
          uint64_t& h = histogram[(int64_t)k * RADIX + digit];
          const uint64_t count = h;
          h = sum;
          sum += count;
        }
    }
    for (int64_t i = begin; i < end; ++i) {
      const uint64_t to = mine[key[i] >> shift & (RADIX - 1)]++;
      key_out[to] = key[i];
      slot_out[to] = slot[i];
    }
  }
}

static void tile_ranges(spl_ctx& c, int64_t n, int64_t tiles, const uint64_t* key) {
  int64_t* start = c.row<int64_t>(R_TILE_START);
  int64_t next = 0;
  for (int64_t i = 0; i < n; ++i)
    for (const int64_t tile = (int64_t)(key[i] >> 32); next <= tile; ++next) start[next] = i;
  for (; next <= tiles; ++next) start[next] = n;
}

void bin(spl_ctx& c, const View& v) {
  begin_phase(c, SPL_BIN);
  const int64_t nnz = c.counts[SPL_PAIRS] - 1, n = nnz ? c.row<int64_t>(R_FIRST)[nnz] : 0;
  uint64_t* keys[2] = {c.row<uint64_t>(R_KEY), c.row<uint64_t>(R_KEY_ALT)};
  uint32_t* slots[2] = {c.row<uint32_t>(R_SLOT), c.row<uint32_t>(R_SLOT_ALT)};
  // Digits in which all keys agree need no pass; which they are is only known once the keys are written.
  uint64_t any, all;
  write_keys(c, v, keys[0], slots[0], any, all);
  const uint64_t differing = n ? any ^ all : 0;
  int at = 0;
  for (int shift = 0; shift < 64; shift += RADIX_BITS) {
    if (!(differing >> shift & (RADIX - 1))) continue;
    radix_pass(c, n, shift, keys[at], slots[at], keys[1 - at], slots[1 - at]);
    at = 1 - at;
  }
  if (at) {
    memcpy(keys[0], keys[1], n * sizeof *keys[0]);
    memcpy(slots[0], slots[1], n * sizeof *slots[0]);
  }
  tile_ranges(c, n, v.tiles(), keys[0]);
}

}  // namespace spl
