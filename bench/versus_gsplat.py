"""Us and gsplat 1.5.3 in one process: times and memory of the same work, and whether both draw the same picture.

    python bench/versus_gsplat.py --scene ../shared/bench/scene.py --out bench/results/versus_gsplat_h200.json --commit $(git rev-parse HEAD)
    python bench/versus_gsplat.py --parity test_garden.npz      # values and gradients against gsplat's rasterization

gsplat and fused-ssim are a peer to compare with, never a dependency: without them this stops with one line (--ours-only goes on).
Same scenes (scene.py, see bench_step.py), uint8 target images, loss 0.8 L1 + 0.2 (1 - SSIM) and tiny learning rates on both sides;
the losses of the first step must agree. Both sides are timed alike: the wall time of a block of calls between two points at which
the device is idle, divided by the calls (`loop_ms`), and that of single calls that end with the device idle (`call_ms`); medians of at
least 20. The forward pass of gsplat starts from activated parameters (exp and sigmoid are not counted), ours from raw ones.
Memory is what a side holds at its peak beyond the target images: for gsplat torch's allocator (allocated; reserved), for us the
engine's rows and arena, and the difference of cudaMemGetInfo. One side is freed before the other starts."""
import argparse
import ctypes
import datetime
import gc
import importlib.util
import json
import os
import statistics
import sys
import time
from typing import NamedTuple

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # gsplat's own advice; read when torch starts
import torch

import parity
from bench_step import CASES, RATES, load_engine
from spirula_gpu import native

VERSION = "1.5.3"
MODES = [(packing, adam) for packing in ("dense", "packed") for adam in ("selective", "fused")]
LEARNING_RATES = dict(means=RATES["lr_mean"], quats=RATES["lr_quat"], log_scales=RATES["lr_log_scale"], logit_opac=RATES["lr_logit_opacity"],
                      sh0=RATES["lr_sh0"], shN=RATES["lr_sh_rest"])
LIMITS = {  # what ours may take at most: ms of a step, ms of a forward pass, MiB of a step; None: no limit set
    "100k": (None, None, None), "1Mlight": (2.4, 0.8, None), "1M": (4.1, 2.0, None), "3M": (5.5, None, None), "10M": (9.3, 3.5, 6.7 * 1024),
    "15Mx5": (46.0, None, None)}
MIB = 2.0**20


class Inputs(NamedTuple):
    """What both sides get."""
    name: str
    viewmats: torch.Tensor  # [C,4,4] CPU
    Ks: torch.Tensor        # [C,3,3] CPU
    target: torch.Tensor    # [C,H,W,3] uint8 on the device
    repeats: tuple          # warm-up, blocks, calls of a block


def inputs_of(scene, name: str, blocks: int) -> Inputs:
    n, cameras, width, height = CASES[name]
    target = (scene.make_target(cameras, width, height) * 255).to(torch.uint8).cuda().contiguous()
    calls = 5 if n < 10_000_000 else 3 if cameras == 1 else 2  # of a block: the longer a call, the fewer
    return Inputs(name, *scene.make_cameras(cameras, width, height), target, (5 if n < 10_000_000 else 3, blocks, calls))


def timed(run, warm_up: int, blocks: int, calls: int, idle=torch.cuda.synchronize) -> dict:
    """loop_ms, call_ms: medians over `blocks` blocks of `calls` calls, and over `blocks` single calls."""
    for _ in range(warm_up):
        run()
    median = lambda count: statistics.median(_block_ms(run, count, idle) for _ in range(blocks))
    return dict(loop_ms=median(calls), call_ms=median(1))


def _block_ms(run, calls: int, idle) -> float:
    idle()
    begin = time.perf_counter()
    for _ in range(calls):
        run()
    idle()
    return (time.perf_counter() - begin) * 1e3 / calls


