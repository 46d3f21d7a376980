"""One camera of the `Intake`: its messages, and its images until each is a Frame or was dropped."""
from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

import numpy as np

from spirula_gpu.camera import Frame

from .companions import Clouds, Depths, Lens, Masks, NotYet, Paired, Pixels, Poses, WaitingImage
from .errors import BadMessage
from .poses import JUMP_NS

if TYPE_CHECKING:
    from .intake import IntakeConfig


class InputState(NamedTuple):
    """One input, to explain why nothing happens."""
    kind: str
    count: int             # messages that arrived
    bad: dict[str, int]    # of them unusable, by reason
    last_stamp_ns: int     # 0: none yet
    age_s: float           # since the last arrival; inf: none yet
    rate_hz: float         # of the last 30 arrivals; 0: fewer than two
    camera: str = ""       # of one camera; '': the only one, or of none


class InputLog:
    """What came in through one input."""

    def __init__(self):
        self.count, self.bad, self.last_stamp_ns, self.arrivals = 0, Counter(), 0, deque(maxlen=30)

    def arrived(self, stamp_ns: int, arrival_s: float) -> None:
        self.count, self.last_stamp_ns = self.count + 1, stamp_ns
        self.arrivals.append(arrival_s)

    def state(self, kind: str, now_s: float, camera: str = "") -> InputState:
        span = self.arrivals[-1] - self.arrivals[0] if len(self.arrivals) > 1 else 0.0
        return InputState(kind, self.count, dict(self.bad), self.last_stamp_ns, now_s - self.arrivals[-1] if self.arrivals else float("inf"),
                          (len(self.arrivals) - 1) / span if span > 0 else 0.0, camera)


def as_bad(error: Exception) -> BadMessage:
    """Anything else than BadMessage is our bug, or an input nobody thought of: counted and shown, and the next message gets its turn."""
    return error if isinstance(error, BadMessage) else BadMessage("internal_error", f"{type(error).__name__}: {error}")


