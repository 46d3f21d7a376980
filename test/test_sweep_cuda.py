"""spl_sweep and spl_agree on the CUDA backend against the CPU's. Sums are integers on both; levels of the warped views and costs may fall on either
side of a rounding, so that a few pixels differ by a part of a plane."""
import numpy as np
import pytest

from conftest import skip_without_cuda
from spirula_gpu.camera import Camera
from spirula_gpu.native import Engine, Hyper, NativeError, view
from test_sweep import CAMERA, params, photo, pose, views

skip_without_cuda(module=True)
MiB = 1 << 20


@pytest.fixture(scope="module")
def engines():
    with Engine("cpu", max_gaussians=1000) as cpu, Engine("cuda", max_gaussians=1000) as cuda:
        yield cpu, cuda


def scene(width: int, height: int, n_views: int, kind: str = "", seed: int = 5):
    """gray, K, views, poses of the wall and its box from random places around; kind: blank, noise, unseen, sizes."""
    rng, camera = np.random.default_rng(seed), Camera(width, height, 0.8 * width, 0.8 * width, 0.5 * width + 0.1, 0.5 * height - 0.2)
    other = camera.resized(71, 33) if kind == "sizes" else camera
    poses = [pose(5.0 * i, 0, 3.1) if kind == "unseen" else pose(*(rng.uniform(-0.2, 0.2, 3) * (1, 1, 0.4))) for i in range(n_views)]
    def look(T, camera, gain=1.0):
        gray = photo(T, camera, gain, blank=kind == "blank")[0]
        return rng.integers(0, 256, gray.shape).astype(np.uint8) if kind == "noise" else gray
    return look(pose(), camera), camera.K, [(look(T, other, rng.uniform(0.7, 1.3)), other.K, np.linalg.inv(T)) for T in poses]


def assert_same(cpu, cuda, p, f: float, share: float = 1.0) -> None:
    """The same pixels known but for 0.5 %; of those the same plane in 99 %, where a part of it differs by less than 0.05 in 97 %; confidence to 0.02.
    share: times so many may differ, and confidence by so much. Planes that are less than half a pixel of disparity
    apart (f: focal length; the views are 0.2 m away) count as one: their costs are the same up to rounding."""
    (a, ca), (b, cb) = cpu, cuda
    few = max(8, 0.005 * share * a.size)
    assert np.isfinite(b).all() and np.isfinite(cb).all() and not cb[b == 0].any() and ((a > 0) != (b > 0)).sum() <= few
    both = (a > 0) & (b > 0)
    off = np.abs(1 / a[both] - 1 / b[both]) * min((p.n_planes - 1) / (p.max_inv - p.min_inv), 2 * 0.2 * f)
    assert (off > 0.55).sum() <= max(8, 0.01 * share * off.size) and (off > 0.05).sum() <= max(8, 0.03 * share * off.size), np.sort(off)[-20:]
    assert (np.abs(ca - cb)[both] > 0.02 * share).sum() <= few


@pytest.mark.parametrize("width, height, n_views, planes, kind", [
    (640, 480, 8, 96, ""), (640, 480, 4, 160, ""), (160, 120, 4, 40, ""), (37, 29, 4, 16, ""), (37, 29, 1, 4, ""), (37, 29, 16, 40, ""), (61, 45, 9, 129, ""),
    (28, 16, 3, 31, ""), (29, 17, 5, 33, ""), (2, 2, 2, 5, ""), (2, 40, 2, 5, ""), (40, 2, 8, 65, ""), (1001, 67, 7, 128, ""), (133, 120, 8, 256, ""), (133, 120, 8, 257, ""),
    (133, 120, 6, 513, ""), (133, 120, 15, 1024, ""), (160, 120, 8, 96, "blank"), (160, 120, 4, 64, "noise"), (160, 120, 4, 64, "unseen"), (160, 120, 6, 48, "sizes")])
@pytest.mark.parametrize("strict", [True, False])   # False: every depth within the range, where planes tie too
def test_depth_is_the_cpus(engines, width, height, n_views, planes, kind, strict):
    gray, K, others = scene(width, height, n_views, kind)
    p = params(n_planes=planes) if strict else params(n_planes=planes, min_ncc=0.0, min_margin=0.0)
    cpu, cuda = (e.sweep(gray, K, others, p) for e in engines)
    assert_same(cpu, cuda, p, K[0, 0], 1 if strict else 3)
    if not strict and kind == "" and min(width, height) > 20 and planes > 4:
        assert (cpu[0] > 0).mean() > 0.3   # it was a test
    assert kind != "unseen" or not cuda[0].any()
    again = engines[1].sweep(gray, K, others, p)
    assert np.array_equal(cuda[0], again[0]) and np.array_equal(cuda[1], again[1])


