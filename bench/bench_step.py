"""Times of the training step and of rendering, and the memory they take, on the synthetic scenes of a scene.py.

    python bench/bench_step.py --scene ../shared/bench/scene.py --out bench/results/step_h200.json --commit $(git rev-parse HEAD)

scene.py offers make_scene(N, size=, dev=), make_cameras(C, W, H), make_target(C, W, H) and SIZE_LIGHT. Wall milliseconds
of whole calls, which end with the device idle; medians after a warm-up. `train` is the same step as a trainer runs it: the end
of a step is not waited for (wait=False), mean of the repeats, the last one waited for. Learning rates are tiny, so that the load
stays. Targets and rendered images are on the device. --kernels lists the time of every kernel of the step.
--sorted brings the map into spatial order first (the scenes have none) and times that. --fov-share sets the focal lengths so that this
share of the Gaussians' centres is in the image, --turn-share turns the cameras away until that is so: splats are as large as before then, and their
intersections fall as they do. `blocks`: the share of the map's blocks of 256 of which something is visible. 5 % against all:

    python bench/bench_step.py --scene ../shared/bench/scene.py --cases 10M --sorted --fov-share 0.05
    python bench/bench_step.py --scene ../shared/bench/scene.py --cases 10M --sorted --fov-share 1 --back 100
    python bench/bench_step.py --scene ../shared/bench/scene.py --cases 10M --sorted --fov-share 1 --back 100 --turn-share 0.05

Needs torch with CUDA."""
import argparse
import ctypes
import datetime
import importlib.util
import json
import statistics
import time

import numpy as np
import torch

from spirula_gpu import native

CASES = {"100k": (100_000, 1, 1280, 720), "1Mlight": (1_000_000, 1, 1920, 1080), "1M": (1_000_000, 1, 1920, 1080), "3M": (3_000_000, 1, 1920, 1080),
         "10M": (10_000_000, 1, 1920, 1080), "15Mx5": (15_000_000, 5, 1600, 1066)}
RATES = dict(lr_mean=1.6e-6, lr_quat=1e-5, lr_log_scale=5e-5, lr_logit_opacity=5e-4, lr_sh0=2.5e-5, lr_sh_rest=1.25e-6, beta1=0.9, beta2=0.999,
             eps=1e-15, ssim_weight=0.2)


def median(run, warm_up: int, repeats: int):
    """Median wall ms of run(), and the medians per phase where its results have them."""
    walls, phases = [], []
    for i in range(warm_up + repeats):
        begin = time.perf_counter()
        result = run()
        if i >= warm_up:
            walls.append((time.perf_counter() - begin) * 1e3)
            phases.append(result.ms if result else {})
    return statistics.median(walls), {k: round(statistics.median(p[k] for p in phases), 4) for k in phases[0]}


def train_ms(step, repeats: int) -> float:
    """Mean wall ms of steps of which only the last is waited for."""
    step(wait=True)
    begin = time.perf_counter()
    for i in range(repeats):
        step(wait=i == repeats - 1)
    return (time.perf_counter() - begin) * 1e3 / repeats


def kernel_ms(step, repeats: int = 5) -> dict[str, float]:
    """Mean ms a step of every kernel and copy, by name, the slowest first."""
    from torch.profiler import ProfilerActivity, profile
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(repeats):
            step()
        torch.cuda.synchronize()
    total = {}
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            total[event.name[:100]] = total.get(event.name[:100], 0) + event.time_range.elapsed_us() / 1e3 / repeats
    return {name: round(ms, 4) for name, ms in sorted(total.items(), key=lambda item: -item[1])}


def load_scene(path: str):
    """scene.py as a module."""
    spec = importlib.util.spec_from_file_location("scene", path)
    scene = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(scene)
    return scene


def load_engine(scene, n: int, light: bool, options: dict) -> native.Engine:
    s = scene.make_scene(n, size=scene.SIZE_LIGHT if light else None, dev="cuda")
    engine = native.Engine("cuda", max_gaussians=n, **options)
    sh = torch.cat([s["sh0"], s["shN"]], 1)
    engine.append(*(a.cpu().numpy() for a in (s["means"], s["quats"], s["log_scales"], s["logit_opac"], sh)))
    return engine


