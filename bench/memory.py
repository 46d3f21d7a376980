"""What large maps take on a GPU: bytes by category and technique, the largest map in a budget, a trained dataset of 10M, files of 10M.

    python bench/memory.py --scene ../shared/bench/scene.py --out bench/results/memory_h200.json --commit $(git rev-parse HEAD)
    python bench/memory.py --scene ../shared/bench/scene.py --only dataset,drift

techniques   15M Gaussians, 5 cameras 1600x1066, one step: MiB by category with and without the arena, full and compact; and, from the counts of
             that step, what buffers without each technique would take (`instead`)
budget       the largest map of the scene that trains in 8 GiB at 1920x1080 (compact): found by the forecast, then trained
dataset      10M Gaussians trained for 500 steps on 60 views of 1600x1066 that the scene was rendered to (JPEG, every eighth held out), from its points:
             isotropic, half the root mean square distance of 4 neighbours, random rotation, opacity 0.1; with the rates of gsplat, and with those of offline.py,
             falling over the run. Both precisions
drift        10,000 steps with regularisers and noise, of a map of which half is never seen: bytes of that half that have changed
crowded      training in what another process leaves of the device, which it takes away and gives back
checkpoint   10M Gaussians written to disk and read

Needs torch with CUDA; scene.py as of bench_step.py."""
import argparse
import datetime
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import cv2
import numpy as np
import torch

from bench_step import RATES, load_engine, load_scene
from spirula_gpu import Camera, Config, Frame, Mapper, native
from spirula_gpu.config import replaced
from spirula_gpu.metrics import psnr
from spirula_gpu.offline import ScheduleConfig
from spirula_gpu.splats import SH0

MIB, GIB = 1 << 20, 1 << 30


def mib(count: float) -> float:
    return round(count / MIB, 1)


def step_of(scene, engine, cameras: int, width: int, height: int):
    """A function that trains one step of the scene's views, and returns its StepStats."""
    viewmats, Ks = scene.make_cameras(cameras, width, height)
    view = native.view_of(viewmats.numpy(), Ks.numpy(), width, height, 3)
    target = (scene.make_target(cameras, width, height) * 255).to(torch.uint8).cuda().contiguous()
    torch.cuda.synchronize()
    hyper = native.Hyper(**RATES)
    return lambda: engine.train_step(view, target, hyper)


# ---- bytes by technique ----------------------------------------------------------------------------------------------

def techniques(scene) -> dict:
    n, cameras, width, height = 15_000_000, 5, 1600, 1066
    held = {}
    for precision in native.PRECISIONS:
        for alias in (False, True):
            with load_engine(scene, n, False, dict(precision=precision, arena_alias=alias)) as engine:
                stats = step_of(scene, engine, cameras, width, height)()
                report = engine.vram()
                by_category = {name: mib(used) for name, (used, _) in report.categories.items() if used}
                held[f"{precision}, {'arena' if alias else 'a buffer per row'}"] = dict(total_mib=mib(report.total), **by_category)
    pairs, isects, tested = stats.n_pairs, stats.n_isects, n * cameras
    K = 48  # floats of SH
    instead = {
        "packed projection: 24 bytes per 128 tested pairs": ("an id and a place, 8 bytes a tested pair", mib(24 / 128 * tested), mib(8 * tested)),
        "screen rows of visible pairs, 40 + 8 + 6 bytes": ("[C, N] arrays", mib(54 * pairs), mib(54 * tested)),
        "AABB16: 8 bytes a visible pair": ("four float32", mib(8 * pairs), mib(16 * pairs)),
        "tile keys of 2 bytes, pairs sorted by depth before: 2 x (2 + 4) bytes an intersection": ("64-bit keys, 2 x (8 + 4)", mib(12 * isects), mib(24 * isects)),
        "fused optimiser: no gradients in memory": ("59 floats a Gaussian", 0.0, mib(236 * n)),
        "one second moment a degree of SH, first moments of degree 0": ("two moments a coefficient", mib(n * 4 * (4 + 3)), mib(n * 4 * 2 * K)),
        "compact codes: 142 bytes a Gaussian": ("float32 of the same, 368", mib(142 * n), mib(368 * n)),
    }
    return dict(gaussians=n, cameras=cameras, width=width, height=height, pairs=pairs, isects=isects, held=held,
                instead={name: dict(instead_of=other, mib=now, instead_mib=then) for name, (other, now, then) in instead.items()})


