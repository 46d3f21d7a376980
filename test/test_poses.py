"""poses.py: interpolation against closed forms and properties; every reason for having no pose; trees of frames."""
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from spirula_ros.poses import NoPose, PoseBuffer, TfBuffer, interpolate, inverse, matrix_from_pose, quat_from_matrix

S = 10**9
numbers = st.floats(-1, 1, allow_subnormal=False)
quats = st.tuples(numbers, numbers, numbers, numbers).filter(lambda q: 0.1 < np.linalg.norm(q)).map(lambda q: np.array(q) / np.linalg.norm(q))
transforms = st.builds(lambda t, q: matrix_from_pose(10 * np.array(t), q), st.tuples(numbers, numbers, numbers), quats)


def at(x: float, yaw_deg: float = 0.0) -> np.ndarray:
    half = np.radians(yaw_deg) / 2
    return matrix_from_pose((x, 0, 0), (0, 0, np.sin(half), np.cos(half)))


def angle(R_a: np.ndarray, R_b: np.ndarray) -> float:
    """By the chord, which is accurate at small angles."""
    return float(2 * np.arcsin(min(1.0, np.linalg.norm(R_a[:3, :3] - R_b[:3, :3]) / np.sqrt(8))))


@given(transforms)
def test_quaternion_round_trip(T):
    q = quat_from_matrix(T)
    assert abs(np.linalg.norm(q) - 1) < 1e-12 and q[3] >= 0
    np.testing.assert_allclose(matrix_from_pose(T[:3, 3], q), T, atol=1e-12)
    np.testing.assert_allclose(inverse(T) @ T, np.eye(4), atol=1e-12)


@pytest.mark.parametrize("axis", range(3))
def test_quaternion_of_half_turns(axis):
    q = np.zeros(4)
    q[axis] = 1
    np.testing.assert_allclose(np.abs(quat_from_matrix(matrix_from_pose((0, 0, 0), q))), q, atol=1e-12)


@given(transforms, transforms, st.floats(0, 1))
def test_interpolation_lies_between(T_a, T_b, s):
    T, whole = interpolate(T_a, T_b, s), angle(T_a, T_b)
    np.testing.assert_allclose(T[:3, :3] @ T[:3, :3].T, np.eye(3), atol=1e-12)
    np.testing.assert_allclose(T[:3, 3], (1 - s) * T_a[:3, 3] + s * T_b[:3, 3], atol=1e-12)
    if whole < np.pi - 1e-2:  # at a half turn both ways are shortest
        assert abs(angle(T_a, T) - s * whole) < 1e-6 and abs(angle(T, T_b) - (1 - s) * whole) < 1e-6


@given(transforms, transforms)
def test_interpolation_ends(T_a, T_b):
    np.testing.assert_allclose(interpolate(T_a, T_b, 0.0), T_a, atol=1e-12)
    np.testing.assert_allclose(interpolate(T_a, T_b, 1.0), T_b, atol=1e-12)


def test_interpolation_takes_the_short_way():
    np.testing.assert_allclose(interpolate(at(0, 170), at(0, -170), 0.5), at(0, 180), atol=1e-12)
    np.testing.assert_allclose(interpolate(at(0, 10), at(1, 40), 1 / 3), at(1 / 3, 20), atol=1e-12)


# ------------------------------------------------------------------------------------------------------ PoseBuffer

def test_lookup_says_what_is_missing():
    poses = PoseBuffer(max_gap_s=0.5)
    assert poses.lookup(S) == NoPose("empty", "no pose has arrived")
    poses.insert(10 * S, at(0))
    np.testing.assert_array_equal(poses.lookup(10 * S), at(0))
    late, early = poses.lookup(10 * S + 250_000_000), poses.lookup(10 * S - 1)
    assert late.kind == "after_last" and late.may_come and "0.250 s" in late.text
    assert early.kind == "before_first" and not early.may_come
    poses.insert(10 * S + 500_000_000, at(1))
    np.testing.assert_allclose(poses.lookup(10 * S + 250_000_000), at(0.5))
    poses.insert(11 * S + 1, at(2))
    gap = poses.lookup(10 * S + 700_000_000)
    assert gap.kind == "gap" and not gap.may_come and "limit 0.5 s" in gap.text
    np.testing.assert_array_equal(poses.lookup(11 * S + 1), at(2))


def test_duplicates_replace_and_late_poses_are_sorted_in():
    poses = PoseBuffer(max_gap_s=0.15)
    poses.insert(10 * S, at(0))
    poses.insert(10 * S + 200_000_000, at(2))
    assert poses.lookup(10 * S + 50_000_000).kind == "gap"
    poses.insert(10 * S + 100_000_000, at(7))
    poses.insert(10 * S + 100_000_000, at(1))
    assert len(poses) == 3
    np.testing.assert_allclose(poses.lookup(10 * S + 50_000_000), at(0.5))


def test_a_restarted_clock_clears_and_is_counted():
    poses = PoseBuffer()
    for second in (10, 11, 12):
        poses.insert(second * S, at(second))
    poses.insert(11 * S, at(0))  # exactly a second late: late
    assert (poses.jumps, len(poses)) == (0, 3)
    poses.insert(11 * S - 1, at(5))
    assert (poses.jumps, len(poses), poses.newest_ns) == (1, 1, 11 * S - 1)
    poses.forget_future(10 * S)  # 10 s + 1 s > 11 s - 1 ns: these are already poses of the new time
    assert len(poses) == 1
    poses.forget_future(9 * S)
    assert (len(poses), poses.jumps) == (0, 2)


