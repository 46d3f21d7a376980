"""The 3DGS .ply that viewers read: binary little endian, float32, raw (optimiser) parameters.

x y z, nx ny nz (0), f_dc_0..2, f_rest_* (channel-major: all of red first), opacity (logit), scale_0..2 (log of metres),
rot_0..3 (w x y z)."""
from __future__ import annotations

import os
import tempfile
from typing import Iterable, Iterator, NamedTuple

import numpy as np
from numpy.lib.recfunctions import structured_to_unstructured

from .splats import FormatError, Splats

MAX_HEADER_BYTES = 1 << 16
MIP = "SplatRenderMode: mip"  # the comment of a map that was trained with the 2D mip filter, as Brush and splat-transform write it
PLY_TYPES = dict(char="i1", int8="i1", uchar="u1", uint8="u1", short="<i2", int16="<i2", ushort="<u2", uint16="<u2",
                 int="<i4", int32="<i4", uint="<u4", uint32="<u4", float="<f4", float32="<f4", double="<f8", float64="<f8")


class Element(NamedTuple):
    """A table of a .ply. dtype: its record; None when it has lists (faces) or a type that .ply does not know."""
    name: str
    count: int
    dtype: np.dtype | None


def write_ply(path: str | os.PathLike, splats: Splats) -> None:
    """Writes beside `path` and renames: a reader never sees half a file. Raises ValueError on wrong shapes, OSError."""
    write_pieces(path, pack_ply(splats))


def pack_ply(splats: Splats) -> Iterator[bytes]:
    """The file in pieces. Raises ValueError on wrong shapes."""
    _check_shapes(splats)
    yield header(("vertex", len(splats.means), [("float", name) for name in _names(splats.sh.shape[1])]), antialiased=splats.antialiased)
    for block in splats.blocks():
        yield _table(block).tobytes()


