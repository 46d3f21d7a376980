"""More intersections than 32-bit numbers count. The same view rendered (and differentiated) in parts, each with few, must give the
same; what does not fit is refused, and the next view is right."""
import numpy as np
import pytest

import abi
from abi import CAPACITY, MEMORY, AbiError, Context, caller, struct, view_of
from conftest import skip_without_cuda
from oracle import Gaussians
from scenes import cameras, gaussians

skip_without_cuda(module=True)
GiB = 1 << 30
BYTES_PER_ISECT = 12  # the least: two numbers of a tile (2 bytes each) and two of a pair


@pytest.fixture(autouse=True)
def cuda(monkeypatch):
    monkeypatch.setattr(abi, "BACKEND", "cuda")


def memory():
    out = struct("spl_memory")
    Context(sh_degree=0).call("memory_info", out)
    return out


def needs(gib: int) -> None:
    if memory().free_bytes < gib << 30:
        pytest.skip(f"needs {gib} GiB of free device memory, there are {memory().free_bytes / GiB:.0f}")


def layers(n: int, opacity: float, n_small=400, seed=8) -> Gaussians:
    """Flat RGB Gaussians that each cover every pixel of a square picture of focal length = width, behind n_small small ones."""
    rng = np.random.default_rng(seed)
    small = np.arange(n) < n_small
    z = np.where(small, rng.uniform(800, 899, n), rng.uniform(900, 1100, n))
    xy = rng.uniform(-0.5, 0.5, (n, 2)) * z[:, None]  # the picture spans +-0.5 z
    sigma = np.where(small, rng.uniform(0.01, 0.05, n), rng.uniform(1.2, 1.8, n)) * z
    return Gaussians(np.column_stack([xy, z]), np.tile([1.0, 0, 0, 0], (n, 1)), np.stack([sigma, 0.9 * sigma, np.full(n, 1e-4)], 1),
                     np.where(small, 0.7, opacity), rng.random((n, 3)))


def part_view(size, x, y, width, height):
    """The pixels from (x, y) on of a picture of size x size."""
    return view_of(np.eye(4)[None], np.array([[[size, 0, size / 2 - x], [0, size, size / 2 - y], [0, 0, 1]]]), width, height, 0)


def picture(context, g, view):
    out = np.empty((1, view.height, view.width, 3), np.float32)
    context.call("forward", caller(g), view, struct("spl_image", rgb=out))
    return out[0], context.report()["isect.pair"].used_bytes // 4


# size, layers, opacity: keys of 4 bytes (a million tiles, beyond 8 GiB); keys of 2 bytes (65025 tiles, beyond 4 GiB)
LARGE = [(16384, 2500, 0.008, 90), (4080, 35_000, 0.05, 48)]


@pytest.mark.parametrize("size, n, opacity, gib", LARGE)
def test_more_than_2_to_the_31_intersections(size, n, opacity, gib):
    needs(gib)
    context, g = Context(), layers(n, opacity)
    whole, isects = picture(context, g, part_view(size, 0, 0, size, size))
    key_bytes = context.report()["isect.tile"].used_bytes // isects
    assert isects > 2**31 and key_bytes == (4 if size == 16384 else 2)
    end, inner = size - 500, 48 * (size // 100)
    for x, y in ((0, 0), (end, 0), (inner, inner + 7), (0, end), (end, end)):
        part, few = picture(context, g, part_view(size, x, y, 500, 500))
        assert few < 2**26 and part.std() > 0.01
        error = np.abs(part - whole[y:y + 500, x:x + 500])
        assert error.max() < 0.01 and (error > 5e-4).mean() < 1e-3, "only borderline pixels differ"


def test_gradients_of_more_than_2_to_the_31_intersections():
    """Of the sum of all colours, against the sum over four quarters: no gradient of a colour cancels."""
    needs(48)
    size, context = 4080, Context()
    g, half = layers(35_000, 0.05), size // 2

    def gradients(x, y, edge):
        view = part_view(size, x, y, edge, edge)
        v = np.ones((1, edge, edge, 3)), np.zeros((1, edge, edge)), np.zeros((1, edge, edge))
        out = context.backward(g, view, *v)
        return out, context.report()["isect.pair"].used_bytes // 4

    whole, isects = gradients(0, 0, size)
    assert isects > 2**31
    colours = np.zeros_like(whole[4], dtype=float)
    for x, y in ((0, 0), (half, 0), (0, half), (half, half)):
        quarter, few = gradients(x, y, half)
        assert 2**29 < few < 2**30
        colours += quarter[4]
    assert all(np.isfinite(a).all() for a in whole)
    np.testing.assert_allclose(whole[4].sum(), size * size * 3, rtol=1e-2)  # every pixel is closed: its weights sum to 1
    assert np.linalg.norm(whole[4] - colours) < 2e-3 * np.linalg.norm(colours)


def refused(context, g, view, status, match):
    """The call is refused, and the map that the context holds still renders."""
    small = view_of(*cameras(1, 64, 48), 64, 48, 1)
    context.append(gaussians(500, 1))
    before = context.render(small)
    with pytest.raises(AbiError, match=match) as error:
        context.call("forward", caller(g), view, abi.image_of(view)[0])
    assert error.value.status == status
    for a, b in zip(context.render(small), before):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("no_paging", [0, 1])
def test_too_many_for_the_budget(no_paging):
    """2^29 intersections below a budget of 4 GiB; nothing of them is allocated."""
    needs(8)
    context = Context(sh_degree=1, budget_bytes=4 * GiB, no_paging=no_paging)
    refused(context, layers(9000, 0.05), part_view(4080, 0, 0, 4080, 4080), CAPACITY,
            r"this view needs \d+ MiB of scratch beside \d+ MiB of map \(\d+ visible pairs, \d{9} intersections\) > budget 4096 MiB; raise engine.vram_budget_mb")
    assert sum(row.capacity_bytes for row in context.report().values()) <= 4 * GiB


@pytest.mark.parametrize("no_paging", [0, 1])
def test_too_many_for_the_device(no_paging):
    needs(8)
    n = int(1.1 * memory().total_bytes / BYTES_PER_ISECT / 255**2)
    refused(Context(sh_degree=1, no_paging=no_paging), layers(n, 0.05), part_view(4080, 0, 0, 4080, 4080), MEMORY,
            r"out of memory \(growing\): \d+ MiB more is not to be had, \d+ MiB are free of \d+")
