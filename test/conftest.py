"""Every test sees the INSTALLED packages (built messages, native library, launch files), also in subprocesses."""
import filecmp
import functools
import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parent.parent
TEST_ROS = Path(sys.prefix) / "test_ros"  # made by tools/test_ros.py where no ROS installation provides launch

# `python -m pytest` puts the working directory on sys.path, where the checkout's packages would hide the installed ones.
sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != CHECKOUT]
# Read when OpenMP loads, which torch does before the engine in some tests: threads that wait must not take the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("AMENT_PREFIX_PATH", sys.prefix)  # what `source setup.bash` does on a ROS installation


def missing(remedy: str) -> None:
    """Skips; fails where everything has to be there (SPIRULA_REQUIRE_LAUNCH=1, which `make test` sets)."""
    if os.environ.get("SPIRULA_REQUIRE_LAUNCH") == "1":
        pytest.fail(remedy, pytrace=False)
    pytest.skip(remedy, allow_module_level=True)


def importorskip(name: str, remedy: str):
    """The module, or `missing`. pytest's own importorskip would let a broken installation pass as green."""
    try:
        return importlib.import_module(name)
    except ImportError as e:
        missing(f"{e}; {remedy}")


def installed_package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None:
        pytest.exit(f"{name} is not installed in {sys.prefix}: run `make build` (or `make develop`)", returncode=4)
    return Path(next(iter(spec.submodule_search_locations)))


def bench_modules(*names: str) -> list:
    """Scripts of bench/, which import each other, as modules."""
    sys.path.insert(0, str(CHECKOUT / "bench"))
    try:
        return [importlib.import_module(name) for name in names]
    finally:
        sys.path.pop(0)


def stale_files(name: str) -> list[str]:
    """Python files that differ between the checkout and the installed package; after `make develop`, none."""
    installed = installed_package(name)
    return [str(file.relative_to(CHECKOUT)) for file in sorted((CHECKOUT / name).rglob("*.py"))
            if not (copy := installed / file.relative_to(CHECKOUT / name)).is_file() or not filecmp.cmp(file, copy, shallow=False)]


def pytest_sessionstart(session):
    if any(file.is_symlink() for file in installed_package("spirula_ros").glob("*.py")):
        subprocess.run([sys.executable, CHECKOUT / "tools" / "develop.py"], check=True)  # links to new files
    stale = stale_files("spirula_gpu") + stale_files("spirula_ros")
    if stale:
        pytest.exit(f"the installed packages are older than the checkout ({', '.join(stale[:5])}): "
                    "run `make build` (or `make develop`)", returncode=4)


def pytest_report_header(config):
    return f"testing {installed_package('spirula_gpu')} and {installed_package('spirula_ros')}"


@pytest.fixture(autouse=True)
def away_from_the_checkout(tmp_path, monkeypatch):
    """Tests and the processes that they start run in an empty folder: nothing is imported from or left in the checkout."""
    monkeypatch.chdir(tmp_path)


@functools.cache
def cuda_missing() -> str:
    """Why the CUDA backend cannot be tested here; empty: it can."""
    from spirula_gpu import native
    try:
        native.Engine("cuda", max_gaussians=1).close()
    except native.NativeError as error:
        return str(error)
    return ""


def skip_without_cuda(module: bool = False) -> None:
    """Skips the test, or the module, where there is no GPU; with SPIRULA_REQUIRE_CUDA=1 it runs, and fails."""
    if cuda_missing() and os.environ.get("SPIRULA_REQUIRE_CUDA") != "1":
        pytest.skip(f"the CUDA backend is not tested: {cuda_missing()}", allow_module_level=module)


BACKENDS = ["cpu"] if cuda_missing() else ["cpu", "cuda"]  # test_parity.py skips visibly, or fails, where CUDA is missing


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch) -> str:
    """The backend of abi.Context."""
    import abi
    monkeypatch.setattr(abi, "BACKEND", request.param)
    return request.param


@pytest.fixture(scope="session")
def launch_env() -> dict[str, str]:
    """Environment for processes that use launch, launch_ros, launch_testing or the `ros2` command.
    Skips where neither a ROS installation nor `make test` provides them; fails instead with SPIRULA_REQUIRE_LAUNCH=1."""
    environment = dict(os.environ)
    if importlib.util.find_spec("launch_testing"):
        return environment
    if not (TEST_ROS / "python" / "launch_testing").is_dir():
        missing("launch_testing is not there: run `make test`, which fetches it, or source a ROS installation")
    environment["PYTHONPATH"] = os.pathsep.join([str(TEST_ROS / "python"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment["PATH"] = os.pathsep.join([str(TEST_ROS / "bin"), str(Path(sys.prefix) / "bin"), os.environ["PATH"]])
    return environment


@pytest.fixture(scope="session")
def ros_domain() -> int:
    """A ROS domain of this test run's own (pytest-xdist workers included), so that it hears no other ROS processes."""
    return 1 + os.getpid() % 100


@pytest.fixture(scope="module")
def ros(ros_domain) -> int:
    """rclpy in a domain of this test run's own, for the tests of a module; the domain."""
    import rclpy
    rclpy.init(domain_id=ros_domain)
    yield ros_domain
    rclpy.try_shutdown()
