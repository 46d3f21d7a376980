"""Corrected paths (loop closure). A corrected path says where the camera really was; `motions` finds how far each frame of the `Track` is off, and
`move_gaussians` takes the Gaussians along with the keyframe that made them. Nothing here knows the mapper.

A motion is D [4,4]: world -> world, corrected pose = D @ pose. Poses are T_world_cam [4,4] float64, quaternions w x y z."""
from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import cv2
import numpy as np

from .camera import Frame
from .native import Engine
from .track import Moments, Track

MAX_GAP_NS = 200_000_000  # poses are interpolated over at most this
MOVED_PX = 0.5            # what moves the image less than this is left alone
NEVER = np.iinfo(np.int64).max   # a stamp
PIECE = 1 << 14           # Gaussians that are in host memory at once, about 10 MB


class PathError(ValueError):
    """A path that says nothing about the frames, or that cannot be meant; the text says why and what to do."""


class Scale(NamedTuple):
    """What a motion of the camera means to its images."""
    px_per_m: float
    px_per_rad: float

    def px(self, A: np.ndarray, B: np.ndarray) -> np.ndarray:
        """[n]: how many pixels lie between the images of cameras at A and at B [n,4,4], about."""
        cos = ((A[:, :3, :3] * B[:, :3, :3]).sum((1, 2)) - 1) / 2
        return self.px_per_m * np.linalg.norm(A[:, :3, 3] - B[:, :3, 3], axis=1) + self.px_per_rad * np.arccos(np.clip(cos, -1, 1))


class Motions(NamedTuple):
    """For each frame of the track: D [n,4,4], and whether it moves visibly."""
    moments: Moments
    D: np.ndarray
    moved: np.ndarray

    def of(self, moments: Moments) -> tuple[np.ndarray, np.ndarray]:
        """(D [m,4,4], moved [m]) of frames taken then; one that is not of the track stays."""
        at, known = self.moments.find(moments)
        return self.D[at], self.moved[at] & known

    def place(self, frame: Frame) -> Frame:
        (D,), (moves,) = self.of(Moments.of([frame]))
        return replace(frame, T_world_cam=D @ frame.T_world_cam) if moves else frame

    def apply(self, track: Track) -> None:
        """Frames that came after these were found stay."""
        D, moved = self.of(track.moments)
        track.poses[moved] = (D @ track.poses)[moved]


def as_one(found: Motions, G: np.ndarray, T: np.ndarray, scale: Scale) -> Motions:
    """All frames, whose cameras are at T [n,4,4], by G [4,4]."""
    D = np.broadcast_to(G, found.D.shape)
    return Motions(found.moments, D, scale.px(D @ T, T) > MOVED_PX)


def mean_motion(T: np.ndarray, T_new: np.ndarray) -> np.ndarray:
    """G [4,4]: cameras at G @ T [n,4,4] lie and look in the mean as those at T_new [n,4,4] do."""
    turns = [cv2.Rodrigues(b @ a.T)[0][:, 0] for a, b in zip(T[:, :3, :3], T_new[:, :3, :3])]   # in the world
    G = np.eye(4)
    G[:3, :3] = cv2.Rodrigues(np.mean(turns, axis=0))[0]
    G[:3, 3] = T_new[:, :3, 3].mean(0) - G[:3, :3] @ T[:, :3, 3].mean(0)
    return G


class Corrected(NamedTuple):
    """How much a corrected path has moved; nothing, when it says what was known."""
    frames: int      # of all that came
    keyframes: int   # of those that are trained on
    gaussians: int


