"""Offline training: the scenes it reads, growth that keeps the picture, runs that learn, and bench/offline.py."""
import json
import re
import subprocess
import sys
from dataclasses import replace as changed
from pathlib import Path

import cv2
import numpy as np
import pytest

from shared_data import DATA
from spirula_gpu import Camera, Engine, Frame
from spirula_gpu.config import InsertConfig, replaced
from spirula_gpu.dataset import Scene, SceneError, read_colmap
from spirula_gpu.metrics import psnr
from spirula_gpu.native import view
from spirula_gpu.offline import OfflineConfig, OfflineRun, TrainingSet, depth_points, neighbour_distance
from spirula_gpu.strategy import GrowConfig, Growth
from scenes import gaussians, look

CHECKOUT = Path(__file__).resolve().parent.parent
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"{DATA} is not there")
CAMERA = Camera(48, 36, 40.0, 41.0, 23.0, 18.5)
FAST = {"engine.threads": 1, "engine.max_gaussians": 700, "init.points": 500, "schedule.max_steps": 160, "schedule.sh_interval_steps": 50,
        "grow.start": 20, "grow.every": 20}


def world_from(cam_world: np.ndarray) -> np.ndarray:
    return np.linalg.inv(cam_world)


@pytest.fixture(scope="module")
def frames() -> list[Frame]:
    """24 views of 60 opaque blobs, with depth; every eighth held out."""
    g, rng, out = gaussians(60, 0, seed=3, size=(0.2, 0.5)), np.random.default_rng(0), []
    with Engine("cpu", sh_degree=0, threads=1) as engine:
        for i in range(24):
            T = look(*rng.uniform(-0.15, 0.15, 2), rng.uniform(-0.4, 0.4, 3))
            rgb, alpha, depth = (x[0] for x in engine.forward(g.means, g.quats, g.scales, np.full(60, 0.95), g.sh, view(CAMERA, T, 0)))
            depth_m = np.where(alpha > 0.5, depth / np.maximum(alpha, 1e-6), 0).astype(np.float32)
            out.append(Frame(i, CAMERA, world_from(T), (rgb.clip(0, 1) * 255 + 0.5).astype(np.uint8), depth_m, i % 8 == 4, f"view{i:02d}"))
    return out


def png(image: np.ndarray) -> bytes:
    return cv2.imencode(".png", image)[1].tobytes()


def scene_of(frames: list[Frame]) -> Scene:
    return Scene(tuple(f.frame_id for f in frames), tuple(f.camera for f in frames), np.array([f.T_world_cam for f in frames]),
                 tuple(png(f.rgb[..., ::-1]) for f in frames), tuple(png((f.depth_m * 1000 + 0.5).astype(np.uint16)) for f in frames))


# ---- scenes ----

def test_a_packed_scene_comes_back_byte_for_byte(frames, tmp_path):
    scene = changed(scene_of(frames), points=np.eye(3, dtype=np.float32), colors=np.eye(3, dtype=np.uint8))
    scene.save(tmp_path / "scene.npz")
    again = Scene.load(tmp_path / "scene.npz")
    assert (again.names, again.cameras, again.images, again.depths) == (scene.names, scene.cameras, scene.images, scene.depths)
    for name in ("T_world_cam", "points", "colors"):
        assert np.array_equal(getattr(again, name), getattr(scene, name)), name


def test_frames_of_a_scene(frames):
    decoded = scene_of(frames).frames()
    assert [f.held_out for f in decoded] == [i % 8 == 4 for i in range(24)]
    for a, b in zip(decoded, frames):
        assert np.array_equal(a.rgb, b.rgb) and np.abs(a.depth_m - b.depth_m).max() <= 0.00051 and a.frame_id == b.frame_id


def test_a_smaller_size_shrinks_image_depth_and_intrinsics(frames):
    small, full = scene_of(frames[:1]).frames((24, 18))[0], frames[0]
    assert small.camera == Camera(24, 18, 20.0, 20.5, 11.5, 9.25)
    means = full.rgb.reshape(18, 2, 24, 2, 3).mean((1, 3))
    assert np.abs(small.rgb - means).max() <= 0.5 + 1e-9
    assert np.allclose(small.depth_m, full.depth_m[1::2, 1::2], atol=0.00051), "one of the samples, never a mean"
    with pytest.raises(SceneError, match="larger than view00 .48x36.*only shrink"):
        scene_of(frames[:1]).frames((96, 18))


