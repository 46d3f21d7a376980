// compact_bwd.cu: projection backward and Adam of a compact map in one kernel: gradients never reach memory. One block of
// threads per block of the map, one thread per Gaussian, so that every code is read and written in memory order, and what no
// camera sees is left alone. The exponent of a group follows from the largest parameter of the whole block: lanes update
// it, the block agrees on the exponent, lanes encode. In between parameters are in units of their old codes.
#include "gradient.cuh"

namespace spl {

constexpr int THREADS = SPL_OPT_BLOCK, WARPS = THREADS / 32;

struct Coded { int16_t* x; uint8_t* m; uint16_t* v; };  // a row of parameters and its moments
struct CompactWork {
  float* mean;
  Coded of_mean, quat, log_scale, opacity, sh0;  // of_mean: moments alone; of SH: degree 0 ..
  uint32_t* rest;                                // .. and the others, whose first moments do not exist
  int8_t* exponents;
  const uint32_t* mask; const int64_t* scan; const uint16_t* camera; const float* v_screen;
  int64_t n, mask_blocks;
  int words, bands;  // of `rest` and of the second moments of SH, a Gaussian
  Optimiser o;
};

template <int D, bool MULTI> struct CompactShared {
  float largest[SPL_N_GROUPS][WARPS];                                     // |parameter|, by warp
  float v_sh[MULTI ? 3 * (D + 1) * (D + 1) : 1][MULTI ? THREADS : 1];      // several cameras: gradients of SH
};

struct Lane {
  int64_t i;             // Gaussian
  bool exists, updated;
  uint32_t key;          // of the random words of this step
  AdamStep adam;
};

// The exponents of the block, one a byte.
struct Exponents {
  int bytes;
  __device__ __forceinline__ int operator[](int group) const { return (int8_t)(bytes >> 8 * group); }
};

// One camera: the gradient of SH coefficient (k, channel) is basis_k(d) v. Several: they are in shared memory.
struct Look { Vec3 d, v; };

// Element 0 of this thread's Gaussian in a row; the next ones follow every THREADS.
template <class T> __device__ __forceinline__ T* mine(T* row, int elements) { return row + (int64_t)blockIdx.x * elements * THREADS + threadIdx.x; }

// SH coefficients of a Gaussian as they are stored, up to degree D.
template <int D> struct alignas(16) Colors { uint32_t rest[rest_words(D) ? (rest_words(D) + 3) / 4 * 4 : 4]; int sh0[3]; };
template <int D> __device__ __forceinline__ void load_rest(const CompactWork& w, int64_t i, uint32_t* words) {
  const uint32_t* from = w.rest + i * w.words;
  constexpr int FOURS = rest_words(D) / 4;
  if (w.words % 4 == 0)
#pragma unroll
    for (int k = 0; k < FOURS; ++k) *(uint4*)(words + 4 * k) = ((const uint4*)from)[k];
  else
#pragma unroll
    for (int k = 0; k < 4 * FOURS; ++k) words[k] = from[k];
#pragma unroll
  for (int k = 4 * FOURS; k < rest_words(D); ++k) words[k] = from[k];
}
template <int D> __device__ __forceinline__ void store_rest(const CompactWork& w, int64_t i, const uint32_t* words) {
  uint32_t* to = w.rest + i * w.words;
  constexpr int FOURS = rest_words(D) / 4;
  if (w.words % 4 == 0)
#pragma unroll
    for (int k = 0; k < FOURS; ++k) ((uint4*)to)[k] = *(const uint4*)(words + 4 * k);
  else
#pragma unroll
    for (int k = 0; k < 4 * FOURS; ++k) to[k] = words[k];
#pragma unroll
  for (int k = 4 * FOURS; k < rest_words(D); ++k) to[k] = words[k];
}

template <int N> __device__ __forceinline__ void load_codes(const int16_t* row, bool exists, int* codes) {
#pragma unroll
  for (int k = 0; k < N; ++k) codes[k] = exists ? row[k * THREADS] : 0;
}
__device__ __forceinline__ float code_units(int code) {  // the compiler's own conversion from 16 bits runs at a quarter of the rate
  float x;
  asm("cvt.rn.f32.s32 %0, %1;" : "=f"(x) : "r"(code));
  return x;
}
__device__ __forceinline__ float fast_root(float x) {  // as in adam_quotient
  float root;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(x));
  return root;
}

