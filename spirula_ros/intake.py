"""`Intake`: image + depth (or points) + mask + CameraInfo + pose messages -> Frames, each image accounted for.

Owned by one thread. One or several cameras (`one_camera`), whose poses have one source. An image waits at most `wait_s` for what belongs to it (`companions`). That time is read from a clock
(the node), passed by the caller, or taken from the stamps of the images: then no decision depends on how fast a replay is.
"""
from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Callable, Iterator, Sequence

import numpy as np

from spirula_gpu.camera import Frame
from spirula_gpu.config import param
from spirula_gpu.report import FrameLedger

from .companions import Poses
from .convert import BadMessage, stamp_ns
from .one_camera import InputLog, InputState, OneCamera, as_bad
from .poses import JUMP_NS

__all__ = ["InputState", "Intake", "IntakeConfig"]


@dataclass(frozen=True)
class IntakeConfig:
    pose_source: str = param("pose", "", "pose | odom | tf | path: PoseStamped topic, Odometry topic, the TF tree, or topics.path of a SLAM, which grows and is corrected")
    depth: str = param("require", "", "require | use_if_there | ignore")
    depth_source: str = param("image", "", "image | points: topics.depth, or topics.points")
    mask: str = param("off", "", "off | use_if_there | require: topics.mask")
    sync_tolerance_s: float = param(0.02, "s", "image and depth, or mask, with stamps this close belong together", 0, 10)
    points_tolerance_s: float = param(0.1, "s", "image and points with stamps this close belong together; the camera's motion in between is taken into account", 0, 10)
    wait_s: float = param(1.0, "s", "time that an image waits for its pose, depth, mask and CameraInfo", 0, 60)
    max_gap_s: float = param(0.5, "s", "poses farther apart than this are not interpolated between", 0, 60)
    queue_frames: int = param(64, "frames", "images that may wait; the oldest is dropped beyond this", 1, 10000)
    time_offset_s: float = param(0.0, "s", "added to the stamps of images (and depth, masks, points) before poses are looked up: positive when images are stamped too early for their poses; what is published keeps the stamps of the messages", -10, 10)
    map_on_time_jump: str = param("keep", "", "keep | reset | new_session: what becomes of the map when image stamps jump back by more than 1 s (looped recording, restarted simulation); new_session saves it beside output.map_path before it begins anew")
    depth_unit_m: float = param(0.001, "m", "one count of 16-bit depth", 1e-6, 1)
    map_frame: str = param("", "", "frame of the map; empty: the frame of the poses, or 'map' with pose_source tf")
    camera_frame: str = param("", "", "optical frame of the camera; empty: the frame_id of its images; {camera} is its name in topics.cameras")
    body_frame: str = param("", "", "frame whose pose is given, when the messages do not name it (PoseStamped, Path): TF connects it to the cameras; empty: the camera's")
    T_body_camera: tuple[float, ...] = param((0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0), "m",
                                             "x y z qx qy qz qw of the camera's optical frame in the frame whose pose is given; 7 numbers for each of several cameras")
    T_camera_lidar: tuple[float, ...] = param((0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0), "m",
                                              "x y z qx qy qz qw of the lidar, or of the depth camera of topics.depth_info, in the camera's optical frame; as it is here: /tf and /tf_static say it; 7 numbers for each of several cameras")
    rectified: str = param("auto", "", "auto | raw | rectified: whether the images are rectified, so that P of the CameraInfo counts and D does not; auto: the last name of topics.image has rect in it")
    max_fov_deg: float = param(130.0, "deg", "a fisheye becomes a pinhole camera of at most this field of view across each axis; the wider, the fewer pixels for the middle", 10, 170)

    def __post_init__(self):
        for name, words in (("pose_source", ("pose", "odom", "tf", "path")), ("depth", ("require", "use_if_there", "ignore")), ("depth_source", ("image", "points")),
                            ("mask", ("off", "use_if_there", "require")), ("rectified", ("auto", "raw", "rectified")),
                            ("map_on_time_jump", ("keep", "reset", "new_session"))):
            if getattr(self, name) not in words:
                raise ValueError(f"intake.{name} = '{getattr(self, name)}': must be {' | '.join(words)}")
        for name in ("T_body_camera", "T_camera_lidar"):
            values = np.asarray(getattr(self, name), np.float64)
            if values.ndim != 1 or not values.size or values.size % 7 or not np.isfinite(values).all() or (abs(np.linalg.norm(values.reshape(-1, 7)[:, 3:], axis=1) - 1) > 1e-2).any():
                raise ValueError(f"intake.{name} = {getattr(self, name)}: must be x y z qx qy qz qw with a unit quaternion, for each camera")
        if self.body_frame and self.pose_source == "tf":
            raise ValueError("intake.body_frame is for poses of a topic; with intake.pose_source tf, intake.map_frame and intake.camera_frame say which transform is meant")


