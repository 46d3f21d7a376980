"""bench/versus_gsplat.py and bench/parity.py as far as they run without gsplat and without a GPU: the refusals, the table, the
timing, the edge pixels, and the comparison with a stand-in for gsplat's rasterization that has our CPU renderer inside."""
import os
import subprocess
import sys
import types

import numpy as np
import pytest
import torch

import oracle
from conftest import CHECKOUT, bench_modules
from scenes import cameras, gaussians

BENCH = CHECKOUT / "bench"


@pytest.fixture(scope="module")
def bench():
    """(versus_gsplat, parity)."""
    return bench_modules("versus_gsplat", "parity")


def refusal(versus_gsplat, monkeypatch, *arguments):
    """The exit status or line of versus_gsplat.py with these arguments."""
    monkeypatch.setattr(sys, "argv", ["versus_gsplat.py", *arguments])
    with pytest.raises(SystemExit) as stop:
        versus_gsplat.main()
    return stop.value.code


# ---- refusals -----------------------------------------------------------------------------------------------------------
def test_without_the_peer_one_line_says_so(tmp_path):
    (tmp_path / "gsplat.py").write_text("raise ImportError('No module named gsplat')")  # also where gsplat is installed
    done = subprocess.run([sys.executable, BENCH / "versus_gsplat.py", "--scene", "nowhere"], capture_output=True, text=True,
                          env=os.environ | dict(PYTHONPATH=str(tmp_path)))
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == "versus_gsplat: No module named gsplat; install gsplat==1.5.3 and fused-ssim built for this torch, or pass --ours-only\n"


@pytest.mark.parametrize("version, cuda, text", [
    ("1.4.0", object(), "versus_gsplat: gsplat 1.4.0 is installed"), ("1.5.3", None, "versus_gsplat: gsplat 1.5.3 without its CUDA part is installed")])
def test_another_gsplat_or_one_without_kernels_is_refused(bench, version, cuda, text, monkeypatch):
    for name, content in (("gsplat", dict(__version__=version)), ("gsplat.cuda", {}), ("gsplat.cuda._backend", dict(_C=cuda)),
                          ("fused_ssim", dict(fused_ssim=None))):
        module = types.ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    line = refusal(bench[0], monkeypatch, "--parity", "nowhere")
    assert line.startswith(text) and "\n" not in line


@pytest.mark.parametrize("arguments, text", [
    ([], "give --scene or --parity"), (["--scene", "x", "--cases", "1M,2M"], "--cases 2M: must be of 100k, "),
    (["--parity", "x", "--ours-only"], "--parity needs gsplat")])
def test_wrong_options(bench, arguments, text, monkeypatch, capsys):
    assert refusal(bench[0], monkeypatch, *arguments) == 2
    assert text in capsys.readouterr().err


