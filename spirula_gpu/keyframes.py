"""Which frames become keyframes, and which keyframe is trained next."""
from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Iterable, NamedTuple

import cv2
import numpy as np

from .align import exp_se3, log_se3
from .camera import Frame
from .config import GateConfig, TrainConfig
from .correct import Motions, Scale, mean_motion
from .exposure import corrected
from .native import Engine, View


SKEWED = 5e-4      # entries of R R^T - 1; a frame may have twice that
GATE_POSES = 2000  # keyframes that a new frame is compared with
NEAR, NEAR_FROM = (0.7, 1.0, 1.4, 2.0, 2.8, 4.0, 5.6, 8.0, 11.0, 16.0, 32.0, 64.0), 500   # keyframes: over so many (sigma) corrections of the poses may be alike; as the newest say
MOST_TARGETS = 64  # images at the exposure of the map that are kept; another one costs a look-up of each byte when its keyframe is chosen
JUDGED_STEPS, JUDGED_LEAST, JUDGED_EVERY = 8, 12, 32   # a keyframe is judged after so many steps, beside so many others; the limit is found again after so many choices
UNFIT_SIGMAS, UNFIT_FACTOR = 4.0, 1.8                   # unfit: a loss so many robust deviations (of logarithms) and so many times above the median
RARELY = 0.05                                           # what is unfit is trained as if its loss were this share of the median


class Gated(NamedTuple):
    """What the gate remembers."""
    poses: np.ndarray          # [G,4,4] float64 T_world_cam of the newest keyframes, at most GATE_POSES
    stamps: np.ndarray         # [G] int64 ns, of the same
    sharpness: list[float]     # of the newest frames that showed something new
    last_stamp_ns: int | None  # of the newest keyframe


def sharpness_of(rgb: np.ndarray) -> float:
    """Variance of the Laplacian of [H,W,3] uint8; whole numbers, so 16 bits hold it."""
    _, deviation = cv2.meanStdDev(cv2.Laplacian(cv2.cvtColor(rgb, cv2.COLOR_RGB2GRAY), cv2.CV_16S))
    return float(deviation[0, 0]) ** 2


class Gate:
    """Accepts a frame that shows something new and is sharp. The mapper's lock guards it."""

    def __init__(self):
        self.clear()

    def clear(self) -> None:
        self._poses, self._stamps = np.empty((0, 4, 4)), np.empty(0, np.int64)
        self._last_stamp_ns = None
        self._sharpness = deque(maxlen=20)

    def state(self) -> Gated:
        return Gated(self._poses, self._stamps, list(self._sharpness), self._last_stamp_ns)

    def resume(self, state: Gated) -> None:
        self.clear()
        self._poses, self._stamps, self._last_stamp_ns = state.poses, state.stamps, state.last_stamp_ns
        self._sharpness.extend(state.sharpness)

    def correct(self, motions: Motions) -> None:
        D, moved = motions.of(self._stamps)
        self._poses = np.where(moved[:, None, None], D @ self._poses, self._poses)

    def refuses(self, frame: Frame, config: GateConfig) -> str | None:
        """None: a keyframe; else the reason of the drop (`not_keyframe`, `blurred`). The pose decides first: only then is the image looked at."""
        if not self.is_new(frame.stamp_ns, frame.T_world_cam, config):
            return "not_keyframe"
        sharpness = sharpness_of(frame.rgb)
        self._sharpness.append(sharpness)
        if sharpness < config.min_sharpness * float(np.median(self._sharpness)):
            return "blurred"
        self._poses = np.concatenate([self._poses[1 - GATE_POSES:], frame.T_world_cam[None]])
        self._stamps = np.append(self._stamps[1 - GATE_POSES:], frame.stamp_ns)
        self._last_stamp_ns = frame.stamp_ns
        return None

    def is_new(self, stamp_ns: int, T_world_cam: np.ndarray, config: GateConfig) -> bool:
        """Whether a frame of that pose [4,4] shows something new, however sharp it is."""
        if self._last_stamp_ns is None or abs(stamp_ns - self._last_stamp_ns) >= config.max_interval_s * 1e9:
            return True
        moved = np.linalg.norm(self._poses[:, :3, 3] - T_world_cam[:3, 3], axis=1) >= config.min_translation_m
        traces = np.einsum("nij,ij->n", self._poses[:, :3, :3], T_world_cam[:3, :3])
        turned = np.degrees(np.arccos(np.clip((traces - 1) / 2, -1, 1))) >= config.min_rotation_deg
        return bool((moved | turned).all())


