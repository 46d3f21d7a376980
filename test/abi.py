"""The C ABI as its header declares it. Struct layouts are parsed from spirula.h, independently of native.py, so whatever
goes through here tests what a C caller sees."""
from __future__ import annotations

import ctypes
import re
from pathlib import Path

import numpy as np

from spirula_gpu.native import library_path

HEADER = Path(__file__).resolve().parents[1] / "spirula_gpu" / "csrc" / "spirula.h"
BACKEND = "cpu"  # the library that a Context loads; the fixture `backend` sets it
SCALARS = dict(int64_t=ctypes.c_int64, uint64_t=ctypes.c_uint64, int32_t=ctypes.c_int32, uint32_t=ctypes.c_uint32, float=ctypes.c_float,
               double=ctypes.c_double, char=ctypes.c_char)
ARGUMENT, CAPACITY, MEMORY, DEVICE = -1, -2, -3, -4


def _parse(text: str) -> dict[str, type]:
    text, structs = re.sub(r"/\*.*?\*/", "", text, flags=re.S), {}
    for body, name in re.findall(r"typedef struct \{(.*?)\} (spl_\w+);", text, re.S):
        fields = []
        for declaration in filter(str.strip, body.split(";")):
            kind, names = re.match(r"\s*(?:const )?(\w+)(.*)", declaration, re.S).groups()
            for field in names.split(","):
                star, label, length = re.match(r"\s*(\*?)\s*(\w+)(?:\[(\d+)\])?\s*$", field).groups()
                scalar = ctypes.c_void_p if star else SCALARS[kind]
                fields.append((label, scalar * int(length) if length else scalar))
        structs[name] = type(name, (ctypes.Structure,), dict(_fields_=fields))
    return structs


STRUCTS = _parse(HEADER.read_text())


def struct(name: str, **values):
    """A struct of the header with struct_size set; numpy arrays become pointers and stay alive with the struct."""
    out = STRUCTS[name]()
    if hasattr(out, "struct_size"):
        out.struct_size = ctypes.sizeof(out)
    out.keep = {}
    for label, value in values.items():
        if isinstance(value, np.ndarray):
            out.keep[label] = value = np.ascontiguousarray(value)
            value = value.ctypes.data
        elif isinstance(value, (tuple, list)):
            value = getattr(out, label).__class__(*value)
        setattr(out, label, value)
    return out


class AbiError(Exception):
    def __init__(self, status: int, text: str):
        super().__init__(text)
        self.status = status


