// sweep.h: depth of one image from others with known poses: a plane sweep (Collins 1996) with semi-global aggregation (Hirschmueller 2008), and the
// check that the depths of several images agree. Plain host C++ that both libraries compile; needs no context.
#pragma once
#include <cstdint>
#include <vector>
#include "spirula.h"

namespace spl {

void sweep(const spl_photo& ref, int n_views, const spl_photo* views, const spl_sweep_params& p, int threads, float* depth_m, float* confidence);
void agree(const spl_photo& ref, int n_views, const spl_photo* views, float tolerance, int threads, float* depth_m, uint8_t* count);

}  // namespace spl
