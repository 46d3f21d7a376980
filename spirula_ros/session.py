"""What the node is from configure to cleanup: topics -> Intake -> Mapper -> topics. It converts, calls and publishes; the map lives in `spirula_gpu.Mapper`.

Threads: everything here runs on the executor's thread (T0). The mapper's own thread (T1) is reached by `submit` and
`command` only; its answers come back as futures, so that no callback ever waits for it.
"""
from __future__ import annotations

import concurrent.futures
import re
import threading
import time
import traceback
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
from rclpy.clock import Clock, ClockType, JumpThreshold
from rclpy.duration import Duration
from rclpy.event_handler import SubscriptionEventCallbacks
from rclpy.parameter import Parameter

from spirula_gpu.camera import Camera, Frame
from spirula_gpu.config import Config, rows
from spirula_gpu.mapper import Mapper
from spirula_gpu.ply import check_path

from .actions import Actions
from .diagnostics import Diagnostics
from .errors import BadMessage
from .finish import save_files
from .inputs import Input, check_distinct, inputs_of, subscribe, unused_overrides
from .intake import Intake
from .lens import resolved
from .outputs import Outputs
from .params import RosConfig
from .resume import describe, far_from_map, intake_for, live_source, other_source
from .rig import cameras_of
from .services import Services
from .time_jump import TimeJump
from .watch import LOST_HINT, Silence, describe_publishers, explain, policy_name, twins

TICK_S = 0.02  # how often the intake is polled and the outputs are looked at
TWINS_S = 5.0  # how often it is looked for another node of the same name


