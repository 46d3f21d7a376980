// context.cu: the device, its memory, errors, phases.
#include "context.h"
#include <cudaTypedefs.h>

namespace spl {

// ---- the driver's part that the runtime does not offer, looked up so that nothing links libcuda ------------------------------
struct Driver {
  PFN_cuGetErrorName_v6000 error_name;
  PFN_cuDevicePrimaryCtxRetain_v7000 retain;
  PFN_cuCtxPushCurrent_v4000 push;
  PFN_cuCtxPopCurrent_v4000 pop;
  PFN_cuCtxGetDevice_v2000 current;
  PFN_cuDeviceGetAttribute_v2000 attribute;
  PFN_cuMemAddressReserve_v10020 address_reserve;
  PFN_cuMemAddressFree_v10020 address_free;
  PFN_cuMemCreate_v10020 create;
  PFN_cuMemRelease_v10020 release;
  PFN_cuMemMap_v10020 map;
  PFN_cuMemUnmap_v10020 unmap;
  PFN_cuMemSetAccess_v10020 set_access;
  PFN_cuMemGetAllocationGranularity_v10020 granularity;
  bool contexts, paging;  // what is complete
};

template <class F> static bool look_up(const char* name, F& f) {
  void* p = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  const cudaError_t e = cudaGetDriverEntryPointByVersion(name, &p, 10020, cudaEnableDefault, &found);
#else
  const cudaError_t e = cudaGetDriverEntryPoint(name, &p, cudaEnableDefault, &found);
#endif
  f = (F)p;
  return e == cudaSuccess && found == cudaDriverEntryPointSuccess && p;
}

static const Driver& driver() {
  static const Driver d = [] {
    Driver d{};
    d.contexts = look_up("cuGetErrorName", d.error_name) && look_up("cuDevicePrimaryCtxRetain", d.retain) && look_up("cuCtxPushCurrent", d.push) &&
                 look_up("cuCtxPopCurrent", d.pop) && look_up("cuCtxGetDevice", d.current) && look_up("cuDeviceGetAttribute", d.attribute);
    d.paging = d.contexts && look_up("cuMemAddressReserve", d.address_reserve) && look_up("cuMemAddressFree", d.address_free) && look_up("cuMemCreate", d.create) &&
               look_up("cuMemRelease", d.release) && look_up("cuMemMap", d.map) && look_up("cuMemUnmap", d.unmap) && look_up("cuMemSetAccess", d.set_access) &&
               look_up("cuMemGetAllocationGranularity", d.granularity);
    cudaGetLastError();
    return d;
  }();
  return d;
}

// ---- errors -------------------------------------------------------------------------------------------------------------
// After a fault in a kernel every later call fails, and only a new process helps.
[[noreturn]] static void refuse_device(const char* what, const char* error, int number) {
  const bool broken = cudaDeviceSynchronize() != cudaSuccess;
  cudaGetLastError();
  fail(SPL_E_DEVICE, "%s: %s (CUDA error %d); %s", what, error, number,
       broken ? "CUDA refuses this process from now on: start it again, or use engine.backend cpu" : "check nvidia-smi, or use engine.backend cpu");
}

void check(cudaError_t e, const char* what) {
  if (e == cudaSuccess) return;
  cudaGetLastError();
  if (e == cudaErrorMemoryAllocation) refuse_memory(0, what);
  refuse_device(what, cudaGetErrorString(e), (int)e);
}

static void check(CUresult e, const char* what, int64_t bytes = 0) {  // bytes: that it should take
  if (e == CUDA_SUCCESS) return;
  if (e == CUDA_ERROR_OUT_OF_MEMORY) refuse_memory(bytes, what);
  const char* name = nullptr;
  driver().error_name(e, &name);
  refuse_device(what, name ? name : "unknown error", (int)e);
}

// ---- memory -------------------------------------------------------------------------------------------------------------
constexpr int64_t CHUNK_BYTES = 16ll << 20;  // more than this is mapped in up to 16 pieces, so that shrinking has something to give back

bool inside_a_call() {
  CUdevice device = 0;
  return driver().contexts && driver().current(&device) == CUDA_SUCCESS;
}

static CUdevice this_device() {
  CUdevice device = 0;
  check(driver().current(&device), "asking for the device");
  return device;
}

static bool virtual_memory() {
  int yes = 0;
  return driver().paging && driver().attribute(&yes, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, this_device()) == CUDA_SUCCESS && yes;
}

static CUmemAllocationProp allocation_of(int device) {
  CUmemAllocationProp p{};
  p.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  p.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  p.location.id = device;
  return p;
}

// Without paging too: cudaMalloc serves large pieces in pages of 2 MiB, and the report shall be what the driver says. A forecast
// has no device to ask; so far they all have such pages.
int64_t Region::rounded(int64_t bytes) {
  size_t page = 0;
  if (driver().paging && inside_a_call()) {
    const CUmemAllocationProp p = allocation_of(this_device());
    if (driver().granularity(&page, &p, CU_MEM_ALLOC_GRANULARITY_MINIMUM) != CUDA_SUCCESS) page = 0;
  }
  return align_up(bytes, page ? (int64_t)page : 2ll << 20);
}

void Region::reserve(int64_t bytes) {
  bytes = rounded(std::max<int64_t>(bytes, 1));
  if (paged) {
    CUdeviceptr p = 0;
    const CUresult e = driver().address_reserve(&p, bytes, 0, 0, 0);
    if (e != CUDA_SUCCESS) fail(SPL_E_MEMORY, "cannot reserve %lld MiB of device addresses (CUDA driver error %d): lower engine.max_gaussians", (long long)(bytes >> 20), (int)e);
    base = (uint8_t*)p;
  }
  reserved = bytes;
}

static void shrink_pages(Region& r, int64_t bytes) {
  while (!r.chunks.empty() && r.chunks.back().begin >= bytes) {
    const Region::Chunk& chunk = r.chunks.back();
    driver().unmap((CUdeviceptr)(r.base + chunk.begin), chunk.bytes);
    driver().release(chunk.handle);
    r.committed = chunk.begin;
    r.chunks.pop_back();
  }
}

static void add_chunk(Region& r, int64_t bytes) {
  const CUmemAllocationProp p = allocation_of(this_device());
  Region::Chunk chunk{0, r.committed, bytes};
  r.chunks.reserve(r.chunks.size() + 1);  // what is mapped must not be forgotten
  check(driver().create(&chunk.handle, chunk.bytes, &p, 0), "growing", bytes);
  const CUdeviceptr at = (CUdeviceptr)(r.base + chunk.begin);
  const CUresult e = driver().map(at, chunk.bytes, 0, chunk.handle, 0);
  if (e != CUDA_SUCCESS) driver().release(chunk.handle);
  check(e, "mapping memory", bytes);
  r.chunks.push_back(chunk);
  r.committed += bytes;
  CUmemAccessDesc access{};
  access.location = p.location;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  check(driver().set_access(at, chunk.bytes, &access, 1), "mapping memory", bytes);
  check(cudaMemset(r.base + chunk.begin, 0, chunk.bytes), "clearing new memory");
}

static void grow_pages(Region& r, int64_t bytes) {  // all of it, or an exception and nothing
  const int64_t before = r.committed, piece = std::max(CHUNK_BYTES, Region::rounded((bytes - before) / 16));
  try {
    while (r.committed < bytes) add_chunk(r, std::min(piece, bytes - r.committed));
  } catch (...) {
    cudaDeviceSynchronize();  // what was mapped is still being cleared
    shrink_pages(r, before);
    throw;
  }
}

static void reallocate(Region& r, int64_t bytes, bool keep) {
  const bool smaller = bytes < r.committed;
  if (!keep || !bytes) {
    cudaFree(r.base);
    r.base = nullptr;
    r.committed = 0;
  }
  if (!bytes) return;
  void* p = nullptr;
  const cudaError_t e = cudaMalloc(&p, bytes);
  if (e == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    if (smaller && keep) return;  // no room for the copy: it stays larger
    refuse_memory(bytes, "growing");
  }
  check(e, "growing");
  check(cudaMemset(p, 0, bytes), "clearing new memory");
  if (r.base) check(cudaMemcpy(p, r.base, std::min(bytes, r.committed), cudaMemcpyDeviceToDevice), "moving to other memory");
  check(cudaDeviceSynchronize(), "moving to other memory");
  cudaFree(r.base);
  r.base = (uint8_t*)p;
  r.committed = bytes;
}

void Region::commit(int64_t bytes, bool keep) {
  bytes = rounded(bytes);
  if (bytes > reserved) fail(SPL_E_CAPACITY, "%lld bytes > %lld reserved", (long long)bytes, (long long)reserved);
  if (bytes == committed) return;
  check(cudaDeviceSynchronize(), "before memory changes");
  if (!paged) return reallocate(*this, bytes, keep);
  if (bytes < committed) shrink_pages(*this, bytes);
  if (bytes < committed && !keep) shrink_pages(*this, chunks.back().begin);  // the piece that reaches beyond comes back smaller
  if (bytes > committed) grow_pages(*this, bytes);
  check(cudaDeviceSynchronize(), "clearing new memory");  // another stream uses it next
}

void Region::release() {
  if (base) cudaDeviceSynchronize();
  if (base && paged) {
    shrink_pages(*this, 0);
    driver().address_free((CUdeviceptr)base, reserved);
  } else if (base) {
    cudaFree(base);
  }
  const bool was_paged = paged;
  *this = Region{};
  paged = was_paged;
}

void memory_of_device(int64_t& free_bytes, int64_t& total_bytes) {
  size_t free = 0, total = 0;
  const cudaError_t e = cudaMemGetInfo(&free, &total);
  if (e != cudaSuccess) cudaGetLastError();
  free_bytes = (int64_t)free;
  total_bytes = (int64_t)total;
}

void measure(spl_ctx& c, spl_memory& o) {
  memory_of_device(o.free_bytes, o.total_bytes);
  o.process_bytes = std::max<int64_t>(c.free_at_start - o.free_bytes, 0);
  o.pinned_bytes = c.staging_bytes + (int64_t)sizeof(Readback);
}

// ---- life cycle -------------------------------------------------------------------------------------------------------------
__global__ void probe_kernel() {}

static void check_device(int device) {
  int n = 0, driver_version = 0, runtime = 0;
  const cudaError_t e = cudaGetDeviceCount(&n);
  cudaDriverGetVersion(&driver_version);
  cudaRuntimeGetVersion(&runtime);
  cudaGetLastError();
  if (e == cudaErrorInsufficientDriver && !driver_version) fail(SPL_E_DEVICE, "there is no NVIDIA driver; install one, or use engine.backend cpu");
  if (e == cudaErrorInsufficientDriver)
    fail(SPL_E_DEVICE, "the NVIDIA driver is too old: it supports CUDA %d.%d, this library needs %d.%d; update the driver or use engine.backend cpu",
         driver_version / 1000, driver_version % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
  if (e == cudaErrorNoDevice || n == 0) fail(SPL_E_DEVICE, "no CUDA device is visible (%s); check nvidia-smi and CUDA_VISIBLE_DEVICES, or use engine.backend cpu", cudaGetErrorString(e));
  check(e, "cudaGetDeviceCount");
  if (device < 0 || device >= n) fail(SPL_E_ARGUMENT, "device %d: this machine has %d CUDA devices; set engine.device to 0..%d", device, n, n - 1);
}

static void check_code(int device) {
  cudaFuncAttributes a;
  const cudaError_t code = cudaFuncGetAttributes(&a, probe_kernel);
  if (code != cudaErrorNoKernelImageForDevice && code != cudaErrorInvalidDeviceFunction) return check(code, "looking for code for this device");
  cudaGetLastError();
  int major = 0, minor = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  fail(SPL_E_DEVICE, "this library has no code for device %d (compute capability %d.%d): build with -DCMAKE_CUDA_ARCHITECTURES=%d%d, or use engine.backend cpu",
       device, major, minor, major, minor);
}

void open_context(spl_ctx& c) {
  const int device = c.params.device;
  check_device(device);
  if (!driver().contexts) fail(SPL_E_DEVICE, "the NVIDIA driver does not offer primary contexts; update it or use engine.backend cpu");
  check(driver().retain(&c.primary, device), "opening the device");  // for good, as the runtime does: others use it too
  activate(c);
  check_code(device);
  int64_t total;
  memory_of_device(c.free_at_start, total);
  const bool paged = !c.params.no_paging && virtual_memory();
  for (Region& r : c.map) r.paged = paged;
  c.arena.paged = paged;
  check(cudaStreamCreateWithFlags(&c.own_stream, cudaStreamNonBlocking), "cudaStreamCreate");
  c.stream = c.own_stream;
  for (Times& t : c.times) for (cudaEvent_t& e : t.event) check(cudaEventCreate(&e), "cudaEventCreate");
  check(cudaEventCreateWithFlags(&c.counted, cudaEventDisableTiming), "cudaEventCreate");
  check(cudaHostAlloc((void**)&c.readback, sizeof(Readback), cudaHostAllocDefault), "pinned memory");
}

void close_context(spl_ctx& c) {
  if (!c.primary) return;  // a call of the runtime would take the default device
  cudaFreeHost(c.staging);
  cudaFreeHost(c.readback);
  for (Times& t : c.times) for (cudaEvent_t e : t.event) if (e) cudaEventDestroy(e);
  if (c.counted) cudaEventDestroy(c.counted);
  if (c.own_stream) cudaStreamDestroy(c.own_stream);
  cudaGetLastError();
}

// The device's primary context, which the runtime and torch use too, on top of whatever is current. cudaSetDevice would also
// do, but going back with it makes a context on a device that the caller may never have used.
void activate(spl_ctx& c) {
  if (!c.primary || c.active) return;
  check(driver().push(c.primary), "using the device");
  c.active = true;
  cudaGetLastError();  // what others left
}

void deactivate(spl_ctx& c) {
  CUcontext popped;
  if (c.active) driver().pop(&popped);
  c.active = false;
}

void use_stream(spl_ctx& c, void* stream) {
  cudaStream_t s = stream ? (cudaStream_t)stream : c.own_stream;
  if (s == c.stream) return;
  check(cudaStreamSynchronize(c.stream), "leaving a stream");
  c.stream = s;
}

// ---- copies -------------------------------------------------------------------------------------------------------------------
bool on_device(const void* p) {
  if (!p) return false;
  cudaPointerAttributes a;
  if (cudaPointerGetAttributes(&a, p) != cudaSuccess) { cudaGetLastError(); return false; }
  return a.type == cudaMemoryTypeDevice || a.type == cudaMemoryTypeManaged;
}

uint8_t* staged(spl_ctx& c, int64_t bytes) {
  if (c.staging_used + bytes > c.staging_bytes) {
    check(cudaStreamSynchronize(c.stream), "waiting for copies");
    cudaFreeHost(c.staging);
    c.staging = nullptr;
    c.staging_bytes = c.staging_used = 0;
    if (cudaHostAlloc((void**)&c.staging, 2 * bytes, cudaHostAllocDefault) != cudaSuccess) {
      cudaGetLastError();
      c.staging = nullptr;
      fail(SPL_E_MEMORY, "cannot pin %lld MiB of host memory for copies; raise ulimit -l or give device pointers", (long long)(2 * bytes >> 20));
    }
    c.staging_bytes = 2 * bytes;
  }
  uint8_t* p = c.staging + c.staging_used;
  c.staging_used += align_up(bytes, 64);
  if (c.staging_used > c.staging_bytes) c.staging_used = c.staging_bytes;
  return p;
}

const void* resident(spl_ctx& c, void* row, const void* from, int64_t bytes) {
  if (!from || on_device(from)) return from;
  uint8_t* pinned = staged(c, bytes);
  memcpy(pinned, from, bytes);
  check(cudaMemcpyAsync(row, pinned, bytes, cudaMemcpyHostToDevice, c.stream), "copying to the device");
  return row;
}

void put(spl_ctx& c, void* row, const void* from, int64_t bytes) {
  check(cudaMemcpyAsync(row, from, bytes, cudaMemcpyDefault, c.stream), "copying to the device");
  check(cudaStreamSynchronize(c.stream), "copying to the device");
}
void get(spl_ctx& c, void* to, const void* row, int64_t bytes) {
  check(cudaMemcpyAsync(to, row, bytes, cudaMemcpyDefault, c.stream), "copying from the device");
  check(cudaStreamSynchronize(c.stream), "copying from the device");
}
void* readable(spl_ctx& c, int row, int64_t bytes) {
  c.shown.resize(bytes);
  if (bytes) get(c, c.shown.data(), c.row<void>(row), bytes);
  return c.shown.data();
}

// ---- phases -------------------------------------------------------------------------------------------------------------------
static void mark(spl_ctx& c, int phase) {
  Times& t = c.times[c.now];
  if (t.n == Times::MARKS) return;
  t.phase[t.n] = phase;
  check(cudaEventRecord(t.event[t.n++], c.stream), "cudaEventRecord");
}

// Sums and times of a step that has ended.
static void read_back(spl_ctx& c, const Times& t) {
  memset(c.ms, 0, sizeof c.ms);
  for (int i = 0; i + 1 < t.n; ++i) {
    float ms = 0;
    check(cudaEventElapsedTime(&ms, t.event[i], t.event[i + 1]), "cudaEventElapsedTime");
    if (t.phase[i] != SPL_PHASE_ALWAYS) c.ms[t.phase[i]] += ms;
  }
  const Readback& r = *c.readback;
  c.sums = {r.sums[0], r.sums[1], r.sums[2], (int64_t)r.lost.shown_px, (int64_t)r.lost.depth_px};
}

void await_counters(spl_ctx& c) {
  check(cudaEventSynchronize(c.counted), "projecting");
  c.staging_used = 0;
  if (!c.pending.any) return;
  read_back(c, c.times[1 - c.now]);
  settle(c);
}

void begin_phase(spl_ctx& c, int phase) {
  if (c.params.arena_debug) check_and_poison(c, phase);
  c.phase = phase;
  mark(c, phase);
}

void begin_step(spl_ctx& c) {
  c.now = 1 - c.now;
  c.times[c.now].n = 0;
}

void leave_phases(spl_ctx& c) {
  if (c.params.arena_debug) {  // looks into the rows of the last phase
    end_phases(c);
    return;
  }
  mark(c, SPL_PHASE_ALWAYS);
  c.phase = SPL_PHASE_ALWAYS;
}

void end_phases(spl_ctx& c) {
  mark(c, SPL_PHASE_ALWAYS);
  check(cudaStreamSynchronize(c.stream), "running the kernels");
  read_back(c, c.times[c.now]);
  if (c.params.arena_debug && c.phase != SPL_PHASE_ALWAYS) check_and_poison(c, SPL_N_PHASES);
  c.phase = SPL_PHASE_ALWAYS;
}

}  // namespace spl

void spl_ctx::fill(uint8_t* p, int byte, int64_t count) { spl::check(cudaMemsetAsync(p, byte, count, stream), "poisoning"); }

int64_t spl_ctx::first_other(const uint8_t* p, int byte, int64_t count) {
  std::vector<uint8_t> copy(count);
  spl::get(*this, copy.data(), p, count);
  for (int64_t i = 0; i < count; ++i) if (copy[i] != byte) return i;
  return -1;
}
