// ops.h: what a backend implements. The entry points (entry.h) are written in terms of these and nothing else.
#pragma once
#include "host.h"

namespace spl {

// life cycle and time
void open_context(spl_ctx&);                       // threads or device and stream; SPL_E_DEVICE if there is none
void close_context(spl_ctx&);
void activate(spl_ctx&);                           // at the start of every call: its device becomes this thread's ..
void deactivate(spl_ctx&);                         // .. and at the end the one that was
void measure(spl_ctx&, spl_memory&);
void begin_phase(spl_ctx&, int phase);             // timing; in debug: canaries and poison
void end_phases(spl_ctx&);                         // all work of the call is done when this returns
void leave_phases(spl_ctx&);                       // it may run on: the next call's project(), or end_phases(), ends it
void begin_step(spl_ctx&);                         // new timings
void use_stream(spl_ctx&, void* stream);

// the pipeline
// What a call on so many Gaussians needs of everything. `have`: what the arena is laid out for. caller_floats: of the caller's arrays; pure host code, no device
Counts needs_of(const spl_create_params&, const Counts& have, const View&, int64_t gaussians, int64_t caller_floats, const Found&);
void project(spl_ctx&, const Source&, const View&, int last);  // mask, compact, tile counts; lays the arena out for the phases up to `last` where it is not
void bin(spl_ctx&, const View&);                               // the pairs of each tile, front to back
void raster(spl_ctx&, const View&, const spl_image* direct);   // rgb, depth, T, last; or straight into the arrays of `direct` that are on the device
void loss(spl_ctx&, const View&, const spl_target&, const spl_hyper&);  // of the rows raster.*; leaves v_rgb, v_depth, v_alpha, and c.sums at end_phases
void raster_bwd(spl_ctx&, const View&);                        // gradients of the screen rows
void project_bwd(spl_ctx&, const Source&, const View&, const Sink&);

// images in and out
void copy_image(spl_ctx&, const View&, const spl_image& out);                // of the rows raster.*, what raster() has not written there
void copy_image_grads(spl_ctx&, const View&, const spl_image& out);          // of the rows loss.v_*
void load_image(spl_ctx&, const View&, const spl_image& in);                 // into the rows raster.*
void load_image_grads(spl_ctx&, const View&, const spl_image& v_image);      // into the rows loss.v_*

// the map's memory
void put(spl_ctx&, void* row, const void* from, int64_t bytes);
void get(spl_ctx&, void* to, const void* row, int64_t bytes);
void append_rows(spl_ctx&, const Source&, int32_t owner);                    // behind the first c.n, memory is there
int64_t keep_rows(spl_ctx&, const uint8_t* keep);                            // -> how many
void move_rows(spl_ctx&, const std::vector<int>& times, int64_t n_moves, const int64_t* dst, const int64_t* src, float min_opacity);
int64_t sort_rows(spl_ctx&);                                                 // by order.h -> how many come from another place
void* readable(spl_ctx&, int row, int64_t bytes);                            // for tests: the row, where the host can read it

// Adds what the rendered rows lack of the target; returns how many.
int64_t insert(spl_ctx&, const View&, const spl_target&, const spl_insert_params&);

// depth from several images (sweep.h), all on the host; what is not known: 0
void sweep(spl_ctx&, const spl_photo& ref, int n_views, const spl_photo* views, const spl_sweep_params&, float* depth_m, float* confidence);
void agree(spl_ctx&, const spl_photo& ref, int n_views, const spl_photo* views, float tolerance, float* depth_m, uint8_t* count);

inline void forward(spl_ctx& c, const Source& g, const View& v, int last, const spl_image* direct = nullptr) {  // `last`: phase of the call
  project(c, g, v, last);
  bin(c, v);
  raster(c, v, direct);
}

}  // namespace spl
