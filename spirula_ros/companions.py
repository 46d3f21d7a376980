"""What an image needs before it is a Frame: its lens (CameraInfo), its pose, its depth, its mask. Each is fed messages and asked
`of(image)`; the answer is the thing, or `NotYet` (it may still come), or BadMessage (it will not; the image is lost)."""
from __future__ import annotations

from collections import deque
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from spirula_gpu.points import project

from .convert import BadMessage, Rectifier, check_image, check_near, depth_to_m, image_to_rgb, info_key, mask_from_msg, path_from_msg, pose_from_msg, rectifier_from_info
from .pointcloud import points_from_msg
from .poses import JUMP_NS, NoPose, PoseBuffer, TfBuffer, inverse, matrix_from_pose

if TYPE_CHECKING:
    from .intake import IntakeConfig


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

    @property
    def rgb(self) -> np.ndarray:
        """[H,W,3] uint8, as it came. Raises BadMessage."""
        return self.pixels.rgb


class Lens:
    """The newest CameraInfo. Rectification maps are made again only when it changed."""

    def __init__(self, config: IntakeConfig):
        self._config = config
        self._key: tuple | None = None
        self._lens: Rectifier | BadMessage | None = None

    def message(self, msg: Any) -> None:
        """Raises BadMessage."""
        if (key := info_key(msg)) != self._key:
            self._key = self._lens = None  # the last lens is not that of this camera, whatever comes now
            try:
                self._lens = rectifier_from_info(msg)
            except BadMessage as error:
                self._lens = error
            self._key = key
        if isinstance(self._lens, BadMessage):
            raise self._lens

    def of(self, image: WaitingImage) -> Rectifier:
        """Raises NotYet, BadMessage. The size of an image that is not decoded yet is not looked at."""
        if self._lens is None:
            raise NotYet("no_camera_info", f"no CameraInfo within intake.wait_s = {self._config.wait_s} s of an image; is its topic the right one, "
                                           "and does the driver publish it?")
        if isinstance(self._lens, BadMessage):
            raise self._lens
        size, raw = image.pixels.size, self._lens.raw
        if size not in (None, (raw.width, raw.height)):
            raise BadMessage("info_size_mismatch", f"image is {size[0]}x{size[1]}, CameraInfo {raw.width}x{raw.height}; take the camera_info of this very "
                                                   "topic (after resizing: that of the resize node)")
        return self._lens


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
    """Depth images."""

    def __init__(self, config: IntakeConfig):
        super().__init__(config, "depth", "depth", "sync_tolerance_s")

    def read(self, found: tuple[int, Any], image: WaitingImage, lens: Rectifier, T_world_cam: np.ndarray) -> np.ndarray:
        """depth_m [H,W] float32 of lens.camera. Raises BadMessage."""
        depth_m, (height, width) = depth_to_m(found[1], self.config.depth_unit_m), image.rgb.shape[:2]
        if depth_m.shape != (height, width):
            raise BadMessage("depth_size_mismatch", f"depth is {depth_m.shape[1]}x{depth_m.shape[0]}, the image {width}x{height}; use depth registered to "
                                                    "the colour camera (aligned_depth_to_color, depth_image_proc/register)")
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


class Poses:
    """Poses of the camera: from a topic (directly, or of a body that T_body_camera or TF connects to it), or from TF."""

    def __init__(self, config: IntakeConfig):
        self._config = config
        self._topic, self._tf = PoseBuffer(config.max_gap_s), TfBuffer(config.max_gap_s)
        self._frame = self._child = ""             # header.frame_id and child_frame_id of the pose topic
        self._bad: deque[int] = deque(maxlen=100)  # stamps of unusable poses
        self._bad_text = ""
        self._T_body_camera, self._T_camera_lidar = (matrix_from_pose(v[:3], np.divide(v[3:], np.linalg.norm(v[3:]))) for v in (config.T_body_camera, config.T_camera_lidar))
        self._extrinsics_given, self._lidar_given = (not np.array_equal(T, np.eye(4)) for T in (self._T_body_camera, self._T_camera_lidar))

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
        self._frame, self._child = frame or self._frame, getattr(msg, "child_frame_id", "").lstrip("/")
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

    def forget_future(self, stamp_ns: int) -> None:
        self._topic.forget_future(stamp_ns)
        self._tf.forget_future(stamp_ns)
        self._bad.clear()

    def of(self, image: WaitingImage) -> np.ndarray:
        """T_world_cam [4,4] float64."""
        if self._config.pose_source == "tf":
            return check_near(self._found(self._tf.lookup(self.map_frame, image.frame_id, image.stamp_ns), image), "bad_pose")   # its parts may be far
        return self._found(self._topic.lookup(image.stamp_ns), image) @ self._in_body(image.frame_id, image.stamp_ns)

    def path(self, msg: Any, camera_frame: str, stamp_ns: int) -> tuple[np.ndarray, np.ndarray]:
        """(stamps [n] int64 ns, T_world_cam [n,4,4]) of a nav_msgs/Path, of the body whose pose is given; with TF, of the body that the camera is fixed to.
        The camera sits on it as it does at stamp_ns. Raises BadMessage."""
        (stamps, T), frame = path_from_msg(msg), msg.header.frame_id.lstrip("/")
        check_near(T, "bad_path")
        if frame and frame != self.map_frame:
            raise BadMessage("bad_path", f"the path is in frame '{frame}', the map in '{self.map_frame}'; take poses in the frame of the path (intake.pose_source tf "
                                         f"with intake.map_frame '{frame}'), or a path in that of the poses")
        if self._config.pose_source == "tf" and not self._extrinsics_given:
            return stamps, T @ self._tf.in_body(camera_frame)
        return stamps, T @ self._in_body(camera_frame, stamp_ns)

    def _in_body(self, camera_frame: str, stamp_ns: int) -> np.ndarray:
        """T_body_camera [4,4]: what the parameter says, else TF between the frames that the messages name."""
        if self._child in ("", camera_frame) or self._extrinsics_given:
            return self._T_body_camera
        T_body_camera = self._tf.lookup(self._child, camera_frame, stamp_ns)
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
            T_cam_frame = self._T_camera_lidar
        elif frame == image.frame_id:
            T_cam_frame = np.eye(4)
        elif isinstance(T_cam_frame := self._tf.lookup(image.frame_id, frame, stamp_ns), NoPose):
            raise (NotYet if T_cam_frame.may_come else BadMessage)(
                "no_extrinsics", f"points are in '{frame}', images of '{image.frame_id}', and {T_cam_frame.text}; publish the transform on /tf_static, or set "
                                 "intake.T_camera_lidar")
        if stamp_ns == image.stamp_ns:
            return T_cam_frame
        try:
            return inverse(T_world_cam) @ self.of(image._replace(stamp_ns=stamp_ns)) @ T_cam_frame
        except BadMessage as error:
            raise type(error)(error.reason, f"at the stamp of its points: {error.text}") from None

    def _note_bad(self, stamp_ns: int, error: BadMessage) -> None:
        self._bad.append(stamp_ns)
        self._bad_text = error.text

    def _found(self, found: np.ndarray | NoPose, image: WaitingImage) -> np.ndarray:
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
        if any(abs(s - image.stamp_ns) <= self._config.max_gap_s * 1e9 for s in self._bad):
            reason, text = "bad_pose", f"the poses around this image were refused: {self._bad_text}"
        raise (NotYet if found.may_come else BadMessage)(reason, text)
