"""Depth for keyframes that come without it: which others see the same from elsewhere, when there are enough of them, a plane sweep
(spl_sweep), and what the depths of several keyframes agree on (spl_agree). Owned by the mapper's thread."""
from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import cv2
import numpy as np

from .bundle import adjusted
from .camera import Camera
from .correct import Motions
from .keyframes import Keyframe, Keyframes, correct
from .native import Engine, NativeError, SweepParams
from .trainer import refused

VIEWS, CHECKS = 4, 6  # neighbours that a keyframe is swept with; whose depth it is compared with
NEAREST = 64          # keyframes nearby that neighbours are chosen from
RECENT = 20           # newest keyframes that a first depth is looked for in
COARSE_PX = 160       # longest edge of the image in which the range of depth is found
MAX_PX = 800 * 600    # of the image that is swept; the depth of a larger one takes the nearest sample
STEP_PX = 1.0         # of disparity between planes, where it is largest
PLANES = (16, 160)
MAX_SHIFT = 0.35      # of the image's longest edge: the largest disparity that is searched
NEAR = 0.4            # .. or depths from this share of the median depth that is expected
MIN_SHIFT_PX = 2.0    # of disparity at the median depth, in the coarse image: less is no depth
MIN_SHARE = 0.1       # of the pixels must have a depth
MIN_NCC, MIN_MARGIN = 0.6, 0.03  # as in spl_sweep_params
READY = 1.5           # summed score of the neighbours, 0..1 each, with which a keyframe does not wait for more ..
ENOUGH = 0.5          # .. and with which it is swept once there will hardly be more:
PATIENCE = 12         # newer keyframes (of one camera) later
GIVE_UP = 40          # newer keyframes (of one camera) after which it gets no depth
KEPT = 64             # newest depths that others are compared with
PICTURES = 64         # newest gray images, two a keyframe
TOLERANCE = 0.02, 0.15  # share by which depths that agree differ at most: 3 times what they differ by here, within these
ANGLES = 4.0, 10.0, 8.0  # deg between the rays to a point: full score from .. to ..; falls off with the third


class Swept(NamedTuple):
    depth_m: np.ndarray     # [h,w] float32, 0 = unknown: before it was compared with others
    K: np.ndarray           # [3,3] of the image that was swept
    median_m: float
    T: dict[int, np.ndarray]  # T_view_ref [4,4] of the views by their keyframe's id, as the sweep had them


