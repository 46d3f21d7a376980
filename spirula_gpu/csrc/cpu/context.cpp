// context.cpp: life cycle, memory from the table of buffers, phases, argument checks.
#include "context.h"
#include <sys/mman.h>
#include <unistd.h>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdio>
#include <cstring>
#include <omp.h>

namespace spl {

void fail(int status, const char* format, ...) {
  char text[512];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  throw Failure{status, text};
}

static int64_t page_bytes() {
  static const int64_t bytes = sysconf(_SC_PAGESIZE);
  return bytes;
}

void Region::reserve(int64_t bytes) {
  reserved = align_up(std::max<int64_t>(bytes, 1), page_bytes());
  void* p = mmap(nullptr, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) {
    reserved = 0;
    fail(SPL_E_MEMORY, "cannot reserve %lld MiB of address space (%s): lower engine.max_gaussians or raise ulimit -v", (long long)(bytes >> 20), strerror(errno));
  }
  base = (uint8_t*)p;
}

void Region::commit(int64_t bytes) {
  bytes = align_up(bytes, page_bytes());
  if (bytes > committed) {
    if (bytes > reserved) fail(SPL_E_CAPACITY, "%lld bytes > %lld reserved", (long long)bytes, (long long)reserved);
    if (mprotect(base + committed, bytes - committed, PROT_READ | PROT_WRITE))
      fail(SPL_E_MEMORY, "cannot take %lld MiB more (%s): lower engine.max_gaussians or engine.vram_budget_mb", (long long)((bytes - committed) >> 20), strerror(errno));
    memset(base + committed, 0, bytes - committed);  // resident now: what we report is what the process holds
  } else if (bytes < committed) {
    madvise(base + bytes, committed - bytes, MADV_DONTNEED);
    mprotect(base + bytes, committed - bytes, PROT_NONE);
  }
  committed = bytes;
}

void Region::release() {
  if (base) munmap(base, reserved);
  *this = Region{};
}

static int64_t budget_of(const spl_ctx& c) { return c.params.budget_bytes > 0 ? c.params.budget_bytes : INT64_MAX; }

int64_t held_bytes(const spl_ctx& c) {
  int64_t sum = c.arena.committed;
  for (const Region& r : c.map) sum += r.committed;
  return sum;
}

// Capacities only grow, and what a call learns on the way (blocks, pairs, intersections) gets headroom, unless the budget
// is too tight for either. The address range is generous, so that growing keeps the arena where it is.
void fit_arena(spl_ctx& c, const Counts& need) {
  Counts capacity = c.capacity;
  bool grow = c.arena.base == nullptr;
  for (int k = 0; k < SPL_N_COUNTS; ++k) {
    if (need[k] <= capacity[k]) continue;
    const bool headroom = k == SPL_BLOCKS || k == SPL_PAIRS || k == SPL_ISECTS;
    capacity[k] = headroom ? need[k] + need[k] / 4 + 1024 : need[k];
    grow = true;
  }
  if (!grow) {
    c.counts = need;
    return;
  }
  const int64_t others = held_bytes(c) - c.arena.committed;
  ArenaPlan plan = plan_arena(capacity, c.params.sh_degree, c.params.arena_alias, c.params.arena_debug);
  if (others + plan.total > budget_of(c)) plan = plan_arena(capacity = need, c.params.sh_degree, c.params.arena_alias, c.params.arena_debug);
  if (others + plan.total > budget_of(c))
    fail(SPL_E_CAPACITY, "this view needs %lld MiB of scratch beside %lld MiB of map (%lld visible pairs, %lld intersections) > budget %lld MiB; "
         "raise engine.vram_budget_mb or render smaller images", (long long)(plan.total >> 20), (long long)(others >> 20),
         (long long)need[SPL_PAIRS], (long long)need[SPL_ISECTS], (long long)(budget_of(c) >> 20));
  if (plan.total > c.arena.reserved) {
    c.arena.release();
    c.capacity = Counts{};
    c.arena.reserve(std::max<int64_t>(4 * plan.total, 1ll << 30));
  }
  c.arena.commit(plan.total);
  c.plan = plan;
  c.capacity = capacity;
  c.counts = need;
}

void fit_map(spl_ctx& c, int64_t n) {
  if (n > c.params.max_gaussians)
    fail(SPL_E_CAPACITY, "%lld Gaussians > engine.max_gaussians %lld; raise it, prune, or relocate", (long long)n, (long long)c.params.max_gaussians);
  int64_t want = std::min(align_up(n, SPL_GROW_GAUSSIANS), c.params.max_gaussians);
  if (want <= c.n_capacity) return;
  int64_t per_gaussian = 0;
  for (int r = 0; r < SPL_N_MAP_ROWS; ++r) per_gaussian += c.item_bytes(r);
  const int64_t after = held_bytes(c) + (want - c.n_capacity) * per_gaussian;
  if (after > budget_of(c))
    fail(SPL_E_CAPACITY, "%lld Gaussians would make the engine hold %lld MiB > budget %lld MiB; raise engine.vram_budget_mb, prune, or relocate",
         (long long)n, (long long)(after >> 20), (long long)(budget_of(c) >> 20));
  try {
    for (int r = 0; r < SPL_N_MAP_ROWS; ++r) c.map[r].commit(want * c.item_bytes(r));
  } catch (const Failure&) {  // all rows or none
    for (int r = 0; r < SPL_N_MAP_ROWS; ++r) c.map[r].commit(c.n_capacity * c.item_bytes(r));
    throw;
  }
  c.n_capacity = want;
}

// Memory that the map no longer needs goes back, so that the arena may have it.
void trim_map(spl_ctx& c) {
  const int64_t want = std::min<int64_t>(align_up(c.n, SPL_GROW_GAUSSIANS), c.params.max_gaussians);
  if (want >= c.n_capacity) return;
  for (int r = 0; r < SPL_N_MAP_ROWS; ++r) c.map[r].commit(want * c.item_bytes(r));
  c.n_capacity = want;
}

// ---- phases -----------------------------------------------------------------------------------------------------------
static double now_ms() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

static void check_and_poison(spl_ctx& c, int phase) {
  for (int r = SPL_N_MAP_ROWS; r < SPL_N_ROWS; ++r) {
    const RowInfo info = row_info(r, c.params.sh_degree);
    uint8_t* p = c.row<uint8_t>(r);
    uint8_t* canary = p + c.plan.bytes[r];
    if (c.phase >= info.first && c.phase <= info.last)  // it was alive until now
      for (int i = 0; i < SPL_CANARY_BYTES; ++i)
        if (canary[i] != 0xC5) fail(SPL_E_ARGUMENT, "arena: something wrote %d bytes behind %s in phase %s (internal error)", i + 1, info.name, SPL_PHASE_NAMES[c.phase]);
  }
  for (int r = SPL_N_MAP_ROWS; r < SPL_N_ROWS; ++r) {  // dead rows first: a living one may share their bytes
    const RowInfo info = row_info(r, c.params.sh_degree);
    const bool alive = c.phase >= info.first && c.phase <= info.last && phase > c.phase;
    if (alive && !(phase >= info.first && phase <= info.last)) memset(c.row<uint8_t>(r), 0xFF, c.plan.bytes[r] + SPL_CANARY_BYTES);
  }
  for (int r = SPL_N_MAP_ROWS; r < SPL_N_ROWS; ++r) {
    const RowInfo info = row_info(r, c.params.sh_degree);
    const bool was = c.phase != SPL_PHASE_ALWAYS && phase > c.phase && c.phase >= info.first && c.phase <= info.last;
    if (phase >= info.first && phase <= info.last && !was) {
      memset(c.row<uint8_t>(r), 0xFF, c.plan.bytes[r]);
      memset(c.row<uint8_t>(r) + c.plan.bytes[r], 0xC5, SPL_CANARY_BYTES);
    }
  }
}

void begin_phase(spl_ctx& c, int phase) {
  const double now = now_ms();
  if (c.phase != SPL_PHASE_ALWAYS) c.ms[c.phase] += now - c.phase_began;
  if (c.params.arena_debug) check_and_poison(c, phase);
  c.phase = phase;
  c.phase_began = now_ms();
}

void begin_step(spl_ctx& c) { memset(c.ms, 0, sizeof c.ms); }

void end_phases(spl_ctx& c) {
  if (c.phase != SPL_PHASE_ALWAYS) c.ms[c.phase] += now_ms() - c.phase_began;
  if (c.params.arena_debug && c.phase != SPL_PHASE_ALWAYS) check_and_poison(c, SPL_N_PHASES);
  c.phase = SPL_PHASE_ALWAYS;
}

// ---- arguments ----------------------------------------------------------------------------------------------------------
View make_view(const spl_ctx& c, const spl_view* v, int stored_sh_degree) {
  if (!v || v->struct_size != sizeof(spl_view)) fail(SPL_E_ARGUMENT, "spl_view: struct_size must be %zu", sizeof(spl_view));
  if (v->n_cameras < 1 || v->n_cameras > SPL_MAX_CAMERAS) fail(SPL_E_ARGUMENT, "n_cameras %d: must be 1..%d", v->n_cameras, (int)SPL_MAX_CAMERAS);
  if (v->width < 1 || v->height < 1 || v->width > SPL_MAX_PX || v->height > SPL_MAX_PX)
    fail(SPL_E_ARGUMENT, "image %dx%d: must be 1..%d pixels each way", v->width, v->height, (int)SPL_MAX_PX);
  if (stored_sh_degree >= 0 && (v->sh_degree < 0 || v->sh_degree > stored_sh_degree))
    fail(SPL_E_ARGUMENT, "view.sh_degree %d: must be 0..%d, what is stored", v->sh_degree, stored_sh_degree);
  if (!v->viewmats || !v->Ks) fail(SPL_E_ARGUMENT, "viewmats and Ks must be given");
  if (!(v->blur_px2 >= 0) || !(v->near_m > 0)) fail(SPL_E_ARGUMENT, "blur_px2 %g must be >= 0 and near_m %g > 0", v->blur_px2, v->near_m);
  View out;
  out.n_cameras = v->n_cameras; out.width = v->width; out.height = v->height;
  out.tiles_x = (v->width + SPL_TILE_PX - 1) / SPL_TILE_PX;
  out.tiles_y = (v->height + SPL_TILE_PX - 1) / SPL_TILE_PX;
  out.sh_degree = v->sh_degree;
  if (out.tiles() > INT32_MAX) fail(SPL_E_ARGUMENT, "%lld tiles > %d: fewer cameras or smaller images", (long long)out.tiles(), INT32_MAX);
  memcpy(out.background, v->background, sizeof out.background);
  for (int i = 0; i < v->n_cameras; ++i) {
    for (int k = 0; k < 16; ++k) if (!finite(v->viewmats[16 * i + k])) fail(SPL_E_ARGUMENT, "viewmats[%d] is not finite", i);
    for (int k = 0; k < 9; ++k) if (!finite(v->Ks[9 * i + k])) fail(SPL_E_ARGUMENT, "Ks[%d] is not finite", i);
    if (!(v->Ks[9 * i] > 0 && v->Ks[9 * i + 4] > 0)) fail(SPL_E_ARGUMENT, "Ks[%d]: focal lengths %g, %g must be > 0", i, v->Ks[9 * i], v->Ks[9 * i + 4]);
    out.cameras.push_back(make_camera(v->viewmats + 16 * i, v->Ks + 9 * i, v->width, v->height, v->blur_px2, v->near_m));
  }
  (void)c;
  return out;
}

Source map_source(spl_ctx& c) {
  const int K = (c.params.sh_degree + 1) * (c.params.sh_degree + 1);
  return {c.row<float>(R_MEAN), c.row<float>(R_QUAT), c.row<float>(R_LOG_SCALE), c.row<float>(R_OPACITY), c.row<float>(R_SH), c.n, 3 * K, false, false};
}

Source caller_source(const spl_gaussians* g) {
  if (!g || g->struct_size != sizeof(spl_gaussians)) fail(SPL_E_ARGUMENT, "spl_gaussians: struct_size must be %zu", sizeof(spl_gaussians));
  if (g->n < 0 || g->n > UINT32_MAX) fail(SPL_E_ARGUMENT, "%lld Gaussians: must be 0..%u", (long long)g->n, UINT32_MAX);
  if (g->sh_degree < -1 || g->sh_degree > 3) fail(SPL_E_ARGUMENT, "sh_degree %lld: must be -1 (RGB) or 0..3", (long long)g->sh_degree);
  if (g->n && !(g->means && g->quats && g->log_scales && g->logit_opacities && g->sh)) fail(SPL_E_ARGUMENT, "a Gaussian array is NULL");
  const bool direct = g->sh_degree < 0;
  const int K = direct ? 1 : (int)((g->sh_degree + 1) * (g->sh_degree + 1));
  return {g->means, g->quats, g->log_scales, g->logit_opacities, g->sh, g->n, 3 * K, (g->flags & SPL_ACTIVATED) != 0, direct};
}

}  // namespace spl

