"""`pip install .`: drives CMakeLists.txt and packs what it installs, messages included where ROS is found.

ROS is looked for in the environment (AMENT_PREFIX_PATH) and in this Python's prefix (the PyPI wheels of ROS); for the
latter install the `ros` extra first and pass --no-build-isolation. On a ROS installation use colcon instead.
"""
import os
import shutil
import subprocess
import sys
import zlib
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).resolve().parent
PACKAGE = ElementTree.parse(HERE / "package.xml").getroot()

ROS = [  # ROS 2 Kilted as wheels
    "ros-kilted-rclpy", "ros-kilted-rmw-fastrtps-cpp", "ros-kilted-std-msgs", "ros-kilted-std-srvs", "ros-kilted-geometry-msgs",
    "ros-kilted-nav-msgs", "ros-kilted-sensor-msgs", "ros-kilted-visualization-msgs", "ros-kilted-diagnostic-msgs", "ros-kilted-lifecycle-msgs",
    # what these wheels need to build messages, and do not all declare
    "ros-kilted-ament-cmake", "ros-kilted-ament-cmake-python", "ros-ament-cmake-include-directories", "ros-ament-cmake-ros-core",
    "ros-ament-package", "ros-kilted-rosidl-default-generators", "ros-rosidl-core-generators", "ros-kilted-action-msgs",
    "catkin-pkg", "cmake>=3.22",
]


class CMakeBuild(build_ext):
    """Configure, build and install below build/cmake, then pack the result: Python into the wheel's root, the rest as data."""

    def run(self):
        if self.inplace or self.editable_mode:
            raise SystemExit("editable installs are not supported: `make develop` installs links into the checkout")
        work = HERE / "build" / f"cmake-{sys.implementation.cache_tag}-{zlib.crc32(sys.prefix.encode()):08x}"  # its cache points into the environment
        stage = work / "stage"
        shutil.rmtree(stage, ignore_errors=True)
        jobs = os.environ.get("SPIRULA_BUILD_JOBS", str(os.cpu_count()))
        for command in (["-S", HERE, "-B", work, *definitions(stage)], ["--build", work, "--parallel", jobs], ["--install", work]):
            subprocess.check_call(["cmake", *command], env=environment())
        for package in (stage / "python").iterdir():
            target = Path(self.build_lib) / package.name
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(package, target, ignore=shutil.ignore_patterns("__pycache__"))
        write_launchers(stage / "lib" / "spirula_ros")
        self.distribution.data_files = data_files(stage)

    def get_outputs(self):
        return []


def environment():
    """AMENT_PREFIX_PATH with this Python's prefix, and its bin folder (where pip puts cmake) on PATH."""
    prefixes = [p for p in os.environ.get("AMENT_PREFIX_PATH", "").split(os.pathsep) if p] + [sys.prefix]
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.prefix) / "bin")])
    return {**os.environ, "AMENT_PREFIX_PATH": os.pathsep.join(prefixes), "PATH": path}


def definitions(stage):
    return [
        f"-DCMAKE_INSTALL_PREFIX={stage}",
        f"-DCMAKE_PREFIX_PATH={environment()['AMENT_PREFIX_PATH'].replace(os.pathsep, ';')}",
        f"-DCMAKE_PROJECT_INCLUDE={HERE / 'cmake' / 'wheel_targets.cmake'}",
        f"-DPython3_EXECUTABLE={sys.executable}",
        "-DPYTHON_INSTALL_DIR=python",
        "-DBUILD_TESTING=OFF",
        *os.environ.get("CMAKE_ARGS", "").split(),
    ]


def write_launchers(directory):
    """lib/spirula_ros/*, where `ros2 run` and launch files look: pip's console scripts know the right Python, these do not."""
    for script in directory.iterdir():
        script.write_text(f'#!/bin/sh\nexec "$(dirname "$0")/../../bin/{script.name}" "$@"\n')


def data_files(stage):
    files = {}
    for root in ("lib", "share"):
        for path in sorted((stage / root).rglob("*")):
            if path.is_file() and path.parent.name != "parent_prefix_path":  # names this machine's prefixes
                files.setdefault(str(path.parent.relative_to(stage)), []).append(os.path.relpath(path, HERE))
    return sorted(files.items())


setup(
    name=PACKAGE.findtext("name"),
    version=PACKAGE.findtext("version"),
    description=PACKAGE.findtext("description"),
    license=PACKAGE.findtext("license"),
    python_requires=">=3.10",
    packages=[],  # CMakeLists.txt is the list of what is installed
    ext_modules=[Extension("spirula_ros", [])],
    cmdclass={"build_ext": CMakeBuild},
    entry_points={"console_scripts": ["spirula = spirula_ros.cli:main", "train_node = spirula_ros.node:main"]},
    install_requires=[
        "numpy>=1.24", "torch>=2.2", "opencv-python>=4.7", "pyyaml>=6", "rosbags>=0.10", "scipy>=1.10", "tqdm>=4.60",
        "pycolmap>=3.12; platform_machine == 'x86_64'",  # there are no wheels for ARM; only COLMAP models need it
        "open3d-cpu>=0.18; platform_machine == 'x86_64' and sys_platform == 'linux'",
        "open3d>=0.18; platform_machine != 'x86_64' or sys_platform != 'linux'",
    ],
    extras_require={"ros": ROS, "web": ["viser>=1.1,<1.2"], "test": ["pytest>=7,<8", "hypothesis>=6", "plyfile>=1"]},
    zip_safe=False,
)
