"""`Intake`: image + depth + CameraInfo + pose messages -> Frames, each image accounted for.

Owned by one thread. An image waits for what belongs to it at most `wait_s`, measured in the arrival times that the caller
passes (node: its clock; replay: recorded time, so that decisions do not depend on the speed of the replay).
"""
from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import Any, Callable, NamedTuple

import numpy as np

from spirula_gpu.camera import Frame
from spirula_gpu.config import param
from spirula_gpu.report import FrameLedger

from .convert import BadMessage, Rectifier, depth_to_m, image_to_rgb, info_key, pose_from_msg, rectifier_from_info, stamp_ns
from .poses import JUMP_NS, NoPose, PoseBuffer, TfBuffer, matrix_from_pose


@dataclass(frozen=True)
class IntakeConfig:
    pose_source: str = param("pose", "", "pose | odom | tf: PoseStamped topic, Odometry topic, or the TF tree")
    depth: str = param("require", "", "require | use_if_there | ignore")
    sync_tolerance_s: float = param(0.02, "s", "image and depth with stamps this close belong together", 0, 10)
    wait_s: float = param(1.0, "s", "time that an image waits for its pose, depth and CameraInfo", 0, 60)
    max_gap_s: float = param(0.5, "s", "poses farther apart than this are not interpolated between", 0, 60)
    queue_frames: int = param(64, "frames", "images that may wait; the oldest is dropped beyond this", 1, 10000)
    depth_unit_m: float = param(0.001, "m", "one count of 16-bit depth", 1e-6, 1)
    map_frame: str = param("", "", "frame of the map; empty: the frame of the poses, or 'map' with pose_source tf")
    camera_frame: str = param("", "", "optical frame of the camera; empty: the frame_id of its images")
    T_body_camera: tuple[float, ...] = param((0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0), "m",
                                             "x y z qx qy qz qw of the camera's optical frame in the frame whose pose is given")

    def __post_init__(self):
        for name, words in (("pose_source", ("pose", "odom", "tf")), ("depth", ("require", "use_if_there", "ignore"))):
            if getattr(self, name) not in words:
                raise ValueError(f"intake.{name} = '{getattr(self, name)}': must be {' | '.join(words)}")
        values = np.asarray(self.T_body_camera, np.float64)
        if values.shape != (7,) or not np.isfinite(values).all() or abs(np.linalg.norm(values[3:]) - 1) > 1e-2:
            raise ValueError(f"intake.T_body_camera = {self.T_body_camera}: must be x y z qx qy qz qw with a unit quaternion")


class InputState(NamedTuple):
    """One input, for the message that explains why nothing happens."""
    kind: str
    count: int             # messages that arrived
    bad: dict[str, int]    # of them unusable, by reason
    last_stamp_ns: int     # 0: none yet
    age_s: float           # since the last arrival; inf: none yet
    rate_hz: float         # of the last 30 arrivals; 0: fewer than two


class _Input:
    def __init__(self):
        self.count, self.bad, self.last_stamp_ns, self.arrivals = 0, Counter(), 0, deque(maxlen=30)


class _NotYet(BadMessage):
    """Something is missing that may still come; the reason counts if it does not."""


class _Waiting(NamedTuple):
    stamp_ns: int
    frame_id: str
    rgb: np.ndarray
    arrival_s: float