// ---- the pairs of a Gaussian ----------------------------------------------------------------------------------------------------
// Visible pairs before pair p.
__device__ __forceinline__ int64_t visible_before(const CompactWork& w, uint64_t p) {
  const int64_t block = p / SPL_MASK_BLOCK;
  int64_t sum = w.scan[block];
  const int at = (int)(p % SPL_MASK_BLOCK);
  for (int k = 0; k < at / 32; ++k) sum += __popc(w.mask[block * SPL_MASK_WORDS + k]);
  if (at % 32) sum += __popc(w.mask[block * SPL_MASK_WORDS + at / 32] & ((1u << at % 32) - 1));
  return sum;
}

struct Pairs { int64_t begin, end; };  // that see this thread's Gaussian
template <bool MULTI> __device__ __forceinline__ Pairs find_pairs(const CompactWork& w, int64_t i, int n_cameras) {
  if constexpr (MULTI) return {visible_before(w, (uint64_t)i * n_cameras), visible_before(w, (uint64_t)(i + 1) * n_cameras)};
  const int64_t block = (int64_t)blockIdx.x * (THREADS / SPL_MASK_BLOCK) + threadIdx.x / SPL_MASK_BLOCK;
  const uint4 words = ((const uint4*)w.mask)[block];
  const uint32_t bits[SPL_MASK_WORDS] = {words.x, words.y, words.z, words.w}, below = (1u << lane_id()) - 1;
  const int word = threadIdx.x / 32 % SPL_MASK_WORDS;
  int before = 0, sees = 0;
#pragma unroll
  for (int k = 0; k < SPL_MASK_WORDS; ++k) {
    before += __popc(bits[k] & (k < word ? ~0u : k == word ? below : 0));
    sees = k == word ? bits[k] >> lane_id() & 1 : sees;
  }
  const int64_t begin = w.scan[block] + before;
  return {begin, begin + sees};
}

// dL/d mean through the colour; several cameras: adds to the gradients of SH.
template <int D, bool MULTI> __device__ __forceinline__ Vec3 color_bwd(const Exponents& e, const Colors<D>& colors, Vec3 mean, Vec3 center, Look& look, float (*v_sh)[MULTI ? THREADS : 1]) {
  float inv;
  look.d = sh_direction(mean, center, inv);
  const Vec3 d = look.d, v = look.v;
  Vec3 vd = {0, 0, 0};
  sh_basis(D, d.x, d.y, d.z, [&](int k, float b, float bx, float by, float bz) {
    const int l = (k >= 1) + (k >= 4) + (k >= 9);
    auto code = [&](int c) { return code_units(k ? rest_byte(colors.rest, rest_begin(l) + 1 + 3 * (k - l * l) + c) : colors.sh0[c]); };
    const float along = code(0) * v.x + code(1) * v.y + code(2) * v.z;
    vd = vd + Vec3{bx, by, bz} * (along * (k ? rest_step(colors.rest, l) : step_of(e[SPL_G_SH])));
    if constexpr (MULTI) {
      v_sh[3 * k][threadIdx.x] += b * v.x; v_sh[3 * k + 1][threadIdx.x] += b * v.y; v_sh[3 * k + 2][threadIdx.x] += b * v.z;
    }
  });
  return (vd - d * dot(vd, d)) * inv;
}

