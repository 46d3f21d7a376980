"""What leaves the map: rendered views, measurements of held-out frames, the mesh, files. Owned by the mapper's thread; it
reads the map and never writes it."""
from __future__ import annotations

from typing import Iterable, NamedTuple

import numpy as np

from .camera import Camera, Frame
from .config import Config
from .formats import format_of, write_map
from .keyframes import Keyframe
from .mesh import MeshError
from .metrics import psnr, ssim
from .native import PARAMETERS, Engine, view
from .report import MeshChunk
from .splats import BLOCK, Splats, most_visible

MESH_FRAMES = 300   # keyframes that a mesh file is made of, at most
FUSE_PER_UPDATE = 8  # keyframes fused per live update of the mesh


class HeldOut(NamedTuple):
    frame: Frame
    rgb: np.ndarray   # [H,W,3] uint8, rendered
    psnr: float       # dB
    ssim: float


class Output:
    def __init__(self, engine: Engine, config: Config):
        self._engine, self._config = engine, config
        self._measured: dict[int, tuple[float, float]] = {}   # stamp of a held-out frame -> (psnr, ssim)
        self._mesher, self._fused = None, set()
        self._chunks: dict[tuple[int, int, int], MeshChunk] = {}

    def render(self, camera: Camera, T_cam_world: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """rgb [H,W,3] uint8, depth_m [H,W] float32 (0 where alpha < 0.5), alpha [H,W] float32; T_cam_world [4,4]."""
        v = view(camera, T_cam_world, self._engine.sh_degree, blur_px2=self._config.train.blur_px2)
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
                block = self._engine.read(f"map.{name}", first, min(BLOCK, n - first))
                rows[name].append((block[:, :1] if name == "sh" else block)[here])
        return Splats(*(np.concatenate(blocks) for blocks in rows.values()))

    def measure(self, frame: Frame) -> HeldOut:
        rgb, _, _ = self.render(frame.camera, frame.T_cam_world)
        result = HeldOut(frame, rgb, psnr(frame.rgb, rgb), ssim(frame.rgb, rgb))
        self._measured[frame.stamp_ns] = (result.psnr, result.ssim)
        return result

    def forget(self, frame: Frame) -> None:
        self._measured.pop(frame.stamp_ns, None)

    def heldout_means(self) -> tuple[float, float]:
        """(psnr, ssim): means over the newest measurement of each held-out frame; NaN when there is none."""
        known = list(self._measured.values())
        return tuple(map(float, np.mean(known, axis=0))) if known else (float("nan"), float("nan"))

    def train_psnr(self, keyframes: Iterable[Keyframe]) -> float:
        known = [psnr(k.frame.rgb, self.render(k.frame.camera, k.frame.T_cam_world)[0]) for k in keyframes]
        return float(np.mean(known)) if known else float("nan")

    # ---- mesh -------------------------------------------------------------------------------------------------------
    def update_mesh(self, keyframes: Iterable[Keyframe]) -> None:
        """Fuse the rendered depth of some keyframes that were not fused yet."""
        self._mesher = self._mesher or self._new_mesher()
        for k in [k for k in reversed(list(keyframes)) if k.id not in self._fused][:FUSE_PER_UPDATE]:  # it follows the robot
            self._fuse(self._mesher, k)
            self._fused.add(k.id)
        self._chunks.update((chunk.key, chunk) for chunk in self._mesher.changed_chunks())

    def mesh(self) -> tuple[MeshChunk, ...]:
        """Every chunk of the live mesh; one that did not change is the same object as before, one that is gone is empty."""
        return tuple(self._chunks.values())

    def write_mesh(self, path: str, keyframes: Iterable[Keyframe]) -> None:
        """A fresh TSDF of the depth that the map has now."""
        mesher = self._new_mesher()
        for k in keyframes:
            self._fuse(mesher, k)
        mesher.write_ply(path)

    def _new_mesher(self):
        from .mesh import TsdfMesher
        return TsdfMesher(self._config.mesh)

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
        return write_map(path, Splats(*(self._engine.read(f"map.{name}") for name in PARAMETERS)))
