"""Poses over time: interpolation at an image stamp, from a pose topic (`PoseBuffer`) or a tree of frames (`TfBuffer`).

A lookup never extrapolates and never guesses: it returns T [4,4] float64, or a `NoPose` that says what is missing.
"""
from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple, Sequence

import numpy as np

JUMP_NS = 1_000_000_000  # a stamp this far before the newest one is a restarted clock, not a late message


class NoPose(NamedTuple):
    """Why there is no pose. kind: empty (nothing yet) | after_last (may still come) | before_first | gap | no_chain
    (may still come)."""
    kind: str
    text: str

    @property
    def may_come(self) -> bool:
        return self.kind in ("empty", "after_last", "no_chain")


def matrix_from_pose(t: Sequence[float], q_xyzw: Sequence[float]) -> np.ndarray:
    """T [4,4] float64 from a translation [3] and a unit quaternion [4] in ROS order (x, y, z, w)."""
    x, y, z, w = q_xyzw
    return np.array([
        [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w), t[0]],
        [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w), t[1]],
        [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y), t[2]],
        [0, 0, 0, 1]], np.float64)


def quat_from_matrix(R: np.ndarray) -> np.ndarray:
    """Unit quaternion [4] (x, y, z, w), w >= 0, of a rotation [3,3]; a slightly skewed R gives the nearby rotation.
    Shepperd's method: the largest of the four components is found first, so that nothing is divided by a small number."""
    (a, b, c), (d, e, f), (g, h, i) = np.asarray(R, np.float64)[:3, :3].tolist()
    squares = (1 + a - e - i, 1 - a + e - i, 1 - a - e + i, 1 + a + e + i)  # 4x^2, 4y^2, 4z^2, 4w^2
    row = ((squares[0], b + d, c + g, h - f), (b + d, squares[1], f + h, c - g),
           (c + g, f + h, squares[2], d - b), (h - f, c - g, d - b, squares[3]))[int(np.argmax(squares))]
    q = np.array(row) / np.linalg.norm(row)
    return -q if q[3] < 0 else q


def inverse(T: np.ndarray) -> np.ndarray:
    """The inverse of a rigid T [4,4]."""
    out = np.eye(4)
    out[:3, :3] = T[:3, :3].T
    out[:3, 3] = -T[:3, :3].T @ T[:3, 3]
    return out


def interpolate(T_a: np.ndarray, T_b: np.ndarray, s: float) -> np.ndarray:
    """The pose at share s in [0, 1] from T_a to T_b: linear in position, slerp (Shoemake 1985) in rotation, short way."""
    q_a, q_b = quat_from_matrix(T_a), quat_from_matrix(T_b)
    cos = float(q_a @ q_b)
    if cos < 0:
        q_b, cos = -q_b, -cos
    if cos > 1 - 1e-9:  # sin(angle) is no longer accurate; linear is, to 1e-9
        q = (1 - s) * q_a + s * q_b
    else:
        angle = np.arccos(cos)
        q = (np.sin((1 - s) * angle) * q_a + np.sin(s * angle) * q_b) / np.sin(angle)
    return matrix_from_pose((1 - s) * T_a[:3, 3] + s * T_b[:3, 3], q / np.linalg.norm(q))


class PoseBuffer:
    """Poses of one moving frame, sorted by stamp; at most `duration_s` seconds and `max_poses` of them.

    Late (out-of-order) poses are sorted in, a pose with a known stamp replaces the old one, and a stamp more than a
    second before the newest one means that the clock was restarted: the buffer is cleared and `jumps` counts it."""

    def __init__(self, max_gap_s: float = 0.5, duration_s: float = 10.0, max_poses: int = 20_000):
        self.max_gap_s, self.max_poses = max_gap_s, max_poses
        self._duration_ns = round(duration_s * 1e9)
        self._stamps: list[int] = []
        self._poses: list[np.ndarray] = []
        self.jumps = 0

    def __len__(self) -> int:
        return len(self._stamps)

    @property
    def newest_ns(self) -> int | None:
        return self._stamps[-1] if self._stamps else None

    def clear(self) -> None:
        self._stamps.clear()
        self._poses.clear()

    def forget_future(self, stamp_ns: int) -> None:
        """The clock was restarted at stamp_ns: poses from before the restart go, those already from after it stay."""
        if self._stamps and self._stamps[-1] > stamp_ns + JUMP_NS:
            self.clear()
            self.jumps += 1

    def insert(self, stamp_ns: int, T: np.ndarray) -> None:
        """T [4,4]: rigid; the caller has checked it (`convert.pose_from_msg`)."""
        stamps, poses = self._stamps, self._poses
        if stamps and stamp_ns < stamps[-1] - JUMP_NS:
            self.clear()
            self.jumps += 1
        at = len(stamps) if not stamps or stamp_ns > stamps[-1] else bisect_left(stamps, stamp_ns)
        if at < len(stamps) and stamps[at] == stamp_ns:
            poses[at] = T
            return
        stamps.insert(at, stamp_ns)
        poses.insert(at, T)
        old = max(bisect_left(stamps, stamps[-1] - self._duration_ns), len(stamps) - self.max_poses)
        if old > 0:
            del stamps[:old], poses[:old]

    def replace(self, stamps: np.ndarray, poses: np.ndarray) -> None:
        """These instead of all there were: stamps [n] int64 ns, increasing; poses [n,4,4]."""
        first = max(int(np.searchsorted(stamps, stamps[-1] - self._duration_ns)), len(stamps) - self.max_poses)
        self._stamps, self._poses = stamps[first:].tolist(), list(poses[first:])

    def lookup(self, stamp_ns: int) -> np.ndarray | NoPose:
        """T [4,4] float64 at the stamp: stored if the stamp is, else between its two neighbours."""
        stamps = self._stamps
        if not stamps:
            return NoPose("empty", "no pose has arrived")
        at = bisect_left(stamps, stamp_ns)
        if at < len(stamps) and stamps[at] == stamp_ns:
            return self._poses[at]
        if at == len(stamps):
            return NoPose("after_last", f"the newest pose is {(stamp_ns - stamps[-1]) / 1e9:.3f} s older than the image")
        if at == 0:
            return NoPose("before_first", f"the oldest pose kept is {(stamps[0] - stamp_ns) / 1e9:.3f} s newer than the image")
        gap_ns = stamps[at] - stamps[at - 1]
        if gap_ns > self.max_gap_s * 1e9:
            return NoPose("gap", f"the poses around the image are {gap_ns / 1e9:.3f} s apart, limit {self.max_gap_s} s")
        return interpolate(self._poses[at - 1], self._poses[at], (stamp_ns - stamps[at - 1]) / gap_ns)


