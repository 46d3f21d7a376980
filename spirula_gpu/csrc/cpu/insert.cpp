// insert.cpp: chooses and adds new Gaussians (insert.h), pixel by pixel.
#include "context.h"
#include "../insert.h"

namespace spl {

int64_t insert(spl_ctx& c, const View& v, const spl_target& t, const spl_insert_params& p) {
  const Scene s = {v.width, v.height, v.cameras[0], t, p, seed_shift(p.seed), c.row<float>(R_RGB), c.row<float>(R_DEPTH), c.row<float>(R_T)};
  std::vector<float> mean, quat, scale, opacity, sh;
  for (int y = 0; y < v.height; ++y)
    for (int x = 0; x < v.width; ++x) {
      const float d = density(s, x, y);
      if (!chosen(s, x, y, d)) continue;
      const Seed g = seed_at(s, x, y, d);
      mean.insert(mean.end(), {g.mean.x, g.mean.y, g.mean.z});
      quat.insert(quat.end(), {1, 0, 0, 0});
      scale.insert(scale.end(), {g.log_scale, g.log_scale, g.log_scale});
      opacity.push_back(g.logit_opacity);
      sh.insert(sh.end(), {g.sh0.x, g.sh0.y, g.sh0.z});
    }
  end_phases(c);
  const int64_t n = (int64_t)opacity.size();
  fit_map(c, c.n + n);
  append_rows(c, {mean.data(), quat.data(), scale.data(), opacity.data(), sh.data(), n, 3, false, false}, p.owner);
  c.n += n;
  return n;
}

}  // namespace spl