def narrowed(viewmats, Ks, means: np.ndarray, share: float):
    """Ks [C,3,3] with focal lengths with which each camera has this share of the means [n,3] in its image."""
    out = Ks.clone()
    for V, K in zip(viewmats.numpy(), out.numpy()):
        x, y, z = V[:3, :3] @ means.T + V[:3, 3:]
        with np.errstate(divide="ignore", invalid="ignore"):
            reach = np.where(z > 0, np.maximum(np.abs(x) / z * K[0, 0] / K[0, 2], np.abs(y) / z * K[1, 1] / K[1, 2]), np.inf)  # 1: the border
        at = np.sort(reach)[max(round(share * len(reach)), 1) - 1]
        if not np.isfinite(at):
            raise SystemExit(f"--fov-share {share}: only {np.isfinite(reach).mean():.0%} of the Gaussians are in front of the camera; move it with --back")
        K[[0, 1], [0, 1]] /= at
    return out


def turned(viewmats, Ks, means: np.ndarray, share: float):
    """viewmats [C,4,4] with each camera turned to the right about its own y axis until this share of the means [n,3] is in its image."""
    out = viewmats.clone()
    for V, K in zip(out, Ks.numpy()):
        given = V.clone()

        def turn(angle: float) -> float:
            c, s = np.cos(angle), np.sin(angle)
            V[:] = torch.tensor([[c, 0, -s, 0], [0, 1, 0, 0], [s, 0, c, 0], [0, 0, 0, 1]], dtype=V.dtype) @ given
            x, y, z = V[:3, :3].numpy() @ means.T + V[:3, 3:].numpy()
            with np.errstate(divide="ignore", invalid="ignore"):
                return float(((z > 0) & (np.abs(x / z) * K[0, 0] < K[0, 2]) & (np.abs(y / z) * K[1, 1] < K[1, 2])).mean())

        low, high = 0.0, np.pi
        for _ in range(24):
            middle = (low + high) / 2
            low, high = (middle, high) if turn(middle) > share else (low, middle)
        turn(high)
    return out


def sort_ms(engine: native.Engine) -> dict:
    """Wall ms of sorting the map, and of finding that it is sorted."""
    times, moved = [], []
    for _ in range(2):
        begin = time.perf_counter()
        moved.append(engine.sort())
        times.append(round((time.perf_counter() - begin) * 1e3, 2))
    return dict(sort_ms=times[0], sort_again_ms=times[1], moved=moved[0])


