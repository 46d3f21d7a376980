"""`spirula doctor`: what it finds here, and what it says of machines that lack something."""
import os
from collections import namedtuple

import numpy as np
import pytest

from spirula_gpu.native import NativeError
from spirula_ros import cli, doctor
from spirula_ros.doctor import FAIL, OK, WARN


def by_name(findings):
    return {f.what: f for f in findings}


def test_this_machine_maps(capsys):
    assert cli.main(["doctor", "--seconds", "1", "--backend", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.split()[0] in (OK, WARN) for line in lines)
    last = lines[-1]
    assert last.startswith("ok    self-test    cpu: a room at 80x60") and float(last.split(" dB")[0].split()[-1]) > doctor.LEAST_PSNR


def test_a_missing_package_fails_and_a_missing_optional_one_warns(monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda name: "" if name in ("rosbags", "viser") else "1.0")
    found = by_name(doctor.packages())
    assert found["packages"].state == FAIL and "pip install rosbags" in found["packages"].text
    assert found["viser"].state == WARN and "spirula_ros[web]" in found["viser"].text and found["torch"].state == OK


def test_who_converts_images_is_said(monkeypatch):
    monkeypatch.setattr("spirula_ros.encodings.cv_bridge_state", lambda: (None, "does not work here: compiled for numpy 1"))
    found = by_name(doctor.converters())["cv_bridge"]
    assert found.state == OK and "compiled for numpy 1; images are converted by OpenCV" in found.text
    monkeypatch.setattr("spirula_ros.encodings.cv_bridge_state", lambda: (object(), ""))
    monkeypatch.setattr("spirula_ros.encodings.in_cv_bridge", lambda name: name == "bgr8")
    assert "converts 1 of " in by_name(doctor.converters())["cv_bridge"].text


def test_a_library_that_does_not_load_fails_and_a_gpu_that_does_not_warns(monkeypatch):
    def broken(*_, **__):
        raise NativeError("device", "the driver is older than the library")
    monkeypatch.setattr("spirula_gpu.native.Engine", broken)
    monkeypatch.setattr("spirula_gpu.native.library_path", lambda backend: f"libspirula_{backend}.so")
    assert [f.state for f in doctor.engine()] == [FAIL] and "driver is older" in next(doctor.engine()).text
    assert [f.state for f in doctor.gpu()] == [WARN] and "the CPU is used" in next(doctor.gpu()).text
    monkeypatch.setattr("spirula_gpu.native.library_path", broken)
    assert "was not built" in next(doctor.gpu()).text


def test_a_profile_that_is_not_there_fails(monkeypatch):
    pytest.importorskip("rclpy")
    monkeypatch.setenv("FASTDDS_DEFAULT_PROFILES_FILE", "/nowhere/fastdds.xml")
    assert by_name(doctor.ros())["dds profile"].state == FAIL


def test_without_ros_the_node_is_missed(monkeypatch):
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    found = list(doctor.ros())
    assert [f.state for f in found] == [WARN] and "source" in found[0].text


@pytest.mark.parametrize("find, what, free, state", [(doctor.shared_memory, "/dev/shm", 10 << 20, WARN), (doctor.shared_memory, "/dev/shm", 1 << 30, OK),
                                                     (doctor.disk, "disk", 1 << 30, WARN), (doctor.disk, "disk", 9 << 30, OK)])
def test_too_little_room_warns_with_the_number(find, what, free, state, monkeypatch):
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: namedtuple("usage", "free")(free))
    found = next(find())
    assert (found.state, found.what) == (state, what) and ("<" in found.text) == (state == WARN)


def test_a_folder_that_cannot_be_written_warns(monkeypatch):
    def refused(**_):
        raise PermissionError(13, os.strerror(13))
    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", refused)
    assert next(doctor.disk()).state == WARN and "Permission denied" in next(doctor.disk()).text


def test_an_engine_that_draws_nonsense_fails(monkeypatch):
    monkeypatch.setattr("spirula_gpu.Mapper.evaluate", lambda self: [namedtuple("held_out", "psnr")(np.float64(7.5))])
    found = next(doctor.self_test(0.1, "cpu"))
    assert found.state == FAIL and "7.5 dB" in found.text
