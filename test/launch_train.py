"""For launch_testing (run by test_launch.py): train.launch.py brings up a node that takes frames and ends cleanly."""
import os
import time
import unittest

import launch_testing.actions
import launch_testing.asserts
import rclpy
from launch import LaunchDescription
from launch.actions import IncludeLaunchDescription
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch_ros.substitutions import FindPackageShare
from launch_testing import post_shutdown_test
from rclpy.executors import SingleThreadedExecutor

from robot import Robot
from spirula_ros.dds import fastdds_profile
from spirula_ros.msg import MapStatus

os.environ.update(fastdds_profile(os.environ))


def generate_test_description():
    return LaunchDescription([
        IncludeLaunchDescription(
            PythonLaunchDescriptionSource([FindPackageShare("spirula_ros"), "/launch/train.launch.py"]),
            launch_arguments={"namespace": "robot1", "image": "/image", "camera_info": "/camera_info", "depth": "/depth",
                              "pose": "/pose", "backend": "cpu", "save_path": "map.ply"}.items()),
        launch_testing.actions.ReadyToTest()])


class Running(unittest.TestCase):
    def test_frames_become_part_of_the_map(self):
        context = rclpy.Context()
        rclpy.init(context=context)
        node = rclpy.create_node("robot", context=context)
        executor = SingleThreadedExecutor(context=context)
        executor.add_node(node)
        robot, statuses = Robot(node), []
        node.create_subscription(MapStatus, "/robot1/spirula/status", statuses.append, 10)
        deadline, sent = time.monotonic() + 90, 0
        while not (statuses and statuses[-1].frames_used):
            self.assertLess(time.monotonic(), deadline, f"no frame was used; statuses: {statuses[-1:]}")
            if robot.connected():
                robot.send(sent, time.time_ns())
                sent += 1
            executor.spin_once(timeout_sec=0.1)
        rclpy.shutdown(context=context)


@post_shutdown_test()
class Stopped(unittest.TestCase):
    def test_exit_code_and_map(self, proc_info):
        launch_testing.asserts.assertExitCodes(proc_info)
        self.assertGreater(os.path.getsize("map.ply"), 1000)
