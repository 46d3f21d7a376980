"""Depth from several views: the native sweep on a wall with a box whose depth is known, agreement, alignment, which keyframes are swept when, and a map from images and poses alone."""
import os
import subprocess
import sys
import time
from dataclasses import replace
from importlib.util import find_spec

import cv2
import numpy as np
import pytest

from conftest import BACKENDS
from spirula_gpu.bundle import adjusted
from spirula_gpu.camera import Camera, Frame
from spirula_gpu.config import Config, TrainConfig, replaced
from spirula_gpu.keyframes import Keyframe, Keyframes
from spirula_gpu.mapper import Mapper
from spirula_gpu.multiview import MultiView, Swept, scores
from spirula_gpu.native import Engine, NativeError, SweepParams
from test_mapper import feed

CAMERA = Camera(160, 120, 130.0, 130.0, 80.0, 60.0)
TEXTURE = cv2.normalize(cv2.GaussianBlur(np.random.default_rng(0).random((2000, 2000)).astype(np.float32), (0, 0), 3), None, 0, 255, cv2.NORM_MINMAX)
AROUND = ((0.15, 0, -0.05), (-0.15, 0, 0.05), (0.05, 0.12, 0), (-0.1, -0.1, 0))  # x, y, turned by


def pose(x=0.0, y=0.0, yaw=0.0, z=0.0) -> np.ndarray:
    T = np.eye(4)
    T[:3, :3], T[:3, 3] = cv2.Rodrigues(np.array([0.0, yaw, 0.0]))[0], (x, y, z)
    return T


def photo(T, camera=CAMERA, gain=1.0, box=True, blank=False) -> tuple[np.ndarray, np.ndarray]:
    """Gray [H,W] uint8 and depth [H,W] of a textured wall 2 m ahead with a box 0.5 m in front of it; blank: its left half has no texture."""
    u, v = np.meshgrid((np.arange(camera.width) + 0.5 - camera.cx) / camera.fx, (np.arange(camera.height) + 0.5 - camera.cy) / camera.fy)
    rays = np.stack([u, v, np.ones_like(u)], -1) @ T[:3, :3].T
    near, far = (((z - T[2, 3]) / rays[..., 2]) for z in (1.5, 2.0))
    at = T[:3, 3] + near[..., None] * rays
    on_box = box & (np.abs(at[..., 0]) < 0.25) & (np.abs(at[..., 1]) < 0.2)
    s = np.where(on_box, near, far)
    at = (T[:3, 3] + s[..., None] * rays) * 300 + 1000 + np.where(on_box, 300, 0)[..., None]
    gray = cv2.remap(TEXTURE, at[..., 0].astype(np.float32), at[..., 1].astype(np.float32), cv2.INTER_LINEAR)
    if blank:
        gray[at[..., 0] < 1000] = 100
    return np.clip(gray * gain + 0.5, 0, 255).astype(np.uint8), s.astype(np.float32)


def views(gains=(1, 1, 1, 1), camera=CAMERA, **scene):
    return [(photo(pose(*p), camera, gain, **scene)[0], camera.K, np.linalg.inv(pose(*p))) for p, gain in zip(AROUND, gains)]


def params(**changes) -> SweepParams:
    return SweepParams(**dict(min_inv=0.1, max_inv=1.2, n_planes=40, min_ncc=0.6, min_margin=0.03) | changes)


@pytest.fixture(scope="module", params=BACKENDS)
def engine(request):
    with Engine(request.param, max_gaussians=1000, threads=2) as e:
        yield e


@pytest.mark.parametrize("gains", [(1, 1, 1, 1), (1.3, 0.7, 1.2, 0.8)])
def test_depth_is_right_to_a_part_of_a_plane_whatever_the_exposure(engine, gains):
    gray, truth = photo(pose())
    depth, confidence = engine.sweep(gray, CAMERA.K, views(gains), params())
    error = np.abs(depth - truth) / truth
    step = 1.1 / 39 * truth   # of a plane, relative
    assert (depth > 0).mean() > 0.95 and ((confidence > 0) == (depth > 0)).all() and confidence.max() <= 1
    assert np.median(error[depth > 0]) < 0.003 and np.median((error / step)[depth > 0]) < 0.1
    assert (error[depth > 0] < 0.05).mean() > 0.985   # the edges of the box, which half of the views do not see behind, included


