"""Corrected paths: rotation of the colour, motions of a track, Gaussians that move with their keyframe, the mapper that closes a loop."""
import numpy as np
import pytest

import oracle
import scenes
from conftest import BACKENDS, importorskip
from spirula_gpu import correct
from spirula_gpu.camera import Camera
from spirula_gpu.correct import PathError, Scale, Track, between, interpolated, move_gaussians, motions, sh_rotations
from spirula_gpu.config import replaced
from spirula_gpu.mapper import Mapper
from spirula_gpu.native import Engine, Hyper, view
from test_checkpoint import everything, save
from test_mapper import SMALL, frame, submit

SCALE = Scale(px_per_m=100.0, px_per_rad=200.0)
MS = 1_000_000


def rotations(n: int, seed: int = 0) -> np.ndarray:
    return correct.matrices_of(np.random.default_rng(seed).normal(size=(n, 4)))


def transforms(n: int, seed: int = 0, size: float = 1.0) -> np.ndarray:
    T = np.tile(np.eye(4), (n, 1, 1))
    T[:, :3, :3], T[:, :3, 3] = rotations(n, seed), np.random.default_rng(seed + 1).normal(size=(n, 3)) * size
    return T


def walk(n: int, per_frame: float = 0.05) -> np.ndarray:
    """[n,4,4]: a camera that moves 3 to 5 cm and turns 2 degrees a frame, in changing directions; or another share of that."""
    s = np.arange(n) * per_frame
    q = np.stack([np.ones(n), 0.3 * np.sin(s), 0.4 * np.sin(1.3 * s + 1), 0.2 * np.cos(s)], 1)
    T = np.tile(np.eye(4), (n, 1, 1))
    T[:, :3, :3], T[:, :3, 3] = correct.matrices_of(q), np.stack([np.sin(s), 0.5 * np.cos(0.7 * s), 0.4 * s], 1)
    return T


def drifted(T: np.ndarray, first: int, last: int, by=(0.1, 0, 0)) -> np.ndarray:
    """Off by nothing up to frame `first`, by all of it from `last` on."""
    out = T.copy()
    out[:, :3, 3] += np.clip((np.arange(len(T)) - first) / (last - first), 0, 1)[:, None] * np.array(by)
    return out


# ---- rotations --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("degree", [1, 2, 3])
def test_rotated_coefficients_give_the_colour_of_the_rotated_direction(degree):
    rng = np.random.default_rng(degree)
    d = rng.normal(size=(50, 3))
    d /= np.linalg.norm(d, axis=1, keepdims=True)
    R, c, ks = rotations(20, degree), rng.normal(size=2 * degree + 1), slice(degree**2, (degree + 1)**2)
    for R_i, M in zip(R, sh_rotations(degree, R)):
        np.testing.assert_allclose(oracle.sh_basis(d @ R_i.T)[:, ks] @ (M @ c), oracle.sh_basis(d)[:, ks] @ c, atol=1e-12)
        np.testing.assert_allclose(M @ M.T, np.eye(len(M)), atol=1e-12)


def test_quaternions_and_interpolation():
    R = np.concatenate([rotations(200), np.array([np.diag(s) for s in ((1, -1, -1), (-1, 1, -1), (-1, -1, 1), (1, 1, 1))], float)])
    np.testing.assert_allclose(correct.matrices_of(correct.quats_of(R)), R, atol=1e-12)
    p, q = (correct.quats_of(rotations(30, seed)) for seed in (1, 2))
    np.testing.assert_allclose(correct.matrices_of(correct.product(p, q)), correct.matrices_of(p) @ correct.matrices_of(q), atol=1e-12)
    A, B = transforms(40, 3), transforms(40, 5)
    np.testing.assert_allclose(between(A, B, np.zeros(40)), A, atol=1e-12)
    np.testing.assert_allclose(between(A, B, np.ones(40)), B, atol=1e-12)
    half = between(A, B, np.full(40, 0.5))
    np.testing.assert_allclose(half[:, :3, :3] @ A[:, :3, :3].swapaxes(1, 2), B[:, :3, :3] @ half[:, :3, :3].swapaxes(1, 2), atol=1e-9)


# ---- the map ------------------------------------------------------------------------------------------------------------

