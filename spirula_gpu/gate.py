"""Which frames become keyframes: each camera has a gate of its own."""
from __future__ import annotations

from collections import defaultdict, deque
from typing import NamedTuple

import cv2
import numpy as np

from .camera import Frame
from .config import GateConfig
from .correct import Motions
from .track import Moments

GATE_POSES = 2000  # keyframes of its camera that a new frame is compared with


class Gated(NamedTuple):
    """What the gates of all cameras remember."""
    poses: np.ndarray          # [G,4,4] float64 T_world_cam of the newest keyframes, at most GATE_POSES of each camera
    moments: Moments           # [G] of the same
    sharpness: list[tuple[int, float]]   # (sensor, variance) of the newest frames that showed something new

    @property
    def last_stamp_ns(self) -> int | None:
        """Of the newest keyframe."""
        laps, stamps, _ = self.moments
        return int(stamps[laps == laps.max()].max()) if len(laps) else None


def sharpness_of(rgb: np.ndarray) -> float:
    """Variance of the Laplacian of [H,W,3] uint8; whole numbers, so 16 bits hold it."""
    _, deviation = cv2.meanStdDev(cv2.Laplacian(cv2.cvtColor(rgb, cv2.COLOR_RGB2GRAY), cv2.CV_16S))
    return float(deviation[0, 0]) ** 2


class CameraGate:
    """The gate of one camera."""

    def __init__(self):
        self.poses, self.moments = np.empty((0, 4, 4)), Moments.rows([])
        self.sharpness = deque(maxlen=20)

    def refuses(self, frame: Frame, config: GateConfig) -> str | None:
        if not self.is_new(frame.stamp_ns, frame.T_world_cam, frame.lap, config):
            return "not_keyframe"
        sharpness = sharpness_of(frame.rgb)
        self.sharpness.append(sharpness)
        if sharpness < config.min_sharpness * float(np.median(self.sharpness)):
            return "blurred"
        self.poses = np.concatenate([self.poses[1 - GATE_POSES:], frame.T_world_cam[None]])
        self.moments = Moments(*(np.append(x[1 - GATE_POSES:], value) for x, value in zip(self.moments, frame.moment)))
        return None

    def is_new(self, stamp_ns: int, T_world_cam: np.ndarray, lap: int, config: GateConfig) -> bool:
        if not len(self.poses) or self.moments.laps[-1] != lap or abs(stamp_ns - int(self.moments.stamps[-1])) >= config.max_interval_s * 1e9:
            return True
        moved = np.linalg.norm(self.poses[:, :3, 3] - T_world_cam[:3, 3], axis=1) >= config.min_translation_m
        traces = np.einsum("nij,ij->n", self.poses[:, :3, :3], T_world_cam[:3, :3])
        turned = np.degrees(np.arccos(np.clip((traces - 1) / 2, -1, 1))) >= config.min_rotation_deg
        return bool((moved | turned).all())


class Gate:
    """Accepts a frame that shows something new to its camera and is sharp for it. The mapper's lock guards it."""

    def __init__(self):
        self._cameras: dict[int, CameraGate] = defaultdict(CameraGate)

    def clear(self) -> None:
        self._cameras.clear()

    def state(self) -> Gated:
        cameras = [self._cameras[sensor] for sensor in sorted(self._cameras)] or [CameraGate()]
        return Gated(np.concatenate([c.poses for c in cameras]), Moments(*map(np.concatenate, zip(*(c.moments for c in cameras)))),
                     [(sensor, value) for sensor in sorted(self._cameras) for value in self._cameras[sensor].sharpness])

    def resume(self, state: Gated) -> None:
        self.clear()
        for sensor in {*state.moments.sensors.tolist(), *(sensor for sensor, _ in state.sharpness)}:
            camera, mine = self._cameras[sensor], state.moments.sensors == sensor
            camera.poses, camera.moments = state.poses[mine], state.moments.where(mine)
            camera.sharpness.extend(value for of, value in state.sharpness if of == sensor)

    def correct(self, motions: Motions) -> None:
        for camera in self._cameras.values():
            D, moved = motions.of(camera.moments)
            camera.poses = np.where(moved[:, None, None], D @ camera.poses, camera.poses)

    def refuses(self, frame: Frame, config: GateConfig) -> str | None:
        """None: a keyframe; else the reason of the drop (`not_keyframe`, `blurred`). The pose decides first: only then is the image looked at."""
        return self._cameras[frame.sensor].refuses(frame, config)

    def is_new(self, stamp_ns: int, T_world_cam: np.ndarray, sensor: int, lap: int, config: GateConfig) -> bool:
        """Whether a frame of that pose [4,4] shows something new to its camera, however sharp it is."""
        return self._cameras[sensor].is_new(stamp_ns, T_world_cam, lap, config)
