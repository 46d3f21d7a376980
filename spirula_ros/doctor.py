"""`spirula doctor`: what this machine has of what mapping needs, and a short run of the engine. One line a finding, with the remedy."""
from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Callable, Iterator, NamedTuple

from .arguments import positive

OK, WARN, FAIL = "ok", "warn", "FAIL"
NEEDED = ("numpy", "opencv-python", "PyYAML", "rosbags")
OPTIONAL = {"torch": "rasterize() with autograd, images that are on the GPU", "open3d": "meshes: pip install open3d-cpu", "pycolmap": "COLMAP models: pip install pycolmap",
            "viser": "the viewer: pip install 'spirula_ros[web]'"}
OTHER_NAMES = {"opencv-python": ("opencv-python-headless", "opencv-contrib-python"), "open3d": ("open3d-cpu",)}
MODULES = {"opencv-python": "cv2", "PyYAML": "yaml"}
LEAST_SHM_MIB, LEAST_DISK_GIB = 64, 2  # Fast DDS keeps images in shared memory; a checkpoint of 1M Gaussians takes 0.4 GiB, twice while it is written
LEAST_PSNR = 25.0                      # of the room after the shortest run, which ends at 30 dB


class Finding(NamedTuple):
    state: str   # OK | WARN | FAIL
    what: str
    text: str    # what was found, and the remedy where it is not good

    def __str__(self) -> str:
        return f"{self.state:<5} {self.what:<12} {self.text}"


def add_doctor(commands) -> None:
    p = commands.add_parser("doctor", help="what this machine has, and a short self-test of the engine",
                            description="Exit status 0: mapping works here (warnings say what will be missing); 1: it does not, and the lines with FAIL say why.")
    p.add_argument("--seconds", metavar="S", type=positive, default=10.0, help="of the self-test (default: %(default)s)")
    p.add_argument("--backend", choices=("auto", "cpu", "cuda"), default="auto", help="of the self-test (default: %(default)s)")
    p.set_defaults(run=run_doctor)


def run_doctor(args) -> int:
    failed = False
    for find in (packages, converters, engine, gpu, ros, shared_memory, disk, lambda: self_test(args.seconds, args.backend)):
        for finding in find():
            print(finding, flush=True)
            failed |= finding.state == FAIL
    return int(failed)


# ---- findings ----------------------------------------------------------------------------------------------------------

def _version(package: str) -> str:
    for name in (package, *OTHER_NAMES.get(package, ())):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return "?" if importlib.util.find_spec(MODULES.get(package, package)) else ""   # from the system, without a record of it


def packages() -> Iterator[Finding]:
    from .share import version
    there = {name: _version(name) for name in NEEDED}
    missing = [name for name, found in there.items() if not found]
    yield Finding(FAIL if missing else OK, "packages", f"{', '.join(missing)} missing: pip install {' '.join(missing)}" if missing else
                  f"spirula_ros {version()}, Python {sys.version.split()[0]}, " + ", ".join(f"{name} {found}" for name, found in there.items()))
    for name, use in OPTIONAL.items():
        yield Finding(OK, name, found) if (found := _version(name)) else Finding(WARN, name, f"not installed; for {use}")


def converters() -> Iterator[Finding]:
    """Who converts images. Either does: it is no fault to have no cv_bridge."""
    from .encodings import ENCODINGS, cv_bridge_state, in_cv_bridge
    bridge, why = cv_bridge_state()
    yield Finding(OK, "cv_bridge", f"{why}; images are converted by OpenCV, to the same pictures" if bridge is None else
                  f"converts {sum(map(in_cv_bridge, ENCODINGS))} of {len(ENCODINGS)} encodings, OpenCV the others")


def engine() -> Iterator[Finding]:
    from spirula_gpu.native import Engine, NativeError, library_path
    try:
        with Engine("cpu", max_gaussians=1):
            yield Finding(OK, "cpu engine", f"{library_path('cpu')}, {len(os.sched_getaffinity(0))} cores")
    except NativeError as error:
        yield Finding(FAIL, "cpu engine", str(error))


def gpu() -> Iterator[Finding]:
    """The CUDA library and a device; without them the CPU maps, which is slower."""
    from spirula_gpu.native import Engine, NativeError, library_path
    try:
        library_path("cuda")
    except NativeError:
        yield Finding(WARN, "gpu engine", "libspirula_cuda.so was not built, the CPU is used: build on a machine with nvcc and a GPU, or with SPIRULA_CUDA=ON")
        return
    try:
        with Engine("cuda", max_gaussians=1) as there:
            memory = there.vram()
            free = memory.device_total - memory.device_used
            yield Finding(OK if free > 1 << 30 else WARN, "gpu engine", f"{memory.device_total / 2**30:.1f} GiB, {free / 2**30:.1f} GiB free"
                          + ("" if free > 1 << 30 else ": end what else runs there, or set engine.vram_budget_mb and engine.precision compact"))
    except NativeError as error:
        yield Finding(WARN, "gpu engine", f"{error}; the CPU is used")


