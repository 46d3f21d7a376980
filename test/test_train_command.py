"""`spirula train`: a COLMAP project, an RGB-D folder and a packed scene to a map with its report, on the real engine; interruptions and refusals."""
import json
import signal
from pathlib import Path

import cv2
import numpy as np
import pytest

from conftest import importorskip
from spirula_gpu.config import InsertConfig
from spirula_gpu.dataset import Scene
from spirula_gpu.formats import read_map
from spirula_gpu.metrics import psnr
from spirula_gpu.native import Engine, NativeError
from spirula_gpu.offline import depth_points
from spirula_ros.arguments import EXPORTS
from test_cli import spirula
from test_offline import FAST, frames, scene_of, write_colmap  # noqa: F401 (frames is a fixture)

QUICK = ["--backend", "cpu", "--threads", "1", "--max-gaussians", "500", "--steps", "60", *(f"--set={name}={value}" for name, value in {
    **FAST, "schedule.max_steps": 60, "engine.max_gaussians": 500, "init.points": 300}.items() if name not in ("engine.threads",))]


@pytest.fixture(scope="module")
def packed(frames, tmp_path_factory):
    path = tmp_path_factory.mktemp("scene") / "blobs.npz"
    scene_of(frames).save(path)
    return path


@pytest.fixture
def project(frames, tmp_path):
    """A COLMAP project with 300 points on what is seen."""
    importorskip("pycolmap", "pip install -r requirements-dev.txt")
    write_colmap(tmp_path / "project", frames, "PINHOLE 48 36 40 41 23 18.5")
    points, colors = depth_points(frames, 300, InsertConfig(), np.random.default_rng(0))
    (tmp_path / "project/sparse/0/points3D.txt").write_text("".join(
        f"{i} {p[0]} {p[1]} {p[2]} {c[0]} {c[1]} {c[2]} 0.5\n" for i, (p, c) in enumerate(zip(points, colors), 1)))
    return tmp_path / "project"


def trained(capsys, data, out, *words) -> tuple[dict, str]:
    """report.json, and what was said on stdout."""
    code, said, err = spirula(capsys, "train", data, out, *QUICK, *words)
    assert code == 0, err
    return json.loads((Path(out) / "report.json").read_text()), said


def refused(capsys, *words) -> str:
    code, out, err = spirula(capsys, "train", *words)
    assert code == 2 and out == "" and "Traceback" not in err, err
    return err


# ---- what comes out --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("every, measured", [(47, 1), (48, 0), (0, 0)])
def test_a_hold_out_beyond_the_set_says_that_nothing_is_measured(packed, capsys, every, measured):
    code, _, err = spirula(capsys, "train", packed, "out", *QUICK, "--steps", "1", "--hold-out", every)
    assert code == 0 and len(json.loads(Path("out/report.json").read_text())["heldout"]) == measured
    assert ("; --hold-out 48 holds out none of 24 images, so nothing is measured; 2 to 47 would\n" in err) == (every == 48)


def test_a_colmap_project_becomes_a_map_with_its_report(project, capsys):
    import pycolmap
    report, said = trained(capsys, project, "out", "--eval", "0,30")
    assert {p.name for p in Path("out").iterdir()} == {"map.ply", "report.json", "report.html", "compare.png", "renders", "poses.txt", "cameras"}
    assert (report["data"], report["images"], report["width"], report["steps"], report["stopped_early"]) == ("project", 21, 48, 60, "")
    assert [p["step"] for p in report["curve"]] == [0, 30, 60] and report["curve"][2]["psnr"] > report["curve"][0]["psnr"] + 2
    assert report["heldout_psnr"] == report["curve"][2]["psnr"] == pytest.approx(np.mean([h["psnr"] for h in report["heldout"]]))
    assert [(h["index"], h["name"]) for h in report["heldout"]] == [(4, "view04.png"), (12, "view12.png"), (20, "view20.png")]
    assert report["begun_with"] == 300 and report["gaussians"] == 300 + report["added"] == len(read_map("out/map.ply").means) > 300
    assert report["vram_total"] == sum(report["vram"].values()) and report["image_bytes"] == 21 * 48 * 36 * 3
    assert report["settings"]["engine.max_gaussians"] == 500 and "init.opacity" not in report["settings"] and report["config"]["init.opacity"] == 0.5
    assert f"held-out PSNR {report['heldout_psnr']:.2f} dB" in said and said.endswith("over 3 frames; out/report.json\n") and said.count("\n") == 1
    ours, theirs = pycolmap.Reconstruction("out/cameras"), pycolmap.Reconstruction(str(project / "sparse/0"))
    poses = [{i.name: i.cam_from_world().matrix() for i in model.images.values()} for model in (ours, theirs)]
    assert poses[0].keys() == poses[1].keys() and all(np.allclose(poses[0][name], poses[1][name], atol=1e-9) for name in poses[0])


