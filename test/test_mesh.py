"""TSDF meshes of analytic depth images, and the bookkeeping of chunks."""
import sys

import conftest
import numpy as np
import pytest

from spirula_gpu.camera import Camera
from spirula_gpu.config import MeshConfig
from spirula_gpu.mesh import TsdfMesher, split

conftest.importorskip("open3d", "pip install open3d-cpu")
plyfile = conftest.importorskip("plyfile", "pip install plyfile")

CONFIG = MeshConfig(voxel_m=0.04, max_depth_m=6.0, chunk_m=1.5)
CAMERA = Camera(160, 120, 120.0, 120.0, 70.0, 55.0)
GREY = np.full((120, 160, 3), (200, 100, 50), np.uint8)


def turned(yaw, position=(0.3, 0.1, -0.2)):
    c, s = np.cos(yaw), np.sin(yaw)
    return np.array([[c, 0, s, position[0]], [0, 1, 0, position[1]], [-s, 0, c, position[2]], [0, 0, 0, 1.0]])


def rays(camera, T):
    y, x = np.mgrid[:camera.height, :camera.width] + 0.5
    d = np.stack([(x - camera.cx) / camera.fx, (y - camera.cy) / camera.fy, np.ones_like(x)], -1)
    return d @ T[:3, :3].T, T[:3, 3]


def room_depth(camera, T, half=2.0):
    """Camera z of the walls of the cube [-half, half]^3 seen from inside."""
    d, o = rays(camera, T)
    with np.errstate(divide="ignore"):
        return np.where(d > 0, (half - o) / d, (-half - o) / d).min(-1).astype(np.float32)


def sphere_depth(camera, T, centre, radius):
    d, o = rays(camera, T)
    b, a, c = d @ (o - centre), (d * d).sum(-1), ((o - centre)**2).sum() - radius**2
    hit = b * b - a * c > 0
    return np.where(hit, (-b - np.sqrt(np.where(hit, b * b - a * c, 0))) / a, 0).astype(np.float32)


def fused_room(config=CONFIG, camera=CAMERA, rgb=GREY, views=16):
    mesher = TsdfMesher(config)
    for i in range(views):
        T = turned(2 * np.pi * i / views)
        mesher.integrate(room_depth(camera, T), rgb, camera, T)
    return mesher


def test_room_lies_within_a_voxel():
    vertices, triangles, colors = fused_room().extract()
    assert len(vertices) > 5000 and triangles.max() < len(vertices)
    off_wall = np.abs(np.abs(vertices).max(1) - 2)
    assert off_wall.max() < CONFIG.voxel_m and np.median(off_wall) < CONFIG.voxel_m / 5
    assert (colors == [200, 100, 50]).all()


def test_sphere_has_the_right_radius_and_faces_outwards():
    centre, radius, mesher = np.array([0.0, 0.0, 2.0]), 0.7, TsdfMesher(CONFIG)
    for yaw in np.linspace(0, 2 * np.pi, 12, endpoint=False):
        R = turned(yaw)[:3, :3]
        T = turned(yaw, centre - R @ [0, 0, 2.0])
        mesher.integrate(sphere_depth(CAMERA, T, centre, radius), GREY, CAMERA, T)
    vertices, triangles, _ = mesher.extract()
    seen = np.abs(vertices[:, 1]) < 0.5  # the poles are seen only at a grazing angle
    assert np.abs(np.linalg.norm(vertices - centre, axis=1) - radius)[seen].max() < CONFIG.voxel_m
    a, b, c = (vertices[triangles[:, i]] - centre for i in range(3))
    assert (np.einsum("ij,ij->i", np.cross(b - a, c - a), a + b + c) > 0).mean() > 0.99


def test_the_principal_point_is_in_our_convention():
    """A slanted plane z = 2 + x / 2: half a pixel of shift would move it along z by a quarter of a sampling distance."""
    camera, T = CAMERA, np.eye(4)
    d, _ = rays(camera, T)
    depth = (2 / (1 - d[..., 0] / 2)).astype(np.float32)
    mesher = TsdfMesher(CONFIG)
    mesher.integrate(np.where(np.abs(d[..., 0]) < 0.4, depth, 0), GREY, camera, T)
    vertices, _, _ = mesher.extract()
    bias, shift = np.mean(vertices[:, 2] - 2 - vertices[:, 0] / 2), 2 / camera.fx / 2 / 2
    assert abs(bias) < 0.2 * shift, f"{bias:.5f} m; half a pixel is {shift:.5f} m"


