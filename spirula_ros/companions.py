"""What an image needs before it is a Frame: its lens (CameraInfo), its pose, its depth, its mask. Each is fed messages and asked
`of(image)`; the answer is the thing, or `NotYet` (it may still come), or BadMessage (it will not; the image is lost)."""
from __future__ import annotations

from bisect import bisect_right
from collections import deque
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from spirula_gpu.points import project

from .convert import check_near, mask_from_msg, path_from_msg, pose_from_msg, stamp_ns
from .depth_codec import depth_to_m
from .encodings import check_image, image_to_rgb
from .errors import BadMessage
from .lens import Rectifier, info_key, rectifier_from_info
from .pointcloud import points_from_msg
from .poses import JUMP_NS, NoPose, PoseBuffer, TfBuffer, inverse, matrix_from_pose
from .registration import register_depth

if TYPE_CHECKING:
    from .intake import IntakeConfig


SAME_POSE = 1e-9   # m, and entries of rotations: poses of a path that differ by less are as they were


class NotYet(BadMessage):
    """Something is missing that may still come; the image is dropped under this reason if it does not."""


class Pixels:
    """Those of an Image or CompressedImage, decoded when they are first asked for. Raises BadMessage at once when an Image cannot be decoded."""

    def __init__(self, msg: Any):
        self._msg = msg
        self._size = None if hasattr(msg, "format") else check_image(msg)

    @property
    def size(self) -> tuple[int, int] | None:
        """(width, height); None: of a CompressedImage that is not decoded yet."""
        return self.rgb.shape[1::-1] if "rgb" in self.__dict__ else self._size

    @cached_property
    def rgb(self) -> np.ndarray:
        """[H,W,3] uint8, as it came. Raises BadMessage."""
        rgb, self._msg = image_to_rgb(self._msg), None
        return rgb


class WaitingImage(NamedTuple):
    stamp_ns: int
    frame_id: str          # of the camera's optical frame
    pixels: Pixels
    arrival_s: float
    sensor: int = 0        # which camera

    @property
    def rgb(self) -> np.ndarray:
        """[H,W,3] uint8, as it came. Raises BadMessage."""
        return self.pixels.rgb


class LensChange(NamedTuple):
    stamp_ns: int
    key: tuple
    lens: Rectifier | BadMessage   # what a CameraInfo that cannot be used says, for the images it is of


class Lens:
    """CameraInfo: each image is of the one that was valid at its stamp, which is the newest change at or before it, else the first. Rectification maps are made
    again only when it changed. Stamps of 0 (a driver that sets none) make it the newest one that came."""

    def __init__(self, config: IntakeConfig, what: str = "camera_info"):
        """what: the row of topics whose messages these are."""
        self._config, self._what, self._topic = config, what, f"topics.{what}"
        self._changes: list[LensChange] = []   # by stamp

    def message(self, msg: Any) -> None:
        """Raises BadMessage."""
        stamp, key = stamp_ns(msg.header), info_key(msg)
        n = bisect_right(self._changes, stamp, key=lambda change: change.stamp_ns)
        valid = self._changes[max(n - 1, 0)] if self._changes else None
        if valid is None or key != valid.key:
            try:
                lens = rectifier_from_info(msg, self._config.rectified == "rectified", self._config.max_fov_deg)
            except Exception as error:              # of images of its time nothing can be made: not of the lens before it either
                lens = error if isinstance(error, BadMessage) else BadMessage("internal_error", f"{type(error).__name__}: {error}")
            valid = LensChange(stamp, key, lens)
            self._changes.insert(n, valid)
        elif stamp < valid.stamp_ns:            # the first change, and it was earlier than we knew
            self._changes[0] = valid._replace(stamp_ns=stamp)
        if isinstance(valid.lens, BadMessage):
            raise valid.lens

    def forget_future(self, stamp_ns: int) -> None:
        self._changes = [change for change in self._changes if change.stamp_ns <= stamp_ns + JUMP_NS] or self._changes[-1:]

    def of(self, image: WaitingImage) -> Rectifier:
        """Raises NotYet, BadMessage. The size of an image that is not decoded yet is not looked at."""
        return self.at(image.stamp_ns, image.pixels.size)

    def at(self, stamp_ns: int, size: tuple[int, int] | None) -> Rectifier:
        """Of an image (width, height), None: not known yet; images must come by stamp. Raises NotYet, BadMessage."""
        if not self._changes:
            raise NotYet(f"no_{self._what}", f"no CameraInfo within intake.wait_s = {self._config.wait_s} s of an image; is {self._topic} the right one, "
                                             "and does the driver publish it?")
        n = bisect_right(self._changes, stamp_ns, key=lambda change: change.stamp_ns)
        del self._changes[:max(n - 1, 0)]       # no later image is of an older lens
        lens = self._changes[0].lens
        if isinstance(lens, BadMessage):
            raise lens
        raw = lens.raw
        if size not in (None, (raw.width, raw.height)):
            raise NotYet("info_size_mismatch", f"image is {size[0]}x{size[1]}, CameraInfo {raw.width}x{raw.height} on {self._topic}; take the camera_info of this very "
                                               "topic (after resizing: that of the resize node)")
        return lens