def filled(backend: str, precision: str, degree: int = 3, owners=(0, 3, 1), n: int = 700) -> Engine:
    """A map whose Gaussians have owners, and moments from two steps."""
    engine = Engine(backend, sh_degree=degree, max_gaussians=10_000, precision=precision, threads=1)
    for owner in owners:
        g = scenes.gaussians(n, degree, seed=owner)
        engine.append(g.means, g.quats, np.log(g.scales), np.log(g.opacities / (1 - g.opacities)), g.sh, owner=owner)
    v = view(Camera(64, 48, 50, 50, 32, 24), np.eye(4), degree)
    for _ in range(2):
        engine.train_step(v, np.full((48, 64, 3), 90, np.uint8), Hyper(lr_mean=1e-4, lr_mean_final=1e-4, lr_quat=1e-3, lr_log_scale=1e-3, lr_logit_opacity=1e-3, lr_sh0=1e-3,
                                                                         lr_sh_rest=1e-3, beta1=0.9, beta2=0.99, eps=1e-15, ssim_weight=0.2))
    return engine


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("precision", ["full", "compact"])
@pytest.mark.parametrize("degree", [0, 3])
def test_a_map_that_moves_looks_the_same_from_a_camera_that_moves_with_it(backend, precision, degree):
    D = transforms(4, 7)
    D[:] = D[0]
    T = scenes.look(0.2, 0.1, (0.1, 0, -0.5))
    camera = Camera(96, 72, 80, 80, 48, 36)
    with filled(backend, precision, degree) as engine:
        before = engine.render(view(camera, T, degree))
        assert move_gaussians(engine, D, np.ones(4, bool)) == len(engine)
        after = engine.render(view(camera, T @ np.linalg.inv(D[0]), degree))
    assert before[1].mean() > 0.5
    tolerance = 1e-4 if precision == "full" else 2e-3   # its codes have 16 bits a block of 256
    for a, b in zip(before, after):
        assert np.abs(a - b).mean() < tolerance and np.percentile(np.abs(a - b), 99) < 10 * tolerance


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("precision", ["full", "compact"])
def test_only_the_moved_owners_gaussians_move_and_forget(backend, precision, monkeypatch):
    monkeypatch.setattr(correct, "PIECE", 512)
    rows = ["map.mean", "map.quat", "map.log_scale", "map.logit_opacity", "map.sh", "adam.steps", "map.owner"]
    D = transforms(4, 7)
    with filled(backend, precision) as engine:
        rows += [row for row in engine.saved_rows() if row.startswith(("adam.v.", "adam.m."))]
        before = {row: engine.read(row) for row in rows}
        mine = before["map.owner"] == 3
        assert before["adam.steps"][mine].any() and np.abs(before["adam.m.mean"][mine]).max() > 0
        moved = np.array([False, False, False, True])
        assert move_gaussians(engine, D, moved) == mine.sum() == 700
        after = {row: engine.read(row) for row in rows}
        assert move_gaussians(engine, D, np.zeros(4, bool)) == move_gaussians(engine, D[:1], np.zeros(1, bool)) == 0
    near = dict(rtol=0, atol=1e-5 if precision == "full" else 2e-3)
    R, t = D[3, :3, :3], D[3, :3, 3]
    np.testing.assert_allclose(after["map.mean"][mine], before["map.mean"][mine] @ R.T + t, atol=1e-5)
    np.testing.assert_allclose(correct.matrices_of(after["map.quat"][mine].astype(float)), R @ correct.matrices_of(before["map.quat"][mine].astype(float)), **near)
    for row in ("map.log_scale", "map.logit_opacity", "map.owner"):
        assert np.array_equal(after[row], before[row]), row
    for row in rows[5:6] + rows[7:]:
        assert not after[row][mine].any(), row
    for row in rows:
        if precision == "full" or row == "map.mean" or row.startswith("adam"):
            assert np.array_equal(after[row][~mine], before[row][~mine]), row
        else:   # a block's exponent may have grown
            np.testing.assert_allclose(after[row][~mine], before[row][~mine], **near)


# ---- what a path says -------------------------------------------------------------------------------------------------------

def frames(T: np.ndarray, period_ms: int = 133) -> Track:
    return Track(1_000 * MS + np.arange(len(T)) * period_ms * MS, T)


def test_a_track_grows_sorts_and_replaces():
    track, T = Track(), transforms(300)
    order = np.random.default_rng(0).permutation(300)
    for i in order:
        track.add(int(i) * MS, T[i])
    assert len(track) == 300 and np.array_equal(track.stamps, np.arange(300) * MS) and np.array_equal(track.poses, T)
    track.add(7 * MS, T[0])
    assert len(track) == 300 and np.array_equal(track.poses[7], T[0])


