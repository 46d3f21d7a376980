// step.cpp: the entry points that render and train. Each reads like the pipeline.
#include "abi.h"
#include <cstring>

using namespace spl;

namespace spl {

static void copy_image(spl_ctx& c, const View& v, const spl_image& out) {
  const int64_t n = v.pixels();
  if (out.rgb) memcpy(out.rgb, c.row<float>(R_RGB), n * 12);
  if (out.depth) memcpy(out.depth, c.row<float>(R_DEPTH), n * 4);
  if (!out.alpha) return;
  const float* T = c.row<float>(R_T);
  for (int64_t i = 0; i < n; ++i) out.alpha[i] = 1.0f - T[i];
}

static void load_upstream(spl_ctx& c, const View& v, const spl_image& g) {
  const int64_t n = v.pixels();
  auto load = [&](int row, const float* from, int64_t bytes) {
    if (from) memcpy(c.row<float>(row), from, bytes); else memset(c.row<float>(row), 0, bytes);
  };
  load(R_V_RGB, g.rgb, n * 12);
  load(R_V_DEPTH, g.depth, n * 4);
  load(R_V_ALPHA, g.alpha, n * 4);
  load(R_PX_ERROR, nullptr, n * 4);
}

static void check_hyper(const spl_hyper& h) {
  const float rates[] = {h.lr_mean, h.lr_quat, h.lr_log_scale, h.lr_logit_opacity, h.lr_sh0, h.lr_sh_rest, h.ssim_weight, h.depth_weight, h.opacity_reg, h.scale_reg, h.eps, h.lr_mean_final, h.lr_decay_steps};
  for (float r : rates) if (!(r >= 0) || !finite(r)) fail(SPL_E_ARGUMENT, "spl_hyper: a rate or weight is %g, must be >= 0 and finite", r);
  if (!(h.beta1 >= 0 && h.beta1 < 1 && h.beta2 >= 0 && h.beta2 < 1)) fail(SPL_E_ARGUMENT, "beta1 %g, beta2 %g: must lie in [0, 1)", h.beta1, h.beta2);
  if (h.lr_decay_steps > 0 && h.lr_mean > 0 && !(h.lr_mean_final > 0)) fail(SPL_E_ARGUMENT, "lr_mean %g cannot decay to lr_mean_final %g: it must be > 0", h.lr_mean, h.lr_mean_final);
  if (h.ssim_weight > 1) fail(SPL_E_ARGUMENT, "ssim_weight %g: must lie in [0, 1]", h.ssim_weight);
}

static void describe_step(spl_ctx& c, spl_step& out) {
  out.n_pairs = c.counts[SPL_PAIRS] - 1;
  out.n_isects = out.n_pairs ? c.row<int64_t>(R_FIRST)[out.n_pairs] : 0;
  memcpy(out.ms, c.ms, sizeof c.ms);
}

}  // namespace spl

int spl_render(spl_ctx* ctx, const spl_view* view, const spl_image* out) {
  return guarded(ctx, [&](spl_ctx& c) {
    const View v = make_view(c, view, c.params.sh_degree);
    const spl_image& image = checked(out, "spl_image");
    begin_step(c);
    forward(c, map_source(c), v);
    copy_image(c, v, image);
    end_phases(c);
  });
}

int spl_forward(spl_ctx* ctx, const spl_gaussians* g, const spl_view* view, const spl_image* out) {
  return guarded(ctx, [&](spl_ctx& c) {
    const Source s = caller_source(g);
    const View v = make_view(c, view, (int)g->sh_degree);
    const spl_image& image = checked(out, "spl_image");
    begin_step(c);
    forward(c, s, v);
    copy_image(c, v, image);
    end_phases(c);
  });
}

int spl_backward(spl_ctx* ctx, const spl_gaussians* g, const spl_view* view, const spl_image* v_image, const spl_gaussian_grads* out) {
  return guarded(ctx, [&](spl_ctx& c) {
    const Source s = caller_source(g);
    const View v = make_view(c, view, (int)g->sh_degree);
    Sink sink;
    sink.grads = checked(out, "spl_gaussian_grads");
    if (s.n && !(sink.grads.means && sink.grads.quats && sink.grads.log_scales && sink.grads.logit_opacities && sink.grads.sh)) fail(SPL_E_ARGUMENT, "a gradient array is NULL");
    begin_step(c);
    forward(c, s, v);
    begin_phase(c, SPL_LOSS);
    load_upstream(c, v, checked(v_image, "spl_image"));
    raster_bwd(c, v);
    project_bwd(c, s, v, sink);
    end_phases(c);
  });
}

int spl_train_step(spl_ctx* ctx, const spl_view* view, const spl_target* target, const spl_hyper* hyper, spl_step* out) {
  return guarded(ctx, [&](spl_ctx& c) {
    const View v = make_view(c, view, c.params.sh_degree);
    const spl_target& t = checked(target, "spl_target");
    Sink sink;
    sink.hyper = &checked(hyper, "spl_hyper");
    spl_step step = checked(out, "spl_step");
    if (!t.rgb) fail(SPL_E_ARGUMENT, "spl_target.rgb is NULL");
    check_hyper(*hyper);
    const Source s = map_source(c);
    begin_step(c);
    forward(c, s, v);
    loss(c, v, t, *hyper, step);
    raster_bwd(c, v);
    project_bwd(c, s, v, sink);
    end_phases(c);
    describe_step(c, step);
    *out = step;
  });
}

int spl_loss(spl_ctx* ctx, const spl_view* view, const spl_image* image, const spl_target* target, const spl_hyper* hyper, const spl_image* v_image, spl_step* out) {
  return guarded(ctx, [&](spl_ctx& c) {
    const View v = make_view(c, view, -1);
    const spl_image &in = checked(image, "spl_image"), &g = checked(v_image, "spl_image");
    const spl_target& t = checked(target, "spl_target");
    spl_step step = checked(out, "spl_step");
    check_hyper(checked(hyper, "spl_hyper"));
    if (!in.rgb || !t.rgb || (t.depth && !(in.depth && in.alpha))) fail(SPL_E_ARGUMENT, "rgb of image and target must be given, and depth and alpha of the image if the target has depth");
    const Source none{};
    begin_step(c);
    project(c, none, v);
    begin_phase(c, SPL_BIN);
    begin_phase(c, SPL_RASTER);
    const int64_t n = v.pixels();
    memcpy(c.row<float>(R_RGB), in.rgb, n * 12);
    for (int64_t i = 0; i < n; ++i) {
      c.row<float>(R_DEPTH)[i] = in.depth ? in.depth[i] : 0.0f;
      c.row<float>(R_T)[i] = in.alpha ? 1.0f - in.alpha[i] : 0.0f;
    }
    loss(c, v, t, *hyper, step);
    if (g.rgb) memcpy(g.rgb, c.row<float>(R_V_RGB), n * 12);
    if (g.depth) memcpy(g.depth, c.row<float>(R_V_DEPTH), n * 4);
    if (g.alpha) memcpy(g.alpha, c.row<float>(R_V_ALPHA), n * 4);
    end_phases(c);
    describe_step(c, step);
    *out = step;
  });
}