def test_images_that_do_not_fit_their_camera_are_refused(frames):
    scene = scene_of(frames[:2])
    with pytest.raises(SceneError, match="view01: 10x10, its camera says 48x36"):
        changed(scene, images=(scene.images[0], png(np.zeros((10, 10, 3), np.uint8)))).frames()
    with pytest.raises(SceneError, match="depth of view01: not an image"):
        changed(scene, depths=(scene.depths[0], b"nothing")).frames()
    with pytest.raises(SceneError, match="view00: not an image that can be read .0 bytes.; was it cut"):
        changed(scene, images=(b"", scene.images[1])).frames()


def write_colmap(root: Path, frames: list[Frame], model: str = "PINHOLE 48 36 40 41 23 18.5") -> None:
    """A text model, the images in reverse order; two points."""
    sparse = root / "sparse" / "0"
    sparse.mkdir(parents=True)
    (root / "images").mkdir()
    (sparse / "cameras.txt").write_text(f"1 {model}\n2 SIMPLE_PINHOLE 48 36 39 24 18\n")
    lines = []
    for n, f in enumerate(reversed(frames)):
        cv2.imwrite(str(root / "images" / f"{f.frame_id}.png"), f.rgb[..., ::-1])
        R, t = f.T_cam_world[:3, :3].astype(float), f.T_cam_world[:3, 3]
        w = 0.5 * np.sqrt(1 + np.trace(R))
        x, y, z = (R[2, 1] - R[1, 2]) / (4 * w), (R[0, 2] - R[2, 0]) / (4 * w), (R[1, 0] - R[0, 1]) / (4 * w)
        lines += [f"{n + 1} {w} {x} {y} {z} {t[0]} {t[1]} {t[2]} {1 + n % 2} {f.frame_id}.png", ""]
    (sparse / "images.txt").write_text("\n".join(lines) + "\n")
    (sparse / "points3D.txt").write_text("1 1 2 3 10 20 30 0.5\n7 -1 0.5 4 200 100 0 0.5\n")


def test_colmap_model(frames, tmp_path):
    write_colmap(tmp_path, frames[:4])
    scene = read_colmap(tmp_path)
    assert scene.names == ("view00.png", "view01.png", "view02.png", "view03.png")
    assert np.allclose(scene.T_world_cam, [f.T_world_cam for f in frames[:4]], atol=1e-5)
    assert scene.cameras[1::2] == (CAMERA,) * 2, "(0.5, 0.5) is the first pixel's centre in both"
    assert scene.cameras[0] == Camera(48, 36, 39, 39, 24, 18)
    assert sorted(map(tuple, scene.points)) == [(-1, 0.5, 4), (1, 2, 3)] and sorted(map(tuple, scene.colors)) == [(10, 20, 30), (200, 100, 0)]
    assert np.array_equal(scene.frames()[2].rgb, frames[2].rgb)


def test_colmap_refusals(frames, tmp_path):
    with pytest.raises(SceneError, match="neither sparse/0 nor sparse"):
        read_colmap(tmp_path)
    write_colmap(tmp_path, frames[:2], "OPENCV 48 36 40 41 23 18.5 0.1 0 0 0")
    with pytest.raises(SceneError, match="camera 1 is OPENCV: undistort"):
        read_colmap(tmp_path)
    (tmp_path / "images" / "view01.png").unlink()
    with pytest.raises(SceneError, match="1 of the model's 2 images are not there, e.g. view01.png"):
        read_colmap(tmp_path)
    (tmp_path / "sparse" / "0" / "images.txt").write_text("")
    with pytest.raises(SceneError, match="no image has a pose|does not read"):
        read_colmap(tmp_path)


def test_truncated_colmap_model_is_refused(tmp_path):
    (tmp_path / "sparse").mkdir()
    (tmp_path / "sparse" / "cameras.bin").write_bytes(b"\x01\x00")
    with pytest.raises(SceneError, match="does not read it"):
        read_colmap(tmp_path)


# ---- the first map ----

