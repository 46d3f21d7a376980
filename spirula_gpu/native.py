"""The only file with ctypes: finds the library, checks that it is ours, and owns a context. See csrc/spirula.h.

`Engine` is one context: used by one thread at a time. Arrays are numpy, C-contiguous float32 unless said otherwise.
"""
from __future__ import annotations

import ctypes as c
import functools
import os
import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .report import VramReport, VramRow

ABI_VERSION = 6
NEAR_M = 0.01   # nothing nearer to a camera is drawn
CATEGORIES = ("splat", "splat_x_img", "image", "appearance", "viewer", "other")
GAUSSIANS = 0  # Row.count of a row with an item per Gaussian
PHASES = ("project", "order", "bin", "raster", "loss", "raster_bwd", "project_bwd")
PRECISIONS = ("full", "compact")
STATUS = {-1: "argument", -2: "capacity", -3: "memory", -4: "device"}
PARAMETERS = ("mean", "quat", "log_scale", "logit_opacity", "sh")  # rows map.*


class NativeError(RuntimeError):
    """The engine refused; `kind` is one of argument, capacity, memory, device. The text says number, limit, remedy."""

    def __init__(self, kind: str, text: str):
        super().__init__(text)
        self.kind = kind


f32p, u8p, i64 = c.c_void_p, c.c_void_p, c.c_int64


def _struct(name: str, **fields):
    """A ctypes struct whose first member is its own size, as every struct of the ABI."""
    kind = type(name, (c.Structure,), {"_fields_": [("struct_size", i64), *fields.items()]})
    make = kind.__init__
    kind.__init__ = lambda self, **values: make(self, struct_size=c.sizeof(kind), **values)
    return kind


CreateParams = _struct("spl_create_params", max_gaussians=i64, budget_bytes=i64, sh_degree=c.c_int32, threads=c.c_int32,
                       device=c.c_int32, arena_alias=c.c_int32, arena_debug=c.c_int32, no_paging=c.c_int32,
                       precision=c.c_int32)
Memory = _struct("spl_memory", free_bytes=i64, total_bytes=i64, process_bytes=i64, pinned_bytes=i64)
Gaussians = _struct("spl_gaussians", flags=i64, n=i64, sh_degree=i64, means=f32p, quats=f32p, log_scales=f32p, logit_opacities=f32p, sh=f32p)
View = _struct("spl_view", n_cameras=c.c_int32, width=c.c_int32, height=c.c_int32, sh_degree=c.c_int32, blur_px2=c.c_float,
               near_m=c.c_float, background=c.c_float * 3, antialiased=c.c_int32, viewmats=f32p, Ks=f32p)
Image = _struct("spl_image", rgb=f32p, alpha=f32p, depth=f32p)
Grads = _struct("spl_gaussian_grads", means=f32p, quats=f32p, log_scales=f32p, logit_opacities=f32p, sh=f32p, viewmats=f32p)
Step = _struct("spl_step", deferred=c.c_int32, reserved=c.c_int32, n_pairs=i64, n_isects=i64, loss=c.c_double, l1=c.c_double, ssim=c.c_double,
               depth=c.c_double, ms=c.c_double * 8)
Target = _struct("spl_target", rgb=u8p, depth=f32p, mask=u8p)
Hyper = _struct("spl_hyper", **{k: c.c_float for k in (
    "lr_mean", "lr_quat", "lr_log_scale", "lr_logit_opacity", "lr_sh0", "lr_sh_rest", "lr_mean_final", "lr_decay_steps",
    "beta1", "beta2", "eps", "ssim_weight",
    "depth_weight", "opacity_reg", "scale_reg", "noise")}, seed=c.c_uint32)
InsertParams = _struct("spl_insert_params", alpha_below=c.c_float, depth_error=c.c_float, detail_gain=c.c_float, min_depth_m=c.c_float,
                       max_depth_m=c.c_float, hole_spacing_px=c.c_float, size=c.c_float, opacity=c.c_float, owner=c.c_int32, seed=c.c_uint64)


class Row(c.Structure):
    _fields_ = [("name", c.c_char * 32), ("category", c.c_int32), ("count", c.c_int32), ("first_phase", c.c_int32), ("last_phase", c.c_int32),
                ("saved", c.c_int32), ("aliased", c.c_int32), ("item_bytes", i64), ("used_bytes", i64), ("capacity_bytes", i64)]


Workload = _struct("spl_workload", gaussians=i64, pairs=i64, isects=i64, n_cameras=c.c_int32, width=c.c_int32, height=c.c_int32, train=c.c_int32)

Photo = _struct("spl_photo", width=c.c_int32, height=c.c_int32, gray=u8p, depth=f32p, K=f32p, T_photo_ref=f32p)
SweepParams = _struct("spl_sweep_params", min_inv=c.c_float, max_inv=c.c_float, n_planes=c.c_int32, min_ncc=c.c_float, min_margin=c.c_float, reserved=c.c_int32)

