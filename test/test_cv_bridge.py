"""cv_bridge and our own conversion give the same pictures. It is asked in a process of its own: Debian's is compiled for the numpy of /usr/bin/python3."""
import subprocess
import sys
from pathlib import Path

import encoders
import messages as m
import numpy as np
import pytest

from spirula_ros import encodings

CHECKOUT = Path(__file__).resolve().parent.parent
W, H = 62, 46
REMEDY = "apt-get install python3-cv-bridge python3-opencv python3-sensor-msgs, or source a ROS 2 that has cv_bridge"
rng = np.random.default_rng(3)


def python_with_cv_bridge() -> str:
    for python in (sys.executable, "/usr/bin/python3"):
        code = "import cv_bridge; cv_bridge.CvBridge().encoding_to_cvtype2('bgr8')"
        if Path(python).exists() and subprocess.run([python, "-c", code], capture_output=True).returncode == 0:
            return python
    pytest.skip(f"cv_bridge is not importable: {REMEDY}")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """{(who converted there, encoding, step, byte order): (message, picture that the Python with cv_bridge made of it)}."""
    python, folder = python_with_cv_bridge(), tmp_path_factory.mktemp("cv_bridge")
    messages = {}
    for name in encoders.EVERY:
        rows = encoders.rows_of(encoders.picture(H, W), name)
        rows = rng.integers(0, np.iinfo(rows.dtype).max, rows.shape, rows.dtype, endpoint=True)  # every value that bytes can have
        for extra, big in ((0, False), (5, False), (0, True), (3, True)):
            data, step = encoders.padded(rows, extra, big)
            messages[f"{name}|{W}|{H}|{step}|{int(big)}"] = np.frombuffer(data, np.uint8)
    np.savez(folder / "messages.npz", **messages)
    subprocess.run([python, CHECKOUT / "test" / "cv_bridge_pictures.py", folder / "messages.npz", folder / "out.npz"], check=True, env={"PYTHONPATH": str(CHECKOUT)})
    out = {}
    for key, rgb in np.load(folder / "out.npz").items():
        by, name, width, height, step, big = key.split("|")
        out[by, name, int(step), big == "1"] = (messages[key.partition("|")[2]], rgb)
    return out


def test_cv_bridge_converts_the_common_encodings(pictures):
    known = {name for by, name, *_ in pictures if by == "cv_bridge"}
    assert known >= {"bgr8", "rgba8", "bgra8", "mono8", "rgb16", "bgr16", "rgba16", "bgra16", "mono16", "yuv422", *encoders.BAYER}
    assert not known & {"rgb8", "nv24", "8UC3"}  # rgb8 is not copied; the others are not colours to it


@pytest.mark.parametrize("name", encoders.EVERY)
def test_both_give_the_same_picture(name, pictures, monkeypatch):
    """Exactly; where colour is interpolated or computed (Bayer, YUV) to one of 255, since two versions of OpenCV are at work (4.6 and 5.0 agree exactly)."""
    monkeypatch.setattr(encodings, "in_cv_bridge", lambda name: False)
    there = {key: value for key, value in pictures.items() if key[1] == name}
    assert len(there) == 4
    for (_, _, step, big), (data, theirs) in there.items():
        ours = encodings.image_to_rgb(m.image(1, W, H, name, data.tobytes(), step, big))
        off = np.abs(ours.astype(int) - theirs)
        assert off.max() <= (0 if name in encoders.ORDERS else 1), f"{off.max()} at {np.argwhere(off == off.max())[0]}"