# ---- us ---------------------------------------------------------------------------------------------------------------
def measure_ours(scene, inputs: Inputs) -> dict:
    n, cameras, width, height = CASES[inputs.name]
    view = native.view_of(inputs.viewmats.numpy(), inputs.Ks.numpy(), width, height, 3)
    out = [torch.empty(cameras, height, width, *tail, device="cuda") for tail in ((3,), (), ())]
    image, hyper = native.Image(rgb=out[0].data_ptr(), alpha=out[1].data_ptr(), depth=out[2].data_ptr()), native.Hyper(**RATES)
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    with load_engine(scene, n, inputs.name.endswith("light"), {}) as engine:
        forward = lambda: engine._check(engine._lib.spl_render(engine._ctx, ctypes.byref(view), ctypes.byref(image)))
        step = lambda: engine.train_step(view, inputs.target, hyper)
        torch.cuda.empty_cache()  # of making the scene
        result = dict(forward=timed(forward, *inputs.repeats), first=step(), step=timed(step, *inputs.repeats))
        vram, first = engine.vram(), result.pop("first")
        return result | dict(loss=first.loss, pairs=first.n_pairs, isects=first.n_isects, engine_mib=vram.total / MIB,
                             categories_mib={k: capacity / MIB for k, (_, capacity) in vram.categories.items()},
                             driver_mib=(free - torch.cuda.mem_get_info()[0]) / MIB)


# ---- gsplat -----------------------------------------------------------------------------------------------------------
def load_peer():
    """(rasterization, SelectiveAdam, fused_ssim), or the end with one line."""
    try:
        import gsplat
        from fused_ssim import fused_ssim
        from gsplat.cuda._backend import _C
    except (ImportError, OSError) as error:
        sys.exit(f"versus_gsplat: {error}; install gsplat=={VERSION} and fused-ssim built for this torch, or pass --ours-only")
    if gsplat.__version__ != VERSION or _C is None:
        sys.exit(f"versus_gsplat: gsplat {gsplat.__version__} {'without its CUDA part ' if _C is None else ''}is installed, must be {VERSION} "
                 "with it; install that, or pass --ours-only")
    return gsplat.rasterization, gsplat.SelectiveAdam, fused_ssim


def measure_forward(rasterization, s: dict, view: dict, packed: bool, repeats: tuple) -> dict:
    activated = (s["means"], s["quats"], s["log_scales"].exp(), s["logit_opac"].sigmoid(), torch.cat([s["sh0"], s["shN"]], 1))
    with torch.no_grad():
        run = lambda: rasterization(*activated, packed=packed, **view)
        pairs = run()[2]
        counts = dict(isects=pairs["flatten_ids"].numel(), pairs=int((pairs["radii"] > 0).all(-1).sum()))
        del pairs
        return timed(run, *repeats) | counts


def measure_step(peer, scene_cpu: dict, view: dict, target, mode: tuple, repeats: tuple) -> dict:
    """A whole training step of raw parameters: activations, rasterization, loss, backward, six optimisers. `target` [C,H,W,3] float."""
    rasterization, selective_adam, fused_ssim = peer
    packed, selective = mode[0] == "packed", mode[1] == "selective"
    target_chw = target.permute(0, 3, 1, 2).contiguous()
    held = torch.cuda.memory_allocated()
    p = {k: torch.nn.Parameter(v.cuda()) for k, v in scene_cpu.items()}
    groups = [[dict(params=[p[k]], lr=LEARNING_RATES[k])] for k in p]
    optimisers = [selective_adam(g, eps=RATES["eps"], betas=(0.9, 0.999)) if selective else torch.optim.Adam(g, eps=RATES["eps"], fused=True) for g in groups]

    def step():
        image, _, info = rasterization(p["means"], p["quats"], p["log_scales"].exp(), p["logit_opac"].sigmoid(), torch.cat([p["sh0"], p["shN"]], 1),
                                       packed=packed, **view)
        loss = 0.8 * (image - target).abs().mean() + 0.2 * (1 - fused_ssim(image.permute(0, 3, 1, 2), target_chw))
        loss.backward()
        seen = [_seen(info, packed, len(p["means"]))] if selective else []
        for optimiser in optimisers:
            optimiser.step(*seen)
            optimiser.zero_grad(set_to_none=True)
        return loss.detach()

    torch.cuda.reset_peak_memory_stats()
    loss = float(step())
    return timed(step, *repeats) | dict(loss=loss, peak_mib=(torch.cuda.max_memory_allocated() - held) / MIB,
                                        reserved_mib=(torch.cuda.max_memory_reserved() - held) / MIB)


