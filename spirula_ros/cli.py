"""`spirula`: make recordings, look at them, replay them. Exit status: 0 good, 2 bad input (one line says what), 1 internal."""
from __future__ import annotations

import argparse
import os
import sys

from .arguments import EXPORTS, count, mebibytes, not_negative, numbers, port, positive, size, step_numbers, whole
from .doctor import add_doctor
from .errors import InputError
from .files import add_files

EXAMPLES = """examples:
  spirula bag synthetic room                       a recording of a synthetic room, with ground truth
  spirula replay room --lossless --out out         map it; report, pictures, .ply and mesh in out/
  spirula replay drive.mcap --backend cuda         a recording of your own, in real time
  spirula replay room --via-ros                    the same through real ROS 2 topics and the node
  spirula train colmap_project out                 a map from photos and poses on the disk, trained offline
  spirula replay room --web                        .. and look at it in a browser meanwhile
  spirula view out/map.ply                         a map or mesh in a browser
  spirula info out/map.ply                         what a file holds: map, recording, checkpoint, mesh, poses
  spirula convert out/map.ply map.spz              a map for the web; also .compressed.ply, .splat, .npy ..
  spirula forecast --gaussians 10e6 --size 1920x1080 --precision compact
                                                   the memory that such a map needs
  spirula doctor                                   what this machine has and lacks
  spirula params > my.yaml                         every parameter; then: spirula replay room --config my.yaml
"""
RGBD_EXAMPLES = """examples:
  spirula bag from-rgbd seq-01 seq_bag --intrinsics "585 585 320 240" --size 320x240
  spirula bag from-rgbd redkitchen kitchen --fps 7.5 --size 160x120 --color-f 525 --color-offset "-0.025 0 0"
  spirula bag from-rgbd redkitchen kitchen64 --fps 7.5 --size 160x120 --color-f 525 --color-offset "-0.025 0 0" --lines 64
  spirula bag from-rgbd rgbd_dataset_freiburg1_desk desk --intrinsics "517.3 516.5 318.6 255.3"
"""
COLMAP_EXAMPLES = """examples:
  spirula bag from-colmap project project_bag --fps 2
  spirula replay project_bag --lossless --refine-seconds 30
"""
REPLAY_EXAMPLES = """examples:
  spirula replay room --lossless --holdout 8 --out out
  spirula replay drive --rate 0.5 --image-topic /front/image_raw --depth-topic /front/depth
  spirula replay room --config my.yaml --set train.steps_per_frame=40 --refine-seconds 30
"""
TRAIN_EXAMPLES = """examples:
  spirula train colmap_desk out --size 953x535 --max-gaussians 300k --eval 1000,3500
  spirula train redkitchen out --color-f 525 --color-offset "-0.025 0 0" --precision compact --export spz
  spirula train colmap_desk out --steps 30000 --set schedule.lr_final=0.1
"""
FORECAST_EXAMPLES = """examples:
  spirula forecast --gaussians 10e6 --size 1920x1080 --sh 3 --precision compact --vram-mb 8192
  spirula forecast --gaussians 300e3 --size 640x480 --backend cpu --render
"""
TOPIC_KINDS = ("image", "compressed", "depth", "points", "mask", "info", "pose", "odom", "tf", "tf_static", "path")


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        return args.run(args) or 0
    except BrokenPipeError:  # `spirula params | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("spirula: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if not _is_input_error(error):
            raise
        print(f"spirula: {error}", file=sys.stderr)
        return 2


def _is_input_error(error: Exception) -> bool:
    from spirula_gpu.native import NativeError
    from spirula_gpu.checkpoint_file import CheckpointError
    from spirula_gpu.splats import FormatError
    return isinstance(error, (InputError, CheckpointError, FormatError, NativeError))