class Session:
    """Raises ValueError on bad parameters and NativeError when the engine cannot start; both say what to do, and nothing is left behind."""

    def __init__(self, node, ros: RosConfig, config: Config, make_mapper=Mapper):
        self.node, self.log = node, node.get_logger()
        check_path("output.map_path", ros.output.map_path)
        self.ros, self.config = ros, self._with_source(ros, config)
        self.internal_error, self.internal_errors = "", 0
        self.hint, self._resume_hint, self._twins, self._twins_at = "", "", "", 0.0
        self._limit, self.limits_told = ("", 0.0), set()  # what limits the map, without its numbers, since when; what was said of that
        self.first_at, self._explained_at = None, 0.0
        self.images_at_finish, self.inputs, self.active, self.paused_by_us = -1, [], False, False
        self._subscriptions, self._resuming = [], None
        self.view: tuple[np.ndarray | None, Camera | None] = (None, None)   # as somebody asked for it; None: that of the newest frames
        self.newest_camera: Camera | None = None   # of the frames that ~/render/* follows
        self._command_lock, self.epoch, self._ended = threading.Lock(), 0, False   # epoch: long jobs of an older one give up; ended: the mapper takes no more commands
        with ExitStack() as stack:   # what was begun is undone in reverse order, now if something fails, else by close()
            self._time_jump = TimeJump(ros, lambda *words: self.mapper.command(*words), lambda: self.mapper.status(), self.log.warning)
            self.mapper = make_mapper(self.config)
            stack.callback(self.mapper.close)
            self._begin(stack)
            self._undo = stack.pop_all()

    def _begin(self, stack: ExitStack) -> None:
        node, resumed = self.node, self.mapper.resumed
        self.ros = replace(self.ros, intake=intake_for(resumed, resolved(self.ros.intake, node.resolve_topic_name(inputs_of(self.ros)[0].topic))))
        for line in describe(resumed, self.config.checkpoint):
            self.log.info(line)
        self._doubt_source(resumed and other_source(resumed.source, self.config.checkpoint.source))
        self.intake = Intake(self.ros.intake, self.mapper.ledger, self._take, self.config.eval.holdout_every, self._now_s, self._correct if self.ros.topics.path else None,
                             cameras_of(self.ros), self._restarted, unregistered=bool(self.ros.topics.depth_info), refuses=self._refuses)
        self._view_sensor, self._silence = len(self.intake.cameras), Silence(len(self.intake.cameras), time.monotonic())
        jumps = node.get_clock().create_jump_callback(  # held: it goes with its handle
            JumpThreshold(min_forward=None, min_backward=Duration(nanoseconds=-1), on_clock_change=False),
            post_callback=self.safely("a jump of the clock", lambda _: self.intake.clock_jumped(node.get_clock().now().nanoseconds)))
        stack.callback(jumps.unregister)
        self.background = concurrent.futures.ThreadPoolExecutor(1, "finish")
        stack.callback(self.background.shutdown, wait=False, cancel_futures=True)
        self.outputs = Outputs(self, stack)
        self.services = Services(self, stack)
        self.actions = Actions(self, stack)
        self.diagnostics = Diagnostics(self, stack)
        self.web = self._open_viewer(stack) if self.ros.web.enabled else None
        tick = self.safely("the timer", self._tick)
        timer = node.create_timer(TICK_S, lambda: tick(), clock=Clock(clock_type=ClockType.STEADY_TIME))
        stack.callback(node.destroy_timer, timer)
        self.mapper.start()

    # ---- topics in ----

    def activate(self) -> None:
        """Listens to the topics."""
        inputs = inputs_of(self.ros)
        for source in inputs:
            source.topic = self.node.resolve_topic_name(source.topic)
        check_distinct(inputs)
        try:
            for source in inputs:
                events = SubscriptionEventCallbacks(
                    incompatible_qos=self.safely(f"the QoS of {source.topic}", lambda info, s=source: self._incompatible(s, info)),
                    message_lost=self.safely(f"the losses of {source.topic}", lambda info, s=source: self._lost(s, info)))
                self._subscriptions.append(subscribe(self.node, source, self._receiver(source), events))
        except Exception:
            self._unsubscribe()
            raise
        self.inputs = inputs
        if unused := unused_overrides(self.node):
            self.log.warning(f"{', '.join(unused)}: without effect; the topics are {', '.join(source.topic for source in inputs)} (qos_overrides.<topic>"
                             ".subscription.<history | depth | reliability | durability>)")
        if self.paused_by_us:
            self._resuming = self.mapper.command("pause", False)
        self.active, self.paused_by_us, self.hint = True, False, ""
        self._silence.expected(time.monotonic())
        self.log.info("listening to " + ", ".join(source.topic for source in inputs))

    def deactivate(self) -> None:
        """Hears nothing more and trains no more, and actions that run are aborted; the map stays, and so do outputs and services."""
        self.epoch += 1
        self.safely("the images that wait", self.intake.flush)()   # whatever happens, the map must be saved afterwards
        self._unsubscribe()
        self.active, self.inputs, self.hint = False, [], ""
        self.paused_by_us = self.mapper.status().state != "paused" or not (self._resuming is None or self._resuming.done())
        self.mapper.command("pause", True)

    def _unsubscribe(self) -> None:
        while self._subscriptions:
            self.node.destroy_subscription(self._subscriptions.pop())

    def _with_source(self, ros: RosConfig, config: Config) -> Config:
        """The engine's configuration with checkpoint.source: a player names the recording, otherwise it is the topics."""
        c, topics, source, name = config.checkpoint, ros.topics, ros.intake.pose_source, self.node.resolve_topic_name
        images = ", ".join(name(i.topic) for i in inputs_of(ros) if i.kind in ("image", "compressed"))
        poses = "tf" if source == "tf" else name(topics.path if source == "path" else topics.pose)
        return replace(config, checkpoint=replace(c, source=c.source or live_source(images, poses)))

    def _doubt_source(self, text: str | None) -> None:
        """The frames may not be those of the map that was resumed: said once in the log, and in the status for good."""
        if text and not self.config.checkpoint.any_source:
            self._resume_hint = text
            self.log.warning(text)

    def _receiver(self, source: Input):
        return self.safely(f"the topic {source.topic}", lambda msg: self._receive(source, msg))

    def _receive(self, source: Input, msg) -> None:
        """msg: rclpy's, or the bytes of a large one."""
        try:
            msg = source.reader(msg) if source.reader else msg
        except BadMessage as error:
            return self.intake.refused(source.kind, error, source.camera)
        self.intake.on(source.kind, msg, camera=source.camera)

    def _now_s(self) -> float:
        """The clock that frames wait by: that of the recording when it drives the node, else one that never jumps."""
        if self.node.get_parameter("use_sim_time").value:
            return self.node.get_clock().now().nanoseconds / 1e9
        return time.monotonic()

    def _refuses(self, stamp_ns: int, T_world_cam, sensor: int, lap: int) -> bool:
        """As Mapper.refuses: the map does not need an image, which is no silence."""
        if not self.mapper.refuses(stamp_ns, T_world_cam, sensor, lap):
            return False
        self._heard(sensor, time.monotonic())
        return True

    def _heard(self, sensor: int, now: float) -> None:
        self._silence.used(sensor, now)
        if not self._silence.of(now, self.ros.watch.silence_s)[0]:
            self.hint = ""

    def _take(self, frame: Frame) -> None:
        """A complete frame from the intake."""
        now, self.mapper.world_frame = time.monotonic(), self.intake.map_frame
        self._heard(frame.sensor, now)
        if self.first_at is None:
            self._doubt_source(far_from_map(self.mapper.resumed, frame.T_world_cam))
        self.first_at = self.first_at or now
        self.outputs.stamp_delay_ms = (self.node.get_clock().now().nanoseconds - frame.stamp_ns) / 1e6
        if frame.sensor <= self._view_sensor:   # as Keyframes.shown
            self.outputs.frame_id, self._view_sensor = frame.frame_id, frame.sensor
        if frame.sensor == self._view_sensor and frame.camera != self.newest_camera:
            self.newest_camera = frame.camera
            self.show(*self.view)
        try:
            self.mapper.submit(frame)
        except Exception:
            self.mapper.ledger.dropped("internal_error")
            raise

    def show(self, T_world_cam: np.ndarray | None, camera: Camera | None) -> None:
        """~/render/* is seen from there; None: as the newest keyframe, and with its camera, no wider than publish.render_width."""
        self.view, c, limit = (T_world_cam, camera), self.newest_camera, self.ros.publish.render_width
        if camera is None and c is not None and 0 < limit < c.width:
            camera = c.resized(limit, max(1, round(c.height * limit / c.width)))
        self.mapper.command("view", T_world_cam, camera)

    def _correct(self, *path) -> None:
        """A corrected path from the intake."""
        self.mapper.command("correct", *path).add_done_callback(self._corrected)

    def _restarted(self, lap: int) -> None:
        """The stamps of images have jumped back."""
        self._time_jump.restarted(lap)

    def _corrected(self, done) -> None:
        if done.exception() is not None:
            self.log.warning(f"{self.ros.topics.path}: {done.exception()}", throttle_duration_sec=10.0)
        elif done.result().frames:
            self.log.info("corrected path: {} frames, {} keyframes, {} Gaussians moved".format(*done.result()))

    def safely(self, where: str, call):
        """`call`, whose exceptions are logged, counted and shown in the status instead of ending the node."""
        def guarded(*args):
            try:
                return call(*args)
            except Exception as e:
                self.note(where, e)
        return guarded

    def note(self, where: str, e: Exception) -> None:
        """A bug of ours, while it is being handled."""
        self.internal_errors += 1
        self.internal_error = f"internal error {self.internal_errors} in {where}: {type(e).__name__}: {e}"
        self.log.error(f"{self.internal_error}\n{traceback.format_exc()}", throttle_duration_sec=1.0)

    # ---- silence ----

    def _incompatible(self, source: Input, info) -> None:
        source.incompatible, policy = info.total_count, policy_name(info.last_policy_kind)
        self.log.warning(f"{source.topic}: {info.total_count} publisher(s) with another QoS ({policy}) cannot be heard: {describe_publishers(self.node, self.inputs, source)}; "
                         f"set qos.sensors, or qos_overrides.{source.topic}.subscription.{policy}")

    def _lost(self, source: Input, info) -> None:
        source.lost = info.total_count
        self.log.warning(f"{source.topic}: {LOST_HINT}; {source.lost} so far", throttle_duration_sec=10.0)

    def _explain_silence(self, now: float) -> None:
        if self.mapper.ledger.counts().frames_in == self.images_at_finish:
            self._silence.expected(now)  # the recording is over: silence is no surprise until another image comes
        watch, (silent, silent_s) = self.ros.watch, self._silence.of(now, self.ros.watch.silence_s)
        if not silent or now < self._explained_at + (watch.repeat_s if self.hint else 0):
            return
        self._explained_at = now
        self.hint = explain(self.node, self.inputs, self.intake, silent_s, silent)
        self.log.warning(self.hint)

    def _explain_limit(self, now: float) -> None:
        """What the mapper's hint says for longer than a moment goes into the log too, once."""
        hint = self.mapper.status().hint
        kind = re.sub(r"\d[\d.,]*", "", hint)
        if kind != self._limit[0]:
            self._limit = kind, now
        elif kind and kind not in self.limits_told and now >= self._limit[1] + self.ros.watch.silence_s:
            self.limits_told.add(kind)
            self.log.warning(hint)

    def _look_for_twins(self, now: float) -> None:
        if now < self._twins_at + TWINS_S:
            return
        before, self._twins, self._twins_at = self._twins, twins(self.node), now
        if self._twins and not before:
            self.log.warning(self._twins)

    # ---- out ----

    def _tick(self) -> None:
        now = time.monotonic()
        if self.active:
            self.intake.poll()
            self._explain_silence(now)
        self._look_for_twins(now)
        self._explain_limit(now)
        wants = self.outputs.wanted(self.ros.publish)
        self.mapper.wants = self.web.wanted(wants) if self.web else wants
        self.outputs.publish(self.ros.publish, "\n".join(filter(None, (self._twins, self._resume_hint, self.hint))), self.internal_error)
        self.diagnostics.publish(now)

    @property
    def failed(self) -> bool:
        return self.mapper.status().state == "error"

    def command(self, name: str, *args) -> concurrent.futures.Future:
        """The mapper's command, for background threads: once the mapper has stopped it would do the work on that thread."""
        with self._command_lock:
            if self._ended:
                raise RuntimeError("the node is ending")
            return self.mapper.command(name, *args)

    def change(self, ros: RosConfig, config: Config) -> None:
        """Parameters that may change while it runs have."""
        changed = {name: value for (name, value, _), (_, before, _) in zip(rows(config), rows(self.config)) if value != before}
        if changed:
            self.mapper.command("configure", changed).add_done_callback(self._configured)
        self.ros, self.config = ros, config
        if self.web:
            self.web.config = ros.web

    def _configured(self, done) -> None:
        if done.exception() is not None:
            self.log.error(f"the mapper refused the new parameters: {done.exception()}")

    # ---- the viewer ----

    def _open_viewer(self, stack: ExitStack):
        """Raises InputError. What is changed in a browser is a change of the node's parameters, on the executor's thread."""
        from .web import Viewer

        def change(values):
            for result in self.node.set_parameters([Parameter(name, value=value) for name, value in values.items()]):
                if not result.successful:
                    raise ValueError(result.reason)

        def configure(values):
            self.node.executor.create_task(self.safely("a change of parameters", change), values)
        viewer = Viewer(self.mapper, self.ros.web, note=lambda: "\n".join(filter(None, (self._twins, self.hint, self.internal_error))),
                        configure=configure, save_to=self.ros.output.map_path)
        stack.callback(viewer.close)
        self.log.info(f"viewer: {viewer.url}")
        return viewer

    # ---- the end ----

    def close(self) -> int:
        """Saves checkpoint and map when checkpoint.path and output.map_path say so, stops the mapper, publishes the last status, frees everything. The exit code."""
        self.epoch += 1
        if self.active:
            self.deactivate()
        try:
            if self.failed:
                self.log.fatal(f"the mapper failed: {self.mapper.status().last_error}")
                code = 1
            else:
                code = save_files(self.mapper, {"checkpoint": self.config.checkpoint.path, "map": self.ros.output.map_path}, self.log)
            with self._command_lock:
                self._ended = True
            self.mapper.stop()
            self.outputs.publish_status("\n".join(filter(None, (self._resume_hint, self.hint))), self.internal_error)
            self.outputs.status.wait_for_all_acked(Duration(seconds=1))
        finally:
            self._undo.close()
        return code
