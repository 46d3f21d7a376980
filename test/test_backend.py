"""Which library an Engine takes, and what it says about that."""
import types

import numpy as np
import pytest

from conftest import skip_without_cuda
from scenes import cameras, gaussians
from spirula_gpu import native


@pytest.fixture
def libraries(tmp_path, monkeypatch):
    """Only what the test puts into this folder is found; nothing is remembered from before or after."""
    cpu = native.library_path("cpu")
    monkeypatch.setattr(native, "_libraries", {})
    native._warn_once.cache_clear()
    monkeypatch.setattr(native, "library_path", lambda backend: native_path(tmp_path, cpu, backend))
    return tmp_path


def native_path(folder, cpu, backend):
    path = cpu if backend == "cpu" else folder / f"libspirula_{backend}.so"
    if not path.is_file():
        raise native.NativeError("device", f"{path.name} is not in {folder}; build it")
    return path


def test_without_a_cuda_library_auto_takes_the_cpu_quietly(libraries, recwarn):
    engine = native.Engine("auto")
    assert engine.backend == "cpu" and "no libspirula_cuda.so" in engine.backend_reason and not recwarn.list


def test_a_cuda_library_that_does_not_load_is_reported_once(libraries):
    (libraries / "libspirula_cuda.so").write_text("not a library")
    with pytest.warns(RuntimeWarning, match="does not load") as warned:
        engines = [native.Engine("auto") for _ in range(3)]
    assert len(warned) == 1 and all(e.backend == "cpu" and "does not load" in e.backend_reason for e in engines)
    with pytest.raises(native.NativeError, match="does not load"):
        native.Engine("cuda")


def test_an_argument_that_is_wrong_is_not_hidden_by_auto():
    with pytest.raises(native.NativeError, match="sh_degree 7"):
        native.Engine("auto", sh_degree=7)


def test_a_device_that_is_not_there_is_not_hidden_by_auto():
    skip_without_cuda()
    for backend in ("auto", "cuda"):
        for device in (-1, 99):
            with pytest.raises(native.NativeError, match=f"device {device}: this machine has .* CUDA devices; set engine.device to 0..") as error:
                native.Engine(backend, device=device)
            assert error.value.kind == "argument"


class GpuTensor:
    """What native asks of a torch tensor on a GPU; its memory is the host's."""
    is_cuda = True

    def __init__(self, values, dtype="float32", index=0):
        self.values = np.ascontiguousarray(values, dtype)
        self.dtype, self.device = f"torch.{dtype}", types.SimpleNamespace(index=index)
        self.shape, self.ndim = self.values.shape, self.values.ndim

    def __len__(self):
        return len(self.values)

    def contiguous(self):
        return self

    def cpu(self):
        return self.values

    def reshape(self, *shape):
        return GpuTensor(self.values.reshape(*shape), self.values.dtype.name, self.device.index)

    def data_ptr(self):
        return self.values.ctypes.data

    def new_empty(self, shape):
        return GpuTensor(np.full(shape, np.nan, np.float32), index=self.device.index)


def test_gpu_tensors_stay_where_they_are():
    """The arguments of an engine on GPU 0, with the CPU library in its place: the same numbers as from numpy arrays."""
    g, (viewmats, Ks) = gaussians(40, 1), cameras(2, 24, 20)
    plain, engine = native.Engine("cpu", sh_degree=1), native.Engine("cpu", sh_degree=1)
    engine.device = 0
    rng = np.random.default_rng(0)
    up, rgb, depth = [rng.random(s).astype(np.float32) for s in ((2, 20, 24, 3), (2, 20, 24), (2, 20, 24))], rng.integers(0, 256, (2, 20, 24, 3), np.uint8), rng.random((2, 20, 24))
    view, view_gpu = native.view_of(viewmats, Ks, 24, 20, 1), native.view_of(GpuTensor(viewmats), GpuTensor(Ks), 24, 20, 1)
    on_gpu = [GpuTensor(a) for a in g]
    for a, b in zip(plain.forward(*g, view), engine.forward(*on_gpu, view_gpu)):
        np.testing.assert_array_equal(a, b.values)
    want, got = plain.backward(*g, view, *up), engine.backward(*on_gpu, view_gpu, *map(GpuTensor, up))
    for name in want:
        np.testing.assert_array_equal(want[name], got[name].values, err_msg=name)
    hyper = native.Hyper(lr_mean=1e-3, beta1=0.9, beta2=0.999, eps=1e-15, ssim_weight=0.2)
    for e, arguments in ((plain, (*g, rgb, depth)), (engine, (*on_gpu, GpuTensor(rgb, "uint8"), GpuTensor(depth)))):
        e.append(*arguments[:5])
        e.train_step(view, arguments[5], hyper, arguments[6])
    np.testing.assert_array_equal(plain.read("map.mean"), engine.read("map.mean"))


@pytest.mark.parametrize("tensor, device, message", [
    (GpuTensor(np.zeros((2, 3)), "float64"), 0, "torch.float64, must be float32"), (GpuTensor(np.zeros((2, 3))), None, "it is read by the CPU"),
    (GpuTensor(np.zeros((2, 3)), index=1), 0, "the engine is on cuda:0"), (GpuTensor(np.zeros((2, 2))), 0, r"shape \(2, 2\), must be \(2, 3\)")])
def test_gpu_tensors_that_cannot_be_used_are_named(tensor, device, message):
    with pytest.raises(native.NativeError, match=f"image .*{message}"):
        native.array(tensor, (2, 3), np.float32, "image", device)


def test_a_cpu_engine_refuses_gpu_tensors():
    g, engine = gaussians(4, 0), native.Engine("cpu", sh_degree=0)
    view = native.view_of(*cameras(1, 8, 8), 8, 8, 0)
    with pytest.raises(native.NativeError, match="means is on .*CPU"):
        engine.forward(*map(GpuTensor, g), view)
    with pytest.raises(native.NativeError, match="rgb is on .*CPU"):
        engine.train_step(view, GpuTensor(np.zeros((1, 8, 8, 3)), "uint8"), native.Hyper())
