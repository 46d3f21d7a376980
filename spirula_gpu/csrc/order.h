// order.h: the order in which the map keeps its Gaussians, the same on both backends: along the Morton curve of their means. Gaussians that
// a camera sees together then lie together, and of the blocks of 256 fewer are visited, each with more that is visible.
//
// The grid: 2^21 cells an axis around the origin of the world, of the smallest power of two that holds all but 1 % of the means; the
// others count as in the cell at the border (one far outlier must not make all others equal). Since cells are halved about the origin,
// a grid of another size orders the same Gaussians in the same way, down to its cell: a map that grows is not shuffled. Equal cells keep
// their order. What has no finite mean comes last.
#pragma once
#include "host.h"
#include "coded.h"

namespace spl {

constexpr int ORDER_BITS = 21;   // an axis
constexpr int EXTENT_BINS = 256; // powers of two; the last: not finite
constexpr int64_t ORDER_ALIGN = 256;

// Which power of two the mean stays below: b of 2^(b - 126), its exponent in fp32; EXTENT_BINS - 1: none.
SPL_FN int extent_bin(const float* mean) {
  const float x = fabsf(mean[0]), y = fabsf(mean[1]), z = fabsf(mean[2]);
  return finite(x) && finite(y) && finite(z) ? (int)(bits_of(most(most(x, y), z)) >> 23) : EXTENT_BINS - 1;
}

inline float cells_per_metre(const uint32_t* histogram) {  // [EXTENT_BINS] of extent_bin
  int64_t inside = 0, within = 0;
  for (int b = 0; b < EXTENT_BINS - 1; ++b) inside += histogram[b];
  int b = 0;
  for (within = histogram[0]; within < inside - inside / 100; within += histogram[++b]) {}
  return power_of_two(ORDER_BITS - 1 - std::max(b - 126, -100));
}

SPL_FN uint64_t spread(uint64_t x) {  // two zeros between the 21 bits
  x = (x | x << 32) & 0x001f00000000ffffull;
  x = (x | x << 16) & 0x001f0000ff0000ffull;
  x = (x | x << 8) & 0x100f00f00f00f00full;
  x = (x | x << 4) & 0x10c30c30c30c30c3ull;
  return (x | x << 2) & 0x1249249249249249ull;
}
SPL_FN uint64_t cell_of(float x, float cells) {
  constexpr int HALF = 1 << (ORDER_BITS - 1);
  return (uint64_t)((int)between(floorf(x * cells), -(float)HALF, (float)(HALF - 1)) + HALF);  // the product is exact
}
SPL_FN uint64_t order_key(const float* mean, float cells) {
  if (extent_bin(mean) == EXTENT_BINS - 1) return 1ull << (3 * ORDER_BITS);
  return spread(cell_of(mean[0], cells)) << 2 | spread(cell_of(mean[1], cells)) << 1 | spread(cell_of(mean[2], cells));
}

// A code of element k moves from one Gaussian's place to another's: to the nearest code with the exponent there.
struct Recode {
  const int8_t *before, *after;  // exponents of all blocks
  int group;                     // of the row
  SPL_FN int16_t operator()(int16_t code, int64_t from, int64_t to) const {
    return encode(decode(code, step_of(exponents_of(before, from)[group])), inverse_step_of(exponents_of(after, to)[group]), NEAREST);
  }
};
struct AsItIs { template <class T> SPL_FN T operator()(T code, int64_t, int64_t) const { return code; } };

// ---- scratch: the arena, which holds nothing between calls. 4 bytes a Gaussian of order, then room through which the rows are moved,
// some words or elements of all Gaussians at a time: 12 bytes a Gaussian, which sorting needs too, or as much more as the arena has.
inline int64_t blocks_of(int64_t n) { return (n + SPL_OPT_BLOCK - 1) / SPL_OPT_BLOCK; }
inline int64_t order_bytes(int64_t n) { return align_up(4 * n, ORDER_ALIGN); }
inline int64_t least_room(int64_t n) { return std::max(3 * order_bytes(n), blocks_of(n) * SPL_OPT_BLOCK * 2); }
inline int at_a_time(int64_t room, int64_t bytes_each, int all) {  // whole sectors of memory where there is room
  const int64_t most = room / bytes_each;
  return (int)(most >= all ? all : most >= 8 ? most / 8 * 8 : most);
}

inline BorrowedArena borrow_for_order(Context& c, int64_t bytes) {
  return BorrowedArena(c, bytes, "sorting " + std::to_string(c.n) + " Gaussians", "set train.sort_growth 0");
}

}  // namespace spl
