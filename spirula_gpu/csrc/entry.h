// entry.h: the entry points of spirula.h, the same for both backends; included by one file of each (step.cpp, step.cu).
// Nothing is thrown across them: a failure becomes a status and a text.
#pragma once
#include "ops.h"
#include "coded.h"

namespace spl {

inline thread_local std::string create_error;

template <class F> int guarded(spl_ctx* c, F&& body) {
  if (!c) return SPL_E_ARGUMENT;
  try {
    activate(*c);
    body(*c);
    c->error.clear();
    return SPL_OK;
  } catch (const Failure& f) {
    c->phase = SPL_PHASE_ALWAYS;
    c->pending.any = false;
    c->error = f.text;
    return f.status;
  } catch (const std::bad_alloc&) {
    c->phase = SPL_PHASE_ALWAYS;
    c->error = "the system is out of memory; lower engine.max_gaussians or the image size";
    return SPL_E_MEMORY;
  }
}

static int find_row(const spl_ctx& c, const char* name) {
  for (int r = 0; r < SPL_N_ROWS; ++r) if (name && c.item_bytes(r) && !strcmp(c.info(r).name, name)) return r;
  fail(SPL_E_ARGUMENT, "no buffer is called '%s'; spl_report lists them", name ? name : "NULL");
}

static int map_row(const spl_ctx& c, const char* name, int64_t first, int64_t count, const void* host) {
  if (!host) fail(SPL_E_ARGUMENT, "host is NULL");
  const int r = find_row(c, name);
  if (r >= SPL_N_MAP_ROWS) fail(SPL_E_ARGUMENT, "%s is %s", name, r == R_EXPONENTS ? "no row of Gaussians; the rows that it scales are read and written in fp32" : "scratch, not part of the map");
  if (first < 0 || count < 0 || first > c.n || count > c.n - first) fail(SPL_E_ARGUMENT, "%s: %lld from %lld on, of %lld Gaussians", name, (long long)count, (long long)first, (long long)c.n);
  return r;
}

// ---- rows of codes, on the host: some blocks at a time ----------------------------------------------------------------------
constexpr int64_t CHUNK = 1024 * SPL_OPT_BLOCK;  // Gaussians

template <class T> struct HostCodes {  // blocks of a row from Gaussian `base` on, which begins one
  spl_ctx& c;
  int row;
  int64_t base;
  std::vector<T> codes;
  uint8_t* there() const { return c.row<uint8_t>(row) + c.map_bytes(row, base); }
  HostCodes(spl_ctx& context, int r, int64_t from, int64_t end) : c(context), row(r), base(from), codes((c.map_bytes(r, end) - c.map_bytes(r, from)) / sizeof(T)) {
    get(c, codes.data(), there(), codes.size() * sizeof(T));
  }
  void store() { put(c, there(), codes.data(), codes.size() * sizeof(T)); }
};

// f(from, begin, end): Gaussians [begin, end) and where their first block begins; at most CHUNK at once.
template <class F> static void in_chunks(int64_t first, int64_t count, F&& f) {
  for (int64_t from = first / SPL_OPT_BLOCK * SPL_OPT_BLOCK; from < first + count; from += CHUNK)
    f(from, std::max(first, from), std::min(first + count, from + CHUNK));
}

struct CodedRow { int row, K, v_row, K_v; bool parameters, first_moments; };
static CodedRow coded_row(const spl_ctx& c, int r) {
  const bool parameters = r <= R_SH, firsts = !parameters && r <= R_M_SH;
  const int v_row = firsts ? r + R_V_MEAN - R_M_MEAN : r;
  return {r, (int)row_info(r, c.params.sh_degree).item_bytes / 4, v_row, (int)row_info(v_row, c.params.sh_degree).item_bytes / 4, parameters, firsts};
}

static void read_coded(spl_ctx& c, int r, int64_t first, int64_t count, float* to) {
  const CodedRow row = coded_row(c, r);
  in_chunks(first, count, [&](int64_t from, int64_t begin, int64_t end) {
    if (row.parameters) {
      const HostCodes<int16_t> x(c, r, from, end);
      const HostCodes<int8_t> exponents(c, R_EXPONENTS, from, end);
      for (int64_t i = begin; i < end; ++i) decode_parameters(x.codes.data(), exponents.codes.data(), r, row.K, i - from, to + (i - first) * row.K);
      return;
    }
    const HostCodes<uint16_t> v(c, row.v_row, from, end);
    auto root = [&](int64_t i, int k) { return decode_f16u(v.codes[place(i - from, k, row.K_v)]); };
    if (!row.first_moments) {
      for (int64_t i = begin; i < end; ++i) for (int k = 0; k < row.K; ++k) to[(i - first) * row.K + k] = root(i, k) * root(i, k);
      return;
    }
    const HostCodes<uint8_t> m(c, r, from, end);
    for (int64_t i = begin; i < end; ++i)
      for (int k = 0; k < row.K; ++k) to[(i - first) * row.K + k] = decode_f8(m.codes[place(i - from, k, row.K)]) * root(i, v_element(r == R_M_SH, k));
  });
}

static void write_parameters(spl_ctx& c, const CodedRow& row, int64_t from, int64_t begin, int64_t end, const float* values) {  // of `begin` on
  HostCodes<int16_t> x(c, row.row, from, end);
  HostCodes<int8_t> exponents(c, R_EXPONENTS, from, end);
  std::vector<float> lanes(SPL_OPT_BLOCK * row.K);
  for (int64_t block = from; block < end; block += SPL_OPT_BLOCK) {
    uint8_t changed[SPL_OPT_BLOCK] = {};
    const int64_t low = std::max(begin, block), high = std::min(end, block + SPL_OPT_BLOCK);
    std::fill(changed + (low - block), changed + (high - block), 1);
    memcpy(lanes.data() + (low - block) * row.K, values + (low - begin) * row.K, (high - low) * row.K * 4);
    encode_block({x.codes.data() + (block - from) * row.K, exponents_of(exponents.codes.data(), block - from), (int)std::min<int64_t>(SPL_OPT_BLOCK, c.n - block)}, row.row, row.K, changed, lanes.data());
  }
  x.store();
  exponents.store();
}

static void write_first_moments(spl_ctx& c, const CodedRow& row, int64_t from, int64_t begin, int64_t end, const float* values) {
  HostCodes<uint8_t> m(c, row.row, from, end);
  const HostCodes<uint16_t> v(c, row.v_row, from, end);
  for (int64_t i = begin; i < end; ++i)
    for (int k = 0; k < row.K; ++k)
      m.codes[place(i - from, k, row.K)] = encode_first(values[(i - begin) * row.K + k], decode_f16u(v.codes[place(i - from, v_element(row.row == R_M_SH, k), row.K_v)]), NEAREST);
  m.store();
}

static void check_first_moments(spl_ctx& c, const CodedRow& row, int64_t from, int64_t begin, int64_t end, const float* values) {
  const HostCodes<uint16_t> v(c, row.v_row, from, end);
  for (int64_t i = begin; i < end; ++i)
    for (int k = 0; k < row.K; ++k) {
      const float x = values[(i - begin) * row.K + k];
      if (x != 0 && !v.codes[place(i - from, v_element(row.row == R_M_SH, k), row.K_v)])
        fail(SPL_E_ARGUMENT, "%s: Gaussian %lld has %g, but no second moment to scale it by; write %s first", c.info(row.row).name, (long long)i, x, c.info(row.v_row).name);
    }
}

// The first moments stay what they are, as far as their codes go.
static void write_second_moments(spl_ctx& c, const CodedRow& row, int64_t from, int64_t begin, int64_t end, const float* values) {
  const int m_row = row.row - (R_V_MEAN - R_M_MEAN), K_m = coded_row(c, m_row).K;
  HostCodes<uint16_t> v(c, row.row, from, end);
  HostCodes<uint8_t> m(c, m_row, from, end);
  for (int64_t i = begin; i < end; ++i) {
    float m_now[48];
    for (int k = 0; k < K_m; ++k) m_now[k] = decode_f8(m.codes[place(i - from, k, K_m)]) * decode_f16u(v.codes[place(i - from, v_element(m_row == R_M_SH, k), row.K)]);
    for (int k = 0; k < row.K; ++k) v.codes[place(i - from, k, row.K)] = encode_f16u(sqrtf(values[(i - begin) * row.K + k]), NEAREST);
    for (int k = 0; k < K_m; ++k) m.codes[place(i - from, k, K_m)] = encode_first(m_now[k], decode_f16u(v.codes[place(i - from, v_element(m_row == R_M_SH, k), row.K)]), NEAREST);
  }
  v.store();
  m.store();
}

static void write_coded(spl_ctx& c, int r, int64_t first, int64_t count, const float* values) {
  const CodedRow row = coded_row(c, r);
  for (int64_t i = 0; i < count * row.K; ++i)
    if (!finite(values[i]) || (r >= R_V_MEAN && values[i] < 0))
      fail(SPL_E_ARGUMENT, "%s: Gaussian %lld has %g, which compact precision cannot store; it must be finite%s", c.info(r).name, (long long)(first + i / row.K), values[i], r >= R_V_MEAN ? " and >= 0" : "");
  if (row.first_moments) in_chunks(first, count, [&](int64_t from, int64_t begin, int64_t end) { check_first_moments(c, row, from, begin, end, values + (begin - first) * row.K); });
  in_chunks(first, count, [&](int64_t from, int64_t begin, int64_t end) {
    const float* at = values + (begin - first) * row.K;
    if (row.parameters) write_parameters(c, row, from, begin, end, at);
    else if (row.first_moments) write_first_moments(c, row, from, begin, end, at);
    else write_second_moments(c, row, from, begin, end, at);
  });
}

// Ends the step that was just issued, or leaves it running and describes the one before.
static void conclude(spl_ctx& c, const View& v, const spl_hyper& h, spl_step& out) {
  const int32_t deferred = out.deferred;
  c.pending = {true, c.counts[SPL_PAIRS] - 1, c.n_isects, v.pixels(), h.ssim_weight, h.depth_weight};
  if (deferred) {
    leave_phases(c);
  } else {
    end_phases(c);
    settle(c);
  }
  out = c.finished;
  out.deferred = deferred;
}

static void check_insert(const View& v, const spl_target& t, const spl_insert_params& p) {
  if (v.n_cameras != 1) fail(SPL_E_ARGUMENT, "spl_insert takes one camera, not %d", v.n_cameras);
  if (!t.rgb || !t.depth) fail(SPL_E_ARGUMENT, "spl_insert needs rgb and depth of the target, and n_new");
  if (!(p.hole_spacing_px >= 1) || !(p.size > 0) || !(p.opacity > 0 && p.opacity < 1) || !(p.min_depth_m > 0))
    fail(SPL_E_ARGUMENT, "spl_insert: hole_spacing_px %g must be >= 1, size %g > 0, opacity %g in (0, 1), min_depth_m %g > 0", p.hole_spacing_px, p.size, p.opacity, p.min_depth_m);
}

// How often each Gaussian is drawn after the moves (1: as before); refuses moves that contradict each other.
static std::vector<int> draws(const spl_ctx& c, int64_t n_moves, const int64_t* dst, const int64_t* src) {
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
  return times;
}

}  // namespace spl

