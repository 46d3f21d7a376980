// project_bwd.cu: from the gradients of the screen rows to those of the parameters, either into arrays or straight into
// Adam, so that in training they never reach memory. One thread handles a Gaussian with all its pairs, which follow each
// other; parameters pass through shared memory, so that a warp reads and writes them in memory order.
#include "gradient.cuh"
#include "select.cuh"
#include "sh.cuh"

namespace spl {

constexpr int THREADS = 128;

struct Parameters { float *mean, *quat, *log_scale, *opacity, *sh; };  // of first moments: sh holds degree 0; of second ones, one a degree
struct Work {
  Source s;
  const uint32_t* gaussian; const uint16_t* camera; const float* v_screen;
  int64_t nnz;
  const uint32_t* heads; const int64_t* n_heads;  // first pairs of Gaussians; null: one camera, every pair is one
  bool aligned;                // 16-byte loads of SH
  int bands;                   // degrees that the map stores
  float* v_cameras;            // [C][12] R t, or null
  Parameters x, m, v;          // Adam; or x: the gradients
  Optimiser o;
};

// Odd strides: no two lanes of a warp share a bank. With one camera a Gaussian has one pair, and its SH coefficients make
// way for their gradients.
template <int FLOATS, bool MULTI> struct Shared {
  float sh[THREADS][FLOATS | 1], v_sh[MULTI ? THREADS : 1][FLOATS | 1];
  float raw[THREADS][11];  // gradients of mean, quat, scale, opacity
  uint32_t gaussian[THREADS];
  float c1[THREADS], c2[THREADS], lr_mean[THREADS];
  float rate[4][THREADS];  // what multiplies the gradients of a degree; of degree 0, its first moments
  __device__ __forceinline__ float* v(int t) { return MULTI ? v_sh[t] : sh[t]; }
};

__device__ __forceinline__ void add_camera(float* to, const CameraGrad& v) {
  float sum = v.t.x + v.t.y + v.t.z;
  for (int k = 0; k < 9; ++k) sum += v.R.m[k];
  if (!finite(sum)) return;
  for (int k = 0; k < 9; ++k) atomicAdd(to + k, v.R.m[k]);
  atomicAdd(to + 9, v.t.x); atomicAdd(to + 10, v.t.y); atomicAdd(to + 11, v.t.z);
}

// dL/d colour -> dL/d mean, and dL/d SH: added to v_sh, or (MULTI = false, v_sh = x) in place of the coefficients.
template <int D, bool MULTI> __device__ __forceinline__ Vec3 color_bwd(const float* x, Vec3 mean, Vec3 center, uint16_t bits, const float* v, float* v_sh) {
  if constexpr (D < 0) {
    for (int k = 0; k < 3; ++k) v_sh[k] = MULTI ? v_sh[k] + v[k] : v[k];
    return {0, 0, 0};
  } else {
    const Vec3 vc = lit(bits, v);
    if constexpr (MULTI) return sh_color_bwd(D, x, mean, center, vc, v_sh);
    float inv;
    const Vec3 d = sh_direction(mean, center, inv);
    Vec3 vd = {0, 0, 0};
    sh_basis(D, d.x, d.y, d.z, [&](int k, float b, float bx, float by, float bz) {
      float* at = v_sh + 3 * k;
      vd = vd + Vec3{bx, by, bz} * (at[0] * vc.x + at[1] * vc.y + at[2] * vc.z);
      at[0] = b * vc.x; at[1] = b * vc.y; at[2] = b * vc.z;
    });
    return (vd - d * dot(vd, d)) * inv;
  }
}

// All pairs of one Gaussian, from `pair` on. MIP: 0, 1, or -1: as the camera says.
template <int D, bool CAMERAS, bool MULTI, int MIP> __device__ __forceinline__ void gather(const Work& w, const Cameras& cameras, const Gaussian& g, int64_t pair, const float* x, Total& t, float* v_sh) {
  const uint32_t gi = w.gaussian[pair];
  bool drawn = false;
  for (int64_t p = pair; p < w.nnz && (MULTI || p == pair) && w.gaussian[p] == gi; ++p) {
    const uint16_t bits = w.camera[p];
    const int ci = camera_of(bits);
    const Camera& cam = cameras[ci];
    t.nearest_z = fminf(t.nearest_z, depth_of(cam, g.mean));
    const ScreenGrad row = load_screen_grad(w.v_screen, p);
    const float* v = row.f;
    if (v[10] == 0) continue;  // no pixel drew it
    drawn = true;
    t.weight += v[10];
    t.error += v[11];
    CameraGrad by_camera{};
    CameraGrad* v_cam = CAMERAS ? &by_camera : nullptr;
    if constexpr (MIP < 0) project_bwd(g, cam, v, t.g, v_cam); else project_bwd<MIP == 1>(g, cam, v, t.g, v_cam);
    const Vec3 vm = color_bwd<D, MULTI>(x, g.mean, cam.center, bits, v + 7, v_sh);
    t.g.mean = t.g.mean + vm;
    if constexpr (CAMERAS) {
      center_bwd(cam, vm, by_camera);
      add_camera(w.v_cameras + 12 * ci, by_camera);
    }
  }
  if constexpr (!MULTI)
    if (!drawn)  // then v_sh still holds the coefficients
      for (int k = 0; k < (D < 0 ? 3 : 3 * (D + 1) * (D + 1)); ++k) v_sh[k] = 0;
}

// Sums of floats, or of their squares, of the SH gradients by degree.
template <int D, bool SQUARE> __device__ __forceinline__ float sum_bands(const float* v_sh, float* bands) {
  float total = 0;
#pragma unroll
  for (int l = 0; l <= (D < 0 ? 0 : D); ++l) {
    bands[l] = 0;
#pragma unroll
    for (int k = band_begin(l); k < band_begin(l + 1); ++k) bands[l] += SQUARE ? v_sh[k] * v_sh[k] : v_sh[k];
    total += bands[l];
  }
  return total;
}

// Moments of the SH coefficients, and what follows from them. The first moments of degree 0 take the place of its gradients.
template <int D, class S> __device__ __forceinline__ void begin_bands(const Work& w, int64_t gi, const float* squares, S& s) {
  const int me = threadIdx.x;
  const AdamStep a = {w.o.h.beta1, w.o.h.beta2, w.o.h.eps, s.c1[me], s.c2[me]};
  float* at = w.v.sh + gi * w.bands;
  alignas(16) float v[D + 1];
  if (D == 3) *(float4*)v = *(const float4*)at; else for (int l = 0; l <= D; ++l) v[l] = at[l];
#pragma unroll
  for (int l = 0; l <= D; ++l) s.rate[l][me] = adam_band(v[l], squares[l], l, l ? w.o.h.lr_sh_rest : w.o.h.lr_sh0, a);
  if (D == 3) *(float4*)at = *(const float4*)v; else for (int l = 0; l <= D; ++l) at[l] = v[l];
  float *m = w.m.sh + 3 * gi, *g = s.v(me);
#pragma unroll
  for (int k = 0; k < 3; ++k) g[k] = m[k] = a.beta1 * m[k] + (1 - a.beta1) * g[k];
}

// What the warp needs for the Adam steps of one Gaussian. False: there is none.
template <class S> __device__ __forceinline__ bool begin_steps(const Work& w, int64_t gi, const Gaussian& g, Total& t, bool sane, S& s) {
  const int me = threadIdx.x;
  Stride stride;
  if (!begin_adam(w.o, gi, g, load_statistics(w.o, gi), t, sane, stride)) return false;
  raw_gradient(g, t.g, false, s.raw[me]);
  s.c1[me] = stride.c1; s.c2[me] = stride.c2; s.lr_mean[me] = stride.lr_mean;
  if (w.o.h.noise > 0 && noisy(g.opacity)) {  // few: not through shared memory
    const Vec3 n = position_noise(g, w.o.h.noise * stride.lr_mean, w.o.h.seed, (uint32_t)gi, (uint32_t)stride.steps);
    float* mean = w.x.mean + 3 * gi;
    mean[0] += n.x; mean[1] += n.y; mean[2] += n.z;
  }
  return true;
}

__device__ __forceinline__ void write_geometry(const Work& w, int64_t gi, const Gaussian& g, const Total& t) {
  float raw[11];
  raw_gradient(g, t.g, w.s.activated, raw);
  for (int k = 0; k < 3; ++k) { w.x.mean[3 * gi + k] = raw[k]; w.x.log_scale[3 * gi + k] = raw[7 + k]; }
  for (int k = 0; k < 4; ++k) w.x.quat[4 * gi + k] = raw[3 + k];
  w.x.opacity[gi] = raw[10];
}

// In memory order: lane after lane WIDE coefficients of the Gaussians of this warp that `which` names, STEP times at once,
// so that many loads are in flight. f(step, Gaussian's place in the block, its first coefficient).
template <int FLOATS, int WIDE, int STEP, class F> __device__ __forceinline__ void in_memory_order(uint32_t which, int base, F&& f) {
#pragma unroll
  for (int j = 0; j < STEP; ++j) {
    const int i = (base + j) * 32 + lane_id(), owner = i / (FLOATS / WIDE);
    if (which >> owner & 1) f(j, threadIdx.x / 32 * 32 + owner, (i - owner * (FLOATS / WIDE)) * WIDE);
  }
}

template <int WIDE> struct alignas(4 * WIDE) Pack { float f[WIDE]; };
template <int WIDE> __device__ __forceinline__ Pack<WIDE> load_pack(const float* p) {
  Pack<WIDE> o;
  if constexpr (WIDE == 4) *(float4*)o.f = *(const float4*)p; else o.f[0] = *p;
  return o;
}
template <int WIDE> __device__ __forceinline__ void store_pack(float* p, const Pack<WIDE>& o) {
  if constexpr (WIDE == 4) *(float4*)p = *(const float4*)o.f; else *p = o.f[0];
}

template <int FLOATS, int WIDE, bool MULTI> __device__ __forceinline__ void share_sh(const Work& w, Shared<FLOATS, MULTI>& s, uint32_t which) {
  constexpr int TIMES = FLOATS / WIDE, STEP = TIMES % 6 == 0 ? 6 : 3;
  for (int base = 0; base < TIMES; base += STEP) {
    Pack<WIDE> x[STEP];
    in_memory_order<FLOATS, WIDE, STEP>(which, base, [&](int j, int t, int k) { x[j] = load_pack<WIDE>(w.s.sh + (int64_t)s.gaussian[t] * w.s.sh_floats + k); });
    in_memory_order<FLOATS, WIDE, STEP>(which, base, [&](int j, int t, int k) { for (int e = 0; e < WIDE; ++e) s.sh[t][k + e] = x[j].f[e]; });
  }
}

template <int FLOATS, bool MULTI> __device__ __forceinline__ void write_sh(const Work& w, Shared<FLOATS, MULTI>& s, uint32_t which) {
  for (int base = 0; base < FLOATS; base += 3)
    in_memory_order<FLOATS, 1, 3>(which, base, [&](int, int t, int k) { w.x.sh[(int64_t)s.gaussian[t] * w.s.sh_floats + k] = s.v(t)[k]; });
}

template <int FLOATS, int WIDE, bool MULTI> __device__ __forceinline__ void adam_sh(const Work& w, Shared<FLOATS, MULTI>& s, uint32_t which) {
  constexpr int TIMES = FLOATS / WIDE, STEP = TIMES % 6 == 0 ? 6 : 3;
  for (int base = 0; base < TIMES; base += STEP) {
    Pack<WIDE> x[STEP];
    in_memory_order<FLOATS, WIDE, STEP>(which, base, [&](int j, int t, int k) { x[j] = load_pack<WIDE>(w.x.sh + (int64_t)s.gaussian[t] * w.s.sh_floats + k); });
    in_memory_order<FLOATS, WIDE, STEP>(which, base, [&](int j, int t, int k) {
#pragma unroll
      for (int e = 0; e < WIDE; ++e) x[j].f[e] -= s.rate[band_of(k + e)][t] * s.v(t)[k + e];
      store_pack<WIDE>(w.x.sh + (int64_t)s.gaussian[t] * w.s.sh_floats + k, x[j]);
    });
  }
}

// One row of N floats a Gaussian, whose gradients begin at raw[FROM].
template <int N, int FROM, int FLOATS, bool MULTI, class Rate>
__device__ __forceinline__ void adam_row(const Work& w, const Shared<FLOATS, MULTI>& s, uint32_t which, float* x_row, float* m_row, float* v_row, Rate&& rate) {
  float x[N], m[N], v[N];
  in_memory_order<N, 1, N>(which, 0, [&](int j, int t, int k) {
    const int64_t at = (int64_t)s.gaussian[t] * N + k;
    x[j] = x_row[at]; m[j] = m_row[at]; v[j] = v_row[at];
  });
  in_memory_order<N, 1, N>(which, 0, [&](int j, int t, int k) {
    const int64_t at = (int64_t)s.gaussian[t] * N + k;
    adam(x[j], m[j], v[j], s.raw[t][FROM + k], rate(t), {w.o.h.beta1, w.o.h.beta2, w.o.h.eps, s.c1[t], s.c2[t]});
    x_row[at] = x[j]; m_row[at] = m[j]; v_row[at] = v[j];
  });
}

template <int FLOATS, bool MULTI> __device__ __forceinline__ void adam_all(const Work& w, Shared<FLOATS, MULTI>& s, uint32_t which) {
  adam_row<3, 0>(w, s, which, w.x.mean, w.m.mean, w.v.mean, [&](int t) { return s.lr_mean[t]; });
  adam_row<4, 3>(w, s, which, w.x.quat, w.m.quat, w.v.quat, [&](int) { return w.o.h.lr_quat; });
  adam_row<3, 7>(w, s, which, w.x.log_scale, w.m.log_scale, w.v.log_scale, [&](int) { return w.o.h.lr_log_scale; });
  adam_row<1, 10>(w, s, which, w.x.opacity, w.m.opacity, w.v.opacity, [&](int) { return w.o.h.lr_logit_opacity; });
  if constexpr (FLOATS % 4 == 0) {
    if (w.aligned) return adam_sh<FLOATS, 4>(w, s, which);
  }
  adam_sh<FLOATS, 1>(w, s, which);
}

template <int D, bool ADAM, bool CAMERAS, bool MULTI, int MIP> __global__ void __launch_bounds__(THREADS, 4) project_bwd_kernel(const __grid_constant__ Work w, const __grid_constant__ Cameras cameras) {
  constexpr int FLOATS = D < 0 ? 3 : 3 * (D + 1) * (D + 1);
  extern __shared__ float memory[];
  Shared<FLOATS, MULTI>& s = *(Shared<FLOATS, MULTI>*)memory;
  const int64_t i = thread_id();
  const int me = threadIdx.x;
  const bool first = i < (MULTI ? *w.n_heads : w.nnz);
  const uint32_t firsts = __ballot_sync(ALL_LANES, first);
  if (!firsts) return;
  const int64_t p = !first ? 0 : MULTI ? w.heads[i] : i;
  const uint32_t gi = w.gaussian[p];
  s.gaussian[me] = gi;
  __syncwarp();
  if constexpr (D >= 0 && FLOATS % 4 == 0) {
    if (w.aligned) share_sh<FLOATS, 4>(w, s, firsts); else share_sh<FLOATS, 1>(w, s, firsts);
  } else if constexpr (D >= 0) {
    share_sh<FLOATS, 1>(w, s, firsts);
  }
  __syncwarp();
  bool sane = false;
  if (first) {
    float* v_sh = s.v(me);
    if constexpr (MULTI)
#pragma unroll
      for (int k = 0; k < FLOATS; ++k) v_sh[k] = 0;
    Gaussian g;
    make_gaussian(w.s.mean + 3 * (int64_t)gi, w.s.quat + 4 * (int64_t)gi, w.s.scale + 3 * (int64_t)gi, w.s.opacity[gi], w.s.activated, g);  // never codes: compact_bwd.cu
    Total t = no_pairs();
    gather<D, CAMERAS, MULTI, MIP>(w, cameras, g, p, s.sh[me], t, v_sh);
    float bands[4];
    sane = all_finite(t.g) && finite(sum_bands<D, ADAM>(v_sh, bands));
    if constexpr (ADAM) {
      sane = begin_steps(w, gi, g, t, sane, s);
      if constexpr (D >= 0) if (sane) begin_bands<D>(w, gi, bands, s);
    } else if (sane) {
      write_geometry(w, gi, g, t);
    }
  }
  const uint32_t which = __ballot_sync(ALL_LANES, sane);
  __syncwarp();
  if constexpr (ADAM) adam_all(w, s, which); else write_sh(w, s, which);
}

// Where the caller's gradients are made: arrays of R_V_CALLER, each at a multiple of 256 bytes.
static Parameters caller_grads(spl_ctx& c, const Source& s) {
  float* at = c.row<float>(R_V_CALLER);
  auto take = [&](int64_t floats) { float* p = at; at += align_up(floats, 64); return p; };
  Parameters o;
  o.mean = take(3 * s.n); o.quat = take(4 * s.n); o.log_scale = take(3 * s.n); o.opacity = take(s.n); o.sh = take(s.n * s.sh_floats);
  return o;
}

struct BeginsGaussian {
  const uint32_t* gaussian;
  __device__ bool operator()(uint32_t p) const { return p == 0 || gaussian[p - 1] != gaussian[p]; }
};

// With several cameras: the first pair of every Gaussian, so that no thread is idle.
static void find_heads(spl_ctx& c, Work& w) {
  uint32_t* heads = c.row<uint32_t>(R_HEADS);
  int64_t* n = &c.counters()->nnz;
  select_pairs(c, heads, n, w.nnz, BeginsGaussian{w.gaussian});
  w.heads = heads;
  w.n_heads = n;
}

static Parameters map_rows(spl_ctx& c, int mean, int quat, int scale, int opacity, int sh) {
  return {c.row<float>(mean), c.row<float>(quat), c.row<float>(scale), c.row<float>(opacity), c.row<float>(sh)};
}

template <int D, bool ADAM, bool CAMERAS, int MIP> static void launch(spl_ctx& c, const Work& w) {
  constexpr int FLOATS = D < 0 ? 3 : 3 * (D + 1) * (D + 1);
  auto* kernel = w.heads ? project_bwd_kernel<D, ADAM, CAMERAS, true, MIP> : project_bwd_kernel<D, ADAM, CAMERAS, false, MIP>;
  const int bytes = w.heads ? sizeof(Shared<FLOATS, true>) : sizeof(Shared<FLOATS, false>);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "taking shared memory");
  kernel<<<blocks_for(w.nnz, THREADS), THREADS, bytes, c.stream>>>(w, c.cameras);
  launched("project_bwd_kernel");
}