def _seen(info: dict, packed: bool, n: int) -> torch.Tensor:
    """[n] bool: in any image."""
    if not packed:
        return (info["radii"] > 0).all(-1).any(0)
    return torch.zeros(n, dtype=torch.bool, device="cuda").index_fill_(0, info["gaussian_ids"], True)


def measure_gsplat(peer, scene, inputs: Inputs, modes: list) -> list[dict]:
    """A record of each mode's step; the forward pass once for packed and dense."""
    n, _, width, height = CASES[inputs.name]
    made = scene.make_scene(n, size=scene.SIZE_LIGHT if inputs.name.endswith("light") else None, dev="cuda")
    view = dict(viewmats=inputs.viewmats.cuda(), Ks=inputs.Ks.cuda(), width=width, height=height, sh_degree=3)
    records = {mode: dict(packing=mode[0], adam=mode[1]) for mode in modes}
    for packing in {mode[0]: 0 for mode in modes}:
        forward = measure_forward(peer[0], made, view, packing == "packed", inputs.repeats)
        for mode in modes:
            if mode[0] == packing:
                records[mode]["forward"] = forward
        free_cache()
    made = {k: v.cpu() for k, v in made.items()}
    free_cache()
    target = inputs.target.float() / 255
    for mode in modes:
        records[mode]["step"] = measure_step(peer, made, view, target, mode, inputs.repeats)
        free_cache()
    return list(records.values())


def free_cache() -> None:
    gc.collect()
    torch.cuda.empty_cache()


# ---- the table --------------------------------------------------------------------------------------------------------
def best(records: list[dict], what: str, figure: str) -> tuple[float, str]:
    """The least of a figure (of `step` or `forward`) over the modes, and the mode that has it."""
    record = min(records, key=lambda r: r[what][figure])
    return record[what][figure], f"{record['packing']} {record['adam']}" if what == "step" else record["packing"]


def compare(name: str, ours: dict, records: list[dict]) -> list[dict]:
    """Rows (what, unit, gsplat, mode, ours, ratio, limit, within): gsplat's best mode against us and the limit. Without records gsplat is None."""
    figures = [("step", "ms", "step", "loop_ms", ours["step"]["loop_ms"]), ("forward", "ms", "forward", "loop_ms", ours["forward"]["loop_ms"]),
               ("peak memory of the step", "MiB", "step", "peak_mib", ours["engine_mib"])]
    rows = []
    for (what, unit, part, figure, mine), limit in zip(figures, LIMITS[name]):
        theirs, mode = best(records, part, figure) if records else (None, "")
        rows.append(dict(case=name, what=what, unit=unit, gsplat=theirs, mode=mode, ours=mine, ratio=theirs / mine if records else None,
                         limit=limit, within=None if limit is None else mine <= limit))
    return rows


def loss_difference(ours: dict, records: list[dict]) -> float:
    """The largest relative difference of the first step's loss: both sides did the same work."""
    return max((abs(r["step"]["loss"] / ours["loss"] - 1) for r in records), default=0.0)


