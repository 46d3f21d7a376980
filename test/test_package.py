"""package.xml, setup.py and requirements-dev.txt say what the code really uses; the messages work."""
import ast
import importlib
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from importlib import metadata
from pathlib import Path

import pytest

from spirula_ros.share import version

CHECKOUT = Path(__file__).resolve().parent.parent
PACKAGE = ElementTree.parse(CHECKOUT / "package.xml").getroot()
OURS = {"spirula_ros", "spirula_gpu"}
ROSDEP = {  # import name -> rosdep key
    "numpy": "python3-numpy", "cv2": "python3-opencv", "open3d": "python3-open3d-pip", "rosbags": "python3-rosbags-pip",
    "pycolmap": "python3-pycolmap-pip", "scipy": "python3-scipy", "torch": "python3-torch", "tqdm": "python3-tqdm",
    "yaml": "python3-yaml", "hypothesis": "python3-hypothesis", "plyfile": "python3-plyfile-pip", "pytest": "python3-pytest",
    "lz4": "python3-rosbags-pip", "backports": "python3-rosbags-pip", "compression": "python3-rosbags-pip",
}
PIP = {"cv2": "opencv-python", "open3d": "open3d-cpu", "yaml": "pyyaml",  # where it differs from the import name
       "lz4": "rosbags", "backports": "rosbags", "compression": "rosbags"}  # what rosbags itself requires
WITHOUT_WHEEL = {"cv_bridge", "tf2_msgs", "tf2_ros", "launch", "launch_ros"}  # no pip requirement can name them
WEB = {"viser", "rich", "trimesh", "websockets", "msgspec"}  # the extra `web`, optional and without a rosdep key: viser and what it requires
NOT_IMPORTED = {"rosidl_default_runtime", "action_msgs", "libgomp1"}  # needed at run time by the messages and the native library


