"""The engine's mathematics in float64 numpy: slow, obvious, one formula per line. Conventions as in spirula.h."""
from __future__ import annotations

from typing import NamedTuple

import numpy as np

from spirula_gpu.metrics import ssim

ALPHA_MIN, ALPHA_MAX, T_MIN, TILE_PX, MASK_BLOCK = 1 / 255, 0.999, 1e-4, 16, 128


class Gaussians(NamedTuple):
    """Activated: scales in m, opacities in (0,1)."""
    means: np.ndarray      # [N,3]
    quats: np.ndarray      # [N,4] wxyz, any norm
    scales: np.ndarray     # [N,3]
    opacities: np.ndarray  # [N]
    sh: np.ndarray         # [N,K,3]; [N,3]: RGB, used as is


class Projected(NamedTuple):
    visible: np.ndarray  # [N] bool
    xy: np.ndarray       # [N,2] px
    cov: np.ndarray      # [N,2,2] px^2, blurred
    conic: np.ndarray    # [N,3] xx, xy, yy of the inverse
    depth: np.ndarray    # [N] camera z
    rgb: np.ndarray      # [N,3]
    box: np.ndarray      # [N,4] x0 y0 x1 y1 of the ellipse alpha = 1/255
    opacity: np.ndarray  # [N] at the centre


def sh_basis(d: np.ndarray) -> np.ndarray:
    """[N,16] real spherical harmonics of unit directions, in the order and with the signs of 3DGS."""
    x, y, z = d.T
    return np.stack([
        0.28209479177387814 * np.ones_like(x),
        -0.48860251190291987 * y, 0.48860251190291987 * z, -0.48860251190291987 * x,
        1.0925484305920792 * x * y, -1.0925484305920792 * y * z, 0.31539156525252005 * (2 * z * z - x * x - y * y),
        -1.0925484305920792 * x * z, 0.5462742152960396 * (x * x - y * y),
        -0.5900435899266435 * y * (3 * x * x - y * y), 2.890611442640554 * x * y * z,
        -0.4570457994644658 * y * (4 * z * z - x * x - y * y), 0.3731763325901154 * z * (2 * z * z - 3 * x * x - 3 * y * y),
        -0.4570457994644658 * x * (4 * z * z - x * x - y * y), 1.445305721320277 * z * (x * x - y * y),
        -0.5900435899266435 * x * (x * x - 3 * y * y)], 1)


