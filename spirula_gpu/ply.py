"""The 3DGS .ply that viewers read: binary little endian, float32, raw (optimiser) parameters.

x y z, nx ny nz (0), f_dc_0..2, f_rest_* (channel-major: all of red first), opacity (logit), scale_0..2 (log of metres),
rot_0..3 (w x y z)."""
from __future__ import annotations

import os
import tempfile
from typing import NamedTuple

import numpy as np

MAX_HEADER_BYTES = 1 << 16
PLY_TYPES = dict(char="i1", int8="i1", uchar="u1", uint8="u1", short="<i2", int16="<i2", ushort="<u2", uint16="<u2",
                 int="<i4", int32="<i4", uint="<u4", uint32="<u4", float="<f4", float32="<f4", double="<f8", float64="<f8")


class Splats(NamedTuple):
    """Gaussians in raw parameters, all float32."""
    means: np.ndarray            # [N,3] map frame, m
    quats: np.ndarray            # [N,4] wxyz
    log_scales: np.ndarray       # [N,3] log of m
    logit_opacities: np.ndarray  # [N]
    sh: np.ndarray               # [N,K,3], K = (degree+1)^2


def write_ply(path: str | os.PathLike, splats: Splats) -> None:
    """Writes beside `path` and renames: a reader never sees half a file. Raises ValueError on wrong shapes, OSError."""
    names, table = _names(splats.sh.shape[1]), _table(splats)
    header = "ply\nformat binary_little_endian 1.0\n" + f"element vertex {len(table)}\n"
    header += "".join(f"property float {name}\n" for name in names) + "end_header\n"
    write_atomically(path, header.encode(), table.tobytes())


def read_ply(path: str | os.PathLike) -> Splats:
    """Reads what `write_ply` or any 3DGS trainer wrote. Raises ValueError that names the file and what is wrong with it."""
    with open(path, "rb") as file:
        count, dtype = _read_header(file, path)
        need, left = count * dtype.itemsize, os.fstat(file.fileno()).st_size - file.tell()
        if left < need:
            raise ValueError(f"{path}: truncated: {count} vertices need {need} bytes, the file has {left}")
        rows = np.frombuffer(file.read(need), dtype)
    rest = sum(name.startswith("f_rest_") for name in dtype.names)
    coefficients = {3 * (k * k - 1): k * k for k in (1, 2, 3, 4, 5)}
    if rest not in coefficients:
        raise ValueError(f"{path}: {rest} f_rest_* properties; a whole SH degree has one of {sorted(coefficients)}")
    missing = [name for name in _names(coefficients[rest]) if name not in dtype.names and not name.startswith("n")]
    if missing:
        raise ValueError(f"{path}: not a 3DGS .ply, these vertex properties are missing: {', '.join(missing)}")
    column = lambda *names: np.stack([rows[name] for name in names], 1).astype(np.float32)
    dc = column(*(f"f_dc_{c}" for c in range(3)))[:, None]
    sh_rest = dc[:, :0]
    if rest:
        sh_rest = column(*(f"f_rest_{i}" for i in range(rest))).reshape(count, 3, rest // 3).transpose(0, 2, 1)
    return Splats(column(*"xyz"), column(*(f"rot_{i}" for i in range(4))), column(*(f"scale_{i}" for i in range(3))),
                  rows["opacity"].astype(np.float32), np.ascontiguousarray(np.concatenate([dc, sh_rest], 1)))


def check_path(name: str, path: str) -> None:
    """That a file cannot be written is said before there is something to write; '' is no file. Raises ValueError."""
    try:
        if path and (not os.path.exists(path) or os.path.isfile(path)):
            tempfile.TemporaryFile(dir=os.path.dirname(os.path.abspath(path))).close()
            return
    except OSError:
        pass
    if path:
        raise ValueError(f"{name} '{path}': must be a file in a folder that exists and can be written; give another one")


def write_atomically(path: str | os.PathLike, *parts: bytes) -> None:
    """`parts`, one after the other, as the file `path`: all or nothing. The file gets the permissions of a plain open()."""
    folder, name = os.path.split(os.path.abspath(path))
    handle, temporary = tempfile.mkstemp(prefix=f".{name}.", dir=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            file.writelines(parts)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _names(n_sh: int) -> list[str]:
    numbered = lambda prefix, n: [f"{prefix}_{i}" for i in range(n)]
    return [*"xyz", "nx", "ny", "nz", *numbered("f_dc", 3), *numbered("f_rest", 3 * (n_sh - 1)), "opacity",
            *numbered("scale", 3), *numbered("rot", 4)]


def _table(s: Splats) -> np.ndarray:
    n, k = len(s.means), s.sh.shape[1]
    shapes = dict(means=(n, 3), quats=(n, 4), log_scales=(n, 3), logit_opacities=(n,), sh=(n, k, 3))
    for name, shape in shapes.items():
        if getattr(s, name).shape != shape:
            raise ValueError(f"{name} has shape {getattr(s, name).shape}, must be {shape}")
    rest = s.sh[:, 1:].transpose(0, 2, 1).reshape(n, 3 * (k - 1))
    columns = (s.means, np.zeros((n, 3)), s.sh[:, 0], rest, s.logit_opacities[:, None], s.log_scales, s.quats)
    return np.concatenate([np.asarray(c, "<f4") for c in columns], 1)


def _read_header(file, path) -> tuple[int, np.dtype]:
    """Vertex count and the record of one vertex; leaves the file at the first vertex."""
    if file.readline(16).strip() != b"ply":
        raise ValueError(f"{path}: not a .ply file")
    count, fields, element = None, [], None
    while True:
        line = file.readline(1024)
        words = line.decode("ascii", "replace").split()
        if not line.endswith(b"\n") or file.tell() > MAX_HEADER_BYTES:
            raise ValueError(f"{path}: the .ply header has no end_header")
        if words[:1] == ["end_header"]:
            break
        if words[:1] == ["format"] and words[1:2] != ["binary_little_endian"]:
            raise ValueError(f"{path}: format {' '.join(words[1:])}: only binary_little_endian is read")
        if words[:1] == ["element"]:
            element = words[1] if len(words) == 3 and words[2].isdigit() else None
            if count is None and element != "vertex":
                raise ValueError(f"{path}: '{' '.join(words)}': the first element must be 'vertex' with a count")
            count = int(words[2]) if element == "vertex" else count
        if words[:1] == ["property"] and element == "vertex":
            if len(words) != 3 or words[1] not in PLY_TYPES:
                raise ValueError(f"{path}: '{' '.join(words)}': vertex properties must be plain numbers")
            fields.append((words[2], PLY_TYPES[words[1]]))
    if count is None or not fields or len(dict(fields)) < len(fields):
        raise ValueError(f"{path}: the header declares no vertex element, or a property twice")
    return count, np.dtype(fields)
