/* spirula.h: the C ABI of the engine, the same for libspirula_cpu.so and libspirula_cuda.so.
 *
 * THREAD RULE. A context belongs to one thread at a time; two contexts never share anything. No function takes a lock,
 * prints, throws or exits. Every function returns 0 (SPL_OK) or a negative spl_status; spl_error(ctx) then says the
 * number, the limit and the remedy, and the outputs are untouched. CUDA: a call works in the device's primary context,
 * as the CUDA runtime and torch do, and leaves the thread's current device as it was.
 *
 * POINTERS are host pointers. The CUDA library also takes device pointers of the context's device for every array of
 * Gaussians, gradients, images and targets (not for the view), and reads targets and Gaussians there without a copy.
 * What other streams than the context's write there must be finished before the call; when it returns, all its work is
 * done, but for a deferred training step, whose device arrays must stay as they are until the next call has returned.
 * Arrays are C-contiguous, lengths in [..].
 *
 * A COMPLETE EXAMPLE
 *     spl_create_params p = {sizeof p};  p.sh_degree = 3;  p.max_gaussians = 1 << 20;  p.arena_alias = 1;
 *     spl_ctx* ctx;                      if (spl_create(&p, &ctx)) { puts(spl_error(NULL)); return 1; }
 *     spl_gaussians g = {sizeof g, 0, n, 3, means, quats, log_scales, logit_opacities, sh};
 *     spl_map_append(ctx, &g, owner);
 *     spl_view v = {sizeof v};  v.n_cameras = 1;  v.width = 640;  v.height = 480;  v.sh_degree = 3;
 *     v.viewmats = T_cam_world;  v.Ks = K;  v.blur_px2 = 0.3f;  v.near_m = 0.01f;
 *     spl_target t = {sizeof t};  t.rgb = image_u8;
 *     spl_hyper h = {sizeof h};  ... learning rates ...
 *     spl_step s = {sizeof s};
 *     for (int i = 0; i < 1000; ++i) if (spl_train_step(ctx, &v, &t, &h, &s)) { puts(spl_error(ctx)); break; }
 *     spl_destroy(ctx);
 *
 * CONVENTIONS. World and camera frames in metres; camera axes x right, y down, z forward (OpenCV, REP-103 optical).
 * viewmats are T_cam_world, row-major. K maps to pixel coordinates in which the CENTRE of the first pixel is (0.5, 0.5)
 * (gsplat's convention; a ROS/OpenCV CameraInfo has it at (0, 0): add 0.5 to cx, cy). Quaternions are w x y z.
 * Depth images are the alpha-weighted sum of camera z: divide by alpha for the expected depth. */
#ifndef SPIRULA_H
#define SPIRULA_H
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif
#define SPL_API __attribute__((visibility("default")))

typedef struct spl_ctx spl_ctx;

typedef enum {
  SPL_OK = 0,
  SPL_E_ARGUMENT = -1,  /* a pointer, size or value that cannot be right */
  SPL_E_CAPACITY = -2,  /* more Gaussians or intersections than the context may hold */
  SPL_E_MEMORY = -3,    /* the allocation failed */
  SPL_E_DEVICE = -4,    /* the device is missing or in an error state (CUDA) */
} spl_status;

/* ---- life cycle ------------------------------------------------------------------------------------------------- */
typedef struct {
  int64_t struct_size;
  int64_t max_gaussians;  /* address range that is reserved for the map; memory is taken only as it grows */
  int64_t budget_bytes;   /* 0: none. All rows together never exceed it: SPL_E_CAPACITY instead */
  int32_t sh_degree;      /* 0..3, what the map stores */
  int32_t threads;        /* CPU: 0 = all cores */
  int32_t device;         /* CUDA: device index */
  int32_t arena_alias;    /* 0: every arena row has bytes of its own (A/B switch; results are bit-identical on the CPU) */
  int32_t arena_debug;    /* 1: poison rows outside their phases and check canaries behind them */
  int32_t no_paging;      /* CUDA: 1 = as where the driver has no virtual memory management: growing copies, with the old and the new of one row held meanwhile */
  int32_t precision;      /* 0: full, fp32. 1: compact: 16-bit parameters, 8- and 16-bit moments (codec.h), 142 instead of 368 bytes a Gaussian at degree 3 */
} spl_create_params;

SPL_API int32_t spl_abi_version(void);
SPL_API const char* spl_backend(void);               /* "cpu" or "cuda" */
SPL_API int64_t spl_constant(const char* name);      /* any constant of layout.h or sizeof a struct; INT64_MIN: unknown */
SPL_API int spl_create(const spl_create_params*, spl_ctx** out);
SPL_API void spl_destroy(spl_ctx*);
SPL_API int spl_set_stream(spl_ctx*, void* cuda_stream); /* CUDA: work goes there from now on, it must live as long; NULL: the context's own; the legacy default stream is (void*)1 */
SPL_API const char* spl_error(const spl_ctx*);       /* NULL: the last failed spl_create, spl_forecast or spl_align of this thread */