class TfBuffer:
    """A tree of frames from /tf and /tf_static. A static edge holds for ever, a dynamic one is a `PoseBuffer`.
    A frame that gets another parent moves there (the old edge is forgotten)."""

    def __init__(self, max_gap_s: float = 0.5, duration_s: float = 10.0):
        self._max_gap_s, self._duration_s = max_gap_s, duration_s
        self._parent: dict[str, str] = {}
        self._edge: dict[str, np.ndarray | PoseBuffer] = {}  # by child: T_parent_child

    @property
    def jumps(self) -> int:
        return sum(e.jumps for e in self._edge.values() if isinstance(e, PoseBuffer))

    def forget_future(self, stamp_ns: int) -> None:
        """As `PoseBuffer.forget_future`; static edges stay (they are sent once)."""
        for edge in self._edge.values():
            if isinstance(edge, PoseBuffer):
                edge.forget_future(stamp_ns)

    def insert(self, stamp_ns: int, parent: str, child: str, T_parent_child: np.ndarray, static: bool = False) -> None:
        """Raises ValueError if a frame would become its own ancestor."""
        parent, child = parent.lstrip("/"), child.lstrip("/")
        if not parent or not child or child in self._ancestors(parent):
            raise ValueError(f"transform from '{parent}' to '{child}': a frame has no name or is its own ancestor")
        if static:
            self._parent[child], self._edge[child] = parent, T_parent_child
            return
        edge = self._edge.get(child)
        if not isinstance(edge, PoseBuffer) or self._parent[child] != parent:
            edge = self._edge[child] = PoseBuffer(self._max_gap_s, self._duration_s)
            self._parent[child] = parent
        edge.insert(stamp_ns, T_parent_child)

    def lookup(self, target: str, source: str, stamp_ns: int) -> np.ndarray | NoPose:
        """T_target_source [4,4] float64 at the stamp: maps points of frame `source` to frame `target`."""
        up_target, up_source = self._ancestors(target.lstrip("/")), self._ancestors(source.lstrip("/"))
        common = next((f for f in up_source if f in up_target), None)
        if common is None or (len(up_source) == 1 and source.lstrip("/") not in self.frames()):
            return NoPose("no_chain", self._break_text(target, source, up_target, up_source))
        halves, missing = [], []
        for chain in (up_target, up_source):
            T = np.eye(4)
            for child in chain[:chain.index(common)]:
                edge = self._edge[child]
                step = edge.lookup(stamp_ns) if isinstance(edge, PoseBuffer) else edge
                if isinstance(step, NoPose):
                    missing.append(NoPose(step.kind, f"'{self._parent[child]}' -> '{child}': {step.text}"))
                else:
                    T = step @ T
            halves.append(T)
        if missing:  # what can no longer come decides
            return min(missing, key=lambda m: m.may_come)
        return inverse(halves[0]) @ halves[1]

    def in_body(self, frame: str) -> np.ndarray:
        """T_body_frame [4,4]: the body is the farthest ancestor that static transforms connect the frame to."""
        T, frame = np.eye(4), frame.lstrip("/")
        while isinstance(edge := self._edge.get(frame), np.ndarray):
            T, frame = edge @ T, self._parent[frame]
        return T

    def frames(self) -> list[str]:
        return sorted(set(self._parent) | set(self._parent.values()))

    def _ancestors(self, frame: str) -> list[str]:
        chain = [frame]
        while chain[-1] in self._parent:
            chain.append(self._parent[chain[-1]])
        return chain

    def _break_text(self, target: str, source: str, up_target: list[str], up_source: list[str]) -> str:
        known = self.frames()
        unknown = [f"'{f}'" for f in (target, source) if f.lstrip("/") not in known]
        where = f"{' and '.join(unknown)} never arrived" if unknown else \
            f"the tree breaks between '{up_target[-1]}' and '{up_source[-1]}'"
        return f"no transform from '{target}' to '{source}': {where}; known frames: {', '.join(known) or 'none'}"
