"""`bag from-colmap`: every camera model against pycolmap's own projection, per-image cameras through a replay, refusals in one line."""
import json
import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest

from conftest import importorskip
from shared_data import ROBUSTNESS, needs_robustness
from spirula_ros import cli, colmap
from spirula_ros.convert import stamp_ns
from spirula_ros.errors import InputError
from test_rgbd import contents, quiet

pycolmap = importorskip("pycolmap", "pip install -r requirements-dev.txt")
PARAMETERS = {"SIMPLE_PINHOLE": "50 32 24", "PINHOLE": "50 51 31 25", "SIMPLE_RADIAL": "50 32 24 -0.1", "RADIAL": "50 32 24 -0.1 0.02",
              "OPENCV": "50 51 31 25 -0.1 0.02 0.003 -0.002", "FULL_OPENCV": "50 51 31 25 -0.1 0.02 0.003 -0.002 0.01 0.02 -0.01 0.005",
              "OPENCV_FISHEYE": "50 51 31 25 -0.1 0.02 0.003 -0.002", "FOV": "50 51 31 25 0.9"}


def project(folder: Path, cameras: list[tuple[str, int, int, str]], form: str = ".png") -> Path:
    """A COLMAP project with one image for each (model, width, height, parameters), along x, written as text."""
    (folder / "sparse" / "0").mkdir(parents=True)
    (folder / "images").mkdir()
    lines, rng = [], np.random.default_rng(0)
    for i, (_, width, height, _) in enumerate(cameras, 1):
        name = f"image{len(cameras) - i:02d}{form}"  # ids run against the names
        cv2.imwrite(str(folder / "images" / name), cv2.resize(rng.integers(0, 256, (9, 12, 3)).astype(np.uint8), (width, height)))
        lines += [f"{i} 0.8 0 0.6 0 {-0.1 * i} 0 0 {i} {name}", ""]
    (folder / "sparse/0/images.txt").write_text("\n".join(lines) + "\n")
    (folder / "sparse/0/cameras.txt").write_text("".join(f"{i} {model} {w} {h} {p}\n" for i, (model, w, h, p) in enumerate(cameras, 1)))
    (folder / "sparse/0/points3D.txt").write_text("")
    return folder


@pytest.mark.parametrize("model", [m for m in PARAMETERS if m != "FOV"])
def test_a_camera_info_projects_as_colmap_does(model, tmp_path):
    project(tmp_path / "p", [(model, 64, 48, PARAMETERS[model])])
    assert colmap.make_bag(tmp_path / "p", tmp_path / "bag", say=quiet) == 1
    info, = contents(tmp_path / "bag")["info"]
    camera = pycolmap.Reconstruction(tmp_path / "p/sparse/0").cameras[1]
    points = np.random.default_rng(1).uniform([-0.5, -0.4, 1], [0.5, 0.4, 1.5], (40, 3))
    K, D = np.array(info.k).reshape(3, 3), np.array(info.d)
    cast = cv2.fisheye.projectPoints if info.distortion_model == "equidistant" else cv2.projectPoints
    ours = cast(points[:, None], np.zeros(3), np.zeros(3), K, D)[0][:, 0] + 0.5  # ROS has the first pixel's centre at 0
    assert ours == pytest.approx(camera.img_from_cam(points), abs=1e-6)
    assert (info.width, info.height, len(D)) == (64, 48, {"equidistant": 4, "plumb_bob": 5, "rational_polynomial": 8}[info.distortion_model])


def test_every_model_has_a_test():
    assert set(colmap.MODELS) == set(PARAMETERS) - {"FOV"}


def test_images_go_in_as_they_are_by_name_with_their_poses(tmp_path):
    folder = project(tmp_path / "p", [("PINHOLE", 64, 48, "50 51 31 25")] * 5, ".jpg")
    assert colmap.make_bag(folder, tmp_path / "bag", fps=4, max_frames=4, say=quiet) == 4
    got = contents(tmp_path / "bag")
    images = pycolmap.Reconstruction(folder / "sparse/0").images.values()
    for n, (image, pose, truth) in enumerate(zip(got["compressed"], got["pose"], sorted(images, key=lambda i: i.name))):
        assert (image.format, bytes(image.data)) == ("jpeg", (folder / "images" / truth.name).read_bytes())
        assert stamp_ns(image.header) == stamp_ns(pose.header) == stamp_ns(got["info"][n].header) == 10**9 + n * 250_000_000
        T = truth.cam_from_world().inverse()
        p, q = pose.pose.position, pose.pose.orientation
        assert [p.x, p.y, p.z] == pytest.approx(T.translation) and abs(np.dot([q.x, q.y, q.z, q.w], T.rotation.quat)) == pytest.approx(1)


