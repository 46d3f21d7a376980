// project.cpp: packed projection in two passes over 128-pair blocks.
// Pass 1 writes one visibility bit per camera-Gaussian pair and one popcount per block; the counts are scanned; pass 2
// finds each survivor's slot as scan[block] + bits below its own, and writes its screen row, box and tile count.
// Pairs are Gaussian-major (p = gaussian * C + camera), so the output is sorted by Gaussian.
#include "context.h"
#include <cstring>
#include "../gaussian.h"

namespace spl {

SPL_HOT static void mask_block(const Source& s, const View& v, int64_t block, uint32_t* words, int64_t* count) {
  uint32_t bits[SPL_MASK_WORDS] = {};
  int64_t total = 0;
  const int64_t first = block * SPL_MASK_BLOCK, lanes = std::min<int64_t>(SPL_MASK_BLOCK, s.n * v.n_cameras - first);
  int64_t gi = first / v.n_cameras;
  int ci = (int)(first - gi * v.n_cameras) - 1;
  for (int lane = 0; lane < lanes; ++lane) {
    if (++ci == v.n_cameras) { ci = 0; ++gi; }
    const Camera& cam = v.cameras[ci];
    Vec3 center;
    Gaussian g;
    Screen screen;
    Box box;
    if (surely_outside(s, gi, cam, center) || !load(s, gi, g) || !project(g, cam, screen, box)) continue;
    bits[lane >> 5] |= 1u << (lane & 31);
    ++total;
  }
  memcpy(words, bits, sizeof bits);
  *count = total;
}

static SPL_FN int64_t count_tiles(const Screen& s, const Box& b, const View& v) {
  const TileRange r = tile_range(b, v.tiles_x, v.tiles_y);
  const float q = cutoff(least(s.opacity, 1.0f));
  int64_t n = 0;
  for (int ty = r.y0; ty < r.y1; ++ty)
    for (int tx = r.x0; tx < r.x1; ++tx) n += tile_hit(s, q, tx, ty, (float)v.width, (float)v.height);
  return n;
}

struct PairRows { uint32_t* gaussian; uint16_t* camera; Screen* screen; Box16* box; int64_t* tiles; };

SPL_HOT static void compact_block(const Source& s, const View& v, int64_t block, const uint32_t* words, int64_t slot, const PairRows& out) {
  for (int lane = 0; lane < SPL_MASK_BLOCK; ++lane) {
    if (!(words[lane >> 5] >> (lane & 31) & 1)) continue;
    const int64_t p = block * SPL_MASK_BLOCK + lane, gi = p / v.n_cameras, ci = p - gi * v.n_cameras;
    const Camera& cam = v.cameras[ci];
    Gaussian g;
    Screen screen{};  // pass 1 decides; if rounding made pass 2 differ, this splat is empty, not garbage
    Box box{};
    load(s, gi, g);
    project(g, cam, screen, box);
    float room[48];
    const float* sh = sh_of(s, gi, v.sh_degree, room);
    paint(s.direct_rgb ? Vec3{sh[0], sh[1], sh[2]} : sh_color(v.sh_degree, sh, g.mean, cam.center), s.direct_rgb, screen);
    const Box16 q = encode_box(box, cam.width, cam.height);
    out.gaussian[slot] = (uint32_t)gi;
    out.camera[slot] = camera_bits((int)ci, screen);
    out.screen[slot] = screen;
    out.box[slot] = q;
    out.tiles[slot] = count_tiles(screen, decode_box(q, cam.width, cam.height), v);
    ++slot;
  }
}

static int64_t exclusive_scan(int64_t* a, int64_t n) {  // a[n] = total; exact in 64 bits
  int64_t sum = 0;
  for (int64_t i = 0; i < n; ++i) { const int64_t x = a[i]; a[i] = sum; sum += x; }
  a[n] = sum;
  return sum;
}

static int64_t mask_pass(spl_ctx& c, const Source& s, const View& v, int64_t blocks) {
  uint32_t* mask = c.row<uint32_t>(R_MASK);
  int64_t* scan = c.row<int64_t>(R_SCAN);
#pragma omp parallel for schedule(static) num_threads(c.threads)
  for (int64_t b = 0; b < blocks; ++b) mask_block(s, v, b, mask + b * SPL_MASK_WORDS, scan + b);
  return exclusive_scan(scan, blocks);
}

static int64_t compact_pass(spl_ctx& c, const Source& s, const View& v, int64_t blocks, int64_t nnz) {
  const uint32_t* mask = c.row<uint32_t>(R_MASK);
  const int64_t* scan = c.row<int64_t>(R_SCAN);
  const PairRows out = {c.row<uint32_t>(R_GAUSSIAN), c.row<uint16_t>(R_CAMERA), c.row<Screen>(R_SCREEN), c.row<Box16>(R_BOX), c.row<int64_t>(R_FIRST)};
#pragma omp parallel for schedule(static) num_threads(c.threads)
  for (int64_t b = 0; b < blocks; ++b) compact_block(s, v, b, mask + b * SPL_MASK_WORDS, scan[b], out);
  return exclusive_scan(out.tiles, nnz);
}

Counts needs_of(const spl_create_params& p, const Counts&, const View& v, int64_t gaussians, int64_t, const Found& found) {
  Counts need = common_needs(v, gaussians, found);
  need[SPL_BINS] = (int64_t)threads_of(p) * 2048;
  return need;
}

// The numbers of pairs and intersections are only known on the way. When the arena turns out too small it is laid out
// again and the passes start over: rare, since capacities keep headroom and never shrink.
void project(spl_ctx& c, const Source& s, const View& v, int last) {
  Found found;
  for (;;) {
    const Counts need = needs_of(c.params, c.capacity, v, s.n, 0, found);
    c.phase = SPL_PHASE_ALWAYS;
    fit_arena(c, need, last);
    begin_phase(c, SPL_PROJECT);
    const int64_t blocks = need[SPL_BLOCKS] - 1, nnz = found.pairs = mask_pass(c, s, v, blocks);
    if (nnz >= UINT32_MAX) fail(SPL_E_CAPACITY, "%lld visible pairs > %u: fewer cameras per call", (long long)nnz, UINT32_MAX);
    if (nnz >= c.capacity[SPL_PAIRS]) continue;
    const int64_t isects = found.isects = compact_pass(c, s, v, blocks, nnz);
    if (isects >= UINT32_MAX) fail(SPL_E_CAPACITY, "%lld splat-tile intersections > %u: smaller images or fewer cameras per call", (long long)isects, UINT32_MAX);
    if (isects > c.capacity[SPL_ISECTS]) continue;
    c.counts = needs_of(c.params, c.capacity, v, s.n, 0, found);
    c.n_isects = isects;
    return;
  }
}

}  // namespace spl
