"""Messages that the node publishes, compared with what rclpy makes of them."""
import numpy as np
import conftest
import pytest

conftest.importorskip("rclpy", "source a ROS 2 installation for this Python, or pip install 'spirula_ros[ros]'")
from geometry_msgs.msg import Point
from rclpy.serialization import deserialize_message, serialize_message
from std_msgs.msg import ColorRGBA
from visualization_msgs.msg import Marker, MarkerArray

from spirula_gpu.camera import Camera
from spirula_gpu.report import MeshChunk
from spirula_ros.markers import MeshMarkers
from spirula_ros.publish import camera_info_msg, depth_msg, header, image_msg

STAMP = 12_345_678_901


def chunk(key=(0, 0, 0), triangles=2, seed=0):
    rng = np.random.default_rng(seed)
    return MeshChunk(key, rng.normal(size=(5, 3)).astype(np.float32), rng.integers(0, 5, (triangles, 3)).astype(np.int32),
                     rng.integers(0, 256, (5, 3)).astype(np.uint8))


def marker_of_objects(c, id, frame_id):
    """The same marker, built the way the ROS documentation does."""
    m = Marker(header=header(STAMP, frame_id), ns="mesh", id=id, type=Marker.TRIANGLE_LIST, action=Marker.ADD)
    m.pose.orientation.w, m.scale.x, m.scale.y, m.scale.z = 1.0, 1.0, 1.0, 1.0
    m.color = ColorRGBA(r=1.0, g=1.0, b=1.0, a=1.0)
    for v in c.triangles.ravel():
        x, y, z = map(float, c.vertices[v])
        m.points.append(Point(x=x, y=y, z=z))
        r, g, b = (float(k / np.float32(255)) for k in c.colors[v])
        m.colors.append(ColorRGBA(r=r, g=g, b=b, a=1.0))
    return m


@pytest.mark.parametrize("frame_id", ["", "m", "ma", "map", "odom", "a_frame"])  # every alignment of what follows the text
def test_marker_bytes_are_those_of_rclpy(frame_id):
    chunks = [chunk((0, 0, 0), 1), chunk((1, 0, 0), 3, 1), chunk((0, -1, 2), 2, 2)]
    mesh = MeshMarkers()
    mesh.update(chunks)
    expected = MarkerArray(markers=[marker_of_objects(c, i, frame_id) for i, c in enumerate(chunks)])
    ours, theirs = mesh.next_message(STAMP, frame_id, 1000), serialize_message(expected)
    assert deserialize_message(ours, MarkerArray) == expected
    differing = [i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b]
    assert len(ours) == len(theirs) and all(ours[i] == 0 for i in differing), "only padding, which rclpy leaves as it was, may differ"
    assert not mesh.pending()


def read(mesh, limit=1000):
    return deserialize_message(mesh.next_message(STAMP, "map", limit), MarkerArray).markers


def test_mesh_sends_changes_deletes_and_everything_to_late_listeners():
    mesh, a, b = MeshMarkers(), chunk((0, 0, 0)), chunk((1, 0, 0))
    mesh.update([a, b])
    assert [m.action for m in read(mesh)] == [Marker.ADD, Marker.ADD]
    mesh.update([a, b])
    assert not mesh.pending(), "the same chunks again are no change"
    gone = MeshChunk(a.key, np.zeros((0, 3), np.float32), np.zeros((0, 3), np.int32), np.zeros((0, 3), np.uint8))
    mesh.update([gone, MeshChunk((9, 9, 9), *gone[1:])])
    markers = read(mesh)
    assert [(m.id, m.action) for m in markers] == [(0, Marker.DELETE)], "an unknown empty chunk is nothing to delete"
    mesh.resend()
    assert [(m.id, m.action, len(m.points)) for m in read(mesh)] == [(1, Marker.ADD, 6)]
    mesh.update([a])
    mesh.clear()
    assert [m.action for m in read(mesh)] == [Marker.DELETEALL]
    mesh.update([b])
    assert [m.id for m in read(mesh)] == [1], "a chunk keeps its id"


def test_mesh_messages_are_bounded():
    mesh = MeshMarkers()
    mesh.update([chunk((i, 0, 0), 40) for i in range(5)] + [chunk((9, 0, 0), 500)])
    sizes = []
    while mesh.pending():
        sizes.append([len(m.points) // 3 for m in read(mesh, 100)])
    assert sizes == [[40, 40], [40, 40], [40], [500]]


def test_images_keep_every_byte():
    rgb = np.random.default_rng(0).integers(0, 256, (5, 7, 3)).astype(np.uint8)
    msg = image_msg(rgb[:, ::-1], header(STAMP, "cam"))  # not contiguous
    assert (msg.encoding, msg.width, msg.height, msg.step) == ("rgb8", 7, 5, 21)
    assert np.array_equal(np.frombuffer(msg.data, np.uint8).reshape(5, 7, 3), rgb[:, ::-1])
    assert (msg.header.stamp.sec, msg.header.stamp.nanosec) == (12, 345_678_901)
    assert deserialize_message(serialize_message(msg), type(msg)) == msg


def test_unknown_depth_is_nan():
    msg = depth_msg(np.array([[0, 1.5]], np.float32), header(STAMP, "cam"))
    assert (msg.encoding, msg.step) == ("32FC1", 8)
    np.testing.assert_array_equal(np.frombuffer(msg.data, np.float32), [np.nan, 1.5])


def test_wrong_pixels_are_refused():
    with pytest.raises(ValueError, match="float64"):
        image_msg(np.zeros((2, 2)), header(0, ""))


def test_camera_info_uses_the_ros_pixel_centre():
    msg = camera_info_msg(Camera(8, 6, 10.0, 11.0, 4.0, 3.0), header(STAMP, "cam"))
    assert (msg.k[2], msg.k[5], msg.p[2], msg.p[6]) == (3.5, 2.5, 3.5, 2.5)
    assert (msg.k[0], msg.k[4], msg.width, msg.height) == (10.0, 11.0, 8, 6)


def test_chunks_of_another_map_wipe_those_of_the_last():
    mesh = MeshMarkers()
    mesh.update([chunk()], 0)
    mesh.next_message(1, "map", 1000)
    mesh.update([chunk((1, 0, 0))], 1)   # a reset between two snapshots
    first, second = deserialize_message(mesh.next_message(1, "map", 1000), MarkerArray).markers
    assert (first.action, second.action) == (Marker.DELETEALL, Marker.ADD)
    mesh.resend()
    assert len(deserialize_message(mesh.next_message(1, "map", 1000), MarkerArray).markers) == 1, "the old chunk is gone"
    mesh.update((), None)                   # and one after which nothing has come yet
    assert [m.action for m in deserialize_message(mesh.next_message(1, "map", 1000), MarkerArray).markers] == [Marker.DELETEALL]
    mesh.update([chunk()], 2)
    assert [m.action for m in deserialize_message(mesh.next_message(1, "map", 1000), MarkerArray).markers] == [Marker.ADD]
