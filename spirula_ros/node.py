"""`train_node`: topics -> Intake -> Mapper -> topics. Thin: it converts, calls and publishes; the map lives in `spirula_gpu.Mapper`.

Threads: everything here runs on the executor's thread (T0). The mapper's own thread (T1) is reached by `submit` and
`command` only; its answers come back as futures, so that no callback ever waits for it.
"""
from __future__ import annotations

import concurrent.futures
import os
import re
import signal
import sys
import threading
import time
import traceback
from dataclasses import replace

import rclpy
from rcl_interfaces.msg import SetParametersResult
from rclpy.callback_groups import ReentrantCallbackGroup
from rclpy.clock import Clock, ClockType
from rclpy.duration import Duration
from rclpy.event_handler import SubscriptionEventCallbacks
from rclpy.exceptions import NameValidationException
from rclpy.executors import SingleThreadedExecutor
from rclpy.impl.implementation_singleton import rclpy_implementation
from rclpy.node import Node
from rclpy.parameter import Parameter
from rclpy.signals import SignalHandlerOptions
from rclpy.utilities import remove_ros_args
from std_srvs.srv import SetBool, Trigger

from spirula_gpu.camera import Frame
from spirula_gpu.config import rows
from spirula_gpu.mapper import Mapper, Wants
from spirula_gpu.native import NativeError
from spirula_gpu.ply import check_path

from .convert import BadMessage
from .finish import finish, save_files
from .inputs import Input, check_distinct, inputs_of, subscribe, unused_overrides
from .intake import Intake
from .node_process import PARENT
from .outputs import Outputs
from .params import check_change, config_from, declare_all
from .resume import describe, far_from_map, intake_for, live_source, other_source
from .srv import SaveMap
from .watch import LOST_HINT, describe_publishers, explain, policy_name, twins

RCLError = rclpy_implementation.RCLError
TICK_S = 0.02  # how often the intake is polled and the outputs are looked at
TWINS_S = 5.0  # how often it is looked for another node of the same name
USAGE = """train_node: images and poses in, a map of Gaussians out, until Ctrl-C.

    train_node --ros-args -p topics.image:=/camera/color/image_raw -p topics.camera_info:=/camera/color/camera_info ...
    train_node --ros-args --params-file spirula.yaml -r __ns:=/robot1

`spirula params` prints a file with every parameter. `ros2 launch spirula_ros train.launch.py --show-args` lists the arguments of the launch file."""


