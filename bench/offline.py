"""Offline training on the engine: a COLMAP model, a 7-Scenes or TUM folder, or a packed scene; prints and writes held-out figures.

    python bench/offline.py colmap_desk --size 953x535 --eval 1000,7000 --set engine.max_gaussians=300000 --out desk.json
    python bench/offline.py 7scenes_redkitchen --color-f 525 --color-offset "-0.025 0 0" --pack kitchen.npz
    python bench/offline.py kitchen.npz --variant "" --variant "schedule.lr_final=0.1,init.points=300000"

Every eighth frame (index % 8 == 4, by name) is held out. Each --variant is one run on top of --set; --sweep reads a JSON list
of such runs, each an object {name: value} or a text as of --variant. `--list` prints the parameters."""
import argparse
import datetime
import json
import os
import sys
from pathlib import Path

import cv2
import numpy as np

from reading import device, settings
from spirula_gpu.config import replaced, rows
from spirula_gpu.native import NativeError
from spirula_gpu.offline import OfflineConfig, OfflineRun, TrainingSet, check_words
from spirula_gpu.ply import check_path
from spirula_ros.arguments import numbers
from spirula_ros.scenes import read_scene
from spirula_ros.train import list_parameters


def variants(args) -> dict[str, OfflineConfig]:
    """What to run, by name: --set alone, or that with each variant on top."""
    base = replaced(OfflineConfig(), settings(",".join(args.set)))
    parsed = [settings(v) if isinstance(v, str) else v for v in args.variant + read_sweep(args.sweep)] or [{}]
    found = {",".join(f"{k}={v}" for k, v in values.items()) or "base": replaced(base, values) for values in parsed}
    for config in found.values():
        check_words(config)
    return found


def read_sweep(path: str | None) -> list:
    if not path:
        return []
    try:
        listed = json.loads(Path(path).read_text())
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(listed, list) or not all(isinstance(v, (str, dict)) for v in listed):
        raise ValueError(f'{path}: must be a list of variants, like ["init.opacity=0.2", {{"grow.rate": 0.1}}]')
    return listed


def marks_of(text: str | None, config: OfflineConfig) -> list[int]:
    """Steps to measure at."""
    last = config.schedule.max_steps
    marks = sorted({int(word) for word in text.split(",")}) if text else [last]
    if not 0 <= marks[0] <= marks[-1] <= last:
        raise ValueError(f"--eval {text}: must lie in 0..{last} (schedule.max_steps)")
    return marks


def train(data: TrainingSet, config: OfflineConfig, marks: list[int], renders: Path | None) -> dict:
    """One run: what it was told beyond the defaults, and its figures at the marks."""
    defaults = {name: value for name, value, _ in rows(OfflineConfig())}
    told = {name: value for name, value, _ in rows(config) if value != defaults[name]}
    with OfflineRun(data, config) as run:
        begun_with, figures = len(run.engine), []
        for mark in marks:
            run.train(until=mark)
            figures.append(f := run.evaluate())
            print(f"  step {f.step:6d}: {f.psnr:6.2f} dB  colour-corrected {f.cc_psnr:6.2f}  SSIM {f.ssim:.4f}  {f.gaussians:,} Gaussians  "
                  f"{f.ms_per_step:.3f} ms/step  engine {f.engine_bytes / 2**20:.0f} MiB + images {f.image_bytes / 2**20:.0f} MiB", flush=True)
        if renders:
            write_renders(run, renders)
        return dict(settings=told, device=device(run.engine.backend), begun_with=begun_with, figures=[f._asdict() for f in figures],
                    relocated=run.growth.relocated, added=run.growth.added)


def write_renders(run: OfflineRun, folder: Path) -> None:
    """Truth beside render of each held-out frame."""
    folder.mkdir(parents=True, exist_ok=True)
    for f in run.data.held_out:
        both = np.concatenate([f.rgb, (run.render(f) * 255 + 0.5).astype(np.uint8)], 1)
        cv2.imwrite(str(folder / f"{Path(f.frame_id).stem}.png"), both[..., ::-1])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", help="COLMAP project, 7-Scenes or TUM folder, or .npz of --pack")
    parser.add_argument("--size", help="train at WxH, smaller than the images")
    parser.add_argument("--color-f", type=float, help="focal length of the colour camera, where it is not the depth camera's")
    parser.add_argument("--color-offset", default=(0.0, 0.0, 0.0), type=numbers(3), metavar="'x y z'", help="X_color = X_depth + this, m")
    parser.add_argument("--eval", help="steps to measure at, e.g. 1000,3500,7000; default: the last one")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a parameter of every run")
    parser.add_argument("--variant", action="append", default=[], metavar="A=1,B=2", help="one more run with these parameters")
    parser.add_argument("--sweep", help="JSON file with a list of variants")
    parser.add_argument("--pack", metavar="FILE", help="write the scene as one .npz and end")
    parser.add_argument("--renders", metavar="DIR", help="pictures of the held-out frames, truth beside render, of run n in DIR/n")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", help="JSON file, written after every run")
    parser.add_argument("--list", action="store_true", help="print every parameter with its unit, range and meaning")
    args = parser.parse_args()
    if not (args.data or args.list):
        parser.error("data: a folder or .npz is missing")
    return args


def main() -> None:
    args = arguments()
    if args.list:
        return print(list_parameters())
    check_path("--out", args.out or "")
    check_path("--pack", args.pack or "")
    runs = [(name, config, marks_of(args.eval, config)) for name, config in variants(args).items()]  # bad words end it before the scene is read
    scene = read_scene(args.data, color_f=args.color_f, color_offset=args.color_offset)
    if args.pack:
        scene.save(args.pack)
        return print(f"{args.pack}: {len(scene.names)} images, {Path(args.pack).stat().st_size / 2**20:.1f} MiB")
    data = TrainingSet(scene.frames(tuple(map(int, args.size.split("x"))) if args.size else None), scene.extent, scene.points, scene.colors)
    camera = data.train[0].camera
    print(f"{len(data.train)} frames + {len(data.held_out)} held out, {camera.width}x{camera.height}, {len(scene.points):,} sparse points, "
          f"depth {'yes' if scene.depths else 'no'}, extent {scene.extent:.3f}", flush=True)
    result = dict(data=Path(args.data).name, date=datetime.date.today().isoformat(), commit=args.commit, width=camera.width, height=camera.height,
                  frames=len(data.train), held_out=len(data.held_out), runs={})
    for number, (name, config, marks) in enumerate(runs):
        print(name, flush=True)
        result["runs"][name] = train(data, config, marks, Path(args.renders) / str(number) if args.renders else None)
        if args.out:
            Path(args.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:  # `--list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError, NativeError) as error:
        raise SystemExit(f"offline.py: {error}")
