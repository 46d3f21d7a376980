"""`spirula convert` and `spirula info`: the files that people take away, and those that they bring."""
from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Iterable, Iterator

from .errors import InputError

CONVERT_EXAMPLES = """examples:
  spirula convert out/map.ply map.spz                    an eighth of the bytes, for the web
  spirula convert out/map.ply map.compressed.ply         for SuperSplat and PlayCanvas
  spirula convert scan.spz start.ply --min-opacity 0.05  then: spirula replay room --set train.start_map=start.ply
"""
OPENED_WITH = {  # what can be done with a format, beside converting it
    ".ply": "SuperSplat (superspl.at/editor) and every other 3DGS viewer", ".compressed.ply": "SuperSplat (superspl.at/editor), PlayCanvas",
    ".splat": "SuperSplat (superspl.at/editor), antimatter15.com/splat", ".spz": "SuperSplat (superspl.at/editor), Spark, Babylon.js"}
READS = ("it reads maps (.ply, .compressed.ply, .splat, .spz), meshes, poses (.txt), checkpoints, pictures, recordings (a rosbag2 folder, .mcap, .db3, .bag), the folder or report.json of a "
         "replay, COLMAP models, packed scenes (.npz), and folders of 7-Scenes and TUM")
PICTURES = (".png", ".jpg", ".jpeg")
MESHES = (".obj", ".glb", ".gltf", ".stl", ".off")
LARGE_BYTES = 100 << 20  # reading says so
LFS_POINTER = b"version https://git-lfs.github.com/"


def add_files(commands) -> None:
    p = commands.add_parser("convert", help="a map in another format", epilog=CONVERT_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter,
                            description="The suffixes say the formats. Read: .ply, .compressed.ply, .splat, .spz. Written: these, .npy, .f32.gz, .points.ply.")
    p.add_argument("source", metavar="IN")
    p.add_argument("target", metavar="OUT")
    p.add_argument("--sh-degree", metavar="D", type=int, choices=range(4), help="cut the spherical harmonics, or fill them with 0 (default: as IN, where OUT can)")
    p.add_argument("--min-opacity", metavar="A", type=_opacity, default=0.0, help="leave out Gaussians below this opacity, 0 to 1 (default: 0)")
    p.set_defaults(run=run_convert)
    p = commands.add_parser("info", help="what a file holds: map, point cloud, mesh, poses, checkpoint, recording, COLMAP model")
    p.add_argument("file", metavar="FILE")
    p.set_defaults(run=lambda args: print(describe(args.file)))


def _opacity(text: str) -> float:
    if not 0 <= (value := float(text)) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' must be 0 or more and below 1")
    return value


# ---- convert ---------------------------------------------------------------------------------------------------------------------

def run_convert(args) -> None:
    from spirula_gpu.formats import format_of, write_map
    from spirula_gpu.splats import opacities
    kind = format_of(args.target)
    splats = _read(args.source)
    n, degree = len(splats.means), splats.degree
    keep = splats.sound()
    print(f"{args.source}: {n:,} Gaussians, SH degree {degree}, {os.path.getsize(args.source):,} bytes" + (f"; {complaint}: left out" if (complaint := splats.complaint()) else ""))
    faint = keep & (opacities(splats) < args.min_opacity)
    if args.min_opacity:
        print(f"--min-opacity {args.min_opacity:g}: {faint.sum():,} left out")
    keep &= ~faint
    if not keep.any():
        raise InputError(f"{args.source}: not one of {n:,} Gaussians is left; lower --min-opacity")
    splats = splats if keep.all() else splats.chosen(keep)
    if args.sh_degree is not None:
        splats = splats.with_degree(args.sh_degree)
    try:
        written = write_map(args.target, splats, lambda pieces: _shown(pieces, args.target))
    except OSError as error:
        raise InputError(f"{args.target}: {error.strerror}") from None
    size, degree_out = os.path.getsize(args.target), min(splats.degree, kind.degree)
    print(f"{args.target}: {kind.name}, {written:,} Gaussians, SH degree {degree_out}, {size:,} bytes ({size / written:.1f} each)")
    lost = [kind.loses] if kind.loses else []
    if splats.antialiased and not kind.says_filter:
        lost.append("that it was trained with the 2D mip filter")
    if min(args.sh_degree if args.sh_degree is not None else degree, degree_out) < degree and "SH above" not in kind.loses:
        lost.insert(0, f"SH degrees {degree_out + 1} to {degree}")
    print("lost: " + ("; ".join(lost) or "nothing"))


