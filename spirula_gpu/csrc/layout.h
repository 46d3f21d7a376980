// layout.h: every constant of the engine and THE table of buffers. Allocation, aliasing, the memory report, the
// checkpoint and the forecast are derived from it. Shared by both backends; plain C++, no dependency.
#pragma once
#include <cstdint>

#define SPL_ABI_VERSION 6

#define SPL_CONSTANTS(X)                                                                                              \
  X(SPL_TILE_PX, 16)      /* tile edge; one row of a tile is one 16-lane vector on the CPU */                        \
  X(SPL_MASK_BLOCK, 128)  /* pairs per block of the packed projection: both passes must use the same */              \
  X(SPL_MASK_WORDS, 4)    /* 32-bit words of visibility bits per block */                                            \
  X(SPL_OPT_BLOCK, 256)   /* Gaussians per optimiser block */                                                        \
  X(SPL_EXPONENTS, 4)     /* compact: bytes of map.exponents per block; one a group of codec.h */                    \
  X(SPL_SCREEN_FLOATS, 10) /* x y, conic a b c, opacity, depth, r g b */                                             \
  X(SPL_VGRAD_FLOATS, 12) /* the gradients of those, then sum of weights, then sum of weight * pixel error */        \
  X(SPL_MAX_PX, 32767)    /* image edge */                                                                           \
  X(SPL_MAX_CAMERAS, 1024)                                                                                            \
  X(SPL_DARK_SHIFT, 13)   /* proj.camera: index, and from this bit on one bit a channel whose colour was clamped at 0 */ \
  X(SPL_MAX_PHOTOS, 16)   /* views of one plane sweep */                                                             \
  X(SPL_MAX_PLANES, 1024)                                                                                             \
  X(SPL_GROW_GAUSSIANS, 16384) /* the map's memory grows in multiples of this */                                     \
  X(SPL_CAMERA_BYTES, 124) /* a Camera of math.h on the device */                                                     \
  X(SPL_CANARY_BYTES, 256)

enum : int64_t {
#define X(name, value) name = value,
  SPL_CONSTANTS(X)
#undef X
};

constexpr float SPL_ALPHA_MIN = 1.0f / 255.0f;
constexpr float SPL_ALPHA_MAX = 0.999f;
constexpr float SPL_COLOR_MAX = 1e6f;   // a splat of a colour beyond this, or NaN, is not drawn
constexpr float SPL_DEPTH_MIN = 1e-4f;  // m: a measurement below this is none
constexpr float SPL_T_MIN = 1e-4f;  // a pixel is finished before the Gaussian that would bring its transmittance here

enum Category { SPL_SPLAT, SPL_SPLAT_X_IMG, SPL_IMAGE, SPL_APPEARANCE, SPL_VIEWER, SPL_OTHER, SPL_N_CATEGORIES };
enum Count { SPL_GAUSSIANS, SPL_BLOCKS, SPL_PAIRS, SPL_ISECTS, SPL_PIXELS, SPL_TILES, SPL_BINS, SPL_CAMERAS, SPL_CALLER, SPL_KEY_BYTES, SPL_MAP_BLOCKS, SPL_N_COUNTS };
enum Precision { SPL_FULL, SPL_COMPACT };
enum Phase { SPL_PROJECT, SPL_ORDER, SPL_BIN, SPL_RASTER, SPL_LOSS, SPL_RASTER_BWD, SPL_PROJECT_BWD, SPL_N_PHASES, SPL_PHASE_ALWAYS = -1 };

// BLOCKS: 128-pair blocks of cameras x Gaussians. PAIRS: visible camera-Gaussian pairs (+1). ISECTS: splat-tile pairs.
// PIXELS and TILES (+1): of all cameras. BINS: 8-byte words of scratch for scans and sorts. CAMERAS: of the view, +1 slot of counters.
// CALLER: floats of the Gaussians that come with a call instead of from the map (CUDA: copied to the device).
// KEY_BYTES: tile numbers of all intersections, of 2 bytes while they fit (CUDA). MAP_BLOCKS: of SPL_OPT_BLOCK Gaussians of the map.
// SPL_PHASE_ALWAYS rows own their bytes, the others live in the arena.

