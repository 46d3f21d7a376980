"""The synthetic room: solids with textures, an exact ray caster, and light baked into the textures. World: z up, metres."""
from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Callable

import cv2
import numpy as np

from . import room_textures as tex

HALF = np.array([2.6, 2.1, 1.35])  # the room is |x| < 2.6, |y| < 2.1, 0 < z < 2.7
LIGHTMAP_M = 0.06                  # spacing of baked irradiance
LAMPS = [  # centre, the two half edges, radiance
    ((-1.1, 0.0, 2.68), (0.45, 0, 0), (0, 0.3, 0), (13.0, 12.0, 10.2)),
    ((1.1, 0.0, 2.68), (0.45, 0, 0), (0, 0.3, 0), (13.0, 12.0, 10.2)),
    ((0.35, 2.07, 1.55), (0.75, 0, 0), (0, 0, 0.55), (4.2, 5.0, 6.2)),
]
AMBIENT = np.array([[0.36], [0.36], [0.37]], np.float32)
AXES = ((1, 2), (0, 2), (0, 1))  # of a face's texture, by the axis of its normal

Draw = Callable[[float, float, np.random.Generator], np.ndarray]


@dataclass
class Solid:
    """A box (half [3]) turned by `yaw` about z, or a sphere (half[0] = its radius). `draw`: face -> texture, -1 = the others.
    Faces of a box: 2 * axis + (outward normal positive); texture coordinates run along the two other axes."""
    center: np.ndarray
    half: np.ndarray
    draw: dict[int, Draw]
    yaw: float = 0.0
    sphere: bool = False
    inside: bool = False     # the room itself: seen from within
    emissive: bool = False   # its textures are radiance already
    textures: dict[int, list[np.ndarray]] = field(default_factory=dict)  # face -> pyramid of [h,w,3] radiance

    def __post_init__(self):
        self.center, self.half = np.asarray(self.center, np.float32), np.asarray(self.half, np.float32)
        c, s = np.cos(self.yaw), np.sin(self.yaw)
        self.R = np.array([[c, s, 0], [-s, c, 0], [0, 0, 1]], np.float32)  # world -> local

    def intersect(self, origin: np.ndarray, d: np.ndarray) -> np.ndarray:
        """Ray parameter [n] of the first hit, inf = miss. origin [3,1] or [3,n], d [3,n], float32."""
        o = origin - self.center[:, None]
        if self.yaw:
            o, d = self.R @ o, self.R @ d
        if self.sphere:
            a, b = (d * d).sum(0), (o * d).sum(0)
            disc = b * b - a * ((o * o).sum(0) - self.half[0] ** 2)
            t = (-b - np.sqrt(np.maximum(disc, 0))) / a
            return np.where((disc > 0) & (t > 1e-4), t, np.float32(np.inf))
        near, far = np.float32(-np.inf), np.float32(np.inf)
        for k in range(3):  # slab test: Kay and Kajiya 1986
            inv = 1 / np.where(np.abs(d[k]) < 1e-9, np.float32(1e-9), d[k])
            mid, reach = -o[k] * inv, self.half[k] * np.abs(inv)
            near, far = np.maximum(near, mid - reach), np.minimum(far, mid + reach)
        return far if self.inside else np.where((near < far) & (near > 1e-4), near, np.float32(np.inf))

    def meets_cone(self, apex: np.ndarray, axis: np.ndarray, half_angle: float) -> bool:
        """False only if nothing in the cone can hit: it misses the sphere around the solid. apex, axis [3], axis a unit vector."""
        to = self.center - apex
        distance, radius = np.linalg.norm(to), self.half[0] if self.sphere else np.linalg.norm(self.half)
        if distance <= radius:
            return True
        return np.arccos(np.clip(axis @ to / distance, -1, 1)) < half_angle + np.arcsin(radius / distance) + 1e-3

    def local(self, points: np.ndarray) -> np.ndarray:
        return self.R @ (points - self.center[:, None])

    def face_of(self, local: np.ndarray) -> np.ndarray:
        """The face [n] on which points of the surface lie."""
        if self.sphere:
            return np.zeros(local.shape[1], np.intp)
        axis = np.abs(local / self.half[:, None]).argmax(0)
        return 2 * axis + (np.take_along_axis(local, axis[None], 0)[0] > 0)

    def uv(self, face: int, local: np.ndarray) -> np.ndarray:
        """[2,n] in [0,1] of points on a face: u to the right and v down as one sees the face."""
        if self.sphere:
            x, y, z = local / self.half[0]
            return np.stack([np.arctan2(y, x) / (2 * np.pi) + 0.5, np.arccos(np.clip(z, -1, 1)) / np.pi])
        a, b = AXES[face // 2]
        return np.stack([0.5 + 0.5 * self._mirror(face) * local[a] / self.half[a], 0.5 - 0.5 * local[b] / self.half[b]])

    def points(self, face: int, w: int, h: int) -> tuple[np.ndarray, np.ndarray]:
        """World points and normals [3,h*w] at the texel centres of a w x h texture: the inverse of uv()."""
        u, v = (a.ravel() for a in np.meshgrid((np.arange(w) + 0.5) / w, (np.arange(h) + 0.5) / h))
        p, n = np.zeros((3, len(u))), np.zeros((3, len(u)))
        if self.sphere:
            lon, lat = (u - 0.5) * 2 * np.pi, v * np.pi
            n[:] = np.sin(lat) * np.cos(lon), np.sin(lat) * np.sin(lon), np.cos(lat)
            p[:] = n * self.half[0]
        else:
            (a, b), axis, sign = AXES[face // 2], face // 2, 2 * (face % 2) - 1
            p[a], p[b], p[axis] = self._mirror(face) * (2 * u - 1) * self.half[a], (1 - 2 * v) * self.half[b], sign * self.half[axis]
            n[axis] = -sign if self.inside else sign
        return (self.R.T @ p + self.center[:, None]).astype(np.float32), (self.R.T @ n).astype(np.float32)

    def _mirror(self, face: int) -> int:
        """-1 where u runs against its axis so that writing on the face is not mirrored."""
        return -1 if (face in (0, 3)) != (self.inside and face < 4) else 1

    @property
    def faces(self) -> range:
        return range(1 if self.sphere else 6)

    def size(self, face: int) -> tuple[float, float]:
        """Width and height in metres of a face's texture."""
        if self.sphere:
            return 2 * np.pi * self.half[0], np.pi * self.half[0]
        return tuple(2 * float(self.half[axis]) for axis in AXES[face // 2])


@dataclass(frozen=True)
class Hit:
    """First hits of rays from origin [3,1]: t [n] float32, solid [n] index."""
    t: np.ndarray
    solid: np.ndarray
    origin: np.ndarray


class Room:
    """Furnished and lit; takes a few seconds to make. The seed changes grain, books and noise, not the furniture."""

    def __init__(self, seed: int = 0):
        from .room_furniture import furniture
        self.solids = furniture()
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            self._bake(seed, pool)

    def cast(self, origin: np.ndarray, directions: np.ndarray) -> Hit:
        """Nearest hit of every ray; inside the closed room every ray hits. origin [3], directions [3,n] float32."""
        origin = np.asarray(origin, np.float32).reshape(3, 1)
        t, solid = np.full(directions.shape[1], np.inf, np.float32), np.zeros(directions.shape[1], np.int16)
        axis = directions.mean(1) / np.linalg.norm(directions.mean(1))
        half_angle = np.arccos(np.clip(axis @ directions / np.sqrt((directions * directions).sum(0)), -1, 1)).max()
        for i, s in enumerate(self.solids):
            if not s.meets_cone(origin[:, 0], axis, half_angle):
                continue
            ti = s.intersect(origin, directions)
            solid[ti < t] = i
            np.minimum(t, ti, out=t)
        return Hit(t, solid, origin)

    def color(self, hit: Hit, directions: np.ndarray, pixel: float) -> np.ndarray:
        """[n,3] radiance. `pixel`: width of a ray at distance 1, chooses the level of the texture pyramid (trilinear)."""
        out = np.empty((len(hit.t), 3), np.float32)
        for i in np.unique(hit.solid):
            s, mine = self.solids[i], np.nonzero(hit.solid == i)[0]
            d, t = directions[:, mine], hit.t[mine]
            local = s.local(hit.origin + t * d)
            level = np.log2(np.maximum(t * np.sqrt((d * d).sum(0)) * pixel / tex.TEXEL_M, 1))
            faces = s.face_of(local)
            for face in np.unique(faces):
                at = np.nonzero(faces == face)[0]
                out[mine[at]] = _sample(s.textures[face], s.uv(face, local[:, at]), level[at])
        return out

    def _bake(self, seed: int, pool: ThreadPoolExecutor) -> None:
        """Textures of all faces: drawn, then multiplied by the irradiance of all faces' lightmap points, computed at once."""
        jobs = [(i, s, face) for i, s in enumerate(self.solids) for face in s.faces]
        albedo = list(pool.map(lambda job: _draw(seed, *job), jobs))
        lit = [k for k, (_, s, _) in enumerate(jobs) if not s.emissive]
        grids = [[max(4, round(n / LIGHTMAP_M)) for n in jobs[k][1].size(jobs[k][2])] for k in lit]
        points, normals = zip(*(jobs[k][1].points(jobs[k][2], *grid) for k, grid in zip(lit, grids)))
        chunks = range(0, sum(p.shape[1] for p in points), 8192)  # small enough for the cache
        points, normals = np.hstack(points), np.hstack(normals)
        light = np.hstack(list(pool.map(lambda c: self._irradiance(points[:, c:c + 8192], normals[:, c:c + 8192]), chunks)))
        start = 0
        for k, (w, h) in zip(lit, grids):
            patch = np.ascontiguousarray(light[:, start:start + w * h].T).reshape(h, w, 3)
            start += w * h
            patch = cv2.resize(cv2.GaussianBlur(patch, (3, 3), 0), albedo[k].shape[1::-1], interpolation=cv2.INTER_LINEAR)
            albedo[k] = albedo[k] * patch
        for (_, s, face), pyramid in zip(jobs, pool.map(_pyramid, albedo)):
            s.textures[face] = pyramid

    def _irradiance(self, points: np.ndarray, normals: np.ndarray) -> np.ndarray:
        """[3,n], divided by pi: from the lamps with soft shadows, and from all round, less in corners (ambient occlusion),
        more from below (light that the floor returns)."""
        start = points + 2e-3 * normals
        total = AMBIENT * (self._openness(start, normals) * (1 + 0.7 * np.maximum(-normals[2], 0)))
        for center, edge_u, edge_v, radiance in LAMPS:
            center, edge_u, edge_v, radiance = (np.array(a, np.float32)[:, None] for a in (center, edge_u, edge_v, radiance))
            facing = np.cross(edge_u, edge_v, axis=0)
            area, facing = 4 * np.linalg.norm(facing), facing / np.linalg.norm(facing)
            grid = [(a, b) for a in (-0.75, -0.25, 0.25, 0.75) for b in (-0.75, -0.25, 0.25, 0.75)]
            for a, b in grid:
                d = center + np.float32(a) * edge_u + np.float32(b) * edge_v - start
                r2 = (d * d).sum(0)
                cosines = np.maximum((d * normals).sum(0), 0) * np.abs((d * facing).sum(0)) / r2
                lit = np.nonzero(cosines > 1e-5)[0]
                lit = lit[~self._blocked(start[:, lit], d[:, lit])]
                total[:, lit] += cosines[lit] / (r2[lit] + 0.05) * (area / len(grid) / np.pi) * radiance
        return total

    def _blocked(self, start: np.ndarray, d: np.ndarray) -> np.ndarray:
        """Whether something that casts a shadow lies between start and start + d."""
        hit = np.zeros(d.shape[1], bool)
        for s in self.solids:
            if not (s.inside or s.emissive):
                hit |= s.intersect(start, d) < 0.999
        return hit

    def _openness(self, start: np.ndarray, normals: np.ndarray, rays: int = 32) -> np.ndarray:
        """[n] in [0,1]: 1 - exp(-distance) averaged over cosine-distributed directions (a Fibonacci spiral on the disc)."""
        k = np.arange(rays) + 0.5
        r, phi = np.sqrt(k / rays), k * np.pi * (3 - np.sqrt(5))
        side = np.where(np.abs(normals[2]) < 0.9, [[0], [0], [1]], [[1], [0], [0]])
        x = np.cross(side, normals, axis=0)
        x /= np.linalg.norm(x, axis=0)
        y = np.cross(normals, x, axis=0)
        out = np.zeros(start.shape[1], np.float32)
        for a, b, c in zip(r * np.cos(phi), r * np.sin(phi), np.sqrt(1 - r * r)):
            d = (a * x + b * y + c * normals).astype(np.float32)
            nearest = np.full(len(out), np.inf, np.float32)
            for s in self.solids:
                np.minimum(nearest, s.intersect(start, d), out=nearest)
            out += 1 - np.exp(-nearest / 0.6)
        return out / rays


def _draw(seed: int, index: int, s: Solid, face: int) -> np.ndarray:
    """The albedo (emissive: radiance) of a face, [h,w,3] float32."""
    draw = s.draw[face] if face in s.draw else s.draw[-1]
    return draw(*s.size(face), np.random.default_rng([seed, index, face])).astype(np.float32)


def _pyramid(image: np.ndarray) -> list[np.ndarray]:
    levels = [np.ascontiguousarray(image, np.float32)]
    while min(levels[-1].shape[:2]) > 4:
        h, w = levels[-1].shape[:2]
        levels.append(cv2.resize(levels[-1], (max(1, w // 2), max(1, h // 2)), interpolation=cv2.INTER_AREA))
    return levels


def _sample(pyramid: list[np.ndarray], uv: np.ndarray, level: np.ndarray) -> np.ndarray:
    """Trilinear lookup: uv [2,n] in [0,1], level [n] >= 0 -> [n,3]."""
    level = np.minimum(level, len(pyramid) - 1)
    out = np.zeros((len(level), 3), np.float32)
    for k in range(int(level.min()), int(np.ceil(level.max())) + 1):
        image, weight = pyramid[k], np.maximum(1 - np.abs(level - k), 0).astype(np.float32)
        at = np.nonzero(weight)[0]
        for part in np.array_split(at, -(-len(at) // 32000) or 1):  # cv2.remap takes at most 32767 in a row
            if len(part):
                x, y = (uv[:, part] * np.array(image.shape[1::-1])[:, None] - 0.5).astype(np.float32)
                value = cv2.remap(image, x[None], y[None], cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE)[0]
                out[part] += weight[part, None] * value
    return out
