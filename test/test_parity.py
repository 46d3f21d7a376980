"""The CUDA backend against the CPU backend, stage by stage. Integers are equal and values agree to float32, except in a
band where a threshold (alpha 1/255, transmittance, the edge of a tile or of the view) may fall on either side."""
import ctypes
import os

import numpy as np
import pytest

import abi
from abi import Context, caller, hyper_of, struct, target_of, view_of
from coded import flat, moments, steps
from conftest import cuda_missing
from scenes import cameras, gaussians
from spirula_gpu.metrics import psnr

W, H = 331, 207


if cuda_missing() and os.environ.get("SPIRULA_REQUIRE_CUDA") != "1":
    pytest.skip(f"the CUDA backend is not tested: {cuda_missing()}", allow_module_level=True)


def test_cuda_is_here():
    assert not cuda_missing()


def both(**params):
    """A context of each backend: cpu, cuda."""
    out = []
    for backend in ("cpu", "cuda"):
        before, abi.BACKEND = abi.BACKEND, backend
        try:
            out.append(Context(**params))
        finally:
            abi.BACKEND = before
    return out


def scene(n=4000, degree=3, n_cameras=3, seed=0, size=(0.005, 0.3), antialiased=False):
    return gaussians(n, degree, seed, size=size), view_of(*cameras(n_cameras, W, H, seed), W, H, degree, antialiased=antialiased)


def differing(a, b, tolerance):
    """Share of elements that differ by more than `tolerance`, relative to the largest value for those beyond 1."""
    return (np.abs(a - b) > tolerance * np.maximum(1, np.abs(a))).mean()


@pytest.mark.parametrize("antialiased", [False, True])
@pytest.mark.parametrize("degree, n_cameras, size", [(0, 1, (0.005, 0.3)), (1, 5, (0.005, 0.3)), (2, 2, (0.001, 0.01)), (3, 3, (0.3, 3.0))])
def test_projection(degree, n_cameras, size, antialiased):
    g, view = scene(degree=degree, n_cameras=n_cameras, size=size, antialiased=antialiased)
    cpu, cuda = both(arena_alias=0)
    for c in (cpu, cuda):
        c.forward(g, view)
    for name, kind in (("proj.mask", "u4"), ("proj.gaussian", "u4"), ("proj.camera", "u2")):
        a, b = cpu.buffer(name, kind), cuda.buffer(name, kind)
        used = len(a) if name == "proj.mask" else len(a) - 1  # the +1 of PAIRS is spare
        if name == "proj.mask":
            used -= 4
        np.testing.assert_array_equal(a[:used], b[:used], err_msg=name)
    a, b = (c.buffer("proj.screen", "f4").reshape(-1, 10)[:-1] for c in (cpu, cuda))
    np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)
    a, b = (c.buffer("proj.box", "u2").reshape(-1, 4)[:-1].astype(int) for c in (cpu, cuda))
    assert np.abs(a - b).max() <= 2