class MultiView:
    """Keyframes without depth come in with wait() and go out of step() with it."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._waiting: list[Keyframe] = []     # not swept yet
        self._unchecked: list[Keyframe] = []   # swept, but too few of those that see the same are
        self._swept: OrderedDict[int, tuple[Keyframe, Swept]] = OrderedDict()
        self._pictures: OrderedDict[tuple[int, float], Picture] = OrderedDict()   # by keyframe's id and size
        self._cameras = 1                      # that keyframes are of
        self._newest = self._kept = 0          # the newest keyframe; depths there have been
        self._idle: tuple | None = None        # (newest, kept, ended) with which nothing was due: it is not looked for again before one of them changes
        self._problem = ""                     # why the last sweep was refused
        self.given_up = 0                      # keyframes that get no depth
        self.shift_px: float | None = None     # disparity, in the coarse image, that the last attempt at a first depth found

    def wait(self, keyframe: Keyframe) -> None:
        self._waiting.append(keyframe)
        self._newest = keyframe.id

    def measured(self, keyframe: Keyframe) -> None:
        """It came with depth, which says how far the scene is, and what the depth of others has to agree with."""
        depth_m, mask, self._newest = keyframe.frame.depth_m, keyframe.frame.mask, keyframe.id
        depth_m = depth_m if mask is None else np.where(mask, depth_m, np.float32(0))
        some = depth_m[::4, ::4]
        if (some > 0).any():
            self._keep(keyframe, Swept(depth_m, keyframe.frame.camera.K, float(np.median(some[some > 0])), {}))

    @property
    def waiting(self) -> int:
        return len(self._waiting) + len(self._unchecked)

    @property
    def hint(self) -> str:
        """Why there is no depth yet, or for some keyframes none at all; empty: there is."""
        if not self.waiting and self.given_up:
            return (f"{self.given_up} keyframes got no depth from several views: too few of those that see the same stand to the side, the images do not say, or there was no memory"
                    + (f" ({self._problem})" if self._problem else ""))
        if self._problem or self._swept or not self._waiting:
            return self._problem
        seen = "there is one view yet" if self.shift_px is None else f"between the keyframes the image has moved by {self.shift_px:.1f} px of {COARSE_PX} beyond turning, or has no texture"
        return (f"{self.waiting} keyframes came without depth and wait for it: {seen}; {MIN_SHIFT_PX:g} px are needed: move the camera sideways, by some 3 % of the "
                "distance to the scene, check the poses, or give depth")

    def step(self, keyframes: Keyframes, ended: bool = False) -> list[tuple[Keyframe, np.ndarray]] | None:
        """At most one sweep; returns keyframes with depth_m [H,W] float32 along z, 0 = unknown, that several of them agree on. None: nothing is due.
        ended: there is no newer keyframe to wait for."""
        now = self._newest, self._kept, ended
        if now == self._idle:
            return None
        there, self._cameras = {id(k) for k in keyframes}, keyframes.cameras
        self._waiting, self._unchecked = ([k for k in known if id(k) in there] for known in (self._waiting, self._unchecked))
        if self._waiting and not self._swept and not self._first(list(keyframes)):
            self._idle = now
            return None
        swept = self._sweep_one(list(keyframes), ended)
        checked = self._check(ended)
        if swept or checked:
            return checked
        self._idle = now
        return None

    def correct(self, found: Motions, moves: Motions, keyframes: Keyframes) -> None:
        """A corrected path moves keyframes that are kept for their depth alone."""
        there = {id(k) for k in keyframes}
        correct([k for k, _ in self._swept.values() if id(k) not in there], found, moves)
        self._idle = None

    def state(self) -> dict:
        """What a checkpoint keeps, for JSON. The depths are not kept: those that come after it are compared among each other."""
        return dict(waiting=[k.id for k in self._waiting + self._unchecked], given_up=self.given_up)

    def resume(self, state: dict, keyframes: Keyframes) -> None:
        """Go on as the one whose state() this is."""
        waiting = set(state["waiting"])
        for keyframe in keyframes:
            if keyframe.frame.depth_m is not None:
                self.measured(keyframe)
            elif keyframe.id in waiting:
                self.wait(keyframe)
        self._newest, self.given_up = keyframes.newest.id, int(state["given_up"])

    # ---- when, and with whom -------------------------------------------------------------------------------------------
    def _first(self, keyframes: list[Keyframe]) -> bool:
        """The first depth of all, without any idea of the scene's size: the widest baselines at hand."""
        if len(keyframes) < 2:
            return False
        refs, recent = self._waiting[-RECENT * self._cameras:], keyframes[-RECENT * self._cameras:]
        for keyframe in (refs[-1], refs[len(refs) // 2], refs[0]):
            T = keyframe.frame.T_world_cam
            others = [k for k in recent if k is not keyframe and np.trace(k.frame.T_world_cam[:3, :3].T @ T[:3, :3]) > 1 + 2 * np.cos(np.radians(25))]
            others.sort(key=lambda k: -np.linalg.norm(k.frame.T_world_cam[:3, 3] - T[:3, 3]))
            swept, shift_px = self._coarse(keyframe, others[:VIEWS]) if others else (None, None)
            self.shift_px = shift_px or 0.0   # too small to be measured
            if not swept or shift_px < MIN_SHIFT_PX:
                continue
            views, score = self._neighbours(keyframe, [k for k in keyframes if k is not keyframe], swept.median_m, VIEWS)
            again = self._sweep(keyframe, views, swept.median_m) if score >= ENOUGH else None
            if again and abs(np.log(again.median_m / swept.median_m)) < np.log(1.3):  # the best neighbours for that depth say the same
                self._keep(keyframe, again)
                return True
        return False

    def _sweep_one(self, keyframes: list[Keyframe], ended: bool) -> bool:
        for keyframe in self._waiting:
            age = GIVE_UP if ended else self._age(keyframe)
            guess_m = self._guess(keyframe)
            views, score = self._neighbours(keyframe, [k for k in keyframes if k is not keyframe], guess_m, VIEWS)
            if score >= READY or (score >= ENOUGH and age >= PATIENCE):
                self._waiting.remove(keyframe)
                swept = self._sweep(keyframe, views, guess_m)
                if swept:
                    self._keep(keyframe, swept)
                    self._unchecked.append(keyframe)
                else:
                    self.given_up += 1
                return True
            if age >= GIVE_UP:
                self._waiting.remove(keyframe)
                self.given_up += 1
                return True
        return False

    def _age(self, keyframe: Keyframe) -> float:
        """Keyframes of a camera that have come since."""
        return (self._newest - keyframe.id) / self._cameras

    def _check(self, ended: bool) -> list[tuple[Keyframe, np.ndarray]]:
        out = []
        for keyframe in list(self._unchecked):
            age, (_, own) = GIVE_UP if ended else self._age(keyframe), self._swept[keyframe.id]
            others = [k for k, _ in self._swept.values() if k is not keyframe]
            views, _ = self._neighbours(keyframe, others, own.median_m, CHECKS, least=0.1)
            if len(views) < (3 if age < PATIENCE else 1) and age < GIVE_UP:
                continue
            self._unchecked.remove(keyframe)
            if not views:
                self.given_up += 1
                continue
            depth_m = self._unless_refused(self._agreed, keyframe, views)
            if depth_m is None:
                self.given_up += 1
            else:
                out.append((keyframe, depth_m))
        return out

    def _agreed(self, keyframe: Keyframe, views: list[Keyframe]) -> np.ndarray:
        """[H,W]: its depth where it is that of enough of the views."""
        own, known = self._swept[keyframe.id][1], [(*self._swept[k.id][1][:2], self._relative(k, keyframe)) for k in views]
        mean, count = self._engine.agree(own.depth_m, own.K, known, TOLERANCE[1])
        differ = np.abs(mean - own.depth_m)[count > 0] / own.depth_m[count > 0]
        tolerance = float(np.clip(3 * np.median(differ), *TOLERANCE)) if len(differ) else TOLERANCE[1]
        mean, count = self._engine.agree(own.depth_m, own.K, known, tolerance)
        mean[count < (2 if len(views) > 2 else 1)] = 0
        camera = keyframe.frame.camera
        return cv2.resize(mean, (camera.width, camera.height), interpolation=cv2.INTER_NEAREST)

    def _unless_refused(self, make, *args):
        """make(*args), or None where there is no memory for it; `hint` says so until there is."""
        try:
            self._problem, result = "", make(*args)
        except NativeError as e:
            if not refused(e):
                raise
            self._problem, result = str(e), None
        return result

    def _relative(self, view: Keyframe, ref: Keyframe) -> np.ndarray:
        """T_view_ref as one of their sweeps had it, else as the poses say."""
        ours, theirs = self._swept[ref.id][1].T, self._swept[view.id][1].T
        return ours[view.id] if view.id in ours else np.linalg.inv(theirs[ref.id]) if ref.id in theirs else relative(view, ref)

    def _keep(self, keyframe: Keyframe, swept: Swept) -> None:
        self._kept += 1
        self._swept[keyframe.id] = keyframe, swept
        self._swept.move_to_end(keyframe.id)
        while len(self._swept) > KEPT and next(iter(self._swept)) not in {k.id for k in self._unchecked}:
            self._swept.popitem(last=False)

    def _guess(self, keyframe: Keyframe) -> float:
        """The median depth of the keyframe with one that is nearest to this, looking the same way before others."""
        T = keyframe.frame.T_world_cam
        def far(item):
            k, swept = item
            other = k.frame.T_world_cam
            return np.linalg.norm(other[:3, 3] - T[:3, 3]) / swept.median_m + 2 * (1 - other[:3, 2] @ T[:3, 2])
        return min(self._swept.values(), key=far)[1].median_m

    def _neighbours(self, keyframe: Keyframe, others: list[Keyframe], depth_m: float, most: int, least: float = 0.1) -> tuple[list[Keyframe], float]:
        """Those that see a plane at this depth from elsewhere, at a good angle and from a similar distance, and the sum of their scores. One
        that stands near another that was taken already adds little."""
        at = np.array([k.frame.T_world_cam[:3, 3] for k in others]).reshape(-1, 3) - keyframe.frame.T_world_cam[:3, 3]
        near = np.argsort(np.linalg.norm(at, axis=1), kind="stable")[:NEAREST]
        others, at = [others[i] for i in near], at[near]
        score, taken, total = scores(keyframe, others, depth_m), [], 0.0
        while len(taken) < most and len(score) and score.max() >= least:
            best = int(score.argmax())
            taken.append(best)
            total += score[best]
            apart = np.linalg.norm(at - at[best], axis=1) / (0.3 * np.linalg.norm(at[best]) + 1e-12)
            score = score * (1 - 0.7 * np.exp(-apart**2))
            score[taken] = 0
        return [others[i] for i in taken], total

    # ---- one sweep ---------------------------------------------------------------------------------------------------------
    def _coarse(self, keyframe: Keyframe, views: list[Keyframe], T: list[np.ndarray] | None = None, guess_m: float = np.inf) -> tuple[Swept | None, float | None]:
        """All depths from infinity to a disparity of MAX_SHIFT or a share NEAR of the guessed depth, in a small image; and the disparity at
        the median depth, px, where one was found."""
        pictures, longest = [self._picture(k, COARSE_PX) for k in (keyframe, *views)], max(keyframe.frame.camera.width, keyframe.frame.camera.height)
        T = T or [relative(k, keyframe) for k in views]
        rate = max(shift_per_inv(pictures[0].camera, p.camera, t) for p, t in zip(pictures[1:], T))
        if not rate > 1e-9:
            return None, 0.0
        swept = self._at(pictures, views, T, 0.0, max(MAX_SHIFT * min(longest, COARSE_PX) / rate, 1 / (NEAR * guess_m)), rate)
        return swept, rate / swept.median_m if swept else None

    def _sweep(self, keyframe: Keyframe, views: list[Keyframe], guess_m: float) -> Swept | None:
        """Coarse for the range of depth, then at full size within it. None: the images do not say."""
        coarse, shift_px = self._coarse(keyframe, views, guess_m=guess_m)
        camera = keyframe.frame.camera
        longest = max(camera.width, camera.height)
        if coarse is None or shift_px < MIN_SHIFT_PX:
            return None
        ref, *others = pictures = [self._picture(k, COARSE_PX) for k in (keyframe, *views)]
        T = adjusted(ref.gray, ref.camera, coarse.depth_m, [(p.gray, p.camera, coarse.T[k.id]) for p, k in zip(others, views)], [p.shown for p in pictures])
        coarse, shift_px = self._coarse(keyframe, views, T, guess_m)
        if coarse is None or shift_px < MIN_SHIFT_PX:
            return None
        if longest <= COARSE_PX:
            return coarse
        inv = 1 / coarse.depth_m[coarse.depth_m > 0]
        low, high = np.percentile(inv, [1, 99])
        pictures = [self._picture(k, longest * min(1.0, (MAX_PX / (camera.width * camera.height))**0.5)) for k in (keyframe, *views)]
        T = [coarse.T[k.id] for k in views]
        rate = max(shift_per_inv(pictures[0].camera, p.camera, t) for p, t in zip(pictures[1:], T))
        return self._at(pictures, views, T, low / 1.25, high * 1.25, rate)

    def _at(self, pictures, views, T, min_inv: float, max_inv: float, rate: float) -> Swept | None:
        (gray, camera, shown), *others = pictures
        n = int(np.clip(np.ceil((max_inv - min_inv) * rate / STEP_PX) + 1, *PLANES))
        params = SweepParams(min_inv=min_inv, max_inv=max_inv, n_planes=n, min_ncc=MIN_NCC, min_margin=MIN_MARGIN)
        result = self._unless_refused(self._engine.sweep, gray, camera.K, [(p.gray, p.camera.K, t) for p, t in zip(others, T)], params)
        if result is None:
            return None
        depth_m, _ = result
        if shown is not None:
            depth_m[shown == 0] = 0
        known = depth_m[depth_m > 0]
        return Swept(depth_m, camera.K, float(np.median(known)), {k.id: t for k, t in zip(views, T)}) if len(known) >= MIN_SHARE * (depth_m.size if shown is None else max(shown.sum(), 1)) else None

    def _picture(self, keyframe: Keyframe, longest: float) -> Picture:
        """As picture(), which a keyframe and each of its neighbours need several times."""
        key = keyframe.id, longest
        if key not in self._pictures:
            self._pictures[key] = picture(keyframe, longest)
        self._pictures.move_to_end(key)
        while len(self._pictures) > PICTURES:
            self._pictures.popitem(last=False)
        return self._pictures[key]


class Picture(NamedTuple):
    gray: np.ndarray           # [h,w] uint8
    camera: Camera
    shown: np.ndarray | None   # [h,w] uint8, 1 = of the scene; None: all of it


def picture(keyframe: Keyframe, longest: float) -> Picture:
    """Its image, no longer than this. What its mask hides stays in it: where few views agree the better half of them decides, and paint of one gray has
    edges that correlate where no surface is (in the kitchen with a mover 22.8 and 23.1 dB, without 23.6, with no use of masks here 23.4)."""
    camera, mask = keyframe.frame.camera, keyframe.frame.mask
    gray, scale = cv2.cvtColor(keyframe.frame.rgb, cv2.COLOR_RGB2GRAY), longest / max(camera.width, camera.height)
    shown = None if mask is None or mask.all() else np.where(mask, np.uint8(255), np.uint8(0))
    if scale < 1:
        size = max(2, round(camera.width * scale)), max(2, round(camera.height * scale))
        camera = camera.resized(*size)
        gray, shown = (x if x is None else cv2.resize(x, size, interpolation=cv2.INTER_AREA) for x in (gray, shown))
    return Picture(gray, camera, shown if shown is None else (shown == 255).astype(np.uint8))   # a pixel that mixes both is not shown


def relative(view: Keyframe, ref: Keyframe) -> np.ndarray:
    """T_view_ref [4,4] float64."""
    R, t = view.frame.T_world_cam[:3, :3], view.frame.T_world_cam[:3, 3]
    out = np.eye(4)
    out[:3, :3], out[:3, 3] = R.T @ ref.frame.T_world_cam[:3, :3], R.T @ (ref.frame.T_world_cam[:3, 3] - t)
    return out


def grid(camera: Camera) -> np.ndarray:
    """[12,3] rays of z = 1 through the image."""
    u, v = np.meshgrid((np.arange(4) + 0.5) / 4 * camera.width, (np.arange(3) + 0.5) / 3 * camera.height)
    return np.stack([(u.ravel() - camera.cx) / camera.fx, (v.ravel() - camera.cy) / camera.fy, np.ones(12)], 1)


def shift_per_inv(camera: Camera, view: Camera, T_view_ref: np.ndarray) -> float:
    """px m: how far pixels move in the view per step of inverse depth, at small ones; of pixels that it sees, the most."""
    p, t = grid(camera) @ T_view_ref[:3, :3].T, T_view_ref[:3, 3]
    z = np.maximum(p[:, 2], 1e-6)
    u, v = view.fx * p[:, 0] / z + view.cx, view.fy * p[:, 1] / z + view.cy
    rate = np.hypot(view.fx * (t[0] - p[:, 0] / z * t[2]), view.fy * (t[1] - p[:, 1] / z * t[2])) / z
    margin_x, margin_y = 0.5 * view.width, 0.5 * view.height
    seen = (p[:, 2] > 0) & (u > -margin_x) & (u < view.width + margin_x) & (v > -margin_y) & (v < view.height + margin_y)
    return float(rate[seen].max()) if seen.any() else 0.0


def scores(keyframe: Keyframe, others: list[Keyframe], depth_m: float) -> np.ndarray:
    """[n], 0..1: how well others see a plane at this depth for triangulation: the share of it in their image, the angle between the rays, the
    ratio of distances."""
    if not others:
        return np.empty(0)
    T = keyframe.frame.T_world_cam
    points = grid(keyframe.frame.camera) * depth_m @ T[:3, :3].T + T[:3, 3]
    poses = np.array([k.frame.T_world_cam for k in others])
    rays = points - poses[:, None, :3, 3]                        # [n,12,3]
    p = np.einsum("nij,nki->nkj", poses[:, :3, :3], rays)        # in their cameras
    c = np.array([(k.frame.camera.fx, k.frame.camera.fy, k.frame.camera.cx, k.frame.camera.cy, k.frame.camera.width, k.frame.camera.height) for k in others])[:, None]
    z = np.maximum(p[..., 2], 1e-9)
    u, v = c[..., 0] * p[..., 0] / z + c[..., 2], c[..., 1] * p[..., 1] / z + c[..., 3]
    seen = (p[..., 2] > 0) & (u >= 0) & (v >= 0) & (u < c[..., 4]) & (v < c[..., 5])
    own = points - T[:3, 3]
    cosine = np.einsum("nki,ki->nk", rays, own) / (np.linalg.norm(rays, axis=-1) * np.linalg.norm(own, axis=-1) + 1e-12)
    angle = np.degrees(np.arccos(np.clip(cosine, -1, 1)))
    good = np.minimum(1, angle / ANGLES[0]) * np.exp(-(np.maximum(angle - ANGLES[1], 0) / ANGLES[2])**2)
    similar = np.exp(-(np.log(z / depth_m) / np.log(1.6))**2)
    return (seen * good * similar).mean(1)