def test_the_renders_are_of_the_map_that_is_written(project, capsys):
    report, _ = trained(capsys, project, "out")
    for h in report["heldout"]:
        truth, render = (cv2.imread(str(path)) for path in (project / "images" / h["name"], Path("out/renders") / f"{h['index']}.png"))
        assert psnr(render, truth) == pytest.approx(h["psnr"], abs=0.05)  # rounded
    assert cv2.imread("out/compare.png").shape == (3 * 360 + 34, 3 * 480, 3)


def test_pictures_that_only_measure_change_nothing(packed, capsys):
    """Nor do the pieces that training is done in, which depend on the time."""
    trained(capsys, packed, "a")
    trained(capsys, packed, "b", "--eval", "7,31")
    assert Path("a/map.ply").read_bytes() == Path("b/map.ply").read_bytes()


@pytest.mark.parametrize("export", EXPORTS)
def test_exports(packed, capsys, export):
    report, _ = trained(capsys, packed, "out", "--export", export, "--precision", "compact")
    assert report["map_file"] == f"map.{export}" and report["config"]["engine.precision"] == "compact"
    assert len(read_map(f"out/map.{export}").means) == report["gaussians"]


def test_a_later_run_leaves_nothing_of_an_earlier_one(packed, capsys):
    trained(capsys, packed, "out")
    Path("out/notes.txt").write_text("mine")
    report, said = trained(capsys, packed, "out", "--hold-out", "0", "--export", "spz", "--size", "24x18")
    assert {p.name for p in Path("out").iterdir()} == {"map.spz", "report.json", "report.html", "renders", "poses.txt", "cameras", "notes.txt"}
    assert not list(Path("out/renders").iterdir()) and (report["images"], report["width"], report["heldout"]) == (24, 24, [])
    assert report["heldout_psnr"] is None and "held-out PSNR n/a dB" in said


def test_a_folder_with_depth(frames, capsys):
    folder = Path("seven")
    folder.mkdir()
    (folder / "camera-intrinsics.txt").write_text("40 0 22.5\n0 40 18\n0 0 1\n")
    for f in frames[:6]:
        stem = folder / f"frame-{f.stamp_ns:06d}"
        cv2.imwrite(f"{stem}.color.png", f.rgb[..., ::-1])
        cv2.imwrite(f"{stem}.depth.png", (f.depth_m * 1000).astype(np.uint16))
        np.savetxt(f"{stem}.pose.txt", f.T_world_cam)
    Path("seven/frame-000002.pose.txt").write_text("nan " * 16)
    code, _, err = spirula(capsys, "train", folder, "out", *QUICK, "--color-f", "38")
    assert code == 0 and "skipped 1 frames: pose is not finite" in err and "4 images and 1 held out, 48x36, 0 sparse points, depth yes" in err
    assert "48 36 38 38" in Path("out/cameras/cameras.txt").read_text() and json.loads(Path("out/report.json").read_text())["begun_with"] == 300
    assert "train a map of it       spirula train" in spirula(capsys, "info", folder)[1]


def test_info_knows_what_is_trained_on(packed, capsys):
    code, told, _ = spirula(capsys, "info", packed)
    assert code == 0 and "packed scene, 24 images 48x36, 0 sparse points, depth yes" in told and f"spirula train {packed} OUT" in told
    np.savez("other.npz", x=1)
    code, _, err = spirula(capsys, "info", "other.npz")
    assert code == 2 and err.startswith("spirula: other.npz: not a packed scene: ") and err.count("\n") == 1


def test_info_knows_the_results(packed, capsys):
    _, said = trained(capsys, packed, "out")
    for path in ("out", "out/report.json"):
        _, told, _ = spirula(capsys, "info", path)
        assert "results of the training of 'blobs.npz' (cpu)" in told and said.strip() in told and "out/map.ply" in told


# ---- runs that end early ---------------------------------------------------------------------------------------------

def after(monkeypatch, steps: int, what) -> None:
    """what() instead of, or before, the step that would be the next one."""
    step, done = Engine.train_step, []

    def counted(*args, **kw):
        if len(done) == steps:
            what()
        done.append(1)
        return step(*args, **kw)
    monkeypatch.setattr(Engine, "train_step", counted)


def test_an_interrupt_finishes_with_what_is_there(packed, capsys, monkeypatch):
    after(monkeypatch, 20, lambda: signal.raise_signal(signal.SIGINT))
    report, said = trained(capsys, packed, "out", "--eval", "10")
    assert 20 < report["steps"] < 60 and report["stopped_early"] == "interrupted" and f"{report['steps']} steps of 60" in said and "; interrupted; out/" in said
    assert [p["step"] for p in report["curve"]] == [10, report["steps"]] and len(read_map("out/map.ply").means) == report["gaussians"]


def test_a_second_interrupt_gives_up(packed, capsys, monkeypatch):
    def twice():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    after(monkeypatch, 20, twice)
    assert spirula(capsys, "train", packed, "out", *QUICK)[0] == 130 and not Path("out/report.json").exists()