def _read(path: str):
    from spirula_gpu.formats import format_of, read_map
    format_of(path, reading=True)
    try:
        if os.path.getsize(path) > LARGE_BYTES:
            print(f"reading {path}, {os.path.getsize(path) / 1e6:.0f} MB", file=sys.stderr, flush=True)
        return read_map(path)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None


def _shown(pieces: Iterable[bytes], what: str) -> Iterator[bytes]:
    """The same, with a bar on a terminal when it takes more than a second."""
    from tqdm import tqdm
    with tqdm(desc=f"writing {what}", unit="B", unit_scale=True, delay=1, disable=None, file=sys.stderr) as bar:
        for piece in pieces:
            yield piece
            bar.update(len(piece))


# ---- info ------------------------------------------------------------------------------------------------------------------------

def describe(path: str) -> str:
    """Lines about any file that this program writes or reads. Raises InputError, FormatError, CheckpointError: one line."""
    from spirula_gpu.checkpoint_file import MAGIC
    from spirula_gpu.formats import ELSEWHERE, FORMATS, format_of
    from spirula_gpu.ply import read_header
    if not os.path.exists(path):
        raise InputError(f"{path}: does not exist")
    name = path.lower().rstrip("/")
    if os.path.isdir(path):
        return _folder(Path(path))
    if name.endswith((".mcap", ".db3", ".bag")):
        return _bag(path)
    try:
        with open(path, "rb") as file:
            head = file.read(len(LFS_POINTER))
            if head.startswith(MAGIC):
                return _checkpoint(path)
            if head == LFS_POINTER:
                raise InputError(f"{path}: a pointer of Git LFS, not the file itself: run `git lfs pull` where it came from")
            file.seek(0)
            if name.endswith(".ply") and (tables := _plain_ply(path, file, read_header(file, path))):
                return tables
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    known = {**dict.fromkeys(MESHES, _open3d_mesh), ".npy": _npy, ".f32.gz": _splat_js, ".txt": _tum, ".json": _report, ".npz": _packed,
             **dict.fromkeys(PICTURES, _picture)}
    if special := next((known[suffix] for suffix in known if name.endswith(suffix)), None):
        return special(path)
    if not name.endswith((*(f.suffix for f in FORMATS), *ELSEWHERE)):
        raise InputError(f"{path}: nothing that this program knows; {READS}")
    return _map(path, format_of(path, reading=True))


def _map(path: str, kind) -> str:
    import numpy as np
    from spirula_gpu.formats import FORMATS
    from spirula_gpu.splats import opacities
    splats = _read(path)
    n, size, sound = len(splats.means), os.path.getsize(path), splats.sound()
    lines = [f"{path}: {kind.name}, {n:,} Gaussians, SH degree {splats.degree}, {size:,} bytes ({size / max(n, 1):.1f} each)"]
    if complaint := splats.complaint():
        lines.append(f"UNSOUND  {complaint}: damaged? `spirula convert` leaves them out")
    if splats.antialiased:
        lines.append("antialiased  trained with the 2D mip filter: for viewers that have it")
    splats = splats.chosen(sound)
    if len(splats.means):
        lines += _bounds(splats.means)
        scales = np.exp(splats.log_scales.max(1).astype(np.float64))
        lines.append("largest axis  " + ", ".join(f"{share} % below {np.quantile(scales, share / 100):.3g} m" for share in (50, 99)))
        counts, _ = np.histogram(opacities(splats), 10, (0, 1))
        lines.append("opacity")
        lines += [f"  {i / 10:.1f} to {(i + 1) / 10:.1f}  {100 * c / counts.sum():5.1f} %  {'#' * round(40 * c / counts.max())}".rstrip() for i, c in enumerate(counts)]
    lines.append(f"open it with  {OPENED_WITH[kind.suffix]}")
    lines.append(f"go on with it spirula replay BAG --set train.start_map={path} --out more")
    lines.append("convert it    spirula convert " + path + " OUT, OUT ending in " + ", ".join(f.suffix for f in FORMATS))
    return "\n".join(lines)


def _bounds(points) -> list[str]:
    import numpy as np
    low, high = points.min(0), points.max(0)
    middle = np.quantile(points, (0.01, 0.99), axis=0)
    return ["bounds  " + "  ".join(f"{axis} {a:.3f} to {b:.3f}" for axis, a, b in zip("xyz", low, high)) + " m",
            "98 % in " + "  ".join(f"{axis} {a:.3f} to {b:.3f}" for axis, a, b in zip("xyz", *middle)) + " m"]