# ---- the largest map -------------------------------------------------------------------------------------------------

def budget(scene, budget_bytes: int = 8 * GIB) -> dict:
    width, height, options = 1920, 1080, dict(precision="compact")
    with load_engine(scene, 5_000_000, False, options) as engine:
        s = step_of(scene, engine, 1, width, height)()
    share, tiles = s.n_pairs / 5e6, s.n_isects  # intersections hardly grow with n: sizes fall as it grows
    fits = lambda n: native.forecast("cuda", gaussians=n, width=width, height=height, pairs=int(share * n), isects=int(tiles * max(1, (n / 5e6) ** 0.5)), max_gaussians=n,
                                     budget_bytes=budget_bytes, **options).total <= budget_bytes
    low, high = 5_000_000, 80_000_000
    while high - low > 250_000:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    n = low // 250_000 * 250_000
    while True:
        try:
            free = torch.cuda.mem_get_info()[0]
            with load_engine(scene, n, False, options | dict(budget_bytes=budget_bytes)) as engine:
                torch.cuda.empty_cache()
                step = step_of(scene, engine, 1, width, height)
                stats, begin = [step() for _ in range(20)][-1], time.perf_counter()
                for _ in range(10):
                    step()
                ms = (time.perf_counter() - begin) * 100
                torch.cuda.empty_cache()
                return dict(budget_mib=mib(budget_bytes), gaussians=n, pairs=stats.n_pairs, isects=stats.n_isects, step_ms=round(ms, 2), engine_mib=mib(engine.vram().total),
                            driver_mib=mib(free - torch.cuda.mem_get_info()[0]))
        except native.NativeError as error:
            print(f"  {n:,}: {error}", flush=True)
            n = int(0.96 * n)


# ---- a dataset ---------------------------------------------------------------------------------------------------------

def orbit(n_views: int) -> list[np.ndarray]:
    """T_cam_world of ../shared/bench/make_dataset.py."""
    out = []
    for i in range(n_views):
        t = 2 * np.pi * i / n_views
        eye = np.array([(9 + 2.5 * np.sin(3 * t)) * np.cos(t), (9 + 2.5 * np.sin(3 * t)) * np.sin(t), 2.4 + np.cos(5 * t)])
        z = np.array([np.sin(7 * t), np.cos(4 * t), 0.9]) - eye
        z /= np.linalg.norm(z)
        x = np.cross(z, [0, 0, 1.0])
        x /= np.linalg.norm(x)
        T = np.eye(4)
        T[:3, :3] = np.stack([x, np.cross(z, x), z], 1)
        T[:3, 3] = eye
        out.append(np.linalg.inv(T))
    return out


