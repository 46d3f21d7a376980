// map.cpp: the Gaussians themselves: append, compact, move.
#include "context.h"
#include "../coded.h"

namespace spl {

void put(spl_ctx&, void* row, const void* from, int64_t bytes) { memcpy(row, from, bytes); }
void get(spl_ctx&, void* to, const void* row, int64_t bytes) { memcpy(to, row, bytes); }
void* readable(spl_ctx& c, int row, int64_t) { return c.row<void>(row); }

// ---- one Gaussian of a row, in whatever form it has there ------------------------------------------------------------------------
static bool has_exponents(const spl_ctx& c, int r) { return r <= R_SH && c.info(r).coded; }  // its codes mean something in their block alone

template <class T> static void copy_codes(T* codes, int K, int64_t to, int64_t from) {
  for (int k = 0; k < K; ++k) codes[place(to, k, K)] = codes[place(from, k, K)];
}
static void copy_item(spl_ctx& c, int r, int64_t to, int64_t from) {
  const RowInfo info = c.info(r);
  if (!info.coded) memcpy(c.row<uint8_t>(r) + to * info.item_bytes, c.row<uint8_t>(r) + from * info.item_bytes, info.item_bytes);
  else if (r >= R_V_MEAN) copy_codes(c.row<uint16_t>(r), info.item_bytes / 2, to, from);
  else copy_codes(c.row<uint8_t>(r), info.item_bytes, to, from);
}
static void clear_items(spl_ctx& c, int r, int64_t first, int64_t count) {
  const RowInfo info = c.info(r);
  if (!info.coded) { memset(c.row<uint8_t>(r) + first * info.item_bytes, 0, count * info.item_bytes); return; }
  const int width = r < R_M_MEAN || r >= R_V_MEAN ? 2 : 1, K = info.item_bytes / width;
  for (int64_t i = first, next; i < first + count; i = next) {
    next = std::min(first + count, (i / SPL_OPT_BLOCK + 1) * SPL_OPT_BLOCK);
    for (int k = 0; k < K; ++k) memset(c.row<uint8_t>(r) + place(i, k, K) * width, 0, (next - i) * width);
  }
}

// ---- parameters of a compact map -----------------------------------------------------------------------------------------------------
static int elements(const spl_ctx& c, int row) { return (int)c.item_bytes(row) / 2; }

static void read_parameters(spl_ctx& c, int row, int64_t i, float* x) {
  decode_parameters(c.row<int16_t>(row), c.row<int8_t>(R_EXPONENTS), row, elements(c, row), i, x);
}

// values(i, x) for all i in [first, n) that which(i) names; n exist. All of a block are read before one of them is written.
template <class Which, class Values> static void set_parameters(spl_ctx& c, int row, int64_t first, int64_t n, Which&& which, Values&& values) {
  const int K = elements(c, row);
  float x[SPL_OPT_BLOCK * 4] = {};
  for (int64_t begin = first / SPL_OPT_BLOCK * SPL_OPT_BLOCK; begin < n; begin += SPL_OPT_BLOCK) {
    const int lanes = (int)std::min<int64_t>(SPL_OPT_BLOCK, n - begin);
    uint8_t changed[SPL_OPT_BLOCK] = {};
    bool any = false;
    for (int lane = 0; lane < lanes; ++lane) {
      if (begin + lane < first || !which(begin + lane)) continue;
      values(begin + lane, x + lane * K);
      changed[lane] = any = true;
    }
    if (any) encode_block({c.row<int16_t>(row) + begin * K, exponents_of(c.row<int8_t>(R_EXPONENTS), begin), lanes}, row, K, changed, x);
  }
}

// ---- append ------------------------------------------------------------------------------------------------------------------------------
static void raw_log_scale(const Source& s, int64_t i, float* x) {
  for (int k = 0; k < 3; ++k) x[k] = s.activated ? logf(s.scale[3 * i + k]) : s.scale[3 * i + k];
}
static float raw_opacity(const Source& s, int64_t i) { return s.activated ? logf(s.opacity[i] / (1 - s.opacity[i])) : s.opacity[i]; }

static void append_parameters(spl_ctx& c, const Source& s) {
  for (int64_t i = 0; i < s.n; ++i) {
    memcpy(c.row<float>(R_QUAT) + 4 * (c.n + i), s.quat + 4 * i, 16);
    raw_log_scale(s, i, c.row<float>(R_LOG_SCALE) + 3 * (c.n + i));
    c.row<float>(R_OPACITY)[c.n + i] = raw_opacity(s, i);
    memcpy(c.row<float>(R_SH) + (c.n + i) * (c.item_bytes(R_SH) / 4), s.sh + i * s.sh_floats, s.sh_floats * 4);
  }
}

static void append_codes(spl_ctx& c, const Source& s) {
  const int64_t n = c.n + s.n;
  auto all = [](int64_t) { return true; };
  set_parameters(c, R_QUAT, c.n, n, all, [&](int64_t i, float* x) {
    float log_scale[3];
    raw_log_scale(s, i - c.n, log_scale);
    memcpy(x, s.quat + 4 * (i - c.n), 16);
    make_storable(x, log_scale, raw_opacity(s, i - c.n), s.sh + (i - c.n) * s.sh_floats, s.sh_floats);
  });
  set_parameters(c, R_LOG_SCALE, c.n, n, all, [&](int64_t i, float* x) { raw_log_scale(s, i - c.n, x); });
  set_parameters(c, R_OPACITY, c.n, n, all, [&](int64_t i, float* x) { *x = raw_opacity(s, i - c.n); });
  set_parameters(c, R_SH, c.n, n, all, [&](int64_t i, float* x) { for (int k = 0; k < 3; ++k) x[k] = storable_sh(s.sh[(i - c.n) * s.sh_floats + k]); });
  if (s.sh_floats == 3) return;  // the others are 0, as they were cleared
  const int words = rest_words(c.params.sh_degree);
  for (int64_t i = c.n; i < n; ++i) {
    float sh[48];
    for (int k = 0; k < band_begin(c.params.sh_degree + 1); ++k) sh[k] = k < s.sh_floats ? storable_sh(s.sh[(i - c.n) * s.sh_floats + k]) : 0.0f;
    encode_rest(c.row<uint32_t>(R_SH_REST) + i * words, c.params.sh_degree, sh, Nearest{});
  }
}

void append_rows(spl_ctx& c, const Source& s, int32_t owner) {
  for (int r = 0; r < SPL_N_MAP_ROWS; ++r) clear_items(c, r, c.n, s.n);
  if (!s.n) return;
  memcpy(c.row<float>(R_MEAN) + 3 * c.n, s.mean, s.n * 12);
  std::fill_n(c.row<int32_t>(R_OWNER) + c.n, s.n, owner);
  if (c.compact()) append_codes(c, s); else append_parameters(c, s);
}

// ---- keep ----------------------------------------------------------------------------------------------------------------------------------
int64_t keep_rows(spl_ctx& c, const uint8_t* keep) {
  int64_t first = 0;
  while (first < c.n && keep[first]) ++first;
  std::vector<int64_t> source;  // of first, first + 1, ..
  for (int64_t i = first; i < c.n; ++i) if (keep[i]) source.push_back(i);
  const int64_t kept = first + (int64_t)source.size();
#pragma omp parallel for schedule(dynamic, 1) num_threads(c.threads)
  for (int r = 0; r < SPL_N_MAP_ROWS; ++r) {
    if (has_exponents(c, r)) set_parameters(c, r, first, kept, [](int64_t) { return true; }, [&](int64_t i, float* x) { read_parameters(c, r, source[i - first], x); });
    else for (int64_t i = first; i < kept; ++i) copy_item(c, r, i, source[i - first]);
  }
  return kept;
}

// ---- relocate --------------------------------------------------------------------------------------------------------------------------------
static void relocate_codes(spl_ctx& c, const std::vector<int>& times, int64_t n_moves, const int64_t* dst, const int64_t* src, float min_opacity) {
  auto relocated = [&](int64_t i, float* log_scale) {
    float opacity;
    read_parameters(c, R_OPACITY, i, &opacity);
    relocate(opacity, log_scale, times[i], min_opacity);
    return opacity;
  };
  auto is_source = [&](int64_t i) { return times[i] > 1; };
  set_parameters(c, R_LOG_SCALE, 0, c.n, is_source, [&](int64_t i, float* x) { read_parameters(c, R_LOG_SCALE, i, x); relocated(i, x); });
  set_parameters(c, R_OPACITY, 0, c.n, is_source, [&](int64_t i, float* x) { float unused[3] = {}; *x = relocated(i, unused); });
  std::vector<int64_t> from(c.n, -1);
  for (int64_t i = 0; i < n_moves; ++i) from[dst[i]] = src[i];
  for (int r : {R_QUAT, R_LOG_SCALE, R_OPACITY, R_SH})
    set_parameters(c, r, 0, c.n, [&](int64_t i) { return from[i] >= 0; }, [&](int64_t i, float* x) { read_parameters(c, r, from[i], x); });
}

void move_rows(spl_ctx& c, const std::vector<int>& times, int64_t n_moves, const int64_t* dst, const int64_t* src, float min_opacity) {
  if (c.compact()) relocate_codes(c, times, n_moves, dst, src, min_opacity);
  else for (int64_t i = 0; i < c.n; ++i) if (times[i] > 1) relocate(c.row<float>(R_OPACITY)[i], c.row<float>(R_LOG_SCALE) + 3 * i, times[i], min_opacity);
  for (int r = 0; r < SPL_N_MAP_ROWS; ++r) {
    if (has_exponents(c, r)) continue;
    for (int64_t i = 0; i < n_moves; ++i) if (r <= R_SH_REST || r == R_OWNER) copy_item(c, r, dst[i], src[i]); else clear_items(c, r, dst[i], 1);
  }
}

}  // namespace spl
