// sort.cpp: the map in the order of order.h.
#include "context.h"
#include "../order.h"

namespace spl {

struct Item { uint64_t key; uint32_t gaussian; };

// The Gaussians in order at `base`, [n] uint32; sorted there with their keys, 16 bytes each. Returns how many come from another place.
static int64_t find_order(spl_ctx& c, uint8_t* base) {
  const float* mean = c.row<float>(R_MEAN);
  uint32_t histogram[EXTENT_BINS] = {};
  for (int64_t i = 0; i < c.n; ++i) ++histogram[extent_bin(mean + 3 * i)];
  const float cells = cells_per_metre(histogram);
  Item* items = (Item*)base;
#pragma omp parallel for schedule(static) num_threads(c.threads)
  for (int64_t i = 0; i < c.n; ++i) items[i] = {order_key(mean + 3 * i, cells), (uint32_t)i};
  std::sort(items, items + c.n, [](const Item& a, const Item& b) { return a.key != b.key ? a.key < b.key : a.gaussian < b.gaussian; });
  int64_t moved = 0;
  for (int64_t i = 0; i < c.n; ++i) {  // never written before it is read
    const uint32_t from = items[i].gaussian;
    moved += from != i;
    memcpy(base + 4 * i, &from, 4);
  }
  return moved;
}

static void sort_words(spl_ctx& c, int r, const uint32_t* order, uint32_t* room, int64_t room_bytes) {
  const int words = (int)c.item_bytes(r) / 4, most = at_a_time(room_bytes, 4 * c.n, words);
  uint32_t* row = c.row<uint32_t>(r);
  for (int first = 0; first < words; first += most) {
    const int count = std::min(most, words - first);
#pragma omp parallel num_threads(c.threads)
    {
#pragma omp for schedule(static)
      for (int64_t i = 0; i < c.n; ++i) std::copy_n(row + (int64_t)order[i] * words + first, count, room + i * count);
#pragma omp for schedule(static)
      for (int64_t i = 0; i < c.n; ++i) std::copy_n(room + i * count, count, row + i * words + first);
    }
  }
}

template <class T, class Change> static void sort_elements(spl_ctx& c, int r, const uint32_t* order, T* room, int64_t room_bytes, Change change) {
  const int64_t blocks = blocks_of(c.n);
  const int K = (int)c.item_bytes(r) / (int)sizeof(T), most = at_a_time(room_bytes, blocks * SPL_OPT_BLOCK * sizeof(T), K);
  T* row = c.row<T>(r);
  for (int first = 0; first < K; first += most) {
    const int count = std::min(most, K - first);
#pragma omp parallel num_threads(c.threads)
    {
#pragma omp for schedule(static)
      for (int64_t i = 0; i < c.n; ++i)
        for (int k = 0; k < count; ++k) room[place(i, k, count)] = change(row[place(order[i], first + k, K)], order[i], i);
#pragma omp for schedule(static)
      for (int64_t i = 0; i < c.n; ++i)
        for (int k = 0; k < count; ++k) row[place(i, first + k, K)] = room[place(i, k, count)];
    }
  }
}

// Exponents of the blocks in which something has come from elsewhere: as small as their Gaussians allow.
static std::vector<int8_t> new_exponents(spl_ctx& c, const uint32_t* order) {
  const int8_t* before = c.row<int8_t>(R_EXPONENTS);
  std::vector<int8_t> after(before, before + c.map_bytes(R_EXPONENTS, c.n));
#pragma omp parallel for schedule(static) num_threads(c.threads)
  for (int64_t block = 0; block < blocks_of(c.n); ++block) {
    const int64_t begin = block * SPL_OPT_BLOCK, end = std::min(c.n, begin + SPL_OPT_BLOCK);
    bool moved = false;
    for (int64_t i = begin; i < end; ++i) moved |= order[i] != i;
    for (int g = 0; g < SPL_N_GROUPS && moved; ++g) {
      const int K = GROUPS[g].count;
      const int16_t* codes = c.row<int16_t>(GROUPS[g].row);
      float largest = 0;
      for (int k = 0; k < K; ++k)
        for (int64_t i = begin; i < end; ++i) largest = most(fabsf(decode(codes[place(order[i], k, K)], step_of(exponents_of(before, order[i])[g]))), largest);
      exponents_of(after.data(), begin)[g] = (int8_t)exponent_for(largest, g);
    }
  }
  return after;
}

int64_t sort_rows(spl_ctx& c) {
  if (c.n < 2) return 0;
  BorrowedArena scratch = borrow_for_order(c, order_bytes(c.n) + least_room(c.n));
  const int64_t moved = find_order(c, c.arena.base);
  const uint32_t* order = (const uint32_t*)c.arena.base;
  uint8_t* room = c.arena.base + order_bytes(c.n);
  const int64_t room_bytes = c.arena.committed - order_bytes(c.n);
  const std::vector<int8_t> after = moved && c.compact() ? new_exponents(c, order) : std::vector<int8_t>();
  for (int r = 0; r < SPL_N_MAP_ROWS && moved; ++r) {
    if (!c.info(r).coded) sort_words(c, r, order, (uint32_t*)room, room_bytes);
    else if (r >= R_V_MEAN) sort_elements(c, r, order, (uint16_t*)room, room_bytes, AsItIs{});
    else if (r > R_SH) sort_elements(c, r, order, room, room_bytes, AsItIs{});
    else sort_elements(c, r, order, (int16_t*)room, room_bytes, Recode{c.row<int8_t>(R_EXPONENTS), after.data(), group_of(r)});
  }
  std::copy(after.begin(), after.end(), c.row<int8_t>(R_EXPONENTS));
  scratch.give_back();
  return moved;
}

}  // namespace spl
