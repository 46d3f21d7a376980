"""bench/stream.py and bench/disturb.py: disturbances are exact and leave held-out frames alone; what a run writes; refusals."""
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import pytest

from conftest import CHECKOUT, bench_modules
from spirula_gpu import Camera, Frame, Mapper
from spirula_gpu.dataset import Scene
from scenes import look

BENCH = CHECKOUT / "bench"
CAMERA = Camera(48, 36, 40.0, 41.0, 23.0, 18.5)


@pytest.fixture(scope="module")
def bench():
    """(stream, disturb)."""
    stream, disturb = bench_modules("stream", "disturb")
    return SimpleNamespace(stream=stream, disturb=disturb)


@pytest.fixture(scope="module")
def frames() -> list[Frame]:
    """24 views at 5 frames a second, 3 cm apart, of a textured wall 3 m away."""
    rng, out = np.random.default_rng(0), []
    wall = cv2.resize(rng.integers(0, 256, (12, 40, 3)).astype(np.uint8), (480, 144), interpolation=cv2.INTER_CUBIC)
    for i in range(24):
        T = np.linalg.inv(look(0.0, 0.0, (0.0, 0.0, 0.0)).astype(np.float64))
        T[:3, 3] += 0.03 * i * T[:3, 0]
        x = round(0.03 * i * CAMERA.fx / 3.0)
        rgb, depth_m = np.ascontiguousarray(wall[:36, x:x + 48]), np.full((36, 48), 3.0, np.float32)
        out.append(Frame(1_000_000_000 + i * 200_000_000, CAMERA, T, rgb, depth_m, i % 8 == 4, f"view{i:02d}"))
    return out


@pytest.fixture
def packed(frames, tmp_path) -> str:
    png = lambda image: cv2.imencode(".png", image)[1].tobytes()
    Scene(tuple(f.frame_id for f in frames), (CAMERA,) * len(frames), np.array([f.T_world_cam for f in frames]), tuple(png(f.rgb[..., ::-1]) for f in frames),
          tuple(png((f.depth_m * 1000).astype(np.uint16)) for f in frames)).save(tmp_path / "wall.npz")
    return str(tmp_path / "wall.npz")


def same(a: Frame, b: Frame) -> bool:
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in ("rgb", "depth_m", "T_world_cam", "mask"))


def trained(frames):
    return [f for f in frames if not f.held_out]


# ---- disturbances ----------------------------------------------------------------------------------------------------
DISTURBANCES = [dict(poses="noise:0.02m,1deg"), dict(exposure="ramp:0.5..2"), dict(closure="0.1m"), dict(depth="none"), dict(depth="lines:6"), dict(mover=True),
                dict(mover=True, mask=True, poses="noise:0.02m,1deg", exposure="ramp:0.5..2", closure="0.1m", depth="lines:6")]


@pytest.mark.parametrize("options", DISTURBANCES, ids=str)
def test_held_out_frames_stay_true_and_the_seed_decides(bench, frames, options):
    d = bench.disturb.Disturbance(**options)
    first, again = bench.disturb.disturbed(frames, d, seed=3), bench.disturb.disturbed(frames, d, seed=3)
    assert all(same(a, b) for a, b in zip(first, again))
    stay = [True] * 3 if "closure" not in options else [True, False, False]   # a drift takes all along
    assert [same(a, b) for a, b in zip(first, frames) if a.held_out] == stay
    assert sum(not same(a, b) for a, b in zip(first, frames)) > 12
    assert [f.stamp_ns for f in first] == [f.stamp_ns for f in frames]
    if "poses" in options or "closure" in options:
        other = bench.disturb.disturbed(frames, d, seed=4)
        assert not any(same(a, b) for a, b in zip(trained(first)[10:], trained(other)[10:]))


def test_poses_are_off_by_exactly_so_much(bench, frames):
    moved = bench.disturb.disturbed(frames, bench.disturb.Disturbance(poses="noise: 0.02 m, 1.5 deg"), seed=0)
    for a, b in zip(trained(moved), trained(frames)):
        D = np.linalg.inv(b.T_world_cam) @ a.T_world_cam
        assert np.linalg.norm(D[:3, 3]) == pytest.approx(0.02)
        assert np.degrees(np.arccos((np.trace(D[:3, :3]) - 1) / 2)) == pytest.approx(1.5)


def test_drift_grows_over_the_second_quarter_and_stays(bench, frames):
    drifted = bench.disturb.disturbed(frames, bench.disturb.Disturbance(closure="0.1m"), seed=0)
    off = np.array([a.T_world_cam[:3, 3] - b.T_world_cam[:3, 3] for a, b in zip(drifted, frames)])
    assert np.linalg.norm(off, axis=1) == pytest.approx(0.1 * np.clip(4 * np.arange(24) / 23 - 1, 0, 1))
    assert np.linalg.matrix_rank(off, tol=1e-9) == 1, "one direction"