// The rows of the map: always there, saved, counted in Gaussians (map.exponents: in MAP_BLOCKS). Where the bytes of the two precisions
// differ, compact holds the codes of codec.h, else both hold the same int32 or fp32. D = sh_degree+1 of the map and K = D^2: the
// second moments of SH coefficients are one per degree, the mean over its 3 (2 l + 1) squares, and only degree 0 has first moments
// (math.h): 356 bytes less at degree 3. Compact holds degree 0 of map.sh there and the others in map.sh_rest, R bytes.
//   enum           name                   full    compact
#define SPL_MAP_ROWS(X)                                                                                                     \
  X(R_MEAN,        "map.mean",             12,     12)                                                                      \
  X(R_QUAT,        "map.quat",             16,     8)                                                                       \
  X(R_LOG_SCALE,   "map.log_scale",        12,     6)                                                                       \
  X(R_OPACITY,     "map.logit_opacity",    4,      2)                                                                       \
  X(R_SH,          "map.sh",               12 * K, 6)                                                                       \
  X(R_SH_REST,     "map.sh_rest",          0,      R)                                                                       \
  X(R_M_MEAN,      "adam.m.mean",          12,     3)                                                                       \
  X(R_M_QUAT,      "adam.m.quat",          16,     4)                                                                       \
  X(R_M_LOG_SCALE, "adam.m.log_scale",     12,     3)                                                                       \
  X(R_M_OPACITY,   "adam.m.logit_opacity", 4,      1)                                                                       \
  X(R_M_SH0,       "adam.m.sh0",           12,     3)                                                                       \
  X(R_V_MEAN,      "adam.v.mean",          12,     6)                                                                       \
  X(R_V_QUAT,      "adam.v.quat",          16,     8)                                                                       \
  X(R_V_LOG_SCALE, "adam.v.log_scale",     12,     6)                                                                       \
  X(R_V_OPACITY,   "adam.v.logit_opacity", 4,      2)                                                                       \
  X(R_V_SH,        "adam.v.sh",            4 * D,  2 * D)                                                                   \
  X(R_STEPS,       "adam.steps",           4,      4)                                                                       \
  X(R_OWNER,       "map.owner",            4,      4)                                                                       \
  X(R_WEIGHT,      "stat.weight",          4,      4)                                                                       \
  X(R_ERROR,       "stat.error",           4,      4)

//   enum           name                  category         bytes     count          first            last              saved
#define SPL_ARENA_ROWS(X)                                                                                                   \
  X(R_MASK,        "proj.mask",           SPL_SPLAT_X_IMG, 16,       SPL_BLOCKS,    SPL_PROJECT,     SPL_PROJECT_BWD,  0)   \
  X(R_SCAN,        "proj.scan",           SPL_SPLAT_X_IMG, 8,        SPL_BLOCKS,    SPL_PROJECT,     SPL_PROJECT_BWD,  0)   \
  X(R_GAUSSIAN,    "proj.gaussian",       SPL_SPLAT_X_IMG, 4,        SPL_PAIRS,     SPL_PROJECT,     SPL_PROJECT_BWD,  0)   \
  X(R_CAMERA,      "proj.camera",         SPL_SPLAT_X_IMG, 2,        SPL_PAIRS,     SPL_PROJECT,     SPL_PROJECT_BWD,  0)   \
  X(R_SCREEN,      "proj.screen",         SPL_SPLAT_X_IMG, 40,       SPL_PAIRS,     SPL_PROJECT,     SPL_RASTER_BWD,   0)   \
  X(R_TILE_START,  "isect.tile_start",    SPL_IMAGE,       8,        SPL_TILES,     SPL_BIN,         SPL_RASTER_BWD,   0)   \
  X(R_RGB,         "raster.rgb",          SPL_IMAGE,       12,       SPL_PIXELS,    SPL_RASTER,      SPL_LOSS,         0)   \
  X(R_DEPTH,       "raster.depth",        SPL_IMAGE,       4,        SPL_PIXELS,    SPL_RASTER,      SPL_LOSS,         0)   \
  X(R_T,           "raster.T",            SPL_IMAGE,       4,        SPL_PIXELS,    SPL_RASTER,      SPL_RASTER_BWD,   0)   \
  X(R_LAST,        "raster.last",         SPL_IMAGE,       4,        SPL_PIXELS,    SPL_RASTER,      SPL_RASTER_BWD,   0)   \
  X(R_SSIM,        "loss.ssim_partials",  SPL_IMAGE,       36,       SPL_PIXELS,    SPL_LOSS,        SPL_LOSS,         0)   \
  X(R_SUMS,        "loss.sums",           SPL_IMAGE,       32,       SPL_TILES,     SPL_LOSS,        SPL_LOSS,         0)   \
  X(R_V_RGB,       "loss.v_rgb",          SPL_IMAGE,       12,       SPL_PIXELS,    SPL_LOSS,        SPL_RASTER_BWD,   0)   \
  X(R_V_DEPTH,     "loss.v_depth",        SPL_IMAGE,       4,        SPL_PIXELS,    SPL_LOSS,        SPL_RASTER_BWD,   0)   \
  X(R_V_ALPHA,     "loss.v_alpha",        SPL_IMAGE,       4,        SPL_PIXELS,    SPL_LOSS,        SPL_RASTER_BWD,   0)   \
  X(R_PX_ERROR,    "loss.error",          SPL_IMAGE,       4,        SPL_PIXELS,    SPL_LOSS,        SPL_RASTER_BWD,   0)

