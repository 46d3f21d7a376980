// map.cpp: the Gaussians themselves: append, read, write, compact, relocate; and the report of all buffers.
#include "abi.h"
#include <cmath>
#include <cstdio>
#include <cstring>

using namespace spl;

namespace spl {

static int find_row(const char* name, int sh_degree) {
  for (int r = 0; r < SPL_N_ROWS; ++r) if (name && !strcmp(row_info(r, sh_degree).name, name)) return r;
  fail(SPL_E_ARGUMENT, "no buffer is called '%s'; spl_report lists them", name ? name : "NULL");
}

static uint8_t* map_bytes(spl_ctx& c, const char* name, int64_t first, int64_t count, int64_t& bytes) {
  const int r = find_row(name, c.params.sh_degree);
  if (r >= SPL_N_MAP_ROWS) fail(SPL_E_ARGUMENT, "%s is scratch, not part of the map", name);
  if (first < 0 || count < 0 || first > c.n || count > c.n - first) fail(SPL_E_ARGUMENT, "%s: %lld from %lld on, of %lld Gaussians", name, (long long)count, (long long)first, (long long)c.n);
  bytes = count * c.item_bytes(r);
  return c.row<uint8_t>(r) + first * c.item_bytes(r);
}

// New opacity and the factor of the scales when a Gaussian is drawn `times` times in place of once
// (Kheradmand et al. 2024, 3DGS as Markov Chain Monte Carlo, eq. 9).
static void relocated(float opacity, int times, float min_opacity, float& new_opacity, float& factor) {
  const double o = std::min(opacity, 0.999f), p = 1 - std::pow(1 - o, 1.0 / times);
  double sum = 0;
  for (int i = 1; i <= times; ++i) {
    double binomial = 1, power = p;
    for (int k = 0; k < i; ++k) {
      sum += binomial * (k % 2 ? -1 : 1) * power / std::sqrt(k + 1.0);
      binomial *= (double)(i - 1 - k) / (k + 1);
      power *= p;
    }
  }
  new_opacity = std::max((float)p, min_opacity);
  factor = (float)(o / sum);
}

}  // namespace spl

int64_t spl_map_size(const spl_ctx* c) { return c ? c->n : 0; }

int spl_map_append(spl_ctx* ctx, const spl_gaussians* g, int32_t owner) {
  return guarded(ctx, [&](spl_ctx& c) {
    const Source s = caller_source(g);
    if (s.direct_rgb || g->sh_degree > c.params.sh_degree) fail(SPL_E_ARGUMENT, "sh_degree %lld: must be 0..%d, what the map stores", (long long)g->sh_degree, c.params.sh_degree);
    fit_map(c, c.n + s.n);
    for (int r = 0; r < SPL_N_MAP_ROWS; ++r) memset(c.row<uint8_t>(r) + c.n * c.item_bytes(r), 0, s.n * c.item_bytes(r));
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
    c.n += s.n;
  });
}

int spl_map_read(spl_ctx* ctx, const char* row, int64_t first, int64_t count, void* host) {
  return guarded(ctx, [&](spl_ctx& c) {
    int64_t bytes;
    if (!host) fail(SPL_E_ARGUMENT, "host is NULL");
    const uint8_t* p = map_bytes(c, row, first, count, bytes);
    memcpy(host, p, bytes);
  });
}

int spl_map_write(spl_ctx* ctx, const char* row, int64_t first, int64_t count, const void* host) {
  return guarded(ctx, [&](spl_ctx& c) {
    int64_t bytes;
    if (!host) fail(SPL_E_ARGUMENT, "host is NULL");
    uint8_t* p = map_bytes(c, row, first, count, bytes);
    memcpy(p, host, bytes);
  });
}

int spl_map_keep(spl_ctx* ctx, const uint8_t* keep, int64_t* n_kept) {
  return guarded(ctx, [&](spl_ctx& c) {
    if (!keep || !n_kept) fail(SPL_E_ARGUMENT, "keep and n_kept must be given");
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
    *n_kept = c.n = kept;
    trim_map(c);
  });
}

