"""Posed images for offline training: a COLMAP model, or a packed scene (.npz); decoded into Frames, every eighth held out.

A `Scene` holds the images as their files hold them, so that it packs into little more than they take on the disk.
"""
from __future__ import annotations

import os
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from .camera import Camera, Frame

HOLDOUT_EVERY = 8  # of so many frames, in the order of their names, the one in the middle only measures: index % 8 == 4
MM_PER_M = 1000


class SceneError(ValueError):
    """The files do not make a scene; the text says which and why."""


@dataclass(frozen=True)
class Scene:
    """n posed images in the order of their names, still encoded.

    names [n]; cameras [n], at the size of the images in the files; T_world_cam [n,4,4] float64, camera axes x right, y down,
    z forward; images [n] JPEG or PNG bytes; depths [n] PNG bytes, 16 bit, millimetres along z in the image's own camera, 0 = unknown,
    or empty; points [P,3] float32 world with colors [P,3] uint8, or empty. World units: metres with depth, else as they came."""
    names: tuple[str, ...]
    cameras: tuple[Camera, ...]
    T_world_cam: np.ndarray
    images: tuple[bytes, ...]
    depths: tuple[bytes, ...] = ()
    points: np.ndarray = field(default_factory=lambda: np.empty((0, 3), np.float32))
    colors: np.ndarray = field(default_factory=lambda: np.empty((0, 3), np.uint8))

    @property
    def extent(self) -> float:
        """1.1 times the largest distance of a camera from their mean: gsplat's scene_scale, in world units. 0 where they differ by rounding alone."""
        at = self.T_world_cam[:, :3, 3]
        radius = float(np.linalg.norm(at - at.mean(0), axis=1).max())
        return 1.1 * radius if radius > 1e-9 * np.abs(at).max() else 0.0

    def frames(self, size: tuple[int, int] | None = None, holdout_every: int = HOLDOUT_EVERY) -> list[Frame]:
        """Decoded, at `size` (width, height) or as they are; `stamp_ns` is the index; holdout_every 0: none is held out. Images shrink by the mean over the area of a new pixel,
        depth takes the sample at its centre, intrinsics follow. Raises SceneError on a bad image or one that would have to grow."""
        with ThreadPoolExecutor() as pool:  # OpenCV lets go of the interpreter
            return list(pool.map(lambda i: self._frame(i, size, holdout_every), range(len(self.names))))

    def _frame(self, i: int, size: tuple[int, int] | None, holdout_every: int = HOLDOUT_EVERY) -> Frame:
        camera, name = self.cameras[i], self.names[i]
        rgb = self._decoded(self.images[i], cv2.IMREAD_COLOR, camera, name)[..., ::-1]
        depth_m = None
        if self.depths:
            depth_m = self._decoded(self.depths[i], cv2.IMREAD_UNCHANGED, camera, f"depth of {name}") / np.float32(MM_PER_M)
        if size is not None and size != (camera.width, camera.height):
            if size[0] > camera.width or size[1] > camera.height:
                raise SceneError(f"size {size[0]}x{size[1]} is larger than {name} ({camera.width}x{camera.height}); images only shrink")
            rgb = cv2.resize(rgb, size, interpolation=cv2.INTER_AREA)
            depth_m = None if depth_m is None else _sampled(depth_m, *size)
            camera = camera.resized(*size)
        held_out = holdout_every > 0 and i % holdout_every == holdout_every // 2
        try:
            return Frame(i, camera, self.T_world_cam[i], np.ascontiguousarray(rgb), depth_m, held_out, name)
        except ValueError as e:
            raise SceneError(f"{name}: {e}") from None

    @staticmethod
    def _decoded(data: bytes, flags: int, camera: Camera, name: str) -> np.ndarray:
        image = cv2.imdecode(np.frombuffer(data, np.uint8), flags) if data else None   # OpenCV raises on no bytes at all
        if image is None:
            raise SceneError(f"{name}: not an image that can be read ({len(data):,} bytes); was it cut? put it back, or take it out of the set")
        if image.shape[:2] != (camera.height, camera.width):
            raise SceneError(f"{name}: {image.shape[1]}x{image.shape[0]}, its camera says {camera.width}x{camera.height}")
        return image

    def save(self, path: str | os.PathLike) -> None:
        """One .npz that `load` reads back, byte for byte."""
        blobs = self.images + self.depths
        cameras = np.array([(c.width, c.height, c.fx, c.fy, c.cx, c.cy) for c in self.cameras])
        with open(path, "wb") as file:
            np.savez(file, names=np.array(self.names), cameras=cameras, T_world_cam=self.T_world_cam, points=self.points, colors=self.colors,
                     sizes=np.array([len(b) for b in blobs]), bytes=np.frombuffer(b"".join(blobs), np.uint8))

    @staticmethod
    def load(path: str | os.PathLike) -> "Scene":
        """Raises SceneError on a file that `save` did not write whole, OSError."""
        try:
            if not zipfile.is_zipfile(path):   # numpy would speak of pickles
                raise ValueError("no .npz archive, or one that was cut short; copy it again")
            return Scene._load(path)
        except (KeyError, ValueError, EOFError, zipfile.BadZipFile) as e:
            raise SceneError(f"{path}: not a packed scene: {' '.join(str(e).split())}") from None

    @staticmethod
    def _load(path: str | os.PathLike) -> "Scene":
        with np.load(path) as z:
            names, ends, data = tuple(map(str, z["names"])), np.cumsum(z["sizes"]), z["bytes"].tobytes()
            blobs = tuple(data[end - size:end] for size, end in zip(z["sizes"], ends))
            cameras = tuple(Camera(int(w), int(h), *map(float, rest)) for w, h, *rest in z["cameras"])
            return Scene(names, cameras, z["T_world_cam"], blobs[:len(names)], blobs[len(names):], z["points"], z["colors"])