@pytest.mark.parametrize("width, height, n_views", [(640, 480, 6), (37, 29, 1), (61, 45, 16)])
def test_agreement_is_the_cpus(engines, width, height, n_views):
    camera, rng = Camera(width, height, 0.8 * width, 0.8 * width, 0.5 * width, 0.5 * height), np.random.default_rng(1)
    poses = [pose(*(rng.uniform(-0.2, 0.2, 3) * (1, 1, 0.4))) for _ in range(n_views)]
    def depth(T):
        d = photo(T, camera)[1] * rng.uniform(0.97, 1.03, (height, width)).astype(np.float32)
        d[rng.random(d.shape) < 0.1] = 0
        return d
    own, others = depth(pose()), [(depth(T), camera.K, np.linalg.inv(T)) for T in poses]
    (a, na), (b, nb) = (e.agree(own, camera.K, others, 0.02) for e in engines)
    assert (na != nb).sum() <= max(1, 1e-3 * na.size) and (na > 0).mean() > 0.2
    np.testing.assert_allclose(b[na == nb], a[na == nb], rtol=1e-5)


def held(engine: Engine) -> int:
    *rows, arena = engine.rows()
    return sum(r.capacity_bytes for r in rows if not r.aliased) + arena.capacity_bytes


def test_a_budget_is_obeyed_and_the_memory_given_back():
    gray, _ = photo(pose())
    large = np.ones((480, 640), np.float32)
    with Engine("cuda", max_gaussians=1000, budget_bytes=2 * MiB) as e:
        before = held(e)
        for text, call in ((r"a sweep of 160x120 pixels, 40 planes and 4 views needs 3 MiB of scratch beside \d+ MiB of map > budget 2 MiB; raise engine.vram_budget_mb", lambda: e.sweep(gray, CAMERA.K, views(), params())),
                           (r"comparing the depth of 640x480 pixels with 1 views needs 4 MiB of scratch", lambda: e.agree(large, CAMERA.K, [(large, CAMERA.K, np.eye(4))], 0.02))):
            with pytest.raises(NativeError, match=text) as error:
                call()
            assert error.value.kind == "capacity" and held(e) == before
    with Engine("cuda", max_gaussians=1000, budget_bytes=4 * MiB) as e:   # it fits, but takes more than half
        assert (e.sweep(gray, CAMERA.K, views(), params())[0] > 0).mean() > 0.9 and held(e) == before
    with Engine("cuda", sh_degree=0, max_gaussians=1000, budget_bytes=64 * MiB) as e:
        e.sweep(gray, CAMERA.K, views(), params())
        assert e.rows()[-1].capacity_bytes == 4 * MiB   # kept for the next one
        e.append(np.zeros((1, 3)), np.array([[1.0, 0, 0, 0]]), np.zeros((1, 3)), np.zeros(1), np.zeros((1, 1, 3)))
        assert held(e) > 32 * MiB                       # pages of 2 MiB for every row of the map
        e.sweep(gray, CAMERA.K, views(), params())
        assert e.rows()[-1].capacity_bytes == 0


def test_no_memory_is_an_error_and_later_there_is_some():
    gray, _ = photo(pose())
    with Engine("cuda", max_gaussians=1000) as e:
        e.fail_allocation(1)
        with pytest.raises(NativeError, match="a test asked for it") as error:
            e.sweep(gray, CAMERA.K, views(), params())
        assert error.value.kind == "memory"
        e.fail_allocation(0)
        assert (e.sweep(gray, CAMERA.K, views(), params())[0] > 0).mean() > 0.9 and held(e) >= 3 * 160 * 120 * 40


@pytest.mark.parametrize("debug", [False, True])
def test_between_training_steps_it_disturbs_nothing(debug):
    """One deferred step after another, with and without sweeps between: the same losses."""
    rng, gray = np.random.default_rng(0), photo(pose())[0]
    means, losses = np.c_[rng.uniform(-1, 1, (3000, 2)), rng.uniform(1.5, 2, 3000)], []
    v, rgb = view(CAMERA, np.eye(4), 0), np.repeat(gray[..., None], 3, 2)
    for sweeps in (False, True):
        with Engine("cuda", sh_degree=0, max_gaussians=10_000, arena_debug=debug) as e:
            e.append(means, np.tile([1.0, 0, 0, 0], (3000, 1)), np.full((3000, 3), -4.0), np.zeros(3000), np.zeros((3000, 1, 3)))
            losses.append([])
            for _ in range(5):
                e.train_step(v, rgb[None], Hyper(lr_mean=1e-3, lr_sh0=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, ssim_weight=0.2), wait=False)
                if sweeps:
                    depth, _ = e.sweep(gray, CAMERA.K, views(), params())
                    assert (depth > 0).mean() > 0.9 and (e.agree(depth, CAMERA.K, [(depth, CAMERA.K, np.eye(4))], 0.02)[1] == (depth > 0)).all()
                losses[-1].append(e.last_step().loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
