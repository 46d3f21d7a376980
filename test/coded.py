"""Compact maps and their codes in numpy: slow and obvious, from the bytes that spl_buffer hands out."""
from __future__ import annotations

import numpy as np

from abi import Context, target_of, view_of
from scenes import cameras, gaussians

BLOCK = 256
CODED = ("quat", "log_scale", "logit_opacity", "sh")  # parameters; positions stay fp32
RAW = ("mean", *CODED)


def f8_step(u):
    """Between the 8-bit codes at u: 2^-12 at 0, then 1/8 of the power of two below 1024 |u| + 2, in units of 1/1024."""
    return 2.0**(np.floor(np.log2(1024 * np.abs(u) + 2)) - 13)


def compact(degree=1, **params):
    return Context(sh_degree=degree, precision=1, **params)


def moments(row):
    """The rows of the first and second moments of a row of parameters; of SH, the first ones are those of degree 0."""
    return "adam.m." + ("sh0" if row == "sh" else row), "adam.v." + row


def twins(g, degree, **params):
    """A full and a compact map in the same state: what compact made of g."""
    full, small = Context(sh_degree=degree, **params), compact(degree, **params)
    for context in (small, full):
        context.append(g)
    return copy(small, full), small


def copy(source, to):
    for name, rows in source.map_rows().items():
        to.write(name, rows)
    return to


def codes(context, row, dtype):
    """[n,K] of a coded row, from its bytes: 256 Gaussians of a block beside each other."""
    K = context.report()[row].item_bytes // np.dtype(dtype).itemsize
    if not len(context):
        return np.empty((0, K), dtype)
    return context.buffer(row, dtype).reshape(-1, K, BLOCK).transpose(0, 2, 1).reshape(-1, K)[:len(context)]


def exponents(context):
    """[blocks,4], in the order of CODED; of SH, degree 0."""
    return context.buffer("map.exponents", "i1").reshape(-1, 4).astype(int)


def rest(context):
    """SH beyond degree 0: codes [n,K-3] and exponents [n,degree], from map.sh_rest: of a degree first its exponent, then its codes."""
    n, D = len(context), context.sh_degree
    if not n or not D:
        return np.empty((n, 3 * (D + 1)**2 - 3), int), np.empty((n, D), int)
    stored, begin = context.buffer("map.sh_rest", "i1").reshape(n, -1).astype(int), [3 * l * l + l - 4 for l in range(D + 2)]
    return np.concatenate([stored[:, begin[l] + 1:begin[l + 1]] for l in range(1, D + 1)], 1), stored[:, begin[1:-1]]


def steps(context, row):
    """[n,K]: what one code is worth."""
    n, D = len(context), context.sh_degree
    block = 2.0**(np.repeat(exponents(context)[:, CODED.index(row)], BLOCK)[:n] - 15)[:, None]
    if row != "sh":
        return np.broadcast_to(block, codes(context, "map." + row, "i2").shape)
    each = 2.0**(rest(context)[1] - 7)
    return np.concatenate([np.repeat(block, 3, 1), *(np.repeat(each[:, [l - 1]], 3 * (2 * l + 1), 1) for l in range(1, D + 1))], 1)


def flat(context, name):
    rows = context.read(name).astype(np.float64)
    return rows.reshape(len(rows), int(np.prod(rows.shape[1:])))


def scene(n=1500, degree=1, n_cameras=1, seed=0, size=(0.02, 0.2)):
    g, (viewmats, Ks) = gaussians(n, degree, seed, size=size), cameras(n_cameras, 64, 48, seed)
    rng = np.random.default_rng(seed)
    rgb, depth = rng.integers(0, 256, (n_cameras, 48, 64, 3), np.uint8), rng.uniform(1, 5, (n_cameras, 48, 64)).astype(np.float32)
    return g, view_of(viewmats, Ks, 64, 48, degree), target_of(rgb, depth)
