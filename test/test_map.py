"""The map: append, read, write, keep, relocate and insert, with everything that belongs to a Gaussian."""
import ctypes

import numpy as np
import pytest

import oracle
from abi import ARGUMENT, AbiError, Context, caller, target_of, view_of
from scenes import gaussians, look

pytestmark = pytest.mark.usefixtures("backend")  # every test with each backend
SH0 = 0.28209479177387814


def filled(n=300, degree=1, seed=0):
    """A map in which every row of every Gaussian holds something of its own."""
    context, rng = Context(sh_degree=degree), np.random.default_rng(seed)
    context.append(gaussians(n, degree, seed), owner=3)
    for name, rows in context.map_rows().items():
        if not name.startswith("map.") or name == "map.owner":
            context.write(name, rng.integers(1, 1000, rows.shape) if rows.dtype == np.int32 else rng.random(rows.shape) + 0.1)
    return context


def test_append_starts_without_history():
    context, g, h = Context(sh_degree=2), gaussians(7, 2, 1), gaussians(5, 1, 2)
    context.append(g, owner=4)
    context.append(h, owner=9)
    rows = context.map_rows()
    assert len(context) == 12 and list(rows["map.owner"]) == [4] * 7 + [9] * 5
    np.testing.assert_array_equal(rows["map.mean"], np.concatenate([g.means, h.means]))
    np.testing.assert_array_equal(rows["map.quat"], np.concatenate([g.quats, h.quats]))
    np.testing.assert_allclose(np.exp(rows["map.log_scale"]), np.concatenate([g.scales, h.scales]), rtol=1e-5)
    np.testing.assert_allclose(1 / (1 + np.exp(-rows["map.logit_opacity"])), np.concatenate([g.opacities, h.opacities]), rtol=1e-4)
    np.testing.assert_array_equal(rows["map.sh"][:7], g.sh)
    assert (rows["map.sh"][7:, :4] == h.sh).all() and not rows["map.sh"][7:, 4:].any()
    assert not any(rows[name].any() for name in rows if not name.startswith("map."))


def test_append_takes_activated_and_lower_degrees():
    context, g = Context(sh_degree=3), gaussians(6, 1, 3)
    context.call("map_append", caller(g), 1)
    np.testing.assert_allclose(np.exp(context.read("map.log_scale")), g.scales, rtol=1e-5)
    np.testing.assert_array_equal(context.read("map.sh")[:, :4], g.sh)
    for bad in (gaussians(2, 3)._replace(sh=np.zeros((2, 3), np.float32)),):
        with pytest.raises(AbiError, match="sh_degree -1"):
            context.call("map_append", caller(bad), 1)


def test_read_and_write_part_of_a_row():
    context = filled(50)
    before = context.read("adam.v.quat")
    context.write("adam.v.quat", np.full((3, 4), 7.0), first=10)
    after = context.read("adam.v.quat")
    assert (after[10:13] == 7).all() and (np.delete(after, [10, 11, 12], 0) == np.delete(before, [10, 11, 12], 0)).all()
    np.testing.assert_array_equal(context.read("adam.v.quat", 9, 5), after[9:14])
    for arguments, message in (((0, 51), "51 from 0 on, of 50"), ((-1, 2), "2 from -1 on"), ((50, 1), "1 from 50 on"), ((2**63 - 1, 1), "1 from 92")):
        with pytest.raises(AbiError, match=message) as error:
            context.call("map_read", "map.mean", *arguments, np.empty(200, np.float32))
        assert error.value.status == ARGUMENT
    with pytest.raises(AbiError, match="scratch"):
        context.call("map_read", "proj.mask", 0, 1, np.empty(4, np.float32))
    with pytest.raises(AbiError, match="'map.nothing'"):
        context.call("map_read", "map.nothing", 0, 1, np.empty(4, np.float32))


@pytest.mark.parametrize("keep", ["half", "none", "all", "last"])
def test_keep_moves_whole_gaussians_in_order(keep):
    context, n = filled(), 300
    flags = dict(half=np.random.default_rng(1).random(n) < 0.5, none=np.zeros(n, bool), all=np.ones(n, bool), last=np.arange(n) == n - 1)[keep]
    before, kept = context.map_rows(), ctypes.c_int64(-1)
    context.call("map_keep", flags.astype(np.uint8), kept)
    assert kept.value == len(context) == flags.sum()
    for name, rows in context.map_rows().items():
        np.testing.assert_array_equal(rows, before[name][flags], err_msg=name)
    context.append(gaussians(2, 1), owner=8)
    assert context.read("map.owner")[-1] == 8 and not context.read("adam.m.sh0")[-2:].any() and not context.read("adam.steps")[-2:].any()