def test_without_a_device_one_line_says_so(bench, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    line = refusal(bench[0], monkeypatch, "--scene", "nowhere", "--ours-only")
    assert line == "versus_gsplat: torch sees no CUDA device; run it on a machine with one"


# ---- the table ----------------------------------------------------------------------------------------------------------
def record(packing, adam, forward, step, memory, loss=0.3):
    return dict(packing=packing, adam=adam, forward=dict(loop_ms=forward, call_ms=forward + 1), step=dict(loop_ms=step, call_ms=step + 1, peak_mib=memory, loss=loss))


RECORDS = [record("dense", "selective", 4.4, 10.4, 1737), record("dense", "fused", 4.4, 10.2, 1740), record("packed", "selective", 4.9, 11.6, 1700)]
OURS = dict(forward=dict(loop_ms=1.1), step=dict(loop_ms=5.1), engine_mib=850.0, loss=0.3)


def test_each_figure_is_against_the_best_mode_for_it(bench):
    step, forward, memory = bench[0].compare("1M", OURS, RECORDS)
    assert (step["gsplat"], step["mode"], step["ratio"]) == (10.2, "dense fused", pytest.approx(2.0))
    assert (forward["gsplat"], forward["mode"], forward["ratio"]) == (4.4, "dense", pytest.approx(4.0))
    assert (memory["gsplat"], memory["mode"], memory["ratio"]) == (1700, "packed selective", pytest.approx(2.0))
    assert (step["limit"], step["within"]) == (4.1, False) and (forward["limit"], forward["within"]) == (2.0, True)
    assert memory["limit"] is None and memory["within"] is None


def test_the_table_shows_modes_ratios_and_verdicts(bench):
    lines = bench[0].markdown(bench[0].compare("1M", OURS, RECORDS)).splitlines()
    assert lines[2:] == ["| 1M | step | 10.20 ms (dense fused) | 5.10 ms | 2.00x | 4.10 ms, **over** |",
                         "| 1M | forward | 4.40 ms (dense) | 1.10 ms | 4.00x | 2.00 ms, within |",
                         "| 1M | peak memory of the step | 1700 MiB (packed selective) | 850 MiB | 2.00x | - |"]


def test_ours_alone_has_no_ratio_but_its_limits(bench):
    step, forward, memory = bench[0].compare("10M", OURS, [])
    assert [r["gsplat"] for r in (step, forward, memory)] == [None] * 3 and step["ratio"] is None
    assert step["within"] and memory["within"] and memory["limit"] == pytest.approx(6860.8)
    assert bench[0].markdown([step]).endswith("| 10M | step | - | 5.10 ms | - | 9.30 ms, within |")
    assert bench[0].loss_difference(OURS, []) == 0


def test_every_case_has_limits(bench):
    assert set(bench[0].LIMITS) == set(bench[0].CASES)


def test_losses_that_differ_are_found(bench):
    assert bench[0].loss_difference(OURS, RECORDS) == 0
    assert bench[0].loss_difference(OURS, RECORDS + [record("packed", "fused", 1, 1, 1, loss=0.33)]) == pytest.approx(0.1)


def test_blocks_are_divided_by_their_calls(bench, monkeypatch):
    clock, trace = [0.0], []
    monkeypatch.setattr(bench[0].time, "perf_counter", lambda: clock[0])

    def run():
        clock[0] += 0.002
        trace.append("run")

    def idle():  # a wait of 10 ms wherever work is pending
        clock[0] += 0.010 if trace[-1:] == ["run"] else 0
        trace.append("idle")

    got = bench[0].timed(run, warm_up=3, blocks=4, calls=5, idle=idle)
    assert got == dict(loop_ms=pytest.approx(2 + 10 / 5), call_ms=pytest.approx(2 + 10))
    assert trace.count("run") == 3 + 4 * 5 + 4


# ---- parity -------------------------------------------------------------------------------------------------------------
def tile_lists(g, viewmats, Ks, width, height, degree):
    """What gsplat's info says, from the oracle; every tile lists every visible Gaussian, in depth order."""
    ps = [oracle.project(g, v, K, width, height, degree) for v, K in zip(viewmats, Ks)]
    n, tiles = len(g.means), (-(-height // 16), -(-width // 16))
    order = [[c * n + i for i in np.argsort(p.depth, kind="stable") if p.visible[i]] for c, p in enumerate(ps)]
    lengths = np.repeat([len(o) for o in order], tiles[0] * tiles[1])
    offsets = np.concatenate([[0], np.cumsum(lengths)[:-1]]).reshape(len(ps), *tiles)
    ids = np.concatenate([np.tile(o, tiles[0] * tiles[1]) for o in order])
    stacked = dict(means2d=[p.xy for p in ps], conics=[p.conic for p in ps], depths=[p.depth for p in ps], opacities=[g.opacities] * len(ps))
    return dict(isect_offsets=torch.tensor(offsets), flatten_ids=torch.tensor(ids)) | {
        k: torch.tensor(np.array(v), dtype=torch.float64) for k, v in stacked.items()}


@pytest.mark.parametrize("width, height", [(33, 21), (16, 16), (40, 50)])
def test_edge_pixels_are_the_oracles(bench, width, height, monkeypatch):
    parity = bench[1]
    for name in ("ALPHA_BAND", "T_BAND"):
        monkeypatch.setattr(parity, name, 2e-3)
    monkeypatch.setattr(parity, "DEPTH_BAND", 1e-6)
    g, (viewmats, Ks) = gaussians(150, 0, 3, size=(0.1, 0.6)), cameras(2, width, height, 3)
    info = tile_lists(g, viewmats, Ks, width, height, 0)
    got = parity.edge_pixels(info["means2d"], info["conics"], info["depths"], info["opacities"], info["isect_offsets"], info["flatten_ids"], width, height)
    want = np.array([oracle.render(g, v, K, width, height, 0, band=2e-3)[3] for v, K in zip(viewmats, Ks)])
    assert 0 < want.mean() < 0.5
    np.testing.assert_array_equal(got.numpy(), want)


@pytest.mark.parametrize("gap, marked", [(0.0, False), (1e-7, True), (1e-5, False)])
def test_near_depths_are_edges_and_equal_ones_are_not(bench, gap, marked):
    z = torch.tensor([[2.0, 2.0 + 2 * gap]], dtype=torch.float64)
    wide = torch.tensor([[[1e-3, 0, 1e-3]] * 2], dtype=torch.float64)
    got = bench[1].edge_pixels(torch.full((1, 2, 2), 8.0, dtype=torch.float64), wide, z, torch.full((1, 2), 0.5, dtype=torch.float64),
                               torch.zeros(1, 1, 1, dtype=torch.int64), torch.arange(2), 16, 16)
    assert got.all() if marked else not got.any()


def test_edge_pixels_of_nothing(bench):
    empty = lambda *shape: torch.empty(1, 0, *shape)
    got = bench[1].edge_pixels(empty(2), empty(3), empty(), empty(), torch.zeros(1, 2, 3, dtype=torch.int32), torch.zeros(0, dtype=torch.int32), 40, 20)
    assert got.shape == (1, 20, 40) and not got.any()


def stand_in(parity, spoil=lambda render: render):
    """gsplat's signature around our CPU renderer and the oracle's tile lists."""
    def rasterization(means, quats, scales, opacities, colors, viewmats, Ks, width, height, sh_degree, render_mode, packed):
        assert not packed
        render, alphas, _ = parity.rasterize(means, quats, scales, opacities, colors, viewmats, Ks, width, height, sh_degree=sh_degree,
                                             render_mode=render_mode, backend="cpu")
        g = oracle.Gaussians(*(x.detach().numpy() for x in (means, quats, scales, opacities, colors)))
        return spoil(render), alphas, tile_lists(g, viewmats.detach().numpy(), Ks.numpy(), width, height, sh_degree or 0)
    return rasterization


@pytest.fixture
def small_garden(tmp_path):
    """A file like gsplat's test_garden.npz: 130 points of which 120 are inside +-2, two cameras 48x32."""
    rng = np.random.default_rng(0)
    means = rng.uniform(-1.5, 1.5, (130, 3))
    means[::13] += 5
    viewmats, Ks = cameras(2, 48, 32)
    viewmats[:, 2, 3] += 4
    np.savez(tmp_path / "garden.npz", means3d=means, colors=rng.integers(0, 256, (130, 3), np.uint8), viewmats=viewmats, Ks=Ks, height=32, width=48)
    return str(tmp_path / "garden.npz")


def test_parity_passes_on_equal_pictures(bench, small_garden, capsys):
    assert bench[1].run(stand_in(bench[1]), small_garden, "cpu", device="cpu", backend="cpu")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 * (1 + 3 + 6) and "120 Gaussians, 2 cameras 48x32" in lines[0]
    assert sum(line.endswith(" ok") for line in lines) == 18


@pytest.mark.parametrize("spoil, wrong", [
    (lambda r: r * 1.0005, {"rgb", "depth"}),                                                # the values; their gradients by 0.05 %, within 0.1 %
    (lambda r: r + 0.01 * (r - r.detach()), {"means", "quats", "scales", "opacities", "colors", "viewmats"}),  # the gradients alone
])
def test_parity_finds_what_is_wrong(bench, small_garden, spoil, wrong, capsys):
    assert not bench[1].run(stand_in(bench[1], spoil), small_garden, "cpu", device="cpu", backend="cpu")
    bad = {line.split()[1] for line in capsys.readouterr().out.splitlines() if line.endswith("NOT OK")}
    assert bad == wrong


def test_few_outliers_pass_and_many_do_not(bench):
    b = torch.ones(10_000, 3)
    few, many = b.clone(), b.clone()
    few[:3] += 2e-4
    many[:50] += 2e-4
    good = [bench[1].difference("values", dict(x=a), dict(x=b))[0]["good"] for a in (b, few, many, b * float("nan"))]
    assert good == [True, True, False, False]


def test_views_have_the_share_that_they_are_made_for():
    step, = bench_modules("bench_step")
    means = np.random.default_rng(0).normal(0, 2, (4000, 3)).astype(np.float32)
    V, K = torch.eye(4)[None].repeat(2, 1, 1), torch.tensor([[100.0, 0, 80], [0, 100, 60], [0, 0, 1]])[None].repeat(2, 1, 1)
    V[:, 2, 3] = torch.tensor([30.0, 40.0])  # all are in front

    def shares(viewmats, Ks):
        for T, k in zip(viewmats.double().numpy(), Ks.double().numpy()):
            assert np.allclose(T[:3, :3] @ T[:3, :3].T, np.eye(3), atol=1e-6)
            u = (means @ T[:3, :3].T + T[:3, 3]) @ k.T
            yield ((u[:, 2] > 0) & (u[:, :2] > 0).all(1) & (u[:, :2] < u[:, 2:] * (160, 120)).all(1)).mean()

    wide = step.narrowed(V, K, means, 1.0)
    for got, want in ((shares(V, wide), 1.0), (shares(V, step.narrowed(V, K, means, 0.3)), 0.3), (shares(step.turned(V, wide, means, 0.05), wide), 0.05)):
        np.testing.assert_allclose(list(got), want, atol=2e-3)
