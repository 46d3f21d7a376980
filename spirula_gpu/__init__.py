"""spirula_gpu: streaming 3D Gaussian mapping and a differentiable renderer, without ROS. See docs/design.md."""
from .camera import Camera, Frame
from .config import Config
from .native import Engine, NativeError

__all__ = ["Camera", "Config", "Engine", "Frame", "Mapper", "NativeError", "rasterize"]


def __getattr__(name):  # torch and the mapper load only when they are used
    if name == "rasterize":
        from .ops import rasterize
        return rasterize
    if name == "Mapper":
        from .mapper import Mapper
        return Mapper
    raise AttributeError(f"module 'spirula_gpu' has no attribute '{name}'")