def test_depth_points_lie_on_the_surface_and_have_its_colour():
    T = world_from(look(0.4, -0.2, (1, 2, 3)))
    depth_m = np.full((36, 48), 2.0, np.float32)
    depth_m[:, :10], depth_m[:, 40:] = 0, 50
    rgb = np.zeros((36, 48, 3), np.uint8)
    rgb[..., 0], rgb[..., 1] = np.arange(48), np.arange(36)[:, None]
    points, colors = depth_points([Frame(0, CAMERA, T, rgb, depth_m)], 300, InsertConfig(), np.random.default_rng(0))
    local = (points - T[:3, 3]) @ T[:3, :3]
    assert len(points) == 300 and np.allclose(local[:, 2], 2, atol=1e-5)
    u, v = CAMERA.fx * local[:, 0] / 2 + CAMERA.cx, CAMERA.fy * local[:, 1] / 2 + CAMERA.cy
    assert np.allclose(u, colors[:, 0] + 0.5, atol=1e-3) and np.allclose(v, colors[:, 1] + 0.5, atol=1e-3)
    assert 10 <= colors[:, 0].min() and colors[:, 0].max() < 40, "0 and 50 m are no depth"


def test_neighbour_distance_against_brute_force():
    points = np.random.default_rng(0).normal(size=(50, 3))
    d = np.sort(np.linalg.norm(points[:, None] - points[None], axis=2), axis=1)[:, 1:4]
    assert np.allclose(neighbour_distance(points), np.sqrt((d**2).mean(1)))
    assert np.allclose(neighbour_distance(points[:2]), np.linalg.norm(points[0] - points[1])) and neighbour_distance(points[:1]) == 1


# ---- growth ----

def grown_engine(n: int = 400, **values) -> tuple[Engine, Growth]:
    g = gaussians(n, 1, seed=5)
    engine = Engine("cpu", sh_degree=1, max_gaussians=10_000, threads=1)
    engine.append(g.means, g.quats, np.log(g.scales), np.log(g.opacities / (1 - g.opacities)), g.sh)
    return engine, Growth(engine, GrowConfig(**values), cap=int(1.5 * n))


def picture(engine: Engine) -> np.ndarray:
    return engine.render(view(Camera(96, 72, 80, 80, 48, 36), np.eye(4), 1))[0][0]


def test_growth_keeps_the_picture():
    engine, growth = grown_engine(rate=0.3)
    before = picture(engine)
    growth.apply()
    assert len(engine) == 520 and growth.added == 120
    assert psnr(picture(engine), before) > 38
    copies, _ = grown_engine()
    rows = [copies.read(f"map.{name}")[:120] for name in ("mean", "quat", "log_scale", "logit_opacity", "sh")]
    copies.append(*rows)
    assert psnr(picture(copies), before) < 30, "mere copies do not"


def test_growth_stops_at_the_cap():
    engine, growth = grown_engine(rate=0.2)
    sizes = [(growth.apply(), len(engine))[1] for _ in range(5)]
    assert sizes == [480, 576, 600, 600, 600]


def test_the_dead_move_onto_the_living_and_start_afresh():
    engine, growth = grown_engine(rate=0.0)
    logits = engine.read("map.logit_opacity")
    dead = np.zeros(400, bool)
    dead[[3, 77, 300]] = True
    logits[dead] = (-8, -9, np.nan)
    engine.write("map.logit_opacity", logits)
    engine.write("adam.m.mean", np.ones((400, 3), np.float32))
    engine.write("adam.steps", np.full(400, 9, np.int32))
    living = engine.read("map.mean")[~dead]
    growth.apply()
    at = engine.read("map.mean")[dead]
    assert growth.relocated == 3 and len(engine) == 400
    assert all((living == p).all(1).any() for p in at), "each stands where a living one stands"
    assert (1 / (1 + np.exp(-engine.read("map.logit_opacity"))) > 0.0049).all()
    assert not engine.read("adam.m.mean")[dead].any() and not engine.read("adam.steps")[dead].any()
    assert (engine.read("adam.m.mean")[~dead] == 1).all() and (engine.read("adam.steps")[~dead] == 9).all()


def test_where_nothing_lives_nothing_grows():
    engine, growth = grown_engine()
    engine.write("map.logit_opacity", np.full(400, -9, np.float32))
    growth.apply()
    assert len(engine) == 400 and growth.relocated == growth.added == 0


