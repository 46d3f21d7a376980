"""`spirula`: arguments, exit codes, one-line errors, parameters and configuration files."""
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from spirula_gpu.config import load_yaml
from spirula_gpu.native import NativeError
from spirula_ros import cli, params
from spirula_ros.errors import InputError
from spirula_ros.settings import settings
from spirula_ros.share import share_directory, version
from spirula_ros.synthetic import make_bag

CONFIG = Path(__file__).resolve().parents[1] / "config"


def spirula(capsys, *argv):
    """(exit code, stdout, stderr)"""
    try:
        code = cli.main([str(a) for a in argv])
    except SystemExit as e:  # argparse
        code = e.code
    return code, *capsys.readouterr()


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    path = tmp_path_factory.mktemp("bags") / "room"
    make_bag(path, frames=2, size=(8, 6), say=lambda _: None)
    return path


def test_version_and_help(capsys):
    assert spirula(capsys, "--version") == (0, f"spirula {version()}\n", "")
    for words in ((), ("replay",), ("bag",), ("bag", "from-rgbd"), ("bag", "from-colmap"), ("bag", "synthetic"), ("bag", "info"), ("convert",), ("info",), ("params",)):
        code, out, _ = spirula(capsys, *words, "--help")
        assert code == 0 and out.startswith("usage: spirula")
    assert "examples:" in spirula(capsys, "replay", "--help")[1]


