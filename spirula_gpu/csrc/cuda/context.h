// context.h: what a CUDA context owns. Everything runs on its stream. The host waits twice a step: for the numbers of pairs
// and intersections, while the device already orders the pairs, and for the end; once, where the end of a step is deferred.
#pragma once
#define SPL_CUDA 1
#define SPL_BACKEND_NAME "cuda"
#define SPL_FOUND_AT_ONCE 1  // the numbers of pairs and intersections are known at the same time
#include <cuda.h>
#include <cuda_runtime.h>
#include <cstdint>
#include <vector>

namespace spl {

// A device address range that is reserved once and backed by memory as it grows: pointers stay, growth copies nothing.
// Without the driver's virtual memory management (not `paged`) growth allocates anew and copies.
struct Region {
  struct Chunk { CUmemGenericAllocationHandle handle; int64_t begin, bytes; };
  bool paged = false;          // set once, when the context is opened
  uint8_t* base = nullptr;
  int64_t reserved = 0, committed = 0;
  std::vector<Chunk> chunks;
  void reserve(int64_t bytes);
  void commit(int64_t bytes, bool keep = true);  // grows, or shrinks as far as it can; new bytes are zero. !keep: the contents may be lost
  void release();
  static int64_t rounded(int64_t bytes);  // what commit takes
};

}  // namespace spl

#include "../host.h"

namespace spl {

struct Counters {  // slot 0 of view.cameras
  int64_t nnz;
  unsigned long long isects, shown_px, depth_px;
};
struct Readback { Counters projected, lost; double sums[3]; };  // pinned: after projection, after the loss

struct Times {  // a mark at the begin of every phase
  static constexpr int MARKS = 32;
  cudaEvent_t event[MARKS] = {};
  int phase[MARKS] = {}, n = 0;
};

struct Cameras {  // passed to kernels by value
  Camera one;
  const Camera* many;
  int n;
  __device__ __forceinline__ const Camera& operator[](int i) const { return n == 1 ? one : many[i]; }
};

struct Dims {  // of a View, for kernels
  int n_cameras, width, height, tiles_x, tiles_y;
  float background[3];
};

}  // namespace spl

struct spl_ctx : spl::Context {
  CUcontext primary = nullptr;     // of the device
  bool active = false;             // `primary` is on this thread's stack of contexts: a call is running
  int64_t free_at_start = 0;       // bytes of the device
  cudaStream_t stream = nullptr, own_stream = nullptr;
  spl::Times times[2];             // of this step, and of the one before, which may still run
  int now = 0;
  cudaEvent_t counted = nullptr;   // the numbers of pairs and intersections are there
  int64_t expected_pairs = 0;      // how many the next projection orders before it knows their number
  spl::Readback* readback = nullptr;
  uint8_t* staging = nullptr;      // pinned
  int64_t staging_bytes = 0, staging_used = 0;
  spl::Source source{};            // of the newest projection, on the device
  spl::Cameras cameras{};
  bool sort_from_alt = false;      // where the tile sort starts, so that it ends in isect.pair
  std::vector<uint8_t> shown;      // what spl_buffer handed out

  spl::Counters* counters() { return row<spl::Counters>(R_CAMERAS); }
  void fill(uint8_t* p, int byte, int64_t count);
  int64_t first_other(const uint8_t* p, int byte, int64_t count);
};

#include "../ops.h"

namespace spl {

// A failed call becomes a Failure that says what was tried.
void check(cudaError_t, const char* what);
void await_counters(spl_ctx&);  // of the projection; a deferred step before this one has ended then
void order_pairs(spl_ctx&, int64_t n);  // bin.cu: the first n pairs by depth; keys of those that don't exist are the largest
void train_compact(spl_ctx&, const View&, const spl_hyper&);  // compact_bwd.cu: projection backward and Adam
inline void launched(const char* kernel) { check(cudaGetLastError(), kernel); }
bool on_device(const void*);  // false for NULL
bool inside_a_call();         // a context is current: the runtime may be asked without opening a device
uint8_t* staged(spl_ctx&, int64_t bytes);  // so much of pinned memory, until what was copied from it has arrived
// `from` where kernels can read it: itself if it is device memory, else copied to `row` (through pinned memory).
const void* resident(spl_ctx&, void* row, const void* from, int64_t bytes);
int64_t scratch_words(int64_t blocks, int64_t pairs, int64_t isects, int64_t pixels);  // bin.cu: for SPL_BINS
int64_t scan(spl_ctx&, int64_t* a, int64_t n);  // bin.cu: exclusive, in place
inline int key_bytes(const View& v) { return v.tiles() < UINT16_MAX ? 2 : 4; }  // of a tile number; `tiles` itself is one too

inline Dims dims_of(const View& v) {
  return {v.n_cameras, v.width, v.height, v.tiles_x, v.tiles_y, {v.background[0], v.background[1], v.background[2]}};
}
inline unsigned blocks_for(int64_t n, int threads) { return (unsigned)std::max<int64_t>((n + threads - 1) / threads, 1); }

constexpr unsigned ALL_LANES = 0xffffffffu;
__device__ __forceinline__ unsigned lane_id() { return threadIdx.x & 31; }
__device__ __forceinline__ int warp_sum(int x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  return __reduce_add_sync(ALL_LANES, x);
#else
  for (int step = 16; step; step >>= 1) x += __shfl_xor_sync(ALL_LANES, x, step);
  return x;
#endif
}
__device__ __forceinline__ int warp_max(int x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  return __reduce_max_sync(ALL_LANES, x);
#else
  for (int step = 16; step; step >>= 1) x = max(x, __shfl_xor_sync(ALL_LANES, x, step));
  return x;
#endif
}
__device__ __forceinline__ int warp_min(int x) { return -warp_max(-x); }
__device__ __forceinline__ int64_t thread_id() { return (int64_t)blockIdx.x * blockDim.x + threadIdx.x; }

}  // namespace spl