@pytest.mark.parametrize("copies, min_opacity", [(1, 0.005), (2, 0.005), (5, 0.005), (3, 0.9)])
def test_relocation(copies, min_opacity):
    context, g = Context(sh_degree=1), gaussians(20, 1, 4)
    context.append(g)
    rng = np.random.default_rng(2)
    for name in ("adam.m.mean", "adam.v.sh"):
        context.write(name, rng.random(context.read(name).shape))
    context.write("adam.steps", np.full(20, 50))
    before = context.map_rows()
    dst, src = np.arange(copies, dtype=np.int64), np.full(copies, 15, np.int64)
    context.call("map_relocate", copies, dst, src, min_opacity)
    after, all_copies = context.map_rows(), [*dst, 15]
    opacity, scales = oracle.relocated(float(g.opacities[15]), g.scales[15].astype(float), copies + 1, min_opacity)
    for i in all_copies:
        assert 1 / (1 + np.exp(-after["map.logit_opacity"][i])) == pytest.approx(opacity, rel=1e-4)
        np.testing.assert_allclose(np.exp(after["map.log_scale"][i]), scales, rtol=1e-4)
        for name in ("map.mean", "map.quat", "map.sh"):
            np.testing.assert_array_equal(after[name][i], before[name][15])
    for name in (n for n in after if n.startswith("adam.")):
        assert not after[name][dst].any(), name
        np.testing.assert_array_equal(after[name][15], before[name][15], err_msg=name)
    others = np.setdiff1d(np.arange(20), all_copies)
    for name in after:
        np.testing.assert_array_equal(after[name][others], before[name][others], err_msg=name)


def test_relocation_leaves_the_picture():
    """One Gaussian into four copies of itself: nearly the same image (the copies are exact at the centre)."""
    context, view = Context(sh_degree=0), view_of(np.eye(4)[None], [[[60, 0, 24], [0, 60, 24], [0, 0, 1]]], 48, 48, 0)
    g = oracle.Gaussians(np.tile([0, 0, 3.0], (4, 1)), np.tile([1.0, 0, 0, 0], (4, 1)), np.full((4, 3), 0.3), np.full(4, 0.01), np.full((4, 1, 3), 0.5))
    g.opacities[0] = 0.6
    context.append(g)
    keep, kept = np.array([1, 0, 0, 0], np.uint8), ctypes.c_int64()
    alone = Context(sh_degree=0)
    alone.append(g)
    alone.call("map_keep", keep, kept)
    context.call("map_relocate", 3, np.array([1, 2, 3]), np.array([0, 0, 0]), 0.005)
    a, b = context.render(view)[1][0], alone.render(view)[1][0]
    assert a[24, 24] == pytest.approx(b[24, 24], abs=2e-3) and np.abs(a - b).max() < 0.06 and a.sum() == pytest.approx(b.sum(), rel=0.05)


@pytest.mark.parametrize("dst, src, message", [([0, 0], [5, 6], "named twice"), ([0], [99], r"99 -> 0"), ([-1], [3], "-1"), ([0, 1], [1, 5], "both moved and a source")])
def test_a_wrong_relocation_changes_nothing(dst, src, message):
    context = filled(20)
    before = context.map_rows()
    with pytest.raises(AbiError, match=message):
        context.call("map_relocate", len(dst), np.array(dst), np.array(src), 0.005)
    for name, rows in context.map_rows().items():
        np.testing.assert_array_equal(rows, before[name])


# ---- insertion

W, H = 48, 36
K = np.array([[[40, 0, 22.0], [0, 42, 19.0], [0, 0, 1]]], np.float32)
T_cam_world = look(0.3, -0.2, (0.5, -0.1, 0.2)).astype(np.float32)
VIEW = view_of(T_cam_world[None], K, W, H, 0)


def picture(seed=0):
    rng = np.random.default_rng(seed)
    depth = np.where(rng.random((H, W)) < 0.3, 0, rng.uniform(1, 3, (H, W))).astype(np.float32)
    return rng.integers(0, 256, (1, H, W, 3), np.uint8), depth[None]