def test_unknown_depth_adds_nothing():
    mesher = TsdfMesher(CONFIG)
    for value in (0.0, -1.0, np.nan, np.inf, 7.0):
        mesher.integrate(np.full((120, 160), value, np.float32), GREY, CAMERA, np.eye(4))
    assert [len(part) for part in mesher.extract()] == [0, 0, 0] and mesher.changed_chunks() == ()


@pytest.mark.parametrize("width, height, at", [(160, 120, (1, 1)), (160, 120, (118, 3)), (3, 120, (0, 0)), (1, 1, (0, 0)), (162, 122, (120, 160))])
def test_depth_between_the_pixels_that_open3d_looks_at_adds_nothing(width, height, at):
    mesher, depth_m = TsdfMesher(CONFIG), np.zeros((height, width), np.float32)
    depth_m[at] = 2
    mesher.integrate(depth_m, np.zeros((height, width, 3), np.uint8), CAMERA.resized(width, height), np.eye(4))
    assert [len(part) for part in mesher.extract()] == [0, 0, 0]


def test_chunks_partition_the_mesh():
    vertices, triangles, colors = fused_room().extract()
    chunks = [cut() for _, _, cut in split(vertices, triangles, colors, 1.5)]
    assert len({c.key for c in chunks}) == len(chunks) > 20
    assert sum(len(c.triangles) for c in chunks) == len(triangles)
    soup = lambda v, t: np.sort(v[t].reshape(len(t), 9).view([("", np.float32)] * 9).ravel())
    joined = np.concatenate([c.vertices[c.triangles] for c in chunks]).reshape(-1, 9)
    assert (soup(vertices, triangles) == np.sort(np.ascontiguousarray(joined).view([("", np.float32)] * 9).ravel())).all()
    for c in chunks:
        assert len(np.unique(c.triangles)) == len(c.vertices) == len(c.colors)
        centroids = c.vertices[c.triangles].mean(1)
        assert (np.floor(centroids / 1.5) == c.key).all()


def test_only_changes_are_handed_out():
    mesher = fused_room()
    first = {c.key for c in mesher.changed_chunks()}
    assert len(first) > 20 and mesher.changed_chunks() == ()
    T = turned(0.0)
    dent = room_depth(CAMERA, T)
    dent[50:60, 65:80] = 1.9  # a box in front of the wall at +z
    for _ in range(8):
        mesher.integrate(np.where(dent == np.float32(1.9), dent, 0), GREY, CAMERA, T)
    changed = mesher.changed_chunks()
    assert 0 < len(changed) < len(first) / 2
    mesher.clear()
    gone = mesher.changed_chunks()
    assert {c.key for c in gone} == first | {c.key for c in changed} and all(len(c.vertices) == 0 for c in gone)
    assert mesher.changed_chunks() == ()


def test_the_grid_grows_past_its_initial_size():
    config = MeshConfig(voxel_m=0.01, max_depth_m=6.0)
    vertices, _, _ = fused_room(config, Camera(320, 240, 240.0, 240.0, 160.0, 120.0),
                                np.full((240, 320, 3), 7, np.uint8), 12).extract()
    occupied = np.unique(np.floor(vertices / 0.16).astype(int), axis=0)
    assert len(occupied) > 1000 and np.abs(np.abs(vertices).max(1) - 2).max() < 2 * config.voxel_m


def test_write_ply(tmp_path):
    mesher = fused_room()
    mesher.write_ply(tmp_path / "mesh.ply")
    ply = plyfile.PlyData.read(tmp_path / "mesh.ply")
    vertices, triangles, _ = mesher.extract()
    assert len(ply["vertex"].data) == len(vertices) and len(ply["face"].data) == len(triangles)
    assert sorted(ply["vertex"]["x"]) == sorted(vertices[:, 0]) and set(ply["vertex"]["red"]) == {200}
    assert len(ply["face"]["vertex_indices"][0]) == 3
    TsdfMesher(CONFIG).write_ply(tmp_path / "empty.ply")
    assert len(plyfile.PlyData.read(tmp_path / "empty.ply")["vertex"].data) == 0


def test_bad_arguments_and_a_missing_open3d(monkeypatch):
    with pytest.raises(ValueError, match=r"\(10, 10\)"):
        TsdfMesher(CONFIG).integrate(np.zeros((10, 10), np.float32), GREY, CAMERA, np.eye(4))
    monkeypatch.setitem(sys.modules, "open3d", None)
    with pytest.raises(RuntimeError, match="pip install open3d"):
        TsdfMesher(CONFIG)
