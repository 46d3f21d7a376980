"""Whether `spirula_gpu.rasterize` and gsplat's `rasterization` draw the same: values and gradients on gsplat's own test data.

Two float32 renderers decide differently where a number lies on a threshold: a Gaussian drawn or not (alpha 1/255, its cap 0.999), a
pixel closed one Gaussian earlier or later (transmittance 1e-4), two Gaussians of nearly equal depth in either order. `edge_pixels` finds
these pixels by compositing gsplat's tile lists again; they are left out of both comparisons (their weight in the gradients' loss is 0),
and their share is printed and limited."""
from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from spirula_gpu import rasterize

ALPHA_MIN, ALPHA_MAX, T_MIN, TILE_PX = 1 / 255, 0.999, 1e-4, 16
ALPHA_BAND, T_BAND, DEPTH_BAND = 2e-4, 5e-4, 3e-7  # relative distances within which float32 may decide otherwise
EDGE_SHARE = 0.05                                  # of the pixels at most
LIMITS = dict(values=1e-4, gradients=1e-3)         # |ours - theirs| / |theirs|, Euclidean norms
OUTLIERS = 1e-3                                    # share of the elements that may differ by more than limit * the largest element
INPUTS = ("means", "quats", "scales", "opacities", "colors", "viewmats")


