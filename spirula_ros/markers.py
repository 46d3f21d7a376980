"""The mesh as visualization_msgs/MarkerArray: one TRIANGLE_LIST per chunk with a colour per vertex, DELETE when it empties.

The messages are written as CDR bytes straight from the arrays: with a Point and a ColorRGBA object per corner rclpy needs
0.9 s for 100,000 triangles, and the executor stands still meanwhile; the bytes take some 40 ms. A test compares
them with rclpy's own serialiser."""
from __future__ import annotations

from typing import Iterable

import numpy as np

from spirula_gpu.report import MeshChunk

from .cdr import Cdr

TRIANGLE_LIST, ADD, DELETE, DELETEALL = 11, 0, 2, 3


def write_marker(cdr: Cdr, stamp_ns: int, frame_id: str, ns: str, id: int, action: int, points: np.ndarray, colors: np.ndarray) -> None:
    """One visualization_msgs/Marker (as of Humble and later). points [P,3] float64, three per triangle; colors [P,4] float32 0..1."""
    cdr.write("i", stamp_ns // 10**9)
    cdr.write("I", stamp_ns % 10**9)
    cdr.text(frame_id)
    cdr.text(ns)
    cdr.write("i", id, TRIANGLE_LIST, action)
    cdr.write("d", 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0)  # pose
    cdr.write("d", 1.0, 1.0, 1.0)                      # scale
    cdr.write("f", 1.0, 1.0, 1.0, 1.0)                 # color
    cdr.write("i", 0, 0)                               # lifetime
    cdr.write("b", 0)                                  # frame_locked
    cdr.items(points)
    cdr.items(colors)
    cdr.text("")                                       # texture_resource
    cdr.write("i", 0, 0)                               # texture: header, format, data
    cdr.text("")
    cdr.text("")
    cdr.write("I", 0, 0)                               # .. and uv_coordinates
    cdr.text("")                                       # text
    cdr.text("")                                       # mesh_resource
    cdr.text("")                                       # mesh_file: filename, data
    cdr.write("I", 0)
    cdr.write("b", 0)                                  # mesh_use_embedded_materials


class MeshMarkers:
    """The chunks that listeners should hold, and those that still have to be sent to them."""

    def __init__(self, ns: str = "mesh"):
        self._ns, self._chunks, self._ids, self._dirty, self._wipe, self._map = ns, {}, {}, {}, False, None

    def update(self, chunks: Iterable[MeshChunk], map: int | None = 0) -> None:
        """Takes chunks that may have changed; one that is held already costs nothing, an empty one is deleted. map: Snapshot.map; another one, or none, and
        listeners drop everything."""
        if self._map not in (None, map):
            self.clear()
        self._map = map
        for chunk in chunks:
            if self._chunks.get(chunk.key) is chunk or (not len(chunk.triangles) and chunk.key not in self._chunks):
                continue
            self._chunks[chunk.key] = chunk
            self._dirty[chunk.key] = chunk

    def resend(self) -> None:
        """Everything again, for a listener that came late."""
        self._dirty = {key: chunk for key, chunk in self._chunks.items()}

    def clear(self) -> None:
        """The map was reset: listeners drop everything."""
        self._chunks, self._dirty, self._wipe = {}, {}, True

    def pending(self) -> bool:
        return bool(self._dirty) or self._wipe

    def next_message(self, stamp_ns: int, frame_id: str, max_triangles: int) -> bytes:
        """A serialised MarkerArray with the oldest pending chunks, at least one of them, about `max_triangles` in all."""
        cdr, batch, triangles, wipe = Cdr(), [], 0, self._wipe
        while self._dirty and (not batch or triangles + len(next(iter(self._dirty.values())).triangles) <= max_triangles):
            chunk = self._dirty.pop(next(iter(self._dirty)))
            batch.append(chunk)
            triangles += len(chunk.triangles)
        cdr.write("I", len(batch) + wipe)
        nothing = np.zeros((0, 3)), np.zeros((0, 4), np.float32)
        if wipe:
            write_marker(cdr, stamp_ns, frame_id, self._ns, 0, DELETEALL, *nothing)
            self._wipe = False
        for chunk in batch:
            id = self._ids.setdefault(chunk.key, len(self._ids))
            if len(chunk.triangles):
                write_marker(cdr, stamp_ns, frame_id, self._ns, id, ADD, *corners(chunk))
            else:
                write_marker(cdr, stamp_ns, frame_id, self._ns, id, DELETE, *nothing)
                self._chunks.pop(chunk.key, None)
        return bytes(cdr.out)


def corners(chunk: MeshChunk) -> tuple[np.ndarray, np.ndarray]:
    """Points [3T,3] float64 and colours [3T,4] float32 of a chunk's triangles, corner by corner."""
    index = chunk.triangles.ravel()
    colors = np.ones((len(index), 4), np.float32)
    colors[:, :3] = chunk.colors[index] / np.float32(255)
    return chunk.vertices[index].astype(np.float64), colors