def test_error_decides_where_to_grow():
    engine, growth = grown_engine(rate=0.1, error_power=1.0)
    error = np.zeros(400, np.float32)
    error[[5, 6]] = 1
    engine.write("stat.error", error)
    spots = engine.read("map.mean")[[5, 6]]
    growth.apply()
    assert all((spots == p).all(1).any() for p in engine.read("map.mean")[400:]) and len(engine) == 440


# ---- runs ----

def trained(frames, extent=1.0, **values):
    with OfflineRun(TrainingSet(frames, extent), replaced(OfflineConfig(), {**FAST, **values})) as run:
        first = run.evaluate()
        run.train(until=80)
        run.train(until=run.config.schedule.max_steps)
        return first, run.evaluate(), run.render(run.data.held_out[0])


@pytest.mark.parametrize("source", ["points", "insert"])
def test_a_run_learns_what_it_never_saw(frames, source):
    first, last, _ = trained(frames, **{"init.source": source})
    assert last.step == 160 and last.psnr > first.psnr + 3 and last.ssim > first.ssim and last.cc_psnr > last.psnr - 0.1
    assert 500 < last.gaussians <= 700 and last.engine_bytes > 0 and last.image_bytes == 21 * 48 * 36 * 3


def test_a_run_repeats_to_the_last_bit_whenever_it_is_measured(frames):
    once = trained(frames)[2]
    with OfflineRun(TrainingSet(frames, 1.0), replaced(OfflineConfig(), FAST)) as run:
        run.train(until=160)
        assert np.array_equal(run.render(run.data.held_out[0]), once)
    assert not np.array_equal(trained(frames, **{"engine.seed": 1})[2], once)


def test_the_unit_of_length_does_not_matter(frames):
    """Metres, or COLMAP's arbitrary unit: rates, noise, sizes and the near plane follow the extent."""
    larger = []
    for f in frames:
        T = f.T_world_cam.copy()
        T[:3, 3] *= 16
        larger.append(changed(f, T_world_cam=T, depth_m=16 * f.depth_m))
    values = {"insert.max_depth_m": 1000.0, "schedule.depth_weight": 0.05}
    a, b = trained(frames, 1.0, **values)[1], trained(larger, 16.0, **values)[1]
    assert abs(a.psnr - b.psnr) < 0.1 and abs(a.ssim - b.ssim) < 0.002


def test_what_cannot_begin_says_why(frames):
    blind = [changed(f, depth_m=None) for f in frames]
    with pytest.raises(ValueError, match="no Gaussian to begin with.*neither sparse points nor depth"):
        OfflineRun(TrainingSet(blind, 1.0), replaced(OfflineConfig(), FAST))
    with pytest.raises(ValueError, match="insert needs depth, and view00 has none|needs depth"):
        OfflineRun(TrainingSet(blind, 1.0), replaced(OfflineConfig(), {**FAST, "init.source": "insert"}))
    with pytest.raises(ValueError, match="depth_weight > 0, but not every"):
        OfflineRun(TrainingSet(blind, 1.0), replaced(OfflineConfig(), {**FAST, "schedule.depth_weight": 0.1}))
    with pytest.raises(ValueError, match="init.source = 'guess': must be points or insert"):
        OfflineRun(TrainingSet(frames, 1.0), replaced(OfflineConfig(), {**FAST, "init.source": "guess"}))
    with pytest.raises(ValueError, match="extent 0"):
        TrainingSet(frames, 0.0)


def test_sparse_points_are_used_and_obey_the_cap(frames):
    points = np.random.default_rng(0).normal(size=(2000, 3)) + (0, 0, 4)
    config = replaced(OfflineConfig(), {**FAST, "init.points": 1500})
    with OfflineRun(TrainingSet(frames, 1.0, points, np.full((2000, 3), 99, np.uint8)), config) as run:
        means = run.engine.read("map.mean")
        assert len(means) == 700 and (np.abs(points[:, None] - means[None, :20]).max(2).min(0) < 1e-6).all()
        assert np.allclose(0.5 + 0.28209479 * run.engine.read("map.sh")[:, 0], 99 / 255, atol=1e-6)


# ---- bench/offline.py ----

