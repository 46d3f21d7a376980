// codec.h: the codes of compact precision, the same on both backends: from the same value and the same random bits both
// make the same code (powers of two and integers only). Zero is exactly zero, and encoding what was decoded changes nothing.
//
// Parameters (quat, log scale, opacity, SH of degree 0): int16 with an exponent per block of 256 Gaussians and group: code * 2^(e - 15).
// SH of higher degrees: 8 bits with an exponent per Gaussian and degree: code * 2^(e - 7).
// First moments: an 8-bit float of u = m / sqrt(v), where v is what is stored of the second moment. Second moments: a 16-bit
// float of sqrt(v). Rounding is stochastic where training writes (a step may be smaller than a code), to nearest elsewhere.
#pragma once
#include "math.h"

namespace spl {

// ---- place: element k of K of a Gaussian; 256 Gaussians of a block beside each other ------------------------------------------
SPL_FN int64_t place(int64_t gaussian, int k, int K) { return (gaussian / SPL_OPT_BLOCK * K + k) * SPL_OPT_BLOCK + gaussian % SPL_OPT_BLOCK; }

// ---- groups: what shares an exponent -------------------------------------------------------------------------------------------
enum Group { SPL_G_QUAT, SPL_G_LOG_SCALE, SPL_G_OPACITY, SPL_G_SH, SPL_N_GROUPS };
static_assert((int)SPL_N_GROUPS == (int)SPL_EXPONENTS, "an exponent each");
constexpr int EXPONENT_MIN = -60;  // values below 2^-75 are zero
// The largest exponents: beyond |log scale| 64 or |logit| 32 nothing that is drawn changes, and one value that is out of all
// proportion must not cost its block the precision.
SPL_FN constexpr int exponent_max(int group) { return group == SPL_G_QUAT ? 5 : group == SPL_G_LOG_SCALE ? 6 : group == SPL_G_OPACITY ? 5 : 22; }
SPL_FN int8_t* exponents_of(int8_t* all, int64_t gaussian) { return all + gaussian / SPL_OPT_BLOCK * SPL_EXPONENTS; }
SPL_FN const int8_t* exponents_of(const int8_t* all, int64_t gaussian) { return all + gaussian / SPL_OPT_BLOCK * SPL_EXPONENTS; }

// ---- bits ----------------------------------------------------------------------------------------------------------------------
SPL_FN uint32_t bits_of(float x) { union { float f; uint32_t u; } b = {x}; return b.u; }
SPL_FN float float_of(uint32_t bits) { union { uint32_t u; float f; } b = {bits}; return b.f; }
SPL_FN float power_of_two(int e) { return float_of((uint32_t)(e + 127) << 23); }  // -126..127

// ---- rounding: 16 random bits, or NEAREST ----------------------------------------------------------------------------------------
constexpr uint32_t NEAREST = 0x8000;
struct Nearest { SPL_FN uint32_t operator()(int) const { return NEAREST; } };
// 32 bits of one Gaussian's step. Words 0..58 serve its elements (11 of geometry in the order of the rows, then SH): the low half
// its parameter, the high half its first moment. The halves of words 64.. serve the second moments: 11, then one a degree.
constexpr int FIRST_SH_ELEMENT = 11;
SPL_FN uint32_t random_word(uint32_t key, int word) { return key * (mixed(word) | 1); }  // one product: an odd factor keeps each half uniform
SPL_FN uint32_t bits_for_x(uint32_t word) { return word & 0xffff; }
SPL_FN uint32_t bits_for_m(uint32_t word) { return word >> 16; }
SPL_FN uint32_t bits_for_v(uint32_t key, int v_element) { return random_word(key, 64 + v_element / 2) >> (v_element % 2 * 16) & 0xffff; }

// ---- parameters: block floating point ----------------------------------------------------------------------------------------------
SPL_FN float step_of(int e) { return power_of_two(e - 15); }            // of the codes with exponent e
SPL_FN float inverse_step_of(int e) { return power_of_two(15 - e); }
// floor(x / step + random / 65536): both ways are exact, since a power of two is, and a sum that is rounded down does not pass a whole number.
SPL_FN int16_t encode(float x, float inverse_step, uint32_t random) {  // saturates
#if defined(__CUDA_ARCH__)
  int16_t code;  // this conversion saturates, and makes 0 of NaN
  asm("cvt.rmi.s16.f32 %0, %1;" : "=h"(code) : "f"(__fmaf_rd(x, inverse_step, (float)random * (1.0f / 65536.0f))));
  return code;
#else
  constexpr float END = 32767.0f * 65536.0f;
  const float a = between(x * (inverse_step * 65536.0f), -END, END);
  const int below = (int)a - (a < (float)(int)a);
  return (int16_t)((below + (int)random) >> 16);
#endif
}
SPL_FN float decode(int16_t code, float step) { return code * step; }
// The smallest exponent whose codes hold `largest` (>= 0), within the limits of the group.
SPL_FN int exponent_for(float largest, int group) {
  const int e = (int)((bits_of(largest) + 0x1ff) >> 23) - 126;  // 32767 / 32768 of a power of two still fits below it
  return e < EXPONENT_MIN ? EXPONENT_MIN : e > exponent_max(group) ? exponent_max(group) : e;
}
// .. and what a block that has `e` goes on with: up at once, down only when two bits lie idle.
SPL_FN int next_exponent(int e, float largest, int group) {
  const int fits = exponent_for(largest, group);
  return fits > e || fits <= e - 2 ? fits : e;
}
// For what comes from outside. Whatever is not finite in a Gaussian's raw parameters makes it one that is never drawn, as in full precision,
// but in a form that codes can hold: the quaternion becomes zero. One of a norm out of proportion is normalised. [K,3] SH: `floats` values.
SPL_FN void make_storable(float* quat, const float* log_scale, float opacity, const float* sh, int floats) {
  float sum = log_scale[0] + log_scale[1] + log_scale[2];  // -infinity is a scale of 0, drawn as a point
  for (int k = 0; k < floats; ++k) sum += sh[k] * 0.0f;
  const float n2 = quat[0] * quat[0] + quat[1] * quat[1] + quat[2] * quat[2] + quat[3] * quat[3];
  const bool drawn = sum < 3.4e38f && opacity > -3.4e38f && n2 > 1e-20f && n2 < 1e20f;
  const float scale = !drawn ? 0.0f : n2 < 1.0f / 256 || n2 > 256 ? 1.0f / sqrtf(n2) : 1.0f;
  for (int k = 0; k < 4; ++k) quat[k] = drawn ? quat[k] * scale : 0.0f;
}

SPL_FN float storable_sh(float x) { return finite(x) ? x : 0.0f; }  // infinity would cost the block its precision

// ---- SH beyond degree 0, map.sh_rest: bytes of 32-bit words, of a degree first its exponent, then its codes --------------------------------
SPL_FN constexpr int band_size(int l) { return 3 * (2 * l + 1); }                              // floats of degree l
SPL_FN constexpr int rest_begin(int l) { return 3 * l * l + l - 4; }                           // the first byte of degree l: 0, 10, 26 (48)
SPL_FN constexpr int rest_words(int degree) { return (rest_begin(degree + 1) + 3) / 4; }       // up to that degree: 0, 3, 7, 12
constexpr int REST_WORDS = rest_words(3);
SPL_FN int rest_byte(const uint32_t* words, int at) { return (int8_t)(words[at / 4] >> at % 4 * 8); }
SPL_FN void set_rest_byte(uint32_t* words, int at, int value) {
  const int shift = at % 4 * 8;
  words[at / 4] = (words[at / 4] & ~(0xffu << shift)) | (uint32_t)(value & 0xff) << shift;
}
SPL_FN int rest_code(const uint32_t* words, int k) { return rest_byte(words, rest_begin(band_of(k)) + 1 + k - band_begin(band_of(k))); }  // of float k >= 3
SPL_FN int rest_exponent(float largest) {  // the smallest with which 127 codes hold it
  const int e = (int)((bits_of(largest) + 0x1ffff) >> 23) - 126;
  return e < EXPONENT_MIN ? EXPONENT_MIN : e > exponent_max(SPL_G_SH) ? exponent_max(SPL_G_SH) : e;
}
SPL_FN float rest_step(const uint32_t* words, int l) { return power_of_two(rest_byte(words, rest_begin(l)) - 7); }
template <int L> SPL_FN void decode_band(const uint32_t* words, float* x) {
  const float step = rest_step(words, L);
SPL_UNROLL
  for (int k = 0; k < band_size(L); ++k) x[k] = step * rest_byte(words, rest_begin(L) + 1 + k);
}
template <int L, class Random> SPL_FN void encode_band(uint32_t* words, const float* x, Random&& random) {  // random(k): 16 bits
  float largest = 0;
SPL_UNROLL
  for (int k = 0; k < band_size(L); ++k) largest = most(fabsf(x[k]), largest);  // not NaN
  const int e = rest_exponent(largest);
  const float inverse = power_of_two(7 - e);
  set_rest_byte(words, rest_begin(L), e);
SPL_UNROLL
  for (int k = 0; k < band_size(L); ++k) {
    const int code = encode(x[k], inverse, random(k));  // beyond 127: only where e has its largest value
    set_rest_byte(words, rest_begin(L) + 1 + k, code > 127 ? 127 : code < -127 ? -127 : code);
  }
}
SPL_FN void decode_rest(const uint32_t* words, int degree, float* sh) {  // [K,3], from degree 1 on
  if (degree >= 1) decode_band<1>(words, sh + band_begin(1));
  if (degree >= 2) decode_band<2>(words, sh + band_begin(2));
  if (degree >= 3) decode_band<3>(words, sh + band_begin(3));
}
template <class Random> SPL_FN void encode_rest(uint32_t* words, int degree, const float* sh, Random&& random) {  // random(k): of float k of [K,3]
  if (degree >= 1) encode_band<1>(words, sh + band_begin(1), [&](int k) { return random(band_begin(1) + k); });
  if (degree >= 2) encode_band<2>(words, sh + band_begin(2), [&](int k) { return random(band_begin(2) + k); });
  if (degree >= 3) encode_band<3>(words, sh + band_begin(3), [&](int k) { return random(band_begin(3) + k); });
}

// ---- first moments: sign, and k in 0..127 of f - 2 in units of 2^-10, where f is the float with bits (k + 1024) << 20: 4 bits of
// exponent, 3 of mantissa. Even steps of 2^-12 at 0, then wider ones of at most 1/8; 0 is k = 0 without a case of its own; the largest is 120.
constexpr float F8_UNIT = 1.0f / 1024, F8_ORIGIN = 2;
SPL_FN float f8_units(int code) {  // with the sign of the code, which is that of the float
  return float_of(bits_of(float_of(0x40000000 | ((uint32_t)code << 20 & 0x07f00000)) - F8_ORIGIN) | ((uint32_t)code & 0x80000000));
}
SPL_FN uint8_t encode_f8(float f, float sign, uint32_t random) {  // f = |u| / F8_UNIT + F8_ORIGIN
  const uint32_t bits = bits_of(f) + (random << 4);
  return (uint8_t)((bits < 0x47ffffff ? bits : 0x47ffffff) >> 20 | (bits_of(sign) >> 24 & 128));  // bits 27..29 are 0
}
SPL_FN uint8_t encode_f8(float u, uint32_t random) { return encode_f8(fabsf(u) * (1 / F8_UNIT) + F8_ORIGIN, u, random); }
SPL_FN float decode_f8(uint8_t code) { return f8_units((int8_t)code) * F8_UNIT; }

// ---- second moments: the upper 16 bits of a positive float, without its sign: 8 of exponent, 8 of mantissa ---------------------------
SPL_FN uint16_t encode_f16u(float root, uint32_t random) {  // root = sqrt(v) >= 0
  const uint32_t code = (bits_of(root) + (random >> 1)) >> 15;
  return (uint16_t)(code < 0xfeff ? code : 0xfeff);  // the largest finite one
}
SPL_FN float decode_f16u(uint16_t code) { return float_of((uint32_t)code << 15); }

}  // namespace spl
