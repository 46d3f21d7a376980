"""`spirula bag play`: what it sends, without DDS; test_launch.py plays a recording to the node."""
import conftest
import pytest

conftest.importorskip("rclpy", "source a ROS 2 installation for this Python, or pip install 'spirula_ros[ros]'")
from rosgraph_msgs.msg import Clock

from spirula_ros import bag_play, bags
from spirula_ros.bag_play import Player, PlayOptions
from spirula_ros.synthetic import make_bag


class Topic:
    """Stands in for a publisher."""
    msg_type = Clock

    def __init__(self):
        self.sent = []

    def publish(self, message):
        self.sent.append(message.clock.sec * 10**9 + message.clock.nanosec if isinstance(message, Clock) else message)


def played(bag, monkeypatch, **options) -> Player:
    player = object.__new__(Player)
    kinds = {topic: info.type for topic, info in bag.topics.items()}
    player._bag, player._kinds, player._options, player.sent, player._told = bag, kinds, PlayOptions(clock=True, **options), 0, 0.0
    player._publishers, player._clock = {topic: Topic() for topic in kinds}, Topic()
    monkeypatch.setattr(bag_play.time, "sleep", lambda _: None)
    player.run()
    return player


@pytest.mark.parametrize("rate", [5.0, 1e6])
def test_every_message_and_a_clock_that_goes_on_also_without_time_to_wait(tmp_path, monkeypatch, rate):
    make_bag(str(tmp_path / "room"), frames=10, size=(64, 48), fps=20.0)
    monkeypatch.setattr(bag_play, "CLOCK_PERIOD_S", 1e-5)
    with bags.open_bag(tmp_path / "room") as bag:
        player = played(bag, monkeypatch, rate=rate)
        assert player.sent == sum(info.count for info in bag.topics.values())
        assert {topic: len(p.sent) for topic, p in player._publishers.items()} == {topic: info.count for topic, info in bag.topics.items()}
        clock = player._clock.sent
        assert len(clock) >= 2 and clock == sorted(clock) and bag.start_ns <= clock[0] and clock[-1] <= bag.end_ns
