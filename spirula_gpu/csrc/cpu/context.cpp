// context.cpp: memory of the process, phases.
#include "context.h"
#include <sys/mman.h>
#include <unistd.h>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <omp.h>

namespace spl {

static int64_t page_bytes() {
  static const int64_t bytes = sysconf(_SC_PAGESIZE);
  return bytes;
}

int64_t Region::rounded(int64_t bytes) { return align_up(bytes, page_bytes()); }

void Region::reserve(int64_t bytes) {
  reserved = align_up(std::max<int64_t>(bytes, 1), page_bytes());
  void* p = mmap(nullptr, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) {
    reserved = 0;
    fail(SPL_E_MEMORY, "cannot reserve %lld MiB of address space (%s): lower engine.max_gaussians or raise ulimit -v", (long long)(bytes >> 20), strerror(errno));
  }
  base = (uint8_t*)p;
}

void Region::commit(int64_t bytes, bool) {
  bytes = rounded(bytes);
  if (bytes > committed) {
    if (bytes > reserved) fail(SPL_E_CAPACITY, "%lld bytes > %lld reserved", (long long)bytes, (long long)reserved);
    if (mprotect(base + committed, bytes - committed, PROT_READ | PROT_WRITE)) refuse_memory(bytes - committed, strerror(errno));
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

static int64_t kilobytes(const char* file, const char* key) {
  int64_t value = 0;
  char line[256];
  FILE* f = fopen(file, "r");
  while (f && fgets(line, sizeof line, f)) if (!strncmp(line, key, strlen(key))) value = atoll(line + strlen(key));
  if (f) fclose(f);
  return value;
}

void memory_of_device(int64_t& free_bytes, int64_t& total_bytes) {
  free_bytes = kilobytes("/proc/meminfo", "MemAvailable:") << 10;
  total_bytes = kilobytes("/proc/meminfo", "MemTotal:") << 10;
}

void measure(spl_ctx&, spl_memory& o) {
  memory_of_device(o.free_bytes, o.total_bytes);
  o.process_bytes = kilobytes("/proc/self/status", "VmRSS:") << 10;
  o.pinned_bytes = 0;
}

// ---- life cycle
int threads_of(const spl_create_params& p) { return p.threads ? p.threads : omp_get_num_procs(); }
void open_context(spl_ctx& c) { c.threads = threads_of(c.params); }
void close_context(spl_ctx&) {}
void activate(spl_ctx&) {}
void deactivate(spl_ctx&) {}

// ---- phases -----------------------------------------------------------------------------------------------------------
static double now_ms() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void begin_phase(spl_ctx& c, int phase) {
  const double now = now_ms();
  if (c.phase != SPL_PHASE_ALWAYS) c.ms[c.phase] += now - c.phase_began;
  if (c.params.arena_debug) check_and_poison(c, phase);
  c.phase = phase;
  c.phase_began = now_ms();
}

void begin_step(spl_ctx& c) {
  settle(c);
  memset(c.ms, 0, sizeof c.ms);
}

void leave_phases(spl_ctx& c) { end_phases(c); }
void use_stream(spl_ctx&, void*) {}

void end_phases(spl_ctx& c) {
  if (c.phase != SPL_PHASE_ALWAYS) c.ms[c.phase] += now_ms() - c.phase_began;
  if (c.params.arena_debug && c.phase != SPL_PHASE_ALWAYS) check_and_poison(c, SPL_N_PHASES);
  c.phase = SPL_PHASE_ALWAYS;
}

}  // namespace spl

void spl_ctx::fill(uint8_t* p, int byte, int64_t count) { memset(p, byte, count); }

int64_t spl_ctx::first_other(const uint8_t* p, int byte, int64_t count) {
  for (int64_t i = 0; i < count; ++i) if (p[i] != byte) return i;
  return -1;
}