@pytest.mark.parametrize("every", [1, 4, 10])
def test_drift_is_taken_back_also_between_the_poses_of_a_sparse_path(every):
    true = walk(200)
    track = frames(drifted(true, 50, 100))
    found = motions(track, track.stamps[::every], true[::every], SCALE)
    corrected = found.D @ track.poses
    error = np.linalg.norm(corrected[:, :3, 3] - true[:, :3, 3], axis=1)
    assert error.max() < 0.004 and found.moved[60:].all() and not found.moved[:50 - every].any()
    found.apply(track)
    assert not motions(track, track.stamps[::every], true[::every], SCALE).moved.any(), "the same path once more is a no-op"


def test_a_turn_is_taken_back_about_the_camera_far_from_the_origin():
    true = walk(60)
    true[:, :3, 3] += (300, -200, 50)
    turn = np.tile(np.eye(4), (60, 1, 1))
    angle = np.radians(np.linspace(0, 5, 60))
    turn[:, 0, 0] = turn[:, 1, 1] = np.cos(angle)
    turn[:, 1, 0], turn[:, 0, 1] = np.sin(angle), -np.sin(angle)
    pivot = true[0, :3, 3]
    given = true.copy()
    given[:, :3, :3] = turn[:, :3, :3] @ true[:, :3, :3]
    given[:, :3, 3] = np.einsum("nij,nj->ni", turn[:, :3, :3], true[:, :3, 3] - pivot) + pivot
    track = frames(given)
    corrected = motions(track, track.stamps[::5], true[::5], SCALE).D @ given
    assert np.linalg.norm(corrected[:, :3, 3] - true[:, :3, 3], axis=1).max() < 0.005


@pytest.mark.parametrize("period_ms, offset_ms", [(100, 17), (20, 3)])
def test_a_path_of_another_sensors_stamps(period_ms, offset_ms):
    """A LiDAR at 10 Hz and odometry at 50 Hz, for frames at 30 Hz."""
    fine = walk(6000, 0.001)   # 1 ms apart; about 1 m/s
    given = drifted(fine, 2000, 3000)
    track = Track(np.arange(0, 6000, 33) * MS, given[::33])
    at = np.arange(offset_ms, 6000, period_ms)
    found = motions(track, at * MS, fine[at], SCALE)
    corrected = found.D @ track.poses
    assert np.linalg.norm(corrected[:, :3, 3] - fine[::33, :3, 3], axis=1).max() < 0.005
    assert not motions(track, at * MS, given[at], SCALE).moved.any(), "the odometry itself is a no-op"


def test_frames_after_the_path_move_until_the_poses_have_jumped():
    true = walk(100)
    given = drifted(true, 40, 60)
    given[90:] = true[90:]   # the SLAM has closed the loop: what comes is in the corrected frame
    track = frames(given)
    for last in (85, 88):
        corrected = motions(track, track.stamps[:last], true[:last], SCALE).D @ given
        assert np.abs(corrected - true).max() < 1e-9
    given[90:] = drifted(true, 40, 60)[90:]
    track = frames(given)
    corrected = motions(track, track.stamps[:85], true[:85], SCALE).D @ given
    assert np.abs(corrected - true).max() < 1e-9, "no jump: all of them"


def test_paths_that_cannot_be_meant_are_refused():
    true = walk(100)
    track = frames(drifted(true, 40, 60))
    E = np.eye(4)
    E[:3, 3] = 0.1, -0.2, 0.05
    for stamps, poses, why in ((track.stamps + 10**12, true, "none of the path's 100 poses, stamps 1001.000 to 1014.167, .* same clock"), (np.full(100, 5), true, "100 of 100 poses of the path share a stamp"),
                               (track.stamps, track.poses @ E, "is 0.229 m from that of its frame.*T_body_camera"), (track.stamps[:0], true[:0], "a path of 0 poses")):
        with pytest.raises(PathError, match=why):
            motions(track, stamps, poses, SCALE)


def test_interpolation_stops_at_gaps_and_ends():
    T, stamps = walk(4), np.array([0, 100, 150, 400]) * MS
    at, known = interpolated(stamps, T, np.array([-1, 0, 50, 100, 200, 400, 401]) * MS)
    assert known.tolist() == [False, True, True, True, False, True, False]
    np.testing.assert_allclose(at[2], between(T[:1], T[1:2], np.array([0.5]))[0])


# ---- the mapper ---------------------------------------------------------------------------------------------------------------

SHIFT = np.array([0.1, 0, 0.05])


def pose(i: int, off: float = 0.0) -> np.ndarray:
    T = frame(i).T_world_cam.copy()
    T[:3, 3] += off * SHIFT
    return T