def read_ply(path: str | os.PathLike) -> Splats:
    """Reads what `write_ply` or any 3DGS trainer wrote. Raises FormatError, OSError."""
    with open(path, "rb") as file:
        vertex = read_header(file, path)[0]
        if vertex.name != "vertex" or vertex.dtype is None:
            raise FormatError(f"{path}: the first element is '{vertex.name}', must be 'vertex' with nothing but plain numbers")
        rows = read_table(file, path, vertex)
    count, dtype = vertex.count, vertex.dtype
    rest = sum(name.startswith("f_rest_") for name in dtype.names)
    coefficients = {3 * (k * k - 1): k * k for k in (1, 2, 3, 4, 5)}
    if rest not in coefficients:
        raise FormatError(f"{path}: {rest} f_rest_* properties; a whole SH degree has one of {sorted(coefficients)}")
    missing = [name for name in _names(coefficients[rest]) if name not in dtype.names and not name.startswith("n")]
    if missing:
        raise FormatError(f"{path}: not a 3DGS .ply, these vertex properties are missing: {', '.join(missing)}")
    table, at = structured_to_unstructured(rows, np.float32), {name: i for i, name in enumerate(dtype.names)}
    column = lambda *names: np.ascontiguousarray(table[:, [at[name] for name in names]])
    dc = column(*(f"f_dc_{c}" for c in range(3)))[:, None]
    sh_rest = dc[:, :0]
    if rest:
        sh_rest = column(*(f"f_rest_{i}" for i in range(rest))).reshape(count, 3, rest // 3).transpose(0, 2, 1)
    return Splats(column(*"xyz"), column(*(f"rot_{i}" for i in range(4))), column(*(f"scale_{i}" for i in range(3))),
                  table[:, at["opacity"]].copy(), np.ascontiguousarray(np.concatenate([dc, sh_rest], 1)), says_antialiased(path))


def header(*elements: tuple[str, int, list[tuple[str, str]]], antialiased: bool = False) -> bytes:
    """Of (name, count, [(type, property), ..]) each."""
    lines = ["ply", "format binary_little_endian 1.0", *([f"comment {MIP}"] if antialiased else [])]
    for name, count, properties in elements:
        lines += [f"element {name} {count}", *(f"property {kind} {leaf}" for kind, leaf in properties)]
    return ("\n".join(lines) + "\nend_header\n").encode()


def read_header(file, path) -> list[Element]:
    """Every element of a binary little-endian .ply, at least one; leaves the file at the first row. Raises FormatError."""
    if file.readline(16).strip() != b"ply":
        raise FormatError(f"{path}: not a .ply file")
    elements: list[tuple[str, int, list]] = []
    while (words := _header_line(file, path))[:1] != ["end_header"]:
        if words[:1] == ["format"] and words[1:2] != ["binary_little_endian"]:
            raise FormatError(f"{path}: format {' '.join(words[1:])}: only binary_little_endian is read")
        if words[:1] == ["element"]:
            if len(words) != 3 or not (words[2].isascii() and words[2].isdigit()):
                raise FormatError(f"{path}: '{' '.join(words)}': an element has a name and a count")
            elements.append((words[1], int(words[2]), []))
        if words[:1] == ["property"] and elements:
            elements[-1][2].append((words[-1], PLY_TYPES.get(words[1]) if len(words) == 3 else None))
    if not elements:
        raise FormatError(f"{path}: the header declares no vertex element")
    for name, _, fields in elements:
        if not fields:
            raise FormatError(f"{path}: element {name} has no properties (of a map the first must be 'vertex', with some)")
        if len(dict(fields)) < len(fields):
            raise FormatError(f"{path}: a property of element {name} is declared twice")
    return [Element(name, count, None if any(kind is None for _, kind in fields) else np.dtype(fields)) for name, count, fields in elements]


def says_antialiased(path: str | os.PathLike) -> bool:
    """By the last of its comments that says it: `SplatRenderMode: mip` (Brush, splat-transform, this program) or `antialiased 1` (Postshot)."""
    with open(path, "rb") as file:
        lines = file.read(MAX_HEADER_BYTES).partition(b"end_header")[0].decode("ascii", "replace").lower().split("\n")
    meant = {("comment", "splatrendermode:"): "mip", ("comment", "antialiased"): "1"}
    said = [words[2:] == [meant[tuple(words[:2])]] for words in map(str.split, lines) if tuple(words[:2]) in meant]
    return bool(said) and said[-1]


def _header_line(file, path) -> list[str]:
    line = file.readline(1024)
    if not line.endswith(b"\n") or file.tell() > MAX_HEADER_BYTES:
        raise FormatError(f"{path}: the .ply header has no end_header")
    return line.decode("ascii", "replace").split()


def read_table(file, path, element: Element) -> np.ndarray:
    """The rows of an element without lists, [count] of its dtype. Nothing is allocated that the file does not hold. Raises FormatError."""
    need, left = element.count * element.dtype.itemsize, os.fstat(file.fileno()).st_size - file.tell()
    if left < need:
        raise FormatError(f"{path}: truncated: {element.count} rows of element {element.name} need {need} bytes, the file has {left}")
    return np.frombuffer(file.read(need), element.dtype)


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
    write_pieces(path, parts)


def write_pieces(path: str | os.PathLike, pieces: Iterable[bytes]) -> None:
    """The same for pieces that are made while the file is written. Raises OSError, and what making them raises."""
    folder, name = os.path.split(os.path.abspath(path))
    handle, temporary = tempfile.mkstemp(prefix=f".{name}.", dir=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            file.writelines(pieces)
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


def _check_shapes(s: Splats) -> None:
    n, k = len(s.means), s.sh.shape[1]
    shapes = dict(means=(n, 3), quats=(n, 4), log_scales=(n, 3), logit_opacities=(n,), sh=(n, k, 3))
    for name, shape in shapes.items():
        if getattr(s, name).shape != shape:
            raise ValueError(f"{name} has shape {getattr(s, name).shape}, must be {shape}")


def _table(s: Splats) -> np.ndarray:
    n, k = len(s.means), s.sh.shape[1]
    rest = s.sh[:, 1:].transpose(0, 2, 1).reshape(n, 3 * (k - 1))
    columns = (s.means, np.zeros((n, 3)), s.sh[:, 0], rest, s.logit_opacities[:, None], s.log_scales, s.quats)
    return np.concatenate([np.asarray(c, "<f4") for c in columns], 1)