def test_views_may_be_of_any_size(engine):
    gray, truth = photo(pose())
    depth, _ = engine.sweep(gray, CAMERA.K, views(camera=CAMERA.resized(200, 90)), params())
    assert (depth > 0).mean() > 0.9 and np.median(np.abs(depth - truth)[depth > 0] / truth[depth > 0]) < 0.005


def test_no_texture_no_depth(engine):
    gray, truth = photo(pose(), blank=True, box=False)
    depth, _ = engine.sweep(gray, CAMERA.K, views(blank=True, box=False), params())
    assert (depth[:, :70] > 0).mean() < 0.01 < 0.95 < (depth[:, 90:] > 0).mean()


def test_what_lies_beyond_the_range_gets_no_depth(engine):
    gray, _ = photo(pose(), box=False)
    depth, _ = engine.sweep(gray, CAMERA.K, views(box=False), params(min_inv=0.6, max_inv=1.2))  # the wall is at 0.5
    assert (depth > 0).mean() < 0.1


def test_the_number_of_threads_changes_nothing():
    gray, _ = photo(pose())
    results = []
    for threads in (1, 2, 5):
        with Engine("cpu", max_gaussians=1000, threads=threads) as e:
            depth, confidence = e.sweep(gray, CAMERA.K, views(), params())
            results.append((depth, confidence, *e.agree(depth, CAMERA.K, [(depth, CAMERA.K, np.eye(4))], 0.02)))
    assert all(np.array_equal(a, b) for r in results[1:] for a, b in zip(results[0], r))


@pytest.mark.parametrize("change, text", [
    (dict(min_inv=1.2), "inverse depths from 1.2 to 1.2"), (dict(n_planes=3), "3 planes: must be 4..1024"), (dict(min_inv=-1), "must rise from >= 0"), (dict(max_inv=np.nan), "must rise")])
def test_bad_parameters_are_refused(engine, change, text):
    gray, _ = photo(pose())
    with pytest.raises(NativeError, match=text) as error:
        engine.sweep(gray, CAMERA.K, views(), params(**change))
    assert error.value.kind == "argument"


def test_bad_views_are_refused(engine):
    gray, truth = photo(pose())
    for bad, text in (([], "0 views: must be 1..16"), (views() * 5, "20 views: must be 1..16"), ([(gray, CAMERA.K * 0, np.eye(4))], "focal lengths 0, 0"),
                      ([(gray, CAMERA.K, np.full((4, 4), np.nan))], "view 0: T_photo_ref is not finite"), ([(gray[:1], CAMERA.K, np.eye(4))], "160x1: must be 2..")):
        with pytest.raises(NativeError, match=text):
            engine.sweep(gray, CAMERA.K, bad, params())
    with pytest.raises(NativeError, match="tolerance 0 > 0"):
        engine.agree(truth, CAMERA.K, [(truth, CAMERA.K, np.eye(4))], 0.0)
    large = Camera(1000, 1000, 800, 800, 500, 500)
    with pytest.raises(NativeError, match="take 858 MiB, more than 768: use a smaller image or fewer planes") as error:
        engine.sweep(np.zeros((1000, 1000), np.uint8), large.K, views(), params(n_planes=300))
    assert error.value.kind == "capacity"


def test_depths_agree_where_both_see_the_same_and_nowhere_else(engine):
    (_, a), (_, b) = photo(pose()), photo(pose(0.3))
    wrong = a.copy()
    wrong[:20] *= 1.1
    mean, count = engine.agree(wrong, CAMERA.K, [(b, CAMERA.K, np.linalg.inv(pose(0.3)))], 0.03)
    assert count[:20].max() == 0 and (mean[count == 0] == 0).all()
    hidden = (a > 1.9) & (np.abs(np.arange(160) - 80)[None] < 40) & (np.arange(160) < 80)[None]   # of the wall, left of the box
    inside = np.zeros_like(hidden)
    inside[22:, 30:] = True
    assert (count[inside & ~hidden] > 0).mean() > 0.97 and np.abs(mean[count > 0] / a[count > 0] - 1).max() < 0.02


