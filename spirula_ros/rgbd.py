"""`spirula bag from-rgbd`: a rosbag2 from a folder of colour images, depth images and poses (7-Scenes or TUM layout)."""
from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Callable

import cv2
import numpy as np

from spirula_gpu.camera import MAX_M, Camera

from .errors import InputError
from .registration import register_depth, shrink_color, shrink_depth

FIRST_STAMP_NS = 1_000_000_000  # layouts without stamps start at 1 s: a stamp of 0 means "unset" in ROS
MAX_DEPTH_GAP_NS = 20_000_000   # TUM: a colour image and its depth image may be this far apart (the benchmark's own limit)
MAX_POSE_GAP_NS = 100_000_000   # TUM: a pose is interpolated only between poses this close together (they come at 100 Hz)
WORLD_FRAME, COLOR_FRAME, DEPTH_FRAME = "map", "camera_color_optical_frame", "camera_depth_optical_frame"
UNITS_PER_M = {"7scenes": 1000.0, "tum": 5000.0}


@dataclass(frozen=True)
class RgbdItem:
    """One frame of a folder, not yet read. T_world_depth [4,4] float64: pose of the camera that measured the depth."""
    stamp_ns: int
    color: Path
    depth: Path
    T_world_depth: np.ndarray


@dataclass(frozen=True)
class Rig:
    """How the two cameras of a folder relate: X_color = X_depth + color_offset_m. Cameras at the size of the images."""
    depth: Camera
    color: Camera
    color_offset_m: tuple[float, float, float] = (0.0, 0.0, 0.0)

    @property
    def registered(self) -> bool:
        return self.depth == self.color and not any(self.color_offset_m)


def make_bag(folder: str, out: str, *, layout: str = "auto", fps: float | None = None, size: tuple[int, int] | None = None,
             intrinsics: tuple[float, ...] | None = None, color_f: float | None = None,
             color_intrinsics: tuple[float, ...] | None = None, color_offset: tuple[float, ...] = (0.0, 0.0, 0.0),
             storage: str = "mcap", max_frames: int | None = None, lines: int | None = None, say: Callable[[str], None] = print) -> int:
    """Writes `out` and returns the number of frames. lines: points of so many rows of the depth image instead of the image. Intrinsics are (fx, fy, cx, cy) in pixels of the images in the folder,
    first pixel's centre at (0, 0), as ROS and OpenCV have it. Raises InputError."""
    from .bags import BagWriter
    root = Path(folder)
    if not root.is_dir():
        raise InputError(f"'{folder}' is not a folder")
    layout = find_layout(root) if layout == "auto" else layout
    items = read_items(root, layout, fps, say)[:max_frames]
    rig = find_rig(root, layout, items[0], intrinsics, color_f, color_intrinsics, color_offset)
    camera = rig.color
    if size is not None:
        if size[0] > camera.width or size[1] > camera.height:
            raise InputError(f"--size {size[0]}x{size[1]} is larger than the images ({camera.width}x{camera.height}); it only shrinks")
        camera = rig.color.resized(*size)
    if lines is not None and not 2 <= lines <= rig.depth.height:
        raise InputError(f"--lines {lines}: the depth images have {rig.depth.height} rows; give 2..{rig.depth.height}")
    with BagWriter(out, storage) as bag:
        if lines:
            bag.tf(items[0].stamp_ns, COLOR_FRAME, DEPTH_FRAME, translation(rig.color_offset_m), static=True)
        for n, item in enumerate(items, 1):
            rgb, raw_m, T_world_color = read_pair(item, rig, UNITS_PER_M[layout])
            write_color(bag, item.stamp_ns, camera, shrink_color(rgb, camera.width, camera.height), T_world_color)
            if lines:
                bag.points("/lidar/points", item.stamp_ns, DEPTH_FRAME, points_of_rows(raw_m, rig.depth, lines))
            else:
                bag.depth("/camera/depth/image_raw", item.stamp_ns, COLOR_FRAME, shrink_depth(registered(raw_m, rig), camera.width, camera.height))
            if n % 50 == 0:
                say(f"{n}/{len(items)} frames")
    say(f"{out}: {len(items)} frames, {camera.width}x{camera.height}, {storage}")
    return len(items)


def write_color(bag, stamp_ns: int, camera: Camera, rgb: np.ndarray, T_world_cam: np.ndarray) -> None:
    """The topics every bag made here has, beside depth (32FC1, metres, registered) or points: pose, camera_info, colour."""
    bag.pose("/camera/pose", stamp_ns, WORLD_FRAME, T_world_cam)
    bag.info("/camera/color/camera_info", stamp_ns, COLOR_FRAME, camera)
    bag.image("/camera/color/image_raw", stamp_ns, COLOR_FRAME, rgb)