def test_exposure_is_light_times_a_gain(bench, frames):
    assert np.array_equal(bench.disturb.brighter(1.0), np.arange(256))
    double = bench.disturb.brighter(2.0)
    light = lambda value: ((value / 255 + 0.055) / 1.055) ** 2.4
    assert light(double[100]) == pytest.approx(2 * light(100), rel=0.02) and double[0] == 0 and double[200] == 255
    ramp = bench.disturb.disturbed(frames, bench.disturb.Disturbance(exposure="ramp:0.5..2"), seed=0)
    assert np.array_equal(ramp[0].rgb, bench.disturb.brighter(0.5)[frames[0].rgb]) and np.array_equal(ramp[23].rgb, double[frames[23].rgb])


def test_depth_in_lines(bench, frames):
    lines = bench.disturb.disturbed(frames, bench.disturb.Disturbance(depth="lines:6"), seed=0)[0].depth_m
    assert np.flatnonzero(lines.any(1)).tolist() == [3, 9, 15, 21, 27, 33] and (lines[3] == 3.0).all()
    assert all(f.depth_m is None for f in trained(bench.disturb.disturbed(frames, bench.disturb.Disturbance(depth="none"), 0)))


def test_the_mover_is_one_solid_in_images_and_depth(bench, frames):
    """Every pixel that shows it lies on its box, and where two frames see the same patch they see the same colour."""
    disturb, places = bench.disturb, bench.disturb.walk(frames)
    moved = disturb.disturbed(frames, disturb.Disturbance(mover=True, mask=True), seed=0)
    half, colors = np.array(disturb.PERSON_M) / 2, {}
    assert sum((f.mask == 0).any() for f in trained(moved)) > 10
    for f, place, before in zip(moved, places, frames):
        if f.held_out:
            continue
        hidden = f.mask == 0
        assert np.array_equal(f.rgb[~hidden], before.rgb[~hidden]) and np.array_equal(f.depth_m[~hidden], before.depth_m[~hidden])
        assert (f.depth_m[hidden] < 3.0).all()
        v, u = np.nonzero(hidden)
        z = f.depth_m[hidden].astype(np.float64)
        at = np.stack([(u + 0.5 - CAMERA.cx) / CAMERA.fx * z, (v + 0.5 - CAMERA.cy) / CAMERA.fy * z, z, np.ones_like(z)])
        local = (np.linalg.inv(place) @ f.T_world_cam @ at)[:3].T
        reach = np.abs(local) / half
        assert reach.max(1) == pytest.approx(1, abs=1e-4)
        for point, patch, axis, color in zip(local, np.floor((local + half) / disturb.PATCH_M + 1e-3), reach.argmax(1), f.rgb[hidden]):
            colors.setdefault((axis, point[axis] > 0, *np.delete(patch, axis)), []).append(tuple(color))
    common = [max(map(seen.count, set(seen))) / len(seen) for seen in colors.values() if len(seen) > 20]
    assert len(common) > 10 and np.median(common) > 0.95


def test_what_is_nearer_hides_the_mover(bench, frames):
    near = [replace(f, depth_m=np.where(np.arange(48) < 24, 0.3, 3.0).astype(np.float32) * np.ones((36, 1), np.float32)) for f in frames]
    moved = bench.disturb.disturbed(near, bench.disturb.Disturbance(mover=True, mask=True), seed=0)
    assert all((f.mask[:, :24] == 255).all() for f in trained(moved)) and any((f.mask == 0).any() for f in trained(moved))


@pytest.mark.parametrize("options, text", [
    (dict(poses="noise:2cm,1deg"), "--poses noise:2cm,1deg: write it as noise:0.02m,1deg"), (dict(exposure="0.5..2"), "--exposure 0.5..2: write it as ramp:0.5..2"),
    (dict(exposure="ramp:0..2"), "both must be above 0"), (dict(depth="some"), "--depth some: write it as sensor, none or lines:64"),
    (dict(closure="10"), "--closure 10: write it as 0.1m"),
    (dict(depth="lines:40"), "--depth lines:40: the images have 36 rows"), (dict(subset="20:30"), "--subset 20:30: there are frames 0:24"),
    (dict(mask=True), "it needs --mover")])
def test_bad_disturbances(bench, frames, options, text):
    with pytest.raises(ValueError, match=text.replace("(", ".").replace("..", r"\.\.")):
        bench.disturb.disturbed(frames, bench.disturb.Disturbance(**options), seed=0)


@pytest.mark.parametrize("options, text", [(dict(mover=True), "--mover: .* has none"), (dict(depth="lines:6"), "has no depth")])
def test_what_needs_depth_says_so(bench, frames, options, text):
    with pytest.raises(ValueError, match=text):
        bench.disturb.disturbed([replace(f, depth_m=None) for f in frames], bench.disturb.Disturbance(**options), seed=0)


# ---- runs ------------------------------------------------------------------------------------------------------------
FAST = ["--set", "engine.threads=1,engine.backend=cpu,train.steps_per_frame=6"]


def run(stream, monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["stream.py", *words])
    stream.main()