// ---- life cycle -----------------------------------------------------------------------------------------------------------
using namespace spl;
static thread_local std::string create_error;

int32_t spl_abi_version(void) { return SPL_ABI_VERSION; }
const char* spl_backend(void) { return "cpu"; }
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
    if (!p || !out || p->struct_size != sizeof(spl_create_params)) fail(SPL_E_ARGUMENT, "spl_create_params: struct_size must be %zu", sizeof(spl_create_params));
    if (p->sh_degree < 0 || p->sh_degree > 3) fail(SPL_E_ARGUMENT, "sh_degree %d: must be 0..3", p->sh_degree);
    if (p->max_gaussians < 1 || p->max_gaussians > UINT32_MAX) fail(SPL_E_ARGUMENT, "max_gaussians %lld: must be 1..%u", (long long)p->max_gaussians, UINT32_MAX);
    if (p->threads < 0 || p->threads > 1024) fail(SPL_E_ARGUMENT, "threads %d: must be 0 (all cores) .. 1024", p->threads);
    c->params = *p;
    c->threads = p->threads ? p->threads : omp_get_num_procs();
    for (int r = 0; r < SPL_N_MAP_ROWS; ++r) c->map[r].reserve(c->params.max_gaussians * c->item_bytes(r));
  } catch (const Failure& f) {
    create_error = f.text;
    spl_destroy(c);
    return f.status;
  }
  *out = c;
  return SPL_OK;
}

void spl_destroy(spl_ctx* c) {
  if (!c) return;
  for (Region& r : c->map) r.release();
  c->arena.release();
  delete c;
}
