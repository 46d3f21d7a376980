"""Speed of the CPU backend on fixed scenes: a training step at 160x120 with 30k Gaussians, a render at 640x480 with 100k.

    python bench/cpu_step.py [--threads 2] [--out bench/results/NAME.json]

Scenes are seeded and all Gaussians lie in front of the camera. Medians of 30 after 10 warm-up calls."""
import argparse
import datetime
import json
import statistics
import subprocess
import time
from pathlib import Path

import numpy as np

from spirula_gpu import Camera, Config, Engine
from spirula_gpu.native import view
from spirula_gpu.trainer import Trainer

WARM_UP, REPEATS = 10, 30


def fill(engine: Engine, n: int, sigma_m: float, seed: int = 0) -> None:
    """n Gaussians of SH degree 3 in a 6 x 4 x 5 m box in front of the camera."""
    rng = np.random.default_rng(seed)
    means = np.c_[rng.uniform(-3, 3, n), rng.uniform(-2, 2, n), rng.uniform(1, 6, n)]
    engine.append(means, rng.normal(size=(n, 4)), np.log(sigma_m) + 0.3 * rng.normal(size=(n, 3)), rng.normal(0, 1.5, n), 0.2 * rng.normal(size=(n, 16, 3)))


def median_ms(call) -> float:
    times = []
    for i in range(WARM_UP + REPEATS):
        begin = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times[WARM_UP:])


def training_step(threads: int, alias: bool = True) -> dict:
    camera, rng = Camera(160, 120, 131.0, 131.0, 80.0, 60.0), np.random.default_rng(1)
    with Engine("cpu", sh_degree=3, threads=threads, arena_alias=alias) as engine:
        fill(engine, 30_000, 0.02)
        v, hyper = view(camera, np.eye(4), 3), Trainer(engine, Config())._hyper()
        image, depth_m = rng.integers(0, 256, (120, 160, 3), np.uint8), np.full((120, 160), 3, np.float32)
        stats = []
        ms = median_ms(lambda: stats.append(engine.train_step(v, image, hyper, depth_m)))
        vram = engine.vram()
        phases = {name: round(statistics.median(s.ms[name] for s in stats[WARM_UP:]), 3) for name in stats[0].ms}
        return {"ms": round(ms, 2), "steps_per_s": round(1e3 / ms, 1), "phases_ms": phases, "pairs": stats[-1].n_pairs, "isects": stats[-1].n_isects,
                "engine_bytes": vram.total, "arena_saves_bytes": vram.arena_saved, "last_loss": stats[-1].loss}


def render(threads: int) -> dict:
    with Engine("cpu", sh_degree=3, threads=threads) as engine:
        fill(engine, 100_000, 0.02)
        v = view(Camera(640, 480, 525.0, 525.0, 320.0, 240.0), np.eye(4), 3)
        ms = median_ms(lambda: engine.render(v))
        return {"ms": round(ms, 2), "frames_per_s": round(1e3 / ms, 1)}


def machine() -> dict:
    model = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "unknown")
    flags = next((line for line in open("/proc/cpuinfo") if line.startswith("flags")), "")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent).stdout.strip()
    return {"cpu": model, "avx512": "avx512f" in flags, "date": datetime.date.today().isoformat(), "commit": commit}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out")
    options = parser.parse_args()
    aliased, separate = training_step(options.threads), training_step(options.threads, alias=False)
    result = {"machine": machine(), "threads": options.threads, "train_step_160x120_30k_sh3": aliased,
              "train_step_one_thread": training_step(1), "render_640x480_100k_sh3": render(options.threads),
              "arena": {"aliased_bytes": aliased["engine_bytes"], "separate_bytes": separate["engine_bytes"],
                        "same_result": aliased["last_loss"] == separate["last_loss"]}}
    text = json.dumps(result, indent=2)
    print(text)
    if options.out:
        Path(options.out).write_text(text + "\n")


if __name__ == "__main__":
    main()