def pixels_of(means):
    """Camera-frame points -> column, row, camera z."""
    p = means.astype(float) @ T_cam_world[:3, :3].T.astype(float) + T_cam_world[:3, 3]
    return K[0, 0, 0] * p[:, 0] / p[:, 2] + K[0, 0, 2], K[0, 1, 1] * p[:, 1] / p[:, 2] + K[0, 1, 2], p[:, 2]


def covered(context, opacity=0.999, depth=3.0, columns=slice(None)):
    """Opaque grey splats at every pixel of `columns`, at camera z `depth`."""
    y, x = (a.ravel() for a in np.mgrid[:H, :W][:, :, columns])
    p = np.stack([(x + 0.5 - K[0, 0, 2]) / K[0, 0, 0] * depth, (y + 0.5 - K[0, 1, 2]) / K[0, 1, 1] * depth, np.full(len(x), depth)], 1)
    R, t = T_cam_world[:3, :3], T_cam_world[:3, 3]
    context.append(oracle.Gaussians((p - t) @ R, np.tile([1.0, 0, 0, 0], (len(p), 1)), np.full((len(p), 3), 0.8 * depth / 40),
                                    np.full(len(p), opacity), np.zeros((len(p), 1, 3))))


def test_an_empty_map_is_filled_where_depth_is_known():
    context, (rgb, depth) = Context(sh_degree=1), picture()
    n = context.insert(VIEW, target_of(rgb, depth), owner=7)
    assert n == len(context) == (depth > 0).sum()
    u, v, z = pixels_of(context.read("map.mean"))
    at = np.floor(v).astype(int), np.floor(u).astype(int)
    assert len(set(zip(*at))) == n and (depth[0][at] > 0).all()
    np.testing.assert_allclose(np.stack([u, v], 1) % 1, 0.5, atol=2e-3)
    np.testing.assert_allclose(z, depth[0][at], rtol=1e-4)
    np.testing.assert_allclose(context.read("map.sh")[:, 0] * SH0 + 0.5, rgb[0][at] / 255, atol=1e-5)
    assert not context.read("map.sh")[:, 1:].any() and (context.read("map.owner") == 7).all()
    assert not context.read("adam.steps").any() and not context.read("adam.m.mean").any()
    np.testing.assert_allclose(1 / (1 + np.exp(-context.read("map.logit_opacity"))), 0.5, rtol=1e-5)
    np.testing.assert_allclose(np.exp(context.read("map.log_scale")), (0.7 * z / np.sqrt(40 * 42))[:, None].repeat(3, 1), rtol=1e-3)


@pytest.mark.parametrize("spacing", [2.0, 3.0])
def test_holes_are_filled_evenly_at_the_spacing(spacing):
    context, (rgb, _) = Context(), picture()
    n = context.insert(VIEW, target_of(rgb, np.full((1, H, W), 2.0)), hole_spacing_px=spacing)
    assert n == pytest.approx(W * H / spacing**2, rel=0.05)
    u, v, _ = pixels_of(context.read("map.mean"))
    y, x = np.mgrid[:H, :W] + 0.5
    gap = np.sqrt((u[:, None, None] - x)**2 + (v[:, None, None] - y)**2).min(0).max()
    assert gap < 1.8 * spacing, f"a pixel is {gap:.1f} px from the nearest new Gaussian"


def test_nothing_is_inserted_where_the_map_is_right():
    context, (rgb, _) = Context(), picture()
    covered(context, columns=slice(0, 24))
    before = len(context)
    alpha = context.render(VIEW)[1][0]
    n = context.insert(VIEW, target_of(rgb, np.full((1, H, W), 3.0)))
    u, v, _ = pixels_of(context.read("map.mean", before))
    at = np.floor(v).astype(int), np.floor(u).astype(int)
    assert n == len(u) == (alpha < 0.5).sum() > 500 and (alpha[at] < 0.5).all() and u.min() > 23


def test_a_nearer_measurement_is_inserted_a_farther_one_is_not():
    context, (rgb, _) = Context(), picture()
    covered(context)
    depth = np.full((1, H, W), 3.0, np.float32)
    depth[0, 10:20, 5:15], depth[0, 20:30, 30:40] = 2.0, 4.0
    n = context.insert(VIEW, target_of(rgb, depth))
    u, v, z = pixels_of(context.read("map.mean", W * H))
    assert n == 100 and u.min() > 5 and u.max() < 15 and v.min() > 10 and v.max() < 20
    np.testing.assert_allclose(z, 2.0, rtol=1e-4)