def motions(track: Track, stamps: np.ndarray, poses: np.ndarray, scale: Scale, sensors: np.ndarray | None = None) -> Motions:
    """What a path of the cameras, stamps [m] int64 ns, poses [m,4,4] and sensors [m] (None: all of camera 0), changes in the newest lap of the track; what was before
    the clock was restarted stays. Raises PathError.

    Where path and track of a camera meet, D is exact, for all cameras: it is a motion of the world. Frames between two such places get a mean of both motions, taken
    about the camera, since drift is smooth; those before the first get its motion, those after the last too until the poses themselves jump into the corrected frame.
    A path may be sparse (keyframes of a SLAM) or dense (another sensor): the denser of path and track is interpolated at the stamps of the other."""
    order = np.argsort(stamps, kind="stable")
    stamps, poses = np.asarray(stamps, np.int64)[order], np.asarray(poses, np.float64)[order]
    sensors = np.zeros(len(stamps), np.int64) if sensors is None else np.asarray(sensors, np.int64)[order]
    newest, found, why = track.moments.laps == track.lap, [], PathError(f"a path of {len(stamps)} poses for {len(track)} frames: nothing to correct")
    of = {sensor: np.flatnonzero(newest & (track.moments.sensors == sensor)) for sensor in np.unique(sensors) if len(track)}
    for sensor, mine in of.items():
        try:
            if len(mine):
                found.append(_anchors(track.stamps[mine], track.poses[mine], stamps[sensors == sensor], poses[sensors == sensor], scale))
        except PathError as e:
            why = e
    if not found:
        raise why
    at, first = np.unique(np.concatenate([at for at, _ in found]), return_index=True)
    D_at, D = np.concatenate([D for _, D in found])[first], np.tile(np.eye(4), (len(track), 1, 1))
    D[newest] = _spread(at, D_at, track.stamps[newest], track.poses[newest])
    D[newest & (track.stamps >= min(_jump(track.stamps[mine], track.poses[mine], at[-1], D_at[-1], scale) for mine in of.values()))] = np.eye(4)
    return Motions(Moments(*(x.copy() for x in track.moments)), D, scale.px(D @ track.poses, track.poses) > MOVED_PX)


def _anchors(known_at: np.ndarray, known_T: np.ndarray, stamps: np.ndarray, poses: np.ndarray, scale: Scale) -> tuple[np.ndarray, np.ndarray]:
    """(stamps [k], D [k,4,4]) where the path of one camera, stamps [m] and poses [m,4,4], meets its track, known_at [n] and known_T [n,4,4]. Raises PathError."""
    if (np.diff(stamps) == 0).any():
        raise PathError(f"{(np.diff(stamps) == 0).sum() + 1} of {len(stamps)} poses of the path share a stamp: each must have that of its measurement (a planned path has not)")
    if _gap(stamps) < _gap(known_at):
        at, T_old = known_at, known_T
        T_new, known = interpolated(stamps, poses, at)
    else:
        at, T_new = stamps, poses
        T_old, known = interpolated(known_at, known_T, at)
    if not known.any():
        raise PathError(f"none of the path's {len(stamps)} poses, stamps {stamps[0] / 1e9:.3f} to {stamps[-1] / 1e9:.3f}, lies within {MAX_GAP_NS / 1e9:g} s of two of the {len(known_at)} frames, "
                        f"{known_at[0] / 1e9:.3f} to {known_at[-1] / 1e9:.3f}: do both use the same clock?")
    at, T_old, T_new = at[known], T_old[known], T_new[known]
    D = T_new @ np.linalg.inv(T_old)
    _refuse_other_body(T_old, T_new, D, scale)
    return at, D


def _gap(stamps: np.ndarray) -> float:
    return float(np.median(np.diff(stamps))) if len(stamps) > 1 else np.inf


def _refuse_other_body(T_old: np.ndarray, T_new: np.ndarray, D: np.ndarray, scale: Scale) -> None:
    """A path of another body differs from the frames by one transform in the camera's own axes, all along; a correction does not."""
    E = np.linalg.inv(T_old) @ T_new
    middle, identity = len(E) // 2, np.eye(4)[None]
    size, spread, spread_D = scale.px(E[middle:middle + 1], identity)[0], *(np.percentile(scale.px(x, x[middle:middle + 1]), 90) for x in (E, D))
    if size > MOVED_PX and spread < 0.1 * size and spread + MOVED_PX < spread_D:
        raise PathError(f"each of the {len(E)} poses of the path is {np.linalg.norm(E[middle, :3, 3]):.3f} m from that of its frame, in the same direction seen from the camera: it is the "
                        "path of another body; set intake.T_body_camera, or topics.path to the path of the body that topics.pose gives")


def _jump(stamps: np.ndarray, T: np.ndarray, last_ns: int, D: np.ndarray, scale: Scale) -> int:
    """The stamp of the first frame of a camera after last_ns that goes on from where D has moved the one before, at the same speed, and not from where that one was."""
    n, first = len(T), int(np.searchsorted(stamps, last_ns, "right"))
    if first < 2 or first >= n:
        return NEVER
    expected = T[first - 1:n - 1] @ np.linalg.inv(T[first - 2:n - 2]) @ T[first - 1:n - 1]
    jumped = scale.px(T[first:], D @ expected) < scale.px(T[first:], expected)
    return int(stamps[first + np.argmax(jumped)]) if jumped.any() else NEVER


