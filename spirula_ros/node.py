"""`train_node`: a managed (lifecycle) node. configure makes the engine and all that speaks (`Session`), activate listens, deactivate stops listening and
training, cleanup saves and frees the map. With lifecycle.autostart it configures and activates itself."""
from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

import rclpy
from rcl_interfaces.msg import SetParametersResult
from rclpy.exceptions import NameValidationException
from rclpy.executors import SingleThreadedExecutor
from rclpy.impl.implementation_singleton import rclpy_implementation
from rclpy.lifecycle import LifecycleNode, TransitionCallbackReturn
from rclpy.signals import SignalHandlerOptions
from rclpy.utilities import remove_ros_args

from spirula_gpu.mapper import Mapper
from spirula_gpu.native import NativeError

from .node_process import PARENT
from .params import check_change, config_from, declare_all
from .session import Session

RCLError = rclpy_implementation.RCLError
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SUCCESS, FAILURE = TransitionCallbackReturn.SUCCESS, TransitionCallbackReturn.FAILURE
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3              # malloc.h
LARGEST_BLOCK, KEPT_BYTES = 32 << 20, 128 << 20          # the first is the most that glibc allows
END_ACTIONS_S = 3.0
USAGE = """train_node: images and poses in, a map of Gaussians out, until Ctrl-C.

    train_node --ros-args -p topics.image:=/camera/color/image_raw -p topics.camera_info:=/camera/color/camera_info ...
    train_node --ros-args --params-file spirula.yaml -r __ns:=/robot1

`spirula params` prints a file with every parameter. `ros2 launch spirula_ros train.launch.py --show-args` lists the arguments of the launch file."""


def keep_freed_memory() -> None:
    """Has glibc keep up to KEPT_BYTES of what was freed. Images come and go many times a second; given back each time, every page of the next one is a fault of
    the executor's thread, which holds the interpreter meanwhile. Other C libraries have no mallopt, and nothing happens."""
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(M_MMAP_THRESHOLD, LARGEST_BLOCK)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


class TrainNode(LifecycleNode):
    """Raises ValueError on bad parameters and, with lifecycle.autostart, what `Session` raises."""

    def __init__(self, make_mapper=Mapper, **options):
        super().__init__("spirula", **options)
        self.session: Session | None = None
        self.ended, self._code, self._make_mapper, self._why = False, 0, make_mapper, None
        declare_all(self)
        self.ros, self.config = config_from(self)
        self.add_on_set_parameters_callback(self._set_parameters)
        if self.ros.lifecycle.autostart:
            for trigger in (self.trigger_configure, self.trigger_activate):
                if trigger() != SUCCESS:
                    self.close()
                    raise self._why
        else:
            self.get_logger().info(f"unconfigured, as lifecycle.autostart is false: ros2 lifecycle set {self.get_fully_qualified_name()} configure")

    # ---- transitions: one that cannot be made leaves the node in the state before ----

    def on_configure(self, state) -> TransitionCallbackReturn:
        return self._transition("configure", self._configure)

    def on_activate(self, state) -> TransitionCallbackReturn:
        return self._transition("activate", lambda: self.session.activate())

    def on_deactivate(self, state) -> TransitionCallbackReturn:
        return self._transition("deactivate", lambda: self.session.deactivate())

    def on_cleanup(self, state) -> TransitionCallbackReturn:
        return self._transition("clean up", self._clean_up)

    def _clean_up(self) -> None:
        if n := self.session.services.answering:   # an answer cannot be sent by a service that is gone
            raise ValueError(f"{n} service call(s) are not answered yet; try again when they are")
        self._end_session()

    def on_shutdown(self, state) -> TransitionCallbackReturn:
        """The process ends."""
        self.ended = True
        return self._transition("shut down", self._end_session)

    def _transition(self, what: str, act) -> TransitionCallbackReturn:
        try:
            act()
            return SUCCESS
        except Exception as e:
            self._why = e
            self.get_logger().error(f"cannot {what}: {e}" if isinstance(e, (ValueError, NativeError, RCLError)) else f"cannot {what}: {type(e).__name__}: {e}")
            return FAILURE

    def _configure(self) -> None:
        self.ros, self.config = config_from(self)
        self.session = Session(self, self.ros, self.config, self._make_mapper)
        self.ros, self.config = self.session.ros, self.session.config

    def _end_session(self) -> None:
        session, self.session = self.session, None
        if session:
            self._code = session.close()

    # ---- parameters ----

    def _set_parameters(self, parameters) -> SetParametersResult:
        try:
            ros, config = check_change(parameters, self.ros, self.config, self.session is not None)
            if self.session:
                self.session.change(ros, config)
        except ValueError as e:
            return SetParametersResult(successful=False, reason=str(e))
        except Exception as e:
            if self.session:
                self.session.note("a change of parameters", e)
            return SetParametersResult(successful=False, reason=f"internal error: {type(e).__name__}: {e}")
        self.ros, self.config = ros, config
        return SetParametersResult(successful=True)

    # ---- the end ----

    @property
    def failed(self) -> bool:
        return self.session is not None and self.session.failed

    def end_actions(self, executor) -> None:
        """Aborts what actions do, and gives their clients the time to hear of it."""
        if self.session and not self.session.failed:
            self.session.epoch += 1
            deadline = time.monotonic() + END_ACTIONS_S
            while self.session.actions.busy and time.monotonic() < deadline:
                executor.spin_once(timeout_sec=0.05)

    def close(self) -> int:
        """Ends the session as cleanup does, and the node. The exit code."""
        self._end_session()
        self.destroy_node()
        return self._code


def main(argv: list[str] | None = None) -> int:
    """Runs until SIGINT, SIGTERM or SIGHUP, the transition shutdown, or until the process that PARENT names has gone. Exit codes: 0 stopped, 1 the
    mapper failed or something was not saved, 2 it could not start."""
    parent = os.environ.get(PARENT)
    stop = threading.Event()
    for number in STOPPING:  # rclpy's own handlers would take the context away before the last status
        signal.signal(number, lambda *_: stop.set())
    try:
        words = remove_ros_args(sys.argv if argv is None else ["train_node", *argv])[1:]
        if words and words[0] in ("-h", "--help"):
            print(USAGE)
            return 0
        if words:
            raise ValueError(f"'{words[0]}': parameters stand behind --ros-args; see train_node --help")
        keep_freed_memory()
        rclpy.init(args=argv, signal_handler_options=SignalHandlerOptions.NO)
        node = TrainNode()
    except (ValueError, NativeError, RCLError, NameValidationException) as e:
        print(f"train_node: {e}", file=sys.stderr)
        rclpy.try_shutdown()
        return 2
    executor = SingleThreadedExecutor()
    executor.add_node(node)
    try:
        while not stop.is_set() and not (node.ended or node.failed) and parent in (None, str(os.getppid())):
            executor.spin_once(timeout_sec=0.1)
        node.end_actions(executor)
    finally:  # whatever ended it: the map is saved
        try:
            code = node.close()
        finally:
            executor.shutdown(timeout_sec=1)
            rclpy.try_shutdown()
    for number in STOPPING:  # all is saved: one more Ctrl-C while Python ends, which takes our handlers away, must not make this a failure
        signal.signal(number, signal.SIG_IGN)
    return code


if __name__ == "__main__":
    sys.exit(main())
