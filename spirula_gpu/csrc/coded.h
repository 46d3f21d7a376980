// coded.h: rows of a compact map on the host, block by block: decode, change, encode. Codecs and places are codec.h's.
#pragma once
#include "codec.h"

namespace spl {

struct GroupInfo { int row, count; };  // and its elements
constexpr GroupInfo GROUPS[SPL_N_GROUPS] = {{R_QUAT, 4}, {R_LOG_SCALE, 3}, {R_OPACITY, 1}, {R_SH, 3}};  // of SH, degree 0
inline int group_of(int row) {
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
  for (int k = 0; k < g.count; ++k) {
    const int16_t* codes = b.codes + k * SPL_OPT_BLOCK;
    for (int lane = 0; lane < b.lanes; ++lane) kept = std::max(kept, changed[lane] ? 0 : abs((int)codes[lane]));
  }
  for (int lane = 0; lane < b.lanes; ++lane)
    if (changed[lane]) for (int k = 0; k < g.count; ++k) largest = most(fabsf(x[lane * stride + k]), largest);
  const float old_step = step_of(e);
  const int old = e;
  e = (int8_t)next_exponent(old, most(largest, kept * old_step), group);
  const float inverse = inverse_step_of(e);
  for (int k = 0; k < g.count; ++k) {
    int16_t* codes = b.codes + k * SPL_OPT_BLOCK;
#pragma GCC ivdep
    for (int lane = 0; lane < b.lanes; ++lane) {  // what keeps its exponent keeps its code
      const float old_value = decode(codes[lane], old_step), new_value = x[lane * stride + k];
      codes[lane] = encode(changed[lane] ? new_value : old_value, inverse, random(lane, k));
    }
  }
}

// A row of K elements, x[lane * K + k], to the nearest code. Where every Gaussian changes, the exponent follows from them alone.
inline void encode_block(const CodedBlock& b, int row, int K, const uint8_t* changed, const float* x) {
  const int group = group_of(row);
  if (std::all_of(changed, changed + b.lanes, [](uint8_t c) { return c != 0; })) b.exponents[group] = EXPONENT_MIN;
  encode_group(b, group, changed, x, K, [](int, int) { return NEAREST; });
}

// One Gaussian of a row of K elements: x [K]. `codes` and `exponents` of all blocks.
inline void decode_parameters(const int16_t* codes, const int8_t* exponents, int row, int K, int64_t i, float* x) {
  const float step = step_of(exponents_of(exponents, i)[group_of(row)]);
  for (int k = 0; k < K; ++k) x[k] = decode(codes[place(i, k, K)], step);
}

// Which second moment scales first moment k: of SH, which has them in degree 0 alone, that of its degree.
SPL_FN int v_element(bool sh, int k) { return sh ? 0 : k; }
SPL_FN uint8_t encode_first(float m, float root, uint32_t random) { return root > 0 ? encode_f8(m / root, random) : 0; }

}  // namespace spl