def imported(*folders: str) -> set[str]:
    """Top-level modules that the Python files import, the standard library's and our own left out."""
    names = set()
    for folder in folders:
        for file in (CHECKOUT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Import):
                    names |= {alias.name.split(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.level == 0:
                    names.add(node.module.split(".")[0])
                elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "importorskip" and isinstance(node.args[0], ast.Constant):
                    names.add(node.args[0].value.split(".")[0])
    return names - set(sys.stdlib_module_names) - OURS


def declared(*tags: str) -> set[str]:
    return {e.text for tag in tags for e in PACKAGE.findall(tag)}


def test_package_xml_declares_exactly_what_is_imported():
    used = {ROSDEP.get(name, name) for name in imported("spirula_gpu", "spirula_ros", "launch") - WEB}
    run_time = declared("depend", "exec_depend") - NOT_IMPORTED
    assert used - run_time == set(), "imported, not in package.xml"
    assert run_time - used == set(), "in package.xml, not imported"


def test_package_xml_declares_what_tests_import():
    ours = {file.stem for folder in ("test", "bench") for file in (CHECKOUT / folder).glob("*.py")}
    used = {ROSDEP.get(name, name) for name in imported("test") - ours - WEB}
    everything = declared("depend", "exec_depend", "test_depend")
    assert used - everything == set()
    assert declared("test_depend") - {"ament_cmake_pytest"} - used == set(), "in package.xml, no test imports it"


def test_engine_needs_no_ros():
    assert imported("spirula_gpu") <= set(ROSDEP), "spirula_gpu imports something of ROS"


def test_pip_requirements_are_exactly_what_is_imported():
    needs = [r for r in metadata.requires("spirula_ros")]
    names = {re.match(r"[A-Za-z0-9_.-]+", r)[0] for r in needs if "extra ==" not in r} - {"open3d"}
    ros = {re.match(r"[A-Za-z0-9_.-]+", r)[0] for r in needs if 'extra == "ros"' in r}
    used = imported("spirula_gpu", "spirula_ros", "launch") - WITHOUT_WHEEL - WEB
    from_wheels = {name for name in used if name not in ROSDEP}
    assert names == {PIP.get(name, name) for name in used - from_wheels}
    provided = {name.removeprefix("ros-").removeprefix("kilted-").replace("-", "_") for name in ros}
    indirect = {"ament_index_python", "builtin_interfaces", "rcl_interfaces", "lifecycle_msgs", "rosgraph_msgs"}  # rclpy requires these
    assert from_wheels - indirect <= provided


def test_the_viewer_is_optional_and_viser_brings_what_it_uses():
    web = {re.match(r"[A-Za-z0-9_.-]+", r)[0] for r in metadata.requires("spirula_ros") if 'extra == "web"' in r}
    viser = {re.match(r"[A-Za-z0-9_.-]+", r)[0] for r in metadata.requires("viser") if "extra ==" not in r}
    assert web == {"viser"} and imported("spirula_ros", "test") & WEB <= web | viser
    everywhere = [node for file in [*(CHECKOUT / "spirula_gpu").rglob("*.py"), *(CHECKOUT / "spirula_ros").rglob("*.py")] for node in ast.parse(file.read_text()).body]
    named = {alias.name.split(".")[0] for node in everywhere if isinstance(node, ast.Import) for alias in node.names} | {
        node.module.split(".")[0] for node in everywhere if isinstance(node, ast.ImportFrom) and node.level == 0}
    assert not named & WEB, "imported where a module loads: it would not load without viser"


def test_pinned_requirements_cover_setup_py():
    def names(lines):
        return {re.match(r"[A-Za-z0-9_.-]+", line)[0].lower() for line in lines if re.match(r"[A-Za-z]", line)}
    pinned = names((CHECKOUT / "requirements-dev.txt").read_text().splitlines())
    assert names(metadata.requires("spirula_ros")) <= pinned


def test_version_is_the_same_everywhere():
    assert version() == metadata.version("spirula_ros") == PACKAGE.findtext("version")


def test_schema_order_and_licence():
    tags = [e.tag for e in PACKAGE]
    assert tags[:5] == ["name", "version", "description", "maintainer", "license"] and PACKAGE.get("format") == "3"
    assert "Apache License" in (CHECKOUT / PACKAGE.find("license").get("file")).read_text()[:200]


# ---- messages ----

def every_message():
    from spirula_ros import action, msg, srv
    each = lambda package, parts: [getattr(kind, part) for file in sorted((CHECKOUT / package.__name__.split(".")[1]).iterdir()) for kind in [getattr(package, file.stem)] for part in parts]
    return [getattr(msg, file.stem) for file in sorted((CHECKOUT / "msg").glob("*.msg"))] + each(srv, ("Request", "Response")) + each(action, ("Goal", "Result", "Feedback"))


@pytest.mark.parametrize("kind", every_message(), ids=lambda kind: kind.__name__)
def test_message_survives_serialisation(kind):
    """Every field set to something other than its default comes back."""
    from rclpy.serialization import deserialize_message, serialize_message
    message = filled(kind)
    assert message != kind()
    assert deserialize_message(serialize_message(message), kind) == message


def filled(kind):
    from std_msgs.msg import Header
    from spirula_ros import msg
    message = kind()
    for name, text in kind.get_fields_and_field_types().items():
        if text == "std_msgs/Header":
            value = Header(frame_id="map")
            value.stamp.sec = 7
        elif text.startswith(("geometry_msgs/", "sensor_msgs/")):   # all that we use have a header
            package, kind_name = text.split("/")
            value = getattr(importlib.import_module(f"{package}.msg"), kind_name)(header=Header(frame_id="map"))
        elif text.startswith("sequence<spirula_ros/"):
            value = [filled(getattr(msg, text[len("sequence<spirula_ros/"):-1]))] * 3
        else:
            value = {"string": "tëxt", "boolean": True, "float": 0.5, "double": 0.25}.get(text, 2**40 if "64" in text else 100)
        setattr(message, name, value)
    return message


def test_status_states_are_those_of_the_mapper():
    from spirula_ros.msg import MapStatus
    report = (CHECKOUT / "spirula_gpu" / "report.py").read_text()
    listed = re.search(r'state: str = "waiting" +# (.*)', report)[1].split(" | ")
    assert listed == [MapStatus.WAITING, MapStatus.RUNNING, MapStatus.PAUSED, MapStatus.ERROR, MapStatus.STOPPED]


def test_status_carries_every_field_of_the_mapper():
    import dataclasses
    from spirula_gpu.report import Status
    from spirula_ros.msg import MapStatus
    fields = {f.name for f in dataclasses.fields(Status)} - {"frames"}  # frames: as frames_in, frames_used, frames_pending, dropped
    assert fields <= set(MapStatus.get_fields_and_field_types())


def test_native_library_exports_the_abi_alone(tmp_path):
    """Nothing but spl_* may be visible: the library shares a process with torch and OpenMP."""
    from spirula_gpu import native
    library = Path(native.__file__).parent / "lib" / "libspirula_cpu.so"
    symbols = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True).stdout
    names = {line.split()[-1] for line in symbols.splitlines()}
    assert {name for name in names if not name.startswith("spl_")} == set()
    declared_in_header = set(re.findall(r"^SPL_API [\w* ]+?\*?(spl_\w+)\(", (CHECKOUT / "spirula_gpu/csrc/spirula.h").read_text(), re.M))
    assert names == declared_in_header
