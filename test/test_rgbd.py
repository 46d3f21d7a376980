"""`bag from-rgbd`: both layouts, registration against an analytic scene, every bad folder, and the real recording."""

import cv2
import numpy as np
import pytest

from shared_data import DATA
from spirula_gpu.camera import Camera
from spirula_ros import bags, rgbd
from spirula_ros.convert import depth_to_m, image_to_rgb, stamp_ns
from spirula_ros.errors import InputError
from spirula_ros.pointcloud import points_from_msg
from spirula_ros.registration import register_depth, shrink_color, shrink_depth

REDKITCHEN = DATA / "7scenes_redkitchen"
W, H = 64, 48


def rotation(axis, angle):
    axis = np.asarray(axis, float) / np.linalg.norm(axis)
    K = np.cross(np.eye(3), axis) * -1
    return np.eye(3) + np.sin(angle) * K + (1 - np.cos(angle)) * K @ K


def pose(angle=0.0, t=(0, 0, 0)):
    T = np.eye(4)
    T[:3, :3], T[:3, 3] = rotation([1, 2, 3], angle), t
    return T


def write_frame(folder, n, T, depth=None, rgb=None):
    rgb = np.full((H, W, 3), 40 + n, np.uint8) if rgb is None else rgb
    depth = np.full((H, W), 1500, np.uint16) if depth is None else depth
    cv2.imwrite(str(folder / f"frame-{n:06d}.color.png"), rgb[..., ::-1])
    cv2.imwrite(str(folder / f"frame-{n:06d}.depth.png"), depth)
    if T is not None:
        np.savetxt(folder / f"frame-{n:06d}.pose.txt", T)


@pytest.fixture
def seven(tmp_path):
    folder = tmp_path / "seven"
    folder.mkdir()
    np.savetxt(folder / "camera-intrinsics.txt", [[58.5, 0, 32], [0, 58.5, 24], [0, 0, 1]])
    for n in range(3):
        write_frame(folder, 4 * n, pose(0.1 * n, (n, 0, 0)))
    return folder


def contents(path):
    """{kind: [message]} of a bag."""
    out = {}
    with bags.open_bag(path) as bag:
        for m in bags.messages(bag, bags.pick_topics(bag)):
            out.setdefault(m.kind, []).append(m.msg)
    return out


def quiet(*_):
    pass


def test_7scenes_layout(seven, tmp_path):
    assert rgbd.make_bag(seven, tmp_path / "bag", fps=7.5, say=quiet) == 3
    found = contents(tmp_path / "bag")
    assert {k: len(v) for k, v in found.items()} == {"image": 3, "depth": 3, "info": 3, "pose": 3}
    stamps = [stamp_ns(m.header) for m in found["image"]]
    assert stamps == [1_000_000_000 + round(i * 1e9 / 7.5) for i in range(3)] == [stamp_ns(m.header) for m in found["pose"]]
    assert (image_to_rgb(found["image"][1]) == 44).all()
    assert np.allclose(depth_to_m(found["depth"][0]), 1.5)
    assert (found["info"][0].k[2], found["info"][0].k[5]) == (32, 24)  # ROS's convention in the file and in the message
    assert found["pose"][2].pose.position.x == pytest.approx(2)


def test_invalid_depth_is_zero(seven, tmp_path):
    depth = np.full((H, W), 2000, np.uint16)
    depth[0], depth[1] = 0, 65535
    write_frame(seven, 0, np.eye(4), depth)
    rgbd.make_bag(seven, tmp_path / "bag", say=quiet)
    z = depth_to_m(contents(tmp_path / "bag")["depth"][0])
    assert (z[:2] == 0).all() and np.allclose(z[2:], 2)


def test_skewed_rotation_becomes_the_nearest_one(seven):
    T = pose(0.7)
    skewed = T.copy()
    skewed[:3, :3] += 2e-4 * np.random.default_rng(0).standard_normal((3, 3))
    R = rgbd.rigid(skewed, "x")[:3, :3]
    assert np.abs(R @ R.T - np.eye(3)).max() < 1e-12 and np.abs(R - T[:3, :3]).max() < 1e-3
    for bad in (np.diag([1, 1, -1, 1.0]), 1.1 * np.eye(4), np.zeros((4, 4))):
        with pytest.raises(InputError, match="not a rotation"):
            rgbd.rigid(bad, "x")


