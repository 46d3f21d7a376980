// step.cpp: images in and out, and the entry points.
#include "context.h"
#include "../entry.h"

namespace spl {

void copy_image(spl_ctx& c, const View& v, const spl_image& out) {
  const int64_t n = v.pixels();
  if (out.rgb) memcpy(out.rgb, c.row<float>(R_RGB), n * 12);
  if (out.depth) memcpy(out.depth, c.row<float>(R_DEPTH), n * 4);
  if (!out.alpha) return;
  const float* T = c.row<float>(R_T);
  for (int64_t i = 0; i < n; ++i) out.alpha[i] = 1.0f - T[i];
}

void copy_image_grads(spl_ctx& c, const View& v, const spl_image& out) {
  const int64_t n = v.pixels();
  if (out.rgb) memcpy(out.rgb, c.row<float>(R_V_RGB), n * 12);
  if (out.depth) memcpy(out.depth, c.row<float>(R_V_DEPTH), n * 4);
  if (out.alpha) memcpy(out.alpha, c.row<float>(R_V_ALPHA), n * 4);
}

void load_image(spl_ctx& c, const View& v, const spl_image& in) {
  const int64_t n = v.pixels();
  memcpy(c.row<float>(R_RGB), in.rgb, n * 12);
  for (int64_t i = 0; i < n; ++i) {
    c.row<float>(R_DEPTH)[i] = in.depth ? in.depth[i] : 0.0f;
    c.row<float>(R_T)[i] = in.alpha ? 1.0f - in.alpha[i] : 0.0f;
  }
}

void load_image_grads(spl_ctx& c, const View& v, const spl_image& g) {
  const int64_t n = v.pixels();
  auto load = [&](int row, const float* from, int64_t bytes) {
    if (from) memcpy(c.row<float>(row), from, bytes); else memset(c.row<float>(row), 0, bytes);
  };
  load(R_V_RGB, g.rgb, n * 12);
  load(R_V_DEPTH, g.depth, n * 4);
  load(R_V_ALPHA, g.alpha, n * 4);
  load(R_PX_ERROR, nullptr, n * 4);
}

}  // namespace spl