def _plain_ply(path: str, file, elements) -> str | None:
    """Of a mesh or point cloud; None: the .ply is a map."""
    import numpy as np
    from spirula_gpu.ply import read_table
    first, names = elements[0], [e.name for e in elements]
    if first.name != "vertex" or first.dtype is None or not {"x", "y", "z"} <= set(first.dtype.names) or "f_dc_0" in first.dtype.names:
        return None
    rows = read_table(file, path, first)
    mesh = "face" in names
    head = f"{path}: {'mesh' if mesh else 'point cloud'}, {first.count:,} {'vertices' if mesh else 'points'}"
    head += f", {elements[names.index('face')].count:,} faces" if mesh else ""
    lines = [f"{head}, {os.path.getsize(path):,} bytes; each {'vertex' if mesh else 'point'}: {' '.join(first.dtype.names)}"]
    points = np.stack([rows[axis] for axis in "xyz"], 1)
    points = points[np.isfinite(points).all(1)]
    return "\n".join(lines + (_bounds(points) if len(points) else []) + [f"open it with  MeshLab, CloudCompare, Blender, Open3D{'' if mesh else ' (the points are no map: a 3DGS viewer does not show them)'}"])


def _open3d_mesh(path: str) -> str:
    import numpy as np
    try:
        import open3d
    except ImportError as error:
        raise InputError(f"{path}: meshes other than .ply need Open3D: pip install open3d-cpu (or open3d); import says: {error}") from None
    mesh = open3d.io.read_triangle_mesh(path)
    if not len(mesh.triangles):
        raise InputError(f"{path}: Open3D finds no triangles in it")
    head = f"{path}: mesh, {len(mesh.vertices):,} vertices, {len(mesh.triangles):,} faces, {os.path.getsize(path):,} bytes; {len(mesh.textures)} textures"
    return "\n".join([head, *_bounds(np.asarray(mesh.vertices)), "open it with  Blender, MeshLab, a browser (.glb)"])


def _npy(path: str) -> str:
    import numpy as np
    try:
        table = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise InputError(f"{path}: not a .npy file: {str(error).splitlines()[0]}") from None
    what = "Gaussians: x y z, covariance (6, and 3 zeros), opacity, SH [4,3]" if table.ndim == 2 and table.shape[1] == 25 else "not a map"
    return f"{path}: numpy, {table.dtype} {list(table.shape)}, {os.path.getsize(path):,} bytes: {what}\nit is written, not read back; open it with  numpy.load"


def _splat_js(path: str) -> str:
    import gzip
    import zlib
    from spirula_gpu.tables import SPLAT_JS
    size = 0
    try:
        with gzip.open(path) as file:
            while block := file.read(1 << 20):
                size += len(block)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path}: damaged: {error}") from None
    if size % (4 * SPLAT_JS):
        raise InputError(f"{path}: {size} bytes unpacked, no multiple of {4 * SPLAT_JS}: not float32 [N,{SPLAT_JS}]")
    return f"{path}: gzip of float32 [{size // (4 * SPLAT_JS)}, {SPLAT_JS}] (x y z, r g b, opacity, covariance), {os.path.getsize(path):,} bytes\nit is written, not read back; open it with  splat.js"


