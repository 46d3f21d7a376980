"""Exposure and pose of a keyframe from the map: at its arrival, before Gaussians are made from it, and now and then when it is trained."""
from __future__ import annotations

import math
import time

import cv2
import numpy as np

from . import bundle
from .align import ALPHA, Seen, align, log_se3
from .camera import Camera
from .config import Config
from .correct import mean_motion, move_gaussians
from .exposure import log_gain
from .keyframes import Keyframe, Keyframes
from .native import Engine

POSE_PIXELS, EXPOSURE_PIXELS, TRACK_PIXELS = 320 * 240, 160 * 120, 320 * 240   # images are compared at this size at most
MOST_SHARE = 0.05         # of the time goes into refinement while training, at most, where runs need not repeat
KEPT = 0.8                # of each estimated gain. Where views share little with the others nothing holds their common gain: it drifts, unless it leaks away
CENTRE_STEP = 0.02        # by so much the exposure of the map changes at a time
CENTRE_FAR = math.log(4)  # a gain farther than this from the median does not count
AGAIN_SHARE = 20          # means over the keyframes are taken again when this part of them has come or changed
LEVEL_STEP = 0.2          # the map goes back to where it was said to be when it is off by this share of the noise of a pose
MOST_SIGMAS = 5.0         # a pose farther from the given one is not believed
BACK = 8, 4, 2, 1         # keyframes before a new one that its tracks lead to; the first that shares enough with it counts
REMEMBERED = 24           # disagreements that the noise of the poses is the median of; when there are as many, every AGAIN_TRACKED-th keyframe is tracked
AGAIN_TRACKED = 8
NOISE_FACTOR, NOISE_LEAST = 4.0, 0.02   # noise of a pose over that of a few keyframes against each other, across the epipolar lines alone; least share of the noise that poses may have