using namespace spl;

// ---- life cycle -----------------------------------------------------------------------------------------------------------
int32_t spl_abi_version(void) { return SPL_ABI_VERSION; }
const char* spl_backend(void) { return SPL_BACKEND_NAME; }
const char* spl_error(const spl_ctx* c) { return c ? c->error.c_str() : create_error.c_str(); }

int64_t spl_constant(const char* name) {
  static const struct { const char* name; int64_t value; } table[] = {
#define X(name, value) {#name, value},
      SPL_CONSTANTS(X)
#undef X
#define X(type) {"sizeof " #type, sizeof(type)},
      X(spl_create_params) X(spl_row) X(spl_gaussians) X(spl_view) X(spl_image) X(spl_gaussian_grads) X(spl_step)
      X(spl_target) X(spl_hyper) X(spl_insert_params)
#undef X
      {"SPL_ABI_VERSION", SPL_ABI_VERSION}, {"SPL_N_ROWS", SPL_N_ROWS}, {"SPL_N_MAP_ROWS", SPL_N_MAP_ROWS}};
  for (const auto& t : table) if (name && !strcmp(t.name, name)) return t.value;
  return INT64_MIN;
}

int spl_create(const spl_create_params* p, spl_ctx** out) {
  spl_ctx* c = new spl_ctx;
  try {
    if (!out) fail(SPL_E_ARGUMENT, "spl_create: out is NULL");
    c->params = checked(p, "spl_create_params");
    if (p->sh_degree < 0 || p->sh_degree > 3) fail(SPL_E_ARGUMENT, "sh_degree %d: must be 0..3", p->sh_degree);
    if (p->max_gaussians < 1 || p->max_gaussians > UINT32_MAX) fail(SPL_E_ARGUMENT, "max_gaussians %lld: must be 1..%u", (long long)p->max_gaussians, UINT32_MAX);
    if (p->threads < 0 || p->threads > 1024) fail(SPL_E_ARGUMENT, "threads %d: must be 0 (all cores) .. 1024", p->threads);
    if (p->precision != SPL_FULL && p->precision != SPL_COMPACT) fail(SPL_E_ARGUMENT, "precision %d: must be %d (full) or %d (compact)", p->precision, SPL_FULL, SPL_COMPACT);
    open_context(*c);
    for (int r = 0; r < SPL_N_OWN_ROWS; ++r) c->map[r].reserve(c->map_bytes(r, c->most_gaussians()));
  } catch (const Failure& f) {
    create_error = f.text;
    spl_destroy(c);
    return f.status;
  }
  *out = c;
  return SPL_OK;
}