def test_unusable_frames_are_skipped_counted_and_said(seven, tmp_path):
    T = np.eye(4)
    T[0, 3] = np.nan
    write_frame(seven, 4, T)
    (seven / "frame-000008.pose.txt").unlink()
    far = np.eye(4)
    far[0, 3] = 1e9
    for n, T in ((20, 1.1 * np.eye(4)), (21, np.zeros((4, 4))), (22, far)):
        write_frame(seven, n, T)
    said = []
    assert rgbd.make_bag(seven, tmp_path / "bag", say=said.append) == 1
    assert any("2 frames: pose is not rigid" in s for s in said) and any("1 frames: pose is more than 100000 m from the origin" in s for s in said)
    assert any("1 frames: pose is not finite" in s for s in said) and any("1 frames: depth image or pose file is missing" in s for s in said)


@pytest.mark.parametrize("break_it, message", [
    (lambda f: [p.unlink() for p in f.glob("*.color.png")], "neither a 7-Scenes folder .* nor a TUM folder"),
    (lambda f: [p.unlink() for p in f.glob("*.depth.png")], "no usable frame"),
    (lambda f: (f / "camera-intrinsics.txt").unlink(), "--intrinsics 'fx fy cx cy'"),
    (lambda f: (f / "camera-intrinsics.txt").write_text("1 2 3"), "3 numbers, expected a 3x3"),
    (lambda f: (f / "camera-intrinsics.txt").write_text("0 0 32 0 0 24 0 0 1"), "focal lengths"),
    (lambda f: (f / "frame-000004.pose.txt").write_text("1 2 x"), "frame-000004.pose.txt: could not convert"),
    (lambda f: (f / "frame-000004.pose.txt").write_text("1 2"), "2 numbers, expected a 4x4"),
    (lambda f: (f / "frame-000004.color.png").write_bytes(b"no image"), "not an image that can be read"),
    (lambda f: cv2.imwrite(str(f / "frame-000004.depth.png"), np.zeros((H, W), np.uint8)), "expected a 16-bit image"),
    (lambda f: cv2.imwrite(str(f / "frame-000004.depth.png"), np.zeros((9, 9), np.uint16)), "9x9, but the first frame has 64x48"),
])
def test_bad_folders(seven, tmp_path, break_it, message):
    break_it(seven)
    with pytest.raises(InputError, match=message):
        rgbd.make_bag(seven, tmp_path / "bag", say=quiet)
    assert not (tmp_path / "bag").exists()


def test_bad_arguments(seven, tmp_path):
    for kw, message in [(dict(size=(128, 96)), "larger than the images"), (dict(intrinsics=(50, 50, 99, 24)), "outside the 64x48 image"),
                        (dict(storage="tape"), "unknown")]:
        with pytest.raises(InputError, match=message):
            rgbd.make_bag(seven, tmp_path / "bag", say=quiet, **kw)
    with pytest.raises(InputError, match="not a folder"):
        rgbd.make_bag(tmp_path / "nowhere", tmp_path / "bag", say=quiet)
    (tmp_path / "there").mkdir()
    with pytest.raises(InputError, match="exists already"):
        rgbd.make_bag(seven, tmp_path / "there", say=quiet)


# ---- TUM ---------------------------------------------------------------------------------------------------------------

@pytest.fixture
def tum(tmp_path):
    folder = tmp_path / "tum"
    for sub in ("rgb", "depth"):
        (folder / sub).mkdir(parents=True)
    colors, depths, poses = ["# stamp file"], [], []
    for n in range(3):
        s = 1305031102 + 0.1 * n
        cv2.imwrite(str(folder / f"rgb/{n}.png"), np.full((H, W, 3), 50 + n, np.uint8))
        cv2.imwrite(str(folder / f"depth/{n}.png"), np.full((H, W), 5000 * (n + 1), np.uint16))
        colors.append(f"{s + 0.000304:.6f} rgb/{n}.png")
        depths.append(f"{s + (0.5 if n == 1 else 0.012):.6f} depth/{n}.png")
    for k in range(30):  # turning about z at 1 rad/s, 100 Hz
        poses.append(f"{1305031102 + 0.01 * k - 0.01:.4f} {0.01 * k} 0 0 0 0 {np.sin(0.005 * k)} {np.cos(0.005 * k)}")
    for name, lines in (("rgb", colors), ("depth", depths), ("groundtruth", poses)):
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")
    (folder / "intrinsics.txt").write_text("58 58 32 24\n")
    return folder