Alignment = _struct("spl_alignment", grey=f32p, depth=f32p, valid=u8p, points=f32p, n=i64, width=c.c_int32, height=c.c_int32, fx=c.c_float, fy=c.c_float, cx=c.c_float, cy=c.c_float,
                    iterations=c.c_int32, found=c.c_int32, sigma_m=c.c_double, sigma_rad=c.c_double, T_prior=c.c_double * 16, T=c.c_double * 16, scales=c.c_double * 2,
                    information=c.c_double * 36, cost=c.c_double, gain=c.c_double)

P = c.POINTER
SIGNATURES = {  # name: (result, arguments)
    "spl_abi_version": (c.c_int32, []), "spl_backend": (c.c_char_p, []), "spl_constant": (i64, [c.c_char_p]),
    "spl_create": (c.c_int, [P(CreateParams), P(c.c_void_p)]), "spl_destroy": (None, [c.c_void_p]), "spl_set_stream": (c.c_int, [c.c_void_p, c.c_void_p]),
    "spl_error": (c.c_char_p, [c.c_void_p]),
    "spl_report": (c.c_int, [c.c_void_p, P(Row), c.c_int32, P(c.c_int32)]),
    "spl_align": (c.c_int, [P(Alignment)]),
    "spl_forecast": (c.c_int, [P(CreateParams), P(Workload), P(Row), c.c_int32, P(c.c_int32)]),
    "spl_buffer": (c.c_int, [c.c_void_p, c.c_char_p, P(c.c_void_p), P(i64)]),
    "spl_memory_info": (c.c_int, [c.c_void_p, P(Memory)]), "spl_fail_allocation": (c.c_int, [c.c_void_p, i64]),
    "spl_map_size": (i64, [c.c_void_p]), "spl_map_append": (c.c_int, [c.c_void_p, P(Gaussians), c.c_int32]),
    "spl_map_read": (c.c_int, [c.c_void_p, c.c_char_p, i64, i64, c.c_void_p]),
    "spl_map_write": (c.c_int, [c.c_void_p, c.c_char_p, i64, i64, c.c_void_p]),
    "spl_map_make": (c.c_int, [c.c_void_p, i64]),
    "spl_map_read_raw": (c.c_int, [c.c_void_p, c.c_char_p, i64, i64, c.c_void_p]),
    "spl_map_write_raw": (c.c_int, [c.c_void_p, c.c_char_p, i64, i64, c.c_void_p]),
    "spl_map_keep": (c.c_int, [c.c_void_p, c.c_void_p, P(i64)]),
    "spl_map_relocate": (c.c_int, [c.c_void_p, i64, c.c_void_p, c.c_void_p, c.c_float]),
    "spl_map_sort": (c.c_int, [c.c_void_p, P(i64)]),
    "spl_render": (c.c_int, [c.c_void_p, P(View), P(Image)]), "spl_forward": (c.c_int, [c.c_void_p, P(Gaussians), P(View), P(Image)]),
    "spl_backward": (c.c_int, [c.c_void_p, P(Gaussians), P(View), P(Image), P(Grads)]),
    "spl_train_step": (c.c_int, [c.c_void_p, P(View), P(Target), P(Hyper), P(Step)]),
    "spl_last_step": (c.c_int, [c.c_void_p, P(Step)]),
    "spl_loss": (c.c_int, [c.c_void_p, P(View), P(Image), P(Target), P(Hyper), P(Image), P(Step)]),
    "spl_insert": (c.c_int, [c.c_void_p, P(View), P(Target), P(InsertParams), P(i64)]),
    "spl_sweep": (c.c_int, [c.c_void_p, P(Photo), i64, P(Photo), P(SweepParams), c.c_void_p, c.c_void_p]),
    "spl_agree": (c.c_int, [c.c_void_p, P(Photo), i64, P(Photo), c.c_float, c.c_void_p, c.c_void_p]),
}


def library_path(backend: str) -> Path:
    """Where lib spirula_<backend>.so is: $SPIRULA_LIBRARY_PATH, else lib/ beside this file."""
    name = f"libspirula_{backend}.so"
    folders = [Path(p) for p in os.environ.get("SPIRULA_LIBRARY_PATH", "").split(os.pathsep) if p] + [Path(__file__).parent / "lib"]
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    raise NativeError("device", f"{name} is not in {', '.join(map(str, folders))}; build it with `make lib`, `pip install .` or colcon" + (", on a machine with nvcc and a GPU or with CMAKE_ARGS=-DSPIRULA_CUDA=ON" if backend == "cuda" else ""))


os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that wait must not spin: the executor needs the cores too
_libraries: dict[str, c.CDLL] = {}


