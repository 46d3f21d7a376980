"""The formats of maps, once: suffix, who writes and reads it, what is lost. docs/formats.md says what each costs."""
from __future__ import annotations

import os
from typing import Callable, Iterable, Iterator, NamedTuple

import numpy as np

from .compressed_ply import is_compressed, pack_compressed_ply, read_compressed_ply
from .config import EngineConfig
from .ply import pack_ply, read_header, read_ply, write_pieces
from .splat import pack_splat, read_splat
from .splats import FormatError, Splats
from .spz import pack_spz, read_spz
from .tables import pack_npy, pack_points, pack_splat_js

Pieces = Callable[[Iterable[bytes]], Iterable[bytes]]


class Format(NamedTuple):
    suffix: str
    name: str
    loses: str                                      # of a map, empty: nothing
    pack: Callable[[Splats], Iterator[bytes]]
    read: Callable[[str], Splats] | None            # None: it is not read
    degree: int                                     # SH, at most
    says_filter: bool = False                       # it holds whether the map is for the 2D mip filter
    finite: bool = True                             # it cannot hold a Gaussian that is not finite: those are never drawn, and left out


def _read_any_ply(path) -> Splats:
    """A .ply says itself which kind it is."""
    with open(path, "rb") as file:
        elements = read_header(file, path)
    return read_compressed_ply(path) if is_compressed(elements) else read_ply(path)


FORMATS = (  # the longest suffix that fits counts
    Format(".ply", "3DGS .ply", "", pack_ply, _read_any_ply, 4, True, finite=False),
    Format(".compressed.ply", "PlayCanvas compressed .ply", "means to 11 bits and colours to 8 bits of the span of 256 neighbours; opacity and SH to 8 bits; the order", pack_compressed_ply, _read_any_ply, 3, True),
    Format(".splat", "antimatter15 .splat", "SH above degree 0; colour, opacity and rotation to 8 bits", pack_splat, read_splat, 0),
    Format(".spz", "Niantic .spz", "means to 0.24 mm; scale (steps of 6 %), colour, opacity and SH to 8 bits, SH within +-1", pack_spz, read_spz, 3, True),
    Format(".npy", "numpy [N,25]", "SH above degree 1; scale and rotation become a covariance", pack_npy, None, 1),
    Format(".f32.gz", "splat.js gzip of float32 [N,13]", "SH above degree 0; scale and rotation become a covariance", pack_splat_js, None, 0),
    Format(".points.ply", "point cloud .ply", "everything but means and colours", pack_points, None, 0),
)
MOST_UNSOUND = 0.1  # of a file's Gaussians; maps of some trainers have a few, damage has more
ELSEWHERE = {".ksplat": "npx @playcanvas/splat-transform IN.ksplat OUT.ply", ".sog": "npx @playcanvas/splat-transform IN.sog OUT.ply"}


def format_of(path: str | os.PathLike, *, reading: bool = False) -> Format:
    """Chosen by the suffix. Raises FormatError with the list of those that there are."""
    name, usable = os.fspath(path).lower(), [f for f in FORMATS if f.read or not reading]
    fits = [f for f in FORMATS if name.endswith(f.suffix)]
    best = max(fits, key=lambda f: len(f.suffix), default=None)
    if best in usable:
        return best
    known = ", ".join(f.suffix for f in usable)
    if best:
        raise FormatError(f"{path}: {best.name} is not read, it holds no whole Gaussians; these are: {known}")
    other = next((f"; convert it first: {how}" for suffix, how in ELSEWHERE.items() if reading and name.endswith(suffix)), "")
    raise FormatError(f"{path}: maps are {'read from' if reading else 'written to'} files that end in {known}{other}")


def read_map(path: str | os.PathLike) -> Splats:
    """The Gaussians of a file, as they are in it; C-contiguous. Up to MOST_UNSOUND of them may be unsound: callers say so. Raises FormatError, one line, and OSError."""
    splats = format_of(path, reading=True).read(path)
    splats = Splats(*map(np.ascontiguousarray, splats.arrays), splats.antialiased)
    if np.count_nonzero(splats.sound()) < (1 - MOST_UNSOUND) * len(splats.means):
        raise FormatError(f"{path}: {splats.complaint()}, at most {100 * MOST_UNSOUND:g} % may be: the file is damaged, or not what its suffix says; take another copy")
    return splats


def write_map(path: str | os.PathLike, splats: Splats, through: Pieces = iter) -> int:
    """Writes beside `path` and renames. through: sees the pieces on their way, for a progress bar. Returns how many Gaussians were written.
    Raises FormatError, one line, and OSError; `path` is then what it was."""
    kind, n = format_of(path), len(splats.means)
    if kind.finite and not (finite := splats.finite()).all():
        splats = splats.chosen(finite)
    if not len(splats.means):
        raise FormatError(f"{path} was not touched: not one of {n} Gaussians can be written" if n else f"{path} was not touched: there are no Gaussians")
    if splats.degree > kind.degree:
        splats = splats.with_degree(kind.degree)
    write_pieces(path, through(kind.pack(splats)))
    return len(splats.means)


def read_start_map(path: str | os.PathLike, engine: EngineConfig) -> Splats:
    """The Gaussians of a file, if an engine of this configuration may hold them. Raises FormatError, one line."""
    try:
        splats = read_map(path)
    except OSError as e:
        raise FormatError(f"{path}: {e.strerror}") from None
    n, complaint = len(splats.means), splats.complaint()
    if not n or complaint:
        raise FormatError(f"{path}: {complaint}; `spirula convert` leaves them out" if n else f"{path}: no Gaussians")
    if n > engine.max_gaussians:
        raise FormatError(f"{path}: {n} Gaussians > engine.max_gaussians {engine.max_gaussians}: raise it, or thin the map with `spirula convert --min-opacity`")
    return splats