// The pairs [p, end) of one Gaussian.
template <int D, bool MULTI, bool MIP> __device__ __forceinline__ void gather(const CompactWork& w, const Cameras& cameras, const Gaussian& g, int64_t p, int64_t end, const Exponents& e,
                                                                    const Colors<D>& colors, Total& t, Look& look, float (*v_sh)[MULTI ? THREADS : 1]) {
  do {
    const uint16_t bits = w.camera[p];
    const Camera& cam = MULTI ? cameras.many[camera_of(bits)] : cameras.one;
    const ScreenGrad v = load_screen_grad(w.v_screen, p);
    t.nearest_z = fminf(t.nearest_z, depth_of(cam, g.mean));
    if (v.f[10] == 0) continue;  // no pixel drew it
    t.weight += v.f[10];
    t.error += v.f[11];
    look.v = lit(bits, v.f + 7);
    const Vec3 vm = color_bwd<D, MULTI>(e, colors, g.mean, cam.center, look, v_sh);
    t.g.mean = t.g.mean + vm;
    project_bwd<MIP>(g, cam, v.f, t.g, nullptr);
  } while (MULTI && ++p < end);
}

// ---- one group: update, agree, encode ----------------------------------------------------------------------------------------------
template <int N, int G, class S> __device__ __forceinline__ void propose(S& s, const float* x) {
  float most = 0;
#pragma unroll
  for (int k = 0; k < N; ++k) most = fmaxf(most, fabsf(x[k]));  // not NaN
  const int bits = warp_max(__float_as_int(most));               // of floats >= 0, in their order
  if (lane_id() == 0) s.largest[G][threadIdx.x / 32] = __int_as_float(bits);
}

// After a barrier. What was not updated stays as it is, unless the exponent changes.
template <int N, int G, class S> __device__ __forceinline__ void settle(const CompactWork& w, const S& s, const Lane& me, int first_word, int e, int16_t* row, const float* x) {
  const float most = __int_as_float(warp_max(__float_as_int(s.largest[G][lane_id() % WARPS])));
  const int next = next_exponent(e, most * step_of(e), G);
  const bool recoded = next != e && me.exists;
  if (!me.updated && !recoded) return;
  const uint32_t key = me.updated ? me.key : random_key(w.o.h.seed, (uint32_t)me.i, (uint32_t)w.o.steps[me.i]);
  const float units = power_of_two(e - next);
#pragma unroll
  for (int k = 0; k < N; ++k) row[k * THREADS] = encode(x[k], units, bits_for_x(random_word(key, first_word + k)));
  if (threadIdx.x == 0 && recoded) w.exponents[(int64_t)blockIdx.x * SPL_EXPONENTS + G] = (int8_t)next;  // Gaussian 0 of a block always exists
}

// The moments of a row of N elements, loaded before anything is stored.
template <int N> struct Moments { uint8_t m[N]; uint16_t v[N]; };
template <int N> __device__ __forceinline__ Moments<N> load_moments(const Coded& row) {
  Moments<N> o;
#pragma unroll
  for (int k = 0; k < N; ++k) { o.m[k] = mine(row.m, N)[k * THREADS]; o.v[k] = mine(row.v, N)[k * THREADS]; }
  return o;
}

// Adam of one element whose moments are codes: m = u sqrt(v), with the second moment as it was stored, then as it is stored now.
__device__ __forceinline__ void adam_coded(float& x, uint8_t& m_code, uint16_t& v_code, float g, float lr, const AdamStep& a, uint32_t m_random, uint32_t v_random) {
  const float was = decode_f16u(v_code);
  float m = decode_f8(m_code) * was, v = was * was;
  adam(x, m, v, g, lr, a);
  v_code = encode_f16u(fast_root(v), v_random);
  const float root = decode_f16u(v_code);
  m_code = encode_f8(root > 0 ? __fdividef(m, root) : 0.0f, m_random);
}

