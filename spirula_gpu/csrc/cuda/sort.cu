// sort.cu: the map in the order of order.h: two stable radix sorts by 32 bits each take half the scratch of one by 64.
#include "codes.h"
#include "../order.h"
#include <cub/device/device_radix_sort.cuh>

namespace spl {

__global__ void __launch_bounds__(EXTENT_BINS) extent_kernel(const float* mean, int64_t n, uint32_t* histogram) {
  __shared__ uint32_t mine[EXTENT_BINS];
  mine[threadIdx.x] = 0;
  __syncthreads();
  for (int64_t i = thread_id(); i < n; i += (int64_t)gridDim.x * blockDim.x) atomicAdd(&mine[extent_bin(mean + 3 * i)], 1u);
  __syncthreads();
  if (mine[threadIdx.x]) atomicAdd(&histogram[threadIdx.x], mine[threadIdx.x]);
}

// The lower halves of the keys, and 0, 1, 2, ..; or, of Gaussians that are in the order of those, the upper ones.
__global__ void lower_keys_kernel(const float* mean, int64_t n, float cells, uint32_t* key, uint32_t* order) {
  const int64_t i = thread_id();
  if (i >= n) return;
  key[i] = (uint32_t)order_key(mean + 3 * i, cells);
  order[i] = (uint32_t)i;
}
__global__ void upper_keys_kernel(const float* mean, int64_t n, float cells, const uint32_t* order, uint32_t* key) {
  const int64_t i = thread_id();
  if (i < n) key[i] = (uint32_t)(order_key(mean + 3 * (int64_t)order[i], cells) >> 32);
}

__global__ void count_moved_kernel(const uint32_t* order, int64_t n, unsigned long long* moved) {
  const int64_t i = thread_id();
  const int here = __syncthreads_count(i < n && order[i] != i);
  if (threadIdx.x == 0 && here) atomicAdd(moved, (unsigned long long)here);
}

__global__ void sorted_words_kernel(const uint32_t* row, int words, int first, int count, const uint32_t* order, int64_t n, uint32_t* out) {
  const int64_t at = thread_id(), i = at / count;
  if (i < n) out[at] = row[(int64_t)order[i] * words + first + (at - i * count)];
}
__global__ void store_words_kernel(const uint32_t* from, int count, int64_t n, uint32_t* row, int words, int first) {
  const int64_t at = thread_id(), i = at / count;
  if (i < n) row[i * words + first + (at - i * count)] = from[at];
}

// The arena while the map is sorted.
struct Room {
  uint32_t* histogram;        // [EXTENT_BINS] ..
  unsigned long long* moved;  // .. and this behind it: cleared together
  int8_t* exponents;          // of compact
  uint32_t* order;            // [n], then what is left:
  uint8_t* rest;
  int64_t rest_bytes;
  size_t cub_bytes;           // at the end of `rest` while sorting
};
constexpr int64_t COUNTERS = EXTENT_BINS * 4 + ORDER_ALIGN;

static void sort_pairs(spl_ctx& c, void* memory, size_t& bytes, cub::DoubleBuffer<uint32_t>& keys, cub::DoubleBuffer<uint32_t>& order) {
  check(cub::DeviceRadixSort::SortPairs(memory, bytes, keys, order, c.n, 0, 32, c.stream), "sorting the map");
}

static int64_t bytes_before_rest(const spl_ctx& c) { return COUNTERS + align_up(c.map_bytes(R_EXPONENTS, c.n), ORDER_ALIGN) + order_bytes(c.n); }

static Room room_of(spl_ctx& c, size_t cub_bytes) {
  Room r{};
  r.histogram = (uint32_t*)c.arena.base;
  r.moved = (unsigned long long*)(r.histogram + EXTENT_BINS);
  r.exponents = (int8_t*)(c.arena.base + COUNTERS);
  r.rest = c.arena.base + bytes_before_rest(c);
  r.order = (uint32_t*)(r.rest - order_bytes(c.n));
  r.rest_bytes = c.arena.committed - bytes_before_rest(c);
  r.cub_bytes = cub_bytes;
  return r;
}

static int64_t find_order(spl_ctx& c, const Room& r) {  // returns how many come from another place
  const float* mean = c.row<float>(R_MEAN);
  const unsigned blocks = blocks_for(c.n, 256);
  check(cudaMemsetAsync(r.histogram, 0, COUNTERS, c.stream), "clearing counters");
  extent_kernel<<<std::min(blocks, 1024u), EXTENT_BINS, 0, c.stream>>>(mean, c.n, r.histogram);
  launched("extent_kernel");
  uint32_t histogram[EXTENT_BINS];
  get(c, histogram, r.histogram, sizeof histogram);
  const float cells = cells_per_metre(histogram);
  const int64_t each = order_bytes(c.n);
  uint8_t* cub = r.rest + 3 * each;
  cub::DoubleBuffer<uint32_t> order(r.order, (uint32_t*)r.rest), keys((uint32_t*)(r.rest + each), (uint32_t*)(r.rest + 2 * each));
  size_t bytes = r.cub_bytes;
  lower_keys_kernel<<<blocks, 256, 0, c.stream>>>(mean, c.n, cells, keys.Current(), order.Current());
  launched("lower_keys_kernel");
  sort_pairs(c, cub, bytes, keys, order);
  upper_keys_kernel<<<blocks, 256, 0, c.stream>>>(mean, c.n, cells, order.Current(), keys.Current());
  launched("upper_keys_kernel");
  sort_pairs(c, cub, bytes, keys, order);
  if (order.Current() != r.order) check(cudaMemcpyAsync(r.order, order.Current(), 4 * c.n, cudaMemcpyDeviceToDevice, c.stream), "copying the order");
  count_moved_kernel<<<blocks, 256, 0, c.stream>>>(r.order, c.n, r.moved);
  launched("count_moved_kernel");
  int64_t moved;
  get(c, &moved, r.moved, sizeof moved);
  return moved;
}

static void sort_words(spl_ctx& c, int row, const Room& r) {
  const int words = (int)c.item_bytes(row) / 4, step = at_a_time(r.rest_bytes, 4 * c.n, words);
  for (int first = 0; first < words; first += step) {
    const int count = std::min(step, words - first);
    const unsigned blocks = blocks_for(c.n * count, 256);
    sorted_words_kernel<<<blocks, 256, 0, c.stream>>>(c.row<uint32_t>(row), words, first, count, r.order, c.n, (uint32_t*)r.rest);
    launched("sorted_words_kernel");
    store_words_kernel<<<blocks, 256, 0, c.stream>>>((const uint32_t*)r.rest, count, c.n, c.row<uint32_t>(row), words, first);
    launched("store_words_kernel");
  }
}

int64_t sort_rows(spl_ctx& c) {
  if (c.n < 2) return 0;
  size_t cub_bytes = 0;
  cub::DoubleBuffer<uint32_t> none;
  sort_pairs(c, nullptr, cub_bytes, none, none);
  BorrowedArena scratch = borrow_for_order(c, bytes_before_rest(c) + std::max(3 * order_bytes(c.n) + (int64_t)cub_bytes, least_room(c.n)));
  const Room r = room_of(c, cub_bytes);
  const int64_t moved = find_order(c, r);
  if (moved) {
    if (c.compact()) sort_codes(c, r.order, r.exponents, r.rest, r.rest_bytes);
    for (int row = 0; row < SPL_N_MAP_ROWS; ++row) if (!c.info(row).coded) sort_words(c, row, r);
  }
  check(cudaStreamSynchronize(c.stream), "sorting the map");
  scratch.give_back();
  return moved;
}

}  // namespace spl
