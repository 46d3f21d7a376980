"""What the browser draws: splats, keyframes, mesh, and a picture of our own renderer over them."""
from __future__ import annotations

from typing import Iterable

import numpy as np
from scipy.spatial.transform import Rotation

from spirula_gpu.camera import Camera
from spirula_gpu.report import MeshChunk, SplatSnapshot
from spirula_gpu.splats import Splats, as_byte, colors, covariances, opacities

UNITS = 32.0         # per metre: viser keeps covariances in float16, which ends at 6e-8 below and 65504 above: sigmas from 8 micrometres to 8 m
FRUSTUM_M = 0.12
KEYFRAME, NEWEST = (110, 160, 210), (255, 150, 40)
CORNERS = ((0, 1), (0, 2), (0, 3), (0, 4), (1, 2), (2, 3), (3, 4), (4, 1))  # lines of a frustum: the apex is 0


def pack(splats: Splats) -> np.ndarray:
    """[n,8] uint32 in viser's layout (see its GaussianSplatHandle): float32 mean [3], a free word, float16 covariance [6] (xx xy xz yy yz zz),
    RGBA bytes; lengths in 1/UNITS m. Those that are never drawn (not finite, no rotation) are left out."""
    drawn = splats.finite() & splats.quats.any(1)
    if not drawn.all():
        splats = splats.chosen(drawn)
    out, first = np.zeros((len(splats.means), 8), np.uint32), 0
    for block in splats.blocks():
        rows = out[first:first + len(block.means)]
        rows[:, :3] = (block.means * np.float32(UNITS)).view(np.uint32)
        rows[:, 4:7] = np.clip(covariances(block) * np.float32(UNITS**2), -65504, 65504).astype(np.float16).view(np.uint32)
        rgba = np.concatenate([as_byte(colors(block) * 255), as_byte(opacities(block)[:, None] * 255)], 1)
        rows[:, 7] = np.ascontiguousarray(rgba).view(np.uint32)[:, 0]
        first += len(rows)
    return out


def frustums(poses: np.ndarray, camera: Camera, depth_m: float = FRUSTUM_M) -> np.ndarray:
    """poses [K,4,4] T_world_cam -> line segments [8 K,2,3] float32."""
    x, y = (np.array([0, camera.width]) - camera.cx) / camera.fx, (np.array([0, camera.height]) - camera.cy) / camera.fy
    local = np.array([[0, 0, 0], [x[0], y[0], 1], [x[1], y[0], 1], [x[1], y[1], 1], [x[0], y[1], 1]]) * depth_m
    world = np.einsum("kij,pj->kpi", poses[:, :3, :3], local) + poses[:, None, :3, 3]
    return world[:, np.array(CORNERS)].reshape(-1, 2, 3).astype(np.float32)


def camera_of(view, longest_px: int) -> tuple[np.ndarray, Camera]:
    """(T_world_cam [4,4], camera) of a browser's view (viser.CameraHandle), its image no longer than longest_px."""
    T = np.eye(4)
    T[:3, :3], T[:3, 3] = Rotation.from_quat(np.roll(view.wxyz, -1)).as_matrix(), view.position
    shrink = min(1.0, longest_px / max(view.image_width, view.image_height))
    width, height = (max(1, round(n * shrink)) for n in (view.image_width, view.image_height))
    f = height / 2 / np.tan(view.fov / 2)
    return T, Camera(width, height, f, f, width / 2, height / 2)


def linear(colors: np.ndarray) -> np.ndarray:
    """sRGB bytes as the linear ones that glTF wants for vertices; 2.2 is near enough for a preview."""
    return as_byte(255 * (colors / 255) ** 2.2)


class Scene:
    """Nodes of a viser server. Not thread-safe: one thread calls it."""

    def __init__(self, server):
        self._server, self._splats, self._keyframes, self._newest = server, None, None, None
        self._chunks: dict[tuple, tuple[MeshChunk, object]] = {}
        self._shown = dict(splats=True, cameras=True, mesh=False)

    def show(self, what: str, visible: bool) -> None:
        """what: splats | cameras | mesh."""
        self._shown[what] = visible
        for node in {"splats": [self._splats], "cameras": [self._keyframes, self._newest], "mesh": [node for _, node in self._chunks.values()]}[what]:
            if node is not None:
                node.visible = visible

    def put_splats(self, packed: np.ndarray) -> None:
        if self._splats is None:
            nothing = np.zeros((1, 3)), np.zeros((1, 3, 3)), np.zeros((1, 3)), np.zeros((1, 1))
            self._splats = self._server.scene.add_gaussian_splats("/splats", *nothing, scale=1 / UNITS, visible=self._shown["splats"])
        self._splats.buffer = packed

    def put_cameras(self, poses: np.ndarray, camera: Camera) -> None:
        """poses [K,4,4] T_world_cam, the newest last."""
        lines, newest = frustums(poses[:-1], camera), frustums(poses[-1:], camera, 2 * FRUSTUM_M)
        if self._newest is None:
            add = dict(thickness=1.5, thickness_units="screen", visible=self._shown["cameras"])
            self._keyframes = self._server.scene.add_line_segments("/keyframes", lines, KEYFRAME, **add)
            self._newest = self._server.scene.add_line_segments("/newest", newest, NEWEST, **{**add, "thickness": 3.0})
            return
        self._keyframes.points, self._newest.points = lines, newest

    def put_mesh(self, chunks: Iterable[MeshChunk]) -> None:
        """All chunks; those that are the same objects as before cost nothing."""
        import trimesh
        for chunk in chunks:
            held, node = self._chunks.get(chunk.key, (None, None))
            if held is chunk:
                continue
            if len(chunk.triangles):
                mesh = trimesh.Trimesh(chunk.vertices, chunk.triangles, vertex_colors=linear(chunk.colors), process=False)
                name = "/mesh/" + "_".join(map(str, chunk.key))
                self._chunks[chunk.key] = chunk, self._server.scene.add_mesh_trimesh(name, mesh, visible=self._shown["mesh"], cast_shadow=False)
            elif node is not None:
                node.remove()
                del self._chunks[chunk.key]

    def clear(self) -> None:
        for node in (self._splats, self._keyframes, self._newest, *(node for _, node in self._chunks.values())):
            if node is not None:
                node.remove()
        self._splats = self._keyframes = self._newest = None
        self._chunks.clear()

    def put(self, snapshot: SplatSnapshot) -> None:
        """Splats and cameras, together."""
        packed = pack(snapshot.splats)
        with self._server.atomic():
            self.put_splats(packed)
            if snapshot.camera is not None:
                self.put_cameras(snapshot.poses, snapshot.camera)


def show_picture(client, rgb: np.ndarray) -> None:
    """rgb [H,W,3] uint8 before everything else in one browser: as a background whose depth is nearer than anything."""
    client.scene.set_background_image(rgb, format="jpeg", jpeg_quality=95, depth=np.full((8, 8), 1e-5))


def hide_picture(client) -> None:
    client.scene.set_background_image(None)


def look_from(view, T_world_cam: np.ndarray, back_m: float = 0.0) -> None:
    """Puts a viser camera (a client's, or the server's initial one) there, or so far behind: [4,4], camera axes x right, y down, z forward."""
    forward = T_world_cam[:3, 2]
    view.position = T_world_cam[:3, 3] - back_m * forward
    view.look_at = T_world_cam[:3, 3] + forward
