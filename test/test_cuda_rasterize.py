"""rasterize() with CUDA tensors: in place, on torch's current stream, in whichever thread and on whichever GPU torch asks."""
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from conftest import skip_without_cuda

skip_without_cuda(module=True)
torch = pytest.importorskip("torch")
from scenes import cameras, gaussians  # noqa: E402
from spirula_gpu import ops  # noqa: E402
from spirula_gpu.native import Engine, Hyper, NativeError, view_of  # noqa: E402
from spirula_gpu.ops import rasterize  # noqa: E402

if not torch.cuda.is_available() and os.environ.get("SPIRULA_REQUIRE_CUDA") != "1":
    pytest.skip("this torch has no CUDA", allow_module_level=True)

W, H = 131, 97


def inputs(degree=2, n=800, n_cameras=2, seed=0, device="cuda", requires_grad=False):
    """means, quats, scales, opacities, colors, viewmats; and Ks."""
    g, (viewmats, Ks) = gaussians(n, degree, seed), cameras(n_cameras, W, H, seed)
    tensors = [torch.tensor(np.float32(a), device=device, requires_grad=requires_grad) for a in (*g, viewmats)]
    return tensors, torch.tensor(Ks, device=device)


def run(device, mode="RGB+D", backend="auto", takes="cuda"):
    """Render, alphas and the gradients of a weighted sum by everything, on the CPU."""
    (*g, viewmats), Ks = inputs(device=device, requires_grad=True)
    background = torch.tensor([[0.1, 0.2, 0.3], [0.9, 0.8, 0.7]], device=device, requires_grad=True)
    render, alphas, meta = rasterize(*g, viewmats, Ks, W, H, sh_degree=2, backgrounds=background, render_mode=mode, backend=backend)
    assert render.device == alphas.device == g[0].device and meta["backend"] == takes
    weight = torch.tensor(np.random.default_rng(1).random(render.shape, np.float32), device=device)
    ((render * weight).sum() + alphas.square().sum()).backward()
    leaves = [*g, viewmats, background]
    grads = [torch.zeros_like(leaf) if mode == "D" and leaf is background else leaf.grad for leaf in leaves]  # depth has no background
    assert all(grad.device == leaf.device for grad, leaf in zip(grads, leaves))
    return [t.detach().cpu().numpy() for t in (render, alphas, *grads)]


@pytest.mark.parametrize("mode", ["RGB", "D", "RGB+D"])
def test_the_same_as_on_the_cpu(mode):
    want, got = run("cpu", mode, "cpu", "cpu"), run("cuda", mode)
    for name, a, b in zip(("render", "alphas"), want, got):
        assert (np.abs(a - b) > 1e-3 * np.maximum(1, np.abs(a))).mean() < 1e-3, name
    for name, a, b in zip(("means", "quats", "scales", "opacities", "colors", "viewmats", "backgrounds"), want[2:], got[2:]):
        if mode == "D" and name in ("colors", "backgrounds"):
            assert not np.any(a) and not np.any(b)
            continue
        assert np.isfinite(b).all() and np.linalg.norm(a - b) < 5e-3 * np.linalg.norm(a), name


def test_nothing_but_the_view_comes_to_the_host(monkeypatch):
    (*g, viewmats), Ks = inputs(requires_grad=True)
    copied = []
    original = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self, *a, **k: copied.append(tuple(self.shape)) or original(self, *a, **k))
    render, alphas, _ = rasterize(*g, viewmats, Ks, W, H, sh_degree=2)
    (render.sum() + alphas.sum()).backward()
    assert set(copied) == {(2, 4, 4), (2, 3, 3)}


def test_forward_and_backward_share_one_engine():
    """torch runs the backward pass of CUDA tensors in a thread of its own."""
    ops._idle.clear()
    (*g, viewmats), Ks = inputs(requires_grad=True)
    for _ in range(3):
        rasterize(*g, viewmats, Ks, W, H, sh_degree=2)[0].sum().backward()
    assert {key: len(engines) for key, engines in ops._idle.items()} == {("cuda", torch.cuda.current_device()): 1}


def test_every_call_runs_on_the_current_stream(monkeypatch):
    (*g, viewmats), Ks = inputs(requires_grad=True)
    used, original = [], Engine.set_stream
    monkeypatch.setattr(Engine, "set_stream", lambda self, stream: used.append(stream) or original(self, stream))
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        rasterize(*g, viewmats, Ks, W, H, sh_degree=2)[0].sum().backward()
    stream.synchronize()
    assert used == [stream.cuda_stream, None] * 2


def test_the_stream_of_an_engine_orders_its_work():
    """The Gaussians are still being made on a stream that is far behind the host."""
    g, (viewmats, Ks) = gaussians(500, 1), cameras(1, W, H)
    view, made = view_of(viewmats, Ks, W, H, 1), [torch.tensor(a, device="cuda") for a in g]
    engine, stream = Engine("cuda", sh_degree=1), torch.cuda.Stream()
    want, late = engine.forward(*made, view), [torch.full_like(t, float("nan")) for t in made]
    torch.cuda.synchronize()
    engine.set_stream(stream.cuda_stream)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # cycles: about 0.1 s
        for a, b in zip(late, made):
            a.copy_(b)
        got = engine.forward(*late, view)
    assert want[1].max() > 0 and all(torch.equal(a, b) for a, b in zip(want, got))


def test_threads_render_at_the_same_time():
    problems = [inputs(1, seed=i) for i in range(6)]
    render = lambda p: rasterize(*p[0], p[1], W, H, sh_degree=1)[0]
    want = [render(p) for p in problems]
    with ThreadPoolExecutor(3) as pool:
        for a, b in zip(want * 3, pool.map(render, problems * 3)):
            assert torch.equal(a, b)