template <bool ADAM, bool CAMERAS, int MIP> static void run(spl_ctx& c, const Work& w, int degree) {
  if (!w.nnz) return;
  if (w.s.direct_rgb) launch<-1, ADAM, CAMERAS, MIP>(c, w);
  else if (degree == 0) launch<0, ADAM, CAMERAS, MIP>(c, w);
  else if (degree == 1) launch<1, ADAM, CAMERAS, MIP>(c, w);
  else if (degree == 2) launch<2, ADAM, CAMERAS, MIP>(c, w);
  else launch<3, ADAM, CAMERAS, MIP>(c, w);
}

static void copy_out(spl_ctx& c, const Work& w, const View& v, const spl_gaussian_grads& o) {
  auto copy = [&](float* to, const float* from, int64_t floats) { check(cudaMemcpyAsync(to, from, floats * 4, cudaMemcpyDefault, c.stream), "copying gradients"); };
  const int64_t n = w.s.n;
  if (n) { copy(o.means, w.x.mean, 3 * n); copy(o.quats, w.x.quat, 4 * n); copy(o.log_scales, w.x.log_scale, 3 * n); copy(o.logit_opacities, w.x.opacity, n); copy(o.sh, w.x.sh, n * w.s.sh_floats); }
  if (!o.viewmats) return;
  std::vector<float> v_cameras(12 * v.n_cameras), viewmats(16 * v.n_cameras);
  get(c, v_cameras.data(), w.v_cameras, v_cameras.size() * 4);
  for (int i = 0; i < v.n_cameras; ++i)
    for (int r = 0; r < 3; ++r) {
      for (int k = 0; k < 3; ++k) viewmats[16 * i + 4 * r + k] = v_cameras[12 * i + 3 * r + k];
      viewmats[16 * i + 4 * r + 3] = v_cameras[12 * i + 9 + r];
    }
  put(c, o.viewmats, viewmats.data(), viewmats.size() * 4);
}

