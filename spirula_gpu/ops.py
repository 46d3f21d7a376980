"""`rasterize`: the renderer alone, as a differentiable torch function with the conventions of gsplat's `rasterization`."""
from __future__ import annotations

import threading
from collections import defaultdict
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .native import Engine, view_of

RENDER_MODES = ("RGB", "D", "ED", "RGB+D", "RGB+ED")
_idle: dict[tuple[str, int], list[Engine]] = defaultdict(list)  # engines that no call is using, by backend and device index
_lock = threading.Lock()


def rasterize(means: Tensor, quats: Tensor, scales: Tensor, opacities: Tensor, colors: Tensor, viewmats: Tensor, Ks: Tensor,
              width: int, height: int, *, sh_degree: int | None = None, near_plane: float = 0.01, eps2d: float = 0.3,
              backgrounds: Tensor | None = None, render_mode: str = "RGB", antialiased: bool = False, backend: str = "auto") -> tuple[Tensor, Tensor, dict]:
    """Renders N Gaussians into C pinhole cameras.

    means       [N,3] world, m                     quats  [N,4] wxyz, any norm > 0
    scales      [N,3] standard deviations, m       opacities [N] in [0,1]
    colors      [N,K,3] SH coefficients, K = 1, 4, 9 or 16, evaluated up to `sh_degree`; [N,3] RGB when sh_degree is None
    viewmats    [C,4,4] T_cam_world (x right, y down, z forward)
    Ks          [C,3,3] pixels; the centre of the first pixel is (0.5, 0.5)
    backgrounds [C,3] RGB behind the Gaussians, or None (black)
    near_plane  m, nearer Gaussians are not drawn  eps2d  px^2, added to every screen covariance
    antialiased opacities are multiplied by sqrt(det(cov) / det(cov + eps2d I)), gsplat's rasterize_mode "antialiased": a splat that
                eps2d makes larger gets fainter (2D mip filter; Yu et al. 2024, Mip-Splatting)

    Returns (render [C,H,W,D], alphas [C,H,W,1], meta). By render_mode, D is 3 (RGB), 1 (D: sum of weight * z; ED: expected
    depth, D / alpha) or 4 (RGB+D, RGB+ED). meta holds width, height, n_cameras and backend.
    Differentiable once, by everything but Ks. All tensors are float32 on one device: the CPU, or a GPU of the CUDA backend, which
    then works on torch's current stream and reads and writes Gaussians, images and gradients in place; backend `auto` then means
    cuda. With tensors on the CPU `auto` takes a GPU if it can and copies. Calls of several threads run at the same time.
    Import spirula_gpu before torch (or set OMP_WAIT_POLICY=passive) if other processes want the cores: torch brings the
    OpenMP that both then use, and by default its waiting threads spin.
    Raises ValueError on a wrong shape, dtype, device or mode, NativeError when the engine refuses."""
    _check(means, quats, scales, opacities, colors, viewmats, Ks, backgrounds, sh_degree, render_mode)
    if means.is_cuda and backend == "cpu":
        raise ValueError(f"backend 'cpu' with tensors on {means.device}: pass tensors on the CPU, or backend 'cuda' or 'auto'")
    meta = dict(width=width, height=height, n_cameras=len(viewmats))
    rgb, alphas, depth = _Rasterize.apply(means, quats, scales, opacities, colors, viewmats, Ks.detach(), sh_degree, near_plane, eps2d, antialiased, backend, meta)
    alphas, depth = alphas[..., None], depth[..., None]
    if backgrounds is not None:
        rgb = rgb + (1 - alphas) * backgrounds[:, None, None]
    if render_mode.endswith("ED"):
        depth = depth / alphas.clamp_min(1e-10)
    render = rgb if render_mode == "RGB" else torch.cat([rgb, depth], -1) if render_mode.startswith("RGB") else depth
    return render, alphas, meta


class _Rasterize(torch.autograd.Function):
    """spl_forward and spl_backward on activated parameters."""

    @staticmethod
    def forward(ctx, means, quats, scales, opacities, colors, viewmats, Ks, sh_degree, near_plane, eps2d, antialiased, backend, meta):
        ctx.save_for_backward(means, quats, scales, opacities, colors, viewmats, Ks)
        ctx.backend = backend
        ctx.settings = dict(width=meta["width"], height=meta["height"], sh_degree=sh_degree or 0, blur_px2=eps2d, near_m=near_plane, antialiased=antialiased)
        with _engine(backend, means.device) as engine:
            images = engine.forward(*_arrays(means, quats, scales, opacities, colors), view_of(*_arrays(viewmats, Ks), **ctx.settings))
            meta["backend"] = engine.backend
        return tuple(torch.as_tensor(image) for image in images)

    @staticmethod
    @once_differentiable
    def backward(ctx, v_rgb, v_alpha, v_depth):
        *gaussians, viewmats, Ks = _arrays(*ctx.saved_tensors)
        with _engine(ctx.backend, v_rgb.device) as engine:
            grads = engine.backward(*gaussians, view_of(viewmats, Ks, **ctx.settings), *_arrays(v_rgb, v_alpha, v_depth))
        names = ("means", "quats", "scales", "opacities", "sh", "viewmats")
        return tuple(torch.as_tensor(grads[name]) for name in names) + (None,) * 7


def _arrays(*tensors: Tensor):
    """Contiguous, and numpy arrays unless they are on a GPU."""
    contiguous = [tensor.detach().contiguous() for tensor in tensors]
    return [tensor if tensor.is_cuda else tensor.numpy() for tensor in contiguous]


@contextmanager
def _engine(backend: str, device: torch.device):
    """A context that no other call is using; its map stays empty. Lent, not kept for each thread: torch runs the backward pass
    of CUDA tensors in a thread of its own, which would then hold a second arena. On a GPU it works on torch's current stream."""
    key = ("cuda", device.index) if device.type == "cuda" else (backend, 0)
    with _lock:
        engine = _idle[key].pop() if _idle[key] else None
    if engine is None:
        engine = Engine(key[0], device=key[1], sh_degree=0, max_gaussians=1, threads=torch.get_num_threads())
    if device.type == "cuda":
        engine.set_stream(torch.cuda.current_stream(device).cuda_stream)
    try:
        yield engine
    finally:
        if device.type == "cuda":
            engine.set_stream(None)  # the caller's stream may end before the next call
        with _lock:
            _idle[key].append(engine)


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
    if means.device.type not in ("cpu", "cuda"):
        raise ValueError(f"means is on {means.device}, must be on the CPU or a CUDA device")
    shapes = dict(means=(means, (n, 3)), quats=(quats, (n, 4)), scales=(scales, (n, 3)), opacities=(opacities, (n,)), colors=(colors, color_shape),
                  viewmats=(viewmats, (cameras, 4, 4)), Ks=(Ks, (cameras, 3, 3)))
    if backgrounds is not None:
        shapes["backgrounds"] = (backgrounds, (cameras, 3))
    for name, (tensor, shape) in shapes.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, must be {shape}" + (" (RGB) when sh_degree is None" if name == "colors" else ""))
        if tensor.dtype != torch.float32 or tensor.device != means.device:
            raise ValueError(f"{name} is {tensor.dtype} on {tensor.device}, must be torch.float32 on {means.device}, where means is")
    if Ks.requires_grad:
        raise ValueError("Ks requires a gradient, but rasterize has none by Ks")