def test_the_buffer_is_bounded_in_time_and_number():
    poses = PoseBuffer(duration_s=2.0)
    for i in range(1000):
        poses.insert(i * 10_000_000, at(i))
    assert len(poses) == 201 and poses.lookup(7 * S).kind == "before_first"
    poses = PoseBuffer(max_poses=50)
    for i in range(1000):
        poses.insert(S + i, at(i))
    assert len(poses) == 50


@settings(max_examples=200)
@given(st.lists(st.integers(0, 900), min_size=1, max_size=30), st.integers(-50, 950))
def test_lookup_matches_a_slow_oracle(stamps_ms, query_ms):
    """Poses of a line x = t, inserted in any order: a lookup is x = t, or the right reason."""
    poses = PoseBuffer(max_gap_s=0.2)
    for ms in stamps_ms:
        poses.insert(100 * S + ms * 1_000_000, at(ms / 1000, ms / 20))
    found, known = poses.lookup(100 * S + query_ms * 1_000_000), sorted(set(stamps_ms))
    assert len(poses) == len(known)
    before, after = [ms for ms in known if ms <= query_ms], [ms for ms in known if ms >= query_ms]
    if query_ms in known or (before and after and after[0] - before[-1] <= 200):
        np.testing.assert_allclose(found, at(query_ms / 1000, query_ms / 20), atol=1e-9)
    else:
        assert found.kind == ("after_last" if not after else "before_first" if not before else "gap")


# -------------------------------------------------------------------------------------------------------- TfBuffer

def robot() -> TfBuffer:
    """map -> odom -> base -> (lidar, camera); odom -> base moves at 1 m/s."""
    tf = TfBuffer(max_gap_s=0.5)
    tf.insert(0, "base", "camera", at(0.1), static=True)
    tf.insert(0, "/base", "/lidar", at(0, 90), static=True)
    for i in range(11):
        tf.insert(10 * S + i * S // 10, "odom", "base", at(i / 10))
    for i in range(3):
        tf.insert(10 * S + i * S // 2, "map", "odom", at(100))
    return tf


def test_chains_up_down_and_through_a_common_ancestor():
    tf, stamp = robot(), 10 * S + 250_000_000
    np.testing.assert_allclose(tf.lookup("map", "camera", stamp), at(100.35), atol=1e-12)
    np.testing.assert_allclose(tf.lookup("camera", "map", stamp), inverse(at(100.35)), atol=1e-12)
    np.testing.assert_allclose(tf.lookup("lidar", "camera", 0), inverse(at(0, 90)) @ at(0.1), atol=1e-12)  # static: any stamp
    np.testing.assert_allclose(tf.lookup("/map", "/camera", stamp), at(100.35), atol=1e-12)
    np.testing.assert_array_equal(tf.lookup("base", "base", stamp), np.eye(4))


def test_each_edge_is_interpolated_and_each_can_be_the_reason():
    tf = robot()
    waits = tf.lookup("map", "camera", 11 * S + 1)
    assert waits.kind == "after_last" and waits.may_come and "'odom' -> 'base'" in waits.text
    assert tf.lookup("odom", "camera", 9 * S).kind == "before_first"
    tf.insert(10 * S + 5 * S, "odom", "base", at(5))
    mixed = tf.lookup("map", "camera", 12 * S)  # a gap below, not yet above: what cannot come any more decides
    assert mixed.kind == "gap" and "'odom' -> 'base'" in mixed.text


def test_a_missing_chain_is_explained():
    tf = robot()
    unknown = tf.lookup("map", "camera_optical", 10 * S)
    assert unknown.kind == "no_chain" and unknown.may_come
    assert "'camera_optical' never arrived" in unknown.text and "base, camera, lidar, map, odom" in unknown.text
    tf.insert(0, "rig", "camera2", at(0), static=True)
    broken = tf.lookup("map", "camera2", 10 * S)
    assert broken.kind == "no_chain" and "the tree breaks between 'map' and 'rig'" in broken.text
    assert TfBuffer().lookup("a", "a", 0).kind == "no_chain"
    assert "known frames: none" in TfBuffer().lookup("a", "b", 0).text


def test_a_loop_is_refused_and_a_new_parent_moves_the_frame():
    tf = robot()
    for parent, child in (("camera", "map"), ("base", "base"), ("", "x"), ("x", "")):
        with pytest.raises(ValueError, match="own ancestor"):
            tf.insert(0, parent, child, at(0), static=True)
    tf.insert(0, "map", "camera", at(3), static=True)
    np.testing.assert_array_equal(tf.lookup("map", "camera", 0), at(3))
    tf.insert(10 * S, "odom", "camera", at(4))  # static -> moving, with another parent
    assert tf.lookup("odom", "camera", 9 * S).kind == "before_first"
    tf.insert(11 * S, "base", "camera", at(5))  # moving -> moving: poses relative to the old parent are forgotten
    assert tf.lookup("base", "camera", 10 * S).kind == "before_first"


def test_a_restarted_clock_keeps_static_edges():
    tf = robot()
    tf.forget_future(5 * S)
    assert tf.lookup("odom", "base", 10 * S).kind == "empty" and tf.jumps == 2
    np.testing.assert_allclose(tf.lookup("base", "camera", 5 * S), at(0.1))


@given(st.lists(transforms, min_size=6, max_size=6))
def test_random_tree_against_products(T):
    """world -> a -> b and world -> c -> d -> e: all pairs equal the product of matrices."""
    tf = TfBuffer()
    edges = {"a": "world", "b": "a", "c": "world", "d": "c", "e": "d"}
    in_world = {"world": np.eye(4)}
    for (child, parent), step in zip(edges.items(), T):
        tf.insert(0, parent, child, step, static=True)
        in_world[child] = in_world[parent] @ step
    for target in in_world:
        for source in in_world:
            np.testing.assert_allclose(tf.lookup(target, source, 0), np.linalg.inv(in_world[target]) @ in_world[source], atol=1e-9)
