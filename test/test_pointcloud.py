"""pointcloud.py: every layout of a PointCloud2 gives the same points; what cannot be used is refused with its fields and what to do."""
import messages as m
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from spirula_ros.convert import BadMessage
from spirula_ros.pointcloud import cloud_fields, points_from_msg

XYZ = np.random.default_rng(0).normal(0, 5, (60, 3)).astype(np.float32)
FLOAT = {7: np.float32, 8: np.float64}


@settings(max_examples=60, deadline=None)
@given(st.permutations(["x", "y", "z", "intensity", "ring"]), st.tuples(*[st.sampled_from([7, 8])] * 3), st.integers(0, 9), st.integers(0, 13), st.integers(0, 30),
       st.booleans(), st.sampled_from([(1, 60), (6, 10), (60, 1)]))
def test_every_layout(order, datatypes, gap, tail, row_tail, big, shape):
    """Fields in any order and at any offset, padding inside points and behind rows, both floats, both byte orders, organised or not."""
    kinds, offset, fields, at = dict(zip("xyz", datatypes)) | {"intensity": 7, "ring": 4}, gap, [], {}
    for name in order:
        at[name] = offset
        fields.append((name, offset, kinds[name], 1))
        offset += (8 if kinds[name] == 8 else 2 if kinds[name] == 4 else 4) + gap
    step = offset + tail
    row_step = step * shape[1] + row_tail
    data = np.random.default_rng(1).integers(0, 256, shape[0] * row_step).astype(np.uint8)  # what is not x, y, z is anything
    for i, axis in enumerate("xyz"):
        size = np.dtype(FLOAT[kinds[axis]]).itemsize
        values = XYZ[:, i].astype(np.dtype(FLOAT[kinds[axis]]).newbyteorder(">" if big else "<"))
        for p in range(60):
            start = p // shape[1] * row_step + p % shape[1] * step + at[axis]
            data[start:start + size] = np.frombuffer(values[p:p + 1].tobytes(), np.uint8)  # a scalar would be native
    points = points_from_msg(m.cloud(1, fields, step, data.tobytes(), shape, row_step, big))
    assert points.dtype == np.float32
    np.testing.assert_array_equal(points, XYZ)


@pytest.mark.parametrize("family", ["rosbags", "rclpy"])
def test_both_message_families_and_what_we_write(family):
    np.testing.assert_array_equal(points_from_msg(m.cloud_of(1, XYZ, family=family)), XYZ)
    fields = cloud_fields(XYZ)
    assert (fields.height, fields.width, fields.point_step, fields.row_step, fields.is_dense) == (1, 60, 12, 720, True)


def test_points_that_are_none():
    points = XYZ.copy()
    points[3], points[4, 1], points[5, 2], points[6] = 0, np.nan, np.inf, (0, 0, 1)
    kept = points_from_msg(m.cloud_of(1, points))
    np.testing.assert_array_equal(kept, np.delete(points, [3, 4, 5], 0))
    huge = np.array([[1e300, 0, 0], [1, 2, 3]])
    fields = [(axis, 8 * i, 8, 1) for i, axis in enumerate("xyz")]
    np.testing.assert_array_equal(points_from_msg(m.cloud(1, fields, 24, huge.tobytes(), (1, 2))), [[1, 2, 3]])


@pytest.mark.parametrize("shape", [(1, 0), (0, 0), (0, 5)])
def test_an_empty_cloud_is_no_error(shape):
    assert points_from_msg(m.cloud(1, [(axis, 4 * i, 7, 1) for i, axis in enumerate("xyz")], 12, b"", shape)).shape == (0, 3)


def test_one_row_needs_no_row_step():
    assert len(points_from_msg(m.cloud(1, [(axis, 4 * i, 7, 1) for i, axis in enumerate("xyz")], 12, XYZ.tobytes(), (1, 60), row_step=0))) == 60


GOOD = [("x", 0, 7, 1), ("y", 4, 7, 1), ("z", 8, 7, 1)]
BAD = {  # case -> (fields, point_step, bytes, row_step, what the text must hold)
    "no z": (GOOD[:2], 12, 720, 720, ["x FLOAT32 at 0, y FLOAT32 at 4", "topics.points"]),
    "no fields": ([], 12, 720, 720, ["fields are: none"]),
    "polar": ([("range", 0, 7, 1), ("azimuth", 4, 7, 1)], 12, 720, 720, ["range FLOAT32 at 0", "Cartesian"]),
    "integers": ([("x", 0, 3, 1), *GOOD[1:]], 12, 720, 720, ["x INT16 at 0"]),
    "unknown datatype": ([("x", 0, 99, 1), *GOOD[1:]], 12, 720, 720, ["x 99 at 0"]),
    "arrays": ([("x", 0, 7, 3), *GOOD[1:]], 12, 720, 720, ["each one FLOAT32"]),
    "z beyond the point": (GOOD, 11, 720, 720, ["within point_step 11", "z FLOAT32 at 8"]),
    "point_step 0": (GOOD, 0, 720, 720, ["point_step 0"]),
    "data is cut": (GOOD, 12, 719, 720, ["720 bytes of data, has 719", "cut"]),
    "no data": (GOOD, 12, 0, 720, ["has 0"]),
}


@pytest.mark.parametrize("case", BAD)
def test_unusable_clouds(case):
    fields, step, n, row_step, words = BAD[case]
    with pytest.raises(BadMessage) as caught:
        points_from_msg(m.cloud(1, fields, step, bytes(n), (1, 60), row_step))
    assert caught.value.reason == "bad_points" and all(word in caught.value.text for word in words), caught.value.text


def test_rows_that_overlap_are_refused():
    with pytest.raises(BadMessage, match="row_step of at least 120"):
        points_from_msg(m.cloud(1, GOOD, 12, bytes(720), (6, 10), 60))