class Refinement:
    """Works on the mapper's thread; writes keyframes, and the map only to move Gaussians with the keyframes they came from."""

    def __init__(self, engine: Engine, config: Config):
        self._engine, self.config = engine, config
        self.timed = False                    # a worker trains: bounded by MOST_SHARE; else by interval_steps alone, so that runs repeat
        self.given = False                    # the map began with Gaussians of a file: its brightness and its place are what others are measured by
        self._ended_s, self._took_s = 0.0, 0.0   # of the newest refinement
        self._exposed = 0                     # gains found since centre() looked at them
        self.aligned = self.refused = 0       # poses
        self._off_rad: list[float] = []       # by which tracks and given poses disagree, of the newest that were looked at
        self._arrived = 0
        self._depth_m, self._placed = 1.0, 0   # of the newest view, the median; poses found since level() looked at them

    def state(self) -> dict:
        """For JSON, to the last bit."""
        return dict(aligned=self.aligned, refused=self.refused, depth_m=self._depth_m, placed=self._placed, exposed=self._exposed, given=self.given,
                    off_rad=self._off_rad, arrived=self._arrived)

    def resume(self, state: dict) -> None:
        """Go on as the refinement whose state() this is."""
        self._depth_m, self.given, self._off_rad, self._arrived = float(state["depth_m"]), bool(state["given"]), list(map(float, state["off_rad"])), int(state["arrived"])
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
            seen = self._align(keyframe) if r.pose else None
            if r.exposure:
                self._expose(keyframe, seen)
        finally:
            self._ended_s = time.monotonic()
            self._took_s = self._ended_s - begin

    def _expose(self, keyframe: Keyframe, seen: tuple | None) -> None:
        """`seen`: rgb and alpha that alignment has rendered; that its pose was a little off does not matter to cells of 8x8 pixels."""
        camera = _at_most(EXPOSURE_PIXELS, keyframe.frame.camera)
        rgb, alpha = self._render(camera, keyframe)[:2] if seen is None else (cv2.resize(x, (camera.width, camera.height), interpolation=cv2.INTER_AREA) for x in seen)
        small = keyframe.frame.resized(camera.width, camera.height)
        if (gain := log_gain(small.rgb, rgb, alpha, small.mask)) is not None:
            keyframe.expose(gain if self.given else KEPT * gain)
            self._exposed += 1

    def _render(self, camera: Camera, k: Keyframe):
        """The blur is of the size that is trained: with that of the smaller image Gaussians would be wider, and the render brighter."""
        full = k.frame.camera
        blur_px2 = self.config.train.blur_px2 * (camera.width * camera.height) / (full.width * full.height)
        return [x[0] for x in self._engine.render(self._engine.view(camera, k.frame.T_cam_world, self._engine.sh_degree, blur_px2=blur_px2))]

    def _align(self, keyframe: Keyframe) -> tuple | None:
        """rgb and alpha of the map where the keyframe was; None: nothing was rendered."""
        r, T_used, camera = self.config.refine, keyframe.frame.T_world_cam, _at_most(POSE_PIXELS, keyframe.frame.camera)
        noise_rad = math.inf if self.given else self.noise_rad   # a map of a file may lie elsewhere than all of them say
        if noise_rad < NOISE_LEAST * math.radians(r.pose_sigma_deg):
            return None   # they are better than what a render could say of them
        rgb, alpha, depth = self._render(camera, keyframe)
        small = keyframe.frame.resized(camera.width, camera.height)
        valid = alpha > ALPHA
        depth = np.where(valid, depth / np.maximum(alpha, 1e-6), 0).astype(np.float32)
        if not valid.any():
            return rgb, alpha
        self._depth_m = float(np.median(depth[valid]))
        most = np.array([r.pose_sigma * self._depth_m, math.radians(r.pose_sigma_deg)])
        sigmas = np.clip(noise_rad * np.array([self._depth_m, 1.0]), NOISE_LEAST * most, most)   # a camera elsewhere by that much looks turned by as much, seen from the scene
        seen = Seen(_grey(rgb * 255), depth, valid)
        ours = Seen(_grey(small.rgb.astype(np.float32)), small.depth_m, np.ones(alpha.shape, bool) if small.mask is None else small.mask != 0)
        T_prior = np.linalg.inv(keyframe.T_given) @ T_used
        result = align(ours, seen, camera, T_prior, *sigmas)
        if isinstance(result, str):
            self.refused += 1
            return rgb, alpha
        away = log_se3(result.T @ np.linalg.inv(T_prior))
        if not result.after < result.before or (np.linalg.norm(away.reshape(2, 3), axis=1) > MOST_SIGMAS * most).any():
            self.refused += 1
            return rgb, alpha
        self.aligned, self._placed = self.aligned + 1, self._placed + 1
        keyframe.place(T_used @ np.linalg.inv(result.T))
        return rgb, alpha

    @property
    def noise_rad(self) -> float:
        """By how much the given poses are off, as tracks say: those of COLMAP or of a motion capture are right to a fraction of a pixel, and aligning them would only shake them."""
        return NOISE_FACTOR * float(np.median(self._off_rad)) if self._off_rad else 0.0

    def track(self, keyframe: Keyframe, keyframes: Keyframes) -> None:
        """Compare what a new keyframe sees with one before it: how far its pose as given is from where its image says."""
        if not self.config.refine.pose:
            return
        self._arrived += 1
        if self._arrived % AGAIN_TRACKED == 0 or (len(self._off_rad) < REMEMBERED and self._arrived <= 2 * REMEMBERED):
            self._compare(keyframe, keyframes.beside(keyframe.frame)[-max(BACK):])

    def track_again(self, keyframes: Keyframes) -> None:
        """For poses that came while they were not asked about."""
        known = list(keyframes)
        for i in range(max(len(known) - REMEMBERED, 0), len(known)):
            before = [k for k in known[:i] if k.frame.moment[::2] == known[i].frame.moment[::2]]   # of its lap and camera
            self._compare(known[i], before[-max(BACK):])

    def _compare(self, keyframe: Keyframe, before: list[Keyframe]) -> None:
        for back in BACK:
            if back <= len(before) and (off := disagreement(keyframe, before[-back])) is not None:
                self._off_rad = [*self._off_rad[1 - REMEMBERED:], off]
                return

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
        """Poses are known up to a common motion, the place of the map: in the mean, keyframes are where they were said to be. The map and all of them move as one, so no picture
        changes; a map of a file stays. Returns how far what a keyframe sees has moved at most, in metres."""
        if not self.config.refine.pose or self.given or not self._placed or self._placed * AGAIN_SHARE < len(keyframes):
            return 0.0
        self._placed, begin_s, r = 0, time.monotonic(), self.config.refine
        keyframes.learn_near(r.pose_sigma * self._depth_m, math.radians(r.pose_sigma_deg))
        T_used, T_given = (np.stack(poses) for poses in zip(*((k.frame.T_world_cam, k.T_given) for k in keyframes)))
        G = mean_motion(T_used, T_given)
        seen = T_used[:, :3, 3] + self._depth_m * T_used[:, :3, 2]
        moved_m = float(np.linalg.norm(seen @ G[:3, :3].T + G[:3, 3] - seen, axis=1).max())
        if moved_m < LEVEL_STEP * r.pose_sigma * self._depth_m:
            return 0.0
        for k in keyframes:
            k.place(G @ k.frame.T_world_cam)
        made = keyframes.newest.id + 1
        move_gaussians(self._engine, np.tile(G, (made, 1, 1)), np.ones(made, bool), forget=False)
        self._ended_s = time.monotonic()
        self._took_s += self._ended_s - begin_s   # of the same share of the time
        return moved_m


def disagreement(a: Keyframe, b: Keyframe) -> float | None:
    """rad, see bundle.disagreement: of the poses as given. None: they share too little."""
    frames, sizes = (a.frame, b.frame), [_at_most(TRACK_PIXELS, k.frame.camera) for k in (a, b)]
    if (sizes[0].width, sizes[0].height) != (sizes[1].width, sizes[1].height):
        return None
    gray, other = (cv2.resize(cv2.cvtColor(f.rgb, cv2.COLOR_RGB2GRAY), (c.width, c.height), interpolation=cv2.INTER_AREA) for f, c in zip(frames, sizes))
    shown = [None if f.mask is None else cv2.resize(f.mask, (c.width, c.height), interpolation=cv2.INTER_NEAREST) for f, c in zip(frames, sizes)]
    return bundle.disagreement((gray, sizes[0]), (other, sizes[1]), np.linalg.inv(b.T_given) @ a.T_given, shown)


def _at_most(pixels: int, camera: Camera) -> Camera:
    n = math.ceil(math.sqrt(camera.width * camera.height / pixels))
    return camera.resized(max(camera.width // n, 1), max(camera.height // n, 1)) if n > 1 else camera


def _grey(rgb: np.ndarray) -> np.ndarray:
    return cv2.cvtColor(np.ascontiguousarray(rgb, np.float32), cv2.COLOR_RGB2GRAY)
