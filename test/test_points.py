"""points.py: what of a cloud the camera sees, and what lies between its samples."""
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from spirula_gpu.camera import Camera, Frame
from spirula_gpu.config import Config, replaced
from spirula_gpu.mapper import Mapper
from spirula_gpu.points import JUMP, fill, project, sampling_distance

W, H = 160, 120
CAMERA = Camera(W, H, 130.0, 130.0, W / 2, H / 2)
LINES = np.arange(2, H, 4)  # rows


def plane(a=0.0, b=0.0, c=0.5, width=W, height=H):
    """[H,W] float32 depth of a plane: 1/z = c + a x + b y, x and y from -1 to 1 over the image."""
    x, y = np.meshgrid(np.linspace(-1, 1, width), np.linspace(-1, 1, height))
    return (1 / (c + a * x + b * y)).astype(np.float32)


def rows_of(depth_m, rows=LINES):
    out = np.zeros_like(depth_m)
    out[rows] = depth_m[rows]
    return out


def cloud(depth_m, camera=CAMERA):
    """[P,3]: the points in the middle of the known pixels."""
    v, u = np.nonzero(depth_m)
    z = depth_m[v, u].astype(np.float64)
    return np.stack([(u + 0.5 - camera.cx) / camera.fx * z, (v + 0.5 - camera.cy) / camera.fy * z, z], 1)


# --------------------------------------------------------------------------------------------------------- project

