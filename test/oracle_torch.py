"""A second, dense and differentiable formulation in float64 torch: gradients for the engine come from its autograd.
Written independently of oracle.py (all Gaussians x all pixels at once, transmittance as a product)."""
from __future__ import annotations

import torch
import torch.nn.functional as F

from oracle import sh_basis


class _Basis(torch.autograd.Function):
    """The oracle's SH basis with a numerical Jacobian: polynomials of degree 3, so central differences are exact to h^2."""

    @staticmethod
    def forward(ctx, d):
        ctx.save_for_backward(d)
        return torch.tensor(sh_basis(d.detach().numpy()))

    @staticmethod
    def backward(ctx, v):
        d, h = ctx.saved_tensors[0], 1e-5
        grads = []
        for axis in torch.eye(3, dtype=d.dtype) * h:
            slope = (sh_basis((d + axis).numpy()) - sh_basis((d - axis).numpy())) / (2 * h)
            grads.append((v * torch.tensor(slope)).sum(1))
        return torch.stack(grads, 1)


def rotations(q):
    w, x, y, z = F.normalize(q, dim=-1).unbind(-1)
    rows = [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y), 2 * (x * y + w * z), 1 - 2 * (x * x + z * z),
            2 * (y * z - w * x), 2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)]
    return torch.stack(rows, -1).reshape(-1, 3, 3)


def render_one(means, quats, scales, opacities, sh, viewmat, K, width, height, degree, blur, near, antialiased):
    R, shift = viewmat[:3, :3], viewmat[:3, 3]
    fx, fy, cx, cy = K[0, 0], K[1, 1], K[0, 2], K[1, 2]
    t = means @ R.T + shift
    x, y, z = t.unbind(1)
    u = (x / z).clamp(-float(cx / fx) - 0.15 * width / float(fx), float((width - cx) / fx) + 0.15 * width / float(fx))
    v = (y / z).clamp(-float(cy / fy) - 0.15 * height / float(fy), float((height - cy) / fy) + 0.15 * height / float(fy))
    zero = torch.zeros_like(z)
    J = torch.stack([fx / z, zero, -fx * u / z, zero, fy / z, -fy * v / z], 1).reshape(-1, 2, 3)
    M = J @ R @ rotations(quats) @ torch.diag_embed(scales)
    sharp = M @ M.transpose(1, 2)
    cov = sharp + blur * torch.eye(2, dtype=means.dtype)
    conic = torch.linalg.inv(cov)
    if antialiased:
        opacities = opacities * (torch.linalg.det(sharp).clamp_min(0) / torch.linalg.det(cov)).sqrt()
    if sh.ndim == 2:
        rgb = sh
    else:
        basis = _Basis.apply(F.normalize(means + torch.linalg.inv(R) @ shift, dim=1))[:, :(degree + 1)**2]
        rgb = (0.5 + torch.einsum("nk,nkc->nc", basis, sh[:, :(degree + 1)**2])).clamp_min(0)
    order = torch.argsort(z.detach(), stable=True)
    order = order[z.detach()[order] > near]
    ys, xs = torch.meshgrid(torch.arange(height) + 0.5, torch.arange(width) + 0.5, indexing="ij")
    pixels = torch.stack([xs, ys], -1).to(means.dtype)
    d = pixels - torch.stack([fx * x / z + cx, fy * y / z + cy], 1)[order, None, None]
    power = -0.5 * torch.einsum("nhwi,nij,nhwj->nhw", d, conic[order], d)
    alpha = (opacities[order, None, None] * power.exp()).clamp_max(0.999)
    alpha = torch.where(alpha >= 1 / 255, alpha, torch.zeros_like(alpha))
    T_after = torch.cumprod(1 - alpha, 0)
    alpha = torch.where(T_after.detach() > 1e-4, alpha, torch.zeros_like(alpha))
    T = torch.cumprod(torch.cat([torch.ones_like(alpha[:1]), 1 - alpha]), 0)
    weight = T[:-1] * alpha
    return torch.einsum("nhw,nc->hwc", weight, rgb[order]), 1 - T[-1], torch.einsum("nhw,n->hw", weight, z[order])


def render(means, quats, scales, opacities, sh, viewmats, Ks, width, height, degree, blur=0.3, near=0.01, background=(0, 0, 0), antialiased=False):
    """float64 tensors -> rgb [C,H,W,3], alpha [C,H,W], depth [C,H,W]."""
    images = [render_one(means, quats, scales, opacities, sh, V, K, width, height, degree, blur, near, antialiased) for V, K in zip(viewmats, Ks)]
    rgb, alpha, depth = (torch.stack(parts) for parts in zip(*images))
    return rgb + (1 - alpha)[..., None] * torch.tensor(background, dtype=rgb.dtype), alpha, depth


def ssim(a, b):
    """[C,H,W,3] -> mean, 11x11 window of sigma 1.5 with zero padding."""
    x = torch.arange(11, dtype=a.dtype) - 5
    g = torch.exp(-x**2 / 4.5)
    window = (g[:, None] * g[None] / g.sum()**2).expand(3, 1, 11, 11)
    blur = lambda i: F.conv2d(i.permute(0, 3, 1, 2), window, padding=5, groups=3)
    ma, mb = blur(a), blur(b)
    va, vb, c = blur(a * a) - ma**2, blur(b * b) - mb**2, blur(a * b) - ma * mb
    return ((2 * ma * mb + 1e-4) * (2 * c + 9e-4) / ((ma**2 + mb**2 + 1e-4) * (va + vb + 9e-4))).mean()


def loss(rgb, alpha, depth, target_u8, target_depth=None, mask=None, ssim_weight=0.2, depth_weight=0.1):
    """As oracle.loss, of tensors; -> scalar tensor."""
    truth = torch.as_tensor(target_u8).to(rgb.dtype) / 255
    keep = torch.ones_like(alpha) if mask is None else (torch.as_tensor(mask) != 0).to(rgb.dtype)
    out = (1 - ssim_weight) * ((rgb - truth).abs() * keep[..., None]).sum() / (3 * keep.sum().clamp_min(1))
    out = out + ssim_weight * (1 - ssim(rgb * keep[..., None], truth * keep[..., None]))
    if target_depth is not None:
        d = torch.as_tensor(target_depth).to(rgb.dtype)
        known = keep * (d > 0)
        safe = torch.where(d > 0, d, torch.ones_like(d))
        out = out + depth_weight * (known * (depth - alpha * d).abs() / safe).sum() / known.sum().clamp_min(1)
    return out
