"""The stages of the engine, one by one, through its buffers (arena_alias = 0 keeps them after a call)."""
import ctypes
import shutil
import subprocess

import numpy as np
import pytest
import torch

import oracle
import oracle_torch
from abi import HEADER, Context, hyper_of, target_of, view_of
from scenes import cameras, gaussians

pytestmark = pytest.mark.usefixtures("backend")  # every test with each backend
SCREEN = np.dtype([("xy", "f4", 2), ("conic", "f4", 3), ("opacity", "f4"), ("depth", "f4"), ("rgb", "f4", 3)])


def rendered(n, n_cameras, width, height, degree=1, seed=0, g=None, **params):
    """-> context after a forward pass, the Gaussians, and the oracle's projection of every pair in Gaussian-major order."""
    g = gaussians(n, degree, seed) if g is None else g
    viewmats, Ks = cameras(n_cameras, width, height, seed)
    context = Context(**dict(arena_alias=0) | params)
    context.forward(g, view_of(viewmats, Ks, width, height, degree))
    pairs = [oracle.project(g, V, K, width, height, degree) for V, K in zip(viewmats, Ks)]
    return context, g, oracle.Projected(*(np.stack(parts, 1).reshape(len(g.means) * n_cameras, *parts[0].shape[1:]) for parts in zip(*pairs)))


# ---- packed projection