def _tum(path: str) -> str:
    import numpy as np
    try:
        rows = np.loadtxt(path, ndmin=2)
        if rows.shape[1] != 8 or not len(rows):
            raise ValueError(f"{rows.shape[1] if len(rows) else 0} columns")
    except (ValueError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not poses (stamp tx ty tz qx qy qz qw a line): {str(error).splitlines()[0]}") from None
    way = float(np.linalg.norm(np.diff(rows[:, 1:4], axis=0), axis=1).sum())
    return "\n".join([f"{path}: {len(rows):,} poses (TUM), {rows[-1, 0] - rows[0, 0]:.2f} s, {way:.2f} m of way", *_bounds(rows[:, 1:4]), "open it with  evo_traj tum"])


def _folder(path: Path) -> str:
    kinds = {"cameras.*": _colmap, "sparse/0/cameras.*": lambda p: _colmap(f"{p}/sparse/0"), "metadata.yaml": _bag, "*.mcap": _bag, "*.db3": _bag, "*.bag": _bag,
             "report.json": lambda p: _report(f"{p}/report.json"), "frame-*.color.*": _rgbd, "rgb.txt": _rgbd}
    kind = next((kinds[pattern] for pattern in kinds if next(path.glob(pattern), None)), None)
    if kind is None:
        raise InputError(f"{path}: nothing in this folder that this program knows; {READS}")
    return kind(str(path))


def _rgbd(path: str) -> str:
    from .rgbd import find_layout
    layout, root = find_layout(Path(path)), Path(path)
    n = len(list(root.glob("frame-*.color.*"))) if layout == "7scenes" else sum(not line.startswith("#") for line in (root / "rgb.txt").read_text().splitlines())
    return f"{path}: folder of images with depth and poses ({layout}), {n:,} images\ntrain a map of it       spirula train {path} OUT\nmake a recording of it  spirula bag from-rgbd {path} OUT (--help: its options)"


def _report(path: str) -> str:
    """Of a replay or training, and what lies beside it."""
    import json
    from . import report as replayed, train as trained
    try:
        with open(path, encoding="utf-8") as file:
            report = json.load(file)
        kind = f"a replay of '{report['bag']}' ({report['mode']}, {report['backend']})" if "bag" in report else \
            f"the training of '{report['data']}' ({report['backend']})" if "data" in report else f"a node ({report['backend']})"
        what, said = f"{path}: results of {kind}", (trained if "data" in report else replayed).sentence(report, Path(path).parent)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise InputError(f"{path}: a .json that is no report of a replay or training; {READS}") from None
    beside = [p for p in sorted(Path(path).parent.iterdir()) if p.name.endswith((".ply", ".spz", ".splat", ".txt", ".png", ".html", ".log"))]
    return "\n".join([what, said, *(f"  {p}  {p.stat().st_size:,} bytes" for p in beside)])


def _packed(path: str) -> str:
    from spirula_gpu.dataset import Scene, SceneError
    try:
        scene = Scene.load(path)
    except SceneError as error:
        raise InputError(str(error)) from None
    sizes = ", ".join(sorted({f"{c.width}x{c.height}" for c in scene.cameras}))
    return (f"{path}: packed scene, {len(scene.names):,} images {sizes}, {len(scene.points):,} sparse points, depth {'yes' if scene.depths else 'no'}, {os.path.getsize(path):,} bytes\n"
            f"train a map of it  spirula train {path} OUT")


def _picture(path: str) -> str:
    import cv2
    image = cv2.imread(path, cv2.IMREAD_UNCHANGED)
    if image is None:
        raise InputError(f"{path}: not a picture that can be read; was it cut?")
    height, width, channels = (*image.shape, 1)[:3]
    return f"{path}: picture, {width}x{height}, {channels} channels of {8 * image.itemsize} bits, {os.path.getsize(path):,} bytes"


def _colmap(path: str) -> str:
    from spirula_gpu.dataset import SceneError, read_reconstruction
    try:
        model = read_reconstruction(path)
    except SceneError as error:
        raise InputError(str(error)) from None
    kinds = ", ".join(sorted({f"{c.model.name} {c.width}x{c.height}" for c in model.cameras.values()}))
    return f"{path}: COLMAP model, {len(model.images):,} images, {len(model.cameras)} cameras ({kinds}), {len(model.points3D):,} points"


def _bag(path: str) -> str:
    from . import bags
    with bags.open_bag(path) as bag:
        lines = [f"{bag.path}: recording, {bag.duration_s:.2f} s" + (f"; incomplete: {bag.problem}" if bag.problem else "")]
        lines += [f"  {topic}  {info.type}  {info.count}" for topic, info in bag.topics.items()]
        try:
            bags.pick_topics(bag)
        except bags.TopicsError as error:
            return "\n".join([*lines, f"a replay cannot use it: {error.why}"])
    return "\n".join([*lines, f"map it        spirula replay {path}", f"its topics    spirula bag info {path}"])


def _checkpoint(path: str) -> str:
    from spirula_gpu.checkpoint_file import Reader
    with Reader(path) as reader:
        reader.check()
        f = reader.facts
        config = f["config"]
        return (f"{path}: checkpoint, {f['gaussians']:,} Gaussians, SH degree {config['engine.sh_degree']}, {config['engine.precision']} precision, {os.path.getsize(path):,} bytes\n"
                f"{f['trainer']['steps']:,} steps, {reader.shape('frames')[0]:,} frames, frame of the map '{f['world_frame']}'" + (f"; of {source}" if (source := config.get("checkpoint.source")) else "") + "\n"
                f"go on with it  spirula replay BAG --set checkpoint.path={path} --set checkpoint.resume=true")