def installed(backend: str) -> str:
    """auto: cuda where its library is, else cpu; a device is not looked for."""
    if backend != "auto":
        return backend
    try:
        library_path("cuda")
    except NativeError:
        return "cpu"
    return "cuda"


def load(backend: str) -> c.CDLL:
    """The library of a backend, cpu or cuda, with argument types set and versions checked."""
    if backend not in ("cpu", "cuda"):
        raise NativeError("argument", f"backend '{backend}': must be auto, cpu or cuda")
    if backend not in _libraries:
        path = library_path(backend)
        try:
            lib = c.CDLL(str(path))
        except OSError as e:
            raise NativeError("device", f"{path} does not load: {e}") from e
        for name, (result, arguments) in SIGNATURES.items():
            if not hasattr(lib, name):
                raise NativeError("argument", f"{path} has no {name}: it is not of this package's version; build it again")
            getattr(lib, name).restype, getattr(lib, name).argtypes = result, arguments
        check_abi(lib, path)
        _libraries[backend] = lib
    return _libraries[backend]


def check_abi(lib: c.CDLL, path: Path) -> None:
    if lib.spl_abi_version() != ABI_VERSION:
        raise NativeError("argument", f"{path} has ABI {lib.spl_abi_version()}, this package needs {ABI_VERSION}; build it again")
    for kind in (CreateParams, Memory, Gaussians, View, Image, Grads, Step, Target, Hyper, InsertParams, Workload, Photo, SweepParams, Alignment, Row):
        theirs, ours = lib.spl_constant(f"sizeof {kind.__name__ if kind is not Row else 'spl_row'}".encode()), c.sizeof(kind)
        if theirs != ours:
            raise NativeError("argument", f"{path}: {kind.__name__} is {theirs} bytes there and {ours} here; build it again")


@functools.cache
def _warn_once(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=5)


class StepStats(NamedTuple):
    loss: float
    l1: float
    ssim: float
    depth: float
    n_pairs: int
    n_isects: int
    ms: dict[str, float]


def on_gpu(x) -> bool:
    return getattr(x, "is_cuda", False)


def array(x, shape: tuple, dtype=np.float32, name: str = "array", device: int | None = None) -> np.ndarray:
    """`x` as a C-contiguous array of this dtype and shape (-1: any), or NativeError. A torch tensor on the GPU `device` (None:
    no GPU will do) stays there: the CUDA backend reads it in place."""
    if on_gpu(x):
        if x.device.index != device:
            raise NativeError("argument", f"{name} is on {x.device}, but " + ("it is read by the CPU" if device is None else f"the engine is on cuda:{device}"))
        if str(x.dtype) != f"torch.{np.dtype(dtype).name}":
            raise NativeError("argument", f"{name} on the GPU is {x.dtype}, must be {np.dtype(dtype).name}")
        out = x.contiguous()
    else:
        out = np.ascontiguousarray(x, dtype)
    if out.ndim != len(shape) or any(want not in (-1, have) for want, have in zip(shape, out.shape)):
        raise NativeError("argument", f"{name} has shape {tuple(out.shape)}, must be {shape}")
    return out


def pointer(x) -> int | None:
    return None if x is None else x.data_ptr() if hasattr(x, "data_ptr") else x.ctypes.data


def empty(shape, like):
    """Uninitialised float32: numpy, or on the GPU where `like` is."""
    return like.new_empty(shape) if on_gpu(like) else np.empty(shape, np.float32)


def view(cameras, T_cam_world, sh_degree: int, *, blur_px2: float = 0.3, near_m: float = NEAR_M, background=(0, 0, 0), antialiased: bool = False) -> View:
    """A View of one Camera (or a list of equal size) at T_cam_world [4,4] (or [C,4,4]); keeps the arrays it points to alive.
    antialiased: the 2D mip filter, see spl_view."""
    cameras = list(cameras) if isinstance(cameras, (list, tuple)) else [cameras]
    Ks = array([camera.K for camera in cameras], (-1, 3, 3), name="Ks")
    return view_of(array(T_cam_world, np.shape(T_cam_world), name="T_cam_world").reshape(-1, 4, 4), Ks, cameras[0].width, cameras[0].height,
                   sh_degree, blur_px2=blur_px2, near_m=near_m, background=background, antialiased=antialiased)


def view_of(viewmats, Ks, width: int, height: int, sh_degree: int, *, blur_px2=0.3, near_m=NEAR_M, background=(0, 0, 0), antialiased=False) -> View:
    viewmats, Ks = (x.cpu() if on_gpu(x) else x for x in (viewmats, Ks))  # the engine reads them on the host
    viewmats = array(viewmats, (-1, 4, 4), name="viewmats")
    Ks = array(Ks, (len(viewmats), 3, 3), name="Ks")
    out = View(n_cameras=len(viewmats), width=width, height=height, sh_degree=sh_degree, blur_px2=blur_px2, near_m=near_m,
               background=(c.c_float * 3)(*background), antialiased=antialiased, viewmats=pointer(viewmats), Ks=pointer(Ks))
    out._alive = (viewmats, Ks)
    return out