void project_bwd(spl_ctx& c, const Source&, const View& v, const Sink& sink) {
  begin_phase(c, SPL_PROJECT_BWD);
  if (sink.hyper && c.compact()) return train_compact(c, v, *sink.hyper);
  Work w{};
  w.s = c.source;
  w.gaussian = c.row<uint32_t>(R_GAUSSIAN); w.camera = c.row<uint16_t>(R_CAMERA); w.v_screen = c.row<float>(R_V_SCREEN);
  w.nnz = c.counts[SPL_PAIRS] - 1;
  w.aligned = aligned_sh(w.s);
  w.v_cameras = c.row<float>(R_V_CAMERAS);
  if (v.n_cameras > 1 && w.nnz) find_heads(c, w);
  if (sink.hyper) {
    w.x = map_rows(c, R_MEAN, R_QUAT, R_LOG_SCALE, R_OPACITY, R_SH);
    w.m = map_rows(c, R_M_MEAN, R_M_QUAT, R_M_LOG_SCALE, R_M_OPACITY, R_M_SH0);
    w.v = map_rows(c, R_V_MEAN, R_V_QUAT, R_V_LOG_SCALE, R_V_OPACITY, R_V_SH);
    w.o = optimiser_of(c, *sink.hyper, w.nnz);
    w.bands = c.params.sh_degree + 1;
    return v.cameras[0].antialiased ? run<true, false, 1>(c, w, v.sh_degree) : run<true, false, 0>(c, w, v.sh_degree);
  }
  w.x = caller_grads(c, w.s);
  check(cudaMemsetAsync(c.row<void>(R_V_CALLER), 0, c.counts[SPL_CALLER] * 4, c.stream), "clearing gradients");
  check(cudaMemsetAsync(w.v_cameras, 0, 48 * v.n_cameras, c.stream), "clearing gradients");
  if (sink.grads.viewmats) run<false, true, -1>(c, w, v.sh_degree); else run<false, false, -1>(c, w, v.sh_degree);
  copy_out(c, w, v, sink.grads);
}

}  // namespace spl
