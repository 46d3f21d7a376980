// select.cuh: scratch memory for CUB, and the pairs that a predicate selects, in order.
#pragma once
#include <cub/device/device_select.cuh>
#include <thrust/iterator/counting_iterator.h>
#include "context.h"

namespace spl {

// run(memory, bytes): a CUB call in view.scratch, which scratch_words() has made large enough; CUB refuses where it has not.
template <class F> void with_scratch(spl_ctx& c, const char* what, F&& run) {
  size_t bytes = c.capacity[SPL_BINS] * 8;
  check(run(c.row<void>(R_SCRATCH), bytes), what);
}

template <class P> void select_pairs(spl_ctx& c, uint32_t* out, int64_t* n_out, int64_t n, P predicate) {
  with_scratch(c, "select", [&](void* temp, size_t& bytes) {
    return cub::DeviceSelect::If(temp, bytes, thrust::counting_iterator<uint32_t>(0), out, n_out, n, predicate, c.stream);
  });
}

}  // namespace spl
