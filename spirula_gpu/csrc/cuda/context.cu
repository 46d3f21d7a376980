// context.cu: the device, its memory, errors, phases.
#include "context.h"
#include <cudaTypedefs.h>

namespace spl {

// ---- errors -------------------------------------------------------------------------------------------------------------
void check(cudaError_t e, const char* what) {
  if (e == cudaSuccess) return;
  cudaGetLastError();
  if (e == cudaErrorMemoryAllocation) {
    size_t free = 0, total = 0;
    cudaMemGetInfo(&free, &total);
    fail(SPL_E_MEMORY, "%s: the device is out of memory (%lld MiB free of %lld); lower engine.vram_budget_mb, engine.max_gaussians or the image size",
         what, (long long)(free >> 20), (long long)(total >> 20));
  }
  fail(SPL_E_DEVICE, "%s: %s (CUDA error %d); the device may need a new process, or use engine.backend cpu", what, cudaGetErrorString(e), (int)e);
}

// ---- the driver's virtual memory management, looked up so that nothing links libcuda ---------------------------------------
struct Driver {
  PFN_cuMemAddressReserve_v10020 address_reserve;
  PFN_cuMemAddressFree_v10020 address_free;
  PFN_cuMemCreate_v10020 create;
  PFN_cuMemRelease_v10020 release;
  PFN_cuMemMap_v10020 map;
  PFN_cuMemUnmap_v10020 unmap;
  PFN_cuMemSetAccess_v10020 set_access;
  PFN_cuMemGetAllocationGranularity_v10020 granularity;
  PFN_cuDeviceGetAttribute_v2000 attribute;
  bool complete;
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
    d.complete = look_up("cuMemAddressReserve", d.address_reserve) && look_up("cuMemAddressFree", d.address_free) && look_up("cuMemCreate", d.create) &&
                 look_up("cuMemRelease", d.release) && look_up("cuMemMap", d.map) && look_up("cuMemUnmap", d.unmap) && look_up("cuMemSetAccess", d.set_access) &&
                 look_up("cuMemGetAllocationGranularity", d.granularity) && look_up("cuDeviceGetAttribute", d.attribute);
    cudaGetLastError();
    return d;
  }();
  return d;
}

static int this_device() {
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  return device;
}

static bool virtual_memory() {
  int yes = 0;
  return driver().complete && driver().attribute(&yes, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, this_device()) == CUDA_SUCCESS && yes;
}

static CUmemAllocationProp allocation_of(int device) {
  CUmemAllocationProp p{};
  p.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  p.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  p.location.id = device;
  return p;
}

static int64_t page_bytes() {
  if (!virtual_memory()) return 512;
  const CUmemAllocationProp p = allocation_of(this_device());
  size_t bytes = 0;
  return driver().granularity(&bytes, &p, CU_MEM_ALLOC_GRANULARITY_MINIMUM) == CUDA_SUCCESS && bytes ? (int64_t)bytes : 2ll << 20;
}

int64_t Region::rounded(int64_t bytes) { return align_up(bytes, page_bytes()); }

void Region::reserve(int64_t bytes) {
  bytes = rounded(std::max<int64_t>(bytes, 1));
  if (virtual_memory()) {
    CUdeviceptr p = 0;
    const CUresult e = driver().address_reserve(&p, bytes, 0, 0, 0);
    if (e != CUDA_SUCCESS) fail(SPL_E_MEMORY, "cannot reserve %lld MiB of device addresses (CUDA driver error %d): lower engine.max_gaussians", (long long)(bytes >> 20), (int)e);
    base = (uint8_t*)p;
  }
  reserved = bytes;
}

