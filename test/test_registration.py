"""registration.py: depth of another camera, turned and beside, against exact geometry and against what NVIDIA's node made of a real recording."""
import json
from dataclasses import replace

import numpy as np
import pytest

from shared_data import ROBUSTNESS
from spirula_gpu.camera import Camera
from spirula_ros.poses import inverse, matrix_from_pose
from spirula_ros.registration import register_depth

ISAAC = ROBUSTNESS / "isaac_depth_align"


def plane_depth(camera, T_cam_world, normal=(0.2, -0.1, -1.0), at=(0, 0, 2.0)):
    """Exact z of a slanted plane."""
    v, u = np.mgrid[:camera.height, :camera.width]
    rays = np.stack([(u + 0.5 - camera.cx) / camera.fx, (v + 0.5 - camera.cy) / camera.fy, np.ones(u.shape)], -1)
    n = T_cam_world[:3, :3] @ normal
    return (n @ (T_cam_world[:3, :3] @ at + T_cam_world[:3, 3]) / (rays @ n)).astype(np.float32)


@pytest.mark.parametrize("angle_deg, axis", [(4, (0, 1, 0)), (4, (1, 0, 0)), (90, (0, 0, 1)), (30, (0.1, 0.1, 1))])
def test_a_turned_camera_sees_the_same_plane(angle_deg, axis):
    depth_camera, color_camera = Camera(160, 120, 140, 130, 82, 58), Camera(200, 200, 190, 200, 100, 104)
    q = np.append(np.sin(np.radians(angle_deg / 2)) * np.array(axis) / np.linalg.norm(axis), np.cos(np.radians(angle_deg / 2)))
    T = matrix_from_pose((0.05, -0.02, 0.03), q)
    truth = plane_depth(color_camera, T)
    found = register_depth(plane_depth(depth_camera, np.eye(4)), depth_camera, color_camera, T)
    back = inverse(T)                                    # what of the other's image lies inside the depth camera's
    v, u = np.mgrid[:200, :200]
    X = np.stack([(u + 0.5 - color_camera.cx) / color_camera.fx * truth, (v + 0.5 - color_camera.cy) / color_camera.fy * truth, truth], -1) @ back[:3, :3].T + back[:3, 3]
    x, y = depth_camera.fx * X[..., 0] / X[..., 2] + depth_camera.cx, depth_camera.fy * X[..., 1] / X[..., 2] + depth_camera.cy
    inside = (x > 2) & (x < 158) & (y > 2) & (y < 118)
    assert inside.mean() > 0.3 and (found[inside] > 0).all(), "cracks"
    assert np.abs(found[inside] / truth[inside] - 1).max() < 0.006   # a pixel of a plane that slants by 11 degrees
    assert (found[(x < -2) | (x > 162) | (y < -2) | (y > 122)] == 0).all()


def isaac(name):
    info = json.loads((ISAAC / name).read_text())
    K = info["K"]
    return Camera(info["width"], info["height"], K[0], K[4], K[2] + 0.5, K[5] + 0.5)


def test_a_real_recording_as_nvidia_s_node_registers_it(capsys):
    """isaac_ros_depth_image_proc, test case stereo_images_chair, transforms of its launch test. What it expects was computed with the transpose of T_color_depth (its kernel
    reads Eigen's columns as rows), which is its rotation backwards and no translation; its pixels are cut, not rounded, half a pixel off. The same is asked of ours."""
    if not ISAAC.exists():
        pytest.skip(f"{ISAAC} is not there")
    optical = matrix_from_pose((0, 0, 0), (-0.5, 0.5, -0.5, 0.5))
    T_link_color = matrix_from_pose((-0.00021917633421253413, 0.014781120233237743, -8.353878365596756e-05),
                                    (-0.0038682855665683746, 0.0017180306604132056, 0.005697885062545538, 0.99997478723526)) @ optical
    T = inverse(T_link_color) @ optical
    as_they = np.eye(4)
    as_they[:3, :3] = T[:3, :3].T
    depth_m, expected = np.load(ISAAC / "non_aligned_depth.npy"), np.load(ISAAC / "aligned_depth_expected.npy")
    color = isaac("rgb_camera_info.json")

    def share(transform, camera):
        found = register_depth(depth_m, isaac("depth_camera_info.json"), camera, transform)
        assert (found[expected > 0] > 0).mean() > 0.97
        both = (found > 0) & (expected > 0)
        return (np.abs(found[both] / expected[both] - 1) < 0.01).mean()

    shares = [share(as_they, color), share(as_they, replace(color, cx=color.cx - 0.5, cy=color.cy - 0.5)), share(np.eye(4), color), share(T, color)]
    with capsys.disabled():
        print("\nwithin 1 %% of what is expected: %.4f; %.4f with pixels cut as theirs; %.4f without a transform; %.4f with T itself" % tuple(shares))
    assert shares[0] > 0.99 and shares[1] > 0.998 and max(shares[2:]) < 0.85