class OneCamera:
    """Owned by the Intake. dropped: called with itself and what an image was dropped for; refuses: as in Intake."""

    def __init__(self, config: IntakeConfig, name: str, sensor: int, poses: Poses, holdout_every: int, dropped: Callable[[OneCamera, BadMessage], None],
                 refuses: Callable[..., bool], unregistered: bool = False):
        self._refuses = refuses
        self.config, self.name, self.sensor, self._poses, self._holdout_every, self._dropped = config, name, sensor, poses, holdout_every, dropped
        points = config.depth_source == "points"
        beside = [*(["mask"] if config.mask != "off" else []), *(["depth_info"] if unregistered and not points else [])]
        self.inputs = {kind: InputLog() for kind in ("image", "points" if points else "depth", "info", *beside)}
        self._lens, self._masks, self._depths = Lens(config), Masks(config), Clouds(config, poses) if points else Depths(config, poses, unregistered)
        self.waiting: deque[WaitingImage] = deque()
        self.frame_id, self.waiting_for, self.last_problem = "", "", ""
        self.frames, self._n_complete, self._first_s = 0, 0, None   # emitted; complete since the clock was restarted; arrival of the first image
        self.last_ns, self._leapt_from_ns = 0, None   # of the newest image; of the one before it, when there is more than JUMP_NS between them
        self._before_ns, self._restart_ns = 0, 0      # newest stamp from before a restart of the clock that others saw, and where it began again: images from before may still come

    # ---- stamps ------------------------------------------------------------------------------------------------------

    def jumps_back(self, stamp_ns: int) -> bool:
        return self.last_ns - stamp_ns > JUMP_NS

    def goes_on(self, stamp_ns: int) -> bool:
        """After a jump back: this image follows on the one before the newest, which alone had a stamp from the future. The clock was not restarted."""
        return self._leapt_from_ns is not None and stamp_ns > self._leapt_from_ns

    def check_stamp(self, stamp_ns: int) -> None:
        """Of an image that does not jump back. Raises BadMessage."""
        if stamp_ns <= 0:
            raise BadMessage("bad_stamp", f"image has stamp {stamp_ns} ns; its driver must set header.stamp")
        if stamp_ns > self._restart_ns + JUMP_NS and abs(stamp_ns - self._before_ns) <= JUMP_NS:
            raise BadMessage("time_jump", f"image stamp {stamp_ns} ns is from before the stamps jumped back to {self._restart_ns} ns")
        if stamp_ns <= self.last_ns:
            raise BadMessage("stamp_backwards", f"image stamp {stamp_ns} ns is {(self.last_ns - stamp_ns) / 1e9:.3f} s before the last one; "
                                                "stamps must increase; do two publishers share the topic?")
        self._leapt_from_ns = self.last_ns if stamp_ns - self.last_ns > JUMP_NS else None
        self.last_ns, self._before_ns = stamp_ns, 0

    def forget(self, at_ns: int, error: BadMessage) -> None:
        """Stamps begin again at at_ns: what is from before goes."""
        while self.waiting:
            self.waiting.popleft()
            self.drop(error)
        for stream in (self._depths, self._masks, self._lens):
            stream.forget_future(at_ns)
        self.last_ns = 0

    def restart(self, at_ns: int, before_ns: int, error: BadMessage) -> None:
        """The clock of all cameras was restarted; the newest stamp before was before_ns."""
        self.forget(at_ns, error)
        self._before_ns, self._restart_ns, self._n_complete, self._leapt_from_ns = before_ns, at_ns, 0, None

    # ---- messages ----------------------------------------------------------------------------------------------------

    def image(self, stamp_ns: int, msg: Any, now_s: float) -> None:
        """Raises BadMessage."""
        pixels, limit = Pixels(msg), self.config.queue_frames
        if len(self.waiting) == limit:
            self.waiting.popleft()
            self.drop(BadMessage("queue_full", f"{limit} images wait ({self.waiting_for}); the oldest was dropped; limit: intake.queue_frames"))
        self.frame_id = self.config.camera_frame.replace("{camera}", self.name) or msg.header.frame_id.lstrip("/")
        self.waiting.append(WaitingImage(stamp_ns, self.frame_id, pixels, now_s, self.sensor))

    def info(self, kind: str, msg: Any) -> None:
        """CameraInfo of the image, or of the depth camera. Raises BadMessage."""
        (self._lens if kind == "info" else self._depths.lens).message(msg)

    def beside(self, kind: str, stamp_ns: int, msg: Any) -> None:
        """Depth, points, or a mask. Raises BadMessage."""
        if stamp_ns <= 0:
            raise BadMessage("bad_stamp", f"{kind} has stamp {stamp_ns} ns; its driver must set header.stamp")
        (self._masks if kind == "mask" else self._depths).message(stamp_ns, msg)

    def wait_anew(self, now_s: float) -> None:
        """The clock of the arrivals was restarted."""
        self.waiting = deque(image._replace(arrival_s=now_s) for image in self.waiting)
        self._first_s = now_s

    def drop(self, error: BadMessage) -> None:
        self.last_problem = str(error)
        self._dropped(self, error)

    # ---- completing --------------------------------------------------------------------------------------------------

    def advance(self, now_s: float, last: bool, lap: int, emit: Callable[[Frame], None]) -> None:
        """Emits or drops waiting images, oldest first, as far as it can be decided."""
        while self.waiting:
            image = self.waiting[0]
            late = last or now_s - image.arrival_s >= self.config.wait_s
            try:
                frame = self._complete(image, late, now_s, lap)
            except Exception as error:
                if isinstance(error, NotYet) and not late:
                    self.waiting_for = error.text
                    return
                self.waiting.popleft()
                self.drop(as_bad(error))
            else:
                self.waiting.popleft()
                self.frames += 1
                if frame is not None:
                    emit(frame)
        self.waiting_for = ""

    def _complete(self, image: WaitingImage, late: bool, now_s: float, lap: int) -> Frame | None:
        """None: the mapper does not want it. Pixels are made last, and only for what it wants. Raises NotYet, BadMessage."""
        lens = self._lens.of(image)
        T_world_cam = self._poses.of(image)
        depth, mask = (stream.of(image, late or self._never_came(stream, image, now_s)) for stream in (self._depths, self._masks))  # before either is decoded
        held_out = self._holdout_every > 0 and self._n_complete % self._holdout_every == self._holdout_every // 2
        if not held_out and self._refuses(image.stamp_ns, T_world_cam, self.sensor, lap):
            self._n_complete += 1
            return None
        rgb, lens = self._decoded(image), self._lens.of(image)   # again: now its size is known
        depth_m, mask = (None if found is None else stream.read(found, image, lens, T_world_cam) for stream, found in ((self._depths, depth), (self._masks, mask)))
        self._n_complete += 1
        return Frame(image.stamp_ns, lens.camera, T_world_cam, lens.rgb(rgb), depth_m, held_out, image.frame_id, lens.seen if mask is None else mask,
                     self.sensor, lap)

    def _decoded(self, image: WaitingImage) -> np.ndarray:
        """[H,W,3] uint8. Raises BadMessage, which counts as one of the image's message."""
        try:
            return image.rgb
        except Exception as error:
            self.inputs["image"].bad[as_bad(error).reason] += 1
            raise

    def _never_came(self, stream: Paired, image: WaitingImage, now_s: float) -> bool:
        """Optional depth, or masks, that have never been seen are waited for by the first images only."""
        if self._first_s is None:
            self._first_s = image.arrival_s
        return stream.mode == "use_if_there" and not stream.exist and now_s - self._first_s >= self.config.wait_s
