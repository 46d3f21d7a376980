// sh.cuh: SH coefficients of one Gaussian in registers.
#pragma once
#include "context.h"

namespace spl {

inline bool aligned_sh(const Source& s) { return s.sh_floats % 4 == 0 && (uintptr_t)s.sh % 16 == 0; }

// The SH coefficients that degree D needs, in registers: 16 bytes a load where the rows allow it.
template <int D> __device__ __forceinline__ void load_sh(const float* sh, bool aligned, float* x) {
  constexpr int FLOATS = 3 * (D + 1) * (D + 1);
  if (aligned) {
#pragma unroll
    for (int k = 0; k < FLOATS / 4; ++k) *(float4*)(x + 4 * k) = ((const float4*)sh)[k];
#pragma unroll
    for (int k = FLOATS / 4 * 4; k < FLOATS; ++k) x[k] = sh[k];
  } else {
#pragma unroll
    for (int k = 0; k < FLOATS; ++k) x[k] = sh[k];
  }
}

}  // namespace spl
