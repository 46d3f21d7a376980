"""lens.py: CameraInfo -> pinhole: binning, region of interest, rectified topics, polynomials, fisheyes, and every refusal."""
import cv2
import messages as m
import numpy as np
import pytest

from spirula_gpu.camera import Camera
from spirula_ros.convert import info_fields
from spirula_ros.errors import BadMessage
from spirula_ros.intake import IntakeConfig
from spirula_ros.lens import camera_from_info, rectifier_from_info, resolved

FAMILIES = ["rosbags", "rclpy"]
FISHEYE = [-0.01, 0.03, -0.02, 0.004]  # as of a T265


def refused(call, *args) -> BadMessage:
    with pytest.raises(BadMessage) as caught:
        call(*args)
    assert len(caught.value.text) > 40
    return caught.value


@pytest.mark.parametrize("family", FAMILIES)
def test_camera_has_the_engine_s_pixel_centres(family):
    msg = m.info(1, 640, 480, 500.0, family=family)  # cx = 319.5 in ROS: the middle of 0..639
    assert camera_from_info(msg) == Camera(640, 480, 500, 500, 320, 240)
    assert camera_from_info(m.put(msg, binning_x=2, binning_y=2)) == Camera(320, 240, 250, 250, 160, 120)
    m.put(msg, binning_x=0, binning_y=0, roi__x_offset=20, roi__y_offset=10, roi__width=100, roi__height=50)
    assert camera_from_info(msg) == Camera(100, 50, 500, 500, 300, 230)


def test_camera_round_trip():
    camera = Camera(64, 48, 50.5, 51.5, 30.25, 24.75)
    f = info_fields(camera)
    msg = m.put(m.info(1, 1, 1), width=f.width, height=f.height, k=f.k, d=f.d, distortion_model=f.distortion_model)
    assert camera_from_info(msg) == camera
    assert rectifier_from_info(msg).camera == camera
    np.testing.assert_array_equal(f.p.reshape(3, 4)[:, :3], f.k.reshape(3, 3))


def test_refused_infos():
    for k in ([0] * 9, [np.nan, 0, 1, 0, 1, 1, 0, 0, 1], [5, 0, 1, 0, -5, 1, 0, 0, 1], [5, 0, np.inf, 0, 5, 1, 0, 0, 1]):
        msg = m.put(m.info(1, 640, 480), k=k)
        assert refused(camera_from_info, msg).reason == "uncalibrated"
    with pytest.raises(BadMessage, match="calibrate"):
        rectifier_from_info(m.put(m.info(1, 640, 480), k=[0] * 9))
    assert refused(camera_from_info, m.info(1, 0, 0)).reason == "uncalibrated"
    assert refused(rectifier_from_info, m.info(1, 640, 480, d=[np.nan] * 5)).reason == "uncalibrated"
    for model, d in (("equidistant", [0.1] * 3), ("equidistant", [0.1] * 5), ("fisheye", []), ("plumb_bob", [0.1] * 7), ("double_sphere", [0.1]), ("none", [0.1] * 5)):
        error = refused(rectifier_from_info, m.info(1, 640, 480, d=d, model=model))
        assert error.reason == "unsupported_distortion" and f"'{model}' with {len(d)} coefficients" in error.text and "image_rect" in error.text
    off_centre = m.put(m.info(1, 640, 480, d=[0] * 4, model="fisheye"), k=[300, 0, 700, 0, 300, 240, 0, 0, 1])
    assert refused(rectifier_from_info, off_centre).reason == "unsupported_distortion"
    for d in ([0, 0, 5, 5, 0], [1000, 0, 0, 0, 0], [0, 0, 0, 0, 1e300], [0, 0, 1e6, 0, 0]):  # fx becomes negative, 1190 times K's, ..
        assert refused(rectifier_from_info, m.info(1, 320, 240, d=d)).reason == "unsupported_distortion", d
    with pytest.raises(BadMessage, match=r"\[1000.0, .* 100, 100 become 3.*e\+05.*limit 4x.*image_rect"):
        rectifier_from_info(m.info(1, 320, 240, d=[1000, 0, 0, 0, 0]))
    for model, d in (("plumb_bob", [0] * 5), ("", []), ("rational_polynomial", [0] * 8), ("inverse_brown_conrady", [0] * 5)):
        assert rectifier_from_info(m.info(1, 640, 480, d=d, model=model)).camera.fx == 100


@pytest.mark.parametrize("d, model", [([-0.3, 0.1, 0.001, -0.002, 0], "plumb_bob"), ([0.15, 0, 0, 0], "plumb_bob"),
                                      ([0.2, 0.1, 0.001, 0, 0.01, 0.1, 0.05, 0.01], "rational_polynomial"),
                                      ([0.2, 0.1, 0.001, 0, 0.01, 0.1, 0.05, 0.01, 0, 0, 0, 0], "rational_polynomial")])