def test_detail_that_the_map_lacks_is_inserted():
    context, rgb = Context(), np.full((1, H, W, 3), 128, np.uint8)
    covered(context)
    rgb[0, 8:20, 8:20][::2, ::2] = 255
    n = context.insert(VIEW, target_of(rgb, np.full((1, H, W), 3.0)), detail_gain=1.0)
    u, v, _ = pixels_of(context.read("map.mean", W * H))
    assert 20 < n and u.min() > 6.9 and u.max() < 21.1 and v.min() > 6.9 and v.max() < 21.1
    assert Context().insert(VIEW, target_of(rgb, np.zeros((1, H, W))), detail_gain=1.0) == 0, "depth is unknown everywhere"


def test_masked_pixels_and_depth_limits():
    context, (rgb, depth) = Context(), picture(3)
    mask = np.random.default_rng(0).integers(0, 2, (1, H, W)).astype(np.uint8)
    n = context.insert(VIEW, target_of(rgb, depth, mask), min_depth_m=1.5, max_depth_m=2.5)
    allowed = (depth >= 1.5) & (depth <= 2.5) & (mask > 0)
    u, v, _ = pixels_of(context.read("map.mean"))
    assert n == allowed.sum() and allowed[0][np.floor(v).astype(int), np.floor(u).astype(int)].all()


def test_insertion_depends_on_the_seed_and_nothing_else():
    rgb, depth = picture(4)
    runs = []
    for seed, threads in ((1, 1), (1, 2), (2, 2)):
        context = Context(threads=threads)
        context.insert(VIEW, target_of(rgb, depth), hole_spacing_px=2.5, detail_gain=0.2, seed=seed)
        runs.append(context.read("map.mean"))
    np.testing.assert_array_equal(runs[0], runs[1])
    assert runs[0].shape != runs[2].shape or (runs[0] != runs[2]).any()


def test_insertion_into_a_full_map_is_refused():
    context, (rgb, depth) = Context(max_gaussians=50), picture()
    with pytest.raises(AbiError, match="max_gaussians 50"):
        context.insert(VIEW, target_of(rgb, depth))
    assert len(context) == 0


@pytest.mark.parametrize("depth", [np.nan, np.inf, -1.0, 1e30])
def test_bad_depth_is_never_inserted(depth):
    rgb, _ = picture()
    assert Context().insert(VIEW, target_of(rgb, np.full((1, H, W), depth))) == 0


@pytest.mark.parametrize("params, message", [(dict(hole_spacing_px=0.0), "hole_spacing_px 0"), (dict(size=0.0), "size 0"), (dict(opacity=1.0), "opacity 1"),
                                             (dict(min_depth_m=0.0), "min_depth_m 0")])
def test_wrong_parameters_are_refused(params, message):
    with pytest.raises(AbiError, match=message):
        Context().insert(VIEW, target_of(*picture()), **params)


def test_inserted_gaussians_show_the_picture():
    """Born near-converged: the render after insertion alone resembles a smooth image."""
    y, x = np.mgrid[:H, :W]
    rgb = np.stack([x * 5, y * 7, 255 - x * 5], -1).astype(np.uint8)[None]
    context = Context(sh_degree=0)
    context.insert(VIEW, target_of(rgb, np.full((1, H, W), 2.0)), opacity=0.8)
    got, alpha, depth = context.render(VIEW)
    inner = np.s_[0, 3:-3, 3:-3]
    assert alpha[inner].min() > 0.9 and np.abs(got[inner] - rgb[inner] / 255).mean() < 0.05
    np.testing.assert_allclose(depth[inner] / alpha[inner], 2.0, rtol=1e-3)


def test_python_callers_cannot_reach_past_their_arrays():
    from spirula_gpu.native import Engine, NativeError, view
    from spirula_gpu.camera import Camera
    with Engine("cpu", sh_degree=0) as engine:
        v = view(Camera(8, 8, 8.0, 8.0, 4.0, 4.0), np.eye(4), 0)
        with pytest.raises(NativeError, match="sh has 0 coefficients"):
            engine.forward(np.zeros((2, 3)), np.ones((2, 4)), np.ones((2, 3)), np.ones(2), np.zeros((2, 0, 3)), v)
        with pytest.raises(NativeError, match="rgb is float64, must be uint8"):
            engine.train_step(v, np.zeros((8, 8, 3)), None)
        with pytest.raises(NativeError, match="2 from 9223372036854775807 on"):
            engine.write("map.mean", np.zeros((2, 3)), first=2**63 - 1)