class Paired:
    """Messages that come beside the images: the newest of one kind, undecoded until they are used.

    what: as in the reason no_<what>; row, tolerance: the rows of IntakeConfig that say whether it is needed and how far apart
    stamps may be."""

    def __init__(self, config: IntakeConfig, what: str, row: str, tolerance: str):
        self._what, self._row, self._tolerance, self._tolerance_s = what, row, tolerance, getattr(config, tolerance)
        self.config, self.mode, self.exist = config, getattr(config, row), False
        self._queue: deque[tuple[int, Any]] = deque(maxlen=config.queue_frames)

    def message(self, stamp_ns: int, msg: Any) -> None:
        if self._queue and stamp_ns < self._queue[-1][0] - JUMP_NS:
            self._queue.clear()
        self._queue.append((stamp_ns, msg))
        self.exist = True

    def forget_future(self, stamp_ns: int) -> None:
        self._queue = deque((d for d in self._queue if d[0] <= stamp_ns + JUMP_NS), self._queue.maxlen)

    def of(self, image: WaitingImage, late: bool) -> tuple[int, Any] | None:
        """(stamp in ns, message): the nearest in time, or None if there is none and none is required. It is decided when one
        at or after the image has arrived, or when it is late. Raises NotYet, BadMessage."""
        if self.mode in ("ignore", "off"):
            return None
        while self._queue and image.stamp_ns - self._queue[0][0] > self._tolerance_s * 1e9:
            self._queue.popleft()  # too old for this image and, as stamps increase, for every later one
        nearest = min(self._queue, key=lambda d: abs(d[0] - image.stamp_ns), default=None)
        off_s = None if nearest is None else abs(nearest[0] - image.stamp_ns) / 1e9
        if not late and not any(d[0] >= image.stamp_ns for d in self._queue):
            raise NotYet(f"no_{self._what}", f"the {self._what} of its stamp")
        if off_s is not None and off_s <= self._tolerance_s:
            return nearest
        if self.mode == "require":
            where = "none has arrived" if off_s is None else f"the nearest is {off_s:.3f} s away"
            raise BadMessage(f"no_{self._what}", f"no {self._what} within intake.{self._tolerance} = {self._tolerance_s} s of the image: {where}; raise it, or set "
                                                 f"intake.{self._row} to use_if_there")
        return None


class Depths(Paired):
    """Depth images: registered to the image, or (`unregistered`) of another camera, whose CameraInfo and transform say how to make them so."""

    def __init__(self, config: IntakeConfig, poses: Poses, unregistered: bool = False):
        super().__init__(config, "depth", "depth", "sync_tolerance_s")
        self._poses = poses
        self.lens = Lens(replace(config, rectified="raw"), "depth_info") if unregistered else None

    def forget_future(self, stamp_ns: int) -> None:
        super().forget_future(stamp_ns)
        if self.lens:
            self.lens.forget_future(stamp_ns)

    def read(self, found: tuple[int, Any], image: WaitingImage, lens: Rectifier, T_world_cam: np.ndarray) -> np.ndarray:
        """depth_m [H,W] float32 of lens.camera. Raises NotYet (the CameraInfo or the transform of another camera is missing), BadMessage."""
        (height, width) = image.rgb.shape[:2]
        if self.lens:
            self.lens.at(found[0], None)   # what may still come is looked for before anything is decoded, which would be done again at each try
            T = self._poses.to_camera(found[1].header.frame_id.lstrip("/"), found[0], image, T_world_cam)
            depth_m = depth_to_m(found[1], self.config.depth_unit_m)
            own = self.lens.at(found[0], depth_m.shape[::-1])
            return register_depth(own.nearest(depth_m), own.camera, lens.camera, T)
        depth_m = depth_to_m(found[1], self.config.depth_unit_m)
        if depth_m.shape != (height, width):
            raise BadMessage("depth_size_mismatch", f"depth is {depth_m.shape[1]}x{depth_m.shape[0]}, the image {width}x{height}; use depth registered to the colour camera "
                                                    "(aligned_depth_to_color, depth_image_proc/register), or set topics.depth_info to the CameraInfo of the depth camera")
        return lens.nearest(depth_m)


