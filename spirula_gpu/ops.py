"""`rasterize`: the renderer alone, as a differentiable torch function with the conventions of gsplat's `rasterization`."""
from __future__ import annotations

import threading

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .native import Engine, view_of

RENDER_MODES = ("RGB", "D", "ED", "RGB+D", "RGB+ED")
_engines = threading.local()  # a context belongs to one thread


def rasterize(means: Tensor, quats: Tensor, scales: Tensor, opacities: Tensor, colors: Tensor, viewmats: Tensor, Ks: Tensor,
              width: int, height: int, *, sh_degree: int | None = None, near_plane: float = 0.01, eps2d: float = 0.3,
              backgrounds: Tensor | None = None, render_mode: str = "RGB", backend: str = "auto") -> tuple[Tensor, Tensor, dict]:
    """Renders N Gaussians into C pinhole cameras.

    means       [N,3] world, m                     quats  [N,4] wxyz, any norm > 0
    scales      [N,3] standard deviations, m       opacities [N] in [0,1]
    colors      [N,K,3] SH coefficients, K = 1, 4, 9 or 16, evaluated up to `sh_degree`; [N,3] RGB when sh_degree is None
    viewmats    [C,4,4] T_cam_world (x right, y down, z forward)
    Ks          [C,3,3] pixels; the centre of the first pixel is (0.5, 0.5)
    backgrounds [C,3] RGB behind the Gaussians, or None (black)
    near_plane  m, nearer Gaussians are not drawn  eps2d  px^2, added to every screen covariance

    Returns (render [C,H,W,D], alphas [C,H,W,1], meta). By render_mode, D is 3 (RGB), 1 (D: sum of weight * z; ED: expected
    depth, D / alpha) or 4 (RGB+D, RGB+ED). meta holds width, height, n_cameras and backend.
    Differentiable once, by everything but Ks. All tensors float32 on the CPU. The engine runs in the calling thread.
    Import spirula_gpu before torch (or set OMP_WAIT_POLICY=passive) if other processes want the cores: torch brings the
    OpenMP that both then use, and by default its waiting threads spin.
    Raises ValueError on a wrong shape, dtype or mode, NativeError when the engine refuses."""
    _check(means, quats, scales, opacities, colors, viewmats, Ks, backgrounds, sh_degree, render_mode)
    rgb, alphas, depth = _Rasterize.apply(means, quats, scales, opacities, colors, viewmats, Ks.detach(), width, height,
                                          sh_degree, near_plane, eps2d, backend)
    alphas, depth = alphas[..., None], depth[..., None]
    if backgrounds is not None:
        rgb = rgb + (1 - alphas) * backgrounds[:, None, None]
    if render_mode.endswith("ED"):
        depth = depth / alphas.clamp_min(1e-10)
    render = rgb if render_mode == "RGB" else torch.cat([rgb, depth], -1) if render_mode.startswith("RGB") else depth
    return render, alphas, dict(width=width, height=height, n_cameras=len(viewmats), backend=_engine(backend).backend)


class _Rasterize(torch.autograd.Function):
    """spl_forward and spl_backward on activated parameters."""

    @staticmethod
    def forward(ctx, means, quats, scales, opacities, colors, viewmats, Ks, width, height, sh_degree, near_plane, eps2d, backend):
        ctx.save_for_backward(means, quats, scales, opacities, colors, viewmats, Ks)
        ctx.backend, ctx.settings = backend, dict(width=width, height=height, sh_degree=sh_degree or 0, blur_px2=eps2d, near_m=near_plane)
        view = view_of(*_numpy(viewmats, Ks), **ctx.settings)
        images = _engine(backend).forward(*_numpy(means, quats, scales, opacities, colors), view)
        return tuple(torch.from_numpy(image) for image in images)

    @staticmethod
    @once_differentiable
    def backward(ctx, v_rgb, v_alpha, v_depth):
        *gaussians, viewmats, Ks = _numpy(*ctx.saved_tensors)
        grads = _engine(ctx.backend).backward(*gaussians, view_of(viewmats, Ks, **ctx.settings), *_numpy(v_rgb, v_alpha, v_depth))
        names = ("means", "quats", "scales", "opacities", "sh", "viewmats")
        return tuple(torch.from_numpy(grads[name]) for name in names) + (None,) * 7


def _numpy(*tensors: Tensor):
    return [tensor.detach().contiguous().numpy() for tensor in tensors]


def _engine(backend: str) -> Engine:
    """This thread's context; its map stays empty."""
    held = _engines.__dict__
    if backend not in held:
        held[backend] = Engine(backend, sh_degree=0, max_gaussians=1, threads=torch.get_num_threads())
    return held[backend]


def _check(means, quats, scales, opacities, colors, viewmats, Ks, backgrounds, sh_degree, render_mode) -> None:
    n, cameras = (means.shape[0] if means.ndim else 0), (viewmats.shape[0] if viewmats.ndim else 0)
    if render_mode not in RENDER_MODES:
        raise ValueError(f"render_mode '{render_mode}': must be one of {', '.join(RENDER_MODES)}")
    color_shape = (n, 3)
    if sh_degree is not None:
        coefficients = colors.shape[1] if colors.ndim == 3 else 0
        if coefficients not in (1, 4, 9, 16) or not 0 <= sh_degree or (sh_degree + 1)**2 > coefficients:
            raise ValueError(f"sh_degree {sh_degree} with colors {tuple(colors.shape)}: colors must be [{n},K,3] with K = 1, 4, 9 or 16 "
                             "and K >= (sh_degree+1)^2")
        color_shape = (n, coefficients, 3)
    shapes = dict(means=(means, (n, 3)), quats=(quats, (n, 4)), scales=(scales, (n, 3)), opacities=(opacities, (n,)), colors=(colors, color_shape),
                  viewmats=(viewmats, (cameras, 4, 4)), Ks=(Ks, (cameras, 3, 3)))
    if backgrounds is not None:
        shapes["backgrounds"] = (backgrounds, (cameras, 3))
    for name, (tensor, shape) in shapes.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, must be {shape}" + (" (RGB) when sh_degree is None" if name == "colors" else ""))
        if tensor.dtype != torch.float32 or tensor.device.type != "cpu":
            raise ValueError(f"{name} is {tensor.dtype} on {tensor.device}, must be torch.float32 on the CPU")
    if Ks.requires_grad:
        raise ValueError("Ks requires a gradient, but rasterize has none by Ks")
