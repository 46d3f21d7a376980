// coded.h: rows of a compact map on the host, block by block: decode, change, encode. Codecs and places are codec.h's.
#pragma once
#include "codec.h"

namespace spl {

struct GroupInfo { int row, first, count; };  // its elements of the row
constexpr GroupInfo GROUPS[SPL_N_GROUPS] = {{R_QUAT, 0, 4}, {R_LOG_SCALE, 0, 3}, {R_OPACITY, 0, 1}, {R_SH, 0, 3}, {R_SH, 3, 9}, {R_SH, 12, 15}, {R_SH, 27, 21}};
inline int first_group(int row) {
  int group = 0;
  while (GROUPS[group].row != row) ++group;
  return group;
}

// What one block holds of a row of parameters. Its first `lanes` Gaussians exist.
struct CodedBlock { int16_t* codes; int8_t* exponents; int lanes; };

// The Gaussians that `changed` names get x[lane * stride + k] in the elements k of a group; the others keep their codes, unless the
// block needs another exponent. random(lane, k): 16 bits. Inlined, so that the loops get the instruction set of their caller.
template <class Random> inline __attribute__((always_inline)) void encode_group(const CodedBlock& b, int group, const uint8_t* changed, const float* x, int stride, Random&& random) {
  const GroupInfo g = GROUPS[group];
  int8_t& e = b.exponents[group];
  int kept = 0;
  float largest = 0;
  for (int k = g.first; k < g.first + g.count; ++k) {
    const int16_t* codes = b.codes + k * SPL_OPT_BLOCK;
    for (int lane = 0; lane < b.lanes; ++lane) kept = std::max(kept, changed[lane] ? 0 : abs((int)codes[lane]));
  }
  for (int lane = 0; lane < b.lanes; ++lane)
    if (changed[lane]) for (int k = g.first; k < g.first + g.count; ++k) largest = most(fabsf(x[lane * stride + k]), largest);
  const float old_step = step_of(e);
  const int old = e;
  e = (int8_t)next_exponent(old, most(largest, kept * old_step), group);
  const float inverse = inverse_step_of(e);
  for (int k = g.first; k < g.first + g.count; ++k) {
    int16_t* codes = b.codes + k * SPL_OPT_BLOCK;
#pragma GCC ivdep
    for (int lane = 0; lane < b.lanes; ++lane) {  // what keeps its exponent keeps its code
      const float old_value = decode(codes[lane], old_step), new_value = x[lane * stride + k];
      codes[lane] = encode(changed[lane] ? new_value : old_value, inverse, random(lane, k));
    }
  }
}

// All groups of a row of K elements, x[lane * K + k], to the nearest code. Where every Gaussian changes, the exponents follow from them alone.
inline void encode_block(const CodedBlock& b, int row, int K, const uint8_t* changed, const float* x) {
  const bool whole = std::all_of(changed, changed + b.lanes, [](uint8_t c) { return c != 0; });
  for (int g = 0; g < SPL_N_GROUPS; ++g) {
    if (GROUPS[g].row != row || GROUPS[g].first >= K) continue;
    if (whole) b.exponents[g] = EXPONENT_MIN;
    encode_group(b, g, changed, x, K, [](int, int) { return NEAREST; });
  }
}

// One Gaussian of a row of parameters: x [K]. `codes` and `exponents` of all blocks.
inline void decode_parameters(const int16_t* codes, const int8_t* exponents, int row, int K, int64_t i, float* x) {
  const int8_t* e = exponents_of(exponents, i);
  for (int g = 0; g < SPL_N_GROUPS; ++g) {
    if (GROUPS[g].row != row || GROUPS[g].first >= K) continue;
    const float step = step_of(e[g]);
    for (int k = GROUPS[g].first; k < GROUPS[g].first + GROUPS[g].count; ++k) x[k] = decode(codes[place(i, k, K)], step);
  }
}

// Which second moment scales first moment k: of SH, which has them in degree 0 alone, that of its degree.
SPL_FN int v_element(bool sh, int k) { return sh ? 0 : k; }
SPL_FN uint8_t encode_first(float m, float root, uint32_t random) { return root > 0 ? encode_f8(m / root, random) : 0; }

}  // namespace spl
