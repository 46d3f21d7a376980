"""`spirula convert`, `spirula info`, and what the mapper writes and begins with."""
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from spirula_gpu.config import replaced
from spirula_gpu.formats import FORMATS, FormatError, read_map, write_map
from spirula_gpu.mapper import Mapper
from spirula_gpu.metrics import psnr
from spirula_gpu.native import NativeError
from spirula_gpu.splats import opacities
from spirula_gpu.trajectory import write_poses
from spirula_ros import params
from test_cli import spirula
from test_formats import splats
from test_mapper import CAMERA, SMALL, frame, run, submit

READ = [f.suffix for f in FORMATS if f.read]


def begin(path, **changes) -> Mapper:
    return Mapper(replaced(SMALL, {"train.start_map": str(path), **{k.replace("__", "."): v for k, v in changes.items()}}))


def rendered(mapper: Mapper) -> list[np.ndarray]:
    return [mapper._output.render(CAMERA, frame(i).T_cam_world)[0] for i in range(4)]


@pytest.fixture(scope="module")
def trained() -> Mapper:
    return run(replaced(SMALL, {"engine.sh_degree": 3, "train.sh_interval_steps": 2, "train.steps_per_frame": 20}))


# ---- the mapper ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("suffix, least_db", [(".ply", np.inf), (".spz", 40), (".compressed.ply", 38), (".splat", 24)])
def test_a_map_that_comes_back_renders_as_before(trained, tmp_path, suffix, least_db):
    path = tmp_path / f"map{suffix}"
    assert trained.command("save_map", str(path)).result() == len(trained._engine)
    again = begin(path, engine__sh_degree=3)
    found = [psnr(a, b) for a, b in zip(rendered(trained), rendered(again))]
    if least_db == np.inf:
        assert all(np.array_equal(a, b) for a, b in zip(rendered(trained), rendered(again)))
    else:
        assert least_db < min(found) and max(found) < 80, found


def test_every_format_is_saved_and_another_suffix_is_refused(trained, tmp_path):
    for f in FORMATS:
        assert trained.command("save_map", str(tmp_path / f"map{f.suffix}")).result() == len(trained._engine)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(FormatError, match=r"map.obj: maps are written to files that end in \.ply"):
        trained.command("save_map", str(tmp_path / "map.obj")).result()
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_a_start_map_is_trained_on_and_checkpointed(trained, tmp_path):
    trained.command("save_map", str(tmp_path / "map.spz")).result()
    mapper = begin(tmp_path / "map.spz", engine__sh_degree=1)
    n = len(mapper._engine)
    assert n == len(trained._engine) and (mapper._engine.read("map.owner") == -1).all() and mapper.status().gaussians == n and mapper.status().state == "waiting"
    np.testing.assert_array_equal(mapper._engine.read("map.sh"), read_map(tmp_path / "map.spz").sh[:, :4])
    submit(mapper, frame(0, held_out=True))
    mapper.run_due()
    before = mapper.evaluate()[0].psnr
    assert before > 20
    for i in range(1, 6):
        submit(mapper, frame(i))
        mapper.run_due()
    assert mapper.evaluate()[0].psnr > before - 0.5
    mapper.command("save_checkpoint", str(tmp_path / "map.ckpt")).result()
    resumed = begin("gone.ply", engine__sh_degree=1, checkpoint__path=str(tmp_path / "map.ckpt"), checkpoint__resume=True)
    assert len(resumed._engine) == len(mapper._engine) and resumed._trainer.state() == mapper._trainer.state()
    mapper.command("reset").result()
    assert not len(mapper._engine)


def test_a_start_map_begins_with_its_own_sh_degree(tmp_path):
    write_map(tmp_path / "two.ply", splats(50, 2))
    mapper, seen = begin(tmp_path / "two.ply", engine__sh_degree=3, train__sh_interval_steps=2), []
    step = mapper._engine.train_step
    mapper._engine.train_step = lambda view, *args, **kw: (seen.append(view.sh_degree), step(view, *args, **kw))[1]
    submit(mapper, frame(0))
    mapper.run_due()
    assert seen == [2, 2, 3, 3]


