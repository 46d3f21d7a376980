"""A test that cannot run is skipped for a user who has no ROS, and an error in `make test`."""
import os
import subprocess
import sys
from pathlib import Path

import pytest

NEED_ROS = ["test_dds.py", "test_node.py", "test_player.py", "test_publish.py"]
RUN = "import sys; sys.modules['rclpy'] = sys.modules['open3d'] = None; import pytest; sys.exit(pytest.main(sys.argv[1:]))"


@pytest.mark.parametrize("required", ["", "1"])
def test_missing_parts(required):
    files = [*NEED_ROS, "test_mesh.py"]
    here = Path(__file__).parent
    done = subprocess.run([sys.executable, "-c", RUN, "-q", "-rs", "-p", "no:cacheprovider", *(here / file for file in files)],
                          env={**os.environ, "SPIRULA_REQUIRE_LAUNCH": required}, capture_output=True, text=True, timeout=120)
    if required:
        assert done.returncode == pytest.ExitCode.INTERRUPTED and f"{len(files)} errors" in done.stdout, done.stdout
        assert all(f"{file} __" in done.stdout for file in files), done.stdout
    else:
        assert f"{len(files)} skipped" in done.stdout and "passed" not in done.stdout and "spirula_ros[ros]" in done.stdout, done.stdout
