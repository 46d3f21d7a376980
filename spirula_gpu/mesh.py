"""A triangle mesh from depth images: TSDF fusion in Open3D's sparse voxel grid, handed out in chunks that changed."""
from __future__ import annotations

import os

import numpy as np

from .camera import Camera
from .config import MeshConfig
from .ply import write_atomically
from .report import MeshChunk

BLOCK_VOXELS, INITIAL_BLOCKS = 16, 1000  # edge of an Open3D block; the grid grows beyond the initial number by itself
STRIDE = 4                               # Open3D looks for blocks at every so many-th pixel, whole strides only
MIN_WEIGHT = 0.5                         # one observation weighs 1; a voxel must weigh more than this


class MeshError(RuntimeError):
    """The mesh cannot be made here; the text says the remedy."""


class TsdfMesher:
    """Fuses depth images into one truncated signed distance field. Not thread-safe; the owner calls from one thread."""

    def __init__(self, config: MeshConfig):
        """Raises MeshError with the remedy when Open3D is not installed."""
        try:
            import open3d
        except ImportError as error:
            raise MeshError(f"the mesh needs Open3D: pip install open3d-cpu (or open3d); import says: {error}") from error
        self._o3d, self._config, self._sent = open3d, config, {}
        self.clear()

    def clear(self) -> None:
        """Forgets the surface but not what was handed out: `changed_chunks` then says what is gone."""
        self._grid, self._empty = self._new_grid(), True

    def integrate(self, depth_m: np.ndarray, rgb: np.ndarray, camera: Camera, T_world_cam: np.ndarray) -> None:
        """Adds one view. depth_m [H,W] float, camera z in m, 0 or non-finite = unknown; rgb [H,W,3] uint8;
        T_world_cam [4,4]. Raises ValueError when a shape does not match the camera."""
        size = (camera.height, camera.width)
        if depth_m.shape != size or rgb.shape != (*size, 3) or rgb.dtype != np.uint8:
            raise ValueError(f"depth_m {depth_m.shape}, rgb {rgb.dtype} {rgb.shape}: the camera says {size} and uint8 {(*size, 3)}")
        usable = (depth_m > 0) & (depth_m < self._config.max_depth_m)  # False for NaN
        height, width = (n // STRIDE * STRIDE for n in size)
        if not usable[:height:STRIDE, :width:STRIDE].any():   # Open3D raises when it finds no block
            return
        core, geometry = self._o3d.core, self._o3d.t.geometry
        image = lambda array: geometry.Image(core.Tensor(np.ascontiguousarray(array, np.float32)))
        depth, color = image(np.where(usable, depth_m, 0)), image(rgb)  # float colours, or the running mean would round down at every view
        # The grid rounds a projected voxel down to its pixel, so pixel centres are at +0.5 for it, as for our Camera.
        # (The rest of Open3D has them at integers; test_mesh.py measures which one holds.)
        intrinsic, extrinsic = core.Tensor(camera.K.astype(np.float64)), core.Tensor(np.linalg.inv(T_world_cam))
        scale, limit, truncation = 1.0, self._config.max_depth_m, self._config.truncation_voxels
        blocks = self._grid.compute_unique_block_coordinates(depth, intrinsic, extrinsic, scale, limit, truncation)
        self._grid.integrate(blocks, depth, color, intrinsic, extrinsic, scale, limit, truncation)
        self._empty = False

    def extract(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The whole mesh now: vertices [V,3] float32 (map frame, m), triangles [T,3] int32, colors [V,3] uint8.
        The order of vertices and triangles is arbitrary."""
        mesh = None if self._empty else self._grid.extract_triangle_mesh(MIN_WEIGHT)
        if mesh is None or mesh.is_empty() or "indices" not in mesh.triangle:
            return np.zeros((0, 3), np.float32), np.zeros((0, 3), np.int32), np.zeros((0, 3), np.uint8)
        colors = mesh.vertex.colors.numpy()
        return (mesh.vertex.positions.numpy().astype(np.float32), mesh.triangle.indices.numpy().astype(np.int32),
                np.rint(colors).clip(0, 255).astype(np.uint8))

    def changed_chunks(self) -> tuple[MeshChunk, ...]:
        """Chunks that differ from what the previous call handed out, and an empty chunk for each that is gone."""
        chunks, seen = [], {}
        for key, fingerprint, cut in split(*self.extract(), self._config.chunk_m):
            seen[key] = fingerprint
            if self._sent.get(key) != fingerprint:
                chunks.append(cut())
        nothing = np.zeros((0, 3), np.float32), np.zeros((0, 3), np.int32), np.zeros((0, 3), np.uint8)
        chunks += [MeshChunk(key, *nothing) for key in self._sent.keys() - seen.keys()]
        self._sent = seen
        return tuple(chunks)

    def write_ply(self, path: str | os.PathLike) -> tuple[int, int]:
        """The whole mesh as a binary .ply with vertex colours; all or nothing. Returns (vertices, triangles). Raises OSError."""
        vertices, triangles, colors = self.extract()
        header = "ply\nformat binary_little_endian 1.0\n" + f"element vertex {len(vertices)}\n"
        header += "".join(f"property float {axis}\n" for axis in "xyz")
        header += "".join(f"property uchar {name}\n" for name in ("red", "green", "blue"))
        header += f"element face {len(triangles)}\nproperty list uchar int vertex_indices\nend_header\n"
        corners = np.empty(len(vertices), [("xyz", "<f4", 3), ("rgb", "u1", 3)])
        corners["xyz"], corners["rgb"] = vertices, colors
        faces = np.empty(len(triangles), [("n", "u1"), ("corners", "<i4", 3)])
        faces["n"], faces["corners"] = 3, triangles
        write_atomically(path, header.encode(), corners.tobytes(), faces.tobytes())
        return len(vertices), len(triangles)

    def _new_grid(self):
        core = self._o3d.core
        return self._o3d.t.geometry.VoxelBlockGrid(
            attr_names=("tsdf", "weight", "color"), attr_dtypes=(core.float32,) * 3, attr_channels=((1), (1), (3)),
            voxel_size=self._config.voxel_m, block_resolution=BLOCK_VOXELS, block_count=INITIAL_BLOCKS,
            device=core.Device("CPU:0"))


def split(vertices: np.ndarray, triangles: np.ndarray, colors: np.ndarray, chunk_m: float):
    """Cuts a mesh into cubes of edge `chunk_m`; a triangle belongs to the cube of its centroid. Yields, per cube that
    holds any, (key, fingerprint, function that makes the MeshChunk)."""
    if not len(triangles):
        return
    cubes = np.floor(vertices[triangles].mean(1) / chunk_m).astype(np.int64)
    order = np.lexsort(cubes.T)
    cubes, triangles = cubes[order], triangles[order]
    starts = np.flatnonzero(np.r_[True, (cubes[1:] != cubes[:-1]).any(1)])
    fingerprints = np.add.reduceat(_triangle_hashes(vertices, triangles, colors), starts)
    for start, end, fingerprint in zip(starts, [*starts[1:], len(triangles)], fingerprints.tolist()):
        key = tuple(cubes[start].tolist())

        def cut(key=key, part=triangles[start:end]) -> MeshChunk:
            used, local = np.unique(part, return_inverse=True)
            return MeshChunk(key, vertices[used], local.reshape(-1, 3).astype(np.int32), colors[used])

        yield key, (end - start, fingerprint), cut


def _triangle_hashes(vertices: np.ndarray, triangles: np.ndarray, colors: np.ndarray) -> np.ndarray:
    """[T] uint64, meant to be summed: Open3D's threads put the same triangles in another order each time."""
    words = np.concatenate([vertices.astype(np.float32).view(np.uint32), colors.astype(np.uint32)], 1).astype(np.uint64)
    hashes = np.zeros(len(words), np.uint64)
    for column in words.T:
        hashes = _mixed(hashes + column)
    return _mixed(hashes[triangles].sum(1))


def _mixed(x: np.ndarray) -> np.ndarray:
    """splitmix64 (Vigna 2015)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