@pytest.mark.parametrize("changes, message", [
    ({"engine.max_gaussians": 5999}, "6000 Gaussians > engine.max_gaussians 5999"), ({"engine.vram_budget_mb": 1}, r"train.start_map .*a.ply: 6000 Gaussians.*budget"),
])
def test_a_start_map_that_does_not_fit_is_refused(tmp_path, changes, message):
    write_map(tmp_path / "a.ply", splats(6000, 2))
    with pytest.raises((FormatError, NativeError), match=message):
        Mapper(replaced(SMALL, {"train.start_map": str(tmp_path / "a.ply"), **changes}))


# ---- poses ---------------------------------------------------------------------------------------------------------------

def posed(n=4):
    frames = [frame(i, camera=CAMERA if i < 3 else replace(CAMERA, fx=37.5)) for i in range(n)]
    c, s = np.cos(0.7), np.sin(0.7)
    for i, f in enumerate(frames):
        f.T_world_cam[:3, :3] = [[c, 0, s], [0, 1, 0], [-s, 0, c]]
        f.T_world_cam[:3, 3] = 0.1 * i, -2, 1 / 3
    return [(f.stamp_ns, f.camera, f.T_world_cam) for f in frames]


def test_tum(tmp_path):
    assert write_poses(tmp_path / "poses.txt", posed()) == 4
    lines = (tmp_path / "poses.txt").read_text().splitlines()
    assert lines[2].startswith("1.100000000 0.1") and len(lines) == 5
    rows = np.loadtxt(tmp_path / "poses.txt")
    np.testing.assert_allclose(rows[3], [1.3, 0.3, -2, 1 / 3, 0, np.sin(0.35), 0, np.cos(0.35)], atol=1e-15)


def test_colmap_reads_its_folder(tmp_path):
    pycolmap = pytest.importorskip("pycolmap")
    assert write_poses(f"{tmp_path}/model/", posed()) == 4
    model = pycolmap.Reconstruction(str(tmp_path / "model"))
    assert len(model.cameras) == 2 and len(model.images) == 4
    for n, (stamp_ns, camera, T) in enumerate(posed(), 1):
        image = model.images[n]
        assert image.name == f"{stamp_ns}.png" and list(model.cameras[image.camera_id].params) == [camera.fx, camera.fy, camera.cx, camera.cy]
        np.testing.assert_allclose(image.cam_from_world().inverse().matrix(), T[:3], atol=1e-12)


def test_refined_poses_are_saved_and_other_suffixes_refused(tmp_path):
    mapper = run(SMALL)
    T = mapper._keyframes.newest.frame.T_world_cam.copy()
    T[:3, 3] = 7, 8, 9
    mapper._keyframes.newest.place(T)
    assert mapper.command("save_poses", "poses.txt").result() == len(mapper._keyframes)
    np.testing.assert_allclose(np.loadtxt("poses.txt")[-1, 1:4], [7, 8, 9])
    with pytest.raises(FormatError, match="not to .csv"):
        mapper.command("save_poses", "poses.csv").result()
    with pytest.raises(FormatError, match="there are no poses"):
        write_poses("none.txt", [])
    assert not Path("none.txt").exists()


# ---- convert -------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("suffix", [f.suffix for f in FORMATS])
@pytest.mark.parametrize("source", READ)
def test_convert_any_to_any(capsys, source, suffix):
    write_map(f"a{source}", splats(30, 1))
    code, out, _ = spirula(capsys, "convert", f"a{source}", f"b{suffix}")
    kind = next(f for f in FORMATS if f.suffix == suffix)
    assert code == 0 and f"b{suffix}: {kind.name}, 30 Gaussians" in out and out.splitlines()[-1].startswith("lost: ") and (kind.loses or "nothing") in out
    assert spirula(capsys, "info", f"b{suffix}")[0] == 0