int spl_set_stream(spl_ctx* ctx, void* stream) {
  return guarded(ctx, [&](spl_ctx& c) { use_stream(c, stream); });
}

void spl_destroy(spl_ctx* c) {
  if (!c) return;
  try { activate(*c); } catch (const Failure&) {}  // a broken device cannot refuse this
  for (Region& r : c->map) r.release();
  c->arena.release();
  close_context(*c);
  delete c;
}

// ---- rendering and training: each reads like the pipeline ---------------------------------------------------------------------
int spl_render(spl_ctx* ctx, const spl_view* view, const spl_image* out) {
  return guarded(ctx, [&](spl_ctx& c) {
    const View v = make_view(view, c.params.sh_degree);
    const spl_image& image = checked(out, "spl_image");
    begin_step(c);
    forward(c, map_source(c), v, &image);
    copy_image(c, v, image);
    end_phases(c);
  });
}

int spl_forward(spl_ctx* ctx, const spl_gaussians* g, const spl_view* view, const spl_image* out) {
  return guarded(ctx, [&](spl_ctx& c) {
    const Source s = caller_source(g);
    const View v = make_view(view, (int)g->sh_degree);
    const spl_image& image = checked(out, "spl_image");
    begin_step(c);
    forward(c, s, v, &image);
    copy_image(c, v, image);
    end_phases(c);
  });
}

