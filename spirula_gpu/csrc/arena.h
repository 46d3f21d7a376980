// arena.h: where each arena row lives. Rows whose phases overlap never share a byte; the others may. Host only, shared.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>
#include "layout.h"

namespace spl {

using Counts = std::array<int64_t, SPL_N_COUNTS>;

struct ArenaPlan {
  std::array<int64_t, SPL_N_ROWS> offset{}, bytes{};  // bytes: what the row may use, without its canary
  int64_t total = 0;                                  // what the arena takes
  int64_t separate = 0;                               // what one buffer per row would take
};

// How an arena is laid out: for so many of everything, with the rows that begin up to phase `last`.
struct Layout {
  Counts capacity{};
  int last = SPL_PHASE_ALWAYS;
  ArenaPlan plan;
  bool has(int first_phase) const { return first_phase <= last; }
  bool holds(const Counts& need, int phase) const {
    for (int k = 0; k < SPL_N_COUNTS; ++k) if (need[k] > capacity[k]) return false;
    return phase <= last;
  }
};

constexpr int64_t ARENA_ALIGN = 256;
inline int64_t align_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Largest rows first, each at the lowest offset that is free during all of its phases. Rows that begin after phase `last` are left out.
inline ArenaPlan plan_arena(const Counts& counts, int last, int sh_degree, bool alias, bool canaries) {
  struct Placed { int64_t begin, end; int first, last; };
  ArenaPlan plan;
  std::vector<int> order;
  for (int row = SPL_N_OWN_ROWS; row < SPL_N_ROWS; ++row) if (row_info(row, sh_degree).first <= last) order.push_back(row);
  std::array<int64_t, SPL_N_ROWS> room{};
  for (int row : order) {
    const RowInfo info = row_info(row, sh_degree);
    plan.bytes[row] = counts[info.count] * info.item_bytes;
    room[row] = align_up(plan.bytes[row] + (canaries ? (int64_t)SPL_CANARY_BYTES : 0), ARENA_ALIGN);
    plan.separate += room[row];
  }
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return room[a] > room[b]; });
  std::vector<Placed> placed;  // sorted by begin
  for (int row : order) {
    const RowInfo info = row_info(row, sh_degree);
    int64_t at = 0;
    for (const Placed& p : placed) {
      const bool together = !alias || (p.first <= info.last && info.first <= p.last);
      if (!together) continue;
      if (p.begin >= at + room[row]) break;
      at = std::max(at, p.end);
    }
    plan.offset[row] = at;
    const Placed mine = {at, at + room[row], info.first, info.last};
    placed.insert(std::upper_bound(placed.begin(), placed.end(), mine, [](const Placed& a, const Placed& b) { return a.begin < b.begin; }), mine);
    plan.total = std::max(plan.total, mine.end);
  }
  return plan;
}

}  // namespace spl