def test_a_lossless_run_is_written_and_repeats(bench, packed, tmp_path, monkeypatch, capsys):
    for name in ("a", "b"):
        run(bench.stream, monkeypatch, packed, "--rate", "5", "--lossless", "--refine-steps", "40", *FAST, "--seeds", "0,1", "--commit", "abc",
            "--out", f"{name}.json", "--pictures", "pictures")
    a, b = (json.loads(Path(f"{name}.json").read_text()) for name in ("a", "b"))
    assert (a["commit"], a["lpips"]) == ("abc", None) and a["device"] and len(a["date"]) == 10
    case, other = a["cases"]["wall"], b["cases"]["wall"]
    assert (case["data"], case["width"], case["height"], case["rate"], case["lossless"], case["refine_steps"]) == ("wall.npz", 48, 36, 5.0, True, 40)
    first = case["runs"][0]
    assert [r["seed"] for r in case["runs"]] == [0, 1]
    assert first["frames"] == {"in": 24, "used": 24, "dropped": {}} and first["keyframes"] == 21
    assert first["stages"]["insert"]["calls"] == first["stages"]["gate"]["calls"] == 21
    assert first["stages"]["step"]["calls"] == first["end"]["steps"] == 24 * 6 + 40
    assert first["stages"]["evaluate"]["calls"] == sum(c["held_out"] for c in first["curve"])
    assert [c["phase"] for c in first["curve"]] == ["stream"] * 8 + ["refine"] * 8
    assert [c["held_out"] for c in first["curve"]] == [0, 1, 1, 1, 2, 2, 3, 3] + [3] * 8
    assert np.all(np.diff([c["wall_s"] for c in first["curve"]]) > 0) and first["curve"][0]["psnr"] is None
    assert first["end"] == first["curve"][-1] and first["stream"] == first["curve"][7] and first["end"]["psnr"] > 15
    memory = first["memory"]
    assert memory["engine"] == sum(memory["categories"].values()) and memory["keyframes"] == 21 * 36 * 48 * 7 and memory["resident"] > 0
    assert [(c["psnr"], c["gaussians"]) for c in first["curve"]] == [(c["psnr"], c["gaussians"]) for c in other["runs"][0]["curve"]]
    assert cv2.imread("pictures/wall/compare.png").shape[1] > 3 * 48
    assert "| wall | " in capsys.readouterr().out


def test_at_a_rate_every_frame_is_accounted_for(bench, packed, monkeypatch):
    """60 frames a second into an inbox of two: some are dropped, and it says how many and why; the looks come during the stream."""
    run(bench.stream, monkeypatch, packed, "--rate", "60", "--refine-seconds", "0.2", *FAST, "--set", "gate.inbox_frames=2",
        "--exposure", "ramp:0.5..2", "--out", "out.json")
    case = json.loads(Path("out.json").read_text())["cases"]["wall"]
    figures = case["runs"][0]
    assert figures["frames"]["in"] == 24 == figures["frames"]["used"] + sum(figures["frames"]["dropped"].values())
    assert set(figures["frames"]["dropped"]) <= {"inbox_full"} and case["disturbance"]["exposure"] == "ramp:0.5..2"
    assert figures["stream_s"] >= 24 / 60 and figures["refine_s"] >= 0.2 and 0 < figures["training_share"] <= 1
    assert figures["stream"]["phase"] == "stream" and figures["end"]["phase"] == "refine"


def test_a_corrected_path_is_the_true_one(bench, frames):
    told, looks = [], []
    mapper = SimpleNamespace(command=lambda *words: told.append(words) or SimpleNamespace(result=lambda: None), look=looks.append)
    bench.stream.correct(mapper, bench.disturb.disturbed(frames, bench.disturb.Disturbance(closure="0.1m"), 0), frames)
    (name, stamps, poses), = told
    assert name == "correct" and looks == ["corrected"]
    assert stamps.tolist() == [f.stamp_ns for f in frames] and np.array_equal(poses, [f.T_world_cam for f in frames])


def test_without_the_command_a_closure_is_refused(bench, packed, monkeypatch):
    monkeypatch.delattr(Mapper, "_do_correct", raising=False)
    with pytest.raises(ValueError, match="wall: --closure needs a Mapper with the command `correct`"):
        run(bench.stream, monkeypatch, packed, "--rate", "5", "--lossless", *FAST, "--closure", "0.1m")


@pytest.mark.parametrize("words, text", [
    (["--cases", "all,desk"], "--cases all: must be all, or of kitchen, "), (["--cases", "desk", "--root", "nowhere"], "neither desk.npz nor colmap_desk is there"),
    (["PACKED"], "--rate: frames a second"), (["PACKED", "--rate", "5", "--set", "train.stepz=1"], "unknown parameter 'train.stepz'")])
def test_refusals(bench, packed, words, text, monkeypatch):
    with pytest.raises(ValueError, match=text):
        run(bench.stream, monkeypatch, *(packed if w == "PACKED" else w for w in words))


def test_every_case_names_a_set_and_a_disturbance_that_is_understood(bench, frames):
    for name, case in bench.stream.CASES.items():
        assert case.set in bench.stream.SETS, name
        d = replace(case.disturbance, depth=case.disturbance.depth.replace("64", "6"))
        assert len(bench.disturb.disturbed(frames, d, 0)) == 24
