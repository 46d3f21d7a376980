"""/diagnostics: what is well, what went wrong since the last message, and who publishes what does not come."""
import conftest
import numpy as np
import pytest

rclpy = conftest.importorskip("rclpy", "source a ROS 2 installation for this Python, or pip install 'spirula_ros[ros]'")
conftest.importorskip("spirula_ros.msg", "build the messages: make develop")
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus

from node_rig import Rig
from spirula_gpu.report import VramReport
from spirula_ros.diagnostics import memory_report

OK, WARN, ERROR = DiagnosticStatus.OK, DiagnosticStatus.WARN, DiagnosticStatus.ERROR


pytestmark = pytest.mark.usefixtures("ros")


@pytest.fixture
def rig():
    rig = Rig(**{"publish.diagnostics_hz": 20.0, "watch.silence_s": 1.0})
    rig.arrays = []
    rig.robot.create_subscription(DiagnosticArray, "/diagnostics", rig.arrays.append, 10)
    rig.until(lambda: rig.arrays)
    yield rig
    rig.close()


def newest(rig, name: str):
    """The newest status of that name, of this rig."""
    return {s.name: s for s in rig.arrays[-1].status}[f"{rig.namespace[1:]}/spirula: {name}"]


def values(status) -> dict:
    return {v.key: v.value for v in status.values}


def test_one_status_for_each_topic_and_part(rig):
    names = {s.name.split(": ")[1] for s in rig.arrays[-1].status}
    assert names == {f"topic {rig.namespace}/{t}" for t in ("image", "depth", "camera_info", "pose")} | {"frames", "trainer", "memory", "map"}
    assert all(s.hardware_id == "spirula" for s in rig.arrays[-1].status)


def test_well_while_frames_come_and_wrong_when_one_is_dropped(rig):
    rig.connected()
    rig.send_frame()
    rig.send_frame()
    rig.until(lambda: newest(rig, f"topic {rig.namespace}/image").level == OK and values(newest(rig, "frames"))["used"] == "2")
    assert newest(rig, "frames").level == OK and "Hz" in newest(rig, f"topic {rig.namespace}/image").message
    rig.send_frame(wrong="short image")
    rig.until(lambda: newest(rig, "frames").level == WARN)
    rig.until(lambda: any("bad_image_size 1" in s.message for a in rig.arrays for s in a.status if s.name.endswith("/image") and s.level == WARN))
    rig.until(lambda: newest(rig, "frames").level == OK)   # over again
    assert values(newest(rig, "frames"))["dropped bad_image_size"] == "1"


def test_silence_is_an_error_that_names_the_publishers(rig):
    topic = f"topic {rig.namespace}/pose"
    rig.until(lambda: newest(rig, topic).level == ERROR)
    assert "nothing yet: 1 publisher" in newest(rig, topic).message
    rig.robot.destroy_publisher(rig.pose)
    rig.until(lambda: "NO PUBLISHER" in newest(rig, topic).message)


def test_a_topic_that_stops_is_an_error_and_camera_info_may(rig):
    rig.connected()
    rig.send_frame()
    rig.until(lambda: "nothing for" in newest(rig, f"topic {rig.namespace}/image").message)
    assert newest(rig, f"topic {rig.namespace}/image").level == ERROR and newest(rig, f"topic {rig.namespace}/camera_info").level == OK


def test_incompatible_publishers_are_counted():
    rig = Rig(**{"publish.diagnostics_hz": 20.0, "qos.sensors": "reliable"})
    rig.arrays = []
    rig.robot.create_subscription(DiagnosticArray, "/diagnostics", rig.arrays.append, 10)
    try:
        rig.until(lambda: rig.arrays and values(newest(rig, f"topic {rig.namespace}/image"))["publishers with incompatible QoS"] == "1")
    finally:
        rig.close()


def test_a_failed_mapper_and_an_internal_error(rig):
    rig.session.safely("a test", lambda: 1 / 0)()
    rig.until(lambda: newest(rig, "trainer").level == WARN and "ZeroDivisionError" in newest(rig, "trainer").message)
    rig.mapper.fail("out of memory in the test")
    rig.until(lambda: newest(rig, "trainer").level == ERROR)
    assert "out of memory in the test" in newest(rig, "trainer").message


def test_memory_near_its_budget_warns():
    report = lambda total: memory_report(VramReport((), {"splat": (total, total)}, total, 0, 100 << 20, 0, 0, 0))
    assert report(50 << 20).level == OK and report(99 << 20).level == WARN and "of 100 MiB" in report(99 << 20).message


def test_the_last_stamp_keeps_its_milliseconds(rig):
    rig.connected()
    rig.sent = 17_960_951_235   # tenths of a second
    rig.send_frame(rgb=np.zeros((48, 64, 3), np.uint8))
    topic = lambda: values(newest(rig, f"topic {rig.namespace}/image"))
    rig.until(lambda: int(topic()["received"]))
    assert topic()["last stamp"] == "1796095123.600"