def blocks_seen(engine: native.Engine, cameras: int) -> float:
    """Share of the map's blocks that the newest call saw something of."""
    size = engine.constant("SPL_OPT_BLOCK") * cameras // 32
    mask = engine.buffer("proj.mask", np.uint32)
    words = -(-len(engine) * cameras // 32)
    return float(np.pad(mask[:words], (0, -words % size)).reshape(-1, size).any(1).mean())


def measure(scene, name: str, warm_up: int, repeats: int, kernels: bool, options: dict, order: bool, share: float, back_m: float, turn_share: float) -> dict:
    n, cameras, width, height = CASES[name]
    viewmats, Ks = scene.make_cameras(cameras, width, height)
    viewmats[:, 2, 3] += back_m
    target = (scene.make_target(cameras, width, height) * 255).to(torch.uint8).cuda().contiguous()
    out = [torch.empty(cameras, height, width, *tail, device="cuda") for tail in ((3,), (), ())]
    image = native.Image(rgb=out[0].data_ptr(), alpha=out[1].data_ptr(), depth=out[2].data_ptr())
    torch.cuda.synchronize()
    free_before = torch.cuda.mem_get_info()[0]
    with load_engine(scene, n, name.endswith("light"), options) as engine:
        torch.cuda.empty_cache()
        sorting = sort_ms(engine) if order else {}
        Ks = narrowed(viewmats, Ks, engine.read("map.mean"), share) if share else Ks
        viewmats = turned(viewmats, Ks, engine.read("map.mean"), turn_share) if turn_share else viewmats
        view = native.view_of(viewmats.numpy(), Ks.numpy(), width, height, 3)
        render = lambda: engine._check(engine._lib.spl_render(engine._ctx, ctypes.byref(view), ctypes.byref(image)))
        forward_ms, _ = median(render, warm_up, repeats)
        blocks = blocks_seen(engine, cameras)
        forward_bytes = sum(r.capacity_bytes for r in engine.rows())
        hyper = native.Hyper(**RATES)
        step = lambda wait=True: engine.train_step(view, target, hyper, wait=wait)
        stats = step()
        step_ms, phases = median(step, warm_up, repeats)
        deferred_ms = train_ms(step, repeats)
        *rows, arena = engine.rows()
        held = sum(r.capacity_bytes for r in rows) + arena.capacity_bytes
        mib = lambda b: round(b / 2**20, 2)
        mask_and_scan = sum(r.used_bytes for r in rows if r.name in (b"proj.mask", b"proj.scan"))
        return dict(case=name, gaussians=n, cameras=cameras, width=width, height=height, pairs=stats.n_pairs, isects=stats.n_isects, blocks=round(blocks, 4), **sorting,
                    forward_ms=round(forward_ms, 4), step_ms=round(step_ms, 4), train_ms=round(deferred_ms, 4), step_phases_ms=phases, kernels_ms=kernel_ms(step) if kernels else {}, loss=stats.loss, alpha=float(out[1].mean()),
                    mask_and_scan_mib=mib(mask_and_scan), engine_mib=mib(held), engine_forward_mib=mib(forward_bytes), arena_mib=mib(arena.capacity_bytes), arena_separate_mib=mib(arena.used_bytes),
                    driver_mib=mib(free_before - torch.cuda.mem_get_info()[0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scene", required=True, help="path of scene.py")
    parser.add_argument("--cases", default="100k,1Mlight,1M,3M,10M", help=",".join(CASES))
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--kernels", action="store_true", help="per-kernel times of the step")
    parser.add_argument("--precision", default="full", choices=native.PRECISIONS)
    parser.add_argument("--sorted", action="store_true", help="sort the map first, and time that")
    parser.add_argument("--fov-share", type=float, default=0, help="focal lengths with which the image has this share of the Gaussians' centres; 0: the scene's")
    parser.add_argument("--turn-share", type=float, default=0, help="cameras turn away until the image has this share of the centres, after --fov-share")
    parser.add_argument("--back", type=float, default=0, help="m; cameras this much further back along their axis")
    parser.add_argument("--no-alias", action="store_true", help="every arena row has bytes of its own")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", help="JSON file")
    args = parser.parse_args()
    scene = load_scene(args.scene)
    rows, options = [], dict(arena_alias=not args.no_alias, precision=args.precision)
    for name in args.cases.split(","):
        rows.append(r := measure(scene, name, args.warm_up, args.repeats, args.kernels, options, args.sorted, args.fov_share, args.back, args.turn_share))
        print(f"{name:>8}: forward {r['forward_ms']:7.3f} ms  step {r['step_ms']:7.3f} ms  train {r['train_ms']:7.3f} ms  {r['engine_mib']:8.1f} MiB  "
              f"pairs {r['pairs']:,} ({r['pairs'] / r['gaussians'] / r['cameras']:.1%})  blocks {r['blocks']:.1%}  isects {r['isects']:,}  "
              + (f"sort {r['sort_ms']} ms (again {r['sort_again_ms']})  " if args.sorted else "")
              + "  ".join(f"{k} {v:.3f}" for k, v in r["step_phases_ms"].items()), flush=True)
        for kernel, ms in list(r["kernels_ms"].items())[:20]:
            print(f"          {ms:8.4f} ms  {kernel}", flush=True)
    result = dict(device=torch.cuda.get_device_name(), date=datetime.date.today().isoformat(), commit=args.commit, torch=torch.__version__, engine=options,
                  sorted=args.sorted, fov_share=args.fov_share, turn_share=args.turn_share, back_m=args.back, warm_up=args.warm_up, repeats=args.repeats, method="wall ms of whole calls, median", cases=rows)
    if args.out:
        with open(args.out, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