def dataset(scene, n: int = 10_000_000, steps: int = 500, n_views: int = 60, width: int = 1600, height: int = 1066) -> dict:
    from scipy.spatial import cKDTree
    f = 0.5 * width / np.tan(np.radians(35))
    K = np.array([[f, 0, width / 2], [0, f, height / 2], [0, 0, 1]], np.float32)
    views = [native.view_of(T[None].astype(np.float32), K[None], width, height, 3) for T in orbit(n_views)]
    s = scene.make_scene(n, size=scene.SIZE_LIGHT, dev="cuda")
    m = s["means"]
    color = torch.stack([torch.sin(1.3 * m[:, 0] + 0.7 * m[:, 2]), torch.sin(1.1 * m[:, 1] + 2 * m[:, 2] + 1), torch.sin(0.9 * (m[:, 0] + m[:, 1]) + 3 * m[:, 2] + 2)], 1) * 0.35 + 0.15 * torch.sin(17 * m) + 0.5
    sh = torch.cat([((color - 0.5) / SH0)[:, None], s["shN"] * 0.5], 1)
    images = []
    with native.Engine("cuda", max_gaussians=n) as engine:
        engine.append(*(a.cpu().numpy() for a in (m, s["quats"], s["log_scales"], s["logit_opac"], sh)))
        for view in views:
            rgb = (engine.render(view)[0][0].clip(0, 1) * 255).astype(np.uint8)
            images.append(cv2.imdecode(cv2.imencode(".jpg", rgb, [cv2.IMWRITE_JPEG_QUALITY, 95])[1], cv2.IMREAD_COLOR))
    points, colors = m.cpu().numpy(), color.clamp(0, 1).cpu().numpy()
    del s, m, color, sh
    torch.cuda.empty_cache()
    begin = time.perf_counter()
    near = cKDTree(points, balanced_tree=False, compact_nodes=False).query(points, k=5, workers=-1)[0][:, 1:]
    sigma = 0.5 * np.sqrt(np.square(near).mean(1)) + 1e-8
    print(f"  neighbours of {n:,} points: {time.perf_counter() - begin:.1f} s", flush=True)
    start = (points, np.random.default_rng(3).normal(size=(n, 4)).astype(np.float32), np.tile(np.log(sigma)[:, None], (1, 3)).astype(np.float32), np.full(n, np.log(0.1 / 0.9), np.float32),
             np.concatenate([((colors - 0.5) / SH0)[:, None], np.zeros((n, 15, 3), np.float32)], 1).astype(np.float32))
    return {precision: {name: train_dataset(precision, rates, start, views, images, steps) for name, rates in RATES_OF.items()} for precision in native.PRECISIONS}


def gsplat_rates(_: float) -> dict:
    return dict(lr_mean=1.6e-4 * EXTENT, lr_quat=1e-3, lr_log_scale=5e-3, lr_logit_opacity=5e-2, lr_sh0=2.5e-3, lr_sh_rest=2.5e-3 / 20)


def own_rates(progress: float) -> dict:
    """Of ScheduleConfig, as offline.py makes them fall."""
    s, names = ScheduleConfig(), ("lr_quat", "lr_log_scale", "lr_logit_opacity", "lr_sh0", "lr_sh_rest")
    return dict(lr_mean=s.lr_mean * EXTENT * s.lr_mean_final ** progress, **{name: getattr(s, name) * s.lr_final ** progress for name in names})


EXTENT = 11.5  # of the cameras, m
RATES_OF = {"rates of gsplat": gsplat_rates, "rates of offline.py": own_rates}