def _spread(anchors: np.ndarray, D: np.ndarray, stamps: np.ndarray, T: np.ndarray) -> np.ndarray:
    """[n,4,4] at the stamps of cameras at T [n,4,4]: D [m,4,4] of the anchors [m], between two of them interpolated about the camera's centre."""
    low, high, share = _around(anchors, stamps)
    center, pose = T[:, :3, 3], np.eye(4)
    moved = np.broadcast_to(pose, (2, len(T), 4, 4)).copy()
    for out, D_i in zip(moved, (D[low], D[high])):
        out[:, :3, :3], out[:, :3, 3] = D_i[:, :3, :3], np.einsum("nij,nj->ni", D_i[:, :3, :3], center) + D_i[:, :3, 3]
    out = between(*moved, share)
    out[:, :3, 3] -= np.einsum("nij,nj->ni", out[:, :3, :3], center)
    return out


def interpolated(stamps: np.ndarray, T: np.ndarray, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(T [m,4,4] at the stamps [m], known [m]): known is false outside of the stamps and in gaps above MAX_GAP_NS."""
    low, high, share = _around(stamps, at)
    inside = (at >= stamps[0]) & (at <= stamps[-1])
    return between(T[low], T[high], share), inside & (stamps[high] - stamps[low] <= MAX_GAP_NS)


def _around(stamps: np.ndarray, at: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Indices of the stamps around each of `at`, and its share of the way from the one to the other; both the same at a stamp, and outside."""
    high = np.minimum(np.searchsorted(stamps, at), len(stamps) - 1)
    low = np.where(stamps[high] > at, np.maximum(high - 1, 0), high)
    return low, high, np.clip((at - stamps[low]) / np.maximum(stamps[high] - stamps[low], 1), 0, 1)


def between(A: np.ndarray, B: np.ndarray, share: np.ndarray) -> np.ndarray:
    """[n,4,4]: linear in position, slerp (Shoemake 1985) in rotation, the short way."""
    a, b = quats_of(A[:, :3, :3]), quats_of(B[:, :3, :3])
    cos = np.einsum("ni,ni->n", a, b)
    b, angle = np.where(cos < 0, -1.0, 1.0)[:, None] * b, np.arccos(np.clip(np.abs(cos), 0, 1))
    small = angle < 1e-6   # the sine is no longer exact, linear is
    sin = np.where(small, 1.0, np.sin(angle))
    weights = [np.where(small, s, np.sin(s * angle) / sin)[:, None] for s in (1 - share, share)]
    out = np.broadcast_to(np.eye(4), A.shape).copy()
    out[:, :3, :3] = matrices_of(weights[0] * a + weights[1] * b)
    out[:, :3, 3] = A[:, :3, 3] + share[:, None] * (B[:, :3, 3] - A[:, :3, 3])
    return out


# ---- rotations of many ------------------------------------------------------------------------------------------------

def quats_of(R: np.ndarray) -> np.ndarray:
    """[n,4] unit quaternions of rotations [n,3,3], by the largest of the four components (Shepperd 1978)."""
    (a, b, c), (d, e, f), (g, h, i) = np.moveaxis(R, 0, -1)
    rows = np.array([(1 + a + e + i, h - f, c - g, d - b), (h - f, 1 + a - e - i, b + d, c + g), (c - g, b + d, 1 - a + e - i, f + h), (d - b, c + g, f + h, 1 - a - e + i)])
    n = np.arange(R.shape[0])
    q = rows[np.argmax(rows[range(4), range(4)], axis=0), :, n]
    return q / np.linalg.norm(q, axis=1, keepdims=True)


def matrices_of(q: np.ndarray) -> np.ndarray:
    """[n,3,3] of quaternions [n,4] of any norm."""
    w, x, y, z = (q / np.linalg.norm(q, axis=1, keepdims=True)).T
    return np.moveaxis(np.array([[1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)], [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
                                 [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)]]), -1, 0)