def _precision(name: str) -> int:
    if name not in PRECISIONS:
        raise NativeError("argument", f"precision '{name}': must be {' or '.join(PRECISIONS)}")
    return PRECISIONS.index(name)


class Engine:
    """One context of the native library: the map, the arena, and everything that works on them. Gaussians, images and targets
    may be torch tensors on the GPU of a CUDA engine: they are read in place, and what comes back then is there too.

    backend auto: cuda where its library and a usable device are there, else cpu; `backend_reason` says why. A CUDA
    library that is there but cannot be used is also reported once as a RuntimeWarning.
    precision full: fp32, 368 bytes a Gaussian at degree 3; compact: 16-bit parameters (positions stay fp32), 8-bit SH beyond degree 0, 8- and 16-bit moments, 142 bytes.
    antialiased: view() makes views with the 2D mip filter."""

    def __init__(self, backend: str = "auto", *, sh_degree: int = 3, max_gaussians: int = 1_000_000, budget_bytes: int = 0, threads: int = 0,
                 device: int = 0, arena_alias: bool = True, arena_debug: bool = False, precision: str = "full", antialiased: bool = False):
        self.sh_degree, self.budget_bytes, self.precision = sh_degree, budget_bytes, precision
        params = CreateParams(max_gaussians=max_gaussians, budget_bytes=budget_bytes, sh_degree=sh_degree, threads=threads, device=device,
                              arena_alias=arena_alias, arena_debug=arena_debug, precision=_precision(precision))
        self.antialiased = antialiased  # how the map is drawn: every view of it is made so
        self.unit_m = 1.0   # what lengths in metres are times: poses alone may be of any unit (COLMAP); who measures it sets it
        self._ctx = c.c_void_p()
        if backend == "auto":
            self.backend_reason = self._open_auto(params)
        else:
            self._open(backend, params)
            self.backend_reason = "asked for"

    def _open(self, backend: str, params: CreateParams) -> None:
        self._lib = load(backend)
        self.backend = self._lib.spl_backend().decode()
        self._check(self._lib.spl_create(c.byref(params), c.byref(self._ctx)))
        self.device = params.device if self.backend == "cuda" else None  # index of the GPU whose tensors are read in place

    def _array(self, x, shape: tuple, dtype=np.float32, name: str = "array"):
        return array(x, shape, dtype, name, self.device)

    def _open_auto(self, params: CreateParams) -> str:
        try:
            library_path("cuda")
        except NativeError:
            self._open("cpu", params)
            return "there is no libspirula_cuda.so"
        try:
            self._open("cuda", params)
            return "a CUDA device is there"
        except NativeError as e:
            if e.kind != "device":  # a device that is there but refuses (arguments, memory) must not be hidden
                raise
            _warn_once(f"libspirula_cuda.so is there but not usable, the CPU is used instead: {e}")
            self._open("cpu", params)
            return str(e)

    def _check(self, status: int) -> None:
        if status:
            raise NativeError(STATUS.get(status, str(status)), self._lib.spl_error(self._ctx).decode())

    def set_stream(self, stream: int | None) -> None:
        """CUDA: all work goes to this stream handle, e.g. torch.cuda.current_stream().cuda_stream (0: the default stream); None: our own."""
        self._check(self._lib.spl_set_stream(self._ctx, None if stream is None else stream or 1))

    def close(self) -> None:
        if self._ctx:
            self._lib.spl_destroy(self._ctx)
            self._ctx = c.c_void_p()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __del__(self):
        if getattr(self, "_ctx", None):
            self.close()

    def constant(self, name: str) -> int:
        return self._lib.spl_constant(name.encode())

    # ---- the map ------------------------------------------------------------------------------------------------
    def __len__(self) -> int:
        """Gaussians in the map."""
        return self._lib.spl_map_size(self._ctx)

    def append(self, means, quats, log_scales, logit_opacities, sh, owner: int = 0) -> None:
        """Raw parameters: means [n,3] m, quats [n,4] wxyz, log_scales [n,3], logit_opacities [n], sh [n,K,3]."""
        g, _alive = self._gaussians(means, quats, log_scales, logit_opacities, sh, 0)
        self._check(self._lib.spl_map_append(self._ctx, c.byref(g), owner))

    def read(self, row: str, first: int = 0, count: int | None = None) -> np.ndarray:
        """A copy of a map row, e.g. `map.mean` [n,3], `map.sh` [n,K,3], `adam.v.sh` [n,sh_degree+1], `adam.steps` [n] int32; names as in layout.h.
        float32 in either precision. From Gaussian `first` on, at most `count`."""
        (n, *tail), dtype = self._row_shape(row)
        out = np.empty((n - first if count is None else min(count, n - first), *tail), dtype)
        self._check(self._lib.spl_map_read(self._ctx, row.encode(), first, len(out), out.ctypes.data))
        return out

    def write(self, row: str, values, first: int = 0) -> None:
        """Gaussians from `first` on. Compact precision rounds to the nearest code, and wants adam.v.* written before adam.m.*."""
        shape, dtype = self._row_shape(row)
        values = self._array(values, (-1, *shape[1:]), dtype, row)
        self._check(self._lib.spl_map_write(self._ctx, row.encode(), first, len(values), pointer(values)))

    def _row_shape(self, row: str):
        leaf = row.rsplit(".", 1)[-1]
        tail = {"mean": (3,), "quat": (4,), "log_scale": (3,), "sh": ((self.sh_degree + 1) ** 2, 3), "sh0": (3,)}.get(leaf, ())
        if row == "adam.v.sh":
            tail = (self.sh_degree + 1,)
        return (len(self), *tail), np.int32 if leaf in ("steps", "owner") else np.float32

    def saved_rows(self) -> dict[str, Row]:
        """{name: row} of what a checkpoint stores, as the table of buffers says."""
        return {r.name.decode(): r for r in self.rows() if r.saved}

    def make(self, n: int) -> None:
        """n Gaussians in an empty map, whose rows hold anything: write every saved row with write_raw before anything else."""
        self._check(self._lib.spl_map_make(self._ctx, n))

    def read_raw(self, row: str, first: int, out: np.ndarray) -> None:
        """The bytes of a saved row from `first` on, as they are stored, into out [bytes] uint8."""
        self._check(self._lib.spl_map_read_raw(self._ctx, row.encode(), first, out.nbytes, out.ctypes.data))

    def write_raw(self, row: str, first: int, values: np.ndarray) -> None:
        """values [bytes] uint8, as read_raw gave them."""
        self._check(self._lib.spl_map_write_raw(self._ctx, row.encode(), first, values.nbytes, values.ctypes.data))

    def keep(self, mask) -> int:
        """Keep the Gaussians where mask [n] is true, in order, with everything that belongs to them; returns how many."""
        mask, kept = self._array(mask, (len(self),), np.uint8, "mask"), i64()
        self._check(self._lib.spl_map_keep(self._ctx, pointer(mask), c.byref(kept)))
        return kept.value

    def relocate(self, dst, src, min_opacity: float = 0.005) -> None:
        """Move Gaussians dst [k] onto src [k] (indices): see spl_map_relocate."""
        dst = array(dst, (-1,), np.int64, "dst")
        src = array(src, dst.shape, np.int64, "src")
        self._check(self._lib.spl_map_relocate(self._ctx, len(dst), pointer(dst), pointer(src), min_opacity))

    def sort(self) -> int:
        """Bring the map into the order of the Morton curve through the means: what a view sees lies together then. Returns how many Gaussians
        are at another index now. Takes 16 bytes a Gaussian meanwhile; without them, NativeError of kind capacity or memory, and the map is as it was."""
        moved = i64()
        self._check(self._lib.spl_map_sort(self._ctx, c.byref(moved)))
        return moved.value

    # ---- rendering ------------------------------------------------------------------------------------------------
    def view(self, camera, T_cam_world, sh_degree: int, *, blur_px2: float) -> View:
        """As the function view(), in the map's unit of length and as the map is drawn."""
        return view(camera, T_cam_world, sh_degree, blur_px2=blur_px2, near_m=NEAR_M * self.unit_m, antialiased=self.antialiased)

    def render(self, v: View) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The map: rgb [C,H,W,3], alpha [C,H,W], depth [C,H,W] (sum of weight * z; divide by alpha)."""
        out, image = self._new_image(v)
        self._check(self._lib.spl_render(self._ctx, c.byref(v), c.byref(image)))
        return out

    def forward(self, means, quats, scales, opacities, sh, v: View, activated: bool = True):
        """The caller's Gaussians (activated: scales in m, opacities 0..1; sh [n,K,3] or RGB [n,3]): as render()."""
        g, _alive = self._gaussians(means, quats, scales, opacities, sh, activated)
        out, image = self._new_image(v, _alive[0])
        self._check(self._lib.spl_forward(self._ctx, c.byref(g), c.byref(v), c.byref(image)))
        return out

    def backward(self, means, quats, scales, opacities, sh, v: View, v_rgb, v_alpha, v_depth, activated: bool = True) -> dict[str, np.ndarray]:
        """Gradients of sum(v_rgb rgb + v_alpha alpha + v_depth depth) by each argument, where it is, and by `viewmats` [C,4,4], where means are."""
        g, (means, quats, scales, opacities, sh) = self._gaussians(means, quats, scales, opacities, sh, activated)
        size = (v.n_cameras, v.height, v.width)
        v_rgb, v_alpha, v_depth = (self._array(x, (*size, *tail), name=name) for x, tail, name in ((v_rgb, (3,), "v_rgb"), (v_alpha, (), "v_alpha"), (v_depth, (), "v_depth")))
        upstream = Image(rgb=pointer(v_rgb), alpha=pointer(v_alpha), depth=pointer(v_depth))
        out = {name: empty(x.shape, x) for name, x in zip(("means", "quats", "scales", "opacities", "sh"), (means, quats, scales, opacities, sh))}
        out["viewmats"] = empty((v.n_cameras, 4, 4), means)
        grads = Grads(means=pointer(out["means"]), quats=pointer(out["quats"]), log_scales=pointer(out["scales"]),
                      logit_opacities=pointer(out["opacities"]), sh=pointer(out["sh"]), viewmats=pointer(out["viewmats"]))
        self._check(self._lib.spl_backward(self._ctx, c.byref(g), c.byref(v), c.byref(upstream), c.byref(grads)))
        return out

    def _new_image(self, v: View, like=None):
        size = (v.n_cameras, v.height, v.width)
        rgb, alpha, depth = (empty(shape, like) for shape in ((*size, 3), size, size))
        return (rgb, alpha, depth), Image(rgb=pointer(rgb), alpha=pointer(alpha), depth=pointer(depth))

    def _gaussians(self, means, quats, scales, opacities, sh, activated):
        means = self._array(means, (-1, 3), name="means")
        n = len(means)
        quats, scales, opacities = (self._array(x, (n, *tail), name=name) for x, tail, name in ((quats, (4,), "quats"), (scales, (3,), "scales"), (opacities, (), "opacities")))
        sh = self._array(sh, (n, 3) if len(np.shape(sh)) == 2 else (n, -1, 3), name="sh")
        degree = -1 if sh.ndim == 2 else round(sh.shape[1] ** 0.5) - 1
        if sh.ndim == 3 and sh.shape[1] not in (1, 4, 9, 16):
            raise NativeError("argument", f"sh has {sh.shape[1]} coefficients: must be 1, 4, 9 or 16")
        arrays = (means, quats, scales, opacities, sh)
        return Gaussians(flags=1 if activated else 0, n=n, sh_degree=degree, means=pointer(means), quats=pointer(quats), log_scales=pointer(scales),
                         logit_opacities=pointer(opacities), sh=pointer(sh)), arrays

    # ---- training -------------------------------------------------------------------------------------------------
    def _target(self, v: View, rgb, depth_m, mask):
        size = (v.n_cameras, v.height, v.width)
        if not on_gpu(rgb) and np.asarray(rgb).dtype != np.uint8:
            raise NativeError("argument", f"the target's rgb is {np.asarray(rgb).dtype}, must be uint8 0..255")
        rgb = self._array(rgb, np.shape(rgb), np.uint8, "rgb").reshape(*size, 3)
        depth_m = None if depth_m is None else self._array(depth_m, np.shape(depth_m), name="depth_m").reshape(size)
        mask = None if mask is None else self._array(mask if on_gpu(mask) else np.asarray(mask) != 0, np.shape(mask), np.uint8, "mask").reshape(size)
        return Target(rgb=pointer(rgb), depth=pointer(depth_m), mask=pointer(mask)), (rgb, depth_m, mask)

    def train_step(self, v: View, rgb, hyper: Hyper, depth_m=None, mask=None, wait: bool = True) -> StepStats:
        """One step on rgb [C,H,W,3] uint8, depth_m [C,H,W] m (0 = unknown), mask [C,H,W] (0 = ignore).

        wait False: the step may still run when this returns, the GPU is not idle between steps, and the numbers are those of
        the training step before (n_pairs -1: there was none). GPU tensors must then stay as they are until the next call."""
        target, self._in_use = self._target(v, rgb, depth_m, mask)
        s = Step(deferred=not wait)
        self._check(self._lib.spl_train_step(self._ctx, c.byref(v), c.byref(target), c.byref(hyper), c.byref(s)))
        return _stats(s)

    def last_step(self) -> StepStats:
        """The newest training step, waited for (n_pairs -1: there was none)."""
        s = Step()
        self._check(self._lib.spl_last_step(self._ctx, c.byref(s)))
        return _stats(s)

    def loss(self, v: View, image, rgb, hyper: Hyper, depth_m=None, mask=None):
        """The loss of image = (rgb, alpha, depth) and its gradients: StepStats, (v_rgb, v_alpha, v_depth)."""
        size = (v.n_cameras, v.height, v.width)
        a = [self._array(x, (*size, 3) if i == 0 else size, name="image") for i, x in enumerate(image)]
        target, _alive = self._target(v, rgb, depth_m, mask)
        out, v_image = self._new_image(v)
        s, given = Step(), Image(rgb=pointer(a[0]), alpha=pointer(a[1]), depth=pointer(a[2]))
        self._check(self._lib.spl_loss(self._ctx, c.byref(v), c.byref(given), c.byref(target), c.byref(hyper), c.byref(v_image), c.byref(s)))
        return _stats(s), out

    def insert(self, v: View, rgb, depth_m, params: InsertParams, mask=None) -> int:
        """Add Gaussians where the map lacks something in this view; returns how many."""
        target, _alive = self._target(v, rgb, depth_m, mask)
        n = i64()
        self._check(self._lib.spl_insert(self._ctx, c.byref(v), c.byref(target), c.byref(params), c.byref(n)))
        return n.value

    # ---- depth from several images ----------------------------------------------------------------------------------
    def sweep(self, gray, K, views, params: SweepParams) -> tuple[np.ndarray, np.ndarray]:
        """Depth of the reference gray [H,W] uint8 with K [3,3] from `views`: (gray [h,w] uint8, K, T_view_ref [4,4]) each, sizes may differ. Planes
        from params.min_inv to max_inv, 1/m. Returns depth_m [H,W] float32 along z, 0 = unknown, and a confidence 0..1."""
        ref, photos, _alive = self._photos(gray, K, views, "gray", np.uint8)
        size = (ref.height, ref.width)
        depth_m, confidence = np.empty(size, np.float32), np.empty(size, np.float32)
        self._check(self._lib.spl_sweep(self._ctx, c.byref(ref), len(photos), photos, c.byref(params), pointer(depth_m), pointer(confidence)))
        return depth_m, confidence

    def agree(self, depth_m, K, views, tolerance: float) -> tuple[np.ndarray, np.ndarray]:
        """Where the reference's depth_m [H,W] float32 (0 = unknown) and those of `views`, (depth_m [h,w], K, T_view_ref) each, agree within
        `tolerance` (share of the depth) and 2 pixels: the mean depth [H,W], 0 where none agrees, and by how many views [H,W] uint8."""
        ref, photos, _alive = self._photos(depth_m, K, views, "depth", np.float32)
        mean, count = np.empty((ref.height, ref.width), np.float32), np.empty((ref.height, ref.width), np.uint8)
        self._check(self._lib.spl_agree(self._ctx, c.byref(ref), len(photos), photos, tolerance, pointer(mean), pointer(count)))
        return mean, count

    @staticmethod
    def _photos(image, K, views, row: str, dtype):
        """The reference, the views, and the arrays that they point to; `row`: gray or depth, what `image` is."""
        items, alive = [], []
        for image, K, T in ((image, K, np.eye(4)), *views):
            image, K, T = array(image, (-1, -1), dtype, row), array(K, (3, 3), name="K"), array(T, (4, 4), name="T_view_ref")
            alive.append((image, K, T))
            items.append(Photo(width=image.shape[1], height=image.shape[0], K=pointer(K), T_photo_ref=pointer(T), **{row: pointer(image)}))
        return items[0], (Photo * len(views))(*items[1:]), alive

    # ---- memory ---------------------------------------------------------------------------------------------------
    def rows(self) -> list[Row]:
        """The table of buffers as it is now; the last row is the arena (used_bytes: what it replaces)."""
        n = c.c_int32()
        rows = (Row * 128)()
        self._check(self._lib.spl_report(self._ctx, rows, 128, c.byref(n)))
        return list(rows[:n.value])

    def vram(self) -> VramReport:
        memory = Memory()
        self._check(self._lib.spl_memory_info(self._ctx, c.byref(memory)))
        return _vram_report(self.rows(), self.budget_bytes, memory)

    def fail_allocation(self, nth: int) -> None:
        """For tests: as if memory ran out at the nth time from now on that a buffer grows; 0: there is enough."""
        self._check(self._lib.spl_fail_allocation(self._ctx, nth))

    def buffer(self, name: str, dtype=np.uint8) -> np.ndarray:
        """For tests: a copy of any row as the last call left it."""
        ptr, size = c.c_void_p(), i64()
        self._check(self._lib.spl_buffer(self._ctx, name.encode(), c.byref(ptr), c.byref(size)))
        return np.frombuffer(c.string_at(ptr, size.value), dtype)


