// step.cu: images in and out, and the entry points.
#include "context.h"
#include "../entry.h"

namespace spl {

__global__ void one_minus_kernel(const float* in, float* out, int64_t n) {
  const int64_t i = thread_id();
  if (i < n) out[i] = 1.0f - in[i];
}

static void copy(spl_ctx& c, void* to, const void* from, int64_t bytes) {
  if (to) check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, c.stream), "copying an image");
}

static void load(spl_ctx& c, void* row, const void* from, int64_t bytes) {
  if (from) copy(c, row, from, bytes);
  else check(cudaMemsetAsync(row, 0, bytes, c.stream), "clearing an image");
}

static void one_minus(spl_ctx& c, const float* in, float* out, int64_t n) {
  one_minus_kernel<<<blocks_for(n, 256), 256, 0, c.stream>>>(in, out, n);
  launched("one_minus_kernel");
}

void copy_image(spl_ctx& c, const View& v, const spl_image& out) {
  const int64_t n = v.pixels();
  if (!on_device(out.rgb)) copy(c, out.rgb, c.row<float>(R_RGB), n * 12);
  if (!on_device(out.depth)) copy(c, out.depth, c.row<float>(R_DEPTH), n * 4);
  if (!out.alpha || on_device(out.alpha)) return;
  float* T = c.row<float>(R_T);
  one_minus(c, T, T, n);  // the picture ends here: nobody reads T again
  copy(c, out.alpha, T, n * 4);
}

void copy_image_grads(spl_ctx& c, const View& v, const spl_image& out) {
  const int64_t n = v.pixels();
  copy(c, out.rgb, c.row<float>(R_V_RGB), n * 12);
  copy(c, out.depth, c.row<float>(R_V_DEPTH), n * 4);
  copy(c, out.alpha, c.row<float>(R_V_ALPHA), n * 4);
}

void load_image(spl_ctx& c, const View& v, const spl_image& in) {
  const int64_t n = v.pixels();
  load(c, c.row<float>(R_RGB), in.rgb, n * 12);
  load(c, c.row<float>(R_DEPTH), in.depth, n * 4);
  load(c, c.row<float>(R_T), in.alpha, n * 4);
  if (in.alpha) one_minus(c, c.row<float>(R_T), c.row<float>(R_T), n);
}

void load_image_grads(spl_ctx& c, const View& v, const spl_image& g) {
  const int64_t n = v.pixels();
  load(c, c.row<float>(R_V_RGB), g.rgb, n * 12);
  load(c, c.row<float>(R_V_DEPTH), g.depth, n * 4);
  load(c, c.row<float>(R_V_ALPHA), g.alpha, n * 4);
  load(c, c.row<float>(R_PX_ERROR), nullptr, n * 4);
}

}  // namespace spl
