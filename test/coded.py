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


def groups(row, degree):
    """[(place in the 8 exponents of a block, elements of the row)]"""
    if row != "sh":
        return [(CODED.index(row), slice(None))]
    return [(3 + l, slice(3 * l * l, 3 * (l + 1)**2)) for l in range(degree + 1)]


def steps(context, row):
    """[n,K]: what one code is worth."""
    exponents = context.buffer("map.exponents", "i1").reshape(-1, 8).astype(int)
    out = np.empty(codes(context, "map." + row, "i2").shape)
    for place, elements in groups(row, context.sh_degree):
        out[:, elements] = 2.0**(np.repeat(exponents[:, place], BLOCK)[:len(context)] - 15)[:, None]
    return out


def flat(context, name):
    rows = context.read(name).astype(np.float64)
    return rows.reshape(len(rows), int(np.prod(rows.shape[1:])))


def scene(n=1500, degree=1, n_cameras=1, seed=0, size=(0.02, 0.2)):
    g, (viewmats, Ks) = gaussians(n, degree, seed, size=size), cameras(n_cameras, 64, 48, seed)
    rng = np.random.default_rng(seed)
    rgb, depth = rng.integers(0, 256, (n_cameras, 48, 64, 3), np.uint8), rng.uniform(1, 5, (n_cameras, 48, 64)).astype(np.float32)
    return g, view_of(viewmats, Ks, 64, 48, degree), target_of(rgb, depth)