def refuse():
    raise NativeError("memory", "need 9 MiB, 8 MiB are free; lower engine.max_gaussians")


def test_what_was_trained_before_memory_ran_out_is_written(packed, capsys, monkeypatch):
    after(monkeypatch, 20, refuse)
    err = refused(capsys, packed, "out", *QUICK).splitlines()[-1]
    assert err.startswith("spirula: need 9 MiB, 8 MiB are free; lower engine.max_gaussians; what was there after step 20 of 60 is written: ")
    report = json.loads(Path("out/report.json").read_text())
    assert report["steps"] == 20 and report["stopped_early"].startswith("need 9 MiB") and len(read_map("out/map.ply").means) == report["gaussians"]


def test_a_first_step_that_is_refused_writes_nothing(packed, capsys, monkeypatch):
    after(monkeypatch, 0, refuse)
    assert refused(capsys, packed, "out", *QUICK).splitlines()[-1] == "spirula: need 9 MiB, 8 MiB are free; lower engine.max_gaussians"
    assert not Path("out/map.ply").exists() and not Path("out/report.json").exists()


# ---- refusals --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("words, message", [
    (["--set", "schedule.lr_finel=0.3"], "unknown parameter 'schedule.lr_finel'; did you mean 'schedule.lr_final'"),
    (["--set", "foo.bar=1"], "--set foo.bar=1: unknown parameter 'foo.bar'; `spirula train --list` lists all"),
    (["--set", "lr_final"], "--set lr_final: write group.name=value; `spirula train --list` lists the names"),
    (["--set", "init.source=guess"], "init.source = 'guess': must be points or insert"),
    (["--set", "engine.sh_degree=7"], "engine.sh_degree = 7: must lie in [0, 3]"),
    (["--max-gaussians", "400M"], "engine.max_gaussians = 400000000 Gaussians: must lie in [1, 200000000]"),
    (["--steps", "100", "--eval", "50,200"], "--eval 200 is beyond the last step: 0..100 (--steps)"),
    (["--size", "96x72"], "size 96x72 is larger than view00 (48x36); images only shrink"),
    (["--hold-out", "1"], "--hold-out 1 leaves none of 24 images to train with: give 2 or more, or 0 to hold out none"),
    (["--color-f", "500"], "--color-f is for folders of 7-Scenes and TUM"),
])
def test_options_that_do_not_fit(packed, capsys, words, message):
    err = refused(capsys, packed, "out", "--backend", "cpu", *words)
    assert message in err and err.startswith("spirula: ") and err.count("\n") == 1, err
    assert not Path("out").exists()


@pytest.mark.parametrize("words, message", [
    (["--eval", "1,x"], "'1,x': write steps as 1000,7000"), (["--eval", "-1"], "'-1': write steps"), (["--export", "obj"], "invalid choice"),
    (["--steps", "0"], "must be a whole number from 1"), (["--precision", "Compact"], "invalid choice"), (["--hold-out", "-1"], "must be 0 or more")])
def test_bad_usage(packed, capsys, words, message):
    assert message in refused(capsys, packed, "out", *words)


def test_data_that_is_none(capsys, frames):
    Path("empty").mkdir()
    Path("notes.txt").write_text("x")
    Path("broken.npz").write_text("no archive")
    scene = scene_of(frames[:3])
    Scene(scene.names, scene.cameras, np.repeat(scene.T_world_cam[:1], 3, 0), scene.images, scene.depths).save("still.npz")
    for data, message in (("nope", "nope: does not exist"), ("empty", "empty: not a COLMAP project"), ("notes.txt", "notes.txt: not a COLMAP project"),
                          ("broken.npz", "broken.npz: not a packed scene: no .npz archive, or one that was cut short; copy it again"), ("still.npz", "still.npz: 3 training frames, extent 0.0: must be positive, cameras at one place have none; give images")):
        err = refused(capsys, data, "out", "--backend", "cpu")
        assert message in err and err.startswith("spirula: ") and err.count("\n") == 1 and not Path("out").exists(), err


def test_results_do_not_mix_with_the_images(project, capsys):
    before = sorted(project.rglob("*"))
    for out in (project, project / "images", project / "sparse", project / "sparse/0"):
        assert "would mix; choose another OUT" in refused(capsys, project, out, *QUICK)
    assert sorted(project.rglob("*")) == before
    for _ in range(2):  # a folder of their own is fine, and may be written again
        trained(capsys, project, project / "out")


def test_a_folder_that_cannot_be_written(packed, capsys):
    assert "choose another folder" in refused(capsys, packed, "/proc/out", "--backend", "cpu")


def test_every_parameter_is_listed(capsys):
    code, out, _ = spirula(capsys, "train", "--list")
    assert code == 0 and {"schedule.lr_final", "grow.rate", "init.size"} <= {line.split(" = ")[0] for line in out.splitlines()}
