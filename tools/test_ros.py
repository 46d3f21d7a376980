"""`make test`: the parts of ROS that tests use and that are not there: neither installed nor as wheels of their own.

- launch, launch_ros, launch_testing and the `ros2` command: pure Python (Apache-2.0), taken out of one large wheel into
  <venv>/test_ros, which only the fixture `launch_env` puts on PYTHONPATH.
- tf2_msgs/TFMessage: generated into the venv.
- colcon, in a virtual environment of its own (it brings another pytest): <venv>/test_ros/colcon.
Nothing of this is part of the package or of what it depends on.
"""
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
TEST_ROS = Path(sys.prefix) / "test_ros"
WHEEL = "isaacsim-ros2==6.2.0.0"
FOLDER = "isaacsim/exts/isaacsim.ros2.core/jazzy/rclpy/"
PACKAGES = ("launch", "launch_ros", "launch_testing", "launch_testing_ros", "launch_xml", "launch_yaml", "osrf_pycommon",
            "ros2cli", "ros2node", "ros2param", "ros2pkg", "ros2run", "ros2service", "ros2topic", "rosidl_runtime_py")

COMPOSITION_STUB = '''"""launch_ros imports this for composable (C++) nodes, which no test uses."""


class LoadNode:
    class Request: ...
    class Response: ...
'''

TF_CMAKE = """cmake_minimum_required(VERSION 3.22)
project(tf2_msgs C CXX)
find_package(ament_cmake REQUIRED)
find_package(geometry_msgs REQUIRED)
find_package(rosidl_default_generators REQUIRED)
rosidl_generate_interfaces(tf2_msgs msg/TFMessage.msg DEPENDENCIES geometry_msgs)
ament_package()
"""
TF_PACKAGE = """<package format="3">
  <name>tf2_msgs</name><version>0.0.0</version><description>TFMessage alone, for tests</description>
  <maintainer email="spirula_ros@example.com">spirula_ros</maintainer><license>Apache-2.0</license>
  <buildtool_depend>ament_cmake</buildtool_depend><buildtool_depend>rosidl_default_generators</buildtool_depend>
  <depend>geometry_msgs</depend><member_of_group>rosidl_interface_packages</member_of_group>
  <export><build_type>ament_cmake</build_type></export>
</package>
"""


def unpack_launch(work: Path) -> None:
    subprocess.check_call([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--python-version", "3.12",
                           "--platform", "manylinux_2_35_x86_64", "-d", work, WHEEL])
    python = TEST_ROS / "python"
    with zipfile.ZipFile(next(work.glob("*.whl"))) as wheel:
        for name in wheel.namelist():
            inner = name.removeprefix(FOLDER)
            if inner != name and inner.split("/")[0].split("-")[0] in PACKAGES and not name.endswith("/"):
                (python / inner).parent.mkdir(parents=True, exist_ok=True)
                (python / inner).write_bytes(wheel.read(name))
    for command, module in {"ros2": "ros2cli.cli", "launch_test": "launch_testing.launch_test"}.items():
        script = TEST_ROS / "bin" / command
        script.parent.mkdir(exist_ok=True)
        script.write_text(f"#!{sys.executable}\nimport sys\n\nfrom {module} import main\n\nsys.exit(main())\n")
        script.chmod(0o755)
    (python / "composition_interfaces").mkdir(exist_ok=True)
    (python / "composition_interfaces" / "__init__.py").write_text("")
    (python / "composition_interfaces" / "srv.py").write_text(COMPOSITION_STUB)


def build_tf2_msgs(work: Path) -> None:
    for name, text in {"CMakeLists.txt": TF_CMAKE, "package.xml": TF_PACKAGE,
                       "msg/TFMessage.msg": "geometry_msgs/TransformStamped[] transforms\n"}.items():
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text(text)
    site = Path(sysconfig.get_path("platlib")).relative_to(sys.prefix)
    environment = {**os.environ, "AMENT_PREFIX_PATH": sys.prefix, "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}"}
    for command in (["-S", work, "-B", work / "build", f"-DCMAKE_INSTALL_PREFIX={sys.prefix}", f"-DCMAKE_PREFIX_PATH={sys.prefix}",
                     f"-DCMAKE_PROJECT_INCLUDE={CHECKOUT / 'cmake' / 'wheel_targets.cmake'}",
                     f"-DPython3_EXECUTABLE={sys.executable}", f"-DPYTHON_INSTALL_DIR={site}", "-DBUILD_TESTING=OFF"],
                    ["--build", work / "build", "--parallel"], ["--install", work / "build"]):
        subprocess.check_call(["cmake", *command], env=environment, stdout=subprocess.DEVNULL)


def install_colcon() -> None:
    venv.create(TEST_ROS / "colcon", with_pip=True, clear=True)
    subprocess.check_call([TEST_ROS / "colcon" / "bin" / "python", "-m", "pip", "install", "-q", "colcon-common-extensions==0.3.0"])


def main() -> None:
    with tempfile.TemporaryDirectory() as work:
        if not importlib.util.find_spec("launch_testing"):
            unpack_launch(Path(work))
        if not importlib.util.find_spec("tf2_msgs"):
            build_tf2_msgs(Path(work) / "tf2_msgs")
    if not shutil.which("colcon"):
        install_colcon()


if __name__ == "__main__":
    main()