@pytest.mark.parametrize("n, n_cameras", [(1, 1), (128, 1), (129, 1), (127, 1), (43, 3), (100, 7), (64, 2), (1000, 1)])
def test_mask_scan_and_slots_are_a_stable_compaction(n, n_cameras):
    context, _, p = rendered(n, n_cameras, 40, 30, seed=n)
    words, scan, pairs = oracle.compact(p.visible)
    np.testing.assert_array_equal(context.buffer("proj.mask", "u4")[:len(words)], words)
    np.testing.assert_array_equal(context.buffer("proj.scan", "i8")[1:len(scan) + 1], scan)
    assert context.buffer("proj.scan", "i8")[0] == 0
    np.testing.assert_array_equal(context.buffer("proj.gaussian", "u4")[:len(pairs)], pairs // n_cameras)
    camera, colors = context.buffer("proj.camera", "u2")[:len(pairs)], context.buffer("proj.screen", "f4").reshape(-1, 10)[:len(pairs), 7:]
    np.testing.assert_array_equal(camera & 0x1fff, pairs % n_cameras)
    np.testing.assert_array_equal(camera >> 13, (colors == 0) @ [1, 2, 4])  # channels clamped at 0


@pytest.mark.parametrize("lanes", [[0], [31], [32], [63], [127], [128], [0, 31, 32, 63, 64, 127, 128, 255], range(256), []])
def test_chosen_lanes(lanes):
    g = gaussians(256, 0, 1)
    g.means[:], g.scales[:], g.opacities[:] = [0, 0, -3], 0.1, 0.5
    g.means[list(lanes)] = [0, 0, 3]
    context, _, p = rendered(256, 1, 32, 32, 0, g=g)
    np.testing.assert_array_equal(np.flatnonzero(p.visible), list(lanes))
    np.testing.assert_array_equal(context.buffer("proj.gaussian", "u4")[:len(lanes)], list(lanes))
    np.testing.assert_array_equal(context.buffer("proj.mask", "u4")[:8], oracle.compact(p.visible)[0])


def test_screen_rows():
    context, _, p = rendered(150, 3, 50, 40, 3, seed=2)
    rows = context.buffer("proj.screen", SCREEN)[:p.visible.sum()]
    for name, want in (("xy", p.xy), ("conic", p.conic), ("depth", p.depth), ("rgb", p.rgb)):
        np.testing.assert_allclose(rows[name], want[p.visible], rtol=2e-4, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("width, height", [(1, 1), (608, 1), (6000, 2), (1, 6000), (32767, 1), (333, 77)])
def test_boxes_contain_the_ellipse_and_not_much_more(width, height):
    g = gaussians(400, 0, 3, size=(0.001, 0.2))
    g.means[:, 2] = np.abs(g.means[:, 2])
    context, _, p = rendered(400, 2, width, height, 0, g=g)
    codes = context.buffer("proj.box", "u2").reshape(-1, 4)[:p.visible.sum()]
    extent = np.array([width, height] * 2)
    decoded, box = oracle.decode_edge(codes, extent), np.clip(p.box[p.visible], 0, extent)
    ulps = 4 * np.spacing(extent.astype(np.float32)) + 2e-5 * np.tile(p.box[p.visible][:, 2:] - p.box[p.visible][:, :2], 2)
    outward = np.array([1, 1, -1, -1]) * (box - decoded)  # > 0: the code lies outside the box
    assert (outward >= -ulps).all() and (outward <= extent / 65535 + ulps).all()
    assert (codes[:, 2:] > codes[:, :2]).all(), "what is visible has a box that is not empty"


CODEC = """
#include "math.h"
extern "C" void codec(const float* lo, const float* hi, int n, float extent, unsigned short* codes, float* decoded) {
  for (int i = 0; i < n; ++i) {
    const spl::Box16 q = spl::encode_box({lo[i], lo[i], hi[i], hi[i]}, extent, extent);
    const spl::Box b = spl::decode_box(q, extent, extent);
    codes[2 * i] = q.x0; codes[2 * i + 1] = q.y1;
    decoded[2 * i] = b.x0; decoded[2 * i + 1] = b.y1;
  }
}
"""


@pytest.fixture(scope="module")
def codec(tmp_path_factory):
    """encode_box and decode_box of math.h themselves: what the engine does not show is the float box before encoding."""
    compiler = shutil.which("c++")
    if not compiler:
        pytest.skip("no C++ compiler here")
    library = tmp_path_factory.mktemp("codec") / "codec.so"
    subprocess.run([compiler, "-std=c++17", "-O2", "-shared", "-fPIC", "-I", HEADER.parent, "-x", "c++", "-", "-o", library], input=CODEC, text=True, check=True)
    return ctypes.CDLL(str(library)).codec


@pytest.mark.parametrize("extent", [1, 2, 16, 608, 1237, 3840, 6000, 32767])
def test_the_decoded_box_contains_the_float_box_to_the_last_bit(codec, extent):
    rng, n = np.random.default_rng(extent), 500_000
    lo, hi = np.sort(rng.uniform(-0.1 * extent, 1.1 * extent, (2, n)), 0).astype(np.float32)
    on_a_code = (rng.integers(0, 65536, n) * (extent / 65535)).astype(np.float32)  # where rounding goes wrong first
    lo, hi = np.where(rng.random(n) < 0.5, on_a_code, lo), np.where(rng.random(n) < 0.5, on_a_code, hi)
    codes, decoded = np.empty((n, 2), np.uint16), np.empty((n, 2), np.float32)
    pointer = lambda a: ctypes.c_void_p(a.ctypes.data)
    codec(pointer(lo), pointer(hi), n, ctypes.c_float(extent), pointer(codes), pointer(decoded))
    lower, upper = np.clip(lo, 0, extent), np.clip(hi, 0, extent)
    assert (decoded[:, 0] <= lower).all() and (decoded[:, 1] >= upper).all()
    step = extent / 65535 + 2 * np.spacing(np.float32(extent))
    assert (lower - decoded[:, 0]).max() <= step and (decoded[:, 1] - upper).max() <= step


# ---- tiles and sorting

@pytest.mark.parametrize("width, height, n_cameras", [(16, 16, 1), (17, 33, 2), (100, 60, 1), (48, 64, 3)])
def test_keys_are_the_exact_hits_sorted_by_tile_and_depth(width, height, n_cameras):
    context, _, p = rendered(120, n_cameras, width, height, 0, seed=width)
    tiles_x, tiles_y = -(-width // 16), -(-height // 16)
    pairs, must, may = np.flatnonzero(p.visible), [], []
    rows = context.buffer("proj.screen", SCREEN)
    for slot, pair in enumerate(pairs):
        for ty in range(tiles_y):
            for tx in range(tiles_x):
                best = oracle.tile_alpha(p.xy[pair], p.conic[pair], rows["opacity"][slot], tx, ty, width, height) * 255
                key = oracle.tile_key(((pair % n_cameras) * tiles_y + ty) * tiles_x + tx, rows["depth"][slot])
                (must if best >= 1.002 else may if best >= 0.998 else []).append(key ^ 0x80000000)
    found_keys, found = context.isects(n_cameras * tiles_x * tiles_y)
    keys = found_keys.tolist()
    assert keys == sorted(keys)
    missing, extra = set(must) - set(keys), set(keys) - set(must) - set(may)
    assert not missing and not extra and len(keys) >= len(must)
    assert (np.diff(context.buffer("isect.tile_start", "i8")) >= 0).all() and len(found) == len(set(zip(keys, found)))


def test_every_pixel_of_a_big_sort_is_in_order():
    """Enough keys for several radix digits and threads."""
    context, _, p = rendered(3000, 2, 160, 120, 0, seed=4, threads=2)
    keys, pairs = context.isects(2 * 10 * 8)
    assert len(keys) > 20_000 and (keys[1:] >= keys[:-1]).all()
    equal = keys[1:] == keys[:-1]
    assert (pairs[1:][equal] > pairs[:-1][equal]).all(), "ties keep their order"


# ---- loss

@pytest.mark.parametrize("with_depth, with_mask", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("width, height, ssim_weight", [(16, 16, 0.2), (37, 21, 0.5), (5, 40, 0.0), (1, 1, 1.0)])
def test_loss_and_its_gradient(width, height, ssim_weight, with_depth, with_mask):
    rng, shape = np.random.default_rng(width), (2, height, width)
    images = [rng.random((*shape, 3)), rng.random(shape), rng.random(shape) * 3]
    target = rng.integers(0, 256, (*shape, 3), np.uint8)
    depth = np.where(rng.random(shape) < 0.3, 0, rng.uniform(0.5, 4, shape)).astype(np.float32) if with_depth else None
    mask = (rng.random(shape) < 0.7).astype(np.uint8) if with_mask else None
    view = view_of(*cameras(2, width, height), width, height, 0)
    step, *v = Context().loss(view, images, target_of(target, depth, mask), hyper_of(ssim_weight=ssim_weight, depth_weight=0.3))
    want = oracle.loss(*images, target, depth, mask, ssim_weight, 0.3)
    for name in ("l1", "depth", "loss") + (("ssim",) if ssim_weight else ()):
        assert getattr(step, name) == pytest.approx(want[name], rel=1e-5, abs=2e-6), name
    inputs = [torch.tensor(np.float32(i), dtype=torch.float64, requires_grad=True) for i in images]
    total = oracle_torch.loss(*inputs, target, depth, mask, ssim_weight, 0.3)
    for name, a, b in zip(("rgb", "alpha", "depth"), v, torch.autograd.grad(total, inputs, allow_unused=True)):
        b = np.zeros_like(a) if b is None else b.numpy()
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * max(np.abs(b).max(), 1e-9), err_msg=name)


def test_flat_and_equal_images_are_no_trouble():
    view = view_of(*cameras(1, 32, 32), 32, 32, 0)
    for value in (0, 128, 255):
        target = np.full((1, 32, 32, 3), value, np.uint8)
        image = [target / 255.0, np.ones((1, 32, 32)), np.ones((1, 32, 32))]
        step, v_rgb, *_ = Context().loss(view, image, target_of(target), hyper_of(ssim_weight=0.5))
        assert step.loss == pytest.approx(0, abs=1e-4) and step.ssim == pytest.approx(1, abs=1e-4)
        assert np.isfinite(v_rgb).all()


@pytest.mark.parametrize("unknown", [np.nan, np.inf, -np.inf, -1.0, 1e-30])
def test_depth_that_is_none_counts_as_unknown(unknown):
    view, rng = view_of(*cameras(1, 20, 20), 20, 20, 0), np.random.default_rng(0)
    images = [rng.random((1, 20, 20, 3)), rng.random((1, 20, 20)), rng.random((1, 20, 20))]
    target, depth = rng.integers(0, 256, (1, 20, 20, 3)), rng.uniform(1, 2, (1, 20, 20))
    hole = rng.random(depth.shape) < 0.4
    want, *v_want = Context().loss(view, images, target_of(target, np.where(hole, 0, depth)), hyper_of())
    got, *v_got = Context().loss(view, images, target_of(target, np.where(hole, unknown, depth)), hyper_of())
    assert got.loss == want.loss and got.depth > 0
    for a, b in zip(v_got, v_want):
        np.testing.assert_array_equal(a, b)


def test_everything_masked_is_zero():
    view, rng = view_of(*cameras(1, 20, 20), 20, 20, 0), np.random.default_rng(0)
    images = [rng.random((1, 20, 20, 3)), rng.random((1, 20, 20)), rng.random((1, 20, 20))]
    step, *v = Context().loss(view, images, target_of(np.full((1, 20, 20, 3), 9), np.ones((1, 20, 20)), np.zeros((1, 20, 20))), hyper_of())
    assert step.l1 == step.depth == 0 and step.ssim == pytest.approx(1) and not any(a.any() for a in v)


# ---- switches that must change nothing: not a bit on the CPU

@pytest.mark.parametrize("switch", [dict(threads=1), dict(arena_alias=0), dict(arena_debug=1), dict(arena_debug=1, arena_alias=0), dict(threads=3)])
def test_results_do_not_depend_on_switches(switch):
    width, height = 70, 50
    g, (viewmats, Ks) = gaussians(500, 2, 6), cameras(3, width, height, 6)
    view, rng = view_of(viewmats, Ks, width, height, 2), np.random.default_rng(0)
    v = rng.normal(size=(3, height, width, 3)), rng.normal(size=(3, height, width)), rng.normal(size=(3, height, width))
    plain, other = Context(threads=2), Context(**dict(threads=2) | switch)
    for a, b in zip(plain.forward(g, view), other.forward(g, view)):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(plain.backward(g, view, *v), other.backward(g, view, *v)):
        if plain.backend == "cpu":
            np.testing.assert_array_equal(a, b)
        else:  # sums of atomics, in no fixed order
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5 * np.abs(a).max())


def test_calls_leave_nothing_behind():
    """Big, small, big again, in one context: the same as in fresh ones."""
    context = Context(arena_debug=1)
    for n, size, seed in ((600, 80, 1), (3, 5, 2), (600, 80, 1), (50, 33, 3)):
        g, (viewmats, Ks) = gaussians(n, 1, seed), cameras(1, size, size, seed)
        view = view_of(viewmats, Ks, size, size, 1)
        for a, b in zip(context.forward(g, view), Context().forward(g, view)):
            np.testing.assert_array_equal(a, b)
