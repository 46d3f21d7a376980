"""The CUDA library is built for what it says, and needs nothing at run time that the NVIDIA driver does not bring."""
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from conftest import CHECKOUT
from spirula_gpu.native import NativeError, library_path

KERNELS = sorted((CHECKOUT / "spirula_gpu" / "csrc" / "cuda").glob("*.cu"))


def needs(tool: str) -> None:
    if not shutil.which(tool):
        pytest.skip(f"there is no {tool} on PATH")


@pytest.mark.parametrize("file", KERNELS, ids=lambda file: file.name)
def test_jetson_compiles(file, tmp_path):
    """Orin, sm_87: every file, without a warning."""
    needs("nvcc")
    command = ["nvcc", "-std=c++17", "-O1", "-arch=sm_87", "-Werror", "all-warnings", "-c", file, "-o", tmp_path / "object.o"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_a_build_without_a_gpu_is_for_a_list_of_them(tmp_path):
    """Configured only: code for Turing, Ampere, Orin and Hopper, which newer ones compile further; the runtime inside the library."""
    needs("nvcc"), needs("cmake")
    if shutil.which("nvidia-smi") or Path("/dev/nvidiactl").exists():
        pytest.skip("there is a GPU: it is built for that one")
    command = ["cmake", "-S", CHECKOUT, "-B", tmp_path, "-G", "Unix Makefiles", "-DSPIRULA_CUDA=ON", "-DSPIRULA_MESSAGES=OFF"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    target = tmp_path / "CMakeFiles" / "spirula_cuda.dir"
    assert re.findall(r"code=\[([\w,]+)\]", (target / "flags.make").read_text()) == ["sm_75", "sm_80", "sm_87", "compute_90,sm_90"]
    linked = "".join(file.read_text() for file in target.glob("link*"))
    assert "-lcudart_static" in linked and "-lcudart " not in linked


def test_the_library_needs_no_cuda_library():
    """Neither the runtime nor the driver: it loads on a machine without either, and says what is missing."""
    needs("readelf")
    try:
        path = library_path("cuda")
    except NativeError as error:
        pytest.skip(str(error))
    needed = re.findall(r"NEEDED.*\[(.*)\]", subprocess.run(["readelf", "-d", path], check=True, capture_output=True, text=True).stdout)
    assert needed and not [name for name in needed if "cuda" in name], needed
