"""What an image needs before it is a Frame: its lens (CameraInfo), its pose, its depth. Each is fed messages and asked
`of(image)`; the answer is the thing, or `NotYet` (it may still come), or BadMessage (it will not; the image is lost)."""
from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .convert import BadMessage, Rectifier, depth_to_m, info_key, path_from_msg, pose_from_msg, rectifier_from_info
from .poses import JUMP_NS, NoPose, PoseBuffer, TfBuffer, matrix_from_pose

if TYPE_CHECKING:
    from .intake import IntakeConfig


class NotYet(BadMessage):
    """Something is missing that may still come; the image is dropped under this reason if it does not."""


class WaitingImage(NamedTuple):
    stamp_ns: int
    frame_id: str          # of the camera's optical frame
    rgb: np.ndarray        # [H,W,3] uint8, as it came
    arrival_s: float


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
        if self._lens is None:
            raise NotYet("no_camera_info", f"no CameraInfo within intake.wait_s = {self._config.wait_s} s of an image; is its topic the right one, "
                                           "and does the driver publish it?")
        if isinstance(self._lens, BadMessage):
            raise self._lens
        (height, width), raw = image.rgb.shape[:2], self._lens.raw
        if (width, height) != (raw.width, raw.height):
            raise BadMessage("info_size_mismatch", f"image is {width}x{height}, CameraInfo {raw.width}x{raw.height}; take the camera_info of this very "
                                                   "topic (after resizing: that of the resize node)")
        return self._lens


class Depths:
    """The newest depth images, paired by stamp; undecoded until they are used."""

    def __init__(self, config: IntakeConfig):
        self._config = config
        self._queue: deque[tuple[int, Any]] = deque(maxlen=config.queue_frames)
        self.exist = False

    def message(self, stamp_ns: int, msg: Any) -> None:
        if self._queue and stamp_ns < self._queue[-1][0] - JUMP_NS:
            self._queue.clear()
        self._queue.append((stamp_ns, msg))
        self.exist = True

    def forget_future(self, stamp_ns: int) -> None:
        self._queue = deque((d for d in self._queue if d[0] <= stamp_ns + JUMP_NS), self._queue.maxlen)

    def of(self, image: WaitingImage, late: bool) -> np.ndarray | None:
        """[H,W] float32: the depth nearest in time, or None if there is none and none is required. It is decided when depth
        at or after the image has arrived, or when it is late."""
        mode, tolerance_s = self._config.depth, self._config.sync_tolerance_s
        if mode == "ignore":
            return None
        while self._queue and image.stamp_ns - self._queue[0][0] > tolerance_s * 1e9:
            self._queue.popleft()  # too old for this image and, as stamps increase, for every later one
        stamp, msg = min(self._queue, key=lambda d: abs(d[0] - image.stamp_ns), default=(None, None))
        off_s = None if stamp is None else abs(stamp - image.stamp_ns) / 1e9
        if not late and not any(d[0] >= image.stamp_ns for d in self._queue):
            raise NotYet("no_depth", "the depth image of its stamp")
        if off_s is not None and off_s <= tolerance_s:
            return self._decoded(msg, image)
        if mode == "require":
            nearest = "none has arrived" if off_s is None else f"the nearest is {off_s:.3f} s away"
            raise BadMessage("no_depth", f"no depth within intake.sync_tolerance_s = {tolerance_s} s of the image: {nearest}; raise it, or set "
                                         "intake.depth to use_if_there")
        return None

    def _decoded(self, msg: Any, image: WaitingImage) -> np.ndarray:
        depth_m, (height, width) = depth_to_m(msg, self._config.depth_unit_m), image.rgb.shape[:2]
        if depth_m.shape != (height, width):
            raise BadMessage("depth_size_mismatch", f"depth is {depth_m.shape[1]}x{depth_m.shape[0]}, the image {width}x{height}; use depth registered to "
                                                    "the colour camera (aligned_depth_to_color, depth_image_proc/register)")
        return depth_m


class Poses:
    """Poses of the camera: from a topic (directly, or of a body that T_body_camera or TF connects to it), or from TF."""

    def __init__(self, config: IntakeConfig):
        self._config = config
        self._topic, self._tf = PoseBuffer(config.max_gap_s), TfBuffer(config.max_gap_s)
        self._frame = self._child = ""             # header.frame_id and child_frame_id of the pose topic
        self._bad: deque[int] = deque(maxlen=100)  # stamps of unusable poses
        self._bad_text = ""
        values = np.asarray(config.T_body_camera, np.float64)
        self._T_body_camera = matrix_from_pose(values[:3], values[3:] / np.linalg.norm(values[3:]))
        self._extrinsics_given = not np.array_equal(self._T_body_camera, np.eye(4))

    @property
    def map_frame(self) -> str:
        return self._config.map_frame or self._frame or "map"

    def message(self, stamp_ns: int, msg: Any) -> None:
        """Raises BadMessage."""
        try:
            if stamp_ns <= 0:
                raise BadMessage("bad_stamp", f"pose has stamp {stamp_ns} ns; its source must set header.stamp")
            T, frame = pose_from_msg(msg), msg.header.frame_id.lstrip("/")
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
            return self._found(self._tf.lookup(self.map_frame, image.frame_id, image.stamp_ns), image)
        return self._found(self._topic.lookup(image.stamp_ns), image) @ self._in_body(image.frame_id, image.stamp_ns)

    def path(self, msg: Any, camera_frame: str, stamp_ns: int) -> tuple[np.ndarray, np.ndarray]:
        """(stamps [n] int64 ns, T_world_cam [n,4,4]) of a nav_msgs/Path, of the body whose pose is given; with TF, of the body that the camera is fixed to.
        The camera sits on it as it does at stamp_ns. Raises BadMessage."""
        (stamps, T), frame = path_from_msg(msg), msg.header.frame_id.lstrip("/")
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