@pytest.mark.parametrize("n, size", [(4000, (0.005, 0.3)), (300, (1.0, 3.0)), (20_000, (0.001, 0.01))])
def test_tiles(n, size):
    g, view = scene(n, 0, size=size)
    tiles = 3 * -(-W // 16) * -(-H // 16)
    sets = []
    for c in both(arena_alias=0):
        c.forward(g, view)
        keys, pairs = c.isects(tiles)
        assert (keys[1:] >= keys[:-1]).all()
        sets.append(set(zip((keys >> np.uint64(32)).tolist(), pairs.tolist())))
    assert len(sets[0]) > 1000 and len(sets[0] ^ sets[1]) <= max(2, 1e-4 * len(sets[0])), "only borderline tiles differ"


@pytest.mark.parametrize("antialiased", [False, True])
@pytest.mark.parametrize("degree, size", [(3, (0.005, 0.3)), (1, (0.3, 1.5)), (0, (0.001, 0.02))])
def test_images_and_gradients(degree, size, antialiased):
    g, view = scene(degree=degree, size=size, antialiased=antialiased)
    view.background[:] = 0.1, 0.5, 0.9
    rng = np.random.default_rng(1)
    cpu, cuda = both()
    images = [c.forward(g, view) for c in (cpu, cuda)]
    flipped = np.zeros((3, H, W), bool)
    for a, b in zip(*images):
        assert differing(a, b, 1e-4) < 2e-3 and np.abs(a - b).max() < 0.1
        flipped |= (np.abs(a - b) > 1e-4 * np.maximum(1, np.abs(a))).reshape(3, H, W, -1).any(-1)
    v = [rng.normal(size=a.shape) * ~flipped.reshape(flipped.shape + (1,) * (a.ndim - 3)) for a in images[0]]
    for name, a, b in zip(("means", "quats", "scales", "opacities", "sh", "viewmats"), cpu.backward(g, view, *v), cuda.backward(g, view, *v)):
        assert np.linalg.norm(a - b) < 1e-3 * np.linalg.norm(a), name
        assert np.isfinite(b).all() and differing(a / np.abs(a).max(), b / np.abs(a).max(), 1e-3) < 1e-3, name


@pytest.mark.parametrize("ssim_weight", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("with_depth, with_mask", [(False, False), (True, True)])
def test_loss(ssim_weight, with_depth, with_mask):
    rng, shape = np.random.default_rng(2), (3, H, W)
    _, view = scene(10, 0)
    images = [rng.random((*shape, 3)), rng.random(shape), rng.random(shape) * 3]
    depth = np.where(rng.random(shape) < 0.3, 0, rng.uniform(0.5, 4, shape)) if with_depth else None
    mask = rng.random(shape) < 0.7 if with_mask else None
    target = target_of(rng.integers(0, 256, (*shape, 3)), depth, mask)
    (a, *va), (b, *vb) = (c.loss(view, images, target, hyper_of(ssim_weight=ssim_weight, depth_weight=0.3)) for c in both())
    for name in ("loss", "l1", "ssim", "depth"):
        assert getattr(a, name) == pytest.approx(getattr(b, name), rel=1e-5, abs=1e-7), name
    for x, y in zip(va, vb):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4 * max(np.abs(x).max(), 1e-9))


@pytest.mark.parametrize("precision", [0, 1])
def test_insertion(precision):
    rng = np.random.default_rng(3)
    g, view = scene(2000, 1, 1)
    smooth = np.kron(rng.integers(0, 256, (1, -(-H // 8), -(-W // 8), 3)), np.ones((1, 8, 8, 1)))[:, :H, :W]
    target = target_of(smooth, np.where(rng.random((1, H, W)) < 0.2, 0, rng.uniform(1, 4, (1, H, W))))
    counts, means, scales = [], [], []
    for c in both(sh_degree=1, precision=precision):
        c.append(g)
        counts.append(c.insert(view, target, hole_spacing_px=2.0, detail_gain=0.4, seed=5))
        means.append({tuple(m) for m in np.round(c.read("map.mean", 2000), 3).tolist()})
        scales.append(c.read("map.log_scale", 2000))
        assert (np.ptp(scales[-1], axis=1) == 0).all() and np.abs(c.read("map.quat", 2000) - [1, 0, 0, 0]).max() < 1e-3 and not c.read("map.sh", 2000)[:, 1:].any()
    assert counts[0] > 1000 and abs(counts[0] - counts[1]) < 2e-3 * counts[0]
    assert len(means[0] ^ means[1]) < 0.02 * len(means[0])
    np.testing.assert_allclose(*(np.quantile(x, [0.1, 0.5, 0.9]) for x in scales), atol=5e-3)


@pytest.mark.parametrize("precision, antialiased", [(0, False), (1, False), (0, True)])
def test_training_reaches_the_same_quality(precision, antialiased):
    """200 steps from a disturbed copy of a scene."""
    truth, (viewmats, Ks) = gaussians(1500, 1, 5, size=(0.03, 0.3)), cameras(4, 160, 120, 5)
    rng, whole = np.random.default_rng(0), view_of(viewmats, Ks, 160, 120, 1, antialiased=antialiased)
    image = (both(sh_degree=1)[0].forward(truth, whole)[0] * 255 + rng.normal(0, 12, (4, 120, 160, 3))).clip(0, 255).astype(np.uint8)  # noise ends it near 26 dB
    start = truth._replace(means=truth.means + rng.normal(0, 0.03, truth.means.shape), sh=truth.sh + rng.normal(0, 0.3, truth.sh.shape))
    reached = []
    for c in both(sh_degree=1, precision=precision):
        c.append(start)
        for i in range(200):
            k = i % 4
            c.train_step(view_of(viewmats[k:k + 1], Ks[k:k + 1], 160, 120, 1, antialiased=antialiased), target_of(image[k:k + 1]), hyper_of(lr_mean=1e-3, lr_sh0=1e-2))
        reached.append(np.mean([psnr(np.clip(a, 0, 1), b / 255.0) for a, b in zip(c.render(whole)[0].astype(float), image)]))
    assert reached[0] > 25 and abs(reached[0] - reached[1]) < 0.1, reached


@pytest.mark.parametrize("n, precision", [(300_000, 0), (600_000, 1)])
def test_keep_and_relocate_of_a_large_map(n, precision):
    """More than one piece of the scratch memory that moves rows."""
    rng = np.random.default_rng(4)
    g = gaussians(n, 3, 6)
    keep = (rng.random(n) < 0.7).astype(np.uint8)
    rows, tolerance = [], {}
    for c in both(sh_degree=3, max_gaussians=n, precision=precision):
        c.append(g)
        c.write("adam.v.sh", np.tile(np.arange(n, dtype=np.float32)[:, None]**2 + 1, (1, 4)))
        c.write("adam.m.sh0", np.tile(np.arange(n, dtype=np.float32)[:, None], (1, 3)))
        kept = ctypes.c_int64()
        c.call("map_keep", keep, kept)
        moved = np.arange(0, kept.value // 2, 3, dtype=np.int64)
        c.call("map_relocate", len(moved), moved, kept.value - 1 - moved // 2, 0.005)
        rows.append({name: c.read(name) for name in ("map.mean", "map.quat", "map.log_scale", "map.logit_opacity", "map.sh", "adam.m.sh0", "adam.v.sh", "map.owner")})
        if precision:  # a source to a code, its copy to another
            tolerance = {"map." + row: 2.01 * steps(c, row).max() for row in ("quat", "log_scale", "logit_opacity", "sh")}
        assert len(c) == kept.value == keep.sum()
    for name, a in rows[0].items():
        np.testing.assert_allclose(a, rows[1][name], rtol=1e-5, atol=1e-5 + tolerance.get(name, 0), err_msg=name)


def test_compact_codes_are_equal():
    """Append, write and keep: code for code."""
    g = gaussians(3000, 2, 7)
    raw = caller((g.means, g.quats, np.log(g.scales), np.log(g.opacities / (1 - g.opacities)), g.sh), activated=False)
    contexts, kept = both(sh_degree=2, precision=1), ctypes.c_int64()
    for c in contexts:
        c.call("map_append", raw, 3)
        for row in ("mean", "quat", "log_scale", "logit_opacity", "sh"):
            for name in reversed(moments(row)):  # in this order
                c.write(name, np.random.default_rng(8).random(c.read(name).shape))
        c.write("map.sh", 3 * g.sh[:100], first=200)
        c.call("map_keep", (np.arange(3000) % 3 != 1).astype(np.uint8), kept)
        c.call("map_append", raw, 4)
    for name in contexts[0].report():
        if name.split(".")[0] in ("map", "adam", "stat"):
            a, b = (c.buffer(name, "u1") for c in contexts)
            np.testing.assert_array_equal(a, b, err_msg=name)


@pytest.mark.parametrize("degree, n_cameras, debug, antialiased", [(0, 1, 0, False), (1, 3, 1, False), (2, 1, 1, False), (3, 1, 0, False), (3, 1, 1, False), (3, 5, 0, False), (2, 3, 0, True)])
def test_a_compact_step(degree, n_cameras, debug, antialiased):
    """From the same state: moments and parameters to a code, since gradients differ in their last bits."""
    g, view = scene(degree=degree, n_cameras=n_cameras, antialiased=antialiased)
    target = target_of(np.random.default_rng(0).integers(0, 256, (n_cameras, H, W, 3)))
    cpu, cuda = both(sh_degree=degree, precision=1, arena_debug=debug)
    for c in (cpu, cuda):
        c.append(g)
    for i in range(3):
        for name, rows in sorted(cpu.map_rows().items(), reverse=True):  # adam.v before adam.m
            cuda.write(name, rows)
        for c in (cpu, cuda):
            c.train_step(view, target, hyper_of(eps=1e-8, noise=1.0, seed=i))
        for row in ("quat", "log_scale", "logit_opacity", "sh"):
            a, b = (flat(c, "map." + row) for c in (cpu, cuda))
            assert (np.abs(a - b) > 1.01 * np.maximum(steps(cpu, row), steps(cuda, row))).mean() < 1e-3, f"step {i}: {row}"
            a, b = (np.sqrt(flat(c, "adam.v." + row)) for c in (cpu, cuda))
            assert differing(a / a.max(), b / a.max(), 2.0**-7) < 1e-3, f"step {i}: {row}"
            assert np.corrcoef(*(flat(c, moments(row)[0]).ravel() for c in (cpu, cuda)))[0, 1] > 0.999, f"step {i}: {row}"
        np.testing.assert_array_equal(cpu.read("adam.steps"), cuda.read("adam.steps"))


def test_the_report_is_what_the_driver_says():
    """Free memory of the device before and after growth of one context, against the report: within 2 %."""
    def free():
        figures = struct("spl_memory")
        warm.call("memory_info", figures)
        return figures.free_bytes
    def step(c):
        c.train_step(view_of(*cameras(1, 640, 480), 640, 480, 3), target_of(np.zeros((1, 480, 640, 3))), hyper_of())
    warm = both()[1]
    warm.append(gaussians(1000, 3))
    step(warm)
    before = free()
    c = both(max_gaussians=1_000_000)[1]
    c.append(gaussians(500_000, 3, size=(0.01, 0.03)))
    step(c)
    taken, reported = before - free(), sum(r.capacity_bytes for r in c.report().values())
    assert reported > 200e6 and abs(taken - reported) < 0.02 * reported, f"driver {taken / 1e6:.1f} MB, report {reported / 1e6:.1f} MB"
