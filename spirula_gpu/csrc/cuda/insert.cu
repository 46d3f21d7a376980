// insert.cu: chooses and adds new Gaussians (insert.h) in pixel order, without leaving the device.
#include "codes.h"
#include "../insert.h"

namespace spl {

__global__ void choose_kernel(Scene s, float* found, int64_t* slot, int64_t pixels) {  // found: density, 0 where none is added
  const int64_t at = thread_id();
  if (at > pixels) return;
  float d = 0;
  if (at < pixels) {
    const int x = (int)(at % s.width), y = (int)(at / s.width);
    d = density(s, x, y);
    if (!chosen(s, x, y, d)) d = 0;
    found[at] = d;
  }
  slot[at] = d > 0;
}

struct NewRows { float *mean, *quat /* or null */, *log_scale, *opacity, *sh; int32_t* owner; int sh_floats; };

__global__ void add_kernel(Scene s, const float* found, const int64_t* slot, int64_t pixels, NewRows o) {
  const int64_t at = thread_id();
  if (at >= pixels || !(found[at] > 0)) return;
  const Seed g = seed_at(s, (int)(at % s.width), (int)(at / s.width), found[at]);
  const int64_t i = slot[at];
  const float mean[3] = {g.mean.x, g.mean.y, g.mean.z}, sh[3] = {g.sh0.x, g.sh0.y, g.sh0.z};
  for (int k = 0; k < 3; ++k) {
    o.mean[3 * i + k] = mean[k];
    o.log_scale[3 * i + k] = g.log_scale;
    o.sh[o.sh_floats * i + k] = sh[k];
  }
  if (o.quat) o.quat[4 * i] = 1;
  o.opacity[i] = g.logit_opacity;
  o.owner[i] = s.p.owner;
}

static NewRows rows_behind(spl_ctx& c) {
  auto behind = [&](int r) { return c.row<float>(r) + c.n * (c.item_bytes(r) / 4); };
  return {behind(R_MEAN), behind(R_QUAT), behind(R_LOG_SCALE), behind(R_OPACITY), behind(R_SH), c.row<int32_t>(R_OWNER) + c.n, (int)c.item_bytes(R_SH) / 4};
}

// Of a compact map: what is coded goes to rows of the loss, at most one Gaussian a pixel; their bytes are free now.
static NewRows rows_to_encode(spl_ctx& c) {
  return {c.row<float>(R_MEAN) + 3 * c.n, nullptr, c.row<float>(R_RGB), c.row<float>(R_V_DEPTH), c.row<float>(R_V_RGB), c.row<int32_t>(R_OWNER) + c.n, 3};
}

int64_t insert(spl_ctx& c, const View& v, const spl_target& t, const spl_insert_params& p) {
  begin_phase(c, SPL_LOSS);
  const int64_t pixels = v.pixels();
  spl_target target = t;
  target.rgb = (const uint8_t*)resident(c, c.row<void>(R_TARGET_RGB), t.rgb, pixels * 3);
  target.depth = (const float*)resident(c, c.row<void>(R_TARGET_DEPTH), t.depth, pixels * 4);
  target.mask = (const uint8_t*)resident(c, c.row<void>(R_TARGET_MASK), t.mask, pixels);
  const Scene s = {v.width, v.height, v.cameras[0], target, p, seed_shift(p.seed), c.row<float>(R_RGB), c.row<float>(R_DEPTH), c.row<float>(R_T)};
  float* found = c.row<float>(R_PX_ERROR);
  int64_t* slot = c.row<int64_t>(R_SSIM);  // 36 bytes a pixel are there, 8 (+8) are used
  choose_kernel<<<blocks_for(pixels + 1, 256), 256, 0, c.stream>>>(s, found, slot, pixels);
  launched("choose_kernel");
  scan(c, slot, pixels + 1);
  int64_t n = 0;
  get(c, &n, slot + pixels, 8);
  fit_map(c, c.n + n);
  if (n) {
    clear_new(c, n);
    const NewRows rows = c.compact() ? rows_to_encode(c) : rows_behind(c);
    add_kernel<<<blocks_for(pixels, 256), 256, 0, c.stream>>>(s, found, slot, pixels, rows);
    launched("add_kernel");
    if (c.compact()) encode_new(c, {nullptr, rows.log_scale, rows.opacity, rows.sh, c.n, rows.sh_floats, false}, n);
  }
  end_phases(c);
  c.n += n;
  return n;
}

}  // namespace spl