class Masks(Paired):
    """What of an image is of the scene."""

    def __init__(self, config: IntakeConfig):
        super().__init__(config, "mask", "mask", "sync_tolerance_s")

    def read(self, found: tuple[int, Any], image: WaitingImage, lens: Rectifier, T_world_cam: np.ndarray) -> np.ndarray:
        """mask [H,W] uint8 of lens.camera, 0 = not of the scene. Raises BadMessage."""
        mask, (height, width) = mask_from_msg(found[1]), image.rgb.shape[:2]
        if mask.shape != (height, width):
            raise BadMessage("mask_size_mismatch", f"mask is {mask.shape[1]}x{mask.shape[0]}, the image {width}x{height}; it must have one pixel for each of the image's")
        return lens.nearest(mask)


class Clouds(Paired):
    """Points of a lidar, which become a sparse depth image of the camera."""

    def __init__(self, config: IntakeConfig, poses: Poses):
        super().__init__(config, "points", "depth", "points_tolerance_s")
        self._poses = poses

    def read(self, found: tuple[int, Any], image: WaitingImage, lens: Rectifier, T_world_cam: np.ndarray) -> np.ndarray:
        """depth_m [H,W] float32 of lens.camera, 0 where no point is seen. Raises NotYet (a pose or transform at the stamp of the points is missing),
        BadMessage."""
        stamp_ns, msg = found
        T = self._poses.to_camera(msg.header.frame_id.lstrip("/"), stamp_ns, image, T_world_cam).astype(np.float32)
        return project(points_from_msg(msg) @ T[:3, :3].T + T[:3, 3], lens.camera)


def transforms(config: IntakeConfig, row: str, cameras: int) -> np.ndarray:
    """[cameras,4,4] of a row with 7 numbers for each camera; 7 in all are of one camera, or nothing (identity) for any number of them. Raises ValueError."""
    values = np.reshape(getattr(config, row), (-1, 7)).astype(np.float64)
    T = np.array([matrix_from_pose(v[:3], v[3:] / np.linalg.norm(v[3:])) for v in values])
    if len(T) == 1 and np.array_equal(T[0], np.eye(4)):
        T = np.tile(T, (cameras, 1, 1))
    if len(T) != cameras:
        raise ValueError(f"intake.{row} has {values.size} numbers, {7 * cameras} are needed: x y z qx qy qz qw of each of the {cameras} cameras, in the order of topics.cameras")
    return T


