// bin.cu: the pairs of each tile, front to back. Pairs are sorted by depth first, their intersections are written in
// that order, and a stable sort by tile alone follows. The order is that of 64-bit keys (tile << 32 | depth), ties by
// pair, but the many intersections are sorted by the few bits of a tile number instead of 32 more of depth.
#include "context.h"
#include "../gaussian.h"
#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_scan.cuh>
#include "select.cuh"
#include "tiles.cuh"

namespace spl {

struct Any {
  __device__ bool operator()(uint32_t) const { return true; }
};

// What CUB asks for and an eighth more; a forecast opens no device and cannot ask.
static int64_t cub_bytes(int64_t blocks, int64_t pairs, int64_t isects, int64_t pixels) {
  size_t most = 0, bytes = 0;
  cub::DoubleBuffer<uint32_t> keys, values;
  cub::DoubleBuffer<uint16_t> short_keys;
  for (int64_t n : {blocks, pairs, pixels}) {
    check(cub::DeviceScan::ExclusiveSum(nullptr, bytes, (int64_t*)nullptr, (int64_t*)nullptr, n), "sizing a scan");
    most = std::max(most, bytes);
  }
  for (int64_t n : {pairs, isects}) {
    check(cub::DeviceRadixSort::SortPairs(nullptr, bytes, keys, values, n, 0, 32), "sizing a sort");
    most = std::max(most, bytes);
    check(cub::DeviceRadixSort::SortPairs(nullptr, bytes, short_keys, values, n, 0, 16), "sizing a sort");
    most = std::max(most, bytes);
  }
  check(cub::DeviceSelect::If(nullptr, bytes, thrust::counting_iterator<uint32_t>(0), (uint32_t*)nullptr, (int64_t*)nullptr, pairs, Any{}), "sizing a selection");
  most = std::max(most, bytes);
  return (int64_t)(most + most / 8);
}

int64_t scratch_words(int64_t blocks, int64_t pairs, int64_t isects, int64_t pixels) {
  // So there is always at least what that is on compute capability 9.0: sorts take 1 KiB per 6144 items and some tables, scans and selections less.
  const int64_t least = std::max(3 * std::max(pairs, isects) / 16, std::max({blocks, pairs, pixels}) / 32) + 32768;
  return std::max(least, inside_a_call() ? cub_bytes(blocks, pairs, isects, pixels) : 0) / 8 + 1024;
}

int64_t scan(spl_ctx& c, int64_t* a, int64_t n) {
  with_scratch(c, "scan", [&](void* temp, size_t& bytes) { return cub::DeviceScan::ExclusiveSum(temp, bytes, a, a, n, c.stream); });
  return n;
}

template <class Key> static void sort(spl_ctx& c, cub::DoubleBuffer<Key>& keys, cub::DoubleBuffer<uint32_t>& values, int64_t n, int bits) {
  with_scratch(c, "sort", [&](void* temp, size_t& bytes) { return cub::DeviceRadixSort::SortPairs(temp, bytes, keys, values, n, 0, bits, c.stream); });
}

__global__ void gather_counts_kernel(const uint32_t* order, const uint32_t* tiles, const Counters* counters, int64_t n, int64_t* first) {
  const int64_t i = thread_id();
  if (i <= n) first[i] = i < n && i < counters->nnz ? tiles[order[i]] : 0;
}

template <class Key> struct KeyRows { const Screen* screen; const Box16* box; const uint16_t* camera; const uint32_t* order; const int64_t* first; Key* key; uint32_t* pair; int64_t nnz; };

constexpr int KEYS_PER_WARP = 512;

// The last i in [0, n) with first[i] <= x, by the whole warp; first[0] <= x.
__device__ __forceinline__ int64_t search(const int64_t* first, int64_t n, int64_t x) {
  int64_t begin = 0;
  while (n > 1) {
    const int64_t step = (n + 31) / 32, i = lane_id() * step;
    const uint32_t below = __ballot_sync(ALL_LANES, i < n && first[begin + i] <= x);
    const int last = 31 - __clz(below);
    begin += last * step;
    n = min(step, n - last * step);
  }
  return begin;
}

// The intersections of 32 pairs, which follow each other, as far as they fall into [low, high).
template <class Key> __device__ __forceinline__ void write_pairs(const Dims& v, const KeyRows<Key>& rows, int64_t begin, int64_t low, int64_t high) {
  Reach reach{};
  uint32_t pair = 0;
  int first_tile = 0;
  if (begin + lane_id() < rows.nnz) {
    pair = rows.order[begin + lane_id()];
    reach = reach_of(rows.screen[pair], rows.box[pair], v);
    first_tile = v.n_cameras == 1 ? 0 : camera_of(rows.camera[pair]) * v.tiles_x * v.tiles_y;
  }
  int64_t at = rows.first[begin];
  high = min(high, rows.first[min(begin + 32, rows.nnz)]);
  for_rows(reach, inclusive_sum(reach.rows), v, [&](int owner, int, int row, Columns columns) {
    const int tile = __shfl_sync(ALL_LANES, first_tile, owner) + row * v.tiles_x + columns.first;  // the first of this lane's row
    const uint32_t of = __shfl_sync(ALL_LANES, pair, owner);
    const int ends = inclusive_sum(columns.count), total = __shfl_sync(ALL_LANES, ends, 31);
    const int skipped = (int)min(max(low - at, (int64_t)0), (int64_t)total), stop = (int)max(min(high - at, (int64_t)total), (int64_t)0);
    for (int base = skipped; base < stop; base += 32) {  // the tiles of these 32 rows, spread over the lanes
      const int k = base + lane_id(), from = owner_of(k, ends), begins = __shfl_sync(ALL_LANES, ends - columns.count, from);
      const uint32_t key = (uint32_t)(__shfl_sync(ALL_LANES, tile, from) + k - begins), key_pair = __shfl_sync(ALL_LANES, of, from);
      if (k >= stop) continue;
      rows.key[at + k] = (Key)key;
      rows.pair[at + k] = key_pair;
    }
    at += total;
    return at < high;
  });
  // Counting and writing may round differently: what did not fit is left out, what is missing gets a tile behind the last one.
  for (int64_t k = max(at, low) + lane_id(); k < high; k += 32) {
    rows.key[k] = (Key)((uint32_t)v.n_cameras * v.tiles_x * v.tiles_y);
    rows.pair[k] = 0;
  }
}

// A warp makes KEYS_PER_WARP intersections, of one pair or of hundreds: near splats, which cover many tiles, follow each other.
template <class Key> __global__ void __launch_bounds__(128) keys_kernel(Dims v, KeyRows<Key> rows, int64_t n) {
  const int64_t low = thread_id() / 32 * KEYS_PER_WARP, high = min(low + KEYS_PER_WARP, n);
  if (low >= n) return;
  for (int64_t begin = search(rows.first, rows.nnz, low); begin < rows.nnz && rows.first[begin] < high; begin += 32) write_pairs(v, rows, begin, low, high);
}

template <class Key> constexpr int KEYS_PER_LOAD = 16 / sizeof(Key);

// start[t]: where tile t begins; a thread looks at 16 bytes of keys.
template <class Key> __global__ void tile_ranges_kernel(const Key* key, int64_t n, int64_t tiles, int64_t* start) {
  constexpr int MANY = KEYS_PER_LOAD<Key>;
  const int64_t first = thread_id() * MANY;
  if (first >= n) return;
  alignas(16) Key mine[MANY];
  if (first + MANY <= n) *(uint4*)mine = *(const uint4*)(key + first);
  else for (int k = 0; k < MANY; ++k) mine[k] = key[min(first + k, n - 1)];
  int64_t next = first ? (int64_t)key[first - 1] + 1 : 0;  // the tile after the newest that has begun
#pragma unroll
  for (int k = 0; k < MANY; ++k)
    for (; next <= (int64_t)mine[k]; ++next) start[next] = first + k;
  if (first + MANY >= n) for (; next <= tiles; ++next) start[next] = n;
}

// Nearest first, into proj.order; first[i]: where the intersections of the i-th begin.
void order_pairs(spl_ctx& c, int64_t n) {
  cub::DoubleBuffer<uint32_t> keys(c.row<uint32_t>(R_DEPTH_KEY), c.row<uint32_t>(R_DEPTH_KEY_ALT)), order(c.row<uint32_t>(R_ORDER), c.row<uint32_t>(R_ORDER_ALT));
  sort(c, keys, order, n, 32);
  if (order.selector != 0) {  // keys too: more of them may be sorted behind these
    check(cudaMemcpyAsync(c.row<uint32_t>(R_ORDER), order.Current(), n * 4, cudaMemcpyDeviceToDevice, c.stream), "copying the order");
    check(cudaMemcpyAsync(c.row<uint32_t>(R_DEPTH_KEY), keys.Current(), n * 4, cudaMemcpyDeviceToDevice, c.stream), "copying keys");
  }
  gather_counts_kernel<<<blocks_for(n + 1, 256), 256, 0, c.stream>>>(c.row<uint32_t>(R_ORDER), c.row<uint32_t>(R_COUNT), c.counters(), n, c.row<int64_t>(R_FIRST));
  launched("gather_counts_kernel");
  scan(c, c.row<int64_t>(R_FIRST), n + 1);
}

// The intersections in the order of their pairs, then by tile.
template <class Key> static void sort_by_tile(spl_ctx& c, const View& v, int64_t nnz, int64_t n) {
  cub::DoubleBuffer<Key> keys(c.row<Key>(R_KEY), c.row<Key>(R_KEY_ALT));
  cub::DoubleBuffer<uint32_t> pairs(c.row<uint32_t>(R_PAIR), c.row<uint32_t>(R_PAIR_ALT));
  keys.selector = pairs.selector = c.sort_from_alt;
  const KeyRows<Key> rows = {c.row<Screen>(R_SCREEN), c.row<Box16>(R_BOX), c.row<uint16_t>(R_CAMERA), c.row<uint32_t>(R_ORDER), c.row<int64_t>(R_FIRST), keys.Current(), pairs.Current(), nnz};
  keys_kernel<<<blocks_for((n + KEYS_PER_WARP - 1) / KEYS_PER_WARP * 32, 128), 128, 0, c.stream>>>(dims_of(v), rows, n);
  launched("keys_kernel");
  int bits = 1;
  while (bits < 32 && v.tiles() >> bits) ++bits;
  sort(c, keys, pairs, n, bits);
  if (pairs.selector != 0) {  // it should end in isect.pair: copy this time, start from the other side next time
    check(cudaMemcpyAsync(c.row<uint32_t>(R_PAIR), pairs.Current(), n * 4, cudaMemcpyDeviceToDevice, c.stream), "copying pairs");
    c.sort_from_alt = !c.sort_from_alt;
  }
  tile_ranges_kernel<<<blocks_for((n + KEYS_PER_LOAD<Key> - 1) / KEYS_PER_LOAD<Key>, 256), 256, 0, c.stream>>>(keys.Current(), n, v.tiles(), c.row<int64_t>(R_TILE_START));
  launched("tile_ranges_kernel");
}

void bin(spl_ctx& c, const View& v) {
  const int64_t nnz = c.counts[SPL_PAIRS] - 1, n = c.n_isects;
  begin_phase(c, SPL_BIN);
  if (!n) return check(cudaMemsetAsync(c.row<void>(R_TILE_START), 0, (v.tiles() + 1) * 8, c.stream), "clearing tiles");
  if (key_bytes(v) == 2) sort_by_tile<uint16_t>(c, v, nnz, n); else sort_by_tile<uint32_t>(c, v, nnz, n);
}

}  // namespace spl