def test_differing_cameras_are_replayed_each_with_its_own(tmp_path, capsys):
    """Sizes and lenses change from image to image; a frame that got another's CameraInfo would be dropped."""
    bent = ("OPENCV", 80, 60, "60 60 40 30 -0.1 0.02 0.003 -0.002")
    cameras = [("PINHOLE", 64 + 8 * (i % 3), 48 + 4 * (i % 2), "50 51 31 25") if i % 4 else bent for i in range(8)]
    project(tmp_path / "p", cameras)
    assert cli.main(["bag", "from-colmap", str(tmp_path / "p"), str(tmp_path / "bag"), "--fps", "5", "--storage", "sqlite3"]) == 0
    options = ["--lossless", "--no-mesh", "--backend", "cpu", "--threads", "1", "--holdout", "0", "--out", str(tmp_path / "out")]
    assert cli.main(["replay", str(tmp_path / "bag"), *options]) == 0
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert report["frames"] == {"in": 8, "used": 8, "dropped": {}}


def test_fisheye_lenses_are_recorded_with_a_word_of_warning(tmp_path):
    said = []
    colmap.make_bag(project(tmp_path / "p", [("OPENCV_FISHEYE", 64, 48, PARAMETERS["OPENCV_FISHEYE"])]), tmp_path / "bag", say=said.append)
    assert len(said) == 2 and "undistort the images first" in said[0]


# ---- refusals --------------------------------------------------------------------------------------------------------
def refused(capsys, *words) -> str:
    assert cli.main(["bag", "from-colmap", *map(str, words)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("spirula: ") and err.count("\n") == 1
    return err


def test_what_no_camera_info_describes_is_refused(tmp_path, capsys):
    err = refused(capsys, project(tmp_path / "p", [("FOV", 64, 48, PARAMETERS["FOV"])]), tmp_path / "bag")
    assert "camera 1 is FOV" in err and "colmap image_undistorter" in err and not (tmp_path / "bag").exists()


@pytest.mark.parametrize("spoil, text", [
    (lambda p: (p / "images/image00.png").unlink(), "1 of the model's 2 images are not there, e.g. image00.png"),
    (lambda p: (p / "images/image00.png").write_bytes(b"GIF89a"), "image00.png: not a JPEG or PNG"),
    (lambda p: cv2.imwrite(str(p / "images/image00.png"), np.zeros((24, 32, 3), np.uint8)), "image00.png: 32x24, its camera says 64x48"),
    (lambda p: shutil.rmtree(p / "sparse"), "neither sparse/0 nor sparse holds a COLMAP model"),
    (lambda p: (p / "sparse/0/images.txt").write_text(""), "no image has a pose")])
def test_bad_projects(tmp_path, capsys, spoil, text):
    folder = project(tmp_path / "p", [("PINHOLE", 64, 48, "50 51 31 25")] * 2)
    spoil(folder)
    assert text in refused(capsys, folder, tmp_path / "bag")
    assert not (tmp_path / "bag").exists()


@needs_robustness
@pytest.mark.parametrize("name", ["colmap_mismatch", "colmap_truncated"])
def test_broken_models_of_others(tmp_path, capsys, name):
    """Cut files, and files of two models: as a project's sparse/0, and given themselves."""
    shutil.copytree(ROBUSTNESS / name, tmp_path / "p" / "sparse" / "0")
    text = {"colmap_mismatch": "are its files of one model? It says: ", "colmap_truncated": "images.bin was cut off at 2,359,296 bytes, after "}[name]
    assert text in refused(capsys, tmp_path / "p", tmp_path / "bag")
    assert "neither sparse/0 nor sparse" in refused(capsys, ROBUSTNESS / name, tmp_path / "bag")


def test_a_project_without_pycolmap(tmp_path, capsys, monkeypatch):
    (tmp_path / "sparse").mkdir()
    (tmp_path / "sparse" / "cameras.txt").touch()
    monkeypatch.setitem(__import__("sys").modules, "pycolmap", None)
    assert "pip install pycolmap" in refused(capsys, tmp_path, tmp_path / "bag")


def test_no_bag_is_written_over(tmp_path):
    project(tmp_path / "p", [("PINHOLE", 64, 48, "50 51 31 25")])
    (tmp_path / "bag").mkdir()
    with pytest.raises(InputError, match="exists already"):
        colmap.make_bag(tmp_path / "p", tmp_path / "bag", say=quiet)
