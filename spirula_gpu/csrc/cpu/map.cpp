// map.cpp: the Gaussians themselves: append, compact, move.
#include "context.h"

namespace spl {

void put(spl_ctx&, void* row, const void* from, int64_t bytes) { memcpy(row, from, bytes); }
void get(spl_ctx&, void* to, const void* row, int64_t bytes) { memcpy(to, row, bytes); }
void* readable(spl_ctx& c, int row, int64_t) { return c.row<void>(row); }

void append_rows(spl_ctx& c, const Source& s, int32_t owner) {
  for (int r = 0; r < SPL_N_MAP_ROWS; ++r) memset(c.row<uint8_t>(r) + c.n * c.item_bytes(r), 0, s.n * c.item_bytes(r));
  if (!s.n) return;
  memcpy(c.row<float>(R_MEAN) + 3 * c.n, s.mean, s.n * 12);
  memcpy(c.row<float>(R_QUAT) + 4 * c.n, s.quat, s.n * 16);
  const int64_t floats = c.item_bytes(R_SH) / 4;
  for (int64_t i = 0; i < s.n; ++i) {
    for (int k = 0; k < 3; ++k) c.row<float>(R_LOG_SCALE)[3 * (c.n + i) + k] = s.activated ? logf(s.scale[3 * i + k]) : s.scale[3 * i + k];
    const float o = s.opacity[i];
    c.row<float>(R_OPACITY)[c.n + i] = s.activated ? logf(o / (1 - o)) : o;
    c.row<int32_t>(R_OWNER)[c.n + i] = owner;
    memcpy(c.row<float>(R_SH) + (c.n + i) * floats, s.sh + i * s.sh_floats, s.sh_floats * 4);
  }
}

int64_t keep_rows(spl_ctx& c, const uint8_t* keep) {
  int64_t kept = 0;
  for (int64_t i = 0; i < c.n; ++i) kept += keep[i] != 0;
#pragma omp parallel for schedule(dynamic, 1) num_threads(c.threads)
  for (int r = 0; r < SPL_N_MAP_ROWS; ++r) {
    const int64_t bytes = c.item_bytes(r);
    uint8_t* base = c.row<uint8_t>(r);
    int64_t to = 0;
    for (int64_t i = 0; i < c.n; ++i) {
      if (!keep[i]) continue;
      if (to != i) memcpy(base + to * bytes, base + i * bytes, bytes);
      ++to;
    }
  }
  return kept;
}

void move_rows(spl_ctx& c, const std::vector<int>& times, int64_t n_moves, const int64_t* dst, const int64_t* src, float min_opacity) {
  for (int64_t i = 0; i < c.n; ++i)
    if (times[i] > 1) relocate(c.row<float>(R_OPACITY)[i], c.row<float>(R_LOG_SCALE) + 3 * i, times[i], min_opacity);
  for (int64_t i = 0; i < n_moves; ++i)
    for (int r = 0; r < SPL_N_MAP_ROWS; ++r) {
      const int64_t bytes = c.item_bytes(r);
      uint8_t *to = c.row<uint8_t>(r) + dst[i] * bytes, *from = c.row<uint8_t>(r) + src[i] * bytes;
      if (r <= R_SH || r == R_OWNER) memcpy(to, from, bytes); else memset(to, 0, bytes);
    }
}

}  // namespace spl
