"""Quality of service: which publishers the node hears with which parameters, what it says of the others, and that late listeners get what is latched."""
import itertools

import conftest
import numpy as np
import pytest

rclpy = conftest.importorskip("rclpy", "source a ROS 2 installation for this Python, or pip install 'spirula_ros[ros]'")
conftest.importorskip("spirula_ros.msg", "build the messages: make develop")
from nav_msgs.msg import Path
from rclpy.qos import DurabilityPolicy, HistoryPolicy, QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import Image
from visualization_msgs.msg import MarkerArray

from fake_mapper import triangle
from spirula_gpu.report import CameraPath, MeshChunk, Snapshot
from spirula_ros.msg import MapStatus, VramReport
from spirula_ros.publish import header, image_msg
from node_rig import CAMERA, Rig

RELIABLE, BEST_EFFORT, VOLATILE, LATCHED = ReliabilityPolicy.RELIABLE, ReliabilityPolicy.BEST_EFFORT, DurabilityPolicy.VOLATILE, DurabilityPolicy.TRANSIENT_LOCAL
PUBLISHERS = list(itertools.product((RELIABLE, BEST_EFFORT), (VOLATILE, LATCHED)))

pytestmark = pytest.mark.usefixtures("ros")


def qos(reliability, durability, depth=100):
    return QoSProfile(depth=depth, reliability=reliability, durability=durability)


def override(policy, value, topic="image"):
    """For a Rig that is made next: its namespace is in the name."""
    return {f"qos_overrides./rig{Rig.count + 1}/{topic}.subscription.{policy}": value}


@pytest.fixture
def rigs():
    """Makes rigs with these parameters, and closes them."""
    made = []

    def make(**parameters):
        made.append(Rig(**{"intake.depth": "ignore"} | parameters))
        return made[-1]
    yield make
    for rig in made:
        rig.close()


def send_images(rig, publisher, n=3):
    for _ in range(n):
        rig.sent += 1
        publisher.publish(image_msg(np.zeros((4, 4, 3), np.uint8), header(rig.sent * 10**8, "camera")))


@pytest.mark.parametrize("sensors", ["best_effort", "reliable"])
@pytest.mark.parametrize("policy, value", [(None, None), ("reliability", "best_effort"), ("reliability", "reliable"), ("durability", "transient_local")])
def test_images_arrive_or_it_is_said_why_not(rigs, sensors, policy, value, capfd):
    rig = rigs(**{"qos.sensors": sensors}, **(override(policy, value) if policy else {}))
    reliable, latched = (value if policy == "reliability" else sensors) == "reliable", policy == "durability"
    ours = rig.session.inputs[0].qos
    assert (ours.reliability == RELIABLE, ours.durability == LATCHED) == (reliable, latched)
    assert rig.session.inputs[1].qos.reliability.name.lower() == sensors, "the override is of one topic"
    rig.robot.destroy_publisher(rig.image)   # the rig's own
    rig.spin(0.2)
    for reliability, durability in PUBLISHERS:
        capfd.readouterr()
        publisher = rig.robot.create_publisher(Image, "image", qos(reliability, durability))
        wrong = "reliability" if reliable and reliability == BEST_EFFORT else "durability" if latched and durability == VOLATILE else ""
        seen, said = rig.mapper.ledger.counts().frames_in, []

        def told():
            said.extend(line for line in capfd.readouterr().err.splitlines() if f"{rig.namespace}/image: " in line)
            return said
        if wrong:
            line = rig.until(told)[0]
            assert "publisher(s) with another QoS" in line and "QOS INCOMPATIBLE" in line
            assert any(f"({p}) cannot be heard" in line and line.endswith(f"qos_overrides.{rig.namespace}/image.subscription.{p}") for p in ("reliability", "durability"))
            send_images(rig, publisher)
            rig.spin(0.1)
            assert rig.mapper.ledger.counts().frames_in == seen
        else:
            rig.until(publisher.get_subscription_count)
            send_images(rig, publisher)
            rig.until(lambda: rig.mapper.ledger.counts().frames_in == seen + 3)
            assert not told()
        rig.robot.destroy_publisher(publisher)


@pytest.mark.parametrize("durability, n", [("transient_local", 3), ("volatile", 0)])
def test_images_from_before_the_node_with_a_latched_subscription(rigs, durability, n):
    early = rclpy.create_node("early", namespace=f"/rig{Rig.count + 1}")
    publisher = early.create_publisher(Image, "image", qos(RELIABLE, LATCHED))
    for k in (1, 2, 3):
        publisher.publish(image_msg(np.zeros((4, 4, 3), np.uint8), header(k * 10**8, "camera")))
    rig = rigs(**override("durability", durability), **override("reliability", "reliable"))
    rig.until(publisher.get_subscription_count)
    rig.until(lambda: rig.mapper.ledger.counts().frames_in >= n)
    rig.spin(0.2)
    assert rig.mapper.ledger.counts().frames_in == n
    early.destroy_node()


