"""Corrected paths: rotation of the colour, motions of a track, Gaussians that move with their keyframe, the mapper that closes a loop."""
import numpy as np
import pytest

import oracle
import scenes
from conftest import BACKENDS
from spirula_gpu import correct
from spirula_gpu.camera import Camera
from spirula_gpu.correct import PathError, Scale, Track, between, interpolated, move_gaussians, motions, sh_rotations
from spirula_gpu.native import PARAMETERS, Engine, view

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
    from spirula_gpu.native import Hyper
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
    rows = ["map.mean", "map.quat", "map.log_scale", "map.logit_opacity", "map.sh", "adam.steps", "map.owner"] + [f"adam.{m}.{name}" for m in "vm" for name in PARAMETERS]
    D = transforms(4, 7)
    with filled(backend, precision) as engine:
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
    track.correct(found)
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