def _sampled(depth_m: np.ndarray, width: int, height: int) -> np.ndarray:
    """[height,width]: the sample at the centre of each new pixel: measured, never a mean across an edge."""
    at = lambda size, new: ((np.arange(new) + 0.5) * (size / new)).astype(int)
    return np.ascontiguousarray(depth_m[at(depth_m.shape[0], height)[:, None], at(depth_m.shape[1], width)])


def read_model(folder: str | os.PathLike) -> tuple[Path, Any, list]:
    """A COLMAP project: images/ and sparse/0/ (or sparse/). The folder of the images; the pycolmap.Reconstruction; its posed images by name,
    all of which are there. Raises SceneError, one line."""
    root = Path(folder)
    model = next((p for p in (root / "sparse" / "0", root / "sparse") if list(p.glob("cameras.*"))), None)
    if model is None:
        raise SceneError(f"{root}: neither sparse/0 nor sparse holds a COLMAP model (cameras.bin or cameras.txt)")
    reconstruction = read_reconstruction(model)
    posed = sorted((image for image in reconstruction.images.values() if image.has_pose), key=lambda image: image.name)
    if not posed:
        raise SceneError(f"{model}: no image has a pose")
    missing = [image.name for image in posed if not (root / "images" / image.name).is_file()]
    if missing:
        raise SceneError(f"{root / 'images'}: {len(missing)} of the model's {len(posed)} images are not there, e.g. {missing[0]}")
    return root / "images", reconstruction, posed


def read_reconstruction(model: str | os.PathLike) -> Any:
    """The pycolmap.Reconstruction of a folder with cameras, images and points3D, .bin or .txt. Raises SceneError, one line."""
    try:
        import pycolmap
    except ImportError as e:
        raise SceneError(f"COLMAP models need pycolmap: pip install pycolmap; import says: {e}") from e
    try:
        return pycolmap.Reconstruction(str(model))
    except (ValueError, RuntimeError, LookupError, MemoryError) as e:  # a file that was cut or mixed shows as any of these
        if cut := "; ".join(filter(None, (_cut_off(Path(model) / name) for name in ("images.bin", "points3D.bin")))):
            raise SceneError(f"{model}: {cut}: copy the model again") from None
        raise SceneError(f"{model}: COLMAP does not read it, are its files of one model? It says: {' '.join(str(e).split())}; copy or export all of it again") from None


def _cut_off(path: Path) -> str:
    """'' or where a file of a COLMAP model ends early. Records as of src/colmap/scene/reconstruction_io_binary.cc."""
    data, done = path.read_bytes() if path.is_file() else b"", 0
    if not path.is_file():
        return ""
    total, at = int.from_bytes(data[:8], "little"), 8
    while done < total and at < len(data):
        if path.name == "images.bin":   # id, qvec, tvec, camera; the name, ends with 0; [n] of x y point3D_id
            counted = (data.find(b"\0", at + 64) + 1) or len(data)
            end = counted + 8 + 24 * int.from_bytes(data[counted:counted + 8], "little")
        else:                           # id, xyz, rgb, error; [n] of image, point2D
            end = at + 51 + 8 * int.from_bytes(data[at + 43:at + 51], "little")
        if end > len(data):
            break
        at, done = end, done + 1
    return f"{path.name} was cut off at {len(data):,} bytes, after {done:,} of {total:,} {path.stem}" if done < total else ""


def world_from(image) -> np.ndarray:
    """T_world_cam [4,4] float64 of an image of pycolmap."""
    return np.vstack([image.cam_from_world().inverse().matrix(), [0, 0, 0, 1]])


def read_colmap(folder: str | os.PathLike) -> Scene:
    """A COLMAP project with undistorted images (PINHOLE, SIMPLE_PINHOLE). Raises SceneError."""
    images, reconstruction, posed = read_model(folder)
    points = list(reconstruction.points3D.values())
    return Scene(tuple(image.name for image in posed), tuple(_pinhole(reconstruction.cameras[image.camera_id]) for image in posed),
                 np.array([world_from(image) for image in posed]), tuple((images / image.name).read_bytes() for image in posed), (),
                 np.array([p.xyz for p in points], np.float32).reshape(-1, 3), np.array([p.color for p in points], np.uint8).reshape(-1, 3))


def _pinhole(camera) -> Camera:
    """COLMAP too has the centre of the first pixel at (0.5, 0.5)."""
    if camera.model.name not in ("PINHOLE", "SIMPLE_PINHOLE"):
        raise SceneError(f"camera {camera.camera_id} is {camera.model.name}: undistort the images first (colmap image_undistorter)")
    K = camera.calibration_matrix()
    try:
        return Camera(camera.width, camera.height, K[0, 0], K[1, 1], K[0, 2], K[1, 2])
    except ValueError as e:
        raise SceneError(f"camera {camera.camera_id}: {e}") from None