static void grow_pages(Region& r, int64_t bytes) {
  const int device = this_device();
  const CUmemAllocationProp p = allocation_of(device);
  Region::Chunk chunk{0, r.committed, bytes - r.committed};
  CUresult e = driver().create(&chunk.handle, chunk.bytes, &p, 0);
  if (e == CUDA_ERROR_OUT_OF_MEMORY) check(cudaErrorMemoryAllocation, "taking more memory");
  if (e != CUDA_SUCCESS) fail(SPL_E_DEVICE, "cuMemCreate of %lld MiB: CUDA driver error %d", (long long)(chunk.bytes >> 20), (int)e);
  const CUdeviceptr at = (CUdeviceptr)(r.base + chunk.begin);
  CUmemAccessDesc access{};
  access.location = p.location;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  e = driver().map(at, chunk.bytes, 0, chunk.handle, 0);
  if (e == CUDA_SUCCESS) {
    r.chunks.push_back(chunk);
    r.committed = bytes;
    e = driver().set_access(at, chunk.bytes, &access, 1);
  } else {
    driver().release(chunk.handle);
  }
  if (e != CUDA_SUCCESS) fail(SPL_E_DEVICE, "mapping %lld MiB: CUDA driver error %d", (long long)(chunk.bytes >> 20), (int)e);
  check(cudaMemset(r.base + chunk.begin, 0, chunk.bytes), "clearing new memory");
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

static void reallocate(Region& r, int64_t bytes) {
  void* p = nullptr;
  if (bytes) check(cudaMalloc(&p, bytes), "taking more memory");
  if (bytes) check(cudaMemset(p, 0, bytes), "clearing new memory");
  if (r.base && bytes) check(cudaMemcpy(p, r.base, std::min(bytes, r.committed), cudaMemcpyDeviceToDevice), "moving to larger memory");
  check(cudaDeviceSynchronize(), "moving to larger memory");
  cudaFree(r.base);
  r.base = (uint8_t*)p;
  r.committed = bytes;
}

void Region::commit(int64_t bytes) {
  bytes = rounded(bytes);
  if (bytes > reserved) fail(SPL_E_CAPACITY, "%lld bytes > %lld reserved", (long long)bytes, (long long)reserved);
  if (bytes == committed) return;
  check(cudaDeviceSynchronize(), "before memory changes");
  if (!virtual_memory()) return reallocate(*this, bytes);
  if (bytes > committed) grow_pages(*this, bytes); else shrink_pages(*this, bytes);
  check(cudaDeviceSynchronize(), "clearing new memory");  // another stream uses it next
}

void Region::release() {
  cudaDeviceSynchronize();
  if (!virtual_memory()) {
    cudaFree(base);
  } else if (base) {
    shrink_pages(*this, 0);
    driver().address_free((CUdeviceptr)base, reserved);
  }
  *this = Region{};
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
  if (device < 0 || device >= n) fail(SPL_E_DEVICE, "device %d: this machine has %d CUDA devices, 0..%d", device, n, n - 1);
  check(cudaSetDevice(device), "cudaSetDevice");
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
  check_device(c.params.device);
  check(cudaStreamCreateWithFlags(&c.own_stream, cudaStreamNonBlocking), "cudaStreamCreate");
  c.stream = c.own_stream;
  for (Times& t : c.times) for (cudaEvent_t& e : t.event) check(cudaEventCreate(&e), "cudaEventCreate");
  check(cudaHostAlloc((void**)&c.readback, sizeof(Readback), cudaHostAllocDefault), "pinned memory");
}

void close_context(spl_ctx& c) {
  cudaFreeHost(c.staging);
  cudaFreeHost(c.readback);
  for (Times& t : c.times) for (cudaEvent_t e : t.event) if (e) cudaEventDestroy(e);
  if (c.own_stream) cudaStreamDestroy(c.own_stream);
  cudaGetLastError();
}

void activate(spl_ctx& c) {
  cudaGetLastError();  // what others left
  check(cudaSetDevice(c.params.device), "cudaSetDevice");
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

static uint8_t* staged(spl_ctx& c, int64_t bytes) {
  if (c.staging_used + bytes > c.staging_bytes) {
    check(cudaStreamSynchronize(c.stream), "waiting for copies");
    cudaFreeHost(c.staging);
    c.staging = nullptr;
    c.staging_bytes = c.staging_used = 0;
    check(cudaHostAlloc((void**)&c.staging, 2 * bytes, cudaHostAllocDefault), "pinned memory");
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

void wait(spl_ctx& c, const char* what) {
  check(cudaStreamSynchronize(c.stream), what);
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