def test_points_fall_into_the_pixels_around_them():
    sparse = rows_of(plane(0.1, 0.2))
    np.testing.assert_allclose(project(cloud(sparse), CAMERA), sparse, rtol=1e-6)
    edge = np.array([[x, y, 130.0] for x, y in ((-W / 2 + 1e-3, 0.5), (-W / 2 - 1e-3, 0.5), (W / 2 - 1e-3, 0.5), (W / 2 + 1e-3, 0.5), (0.5, H / 2 + 1e-3))])  # z = f: pixels
    seen = project(edge, CAMERA)
    assert np.flatnonzero(seen).tolist() == [H // 2 * W, H // 2 * W + W - 1]


def test_the_nearest_point_of_a_pixel_counts():
    at = np.array([[0.0, 0, 3], [0, 0, 2], [0, 0, 5]])
    assert project(at, CAMERA)[H // 2, W // 2] == 2


def test_what_cannot_be_seen_is_left_out():
    bad = np.array([[0, 0, -2.0], [0, 0, 0], [np.nan, 0, 1], [0, 0, np.nan], [np.inf, 0, 1], [1e30, 1e30, 1]])
    assert not project(bad, CAMERA).any() and not project(np.empty((0, 3)), CAMERA).any()


@pytest.mark.parametrize("spacing", [3, 4, 8])
@pytest.mark.parametrize("upright", [False, True])
def test_a_wall_behind_a_box_is_not_seen_through_the_gaps_between_its_lines(spacing, upright):
    """A box of 2 m before a wall of 4 m, and wall points between the box's lines, as from a lidar above the camera."""
    truth = np.full((H, W), 4.0, np.float32)
    truth[40:90, 50:110] = 2
    lines = np.arange(1, H, spacing)
    sparse = rows_of(truth, lines)
    through = np.zeros((H, W), bool)
    through[42 + (44 % spacing):88, 52:108:5] = True  # some columns, all rows: of them those between the lines
    through[lines] = False
    both = np.where(through, np.float32(4), sparse)
    camera = CAMERA
    if upright:
        truth, sparse, both, camera = truth.T, sparse.T, both.T, Camera(H, W, 130.0, 130.0, H / 2, W / 2)
        through = through.T
    seen = project(cloud(both, camera), camera)
    assert through.sum() > 100 and not seen[through].any()
    outside = truth == 4
    assert (seen[outside] > 0).sum() >= 0.97 * (sparse[outside] > 0).sum(), "the wall beside the box is seen up to its outline"
    assert (seen[~outside & ~through] == sparse[~outside & ~through]).all()


def test_a_dense_cloud_is_only_z_buffered():
    noisy = plane() * np.random.default_rng(0).uniform(0.8, 1.2, (H, W)).astype(np.float32)
    np.testing.assert_allclose(project(cloud(noisy), CAMERA), noisy, rtol=1e-6)


# ------------------------------------------------------------------------------------------------------------ fill

@settings(max_examples=40, deadline=None)
@given(st.floats(-0.3, 0.3), st.floats(-0.3, 0.3), st.sampled_from([2, 3, 5, 7]), st.booleans(), st.integers(0, 6))
def test_planes_are_exact(a, b, spacing, upright, first):
    truth = plane(a, b, 0.8)
    sparse = np.zeros_like(truth)
    if upright:
        sparse[:, first % spacing::spacing] = truth[:, first % spacing::spacing]
    else:
        sparse[first % spacing::spacing] = truth[first % spacing::spacing]
    out = fill(sparse)
    known = out > 0
    between = np.flatnonzero(sparse.any(0 if upright else 1))
    inside = known[:, between[0]:between[-1] + 1] if upright else known[between[0]:between[-1] + 1]
    assert inside.all() and known.sum() == inside.sum(), "all between the outer lines, nothing beyond"
    np.testing.assert_allclose(out[known], truth[known], rtol=2e-6)
    assert out.dtype == np.float32 and (out[sparse > 0] == sparse[sparse > 0]).all()


@pytest.mark.parametrize("n", [1500, 6000])
def test_scattered_samples_of_a_plane(n):
    truth, sparse = plane(0.2, -0.1), np.zeros((H, W), np.float32)
    at = np.random.default_rng(n).integers(0, H * W, n)
    sparse.reshape(-1)[at] = truth.reshape(-1)[at]
    out = fill(sparse)
    assert (out > 0).mean() > 0.9
    np.testing.assert_allclose(out[out > 0], truth[out > 0], rtol=2e-6)


@pytest.mark.parametrize("spacing", [3, 4, 7])
@pytest.mark.parametrize("far_m", [2.3, 3.0, 8.0])
def test_nothing_across_a_discontinuity(spacing, far_m):
    """A square of 2 m before a wall: every filled pixel is of one or the other, and most are filled."""
    truth = np.full((H, W), far_m, np.float32)
    truth[35:85, 45:115] = 2
    out = fill(rows_of(truth, np.arange(1, H, spacing)))
    assert not ((out > 0) & (np.abs(out - truth) > 1e-3)).any()
    assert (out > 0).mean() > 1 - 2 * 70 * spacing / (H * W) - 2 * spacing / H, "only at the upper and lower edge of the square something is missing"


def test_a_slanted_surface_is_filled_although_its_lines_are_far_apart():
    """A floor at grazing incidence: neighbouring lines differ by more than JUMP, but the surface goes on as it runs between them."""
    floor = plane(0, 0.45, 0.5)[60:]
    rows = np.arange(0, 60, 6)
    steps = np.abs(np.diff(1 / floor[rows, 0])) * floor[rows[:-1], 0]
    assert steps.max() > JUMP
    sparse = np.zeros((H, W), np.float32)
    sparse[60:] = rows_of(floor, rows)
    out = fill(sparse)[60:115]
    assert (out > 0).all()
    np.testing.assert_allclose(out, floor[:55], rtol=2e-6)


def test_nothing_where_there_is_nothing_around():
    sparse = rows_of(plane())
    sparse[:, 60:100] = 0
    out = fill(sparse)
    assert not out[:, 60:100].any() and (out[LINES[0]:LINES[-1], :60] > 0).all()
    lonely = np.zeros((H, W), np.float32)
    lonely[30, 40] = lonely[90, 100] = 2
    np.testing.assert_array_equal(fill(lonely), lonely)
    assert not fill(np.zeros((H, W), np.float32)).any()


def test_a_depth_camera_s_image_is_left_alone():
    """With its holes: neither the very same array is changed nor another one made."""
    dense = plane(0.2, 0.1)
    rng = np.random.default_rng(0)
    dense[rng.random((H, W)) < 0.1] = 0
    dense[20:50, 30:70] = 0
    before = dense.copy()
    assert fill(dense) is dense
    np.testing.assert_array_equal(dense, before)


@pytest.mark.parametrize("spacing, distance", [(1, 1), (2, 2), (4, 4), (7, 8), (14, 16)])
def test_the_sampling_distance_of_lines(spacing, distance):
    known = np.zeros((480, 640), bool)
    known[::spacing] = True
    known[:, 300:420] = False  # a hole
    known[:150] = False        # above the field of view
    assert sampling_distance(known) == distance == sampling_distance(np.ascontiguousarray(known.T))


@pytest.mark.parametrize("shape", [(1, 1), (1, 50), (50, 1), (3, 5), (33, 47)])
def test_small_and_odd_images(shape):
    depth_m = np.zeros(shape, np.float32)
    depth_m[::2, ::3] = 1.5
    out = fill(depth_m)
    assert out.shape == shape and np.isin(out, np.float32([0, 1.5])).all()
    assert project(np.array([[0, 0, 1.0]]), Camera(shape[1], shape[0], 10, 10, shape[1] / 2, shape[0] / 2)).shape == shape


# ------------------------------------------------------------------------------------------------------- insertion

def test_gaussians_are_made_between_the_lines_and_the_keyframe_keeps_what_was_measured():
    rgb = np.random.default_rng(0).integers(0, 256, (H, W, 3)).astype(np.uint8)
    sparse = rows_of(plane(), np.arange(4, H, 8))

    def inserted(depth_m):
        mapper = Mapper(replaced(Config(), {"engine.backend": "cpu", "engine.threads": 1, "train.steps_per_frame": 0}))
        mapper.ledger.arrived()
        mapper.submit(Frame(1, CAMERA, np.eye(4), rgb, depth_m))
        mapper.run_due()
        mean, keyframe = mapper._engine.read("map.mean"), mapper._keyframes.newest
        mapper.close()
        return mean, keyframe
    mean, keyframe = inserted(sparse)
    v = np.floor(mean[:, 1] / mean[:, 2] * CAMERA.fy + CAMERA.cy).astype(int)
    assert np.isin(np.arange(4, 117), v).all() and np.abs(mean[:, 2] - 2).max() < 1e-3
    assert len(mean) > 0.9 * len(inserted(plane())[0])
    np.testing.assert_array_equal(keyframe.frame.depth_m, sparse)
