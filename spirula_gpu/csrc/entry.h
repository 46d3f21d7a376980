// entry.h: the entry points of spirula.h, the same for both backends; included by one file of each (step.cpp, step.cu).
// Nothing is thrown across them: a failure becomes a status and a text.
#pragma once
#include "align.h"
#include "forecast.h"
#include "ops.h"
#include "rows.h"

namespace spl {

inline thread_local std::string create_error;

struct Active { spl_ctx& c; ~Active() { deactivate(c); } };

template <class F> int guarded(spl_ctx* c, F&& body) {
  if (!c) return SPL_E_ARGUMENT;
  const Active until_the_end{*c};
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
  if (r == R_SH_REST) fail(SPL_E_ARGUMENT, "%s holds codes; read and write map.sh, in fp32", name);
  if (first < 0 || count < 0 || first > c.n || count > c.n - first) fail(SPL_E_ARGUMENT, "%s: %lld from %lld on, of %lld Gaussians", name, (long long)count, (long long)first, (long long)c.n);
  return r;
}

// Bytes [first, first + bytes) of a saved row, as they are stored.
static uint8_t* saved_bytes(spl_ctx& c, const char* name, int64_t first, int64_t bytes, const void* host) {
  if (!host) fail(SPL_E_ARGUMENT, "host is NULL");
  for (int r = 0; r < SPL_N_ROWS; ++r) {
    const RowInfo info = row_info(r, c.params.sh_degree);
    if (!name || !info.saved || strcmp(info.name, name)) continue;
    const int64_t all = c.used_bytes(r);
    if (first < 0 || bytes < 0 || first > all || bytes > all - first) fail(SPL_E_ARGUMENT, "%s: %lld bytes from %lld on, of %lld", name, (long long)bytes, (long long)first, (long long)all);
    return c.row<uint8_t>(r) + first;
  }
  fail(SPL_E_ARGUMENT, "no saved buffer is called '%s'; spl_report lists them", name ? name : "NULL");
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

static void check_photo(const spl_photo* photo, const char* name, int64_t index, const void* image) {
  const spl_photo& p = checked(photo, "spl_photo");
  if (p.width < 2 || p.height < 2 || p.width > SPL_MAX_PX || p.height > SPL_MAX_PX) fail(SPL_E_ARGUMENT, "%s %lld: image %dx%d: must be 2..%d pixels each way", name, (long long)index, p.width, p.height, (int)SPL_MAX_PX);
  if (!image || !p.K || (index >= 0 && !p.T_photo_ref)) fail(SPL_E_ARGUMENT, "%s %lld: image, K and T_photo_ref must be given", name, (long long)index);
  for (int k = 0; k < 9; ++k) if (!finite(p.K[k])) fail(SPL_E_ARGUMENT, "%s %lld: K is not finite", name, (long long)index);
  if (!(p.K[0] > 0 && p.K[4] > 0)) fail(SPL_E_ARGUMENT, "%s %lld: focal lengths %g, %g must be > 0", name, (long long)index, p.K[0], p.K[4]);
  for (int k = 0; k < 16 && index >= 0; ++k) if (!finite(p.T_photo_ref[k])) fail(SPL_E_ARGUMENT, "%s %lld: T_photo_ref is not finite", name, (long long)index);
}

static void check_photos(const spl_photo* ref, int64_t n, const spl_photo* views, const uint8_t* spl_photo::*gray, const float* spl_photo::*depth) {
  if (n < 1 || n > SPL_MAX_PHOTOS) fail(SPL_E_ARGUMENT, "%lld views: must be 1..%d", (long long)n, (int)SPL_MAX_PHOTOS);
  auto image = [&](const spl_photo* p) { return !p ? nullptr : gray ? (const void*)(p->*gray) : (const void*)(p->*depth); };
  check_photo(ref, "reference", -1, image(ref));
  for (int64_t i = 0; i < n; ++i) check_photo(views ? views + i : nullptr, "view", i, image(views ? views + i : nullptr));
}

static void check_alignment(const spl_alignment& a) {
  if (a.width < 4 || a.height < 4 || a.width > SPL_MAX_PX || a.height > SPL_MAX_PX) fail(SPL_E_ARGUMENT, "image %dx%d: must be 4..%d pixels each way", a.width, a.height, (int)SPL_MAX_PX);
  if (!a.grey || !a.valid || a.n < 0 || (a.n && !a.points)) fail(SPL_E_ARGUMENT, "spl_align: grey, valid and points must be given, and their number %lld >= 0", (long long)a.n);
  if (a.iterations < 0 || !(a.sigma_m > 0 && a.sigma_rad > 0)) fail(SPL_E_ARGUMENT, "spl_align: iterations %d must be >= 0, sigma_m %g and sigma_rad %g > 0", a.iterations, a.sigma_m, a.sigma_rad);
  double sum = a.fx + a.fy + a.cx + a.cy + a.scales[0] + a.scales[1];
  for (int k = 0; k < 16; ++k) sum += a.T[k] + a.T_prior[k];
  if (!std::isfinite(sum)) fail(SPL_E_ARGUMENT, "spl_align: intrinsics, scales and poses must be finite");
}

static void check_sweep(const spl_photo& ref, const spl_sweep_params& p) {
  if (!(p.min_inv >= 0 && p.max_inv > p.min_inv && finite(p.max_inv))) fail(SPL_E_ARGUMENT, "inverse depths from %g to %g 1/m: must rise from >= 0", p.min_inv, p.max_inv);
  if (p.n_planes < 4 || p.n_planes > SPL_MAX_PLANES) fail(SPL_E_ARGUMENT, "%d planes: must be 4..%d", p.n_planes, (int)SPL_MAX_PLANES);
  const int64_t cells = (int64_t)ref.width * ref.height * p.n_planes;
  if (cells > 1ll << 28) fail(SPL_E_CAPACITY, "%dx%d pixels and %d planes take %lld MiB, more than 768: use a smaller image or fewer planes", ref.width, ref.height, p.n_planes, (long long)(3 * cells >> 20));
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
      X(spl_target) X(spl_hyper) X(spl_insert_params) X(spl_memory) X(spl_workload) X(spl_photo) X(spl_sweep_params) X(spl_alignment)
#undef X
      {"SPL_ABI_VERSION", SPL_ABI_VERSION}, {"SPL_N_ROWS", SPL_N_ROWS}, {"SPL_N_MAP_ROWS", SPL_N_MAP_ROWS}};
  for (const auto& t : table) if (name && !strcmp(t.name, name)) return t.value;
  return INT64_MIN;
}

int spl_create(const spl_create_params* p, spl_ctx** out) {
  spl_ctx* c = new spl_ctx;
  try {
    if (!out) fail(SPL_E_ARGUMENT, "spl_create: out is NULL");
    c->params = checked_create(p);
    open_context(*c);
    for (int r = 0; r < SPL_N_OWN_ROWS; ++r) c->map[r].reserve(c->map_bytes(r, c->most_gaussians()));
  } catch (const Failure& f) {
    create_error = f.text;
    spl_destroy(c);
    return f.status;
  }
  deactivate(*c);
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
  deactivate(*c);
  delete c;
}

// ---- rendering and training: each reads like the pipeline ---------------------------------------------------------------------
int spl_render(spl_ctx* ctx, const spl_view* view, const spl_image* out) {
  return guarded(ctx, [&](spl_ctx& c) {
    const View v = make_view(view, c.params.sh_degree);
    const spl_image& image = checked(out, "spl_image");
    begin_step(c);
    forward(c, map_source(c), v, SPL_RASTER, &image);
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
    forward(c, s, v, SPL_RASTER, &image);
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
    forward(c, s, v, SPL_PROJECT_BWD);
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
    forward(c, map_source(c), v, SPL_PROJECT_BWD);
    loss(c, v, t, *hyper);
    raster_bwd(c, v);
    project_bwd(c, map_source(c), v, sink);
    conclude(c, v, *hyper, step);
    *out = step;
  });
}

int spl_last_step(spl_ctx* ctx, spl_step* out) {
  return guarded(ctx, [&](spl_ctx& c) {
    checked(out, "spl_step");
    if (c.pending.any) {
      end_phases(c);
      settle(c);
    }
    *out = c.finished;
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
    project(c, Source{}, v, SPL_LOSS);
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

int spl_map_make(spl_ctx* ctx, int64_t n) {
  return guarded(ctx, [&](spl_ctx& c) {
    if (c.n || n < 0) fail(SPL_E_ARGUMENT, "spl_map_make: %lld Gaussians into a map of %lld: it must be empty", (long long)n, (long long)c.n);
    fit_map(c, n);
    c.n = n;
  });
}

int spl_map_read_raw(spl_ctx* ctx, const char* row, int64_t first, int64_t bytes, void* host) {
  return guarded(ctx, [&](spl_ctx& c) { get(c, host, saved_bytes(c, row, first, bytes, host), bytes); });
}

int spl_map_write_raw(spl_ctx* ctx, const char* row, int64_t first, int64_t bytes, const void* host) {
  return guarded(ctx, [&](spl_ctx& c) { put(c, saved_bytes(c, row, first, bytes, host), host, bytes); });
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

int spl_map_sort(spl_ctx* ctx, int64_t* n_moved) {
  return guarded(ctx, [&](spl_ctx& c) {
    if (!n_moved) fail(SPL_E_ARGUMENT, "spl_map_sort: n_moved is NULL");
    *n_moved = sort_rows(c);
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
    forward(c, map_source(c), v, SPL_LOSS);
    *n_new = insert(c, v, t, p);
  });
}

int spl_sweep(spl_ctx* ctx, const spl_photo* ref, int64_t n_views, const spl_photo* views, const spl_sweep_params* params, float* depth_m, float* confidence) {
  return guarded(ctx, [&](spl_ctx& c) {
    check_photos(ref, n_views, views, &spl_photo::gray, nullptr);
    check_sweep(*ref, checked(params, "spl_sweep_params"));
    if (!depth_m || !confidence) fail(SPL_E_ARGUMENT, "spl_sweep: depth_m and confidence must be given");
    sweep(c, *ref, (int)n_views, views, *params, depth_m, confidence);
  });
}

int spl_agree(spl_ctx* ctx, const spl_photo* ref, int64_t n_views, const spl_photo* views, float tolerance, float* depth_m, uint8_t* count) {
  return guarded(ctx, [&](spl_ctx& c) {
    check_photos(ref, n_views, views, nullptr, &spl_photo::depth);
    if (!depth_m || !count || !(tolerance > 0)) fail(SPL_E_ARGUMENT, "spl_agree: depth_m and count must be given, and a tolerance %g > 0", tolerance);
    agree(c, *ref, (int)n_views, views, tolerance, depth_m, count);
  });
}

int spl_align(spl_alignment* alignment) {
  try {
    checked(alignment, "spl_alignment");
    check_alignment(*alignment);
    alignment->found = Alignment(*alignment).descend();
    return SPL_OK;
  } catch (const Failure& f) {
    create_error = f.text;
    return f.status;
  } catch (const std::bad_alloc&) {
    create_error = "the system is out of memory";
    return SPL_E_MEMORY;
  }
}

// ---- memory -----------------------------------------------------------------------------------------------------------------
int spl_report(spl_ctx* ctx, spl_row* rows, int32_t capacity, int32_t* n_rows) {
  return guarded(ctx, [&](spl_ctx& c) {
    if (!rows || !n_rows || capacity < SPL_N_ROWS + 1) fail(SPL_E_ARGUMENT, "spl_report needs room for %d rows", SPL_N_ROWS + 1);
    *n_rows = list_rows(c, rows);
  });
}

int spl_forecast(const spl_create_params* params, const spl_workload* work, spl_row* rows, int32_t capacity, int32_t* n_rows) {
  try {
    if (!rows || !n_rows || capacity < SPL_N_ROWS + 1) fail(SPL_E_ARGUMENT, "spl_forecast needs room for %d rows", SPL_N_ROWS + 1);
    *n_rows = list_rows(forecast(checked_create(params), checked(work, "spl_workload")), rows);
    return SPL_OK;
  } catch (const Failure& f) {
    create_error = f.text;
    return f.status;
  }
}

int spl_buffer(spl_ctx* ctx, const char* name, void** ptr, int64_t* bytes) {
  return guarded(ctx, [&](spl_ctx& c) {
    const int r = find_row(c, name);
    if (!ptr || !bytes) fail(SPL_E_ARGUMENT, "ptr and bytes must be given");
    *bytes = c.used_bytes(r);
    *ptr = readable(c, r, *bytes);
  });
}

int spl_memory_info(spl_ctx* ctx, spl_memory* out) {
  return guarded(ctx, [&](spl_ctx& c) {
    spl_memory m = checked(out, "spl_memory");
    measure(c, m);
    *out = m;
  });
}

int spl_fail_allocation(spl_ctx* ctx, int64_t nth) {
  return guarded(ctx, [&](spl_ctx& c) {
    if (nth < 0) fail(SPL_E_ARGUMENT, "nth %lld: must be >= 0", (long long)nth);
    c.fail_allocation = nth;
  });
}