class TrainNode(Node):
    """Raises ValueError on bad parameters and NativeError when the engine cannot start; both say what to do."""

    def __init__(self, make_mapper=Mapper, **options):
        super().__init__("spirula", **options)
        declare_all(self)
        self.ros, self.config = config_from(self)
        check_path("output.map_path", self.ros.output.map_path)
        self.config = self._with_source()
        self.mapper = make_mapper(self.config)
        self.ros = replace(self.ros, intake=intake_for(self.mapper.resumed, self.ros.intake))
        for line in describe(self.mapper.resumed, self.config.checkpoint):
            self.get_logger().info(line)
        self.intake = Intake(self.ros.intake, self.mapper.ledger, self._take, self.config.eval.holdout_every, self._now_s, self._correct if self.ros.topics.path else None,
                             self._refuses)
        self.outputs = Outputs(self, self.mapper)
        self.internal_error, self.internal_errors = "", 0
        self._hint, self._view_camera, self._resume_hint = "", None, ""
        self._twins, self._twins_at = "", 0.0
        self._limit, self._limits_told = ("", 0.0), set()  # what limits the map, without its numbers, since when; what was said of that
        self._first_at, self._used_at, self._explained_at = None, time.monotonic(), 0.0
        self._images_at_finish = -1
        self._doubt_source(self.mapper.resumed and other_source(self.mapper.resumed.source, self.config.checkpoint.source))
        self._background, self._ending = concurrent.futures.ThreadPoolExecutor(1, "finish"), False
        self._command_lock = threading.Lock()
        self._subscribe()
        self._serve()
        self.add_on_set_parameters_callback(self._set_parameters)
        self.web = self._open_viewer() if self.ros.web.enabled else None
        tick = self._safely("the timer", self._tick)
        self.create_timer(TICK_S, lambda: tick(), clock=Clock(clock_type=ClockType.STEADY_TIME))
        self.mapper.start()
        self.get_logger().info("listening to " + ", ".join(source.topic for source in self.inputs))

    # ---- topics in ----

    def _subscribe(self) -> None:
        self.inputs = inputs_of(self.ros)
        for source in self.inputs:
            source.topic = self.resolve_topic_name(source.topic)
        check_distinct(self.inputs)
        for source in self.inputs:
            events = SubscriptionEventCallbacks(
                incompatible_qos=self._safely(f"the QoS of {source.topic}", lambda info, s=source: self._incompatible(s, info)),
                message_lost=self._safely(f"the losses of {source.topic}", lambda info, s=source: self._lost(s, info)))
            subscribe(self, source, self._receiver(source), events)
        if unused := unused_overrides(self):
            self.get_logger().warning(f"{', '.join(unused)}: without effect; the topics are {', '.join(source.topic for source in self.inputs)} (qos_overrides.<topic>"
                                      ".subscription.<history | depth | reliability | durability>)")

    def _with_source(self):
        """The engine's configuration with checkpoint.source: a player names the recording, otherwise it is the topics."""
        c, (image, *_), source = self.config.checkpoint, inputs_of(self.ros), self.ros.intake.pose_source
        poses = "tf" if source == "tf" else self.resolve_topic_name(self.ros.topics.pose)
        return replace(self.config, checkpoint=replace(c, source=c.source or live_source(self.resolve_topic_name(image.topic), poses)))

    def _doubt_source(self, text: str | None) -> None:
        """The frames may not be those of the map that was resumed: said once in the log, and in the status for good."""
        if text and not self.config.checkpoint.any_source:
            self._resume_hint = text
            self.get_logger().warning(text)

    def _receiver(self, source: Input):
        return self._safely(f"the topic {source.topic}", lambda msg: self._receive(source, msg))

    def _receive(self, source: Input, msg) -> None:
        """msg: rclpy's, or the bytes of a large one."""
        try:
            msg = source.reader(msg) if source.reader else msg
        except BadMessage as error:
            return self.intake.refused(source.kind, error)
        self.intake.on(source.kind, msg)

    def _now_s(self) -> float:
        """The clock that frames wait by: that of the recording when it drives the node, else one that never jumps."""
        if self.get_parameter("use_sim_time").value:
            return self.get_clock().now().nanoseconds / 1e9
        return time.monotonic()

    def _refuses(self, stamp_ns: int, T_world_cam) -> bool:
        """As Mapper.refuses: the map does not need an image, which is no silence."""
        if not self.mapper.refuses(stamp_ns, T_world_cam):
            return False
        self._used_at, self._hint = time.monotonic(), ""
        return True

    def _take(self, frame: Frame) -> None:
        """A complete frame from the intake."""
        self._used_at, self._hint, self.mapper.world_frame = time.monotonic(), "", self.intake.map_frame
        if self._first_at is None:
            self._doubt_source(far_from_map(self.mapper.resumed, frame.T_world_cam))
        self._first_at = self._first_at or self._used_at
        self.outputs.frame_id = frame.frame_id
        self.outputs.stamp_delay_ms = (self.get_clock().now().nanoseconds - frame.stamp_ns) / 1e6
        if frame.camera != self._view_camera:
            self._view_camera, limit = frame.camera, self.ros.publish.render_width
            if 0 < limit < frame.camera.width:
                height = max(1, round(frame.camera.height * limit / frame.camera.width))
                self.mapper.command("view", None, frame.camera.resized(limit, height))
        try:
            self.mapper.submit(frame)
        except Exception:
            self.mapper.ledger.dropped("internal_error")
            raise

    def _correct(self, stamps, poses) -> None:
        """A corrected path from the intake."""
        self.mapper.command("correct", stamps, poses).add_done_callback(self._corrected)

    def _corrected(self, done) -> None:
        if done.exception() is not None:
            self.get_logger().warning(f"{self.ros.topics.path}: {done.exception()}", throttle_duration_sec=10.0)
        elif done.result().frames:
            self.get_logger().info("corrected path: {} frames, {} keyframes, {} Gaussians moved".format(*done.result()))

    def _safely(self, where: str, call):
        """`call`, whose exceptions are logged, counted and shown in the status instead of ending the node."""
        def guarded(*args):
            try:
                return call(*args)
            except Exception as e:
                self.internal_errors += 1
                self.internal_error = f"internal error {self.internal_errors} in {where}: {type(e).__name__}: {e}"
                self.get_logger().error(f"{self.internal_error}\n{traceback.format_exc()}", throttle_duration_sec=1.0)
        return guarded

    # ---- silence ----

    def _incompatible(self, source: Input, info) -> None:
        policy = policy_name(info.last_policy_kind)
        self.get_logger().warning(f"{source.topic}: {info.total_count} publisher(s) with another QoS ({policy}) cannot be heard: {describe_publishers(self, source)}; "
                                  f"set qos.sensors, or qos_overrides.{source.topic}.subscription.{policy}")

    def _lost(self, source: Input, info) -> None:
        source.lost = info.total_count
        self.get_logger().warning(f"{source.topic}: {LOST_HINT}; {source.lost} so far", throttle_duration_sec=10.0)

    def _explain_silence(self, now: float) -> None:
        if self.mapper.ledger.counts().frames_in == self._images_at_finish:
            self._used_at = now  # the recording is over: silence is no surprise until another image comes
        watch, silent_s = self.ros.watch, now - self._used_at
        if silent_s < watch.silence_s or now < self._explained_at + (watch.repeat_s if self._hint else 0):
            return
        self._explained_at = now
        self._hint = explain(self, self.inputs, self.intake, silent_s)
        self.get_logger().warning(self._hint)

    def _explain_limit(self, now: float) -> None:
        """What the mapper's hint says for longer than a moment goes into the log too, once."""
        hint = self.mapper.status().hint
        kind = re.sub(r"\d[\d.,]*", "", hint)
        if kind != self._limit[0]:
            self._limit = kind, now
        elif kind and kind not in self._limits_told and now >= self._limit[1] + self.ros.watch.silence_s:
            self._limits_told.add(kind)
            self.get_logger().warning(hint)

    def _look_for_twins(self, now: float) -> None:
        if now < self._twins_at + TWINS_S:
            return
        before, self._twins, self._twins_at = self._twins, twins(self), now
        if self._twins and not before:
            self.get_logger().warning(self._twins)

    # ---- out ----

    def _tick(self) -> None:
        self.intake.poll()
        self._explain_silence(time.monotonic())
        self._look_for_twins(time.monotonic())
        self._explain_limit(time.monotonic())
        wants = Wants(self.outputs.render_listeners() > 0, self.outputs.mesh_listeners() > 0, self.outputs.path_listeners() > 0, 1 / self.ros.publish.render_hz)
        self.mapper.wants = self.web.wanted(wants) if self.web else wants
        self.outputs.publish(self.ros.publish, "\n".join(filter(None, (self._twins, self._resume_hint, self._hint))), self.internal_error)

    @property
    def failed(self) -> bool:
        return self.mapper.status().state == "error"

    # ---- services: the answer is the outcome, and nothing waits for it on this thread ----

    def _serve(self) -> None:
        # reentrant: a handler that awaits would keep a mutually exclusive group, and with it every topic, locked
        group = ReentrantCallbackGroup()
        for kind, name, handler in ((SaveMap, "save_map", self._save_map), (Trigger, "reset", self._reset),
                                    (SetBool, "pause", self._pause), (Trigger, "finish", self._finish)):
            self.create_service(kind, f"~/{name}", handler, callback_group=group)

    async def _answer(self, response, ask, text):
        """Fills success and message of a service response from the concurrent.futures.Future of ask(); text: result -> message."""
        executor = self.executor  # held: the answer may come when the node is gone
        bridge = rclpy.task.Future(executor=executor)
        try:
            if self.failed:
                raise RuntimeError(self.mapper.status().last_error)
            # the task, not the mapper's thread, sets the bridge: create_task also wakes the executor
            ask().add_done_callback(lambda done: executor.create_task(bridge.set_result, done))
            response.message = text((await bridge).result())
            response.success = True
        except Exception as e:
            response.success, response.message = False, f"{type(e).__name__}: {e}"
            self.get_logger().error(response.message)
        return response

    async def _save_map(self, request, response):
        path = os.path.expanduser(request.path) or self.ros.output.map_path
        if not path:
            response.success, response.message = False, "no path: give one in the request, or set the parameter output.map_path"
            return response
        return await self._answer(response, lambda: self.mapper.command("save_map", path),
                                  lambda written: f"{written} Gaussians in {path}")

    async def _reset(self, request, response):
        def done(_):
            self.outputs.mesh.clear()
            self._limits_told.clear()
            return "the map is empty"
        return await self._answer(response, lambda: self.mapper.command("reset"), done)

    async def _pause(self, request, response):
        return await self._answer(response, lambda: self.mapper.command("pause", request.data),
                                  lambda _: "paused" if request.data else "running")

    async def _finish(self, request, response):
        output = self.ros.output
        if not output.report_dir:
            response.success, response.message = False, "nowhere to write: set the parameter output.report_dir"
            return response

        def begin():
            self.intake.flush()
            self._images_at_finish, self._hint = self.mapper.ledger.counts().frames_in, ""
            return self._background.submit(finish, self.mapper, self._command, output, self._first_at or time.monotonic())
        return await self._answer(response, begin, str)

    def _command(self, name: str, *args) -> concurrent.futures.Future:
        """The mapper's command, for the background thread: once the mapper has stopped it would do the work on that thread."""
        with self._command_lock:
            if self._ending:
                raise RuntimeError("the node is ending")
            return self.mapper.command(name, *args)

    # ---- parameters ----

    def _set_parameters(self, parameters) -> SetParametersResult:
        result = self._safely("a change of parameters", self._change)(parameters)
        return result or SetParametersResult(successful=False, reason=self.internal_error)

    def _change(self, parameters) -> SetParametersResult:
        try:
            ros, config = check_change(parameters, self.ros, self.config)
        except ValueError as e:
            return SetParametersResult(successful=False, reason=str(e))
        changed = {name: value for (name, value, _), (_, before, _) in zip(rows(config), rows(self.config)) if value != before}
        if changed:
            self.mapper.command("configure", changed).add_done_callback(self._configured)
        self.ros, self.config = ros, config
        if self.web:
            self.web.config = ros.web
        return SetParametersResult(successful=True)

    def _configured(self, done) -> None:
        if done.exception() is not None:
            self.get_logger().error(f"the mapper refused the new parameters: {done.exception()}")

    # ---- the viewer ----

    def _open_viewer(self):
        """Raises InputError. What is changed in a browser is a change of the node's parameters, on the executor's thread."""
        from .web import Viewer

        def change(values):
            for result in self.set_parameters([Parameter(name, value=value) for name, value in values.items()]):
                if not result.successful:
                    raise ValueError(result.reason)

        def configure(values):
            self.executor.create_task(self._safely("a change of parameters", change), values)
        viewer = Viewer(self.mapper, self.ros.web, note=lambda: "\n".join(filter(None, (self._twins, self._hint, self.internal_error))),
                        configure=configure, save_to=self.ros.output.map_path)
        self.get_logger().info(f"viewer: {viewer.url}")
        return viewer

    # ---- the end ----

    def close(self) -> int:
        """Saves checkpoint and map when checkpoint.path and output.map_path say so, stops the mapper, publishes the last status. The exit code."""
        if self.failed:
            self.get_logger().fatal(f"the mapper failed: {self.mapper.status().last_error}")
            code = 1
        else:
            code = save_files(self.mapper, {"checkpoint": self.config.checkpoint.path, "map": self.ros.output.map_path}, self.get_logger())
        with self._command_lock:
            self._ending = True
        if self.web:
            self.web.close()
        self.mapper.stop()
        self._background.shutdown(wait=False, cancel_futures=True)
        self.outputs.publish_status("\n".join(filter(None, (self._resume_hint, self._hint))), self.internal_error)
        self.outputs.status.wait_for_all_acked(Duration(seconds=1))
        self.destroy_node()
        return code


