"""Loop closure: a packed scene is streamed with poses that drift, its corrected path comes at the end, and training goes on. Held-out PSNR
against a stream that never drifted. Inline: the figures do not depend on how busy the machine is.

    python bench/closure.py kitchen.npz --drift ramp --seed 0 --renders out

--drift none | jump (the second half is off) | ramp (it grows over the second quarter and stays); --every N: the path has every N-th frame only."""
import argparse
import json
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np

from spirula_gpu.config import Config, replaced
from spirula_gpu.dataset import Scene
from spirula_gpu.mapper import Mapper

OFF_M = 0.1 * np.array([0.6, 0.0, 0.8])
SHARE = {"none": lambda n: np.zeros(n), "jump": lambda n: 1.0 * (np.arange(n) >= n // 2), "ramp": lambda n: np.clip(4 * np.arange(n) / n - 1, 0, 1)}  # of OFF_M, by frame


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scene", help=".npz of offline.py --pack, with depth")
    parser.add_argument("--drift", choices=SHARE, default="ramp")
    parser.add_argument("--leave", action="store_true", help="never correct it")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--skip", type=int, default=1, help="stream every N-th frame only")
    parser.add_argument("--steps", default="0,250,500,1000", help="after the stream, to measure at")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fps", type=float, default=7.5)
    parser.add_argument("--renders", help="folder: truth beside render of some held-out frames")
    args = parser.parse_args()

    frames = [replace(f, held_out=i % 8 == 4, stamp_ns=10**12 + round(i * args.skip * 1e9 / args.fps)) for i, f in enumerate(Scene.load(args.scene).frames((160, 120))[::args.skip])]
    stamps, true = np.array([f.stamp_ns for f in frames]), np.array([f.T_world_cam for f in frames])
    given = true.copy()
    given[:, :3, 3] += SHARE[args.drift](len(frames))[:, None] * OFF_M
    values = {"engine.backend": "cpu", "engine.seed": args.seed, **{name: json.loads(value) for name, _, value in (word.partition("=") for word in args.set)}}
    mapper = Mapper(replaced(Config(), values))
    for frame, T in zip(frames, given):
        mapper.ledger.arrived()
        mapper.submit(replace(frame, T_world_cam=T))
        mapper.run_due()
    result = dict(drift=args.drift, corrected=not args.leave, seed=args.seed, frames=len(frames), end_of_stream=measured(mapper))
    if not args.leave:
        result["moved"] = mapper.command("correct", stamps[::args.every], true[::args.every]).result()._asdict()
    made = 0
    for steps in map(int, args.steps.split(",")):
        mapper.train(steps=steps - made)
        made, result[f"+{steps}"] = steps, measured(mapper, args.renders and Path(args.renders) / f"{args.drift}_{'left' if args.leave else 'corrected'}_{steps}")
    print(json.dumps(result))


def measured(mapper: Mapper, folder: Path | None = None) -> tuple[float, float]:
    """(dB, SSIM) over the held-out frames."""
    results = mapper.evaluate()
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        for h in results[::4]:
            cv2.imwrite(str(folder / f"{h.frame.stamp_ns}.png"), np.concatenate([h.frame.rgb, h.rgb], 1)[..., ::-1])
    return round(float(np.mean([h.psnr for h in results])), 3), round(float(np.mean([h.ssim for h in results])), 4)


if __name__ == "__main__":
    main()
