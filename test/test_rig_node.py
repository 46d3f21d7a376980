"""TrainNode with several cameras, and with a clock that is restarted, over real topics."""
import conftest
import numpy as np
import pytest

rclpy = conftest.importorskip("rclpy", "source a ROS 2 installation for this Python, or pip install 'spirula_ros[ros]'")
conftest.importorskip("spirula_ros.msg", "build the messages: make develop")
from geometry_msgs.msg import PoseStamped
from rclpy.parameter import Parameter
from rosgraph_msgs.msg import Clock
from sensor_msgs.msg import CameraInfo, Image

from spirula_gpu.camera import Camera
from spirula_ros.node import TrainNode
from spirula_ros.publish import camera_info_msg, depth_msg, header, image_msg
from node_rig import BEST_EFFORT, LATCHED
from spirula_ros.msg import MapStatus
from test_node import rig  # noqa: F401 (a fixture)

BODY, REAR = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0), (0.0, 0.0, -0.2, 0.0, 1.0, 0.0, 0.0)
CAMERAS = {"front": Camera(64, 48, 60.0, 60.0, 32.0, 24.0), "rear": Camera(32, 24, 30.0, 30.0, 16.0, 12.0)}
TWO = {"topics.cameras": "front, rear", "topics.image": "{camera}/image", "topics.depth": "{camera}/depth", "topics.camera_info": "{camera}/camera_info", "intake.T_body_camera": list(BODY + REAR)}

pytestmark = pytest.mark.usefixtures("ros")


class Cameras:
    def __init__(self, rig):
        self.rig, create = rig, rig.robot.create_publisher
        self.of = {name: [create(kind, f"{name}/{topic}", BEST_EFFORT) for kind, topic in ((CameraInfo, "camera_info"), (Image, "depth"), (Image, "image"))] for name in CAMERAS}
        rig.until(lambda: all(p.get_subscription_count() for p in (*sum(self.of.values(), []), rig.pose)))

    def send(self, i, *names, ns=100_000_000):
        pose = PoseStamped(header=header((i + 1) * ns, "map"))
        pose.pose.orientation.w, pose.pose.position.x = 1.0, 0.1 * i
        self.rig.pose.publish(pose)
        for name in names:
            info, depth, image = self.of[name]
            camera, head = CAMERAS[name], header((i + 1) * ns, f"{name}_optical")
            size = camera.height, camera.width
            info.publish(camera_info_msg(camera, head))
            depth.publish(depth_msg(np.full(size, 2, np.float32), head))
            image.publish(image_msg(np.full((*size, 3), i, np.uint8), head))


@pytest.mark.parametrize("rig", [{**TWO, "watch.silence_s": 0.5, "watch.repeat_s": 0.2}], indirect=True)
def test_two_cameras_and_the_silence_of_one(rig):  # noqa: F811
    cameras, heard = Cameras(rig), rig.hear(MapStatus, "status", LATCHED)
    for i in range(4):
        cameras.send(i, "front", "rear")
        rig.until(lambda: len(rig.mapper.frames) == 2 * i + 2)
    assert sorted((f.stamp_ns, f.sensor) for f in rig.mapper.frames[:4]) == [(100_000_000, 0), (100_000_000, 1), (200_000_000, 0), (200_000_000, 1)]
    front, rear = (next(f for f in rig.mapper.frames if f.sensor == s) for s in (0, 1))
    assert front.camera == CAMERAS["front"] and rear.camera == CAMERAS["rear"] and rear.T_world_cam[:3, 3] == pytest.approx([0, 0, -0.2])
    assert rig.session.outputs.frame_id == "front_optical" and not [c for c in rig.mapper.commands if c[0] == "view" and c[2]]
    for i in range(4, 30):
        cameras.send(i, "front")
        rig.spin(0.05)
    hint = rig.until(lambda: next((s.hint for s in heard if "no usable frame" in s.hint), ""))
    assert hint.startswith("no usable frame of camera rear for ") and "while front brings some" in hint
    assert "/rear/image [sensor_msgs/msg/Image]: 1 publisher" in hint and "/front/" not in hint
    cameras.send(30, "front", "rear")
    rig.until(lambda: heard[-1].hint == "")
    assert rig.session.internal_errors == 0


@pytest.mark.parametrize("rig", [{"use_sim_time": True, "intake.map_on_time_jump": "reset", "intake.depth": "require", **TWO}], indirect=True)
def test_a_restarted_simulation_resets_the_map_once(rig):  # noqa: F811
    cameras, clock = Cameras(rig), rig.robot.create_publisher(Clock, "/clock", BEST_EFFORT)
    rig.until(clock.get_subscription_count)
    for lap in range(2):
        for i in range(20):
            stamp = header((i + 1) * 100_000_000, "").stamp
            clock.publish(Clock(clock=stamp))
            cameras.send(i, "front", "rear")
            rig.until(lambda: len(rig.mapper.frames) == 40 * lap + 2 * i + 2)
    assert [c for c in rig.mapper.commands if c[0] == "reset"] == [("reset", 1)] and {f.lap for f in rig.mapper.frames[40:]} == {1}
    assert rig.session.intake.lap == 1 and rig.session.internal_errors == 0 and not rig.mapper.ledger.counts().dropped


@pytest.mark.parametrize("values, why", [({"intake.map_on_time_jump": "new_session"}, "output.map_path"), ({**TWO, "topics.depth": "depth"}, "topics.depth = 'depth' is the same for all 2"),
                                         ({**TWO, "intake.T_body_camera": list(REAR)}, "7 numbers, 14 are needed"), ({"intake.pose_source": "path"}, "topics.path, which is empty")])
def test_bad_start_values_of_several_cameras_and_time(ros_domain, values, why):
    from fake_mapper import FakeMapper
    with pytest.raises(ValueError, match=why):
        TrainNode(FakeMapper, parameter_overrides=[Parameter(name, value=value) for name, value in values.items()])


@pytest.mark.parametrize("rig", [{"use_sim_time": True, "intake.wait_s": 30.0}], indirect=True)
def test_a_jump_of_the_ros_clock_alone_forgets_waiting_images(rig):  # noqa: F811
    rig.connected()
    clock = rig.robot.create_publisher(Clock, "/clock", BEST_EFFORT)
    rig.until(clock.get_subscription_count)
    rig.sent = 100   # stamps of 10 s
    clock.publish(Clock(clock=header(10_100_000_000, "").stamp))
    rig.send_frame("no pose")
    rig.until(lambda: rig.session.intake.pending == 1)
    clock.publish(Clock(clock=header(9_900_000_000, "").stamp))
    rig.spin(0.2)
    assert rig.session.intake.pending == 1, "0.2 s back is no restart"
    clock.publish(Clock(clock=header(1_000_000_000, "").stamp))
    rig.until(lambda: rig.mapper.ledger.counts().dropped == {"time_jump": 1})
    assert rig.session.intake.lap == 1 and rig.session.intake.pending == 0