def product(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """[n,4] of quaternions [n,4]: first q, then p."""
    w, v, s, u = p[:, :1], p[:, 1:], q[:, :1], q[:, 1:]
    return np.concatenate([w * s - (v * u).sum(1, keepdims=True), w * u + s * v + np.cross(v, u)], 1)


def sh_basis(degree: int, d: np.ndarray) -> np.ndarray:
    """[...,2 degree + 1] real spherical harmonics of that degree at unit directions d [...,3], as sh_basis in math.h has them."""
    x, y, z = np.moveaxis(d, -1, 0)
    xx, yy, zz = x * x, y * y, z * z
    if degree == 1:
        values = [-y, z, -x]
        scale = 0.4886025119029199
    elif degree == 2:
        values = [x * y, -y * z, (2 * zz - xx - yy) / 12**0.5, -x * z, (xx - yy) / 2]
        scale = 1.0925484305920792
    else:
        values = [-y * (3 * xx - yy), 24**0.5 * x * y * z, -0.6**0.5 * y * (4 * zz - xx - yy), 0.4**0.5 * z * (2 * zz - 3 * xx - 3 * yy),
                  -0.6**0.5 * x * (4 * zz - xx - yy), 6**0.5 * z * (xx - yy), -x * (xx - 3 * yy)]
        scale = 0.5900435899266435
    return scale * np.stack(values, -1)


def sh_rotations(degree: int, R: np.ndarray) -> np.ndarray:
    """[n,2 degree + 1,2 degree + 1] for R [n,3,3]: coefficients c of one degree become M @ c, so that the colour in direction R d is the old one in d. The
    harmonics of a degree span what rotation makes of them, so a fit at a few directions is exact."""
    i = np.arange(24) + 0.5
    z, turn = 1 - i / 12, i * np.pi * (3 - 5**0.5)   # Fibonacci's spiral: evenly over the sphere
    d = np.stack([np.sqrt(1 - z * z) * np.cos(turn), np.sqrt(1 - z * z) * np.sin(turn), z], 1)
    return np.linalg.pinv(sh_basis(degree, d)) @ sh_basis(degree, np.einsum("nji,sj->nsi", R, d))


# ---- the map ------------------------------------------------------------------------------------------------------------

def move_gaussians(engine: Engine, D: np.ndarray, moved: np.ndarray, forget: bool = True) -> int:
    """Moves the Gaussians of each owner i with moved[i] by D[i] [4,4], as a rigid body: position, rotation, view-dependent colour. Size and opacity stay;
    forget: the optimiser begins anew with them. Returns how many. When it fails those that have moved
    are moved back, to rounding."""
    total, first = 0, 0
    try:
        for first in range(0, len(engine), PIECE):
            total += _move_piece(engine, first, D, moved, forget)
    except BaseException:
        for done in range(0, first, PIECE):
            _move_piece(engine, done, np.linalg.inv(D), moved, forget)
        raise
    return total


def _move_piece(engine: Engine, first: int, D: np.ndarray, moved: np.ndarray, forget: bool) -> int:
    """All of its new values are there before the first is written."""
    owner, new = engine.read("map.owner", first, PIECE), {}
    mine = (owner >= 0) & (owner < len(moved))
    mine[mine] = moved[owner[mine]]
    if not mine.any():
        return 0
    owners, of = np.unique(owner[mine], return_inverse=True)
    D = D[owners]
    R, t, q = D[:, :3, :3], D[:, :3, 3], quats_of(D[:, :3, :3])

    def change(row: str, by) -> None:
        new[row] = values = engine.read(row, first, PIECE)
        values[mine] = by(values[mine])

    def rotated_sh(sh: np.ndarray) -> np.ndarray:
        for degree in range(1, engine.sh_degree + 1):
            ks = slice(degree * degree, (degree + 1)**2)
            sh[:, ks] = sh_rotations(degree, R).astype(np.float32)[of] @ sh[:, ks]
        return sh

    change("map.mean", lambda x: np.einsum("nij,nj->ni", R[of], x) + t[of])
    change("map.quat", lambda x: product(q[of], x))
    if engine.sh_degree:
        change("map.sh", rotated_sh)
    for row in sorted((r for r in engine.saved_rows() if r.startswith("adam.")), reverse=True) if forget else []:  # adam.v before adam.m, which compact keeps in units of it
        change(row, np.zeros_like)
    for row, values in new.items():
        engine.write(row, values, first)
    return int(mine.sum())
