"""The parameter tables: every row has its place once, the file form says what the tables say."""
import dataclasses

import pytest
import yaml

from spirula_gpu.config import Config
from spirula_ros import params
from spirula_ros.params import RosConfig, rows, split, yaml_text


def test_every_row_is_complete_and_named_once():
    names = [name for name, _, _ in rows()]
    assert len(names) == len(set(names)) > 60
    groups = [f.name for table in (RosConfig, Config) for f in dataclasses.fields(table)]
    assert len(groups) == len(set(groups)), "a group in both tables would be ambiguous"
    for name, default, field in rows():
        meta = field.metadata
        assert meta["help"] and name.count(".") == 1, name
        if isinstance(default, (int, float)) and not isinstance(default, bool):
            assert meta["low"] is not None and meta["low"] <= default <= meta["high"], f"{name} has no range, or its default is outside"
    assert set(params.CHOICES) <= set(names)
    assert all(next(d for n, d, _ in rows() if n == name) in allowed for name, allowed in params.CHOICES.items())


def test_the_file_says_every_default_in_its_own_type():
    tree = yaml.safe_load(yaml_text())["/**"]["ros__parameters"]
    read = {f"{group}.{leaf}": value for group, leaves in tree.items() for leaf, value in leaves.items()}
    for name, default, _ in rows():
        value = tuple(read.pop(name)) if isinstance(default, tuple) else read.pop(name)
        assert value == default and type(value) is type(default), f"{name}: {value!r} is not {default!r} (ROS refuses 1 for 1.0)"
    assert not read
    assert split(read) == (RosConfig(), Config())


def test_the_file_takes_values():
    values = {"topics.image": 'a "quoted" \\ name', "train.lr_mean": 1e-05, "engine.seed": 7, "intake.T_body_camera": (1.0, 2.0, 3.0, 0.0, 0.0, 0.0, 1.0), "output.mesh": False}
    tree = yaml.safe_load(yaml_text(values))["/**"]["ros__parameters"]
    for name, value in values.items():
        group, leaf = name.split(".")
        assert tree[group][leaf] == (list(value) if isinstance(value, tuple) else value)


@pytest.mark.parametrize("values, text", [
    ({"qos.sensors": "sometimes"}, "best_effort, reliable"),
    ({"engine.backend": "gpu"}, "auto, cpu, cuda"),
    ({"engine.precision": "half"}, "full, compact"),
    ({"publish.status_hz": 0.0}, r"publish.status_hz = 0.0 Hz: must lie in \[0.01"),
    ({"publish.status_hz": float("nan")}, "must lie in"),
    ({"train.lr_mean": "fast"}, "must be float"),
    ({"train.max_keyframes": 2.5}, "whole number"),
    ({"output.mesh": 1}, "must be bool"),
    ({"lr_mean": 1.0}, "unknown parameter 'lr_mean'; did you mean 'train.lr_mean'"),
    ({"engine.precison": "compact"}, "unknown parameter 'engine.precison'; did you mean 'engine.precision'"),
    ({"precison": "compact"}, "unknown parameter 'precison'; did you mean 'engine.precision'"),
    *(({name: 1}, f"^unknown parameter '{name}'; did you mean '{meant}'.$") for name, meant in (
        ("web.prot", "web.port"), ("web.enable", "web.enabled"), ("topics.imagee", "topics.image"), ("web.period", "web.period_s"), ("checkpoint.periods", "checkpoint.period_s"),
        ("steps_per_frame", "train.steps_per_frame"), ("train.voxel_m", "mesh.voxel_m"), ("mesh.voxel", "mesh.voxel_m"), ("intake.depht", "intake.depth"))),
    *(({name: 1}, f"^unknown parameter '{name}'$") for name in ("foo.bar", "engine.colour", "checkpoint.interval")),
    ({"intake.T_body_camera": (0.0,) * 7}, "unit quaternion"),
    ({"topics.pose_type": "Pose"}, "PoseStamped, PoseWithCovarianceStamped"),
])
def test_bad_values_are_refused_with_what_is_allowed(values, text):
    with pytest.raises(ValueError, match=text):
        split(values)


def test_values_reach_the_right_table():
    ros, config = split({"publish.render_hz": 3, "engine.seed": 5.0, "intake.pose_source": "tf"})
    assert ros.publish.render_hz == 3.0 and type(ros.publish.render_hz) is float and ros.intake.pose_source == "tf"
    assert config.engine.seed == 5 and type(config.engine.seed) is int
    assert config == dataclasses.replace(Config(), engine=dataclasses.replace(Config().engine, seed=5))


def test_ros_declares_every_row():
    rclpy = pytest.importorskip("rclpy", reason="needs a ROS 2 Python (rclpy)")
    context = rclpy.Context()
    rclpy.init(context=context)
    node = rclpy.create_node("declares", context=context)
    params.declare_all(node)
    for name, default, field in rows():
        descriptor = node.describe_parameter(name)
        assert descriptor.read_only != field.metadata["live"] and field.metadata["help"] in descriptor.description
        ranges = [(r.from_value, r.to_value) for r in [*descriptor.integer_range, *descriptor.floating_point_range]]
        assert ranges == ([(field.metadata["low"], field.metadata["high"])] if field.metadata["low"] is not None and not isinstance(default, tuple) else []), name
    assert params.config_from(node) == (RosConfig(), Config())
    node.destroy_node()
    rclpy.shutdown(context=context)
