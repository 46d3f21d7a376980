"""Streams a posed set through the Mapper, as a robot would, and measures held-out frames over the wall time.

    python bench/stream.py --cases all --root ../shared/data --size 160x120 --lossless --seeds 0,1,2 --out stream_cpu.json
    python bench/stream.py --cases all --root ../shared/data --out stream.json --pictures pictures      # on a GPU: real rate, full size
    python bench/stream.py kitchen.npz --rate 7.5 --refine-seconds 30 --set train.ssim_weight=0.1 --depth lines:64 --poses noise:0.02m,1deg

Real rate: a frame is submitted when the recording says so, the mapper works on its own thread, and what it cannot take is dropped
and counted. --lossless: inline, train.steps_per_frame steps a frame; repeatable. Every eighth frame (index % 8 == 4, by name) is
held out. Disturbances (disturb.py) change training frames alone, but for the drift. --cases takes names of CASES; without it, DATA is a folder or
.npz as of offline.py. LPIPS is not among the figures: its weights are a download of their own."""
import argparse
import datetime
import functools
import json
import time
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import numpy as np

from disturb import Disturbance, disturbed
from reading import device, settings
from spirula_gpu import Config, Frame, Mapper
from spirula_gpu.config import replaced
from spirula_gpu.output import HeldOut
from spirula_ros.scenes import read_scene
from watched import WatchedMapper

FIRST_STAMP_NS = 1_000_000_000
LOOKS = 8  # measurements during the stream, and during the refinement