def test_alignment_recovers_poses_that_are_off():
    gray, truth = photo(pose())
    rng, given, right = np.random.default_rng(1), [], []
    for p in AROUND:
        T = np.linalg.inv(pose(*p))
        off = np.eye(4)
        off[:3, :3] = cv2.Rodrigues(np.radians(rng.normal(0, 0.5, 3)))[0]
        given.append((photo(pose(*p))[0], CAMERA, off @ T))
        right.append(T)
    T = adjusted(gray, CAMERA, truth * 1.03, given)
    def px(Ts):   # by how much pixels are off in the views, but for what another depth explains: across the baseline
        rays = np.stack([np.linspace(-0.5, 0.5, 9), np.linspace(0.4, -0.4, 9), np.ones(9)], 1) * 2
        off = []
        for a, b in zip(Ts, right):
            p, q = (rays @ x[:3, :3].T + x[:3, 3] for x in (a, b))
            d, along = (p / p[:, 2:] - q / q[:, 2:])[:, :2] * 130, b[:2, 3] / np.linalg.norm(b[:2, 3])
            off.append(np.abs(d @ np.array([-along[1], along[0]])).mean())
        return np.mean(off)
    assert px([t for _, _, t in given]) > 0.5 and px(T) < 0.25 * px([t for _, _, t in given])


def test_what_the_masks_hide_moves_no_pose():
    rng, gray, given, shown = np.random.default_rng(2), photo(pose(), box=False)[0], [], []
    person = cv2.GaussianBlur(rng.random((70, 60)).astype(np.float32), (0, 0), 1.5)
    person = cv2.normalize(person, None, 0, 255, cv2.NORM_MINMAX).astype(np.uint8)

    def with_person(image, x, y):   # it walks: no pose explains where it is
        image, mask = image.copy(), np.ones(image.shape, np.uint8)
        image[y:y + 70, x:x + 60], mask[y:y + 70, x:x + 60] = person, 0
        shown.append(mask)
        return image
    ref = with_person(gray, 50, 25)
    for p in AROUND:
        T, at = np.linalg.inv(pose(*p)), np.array([0.0, 0.0, 2.0])
        u, v = (CAMERA.K @ (T[:3, :3] @ at + T[:3, 3]))[:2] / (T[:3, :3] @ at + T[:3, 3])[2] - (80, 60)
        given.append((with_person(photo(pose(*p), box=False)[0], int(50 + u + 4), int(25 + v - 3)), CAMERA, T))
    depth = np.full(gray.shape, 2.0, np.float32)
    moved = {name: max(np.linalg.norm(a - b) for a, (_, _, b) in zip(adjusted(ref, CAMERA, depth, given, masks), given)) for name, masks in (("all", None), ("shown", shown))}
    assert moved["shown"] < 0.003 and moved["all"] > 3 * moved["shown"], moved


SCARCE = """
import resource, sys
import numpy as np
from spirula_gpu.native import Engine, NativeError, SweepParams
K, eye, used = np.array([[100.0, 0, 50], [0, 100, 50], [0, 0, 1]]), np.eye(4), lambda: int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
image, params, refused = np.zeros((256, 16000), np.uint8), SweepParams(min_inv=0.1, max_inv=1, n_planes=4), 0
with Engine("cpu", max_gaussians=1000, threads=16) as engine:
    for more in range(180, 500, 6):   # MiB: 200 for the volume, then 3 for each thread
        resource.setrlimit(resource.RLIMIT_AS, (used() + (more << 20), -1))
        try:
            engine.sweep(image, K, [(image, K, eye)], params)
        except (NativeError, MemoryError) as e:
            assert isinstance(e, MemoryError) or e.kind == "memory", e
            refused += isinstance(e, NativeError)
            continue
        sys.exit(0 if refused > 3 else "nothing was refused")
sys.exit("it never fitted")
"""


def test_threads_that_get_no_memory_refuse_the_sweep_and_do_not_end_the_program():
    done = subprocess.run(["sh", "-c", 'ulimit -s 512; exec "$0" -c "$1"', sys.executable, SCARCE], capture_output=True, text=True, timeout=120, env={**os.environ, "OPENBLAS_NUM_THREADS": "1"})
    assert done.returncode == 0, (done.returncode, done.stderr)