/* ---- memory: the one table of buffers (layout.h) ------------------------------------------------------------------ */
typedef struct {
  char name[32];
  int32_t category;     /* index into SPL_CATEGORY_NAMES */
  int32_t count;        /* what it is counted in: index into SPL_COUNT_NAMES */
  int32_t first_phase;  /* bytes are valid from .. */
  int32_t last_phase;   /* .. to; SPL_PHASE_ALWAYS rows own their bytes */
  int32_t saved;        /* a checkpoint stores it */
  int32_t aliased;      /* lives in the arena, capacity is reported once under "arena" */
  int64_t item_bytes;
  int64_t used_bytes, capacity_bytes;
} spl_row;
/* Before anything is allocated: what a new context with these parameters holds after such a call, laid out by the same functions. Rows as of
 * spl_report; capacity_bytes, and the arena's, sum up to all memory of rows. With a budget: without headroom where that exceeds it, and
 * the sum may then still exceed it: such a call would be refused. Opens no device. spl_error(NULL) says why it failed. CUDA: beside rows there
 * are the device's own context, pinned host memory (spl_memory), map edits, which take an arena of 32 MiB where they can get it, and spl_sweep and
 * spl_agree, which need an arena of their own size. */
typedef struct {
  int64_t struct_size;
  int64_t gaussians;      /* of the map */
  int64_t pairs, isects;  /* as in spl_step, of the largest view; 0: estimated (forecast.h): so many are visible, and so many tiles are reached by each */
  int32_t n_cameras, width, height;
  int32_t train;          /* 1: training steps; 0: renders alone */
} spl_workload;
SPL_API int spl_forecast(const spl_create_params*, const spl_workload*, spl_row* rows, int32_t capacity, int32_t* n_rows);
SPL_API int spl_report(spl_ctx*, spl_row* rows, int32_t capacity, int32_t* n_rows); /* all rows, then "arena" */
SPL_API int spl_buffer(spl_ctx*, const char* name, void** ptr, int64_t* bytes);     /* for tests: a row as it is now */

typedef struct {
  int64_t struct_size;
  int64_t free_bytes, total_bytes; /* of the device, as the driver says; CPU: of the machine */
  int64_t process_bytes; /* CPU: resident. CUDA: what has gone from free_bytes since the context was created (the driver has no figure per process: others count too) */
  int64_t pinned_bytes;  /* CUDA: host memory for copies to the device, twice the largest images that came as host pointers in one call. Not a row and not in the budget, which are of the device */
} spl_memory;
SPL_API int spl_memory_info(spl_ctx*, spl_memory*);
SPL_API int spl_fail_allocation(spl_ctx*, int64_t nth); /* for tests: as if memory ran out at the nth time from now on that a row of the map or the arena grows; 0: there is enough */

/* ---- the map: raw (optimiser) parametrisation ---------------------------------------------------------------------- */
enum { SPL_ACTIVATED = 1 }; /* spl_gaussians.flags: log_scales holds scales in m, logit_opacities holds opacities */
typedef struct {
  int64_t struct_size;
  int64_t flags;
  int64_t n;
  int64_t sh_degree;             /* of the array sh: K = (sh_degree+1)^2; -1: sh holds RGB [n,3], used as is */
  const float* means;            /* [n,3] world, m */
  const float* quats;            /* [n,4] wxyz, any norm > 0 */
  const float* log_scales;       /* [n,3] */
  const float* logit_opacities;  /* [n] */
  const float* sh;               /* [n,K,3] */
} spl_gaussians;

SPL_API int64_t spl_map_size(const spl_ctx*);
SPL_API int spl_map_append(spl_ctx*, const spl_gaussians* host, int32_t owner);  /* owner: keyframe id; Adam state zero */
/* Rows by their names, in fp32 (int32: owner, steps) in either precision, [count,..] from Gaussian `first` on. Compact rounds what is written
 * to the nearest code; it keeps a first moment relative to the second one: write adam.v.* before adam.m.*. */
SPL_API int spl_map_read(spl_ctx*, const char* row, int64_t first, int64_t count, void* host);
SPL_API int spl_map_write(spl_ctx*, const char* row, int64_t first, int64_t count, const void* host);
/* For checkpoints: n Gaussians in an empty map, whose rows hold anything; and the bytes of a saved row as they are stored, [first, first + bytes)
 * of the row's used_bytes. A map is whole when every saved row of spl_report has been written. */