int spl_backward(spl_ctx* ctx, const spl_gaussians* g, const spl_view* view, const spl_image* v_image, const spl_gaussian_grads* out) {
  return guarded(ctx, [&](spl_ctx& c) {
    const Source s = caller_source(g);
    const View v = make_view(view, (int)g->sh_degree);
    const spl_image& upstream = checked(v_image, "spl_image");
    Sink sink;
    sink.grads = checked(out, "spl_gaussian_grads");
    if (s.n && !(sink.grads.means && sink.grads.quats && sink.grads.log_scales && sink.grads.logit_opacities && sink.grads.sh)) fail(SPL_E_ARGUMENT, "a gradient array is NULL");
    begin_step(c);
    forward(c, s, v);
    begin_phase(c, SPL_LOSS);
    load_image_grads(c, v, upstream);
    raster_bwd(c, v);
    project_bwd(c, s, v, sink);
    end_phases(c);
  });
}

int spl_train_step(spl_ctx* ctx, const spl_view* view, const spl_target* target, const spl_hyper* hyper, spl_step* out) {
  return guarded(ctx, [&](spl_ctx& c) {
    const View v = make_view(view, c.params.sh_degree);
    const spl_target& t = checked(target, "spl_target");
    spl_step step = checked(out, "spl_step");
    if (!t.rgb) fail(SPL_E_ARGUMENT, "spl_target.rgb is NULL");
    Sink sink;
    sink.hyper = &checked_hyper(hyper);
    begin_step(c);
    forward(c, map_source(c), v);
    loss(c, v, t, *hyper);
    raster_bwd(c, v);
    project_bwd(c, map_source(c), v, sink);
    conclude(c, v, *hyper, step);
    *out = step;
  });
}

int spl_loss(spl_ctx* ctx, const spl_view* view, const spl_image* image, const spl_target* target, const spl_hyper* hyper, const spl_image* v_image, spl_step* out) {
  return guarded(ctx, [&](spl_ctx& c) {
    const View v = make_view(view, -1);
    const spl_image &in = checked(image, "spl_image"), &g = checked(v_image, "spl_image");
    const spl_target& t = checked(target, "spl_target");
    spl_step step = checked(out, "spl_step");
    checked_hyper(hyper);
    if (!in.rgb || !t.rgb || (t.depth && !(in.depth && in.alpha))) fail(SPL_E_ARGUMENT, "rgb of image and target must be given, and depth and alpha of the image if the target has depth");
    begin_step(c);
    project(c, Source{}, v);
    begin_phase(c, SPL_BIN);
    begin_phase(c, SPL_RASTER);
    load_image(c, v, in);
    loss(c, v, t, *hyper);
    copy_image_grads(c, v, g);
    step.deferred = 0;
    conclude(c, v, *hyper, step);
    *out = step;
  });
}