int spl_map_relocate(spl_ctx* ctx, int64_t n_moves, const int64_t* dst, const int64_t* src, float min_opacity) {
  return guarded(ctx, [&](spl_ctx& c) {
    if (n_moves < 0 || (n_moves && !(dst && src))) fail(SPL_E_ARGUMENT, "%lld moves: dst and src must be given", (long long)n_moves);
    std::vector<int> times(c.n, 1);
    std::vector<uint8_t> is_dst(c.n, 0);
    for (int64_t i = 0; i < n_moves; ++i) {
      if (dst[i] < 0 || dst[i] >= c.n || src[i] < 0 || src[i] >= c.n) fail(SPL_E_ARGUMENT, "move %lld: %lld -> %lld, must be 0..%lld", (long long)i, (long long)src[i], (long long)dst[i], (long long)c.n - 1);
      if (is_dst[dst[i]]) fail(SPL_E_ARGUMENT, "move %lld: destination %lld is named twice", (long long)i, (long long)dst[i]);
      is_dst[dst[i]] = 1;
    }
    for (int64_t i = 0; i < n_moves; ++i) {
      if (is_dst[src[i]]) fail(SPL_E_ARGUMENT, "Gaussian %lld is both moved and a source", (long long)src[i]);
      ++times[src[i]];
    }
    for (int64_t i = 0; i < c.n; ++i) {
      if (times[i] == 1) continue;
      float opacity, factor;
      float& logit = c.row<float>(R_OPACITY)[i];
      relocated(sigmoid(logit), std::min(times[i], 51), min_opacity, opacity, factor);
      logit = logf(opacity / (1 - opacity));
      for (int k = 0; k < 3; ++k) c.row<float>(R_LOG_SCALE)[3 * i + k] += logf(factor);
    }
    for (int64_t i = 0; i < n_moves; ++i)
      for (int r = 0; r < SPL_N_MAP_ROWS; ++r) {
        const int64_t bytes = c.item_bytes(r);
        uint8_t *to = c.row<uint8_t>(r) + dst[i] * bytes, *from = c.row<uint8_t>(r) + src[i] * bytes;
        if (r <= R_SH || r == R_OWNER) memcpy(to, from, bytes); else memset(to, 0, bytes);
      }
  });
}

int spl_report(spl_ctx* ctx, spl_row* rows, int32_t capacity, int32_t* n_rows) {
  return guarded(ctx, [&](spl_ctx& c) {
    if (!rows || !n_rows || capacity < SPL_N_ROWS + 1) fail(SPL_E_ARGUMENT, "spl_report needs room for %d rows", SPL_N_ROWS + 1);
    for (int r = 0; r < SPL_N_ROWS; ++r) {
      const RowInfo info = row_info(r, c.params.sh_degree);
      spl_row& o = rows[r];
      o = {};
      snprintf(o.name, sizeof o.name, "%s", info.name);
      o.category = info.category; o.count = info.count; o.first_phase = info.first; o.last_phase = info.last;
      o.saved = info.saved; o.aliased = info.arena(); o.item_bytes = info.item_bytes;
      o.used_bytes = (r < SPL_N_MAP_ROWS ? c.n : c.counts[info.count]) * info.item_bytes;
      o.capacity_bytes = r < SPL_N_MAP_ROWS ? c.map[r].committed : 0;
    }
    spl_row& arena = rows[SPL_N_ROWS];
    arena = {};
    snprintf(arena.name, sizeof arena.name, "arena");
    arena.category = SPL_OTHER;
    arena.used_bytes = c.plan.separate;  // what the rows would take with a buffer each
    arena.capacity_bytes = c.arena.committed;
    *n_rows = SPL_N_ROWS + 1;
  });
}

int spl_buffer(spl_ctx* ctx, const char* name, void** ptr, int64_t* bytes) {
  return guarded(ctx, [&](spl_ctx& c) {
    const int r = find_row(name, c.params.sh_degree);
    const RowInfo info = row_info(r, c.params.sh_degree);
    if (!ptr || !bytes) fail(SPL_E_ARGUMENT, "ptr and bytes must be given");
    *ptr = c.row<void>(r);
    *bytes = (r < SPL_N_MAP_ROWS ? c.n : c.counts[info.count]) * info.item_bytes;
  });
}