SPL_API int spl_map_make(spl_ctx*, int64_t n);
SPL_API int spl_map_read_raw(spl_ctx*, const char* row, int64_t first, int64_t bytes, void* host);
SPL_API int spl_map_write_raw(spl_ctx*, const char* row, int64_t first, int64_t bytes, const void* host);
SPL_API int spl_map_keep(spl_ctx*, const uint8_t* keep_host, int64_t* n_kept);   /* keep [n]: 0 removes; order is kept */
/* Move n_moves Gaussians onto better ones: dst takes src's parameters, both get the opacity and scale that leave the
 * rendered sum unchanged (Kheradmand et al. 2024, eq. 9); dst's Adam state is zeroed. */
SPL_API int spl_map_relocate(spl_ctx*, int64_t n_moves, const int64_t* dst_host, const int64_t* src_host, float min_opacity);
/* All rows into the order of the Morton curve through the means, so that what a view sees lies together (order.h); what is equal keeps its order, what
 * is not finite comes last. n_moved: Gaussians that are at another index now; 0: nothing was touched. Compact: rounds to the nearest code where a block
 * gets a larger exponent. Takes 16 bytes a Gaussian of scratch (arena) while it works; where they are not to be had (SPL_E_CAPACITY, SPL_E_MEMORY) the map is as it was. */
SPL_API int spl_map_sort(spl_ctx*, int64_t* n_moved);

/* ---- rendering ------------------------------------------------------------------------------------------------------ */
typedef struct {
  int64_t struct_size;
  int32_t n_cameras, width, height;
  int32_t sh_degree;       /* degree that is evaluated, <= what is stored */
  float blur_px2;          /* added to the screen covariance, px^2 (0.3) */
  float near_m;            /* Gaussians nearer than this are not drawn */
  float background[3];
  int32_t antialiased;     /* 1: the 2D mip filter: opacities times sqrt(det(cov) / det(cov + blur_px2 I)), so that small splats get fainter and not larger */
  const float* viewmats;   /* [C,4,4] T_cam_world, host */
  const float* Ks;         /* [C,3,3] host */
} spl_view;

typedef struct {
  int64_t struct_size;
  float* rgb;    /* [C,H,W,3] or NULL */
  float* alpha;  /* [C,H,W]   or NULL */
  float* depth;  /* [C,H,W]   or NULL: sum of weight * camera z, m */
} spl_image;

typedef struct {
  int64_t struct_size;
  float *means, *quats, *log_scales, *logit_opacities, *sh; /* as spl_gaussians; every element is written, 0 for a Gaussian whose gradient overflows */
  float* viewmats;                                          /* [C,4,4] or NULL */
} spl_gaussian_grads;

typedef struct {
  int64_t struct_size;
  int32_t deferred;          /* in: 1 = the step may still run when the call returns, and the rest describes the training step */
  int32_t reserved;          /* before (n_pairs -1: there was none). Its error, if any, comes with the next call */
  int64_t n_pairs, n_isects; /* visible camera-Gaussian pairs; splat-tile intersections */
  double loss, l1, ssim, depth; /* loss without the two regularisers */
  double ms[8];              /* per phase of layout.h */
} spl_step;

SPL_API int spl_render(spl_ctx*, const spl_view*, const spl_image* out);                        /* the map */
SPL_API int spl_forward(spl_ctx*, const spl_gaussians*, const spl_view*, const spl_image* out);  /* the caller's */
/* Gradients of sum(v_image . image) for the Gaussians and view of the arguments: runs forward again, keeps nothing. */
SPL_API int spl_backward(spl_ctx*, const spl_gaussians*, const spl_view*, const spl_image* v_image, const spl_gaussian_grads* out);

/* ---- training --------------------------------------------------------------------------------------------------------- */
typedef struct {
  int64_t struct_size;
  const uint8_t* rgb;   /* [C,H,W,3] */
  const float* depth;   /* [C,H,W] m, 0 = unknown; or NULL */
  const uint8_t* mask;  /* [C,H,W] 0 = ignore; or NULL */
} spl_target;

typedef struct {
  int64_t struct_size;
  float lr_mean, lr_quat, lr_log_scale, lr_logit_opacity, lr_sh0, lr_sh_rest; /* lr_mean in m */
  float lr_mean_final, lr_decay_steps; /* each Gaussian's lr_mean falls to this, exponentially, over its own first steps; 0: constant */
  float beta1, beta2, eps; /* eps > 0 */
  float ssim_weight;    /* loss = (1-w) L1 + w (1-SSIM) */
  float depth_weight;   /* + w * mean |depth - alpha d| / d over known depths */
  float opacity_reg, scale_reg; /* + reg * sigmoid(o), + reg * scale / (z of the nearest pair), visible Gaussians only */
  float noise;          /* nearly transparent visible Gaussians move by covariance * normal * lr_mean * noise (Kheradmand et al. 2024, eq. 8) */
  uint32_t seed;        /* of that noise */
} spl_hyper;

