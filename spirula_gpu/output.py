"""What leaves the map: rendered views, measurements of held-out frames, the mesh, files. Owned by the mapper's thread; it
reads the map and never writes it."""
from __future__ import annotations

from dataclasses import replace
from typing import Callable, Iterable, NamedTuple, Sequence

import numpy as np

from .camera import Camera, Frame
from .config import Config, MeshConfig, replaced
from .correct import Scale
from .exposure import corrected
from .formats import format_of, write_map
from .keyframes import Keyframe, Keyframes
from .metrics import cc_psnr, psnr, ssim
from .native import PARAMETERS, Engine
from .report import MeshChunk
from .splats import BLOCK, Splats, most_visible

MESH_FRAMES = 300   # keyframes that a mesh file is made of, at most
SCALE_FRAMES, COARSE_PX = 8, 4  # keyframes, and every so many-th pixel of them, that say how far away things are
FUSE_PER_UPDATE = 8  # keyframes fused per live update of the mesh


Progress = Callable[[int, int], None]   # (done, of how many)


def nothing_told(done: int, of: int) -> None:
    """A Progress that nobody looks at."""


class HeldOut(NamedTuple):
    frame: Frame
    rgb: np.ndarray   # [H,W,3] uint8, rendered
    psnr: float       # dB; like ssim over what the frame's mask shows
    ssim: float
    cc_psnr: float    # dB, after an affine colour fit: without what is of the exposure

    @staticmethod
    def of(frame: Frame, render: np.ndarray, log_gain: np.ndarray) -> HeldOut:
        """render [H,W,3] uint8: the map as it is; log_gain [3]: of the frame's exposure over the map's, as its neighbours in time have it."""
        rgb = corrected(render, -log_gain)
        return HeldOut(frame, rgb, psnr(frame.rgb, rgb, frame.mask), ssim(frame.rgb, rgb, frame.mask), cc_psnr(render, frame.rgb, frame.mask))