_INPUT_OF = {"image": "image", "compressed": "image", "depth": "depth", "points": "points", "mask": "mask", "info": "info", "depth_info": "depth_info", "pose": "pose", "odom": "pose", "tf": "tf", "tf_static": "tf", "path": "path"}
OF_CAMERA = ("image", "depth", "points", "mask", "info", "depth_info")


class Intake:
    """Messages in (`on_*`), Frames out (`emit`). Every image counts once in the ledger: arrived here, and then dropped here
    under one reason or emitted (whoever takes the Frame counts it on). `last_problem` says the newest problem in words.

    refuses: called with stamp in ns, T_world_cam [4,4], sensor and lap of an image that is complete and not held out, before anything is decoded. True: it will not be
    taken, and who is called has counted it (Mapper.refuses).
    cameras: their names, in the order of Frame.sensor; one may have none.
    correct: called with (stamps [n] int64 ns, T_world_cam [n,4,4], sensors [n]) of each corrected path, once the images up to its end have been emitted.
    unregistered: depth is of another camera; `depth_info` is its CameraInfo, and TF (or intake.T_camera_lidar) connects both.
    clock: what an arrival without a time is given; None: time is the stamp of the newest image (lossless replay).
    restarted: called with the number of the lap that begins, when the stamps of images have jumped back, before a Frame of it is emitted.
    Raises ValueError when the configuration is that of another number of cameras."""

    def __init__(self, config: IntakeConfig, ledger: FrameLedger, emit: Callable[[Frame], None], holdout_every: int = 0,
                 clock: Callable[[], float] | None = time.monotonic, correct: Callable[..., None] | None = None, cameras: Sequence[str] = ("",),
                 restarted: Callable[[int], None] | None = None, unregistered: bool = False,
                 refuses: Callable[..., bool] = lambda *image: False):
        self.config, self.ledger, self._emit, self._clock, self._correct, self._restarted = config, ledger, emit, clock, correct, restarted
        self._poses, self._path, self._follows = Poses(config, len(cameras)), None, config.pose_source == "path"
        self.cameras = [OneCamera(config, name, sensor, self._poses, holdout_every, self._drop, refuses, unregistered) for sensor, name in enumerate(cameras)]
        self._inputs = {kind: InputLog() for kind in (*([] if self._follows else ["pose"]), "tf", *(["path"] if correct or self._follows else []))}
        self._now_s = 0.0
        self.last_problem, self.time_jumps, self.lap = "", 0, 0   # jumps: also those of single stamps, with which no lap begins

    @property
    def pending(self) -> int:
        """Images that wait here."""
        return sum(len(camera.waiting) for camera in self.cameras)

    @property
    def waiting_for(self) -> str:
        """What the oldest image of each camera waits for."""
        return "; ".join(self._named(camera, camera.waiting_for) for camera in self.cameras if camera.waiting_for)

    @property
    def map_frame(self) -> str:
        """The frame that T_world_cam of the Frames maps to."""
        return self._poses.map_frame

    # ------------------------------------------------------------------------------------------------------ inputs

    def on(self, kind: str, msg: Any, arrival_s: float | None = None, camera: str = "") -> None:
        """By kind: image, compressed, depth, depth_info, points, mask, info, pose, odom, tf, tf_static, path. What the configuration does not use (a pose or odom that
        is not the pose_source, depth or points that are not the depth_source, a mask, a path) is ignored. camera: the name of that which it is of; '' with
        several: points of a lidar that all of them see."""
        if not self._used(kind) or (kind in ("pose", "odom") and kind != self.config.pose_source):
            return
        if kind.startswith("tf"):
            self.on_tf(msg, kind == "tf_static", arrival_s)
        elif _INPUT_OF[kind] in OF_CAMERA:
            getattr(self, f"on_{_INPUT_OF[kind]}")(msg, arrival_s, camera)
        else:
            getattr(self, f"on_{_INPUT_OF[kind]}")(msg, arrival_s)

    def _used(self, kind: str) -> bool:
        return _INPUT_OF[kind] in self._inputs or _INPUT_OF[kind] in self.cameras[0].inputs

    def _of(self, name: str) -> list[OneCamera]:
        """The camera of this name; all of several without a name. Raises KeyError."""
        found = [camera for camera in self.cameras if camera.name == name] or (self.cameras if name == "" else [])
        if not found:
            raise KeyError(f"camera '{name}': the cameras are {', '.join(camera.name for camera in self.cameras)}")
        return found

    def on_image(self, msg: Any, arrival_s: float | None = None, camera: str = "") -> None:
        """sensor_msgs/Image or CompressedImage."""
        (of,), stamp = self._of(camera), stamp_ns(msg.header)
        self.ledger.arrived()
        self._arrived(of.inputs["image"], stamp, arrival_s, is_image=True)
        try:
            if stamp > 0 and of.jumps_back(stamp):
                self._jump_back(of, stamp)
            of.check_stamp(stamp)
            of.image(stamp, msg, self._now_s)
        except Exception as error:
            self._refuse_of(of, "image", as_bad(error))
            return
        self._advance()

    on_compressed = on_image

    def on_depth(self, msg: Any, arrival_s: float | None = None, camera: str = "") -> None:
        """sensor_msgs/Image or CompressedImage, registered to the image: same size, same camera."""
        self._beside("depth", msg, arrival_s, camera)

    def on_points(self, msg: Any, arrival_s: float | None = None, camera: str = "") -> None:
        """sensor_msgs/PointCloud2, in the frame of the lidar or of the map."""
        self._beside("points", msg, arrival_s, camera)

    def on_mask(self, msg: Any, arrival_s: float | None = None, camera: str = "") -> None:
        """sensor_msgs/Image or CompressedImage, as large as the image; 0 = not of the scene."""
        self._beside("mask", msg, arrival_s, camera)

    def _beside(self, kind: str, msg: Any, arrival_s: float | None, camera: str) -> None:
        stamp = stamp_ns(msg.header)
        for of in self._of(camera):
            self._arrived(of.inputs[kind], stamp, arrival_s)
            self._take(of, kind, of.beside, kind, stamp, msg)
        self._advance()

    def on_info(self, msg: Any, arrival_s: float | None = None, camera: str = "") -> None:
        """sensor_msgs/CameraInfo of the image; the one of its time counts."""
        self._info("info", msg, arrival_s, camera)

    def on_depth_info(self, msg: Any, arrival_s: float | None = None, camera: str = "") -> None:
        """sensor_msgs/CameraInfo of the depth camera, which is another one than that of the images."""
        self._info("depth_info", msg, arrival_s, camera)

    def _info(self, kind: str, msg: Any, arrival_s: float | None, camera: str) -> None:
        of, = self._of(camera)
        self._arrived(of.inputs[kind], stamp_ns(msg.header), arrival_s)
        self._take(of, kind, of.info, kind, msg)
        self._advance()

    def on_pose(self, msg: Any, arrival_s: float | None = None) -> None:
        """PoseStamped, PoseWithCovarianceStamped, TransformStamped or Odometry: the pose of the camera's optical frame, or
        of a body that T_body_camera or TF connects to it."""
        self._take(None, "pose", self._poses.message, self._arrived(self._inputs["pose"], stamp_ns(msg.header), arrival_s), msg)
        self._advance()

    def on_tf(self, msg: Any, static: bool = False, arrival_s: float | None = None) -> None:
        """tf2_msgs/TFMessage of /tf, or (static) of /tf_static."""
        for transform in msg.transforms:
            self._take(None, "tf", self._poses.transform, self._arrived(self._inputs["tf"], stamp_ns(transform.header), arrival_s), transform, static)
        self._advance()

    def on_path(self, msg: Any, arrival_s: float | None = None) -> None:
        """nav_msgs/Path: all poses there have been, corrected."""
        self._arrived(self._inputs["path"], stamp_ns(msg.header), arrival_s)
        if msg.poses:
            self._take(None, "path", self._take_path, msg)
        self._advance()

    def _take_path(self, msg: Any) -> None:
        cameras = [(camera.sensor, camera.frame_id, camera.last_ns) for camera in self.cameras if camera.last_ns]
        if not (cameras or self._follows):   # before the first image there is nothing to correct
            return
        stamps, T = self._poses.path(msg)
        if (not self._follows or self._poses.follow(stamps, T)) and self._correct and cameras:
            self._path = self._poses.of_cameras(stamps, T, cameras)

    def refused(self, kind: str, error: BadMessage, camera: str = "") -> None:
        """A message of this kind arrived but could not even be decoded."""
        if not self._used(kind):
            return
        for of in self._of(camera) if _INPUT_OF[kind] in OF_CAMERA else [None]:
            (of.inputs if of else self._inputs)[_INPUT_OF[kind]].count += 1
            if _INPUT_OF[kind] == "image":
                self.ledger.arrived()
            self._refuse_of(of, _INPUT_OF[kind], error)

    def poll(self, now_s: float | None = None) -> None:
        """Call it now and then: drops the images that have waited long enough."""
        self._move_time(self._time(now_s))
        self._advance()

    def flush(self) -> None:
        """Nothing more will come: every waiting image is emitted or gets its reason."""
        self._advance(last=True)

    # -------------------------------------------------------------------------------------------------------- time

    def clock_jumped(self, now_ns: int) -> None:
        """The clock that stamps are of shows this time now, which is less than it did (a restarted simulation): what is from before goes, unless images have told already."""
        if any(camera.jumps_back(now_ns) for camera in self.cameras):
            self._restart(now_ns, None)

    def _jump_back(self, of: OneCamera, stamp: int) -> None:
        """An image is from more than JUMP_NS before the last one of its camera (a looped bag, a reset simulation)."""
        if not of.goes_on(stamp):
            self._restart(stamp, of)
            return
        self.time_jumps += 1
        self._poses.forget_future(stamp)
        of.forget(stamp, self._jumped(of.last_ns, stamp))

    def _restart(self, at_ns: int, by: OneCamera | None) -> None:
        before_ns = max(camera.last_ns for camera in self.cameras)
        self.time_jumps, self.lap, error = self.time_jumps + 1, self.lap + 1, self._jumped(before_ns, at_ns)
        for camera in self.cameras:
            camera.restart(at_ns, 0 if camera is by else before_ns, error)
        self._poses.forget_future(at_ns)
        self._path, self.last_problem = None, str(error)
        if self._restarted:
            self._restarted(self.lap)

    def _jumped(self, before_ns: int, at_ns: int) -> BadMessage:
        return BadMessage("time_jump", f"stamps jumped back by {(before_ns - at_ns) / 1e9:.3f} s to {at_ns} ns; waiting images were dropped")

    def _arrived(self, log: InputLog, stamp: int, arrival_s: float | None, is_image: bool = False) -> int:
        """Notes an arrival and moves time; returns the stamp."""
        if arrival_s is None:
            arrival_s = stamp / 1e9 if self._clock is None and is_image and stamp > 0 else self._time()
        self._move_time(arrival_s)
        log.arrived(stamp, arrival_s)
        return stamp

    def _time(self, now_s: float | None = None) -> float:
        return now_s if now_s is not None else self._clock() if self._clock else self._now_s

    def _move_time(self, now_s: float) -> None:
        if now_s < self._now_s - JUMP_NS / 1e9:  # the clock of the arrivals was restarted: waiting starts again
            for camera in self.cameras:
                camera.wait_anew(now_s)
            self._now_s = now_s
        self._now_s = max(self._now_s, now_s)

    # ---------------------------------------------------------------------------------------------------- accounts

    def states(self, now_s: float | None = None) -> list[InputState]:
        """What came in through every input."""
        now_s = self._time(now_s)
        return [*(log.state(kind, now_s, camera.name) for camera in self.cameras for kind, log in camera.inputs.items()), *(log.state(kind, now_s) for kind, log in self._inputs.items())]

    def describe_silence(self, now_s: float | None = None) -> str:
        """Why no frame comes, in a few lines: every input, what the oldest images wait for, the newest problem."""
        lines = []
        for s in self.states(now_s):
            bad, name = "".join(f", {reason} {n}" for reason, n in s.bad.items()), f"{s.camera} {s.kind}".strip()
            lines.append(f"{name}: nothing yet" if not s.count else
                         f"{name}: {s.count} messages at {s.rate_hz:.1f} Hz, last stamp {s.last_stamp_ns / 1e9:.3f}, {s.age_s:.1f} s ago{bad}")
        for camera in self.cameras:
            if camera.waiting:
                lines.append(self._named(camera, f"{len(camera.waiting)} images wait; the oldest, stamp {camera.waiting[0].stamp_ns / 1e9:.3f}, for: {camera.waiting_for}"))
        if self.last_problem:
            lines.append(f"newest problem: {self.last_problem}")
        return "\n".join(lines)

    def unused(self) -> Iterator[str]:
        """Of several cameras, why those of which not one frame could be used brought none."""
        for camera in self.cameras if len(self.cameras) > 1 else []:
            if not camera.frames:
                n = camera.inputs["image"].count
                yield f"camera {camera.name}: of {n} images not one could be used" + (f": {camera.last_problem}" if camera.last_problem else "")

    def _named(self, camera: OneCamera, text: str) -> str:
        return f"{camera.name}: {text}" if camera.name else text

    def _take(self, of: OneCamera | None, kind: str, message: Callable, *args: Any) -> None:
        try:
            message(*args)
        except Exception as error:
            self._refuse_of(of, kind, as_bad(error))

    def _refuse_of(self, of: OneCamera | None, kind: str, error: BadMessage) -> None:
        """A message cannot be used; if it is an image, that is where it ends."""
        (of.inputs if of else self._inputs)[kind].bad[error.reason] += 1
        self.last_problem = str(error)
        if of:
            of.last_problem, self.last_problem = str(error), self._named(of, str(error))
        if kind == "image":
            self._drop(of, error)

    def _drop(self, of: OneCamera, error: BadMessage) -> None:
        self.ledger.dropped(error.reason)
        self.last_problem = self._named(of, str(error))

    def _advance(self, last: bool = False) -> None:
        for camera in self.cameras:
            camera.advance(self._now_s, last, self.lap, lambda frame: self._emit(frame))
        self._pass_path()

    def _pass_path(self) -> None:
        """The newest path, unless an image of its time still waits for its companions: that would be left behind."""
        if self._path is not None and not any(camera.waiting and camera.waiting[0].stamp_ns <= self._path[0].max() for camera in self.cameras):
            path, self._path = self._path, None
            self._correct(*path)