class Poses:
    """Poses of the cameras: from a topic (directly, or of a body that T_body_camera or TF connects to them), from a path that a SLAM publishes growing, or from TF.
    Stamps of images are taken as they are in the messages; intake.time_offset_s is added here, before anything is looked up."""

    def __init__(self, config: IntakeConfig, cameras: int = 1):
        """Raises ValueError when a transform is given for another number of cameras."""
        self._config, self._cameras, self._offset_ns = config, cameras, round(config.time_offset_s * 1e9)
        self._topic, self._tf = PoseBuffer(config.max_gap_s), TfBuffer(config.max_gap_s)
        self._frame, self._child = "", config.body_frame   # header.frame_id and child_frame_id of the poses
        self._followed: tuple[np.ndarray, np.ndarray] | None = None   # the newest path that poses are of
        self._bad: deque[int] = deque(maxlen=100)  # stamps of unusable poses
        self._bad_text = ""
        names = "T_body_camera", "T_camera_lidar"
        self._T_body_camera, self._T_camera_lidar = (transforms(config, name, cameras) for name in names)
        # the default is one identity; whoever writes several means them
        self._extrinsics_given, self._lidar_given = (len(getattr(config, name)) > 7 or not np.array_equal(T[0], np.eye(4)) for name, T in zip(names, (self._T_body_camera, self._T_camera_lidar)))

    @property
    def map_frame(self) -> str:
        return self._config.map_frame or self._frame or "map"

    def message(self, stamp_ns: int, msg: Any) -> None:
        """Raises BadMessage."""
        try:
            if stamp_ns <= 0:
                raise BadMessage("bad_stamp", f"pose has stamp {stamp_ns} ns; its source must set header.stamp")
            T, frame = check_near(pose_from_msg(msg), "bad_pose"), msg.header.frame_id.lstrip("/")
            if frame and frame != (self._config.map_frame or self._frame or frame):
                raise BadMessage("bad_pose", f"pose is in frame '{frame}', the map in '{self.map_frame}'; set intake.map_frame to the frame of the poses")
        except BadMessage as error:
            self._note_bad(stamp_ns, error)
            raise
        self._frame, self._child = frame or self._frame, getattr(msg, "child_frame_id", "").lstrip("/") or self._config.body_frame
        self._topic.insert(stamp_ns, T)

    def transform(self, stamp_ns: int, msg: Any, static: bool) -> None:
        """One TransformStamped of /tf or /tf_static. Raises BadMessage."""
        try:
            self._tf.insert(stamp_ns, msg.header.frame_id, msg.child_frame_id, pose_from_msg(msg), static)
        except ValueError as error:
            raise BadMessage("bad_tree", str(error)) from None
        except BadMessage as error:
            self._note_bad(stamp_ns, error)
            raise

    def forget_future(self, image_ns: int) -> None:
        """The stamps of images were restarted at this one."""
        self._topic.forget_future(image_ns + self._offset_ns)
        self._tf.forget_future(image_ns + self._offset_ns)
        self._followed = None
        self._bad.clear()

    def of(self, image: WaitingImage) -> np.ndarray:
        """T_world_cam [4,4] float64."""
        at_ns = image.stamp_ns + self._offset_ns
        if self._config.pose_source == "tf":
            return check_near(self._found(self._tf.lookup(self.map_frame, image.frame_id, at_ns), at_ns), "bad_pose")   # its parts may be far
        return self._found(self._topic.lookup(at_ns), at_ns) @ self._in_body(image.frame_id, at_ns, image.sensor)

    def path(self, msg: Any) -> tuple[np.ndarray, np.ndarray]:
        """(stamps [n] int64 ns, T_world_body [n,4,4]) of a nav_msgs/Path, of the body whose pose is given; with TF, of the body that the cameras are fixed to.
        Raises BadMessage."""
        (stamps, T), frame = path_from_msg(msg), msg.header.frame_id.lstrip("/")
        check_near(T, "bad_path")
        follows = self._config.pose_source == "path"
        if frame and frame != (self._config.map_frame or self._frame or frame if follows else self.map_frame):
            raise BadMessage("bad_path", f"the path is in frame '{frame}', the map in '{self.map_frame}'; take poses in the frame of the path (intake.pose_source tf "
                                         f"with intake.map_frame '{frame}'), or a path in that of the poses")
        if follows:
            self._frame = frame or self._frame
        return stamps, T

    def follow(self, stamps: np.ndarray, T: np.ndarray) -> bool:
        """The poses are those of this path from now on (pose_source path). True: it says something else about a time that the path before knew. Raises BadMessage."""
        order = np.argsort(stamps, kind="stable")
        stamps, T = stamps[order], T[order]
        if stamps[0] <= 0 or (np.diff(stamps) == 0).any():
            raise BadMessage("bad_path", f"of the {len(stamps)} poses of the path {(np.diff(stamps) == 0).sum()} repeat a stamp and {(stamps <= 0).sum()} have none; each must have "
                                         "that of its measurement (a planned path has not)")
        before, self._followed = self._followed, (stamps, T)
        self._topic.replace(stamps, T)
        if before is None:
            return False
        known = stamps[(stamps >= before[0][0]) & (stamps <= before[0][-1])]
        at = np.searchsorted(before[0], known)
        return not np.array_equal(before[0][at], known) or bool((np.abs(before[1][at] - T[np.searchsorted(stamps, known)]) > SAME_POSE).any())

    def of_cameras(self, stamps: np.ndarray, T: np.ndarray, cameras: list[tuple[int, str, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(stamps [m] int64 ns of images, T_world_cam [m,4,4], sensors [m]) of a path(): each camera (sensor, frame, stamp of an image) sits on the body as it does at that
        stamp. Raises BadMessage when that is known of none."""
        found, why = [], None
        for sensor, frame, image_ns in cameras:
            try:
                fixed = self._config.pose_source == "tf" and not self._extrinsics_given
                found.append((sensor, self._tf.in_body(frame) if fixed else self._in_body(frame, image_ns + self._offset_ns, sensor)))
            except BadMessage as error:
                why = error
        if not found:
            raise why
        return (np.tile(stamps - self._offset_ns, len(found)), np.concatenate([T @ T_body_camera for _, T_body_camera in found]),
                np.repeat(np.array([sensor for sensor, _ in found], np.int64), len(stamps)))

    def _in_body(self, camera_frame: str, at_ns: int, sensor: int) -> np.ndarray:
        """T_body_camera [4,4]: what the parameter says, else TF between the frames that the messages name."""
        if self._extrinsics_given or (self._child == "" and self._cameras == 1) or self._child == camera_frame:
            return self._T_body_camera[sensor]
        if self._child == "":
            raise BadMessage("no_extrinsics", f"poses do not name the body that they are of, so nothing says where on it each of the {self._cameras} cameras is; set intake.body_frame, which TF "
                                              "connects to the cameras, or intake.T_body_camera with 7 numbers for each camera")
        T_body_camera = self._tf.lookup(self._child, camera_frame, at_ns)
        if isinstance(T_body_camera, NoPose):
            raise (NotYet if T_body_camera.may_come else BadMessage)(
                "no_extrinsics", f"poses are those of '{self._child}', images of '{camera_frame}', and {T_body_camera.text}; set "
                                 "intake.T_body_camera (or intake.camera_frame, if both are the same), or publish the transform on /tf_static")
        return T_body_camera

    def to_camera(self, frame: str, stamp_ns: int, image: WaitingImage, T_world_cam: np.ndarray) -> np.ndarray:
        """T [4,4] float64: maps points that were measured in `frame` at stamp_ns to the camera where it was when it took the image: the camera's motion
        between the two stamps counts. Points may also be in the frame of the map. Raises NotYet, BadMessage."""
        if frame == self.map_frame and not self._lidar_given:
            return inverse(T_world_cam)
        if self._lidar_given:
            T_cam_frame = self._T_camera_lidar[image.sensor]
        elif frame == image.frame_id:
            T_cam_frame = np.eye(4)
        elif isinstance(T_cam_frame := self._tf.lookup(image.frame_id, frame, stamp_ns + self._offset_ns), NoPose):
            raise (NotYet if T_cam_frame.may_come else BadMessage)(
                "no_extrinsics", f"points or depth are in '{frame}', images of '{image.frame_id}', and {T_cam_frame.text}; publish the transform on /tf_static, or set "
                                 "intake.T_camera_lidar")
        if stamp_ns == image.stamp_ns:
            return T_cam_frame
        try:
            return inverse(T_world_cam) @ self.of(image._replace(stamp_ns=stamp_ns)) @ T_cam_frame
        except BadMessage as error:
            raise type(error)(error.reason, f"at the stamp of what was measured beside it: {error.text}") from None

    def _note_bad(self, stamp_ns: int, error: BadMessage) -> None:
        self._bad.append(stamp_ns)
        self._bad_text = error.text

    def _found(self, found: np.ndarray | NoPose, at_ns: int) -> np.ndarray:
        if not isinstance(found, NoPose):
            return found
        reason, remedy = {
            "empty": ("no_pose", "is the pose topic the right one, and its type that of intake.pose_source?"),
            "no_chain": ("no_pose", "set intake.map_frame and intake.camera_frame to frames of the tree"),
            "before_first": ("no_pose", "the poses started later"),
            "after_last": ("pose_too_old", f"waited intake.wait_s = {self._config.wait_s} s; is the source of the poses alive, and do both use the "
                                           "same clock (use_sim_time)?"),
            "gap": ("pose_gap", "raise intake.max_gap_s or the rate of the poses"),
        }[found.kind]
        text = f"{found.text}; {remedy}"
        if any(abs(s - at_ns) <= self._config.max_gap_s * 1e9 for s in self._bad):
            reason, text = "bad_pose", f"the poses around this image were refused: {self._bad_text}"
        raise (NotYet if found.may_come else BadMessage)(reason, text)
