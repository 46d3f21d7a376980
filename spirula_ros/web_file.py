"""`spirula view`: a saved map or mesh in the browser."""
from __future__ import annotations

import os
import threading

import numpy as np
from scipy.spatial.transform import Rotation

from spirula_gpu.formats import format_of, read_map
from spirula_gpu.ply import read_header
from spirula_gpu.splats import most_visible

from .errors import InputError
from .files import MESHES
from .params import WebConfig
from .web_scene import Scene, look_from, pack
from .web_server import Named, close_server, open_server


def view(path: str, config: WebConfig, up: str = "z", stop: threading.Event | None = None) -> None:
    """Until `stop` is set or Ctrl-C. up: x, -x, y, -y, z or -z. Raises InputError and FormatError, one line."""
    stop = stop or threading.Event()
    try:
        splats = None if _is_mesh(path) else read_map(path)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    if splats is not None and not len(splats.means):
        raise InputError(f"{path}: no Gaussians")
    if splats is not None and (complaint := splats.complaint()):
        print(f"{path}: {complaint}: left out; damaged?", flush=True)
        splats = splats.chosen(splats.sound())
    mesh = _read_mesh(path) if splats is None else None
    server, url = open_server(config, os.path.basename(path), Named("--host", "--port", "--token"))
    try:
        server.scene.set_up_direction("+" + up if len(up) == 1 else up)
        if splats is not None:
            shown = splats.chosen(most_visible(splats.log_scales, splats.logit_opacities, config.max_splats))
            Scene(server).put_splats(pack(shown))
            points, what = shown.means, f"{len(splats.means):,} Gaussians" + (f", {len(shown.means):,} of them shown (--max-splats)" if len(shown.means) < len(splats.means) else "")
        else:
            server.scene.add_mesh_trimesh("/mesh", mesh, cast_shadow=False)
            points, what = np.asarray(mesh.vertices), f"{len(mesh.vertices):,} vertices, {len(mesh.faces):,} triangles"
        look_from(server.initial_camera, first_pose(path) if os.path.isfile(_poses_of(path)) else outside(points, up))
        server.gui.add_markdown(f"**{os.path.basename(path)}**  \n{what}" + ("  \nbase colours, without their dependence on the view" if splats is not None else ""))
        print(f"{path}: {what}\n{url}    (Ctrl-C ends it)", flush=True)
        stop.wait()
    except KeyboardInterrupt:
        print()
    finally:
        close_server(server)


def outside(points: np.ndarray, up: str) -> np.ndarray:
    """[4,4] T_world_cam: above the middle of 90 % of the points, looking down on all of them from one side."""
    low, high = np.quantile(points, (0.05, 0.95), axis=0)
    axis = "xyz".index(up[-1])
    upward = np.eye(3)[axis] * (-1 if up[0] == "-" else 1)
    backward = np.eye(3)[(axis + 1) % 3] + 0.8 * upward
    forward = -backward / np.linalg.norm(backward)
    right = np.cross(forward, upward) / np.linalg.norm(np.cross(forward, upward))
    T = np.eye(4)
    T[:3, :3] = np.stack([right, np.cross(forward, right), forward], 1)
    T[:3, 3] = (low + high) / 2 - forward * 1.2 * max(np.linalg.norm(high - low), 0.1)
    return T


def first_pose(path: str) -> np.ndarray:
    """[4,4] T_world_cam of the poses.txt beside a map of ours. Raises InputError."""
    try:
        row = np.loadtxt(_poses_of(path), ndmin=2)[0]
        T = np.eye(4)
        T[:3, :3], T[:3, 3] = Rotation.from_quat(row[4:8]).as_matrix(), row[1:4]
        return T
    except (ValueError, IndexError) as error:
        raise InputError(f"{_poses_of(path)}: not poses (stamp tx ty tz qx qy qz qw a line): {error}") from None


def _poses_of(path: str) -> str:
    return os.path.join(os.path.dirname(os.path.abspath(path)), "poses.txt")


def _is_mesh(path: str) -> bool:
    """Raises FormatError for a suffix that is neither, OSError."""
    if path.lower().endswith(MESHES):
        return True
    format_of(path, reading=True)
    if not path.lower().endswith(".ply"):
        return False
    with open(path, "rb") as file:
        return any(element.name == "face" for element in read_header(file, path))


def _read_mesh(path: str):
    """trimesh.Trimesh. Raises InputError."""
    import trimesh
    try:
        mesh = trimesh.load(path, force="mesh", process=False)
    except Exception as error:  # many readers, each with its own
        raise InputError(f"{path}: not a mesh that trimesh reads: {type(error).__name__}: {error}") from None
    if not len(mesh.faces):
        raise InputError(f"{path}: no triangles")
    return mesh
