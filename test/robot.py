"""A robot for tests: a camera that slides along a textured wall and publishes image, depth, CameraInfo and pose."""
import struct

import cv2
import numpy as np
from geometry_msgs.msg import PoseStamped
from rclpy.qos import QoSProfile, ReliabilityPolicy
from rclpy.serialization import serialize_message
from sensor_msgs.msg import CameraInfo, Image

from spirula_gpu.camera import Camera
from spirula_ros.publish import camera_info_msg, depth_msg, header, image_msg

WALL_M, STEP_M, POSITIONS = 2.0, 0.02, 30


class Robot:
    """Publishes as camera drivers do: best effort. Image and depth are serialised once; only their stamps change."""

    def __init__(self, node, width=640, height=480, queue=10):
        self.camera = Camera(width, height, 0.8 * width, 0.8 * width, width / 2, height / 2)
        qos = QoSProfile(depth=queue, reliability=ReliabilityPolicy.BEST_EFFORT)
        self._image, self._depth, self._info, self._pose = (node.create_publisher(kind, name, qos) for kind, name in (
            (Image, "image"), (Image, "depth"), (CameraInfo, "camera_info"), (PoseStamped, "pose")))
        head, px_per_step = header(0, "camera_optical"), STEP_M * self.camera.fx / WALL_M
        wall = np.random.default_rng(0).integers(0, 256, (height // 8, (width + round(POSITIONS * px_per_step)) // 8 + 2, 3)).astype(np.uint8)
        wall = cv2.resize(wall, None, fx=8, fy=8, interpolation=cv2.INTER_CUBIC)
        self._images = [bytearray(serialize_message(image_msg(wall[:height, (x := round(k * px_per_step)):x + width], head))) for k in range(POSITIONS)]
        self._depths = bytearray(serialize_message(depth_msg(np.full((height, width), WALL_M, np.float32), head)))

    def connected(self) -> bool:
        return all(p.get_subscription_count() for p in (self._image, self._depth, self._info, self._pose))

    def send(self, index: int, stamp_ns: int) -> None:
        """One frame; the camera goes to and fro."""
        at = POSITIONS - 1 - abs(index % (2 * POSITIONS - 2) - (POSITIONS - 1))
        pose = PoseStamped(header=header(stamp_ns, "map"))
        pose.pose.position.x, pose.pose.orientation.w = at * STEP_M, 1.0
        self._info.publish(camera_info_msg(self.camera, header(stamp_ns, "camera_optical")))
        self._pose.publish(pose)
        for publisher, message in ((self._depth, self._depths), (self._image, self._images[at])):
            struct.pack_into("<iI", message, 4, stamp_ns // 10**9, stamp_ns % 10**9)  # behind the CDR header
            publisher.publish(bytes(message))