def test_depth_and_history_and_other_topics(rigs):
    rig = rigs(**override("depth", 3), **override("history", "keep_all", "pose"))
    image, _, pose = (source.qos for source in rig.session.inputs)
    assert (image.depth, image.history) == (3, HistoryPolicy.KEEP_LAST) and pose.history == HistoryPolicy.KEEP_ALL
    assert rig.node.get_parameter(f"qos_overrides.{rig.namespace}/camera_info.subscription.depth").value == rig.node.ros.qos.sensor_queue
    publisher = rig.robot.create_publisher(Image, "image", qos(BEST_EFFORT, VOLATILE))
    rig.until(publisher.get_subscription_count)
    send_images(rig, publisher, 8)
    rig.spin(0.3)
    assert rig.mapper.ledger.counts().frames_in == 3, "a queue of three holds the newest three"


@pytest.mark.parametrize("policy, value", [("reliability", "quick"), ("durability", 7), ("depth", -1), ("history", "all")])
def test_an_override_that_is_none_is_refused(policy, value):
    with pytest.raises(ValueError, match="(?s)qos_overrides./rig.*/image.subscription: .*reliability best_effort or reliable"):
        Rig(**override(policy, value))


def test_an_override_without_effect_is_said(rigs, capfd):
    rigs(**override("reliability", "reliable", "camera/image"))
    said = capfd.readouterr().err
    assert f"/rig{Rig.count}/camera/image.subscription.reliability: without effect" in said and f"the topics are /rig{Rig.count}/image, " in said


# ---------------------------------------------------------------------------------------------------------------------- outputs

OUTPUTS = {"status": MapStatus, "vram": VramReport, "path": Path, "mesh": MarkerArray}
CHUNKS, TRIANGLES = 15, 100   # one chunk a message: more messages than the history of ~/mesh holds


def mapped(rig):
    """A map: a path, and a mesh in many messages."""
    chunks = tuple(MeshChunk((i, 0, 0), (t := triangle()).vertices, np.tile(t.triangles, (TRIANGLES, 1)), t.colors) for i in range(CHUNKS))
    rgb, one = np.zeros((48, 64, 3), np.uint8), np.ones((48, 64), np.float32)
    rig.mapper.latest.set(Snapshot(1, 1, CAMERA, np.eye(4), rgb, one, one, rig.mapper.status(), rig.mapper.vram(), chunks))
    rig.mapper.path.set(CameraPath(np.array([1, 2]), np.stack([np.eye(4)] * 2)))


@pytest.mark.parametrize("durability", [VOLATILE, LATCHED])
def test_a_late_listener_gets_everything(rigs, durability):
    rig = rigs(**{"publish.mesh_triangles": TRIANGLES, "publish.mesh_hz": 1000.0})
    mapped(rig)
    early = rig.hear(MarkerArray, "mesh", qos(RELIABLE, LATCHED))
    ids = lambda heard: {marker.id for message in heard for marker in message.markers}
    rig.until(lambda: len(ids(early)) == CHUNKS)
    rig.spin(0.2)
    late = {name: rig.hear(kind, name, qos(RELIABLE, durability)) for name, kind in OUTPUTS.items()}
    rig.until(lambda: all(late.values()) and len(ids(late["mesh"])) == CHUNKS)
    assert len(late["path"][-1].poses) == 2 and late["status"][-1].gaussians == 1000 and late["vram"][-1].total_bytes
    assert all(len(marker.points) == 3 * TRIANGLES for message in late["mesh"] for marker in message.markers)


def test_what_is_latched_reaches_a_listener_without_the_executor(rigs):
    """The middleware itself keeps the newest of each: the node may be busy, or stopped between two of its own."""
    rig = rigs()
    mapped(rig)
    early = [rig.hear(kind, name, qos(RELIABLE, LATCHED)) for name, kind in OUTPUTS.items()]
    rig.until(lambda: all(early))
    rig.executor.remove_node(rig.node)
    late = [rig.hear(kind, name, qos(RELIABLE, LATCHED)) for name, kind in OUTPUTS.items()]
    rig.until(lambda: all(late))
    rig.executor.add_node(rig.node)


def test_a_listener_that_asks_for_more_than_is_offered_is_named(rigs, capfd):
    rig = rigs()
    rig.robot.create_subscription(Image, "spirula/render/image", lambda _: None, qos(RELIABLE, LATCHED))
    said = [""]
    rig.until(lambda: said.append(said[-1] + capfd.readouterr().err) or "than is offered" in said[-1])
    assert f"{rig.namespace}/spirula/render/image: 1 subscriber(s) ask for another QoS (durability) than is offered (reliable, volatile)" in said[-1]