class Intake:
    """Messages in (`on_*`), Frames out (`emit`). Every image counts once in the ledger: arrived here, and then dropped here
    under one reason or emitted (whoever takes the Frame counts it on). `last_problem` says the newest drop in words."""

    def __init__(self, config: IntakeConfig, ledger: FrameLedger, emit: Callable[[Frame], None], holdout_every: int = 0):
        self.config, self.ledger, self._emit, self._holdout_every = config, ledger, emit, holdout_every
        self.inputs: dict[str, _Input] = {kind: _Input() for kind in ("image", "depth", "info", "pose", "tf")}
        self.last_problem, self.waiting_for, self.time_jumps = "", "", 0
        self._waiting: deque[_Waiting] = deque()
        self._depths: deque[tuple[int, Any]] = deque(maxlen=config.queue_frames)
        self._poses, self._tf = PoseBuffer(config.max_gap_s), TfBuffer(config.max_gap_s)
        self._bad_poses: deque[int] = deque(maxlen=100)  # stamps
        self._lens: Rectifier | BadMessage | None = None
        self._info_key: tuple | None = None
        self._pose_frame = self._child_frame = ""
        self._last_image_ns = self._n_complete = 0
        self._now_s = 0.0
        values = np.asarray(config.T_body_camera, np.float64)
        self._T_body_camera = matrix_from_pose(values[:3], values[3:] / np.linalg.norm(values[3:]))
        self._on = {"image": self.on_image, "compressed": self.on_image, "depth": self.on_depth, "info": self.on_info,
                    "pose": self.on_pose, "odom": self.on_pose, "tf": self.on_tf,
                    "tf_static": lambda msg, arrival_s=None: self.on_tf(msg, True, arrival_s)}

    @property
    def pending(self) -> int:
        """Images that wait here."""
        return len(self._waiting)

    @property
    def map_frame(self) -> str:
        return self.config.map_frame or self._pose_frame or "map"

    # ------------------------------------------------------------------------------------------------------ inputs
    # arrival_s: any clock that does not run backwards while time goes on; None: the newest stamp seen ("message time")

    def on(self, kind: str, msg: Any, arrival_s: float | None = None) -> None:
        """By kind: image, compressed, depth, info, pose, odom, tf, tf_static. A pose or odom that is not the pose_source is
        ignored."""
        if kind in ("pose", "odom") and kind != self.config.pose_source:
            return
        self._on[kind](msg, arrival_s)

    def on_image(self, msg: Any, arrival_s: float | None = None) -> None:
        """sensor_msgs/Image or CompressedImage."""
        self.ledger.arrived()
        stamp = self._seen("image", stamp_ns(msg.header), arrival_s)
        try:
            self._check_image_stamp(stamp)
            rgb = image_to_rgb(msg)
        except BadMessage as error:
            self._refuse("image", error)
            self._drop(error)
            return
        if len(self._waiting) == self.config.queue_frames:
            self._waiting.popleft()
            self._drop(BadMessage("queue_full", f"{self.config.queue_frames} images wait ({self.waiting_for}); limit intake.queue_frames; the oldest was dropped"))
        self._waiting.append(_Waiting(stamp, msg.header.frame_id, rgb, self._now_s))
        self._advance()

    on_compressed = on_image

    def on_depth(self, msg: Any, arrival_s: float | None = None) -> None:
        """sensor_msgs/Image or CompressedImage, registered to the image: same size, same camera."""
        stamp = self._seen("depth", stamp_ns(msg.header), arrival_s)
        if stamp <= 0:
            self._refuse("depth", BadMessage("bad_stamp", f"depth has stamp {stamp} ns; its driver must set header.stamp"))
            return
        if self._depths and stamp < self._depths[-1][0] - JUMP_NS:
            self._depths.clear()
        self._depths.append((stamp, msg))
        self._advance()

    def on_info(self, msg: Any, arrival_s: float | None = None) -> None:
        """sensor_msgs/CameraInfo of the image; the newest one counts. Maps are made again only when it changed."""
        self._seen("info", stamp_ns(msg.header), arrival_s)
        if (key := info_key(msg)) != self._info_key:
            self._info_key = key
            try:
                self._lens = rectifier_from_info(msg)
            except BadMessage as error:
                self._lens = error
        if isinstance(self._lens, BadMessage):
            self._refuse("info", self._lens)
        self._advance()

    def on_pose(self, msg: Any, arrival_s: float | None = None) -> None:
        """PoseStamped, PoseWithCovarianceStamped, TransformStamped or Odometry: the pose of the camera's optical frame, or
        of a body that T_body_camera or TF connects to it."""
        stamp = self._seen("pose", stamp_ns(msg.header), arrival_s)
        try:
            if stamp <= 0:
                raise BadMessage("bad_stamp", f"pose has stamp {stamp} ns; its source must set header.stamp")
            T, frame = pose_from_msg(msg), msg.header.frame_id.lstrip("/")
            if frame and frame != (self.config.map_frame or self._pose_frame or frame):
                raise BadMessage("bad_pose", f"pose is in frame '{frame}', the map in '{self.map_frame}'; set intake.map_frame to the frame of the poses")
        except BadMessage as error:
            self._bad_poses.append(stamp)
            self._refuse("pose", error)
        else:
            self._pose_frame, self._child_frame = frame or self._pose_frame, getattr(msg, "child_frame_id", "").lstrip("/")
            self._poses.insert(stamp, T)
        self._advance()

    def on_tf(self, msg: Any, static: bool = False, arrival_s: float | None = None) -> None:
        """tf2_msgs/TFMessage."""
        for transform in msg.transforms:
            stamp = self._seen("tf", stamp_ns(transform.header), arrival_s, moves_time=not static)
            try:
                self._tf.insert(stamp, transform.header.frame_id, transform.child_frame_id, pose_from_msg(transform), static)
            except ValueError as error:
                self._refuse("tf", BadMessage("bad_tree", str(error)))
            except BadMessage as error:
                self._bad_poses.append(stamp)
                self._refuse("tf", error)
        self._advance()

    def refused(self, kind: str, error: BadMessage) -> None:
        """A message of this kind arrived but could not even be decoded."""
        name = {"compressed": "image", "odom": "pose", "tf_static": "tf"}.get(kind, kind)
        self.inputs[name].count += 1
        self._refuse(name, error)
        if name == "image":
            self.ledger.arrived()
            self._drop(error)

    def poll(self, now_s: float) -> None:
        """Call it now and then: drops the images that have waited long enough."""
        self._now_s = max(self._now_s, now_s)
        self._advance()

    def flush(self) -> None:
        """Nothing more will come: every waiting image is emitted or gets its reason."""
        self._advance(last=True)

    def time_jump(self, at_ns: int) -> None:
        """The clock was restarted at this stamp (a looped bag, a reset simulation): drops what is from before."""
        self.time_jumps += 1
        error = BadMessage("time_jump", f"time jumped back by {(self._last_image_ns - at_ns) / 1e9:.3f} s to {at_ns} ns; waiting images were dropped")
        while self._waiting:
            self._waiting.popleft()
            self._drop(error)
        self._depths = deque((d for d in self._depths if d[0] <= at_ns + JUMP_NS), self._depths.maxlen)
        self._poses.forget_future(at_ns)
        self._tf.forget_future(at_ns)
        self._bad_poses.clear()
        self._last_image_ns, self._now_s, self.last_problem = 0, 0.0, error.text

    def describe_silence(self, now_s: float) -> list[InputState]:
        """Every input: what arrived and when; with `waiting_for` and `last_problem` the material to explain silence."""
        states = []
        for kind, i in self.inputs.items():
            span = i.arrivals[-1] - i.arrivals[0] if len(i.arrivals) > 1 else 0.0
            states.append(InputState(kind, i.count, dict(i.bad), i.last_stamp_ns, now_s - i.arrivals[-1] if i.arrivals else float("inf"),
                                     (len(i.arrivals) - 1) / span if span > 0 else 0.0))
        return states

    # --------------------------------------------------------------------------------------------------- accounting

    def _seen(self, kind: str, stamp: int, arrival_s: float | None, moves_time: bool = True) -> int:
        """Notes an arrival; returns its stamp."""
        if arrival_s is None:
            arrival_s = max(self._now_s, stamp / 1e9) if moves_time else self._now_s
        self._now_s = max(self._now_s, arrival_s)
        i = self.inputs[kind]
        i.count, i.last_stamp_ns = i.count + 1, stamp
        i.arrivals.append(arrival_s)
        return stamp

    def _refuse(self, kind: str, error: BadMessage) -> None:
        self.inputs[kind].bad[error.reason] += 1
        self.last_problem = str(error)

    def _drop(self, error: BadMessage) -> None:
        self.ledger.dropped(error.reason)
        self.last_problem = str(error)

    def _check_image_stamp(self, stamp: int) -> None:
        if stamp <= 0:
            raise BadMessage("bad_stamp", f"image has stamp {stamp} ns; its driver must set header.stamp")
        if self._last_image_ns - stamp > JUMP_NS:
            now_s = self._now_s
            self.time_jump(stamp)
            self._now_s = min(now_s, self.inputs["image"].arrivals[-1])
        elif stamp <= self._last_image_ns:
            raise BadMessage("stamp_backwards", f"image stamp {stamp} ns is {(self._last_image_ns - stamp) / 1e9:.3f} s before the last one; "
                                                "stamps must increase; do two publishers share the topic?")
        self._last_image_ns = stamp

    # -------------------------------------------------------------------------------------------------- completing

    def _advance(self, last: bool = False) -> None:
        """Emits or drops waiting images, oldest first, as far as it can be decided."""
        while self._waiting:
            image = self._waiting[0]
            late = last or self._now_s - image.arrival_s >= self.config.wait_s
            try:
                frame = self._complete(image, late)
            except _NotYet as error:
                if not late:
                    self.waiting_for = error.text
                    return
                self._drop(error)
            except BadMessage as error:
                self._drop(error)
            else:
                self._waiting.popleft()
                self._emit(frame)
                continue
            self._waiting.popleft()
        self.waiting_for = ""

    def _complete(self, image: _Waiting, late: bool) -> Frame:
        lens = self._lens_of(image)
        T_world_cam = self._pose_of(image)
        depth_m = self._depth_of(image, late)
        every, index = self._holdout_every, self._n_complete
        self._n_complete += 1
        return Frame(image.stamp_ns, lens.camera, T_world_cam, lens.rgb(image.rgb), None if depth_m is None else lens.depth(depth_m),
                     every > 0 and index % every == every // 2, self._camera_frame(image))

    def _camera_frame(self, image: _Waiting) -> str:
        return self.config.camera_frame or image.frame_id.lstrip("/")

    def _lens_of(self, image: _Waiting) -> Rectifier:
        if self._lens is None:
            raise _NotYet("no_camera_info", f"no CameraInfo within {self.config.wait_s} s of an image; is camera_info remapped, and does the driver publish it?")
        if isinstance(self._lens, BadMessage):
            raise self._lens
        height, width = image.rgb.shape[:2]
        if (width, height) != (self._lens.raw.width, self._lens.raw.height):
            raise BadMessage("info_size_mismatch", f"image is {width}x{height}, CameraInfo {self._lens.raw.width}x{self._lens.raw.height}; "
                                                   "take the camera_info of this very topic (after resizing: that of the resize node)")
        return self._lens

    def _pose_of(self, image: _Waiting) -> np.ndarray:
        """T_world_cam [4,4] float64."""
        camera = self._camera_frame(image)
        if self.config.pose_source == "tf":
            return self._pose_or_raise(self._tf.lookup(self.map_frame, camera, image.stamp_ns), image)
        T_world_body = self._pose_or_raise(self._poses.lookup(image.stamp_ns), image)
        if self._child_frame in ("", camera) or not np.array_equal(self._T_body_camera, np.eye(4)):
            return T_world_body @ self._T_body_camera
        T_body_camera = self._tf.lookup(self._child_frame, camera, image.stamp_ns)
        if isinstance(T_body_camera, NoPose):
            raise (_NotYet if T_body_camera.may_come else BadMessage)(
                "no_extrinsics", f"poses are those of '{self._child_frame}', images of '{camera}', and {T_body_camera.text}; set "
                                 "intake.T_body_camera, or publish the transform on /tf_static")
        return T_world_body @ T_body_camera

    def _pose_or_raise(self, found: np.ndarray | NoPose, image: _Waiting) -> np.ndarray:
        if not isinstance(found, NoPose):
            return found
        reason, remedy = {
            "empty": ("no_pose", "is the pose topic remapped, and does intake.pose_source name the right kind?"),
            "no_chain": ("no_pose", "set intake.map_frame and intake.camera_frame to frames of the tree"),
            "before_first": ("no_pose", "the poses started later"),
            "after_last": ("pose_too_old", f"waited intake.wait_s = {self.config.wait_s} s; is the source of the poses alive, and do both use the same clock (use_sim_time)?"),
            "gap": ("pose_gap", "raise intake.max_gap_s or the rate of the poses"),
        }[found.kind]
        text = f"{found.text}; {remedy}"
        if any(abs(s - image.stamp_ns) <= self.config.max_gap_s * 1e9 for s in self._bad_poses):
            reason, text = "bad_pose", f"the poses at this stamp were unusable (newest problem: {self.last_problem})"
        raise (_NotYet if found.may_come else BadMessage)(reason, text)

    def _depth_of(self, image: _Waiting, late: bool) -> np.ndarray | None:
        """[H,W] float32 of the depth image that is nearest in time; None if there is none and none is required."""
        mode, tolerance_ns = self.config.depth, round(self.config.sync_tolerance_s * 1e9)
        if mode == "ignore":
            return None
        while self._depths and self._depths[0][0] < image.stamp_ns - tolerance_ns:
            self._depths.popleft()  # too old for this image and, as stamps increase, for every later one
        stamp, msg = min(self._depths, key=lambda d: abs(d[0] - image.stamp_ns), default=(None, None))
        error_ns = None if stamp is None else abs(stamp - image.stamp_ns)
        if error_ns is not None and error_ns <= tolerance_ns and (stamp >= image.stamp_ns or late or self._depths[-1][0] > image.stamp_ns):
            depth_m = depth_to_m(msg, self.config.depth_unit_m)
            if depth_m.shape != image.rgb.shape[:2]:
                raise BadMessage("depth_size_mismatch", f"depth is {depth_m.shape[1]}x{depth_m.shape[0]}, the image {image.rgb.shape[1]}x{image.rgb.shape[0]}; use depth "
                                                        "registered to the colour camera (aligned_depth_to_color, depth_image_proc/register)")
            return depth_m
        off = "none has arrived" if error_ns is None else f"the nearest is {error_ns / 1e9:.3f} s away"
        error = ("no_depth", f"no depth within intake.sync_tolerance_s = {self.config.sync_tolerance_s} s of the image: {off}; raise it, or set "
                             "intake.depth to use_if_there")
        if self._depths and self._depths[-1][0] > image.stamp_ns:
            decided = True
        elif mode == "use_if_there":  # a stream that never existed is not waited for, once there was time to see it
            decided = late or (self.inputs["depth"].count == 0 and self._now_s - self.inputs["image"].arrivals[0] > self.config.wait_s)
        else:
            decided = late
        if not decided:
            raise _NotYet(*error)
        if mode == "require":
            raise BadMessage(*error)
        return None
