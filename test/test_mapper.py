"""The mapper on small real maps: the gate, the inbox, limits, commands, errors, the same result twice."""
import os
import threading
import time
from dataclasses import replace

import cv2
import numpy as np
import pytest

import spirula_gpu.keyframes
from spirula_gpu.camera import Camera, Frame
from spirula_gpu.checkpoint_file import CheckpointError
from spirula_gpu.config import Config, GateConfig, TrainConfig, replaced, rows
from spirula_gpu.gate import Gate
from spirula_gpu.keyframes import Keyframe, Keyframes
from spirula_gpu.mapper import Mapper, Wants
from spirula_gpu.mesh import MeshError
from spirula_gpu.native import NativeError

CAMERA = Camera(40, 30, 36.0, 36.0, 20.0, 15.0)
SMALL = replaced(Config(), {"engine.backend": "cpu", "engine.threads": 1, "train.steps_per_frame": 4, "prune.interval_steps": 10})


def frame(i: int, **changes) -> Frame:
    """A textured wall 2 m ahead, seen from 5 cm further right each time."""
    T = np.eye(4)
    T[0, 3] = 0.05 * i
    u, v = np.meshgrid(np.arange(40) + 0.05 * i * 18, np.arange(30))
    rgb = np.stack([128 + 100 * np.sin(u * 0.5), 128 + 100 * np.sin(v * 0.4), 128 + 60 * np.cos(u * 0.3 + v * 0.2)], -1).astype(np.uint8)
    return replace(Frame(1_000_000_000 + i * 100_000_000, CAMERA, T, rgb, np.full((30, 40), 2, np.float32)), **changes)


def submit(mapper: Mapper, f: Frame) -> None:
    mapper.ledger.arrived()
    mapper.submit(f)


def feed(mapper: Mapper, *frames: Frame) -> Mapper:
    """Each with all that it makes due."""
    for f in frames:
        submit(mapper, f)
        mapper.run_due()
    return mapper


def run(config: Config, n: int = 6) -> Mapper:
    mapper = Mapper(config)
    for i in range(n):
        submit(mapper, frame(i, held_out=i == 3))
        mapper.run_due()
    return mapper