// One row of the geometry; `element` is the number of its first (codec.h), of which `raw` holds the gradients.
template <int N> __device__ __forceinline__ void update_row(const Lane& me, const Coded& row, Moments<N>& codes, int element, const float* raw, float lr, float* x) {
#pragma unroll
  for (int k = 0; k < N; ++k) {
    adam_coded(x[k], codes.m[k], codes.v[k], raw[element + k], lr, me.adam, bits_for_m(random_word(me.key, element + k)), bits_for_v(me.key, element + k));
    mine(row.m, N)[k * THREADS] = codes.m[k]; mine(row.v, N)[k * THREADS] = codes.v[k];
  }
}

// ---- SH, degree by degree: first moments of degree 0 alone (math.h) ----------------------------------------------------------------------
// The gradients of degree L; returns the sum of their squares.
template <int L, bool MULTI> __device__ __forceinline__ float band_gradient(const Look& look, const float (*v_sh)[MULTI ? THREADS : 1], float* g) {
  float squares = 0;
  if constexpr (MULTI) {
#pragma unroll
    for (int k = 0; k < band_size(L); ++k) {
      const float v = v_sh[band_begin(L) + k][threadIdx.x];
      squares += v * v;
      g[k] = v;
    }
    return squares;
  }
  const Vec3 v = look.v;
  sh_basis(L, look.d.x, look.d.y, look.d.z, [&](int k, float b, float, float, float) {
    if (k < L * L) return;
    float* at = g + 3 * (k - L * L);
    at[0] = b * v.x; at[1] = b * v.y; at[2] = b * v.z;
    squares += b * b;
  });
  return squares * dot(v, v);
}

// Second moment of degree L, as it was and as it is stored now, and what its gradients are multiplied by.
struct Rate { float was, now, rate; };
template <int L> __device__ __forceinline__ Rate step_band(const CompactWork& w, const Lane& me, uint16_t code, float squares, float lr) {
  Rate o;
  o.was = decode_f16u(code);
  float v = o.was * o.was;
  o.rate = fminf(adam_band(v, squares, L, lr, me.adam), 3e38f);  // times a gradient of 0 is 0
  const uint16_t next = encode_f16u(fast_root(v), bits_for_v(me.key, FIRST_SH_ELEMENT + L));
  mine(w.sh0.v, w.bands)[L * THREADS] = next;
  o.now = decode_f16u(next);
  return o;
}

// Degree 0: x in units of its codes.
template <bool MULTI> __device__ __forceinline__ void update_sh0(const CompactWork& w, const Lane& me, const Look& look, const float (*v_sh)[MULTI ? THREADS : 1], int e, float* x) {
  float g[3];
  int m[3];
#pragma unroll
  for (int k = 0; k < 3; ++k) m[k] = mine((const int8_t*)w.sh0.m, 3)[k * THREADS];
  const float squares = band_gradient<0, MULTI>(look, v_sh, g);
  const Rate r = step_band<0>(w, me, mine(w.sh0.v, w.bands)[0], squares, w.o.h.lr_sh0 * inverse_step_of(e));
  const float inverse = r.now > 0 ? __fdividef(1 / F8_UNIT, r.now) : 0.0f, kept = me.adam.beta1 * r.was * F8_UNIT;
#pragma unroll
  for (int k = 0; k < 3; ++k) {
    const float moment = f8_units(m[k]) * kept + (1 - me.adam.beta1) * g[k];
    x[k] -= r.rate * moment;
    mine(w.sh0.m, 3)[k * THREADS] = encode_f8(fabsf(moment) * inverse + F8_ORIGIN, moment, bits_for_m(random_word(me.key, FIRST_SH_ELEMENT + k)));
  }
}