SPL_API int spl_train_step(spl_ctx*, const spl_view*, const spl_target*, const spl_hyper*, spl_step* out);
SPL_API int spl_last_step(spl_ctx*, spl_step* out); /* the newest training step, waited for if it was deferred; n_pairs -1: there was none */
/* The loss alone: value and d loss / d image (v_image pointers may be NULL). */
SPL_API int spl_loss(spl_ctx*, const spl_view*, const spl_image* image, const spl_target*, const spl_hyper*, const spl_image* v_image, spl_step* out);

/* ---- insertion ---------------------------------------------------------------------------------------------------------- */
typedef struct {
  int64_t struct_size;
  float alpha_below;      /* insert where rendered alpha is below .. */
  float depth_error;      /* .. or |rendered - measured depth| > depth_error * depth and the measurement is in front .. */
  float detail_gain;      /* .. else with probability gain * (|Laplacian(image)| - |Laplacian(render)|), colours in 0..1 */
  float min_depth_m, max_depth_m;
  float hole_spacing_px;  /* in the first two cases at least one Gaussian every so many pixels, more where there is detail */
  float size;             /* sigma = size * sampling distance on screen * depth / f */
  float opacity;
  int32_t owner;          /* keyframe id */
  uint64_t seed;
} spl_insert_params;
SPL_API int spl_insert(spl_ctx*, const spl_view*, const spl_target*, const spl_insert_params*, int64_t* n_new);

/* ---- depth from several images with known poses; all pointers are of the host -------------- */
typedef struct {
  int64_t struct_size;
  int32_t width, height;
  const uint8_t* gray;        /* [H,W]; spl_sweep */
  const float* depth;         /* [H,W] m along z, 0 = unknown; spl_agree */
  const float* K;             /* [3,3] */
  const float* T_photo_ref;   /* [4,4] from the reference's camera into this one; not read of the reference itself */
} spl_photo;

typedef struct {
  int64_t struct_size;
  float min_inv, max_inv;     /* 1/m: the planes are at n_planes equal steps of inverse depth from the first to the second */
  int32_t n_planes;           /* choose it so that a step is at most a pixel in each view */
  float min_ncc;              /* a depth is refused where the better half of the views correlates less than this, 0..1 .. */
  float min_margin;           /* .. or where another plane, not beside it, comes as close as this; 0..1 */
  int32_t reserved;
} spl_sweep_params;
/* depth_m, confidence (0..1) [H,W]: 0 where the images do not say. Takes 3 bytes a pixel and plane meanwhile: of the host's memory; CUDA: of the arena (planes
 * in fours, 9 more a pixel; 5 a pixel of the views if that is more), within the budget (SPL_E_CAPACITY); it keeps them for the next sweep while less than half of that is taken. The backends agree up to rounding of levels and costs. */
SPL_API int spl_sweep(spl_ctx*, const spl_photo* ref, int64_t n_views, const spl_photo* views, const spl_sweep_params*, float* depth_m, float* confidence);
/* Where a depth of the reference and those of the views agree: it comes back to within 2 pixels by way of the view's own depth, which is at most
 * `tolerance` (share) off. count [H,W]: by how many views; depth_m: the harmonic mean of those and its own, 0 where there is none. */
SPL_API int spl_agree(spl_ctx*, const spl_photo* ref, int64_t n_views, const spl_photo* views, float tolerance, float* depth_m, uint8_t* count);

/* ---- the motion between an image and a render of the map: one level of align.py, on the host ---- */
typedef struct {
  int64_t struct_size;
  const float* grey;          /* [H,W] 0..255, of the image */
  const float* depth;         /* [H,W] m, 0 = unknown; or NULL */
  const uint8_t* valid;       /* [H,W] 0 = not of the scene */
  const float* points;        /* [n,4] of the render: X Y Z in its camera, m, and grey level */
  int64_t n;
  int32_t width, height;      /* 4..SPL_MAX_PX */
  float fx, fy, cx, cy;
  int32_t iterations;         /* of Gauss-Newton, at most; 0: what the residuals are at T */
  int32_t found;              /* out: 0: too few points fall into the image, and only T is written */
  double sigma_m, sigma_rad;  /* > 0: of T about T_prior, along and around each axis */
  double T_prior[16];         /* [4,4]: render's camera -> image's camera, as given .. */
  double T[16];               /* .. at the start; out: as found */
  double scales[2];           /* spread of the residuals, grey levels and share of the depth; 0: as they are; out: what was taken */
  double information[36];     /* out: [6,6] of the images alone, translation and rotation */
  double cost, gain;          /* out: robust residual per point in units of its spread; of the image over the render */
} spl_alignment;
SPL_API int spl_align(spl_alignment*); /* its text is spl_error(NULL) */

#ifdef __cplusplus
}
#endif
#endif
