"""Exposure and pose of a keyframe from the map: at its arrival, before Gaussians are made from it, and now and then when it is trained."""
from __future__ import annotations

import math
import time

import cv2
import numpy as np

from .align import ALPHA, Seen, align, log_se3
from .camera import Camera
from .config import Config
from .correct import move_gaussians
from .exposure import log_gain
from .keyframes import Keyframe, Keyframes
from .native import Engine

POSE_PIXELS, EXPOSURE_PIXELS = 320 * 240, 160 * 120   # images are compared at this size at most
MOST_SHARE = 0.05         # of the time goes into refinement while training, at most, where runs need not repeat
NEAR = 4.0, 16.0, 64.0    # keyframes: so far before and after one (sigma), given poses are off by the same, but for noise; what predicts best counts
KEPT = 0.8                # of each estimated gain. Where views share little with the others nothing holds their common gain: it drifts, unless it leaks away
CENTRE_STEP = 0.02        # by so much the exposure of the map changes at a time
CENTRE_FAR = math.log(4)  # a gain farther than this from the median does not count
AGAIN_SHARE = 20          # means over the keyframes are taken again when this part of them has come or changed
LEVEL_MOST = 500          # of the newest keyframes: those before them have found their places
MOST_SIGMAS = 5.0         # a pose farther from the given one is not believed