def test_tum_layout(tum, tmp_path):
    said = []
    assert rgbd.make_bag(tum, tmp_path / "bag", say=said.append) == 2
    assert any("1 frames: no depth image within 20 ms" in s for s in said)
    found = contents(tmp_path / "bag")
    assert [stamp_ns(m.header) for m in found["image"]] == [1305031102000304000, 1305031102200304000]  # exact, unlike float64
    assert np.allclose(depth_to_m(found["depth"][1]), 3)
    q = found["pose"][0].pose.orientation
    assert 2 * np.arctan2(q.z, q.w) == pytest.approx(0.010304, abs=1e-6)  # interpolated at the image's stamp
    assert found["pose"][0].pose.position.x == pytest.approx(0.010304, abs=1e-6)


def test_tum_poses_that_are_none_leave_a_gap(tmp_path):
    rows = [(n, f"{x} 0 0 0 0 0 {w}".split()) for n, (x, w) in enumerate([(0, 1), ("nan", 1), (1e9, 1), (0, 2), (0.1, 1)])]
    assert rgbd._finite_poses(rows, tmp_path)[0] == [0, 4]


def test_tum_gap_in_the_poses(tum):
    lines = (tum / "groundtruth.txt").read_text().splitlines()
    lines[3] = lines[3].replace(" 0 0 0 ", " nan 0 0 ")       # no pose: leaves a gap of 20 ms, which is bridged
    (tum / "groundtruth.txt").write_text("\n".join(lines[:8]))  # ends at 60 ms
    items, skipped = rgbd.read_tum(tum, None)
    assert len(items) == 1 and skipped["no pose on both sides within 100 ms"] == 1


@pytest.mark.parametrize("name, text, message", [
    ("rgb", "1305031102.1 a b\n", "line 1: 3 words, expected 2"), ("rgb", "soon a\n", "not a time in seconds"),
    ("groundtruth", "1 2 3 4 5 6 7 x\n", "groundtruth.txt: could not convert")])
def test_bad_tum_lists(tum, name, text, message):
    (tum / f"{name}.txt").write_text(text)
    with pytest.raises(InputError, match=message):
        rgbd.read_tum(tum, None)


def test_tum_has_its_own_stamps(tum, tmp_path):
    with pytest.raises(InputError, match="--fps"):
        rgbd.make_bag(tum, tmp_path / "bag", fps=30, say=quiet)


# ---- registration and sizes ----------------------------------------------------------------------------------------------

def two_walls(camera, shift=0.0):
    """Exact depth of a wall at 3 m and a panel, |x| < 0.3 and |y| < 0.2 at 1.5 m, from a camera at x = shift."""
    v, u = np.mgrid[:camera.height, :camera.width]
    x, y = (u + 0.5 - camera.cx) / camera.fx, (v + 0.5 - camera.cy) / camera.fy
    panel = (np.abs(1.5 * x + shift) < 0.3) & (np.abs(1.5 * y) < 0.2)
    return np.where(panel, 1.5, 3.0).astype(np.float32)