template <int L, bool MULTI> __device__ __forceinline__ void update_band(const CompactWork& w, const Lane& me, const Look& look, const float (*v_sh)[MULTI ? THREADS : 1], uint16_t v_code, uint32_t* rest) {
  float x[band_size(L)], g[band_size(L)];
  const Rate r = step_band<L>(w, me, v_code, band_gradient<L, MULTI>(look, v_sh, g), w.o.h.lr_sh_rest);
  decode_band<L>(rest, x);
#pragma unroll
  for (int k = 0; k < band_size(L); ++k) x[k] -= r.rate * g[k];
  encode_band<L>(rest, x, [&](int k) { return bits_for_x(random_word(me.key, FIRST_SH_ELEMENT + band_begin(L) + k)); });
}
template <int D, bool MULTI> __device__ __forceinline__ void update_rest(const CompactWork& w, const Lane& me, const Look& look, const float (*v_sh)[MULTI ? THREADS : 1], uint32_t* rest) {
  uint16_t v[D + 1];
#pragma unroll
  for (int l = 1; l <= D; ++l) v[l] = mine(w.sh0.v, w.bands)[l * THREADS];
  if constexpr (D >= 1) update_band<1, MULTI>(w, me, look, v_sh, v[1], rest);
  if constexpr (D >= 2) update_band<2, MULTI>(w, me, look, v_sh, v[2], rest);
  if constexpr (D >= 3) update_band<3, MULTI>(w, me, look, v_sh, v[3], rest);
  store_rest<D>(w, me.i, rest);
}

// ---- a Gaussian -------------------------------------------------------------------------------------------------------------------------
template <int N> __device__ __forceinline__ void load_units(const int16_t* row, bool exists, float* x) {
  int codes[N];
  load_codes<N>(row, exists, codes);
#pragma unroll
  for (int k = 0; k < N; ++k) x[k] = code_units(codes[k]);
}
template <int N> __device__ __forceinline__ void load_row(const int16_t* row, float step, float* x) {
  load_units<N>(row, true, x);
#pragma unroll
  for (int k = 0; k < N; ++k) x[k] *= step;
}
__device__ __forceinline__ Gaussian load_lane(const CompactWork& w, const Lane& me, const Exponents& e) {
  Raw x;
  load_row<4>(mine(w.quat.x, 4), step_of(e[SPL_G_QUAT]), x.quat);
  load_row<3>(mine(w.log_scale.x, 3), step_of(e[SPL_G_LOG_SCALE]), x.log_scale);
  load_row<1>(mine(w.opacity.x, 1), step_of(e[SPL_G_OPACITY]), &x.opacity);
  Gaussian g;
  make_gaussian(w.mean + 3 * me.i, x.quat, x.log_scale, x.opacity, false, g);
  return g;
}

// The gradients of one Gaussian from all its pairs, and its statistics. Leaves the gradients in `raw`.
template <int D, bool MULTI, bool MIP, class S> __device__ __forceinline__ void begin_lane(const CompactWork& w, const Cameras& cameras, S& s, const Exponents& e, Lane& me, Colors<D>& colors, Look& look, float* raw, Vec3& noise, float& lr_mean) {
  constexpr int FLOATS = 3 * (D + 1) * (D + 1);
  const Pairs pairs = find_pairs<MULTI>(w, me.i, cameras.n);
  const Gaussian g = load_lane(w, me, e);  // on its way together with the mask
  const Statistics was = load_statistics(w.o, me.i);
  if (pairs.begin == pairs.end) return;
  load_codes<3>(mine(w.sh0.x, 3), true, colors.sh0);
  load_rest<D>(w, me.i, colors.rest);
  if constexpr (MULTI)
#pragma unroll
    for (int k = 0; k < FLOATS; ++k) s.v_sh[k][threadIdx.x] = 0;
  Total t = no_pairs();
  gather<D, MULTI, MIP>(w, cameras, g, pairs.begin, pairs.end, e, colors, t, look, s.v_sh);
  float squares = dot(look.v, look.v);
  if constexpr (MULTI)
#pragma unroll
    for (int k = 0; k < FLOATS; ++k) squares += s.v_sh[k][threadIdx.x] * s.v_sh[k][threadIdx.x];
  Stride stride;
  me.updated = begin_adam(w.o, me.i, g, was, t, all_finite(t.g) && finite(squares), stride);
  if (!me.updated) return;
  me.key = random_key(w.o.h.seed, (uint32_t)me.i, (uint32_t)stride.steps);
  me.adam = {w.o.h.beta1, w.o.h.beta2, w.o.h.eps, stride.c1, stride.c2};
  lr_mean = stride.lr_mean;
  raw_gradient(g, t.g, false, raw);
  if (w.o.h.noise > 0 && noisy(g.opacity)) noise = position_noise(g, w.o.h.noise * lr_mean, w.o.h.seed, (uint32_t)me.i, (uint32_t)stride.steps);
}