def bench(*words: str, ok: bool = True) -> str:
    result = subprocess.run([sys.executable, CHECKOUT / "bench" / "offline.py", *words], capture_output=True, text=True)
    assert (result.returncode == 0) == ok, result.stdout + result.stderr
    return result.stdout if ok else result.stderr


@pytest.fixture(scope="module")
def packed(frames, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("packed") / "blobs.npz"
    scene_of(frames).save(path)
    return str(path)


def test_the_bench_runs_variants_and_writes_what_it_found(packed, tmp_path):
    (tmp_path / "sweep.json").write_text(json.dumps([{"init.opacity": 0.2}]))
    words = [f"--set={name}={value}" for name, value in FAST.items()]
    out = bench(packed, "--size", "24x18", "--eval", "0,30,160", *words, "--variant", "schedule.noise=0,grow.rate=0.1", "--sweep", "sweep.json",
                "--renders", "renders", "--commit", "abc", "--out", "out.json")
    assert "21 frames + 3 held out, 24x18" in out and out.count("  step ") == 6
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["data"] == "blobs.npz" and result["commit"] == "abc" and (result["width"], result["height"]) == (24, 18)
    assert list(result["runs"]) == ["schedule.noise=0,grow.rate=0.1", "init.opacity=0.2"]
    run = result["runs"]["schedule.noise=0,grow.rate=0.1"]
    assert run["settings"]["grow.rate"] == 0.1 and run["settings"]["init.points"] == 500 and "init.opacity" not in run["settings"]
    assert [f["step"] for f in run["figures"]] == [0, 30, 160] and run["figures"][2]["psnr"] > run["figures"][0]["psnr"]
    assert run["begun_with"] + run["added"] == run["figures"][2]["gaussians"] and run["device"]
    assert cv2.imread(str(tmp_path / "renders" / "1" / "view04.png")).shape == (18, 48, 3)


@pytest.mark.parametrize("words, message", [
    (["--set", "schedule.lr_maen=1"], "unknown parameter 'schedule.lr_maen'"),
    (["--variant", "lr_mean=1"], "unknown parameter 'lr_mean'; did you mean 'schedule.lr_mean'"),
    (["--set", "schedule.noise=-1"], "schedule.noise = -1.0: must lie in"),
    (["--set", "schedule.lr_mean"], "must be name=value"),
    (["--eval", "8000"], "must lie in 0..7000 .schedule.max_steps"),
    (["--set", "engine.precision=Compact"], "engine.precision = 'Compact': must be full or compact"),
    (["--set", "engine.precison=compact"], "unknown parameter 'engine.precison'; did you mean 'engine.precision'"),
    (["--sweep", "nope.json"], "No such file or directory: 'nope.json'"),
    (["--sweep", "bad.json"], "bad.json: not JSON"),
    (["--sweep", "number.json"], "number.json: must be a list of variants"),
    (["--color-offset", "1 2"], "'1 2': 3 numbers are needed"),
    (["--color-offset", "a b c"], "'a b c': 3 numbers are needed"),
    (["--out", "no/such/out.json"], "--out 'no/such/out.json': must be a file in a folder that exists"),
    (["--out", "."], "--out '.': must be a file"),
])
def test_the_bench_refuses(packed, words, message):
    Path("bad.json").write_text("[")
    Path("number.json").write_text("[1]")
    said = bench(packed, *words, ok=False)
    assert re.search(message, said) and "Traceback" not in said


def test_the_bench_refuses_what_is_no_scene():
    Path("text.npz").write_text("no archive")
    np.savez("other.npz", x=np.zeros(3))
    Path("cut.npz").write_bytes(Path("other.npz").read_bytes()[:60])
    for name, message in (("nope.npz", "nope.npz: does not exist"), ("text.npz", "text.npz: not a packed scene"),
                          ("other.npz", "other.npz: not a packed scene"), ("cut.npz", "cut.npz: not a packed scene")):
        said = bench(name, ok=False)
        assert re.search(message, said) and said.startswith("offline.py: ") and said.count("\n") == 1, said


def test_the_list_may_be_cut_off():
    script = CHECKOUT / "bench" / "offline.py"
    result = subprocess.run(f"set -o pipefail; {sys.executable} {script} --list | head -1", shell=True, executable="/bin/bash", capture_output=True, text=True)
    assert result.returncode == 0 and result.stderr == "" and result.stdout.startswith("engine.backend")


def test_the_bench_packs_an_rgbd_folder(frames, tmp_path):
    folder = tmp_path / "seven"
    folder.mkdir()
    (folder / "camera-intrinsics.txt").write_text("40 0 22.5\n0 40 18\n0 0 1\n")
    for f in frames[:3]:
        stem = folder / f"frame-{f.stamp_ns:06d}"
        cv2.imwrite(f"{stem}.color.png", f.rgb[..., ::-1])
        cv2.imwrite(f"{stem}.depth.png", (f.depth_m * 1000).astype(np.uint16))
        np.savetxt(f"{stem}.pose.txt", f.T_world_cam)
    bench(str(folder), "--pack", "plain.npz")
    bench(str(folder), "--color-f", "38", "--color-offset", "-0.025 0 0", "--pack", "rig.npz")
    plain, rig = Scene.load(tmp_path / "plain.npz"), Scene.load(tmp_path / "rig.npz")
    decoded = plain.frames()
    assert [f.frame_id for f in decoded] == [f"frame-{i:06d}.color.png" for i in range(3)] and decoded[0].camera == Camera(48, 36, 40, 40, 23, 18.5)
    for a, b in zip(decoded, frames):
        assert np.array_equal(a.rgb, b.rgb) and np.array_equal(a.depth_m, (b.depth_m * 1000).astype(np.uint16) / np.float32(1000))
    assert rig.cameras[0] == Camera(48, 36, 38, 38, 23, 18.5)
    moved = np.linalg.inv(plain.T_world_cam) @ rig.T_world_cam
    assert np.allclose(moved[:, :3, 3], (0.025, 0, 0)) and np.allclose(moved[:, :3, :3], np.eye(3))


def test_every_parameter_is_listed_once():
    lines = bench("--list").splitlines()
    names = [line.split(" = ")[0] for line in lines]
    assert len(set(names)) == len(names) > 40 and {"engine.max_gaussians", "grow.rate", "schedule.noise"} <= set(names)


# ---- the real scenes ----

def reprojection_px(scene: Scene, reconstruction) -> float:
    """Median distance of COLMAP's own observations from its points through the scene's cameras."""
    errors = []
    for image in reconstruction.images.values():
        i = scene.names.index(image.name)
        camera, T = scene.cameras[i], np.linalg.inv(scene.T_world_cam[i])
        seen = [(p.xy, reconstruction.points3D[p.point3D_id].xyz) for p in image.points2D if p.has_point3D()]
        xy, xyz = (np.array(x) for x in zip(*seen))
        local = xyz @ T[:3, :3].T + T[:3, 3]
        errors.append(np.linalg.norm(local[:, :2] / local[:, 2:] * (camera.fx, camera.fy) + (camera.cx, camera.cy) - xy, axis=1))
    return float(np.median(np.concatenate(errors)))


@needs_data
@pytest.mark.parametrize("name, images, points, size, most_px", [("colmap_desk", 29, 7562, (1906, 1070), 1.0), ("colmap_cup", 77, None, (800, 600), 0.6)])
def test_colmap_scenes(name, images, points, size, most_px):
    import pycolmap
    scene = read_colmap(DATA / name)
    assert len(scene.names) == images and (scene.cameras[0].width, scene.cameras[0].height) == size
    assert points is None or len(scene.points) == points
    assert len(set(scene.cameras)) == (1 if name == "colmap_desk" else 77)
    assert reprojection_px(scene, pycolmap.Reconstruction(str(DATA / name / "sparse" / "0"))) < most_px


@needs_data
def test_desk_at_half_size():
    frames = read_colmap(DATA / "colmap_desk").frames((953, 535))
    assert sum(f.held_out for f in frames) == 4
    c = frames[0].camera
    assert np.allclose((c.fx, c.fy, c.cx, c.cy), (755.425, 750.77, 476.5, 267.5), atol=0.01)
    full = read_colmap(DATA / "colmap_desk")._frame(0, None).rgb
    assert np.abs(full[:1070].reshape(535, 2, 953, 2, 3).mean((1, 3)) - frames[0].rgb).max() <= 0.51
