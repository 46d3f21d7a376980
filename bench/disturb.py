"""What can go wrong with a recording, done to one on purpose: depth, poses, exposure, drift, a person who walks through.

Every function takes the frames of a whole recording in their order and returns them, the training frames disturbed and the
held-out ones as they were: these measure the truth. The same seed makes the same disturbance."""
from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np

from spirula_gpu.camera import Frame

PERSON_M = (0.5, 0.35, 1.7)    # width, depth, height of the mover
PATCH_M = 0.1                  # edge of the patches of its texture
NEARNESS = 0.75                # it walks at this share of the median depth in front of the camera ..
SMOOTH_S, SWAY_M, SWAY_S = 2.0, 0.8, 4.0  # .. on the camera's path smoothed over this time, swaying sideways by this much in this period


@dataclass(frozen=True)
class Disturbance:
    """One field per option, as its text; `parsed` says what is wrong with it. Empty: the recording as it is."""
    subset: str = ""       # first:last
    mover: bool = False
    mask: bool = False     # the mover's, as the mapper's mask
    exposure: str = ""     # ramp:FROM..TO
    depth: str = "sensor"  # sensor | none | lines:N
    poses: str = ""        # noise:METRES m,DEGREES deg
    closure: str = ""      # METRES m


def parsed(text: str, form: str, example: str, option: str) -> tuple[float, ...]:
    """The numbers in `text`, which must look like `form`: a pattern with a group each."""
    found = re.fullmatch(form.replace("#", r"(\d+(?:\.\d*)?|\.\d+)"), text.replace(" ", ""))
    if not found:
        raise ValueError(f"--{option} {text}: write it as {example}")
    return tuple(map(float, found.groups()))


def disturbed(frames: list[Frame], d: Disturbance, seed: int) -> list[Frame]:
    """All of them, images before poses: the mover is where the true cameras see it. Raises ValueError on a bad text."""
    if d.mask and not d.mover:
        raise ValueError("--mask is the mover's: it needs --mover")
    frames = frames_of(frames, d.subset) if d.subset else frames
    frames = with_mover(frames, seed, d.mask) if d.mover else frames
    frames = exposed(frames, *parsed(d.exposure, r"ramp:#\.\.#", "ramp:0.5..2", "exposure")) if d.exposure else frames
    frames = with_depth(frames, d.depth)
    frames = moved(frames, seed, *parsed(d.poses, "noise:#m,#deg", "noise:0.02m,1deg", "poses")) if d.poses else frames
    return drifted(frames, seed, *parsed(d.closure, "#m", "0.1m", "closure")) if d.closure else frames


def training(change):
    """change(i, frame) for training frame i, counted over all frames; a held-out one stays."""
    return lambda frames: [f if f.held_out else change(i, f) for i, f in enumerate(frames)]


def frames_of(frames: list[Frame], subset: str) -> list[Frame]:
    first, last = (int(x) for x in parsed(subset, r"#:#", "0:100", "subset"))
    if not 0 <= first < last <= len(frames):
        raise ValueError(f"--subset {subset}: there are frames 0:{len(frames)}")
    return frames[first:last]


# ---- images and depth ------------------------------------------------------------------------------------------------

def with_depth(frames: list[Frame], kind: str) -> list[Frame]:
    """sensor: as it is; none; lines:N: only in N rows of the image, evenly spread, as a spinning LiDAR measures."""
    if kind == "sensor":
        return frames
    if kind == "none":
        return training(lambda i, f: replace(f, depth_m=None))(frames)
    n = int(parsed(kind, "lines:#", "sensor, none or lines:64", "depth")[0])
    if any(f.depth_m is None for f in frames):
        raise ValueError(f"--depth {kind}: the recording has no depth")
    if not 0 < n <= frames[0].camera.height:
        raise ValueError(f"--depth {kind}: the images have {frames[0].camera.height} rows")
    return training(lambda i, f: replace(f, depth_m=in_rows(f.depth_m, n)))(frames)


def in_rows(depth_m: np.ndarray, n: int) -> np.ndarray:
    """[H,W]: zero but in n rows, at the middle of each n-th of the height."""
    out, rows = np.zeros_like(depth_m), ((np.arange(n) + 0.5) * len(depth_m) / n).astype(int)
    out[rows] = depth_m[rows]
    return out


def exposed(frames: list[Frame], first: float, last: float) -> list[Frame]:
    """Light times a gain that goes from `first` to `last` by equal factors over the recording; what is too bright clips, as on a sensor."""
    if not (first > 0 and last > 0):
        raise ValueError(f"--exposure ramp:{first:g}..{last:g}: both must be above 0")
    gains = np.geomspace(first, last, len(frames))
    return training(lambda i, f: replace(f, rgb=brighter(gains[i])[f.rgb]))(frames)


def brighter(gain: float) -> np.ndarray:
    """[256] uint8: each sRGB value (IEC 61966-2-1) with its light times the gain."""
    value = np.arange(256) / 255
    light = np.minimum(gain * np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4), 1)
    return np.round(255 * np.where(light <= 0.0031308, 12.92 * light, 1.055 * light ** (1 / 2.4) - 0.055)).astype(np.uint8)


# ---- poses -----------------------------------------------------------------------------------------------------------