// Parameters of the geometry, in units of their codes but for the mean.
struct Units { float mean[3], quat[4], log_scale[3], opacity[1], sh0[3]; };
__device__ __forceinline__ void update_geometry(const CompactWork& w, const Lane& me, const Exponents& e, const float* raw, float lr_mean, Vec3 noise, Units& x) {
  Moments<3> mean = load_moments<3>(w.of_mean), log_scale = load_moments<3>(w.log_scale);
  Moments<4> quat = load_moments<4>(w.quat);
  Moments<1> opacity = load_moments<1>(w.opacity);
  update_row<3>(me, w.of_mean, mean, 0, raw, lr_mean, x.mean);
  w.mean[3 * me.i] = x.mean[0] + noise.x; w.mean[3 * me.i + 1] = x.mean[1] + noise.y; w.mean[3 * me.i + 2] = x.mean[2] + noise.z;
  update_row<4>(me, w.quat, quat, 3, raw, w.o.h.lr_quat * inverse_step_of(e[SPL_G_QUAT]), x.quat);
  update_row<3>(me, w.log_scale, log_scale, 7, raw, w.o.h.lr_log_scale * inverse_step_of(e[SPL_G_LOG_SCALE]), x.log_scale);
  update_row<1>(me, w.opacity, opacity, 10, raw, w.o.h.lr_logit_opacity * inverse_step_of(e[SPL_G_OPACITY]), x.opacity);
}

template <int D, bool MULTI, bool MIP> __global__ void __launch_bounds__(THREADS, 2) compact_bwd_kernel(const __grid_constant__ CompactWork w, const __grid_constant__ Cameras cameras) {
  extern __shared__ __align__(16) float memory[];
  CompactShared<D, MULTI>& s = *(CompactShared<D, MULTI>*)memory;
  const int64_t masks = (int64_t)(THREADS / SPL_MASK_BLOCK) * cameras.n, first = blockIdx.x * masks;
  if (w.scan[first] == w.scan[min(first + masks, w.mask_blocks)]) return;  // all threads: nothing of this block is seen
  Lane me{};
  me.i = thread_id();
  me.exists = me.i < w.n;
  const Exponents e = {*(const int*)(w.exponents + (int64_t)blockIdx.x * SPL_EXPONENTS)};
  int16_t *quat = mine(w.quat.x, 4), *log_scale = mine(w.log_scale.x, 3), *opacity = mine(w.opacity.x, 1), *sh0 = mine(w.sh0.x, 3);
  Colors<D> colors;
  Look look{};
  float raw[FIRST_SH_ELEMENT], lr_mean;
  Vec3 noise = {0, 0, 0};
  if (me.exists) begin_lane<D, MULTI, MIP>(w, cameras, s, e, me, colors, look, raw, noise, lr_mean);
  Units x;
  load_units<4>(quat, me.exists, x.quat);
  load_units<3>(log_scale, me.exists, x.log_scale);
  load_units<1>(opacity, me.exists, x.opacity);
  load_units<3>(sh0, me.exists, x.sh0);
#pragma unroll
  for (int k = 0; k < 3; ++k) x.mean[k] = me.updated ? w.mean[3 * me.i + k] : 0;
  if (me.updated) {
    update_geometry(w, me, e, raw, lr_mean, noise, x);
    update_sh0<MULTI>(w, me, look, s.v_sh, e[SPL_G_SH], x.sh0);
  }
  propose<4, SPL_G_QUAT>(s, x.quat);
  propose<3, SPL_G_LOG_SCALE>(s, x.log_scale);
  propose<1, SPL_G_OPACITY>(s, x.opacity);
  propose<3, SPL_G_SH>(s, x.sh0);
  if (me.updated) update_rest<D, MULTI>(w, me, look, s.v_sh, colors.rest);
  __syncthreads();
  settle<4, SPL_G_QUAT>(w, s, me, 3, e[SPL_G_QUAT], quat, x.quat);
  settle<3, SPL_G_LOG_SCALE>(w, s, me, 7, e[SPL_G_LOG_SCALE], log_scale, x.log_scale);
  settle<1, SPL_G_OPACITY>(w, s, me, 10, e[SPL_G_OPACITY], opacity, x.opacity);
  settle<3, SPL_G_SH>(w, s, me, FIRST_SH_ELEMENT, e[SPL_G_SH], sh0, x.sh0);
}