def markdown(rows: list[dict]) -> str:
    show = lambda x, unit: "-" if x is None else f"{x:.2f} {unit}" if unit == "ms" else f"{x:.0f} {unit}"
    lines = ["| case | what | gsplat, best mode | ours | ratio | at most |", "|---|---|---|---|---|---|"]
    for r in rows:
        verdict = "" if r["within"] is None else ", within" if r["within"] else ", **over**"
        ratio = "-" if r["ratio"] is None else f"{r['ratio']:.2f}x"
        theirs = show(r["gsplat"], r["unit"]) + (f" ({r['mode']})" if r["mode"] else "")
        lines.append(f"| {r['case']} | {r['what']} | {theirs} | {show(r['ours'], r['unit'])} | {ratio} | {show(r['limit'], r['unit'])}{verdict} |")
    return "\n".join(lines)


def run_case(peer, scene, name: str, blocks: int) -> dict:
    inputs = inputs_of(scene, name, blocks)
    modes = MODES[:3] if name == "15Mx5" else MODES  # packed with the fused Adam is the slowest everywhere
    records = measure_gsplat(peer, scene, inputs, modes) if peer else []
    free_cache()
    ours = measure_ours(scene, inputs)
    free_cache()
    return dict(case=name, ours=ours, gsplat=records, loss_difference=loss_difference(ours, records), rows=compare(name, ours, records))


def run_cases(peer, args) -> bool:
    """True: the losses agree and no limit is exceeded."""
    spec = importlib.util.spec_from_file_location("scene", args.scene)
    scene = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(scene)
    results = []
    for name in args.cases.split(","):
        begin = time.perf_counter()
        results.append(result := run_case(peer, scene, name, args.blocks))
        print(f"{name}: {time.perf_counter() - begin:.0f} s, losses differ by {result['loss_difference']:.1e}", flush=True)
        print("\n".join(f"  {r['packing']} {r['adam']}: " + ", ".join(f"{k} {v:.5g}" for part in ("forward", "step") for k, v in r[part].items())
                        for r in result["gsplat"]), flush=True)
        report = dict(device=torch.cuda.get_device_name(), date=datetime.date.today().isoformat(), commit=args.commit, torch=torch.__version__,
                      gsplat=VERSION if peer else None, blocks=args.blocks, method=__doc__.split("\n\n")[2], cases=results)
        if args.out:  # after each case: a run that is cut short keeps what it has
            with open(args.out, "w") as file:
                json.dump(report, file, indent=1)
    rows = [row for result in results for row in result["rows"]]
    print(markdown(rows))
    apart = [r["case"] for r in results if r["loss_difference"] > 1e-3]
    if apart:
        print(f"the losses of {', '.join(apart)} differ by more than 1e-3: the sides did not do the same work")
    return not apart and all(row["within"] is not False for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scene", help="path of scene.py: measure")
    parser.add_argument("--parity", metavar="NPZ", help="path of gsplat's test_garden.npz: compare values and gradients")
    parser.add_argument("--tensors", default="cpu", choices=("cpu", "cuda"), help="where the tensors given to our rasterize lie (--parity)")
    parser.add_argument("--cases", default=",".join(CASES), help="default: all")
    parser.add_argument("--blocks", type=int, default=20, help="blocks of calls of each median, at least 20")
    parser.add_argument("--ours-only", action="store_true", help="without gsplat")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", help="JSON file")
    args = parser.parse_args()
    if not (args.scene or args.parity):
        parser.error("give --scene or --parity")
    if unknown := set(args.cases.split(",")) - set(CASES):
        parser.error(f"--cases {','.join(sorted(unknown))}: must be of {', '.join(CASES)}")
    if args.ours_only and args.parity:
        parser.error("--parity needs gsplat")
    peer = None if args.ours_only else load_peer()
    if not torch.cuda.is_available():
        sys.exit("versus_gsplat: torch sees no CUDA device; run it on a machine with one")
    good = parity.run(peer[0], args.parity, args.tensors) if args.parity else True
    if args.scene:
        good = run_cases(peer, args) and good
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