def train_dataset(precision: str, rates, start, views, images, steps: int) -> dict:
    hyper = native.Hyper(beta1=0.9, beta2=0.999, eps=1e-15, ssim_weight=0.2)
    targets = [torch.from_numpy(image[None]).cuda() for image in images]
    training = [i for i in range(len(views)) if i % 8]
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    with native.Engine("cuda", max_gaussians=len(start[0]), precision=precision) as engine:
        engine.append(*start)
        engine.sort()
        times, hits = [], []
        for step in range(steps):
            i = training[step * 37 % len(training)]
            for name, value in rates(step / steps).items():
                setattr(hyper, name, value)
            begin = time.perf_counter()
            stats = engine.train_step(views[i], targets[i], hyper)
            times.append((time.perf_counter() - begin) * 1e3)
            hits.append(stats.n_isects)
        report = engine.vram()
        psnrs = [psnr(engine.render(views[i])[0][0].clip(0, 1).astype(np.float64), images[i] / 255.0) for i in range(0, len(views), 8)]
        begin = time.perf_counter()
        for step in range(100):  # as a trainer runs them: the end of a step is not waited for
            i = training[step * 37 % len(training)]
            engine.train_step(views[i], targets[i], hyper, wait=step == 99)
        deferred = (time.perf_counter() - begin) * 10
        late = sorted(times[steps // 2:])
        return dict(steps=steps, median_ms=round(late[len(late) // 2], 2), p90_ms=round(late[len(late) * 9 // 10], 2), deferred_ms=round(deferred, 2), engine_mib=mib(report.total),
                    driver_mib=mib(free - torch.cuda.mem_get_info()[0]), psnr=round(float(np.mean(psnrs)), 3), isects_first=hits[0], isects_last=int(np.mean(hits[-20:])))


# ---- what must not change ------------------------------------------------------------------------------------------------

def drift(scene, n: int = 100_000, steps: int = 10_000) -> dict:
    """Half of the map lies behind the camera. Blocks of 256 that hold something of both halves count as seen."""
    width, height = 320, 240
    s = scene.make_scene(n, size=scene.SIZE_LIGHT, dev="cpu")
    viewmats, Ks = scene.make_cameras(1, width, height)
    T = np.linalg.inv(viewmats[0].double().numpy())
    means = np.concatenate([s["means"].numpy(), (T[:3, 3] - 5 * T[:3, 2] + 0.5 * np.random.default_rng(0).normal(size=(n, 3)))]).astype(np.float32)  # 5 m behind it
    twice = lambda a: np.concatenate([a.numpy()] * 2)
    view, hyper = native.view_of(viewmats.numpy(), Ks.numpy(), width, height, 3), native.Hyper(**RATES, opacity_reg=0.01, scale_reg=0.01, noise=5e5)
    target = (scene.make_target(1, width, height) * 255).to(torch.uint8).cuda().contiguous()
    out = {}
    for precision in native.PRECISIONS:
        with native.Engine("cuda", max_gaussians=2 * n, precision=precision) as engine:
            engine.append(means, twice(s["quats"]), twice(s["log_scales"]), twice(s["logit_opac"]), twice(torch.cat([s["sh0"], s["shN"]], 1)))
            block = engine.constant("SPL_OPT_BLOCK")
            first = -(-n // block) * block
            unseen = lambda: {name: engine.read(name, first, 2 * n - first).tobytes() for name in engine.saved_rows() if name not in ("map.exponents", "map.sh_rest")}  # codes: read as map.*
            seen = engine.read("map.mean", 0, n)
            before, stats = unseen(), None
            for step in range(steps):
                hyper.seed = step
                stats = engine.train_step(view, target, hyper, wait=step + 1 == steps)
            changed = [name for name, values in unseen().items() if values != before[name]]
            out[precision] = dict(steps=steps, unseen=2 * n - first, seen_and_moved=int((engine.read("map.mean", 0, n) != seen).any(1).sum()), rows_changed=changed, loss=stats.loss)
    return out


CROWD = """
import sys, time, torch
torch.cuda.init()
held = []
for line in sys.stdin:
    leave = float(line)
    held.clear(); torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    piece = 1 << 30
    while leave >= 0 and piece >= 1 << 21:  # the allocator cannot have the very last bytes
        take = int(min(piece, torch.cuda.mem_get_info()[0] - leave))
        try: held.append(torch.empty(take, dtype=torch.uint8, device="cuda")) if take >= 1 << 21 else None
        except torch.OutOfMemoryError: take = 0
        if take < piece: piece //= 4
    print(torch.cuda.mem_get_info()[0], flush=True)
"""


def crowded(_) -> dict:
    """A mapper whose map grows while another process leaves it less and less of the device, then all again."""
    other = subprocess.Popen([sys.executable, "-c", CROWD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def leave(count: float) -> int:
        other.stdin.write(f"{count}\n")
        other.stdin.flush()
        return int(other.stdout.readline())

    leave(-1)
    camera, rng, looks = Camera(640, 480, 500.0, 500.0, 320.0, 240.0), np.random.default_rng(0), []
    mapper = Mapper(replaced(Config(), {"engine.backend": "cuda", "engine.max_gaussians": 20_000_000, "engine.sh_degree": 3, "insert.hole_spacing_px": 1.0}))
    try:
        texture = rng.integers(0, 256, (480, 640, 3), dtype=np.uint8)
        for i in range(60):
            T = np.eye(4)
            T[0, 3] = 0.5 * i
            free = leave({20: 256 * MIB, 30: 64 * MIB, 40: 0, 50: -1}[i]) if i in (20, 30, 40, 50) else None
            mapper.ledger.arrived()
            mapper.submit(Frame(i * 100_000_000 + 1, camera, T, np.roll(texture, 37 * i, 1), rng.uniform(1, 3, (480, 640)).astype(np.float32)))
            mapper.run_due()
            status = mapper.status()
            if free is not None or i % 10 == 9:
                looks.append(dict(frame=i, state=status.state, gaussians=status.gaussians, steps=status.steps, hint=status.hint, free_mib=mib(torch.cuda.mem_get_info()[0])))
        return dict(looks=looks, state=mapper.status().state, last_error=mapper.status().last_error, pictures_finite=bool(np.isfinite(mapper._engine.render(mapper._engine.view(camera, np.eye(4), 3, blur_px2=0.3))[0]).all()))
    finally:
        mapper.stop()
        other.stdin.close()
        other.wait()


# ---- files -------------------------------------------------------------------------------------------------------------------

def checkpoint(scene, n: int = 10_000_000) -> dict:
    out = {}
    camera = Camera(64, 48, 50.0, 50.0, 32.0, 24.0)
    s = scene.make_scene(n, size=scene.SIZE_LIGHT, dev="cuda")
    arrays = [a.cpu().numpy() for a in (s["means"], s["quats"], s["log_scales"], s["logit_opac"], torch.cat([s["sh0"], s["shN"]], 1))]
    del s
    torch.cuda.empty_cache()
    for precision in native.PRECISIONS:
        config = replaced(Config(), {"engine.backend": "cuda", "engine.max_gaussians": n + 10_000, "engine.sh_degree": 3, "engine.precision": precision})
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "map.ckpt")
            mapper = Mapper(config)
            mapper.ledger.arrived()
            mapper.submit(Frame(1, camera, np.eye(4), np.full((48, 64, 3), 128, np.uint8), np.full((48, 64), 2, np.float32)))
            mapper.run_due()
            mapper._engine.append(*arrays)
            begin = time.perf_counter()
            mapper.command("save_checkpoint", path).result()
            save_s, size = time.perf_counter() - begin, Path(path).stat().st_size
            mapper.stop()
            again = Mapper(config)
            begin = time.perf_counter()
            resumed = again.resume(path)
            out[precision] = dict(gaussians=resumed.gaussians, file_mib=mib(size), save_s=round(save_s, 2), resume_s=round(time.perf_counter() - begin, 2))
            again.stop()
    return out


PARTS = dict(techniques=techniques, budget=budget, dataset=dataset, drift=drift, crowded=crowded, checkpoint=checkpoint)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scene", required=True, help="path of scene.py")
    parser.add_argument("--only", default=",".join(PARTS), help="some of " + ", ".join(PARTS))
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", help="JSON file, written after every part")
    args = parser.parse_args()
    scene = load_scene(args.scene)
    result = dict(device=torch.cuda.get_device_name(), date=datetime.date.today().isoformat(), commit=args.commit, torch=torch.__version__)
    for name in args.only.split(","):
        begin = time.perf_counter()
        result[name] = PARTS[name](scene)
        torch.cuda.empty_cache()
        print(f"{name} ({time.perf_counter() - begin:.0f} s): {json.dumps(result[name], indent=1)}", flush=True)
        if args.out:
            Path(args.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