class Keyframe:
    """A frame that is trained on, with its view of the map and how well it fits."""

    def __init__(self, id: int, frame: Frame, blur_px2: float):
        self.id, self.frame, self.blur_px2 = id, frame, blur_px2
        self.T_given = frame and frame.T_world_cam   # [4,4], as the source of the poses said; `frame` has the one that is used
        self.log_gain = np.zeros(3)   # of its exposure over the map's, a channel
        self.targets: Targets | None = None   # where its target is kept; None: nowhere
        self.steps = 0   # that it was trained in
        self.loss = np.inf   # running mean; infinite until it was trained once
        self._correction = self._view = None   # made when asked for
        self._view_of = None   # (degree, unit) that it was made for

    @property
    def bytes(self) -> int:
        """Host memory of its images."""
        return sum(a.nbytes for a in (self.frame.rgb, self.frame.depth_m, self.frame.mask) if a is not None)

    def place(self, T_world_cam: np.ndarray) -> None:
        """Its camera is there: [4,4] float64. Motions must not make a given rotation that is only just one into none."""
        R = T_world_cam[:3, :3]
        if np.abs(R @ R.T - np.eye(3)).max() > SKEWED:
            u, _, v = np.linalg.svd(R)
            T_world_cam = T_world_cam.copy()
            T_world_cam[:3, :3] = u @ v
        self.frame, self._view, self._correction = replace(self.frame, T_world_cam=T_world_cam), None, None

    @property
    def moved(self) -> bool:
        """It was found elsewhere than it was said to be."""
        return not np.array_equal(self.frame.T_world_cam, self.T_given)

    @property
    def correction(self) -> np.ndarray:
        """[6]: where it was found over where it was said to be: translation in m and rotation vector, in the camera's own axes."""
        if self._correction is None:
            self._correction = log_se3(np.linalg.inv(self.T_given) @ self.frame.T_world_cam)
        return self._correction

    def correct(self, D: np.ndarray, M: np.ndarray | None, as_one: bool = False) -> None:
        """A corrected path moves the pose as given by D [4,4] and the one that is used by M, if visibly (not None). It is trained as often as a new one then, unless all move as one."""
        stays = not self.moved and M is not None and np.array_equal(D, M)
        if M is not None:
            self.place(M @ self.frame.T_world_cam)
            if not as_one:
                self.loss, self.steps = np.inf, 0
        self.T_given, self._correction = self.frame.T_world_cam if stays else D @ self.T_given, None

    def expose(self, log_gain: np.ndarray) -> None:
        """Its image was taken with exp(log_gain [3]) times the exposure of the map."""
        self.log_gain = log_gain
        if self.targets:
            self.targets.forget(self)

    @property
    def target(self) -> np.ndarray:
        """[H,W,3] uint8: its image at the exposure of the map."""
        return self.targets.of(self) if self.targets else corrected(self.frame.rgb, self.log_gain)

    def view(self, engine: Engine, sh_degree: int) -> View:
        if self._view is None or self._view_of != (sh_degree, engine.unit_m):
            self._view = engine.view(self.frame.camera, self.frame.T_cam_world, sh_degree, blur_px2=self.blur_px2)
            self._view_of = sh_degree, engine.unit_m
        return self._view

    def compared(self, engine: Engine, sh_degree: int, half: bool = False) -> tuple[View, np.ndarray, np.ndarray | None, np.ndarray | None]:
        """What a step renders and compares with: view, target [H,W,3], depth_m and mask [H,W] or None; half: all at half the size."""
        if not half:
            return self.view(engine, sh_degree), self.target, self.frame.depth_m, self.frame.mask
        small = replace(self.frame, rgb=self.target).resized(-(-self.frame.camera.width // 2), -(-self.frame.camera.height // 2))
        blur_px2 = self.blur_px2 if engine.antialiased else self.blur_px2 / 4  # without the filter: as wide as at full size
        return engine.view(small.camera, small.T_cam_world, sh_degree, blur_px2=blur_px2), small.rgb, small.depth_m, small.mask

    def trained(self, loss: float) -> None:
        self.steps += 1
        self.loss = loss if np.isinf(self.loss) else 0.7 * self.loss + 0.3 * loss


def nearness(away: np.ndarray, near: float) -> np.ndarray:
    """How much a keyframe counts that is so many keyframes away."""
    return np.exp(-((away / near) ** 2) / 2)


def correct(keyframes: Iterable[Keyframe], found: Motions, moves: Motions, as_one: bool = False) -> int:
    """What a corrected path has found moves those poses as given that it moves visibly, and the cameras by `moves`. Returns how many cameras."""
    stamps = np.array([k.frame.stamp_ns for k in keyframes], np.int64)
    (D, said), (M, moved) = found.of(stamps), moves.of(stamps)
    for keyframe, D_k, is_said, M_k, moves_k in zip(keyframes, D, said, M, moved):
        keyframe.correct(D_k if is_said else np.eye(4), M_k if moves_k else None, as_one)
    return int(moved.sum())


class Targets:
    """The images at the exposure of the map that were used last: few beside the images themselves, of which they are copies."""

    def __init__(self):
        self._images: dict[int, np.ndarray] = {}   # by the keyframe's id, what was used last at the end

    def of(self, keyframe: Keyframe) -> np.ndarray:
        image = self._images.pop(keyframe.id, None)
        self._images[keyframe.id] = image = corrected(keyframe.frame.rgb, keyframe.log_gain) if image is None else image
        if len(self._images) > MOST_TARGETS:
            del self._images[next(iter(self._images))]
        return image

    def forget(self, keyframe: Keyframe) -> None:
        self._images.pop(keyframe.id, None)


class Keyframes:
    """The keyframes and the choice of the next one: the newest often, else at random with weight = loss."""

    def __init__(self, seed: int):
        self._all: list[Keyframe] = []
        self.unfit = 0                    # keyframes that are trained rarely, see _highest_fit
        self._choices, self._limit = 0, np.inf
        self.near = max(NEAR)             # see learn_near
        self.bytes = 0   # host memory of the images, but for the few of `targets`
        self._targets = Targets()
        self._rng = np.random.default_rng(seed)

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self):
        return iter(self._all)

    @property
    def newest(self) -> Keyframe:
        return self._all[-1]

    def add(self, keyframe: Keyframe, config: TrainConfig) -> None:
        """Keeps within max_keyframes and keyframes_mb."""
        self._all.append(keyframe)
        self.bytes += keyframe.bytes
        keyframe.targets = self._targets
        while len(self._all) > 2 and (len(self._all) > config.max_keyframes or self.bytes > config.keyframes_mb << 20):
            gone = self._all.pop(self._most_redundant())
            self._targets.forget(gone)
            self.bytes, gone.targets = self.bytes - gone.bytes, None

    def _most_redundant(self) -> int:
        """The keyframe whose neighbours in time are nearest to each other; the newest one stays."""
        t = np.array([k.frame.T_world_cam[:3, 3] for k in self._all])
        return 1 + int(np.argmin(np.linalg.norm(t[2:] - t[:-2], axis=1)))

    def log_gain_at(self, stamps_ns) -> np.ndarray:
        """[...,3]: exposure at those times [...] over the map's, between those of the keyframes before and after."""
        stamps_ns = np.asarray(stamps_ns, np.int64)
        if not self._all:
            return np.zeros((*stamps_ns.shape, 3))
        known, at = self._seconds(stamps_ns)
        order, gains = np.argsort(known, kind="stable"), np.array([k.log_gain for k in self._all])
        return np.stack([np.interp(at, known[order], g) for g in gains[order].T], axis=-1)

    def _seconds(self, stamps_ns) -> tuple[np.ndarray, np.ndarray]:
        """Stamps of the keyframes, and those given, since the first keyframe's: ns since 1970 are more than float64 has digits for."""
        known = np.array([k.frame.stamp_ns for k in self._all], np.int64)
        return (known - known.min()) / 1e9, (np.asarray(stamps_ns, np.int64) - known.min()) / 1e9

    def placed(self, frame: Frame) -> Frame:
        """Where the map has a frame that is not a keyframe: its pose as given, moved as the keyframes about it were (`refine.pose`)."""
        if not any(k.moved for k in self._all):
            return frame
        known, at = self._seconds(frame.stamp_ns)
        order = np.argsort(known, kind="stable")
        place = np.interp(at, known[order], np.arange(len(order)))
        weight = nearness(np.arange(len(order)) - place, self.near)
        moved = weight @ np.array([self._all[i].correction for i in order]) / weight.sum()
        return replace(frame, T_world_cam=frame.T_world_cam @ exp_se3(moved))

    def settled(self, found: Motions, scale: Scale, fixed: bool = False) -> np.ndarray | None:
        """Where poses were aligned with the map (`refine.pose`), the map may have made a correction long ago; to move its parts again would tear it. G [4,4], the motion of all as one that
        takes the map to the corrected path, when that leaves the cameras nearer to their corrected poses than the motions found would leave them; else, and without alignment, None. fixed: the map is that of a file, which stays (G = 1)."""
        if not any(k.moved for k in self._all):
            return None
        if fixed:
            return np.eye(4)
        D, said = found.of(np.array([k.frame.stamp_ns for k in self._all], np.int64))
        T_given = np.stack([D_k @ k.T_given if moves else k.T_given for D_k, moves, k in zip(D, said, self._all)])
        T_used, px = np.stack([k.frame.T_world_cam for k in self._all]), np.repeat([scale.px_per_m, scale.px_per_rad], 3)
        G = mean_motion(T_used, T_given)
        goes = px * np.array([k.correction for k in self._all])
        stays = px * np.array([log_se3(np.linalg.inv(g) @ G @ u) for g, u in zip(T_given, T_used)])
        return G if (stays**2).sum() < (goes**2).sum() else None

    def learn_near(self, sigma_m: float, sigma_rad: float) -> None:
        """Over how many keyframes corrections are alike: neighbours of a keyframe, left out itself, predict its own best with that one of NEAR. A drift of the given poses, or a
        camera that sits otherwise than it was said, is followed closely; noise, different in each, is averaged over many."""
        newest = sorted(self._all[-NEAR_FROM:], key=lambda k: k.frame.stamp_ns)
        moved = np.array([k.correction for k in newest]) / np.repeat([sigma_m, sigma_rad], 3)
        if len(newest) < 4:
            return
        order, errors = np.arange(len(newest)), []
        for near in NEAR:
            weight = nearness(order[:, None] - order, near)
            np.fill_diagonal(weight, 0)
            errors.append(np.abs(moved - weight @ moved / weight.sum(1, keepdims=True)).sum())
        self.near = NEAR[int(np.argmin(errors))]

    def state(self) -> dict:
        """What the next choices depend on beside the keyframes, for JSON."""
        return dict(random=self._rng.bit_generator.state, choices=self._choices, limit=repr(self._limit), near=self.near)

    def resume(self, state: dict) -> None:
        self._rng.bit_generator.state, self._choices, self._limit, self.near = state["random"], int(state["choices"]), float(state["limit"]), float(state["near"])

    def choose(self, config: TrainConfig) -> Keyframe:
        if self._rng.random() < config.newest_probability and not self._unfit(self._all[-1]):
            return self._all[-1]
        loss = np.array([k.loss for k in self._all])
        known = loss[np.isfinite(loss)]
        loss[~np.isfinite(loss)] = 2 * known.max() if len(known) else 1.0  # a new one comes soon
        weight = loss + 1e-6
        if self._choices % JUDGED_EVERY == 0:
            self._limit = self._highest_fit(loss)
        self._choices += 1
        unfit = np.array([self._limit < np.inf and self._unfit(k) for k in self._all])
        self.unfit, weight[unfit] = int(unfit.sum()), RARELY * np.median(weight)
        return self._all[int(self._rng.choice(len(self._all), p=weight / weight.sum()))]

    def _unfit(self, keyframe: Keyframe) -> bool:
        return keyframe.steps >= JUDGED_STEPS and self._limit < keyframe.loss < np.inf

    def _highest_fit(self, loss: np.ndarray) -> float:
        """The loss [n] above which the map does not come to fit a keyframe, though it was trained on it and fits the others: a wrong pose, a covered or dazzled
        lens. By its own loss it would be trained most; so it is trained rarely, and taken back when its loss falls."""
        logs = np.log(np.maximum(loss[[k.steps >= JUDGED_STEPS for k in self._all]], 1e-6))
        if len(logs) < JUDGED_LEAST:
            return np.inf
        middle = np.median(logs)
        spread = 1.4826 * np.median(np.abs(logs - middle))
        return float(np.exp(middle + max(UNFIT_SIGMAS * spread, np.log(UNFIT_FACTOR))))

    def spread(self, n: int) -> list[Keyframe]:
        """n of them (or all), evenly over time."""
        at = np.unique(np.linspace(0, len(self._all) - 1, min(n, len(self._all))).round().astype(int)) if self._all else []
        return [self._all[i] for i in at]