@pytest.mark.parametrize("zoom", [0.6, 0.9, 1.0, 1.7])
def test_registration_matches_what_the_other_camera_sees(zoom):
    depth_camera, b = Camera(160, 120, 146, 146, 80, 60), 0.06
    color_camera = Camera(160, 120, 146 * zoom, 146 * zoom, 80, 60)
    found = register_depth(two_walls(depth_camera), depth_camera, color_camera, rgbd.translation([-b, 0, 0]))
    truth = two_walls(color_camera, shift=b)
    edge = cv2.dilate((np.abs(cv2.Laplacian(truth, cv2.CV_32F)) > 0.1).astype(np.uint8), np.ones((5, 5))) > 0
    seen = np.zeros_like(edge)  # all but the border that only the colour camera sees, and the strip behind the panel
    half_w, half_h = int(0.5 * 160 * min(zoom, 1)) - 6, int(0.5 * 120 * min(zoom, 1)) - 3
    seen[60 - half_h:60 + half_h, 80 - half_w:80 + half_w] = True
    shadow = cv2.dilate((truth == 1.5).astype(np.uint8), np.ones((1, 2 * int(zoom * 146 * b / 1.5) + 5))) > 0
    check = seen & ~edge & (~shadow | (truth == 1.5))
    assert check.mean() > 0.15
    assert (found[check] > 0).all(), "cracks"
    assert np.abs(found[check] - truth[check]).max() < 1e-5


def test_registration_nearer_wins():
    camera = Camera(8, 1, 8, 8, 4, 0.5)
    depth = np.array([[2, 2, 2, 2, 1, 2, 2, 2]], np.float32)
    found = register_depth(depth, camera, camera, rgbd.translation([-0.125, 0, 0]))  # moves 1 m by one pixel, 2 m by half of one
    assert found[0, 3] == 1


def test_same_camera_registers_to_itself():
    camera = Camera(32, 24, 30, 31, 15, 13)
    depth = np.random.default_rng(0).uniform(1, 4, (24, 32)).astype(np.float32)
    depth[3, 4] = 0
    assert np.array_equal(register_depth(depth, camera, camera, np.eye(4)), depth)


def test_color_camera_moves_the_pose(seven, tmp_path):
    rgbd.make_bag(seven, tmp_path / "bag", color_f=52.5, color_offset=(-0.025, 0, 0), say=quiet)
    found = contents(tmp_path / "bag")
    T = pose(0.1, (1, 0, 0)) @ np.array([[1, 0, 0, 0.025], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1.0]])
    p = found["pose"][1].pose.position
    assert np.allclose([p.x, p.y, p.z], T[:3, 3], atol=1e-9)
    assert found["info"][0].k[0] == 52.5