def parser() -> argparse.ArgumentParser:
    top = _parser(argparse.ArgumentParser, prog="spirula", description="Live, photoreal 3D Gaussian maps from images and poses.", epilog=EXAMPLES)
    top.add_argument("--version", action=Version, nargs=0, help="print the version and exit")
    commands = top.add_subparsers(metavar="COMMAND", required=True)
    add_replay(commands)
    add_train(commands)
    bag = commands.add_parser("bag", help="make or look at recordings").add_subparsers(metavar="COMMAND", required=True)
    add_from_rgbd(bag)
    add_from_colmap(bag)
    add_synthetic(bag)
    add_play(bag)
    info = bag.add_parser("info", help="what a recording holds and which topics a replay would use")
    info.add_argument("bag", metavar="BAG")
    add_topics(info)
    info.set_defaults(run=run_info)
    add_files(commands)
    add_view(commands)
    add_forecast(commands)
    add_doctor(commands)
    params = commands.add_parser("params", help="print every parameter as a file for --config and ROS")
    params.add_argument("--config", metavar="F", help="start from this file")
    params.set_defaults(run=run_params)
    return top


def _parser(make, *args, **kw):
    return make(*args, formatter_class=argparse.RawDescriptionHelpFormatter, **kw)


class Version(argparse.Action):
    """Reads the version only when asked for."""

    def __call__(self, parser, *_):
        from .share import version
        print(f"spirula {version()}")
        parser.exit()


# ---- replay ----------------------------------------------------------------------------------------------------------

def add_replay(commands) -> None:
    p = _parser(commands.add_parser, "replay", help="map a recording", epilog=REPLAY_EXAMPLES,
                description="Maps a rosbag2 recording (mcap or sqlite3) and writes report.html, report.json, renders/, compare.png, map.ply, poses.txt and mesh.ply.")
    p.add_argument("bag", metavar="BAG", help="rosbag2 directory, .mcap or .db3 file")
    p.add_argument("--out", metavar="DIR", default="spirula_out", help="where the results go (default: %(default)s)")
    p.add_argument("--backend", choices=("auto", "cpu", "cuda"), help="engine (default: auto)")
    p.add_argument("--config", metavar="F", help="parameter file, or the name of an installed one")
    p.add_argument("--set", metavar="NAME=VALUE", dest="assignments", action="append", default=[], help="one parameter; may be repeated")
    p.add_argument("--holdout", metavar="N", type=whole(0), help="every N-th frame only measures the map, 0 = none (default: 8)")
    pace = p.add_mutually_exclusive_group()
    pace.add_argument("--rate", metavar="R", type=positive, default=1.0, help="speed of the recording (default: 1, as recorded)")
    pace.add_argument("--lossless", action="store_true", help="wait for the mapper instead of dropping; repeatable")
    p.add_argument("--max-seconds", metavar="S", type=positive, help="stop stream and refinement after so long; what is there is reported")
    p.add_argument("--refine-seconds", metavar="S", type=not_negative, default=0.0, help="train so long after the stream")
    p.add_argument("--refine-steps", metavar="N", type=whole(0), default=0, help=".. or so many steps, whichever ends first")
    p.add_argument("--seed", metavar="N", type=whole(0), help="of every random choice (default: 0)")
    p.add_argument("--threads", metavar="N", type=whole(0), help="CPU threads of the engine (default: 0 = all cores)")
    p.add_argument("--mesh", action=argparse.BooleanOptionalAction, default=True, help="write mesh.ply (default: yes)")
    p.add_argument("--web", metavar="PORT", type=port, nargs="?", const=-1, help="serve the live viewer to browsers on this machine (default port: 8080)")
    p.add_argument("--via-ros", action="store_true", help="start the node and play the recording to it through real topics (needs rclpy)")
    add_topics(p)
    p.set_defaults(run=run_replay)


def add_topics(p: argparse.ArgumentParser) -> None:
    topics = p.add_argument_group("topics", "chosen by type and name unless given; '' = do not use")
    for kind in TOPIC_KINDS:
        topics.add_argument(f"--{kind.replace('_', '-')}-topic", metavar="T")