def _vram_report(rows: list[Row], budget_bytes: int, memory: Memory) -> VramReport:
    """Of all rows and, last, the arena."""
    *rows, arena = rows
    categories = {k: [0, 0] for k in CATEGORIES}
    for r in rows:
        categories[CATEGORIES[r.category]][0] += r.used_bytes
        categories[CATEGORIES[r.category]][1] += r.capacity_bytes
    categories["other"][1] += arena.capacity_bytes
    listed = [VramRow(r.name.decode(), CATEGORIES[r.category], r.used_bytes, r.capacity_bytes, bool(r.aliased)) for r in rows]
    listed.append(VramRow("arena", "other", arena.capacity_bytes, arena.capacity_bytes, False))
    return VramReport(tuple(listed), {k: tuple(v) for k, v in categories.items()}, sum(v[1] for v in categories.values()),
                      max(arena.used_bytes - arena.capacity_bytes, 0), budget_bytes, memory.process_bytes,
                      memory.total_bytes - memory.free_bytes, memory.total_bytes, memory.pinned_bytes)


def _stats(s: Step) -> StepStats:
    return StepStats(s.loss, s.l1, s.ssim, s.depth, s.n_pairs, s.n_isects, dict(zip(PHASES, s.ms)))


# ---- memory, before it is allocated -------------------------------------------------------------------------------------
def forecast(backend: str = "auto", *, gaussians: int, width: int, height: int, n_cameras: int = 1, pairs: int = 0, isects: int = 0, train: bool = True,
             sh_degree: int = 3, max_gaussians: int = 1_000_000, precision: str = "full", budget_bytes: int = 0, threads: int = 0, arena_alias: bool = True) -> VramReport:
    """What an Engine with these parameters holds, by row and category, once it has trained (train False: rendered) a map of so many Gaussians with
    views of n_cameras images of width x height pixels. Nothing is allocated and no device is opened; backend auto: cuda where its library is.

    pairs, isects: as in StepStats, of the largest view; 0: estimated as documented in docs/design.md, "Forecast". `process` and the figures of
    the device are 0. With a budget the report shows what the engine would do without headroom, if that is what it takes; a total above the
    budget means that it would refuse. Raises NativeError (argument) on what the engine does not take."""
    lib, n, rows = load(installed(backend)), c.c_int32(), (Row * 128)()
    params = CreateParams(max_gaussians=max(gaussians, max_gaussians), budget_bytes=budget_bytes, sh_degree=sh_degree, threads=threads, arena_alias=arena_alias,
                          precision=_precision(precision))
    work = Workload(gaussians=gaussians, pairs=pairs, isects=isects, n_cameras=n_cameras, width=width, height=height, train=train)
    status = lib.spl_forecast(c.byref(params), c.byref(work), rows, len(rows), c.byref(n))
    if status:
        raise NativeError(STATUS.get(status, str(status)), lib.spl_error(None).decode())
    return _vram_report(rows[:n.value], budget_bytes, Memory())