def wait_for(condition, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def test_inline_counts_and_measures():
    mapper = run(SMALL)
    results, status = mapper.evaluate(), mapper.status()
    assert status.frames == (6, 6, {}) and status.frames.pending == 0
    assert (status.keyframes, status.held_out, status.steps) == (5, 1, 24)  # every frame makes steps due
    assert status.state == "running" and status.heldout_psnr == pytest.approx(results[0].psnr) and results[0].psnr > 17


def test_the_same_frames_and_seed_give_the_same_map():
    a, b = run(SMALL), run(SMALL)
    for row in ("map.mean", "map.quat", "map.log_scale", "map.logit_opacity", "map.sh", "adam.steps"):
        assert np.array_equal(a._engine.read(row), b._engine.read(row)), row
    assert not np.array_equal(a._engine.read("map.mean"), run(replaced(SMALL, {"engine.seed": 1}))._engine.read("map.mean"))


def test_a_held_out_frame_leaves_no_trace_in_the_map():
    mapper, other = Mapper(SMALL), Mapper(SMALL)
    for i in range(4):
        for m in (mapper, other):
            submit(m, frame(i, held_out=i == 2, rgb=np.zeros((30, 40, 3), np.uint8) if m is other and i == 2 else frame(i).rgb))
            m.run_due()
    assert np.array_equal(mapper._engine.read("map.sh"), other._engine.read("map.sh"))
    assert len(mapper.evaluate()) == 1 and mapper.evaluate()[0].psnr != other.evaluate()[0].psnr


def test_a_held_out_frame_that_comes_again_counts_once():
    """As in a resumed replay, which plays its recording from the start."""
    mapper = feed(Mapper(SMALL), frame(0), frame(1, held_out=True))
    mapper.evaluate()
    newest = frame(1, held_out=True, rgb=np.zeros((30, 40, 3), np.uint8))
    feed(mapper, newest, frame(2, held_out=True))
    results = mapper.evaluate()
    assert [r.frame.stamp_ns for r in results] == [newest.stamp_ns, frame(2).stamp_ns] and not results[0].frame.rgb.any()
    assert mapper.status().held_out == 2 and mapper.status().heldout_psnr == pytest.approx(np.mean([r.psnr for r in results]))


@pytest.mark.parametrize("path", ["fifo", "folder", "no/such/folder/map.ckpt", "/proc/map.ckpt"])
def test_a_checkpoint_that_cannot_be_written_is_refused_at_the_start(path):
    os.mkfifo("fifo")
    os.mkdir("folder")
    with pytest.raises(CheckpointError, match=f"checkpoint.path '{path}': must be a file in a folder that exists and can be written"):
        Mapper(replaced(SMALL, {"checkpoint.path": path}))


def test_gate():
    gate, config = Gate(), GateConfig(min_translation_m=0.1, min_rotation_deg=5.0, max_interval_s=10.0)
    turned = np.eye(4)
    c, s = np.cos(np.radians(6)), np.sin(np.radians(6))
    turned[:2, :2] = [[c, -s], [s, c]]
    assert gate.refuses(frame(0), config) is None
    assert gate.refuses(frame(1), config) == "not_keyframe"              # 5 cm
    assert gate.refuses(frame(2), config) is None                        # 10 cm
    assert gate.refuses(frame(1), config) == "not_keyframe"              # 5 cm from both
    assert gate.refuses(frame(0, T_world_cam=turned), config) is None
    assert gate.refuses(frame(200, T_world_cam=np.eye(4)), config) is None    # 20 s later
    assert gate.refuses(frame(210, rgb=np.full((30, 40, 3), 90, np.uint8)), config) == "blurred"


def test_the_inbox_drops_the_oldest_and_counts_it():
    mapper = Mapper(replaced(SMALL, {"gate.inbox_frames": 2}))
    for i in range(5):
        submit(mapper, frame(i))
    assert mapper.ledger.counts() == (5, 0, {"inbox_full": 3}) and mapper.status().inbox_frames == 2
    mapper.run_due()
    assert [k.frame.stamp_ns for k in mapper._keyframes] == [frame(3).stamp_ns, frame(4).stamp_ns]


def test_what_a_step_at_half_size_compares():
    rng = np.random.default_rng(0)
    camera, mask = Camera(41, 30, 36.0, 36.0, 20.0, 15.0), (rng.random((30, 41)) < 0.5).astype(np.uint8)
    f = frame(0, camera=camera, rgb=rng.integers(0, 256, (30, 41, 3), np.uint8), depth_m=rng.random((30, 41), np.float32), mask=mask)
    for drawn, blur in ((True, 0.3), (False, 0.075)):
        engine = Mapper(replaced(SMALL, {"engine.antialiased": drawn}))._engine
        view, rgb, depth_m, mask = Keyframe(0, f, 0.3).compared(engine, 1, half=True)
        assert (view.width, view.height, view.sh_degree) == (21, 15, 1) and view.blur_px2 == pytest.approx(blur)
        assert rgb.shape == (15, 21, 3) and depth_m.shape == mask.shape == (15, 21) and set(np.unique(mask)) <= {0, 1}
        assert np.isin(depth_m, f.depth_m).all() and abs(rgb.mean() - f.rgb.mean()) < 1 and rgb.std() < 0.6 * f.rgb.std()
    view, rgb, depth_m, _ = Keyframe(0, f, 0.3).compared(engine, 1)
    assert (view.width, view.height) == (41, 30) and rgb is f.rgb or (rgb == f.rgb).all() and depth_m is f.depth_m


def test_a_young_keyframe_is_trained_at_half_size_while_the_mapper_is_behind(monkeypatch):
    mapper = run(replaced(SMALL, {"train.steps_per_frame": 0}))
    step, widths = mapper._engine.train_step, []
    monkeypatch.setattr(mapper._engine, "train_step", lambda view, *a, **k: widths.append(view.width) or step(view, *a, **k))
    monkeypatch.setattr("spirula_gpu.trainer.YOUNG_STEPS", 1000)
    seen, before = mapper._trainer._seen, mapper._output.train_psnr(mapper._keyframes)
    mapper._steps(40, behind=True)
    assert mapper._trainer._seen == seen == (0, 0), "what memory a step takes is that of full size"
    assert mapper._output.train_psnr(mapper._keyframes) > before + 3
    mapper._steps(2)
    assert widths == 40 * [20] + 2 * [40] and mapper._trainer._seen[0] > 0
    monkeypatch.setattr("spirula_gpu.trainer.YOUNG_STEPS", 1)   # all are older
    mapper._steps(3, behind=True)
    assert widths[42:] == 3 * [40]


def test_half_size_only_while_frames_come_faster_than_steps():
    mapper = run(SMALL)   # 4 steps a frame
    mapper._last["frame"] = time.monotonic()
    def half(due, worker=object(), **changes):
        mapper._due, mapper._thread = due, worker
        mapper.config = replaced(SMALL, {k.replace("__", "."): v for k, v in changes.items()})
        try:
            return mapper._behind()
        finally:
            mapper._thread = None
    assert half(9) and not half(8), "more than two frames' steps"
    assert not half(900, worker=None), "inline: nothing is behind a clock"
    assert not half(900, train__half_behind=0) and not half(900, train__steps_per_frame=0)
    mapper._last["frame"] -= 10
    assert not half(900), "the stream has ended"


def test_at_max_gaussians_the_map_stays_below_and_says_so():
    mapper = run(replaced(SMALL, {"engine.max_gaussians": 60}))
    status = mapper.status()
    assert 0 < status.gaussians <= 60 and status.state == "running" and status.last_error == ""
    assert "engine.max_gaussians 60" in status.hint
    assert status.frames.used == 6


def test_a_worker_that_fails_says_so_everywhere(monkeypatch):
    mapper = Mapper(SMALL)
    def broken(*_):
        raise NativeError("device", "an illegal memory access was encountered; start it again")
    monkeypatch.setattr(mapper._engine, "insert", broken)
    mapper.start()
    submit(mapper, frame(0))
    wait_for(lambda: mapper.status().state == "error")
    assert "illegal memory access" in mapper.status().last_error
    submit(mapper, frame(1))
    with pytest.raises(RuntimeError, match="has stopped.*illegal memory access"):
        mapper.command("save_map", "nowhere.ply").result(5)
    mapper.stop()
    counts = mapper.ledger.counts()
    assert counts.pending == 0 and counts.dropped == {"error": 2} and mapper.status().state == "error"


def test_the_worker_takes_frames_trains_when_idle_and_stops(tmp_path):
    mapper = Mapper(SMALL)
    mapper.wants = Wants(render=True, render_period_s=0.01)
    mapper.start()
    for i in range(4):
        submit(mapper, frame(i))
    wait_for(lambda: mapper.status().keyframes == 4 and mapper.status().steps > 60)  # 16 were due
    snapshot = mapper.latest.get()
    assert snapshot.rgb.shape == (30, 40, 3) and not snapshot.rgb.flags.writeable
    mapper.command("pause", True).result(10)
    assert mapper.command("save_map", str(tmp_path / "map.ply")).result(10) == mapper.status().gaussians
    submit(mapper, frame(5))
    assert mapper.ledger.counts().dropped == {"paused": 1}
    steps = mapper.status().steps
    time.sleep(0.3)
    assert mapper.status().steps == steps
    mapper.command("reset").result(10)
    assert mapper.latest.get() is None and mapper.status().gaussians == 0 and mapper.status().state == "paused"
    mapper.stop()
    assert mapper.status().state == "stopped" and "spirula-mapper" not in [t.name for t in threading.enumerate()]
    mapper.close()


def test_a_view_may_set_the_camera_alone():
    mapper = run(SMALL, 2)
    mapper.command("view", None, CAMERA.resized(20, 15)).result(1)
    snapshot = mapper._snapshot()
    assert snapshot.rgb.shape == (15, 20, 3) and snapshot.T_world_cam[0, 3] == pytest.approx(0.05)


def test_unknown_commands_and_failing_ones_reach_the_caller(tmp_path):
    mapper = run(SMALL, 1)
    with pytest.raises(ValueError, match="unknown command 'fly'"):
        mapper.command("fly").result(1)
    with pytest.raises(OSError):
        mapper.command("save_map", str(tmp_path / "no" / "such" / "map.ply")).result(1)
    assert mapper.status().state == "running"


def test_every_chunk_is_in_every_snapshot_and_unchanged_ones_are_the_same_objects():
    mapper = run(replaced(SMALL, {"mesh.voxel_m": 0.1}))
    mapper._output.update_mesh(mapper._keyframes)
    first = {c.key: c for c in mapper._snapshot().mesh}
    mapper._output.update_mesh(mapper._keyframes)  # nothing new to fuse
    second = {c.key: c for c in mapper._snapshot().mesh}
    assert first and all(second[k] is first[k] for k in first)


@pytest.mark.parametrize("budget_mb", [8, 9, 10, 12, 14, 40])
def test_a_tight_budget_bounds_the_map_and_never_ends_it(budget_mb):
    camera = CAMERA.resized(160, 120)
    rng = np.random.default_rng(0)
    mapper = Mapper(replaced(SMALL, {"engine.vram_budget_mb": budget_mb, "engine.max_gaussians": 80_000, "engine.sh_degree": 0, "insert.hole_spacing_px": 1.0, "train.steps_per_frame": 6}))
    for i in range(12):
        f = frame(i * 10)
        submit(mapper, replace(f, camera=camera, rgb=rng.integers(0, 256, (120, 160, 3), np.uint8), depth_m=np.full((120, 160), 2, np.float32)))
        mapper.run_due()
        assert mapper.vram().total <= budget_mb << 20
    assert mapper.status().gaussians > 100 and mapper.ledger.counts().used == 12
    assert ("vram_budget_mb" in mapper.status().hint) == (budget_mb < 40)


def test_every_live_parameter_may_take_its_lowest_and_highest_value():
    live = [(name, f.metadata["low"], f.metadata["high"]) for name, _, f in rows() if f.metadata["live"] and f.metadata["low"] is not None]
    assert len(live) > 20
    for name, low, high in live:
        for value in (low, high):
            if name in ("train.steps_per_frame", "insert.hole_spacing_px") and value == high:
                continue  # a matter of time, or of an empty map
            mapper = run(SMALL, 2)
            kind = type(dict((n, v) for n, v, _ in rows())[name])
            mapper.command("configure", {name: kind(value)}).result(60)
            submit(mapper, frame(9))
            mapper.run_due()
            assert mapper.status().state == "running", name


def test_reset_answers_who_waits_for_a_refinement():
    mapper = run(SMALL, 2)
    mapper.start()
    waiting = mapper.command("refine", 1000.0)
    mapper.command("reset").result(10)
    with pytest.raises(RuntimeError, match="reset"):
        waiting.result(1)
    mapper.stop()


def test_a_cancelled_command_harms_nobody():
    mapper = Mapper(SMALL)
    mapper.start()
    mapper.command("pause", True).cancel()
    mapper.command("refine", 0.1).cancel()
    assert mapper.command("pause", False).result(10) is None and mapper.status().state == "waiting"
    mapper.stop()
    with pytest.raises(ValueError, match="empty"):  # without a worker the caller runs it
        mapper.command("save_map", "map.ply").result(1)


def test_keyframes_stay_within_their_memory():
    mapper = Mapper(replaced(SMALL, {"train.keyframes_mb": 16, "train.steps_per_frame": 0, "gate.inbox_frames": 50}))
    camera = CAMERA.resized(800, 600)   # 3.4 MB a frame
    for i in range(8):
        submit(mapper, replace(frame(i), camera=camera, rgb=np.zeros((600, 800, 3), np.uint8), depth_m=np.full((600, 800), 2, np.float32)))
        mapper.run_due()
    assert len(mapper._keyframes) == 4 and mapper._keyframes.bytes <= 16 << 20
    assert mapper._keyframes.newest.frame.stamp_ns == frame(7).stamp_ns


def test_a_mesh_that_cannot_be_made_does_not_stop_the_map(monkeypatch):
    monkeypatch.setattr("spirula_gpu.mesh.TsdfMesher.__init__", lambda self, config: (_ for _ in ()).throw(MeshError("the mesh needs Open3D")))
    mapper = Mapper(SMALL)
    mapper.wants = Wants(mesh=True)
    mapper.start()
    submit(mapper, frame(0))
    wait_for(lambda: "Open3D" in mapper.status().hint and mapper.status().steps > 20)
    assert mapper.status().state == "running"
    mapper.stop()


def test_a_render_beyond_the_budget_is_a_hint():
    mapper = Mapper(replaced(SMALL, {"engine.vram_budget_mb": 20}))
    mapper.wants = Wants(render=True, render_period_s=0.01)
    mapper.start()
    mapper.command("view", None, CAMERA.resized(1600, 1200)).result(5)
    submit(mapper, frame(0))
    wait_for(lambda: "engine.vram_budget_mb" in mapper.status().hint and mapper.status().steps > 20)
    assert mapper.status().state == "running"
    mapper.stop()


def test_an_empty_map_overwrites_nothing_and_says_why_it_is_empty(tmp_path):
    (tmp_path / "map.ply").write_text("good")
    for changes, why in ((dict(depth_m=None), "without depth"), (dict(depth_m=np.full((30, 40), np.nan, np.float32)), "min_depth_m")):
        mapper = Mapper(SMALL)
        submit(mapper, frame(0, **changes))
        mapper.run_due()
        assert why in mapper.status().hint and mapper.status().state == "running"
        with pytest.raises(ValueError, match="map is empty"):
            mapper.command("save_map", str(tmp_path / "map.ply")).result(1)
    assert (tmp_path / "map.ply").read_text() == "good"


def test_what_the_mask_hides_makes_no_gaussian_and_trains_nothing():
    """A black person in the left half of every frame leaves no trace."""
    mask = np.ones((30, 40), np.uint8)
    mask[:, :20] = 0
    maps = []
    for level in (0, 255):
        mapper = Mapper(SMALL)
        for i in range(4):
            rgb = frame(i).rgb.copy()
            rgb[:, :18] = level  # 2 px from the edge: |Laplacian| and SSIM have a window
            submit(mapper, frame(i, rgb=rgb, mask=mask))
            mapper.run_due()
        maps.append(mapper)
    newest = maps[0]._keyframes.newest.frame
    _, _, alpha = maps[0]._output.render(newest.camera, newest.T_cam_world)
    assert len(maps[0]._engine) > 50 and alpha[:, :12].max() < 0.5 < alpha[:, 24:].mean()
    assert maps[0]._keyframes.bytes == 4 * 30 * 40 * (3 + 4 + 1)
    with pytest.raises(ValueError, match="mask is bool .*the camera says uint8"):
        frame(0, mask=mask.astype(bool))


@pytest.mark.parametrize("part, shares", [(None, (0.0, 0.9)), ((0.5, 1.0), (0.5, 0.95))])
def test_the_rates_fall_over_a_refinement_and_are_whole_again_after_it(part, shares):
    mapper = run(SMALL)
    usual, rates = mapper._trainer._hyper(), []
    mapper.train(steps=10, progress=lambda m: rates.append(m._trainer._hyper()), **({"part": part} if part else {}))
    for name in ("lr_mean", "lr_mean_final", "lr_quat", "lr_log_scale", "lr_logit_opacity", "lr_sh0", "lr_sh_rest"):
        got = np.array([getattr(r, name) for r in rates]) / getattr(usual, name)
        np.testing.assert_allclose(got, mapper.config.refine.lr_final ** np.linspace(*shares, 10), rtol=1e-5, err_msg=name)
    assert mapper._trainer._hyper().lr_mean == usual.lr_mean
    mapper.close()


def test_the_rates_fall_while_the_thread_refines_and_stay_until_the_next_frame():
    mapper = run(SMALL)
    mapper.start()
    try:
        done = mapper.command("refine", 1.0)
        wait_for(lambda: mapper._trainer.refined > 0.5)
        done.result(60)
        end = mapper._trainer.steps
        wait_for(lambda: mapper._trainer.steps > end + 10)
        assert mapper._trainer.refined == 1, "idle training goes on at the rates of its end"
        submit(mapper, frame(20))
        wait_for(lambda: mapper._trainer.refined == 0)
    finally:
        mapper.close()


@pytest.mark.parametrize("change, text", [(lambda T: T * np.nan, "finite 4x4"), (lambda T: T * 1.1, "not orthonormal"), (lambda T: np.diag([1, 1, -1, 1.0]), "not orthonormal"),
                                          (lambda T: np.block([[T[:3, :3], np.full((3, 1), 2e5)], [T[3:]]]), "more than 100000 m")])
def test_a_frame_of_an_absurd_pose_is_none(change, text):
    with pytest.raises(ValueError, match=text):
        frame(0, T_world_cam=change(np.eye(4)))


def test_a_keyframe_that_does_not_fit_is_trained_rarely_and_comes_back():
    keyframes, config = Keyframes(0), TrainConfig(newest_probability=0.5)
    for i in range(30):
        keyframes.add(Keyframe(i, frame(i), 0.3), config)
        for _ in range(10):
            list(keyframes)[i].trained(0.1 + 0.001 * i)
    bad = list(keyframes)[-1]
    often = lambda: np.mean([keyframes.choose(config) is bad for _ in range(640)])
    assert often() > 0.4 and keyframes.unfit == 0   # the newest
    for _ in range(30):
        bad.trained(0.5)
    assert often() < 0.05 and keyframes.unfit == 1  # every 32nd choice judges: 0.5 of them came before the first
    for _ in range(30):
        bad.trained(0.1)
    assert often() > 0.4 and keyframes.unfit == 0
    for _ in range(30):
        bad.trained(0.5)
    assert often() < 0.05 and keyframes.unfit == 1
    for k in keyframes:
        k.correct(np.eye(4), np.eye(4))   # a loop has closed: all are to be judged anew
    often()
    assert keyframes.unfit == 0


def test_keyframes_of_wrong_poses_cost_less_than_they_would():
    """Every sixth image at a pose 0.4 m and 15 degrees off; a young one is not judged."""
    def map_of(judged: int) -> Mapper:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(spirula_gpu.keyframes, "JUDGED_LEAST", judged)
            mapper = Mapper(replaced(SMALL, {"train.steps_per_frame": 40, "prune.growth_error": 0.2}))
            for i in range(18):
                f = frame(i, held_out=i % 6 == 2)
                wrong = f.T_world_cam.copy()
                wrong[:3, :3] = cv2.Rodrigues(np.array([0.0, 0.26, 0.0]))[0] @ wrong[:3, :3]
                wrong[:3, 3] += 0.4
                submit(mapper, replace(f, T_world_cam=wrong) if i % 6 == 5 else f)
                mapper.run_due()
            mapper.train(steps=200)
        return mapper
    with_it, without = map_of(8), map_of(10**6)
    psnr = lambda m: np.mean([h.psnr for h in m.evaluate()])
    assert with_it.status().keyframes_unfit == 3 and without.status().keyframes_unfit == 0
    assert psnr(with_it) > psnr(without) + 0.3, (psnr(with_it), psnr(without))
    with_it.close(), without.close()


def test_the_path_is_shown_when_it_has_changed_and_is_empty_after_a_reset():
    mapper = run(SMALL)
    assert mapper.path.get() is None
    mapper.wants = Wants(path=True)
    mapper.tick()
    path = mapper.path.get()
    assert path.stamps_ns.tolist() == sorted(k.frame.stamp_ns for k in mapper._keyframes)
    np.testing.assert_array_equal(path.T_world_cam, [k.frame.T_world_cam for k in mapper._keyframes])
    mapper._last["path"] = 0.0
    mapper.tick()
    assert mapper.path.get() is path
    submit(mapper, frame(7))
    mapper._last["path"] = 0.0
    mapper.run_due()
    assert len(mapper.path.get().stamps_ns) == len(path.stamps_ns) + 1
    mapper.command("reset").result()
    assert len(mapper.path.get().stamps_ns) == 0


def test_what_is_refused_by_its_pose_is_as_if_it_had_been_submitted(monkeypatch):
    """Same counts, track and keyframes; and no image is looked at of a frame that shows nothing new."""
    looked = []
    real = spirula_gpu.gate.sharpness_of
    monkeypatch.setattr("spirula_gpu.gate.sharpness_of", lambda rgb: looked.append(1) or real(rgb))
    frames = [frame(i, T_world_cam=frame(i // 2).T_world_cam) for i in range(8)]   # each place twice
    asked, plain = Mapper(SMALL), Mapper(SMALL)
    for f in frames:
        asked.ledger.arrived()
        if not asked.refuses(f.stamp_ns, f.T_world_cam):
            asked.submit(f)
        submit(plain, f)
    assert asked.ledger.counts() == plain.ledger.counts() and plain.ledger.counts().dropped == {"not_keyframe": 4}
    assert asked._gate.state().moments.stamps.tolist() == plain._gate.state().moments.stamps.tolist() == [f.stamp_ns for f in frames[::2]]
    np.testing.assert_array_equal(asked._track.stamps, plain._track.stamps)
    assert len(asked._track) == 8 and len(looked) == 8
    asked.run_due()
    asked.command("pause", True).result()
    assert asked.refuses(1, np.eye(4) * 9) and asked.ledger.counts().dropped["paused"] == 1
    asked.close(), plain.close()
