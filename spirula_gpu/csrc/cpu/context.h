// context.h: what a CPU context owns, and the steps of the pipeline as functions of it.
#pragma once
#include <cstdarg>
#include <cstdint>
#include <string>
#include <vector>
#include "../arena.h"
#include "../layout.h"
#include "../math.h"
#include "../spirula.h"

// Hot loops are compiled for three instruction sets and chosen when the library is loaded: one build runs everywhere.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(SPL_NO_CLONES)
#if __GNUC__ >= 12
#define SPL_HOT __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else  // GCC 11 (Ubuntu 22.04) does not know the levels
#define SPL_HOT __attribute__((target_clones("avx512f", "avx2", "default")))
#endif
#else
#define SPL_HOT
#endif

namespace spl {

struct Failure { int status; std::string text; };  // thrown inside, turned into a status at the ABI
[[noreturn]] void fail(int status, const char* format, ...) __attribute__((format(printf, 2, 3)));

// An address range that is reserved once and backed by memory as it grows: pointers stay, growth copies nothing.
struct Region {
  uint8_t* base = nullptr;
  int64_t reserved = 0, committed = 0;
  void reserve(int64_t bytes);
  void commit(int64_t bytes);  // grows or shrinks to a page multiple; new bytes are zero and resident
  void release();
};

struct Source {  // the Gaussians that a call works on: the map's rows or the caller's arrays
  const float *mean, *quat, *scale, *opacity, *sh;
  int64_t n;
  int sh_floats;      // per Gaussian in `sh`
  bool activated, direct_rgb;
};

struct Sink {  // where gradients go: either arrays, or (hyper != null) straight into Adam
  const spl_hyper* hyper = nullptr;
  spl_gaussian_grads grads{};
};

struct View {
  std::vector<Camera> cameras;
  int n_cameras, width, height, tiles_x, tiles_y, sh_degree;
  float background[3];
  int64_t pixels() const { return (int64_t)n_cameras * width * height; }
  int64_t tiles() const { return (int64_t)n_cameras * tiles_x * tiles_y; }
};

}  // namespace spl

struct spl_ctx {
  spl_create_params params{};
  std::string error;
  int threads = 1;
  int64_t n = 0;            // Gaussians in the map
  int64_t n_capacity = 0;   // with memory behind them
  spl::Region map[SPL_N_MAP_ROWS];
  spl::Region arena;
  spl::ArenaPlan plan;
  spl::Counts counts{}, capacity{};  // of the newest call; what the arena is laid out for
  int phase = SPL_PHASE_ALWAYS;
  double ms[SPL_N_PHASES] = {};
  double phase_began = 0;
  std::vector<float> adam_c1, adam_c2;  // bias corrections by step count, for the betas beside
  float adam_beta1 = -1, adam_beta2 = -1;

  template <class T> T* row(int r) {
    return (T*)(void*)(r < SPL_N_MAP_ROWS ? map[r].base : arena.base + plan.offset[r]);
  }
  int64_t item_bytes(int r) const { return row_info(r, params.sh_degree).item_bytes; }
};

namespace spl {

// memory (context.cpp)
void fit_arena(spl_ctx&, const Counts& need);     // grows the capacities and lays the arena out again; contents are lost
void fit_map(spl_ctx&, int64_t n);                // memory for n Gaussians, or SPL_E_CAPACITY
void trim_map(spl_ctx&);                          // gives back what n Gaussians do not need
int64_t held_bytes(const spl_ctx&);
void begin_phase(spl_ctx&, int phase);            // timing; in debug: canaries and poison
void end_phases(spl_ctx&);
void begin_step(spl_ctx&);                         // clears the timings
View make_view(const spl_ctx&, const spl_view*, int stored_sh_degree);
Source map_source(spl_ctx&);
Source caller_source(const spl_gaussians*);

// the pipeline
void project(spl_ctx&, const Source&, const View&);            // project.cpp: mask, compact, tile counts; may re-plan the arena
void bin(spl_ctx&, const View&);                               // bin.cpp: keys, radix sort, tile ranges
void raster(spl_ctx&, const View&);                            // raster.cpp: rgb, depth, alpha, last
void loss(spl_ctx&, const View&, const spl_target&, const spl_hyper&, spl_step& out);  // loss.cpp: of the rows raster.*; leaves v_rgb, v_depth, v_alpha
void raster_bwd(spl_ctx&, const View&);                        // raster.cpp: v_isect
void project_bwd(spl_ctx&, const Source&, const View&, const Sink&);  // project_bwd.cpp

inline void forward(spl_ctx& c, const Source& g, const View& v) {
  project(c, g, v);
  bin(c, v);
  raster(c, v);
}

}  // namespace spl