def test_convert_cuts_what_is_asked(capsys):
    a = splats(200, 3)
    a.means[0] = np.nan
    write_map("a.ply", a)
    code, out, _ = spirula(capsys, "convert", "a.ply", "b.ply", "--sh-degree", "1", "--min-opacity", "0.5")
    b, keep = read_map("b.ply"), (opacities(a) >= 0.5) & np.isfinite(a.means[:, 0])
    np.testing.assert_array_equal(b.means, a.means[keep])
    np.testing.assert_array_equal(b.sh, a.sh[keep][:, :4])
    assert code == 0 and "1 of 200 Gaussians are not finite or absurd (1 not finite): left out" in out and "lost: SH degrees 2 to 3" in out and f"0.5: {199 - keep.sum()} left out" in out


@pytest.mark.parametrize("argv, message", [
    (("a.ply", "b.obj"), "b.obj: maps are written to files that end in .ply"), (("none.ply", "b.ply"), "none.ply: No such file"), (("a.npy", "b.ply"), "is not read"),
    (("bad.ply", "b.ply"), "not a .ply file"), (("a.ply", "no/b.ply"), "no/b.ply: No such file"), (("a.ply", "b.ply", "--min-opacity", "0.999999"), "not one of 30 Gaussians is left"),
])
def test_convert_refuses_in_one_line(capsys, argv, message):
    write_map("a.ply", splats(30, 1))
    Path("bad.ply").write_bytes(b"hello\n")
    code, out, err = spirula(capsys, "convert", *argv)
    assert code == 2 and message in err and len(err.splitlines()) == 1 and not Path("b.ply").exists()


# ---- info ----------------------------------------------------------------------------------------------------------------

def test_info_of_a_map(capsys):
    a = splats(1000, 2)
    a.means[0] = np.inf
    write_map("a.ply", a)
    _, out, _ = spirula(capsys, "info", "a.ply")
    share = 100 * np.mean(opacities(a)[1:] < 0.1)
    assert "spirula replay BAG --set train.start_map=a.ply --out " in out   # the default folder may be the one that it lies in
    assert "3DGS .ply, 1,000 Gaussians, SH degree 2" in out and "UNSOUND  1 of 1,000 Gaussians are not finite or absurd (1 not finite)" in out and f"x {a.means[1:, 0].min():.3f} to" in out and f"{share:5.1f} %" in out


def test_info_of_everything_else(capsys, trained, tmp_path):
    from spirula_ros.synthetic import make_bag
    trained.command("save_checkpoint", "a.ckpt").result()
    write_poses("poses.txt", posed())
    write_poses("model/", posed())
    make_bag("room", frames=2, size=(8, 6), say=lambda _: None)
    header = "ply\nformat binary_little_endian 1.0\nelement vertex 3\nproperty float x\nproperty float y\nproperty float z\nelement face 1\nproperty list uchar int vertex_indices\nend_header\n"
    Path("mesh.ply").write_bytes(header.encode() + np.eye(3, dtype="<f4").tobytes() + b"\x03" + np.arange(3, dtype="<i4").tobytes())
    Path("mesh.obj").write_text("v 0 0 0\nv 1 0 0\nv 0 1 0\nf 1 2 3\n")
    for path, text in (("a.ckpt", f"checkpoint, {len(trained._engine):,} Gaussians, SH degree 3, full precision"), ("poses.txt", "4 poses (TUM), 0.30 s, 0.30 m"),
                       ("model", "COLMAP model, 4 images, 2 cameras"), ("room", "recording"), ("mesh.ply", "mesh, 3 vertices, 1 faces"), ("mesh.obj", "mesh, 3 vertices, 1 faces")):
        code, out, err = spirula(capsys, "info", path)
        assert code == 0 and text in out, (path, out, err)


