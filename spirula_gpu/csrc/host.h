// host.h: the host side that both backends share: errors, argument checks, and memory from the table of buffers.
// A backend defines spl::Region (its growable memory) before it includes this, and spl_ctx after it.
#pragma once
#include <algorithm>
#include <climits>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <new>
#include <string>
#include <vector>
#include "arena.h"
#include "layout.h"
#include "math.h"
#include "spirula.h"

namespace spl {

struct Failure { int status; std::string text; };  // thrown inside, turned into a status at the ABI
[[noreturn]] inline void fail(int status, const char* format, ...) __attribute__((format(printf, 2, 3)));
inline void fail(int status, const char* format, ...) {
  char text[512];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  throw Failure{status, text};
}
inline long long mib_needed(int64_t bytes) { return (bytes + (1 << 20) - 1) >> 20; }  // up, where a limit is rounded down: "6 > 5", never "5 > 5"
void memory_of_device(int64_t& free_bytes, int64_t& total_bytes);  // of the backend; 0 where that cannot be known
[[noreturn]] inline void refuse_memory(int64_t bytes, const char* what) {  // so much could not be had; 0: it is not known how much
  int64_t free = 0, total = 0;
  memory_of_device(free, total);
  char amount[48] = "what it needs";
  if (bytes) snprintf(amount, sizeof amount, "%lld MiB more", mib_needed(bytes));
  fail(SPL_E_MEMORY, "out of memory (%s): %s is not to be had, %lld MiB are free of %lld; end what else runs there, or lower engine.max_gaussians, "
       "engine.vram_budget_mb or the image size", what, amount, (long long)(free >> 20), (long long)(total >> 20));
}
template <class T> const T& checked(const T* p, const char* name) {
  if (!p || p->struct_size != (int64_t)sizeof(T)) fail(SPL_E_ARGUMENT, "%s: NULL or struct_size is not %zu: library and caller differ", name, sizeof(T));
  return *p;
}

struct Codes {  // of a compact map: gaussian.h decodes them
  const int16_t *quat, *log_scale, *opacity, *sh0;
  const int8_t* exponents;  // null: full precision
  const uint32_t* rest;     // [n][words]: SH from degree 1 on
  int words;
};

struct Source {  // the Gaussians that a call works on: the map's rows or the caller's arrays
  const float *mean, *quat, *scale, *opacity, *sh;  // of a compact map: the mean alone
  int64_t n;
  int sh_floats;      // per Gaussian in `sh`
  bool activated, direct_rgb;
  Codes codes{};      // of a compact map
};

struct Sink {  // where gradients go: either arrays, or (hyper != null) straight into Adam
  const spl_hyper* hyper = nullptr;
  spl_gaussian_grads grads{};
};

struct View {
  std::vector<Camera> cameras;
  int n_cameras, width, height, tiles_x, tiles_y, sh_degree;
  float background[3];
  int64_t pixels() const { return (int64_t)n_cameras * width * height; }
  int64_t tiles() const { return (int64_t)n_cameras * tiles_x * tiles_y; }
};

struct LossSums { double ssim, l1, depth; int64_t shown_px, depth_px; };  // over all pixels (and channels)

struct Found { int64_t pairs = 0, isects = 0; };  // what a projection finds: camera-Gaussian pairs, splat-tile intersections

// A training step whose end nobody has waited for: what describes it beside sums and times.
struct Pending { bool any; int64_t n_pairs, n_isects, pixels; float ssim_weight, depth_weight; };

struct Context : Layout {  // what a context of either backend owns; the Layout is its arena's
  spl_create_params params{};
  std::string error;
  int64_t n = 0;            // Gaussians in the map
  int64_t n_capacity = 0;   // with memory behind them
  Region map[SPL_N_OWN_ROWS];
  Region arena;
  Counts counts{};          // of the newest call
  int phase = SPL_PHASE_ALWAYS;
  double ms[SPL_N_PHASES] = {};
  int64_t n_isects = 0;     // of the newest projection
  LossSums sums{};          // of the newest loss
  int64_t fail_allocation = 0;  // for tests: the how manieth growth from now on fails, and every one after it; 0: none
  Pending pending{};        // a training step that may still run ..
  spl_step finished{};      // .. and the newest that does not

