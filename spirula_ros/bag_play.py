"""`spirula bag play`: what `ros2 bag play --clock` does, where rosbag2 is not installed or does not read the recording: every topic that a node can map from, and
/clock. Messages are sent as they are, undecoded."""
from __future__ import annotations

import importlib.util
import os
import sys
import time
from typing import NamedTuple

from . import bags
from .dds import fastdds_profile
from .errors import InputError
from .player import message_class, qos_of

CLOCK_PERIOD_S = 0.01
TYPES = {kind for kinds in bags.KINDS.values() for kind in kinds}


class PlayOptions(NamedTuple):
    rate: float = 1.0       # of the recording's time
    loop: bool = False
    clock: bool = False     # publish /clock
    wait_s: float = 0.0     # begin when somebody listens to the images, or after so long


def play(path: str, options: PlayOptions) -> int:
    """Until the recording's end, or Ctrl-C. Returns the number of messages. Raises InputError."""
    if importlib.util.find_spec("rclpy") is None:
        raise InputError("bag play needs ROS 2 for this Python (rclpy): source its setup file, or install the extra: pip install 'spirula_ros[ros]'")
    os.environ.update(fastdds_profile(os.environ))
    with bags.open_bag(path) as bag:
        kinds = {topic: "tf_static" if info.type.endswith("TFMessage") and "static" in topic else info.type for topic, info in bag.topics.items() if info.type in TYPES and info.count}
        if not kinds:
            raise InputError(f"{path}: none of its {len(bag.topics)} topics is one that a node maps from; `spirula bag info` lists them")
        import rclpy
        from rclpy.signals import SignalHandlerOptions
        rclpy.init(signal_handler_options=SignalHandlerOptions.NO)  # rclpy's own handlers would take the context away in the middle of a message
        player = Player(bag, kinds, options)
        try:
            player.run()
            print(f"played {player.sent} messages of {len(kinds)} topics")
        except KeyboardInterrupt:
            print(f"stopped after {player.sent} messages")
        finally:
            rclpy.try_shutdown()
        return player.sent


class Player:
    """kinds: {topic: its type, or tf_static}."""

    def __init__(self, bag: bags.Bag, kinds: dict[str, str], options: PlayOptions):
        import rclpy
        from rosgraph_msgs.msg import Clock
        self._bag, self._kinds, self._options, self.sent, self._told = bag, kinds, options, 0, 0.0
        self._node = rclpy.create_node("spirula_bag_player")
        self._publishers = {topic: self._node.create_publisher(message_class(bag.topics[topic].type), topic, qos_of(kind)) for topic, kind in kinds.items()}
        self._clock = self._node.create_publisher(Clock, "/clock", 10) if options.clock else None

    def run(self) -> None:
        self._wait()
        while not (problem := self._once()) and self._options.loop:
            pass
        if problem:
            print(f"warning: {problem}", file=sys.stderr)
        time.sleep(0.5)  # the last messages leave

    def _wait(self) -> None:
        images, deadline = [self._publishers[topic] for topic in self._kinds if self._bag.topics[topic].type.endswith("Image")], time.monotonic() + self._options.wait_s
        while time.monotonic() < deadline and not any(p.get_subscription_count() for p in images):
            self._tell(self._bag.start_ns)
            time.sleep(0.05)

    def _once(self) -> str:
        """'' or what is wrong with the recording's end."""
        begin, first_ns, rate = time.monotonic(), None, self._options.rate
        try:
            for message in bags.read(self._bag, self._kinds):
                first_ns = message.recv_ns if first_ns is None else first_ns
                due = begin + (message.recv_ns - first_ns) / 1e9 / rate
                while (left := due - time.monotonic()) > 0:
                    time.sleep(min(left, CLOCK_PERIOD_S))
                    self._tell(message.recv_ns - round(max(0.0, due - time.monotonic()) * rate * 1e9))
                self._publishers[message.topic].publish(message.raw)
                self.sent += 1
                if time.monotonic() - self._told >= CLOCK_PERIOD_S:   # also when there is no time to wait
                    self._tell(message.recv_ns)
        except bags.BagError as error:
            return str(error)
        return ""

    def _tell(self, now_ns: int) -> None:
        self._told = time.monotonic()
        if self._clock is not None:
            message = self._clock.msg_type()
            message.clock.sec, message.clock.nanosec = divmod(now_ns, 1_000_000_000)
            self._clock.publish(message)