def main(argv: list[str] | None = None) -> int:
    """Runs until SIGINT, SIGTERM or SIGHUP, or until the process that PARENT names has gone. Exit codes: 0 stopped, 1 the
    mapper failed, 2 it could not start."""
    parent = os.environ.get(PARENT)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # rclpy's own handlers would take the context away before the last status
        signal.signal(number, lambda *_: stop.set())
    try:
        words = remove_ros_args(sys.argv if argv is None else ["train_node", *argv])[1:]
        if words and words[0] in ("-h", "--help"):
            print(USAGE)
            return 0
        if words:
            raise ValueError(f"'{words[0]}': parameters stand behind --ros-args; see train_node --help")
        rclpy.init(args=argv, signal_handler_options=SignalHandlerOptions.NO)
        node = TrainNode()
    except (ValueError, NativeError, RCLError, NameValidationException) as e:
        print(f"train_node: {e}", file=sys.stderr)
        rclpy.try_shutdown()
        return 2
    executor = SingleThreadedExecutor()
    executor.add_node(node)
    try:
        while not stop.is_set() and not node.failed and parent in (None, str(os.getppid())):
            executor.spin_once(timeout_sec=0.1)
    finally:  # whatever ended it: the map is saved
        try:
            code = node.close()
        finally:
            executor.shutdown(timeout_sec=1)
            rclpy.try_shutdown()
    return code


if __name__ == "__main__":
    sys.exit(main())
