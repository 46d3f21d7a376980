// rows.h: rows of a compact map in and out in fp32, for spl_map_read and spl_map_write of both backends: some blocks at a time come
// to the host with get(), are decoded or changed there, and go back with put().
#pragma once
#include "coded.h"
#include "ops.h"

namespace spl {

constexpr int64_t CHUNK = 1024 * SPL_OPT_BLOCK;  // Gaussians

template <class T> struct HostCodes {  // blocks of a row from Gaussian `base` on, which begins one
  spl_ctx& c;
  int row;
  int64_t base;
  std::vector<T> codes;
  uint8_t* there() const { return c.row<uint8_t>(row) + c.map_bytes(row, base); }
  HostCodes(spl_ctx& context, int r, int64_t from, int64_t end) : c(context), row(r), base(from), codes((c.map_bytes(r, end) - c.map_bytes(r, from)) / sizeof(T)) {
    get(c, codes.data(), there(), codes.size() * sizeof(T));
  }
  void store() { put(c, there(), codes.data(), codes.size() * sizeof(T)); }
};

// f(from, begin, end): Gaussians [begin, end) and where their first block begins; at most CHUNK at once.
template <class F> static void in_chunks(int64_t first, int64_t count, F&& f) {
  for (int64_t from = first / SPL_OPT_BLOCK * SPL_OPT_BLOCK; from < first + count; from += CHUNK)
    f(from, std::max(first, from), std::min(first + count, from + CHUNK));
}

struct CodedRow { int row, K, v_row, K_v; bool parameters, first_moments; };  // K: floats in fp32
static CodedRow coded_row(const spl_ctx& c, int r) {
  const bool parameters = r <= R_SH, firsts = !parameters && r <= R_M_SH0;
  const int v_row = firsts ? r + R_V_MEAN - R_M_MEAN : r;
  return {r, (int)row_info(r, c.params.sh_degree).item_bytes / 4, v_row, (int)row_info(v_row, c.params.sh_degree).item_bytes / 4, parameters, firsts};
}

static void read_coded(spl_ctx& c, int r, int64_t first, int64_t count, float* to) {
  const CodedRow row = coded_row(c, r);
  in_chunks(first, count, [&](int64_t from, int64_t begin, int64_t end) {
    if (row.parameters) {
      const HostCodes<int16_t> x(c, r, from, end);
      const HostCodes<int8_t> exponents(c, R_EXPONENTS, from, end);
      for (int64_t i = begin; i < end; ++i) decode_parameters(x.codes.data(), exponents.codes.data(), r, (int)c.item_bytes(r) / 2, i - from, to + (i - first) * row.K);
      if (r == R_SH && c.params.sh_degree) {
        const HostCodes<uint32_t> rest(c, R_SH_REST, from, end);
        for (int64_t i = begin; i < end; ++i) decode_rest(rest.codes.data() + (i - from) * rest_words(c.params.sh_degree), c.params.sh_degree, to + (i - first) * row.K);
      }
      return;
    }
    const HostCodes<uint16_t> v(c, row.v_row, from, end);
    auto root = [&](int64_t i, int k) { return decode_f16u(v.codes[place(i - from, k, row.K_v)]); };
    if (!row.first_moments) {
      for (int64_t i = begin; i < end; ++i) for (int k = 0; k < row.K; ++k) to[(i - first) * row.K + k] = root(i, k) * root(i, k);
      return;
    }
    const HostCodes<uint8_t> m(c, r, from, end);
    for (int64_t i = begin; i < end; ++i)
      for (int k = 0; k < row.K; ++k) to[(i - first) * row.K + k] = decode_f8(m.codes[place(i - from, k, row.K)]) * root(i, v_element(r == R_M_SH0, k));
  });
}

static void write_parameters(spl_ctx& c, const CodedRow& row, int64_t from, int64_t begin, int64_t end, const float* values) {  // of `begin` on
  HostCodes<int16_t> x(c, row.row, from, end);
  HostCodes<int8_t> exponents(c, R_EXPONENTS, from, end);
  const int K = (int)c.item_bytes(row.row) / 2;
  std::vector<float> lanes(SPL_OPT_BLOCK * K);
  for (int64_t block = from; block < end; block += SPL_OPT_BLOCK) {
    uint8_t changed[SPL_OPT_BLOCK] = {};
    const int64_t low = std::max(begin, block), high = std::min(end, block + SPL_OPT_BLOCK);
    std::fill(changed + (low - block), changed + (high - block), 1);
    for (int64_t i = low; i < high; ++i) std::copy_n(values + (i - begin) * row.K, K, lanes.data() + (i - block) * K);
    encode_block({x.codes.data() + (block - from) * K, exponents_of(exponents.codes.data(), block - from), (int)std::min<int64_t>(SPL_OPT_BLOCK, c.n - block)}, row.row, K, changed, lanes.data());
  }
  x.store();
  exponents.store();
  if (row.row != R_SH || !c.params.sh_degree) return;
  HostCodes<uint32_t> rest(c, R_SH_REST, from, end);
  for (int64_t i = begin; i < end; ++i)
    encode_rest(rest.codes.data() + (i - from) * rest_words(c.params.sh_degree), c.params.sh_degree, values + (i - begin) * row.K, Nearest{});
  rest.store();
}

static void write_first_moments(spl_ctx& c, const CodedRow& row, int64_t from, int64_t begin, int64_t end, const float* values) {
  HostCodes<uint8_t> m(c, row.row, from, end);
  const HostCodes<uint16_t> v(c, row.v_row, from, end);
  for (int64_t i = begin; i < end; ++i)
    for (int k = 0; k < row.K; ++k)
      m.codes[place(i - from, k, row.K)] = encode_first(values[(i - begin) * row.K + k], decode_f16u(v.codes[place(i - from, v_element(row.row == R_M_SH0, k), row.K_v)]), NEAREST);
  m.store();
}

static void check_first_moments(spl_ctx& c, const CodedRow& row, int64_t from, int64_t begin, int64_t end, const float* values) {
  const HostCodes<uint16_t> v(c, row.v_row, from, end);
  for (int64_t i = begin; i < end; ++i)
    for (int k = 0; k < row.K; ++k) {
      const float x = values[(i - begin) * row.K + k];
      if (x != 0 && !v.codes[place(i - from, v_element(row.row == R_M_SH0, k), row.K_v)])
        fail(SPL_E_ARGUMENT, "%s: Gaussian %lld has %g, but no second moment to scale it by; write %s first", c.info(row.row).name, (long long)i, x, c.info(row.v_row).name);
    }
}

// The first moments stay what they are, as far as their codes go.
static void write_second_moments(spl_ctx& c, const CodedRow& row, int64_t from, int64_t begin, int64_t end, const float* values) {
  const int m_row = row.row - (R_V_MEAN - R_M_MEAN), K_m = coded_row(c, m_row).K;
  HostCodes<uint16_t> v(c, row.row, from, end);
  HostCodes<uint8_t> m(c, m_row, from, end);
  for (int64_t i = begin; i < end; ++i) {
    float m_now[48];
    for (int k = 0; k < K_m; ++k) m_now[k] = decode_f8(m.codes[place(i - from, k, K_m)]) * decode_f16u(v.codes[place(i - from, v_element(m_row == R_M_SH0, k), row.K)]);
    for (int k = 0; k < row.K; ++k) v.codes[place(i - from, k, row.K)] = encode_f16u(sqrtf(values[(i - begin) * row.K + k]), NEAREST);
    for (int k = 0; k < K_m; ++k) m.codes[place(i - from, k, K_m)] = encode_first(m_now[k], decode_f16u(v.codes[place(i - from, v_element(m_row == R_M_SH0, k), row.K)]), NEAREST);
  }
  v.store();
  m.store();
}

static void write_coded(spl_ctx& c, int r, int64_t first, int64_t count, const float* values) {
  const CodedRow row = coded_row(c, r);
  for (int64_t i = 0; i < count * row.K; ++i)
    if (!finite(values[i]) || (r >= R_V_MEAN && values[i] < 0))
      fail(SPL_E_ARGUMENT, "%s: Gaussian %lld has %g, which compact precision cannot store; it must be finite%s", c.info(r).name, (long long)(first + i / row.K), values[i], r >= R_V_MEAN ? " and >= 0" : "");
  if (row.first_moments) in_chunks(first, count, [&](int64_t from, int64_t begin, int64_t end) { check_first_moments(c, row, from, begin, end, values + (begin - first) * row.K); });
  in_chunks(first, count, [&](int64_t from, int64_t begin, int64_t end) {
    const float* at = values + (begin - first) * row.K;
    if (row.parameters) write_parameters(c, row, from, begin, end, at);
    else if (row.first_moments) write_first_moments(c, row, from, begin, end, at);
    else write_second_moments(c, row, from, begin, end, at);
  });
}

}  // namespace spl