def topics_from(args) -> dict[str, str | None]:
    return {kind: getattr(args, f"{kind}_topic") for kind in TOPIC_KINDS}


def settings_from(args):
    """The `Settings` that the options of `replay` describe."""
    from .settings import settings
    options = {"engine.backend": args.backend, "engine.seed": args.seed, "engine.threads": args.threads, "eval.holdout_every": args.holdout}
    if args.web is not None:
        options.update({"web.enabled": True, "web.port": args.web if args.web >= 0 else None})
    found = settings(args.config, options, args.assignments)
    if "eval.holdout_every" not in found.given:
        found = settings(args.config, {**options, "eval.holdout_every": 8}, args.assignments)
    return found


def run_replay(args) -> None:
    if args.via_ros:
        from .player import replay_via_ros
        return replay_via_ros(args)
    from .replay import ReplayOptions, replay
    options = ReplayOptions(args.bag, args.out, topics_from(args), None if args.lossless else args.rate, args.max_seconds, args.refine_seconds,
                            args.refine_steps, args.mesh)
    print(replay(options, settings_from(args)))


# ---- train -----------------------------------------------------------------------------------------------------------

def add_train(commands) -> None:
    p = _parser(commands.add_parser, "train", help="a map from a COLMAP project or an RGB-D folder, without ROS", epilog=TRAIN_EXAMPLES,
                description="Trains offline, all images at once, and writes map.ply, report.html, report.json, compare.png, renders/, poses.txt and cameras/ (COLMAP, text). DATA is a COLMAP project "
                "with undistorted images (images/, sparse/0/), a 7-Scenes or TUM folder, or a packed scene (.npz). Ctrl-C ends it with what is there.")
    p.add_argument("data", metavar="DATA")
    p.add_argument("out", metavar="OUT", help="the folder of the results")
    p.add_argument("--steps", metavar="N", type=count(1), help="(default: 7000)")
    p.add_argument("--size", metavar="WxH", type=size, help="shrink the images")
    p.add_argument("--max-gaussians", metavar="N", type=count(1), help="the map never holds more (default: 400k)")
    p.add_argument("--precision", choices=("full", "compact"), help="compact: less than half of the bytes (default: full)")
    p.add_argument("--backend", choices=("auto", "cpu", "cuda"), help="engine (default: auto)")
    p.add_argument("--set", metavar="NAME=VALUE", dest="assignments", action="append", default=[], help="one parameter; may be repeated")
    p.add_argument("--list", action=Parameters, nargs=0, help="print every parameter and exit")
    p.add_argument("--hold-out", "--holdout", metavar="N", type=whole(0), default=8, help="every N-th image only measures the map, 0 = none (default: 8)")
    p.add_argument("--eval", metavar="N,N,..", type=step_numbers, default=(), help="steps to measure at, beside the last one")
    p.add_argument("--export", choices=EXPORTS, default="ply", help="format of the map (default: ply)")
    p.add_argument("--seed", metavar="N", type=whole(0), help="of every random choice (default: 0)")
    p.add_argument("--threads", metavar="N", type=whole(0), help="CPU threads of the engine (default: 0 = all cores)")
    add_rig(p.add_argument_group("folders of 7-Scenes and TUM"))
    p.set_defaults(run=run_train)


class Parameters(argparse.Action):
    """Of `spirula train`."""

    def __call__(self, parser, *_):
        from .train import list_parameters
        print(list_parameters(), flush=True)
        parser.exit()


def run_train(args) -> None:
    from .train import TrainOptions, train, train_config
    config = train_config({"schedule.max_steps": args.steps, "engine.max_gaussians": args.max_gaussians, "engine.precision": args.precision,
                           "engine.backend": args.backend, "engine.seed": args.seed, "engine.threads": args.threads}, args.assignments)
    print(train(TrainOptions(args.data, args.out, args.size, args.hold_out, args.eval, args.export, rig_from(args)), config))