def test_strided_tensors_and_rgb_colours():
    (*g, viewmats), Ks = inputs(0)
    rgb = torch.rand(800, 3, device="cuda")
    want = rasterize(*g[:4], rgb, viewmats, Ks, W, H)[0]
    strided = [torch.stack([t, t], -1)[..., 0] for t in (*g[:4], rgb)]
    assert not strided[0].is_contiguous() and torch.equal(rasterize(*strided, viewmats, Ks, W, H)[0], want)


def test_no_gaussians():
    (*g, viewmats), Ks = inputs(1)
    empty = [t[:0].clone().requires_grad_() for t in g]
    render, alphas, _ = rasterize(*empty, viewmats, Ks, W, H, sh_degree=1)
    (render.sum() + alphas.sum()).backward()
    assert not render.any() and not alphas.any() and empty[0].grad.shape == (0, 3)


def test_mixed_devices_and_types_are_refused():
    (*g, viewmats), Ks = inputs(2)
    for name, changed in (("opacities", [*g[:3], g[3].cpu(), g[4], viewmats, Ks]), ("viewmats", [*g, viewmats.cpu(), Ks]), ("Ks", [*g, viewmats, Ks.cpu()]),
                          ("quats", [g[0].cpu(), *g[1:], viewmats, Ks])):
        with pytest.raises(ValueError, match=f"{name} is torch.float32 on .*, must be torch.float32 on .*, where means is"):
            rasterize(*changed, W, H, sh_degree=2)
    with pytest.raises(ValueError, match="scales is torch.float64 on cuda:0"):
        rasterize(*g[:2], g[2].double(), *g[3:], viewmats, Ks, W, H, sh_degree=2)
    with pytest.raises(ValueError, match="backend 'cpu' with tensors on cuda:0"):
        rasterize(*g, viewmats, Ks, W, H, sh_degree=2, backend="cpu")
    with pytest.raises(NativeError, match="focal"):
        rasterize(*g, viewmats, Ks * 0, W, H, sh_degree=2)
    assert torch.isfinite(rasterize(*g, viewmats, Ks, W, H, sh_degree=2)[0]).all(), "the engine is as good as before"


def test_cpu_tensors_are_copied_by_the_cuda_backend():
    for backend in ("auto", "cuda"):
        for a, b in zip(run("cuda"), run("cpu", backend=backend)):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3 * max(np.abs(a).max(), 1e-6))


def test_an_engine_trains_on_tensors_where_they_are():
    g, (viewmats, Ks) = gaussians(2000, 1), cameras(1, W, H)
    view, rows = view_of(viewmats, Ks, W, H, 1), []
    rgb = np.random.default_rng(0).integers(0, 256, (1, H, W, 3), np.uint8)
    hyper = Hyper(lr_mean=1e-3, lr_sh0=1e-2, beta1=0.9, beta2=0.999, eps=1e-15, ssim_weight=0.2)
    for place in (lambda a: a, lambda a: torch.tensor(a, device="cuda")):
        engine = Engine("cuda", sh_degree=1)
        rows_of_map, target = [place(a) for a in (g.means, g.quats, np.log(g.scales), g.opacities, g.sh)], place(rgb)
        torch.cuda.synchronize()
        engine.append(*rows_of_map)
        engine.train_step(view, target, hyper)
        rows.append(engine.read("map.mean"))
    assert np.abs(rows[0] - g.means).max() > 5e-4 and (np.abs(rows[0] - rows[1]) > 1e-5).mean() < 1e-3
    with pytest.raises(NativeError, match="means is on cuda:0, but it is read by the CPU"):
        Engine("cpu", sh_degree=1).append(*(torch.tensor(a, device="cuda") for a in (g.means, g.quats, g.scales, g.opacities, g.sh)))


def test_torch_keeps_its_current_device_and_memory_elsewhere_is_not_touched():
    """A context on GPU 1 while torch, in this process, uses GPU 0."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    (*g, viewmats), Ks = inputs()
    want = rasterize(*g, viewmats, Ks, W, H, sh_degree=2)[0]
    torch.cuda.set_device(0)
    moved = [t.to("cuda:1") for t in (*g, viewmats)]
    free = torch.cuda.mem_get_info(0)[0]
    got = rasterize(*moved, Ks.to("cuda:1"), W, H, sh_degree=2)[0]
    assert torch.cuda.current_device() == 0 and torch.empty(1, device="cuda").device.index == 0 and got.device.index == 1
    assert torch.equal(got.cpu(), want.cpu()) and free - torch.cuda.mem_get_info(0)[0] < 1 << 20
    with pytest.raises(ValueError, match="colors is torch.float32 on cuda:0, must be torch.float32 on cuda:1"):
        rasterize(*moved[:4], g[4], moved[5], Ks.to("cuda:1"), W, H, sh_degree=2)


WITHOUT_TORCH = """
import sys
sys.path[:0] = {path!r}
sys.modules["torch"] = None
from spirula_gpu.native import Engine, view_of
from scenes import cameras, gaussians
engine = Engine("cuda", device={device})
rgb, alpha, depth = engine.forward(*gaussians(100, 0), view_of(*cameras(1, 40, 30), 40, 30, 0))
assert engine.backend == "cuda" and alpha.max() > 0
print("rendered")
"""


@pytest.mark.parametrize("device", [0, 1])
def test_without_torch(device):
    if device >= torch.cuda.device_count():
        pytest.skip("needs two GPUs")
    path = [os.path.dirname(__file__), *sys.path]
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH.format(path=path, device=device)], capture_output=True, text=True, timeout=120)
    assert done.stdout == "rendered\n", done.stderr
