"""The installed package works from any directory; so do an sdist without ROS and a colcon workspace."""
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parent.parent
PREFIX = Path(sys.prefix)

# Everything that the package must find through its installation, printed as JSON.
PROBE = """
import json
from spirula_gpu import native
from spirula_ros.share import share_directory, version
native.load("cpu")
try:
    from spirula_ros import msg
    messages = sorted(name for name in dir(msg) if name[0].isupper())
except ImportError:
    messages = []
share = share_directory()
print(json.dumps(dict(package=native.__file__, share=str(share), version=version(), messages=messages,
                      files=sorted(str(f.relative_to(share)) for d in ("config", "launch", "rviz", "foxglove") for f in (share / d).rglob("*")
                                   if f.is_file() and "__pycache__" not in f.parts))))
"""


def probe(command: list, **environment: str) -> dict:
    """What the probe finds when it runs with nothing in the environment but PATH and `environment`."""
    done = subprocess.run([*command, "-c", PROBE], env={"PATH": os.defpath, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def shared_files() -> list[str]:
    return sorted(str(f.relative_to(CHECKOUT)) for d in ("config", "launch", "rviz", "foxglove") for f in (CHECKOUT / d).rglob("*")
                  if f.is_file() and "__pycache__" not in f.parts)


def test_installed_copy_finds_its_parts_with_an_empty_environment():
    found = probe([sys.executable])
    assert Path(found["package"]).is_relative_to(PREFIX) and Path(found["share"]) == PREFIX / "share" / "spirula_ros"
    assert found["files"] == shared_files()
    assert {"MapStatus", "VramReport"} <= set(found["messages"])


def test_ament_index_finds_it():
    code = "from ament_index_python.packages import get_package_share_directory as f; print(f('spirula_ros'))"
    out = subprocess.run([sys.executable, "-c", code], env={"PATH": os.defpath, "AMENT_PREFIX_PATH": str(PREFIX)},
                         capture_output=True, text=True, check=True).stdout
    assert Path(out.strip()) == PREFIX / "share" / "spirula_ros"


@pytest.mark.parametrize("program", [PREFIX / "bin" / "spirula", PREFIX / "lib" / "spirula_ros" / "spirula"], ids=["console", "ros2run"])
def test_spirula_runs_with_an_empty_environment(program):
    done = subprocess.run([program, "--help"], env={"PATH": os.defpath}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "replay" in done.stdout and "bag" in done.stdout


def test_ros2_run_finds_the_node(launch_env):
    out = subprocess.run(["ros2", "pkg", "executables", "spirula_ros"], env=launch_env, capture_output=True, text=True, check=True).stdout
    assert set(out.split("\n")) - {""} == {"spirula_ros spirula", "spirula_ros train_node"}


def test_sdist_installs_without_ros(tmp_path):
    """The source distribution is complete, and without ROS the engine installs alone."""
    tree = checkout_copy(tmp_path / "tree")
    run = [sys.executable, "-c", "from setuptools import build_meta; print(build_meta.build_sdist('dist'))"]
    archive = tree / "dist" / subprocess.run(run, cwd=tree, capture_output=True, text=True, check=True).stdout.split()[-1]
    target = tmp_path / "target"
    done = subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", target, archive],
                          env={**os.environ, "CMAKE_ARGS": "-DSPIRULA_MESSAGES=OFF"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = probe([sys.executable], PYTHONPATH=str(target))
    assert Path(found["package"]).is_relative_to(target) and Path(found["share"]).is_relative_to(target)
    assert found["files"] == shared_files() and found["messages"] == []


@pytest.mark.parametrize("option", [[], ["--symlink-install"]], ids=["copied", "symlinks"])
def test_colcon_builds_and_the_workspace_works(option, tmp_path):
    colcon = shutil.which("colcon") or PREFIX / "test_ros" / "colcon" / "bin" / "colcon"
    if not Path(colcon).exists():
        remedy = "colcon is not there: run `make test`, which installs it, or install colcon-common-extensions"
        (pytest.fail if os.environ.get("SPIRULA_REQUIRE_LAUNCH") == "1" else pytest.skip)(remedy)
    source = checkout_copy(tmp_path / "src" / "spirula_ros")
    prefix = os.environ["AMENT_PREFIX_PATH"]
    done = subprocess.run(
        [colcon, "build", *option, "--cmake-args", "-DBUILD_TESTING=OFF", f"-DPython3_EXECUTABLE={sys.executable}",
         f"-DCMAKE_PROJECT_INCLUDE={source / 'cmake' / 'wheel_targets.cmake'}"],
        env={**os.environ, "CMAKE_PREFIX_PATH": prefix, "PATH": f"{PREFIX / 'bin'}:{os.environ['PATH']}"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    workspace = tmp_path / "install" / "spirula_ros"
    found = probe(["sh", "-c", f'. {workspace}/share/spirula_ros/package.sh && exec {sys.executable} "$@"', "sh"],
                  COLCON_CURRENT_PREFIX=str(workspace))
    assert Path(found["package"]).is_relative_to(workspace) and Path(found["share"]) == workspace / "share" / "spirula_ros"
    assert Path(found["package"]).is_symlink() == bool(option)
    assert found["files"] == shared_files() and "VramReport" in found["messages"]
    assert os.access(workspace / "lib" / "spirula_ros" / "train_node", os.X_OK)


def checkout_copy(target: Path) -> Path:
    """The files of the checkout that git knows or would add, so that nothing that was built there is picked up."""
    listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=CHECKOUT,
                            capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (CHECKOUT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(CHECKOUT / name, target / name)
    return target
