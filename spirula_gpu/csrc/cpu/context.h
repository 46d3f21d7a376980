// context.h: what a CPU context owns.
#pragma once
#include <cstdint>
#include "../hot.h"

namespace spl {

// An address range that is reserved once and backed by memory as it grows: pointers stay, growth copies nothing.
struct Region {
  uint8_t* base = nullptr;
  int64_t reserved = 0, committed = 0;
  void reserve(int64_t bytes);
  void commit(int64_t bytes, bool keep = true);  // grows or shrinks to a page multiple; new bytes are zero and resident; the rest always stays
  void release();
  static int64_t rounded(int64_t bytes);  // what commit takes
};

}  // namespace spl

#define SPL_BACKEND_NAME "cpu"
#define SPL_FOUND_AT_ONCE 0  // the number of pairs is known before that of intersections
#include "../host.h"

struct spl_ctx : spl::Context {
  int threads = 1;
  double phase_began = 0;
  std::vector<float> adam_c1, adam_c2;  // bias corrections by step count, for the betas beside
  float adam_beta1 = -1, adam_beta2 = -1;

  void fill(uint8_t* p, int byte, int64_t count);
  int64_t first_other(const uint8_t* p, int byte, int64_t count);
};

#include "../ops.h"

namespace spl {
int threads_of(const spl_create_params&);
}