# ---- bag -------------------------------------------------------------------------------------------------------------

def add_from_rgbd(commands) -> None:
    p = _parser(commands.add_parser, "from-rgbd", help="a recording from a folder of colour and depth images with poses", epilog=RGBD_EXAMPLES,
                description="Layouts: 7scenes (frame-NNNNNN.color.jpg|png, .depth.png in mm, .pose.txt, camera-intrinsics.txt) and tum "
                "(rgb.txt, depth.txt, groundtruth.txt, depth in 1/5000 m, intrinsics.txt with 'fx fy cx cy').")
    p.add_argument("folder", metavar="FOLDER")
    p.add_argument("out", metavar="OUT", help="the rosbag2 directory to make")
    p.add_argument("--layout", choices=("auto", "7scenes", "tum"), default="auto")
    p.add_argument("--fps", metavar="F", type=positive, help="frames per second of a layout without stamps (default: 30)")
    p.add_argument("--size", metavar="WxH", type=size, help="shrink the images")
    add_rig(p)
    add_bag_options(p)
    p.add_argument("--lines", metavar="N", type=whole(2), help="instead of depth images: a PointCloud2 of N of their rows, as a lidar with N lines would send")
    p.add_argument("--max-frames", metavar="N", type=whole(1), help="only the first N")
    p.set_defaults(run=run_from_rgbd)


def run_from_rgbd(args) -> None:
    from .rgbd import make_bag
    make_bag(args.folder, args.out, layout=args.layout, fps=args.fps, size=args.size, **rig_from(args), storage=args.storage,
             max_frames=args.max_frames, lines=args.lines)


def add_rig(p) -> None:
    """The two cameras of an RGB-D folder."""
    p.add_argument("--intrinsics", metavar="'fx fy cx cy'", type=numbers(4), help="of the depth images, in pixels (first pixel's centre at 0, 0)")
    color = p.add_mutually_exclusive_group()
    color.add_argument("--color-f", metavar="F", type=positive, help="focal length of a colour camera beside the depth camera, in pixels")
    color.add_argument("--color-intrinsics", metavar="'fx fy cx cy'", type=numbers(4), help=".. or all its intrinsics")
    p.add_argument("--color-offset", metavar="'x y z'", type=numbers(3), default=(0.0, 0.0, 0.0), help="X_color = X_depth + offset, metres")


def rig_from(args) -> dict:
    return {name: getattr(args, name) for name in ("intrinsics", "color_f", "color_intrinsics", "color_offset")}


def add_from_colmap(commands) -> None:
    p = _parser(commands.add_parser, "from-colmap", help="a recording from the images and poses of a COLMAP model", epilog=COLMAP_EXAMPLES,
                description="Layout: images/ and sparse/0/ (or sparse/). Images go in as they are, in the order of their names, each with its own "
                "CameraInfo and pose. Lengths are the model's own, which are no metres. Needs pycolmap.")
    p.add_argument("folder", metavar="FOLDER")
    p.add_argument("out", metavar="OUT", help="the rosbag2 directory to make")
    p.add_argument("--fps", metavar="F", type=positive, default=2.0, help="images per second (default: %(default)s)")
    add_bag_options(p)
    p.add_argument("--max-frames", metavar="N", type=whole(1), help="only the first N")
    p.set_defaults(run=run_from_colmap)


def run_from_colmap(args) -> None:
    from .colmap import make_bag
    make_bag(args.folder, args.out, fps=args.fps, storage=args.storage, max_frames=args.max_frames)


def add_play(commands) -> None:
    p = _parser(commands.add_parser, "play", help="send a recording to ROS 2 topics, where `ros2 bag play` is not installed",
                description="Publishes the images, CameraInfo, poses, paths, TF and clouds of a recording (rosbag2, or a ROS 1 .bag); needs rclpy.")
    p.add_argument("bag", metavar="BAG")
    p.add_argument("--rate", metavar="R", type=positive, default=1.0, help="speed (default: 1, as recorded)")
    p.add_argument("--loop", action="store_true", help="again and again")
    p.add_argument("--clock", action="store_true", help="publish /clock, for nodes with use_sim_time")
    p.add_argument("--wait", metavar="S", type=not_negative, default=0.0, help="begin when a node listens to the images, or after S seconds")
    p.set_defaults(run=run_play)