// ---- the map ----------------------------------------------------------------------------------------------------------------
int64_t spl_map_size(const spl_ctx* c) { return c ? c->n : 0; }

int spl_map_append(spl_ctx* ctx, const spl_gaussians* g, int32_t owner) {
  return guarded(ctx, [&](spl_ctx& c) {
    const Source s = caller_source(g);
    if (s.direct_rgb || g->sh_degree > c.params.sh_degree) fail(SPL_E_ARGUMENT, "sh_degree %lld: must be 0..%d, what the map stores", (long long)g->sh_degree, c.params.sh_degree);
    fit_map(c, c.n + s.n);
    append_rows(c, s, owner);
    c.n += s.n;
  });
}

int spl_map_read(spl_ctx* ctx, const char* row, int64_t first, int64_t count, void* host) {
  return guarded(ctx, [&](spl_ctx& c) {
    const int r = map_row(c, row, first, count, host);
    if (c.info(r).coded) read_coded(c, r, first, count, (float*)host);
    else get(c, host, c.row<uint8_t>(r) + c.map_bytes(r, first), c.map_bytes(r, count));
  });
}

int spl_map_write(spl_ctx* ctx, const char* row, int64_t first, int64_t count, const void* host) {
  return guarded(ctx, [&](spl_ctx& c) {
    const int r = map_row(c, row, first, count, host);
    if (c.info(r).coded) write_coded(c, r, first, count, (const float*)host);
    else put(c, c.row<uint8_t>(r) + c.map_bytes(r, first), host, c.map_bytes(r, count));
  });
}

int spl_map_keep(spl_ctx* ctx, const uint8_t* keep, int64_t* n_kept) {
  return guarded(ctx, [&](spl_ctx& c) {
    if (!keep || !n_kept) fail(SPL_E_ARGUMENT, "keep and n_kept must be given");
    *n_kept = c.n = keep_rows(c, keep);
    trim_map(c);
  });
}

int spl_map_relocate(spl_ctx* ctx, int64_t n_moves, const int64_t* dst, const int64_t* src, float min_opacity) {
  return guarded(ctx, [&](spl_ctx& c) {
    if (n_moves < 0 || (n_moves && !(dst && src))) fail(SPL_E_ARGUMENT, "%lld moves: dst and src must be given", (long long)n_moves);
    move_rows(c, draws(c, n_moves, dst, src), n_moves, dst, src, min_opacity);
  });
}

int spl_insert(spl_ctx* ctx, const spl_view* view, const spl_target* target, const spl_insert_params* params, int64_t* n_new) {
  return guarded(ctx, [&](spl_ctx& c) {
    const View v = make_view(view, c.params.sh_degree);
    const spl_target& t = checked(target, "spl_target");
    const spl_insert_params& p = checked(params, "spl_insert_params");
    check_insert(v, t, p);
    if (!n_new) fail(SPL_E_ARGUMENT, "spl_insert: n_new is NULL");
    begin_step(c);
    forward(c, map_source(c), v);
    *n_new = insert(c, v, t, p);
  });
}

// ---- memory -----------------------------------------------------------------------------------------------------------------
int spl_report(spl_ctx* ctx, spl_row* rows, int32_t capacity, int32_t* n_rows) {
  return guarded(ctx, [&](spl_ctx& c) {
    if (!rows || !n_rows || capacity < SPL_N_ROWS + 1) fail(SPL_E_ARGUMENT, "spl_report needs room for %d rows", SPL_N_ROWS + 1);
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
    *n_rows = n;
  });
}

int spl_buffer(spl_ctx* ctx, const char* name, void** ptr, int64_t* bytes) {
  return guarded(ctx, [&](spl_ctx& c) {
    const int r = find_row(c, name);
    if (!ptr || !bytes) fail(SPL_E_ARGUMENT, "ptr and bytes must be given");
    *bytes = c.used_bytes(r);
    *ptr = readable(c, r, *bytes);
  });
}
