"""A TrainNode with a robot that publishes to it, in one process, for tests."""
import math
import time

import numpy as np
import rclpy
from geometry_msgs.msg import PoseStamped
from rclpy.action import ActionClient
from rclpy.executors import SingleThreadedExecutor
from rclpy.parameter import Parameter
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import CameraInfo, Image

from fake_mapper import FakeMapper
from spirula_gpu.camera import Camera
from spirula_ros.node import TrainNode
from spirula_ros.publish import camera_info_msg, depth_msg, header, image_msg

CAMERA = Camera(64, 48, 60.0, 60.0, 32.0, 24.0)
BEST_EFFORT = QoSProfile(depth=10, reliability=ReliabilityPolicy.BEST_EFFORT)
LATCHED = QoSProfile(depth=1, reliability=ReliabilityPolicy.RELIABLE, durability=DurabilityPolicy.TRANSIENT_LOCAL)


class Rig:
    """A TrainNode, a robot that publishes to it, and one executor for both. Each rig has its own namespace."""
    count = 0

    def __init__(self, make_mapper=FakeMapper, **parameters):
        Rig.count += 1
        self.namespace = f"/rig{Rig.count}"
        overrides = [Parameter(name, value=value) for name, value in {"publish.status_hz": 50.0, "publish.vram_hz": 50.0, **parameters}.items()]
        self.node = TrainNode(make_mapper, namespace=self.namespace, parameter_overrides=overrides)
        self.session = self.node.session
        self.mapper = self.session and self.session.mapper
        self.robot = rclpy.create_node("robot", namespace=self.namespace)
        self.executor = SingleThreadedExecutor()
        self.executor.add_node(self.node)
        self.executor.add_node(self.robot)
        self.sent = 0
        wants_pose = parameters.get("intake.pose_source", "pose") == "pose"
        self.image, self.depth, self.info, self.pose = (self.robot.create_publisher(kind, name, BEST_EFFORT) for kind, name in (
            (Image, "image"), (Image, "depth"), (CameraInfo, "camera_info"), (PoseStamped, "pose" if wants_pose else "unused")))

    def until(self, condition, seconds=5.0):
        deadline = time.monotonic() + seconds
        while not (value := condition()) and time.monotonic() < deadline:
            self.executor.spin_once(timeout_sec=0.02)
        assert value, "timed out"
        return value

    def spin(self, seconds):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.executor.spin_once(timeout_sec=0.02)

    def hear(self, kind, name, qos=10):
        heard = []
        subscription = self.robot.create_subscription(kind, f"spirula/{name}", heard.append, qos)
        self.until(lambda: self.robot.count_publishers(subscription.topic_name))
        return heard

    def connected(self):
        self.until(lambda: all(p.get_subscription_count() for p in (self.image, self.depth, self.info, self.pose)))
        return self

    def send_frame(self, wrong=None, wall_m=2.0, rgb=None, moves=0.1):
        """One complete frame of a wall; wrong: "nan pose" | "short image" | "no pose"."""
        self.sent += 1
        head = header(self.sent * 100_000_000, "camera")
        pose = PoseStamped(header=header(self.sent * 100_000_000, "map"))
        pose.pose.orientation.w, pose.pose.position.x = 1.0, math.nan if wrong == "nan pose" else moves * self.sent
        image = image_msg(np.full((48, 64, 3), self.sent, np.uint8) if rgb is None else rgb, head)
        if wrong == "short image":
            image.data = image.data[:100]
        self.info.publish(camera_info_msg(CAMERA, head))
        self.depth.publish(depth_msg(np.full((48, 64), wall_m, np.float32), head))
        if wrong != "no pose":
            self.pose.publish(pose)
        self.image.publish(image)

    def call(self, kind, name, request, seconds=5.0):
        client = self.robot.create_client(kind, f"spirula/{name}")
        self.until(client.service_is_ready)
        future = client.call_async(request)
        self.until(future.done, seconds)
        return future.result()

    def act(self, kind, name, goal, told=lambda feedback: None):
        """The goal handle of an action that was accepted, or the refused one."""
        client = ActionClient(self.robot, kind, f"spirula/{name}")
        self.until(client.server_is_ready)
        future = client.send_goal_async(goal, feedback_callback=lambda msg: told(msg.feedback))
        self.until(future.done)
        return future.result()

    def outcome(self, handle, seconds=30.0):
        """(status, result) of an accepted goal."""
        future = handle.get_result_async()
        self.until(future.done, seconds)
        return future.result().status, future.result().result

    def close(self):
        code = self.node.close()
        self.robot.destroy_node()
        self.executor.shutdown()
        return code