def rotation(q: np.ndarray) -> np.ndarray:
    w, x, y, z = q / np.linalg.norm(q)
    return np.array([[1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
                     [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
                     [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)]])


@np.errstate(all="ignore")
def project(g: Gaussians, viewmat, K, width, height, degree, blur=0.3, near=0.01, antialiased=False) -> Projected:
    """EWA splatting (Zwicker et al. 2001) as gsplat does it; antialiased: Yu et al. 2024 (Mip-Splatting), eq. 9."""
    g = Gaussians(*(np.asarray(a, np.float64) for a in g))
    viewmat, K, n = np.asarray(viewmat, np.float64), np.asarray(K, np.float64), len(g.means)
    R, fx, fy, cx, cy = viewmat[:3, :3], K[0, 0], K[1, 1], K[0, 2], K[1, 2]
    t = g.means @ R.T + viewmat[:3, 3]
    margin_x, margin_y = 0.3 * 0.5 * width / fx, 0.3 * 0.5 * height / fy
    xy, cov, conic, opacity = np.zeros((n, 2)), np.zeros((n, 2, 2)), np.zeros((n, 3)), g.opacities.copy()
    for i, (x, y, z) in enumerate(t):
        u = np.clip(x / z, -cx / fx - margin_x, (width - cx) / fx + margin_x)
        v = np.clip(y / z, -cy / fy - margin_y, (height - cy) / fy + margin_y)
        J = np.array([[fx / z, 0, -fx * u / z], [0, fy / z, -fy * v / z]])
        M = J @ R @ rotation(g.quats[i]) @ np.diag(g.scales[i])
        xy[i], cov[i] = (fx * x / z + cx, fy * y / z + cy), M @ M.T + blur * np.eye(2)
        if antialiased:
            opacity[i] *= np.sqrt(max(np.linalg.det(M @ M.T), 0) / np.linalg.det(cov[i]))
        conic[i] = np.array([cov[i, 1, 1], -cov[i, 0, 1], cov[i, 0, 0]]) / np.linalg.det(cov[i])
    reach = np.sqrt(2 * np.log(opacity / ALPHA_MIN))[:, None] * np.sqrt(np.stack([cov[:, 0, 0], cov[:, 1, 1]], 1))
    box = np.concatenate([xy - reach, xy + reach], 1)
    if g.sh.ndim == 2:
        rgb = g.sh
    else:
        d = g.means + np.linalg.inv(R) @ viewmat[:3, 3]
        basis = sh_basis(d / np.linalg.norm(d, axis=1, keepdims=True))[:, :(degree + 1)**2]
        rgb = np.maximum(0, 0.5 + np.einsum("nk,nkc->nc", basis, g.sh[:, :(degree + 1)**2]))
    finite = np.isfinite(np.concatenate([t, xy, conic, rgb, box, opacity[:, None]], 1)).all(1)
    inside = (box[:, 0] < width) & (box[:, 1] < height) & (box[:, 2] > 0) & (box[:, 3] > 0)
    return Projected(finite & inside & (t[:, 2] > near) & (opacity >= ALPHA_MIN), xy, cov, conic, t[:, 2], rgb, box, opacity)


def render(g: Gaussians, viewmat, K, width, height, degree, blur=0.3, near=0.01, background=(0, 0, 0), antialiased=False, band=2e-3):
    """One camera. Returns rgb [H,W,3], alpha [H,W], depth [H,W] and edge [H,W] bool: the pixels where a threshold
    (1/255, T_MIN, the order of two depths) lies within the relative distance `band`, so that float32 may decide otherwise."""
    p = project(g, viewmat, K, width, height, degree, blur, near, antialiased)
    y, x = np.mgrid[:height, :width] + 0.5
    T, rgb, depth = np.ones((height, width)), np.zeros((height, width, 3)), np.zeros((height, width))
    done, edge, last_z = np.zeros(T.shape, bool), np.zeros(T.shape, bool), np.full(T.shape, -np.inf)
    for i in np.argsort(p.depth, kind="stable"):
        if not p.visible[i]:
            continue
        dx, dy = x - p.xy[i, 0], y - p.xy[i, 1]
        raw = p.opacity[i] * np.exp(-0.5 * (p.conic[i, 0] * dx**2 + 2 * p.conic[i, 1] * dx * dy + p.conic[i, 2] * dy**2))
        alpha = np.minimum(ALPHA_MAX, raw)
        edge |= ~done & ((np.abs(raw / ALPHA_MIN - 1) < band) | (np.abs(raw / ALPHA_MAX - 1) < band))
        use = (alpha >= ALPHA_MIN) & ~done
        edge |= use & ((np.abs(T * (1 - alpha) / T_MIN - 1) < band) | (p.depth[i] - last_z < 1e-6 * p.depth[i]))
        done |= use & (T * (1 - alpha) <= T_MIN)
        weight = np.where(use & ~done, T * alpha, 0)
        rgb, depth, T = rgb + weight[..., None] * p.rgb[i], depth + weight * p.depth[i], T - weight
        last_z = np.where(use, p.depth[i], last_z)
    return rgb + T[..., None] * np.asarray(background), 1 - T, depth, edge


def loss(rgb, alpha, depth, target_u8, target_depth=None, mask=None, ssim_weight=0.2, depth_weight=0.1) -> dict:
    """The loss of spl_hyper over [C,H,W,..] images; without the regularisers."""
    keep = np.ones(alpha.shape, bool) if mask is None else mask != 0
    truth = target_u8 / 255.0
    l1 = np.abs(rgb - truth)[keep].mean() if keep.any() else 0.0
    s = np.mean([ssim(a * k[..., None], b * k[..., None]) for a, b, k in zip(rgb.astype(np.float64), truth, keep)])
    known = keep & (target_depth > 0) if target_depth is not None else np.zeros_like(keep)
    d = (np.abs(depth[known] / target_depth[known] - alpha[known])).mean() if known.any() else 0.0
    return dict(l1=l1, ssim=s, depth=d, loss=(1 - ssim_weight) * l1 + ssim_weight * (1 - s) + depth_weight * d)


def adam(parameter, gradient, m, v, step, visible, lr, beta1=0.9, beta2=0.999, eps=1e-15):
    """Kingma & Ba 2015 per Gaussian (axis 0): `step` [N] counts the updates of each; what is not visible stays. In place."""
    for i in np.flatnonzero(visible):
        step[i] += 1
        m[i] = beta1 * m[i] + (1 - beta1) * gradient[i]
        v[i] = beta2 * v[i] + (1 - beta2) * gradient[i]**2
        parameter[i] -= lr * (m[i] / (1 - beta1**step[i])) / (np.sqrt(v[i] / (1 - beta2**step[i])) + eps)


def adam_by_degree(parameter, gradient, m, v, step, visible, lr, beta1=0.9, beta2=0.999, eps=1e-15):
    """Adam on SH coefficients [N,K,3] with one second moment a degree, v [N,degree+1], of the mean square of its gradients, and first moments
    of degree 0 alone, m [N,3]."""
    degree_of = np.floor(np.sqrt(np.arange(gradient.shape[1]))).astype(int)
    for i in np.flatnonzero(visible):
        step[i] += 1
        m[i] = beta1 * m[i] + (1 - beta1) * gradient[i, 0]
        v[i] = beta2 * v[i] + (1 - beta2) * np.array([np.mean(gradient[i][degree_of == d]**2) for d in range(v.shape[1])])
        root = np.sqrt(v[i] / (1 - beta2**step[i])) + eps
        parameter[i] -= lr * np.vstack([m[i] / (1 - beta1**step[i]), gradient[i, 1:]]) / root[degree_of][:, None]


def decode_edge(code, extent) -> np.ndarray:
    """Position in px of a 16-bit box edge."""
    return np.asarray(code, np.float64) * extent / 65535


def encode_edge(position, extent, upper: bool) -> int:
    """The code nearest to `position`, clamped to the image, whose decoded edge is not inside the box."""
    codes = decode_edge(np.arange(65536), extent)
    position = min(max(position, 0), extent)
    return int(np.searchsorted(codes, position)) if upper else int(np.searchsorted(codes, position, "right")) - 1


def compact(visible) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """visible [P] bool in Gaussian-major pair order -> mask words [blocks*4] uint32, inclusive scan of the blocks' counts,
    and the pair in each output slot."""
    blocks = -(-len(visible) // MASK_BLOCK)
    bits = np.zeros(blocks * MASK_BLOCK, bool)
    bits[:len(visible)] = visible
    words = (bits.reshape(-1, 32) << np.arange(32, dtype=np.uint64)).sum(1).astype(np.uint32)
    return words, np.cumsum(bits.reshape(-1, MASK_BLOCK).sum(1)), np.flatnonzero(visible)


def tile_key(tile: int, depth: float) -> int:
    """64 bits that sort by tile, then by depth (> 0)."""
    return tile << 32 | int(np.float32(depth).view(np.uint32))


def tile_alpha(xy, conic, opacity, tx: int, ty: int, width: int, height: int) -> float:
    """The largest alpha over the rectangle that the tile's pixel centres span: the minimum of a convex quadratic over a
    box is at its centre, or on an edge at the clamped minimum of a parabola."""
    x0, y0 = tx * TILE_PX + 0.5, ty * TILE_PX + 0.5
    x1, y1 = min((tx + 1) * TILE_PX, width) - 0.5, min((ty + 1) * TILE_PX, height) - 0.5
    a, b, c = conic
    power = lambda x, y: 0.5 * (a * (x - xy[0])**2 + 2 * b * (x - xy[0]) * (y - xy[1]) + c * (y - xy[1])**2)
    if x0 <= xy[0] <= x1 and y0 <= xy[1] <= y1:
        return opacity
    best = [power(x, np.clip(xy[1] - b / c * (x - xy[0]), y0, y1)) for x in (x0, x1)]
    best += [power(np.clip(xy[0] - b / a * (y - xy[1]), x0, x1), y) for y in (y0, y1)]
    return opacity * np.exp(-min(best))


def relocated(opacity: float, scale: np.ndarray, copies: int, min_opacity: float) -> tuple[float, np.ndarray]:
    """Opacity and scale of each of `copies` Gaussians that replace one (Kheradmand et al. 2024, eq. 9)."""
    new = 1 - (1 - opacity)**(1 / copies)
    total, binomial = 0.0, [1.0]
    for i in range(1, copies + 1):
        total += sum(c * (-1)**k * new**(k + 1) / np.sqrt(k + 1) for k, c in enumerate(binomial))
        binomial = [a + b for a, b in zip([0.0, *binomial], [*binomial, 0.0])]
    return max(new, min_opacity), scale * opacity / total