# ---- keyframes ---------------------------------------------------------------------------------------------------------
def frame(i: int, T=None, **changes) -> Frame:
    """From 4 cm further right each time, without depth."""
    T = pose(0.04 * i, 0.02 * (i % 3)) if T is None else T
    gray = photo(T)[0]
    return replace(Frame(1_000_000_000 + i * 100_000_000, CAMERA, T, np.repeat(gray[..., None], 3, 2)), **changes)


def keyframes(frames) -> tuple[Keyframes, MultiView, list]:
    known, out = Keyframes(0), []
    with Engine("cpu", max_gaussians=1000, threads=2) as engine:
        sweeper = MultiView(engine)
        for i, f in enumerate(frames):
            known.add(Keyframe(i, f, 0.3), TrainConfig())
            sweeper.wait(known.newest)
            while (found := sweeper.step(known)) is not None:
                out += [(k, d, i) for k, d in found]
        while (found := sweeper.step(known, ended=True)) is not None:
            out += [(k, d, len(frames)) for k, d in found]
    return known, sweeper, out


def test_every_keyframe_gets_depth_once_and_it_is_right():
    known, sweeper, out = keyframes([frame(i) for i in range(10)])
    assert sorted(k.id for k, _, _ in out) == list(range(10)) and sweeper.waiting == 0 and sweeper.given_up == 0
    assert min(i for _, _, i in out) < 9   # not only at the end
    for k, depth, _ in out:
        truth = photo(k.frame.T_world_cam)[1]
        error = np.abs(depth - truth)[depth > 0] / truth[depth > 0]
        assert (depth > 0).mean() > 0.5 and np.median(error) < 0.01 and (error < 0.05).mean() > 0.97, k.id


def test_what_the_mask_hides_gets_no_depth_and_bends_none():
    def masked(i):
        near = photo(frame(i).T_world_cam)[1] < 1.9   # the box in front of the wall
        return frame(i, mask=np.where(near, 0, 255).astype(np.uint8))
    _, sweeper, out = keyframes([masked(i) for i in range(10)])
    assert len(out) == 10
    for k, depth, _ in out:
        truth, hidden = photo(k.frame.T_world_cam)[1], k.frame.mask == 0
        assert hidden.sum() > 500 and not depth[hidden].any()
        error = np.abs(depth - truth)[depth > 0] / truth[depth > 0]
        assert (depth[~hidden] > 0).mean() > 0.5 and np.median(error) < 0.01 and (error < 0.05).mean() > 0.97, k.id
    k = Keyframe(0, replace(masked(0), depth_m=photo(pose())[1]), 0.3)   # a depth image that others have to agree with
    sweeper.measured(k)
    assert not sweeper._swept[0][1].depth_m[k.frame.mask == 0].any() and sweeper._swept[0][1].median_m == 2.0


def test_without_motion_nothing_is_guessed_and_the_hint_says_what_is_missing():
    _, sweeper, out = keyframes([frame(i, T=pose(1e-4 * i)) for i in range(5)])
    assert not out and "0.0 px" in sweeper.hint and "2 px are needed: move the camera sideways" in sweeper.hint


def test_neighbours_see_the_same_from_elsewhere():
    poses = [pose(0.2), pose(), pose(2.5), pose(0.2, 0, np.pi), pose(0, 0, 0, 0.3), pose(0.3)]
    score = scores(Keyframe(0, frame(0), 0.3), [Keyframe(i, frame(0, T=T), 0.3) for i, T in enumerate(poses)], 2.0)
    assert score[0] > 0.6 and score[5] > 0.6          # to the side
    assert max(score[1], score[3]) < 1e-3             # from the same place; the other way
    assert score[2] < 0.05 and 0 < score[4] < score[0]   # hardly any overlap; forward: small angles