def test_rectified_points_lie_where_a_pinhole_projects_them(d, model):
    """Independent oracle: the distortion polynomial of OpenCV's documentation, in numpy, on single bright points."""
    width, height = 320, 240
    lens = rectifier_from_info(m.info(1, width, height, 250.0, d=d, model=model))
    k1, k2, p1, p2, k3, k4, k5, k6 = [*d, 0, 0, 0, 0][:8]
    for x, y in ((0.0, 0.0), (0.3, 0.2), (-0.35, 0.1), (0.1, -0.28)):
        r2 = x * x + y * y
        radial = (1 + k1 * r2 + k2 * r2**2 + k3 * r2**3) / (1 + k4 * r2 + k5 * r2**2 + k6 * r2**3)
        u = 250 * (x * radial + 2 * p1 * x * y + p2 * (r2 + 2 * x * x)) + (width - 1) / 2
        v = 250 * (y * radial + p1 * (r2 + 2 * y * y) + 2 * p2 * x * y) + (height - 1) / 2
        columns, rows = np.meshgrid(np.arange(width), np.arange(height))
        blob = np.exp(-((columns - u)**2 + (rows - v)**2) / (2 * 3.0**2))
        out = lens.rgb(np.dstack([np.round(255 * blob).astype(np.uint8)] * 3))[..., 0].astype(float)
        centre = np.array([(out * (columns + 0.5)).sum(), (out * (rows + 0.5)).sum()]) / out.sum()  # the engine's pixel centres
        expected = [lens.camera.fx * x + lens.camera.cx, lens.camera.fy * y + lens.camera.cy]
        np.testing.assert_allclose(centre, expected, atol=0.15)