def test_the_installed_command(tmp_path):
    done = subprocess.run([Path(sys.prefix) / "bin" / "spirula", "replay", tmp_path / "nothing"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.splitlines() == [f"spirula: {tmp_path}/nothing: does not exist"]


def test_a_closed_pipe_is_no_error():
    done = subprocess.run(f"{Path(sys.prefix) / 'bin' / 'spirula'} params | head -1", shell=True, capture_output=True, text=True)
    assert done.stdout == "/**:\n" and done.stderr == ""


@pytest.mark.parametrize("argv, message", [
    (["replay"], "required: BAG"), ([], "required: COMMAND"), (["replay", "x", "--rate", "0"], "'0' must be above 0"),
    (["replay", "x", "--rate", "nan"], "'nan' must be above 0"), (["replay", "x", "--rate", "2", "--lossless"], "not allowed with"),
    (["replay", "x", "--holdout", "-1"], "'-1' must be 0 or more"), (["replay", "x", "--backend", "tpu"], "invalid choice"),
    (["bag", "synthetic", "x", "--size", "160"], "write it as 160x120"), (["bag", "synthetic", "x", "--size", "0x5"], "1..32767"),
    (["bag", "synthetic", "x", "--frames", "1"], "'1' must be 2 or more"),
    (["bag", "synthetic", "x", "--frames", "1e9"], "'1e9' must be a whole number, written in digits, like 2"),
    (["forecast", "--size", "64x48", "--cameras", "999999999999"], "'999999999999' must be 2147483647 or less"),
    (["bag", "from-rgbd", "x", "y", "--intrinsics", "1 2 3"], "4 numbers are needed"),
    (["forecast", "--size", "64x48", "--pairs", "0"], "'0' must be a whole number from 1 to"),
    (["forecast", "--size", "64x48", "--gaussians", "10Q"], "'10Q' must be a whole number from 0 to"),
    (["forecast", "--size", "64x48", "--vram-mb", "8PB"], "'8PB' must be 1 MiB or more, like 8192, 8GiB or 8GB"),
    (["forecast", "--size", "64x48", "--vram-mb", "nan"], "must be 1 MiB or more"),
    (["bag", "from-rgbd", "x", "y", "--color-f", "5", "--color-intrinsics", "1 2 3 4"], "not allowed with"),
])
def test_bad_usage(capsys, argv, message):
    code, out, err = spirula(capsys, *argv)
    assert code == 2 and message in err and out == ""


@pytest.mark.parametrize("options, message", [
    (["--config", "nonesuch"], "no such file, and no installed configuration of that name .*default"),
    (["--set", "train.steps=1"], "unknown parameter 'train.steps'.*; `spirula params` lists all"), (["--config", "."], "--config .: a folder; give a parameter file"), (["--set", "steps_per_frame"], "write group.name=value"),
    (["--set", "train.steps_per_frame=many"], "must be int"), (["--set", "engine.sh_degree=7"], r"must lie in \[0, 3\]"),
    (["--set", "gate.min_rotation_deg=.nan"], "must lie in"), (["--set", "intake.depth=maybe"], "must be one of require, use_if_there, ignore"),
    (["--depth-topic", "/nope"], "--depth-topic /nope is not in"), (["--out", "/proc/x"], "choose another folder"),
])
def test_bad_input_is_one_message_and_exit_2(capsys, tmp_path, room, options, message):
    code, out, err = spirula(capsys, "replay", room, "--out", tmp_path / "out", *options)
    assert code == 2 and re.search(message, err) and err.startswith("spirula: ") and "Traceback" not in err and out == ""


def test_exit_codes_of_failures(capsys, monkeypatch):
    def raises(error):
        def run(args):
            raise error
        return run
    for error, code in ((InputError("bad"), 2), (NativeError("device", "no GPU"), 2), (KeyboardInterrupt(), 130)):
        monkeypatch.setattr(cli, "run_params", raises(error))
        assert spirula(capsys, "params")[0] == code
    monkeypatch.setattr(cli, "run_params", raises(RuntimeError("a bug")))
    with pytest.raises(RuntimeError):  # a traceback and exit status 1
        cli.main(["params"])


def test_bag_commands(capsys, tmp_path):
    assert spirula(capsys, "bag", "synthetic", tmp_path / "room", "--frames", 3, "--size", "24x18", "--storage", "sqlite3")[0] == 0
    assert next((tmp_path / "room").glob("*.db3"))
    code, out, _ = spirula(capsys, "bag", "info", tmp_path / "room")
    assert code == 0 and "/camera/depth/image_raw  sensor_msgs/msg/Image  3" in out and "a replay uses: image /camera/color/image_raw" in out
    code, _, err = spirula(capsys, "bag", "from-rgbd", tmp_path, tmp_path / "y")
    assert code == 2 and "neither a 7-Scenes folder" in err


# ---- parameters ------------------------------------------------------------------------------------------------------------

def test_default_yaml_is_what_params_prints(capsys):
    text = (CONFIG / "default.yaml").read_text()
    assert text == spirula(capsys, "params")[1], "parameters have changed: spirula params > config/default.yaml"
    tree = yaml.safe_load(text)["/**"]["ros__parameters"]
    listed = {f"{group}.{name}": value for group, rows in tree.items() for name, value in rows.items()}
    assert listed == {name: list(value) if isinstance(value, tuple) else value for name, value, _ in params.rows()}


@pytest.mark.parametrize("file", sorted(CONFIG.glob("*.yaml")), ids=lambda p: p.stem)
def test_every_configuration_loads_by_path_and_by_name(file):
    by_path, by_name = settings(str(file), {}, []), settings(file.stem, {}, [])
    assert by_path == by_name and by_path.given
    assert by_path.config == load_yaml(str(file))
    assert (share_directory() / "config" / file.name).is_file()


def test_precedence(tmp_path):
    (tmp_path / "f.yaml").write_text("engine: {seed: 1, threads: 1}\ntrain: {lr_mean: 1.0e-3}\nintake: {depth: ignore}\n")
    found = settings(str(tmp_path / "f.yaml"), {"engine.seed": 2, "engine.threads": None}, ["engine.seed=3", "train.lr_sh0=1e-4", "topics.image=5"])
    assert (found.config.engine.seed, found.config.engine.threads, found.config.train.lr_mean, found.config.train.lr_sh0) == (3, 1, 1e-3, 1e-4)
    assert found.ros.intake.depth == "ignore" and found.ros.topics.image == "5"
    assert found.given == {"engine.seed", "engine.threads", "train.lr_mean", "train.lr_sh0", "intake.depth", "topics.image"}


@pytest.mark.parametrize("text", ["a: 1", "- 1", "a: {b: [", "\x00", "train: {steps: 1}"])
def test_files_that_are_no_configuration(tmp_path, text):
    (tmp_path / "f.yaml").write_text(text)
    with pytest.raises(InputError):
        settings(str(tmp_path / "f.yaml"), {}, [])


def test_holdout_is_8_unless_said(tmp_path):
    parse = cli.parser().parse_args
    assert cli.settings_from(parse(["replay", "x"])).config.eval.holdout_every == 8
    assert cli.settings_from(parse(["replay", "x", "--holdout", "0"])).config.eval.holdout_every == 0
    assert cli.settings_from(parse(["replay", "x", "--set", "eval.holdout_every=5"])).config.eval.holdout_every == 5
    (tmp_path / "f.yaml").write_text("eval: {holdout_every: 3}")
    assert cli.settings_from(parse(["replay", "x", "--config", str(tmp_path / "f.yaml")])).config.eval.holdout_every == 3


def test_params_from_a_file_prints_its_values(capsys, tmp_path):
    (tmp_path / "f.yaml").write_text("train: {steps_per_frame: 7}")
    code, out, _ = spirula(capsys, "params", "--config", tmp_path / "f.yaml")
    assert code == 0 and yaml.safe_load(out)["/**"]["ros__parameters"]["train"]["steps_per_frame"] == 7