template <int D, bool MULTI, bool MIP> static void launch(spl_ctx& c, const CompactWork& w) {
  auto* kernel = compact_bwd_kernel<D, MULTI, MIP>;
  const int bytes = sizeof(CompactShared<D, MULTI>);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "taking shared memory");
  kernel<<<blocks_for(w.n, THREADS), THREADS, bytes, c.stream>>>(w, c.cameras);
  launched("compact_bwd_kernel");
}

template <bool MULTI, bool MIP> static void run(spl_ctx& c, const CompactWork& w, int degree) {
  if (degree == 0) launch<0, MULTI, MIP>(c, w);
  else if (degree == 1) launch<1, MULTI, MIP>(c, w);
  else if (degree == 2) launch<2, MULTI, MIP>(c, w);
  else launch<3, MULTI, MIP>(c, w);
}

void train_compact(spl_ctx& c, const View& v, const spl_hyper& h) {
  const int64_t nnz = c.counts[SPL_PAIRS] - 1;
  if (!nnz) return;
  auto coded = [&](int x, int m, int v) { return Coded{c.row<int16_t>(x), c.row<uint8_t>(m), c.row<uint16_t>(v)}; };
  CompactWork w{};
  w.mean = c.row<float>(R_MEAN);
  w.of_mean = {nullptr, c.row<uint8_t>(R_M_MEAN), c.row<uint16_t>(R_V_MEAN)};
  w.quat = coded(R_QUAT, R_M_QUAT, R_V_QUAT);
  w.log_scale = coded(R_LOG_SCALE, R_M_LOG_SCALE, R_V_LOG_SCALE);
  w.opacity = coded(R_OPACITY, R_M_OPACITY, R_V_OPACITY);
  w.sh0 = coded(R_SH, R_M_SH0, R_V_SH);
  w.rest = c.row<uint32_t>(R_SH_REST);
  w.exponents = c.row<int8_t>(R_EXPONENTS);
  w.mask = c.row<uint32_t>(R_MASK); w.scan = c.row<int64_t>(R_SCAN); w.camera = c.row<uint16_t>(R_CAMERA); w.v_screen = c.row<float>(R_V_SCREEN);
  w.n = c.source.n;
  w.mask_blocks = c.counts[SPL_BLOCKS] - 1;
  w.words = c.source.codes.words; w.bands = c.params.sh_degree + 1;
  w.o = optimiser_of(c, h, nnz);
  const bool mip = v.cameras[0].antialiased;
  if (v.n_cameras > 1) mip ? run<true, true>(c, w, v.sh_degree) : run<true, false>(c, w, v.sh_degree);
  else mip ? run<false, true>(c, w, v.sh_degree) : run<false, false>(c, w, v.sh_degree);
}

}  // namespace spl