def test_rectified_images_have_no_empty_border_and_no_invented_depth():
    for d in ([-0.3, 0.1, 0, 0, 0], [0.2, 0.05, 0, 0, 0]):
        lens = rectifier_from_info(m.info(1, 320, 240, 250.0, d=d))
        assert lens.camera.width == 320 and lens.camera.height == 240 and lens.camera != lens.raw
        assert lens.rgb(np.full((240, 320, 3), 255, np.uint8)).min() == 255
        checker = (np.indices((240, 320)).sum(0) // 8 % 2 * 4 + 1).astype(np.float32)
        depth = lens.nearest(checker)
        assert set(np.unique(depth)) <= {0, 1, 5} and (depth == 0).mean() < 0.01


# --------------------------------------------------------------------------------------------------------- fisheye

@pytest.mark.parametrize("model, d", [("equidistant", FISHEYE), ("fisheye", [0, 0, 0, 0]), ("kannala_brandt", FISHEYE), ("equidistant", [*FISHEYE, 0])])
def test_a_fisheye_becomes_a_pinhole(model, d):
    """Oracle: cv2.fisheye, which maps the same pinhole camera to the same places of the raw image."""
    lens = rectifier_from_info(m.info(1, 320, 240, 110.0, d=d, model=model))
    c = lens.camera
    K = np.array([[110, 0, 159.5], [0, 110, 119.5], [0, 0, 1]], np.float64)
    new_K = np.array([[c.fx, 0, c.cx - 0.5], [0, c.fy, c.cy - 0.5], [0, 0, 1]])
    columns, rows = cv2.fisheye.initUndistortRectifyMap(K, np.array(d[:4], np.float64), np.eye(3), new_K, (c.width, c.height), cv2.CV_32FC1)
    ours, seen = lens._maps[:2], lens.seen == 1
    assert seen.mean() > 0.6
    np.testing.assert_allclose(ours[0][seen], columns[seen], atol=2e-3)
    np.testing.assert_allclose(ours[1][seen], rows[seen], atol=2e-3)
    inside = (columns > 0.1) & (columns < 318.9) & (rows > 0.1) & (rows < 238.9)
    np.testing.assert_array_equal(seen, inside | seen & ~inside)                     # whatever lies inside was seen,
    assert (columns[seen] >= 0).all() and (columns[seen] <= 319).all() and (rows[seen] >= 0).all() and (rows[seen] <= 239).all()   # and only that


@pytest.mark.parametrize("limit", [60.0, 130.0, 170.0])
def test_the_field_of_view_is_all_of_it_or_the_limit(limit):
    """f = 110: 320 columns are 167 degrees, 240 rows 125, the diagonal 208."""
    c = rectifier_from_info(m.info(1, 320, 240, 110.0, d=[0] * 4, model="equidistant"), False, limit).camera
    angles = np.degrees(np.arctan([c.cx / c.fx, (c.width - c.cx) / c.fx, c.cy / c.fy, (c.height - c.cy) / c.fy]))
    np.testing.assert_allclose(angles, limit / 2, atol=1e-6)
    narrow = rectifier_from_info(m.info(1, 320, 240, 400.0, d=[0] * 4, model="equidistant"), False, limit)
    corner = np.hypot(160, 120) / 400                                               # the farthest that it saw, and less than any limit but 60
    x = min(np.tan(corner) * 0.8, np.tan(np.radians(limit / 2)))
    np.testing.assert_allclose([narrow.camera.cx / narrow.camera.fx, (narrow.camera.width - narrow.camera.cx) / narrow.camera.fx], x, rtol=1e-9)
    for camera in (c, narrow.camera):                                               # pixels: as many as before, and of the same shape
        assert abs(camera.width * camera.height / (320 * 240) - 1) < 0.01 and abs(camera.fx / camera.fy - 1) < 0.01


def test_nothing_of_a_fisheye_is_cut_below_the_limit():
    """Every pixel of the raw image is seen somewhere."""
    lens = rectifier_from_info(m.info(1, 160, 120, 120.0, d=FISHEYE, model="equidistant"), False, 130.0)
    columns, rows, _ = lens._maps
    seen = lens.seen == 1
    shown = np.zeros((120, 160), bool)
    shown[np.round(rows[seen]).astype(int), np.round(columns[seen]).astype(int)] = True
    assert cv2.dilate(shown.astype(np.uint8), np.ones((5, 5), np.uint8)).all()
    assert shown[:, 0].mean() > 0.3 and shown[:, -1].mean() > 0.3 and shown[0].mean() > 0.3 and shown[-1].mean() > 0.3


def test_what_a_fisheye_did_not_see_is_black_and_masked():
    lens = rectifier_from_info(m.info(1, 320, 240, 110.0, d=FISHEYE, model="equidistant"))
    size = (lens.camera.height, lens.camera.width)
    white, depth_m = lens.rgb(np.full((240, 320, 3), 255, np.uint8)), lens.nearest(np.full((240, 320), 2.5, np.float32))
    assert white.shape == (*size, 3) and depth_m.shape == lens.seen.shape == size and lens.seen.dtype == np.uint8
    assert 0.01 < (lens.seen == 0).mean() < 0.4
    assert (white[lens.seen == 0] == 0).all() and (white[lens.seen == 1] == 255).all()
    assert (depth_m[lens.seen == 0] == 0).all() and (depth_m[lens.seen == 1] == 2.5).all()
    assert (lens.nearest(np.ones((240, 320), np.uint8)) == lens.seen).all()


def test_a_fisheye_whose_polynomial_turns_back_shows_what_is_before_that():
    """k1 = -0.3: the angle 60 degrees off the axis is bent most; what would lie beyond it is not made up."""
    lens = rectifier_from_info(m.info(1, 320, 240, 200.0, d=[-0.3, 0, 0, 0], model="equidistant"), False, 170.0)
    y, x = np.nonzero(lens.seen)
    angle = np.degrees(np.arctan(np.hypot((x + 0.5 - lens.camera.cx) / lens.camera.fx, (y + 0.5 - lens.camera.cy) / lens.camera.fy)))
    assert 55 < angle.max() < np.degrees(np.sqrt(1 / 0.9)) + 0.1


# -------------------------------------------------------------------------------------------------------- rectified

def rectified_info(**more):
    P = [90.0, 0, 150, -9, 0, 91, 110, 0, 0, 0, 1, 0]
    return m.put(m.info(1, 320, 240, 100.0, d=[-0.3, 0.1, 0, 0, 0]), p=P, **more)


def test_of_a_rectified_image_p_counts_and_d_does_not():
    lens = rectifier_from_info(rectified_info(), True)
    assert lens.camera == lens.raw == Camera(320, 240, 90, 91, 150.5, 110.5) and lens.seen is None
    image = np.zeros((240, 320, 3), np.uint8)
    assert lens.rgb(image) is image
    halved = rectifier_from_info(rectified_info(binning_x=2, binning_y=2, roi__x_offset=20, roi__y_offset=10, roi__width=100, roi__height=50), True)
    assert halved.camera == Camera(50, 25, 45, 45.5, 65.25, 50.25)
    assert rectifier_from_info(rectified_info(distortion_model="double_sphere"), True).camera.fx == 90  # whatever the lens was
    error = refused(rectifier_from_info, m.info(1, 320, 240), True)
    assert error.reason == "uncalibrated" and "P = [0.0, " in error.text and "intake.rectified raw" in error.text


@pytest.mark.parametrize("topic, word", [("/camera/image_rect", "rectified"), ("image_rect_color", "rectified"), ("/a/rectified/compressed", "rectified"), ("/a/left_Rect/compressed", "rectified"),
                                         ("/camera/image_raw", "raw"), ("/rect/image_raw", "raw"), ("/a/image_direct", "raw"), ("/a/unrectified", "raw"), ("", "raw")])
def test_auto_is_decided_by_the_last_name(topic, word):
    assert resolved(IntakeConfig(), topic).rectified == word
    for given in ("raw", "rectified"):
        assert resolved(IntakeConfig(rectified=given), topic).rectified == given


def test_a_replay_decides_by_the_bag_s_topic():
    from spirula_ros.bags import Topics
    from spirula_ros.params import split
    from spirula_ros.replay import intake_config_for
    from spirula_ros.settings import Settings
    ros, config = split({})
    for topics, word in ((Topics(image="/c/image_rect"), "rectified"), (Topics(compressed="/c/image_rect/compressed"), "rectified"), (Topics(image="/c/image_raw"), "raw")):
        assert intake_config_for(Settings(config, ros, frozenset()), topics).rectified == word
