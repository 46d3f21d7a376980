"""`Intake`: image + depth (or points) + mask + CameraInfo + pose messages -> Frames, each image accounted for.

Owned by one thread. An image waits at most `wait_s` for what belongs to it (`companions`). That time is read from a clock
(the node), passed by the caller, or taken from the stamps of the images: then no decision depends on how fast a replay is.
"""
from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any, Callable, NamedTuple

import numpy as np

from spirula_gpu.camera import Frame
from spirula_gpu.config import param
from spirula_gpu.report import FrameLedger

from .companions import Clouds, Depths, Lens, Masks, NotYet, Paired, Pixels, Poses, WaitingImage
from .convert import BadMessage, stamp_ns
from .poses import JUMP_NS


@dataclass(frozen=True)
class IntakeConfig:
    pose_source: str = param("pose", "", "pose | odom | tf: PoseStamped topic, Odometry topic, or the TF tree")
    depth: str = param("require", "", "require | use_if_there | ignore")
    depth_source: str = param("image", "", "image | points: topics.depth, or topics.points")
    mask: str = param("off", "", "off | use_if_there | require: topics.mask")
    sync_tolerance_s: float = param(0.02, "s", "image and depth, or mask, with stamps this close belong together", 0, 10)
    points_tolerance_s: float = param(0.1, "s", "image and points with stamps this close belong together; the camera's motion in between is taken into account", 0, 10)
    wait_s: float = param(1.0, "s", "time that an image waits for its pose, depth, mask and CameraInfo", 0, 60)
    max_gap_s: float = param(0.5, "s", "poses farther apart than this are not interpolated between", 0, 60)
    queue_frames: int = param(64, "frames", "images that may wait; the oldest is dropped beyond this", 1, 10000)
    depth_unit_m: float = param(0.001, "m", "one count of 16-bit depth", 1e-6, 1)
    map_frame: str = param("", "", "frame of the map; empty: the frame of the poses, or 'map' with pose_source tf")
    camera_frame: str = param("", "", "optical frame of the camera; empty: the frame_id of its images")
    T_body_camera: tuple[float, ...] = param((0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0), "m",
                                             "x y z qx qy qz qw of the camera's optical frame in the frame whose pose is given")
    T_camera_lidar: tuple[float, ...] = param((0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0), "m",
                                              "x y z qx qy qz qw of the lidar in the camera's optical frame; as it is here: /tf and /tf_static say it")

    def __post_init__(self):
        for name, words in (("pose_source", ("pose", "odom", "tf")), ("depth", ("require", "use_if_there", "ignore")), ("depth_source", ("image", "points")),
                            ("mask", ("off", "use_if_there", "require"))):
            if getattr(self, name) not in words:
                raise ValueError(f"intake.{name} = '{getattr(self, name)}': must be {' | '.join(words)}")
        for name in ("T_body_camera", "T_camera_lidar"):
            values = np.asarray(getattr(self, name), np.float64)
            if values.shape != (7,) or not np.isfinite(values).all() or abs(np.linalg.norm(values[3:]) - 1) > 1e-2:
                raise ValueError(f"intake.{name} = {getattr(self, name)}: must be x y z qx qy qz qw with a unit quaternion")


class InputState(NamedTuple):
    """One input, to explain why nothing happens."""
    kind: str
    count: int             # messages that arrived
    bad: dict[str, int]    # of them unusable, by reason
    last_stamp_ns: int     # 0: none yet
    age_s: float           # since the last arrival; inf: none yet
    rate_hz: float         # of the last 30 arrivals; 0: fewer than two


def _bad(error: Exception) -> BadMessage:
    """Anything else than BadMessage is our bug, or an input nobody thought of: counted and shown, and the next message gets its turn."""
    return error if isinstance(error, BadMessage) else BadMessage("internal_error", f"{type(error).__name__}: {error}")


class _Input:
    def __init__(self):
        self.count, self.bad, self.last_stamp_ns, self.arrivals = 0, Counter(), 0, deque(maxlen=30)


_INPUT_OF = {"image": "image", "compressed": "image", "depth": "depth", "points": "points", "mask": "mask", "info": "info", "pose": "pose", "odom": "pose", "tf": "tf", "tf_static": "tf", "path": "path"}


