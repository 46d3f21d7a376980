"""Depth from several views: time of spl_sweep and spl_agree on a textured wall, as MultiView calls them, host arrays in and out.

    python bench/sweep.py [--backend cuda] [--kernels] [--out bench/results/sweep_h200.json]

Medians of whole calls in wall ms; memory: the arena after the call. --kernels: device time of each kernel, from torch's profiler."""
import argparse
import datetime
import json
import statistics
import time

import cv2
import numpy as np

from spirula_gpu.native import Engine, SweepParams

CASES = (("640x480", 8, 96), ("640x480", 4, 96), ("640x480", 4, 160), ("640x480", 16, 96), ("800x600", 4, 160), ("160x120", 4, 48))  # size, views, planes
CHECKS = 6  # views of an agreement
WARM_UP, REPEATS = 3, 15


def wall(width: int, height: int, n_views: int):
    """gray, K, views and their depth of a wall 2 m ahead, the views to all sides of the reference, none turned."""
    noise = np.random.default_rng(0).random((height + 400, width + 400)).astype(np.float32)
    texture = cv2.normalize(cv2.GaussianBlur(noise, (0, 0), 1.5), None, 0, 255, cv2.NORM_MINMAX).astype(np.uint8)
    f = 0.82 * width
    K = np.array([[f, 0, width / 2], [0, f, height / 2], [0, 0, 1]])
    views = []
    for i in range(n_views):
        angle, reach = 2 * np.pi * i / n_views, min(width, height) // 8
        dx, dy = round(reach * np.cos(angle)), round(reach * np.sin(angle))   # whole pixels of disparity
        T = np.eye(4)
        T[:2, 3] = dx / f * 2.0, dy / f * 2.0
        views.append((np.ascontiguousarray(texture[200 - dy:200 - dy + height, 200 - dx:200 - dx + width]), K, T))
    return texture[200:200 + height, 200:200 + width].copy(), K, views


def median_ms(call) -> float:
    times = []
    for _ in range(WARM_UP + REPEATS):
        begin = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times[WARM_UP:])


def measure(engine: Engine, size: str, n_views: int, planes: int, kernels: bool) -> dict:
    width, height = map(int, size.split("x"))
    gray, K, views = wall(width, height, n_views)
    params = SweepParams(min_inv=0.1, max_inv=1.2, n_planes=planes, min_ncc=0.6, min_margin=0.03)
    sweep = lambda: engine.sweep(gray, K, views, params)
    depth_m, _ = sweep()
    known = depth_m[depth_m > 0]
    checks = [(np.full_like(depth_m, 2.0), K, T) for _, K, T in wall(width, height, CHECKS)[2]]
    agree = lambda: engine.agree(depth_m, K, checks, 0.02)
    row = dict(size=size, views=n_views, planes=planes, sweep_ms=round(median_ms(sweep), 3), agree_ms=round(median_ms(agree), 3), known=round(known.size / depth_m.size, 4),
               median_error=round(float(np.median(np.abs(known / 2.0 - 1))), 5), agreed=round(float((agree()[1] > 0).mean()), 4), arena_mib=round(engine.rows()[-1].capacity_bytes / 2**20, 1))
    if kernels:
        from bench_step import kernel_ms   # needs torch
        row["kernels_ms"] = kernel_ms(lambda: (sweep(), agree()))
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--cases", type=int, default=len(CASES), help="so many of the cases")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", help="JSON file")
    args = parser.parse_args()
    rows = []
    for size, n_views, planes in CASES[:args.cases]:
        with Engine(args.backend, max_gaussians=1000, threads=args.threads) as engine:
            backend = engine.backend
            rows.append(row := measure(engine, size, n_views, planes, args.kernels and backend == "cuda"))
        print(f"{backend} {size}, {n_views} views, {planes} planes: sweep {row['sweep_ms']:.2f} ms, agree {row['agree_ms']:.2f} ms, arena {row['arena_mib']:.0f} MiB, "
              f"{row['known']:.1%} known, median error {row['median_error']:.3%}, {row['agreed']:.1%} agreed", flush=True)
        for name, ms in row.get("kernels_ms", {}).items():
            print(f"    {ms:8.4f} ms  {name}", flush=True)
    if args.out:
        with open(args.out, "w") as file:
            json.dump(dict(date=datetime.date.today().isoformat(), commit=args.commit, backend=backend, threads=args.threads, warm_up=WARM_UP, repeats=REPEATS, method="wall ms of whole calls, median", cases=rows), file, indent=1)


if __name__ == "__main__":
    main()