class Refinement:
    """Works on the mapper's thread; writes keyframes, and the map only to move Gaussians with the keyframes they came from."""

    def __init__(self, engine: Engine, config: Config):
        self._engine, self.config = engine, config
        self.timed = False                    # a worker trains: bounded by MOST_SHARE; else by interval_steps alone, so that runs repeat
        self.given = False                    # the map began with Gaussians of a file: its brightness and its place are what others are measured by
        self._ended_s, self._took_s = 0.0, 0.0   # of the newest refinement
        self._exposed = 0                     # gains found since centre() looked at them
        self.aligned = self.refused = 0       # poses
        self._depth_m, self._placed = 1.0, 0   # of the newest view, the median; poses found since level() looked at them

    def state(self) -> dict:
        """For JSON, to the last bit."""
        return dict(aligned=self.aligned, refused=self.refused, depth_m=self._depth_m, placed=self._placed, exposed=self._exposed, given=self.given)

    def resume(self, state: dict) -> None:
        """Go on as the refinement whose state() this is."""
        self._depth_m, self.given = float(state["depth_m"]), bool(state["given"])
        self.aligned, self.refused, self._placed, self._exposed = (int(state[name]) for name in ("aligned", "refused", "placed", "exposed"))

    def due(self) -> bool:
        """Whether there is time for one while training. What it took includes the wait for the step that ran."""
        return not self.timed or time.monotonic() - self._ended_s >= self._took_s * (1 / MOST_SHARE - 1)

    def apply(self, keyframe: Keyframe) -> None:
        """Align the keyframe with the map, then compare their colours."""
        r, begin = self.config.refine, time.monotonic()
        if not len(self._engine):
            return
        try:
            if r.pose:
                self._align(keyframe)
            if r.exposure:
                self._expose(keyframe)
        finally:
            self._ended_s = time.monotonic()
            self._took_s = self._ended_s - begin

    def _expose(self, keyframe: Keyframe) -> None:
        camera = _at_most(EXPOSURE_PIXELS, keyframe.frame.camera)
        rgb, alpha, _ = self._render(camera, keyframe)
        small = keyframe.frame.resized(camera.width, camera.height)
        if (gain := log_gain(small.rgb, rgb, alpha, small.mask)) is not None:
            keyframe.expose(gain if self.given else KEPT * gain)
            self._exposed += 1

    def _render(self, camera: Camera, k: Keyframe):
        """The blur is of the size that is trained: with that of the smaller image Gaussians would be wider, and the render brighter."""
        full = k.frame.camera
        blur_px2 = self.config.train.blur_px2 * (camera.width * camera.height) / (full.width * full.height)
        return [x[0] for x in self._engine.render(self._engine.view(camera, k.frame.T_cam_world, self._engine.sh_degree, blur_px2=blur_px2))]

    def _align(self, keyframe: Keyframe) -> bool:
        r, T_used, camera = self.config.refine, keyframe.frame.T_world_cam, _at_most(POSE_PIXELS, keyframe.frame.camera)
        rgb, alpha, depth = self._render(camera, keyframe)
        small = keyframe.frame.resized(camera.width, camera.height)
        valid = alpha > ALPHA
        depth = np.where(valid, depth / np.maximum(alpha, 1e-6), 0).astype(np.float32)
        if not valid.any():
            return False
        self._depth_m = float(np.median(depth[valid]))
        sigma_m, sigma_rad = r.pose_sigma * self._depth_m, math.radians(r.pose_sigma_deg)
        seen = Seen(_grey(rgb * 255), depth, valid)
        ours = Seen(_grey(small.rgb.astype(np.float32)), small.depth_m, np.ones(alpha.shape, bool) if small.mask is None else small.mask != 0)
        T_prior = np.linalg.inv(keyframe.T_given) @ T_used
        result = align(ours, seen, camera, T_prior, sigma_m, sigma_rad)
        if isinstance(result, str):
            self.refused += 1
            return False
        away = log_se3(result.T @ np.linalg.inv(T_prior))
        if not result.after < result.before or np.linalg.norm(away[:3]) > MOST_SIGMAS * sigma_m or np.linalg.norm(away[3:]) > MOST_SIGMAS * sigma_rad:
            self.refused += 1
            return False
        self.aligned, self._placed = self.aligned + 1, self._placed + 1
        keyframe.place(T_used @ np.linalg.inv(result.T))
        return True

    def centre(self, keyframes: Keyframes) -> None:
        """Gains are known up to a common factor, the brightness of the map: their mean is 1, without those that are far from the median, and the map follows by training.
        A map of a file keeps its brightness. (The median as the gauge cost 0.3 dB in each of three runs in the kitchen.)"""
        if not self.config.refine.exposure or self.given or self._exposed * AGAIN_SHARE < len(keyframes):
            return
        self._exposed = 0
        gains = np.array([k.log_gain for k in keyframes])
        middle = np.sort(gains, axis=0)[len(gains) // 2]   # one of them, so that some are left
        common = np.mean(gains, axis=0, where=np.abs(gains - middle) <= CENTRE_FAR)
        if np.abs(common).max() > CENTRE_STEP:
            for k in keyframes:
                k.expose(k.log_gain - common)

    def level(self, keyframes: Keyframes) -> float:
        """Keyframes and what they brought into the map are moved back to where they were said to be, in the mean over those that came shortly before and after; a map of a file stays.
        Returns how far what a keyframe sees has moved at most, in metres."""
        if not self.config.refine.pose or self.given or not self._placed or self._placed * AGAIN_SHARE < len(keyframes):
            return 0.0
        self._placed, begin_s, made = 0, time.monotonic(), keyframes.newest.id + 1
        moved = list(keyframes)[-LEVEL_MOST:]
        T_used, T_given = np.stack([k.frame.T_world_cam for k in moved]), np.stack([k.T_given for k in moved])
        G = mean_correction(T_used, T_given, nearness(T_used, T_given, self.config.refine.pose_sigma * self._depth_m, math.radians(self.config.refine.pose_sigma_deg)))
        for k, g in zip(moved, G):
            k.place(g @ k.frame.T_world_cam)
        ids, owners = np.array([k.id for k in moved]), np.arange(made)
        nearest = np.minimum(np.searchsorted(ids, owners), len(ids) - 1)   # Gaussians of a keyframe that has gone move with the next one
        begin = ids[0] if len(moved) < len(keyframes) else 0
        move_gaussians(self._engine, G[nearest], owners >= begin, forget=False)
        self._ended_s = time.monotonic()
        self._took_s += self._ended_s - begin_s   # of the same share of the time
        seen = T_used[:, :3, 3] + self._depth_m * T_used[:, :3, 2]
        return float(np.linalg.norm(np.einsum("nij,nj->ni", G[:, :3, :3], seen) + G[:, :3, 3] - seen, axis=1).max())


def nearness(T_used: np.ndarray, T_given: np.ndarray, sigma_m: float, sigma_rad: float) -> float:
    """That of NEAR by which the mean of its neighbours says best how far a keyframe [n,4,4] is from where it was said to be (leave-one-out):
    noise alone is averaged over many, a drift is followed."""
    away = np.column_stack([(T_given[:, :3, 3] - T_used[:, :3, 3]) / sigma_m, _turns(T_used, T_given) / sigma_rad])
    errors = []
    for near in NEAR:
        weight = _weights(len(away), near)
        np.fill_diagonal(weight, 1e-12)
        errors.append(np.abs(away - weight @ away / weight.sum(1, keepdims=True)).sum())
    return NEAR[int(np.argmin(errors))]


def _weights(n: int, near: float) -> np.ndarray:
    order = np.arange(n)
    return np.exp(-(((order[:, None] - order) / near) ** 2) / 2)


def _turns(T_used: np.ndarray, T_given: np.ndarray) -> np.ndarray:
    """[n,3] rad: rotation from the one to the other, in the world."""
    return np.array([cv2.Rodrigues(b @ a.T)[0][:, 0] for a, b in zip(T_used[:, :3, :3], T_given[:, :3, :3])])


def mean_correction(T_used: np.ndarray, T_given: np.ndarray, near: float) -> np.ndarray:
    """[n,4,4] G: G[i] @ T_used[i] is where i lies when those about it, by a Gaussian of sigma `near` over their order, lie where T_given [n,4,4] has them in the mean."""
    t, weight = T_used[:, :3, 3], _weights(len(T_used), near)
    weight /= weight.sum(1, keepdims=True)
    turn = weight @ _turns(T_used, T_given)
    G = np.tile(np.eye(4), (len(t), 1, 1))
    G[:, :3, :3] = [cv2.Rodrigues(v)[0] for v in turn]
    G[:, :3, 3] = weight @ T_given[:, :3, 3] - np.einsum("nij,nj->ni", G[:, :3, :3], weight @ t)
    return G


def _at_most(pixels: int, camera: Camera) -> Camera:
    n = math.ceil(math.sqrt(camera.width * camera.height / pixels))
    return camera.resized(max(camera.width // n, 1), max(camera.height // n, 1)) if n > 1 else camera


def _grey(rgb: np.ndarray) -> np.ndarray:
    return cv2.cvtColor(np.ascontiguousarray(rgb, np.float32), cv2.COLOR_RGB2GRAY)
