"""Which library an Engine takes, and what it says about that."""
import numpy as np
import pytest

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


def test_gpu_tensors_must_have_the_right_type():
    class Tensor:  # what native asks of a torch tensor
        is_cuda, dtype, shape, ndim = True, "torch.float64", (2, 3), 2
    with pytest.raises(native.NativeError, match="torch.float64, must be float32"):
        native.array(Tensor(), (2, 3), np.float32, "image")
