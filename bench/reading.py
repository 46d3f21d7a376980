"""What offline.py and stream.py read alike: posed scenes from folders and packed files, parameters as text, the name of the device."""
import json
from pathlib import Path

import cv2
import numpy as np

from spirula_gpu.dataset import MM_PER_M, Scene, read_colmap


def read_rgbd(folder: str, color_f: float | None, color_offset: tuple[float, ...]) -> Scene:
    """A 7-Scenes or TUM folder; depth is registered to the colour camera here. Options as of `spirula bag from-rgbd`."""
    from spirula_ros import rgbd
    root = Path(folder)
    layout = rgbd.find_layout(root)
    items, skipped = rgbd.read_7scenes(root, 30.0) if layout == "7scenes" else rgbd.read_tum(root, None)
    for reason, n in sorted(skipped.items()):
        print(f"skipped {n} frames: {reason}")
    rig = rgbd.find_rig(root, layout, items[0], None, color_f, None, color_offset)
    depths, poses = [], []
    for item in items:
        _, depth_m, T_world_color = rgbd.read_frame(item, rig, rgbd.UNITS_PER_M[layout])
        mm = np.round(depth_m * MM_PER_M)
        depths.append(cv2.imencode(".png", np.where(mm <= 65534, mm, 0).astype(np.uint16), [cv2.IMWRITE_PNG_COMPRESSION, 9])[1].tobytes())
        poses.append(T_world_color)
    return Scene(tuple(item.color.name for item in items), (rig.color,) * len(items), np.array(poses),
                 tuple(item.color.read_bytes() for item in items), tuple(depths))


def read_scene(data: str, color_f: float | None, color_offset: tuple[float, ...]) -> Scene:
    if data.endswith(".npz"):
        return Scene.load(data)
    return read_colmap(data) if (Path(data) / "sparse").is_dir() else read_rgbd(data, color_f, color_offset)


def settings(text: str) -> dict:
    """`a.b=1,c.d=x` as {name: value}; values as in JSON, else text."""
    pairs = [item.partition("=") for item in text.split(",") if item.strip()]
    bad = [name for name, equals, _ in pairs if not equals]
    if bad:
        raise ValueError(f"'{bad[0]}': must be name=value")
    return {name.strip(): _value(value.strip()) for name, _, value in pairs}


def _value(text: str):
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def device(backend: str) -> str:
    if backend == "cuda":
        import torch
        return torch.cuda.get_device_name()
    return next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "unknown")