class Intake:
    """Messages in (`on_*`), Frames out (`emit`). Every image counts once in the ledger: arrived here, and then dropped here
    under one reason or emitted (whoever takes the Frame counts it on). `last_problem` says the newest problem in words.

    refuses: called with stamp in ns and T_world_cam [4,4] of an image that is complete and not held out, before anything is decoded. True: it will not be taken,
    and who is called has counted it (Mapper.refuses).
    correct: called with (stamps [n] int64 ns, T_world_cam [n,4,4]) of each corrected path, once the images up to its end have been emitted.
    clock: what an arrival without a time is given; None: time is the stamp of the newest image (lossless replay)."""

    def __init__(self, config: IntakeConfig, ledger: FrameLedger, emit: Callable[[Frame], None], holdout_every: int = 0,
                 clock: Callable[[], float] | None = time.monotonic, correct: Callable[[np.ndarray, np.ndarray], None] | None = None,
                 refuses: Callable[[int, np.ndarray], bool] = lambda stamp_ns, T_world_cam: False):
        self._refuses = refuses
        self.config, self.ledger, self._emit, self._holdout_every, self._clock = config, ledger, emit, holdout_every, clock
        with_points, masked = config.depth_source == "points", config.mask != "off"
        self._inputs = {kind: _Input() for kind in ("image", "points" if with_points else "depth", "info", "pose", *(["mask"] if masked else []), "tf", *(["path"] if correct else []))}
        self._lens, self._poses, self._masks = Lens(config), Poses(config), Masks(config)
        self._depths = Clouds(config, self._poses) if with_points else Depths(config)
        self._correct, self._path, self._camera_frame = correct, None, ""
        self._waiting: deque[WaitingImage] = deque()
        self._last_image_ns = self._n_complete = 0
        self._now_s, self._first_s = 0.0, None
        self.last_problem, self.waiting_for, self.time_jumps = "", "", 0

    @property
    def pending(self) -> int:
        """Images that wait here."""
        return len(self._waiting)

    @property
    def map_frame(self) -> str:
        """The frame that T_world_cam of the Frames maps to."""
        return self._poses.map_frame

    # ------------------------------------------------------------------------------------------------------ inputs

    def on(self, kind: str, msg: Any, arrival_s: float | None = None) -> None:
        """By kind: image, compressed, depth, points, mask, info, pose, odom, tf, tf_static, path. What the configuration does not use (a pose or odom that
        is not the pose_source, depth or points that are not the depth_source, a mask, a path) is ignored."""
        if _INPUT_OF[kind] not in self._inputs or (kind in ("pose", "odom") and kind != self.config.pose_source):
            return
        if kind.startswith("tf"):
            self.on_tf(msg, kind == "tf_static", arrival_s)
        else:
            getattr(self, f"on_{_INPUT_OF[kind]}")(msg, arrival_s)

    def on_image(self, msg: Any, arrival_s: float | None = None) -> None:
        """sensor_msgs/Image or CompressedImage."""
        self.ledger.arrived()
        stamp = self._arrived("image", stamp_ns(msg.header), arrival_s)
        try:
            self._check_image_stamp(stamp)
            pixels = Pixels(msg)
        except Exception as error:
            self._refuse("image", _bad(error))
            return
        if len(self._waiting) == self.config.queue_frames:
            self._waiting.popleft()
            self._drop(BadMessage("queue_full", f"{self.config.queue_frames} images wait ({self.waiting_for}); the oldest was dropped; limit: "
                                                "intake.queue_frames"))
        self._camera_frame = self.config.camera_frame or msg.header.frame_id.lstrip("/")
        self._waiting.append(WaitingImage(stamp, self._camera_frame, pixels, self._now_s))
        self._advance()

    on_compressed = on_image

    def on_depth(self, msg: Any, arrival_s: float | None = None) -> None:
        """sensor_msgs/Image or CompressedImage, registered to the image: same size, same camera."""
        self._beside("depth", self._depths, msg, arrival_s)

    def on_points(self, msg: Any, arrival_s: float | None = None) -> None:
        """sensor_msgs/PointCloud2, in the frame of the lidar or of the map."""
        self._beside("points", self._depths, msg, arrival_s)

    def on_mask(self, msg: Any, arrival_s: float | None = None) -> None:
        """sensor_msgs/Image or CompressedImage, as large as the image; 0 = not of the scene."""
        self._beside("mask", self._masks, msg, arrival_s)

    def _beside(self, kind: str, stream: Paired, msg: Any, arrival_s: float | None) -> None:
        stamp = self._arrived(kind, stamp_ns(msg.header), arrival_s)
        if stamp <= 0:
            self._refuse(kind, BadMessage("bad_stamp", f"{kind} has stamp {stamp} ns; its driver must set header.stamp"))
            return
        stream.message(stamp, msg)
        self._advance()

    def on_info(self, msg: Any, arrival_s: float | None = None) -> None:
        """sensor_msgs/CameraInfo of the image; the newest one counts."""
        self._arrived("info", stamp_ns(msg.header), arrival_s)
        self._take("info", self._lens.message, msg)
        self._advance()

    def on_pose(self, msg: Any, arrival_s: float | None = None) -> None:
        """PoseStamped, PoseWithCovarianceStamped, TransformStamped or Odometry: the pose of the camera's optical frame, or
        of a body that T_body_camera or TF connects to it."""
        self._take("pose", self._poses.message, self._arrived("pose", stamp_ns(msg.header), arrival_s), msg)
        self._advance()

    def on_tf(self, msg: Any, static: bool = False, arrival_s: float | None = None) -> None:
        """tf2_msgs/TFMessage of /tf, or (static) of /tf_static."""
        for transform in msg.transforms:
            self._take("tf", self._poses.transform, self._arrived("tf", stamp_ns(transform.header), arrival_s), transform, static)
        self._advance()

    def on_path(self, msg: Any, arrival_s: float | None = None) -> None:
        """nav_msgs/Path: all poses there have been, corrected."""
        self._arrived("path", stamp_ns(msg.header), arrival_s)
        if self._last_image_ns and msg.poses:   # before the first image there is nothing to correct
            self._take("path", self._take_path, msg)
        self._advance()

    def _take_path(self, msg: Any) -> None:
        self._path = self._poses.path(msg, self._camera_frame, self._last_image_ns)

    def refused(self, kind: str, error: BadMessage) -> None:
        """A message of this kind arrived but could not even be decoded."""
        if _INPUT_OF[kind] not in self._inputs:
            return
        self._inputs[_INPUT_OF[kind]].count += 1
        if _INPUT_OF[kind] == "image":
            self.ledger.arrived()
        self._refuse(_INPUT_OF[kind], error)

    def poll(self, now_s: float | None = None) -> None:
        """Call it now and then: drops the images that have waited long enough."""
        self._move_time(self._time(now_s))
        self._advance()

    def flush(self) -> None:
        """Nothing more will come: every waiting image is emitted or gets its reason."""
        self._advance(last=True)

    def time_jump(self, at_ns: int) -> None:
        """The clock of the stamps was restarted at this stamp (a looped bag, a reset simulation): what is from before goes."""
        self.time_jumps += 1
        error = BadMessage("time_jump", f"stamps jumped back by {(self._last_image_ns - at_ns) / 1e9:.3f} s to {at_ns} ns; waiting images were dropped")
        while self._waiting:
            self._waiting.popleft()
            self._drop(error)
        self._depths.forget_future(at_ns)
        self._masks.forget_future(at_ns)
        self._poses.forget_future(at_ns)
        self._path = None
        self._last_image_ns, self.last_problem = 0, str(error)

    def states(self, now_s: float | None = None) -> list[InputState]:
        """What came in through every input."""
        now_s, out = self._time(now_s), []
        for kind, i in self._inputs.items():
            span = i.arrivals[-1] - i.arrivals[0] if len(i.arrivals) > 1 else 0.0
            out.append(InputState(kind, i.count, dict(i.bad), i.last_stamp_ns, now_s - i.arrivals[-1] if i.arrivals else float("inf"),
                                  (len(i.arrivals) - 1) / span if span > 0 else 0.0))
        return out

    def describe_silence(self, now_s: float | None = None) -> str:
        """Why no frame comes, in a few lines: every input, what the oldest image waits for, the newest problem."""
        lines = []
        for s in self.states(now_s):
            bad = "".join(f", {reason} {n}" for reason, n in s.bad.items())
            lines.append(f"{s.kind}: nothing yet" if not s.count else
                         f"{s.kind}: {s.count} messages at {s.rate_hz:.1f} Hz, last stamp {s.last_stamp_ns / 1e9:.3f}, {s.age_s:.1f} s ago{bad}")
        if self._waiting:
            lines.append(f"{len(self._waiting)} images wait; the oldest, stamp {self._waiting[0].stamp_ns / 1e9:.3f}, for: {self.waiting_for}")
        if self.last_problem:
            lines.append(f"newest problem: {self.last_problem}")
        return "\n".join(lines)

    # --------------------------------------------------------------------------------------------------- accounting

    def _arrived(self, kind: str, stamp: int, arrival_s: float | None) -> int:
        """Notes an arrival and moves time; returns the stamp."""
        if arrival_s is None:
            arrival_s = stamp / 1e9 if self._clock is None and kind == "image" and stamp > 0 else self._time()
        self._move_time(arrival_s)
        i = self._inputs[kind]
        i.count, i.last_stamp_ns = i.count + 1, stamp
        i.arrivals.append(arrival_s)
        return stamp

    def _time(self, now_s: float | None = None) -> float:
        return now_s if now_s is not None else self._clock() if self._clock else self._now_s

    def _move_time(self, now_s: float) -> None:
        if now_s < self._now_s - JUMP_NS / 1e9:  # the clock of the arrivals was restarted: waiting starts again
            self._waiting = deque(image._replace(arrival_s=now_s) for image in self._waiting)
            self._now_s = self._first_s = now_s
        self._now_s = max(self._now_s, now_s)

    def _take(self, kind: str, message: Callable, *args: Any) -> None:
        try:
            message(*args)
        except Exception as error:
            self._refuse(kind, _bad(error))

    def _refuse(self, kind: str, error: BadMessage) -> None:
        """A message cannot be used; if it is an image, that is where it ends."""
        self._inputs[kind].bad[error.reason] += 1
        self.last_problem = str(error)
        if kind == "image":
            self._drop(error)

    def _drop(self, error: BadMessage) -> None:
        self.ledger.dropped(error.reason)
        self.last_problem = str(error)

    def _check_image_stamp(self, stamp: int) -> None:
        if stamp <= 0:
            raise BadMessage("bad_stamp", f"image has stamp {stamp} ns; its driver must set header.stamp")
        if self._last_image_ns - stamp > JUMP_NS:
            self.time_jump(stamp)
        elif stamp <= self._last_image_ns:
            raise BadMessage("stamp_backwards", f"image stamp {stamp} ns is {(self._last_image_ns - stamp) / 1e9:.3f} s before the last one; "
                                                "stamps must increase; do two publishers share the topic?")
        self._last_image_ns = stamp

    # -------------------------------------------------------------------------------------------------- completing

    def _advance(self, last: bool = False) -> None:
        self._emit_waiting(last)
        self._pass_path()

    def _emit_waiting(self, last: bool) -> None:
        """Emits or drops waiting images, oldest first, as far as it can be decided."""
        while self._waiting:
            image = self._waiting[0]
            late = last or self._now_s - image.arrival_s >= self.config.wait_s
            try:
                frame = self._complete(image, late)
            except Exception as error:
                if isinstance(error, NotYet) and not late:
                    self.waiting_for = error.text
                    return
                self._waiting.popleft()
                self._drop(_bad(error))
            else:
                self._waiting.popleft()
                if frame is not None:
                    self._emit(frame)
        self.waiting_for = ""

    def _pass_path(self) -> None:
        """The newest path, unless an image of its time still waits for its companions: that would be left behind."""
        if self._path is not None and not (self._waiting and self._waiting[0].stamp_ns <= self._path[0].max()):
            path, self._path = self._path, None
            self._correct(*path)

    def _complete(self, image: WaitingImage, late: bool) -> Frame | None:
        """None: the mapper does not want it. Pixels are made last, and only for what it wants. Raises NotYet, BadMessage."""
        lens = self._lens.of(image)
        T_world_cam = self._poses.of(image)
        depth, mask = (stream.of(image, late or self._never_came(stream, image)) for stream in (self._depths, self._masks))  # before either is decoded
        held_out = self._holdout_every > 0 and self._n_complete % self._holdout_every == self._holdout_every // 2
        if not held_out and self._refuses(image.stamp_ns, T_world_cam):
            self._n_complete += 1
            return None
        rgb, lens = self._decoded(image), self._lens.of(image)   # again: now its size is known
        depth_m, mask = (None if found is None else stream.read(found, image, lens, T_world_cam) for stream, found in ((self._depths, depth), (self._masks, mask)))
        self._n_complete += 1
        return Frame(image.stamp_ns, lens.camera, T_world_cam, lens.rgb(rgb), depth_m, held_out, image.frame_id, mask)

    def _decoded(self, image: WaitingImage) -> np.ndarray:
        """[H,W,3] uint8. Raises BadMessage, which counts as one of the image's message."""
        try:
            return image.rgb
        except Exception as error:
            self._inputs["image"].bad[_bad(error).reason] += 1
            raise

    def _never_came(self, stream: Paired, image: WaitingImage) -> bool:
        """Optional depth, or masks, that have never been seen are waited for by the first images only."""
        if self._first_s is None:
            self._first_s = image.arrival_s
        return stream.mode == "use_if_there" and not stream.exist and self._now_s - self._first_s >= self.config.wait_s