// The rows of one backend. CPU: 64-bit keys, and a row of gradients per intersection, so that nothing is atomic. CUDA:
// pairs sorted by depth, then their intersections by tile (the same order in half the bytes), and a row of gradients per pair.
#ifdef SPL_CUDA
#define SPL_BACKEND_ROWS(X)                                                                                                 \
  X(R_CAMERAS,       "view.cameras",        SPL_OTHER,       SPL_CAMERA_BYTES,      SPL_CAMERAS,   SPL_PROJECT,     SPL_PROJECT_BWD,  0) \
  X(R_V_CAMERAS,     "view.v_cameras",      SPL_OTHER,       48,       SPL_CAMERAS,   SPL_PROJECT_BWD, SPL_PROJECT_BWD,  0) \
  X(R_SCRATCH,       "view.scratch",        SPL_OTHER,       8,        SPL_BINS,      SPL_PROJECT,     SPL_PROJECT_BWD,  0) \
  X(R_CALLER,        "caller.gaussians",    SPL_SPLAT,       4,        SPL_CALLER,    SPL_PROJECT,     SPL_PROJECT_BWD,  0) \
  X(R_V_CALLER,      "caller.grads",        SPL_SPLAT,       4,        SPL_CALLER,    SPL_PROJECT_BWD, SPL_PROJECT_BWD,  0) \
  X(R_BOX,           "proj.box",            SPL_SPLAT_X_IMG, 8,        SPL_PAIRS,     SPL_PROJECT,     SPL_BIN,          0) \
  X(R_COUNT,         "proj.tiles",          SPL_SPLAT_X_IMG, 4,        SPL_PAIRS,     SPL_PROJECT,     SPL_ORDER,        0) \
  X(R_DEPTH_KEY,     "proj.depth_key",      SPL_SPLAT_X_IMG, 4,        SPL_PAIRS,     SPL_PROJECT,     SPL_ORDER,        0) \
  X(R_DEPTH_KEY_ALT, "proj.depth_key_alt",  SPL_SPLAT_X_IMG, 4,        SPL_PAIRS,     SPL_ORDER,       SPL_ORDER,        0) \
  X(R_ORDER,         "proj.order",          SPL_SPLAT_X_IMG, 4,        SPL_PAIRS,     SPL_PROJECT,     SPL_BIN,          0) \
  X(R_ORDER_ALT,     "proj.order_alt",      SPL_SPLAT_X_IMG, 4,        SPL_PAIRS,     SPL_ORDER,       SPL_ORDER,        0) \
  X(R_FIRST,         "isect.first",         SPL_SPLAT_X_IMG, 8,        SPL_PAIRS,     SPL_ORDER,       SPL_BIN,          0) \
  X(R_KEY,           "isect.tile",          SPL_SPLAT_X_IMG, 1,        SPL_KEY_BYTES, SPL_BIN,         SPL_BIN,          0) \
  X(R_KEY_ALT,       "isect.tile_alt",      SPL_SPLAT_X_IMG, 1,        SPL_KEY_BYTES, SPL_BIN,         SPL_BIN,          0) \
  X(R_PAIR,          "isect.pair",          SPL_SPLAT_X_IMG, 4,        SPL_ISECTS,    SPL_BIN,         SPL_RASTER_BWD,   0) \
  X(R_PAIR_ALT,      "isect.pair_alt",      SPL_SPLAT_X_IMG, 4,        SPL_ISECTS,    SPL_BIN,         SPL_BIN,          0) \
  X(R_TARGET_RGB,    "target.rgb",          SPL_IMAGE,       3,        SPL_PIXELS,    SPL_LOSS,        SPL_LOSS,         0) \
  X(R_TARGET_DEPTH,  "target.depth",        SPL_IMAGE,       4,        SPL_PIXELS,    SPL_LOSS,        SPL_LOSS,         0) \
  X(R_TARGET_MASK,   "target.mask",         SPL_IMAGE,       1,        SPL_PIXELS,    SPL_LOSS,        SPL_LOSS,         0) \
  X(R_HEADS,         "proj.heads",          SPL_SPLAT_X_IMG, 4,        SPL_PAIRS,     SPL_PROJECT_BWD, SPL_PROJECT_BWD,  0) \
  X(R_V_SCREEN,      "raster_bwd.v_screen", SPL_SPLAT_X_IMG, 48,       SPL_PAIRS,     SPL_RASTER_BWD,  SPL_PROJECT_BWD,  0)