# ---- the map -------------------------------------------------------------------------------------------------------------
def test_images_and_poses_alone_make_a_map():
    config = replaced(Config(), {"engine.backend": "cpu", "engine.threads": 2, "train.steps_per_frame": 15})
    psnr = {}
    for unit in (1.0, 25.0, None):   # of the poses; None: with depth, in metres
        mapper = Mapper(config)
        for i in range(12):
            f = frame(i, held_out=i == 5)
            T = f.T_world_cam.copy()
            T[:3, 3] *= unit or 1
            mapper.ledger.arrived()
            mapper.submit(replace(f, T_world_cam=T, depth_m=None if unit else photo(f.T_world_cam)[1]))
            mapper.run_due()
        mapper.train(steps=100)
        psnr[unit] = mapper.evaluate()[0].psnr
        assert len(mapper._engine) > 1000 and mapper.status().hint == "" and mapper.ledger.counts().used == 12
        assert mapper._trainer.unit_m == pytest.approx(unit or 1, rel=0.15)
    assert psnr[1.0] > 27 and psnr[1.0] > psnr[None] - 2.5 and psnr[25.0] == pytest.approx(psnr[1.0], abs=1)


def test_a_resumed_map_goes_on_waiting(tmp_path):
    config = replaced(Config(), {"engine.backend": "cpu", "engine.threads": 2, "train.steps_per_frame": 4, "checkpoint.path": str(tmp_path / "map.ckpt")})
    mapper = Mapper(config)
    for i in range(3):
        mapper.ledger.arrived()
        mapper.submit(frame(i, depth_m=photo(frame(i).T_world_cam)[1] if i < 2 else None))
        mapper.run_due()
    assert [k.id for k in mapper._multiview._waiting] == [2]   # 4 cm are too little, but may become more
    mapper.command("save_checkpoint", str(tmp_path / "map.ckpt")).result(1)
    again = Mapper(replaced(config, {"checkpoint.resume": True}))
    assert [k.id for k in again._multiview._waiting] == [2]
    for m in (mapper, again):
        for i in range(4, 9):
            m.ledger.arrived()
            m.submit(frame(i))
            m.run_due()
        m.train(steps=1)
        assert 2 in m._engine.read("map.owner") and m._multiview.waiting == 0 and m._trainer.unit_m == 1


# ---- the end of a stream, pauses, want of memory ---------------------------------------------------------------------------
ALONE = replaced(Config(), {"engine.backend": "cpu", "engine.threads": 2, "train.steps_per_frame": 4, "gate.min_translation_m": 0.0})


def near(i: int) -> Frame:
    """2 cm further right each time: it takes some until there is a first depth."""
    return frame(i, T=pose(0.02 * i))


def no_memory(*_):
    raise NativeError("memory", "out of memory")


def test_without_a_worker_the_clock_decides_nothing(monkeypatch):
    maps = []
    for ended_s in (3.0, -1.0):   # -1: each frame takes longer than that
        monkeypatch.setattr("spirula_gpu.mapper.ENDED_S", ended_s)
        mapper = feed(Mapper(ALONE), *(near(i) for i in range(8)))
        maps.append((mapper._multiview.given_up, mapper._multiview.waiting, mapper._engine.read("map.mean")))
    assert maps[0][:2] == maps[1][:2] and np.array_equal(maps[0][2], maps[1][2])