def run_play(args) -> None:
    from .bag_play import PlayOptions, play
    play(args.bag, PlayOptions(args.rate, args.loop, args.clock, args.wait))


def add_synthetic(commands) -> None:
    p = commands.add_parser("synthetic", help="a recording of a synthetic room, with ground truth",
                            description="Also writes OUT.truth.npz: stamps, poses, camera, and points on the true surfaces.")
    p.add_argument("out", metavar="OUT", help="the rosbag2 directory to make")
    p.add_argument("--frames", metavar="N", type=whole(2), default=150, help="(default: %(default)s)")
    p.add_argument("--size", metavar="WxH", type=size, default=(160, 120), help="(default: 160x120)")
    p.add_argument("--fps", metavar="F", type=positive, default=15.0, help="(default: %(default)s)")
    p.add_argument("--seed", metavar="N", type=whole(0), default=0, help="of the textures (default: %(default)s)")
    p.add_argument("--lines", metavar="N", type=whole(2), help="instead of depth images: the PointCloud2 of a lidar with N lines above the camera")
    add_bag_options(p)
    p.set_defaults(run=run_synthetic)


def run_synthetic(args) -> None:
    from .synthetic import make_bag
    make_bag(args.out, frames=args.frames, size=args.size, fps=args.fps, seed=args.seed, storage=args.storage, lines=args.lines)


def add_bag_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("--storage", choices=("mcap", "sqlite3"), default="mcap", help="(default: %(default)s)")


def run_info(args) -> None:
    from . import bags
    with bags.open_bag(args.bag) as bag:
        print(f"{bag.path}: {bag.duration_s:.2f} s" + (f"; incomplete: {bag.problem}" if bag.problem else ""))
        for topic, info in bag.topics.items():
            print(f"  {topic}  {info.type}  {info.count}")
        try:
            topics = bags.pick_topics(bag, topics_from(args))
        except bags.TopicsError as error:
            print(f"a replay cannot use it: {error.why}")
            return
        print("a replay uses: " + ", ".join(f"{kind} {topic}" for topic, kind in topics.chosen().items()))
        for note in topics.notes:
            print(note)


def run_params(args) -> None:
    from .params import yaml_text
    from .settings import read_file, settings
    values = read_file(args.config) if args.config else {}
    settings(None, values, [])  # refuses what no row allows
    print(yaml_text(values), end="")


# ---- view ------------------------------------------------------------------------------------------------------------

def add_view(commands) -> None:
    p = commands.add_parser("view", help="a map or mesh in a browser, until Ctrl-C", description="Shows .ply, .compressed.ply, .splat and .spz maps and meshes. "
                            "Where poses.txt lies beside it, the view begins at its first pose.")
    p.add_argument("file", metavar="FILE")
    p.add_argument("--port", metavar="PORT", type=port, default=8080, help="0 = any that is free (default: %(default)s)")
    p.add_argument("--host", metavar="ADDRESS", default="127.0.0.1", help="another one than loopback needs --token (default: %(default)s)")
    p.add_argument("--token", metavar="T", default="", help="browsers must know it")
    p.add_argument("--max-splats", metavar="N", type=whole(1), default=1_000_000, help="at most so many, those that show most (default: %(default)s)")
    p.add_argument("--up", choices=("x", "-x", "y", "-y", "z", "-z"), default="z", help="which way is up in the file; COLMAP and most 3DGS files: -y (default: %(default)s)")
    p.set_defaults(run=run_view)