@dataclass(frozen=True)
class Set:
    folder: str
    rate: float                                # frames a second of the recording
    size: tuple[int, int] | None = None        # None: as the images are
    color_f: float | None = None
    color_offset: tuple[float, ...] = (0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Case:
    """One row of the table."""
    set: str
    disturbance: Disturbance = Disturbance()
    settings: dict = field(default_factory=dict)
    refine_s: float = 30.0


SETS = {"kitchen": Set("7scenes_redkitchen", 7.5, None, 525.0, (-0.025, 0.0, 0.0)),
        "desk": Set("colmap_desk", 2.0, (953, 535)), "cup": Set("colmap_cup", 2.0, (800, 600))}
CASES = {
    "kitchen": Case("kitchen"),
    "kitchen-none": Case("kitchen", Disturbance(depth="none")),
    "kitchen-lines": Case("kitchen", Disturbance(depth="lines:64")),
    "kitchen-unrefined": Case("kitchen", Disturbance(), {"refine.pose": False}),
    "kitchen-poses": Case("kitchen", Disturbance(poses="noise:0.02m,1deg")),
    "kitchen-poses-unrefined": Case("kitchen", Disturbance(poses="noise:0.02m,1deg"), {"refine.pose": False}),
    "kitchen-exposure": Case("kitchen", Disturbance(exposure="ramp:0.5..2")),
    "kitchen-closure": Case("kitchen", Disturbance(closure="0.1m")),
    "kitchen-mover": Case("kitchen", Disturbance(mover=True)),
    "kitchen-mover-masked": Case("kitchen", Disturbance(mover=True, mask=True)),
    "desk": Case("desk"),
    "cup": Case("cup"),
}


# ---- one run ---------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Pace:
    """rate: frames a second; refinement ends with the first of both limits, 0 = no such limit, both 0: none."""
    rate: float
    lossless: bool
    refine_s: float = 0.0
    refine_steps: int = 0


def stamped(frames: list[Frame], rate: float) -> list[Frame]:
    return [replace(f, stamp_ns=FIRST_STAMP_NS + round(i * 1e9 / rate)) for i, f in enumerate(frames)]


def stream(mapper: WatchedMapper, frames: list[Frame], pace: Pace) -> float:
    """All frames, then the mapper is inline. Seconds from the first frame until the last one's time was over and nothing waited."""
    n, due = len(frames), lambda i: mapper.begun + i / pace.rate
    at = {round(k * n / LOOKS) for k in range(1, LOOKS)}
    mapper.begin([] if pace.lossless else [k * n / pace.rate / LOOKS for k in range(1, LOOKS)])
    if not pace.lossless:
        mapper.start()
    for i, frame in enumerate(frames):
        if not pace.lossless:
            time.sleep(max(due(i) - time.monotonic(), 0))
        mapper.ledger.arrived()
        mapper.submit(frame)
        if pace.lossless:
            mapper.run_due()
            if i + 1 in at:
                mapper.look("stream")
    if not pace.lossless:
        from spirula_ros.finish import wait_until_idle
        time.sleep(max(due(n) - time.monotonic(), 0))
        wait_until_idle(mapper)
        mapper.stop()
        if mapper.status().last_error:
            raise ValueError(f"the mapper failed: {mapper.status().last_error}")
    mapper.command("drain").result()
    seconds = time.monotonic() - mapper.begun
    mapper.look("stream", given=True)
    return seconds


def refine(mapper: WatchedMapper, pace: Pace) -> float:
    """One refinement, inline, looked at LOOKS times. Returns its seconds."""
    if not (pace.refine_s or pace.refine_steps):
        return 0.0
    begin, first, done = time.monotonic(), mapper.status().steps, 0

    def progress(_) -> None:
        nonlocal done
        share = max((time.monotonic() - begin) / pace.refine_s if pace.refine_s else 0,
                    (mapper._trainer.steps - first) / pace.refine_steps if pace.refine_steps else 0)
        if done + 1 < LOOKS and share * LOOKS >= done + 1:
            done += 1
            mapper.look("refine")
    mapper.train(seconds=pace.refine_s or None, steps=pace.refine_steps or None, progress=progress)
    seconds = time.monotonic() - begin
    mapper.look("refine", given=True)
    return seconds


def correct(mapper: WatchedMapper, given: list[Frame], true: list[Frame]) -> None:
    """The corrected path, as a loop closure gives it: the true poses."""
    mapper.command("correct", np.array([f.stamp_ns for f in given]), np.array([f.T_world_cam for f in true])).result()
    mapper.look("corrected")


def run(true: list[Frame], d: Disturbance, pace: Pace, config: Config) -> tuple[dict, list[HeldOut]]:
    """One stream with its refinement: the figures, and the held-out frames as the map shows them at the end."""
    seed = config.engine.seed
    frames = disturbed(true, d, seed)
    mapper = WatchedMapper(config)
    try:
        stream_s = stream(mapper, frames, pace)
        in_stream = mapper.stages["step"][1]
        if d.closure:
            correct(mapper, frames, disturbed(true, Disturbance(subset=d.subset), seed))
        refine_s = refine(mapper, pace)
        curve, counts, last = [look.figures() for look in mapper.looks], mapper.ledger.counts(), mapper.looks[-1].held_out()
        figures = dict(seed=seed, stream=[c for c in curve if c["phase"] == "stream"][-1], end=curve[-1], stream_s=round(stream_s, 3), refine_s=round(refine_s, 3),
                       training_share=round(in_stream / stream_s, 4), frames={"in": counts.frames_in, "used": counts.used, "dropped": counts.dropped},
                       keyframes=mapper.status().keyframes, stages=mapper.stage_ms(), memory=mapper.memory(), hint=mapper.status().hint, curve=curve)
        return figures | dict(device=device(mapper.backend)), last
    finally:
        mapper.close()


# ---- many runs -------------------------------------------------------------------------------------------------------

def markdown(results: dict) -> str:
    """The table: means over the seeds, and the spread of the PSNR at the end of the stream where there are several."""
    lines = ["| case | end of stream: PSNR / cc / SSIM (at poses as given, aligned by their own images) | after refinement | Gaussians | used / dropped | ms a step / a keyframe, aligned | training | engine MiB |",
             "|---|---|---|---|---|---|---|---|"]
    for name, case in results.items():
        runs = case["runs"]
        mean = lambda get: sum(map(get, runs)) / len(runs)
        figures = lambda at: " / ".join(f"{mean(lambda r: r[at][key] or float('nan')):.{digits}f}" for key, digits in (("psnr", 2), ("cc_psnr", 2), ("ssim", 3)))
        given = lambda at: f" ({mean(lambda r: r[at]['given_psnr']):.2f}, {mean(lambda r: r[at]['aligned_psnr']):.2f})" if all("given_psnr" in r[at] for r in runs) else ""
        psnrs = [r["stream"]["psnr"] for r in runs]
        spread = f" ({min(psnrs):.2f}..{max(psnrs):.2f})" if len(runs) > 1 and None not in psnrs else ""
        lines.append(f"| {name} | {figures('stream')}{spread}{given('stream')} | {figures('end')}{given('end')} | {mean(lambda r: r['end']['gaussians']):,.0f} "
                     f"| {mean(lambda r: r['frames']['used']):.0f} / {mean(lambda r: sum(r['frames']['dropped'].values())):.0f} "
                     f"| {mean(lambda r: r['stages']['step']['ms']):.2f} / {mean(lambda r: r['stages']['insert']['ms']):.2f}, {mean(lambda r: r['stages']['align']['ms']):.2f} "
                     f"| {mean(lambda r: r['training_share']):.0%} | {mean(lambda r: r['memory']['engine']) / 2**20:.0f} |")
    return "\n".join(lines)


def chosen(args) -> dict[str, Case]:
    """What to run, by name. Options of the command line go over those of a case."""
    over = {f.name: getattr(args, f.name) for f in fields(Disturbance) if getattr(args, f.name)}
    names = [] if not args.cases else list(CASES) if args.cases == "all" else args.cases.split(",")
    if unknown := [name for name in names if name not in CASES]:
        raise ValueError(f"--cases {','.join(unknown)}: must be all, or of {', '.join(CASES)}")
    cases = {name: replace(CASES[name], disturbance=replace(CASES[name].disturbance, **over)) for name in names} if names else {
        Path(args.data).stem: Case("", Disturbance(**over), {}, 0.0)}
    drifting = [name for name, case in cases.items() if case.disturbance.closure]
    if drifting and not hasattr(Mapper, "_do_correct"):
        raise ValueError(f"{', '.join(drifting)}: --closure needs a Mapper with the command `correct`, which takes the corrected path; leave it out")
    return cases


def source(case: Case, args) -> tuple[str, Set]:
    """Where the set lies: DATA, or in --root, as <name>.npz or as its folder."""
    if not case.set:
        return args.data, Set(args.data, args.rate, None, args.color_f, tuple(map(float, args.color_offset.split())))
    packed, folder = (Path(args.root) / name for name in (f"{case.set}.npz", SETS[case.set].folder))
    if not (packed.is_file() or folder.is_dir()):
        raise ValueError(f"--root {args.root}: neither {packed.name} nor {folder.name} is there")
    if packed.is_file():
        return str(packed), replace(SETS[case.set], color_f=None, color_offset=(0.0, 0.0, 0.0))  # its depth is registered
    return str(folder), SETS[case.set]


@functools.lru_cache(1)
def frames_of(path: str, color_f: float | None, color_offset: tuple, size: tuple | None) -> list[Frame]:
    return read_scene(path, color_f=color_f, color_offset=color_offset).frames(size)


def run_case(name: str, case: Case, args, seeds: list[int]) -> dict:
    path, from_set = source(case, args)
    size = tuple(map(int, args.size.split("x"))) if args.size else from_set.size
    rate = args.rate or from_set.rate
    if not rate:
        raise ValueError("--rate: frames a second of the recording, e.g. 7.5")
    true = stamped(frames_of(path, from_set.color_f, from_set.color_offset, size), rate)
    seconds = args.refine_seconds if args.refine_seconds is not None else 0.0 if args.refine_steps or args.lossless else case.refine_s
    pace = Pace(rate, args.lossless, seconds, args.refine_steps)
    told = {"eval.period_s": 0, **case.settings, **settings(",".join(args.set))}
    runs = []
    for seed in seeds:
        figures, last = run(true, case.disturbance, pace, replaced(Config(), told | {"engine.seed": seed}))
        runs.append(figures)
        print(f"{name} seed {seed}: " + "  ".join(f"{at} {figures[at]['psnr'] or float('nan'):.2f} dB" for at in ("stream", "end"))
              + f"  {figures['end']['gaussians']:,} Gaussians  dropped {figures['frames']['dropped']}", flush=True)
    if args.pictures and last:
        write_picture(Path(args.pictures) / name / "compare.png", last)
    camera = true[0].camera
    return dict(data=Path(path).name, width=camera.width, height=camera.height, **asdict(pace), disturbance=asdict(case.disturbance), settings=told, runs=runs)


def write_picture(path: Path, held_out: list[HeldOut]) -> None:
    """Truth, render and error of a few held-out frames."""
    from spirula_ros.report import compare_picture, write_png
    path.parent.mkdir(parents=True, exist_ok=True)
    write_png(path, compare_picture(held_out))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", help="COLMAP project, 7-Scenes or TUM folder, or .npz of `offline.py --pack`")
    parser.add_argument("--cases", help=f"all, or of {', '.join(CASES)}")
    parser.add_argument("--root", default=".", help="with --cases: where the sets are, packed or as folders")
    parser.add_argument("--size", help="WxH, smaller than the images")
    parser.add_argument("--color-f", type=float, help="focal length of the colour camera, where it is not the depth camera's")
    parser.add_argument("--color-offset", default="0 0 0", help="X_color = X_depth + this, m")
    parser.add_argument("--rate", type=float, help="frames a second of the recording")
    parser.add_argument("--lossless", action="store_true", help="inline, so many steps a frame as train.steps_per_frame; refines only when told to")
    parser.add_argument("--refine-seconds", type=float, help="after the stream; default: that of the case, 0 for DATA and with --lossless")
    parser.add_argument("--refine-steps", type=int, default=0, help=".. or so many steps, whichever ends first")
    parser.add_argument("--seeds", default="0", help="e.g. 0,1,2: a run each, of the mapper's choices and the disturbance's")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a parameter of every run")
    parser.add_argument("--subset", metavar="A:B", help="frames A to B - 1 alone")
    parser.add_argument("--depth", metavar="KIND", help="sensor, none, or lines:N, N rows of it alone")
    parser.add_argument("--poses", metavar="noise:0.02m,1deg", help="each camera moved so far and turned so far, at random")
    parser.add_argument("--exposure", metavar="ramp:0.5..2", help="gain of the light over the stream")
    parser.add_argument("--closure", metavar="0.1m", help="drift in the second quarter of the path that the second half keeps; corrected at the end")
    parser.add_argument("--mover", action="store_true", help="a person-sized box walks through")
    parser.add_argument("--mask", action="store_true", help="with --mover: the mapper gets its mask")
    parser.add_argument("--pictures", metavar="DIR", help="DIR/<case>/compare.png: truth, render and error of held-out frames at the end")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", help="JSON file, written after every case")
    args = parser.parse_args()
    if bool(args.data) == bool(args.cases):
        parser.error("give DATA or --cases, one of them")
    return args


def main() -> None:
    args = arguments()
    seeds, results = [int(s) for s in args.seeds.split(",")], {}
    for name, case in chosen(args).items():
        results[name] = run_case(name, case, args, seeds)
        if args.out:
            head = dict(device=results[name]["runs"][0]["device"], date=datetime.date.today().isoformat(), commit=args.commit, lpips=None)
            Path(args.out).write_text(json.dumps(head | dict(cases=results), indent=1) + "\n")
    print(markdown(results))


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        raise SystemExit(f"stream.py: {error}")