def test_a_worker_counts_the_silence_from_its_start_or_the_end_of_a_pause(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    mapper = Mapper(ALONE)
    mapper._thread = object()
    assert not mapper._ended()
    now[0] += 4
    assert mapper._ended()
    mapper._inbox.put(frame(0), 10)
    assert not mapper._ended()
    mapper._inbox.drop_all("reset")
    mapper._do_pause(False)
    assert not mapper._ended()
    mapper._thread = None
    mapper.close()


@pytest.mark.parametrize("driver", ["Lossless", "Live"])
def test_the_end_of_a_stream_gives_depth_without_refinement_and_the_stream_may_go_on(driver):
    replay = pytest.importorskip("spirula_ros.replay")
    mapper = Mapper(ALONE)
    drive = getattr(replay, driver)(mapper, replay.StopRequest(None))
    for i in range(6):
        mapper.ledger.arrived()
        drive.take(near(i))
    drive.settle()
    n = mapper.status().gaussians
    assert n > 1000 and mapper._multiview.waiting == 0
    for i in range(6, 9):
        mapper.ledger.arrived()
        drive.take(near(i))
    drive.settle()
    assert mapper.status().gaussians > n and mapper._multiview.waiting == 0 and mapper.status().keyframes == 9
    mapper.close()


def test_while_paused_nothing_is_triangulated():
    mapper = feed(Mapper(ALONE), *(near(i) for i in range(8)))
    before = mapper._multiview.waiting, len(mapper._engine)
    mapper.command("pause", True).result()
    mapper.run_due()
    mapper.tick()
    mapper.train(steps=0)
    mapper.command("drain")
    assert (mapper._multiview.waiting, len(mapper._engine)) == before and before[0] > 0
    mapper.command("pause", False).result()
    mapper.command("drain").result()
    assert mapper._multiview.waiting == 0 and len(mapper._engine) > before[1]


def test_a_first_sweep_that_gets_no_memory_is_made_later(monkeypatch):
    mapper = Mapper(ALONE)
    with monkeypatch.context() as scarce:
        scarce.setattr(mapper._engine, "sweep", no_memory)
        feed(mapper, *(frame(i) for i in range(5)))
        mapper.command("drain").result()
        assert mapper._multiview.waiting == 5 and "out of memory" in mapper.status().hint and not len(mapper._engine)
    feed(mapper, frame(5)).command("drain").result()
    assert mapper._multiview.waiting == 0 and len(mapper._engine) > 1000 and mapper.status().hint == ""


@pytest.mark.parametrize("what", ["sweep", "agree", "insert"])
def test_a_keyframe_that_gets_no_memory_is_given_up_and_the_others_go_on(monkeypatch, what):
    mapper = feed(Mapper(ALONE), *(frame(i) for i in range(6)))
    mapper.command("drain").result()
    n = len(mapper._engine)
    with monkeypatch.context() as scarce:
        scarce.setattr(mapper._engine, what, no_memory)
        feed(mapper, frame(6), frame(7)).command("drain").result()
    assert mapper._multiview.waiting == 0 and mapper._multiview.given_up == (0 if what == "insert" else 2) and len(mapper._engine) <= n
    assert what == "insert" or "2 keyframes got no depth from several views" in mapper.status().hint and "out of memory" in mapper.status().hint
    assert (what == "insert") == bool(mapper._trainer.hint)   # else the map's growth would end with it
    feed(mapper, frame(8), frame(9)).command("drain").result()
    assert {8, 9} & set(mapper._engine.read("map.owner").tolist())


def test_another_error_of_a_sweep_ends_the_worker(monkeypatch):
    mapper = Mapper(ALONE)
    monkeypatch.setattr(mapper._engine, "sweep", lambda *_: (_ for _ in ()).throw(NativeError("device", "the GPU is lost")))
    with pytest.raises(NativeError, match="the GPU is lost"):
        feed(mapper, *(frame(i) for i in range(5)))


# ---- what keyframes without depth need of others ---------------------------------------------------------------------------
def test_nothing_is_looked_for_again_before_something_has_changed(monkeypatch):
    known, sweeper, calls = Keyframes(0), MultiView(None), []
    for i in range(12):
        known.add(Keyframe(i, frame(0, T=pose(10.0 * i)), 0.3), TrainConfig())
        sweeper.wait(known.newest) if i % 2 else sweeper._keep(known.newest, Swept(np.ones((12, 16), np.float32), CAMERA.K, 2.0, {}))
    look = MultiView._neighbours
    monkeypatch.setattr(MultiView, "_neighbours", lambda *a, **k: calls.append(a) or look(*a, **k))
    assert sweeper.step(known) is None and len(calls) == 6
    assert sweeper.step(known) is None and len(calls) == 6
    known.add(Keyframe(12, frame(0, T=pose(120.0)), 0.3), TrainConfig())
    sweeper.wait(known.newest)
    assert sweeper.step(known) is None and len(calls) == 13
    while sweeper.step(known, ended=True) is not None:   # it still is over for all
        pass
    assert sweeper.waiting == 0 and sweeper.given_up == 7 and "7 keyframes got no depth" in sweeper.hint


@pytest.mark.parametrize("unit", [25.0, 0.002])
def test_a_unit_is_measured_above_a_start_map_and_what_is_near_is_drawn_in_it(tmp_path, unit):
    def scaled(i, **changes):
        f = frame(i, **changes)
        T = f.T_world_cam.copy()
        T[:3, 3] *= unit
        return replace(f, T_world_cam=T)
    mapper = feed(Mapper(ALONE), *(scaled(i) for i in range(8)))
    mapper.train(steps=30)
    assert mapper._trainer.unit_m == pytest.approx(unit, rel=0.15)
    assert mapper._output.render(CAMERA, scaled(4).T_cam_world)[2].mean() > 0.7
    if find_spec("open3d"):
        assert mapper._output._new_mesher()._config.voxel_m == pytest.approx(0.03 * mapper._trainer.unit_m)
    mapper.command("save_map", str(tmp_path / "map.ply")).result()
    again = Mapper(replaced(ALONE, {"train.start_map": str(tmp_path / "map.ply")}))
    feed(again, *(scaled(i, T=pose(0.5 + 0.04 * i)) for i in range(8)))
    again.command("drain").result()
    assert again._trainer.unit_m == pytest.approx(unit, rel=0.2)


def test_a_map_that_began_in_metres_stays_there():
    mapper = feed(Mapper(ALONE), frame(0, depth_m=photo(pose())[1]), *(frame(i) for i in range(1, 8)))
    mapper.command("drain").result()
    assert mapper._trainer.unit_m == 1 and mapper._multiview.waiting == 0


def test_keyframes_that_waited_are_compared_with_the_map_again_before_they_are_inserted(monkeypatch):
    mapper, calls = Mapper(ALONE), []
    for name in ("refine", "insert"):
        monkeypatch.setattr(mapper._trainer, name, lambda k, *a, do=getattr(mapper._trainer, name), name=name: calls.append((name, k.id, k.log_gain.mean())) or do(k, *a))
    feed(mapper, *(replace(frame(i), rgb=(frame(i).rgb * 0.9 ** i).astype(np.uint8)) for i in range(8))).command("drain").result()
    inserted = [(i, id) for i, (name, id, _) in enumerate(calls) if name == "insert"]
    assert len(inserted) == 8 and all(calls[i - 1][:2] == ("refine", id) for i, id in inserted)
    at_arrival, used = ([next(c[2] for c in calls if c[:2] == (name, id)) for id in range(8)] for name in ("refine", "insert"))
    assert at_arrival[:2] == [0, 0] and used[7] < used[4] - 0.1 < used[2] - 0.1   # the map was empty; they are darker and darker


def test_a_corrected_path_moves_keyframes_that_are_kept_for_their_depth_alone():
    mapper = feed(Mapper(replaced(ALONE, {"train.max_keyframes": 4, "train.steps_per_frame": 0})), *(frame(i, depth_m=photo(frame(i).T_world_cam)[1]) for i in range(10)))
    kept = {k.id for k in mapper._keyframes}
    before = {k.id: k.frame.T_world_cam for k, _ in mapper._multiview._swept.values()}
    D = pose(0.5, yaw=0.1)
    corrected = mapper.command("correct", mapper._track.stamps.copy(), D @ mapper._track.poses).result()
    assert len(before) == 10 and len(kept) == 4 == corrected.keyframes
    for k, _ in mapper._multiview._swept.values():
        assert np.allclose(k.frame.T_world_cam, D @ before[k.id]), k.id


def test_a_keyframe_that_was_given_up_does_not_wait_again_in_a_resumed_map(tmp_path):
    config = replaced(ALONE, {"checkpoint.path": str(tmp_path / "map.ckpt")})
    mapper = feed(Mapper(config), *(frame(i) for i in range(5)), frame(5, T=pose(2.5)))
    mapper.command("drain").result()
    feed(mapper, frame(6, T=pose(-2.5)))
    assert mapper._multiview.given_up == 1 and [k.id for k in mapper._multiview._waiting] == [6]
    mapper.command("save_checkpoint", config.checkpoint.path).result()
    again = Mapper(replaced(config, {"checkpoint.resume": True}))
    assert again._multiview.given_up == 1 and [k.id for k in again._multiview._waiting] == [6]
    again.command("drain").result()
    feed(again, frame(7, T=pose(0, 2.5))).command("drain").result()