def run_view(args) -> None:
    from .params import WebConfig
    from .web_file import view
    view(args.file, WebConfig(host=args.host, port=args.port, token=args.token, max_splats=args.max_splats), args.up)


# ---- forecast ----------------------------------------------------------------------------------------------------------

def add_forecast(commands) -> None:
    p = _parser(commands.add_parser, "forecast", help="the memory that a map will need", epilog=FORECAST_EXAMPLES,
                description="What the engine will hold for a map and images of this size. Nothing is allocated; no GPU is needed.")
    p.add_argument("--gaussians", metavar="N", type=count(0), default=1_000_000, help="in the map; 10M or 10e6 is ten million (default: 1M)")
    p.add_argument("--size", metavar="WxH", type=size, required=True, help="of the images")
    p.add_argument("--sh", metavar="D", type=int, choices=range(4), default=2, help="spherical-harmonics degree, 0 to 3 (default: 2)")
    p.add_argument("--precision", choices=("full", "compact"), default="full", help="(default: full)")
    p.add_argument("--cameras", metavar="C", type=whole(1), default=1, help="images per step (default: 1)")
    p.add_argument("--render", action="store_true", help="only render, do not train")
    p.add_argument("--pairs", metavar="N", type=count(1), default=0, help="Gaussians that the fullest view shows (default: half of the map)")
    p.add_argument("--isects", metavar="N", type=count(1), default=0, help="splat-tile intersections of that view (default: estimated)")
    p.add_argument("--vram-mb", metavar="MiB", type=mebibytes, help="also say how many Gaussians fit into so much; 8GiB and 8GB are understood too")
    p.add_argument("--backend", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda where its library is installed (default: auto)")
    p.set_defaults(run=run_forecast)


def run_forecast(args) -> None:
    from spirula_gpu.native import forecast, installed, largest_map, least_budget
    if args.pairs > args.gaussians * args.cameras:
        raise InputError(f"--pairs {args.pairs:,} > {args.gaussians * args.cameras:,}, the Gaussians of the map times the images of a step; give those of one step")
    (width, height), backend = args.size, installed(args.backend)
    image = dict(width=width, height=height, n_cameras=args.cameras, train=not args.render, sh_degree=args.sh, precision=args.precision)
    report = forecast(backend, gaussians=args.gaussians, pairs=args.pairs, isects=args.isects, **image)
    used = {row.name: row.used for row in report.rows}
    pairs, isects = used["proj.gaussian"] // 4 - 1, used["isect.pair"] // 4  # 4 bytes each, and one more pair
    arena = {category: sum(row.used for row in report.rows if row.aliased and row.category == category) for category in report.categories}
    print(f"{args.gaussians:,} Gaussians, SH degree {args.sh}, {args.precision}; {'rendering' if args.render else 'training on'} {args.cameras} x {width}x{height}; {backend}")
    print(f"{'category':<14}{'MiB':>10}")
    print(f"{'splat':<14}{report.categories['splat'][1] / 2**20:>10.1f}  the map: {(report.total - used['arena']) / max(args.gaussians, 1):.0f} bytes a Gaussian")
    print(f"{'arena':<14}{used['arena'] / 2**20:>10.1f}  scratch; these take turns in it: " + ", ".join(f"{k} {n / 2**20:.1f}" for k, n in arena.items() if n))
    print(f"{'total':<14}{report.total / 2**20:>10.1f}")
    how = "given" if args.pairs and args.isects else "assumed; --pairs and --isects say better"
    print(f"{pairs:,} visible pairs, {isects:,} intersections ({how}); what calls learn on the way gets 25 % headroom")
    if args.vram_mb and (n := largest_map(args.vram_mb << 20, backend, **image)):
        print(f"{args.vram_mb} MiB: about {n:,} Gaussians fit (without headroom; a growing map ends a little below)")
    elif args.vram_mb:
        print(f"{args.vram_mb} MiB: no map fits; these images need {least_budget(backend, **image):,} MiB or more")


if __name__ == "__main__":
    sys.exit(main())