def edge_pixels(means2d: Tensor, conics: Tensor, depths: Tensor, opacities: Tensor, offsets: Tensor, ids: Tensor, width: int, height: int) -> Tensor:
    """[C,H,W] bool: a decision lies within its band. means2d [C,N,2], conics [C,N,3] (xx, xy, yy), depths, opacities [C,N]; ids [I]
    into C*N, sorted by tile and depth; offsets [C,TH,TW]: where a tile's ids begin. All tiles walk their lists in step. Equal depths are no
    edge: the data have 1,658 points twice, and both sorts keep the order of the indices."""
    cameras, tiles_y, tiles_x = offsets.shape
    means2d, conics, depths, opacities = means2d.reshape(-1, 2), conics.reshape(-1, 3), depths.reshape(-1), opacities.reshape(-1)
    begin = offsets.reshape(-1).long()
    count = torch.cat([begin[1:], begin.new_tensor([len(ids)])]) - begin
    tile = torch.arange(len(begin), device=ids.device)
    corner = torch.stack([tile % tiles_x, tile // tiles_x % tiles_y], 1) * TILE_PX
    inside = torch.stack(torch.meshgrid(*[torch.arange(TILE_PX, device=ids.device)] * 2, indexing="xy"), -1).reshape(1, -1, 2)
    pixel = corner[:, None] + inside + 0.5                                                       # [T,256,2]
    T, last_z = torch.ones_like(pixel[..., 0]), torch.full_like(pixel[..., 0], -torch.inf)
    edge, done = torch.zeros_like(T, dtype=torch.bool), torch.zeros_like(T, dtype=torch.bool)
    near = lambda x, threshold, band: (x / threshold - 1).abs() < band
    for k in range(int(count.max()) if len(ids) else 0):
        i = ids[(begin + k).clamp_max(len(ids) - 1)].long()
        d, conic, z = pixel - means2d[i, None], conics[i, None], depths[i, None]
        form = 0.5 * (conic[..., 0] * d[..., 0]**2 + conic[..., 2] * d[..., 1]**2) + conic[..., 1] * d[..., 0] * d[..., 1]
        raw = opacities[i, None] * torch.exp(-form)
        alive = ~done & (k < count)[:, None]
        alpha = raw.clamp_max(ALPHA_MAX)
        use = alive & (alpha >= ALPHA_MIN)
        edge |= alive & (near(raw, ALPHA_MIN, ALPHA_BAND) | near(raw, ALPHA_MAX, ALPHA_BAND))
        edge |= use & (near(T * (1 - alpha), T_MIN, T_BAND) | ((z - last_z < DEPTH_BAND * z) & (z != last_z)))
        done |= use & (T * (1 - alpha) <= T_MIN)
        T = torch.where(use & ~done, T * (1 - alpha), T)
        last_z = torch.where(use, z, last_z)
    grid = edge.reshape(cameras, tiles_y, tiles_x, TILE_PX, TILE_PX).transpose(2, 3)
    return grid.reshape(cameras, tiles_y * TILE_PX, tiles_x * TILE_PX)[:, :height, :width]


def garden(path: str, device: str) -> tuple[dict, int, int]:
    """gsplat's test data cropped to +-2 as its tests do: points with random shapes (seeded), RGB colours; all cameras. (arguments, width, height)"""
    data = np.load(path)
    means = torch.from_numpy(data["means3d"]).float()
    kept = ((means >= -2) & (means <= 2)).all(-1)
    g, n = torch.Generator().manual_seed(42), int(kept.sum())
    arguments = dict(means=means[kept], quats=F.normalize(torch.randn(n, 4, generator=g), dim=-1), scales=torch.rand(n, 3, generator=g) * 0.02,
                     opacities=torch.rand(n, generator=g), colors=torch.from_numpy(data["colors"]).float()[kept] / 255,
                     viewmats=torch.from_numpy(data["viewmats"]).float(), Ks=torch.from_numpy(data["Ks"]).float())
    return {k: v.to(device).contiguous() for k, v in arguments.items()}, int(data["width"]), int(data["height"])


def with_sh(arguments: dict) -> dict:
    """The same scene with colours of SH degree 3 [N,16,3]: its RGB from the front, seeded view dependence."""
    colors = arguments["colors"]
    rest = torch.randn(len(colors), 15, 3, generator=torch.Generator().manual_seed(43)).to(colors.device) * 0.1
    return arguments | dict(colors=torch.cat([((colors - 0.5) / 0.28209479177387814)[:, None], rest], 1))


def weights(cameras: int, height: int, width: int, edge: Tensor) -> tuple[Tensor, Tensor]:
    """Seeded dL/d render [C,H,W,4] and dL/d alphas [C,H,W,1]; 0 at the edge pixels."""
    g = torch.Generator().manual_seed(44)
    kept = (~edge[..., None]).float()
    return tuple(torch.rand(cameras, height, width, tail, generator=g).to(edge.device) * kept for tail in (4, 1))


def draw(function, arguments: dict, **settings) -> tuple[tuple, dict, dict]:
    """(render, alphas), the leaves and the info of RGB+ED; gradients wait for `gradients`."""
    leaves = {k: v.detach().clone().requires_grad_(k in INPUTS) for k, v in arguments.items()}
    render, alphas, info = function(**leaves, render_mode="RGB+ED", **settings)
    return (render, alphas), leaves, info


def gradients(images: tuple, leaves: dict, v: tuple) -> dict:
    torch.autograd.backward(images, [x.to(images[0].device) for x in v])
    out = {k: leaves[k].grad for k in INPUTS}
    out["viewmats"] = out["viewmats"][..., :3, :]  # the last row is a constant; by gsplat's matrix inverse it has a gradient nevertheless
    return out


def values(images: tuple, edge: Tensor) -> dict:
    render, alphas = (image[~edge.to(image.device)] for image in images)
    return dict(rgb=render[:, :3], depth=render[:, 3], alpha=alphas)


def difference(kind: str, ours: dict, theirs: dict) -> list[dict]:
    """A row for each array: relative error of the norms, largest error over the largest element, share of outliers, and whether it passes."""
    rows = []
    for name, b in theirs.items():
        a, b = ours[name].detach().double().cpu(), b.detach().double().cpu()
        error, scale = (a - b).abs(), float(b.abs().max())
        row = dict(kind=kind, name=name, norm=float((a - b).norm() / b.norm()), worst=float(error.max()) / scale,
                   outliers=float((error > LIMITS[kind] * scale).double().mean()))
        rows.append(row | dict(good=bool(np.isfinite(row["norm"])) and row["norm"] <= LIMITS[kind] and row["outliers"] <= OUTLIERS))
    return rows


def compare(rasterization, arguments: dict, ours_device: str, backend: str, **settings) -> tuple[float, list[dict]]:
    """The share of edge pixels and the rows of `difference` for one scene. settings: width, height, sh_degree."""
    theirs, their_leaves, info = draw(rasterization, arguments, packed=False, **settings)
    with torch.no_grad():
        edge = edge_pixels(info["means2d"], info["conics"], info["depths"], info["opacities"], info["isect_offsets"], info["flatten_ids"],
                           settings["width"], settings["height"])
    ours, our_leaves, _ = draw(rasterize, {k: v.to(ours_device) for k, v in arguments.items()}, backend=backend, **settings)
    v = weights(len(arguments["viewmats"]), settings["height"], settings["width"], edge)
    rows = difference("values", values(ours, edge), values(theirs, edge))
    return float(edge.float().mean()), rows + difference("gradients", gradients(ours, our_leaves, v), gradients(theirs, their_leaves, v))


def run(rasterization, path: str, ours_device: str, device: str = "cuda", backend: str = "cuda") -> bool:
    """Compares RGB and SH colours of the garden, prints a line for each array; True: all within the limits."""
    arguments, width, height = garden(path, device)
    good = True
    for title, scene, degree in (("RGB", arguments, None), ("SH 3", with_sh(arguments), 3)):
        share, rows = compare(rasterization, scene, ours_device, backend, width=width, height=height, sh_degree=degree)
        print(f"parity, {title}: {len(scene['means'])} Gaussians, {len(scene['viewmats'])} cameras {width}x{height}, {share:.3%} of the pixels at a threshold "
              f"(at most {EDGE_SHARE:.0%}), left out", flush=True)
        for row in rows:
            print(f"  {row['kind']:>9} {row['name']:<9} relative {row['norm']:.2e} (at most {LIMITS[row['kind']]:.0e})  worst {row['worst']:.2e}  "
                  f"outliers {row['outliers']:.2e} (at most {OUTLIERS:.0e})  {'ok' if row['good'] else 'NOT OK'}", flush=True)
        good = good and share <= EDGE_SHARE and all(row["good"] for row in rows)
    return good