def test_shrunk_depth_is_one_of_the_samples():
    rng = np.random.default_rng(1)
    depth = rng.uniform(1, 5, (48, 64)).astype(np.float32)
    depth[rng.random(depth.shape) < 0.4] = 0
    depth[:4, :4] = 0
    for size in ((16, 12), (20, 15), (64, 48), (48, 40)):
        small = shrink_depth(depth, *size)
        assert small.shape == size[::-1] and small.dtype == np.float32
        assert set(np.unique(small)) <= set(np.unique(depth))
    assert shrink_depth(depth, 16, 12)[0, 0] == 0
    block = depth[4:8, 8:12]
    assert shrink_depth(depth, 16, 12)[1, 2] == np.sort(block[block > 0])[(np.count_nonzero(block) - 1) // 2]


def test_a_shrunk_edge_invents_no_surface():
    depth = np.where(np.arange(64)[None] < 30, np.float32(1), np.float32(3)) * np.ones((48, 1), np.float32)
    assert set(np.unique(shrink_depth(depth, 16, 12))) == {1.0, 3.0}


def test_shrunk_color_is_the_mean():
    rgb = np.random.default_rng(2).integers(0, 256, (48, 64, 3), np.uint8)
    mean = rgb.reshape(12, 4, 16, 4, 3).mean((1, 3))
    assert np.abs(shrink_color(rgb, 16, 12) - mean).max() <= 0.51


def test_shrinking_scales_the_camera_exactly(seven, tmp_path):
    rgbd.make_bag(seven, tmp_path / "bag", size=(16, 12), say=quiet)
    k = contents(tmp_path / "bag")["info"][0].k
    assert np.allclose([k[0], k[2], k[5]], [58.5 / 4, (32 + 0.5) / 4 - 0.5, (24 + 0.5) / 4 - 0.5])


# ---- the real recording ----------------------------------------------------------------------------------------------------

@pytest.mark.skipif(not REDKITCHEN.is_dir(), reason=f"{REDKITCHEN} is not there")
def test_redkitchen_registration_agrees_with_the_colours():
    """Colours of one frame, moved into another with depth and pose, correlate better with registration (its README: 0.956)."""
    items, _ = rgbd.read_7scenes(REDKITCHEN, 7.5)
    as_given = rgbd.find_rig(REDKITCHEN, "7scenes", items[0], None, None, None, (0, 0, 0))
    registered = rgbd.find_rig(REDKITCHEN, "7scenes", items[0], None, 525.0, None, (-0.025, 0, 0))
    pairs = [(items[i], items[i + 3]) for i in range(0, 240, 20)]
    before, after = (np.mean([agreement(a, b, rig) for a, b in pairs]) for rig in (as_given, registered))
    assert after > 0.94 and after > before + 0.02


def agreement(a, b, rig):
    (rgb_a, z_a, T_a), (rgb_b, z_b, T_b) = (rgbd.read_frame(item, rig, 1000.0) for item in (a, b))
    c = rig.color
    v, u = np.nonzero(z_a > 0)
    z = z_a[v, u]
    X = np.linalg.inv(T_b) @ T_a @ np.stack([(u + 0.5 - c.cx) * z / c.fx, (v + 0.5 - c.cy) * z / c.fy, z, np.ones_like(z)])
    uu, vv = (np.round(f * X[i] / X[2] + o - 0.5).astype(int) for i, f, o in ((0, c.fx, c.cx), (1, c.fy, c.cy)))
    ok = (X[2] > 0) & (uu >= 0) & (vv >= 0) & (uu < c.width) & (vv < c.height)
    ok[ok] &= np.abs(z_b[vv[ok], uu[ok]] - X[2, ok]) < 0.05
    gray_a, gray_b = (cv2.cvtColor(rgb, cv2.COLOR_RGB2GRAY).astype(float) for rgb in (rgb_a, rgb_b))
    return np.corrcoef(gray_a[v[ok], u[ok]], gray_b[vv[ok], uu[ok]])[0, 1]


# ----------------------------------------------------------------------------------------------------------- lines

def test_lines_instead_of_depth_images(seven, tmp_path):
    """Rows of the depth image as the depth camera measured it, in its frame; /tf_static says where the colour camera is."""
    depth = np.random.default_rng(0).integers(500, 4000, (H, W)).astype(np.uint16)
    depth[:, :10] = 0
    write_frame(seven, 0, pose(), depth)
    assert rgbd.make_bag(seven, tmp_path / "bag", lines=6, color_f=60.0, color_offset=(-0.1, 0, 0), say=quiet) == 3
    found = contents(tmp_path / "bag")
    assert {k: len(v) for k, v in found.items()} == {"image": 3, "points": 3, "info": 3, "pose": 3, "tf_static": 1}
    points = points_from_msg(found["points"][0])
    z = depth[4::8, 10:] / 1000  # the middle row of each sixth
    np.testing.assert_allclose(points[:, 2], z.ravel(), rtol=1e-6)
    v = points[:, 1] / points[:, 2] * 58.5 + 24  # pixel centres at whole numbers, as in the file
    np.testing.assert_allclose(v.reshape(6, -1), np.repeat(np.arange(4, 48, 8)[:, None], W - 10, 1), atol=1e-4)
    static = found["tf_static"][0].transforms[0]
    assert (static.header.frame_id, static.child_frame_id, static.transform.translation.x) == ("camera_color_optical_frame", "camera_depth_optical_frame", -0.1)
    assert found["points"][0].header.frame_id == "camera_depth_optical_frame"
    assert found["pose"][0].pose.position.x == pytest.approx((pose()[:3, :3] @ [0.1, 0, 0])[0])


@pytest.mark.parametrize("lines", [1, H + 1])
def test_a_bad_number_of_lines(seven, tmp_path, lines):
    with pytest.raises(InputError, match=f"--lines {lines}: the depth images have {H} rows; give 2..{H}"):
        rgbd.make_bag(seven, tmp_path / "bag", lines=lines, say=quiet)