class Output:
    def __init__(self, engine: Engine, config: Config):
        self._engine, self._config = engine, config
        self._measured: dict[tuple[int, int, int], tuple[float, float, float]] = {}   # moment of a held-out frame -> (psnr, ssim, cc_psnr)
        self._mesher, self._fused, self._moved_m = None, set(), 0.0
        self._chunks: dict[tuple[int, int, int], MeshChunk] = {}

    def render(self, camera: Camera, T_cam_world: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """rgb [H,W,3] uint8, depth_m [H,W] float32 (0 where alpha < 0.5), alpha [H,W] float32; T_cam_world [4,4]."""
        v = self._engine.view(camera, T_cam_world, self._engine.sh_degree, blur_px2=self._config.train.blur_px2)
        rgb, alpha, depth = (x[0] for x in self._engine.render(v))
        depth_m = np.where(alpha >= 0.5, depth / np.maximum(alpha, 1e-6), 0).astype(np.float32)
        return (np.clip(rgb, 0, 1) * 255 + 0.5).astype(np.uint8), depth_m, alpha

    def splats(self, most: int) -> Splats:
        """A copy of the `most` Gaussians that show most (opacity * area), in the map's order; of their SH only the constant [n,1,3]."""
        n, rows = len(self._engine), {name: [] for name in PARAMETERS}
        chosen = np.arange(n) if n <= most else most_visible(self._engine.read("map.log_scale"), self._engine.read("map.logit_opacity"), most)
        for first in range(0, n, BLOCK):
            here = chosen[np.searchsorted(chosen, first):np.searchsorted(chosen, first + BLOCK)] - first
            for name in PARAMETERS:
                block = self._engine.read(f"map.{name}", first, BLOCK)
                rows[name].append((block[:, :1] if name == "sh" else block)[here])
        return Splats(*(np.concatenate(blocks) for blocks in rows.values()), self._engine.antialiased)

    def measure(self, frame: Frame, log_gain: np.ndarray) -> HeldOut:
        """log_gain: as in HeldOut.of."""
        result = HeldOut.of(frame, self.render(frame.camera, frame.T_cam_world)[0], log_gain)
        self._measured[frame.moment] = (result.psnr, result.ssim, result.cc_psnr)
        return result

    def forget(self, frame: Frame) -> None:
        self._measured.pop(frame.moment, None)

    def heldout_means(self) -> tuple[float, float, float]:
        """(psnr, ssim, cc_psnr): means over the newest measurement of each held-out frame; NaN when there is none."""
        known = list(self._measured.values())
        return tuple(map(float, np.mean(known, axis=0))) if known else (float("nan"),) * 3

    def train_psnr(self, keyframes: Iterable[Keyframe]) -> float:
        known = [psnr(k.target, self.render(k.frame.camera, k.frame.T_cam_world)[0], k.frame.mask) for k in keyframes]
        return float(np.mean(known)) if known else float("nan")

    def image_scale(self, keyframes: Keyframes) -> Scale:
        """Of the images, for things at their median depth, as measured, else as rendered; 1 m away when nothing is known."""
        known = []
        for frame in (k.frame for k in keyframes.spread(SCALE_FRAMES)):
            c, depth_m = frame.camera, frame.depth_m
            if depth_m is None:
                _, depth_m, _ = self.render(c.resized(-(-c.width // COARSE_PX), -(-c.height // COARSE_PX)), frame.T_cam_world)
            else:
                depth_m = depth_m[::COARSE_PX, ::COARSE_PX]
            if (depth_m > 0).any():
                known.append((c.fx / np.median(depth_m[depth_m > 0]), c.fx))
        return Scale(*np.median(known or [(keyframes.newest.frame.camera.fx,) * 2], axis=0))

    # ---- mesh -------------------------------------------------------------------------------------------------------
    def update_mesh(self, keyframes: Iterable[Keyframe]) -> None:
        """Fuse the rendered depth of some keyframes that were not fused yet. Before the first Gaussian there is none, nor a unit of length."""
        if not len(self._engine):
            return
        self._mesher = self._mesher or self._new_mesher()
        for k in [k for k in reversed(list(keyframes)) if k.id not in self._fused][:FUSE_PER_UPDATE]:  # it follows the robot
            self._fuse(self._mesher, k)
            self._fused.add(k.id)
        self._chunks.update((chunk.key, chunk) for chunk in self._mesher.changed_chunks())

    def moved(self, by_m: float) -> None:
        """Parts of the map have moved by at most so much; from a voxel on, in all, the live mesh is fused again."""
        self._moved_m += by_m
        if self._moved_m > self._config.mesh.voxel_m:
            self.restart_mesh()

    def restart_mesh(self) -> None:
        """The map has moved: the live mesh is fused again; until then its chunks are gone."""
        self._fused.clear()
        self._moved_m = 0.0
        if self._mesher:
            self._mesher.clear()

    def mesh(self) -> tuple[MeshChunk, ...]:
        """Every chunk of the live mesh; one that did not change is the same object as before, one that is gone is empty."""
        return tuple(self._chunks.values())

    def write_mesh(self, path: str, keyframes: Sequence[Keyframe], voxel_m: float = 0.0, progress: Progress = nothing_told) -> tuple[int, int]:
        """A fresh TSDF of the depth that the map has now, voxel_m 0: as configured. progress(fused, of how many) may raise, which ends it: nothing is written.
        Returns (vertices, triangles). Raises ValueError: voxel_m is out of range."""
        mesher = self._new_mesher(replaced(self._config, {"mesh.voxel_m": voxel_m}).mesh if voxel_m else None)
        for i, k in enumerate(keyframes):
            progress(i, len(keyframes))
            self._fuse(mesher, k)
        progress(len(keyframes), len(keyframes))
        return mesher.write_ply(path)

    def _new_mesher(self, mesh: MeshConfig | None = None):
        from .mesh import TsdfMesher
        mesh, unit_m = mesh or self._config.mesh, self._engine.unit_m
        return TsdfMesher(replace(mesh, voxel_m=mesh.voxel_m * unit_m, max_depth_m=mesh.max_depth_m * unit_m, chunk_m=mesh.chunk_m * unit_m))

    def _fuse(self, mesher, k: Keyframe) -> None:
        rgb, depth_m, _ = self.render(k.frame.camera, k.frame.T_cam_world)
        mesher.integrate(depth_m, rgb, k.frame.camera, k.frame.T_world_cam)

    # ---- files ------------------------------------------------------------------------------------------------------
    def save_map(self, path: str) -> int:
        """In the format that the suffix says (formats.py); returns the number of Gaussians. Raises ValueError when there are none or the
        suffix is unknown: nothing is overwritten."""
        format_of(path)
        if not len(self._engine):
            raise ValueError(f"the map is empty; {path} was not touched")
        return write_map(path, whole_map(self._engine))


def whole_map(engine: Engine) -> Splats:
    """A copy of every Gaussian."""
    return Splats(*(engine.read(f"map.{name}") for name in PARAMETERS), engine.antialiased)
