"""The CUDA driver through ctypes, for tests that need device memory of their own or ask what is current; see the driver API."""
import ctypes

CUDA = ctypes.CDLL("libcuda.so.1")


def call(name: str, *arguments) -> None:
    error = getattr(CUDA, name)(*arguments)
    assert error == 0, f"{name}: CUDA driver error {error}"


def current_context() -> int | None:
    context = ctypes.c_void_p()
    call("cuCtxGetCurrent", ctypes.byref(context))
    return context.value


class Allocation:
    """Device memory of device 0, beside the engine's; `pointer` is its address."""

    def __init__(self, n_bytes: int):
        self._context, address = ctypes.c_void_p(), ctypes.c_uint64()
        call("cuInit", 0)
        call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), 0)
        self._in_context("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(n_bytes))
        self.pointer = address.value

    def _in_context(self, name: str, *arguments) -> None:
        popped = ctypes.c_void_p()
        call("cuCtxPushCurrent_v2", self._context)
        try:
            call(name, *arguments)
        finally:
            call("cuCtxPopCurrent_v2", ctypes.byref(popped))

    def free(self) -> None:
        self._in_context("cuMemFree_v2", ctypes.c_uint64(self.pointer))
