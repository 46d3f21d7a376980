"""What the mapper says -> ROS messages. Pure functions; the node publishes."""
from __future__ import annotations

import array

import numpy as np
from builtin_interfaces.msg import Time
from geometry_msgs.msg import PoseStamped
from nav_msgs.msg import Path
from sensor_msgs.msg import CameraInfo, Image, PointCloud2, PointField
from std_msgs.msg import Header

from spirula_gpu.camera import Camera
from spirula_gpu.report import CameraPath, Status, VramReport

from . import msg as ours
from .pointcloud import CloudFields
from .poses import quat_from_matrix


VIEW_FRAME = "spirula_view"  # of pictures that no camera of the robot has taken; nobody publishes a transform to it


def header(stamp_ns: int, frame_id: str) -> Header:
    return Header(stamp=Time(sec=stamp_ns // 10**9, nanosec=stamp_ns % 10**9), frame_id=frame_id)


def image_msg(pixels: np.ndarray, head: Header) -> Image:
    """rgb8 from uint8 [H,W,3], 32FC1 from float32 [H,W]."""
    if pixels.dtype == np.uint8 and pixels.ndim == 3 and pixels.shape[2] == 3:
        encoding = "rgb8"
    elif pixels.dtype == np.float32 and pixels.ndim == 2:
        encoding = "32FC1"
    else:
        raise ValueError(f"image is {pixels.dtype} {pixels.shape}: must be uint8 [H,W,3] or float32 [H,W]")
    height, width = pixels.shape[:2]
    return Image(header=head, height=height, width=width, encoding=encoding, is_bigendian=0,
                 step=width * pixels.itemsize * (3 if encoding == "rgb8" else 1), data=byte_array(pixels))


def byte_array(values: np.ndarray) -> array.array:
    """The one type that rclpy takes as it is; an ndarray is checked byte by byte, ~1 s per 1080p image."""
    data = array.array("B")
    if values.size:
        data.frombytes(memoryview(np.ascontiguousarray(values)).cast("B"))
    return data


def cloud_msg(cloud: CloudFields, head: Header) -> PointCloud2:
    return PointCloud2(header=head, height=cloud.height, width=cloud.width, is_bigendian=cloud.is_bigendian, point_step=cloud.point_step, row_step=cloud.row_step,
                       fields=[PointField(name=name, offset=offset, datatype=kind, count=count) for name, offset, kind, count in cloud.fields],
                       data=byte_array(cloud.data), is_dense=cloud.is_dense)


def depth_msg(depth_m: np.ndarray, head: Header) -> Image:
    """32FC1 metres; unknown (0) becomes NaN, as REP-118 wants it."""
    return image_msg(np.where(depth_m > 0, depth_m, np.float32(np.nan)), head)


def camera_info_msg(camera: Camera, head: Header) -> CameraInfo:
    """Undistorted pinhole. ROS puts the first pixel's centre at (0, 0), `Camera` at (0.5, 0.5)."""
    fx, fy, cx, cy = camera.fx, camera.fy, camera.cx - 0.5, camera.cy - 0.5
    return CameraInfo(header=head, height=camera.height, width=camera.width, distortion_model="plumb_bob", d=[0.0] * 5,
                      k=[fx, 0.0, cx, 0.0, fy, cy, 0.0, 0.0, 1.0], r=[1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0],
                      p=[fx, 0.0, cx, 0.0, 0.0, fy, cy, 0.0, 0.0, 0.0, 1.0, 0.0])


def path_msg(path: CameraPath, head: Header) -> Path:
    """The cameras (optical frame) in the map's frame, each with the stamp of its image."""
    poses = []
    for stamp_ns, T in zip(path.stamps_ns.tolist(), path.T_world_cam):
        pose = PoseStamped(header=header(stamp_ns, head.frame_id))
        pose.pose.position.x, pose.pose.position.y, pose.pose.position.z = map(float, T[:3, 3])
        pose.pose.orientation.x, pose.pose.orientation.y, pose.pose.orientation.z, pose.pose.orientation.w = map(float, quat_from_matrix(T[:3, :3]))
        poses.append(pose)
    return Path(header=head, poses=poses)


def status_msg(status: Status, head: Header, hint: str = "", stamp_latency_ms: float = float("nan")) -> ours.MapStatus:
    frames = status.frames
    return ours.MapStatus(
        header=head, state=status.state, gaussians=status.gaussians, keyframes=status.keyframes, held_out=status.held_out,
        steps=status.steps, steps_per_s=float(status.steps_per_s), loss=float(status.loss), train_psnr=float(status.train_psnr),
        heldout_psnr=float(status.heldout_psnr), heldout_ssim=float(status.heldout_ssim), heldout_cc_psnr=float(status.heldout_cc_psnr),
        corrections=status.corrections, poses_refined=status.poses_refined, poses_refused=status.poses_refused, keyframes_unfit=status.keyframes_unfit, frames_in=frames.frames_in,
        frames_used=frames.used, frames_pending=frames.pending, inbox_frames=status.inbox_frames,
        dropped=[ours.KeyCount(key=reason, count=n) for reason, n in frames.dropped.items()],
        latency_ms=float(status.latency_ms), stamp_latency_ms=float(stamp_latency_ms), hint=hint, last_error=status.last_error)


def vram_msg(report: VramReport, head: Header, buffers: bool) -> ours.VramReport:
    return ours.VramReport(
        header=head, total_bytes=report.total, arena_saved_bytes=report.arena_saved, budget_bytes=report.budget,
        process_bytes=report.process, device_used_bytes=report.device_used, device_total_bytes=report.device_total,
        categories=[ours.VramCategory(name=name, used_bytes=used, capacity_bytes=capacity)
                    for name, (used, capacity) in report.categories.items()],
        buffers=[ours.VramBuffer(name=r.name, category=r.category, used_bytes=r.used, capacity_bytes=r.capacity, aliased=r.aliased)
                 for r in report.rows] if buffers else [])