def align(*, grey, depth_m, valid, points, intrinsics, T, T_prior, sigma_m: float, sigma_rad: float, iterations: int, scales=(0.0, 0.0)) -> Alignment:
    """One level of align.align: grey [H,W] float32, depth_m the same or None, valid [H,W] uint8 or bool; points [n,4] float32; intrinsics fx, fy, cx, cy; T, T_prior [4,4].
    The result's `found`, T, scales, information, cost and gain are as spirula.h says. Raises NativeError (argument)."""
    lib, size = load("cpu"), np.shape(grey)   # on the host with every backend
    grey, points = array(grey, (-1, -1), np.float32, "grey"), array(points, (-1, 4), np.float32, "points")
    valid, depth_m = array(valid, size, np.uint8, "valid"), None if depth_m is None else array(depth_m, size, np.float32, "depth_m")
    a = Alignment(grey=pointer(grey), depth=pointer(depth_m), valid=pointer(valid), points=pointer(points), n=len(points), width=size[1], height=size[0],
                  iterations=iterations, sigma_m=sigma_m, sigma_rad=sigma_rad, scales=(c.c_double * 2)(*scales), **dict(zip(("fx", "fy", "cx", "cy"), intrinsics)))
    a.T[:], a.T_prior[:] = np.ravel(T).tolist(), np.ravel(T_prior).tolist()
    if status := lib.spl_align(c.byref(a)):
        raise NativeError(STATUS.get(status, str(status)), lib.spl_error(None).decode())
    return a


def least_budget(backend: str = "auto", **workload) -> int:
    """The smallest whole number of MiB into which one Gaussian fits. Keywords as in forecast()."""
    def fits(mib: int) -> bool:
        return forecast(backend, gaussians=1, budget_bytes=mib << 20, **workload).total <= mib << 20
    high = 1
    while not fits(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def largest_map(budget_bytes: int, backend: str = "auto", *, most: int = 200_000_000, **workload) -> int:
    """The most Gaussians, up to `most`, whose forecast stays within the budget, to 0.1 %; 0: not even an empty map does. Keywords as in forecast()."""
    def fits(n: int) -> bool:
        try:
            return forecast(backend, gaussians=n, budget_bytes=budget_bytes, **workload).total <= budget_bytes
        except NativeError as e:
            if e.kind != "capacity":  # more pairs than a call may have
                raise
            return False
    if not fits(0):
        return 0
    if fits(most):
        return most
    low, high = 0, most
    while high - low > max(low // 1000, 1):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
