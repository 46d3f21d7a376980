"""train_node as a command: what it refuses to start with, in one line, and that it ends with the process that started it."""
import os
import subprocess
import sys
import time

import conftest
import pytest

conftest.importorskip("rclpy", "source a ROS 2 installation for this Python, or pip install 'spirula_ros[ros]'")
conftest.importorskip("spirula_ros.msg", "build the messages: make develop")
from spirula_ros.share import share_directory

NODE = share_directory().parents[1] / "lib" / "spirula_ros" / "train_node"


def start(*words: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run([NODE, *words], env={**os.environ, **environment}, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("words, environment, text", [
    (["--ros-args", "--params-file", "nowhere.yaml"], {}, "nowhere.yaml"),
    (["--ros-args", "-p", "topics.image:=bad topic"], {}, "topic name"),
    (["--ros-args", "-r", "__node:=a-b"], {}, "__node:=a-b"),
    ([], {"ROS_DOMAIN_ID": "abc"}, "ROS_DOMAIN_ID is not an integral number"),
    (["--ros-args", "-p", "topics.imag:=/camera/image"], {}, "unknown parameter 'topics.imag'"),
    (["--ros-args", "-p", "topics.image:=/same", "-p", "topics.depth:=/same"], {}, "topics.image and topics.depth are both /same: one topic cannot be image and depth"),
    (["topics.image:=/camera"], {}, "'topics.image:=/camera': parameters stand behind --ros-args; see train_node --help"),
], ids=lambda x: x if isinstance(x, str) else "")
def test_it_does_not_start_and_says_why(words, environment, text, ros_domain):
    done = start(*words, **{"ROS_DOMAIN_ID": str(ros_domain), **environment})
    said = [line for line in done.stderr.splitlines() if line.startswith("train_node: ")]
    assert done.returncode == 2 and len(said) == 1 and text in said[0] and "Traceback" not in done.stderr, done.stderr


def test_help():
    done = start("--help")
    assert done.returncode == 0 and "--params-file" in done.stdout and "spirula params" in done.stdout


def test_it_ends_when_its_starter_is_killed(tmp_path, ros_domain):
    """No `finally` runs in a process that is killed: `spirula replay --via-ros` would leave its node behind."""
    starter = subprocess.Popen([sys.executable, "-c", f"""
import pathlib, time
from spirula_ros.node_process import NodeProcess
print(NodeProcess(pathlib.Path({str(tmp_path)!r}), {{}}).process.pid, flush=True)
time.sleep(600)"""], env={**os.environ, "ROS_DOMAIN_ID": str(ros_domain)}, stdout=subprocess.PIPE, text=True)
    pid, log, deadline = int(starter.stdout.readline()), tmp_path / "node.log", time.monotonic() + 60
    while "listening to" not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
    starter.kill()
    starter.wait()
    while os.path.exists(f"/proc/{pid}/cmdline") and open(f"/proc/{pid}/cmdline").read():  # a zombie has none
        assert time.monotonic() < deadline, "the node is still there"
        time.sleep(0.1)


def test_the_node_loads_nothing_that_reads_recordings_or_trains_offline():
    """At a robot each of them costs memory and a second of start."""
    code = "import sys, spirula_ros.node; print(sorted({m.split('.')[0] for m in sys.modules} & {'rosbags', 'scipy', 'torch', 'open3d', 'pycolmap', 'viser'}))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_the_node_keeps_freed_memory():
    """A block as large as a 1080p message stays with the process; by itself glibc gives it back at once."""
    code = """
import re, sys
from spirula_ros.node import keep_freed_memory
resident_kb = lambda: int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1])
if sys.argv[1] == "kept":
    keep_freed_memory()
before = resident_kb()
block = bytearray(b"x" * (30 << 20))
del block
print(resident_kb() - before)
"""
    grown = {how: int(subprocess.run([sys.executable, "-c", code, how], capture_output=True, text=True, check=True).stdout) for how in ("kept", "plain")}
    assert grown["kept"] > 25_000 > 5_000 > grown["plain"], grown