  Context() { finished.struct_size = sizeof finished; finished.n_pairs = finished.n_isects = -1; }

  template <class T> T* row(int r) {
    return (T*)(void*)(r < SPL_N_OWN_ROWS ? map[r].base : arena.base + plan.offset[r]);
  }
  RowInfo info(int r) const { return row_info(r, params.sh_degree, params.precision); }
  bool compact() const { return params.precision == SPL_COMPACT; }
  int64_t item_bytes(int r) const { return info(r).item_bytes; }
  int64_t map_bytes(int r, int64_t gaussians) const {  // of a row of the map; codes come in whole blocks
    const RowInfo i = info(r);
    const int64_t blocks = align_up(gaussians, SPL_OPT_BLOCK) / SPL_OPT_BLOCK;
    return (i.count == SPL_MAP_BLOCKS ? blocks : i.coded ? blocks * SPL_OPT_BLOCK : gaussians) * i.item_bytes;
  }
  int64_t used_bytes(int r) const { return r < SPL_N_OWN_ROWS ? map_bytes(r, n) : has(info(r).first) ? counts[info(r).count] * item_bytes(r) : 0; }
  int64_t map_capacity(int64_t gaussians) const { return std::min(align_up(gaussians, SPL_GROW_GAUSSIANS), most_gaussians()); }  // that there is memory for then
  int64_t most_gaussians() const { return align_up(params.max_gaussians, SPL_OPT_BLOCK); }  // that there is ever memory for
  int64_t budget() const { return params.budget_bytes > 0 ? params.budget_bytes : INT64_MAX; }
};

// The pending step has ended, and c.sums and c.ms are its own.
inline void settle(Context& c) {
  if (!c.pending.any) return;
  const Pending& p = c.pending;
  const LossSums& s = c.sums;
  spl_step& o = c.finished;
  o.n_pairs = p.n_pairs; o.n_isects = p.n_isects;
  o.l1 = s.l1 / (3.0 * std::max<int64_t>(s.shown_px, 1));
  o.ssim = p.ssim_weight != 0 ? s.ssim / (3.0 * p.pixels) : 0;
  o.depth = s.depth / (double)std::max<int64_t>(s.depth_px, 1);
  o.loss = (1 - p.ssim_weight) * o.l1 + (p.ssim_weight != 0 ? p.ssim_weight * (1 - o.ssim) : 0) + p.depth_weight * o.depth;
  memcpy(o.ms, c.ms, sizeof c.ms);
  c.pending.any = false;
}

// ---- memory -----------------------------------------------------------------------------------------------------------
inline int64_t held_bytes(const Context& c) {
  int64_t sum = c.arena.committed;
  for (const Region& r : c.map) sum += r.committed;
  return sum;
}

// Region::commit, but memory can be refused on purpose.
inline void commit(Context& c, Region& r, int64_t bytes, bool keep = true) {
  if (c.fail_allocation && Region::rounded(bytes) > r.committed) {
    if (c.fail_allocation == 1) refuse_memory(bytes - r.committed, "a test asked for it");
    --c.fail_allocation;
  }
  r.commit(bytes, keep);
}

inline void forget_arena(Context& c) {  // its rows hold nothing and are laid out anew
  (Layout&)c = Layout{};
  c.counts = Counts{};
}

// An arena of so many bytes, whose contents are lost. The address range is generous, so that growing keeps it where it is.
inline void resize_arena(Context& c, int64_t bytes) {
  try {
    if (bytes > c.arena.reserved) {
      c.arena.release();
      c.arena.reserve(std::max<int64_t>(4 * bytes, 1ll << 30));
    }
    commit(c, c.arena, bytes, false);
  } catch (const Failure&) {
    if (c.arena.committed < c.plan.total) forget_arena(c);  // else it is as it was
    throw;
  }
}

inline int64_t with_headroom(int64_t n) { return n + n / 4 + 1024; }

// What the arena becomes when it is laid out for `need` and the phases up to `last`. Roomy: capacities only grow, and what calls learn
// on the way (blocks, pairs, intersections) gets headroom. Else: what is needed now.
inline Layout laid_out(const Context& c, const Counts& need, int last, bool roomy) {
  Layout next;
  next.capacity = need;
  next.last = roomy ? std::max(last, c.last) : last;
  for (int k = 0; roomy && k < SPL_N_COUNTS; ++k) {
    const bool learnt = k == SPL_BLOCKS || k == SPL_PAIRS || k == SPL_ISECTS || k == SPL_KEY_BYTES;
    next.capacity[k] = need[k] <= c.capacity[k] ? c.capacity[k] : learnt ? with_headroom(need[k]) : need[k];
  }
  next.plan = plan_arena(next.capacity, next.last, c.params.sh_degree, c.params.arena_alias, c.params.arena_debug);
  return next;
}

inline int64_t held_with(const Context& c, const Layout& next) {  // bytes, if the arena were that
  return held_bytes(c) - c.arena.committed + Region::rounded(next.plan.total);
}

inline Layout next_layout(const Context& c, const Counts& need, int last) {  // roomy, unless the budget is too tight for that
  Layout next = laid_out(c, need, last, true);
  return held_with(c, next) <= c.budget() ? next : laid_out(c, need, last, false);
}

// Lays the arena out again if it does not hold so much; contents are lost.
inline void fit_arena(Context& c, const Counts& need, int last) {
  if (!c.holds(need, last)) {
    Layout next = next_layout(c, need, last);
    if (held_with(c, next) > c.budget())
      fail(SPL_E_CAPACITY, "this view needs %lld MiB of scratch beside %lld MiB of map (%lld visible pairs, %lld intersections) > budget %lld MiB; "
           "raise engine.vram_budget_mb or render smaller images; `spirula forecast` says what fits", mib_needed(next.plan.total),
           mib_needed(held_bytes(c) - c.arena.committed), (long long)need[SPL_PAIRS], (long long)need[SPL_ISECTS], (long long)(c.budget() >> 20));
    try {
      resize_arena(c, next.plan.total);
    } catch (const Failure& f) {
      if (f.status != SPL_E_MEMORY) throw;
      next = laid_out(c, need, last, false);
      resize_arena(c, next.plan.total);
    }
    (Layout&)c = next;
  }
  c.counts = need;
}

// The arena as scratch between calls, when it holds nothing: of at least so many bytes, or a refusal before anything has changed.
struct BorrowedArena {
  Context& c;
  const int64_t before;
  BorrowedArena(Context& context, int64_t bytes, const std::string& what, const char* or_else) : c(context), before(c.arena.committed) {
    if (bytes <= before) return;
    const int64_t others = held_bytes(c) - before;
    if (others + Region::rounded(bytes) > c.budget())
      fail(SPL_E_CAPACITY, "%s needs %lld MiB of scratch beside %lld MiB of map > budget %lld MiB; raise engine.vram_budget_mb, or %s",
           what.c_str(), mib_needed(bytes), mib_needed(others), (long long)(c.budget() >> 20), or_else);
    resize_arena(c, bytes);
  }
  void give_back() { if (c.arena.committed > before) c.arena.commit(before); }  // all work in it has ended; keeps, so that it cannot fail
  void keep() { if (held_bytes(c) > c.budget() / 2 && c.arena.committed > c.plan.total) c.arena.commit(c.plan.total); }  // for the next one, unless the map may soon need it
};

inline void fit_map(Context& c, int64_t n) {  // memory for n Gaussians, or SPL_E_CAPACITY
  if (n > c.params.max_gaussians)
    fail(SPL_E_CAPACITY, "%lld Gaussians > engine.max_gaussians %lld; raise it, prune, or relocate", (long long)n, (long long)c.params.max_gaussians);
  const int64_t want = c.map_capacity(n);
  if (want <= c.n_capacity) return;
  int64_t after = c.arena.committed;
  for (int r = 0; r < SPL_N_OWN_ROWS; ++r) after += std::max(Region::rounded(c.map_bytes(r, want)), c.map[r].committed);
  if (after > c.budget())
    fail(SPL_E_CAPACITY, "%lld Gaussians would make the engine hold %lld MiB > budget %lld MiB; raise engine.vram_budget_mb, prune, or relocate; `spirula forecast` says what fits",
         (long long)n, mib_needed(after), (long long)(c.budget() >> 20));
  try {
    for (int r = 0; r < SPL_N_OWN_ROWS; ++r) commit(c, c.map[r], std::max(c.map_bytes(r, want), c.map[r].committed));
  } catch (const Failure&) {  // all rows or none
    for (int r = 0; r < SPL_N_OWN_ROWS; ++r) c.map[r].commit(c.map_bytes(r, c.n_capacity));
    throw;
  }
  c.n_capacity = want;
}

// Memory that the map no longer needs goes back, so that the arena may have it.
inline void trim_map(Context& c) {
  const int64_t want = c.map_capacity(c.n);
  if (want >= c.n_capacity) return;
  for (int r = 0; r < SPL_N_OWN_ROWS; ++r) c.map[r].commit(c.map_bytes(r, want));
  c.n_capacity = want;
}

// Canaries and poison at the passage to `phase`, for arena_debug. Context offers fill(address, byte, count) and
// first_other(address, byte, count), the first byte that differs or -1.
template <class C> void check_and_poison(C& c, int phase) {
  auto at = [&](int r) { return c.template row<uint8_t>(r); };
  auto alive_in = [&](int r, int p) { const RowInfo i = row_info(r, c.params.sh_degree); return p >= i.first && p <= i.last; };
  for (int r = SPL_N_OWN_ROWS; r < SPL_N_ROWS; ++r) {
    if (!alive_in(r, c.phase)) continue;
    const int64_t bad = c.first_other(at(r) + c.plan.bytes[r], 0xC5, SPL_CANARY_BYTES);
    if (bad >= 0) fail(SPL_E_ARGUMENT, "arena: something wrote %lld bytes behind %s in phase %s (internal error)", (long long)bad + 1, row_info(r, 0).name, SPL_PHASE_NAMES[c.phase]);
  }
  const bool onwards = c.phase != SPL_PHASE_ALWAYS && phase > c.phase;
  for (int r = SPL_N_OWN_ROWS; r < SPL_N_ROWS; ++r)  // dead rows first: a living one may share their bytes
    if (onwards && alive_in(r, c.phase) && !alive_in(r, phase)) c.fill(at(r), 0xFF, c.plan.bytes[r] + SPL_CANARY_BYTES);
  for (int r = SPL_N_OWN_ROWS; r < SPL_N_ROWS; ++r) {
    if (!alive_in(r, phase) || (onwards && alive_in(r, c.phase))) continue;
    c.fill(at(r), 0xFF, c.plan.bytes[r]);
    c.fill(at(r) + c.plan.bytes[r], 0xC5, SPL_CANARY_BYTES);
  }
}

// What a call needs of the counts that both backends have; pairs and intersections as far as they are known.
inline Counts common_needs(const View& v, int64_t gaussians, const Found& found) {
  Counts need{};
  need[SPL_BLOCKS] = (gaussians * v.n_cameras + SPL_MASK_BLOCK - 1) / SPL_MASK_BLOCK + 1;
  need[SPL_PIXELS] = v.pixels();
  need[SPL_TILES] = v.tiles() + 1;
  need[SPL_PAIRS] = found.pairs + 1;
  need[SPL_ISECTS] = std::max<int64_t>(found.isects, 1);
  return need;
}

// ---- arguments ----------------------------------------------------------------------------------------------------------
inline View sized_view(int n_cameras, int width, int height) {  // without cameras
  if (n_cameras < 1 || n_cameras > SPL_MAX_CAMERAS) fail(SPL_E_ARGUMENT, "n_cameras %d: must be 1..%d", n_cameras, (int)SPL_MAX_CAMERAS);
  if (width < 1 || height < 1 || width > SPL_MAX_PX || height > SPL_MAX_PX)
    fail(SPL_E_ARGUMENT, "image %dx%d: must be 1..%d pixels each way", width, height, (int)SPL_MAX_PX);
  View out;
  out.n_cameras = n_cameras; out.width = width; out.height = height;
  out.tiles_x = (width + SPL_TILE_PX - 1) / SPL_TILE_PX;
  out.tiles_y = (height + SPL_TILE_PX - 1) / SPL_TILE_PX;
  if (out.tiles() > INT32_MAX) fail(SPL_E_ARGUMENT, "%lld tiles > %d: fewer cameras or smaller images", (long long)out.tiles(), INT32_MAX);
  return out;
}

inline View make_view(const spl_view* given, int stored_sh_degree) {
  const spl_view& v = checked(given, "spl_view");
  View out = sized_view(v.n_cameras, v.width, v.height);
  if (stored_sh_degree >= 0 && (v.sh_degree < 0 || v.sh_degree > stored_sh_degree))
    fail(SPL_E_ARGUMENT, "view.sh_degree %d: must be 0..%d, what is stored", v.sh_degree, stored_sh_degree);
  if (!v.viewmats || !v.Ks) fail(SPL_E_ARGUMENT, "viewmats and Ks must be given");
  if (!(v.blur_px2 >= 0) || !(v.near_m > 0)) fail(SPL_E_ARGUMENT, "blur_px2 %g must be >= 0 and near_m %g > 0", v.blur_px2, v.near_m);
  if (v.antialiased != 0 && v.antialiased != 1) fail(SPL_E_ARGUMENT, "antialiased %d: must be 0 or 1", v.antialiased);
  out.sh_degree = v.sh_degree;
  memcpy(out.background, v.background, sizeof out.background);
  for (int i = 0; i < v.n_cameras; ++i) {
    for (int k = 0; k < 16; ++k) if (!finite(v.viewmats[16 * i + k])) fail(SPL_E_ARGUMENT, "viewmats[%d] is not finite", i);
    for (int k = 0; k < 9; ++k) if (!finite(v.Ks[9 * i + k])) fail(SPL_E_ARGUMENT, "Ks[%d] is not finite", i);
    if (!(v.Ks[9 * i] > 0 && v.Ks[9 * i + 4] > 0)) fail(SPL_E_ARGUMENT, "Ks[%d]: focal lengths %g, %g must be > 0", i, v.Ks[9 * i], v.Ks[9 * i + 4]);
    out.cameras.push_back(make_camera(v.viewmats + 16 * i, v.Ks + 9 * i, v.width, v.height, v.blur_px2, v.near_m, v.antialiased == 1 && v.blur_px2 > 0));  // without blur the filter changes nothing but by rounding
  }
  return out;
}

inline Source map_source(Context& c) {
  const int floats = (int)row_info(R_SH, c.params.sh_degree).item_bytes / 4;
  if (!c.compact()) return {c.row<float>(R_MEAN), c.row<float>(R_QUAT), c.row<float>(R_LOG_SCALE), c.row<float>(R_OPACITY), c.row<float>(R_SH), c.n, floats, false, false};
  return {c.row<float>(R_MEAN), nullptr, nullptr, nullptr, nullptr, c.n, floats, false, false,
          {c.row<int16_t>(R_QUAT), c.row<int16_t>(R_LOG_SCALE), c.row<int16_t>(R_OPACITY), c.row<int16_t>(R_SH), c.row<int8_t>(R_EXPONENTS),
           c.row<uint32_t>(R_SH_REST), (int)c.item_bytes(R_SH_REST) / 4}};
}

inline Source caller_source(const spl_gaussians* given) {
  const spl_gaussians& g = checked(given, "spl_gaussians");
  if (g.n < 0 || g.n > UINT32_MAX) fail(SPL_E_ARGUMENT, "%lld Gaussians: must be 0..%u", (long long)g.n, UINT32_MAX);
  if (g.sh_degree < -1 || g.sh_degree > 3) fail(SPL_E_ARGUMENT, "sh_degree %lld: must be -1 (RGB) or 0..3", (long long)g.sh_degree);
  if (g.n && !(g.means && g.quats && g.log_scales && g.logit_opacities && g.sh)) fail(SPL_E_ARGUMENT, "a Gaussian array is NULL");
  const bool direct = g.sh_degree < 0;
  const int K = direct ? 1 : (int)((g.sh_degree + 1) * (g.sh_degree + 1));
  return {g.means, g.quats, g.log_scales, g.logit_opacities, g.sh, g.n, 3 * K, (g.flags & SPL_ACTIVATED) != 0, direct};
}

inline const spl_create_params& checked_create(const spl_create_params* given) {
  const spl_create_params& p = checked(given, "spl_create_params");
  if (p.sh_degree < 0 || p.sh_degree > 3) fail(SPL_E_ARGUMENT, "sh_degree %d: must be 0..3", p.sh_degree);
  if (p.max_gaussians < 1 || p.max_gaussians > UINT32_MAX) fail(SPL_E_ARGUMENT, "max_gaussians %lld: must be 1..%u", (long long)p.max_gaussians, UINT32_MAX);
  if (p.threads < 0 || p.threads > 1024) fail(SPL_E_ARGUMENT, "threads %d: must be 0 (all cores) .. 1024", p.threads);
  if (p.precision != SPL_FULL && p.precision != SPL_COMPACT) fail(SPL_E_ARGUMENT, "precision %d: must be %d (full) or %d (compact)", p.precision, SPL_FULL, SPL_COMPACT);
  return p;
}

inline const spl_hyper& checked_hyper(const spl_hyper* given) {
  const spl_hyper& h = checked(given, "spl_hyper");
  const float rates[] = {h.lr_mean, h.lr_quat, h.lr_log_scale, h.lr_logit_opacity, h.lr_sh0, h.lr_sh_rest, h.ssim_weight, h.depth_weight, h.opacity_reg, h.scale_reg, h.eps, h.lr_mean_final, h.lr_decay_steps, h.noise};
  for (float r : rates) if (!(r >= 0) || !finite(r)) fail(SPL_E_ARGUMENT, "spl_hyper: a rate or weight is %g, must be >= 0 and finite", r);
  if (!(h.eps > 0)) fail(SPL_E_ARGUMENT, "eps %g: must be > 0; where a gradient has always been 0, 0 / 0 would be no step but NaN", h.eps);
  if (!(h.beta1 >= 0 && h.beta1 < 1 && h.beta2 >= 0 && h.beta2 < 1)) fail(SPL_E_ARGUMENT, "beta1 %g, beta2 %g: must lie in [0, 1)", h.beta1, h.beta2);
  if (h.lr_decay_steps > 0 && h.lr_mean > 0 && !(h.lr_mean_final > 0)) fail(SPL_E_ARGUMENT, "lr_mean %g cannot decay to lr_mean_final %g: it must be > 0", h.lr_mean, h.lr_mean_final);
  if (h.ssim_weight > 1) fail(SPL_E_ARGUMENT, "ssim_weight %g: must lie in [0, 1]", h.ssim_weight);
  return h;
}

}  // namespace spl