@pytest.mark.parametrize("name, content, message", [
    ("none.ply", None, "does not exist"), ("a.txt", b"hello", "not poses"), ("a.npy", b"\x80\x04]q", "not a .npy"), ("a.f32.gz", b"\x1f\x8bxx", "damaged"), ("a.json", b"{}", "a .json that is no report of a replay or training; it reads maps"),
    ("a.json", b'{"bag": 1, "mode": "x", "backend": "cpu"}', "no report of a replay"), ("a.json", b"[" * 100_000, "no report of a replay"), ("a.bag", b"#ROSBAG V2.0\n", "cut off at 13 bytes, in its header; copy it again"), ("a.png", b"\x89PNG", "not a picture that can be read"),
    ("a.pdf", b"%PDF", "nothing that this program knows; it reads maps"), ("a.splat", b"123", "a.splat"),
    ("a.ckpt", b"SPIRULA\x1a", "cut short"), ("a.ksplat", b"x", "splat-transform"),
])
def test_info_refuses_in_one_line(capsys, name, content, message):
    if content is not None:
        Path(name).write_bytes(content)
    code, out, err = spirula(capsys, "info", name)
    assert code == 2 and message in err and len(err.splitlines()) == 1, (out, err)


def test_info_of_folders_and_results(capsys):
    from spirula_ros.synthetic import make_bag
    make_bag("room", frames=4, size=(20, 15), say=lambda _: None)
    done = spirula(capsys, "replay", "room", "--lossless", "--out", "out", "--set", "engine.backend=cpu", "--set", "engine.threads=1", "--holdout", "2")
    for path in ("out", "out/", "out/report.json"):
        code, out, err = spirula(capsys, "info", path)
        assert code == 0 and "results of a replay of 'room' (lossless, cpu)" in out and done[1].strip() in out and "out/map.ply" in out, (out, err)
    code, out, _ = spirula(capsys, "info", "out/compare.png")
    assert code == 0 and re.search(r"picture, \d+x\d+, 3 channels of 8 bits", out)
    Path("empty").mkdir()
    Path("ros1").mkdir()
    Path("ros1/a.bag").write_bytes(b"#ROSBAG V2.0\n")
    for name in ("seven/frame-000000.color.png", "seven/frame-000001.color.png", "tum/rgb.txt"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("# stamp file\n1 a\n")
    assert "(7scenes), 2 images" in spirula(capsys, "info", "seven")[1] and "(tum), 1 images" in spirula(capsys, "info", "tum")[1]
    for name, text in (("empty", "nothing in this folder that this program knows; it reads maps"), ("ros1", "cut off at 13 bytes, in its header")):
        code, _, err = spirula(capsys, "info", name)
        assert code == 2 and text in err and len(err.splitlines()) == 1, err
    write_poses("project/sparse/0/", posed())
    assert "COLMAP model, 4 images" in spirula(capsys, "info", "project")[1]


def test_object_arrays_are_not_unpickled(capsys):
    np.save("a.npy", np.array([{}], object), allow_pickle=True)
    assert spirula(capsys, "info", "a.npy")[0] == 2


def test_map_files_of_parameters_are_checked():
    for name in ("output.map_path", "output.map_file"):
        with pytest.raises(ValueError, match=f"{name} = 'map.obj': .*end in .ply"):
            params.split({name: "map.obj"})
        params.split({name: "map.spz"})
    with pytest.raises(ValueError, match="a name, it lies in output.report_dir"):
        params.split({"output.map_file": "x/map.spz"})


def test_replay_writes_the_map_in_the_format_asked_for(capsys):
    from spirula_ros.synthetic import make_bag
    make_bag("room", frames=3, size=(16, 12), say=lambda _: None)
    code, _, err = spirula(capsys, "replay", "room", "--lossless", "--no-mesh", "--backend", "cpu", "--set", "train.steps_per_frame=1", "--set", "output.map_file=map.compressed.ply", "--out", "out")
    assert code == 0 and len(read_map("out/map.compressed.ply").means) == json.loads(Path("out/report.json").read_text())["gaussians"], err
    assert len(np.loadtxt("out/poses.txt", ndmin=2)) >= 1


def test_info_of_a_checkpoint_reads_all_of_it(trained, capsys):
    trained.command("save_checkpoint", "a.ckpt").result()
    data = bytearray(open("a.ckpt", "rb").read())
    data[len(data) // 2] ^= 1
    open("a.ckpt", "wb").write(data)
    code, out, err = spirula(capsys, "info", "a.ckpt")
    assert code == 2 and "is damaged: its checksum is another" in err and "Traceback" not in err and not out