# ---- one frame -------------------------------------------------------------------------------------------------------

def read_frame(item: RgbdItem, rig: Rig, units_per_m: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(rgb [H,W,3] uint8, depth_m [H,W] float32 in the colour image with 0 = unknown, T_world_color [4,4])."""
    rgb, raw_m, T_world_color = read_pair(item, rig, units_per_m)
    return rgb, registered(raw_m, rig), T_world_color


def read_pair(item: RgbdItem, rig: Rig, units_per_m: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """As `read_frame`, but the depth as the depth camera measured it."""
    rgb = _read_image(item.color, cv2.IMREAD_COLOR, (rig.color.height, rig.color.width))[..., ::-1]
    raw = _read_image(item.depth, cv2.IMREAD_UNCHANGED, (rig.depth.height, rig.depth.width))
    if raw.dtype != np.uint16 or raw.ndim != 2:
        raise InputError(f"{item.depth}: {raw.dtype} {raw.shape}, expected a 16-bit image with one channel")
    depth_m = (raw / np.float32(units_per_m)).astype(np.float32)
    depth_m[raw == 65535] = 0  # 0 and 65535 both mean "unknown" (7-Scenes uses the latter)
    return np.ascontiguousarray(rgb), depth_m, item.T_world_depth @ translation(-np.asarray(rig.color_offset_m))


def registered(depth_m: np.ndarray, rig: Rig) -> np.ndarray:
    """Depth as the colour camera sees it."""
    return depth_m if rig.registered else register_depth(depth_m, rig.depth, rig.color, translation(rig.color_offset_m))


def translation(offset_m) -> np.ndarray:
    """T [4,4] float64."""
    T = np.eye(4)
    T[:3, 3] = offset_m
    return T


def points_of_rows(depth_m: np.ndarray, camera: Camera, lines: int) -> np.ndarray:
    """[P,3] float32, m, camera axes: what `lines` evenly spaced rows of a depth image [H,W] measured."""
    rows = ((np.arange(lines) + 0.5) * camera.height / lines).astype(int)
    line, u = np.nonzero(depth_m[rows] > 0)
    v = rows[line]
    z = depth_m[v, u]
    return np.stack([(u + 0.5 - camera.cx) / camera.fx * z, (v + 0.5 - camera.cy) / camera.fy * z, z], 1).astype(np.float32)


def _read_image(path: Path, flags: int, size: tuple[int, int] | None = None) -> np.ndarray:
    image = cv2.imread(str(path), flags)
    if image is None:
        raise InputError(f"{path}: not there, or not an image that can be read")
    if size is not None and image.shape[:2] != size:
        raise InputError(f"{path}: {image.shape[1]}x{image.shape[0]}, but the first frame has {size[1]}x{size[0]}")
    return image


def find_rig(root: Path, layout: str, first: RgbdItem, intrinsics, color_f, color_intrinsics, color_offset) -> Rig:
    """Cameras from the arguments, else from the folder. Without colour intrinsics the depth is taken as registered already."""
    color_hw = _read_image(first.color, cv2.IMREAD_COLOR).shape[:2]
    depth_hw = _read_image(first.depth, cv2.IMREAD_UNCHANGED).shape[:2]
    given = intrinsics if intrinsics is not None else _intrinsics_from(root, layout)
    depth = _camera(given, depth_hw, "--intrinsics")
    if color_intrinsics is not None:
        color = _camera(color_intrinsics, color_hw, "--color-intrinsics")
    elif color_hw != depth_hw:
        raise InputError(f"colour is {color_hw[1]}x{color_hw[0]}, depth {depth_hw[1]}x{depth_hw[0]}: "
                         "give the colour camera with --color-intrinsics 'fx fy cx cy'")
    else:
        color = depth if color_f is None else replace(depth, fx=color_f, fy=color_f)
    return Rig(depth, color, tuple(color_offset))


def _camera(intrinsics: tuple[float, ...], hw: tuple[int, int], option: str) -> Camera:
    fx, fy, cx, cy = intrinsics
    if not (0 < cx < hw[1] and 0 < cy < hw[0]):
        raise InputError(f"{option}: principal point ({cx}, {cy}) lies outside the {hw[1]}x{hw[0]} image; the order is fx fy cx cy")
    try:
        return Camera(hw[1], hw[0], fx, fy, cx + 0.5, cy + 0.5)
    except ValueError as error:
        raise InputError(f"{option}: {error}") from None


def _intrinsics_from(root: Path, layout: str) -> tuple[float, ...]:
    path = root / ("camera-intrinsics.txt" if layout == "7scenes" else "intrinsics.txt")
    if not path.is_file():
        raise InputError(f"{path} is not there: give --intrinsics 'fx fy cx cy' (pixels of the depth images)")
    values = _numbers(path)
    if layout == "7scenes" and len(values) == 9:
        return values[0], values[4], values[2], values[5]
    if len(values) != 4:
        raise InputError(f"{path}: {len(values)} numbers, expected " + ("a 3x3 matrix or 'fx fy cx cy'" if layout == "7scenes" else "'fx fy cx cy'"))
    return tuple(values)


# ---- the two layouts -------------------------------------------------------------------------------------------------

def read_items(root: Path, layout: str, fps: float | None = None, say: Callable[[str], None] = print) -> list[RgbdItem]:
    """At least one frame; how many were skipped, and why, is said. fps: of a layout without stamps. Raises InputError."""
    items, skipped = read_7scenes(root, fps or 30.0) if layout == "7scenes" else read_tum(root, fps)
    for reason, n in sorted(skipped.items()):
        say(f"skipped {n} frames: {reason}")
    if not items:
        raise InputError(f"no usable frame in '{root}' (layout {layout}); skipped: {dict(skipped) or 'none'}")
    return items


def layout_of(root: Path) -> str:
    """7scenes | tum | '', from what lies in the folder."""
    return "tum" if (root / "rgb.txt").is_file() else "7scenes" if next(root.glob("frame-*.color.*"), None) else ""


def find_layout(root: Path) -> str:
    """7scenes | tum. Raises InputError."""
    if layout := layout_of(root):
        return layout
    raise InputError(f"'{root}' is neither a 7-Scenes folder (frame-NNNNNN.color.jpg|png, .depth.png, .pose.txt) "
                     "nor a TUM folder (rgb.txt, depth.txt, groundtruth.txt)")


def read_7scenes(root: Path, fps: float) -> tuple[list[RgbdItem], Counter]:
    """Frames in the order of their numbers, `fps` apart whatever the numbers are; a skipped one leaves its gap in time."""
    skipped: Counter = Counter()
    items = []
    for n, color in enumerate(sorted(root.glob("frame-*.color.*"))):
        stem = color.name.split(".")[0]
        depth, pose = root / f"{stem}.depth.png", root / f"{stem}.pose.txt"
        if not (depth.is_file() and pose.is_file()):
            skipped["depth image or pose file is missing"] += 1
            continue
        values = _numbers(pose)
        if len(values) != 16:
            raise InputError(f"{pose}: {len(values)} numbers, expected a 4x4 matrix")
        T = np.array(values).reshape(4, 4)
        if not np.isfinite(T).all():
            skipped["pose is not finite (tracking was lost)"] += 1
            continue
        if np.abs(T[:3, 3]).max() > MAX_M:
            skipped[f"pose is more than {MAX_M:g} m from the origin"] += 1
            continue
        try:
            items.append(RgbdItem(FIRST_STAMP_NS + round(n * 1e9 / fps), color, depth, rigid(T, str(pose))))
        except InputError:
            skipped["pose is not rigid"] += 1
    return items, skipped


def rigid(T: np.ndarray, name: str) -> np.ndarray:
    """The rigid transform nearest to `T` (SVD of the rotation: the closest one in the Frobenius norm, Kabsch 1976)."""
    U, s, Vt = np.linalg.svd(T[:3, :3])
    if np.abs(s - 1).max() > 0.02 or np.linalg.det(U @ Vt) < 0:
        raise InputError(f"{name}: not a rotation (singular values {np.round(s, 4)}, determinant {np.linalg.det(T[:3, :3]):.4f})")
    out = np.eye(4)
    out[:3, :3], out[:3, 3] = U @ Vt, T[:3, 3]
    return out


def read_tum(root: Path, fps: float | None) -> tuple[list[RgbdItem], Counter]:
    """TUM RGB-D benchmark: colour with the nearest depth, the pose interpolated at the stamp of the colour image."""
    if fps is not None:
        raise InputError("--fps: a TUM folder has its own stamps")
    colors, depths, poses = (_stamped_rows(root / f"{name}.txt", n) for name, n in (("rgb", 1), ("depth", 1), ("groundtruth", 7)))
    depth_stamps = [s for s, _ in depths]
    pose_stamps, pose_rows = _finite_poses(poses, root / "groundtruth.txt")
    skipped: Counter = Counter()
    items = []
    for stamp, (color,) in colors:
        i = _nearest(depth_stamps, stamp)
        if i is None or abs(depth_stamps[i] - stamp) > MAX_DEPTH_GAP_NS:
            skipped[f"no depth image within {MAX_DEPTH_GAP_NS // 10**6} ms"] += 1
            continue
        T = _pose_at(pose_stamps, pose_rows, stamp)
        if T is None:
            skipped[f"no pose on both sides within {MAX_POSE_GAP_NS // 10**6} ms"] += 1
            continue
        items.append(RgbdItem(stamp, root / color, root / depths[i][1][0], T))
    return items, skipped


def _finite_poses(poses: list[tuple[int, list[str]]], path: Path) -> tuple[list[int], np.ndarray]:
    """Stamps and [n,7] rows (tx ty tz qx qy qz qw) without those that are no pose; what they leave is a gap."""
    try:
        rows = np.array([[float(word) for word in words] for _, words in poses]).reshape(-1, 7)
    except ValueError as error:
        raise InputError(f"{path}: {error}") from None
    good = np.isfinite(rows).all(1) & (np.abs(np.linalg.norm(rows[:, 3:], axis=1) - 1) < 0.01) & (np.abs(rows[:, :3]) <= MAX_M).all(1)
    return [stamp for (stamp, _), ok in zip(poses, good) if ok], rows[good]


def _nearest(stamps: list[int], stamp: int) -> int | None:
    i = bisect_left(stamps, stamp)
    return min((j for j in (i - 1, i) if 0 <= j < len(stamps)), key=lambda j: abs(stamps[j] - stamp), default=None)


def _pose_at(stamps: list[int], rows: np.ndarray, stamp: int) -> np.ndarray | None:
    """[4,4] at `stamp` from rows of (tx ty tz qx qy qz qw), or None outside them or in a gap."""
    i = bisect_left(stamps, stamp)
    if i < len(stamps) and stamps[i] == stamp:
        return _matrix(rows[i, :3], rows[i, 3:])
    if i == 0 or i == len(stamps) or stamps[i] - stamps[i - 1] > MAX_POSE_GAP_NS:
        return None
    t = (stamp - stamps[i - 1]) / (stamps[i] - stamps[i - 1])
    return _matrix((1 - t) * rows[i - 1, :3] + t * rows[i, :3], _slerp(rows[i - 1, 3:], rows[i, 3:], t))


def _slerp(a: np.ndarray, b: np.ndarray, t: float) -> np.ndarray:
    """Spherical interpolation of quaternions the short way (Shoemake 1985)."""
    a, b = a / np.linalg.norm(a), b / np.linalg.norm(b)
    b = -b if a @ b < 0 else b
    angle = np.arccos(np.clip(a @ b, -1, 1))
    return a + t * (b - a) if angle < 1e-6 else (np.sin((1 - t) * angle) * a + np.sin(t * angle) * b) / np.sin(angle)


def _matrix(position: np.ndarray, q_xyzw: np.ndarray) -> np.ndarray:
    x, y, z, w = q_xyzw / np.linalg.norm(q_xyzw)
    T = np.eye(4)
    T[:3, :3] = [[1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
                 [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
                 [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)]]
    T[:3, 3] = position
    return T


def _stamped_rows(path: Path, n: int) -> list[tuple[int, list[str]]]:
    """Rows of (stamp in ns, n words) in the order of time. Decimal: a float64 would be some 100 ns off."""
    if not path.is_file():
        raise InputError(f"{path} is not there: a TUM folder has rgb.txt, depth.txt and groundtruth.txt")
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        words = line.split("#")[0].replace(",", " ").split()
        if not words:
            continue
        if len(words) != n + 1:
            raise InputError(f"{path}, line {number}: {len(words)} words, expected {n + 1}")
        try:
            rows.append((int(Decimal(words[0]) * 10**9), words[1:]))
        except InvalidOperation:
            raise InputError(f"{path}, line {number}: '{words[0]}' is not a time in seconds") from None
    return sorted(rows, key=lambda row: row[0])


def _numbers(path: Path) -> list[float]:
    try:
        return [float(word) for word in path.read_text().split()]
    except ValueError as error:
        raise InputError(f"{path}: {error}") from None