def moved(frames: list[Frame], seed: int, far_m: float, turned_deg: float) -> list[Frame]:
    """Each camera moved by exactly `far_m` in a random direction and turned by exactly `turned_deg` about a random axis through it."""
    rng = np.random.default_rng(seed)
    directions, axes = (unit(rng.normal(size=(len(frames), 3))) for _ in range(2))

    def change(i: int, f: Frame) -> Frame:
        T = f.T_world_cam.copy()
        T[:3, :3] = T[:3, :3] @ rotation(axes[i], np.radians(turned_deg))
        T[:3, 3] += far_m * directions[i]
        return replace(f, T_world_cam=T)
    return training(change)(frames)


def drifted(frames: list[Frame], seed: int, far_m: float) -> list[Frame]:
    """The second half of the path is off by `far_m` in one random direction; it drifts there over the second quarter. Held-out frames too: their
    poses come from the same odometry, and the corrected path moves them with the others."""
    direction = unit(np.random.default_rng(seed + 1).normal(size=3))
    share = np.clip(4 * np.linspace(0, 1, len(frames)) - 1, 0, 1)

    def change(i: int, f: Frame) -> Frame:
        T = f.T_world_cam.copy()
        T[:3, 3] += share[i] * far_m * direction
        return replace(f, T_world_cam=T)
    return [change(i, f) for i, f in enumerate(frames)]


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def rotation(axis: np.ndarray, angle: float) -> np.ndarray:
    """[3,3] about a unit axis (Rodrigues)."""
    K = np.array([[0, -axis[2], axis[1]], [axis[2], 0, -axis[0]], [-axis[1], axis[0], 0]])
    return np.eye(3) + np.sin(angle) * K + (1 - np.cos(angle)) * K @ K


# ---- the mover -------------------------------------------------------------------------------------------------------

def with_mover(frames: list[Frame], seed: int, masked: bool) -> list[Frame]:
    """A box the size of a person walks through the recording: in the images and the depth where nothing is in front of it,
    and with `masked` as 0 in the mask. It is upright as the cameras are on average."""
    if any(f.depth_m is None for f in frames):
        raise ValueError("--mover: what is in front of the mover follows from depth, and the recording has none")
    places, colors = walk(frames), np.random.default_rng(seed + 2).integers(30, 226, (6, 32, 32, 3)).astype(np.uint8)

    def change(i: int, f: Frame) -> Frame:
        z, rgb = cast_box(f, places[i], colors)
        seen = np.isfinite(z) & ((f.depth_m == 0) | (z < f.depth_m))
        mask = np.where(seen, 0, 255).astype(np.uint8) if masked else f.mask
        return replace(f, rgb=np.where(seen[..., None], rgb, f.rgb), depth_m=np.where(seen, z, f.depth_m).astype(np.float32), mask=mask)
    return training(change)(frames)


def walk(frames: list[Frame]) -> list[np.ndarray]:
    """T_world_box [4,4] of each frame: axes right, towards the camera's smoothed view, up; its centre at the height of the view."""
    poses, t = np.array([f.T_world_cam for f in frames]), np.array([f.stamp_ns for f in frames]) / 1e9
    up = unit(-poses[:, :3, 1].mean(0))
    depth = np.array([np.median(f.depth_m[f.depth_m > 0]) if (f.depth_m > 0).any() else np.nan for f in frames])
    depth = np.where(np.isfinite(depth), depth, np.nanmedian(depth))
    ahead = poses[:, :3, 3] + NEARNESS * depth[:, None] * poses[:, :3, 2]
    weight = np.exp(-0.5 * ((t[:, None] - t) / SMOOTH_S) ** 2)
    ahead, forward = (weight @ x / weight.sum(1, keepdims=True) for x in (ahead, poses[:, :3, 2]))
    out = []
    for at, along, time in zip(ahead, forward, t - t[0]):
        right = unit(np.cross(along, up))
        T = np.eye(4)
        T[:3, 0], T[:3, 1], T[:3, 2] = right, np.cross(up, right), up
        T[:3, 3] = at + SWAY_M * np.sin(2 * np.pi * time / SWAY_S) * right
        out.append(T)
    return out


def cast_box(f: Frame, T_world_box: np.ndarray, colors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Depth [H,W] of the box, inf where it is not, and its colours [H,W,3] uint8: patches of PATCH_M from `colors` [6,32,32,3].
    Slab test (Kay and Kajiya 1986) through the pixels' centres; camera z = 1, so the ray parameter is the depth."""
    c, half, T = f.camera, np.array(PERSON_M) / 2, np.linalg.inv(T_world_box) @ f.T_world_cam
    v, u = np.mgrid[:c.height, :c.width] + 0.5
    d = np.stack([(u - c.cx) / c.fx, (v - c.cy) / c.fy, np.ones_like(u)], -1) @ T[:3, :3].T
    with np.errstate(divide="ignore", invalid="ignore"):
        a, b = (-half - T[:3, 3]) / d, (half - T[:3, 3]) / d
    near, far = np.minimum(a, b), np.maximum(a, b)
    axis, t = near.argmax(-1), near.max(-1)
    z = np.where((t < far.min(-1)) & (t > 0.05), t, np.inf)
    at = T[:3, 3] + np.where(np.isfinite(z), z, 0)[..., None] * d
    patch = np.floor((at + half) / PATCH_M).astype(int) % 32
    others = np.array([(1, 2), (0, 2), (0, 1)])[axis]
    i, j = (np.take_along_axis(patch, others[..., k, None], -1)[..., 0] for k in (0, 1))
    side = 2 * axis + (np.take_along_axis(d, axis[..., None], -1)[..., 0] < 0)
    return z, colors[side, i, j]
