"""`spirula bag from-colmap`: a rosbag2 of a COLMAP model's images, as they are, each with its own camera and pose, in the order of their names."""
from __future__ import annotations

from typing import Callable, NamedTuple

import cv2
import numpy as np

from spirula_gpu.camera import Camera
from spirula_gpu.dataset import SceneError, read_model, world_from

from .errors import InputError
from .rgbd import FIRST_STAMP_NS

FORMS = {b"\xff\xd8\xff": "jpeg", b"\x89PNG": "png"}  # by their first bytes, what a CompressedImage may hold


class Model(NamedTuple):
    """How a COLMAP camera model is told in ROS: its parameters are f or fx fy, then cx cy, then those of the lens."""
    focals: int
    lens: str              # CameraInfo.distortion_model
    d: tuple[int, ...]     # CameraInfo.d: which of the parameters after cx cy; -1: 0


MODELS = {  # src/colmap/sensor/models.h; plumb_bob is k1 k2 p1 p2 k3, rational_polynomial k1 k2 p1 p2 k3 k4 k5 k6, equidistant k1 k2 k3 k4
    "SIMPLE_PINHOLE": Model(1, "plumb_bob", (-1,) * 5), "PINHOLE": Model(2, "plumb_bob", (-1,) * 5),
    "SIMPLE_RADIAL": Model(1, "plumb_bob", (0, -1, -1, -1, -1)), "RADIAL": Model(1, "plumb_bob", (0, 1, -1, -1, -1)),
    "OPENCV": Model(2, "plumb_bob", (0, 1, 2, 3, -1)), "FULL_OPENCV": Model(2, "rational_polynomial", tuple(range(8))),
    "OPENCV_FISHEYE": Model(2, "equidistant", (0, 1, 2, 3)),
}


def make_bag(folder: str, out: str, *, fps: float = 2.0, storage: str = "mcap", max_frames: int | None = None, say: Callable[[str], None] = print) -> int:
    """Writes `out` and returns the number of images. Poses and with them the map are in the model's own unit of length. Raises InputError."""
    from .bags import BagWriter
    try:
        images, reconstruction, posed = read_model(folder)
    except SceneError as error:
        raise InputError(str(error)) from None
    posed = posed[:max_frames]
    lenses = {id: lens_of(reconstruction.cameras[id]) for id in sorted({image.camera_id for image in posed})}
    with BagWriter(out, storage) as bag:
        for n, image in enumerate(posed):
            camera, model, d = lenses[image.camera_id]
            stamp, frame_id = FIRST_STAMP_NS + round(n * 1e9 / fps), "camera_color_optical_frame"
            data = (images / image.name).read_bytes()
            form = form_of(data, camera, image.name)
            bag.pose("/camera/pose", stamp, "map", world_from(image))
            bag.info("/camera/color/camera_info", stamp, frame_id, camera, distortion=(model, d))
            bag.compressed("/camera/color/image_raw/compressed", stamp, frame_id, form, data)
    if any(model == "equidistant" for _, model, _ in lenses.values()):
        say("fisheye lenses (equidistant): `spirula replay` and the node refuse them; for those undistort the images first (colmap image_undistorter)")
    say(f"{out}: {len(posed)} images of {len(lenses)} cameras at {fps:g} a second, {storage}")
    return len(posed)


def lens_of(camera) -> tuple[Camera, str, np.ndarray]:
    """Pinhole, distortion_model and d of a COLMAP camera; COLMAP too has the centre of the first pixel at (0.5, 0.5)."""
    if camera.model.name not in MODELS:
        raise InputError(f"camera {camera.camera_id} is {camera.model.name}, which no CameraInfo describes ({', '.join(MODELS)} are): "
                         "undistort the images first (colmap image_undistorter)")
    model, p = MODELS[camera.model.name], list(camera.params)
    lens = p[model.focals + 2:] + [0.0]
    try:
        pinhole = Camera(camera.width, camera.height, p[0], p[model.focals - 1], *p[model.focals:model.focals + 2])
    except ValueError as error:
        raise InputError(f"camera {camera.camera_id}: {error}") from None
    return pinhole, model.lens, np.array([lens[i] for i in model.d], np.float64)


def form_of(data: bytes, camera: Camera, name: str) -> str:
    """jpeg | png. Raises InputError on anything else, and on an image that is not of the camera's size."""
    form = next((form for start, form in FORMS.items() if data.startswith(start)), None)
    image = None if form is None else cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED | cv2.IMREAD_IGNORE_ORIENTATION)
    if image is None:
        raise InputError(f"{name}: not a JPEG or PNG that can be read; a CompressedImage holds no other")
    if image.shape[:2] != (camera.height, camera.width):
        raise InputError(f"{name}: {image.shape[1]}x{image.shape[0]}, its camera says {camera.width}x{camera.height}: use the images that the model was made of")
    return form