class Context:
    """spl_ctx with numpy in and out."""

    def __init__(self, **params):
        self.backend = BACKEND
        self.library = ctypes.CDLL(str(library_path(BACKEND)))
        self.library.spl_error.restype = ctypes.c_char_p
        self.library.spl_map_size.restype = self.library.spl_constant.restype = ctypes.c_int64
        self.sh_degree = params.setdefault("sh_degree", 3)
        defaults = dict(max_gaussians=100_000, threads=2, arena_alias=1)
        self.ctx = ctypes.c_void_p()
        self._check(self.library.spl_create(ctypes.byref(struct("spl_create_params", **defaults | params)), ctypes.byref(self.ctx)))

    def __del__(self):
        self.library.spl_destroy(self.ctx)

    def _check(self, status: int) -> None:
        if status:
            raise AbiError(status, self.library.spl_error(self.ctx).decode())

    def call(self, name: str, *arguments) -> None:
        """spl_<name>(ctx, ...): structs by address, arrays as pointers; raises AbiError."""
        converted = []
        for a in arguments:
            if isinstance(a, np.ndarray):
                a = ctypes.c_void_p(a.ctypes.data)
            elif isinstance(a, (ctypes.Structure, ctypes._SimpleCData)):
                a = ctypes.byref(a)
            elif isinstance(a, str):
                a = a.encode()
            elif isinstance(a, int):
                a = ctypes.c_int64(a)
            elif isinstance(a, float):
                a = ctypes.c_float(a)
            converted.append(a)
        self._check(getattr(self.library, "spl_" + name)(self.ctx, *converted))

    def __len__(self) -> int:
        return self.library.spl_map_size(self.ctx)

    def constant(self, name: str) -> int:
        return self.library.spl_constant(name.encode())

    # ---- rendering
    def render(self, view) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        image, arrays = image_of(view)
        self.call("render", view, image)
        return arrays

    def forward(self, gaussians, view) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        image, arrays = image_of(view)
        self.call("forward", caller(gaussians), view, image)
        return arrays

    def backward(self, gaussians, view, v_rgb, v_alpha, v_depth) -> list[np.ndarray]:
        """Gradients of means, quats, scales, opacities, sh, viewmats."""
        shapes = [np.shape(a) for a in gaussians] + [(view.n_cameras, 4, 4)]
        out = [np.full(s, np.nan, np.float32) for s in shapes]
        grads = struct("spl_gaussian_grads", **dict(zip(("means", "quats", "log_scales", "logit_opacities", "sh", "viewmats"), out)))
        v = struct("spl_image", rgb=f32(v_rgb), alpha=f32(v_alpha), depth=f32(v_depth))
        self.call("backward", caller(gaussians), view, v, grads)
        return out

    # ---- the map
    def append(self, gaussians, owner=0) -> None:
        """Activated Gaussians, stored in raw parameters."""
        m, q, s, o, sh = gaussians
        full = np.zeros((len(m), (self.sh_degree + 1)**2, 3), np.float32)
        full[:, :sh.shape[1]] = sh
        self.call("map_append", caller((m, q, np.log(s), np.log(o / (1 - o)), full), activated=False), ctypes.c_int32(owner).value)

    def read(self, row: str, first=0, count=None) -> np.ndarray:
        width, kind = self.row_shape(row)
        count = len(self) - first if count is None else count
        out = np.empty((count, *width), kind)
        self.call("map_read", row, first, count, out)
        return out

    def write(self, row: str, values: np.ndarray, first=0) -> None:
        self.call("map_write", row, first, len(values), np.ascontiguousarray(values, self.row_shape(row)[1]))

    def row_shape(self, row: str):
        K = (self.sh_degree + 1)**2
        last = row.rsplit(".", 1)[1]
        if row == "adam.v.sh":  # one a degree
            return (self.sh_degree + 1,), np.float32
        return dict(mean=(3,), quat=(4,), log_scale=(3,), sh=(K, 3), sh0=(3,)).get(last, ()), np.int32 if last in ("owner", "steps") else np.float32

    def map_rows(self) -> dict[str, np.ndarray]:
        return {name: self.read(name) for name in self.report() if name.split(".")[0] in ("map", "adam", "stat") and name not in ("map.exponents", "map.sh_rest")}

    # ---- memory
    def report(self) -> dict[str, object]:
        rows, n = (STRUCTS["spl_row"] * 256)(), ctypes.c_int32()
        self._check(self.library.spl_report(self.ctx, rows, 256, ctypes.byref(n)))
        return {r.name.decode(): r for r in rows[:n.value]}

    def buffer(self, name: str, dtype) -> np.ndarray:
        """A copy of the row's bytes as they are now."""
        pointer, size = ctypes.c_void_p(), ctypes.c_int64()
        self._check(self.library.spl_buffer(self.ctx, name.encode(), ctypes.byref(pointer), ctypes.byref(size)))
        return np.frombuffer(ctypes.string_at(pointer, size.value), dtype)

    def isects(self, n_tiles: int) -> tuple[np.ndarray, np.ndarray]:
        """Of all intersections in their order: 64-bit keys tile << 32 | order-preserving depth bits, and pairs."""
        start = self.buffer("isect.tile_start", "i8")[:n_tiles + 1]
        pairs = self.buffer("isect.pair", "u4")
        pairs = (pairs[self.buffer("isect.slot", "u4")] if self.backend == "cpu" else pairs)[:start[-1]]
        depth = self.buffer("proj.screen", "f4").reshape(-1, 10)[pairs, 6].view("u4") ^ np.uint32(0x80000000)
        keys = np.repeat(np.arange(n_tiles, dtype=np.uint64), np.diff(start)) << np.uint64(32) | depth
        if self.backend == "cpu":
            np.testing.assert_array_equal(self.buffer("isect.key", "u8")[:start[-1]], keys)
        return keys, pairs

    # ---- training
    def loss(self, view, images, target, hyper):
        """-> (spl_step, v_rgb, v_alpha, v_depth)."""
        step, (v, arrays) = struct("spl_step"), image_of(view)
        image = struct("spl_image", **dict(zip(("rgb", "alpha", "depth"), map(f32, images))))
        self.call("loss", view, image, target, hyper, v, step)
        return step, *arrays

    def train_step(self, view, target, hyper, deferred=0):
        step = struct("spl_step", deferred=deferred)
        self.call("train_step", view, target, hyper, step)
        return step

    def insert(self, view, target, **params) -> int:
        defaults = dict(alpha_below=0.5, depth_error=0.05, detail_gain=0.0, min_depth_m=0.1, max_depth_m=20.0,
                        hole_spacing_px=1.0, size=0.7, opacity=0.5, owner=1, seed=1)
        n = ctypes.c_int64(-1)
        self.call("insert", view, target, struct("spl_insert_params", **defaults | params), n)
        return n.value


def f32(array) -> np.ndarray:
    return np.ascontiguousarray(array, np.float32)


def view_of(viewmats, Ks, width, height, sh_degree, blur=0.3, near=0.01, background=(0, 0, 0), antialiased=False):
    return struct("spl_view", n_cameras=len(viewmats), width=width, height=height, sh_degree=sh_degree, blur_px2=blur, near_m=near,
                  background=tuple(background), antialiased=int(antialiased), viewmats=f32(viewmats), Ks=f32(Ks))


def image_of(view):
    shape = view.n_cameras, view.height, view.width
    arrays = np.full((*shape, 3), np.nan, np.float32), np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)
    return struct("spl_image", **dict(zip(("rgb", "alpha", "depth"), arrays))), arrays


def caller(gaussians, activated=True):
    m, q, s, o, sh = map(f32, gaussians)
    degree = -1 if sh.ndim == 2 else round(sh.shape[1]**0.5) - 1
    return struct("spl_gaussians", flags=int(activated), n=len(m), sh_degree=degree, means=m, quats=q, log_scales=s, logit_opacities=o, sh=sh)


def target_of(rgb, depth=None, mask=None):
    values = dict(rgb=np.ascontiguousarray(rgb, np.uint8))
    values |= {} if depth is None else dict(depth=f32(depth))
    values |= {} if mask is None else dict(mask=np.ascontiguousarray(mask, np.uint8))
    return struct("spl_target", **values)


def hyper_of(**values):
    defaults = dict(lr_mean=4e-4, lr_quat=1e-3, lr_log_scale=5e-3, lr_logit_opacity=2.5e-2, lr_sh0=2.5e-3, lr_sh_rest=1.25e-4,
                    beta1=0.9, beta2=0.999, eps=1e-15, ssim_weight=0.2, depth_weight=0.1)
    return struct("spl_hyper", **defaults | values)