#else
#define SPL_BACKEND_ROWS(X)                                                                                                 \
  X(R_BOX,         "proj.box",            SPL_SPLAT_X_IMG, 8,        SPL_PAIRS,     SPL_PROJECT,     SPL_RASTER_BWD,   0)   \
  X(R_FIRST,       "isect.first",         SPL_SPLAT_X_IMG, 8,        SPL_PAIRS,     SPL_PROJECT,     SPL_PROJECT_BWD,  0)   \
  X(R_KEY,         "isect.key",           SPL_SPLAT_X_IMG, 8,        SPL_ISECTS,    SPL_BIN,         SPL_BIN,          0)   \
  X(R_KEY_ALT,     "isect.key_alt",       SPL_SPLAT_X_IMG, 8,        SPL_ISECTS,    SPL_BIN,         SPL_BIN,          0)   \
  X(R_SLOT,        "isect.slot",          SPL_SPLAT_X_IMG, 4,        SPL_ISECTS,    SPL_BIN,         SPL_RASTER_BWD,   0)   \
  X(R_SLOT_ALT,    "isect.slot_alt",      SPL_SPLAT_X_IMG, 4,        SPL_ISECTS,    SPL_BIN,         SPL_BIN,          0)   \
  X(R_PAIR,        "isect.pair",          SPL_SPLAT_X_IMG, 4,        SPL_ISECTS,    SPL_BIN,         SPL_RASTER_BWD,   0)   \
  X(R_HISTOGRAM,   "isect.histogram",     SPL_OTHER,       8,        SPL_BINS,      SPL_BIN,         SPL_BIN,          0)   \
  X(R_V_ISECT,     "raster_bwd.v_isect",  SPL_SPLAT_X_IMG, 48,       SPL_ISECTS,    SPL_RASTER_BWD,  SPL_PROJECT_BWD,  0)
#endif

enum Row : int {
#define X(id, ...) id,
  SPL_MAP_ROWS(X) SPL_N_MAP_ROWS,                        // those of Gaussians; ..
  R_EXPONENTS = SPL_N_MAP_ROWS, SPL_N_OWN_ROWS,          // .. and all that own their bytes
  SPL_LAST_OWN_ROW = SPL_N_OWN_ROWS - 1,                 // the next row continues the count
  SPL_ARENA_ROWS(X) SPL_BACKEND_ROWS(X)
#undef X
  SPL_N_ROWS
};

struct RowInfo {
  const char* name;
  int category, item_bytes, count, first, last, saved;
  bool coded;  // compact: not int32 or fp32, but codes, block-transposed (codec.h)
  bool arena() const { return first != SPL_PHASE_ALWAYS; }
};

// A row of 0 bytes does not exist: map.exponents and map.sh_rest in full precision.
inline RowInfo row_info(int row, int sh_degree, int precision = SPL_FULL) {
  const int D = sh_degree + 1, K = D * D, R = (3 * D * D + D - 1) / 4 * 4;  // R: see rest_words
  const bool compact = precision == SPL_COMPACT;
  const RowInfo table[SPL_N_ROWS] = {
#define X(id, name, full, small) {name, SPL_SPLAT, compact ? small : full, SPL_GAUSSIANS, SPL_PHASE_ALWAYS, SPL_PHASE_ALWAYS, 1, compact && (full) != 0 && (small) != (full)},
      SPL_MAP_ROWS(X)
#undef X
      {"map.exponents", SPL_SPLAT, compact ? (int)SPL_EXPONENTS : 0, SPL_MAP_BLOCKS, SPL_PHASE_ALWAYS, SPL_PHASE_ALWAYS, 1, false},
#define X(id, name, category, bytes, count, first, last, saved) {name, category, bytes, count, first, last, saved, false},
      SPL_ARENA_ROWS(X) SPL_BACKEND_ROWS(X)
#undef X
  };
  return table[row];
}

constexpr const char* SPL_CATEGORY_NAMES[] = {"splat", "splat_x_img", "image", "appearance", "viewer", "other"};
constexpr const char* SPL_COUNT_NAMES[] = {"gaussians", "blocks", "pairs", "isects", "pixels", "tiles", "bins", "cameras", "caller", "key_bytes", "map_blocks"};
constexpr const char* SPL_PHASE_NAMES[] = {"project", "order", "bin", "raster", "loss", "raster_bwd", "project_bwd"};