def drifting(i: int) -> float:
    """Share of SHIFT by which frame i is off: from frame 4 on, all of it from 8 on."""
    return float(np.clip((i - 4) / 4, 0, 1))


def mapped(off=drifting, n: int = 14, **changes) -> Mapper:
    mapper = Mapper(replaced(SMALL, {"train.steps_per_frame": 10, "refine.exposure": False, **{k.replace("__", "."): v for k, v in changes.items()}}))
    for i in range(n):
        submit(mapper, frame(i, T_world_cam=pose(i, off(i)), held_out=i % 4 == 3))
        mapper.run_due()
    return mapper


def close(mapper: Mapper, n: int = 14, every: int = 1, off=lambda i: 0.0):
    at = range(0, n, every)
    return mapper.command("correct", np.array([frame(i).stamp_ns for i in at]), np.array([pose(i, off(i)) for i in at])).result()


def psnr(mapper: Mapper) -> float:
    return float(np.mean([h.psnr for h in mapper.evaluate()]))


def test_a_closed_loop_moves_everything_that_has_a_pose_and_the_map_recovers():
    never, mapper, left = mapped(lambda i: 0.0), mapped(), mapped()
    for m in (never, mapper, left):
        m.train(steps=100)
    owners = {k.id: k for k in mapper._keyframes}
    means, owner = mapper._engine.read("map.mean"), mapper._engine.read("map.owner")
    done = close(mapper)
    assert done.frames == 14 - 5 and done.keyframes == sum(k.frame.stamp_ns > frame(4).stamp_ns for k in owners.values()) == 7
    assert done.gaussians == sum(owners[o].frame.stamp_ns > frame(4).stamp_ns for o in owner) and mapper.status().corrections == 1
    for i, k in [(round((k.frame.stamp_ns - frame(0).stamp_ns) / 1e8), k) for k in owners.values()]:
        np.testing.assert_allclose(k.frame.T_world_cam, pose(i), atol=1e-12)
        np.testing.assert_allclose(k.T_given, pose(i), atol=1e-12)
        assert np.isinf(k.loss) == (i > 4)
        np.testing.assert_allclose(mapper._engine.read("map.mean")[owner == k.id], means[owner == k.id] - drifting(i) * SHIFT, atol=1e-6)
    for f in mapper._held_out:
        np.testing.assert_allclose(f.T_world_cam, pose(round((f.stamp_ns - frame(0).stamp_ns) / 1e8)), atol=1e-12)
    np.testing.assert_allclose(mapper._gate.state().poses, [k.frame.T_world_cam for k in mapper._keyframes], atol=1e-12)
    for m in (never, mapper, left):
        m.train(steps=300)
    best, closed, worst = psnr(never), psnr(mapper), psnr(left)
    assert best - worst > 5 and best - closed < 0.2 * (best - worst), (best, closed, worst)


def test_a_correction_that_fails_on_the_way_changes_nothing(monkeypatch):
    monkeypatch.setattr(correct, "PIECE", 32)
    mapper, calls = mapped(), []
    submit(mapper, frame(14, T_world_cam=pose(14, 1.0)))   # waits
    rows = ("map.mean", "map.quat", "map.sh", "map.owner")
    state = lambda: [mapper._track.poses.copy(), mapper._gate.state().poses, [f.T_world_cam for f in mapper._inbox.frames() + mapper._held_out], [k.T_given for k in mapper._keyframes]]
    before, map_before = state(), [mapper._engine.read(row) for row in rows]

    def scarce(*args):
        calls.append(1)
        if len(calls) == 3:   # two pieces have moved
            raise MemoryError("none left")
        return correct_product(*args)
    correct_product = correct.product
    monkeypatch.setattr(correct, "product", scarce)
    with pytest.raises(MemoryError, match="none left"):
        close(mapper)
    assert len(calls) == 5 and mapper.status().corrections == 0
    for a, b in zip(before, state()):
        assert np.array_equal(a, b)
    for a, b in zip(map_before, [mapper._engine.read(row) for row in rows]):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)
    done = close(mapper, 15)
    assert done.gaussians > 50 and done.frames == 15 - 5 and mapper.status().corrections == 1


def test_frames_that_come_while_the_gaussians_move_stay_where_they_are_given(monkeypatch):
    mapper = mapped()
    move = mapper._trainer.correct

    def meanwhile(*args, **kwargs):
        submit(mapper, frame(14, T_world_cam=pose(14)))
        return move(*args, **kwargs)
    monkeypatch.setattr(mapper._trainer, "correct", meanwhile)
    assert close(mapper).frames == 14 - 5
    np.testing.assert_allclose(mapper._track.poses, [pose(i) for i in range(15)], atol=1e-12)
    np.testing.assert_allclose(mapper._inbox.frames()[0].T_world_cam, pose(14), atol=1e-12)


