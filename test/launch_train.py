"""launch_testing: train.launch.py starts the node, a robot feeds it, everything comes out, and Ctrl-C ends it with a saved map.

Run by test_launch.py in a process of its own and in an empty folder: python -m launch_testing.launch_test launch_train.py"""
import os
import time
import unittest
from pathlib import Path

import launch_testing
import launch_testing.actions
import launch_testing.asserts
import rclpy
from launch import LaunchDescription
from launch.actions import IncludeLaunchDescription
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch_ros.substitutions import FindPackageShare
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import CameraInfo, Image
from visualization_msgs.msg import MarkerArray

from robot import Robot
from spirula_ros.dds import fastdds_profile
from spirula_ros.msg import MapStatus, VramReport
from spirula_ros.srv import SaveMap

LATCHED = QoSProfile(depth=10, reliability=ReliabilityPolicy.RELIABLE, durability=DurabilityPolicy.TRANSIENT_LOCAL)
CONFIG = """/**:
  ros__parameters:
    train: {steps_per_frame: 5}
    mesh: {period_s: 1.0, voxel_m: 0.05}
    publish: {status_hz: 10.0, vram_buffers: true}
"""


def generate_test_description():
    Path("config.yaml").write_text(CONFIG)
    arguments = {"namespace": "robot1", "config": os.path.abspath("config.yaml"), "image": "image", "camera_info": "camera_info", "depth": "depth",
                 "pose": "pose", "pose_source": "pose", "backend": "cpu", "holdout_every": "5", "save_path": os.path.abspath("map.ply")}
    return LaunchDescription([
        IncludeLaunchDescription(PythonLaunchDescriptionSource([FindPackageShare("spirula_ros"), "/launch/train.launch.py"]),
                                 launch_arguments=arguments.items()),
        launch_testing.actions.ReadyToTest()])


class TestRunning(unittest.TestCase):
    def test_frames_in_and_everything_out(self):
        os.environ.update(fastdds_profile(os.environ))
        rclpy.init()
        node = rclpy.create_node("camera", namespace="robot1")
        robot, heard, sent = Robot(node, 160, 120), {}, 0
        for kind, name in ((Image, "render/image"), (Image, "render/depth"), (CameraInfo, "render/camera_info"), (MapStatus, "status"),
                           (VramReport, "vram"), (MarkerArray, "mesh")):
            qos = 5 if name.startswith("render") else LATCHED
            node.create_subscription(kind, f"spirula/{name}", lambda msg, name=name: heard.__setitem__(name, msg), qos)

        def complete():
            return len(heard) == 6 and heard["mesh"].markers and heard["status"].held_out >= 3 and heard["status"].keyframes >= 5
        deadline = time.monotonic() + 90
        while not complete():
            self.assertLess(time.monotonic(), deadline, f"heard {sorted(heard)}; {heard.get('status')}")
            rclpy.spin_once(node, timeout_sec=0.1)
            if robot.connected():
                robot.send(sent, time.time_ns())
                sent += 1
        status, image, vram = heard["status"], heard["render/image"], heard["vram"]
        self.assertEqual((image.width, image.height, image.encoding), (160, 120, "rgb8"))
        self.assertGreater(max(image.data), 0)
        self.assertEqual((status.state, status.last_error), ("running", ""))
        self.assertGreater(status.gaussians, 1000)
        self.assertEqual(sum(c.capacity_bytes for c in vram.categories), vram.total_bytes)
        self.assertTrue(vram.buffers)
        saved = self.call(node, SaveMap, "spirula/save_map", SaveMap.Request(path=os.path.abspath("asked.ply")))
        self.assertTrue(saved.success, saved.message)
        self.assertGreater(os.path.getsize("asked.ply"), 1000)
        node.destroy_node()
        rclpy.shutdown()

    def call(self, node, kind, name, request):
        client = node.create_client(kind, name)
        self.assertTrue(client.wait_for_service(10), name)
        future = client.call_async(request)
        rclpy.spin_until_future_complete(node, future, timeout_sec=30)
        return future.result()


@launch_testing.post_shutdown_test()
class TestStopped(unittest.TestCase):
    def test_clean_end_with_the_map(self, proc_info, proc_output):
        launch_testing.asserts.assertExitCodes(proc_info)
        text = "".join(output.text.decode() for process in proc_info.process_names() for output in proc_output[process])
        self.assertNotIn("Traceback", text)
        self.assertIn("map saved to", text)
        self.assertGreater(os.path.getsize("map.ply"), 1000)