def ros() -> Iterator[Finding]:
    """rclpy, our messages, and the profile without which Fast DDS loses images."""
    from .dds import VARIABLES
    if not importlib.util.find_spec("rclpy"):
        yield Finding(WARN, "ros", "no rclpy: `spirula replay` works, the node does not; source a ROS 2 installation (source /opt/ros/<distro>/setup.bash)")
        return
    yield Finding(OK, "ros", f"ROS_DISTRO {os.environ.get('ROS_DISTRO', '(not set)')}, ROS_DOMAIN_ID {os.environ.get('ROS_DOMAIN_ID', '0')}, "
                  f"RMW {os.environ.get('RMW_IMPLEMENTATION', '(default)')}")
    try:
        from spirula_ros.msg import MapStatus  # noqa: F401
        yield Finding(OK, "messages", "spirula_ros/msg is built")
    except Exception as error:  # a library of it that does not load raises what it likes
        yield Finding(FAIL, "messages", f"spirula_ros/msg does not import ({error}): build the package with rosidl there (colcon build, or pip install . after sourcing ROS)")
    chosen = next((os.environ[name] for name in VARIABLES if os.environ.get(name)), "")
    if chosen and not Path(chosen).is_file():
        yield Finding(FAIL, "dds profile", f"{chosen} does not exist: unset the variable, or name the file that `ros2 pkg prefix --share spirula_ros` has in config/")
    else:
        yield Finding(OK, "dds profile", chosen or "none set; our launch files set theirs, set the same for your camera driver (README)")


def shared_memory() -> Iterator[Finding]:
    try:
        free = shutil.disk_usage("/dev/shm").free >> 20
    except OSError:
        return  # not Linux: DDS has other ways there
    yield Finding(OK if free >= LEAST_SHM_MIB else WARN, "/dev/shm", f"{free} MiB free" + ("" if free >= LEAST_SHM_MIB else
                  f" < {LEAST_SHM_MIB} MiB: images between processes will be lost; in a container start it with --shm-size 512m or --ipc host"))


def disk() -> Iterator[Finding]:
    here = Path.cwd()
    try:
        with tempfile.TemporaryFile(dir=here):
            free = shutil.disk_usage(here).free / 2**30
            yield Finding(OK if free >= LEAST_DISK_GIB else WARN, "disk", f"{here}: {free:.1f} GiB free" + ("" if free >= LEAST_DISK_GIB else
                          f" < {LEAST_DISK_GIB} GiB: maps and checkpoints may not fit; choose another --out and checkpoint.path"))
    except OSError as error:
        yield Finding(WARN, "disk", f"{here} cannot be written ({error.strerror}): results need --out, and checkpoint.path, elsewhere")


# ---- the engine at work ----------------------------------------------------------------------------------------------------

def self_test(seconds: float, backend: str) -> Iterator[Finding]:
    """Maps the synthetic room for so long, as a node would, and measures a view that it was not shown."""
    from spirula_gpu.native import NativeError
    try:
        yield _mapped(seconds, backend)
    except NativeError as error:
        yield Finding(FAIL, "self-test", str(error))


def _mapped(seconds: float, backend: str, clock: Callable[[], float] = time.monotonic) -> Finding:
    from spirula_gpu import Config, Frame, Mapper
    from spirula_gpu.config import replaced
    from .room import Room
    from .synthetic import render, room_camera, trajectory
    room, camera, begin = Room(), room_camera(80, 60), clock()
    mapper = Mapper(replaced(Config(), {"engine.backend": backend}))
    try:
        for i, T in enumerate(trajectory(90)[:13]):  # a seventh of the way
            seen = render(room, camera, T, 1)
            mapper.ledger.arrived()
            mapper.submit(Frame((i + 1) * 10**8, camera, T, seen.rgb, seen.depth_m, held_out=i == 6))
            mapper.run_due()
        trained = clock()
        mapper.train(seconds=max(seconds - (trained - begin), 0.1))
        status, psnr = mapper.status(), mapper.evaluate()[0].psnr
        good = psnr >= LEAST_PSNR
        return Finding(OK if good else FAIL, "self-test", f"{mapper.backend}: a room at 80x60, {status.steps} steps in {clock() - begin:.1f} s, {status.gaussians:,} Gaussians, {psnr:.1f} dB of a view that "
                       f"it was not shown, {mapper.vram().total / 2**20:.0f} MiB" + ("" if good else f"; below {LEAST_PSNR:g} dB: please report this with the lines above"))
    finally:
        mapper.close()