def test_frames_that_wait_are_corrected_too():
    mapper = Mapper(replaced(SMALL, {"gate.inbox_frames": 20}))
    for i in range(8):
        submit(mapper, frame(i, T_world_cam=pose(i, 1.0)))
    mapper.tick()
    assert close(mapper, 8).frames == 8
    mapper.run_due()
    assert len(mapper._keyframes) == 8
    for i, k in enumerate(mapper._keyframes):
        np.testing.assert_allclose(k.T_given, pose(i), atol=1e-12)


@pytest.mark.parametrize("every", [1, 3])
def test_gaussians_whose_keyframe_has_gone_move_as_it_would(every):
    """A path of every third frame: the motion of the others lies between."""
    mapper = mapped(train__max_keyframes=3)
    stamps = {id: stamp for id, (_, stamp, _) in enumerate(mapper._owners)}
    assert len(mapper._keyframes) == 3 and len(stamps) > 8
    means, owner = mapper._engine.read("map.mean"), mapper._engine.read("map.owner")
    gone = np.setdiff1d(owner, [k.id for k in mapper._keyframes])
    close(mapper, 14, every)
    after, at, tested = mapper._engine.read("map.mean"), range(0, 14, every), 0
    for o in gone:
        i = round((stamps[o] - frame(0).stamp_ns) / 1e8)
        expected = np.interp(i, at, [drifting(k) for k in at])
        expected *= expected * np.linalg.norm(SHIFT) * 36 / 2 > correct.MOVED_PX   # 36 px of focal length, 2 m away
        np.testing.assert_allclose(after[owner == o], means[owner == o] - expected * SHIFT, atol=1e-6)
        tested += 0 < drifting(i)
    assert tested >= 3


def test_odometry_changes_nothing_and_a_path_that_is_not_used_says_why():
    mapper, untouched = mapped(), mapped()
    assert close(mapper, off=drifting) == close(mapper, every=5, off=drifting) == (0, 0, 0) and mapper.status().corrections == 0
    with pytest.raises(PathError, match="same clock"):
        mapper.command("correct", np.arange(5), np.array([pose(i) for i in range(5)])).result()
    assert "the corrected path was not used: none of the path's 5 poses" in mapper.status().hint
    close(mapper, off=drifting)
    assert "path" not in mapper.status().hint
    assert everything(mapper) == everything(untouched) and Mapper(SMALL).command("correct", np.arange(5), np.tile(np.eye(4), (5, 1, 1))).result() == (0, 0, 0)


@pytest.mark.parametrize("precision", ["full", "compact"])
def test_a_corrected_map_resumes_bit_for_bit_and_can_be_corrected_again(precision):
    def second(m):
        close(m, 14, 2, lambda i: 0.5 * drifting(i))
        m.train(steps=30)
        return everything(m), [k.T_given.tobytes() for k in m._keyframes], m._track.poses.tobytes(), m.status().corrections

    mapper = mapped(engine__precision=precision, train__max_keyframes=4)
    close(mapper)
    mapper.train(steps=20)
    resumed = Mapper(mapper.config)
    resumed.resume(save(mapper))
    assert second(resumed) == second(mapper) and mapper.status().corrections == 2


def test_the_live_mesh_is_fused_again():
    importorskip("open3d", "pip install open3d-cpu")
    mapper = mapped(mesh__voxel_m=0.1, mesh__chunk_m=0.5)
    for _ in range(3):
        mapper._output.update_mesh(mapper._keyframes)
    before = {c.key: c for c in mapper._output.mesh()}
    far = lambda i: 1.0 + 30 * drifting(i)   # 3 m to the side
    close(mapper, off=far)
    mapper._output.update_mesh(mapper._keyframes)
    after = {c.key: c for c in mapper._output.mesh()}
    assert any(len(c.vertices) for c in before.values()) and max(c.vertices[:, 0].max() for c in after.values() if len(c.vertices)) > 3
    assert [key for key in before if len(before[key].vertices) and not len(after[key].vertices)], "chunks that are gone are said to be empty"


def test_a_running_mapper_is_corrected_by_its_own_thread():
    mapper = mapped()
    mapper.start()
    try:
        assert close(mapper).keyframes == 7
    finally:
        mapper.stop()
    assert not mapper.status().last_error
