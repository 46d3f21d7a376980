// codes.h: the coded rows of a compact map on the device: decode, change, encode. See ../codec.h and, for the same on the host, ../coded.h.
#pragma once
#include "context.h"

namespace spl {

struct NewGaussians {  // raw parameters on the device, of Gaussian `first` of the map and those after it
  const float *quat, *scale, *opacity, *sh;  // quat null: no rotation
  int64_t first;
  int sh_floats;
  bool activated;  // as SPL_ACTIVATED
};

void encode_new(spl_ctx&, const NewGaussians&, int64_t n);        // behind the first c.n; with those of the last block, if it needs another exponent
void clear_new(spl_ctx&, int64_t n);                              // map.cu: rows behind the first c.n
void clear_codes(spl_ctx&, int row, int64_t first, int64_t count);
uint8_t* scratch(spl_ctx&, int64_t& bytes);                       // map.cu: `bytes`, or less where budget or memory leave less

// Gaussians first, first + 1, .. become those that `sources` names, all of them behind; `first` + sources.size() are there then.
void keep_codes(spl_ctx&, int64_t first, const std::vector<uint32_t>& sources);
// Opacity and scale of what is drawn times[i] > 1 times; then the parameters of dst[i] become those of src[i], its moments zero.
void move_codes(spl_ctx&, const std::vector<int>& times, int64_t n_moves, const int64_t* dst, const int64_t* src, float min_opacity);
// Gaussian i becomes what order[i] was, for all. `after`: room for the exponents; `room`: see ../order.h.
void sort_codes(spl_ctx&, const uint32_t* order, int8_t* after, uint8_t* room, int64_t room_bytes);

}  // namespace spl
