"""Odd files of other people: each command either does its work, or ends with 2 and one sentence that says what was found and what to do, and leaves nothing.
One row per file. Small recordings of every layout that rosbag2 and ROS 1 write, too."""
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from rosbags.rosbag1 import Writer as Ros1Writer
from rosbags.rosbag2 import CompressionFormat, CompressionMode, StoragePlugin, Writer

from shared_data import ROBUSTNESS, needs_robustness
from spirula_gpu.camera import Camera
from spirula_ros import cli, convert
from spirula_ros.bags import TYPES, BagError, BagWriter, Topics, messages, open_bag, pick_topics

S = 10**9
NO_INPUT = "a replay cannot use it: {path}: no topic with an image (sensor_msgs/Image or CompressedImage), a CameraInfo"
REPLAY = "{path}: no topic with an image (sensor_msgs/Image or CompressedImage), a CameraInfo"
RECORDING = {"bag info": NO_INPUT, "info": NO_INPUT, "replay": REPLAY}   # whole, without images
MANY_BAGS = "6 ROS 1 bags (example.bag, "
R1, R2, PY = "bags_ros1", "rosbag2/rosbag2_tests/resources", "rosbag2/rosbag2_py/test/resources"
LFS = "a pointer of Git LFS, not the file itself: run `git lfs pull` where it came from"
CUT = "images.bin was cut off at 2,359,296 bytes, after 13 of 82 images; points3D.bin was cut off at 2,359,296 bytes, after 23,170 of 49,366 points3D: copy the model again"
MIXED = "are its files of one model? It says: [reconstruction.cc:535] Check failed: point2D.point3D_id == point3D_id (0 vs. 1)"


def everywhere(text: str) -> dict[str, str]:
    return {"bag info": text, "info": text, "replay": text}


def ros2(storage: str, suffix: str) -> dict[str, dict[str, str]]:
    rows = {f"{R2}/{storage}/{name}": RECORDING for name in ("bag_with_topics_and_service_events", "cdr_test")}
    rows |= {f"{PY}/{storage}/{name}": RECORDING for name in ("convert_a", "convert_b", "talker", "wbag", "reindex_test_bags/multiple_files")}
    rows |= {f"{PY}/{storage}/wbag/wbag_{i}.{suffix}": RECORDING for i in (0, 4)} | {f"{PY}/{storage}/reindex_test_bags/multiple_files/multiple_files_2.{suffix}": RECORDING}
    return rows | {f"{R2}/{storage}/wrong_rmw_test": everywhere("wrong_format"), f"{PY}/{storage}/reindex_test_bags": {"bag info": "no .mcap or .db3 file and no metadata.yaml", "info": "nothing in this folder", "replay": "no .mcap or .db3 file and no metadata.yaml"}}


ROWS = {  # file or folder: command: what it says
    **{f"{R1}/example{name}.bag": RECORDING for name in ("", "-bz2", "-lz4", "-unsorted-chunks")},
    f"{R1}/empty-file.bag": everywhere("the recording is empty (0 bytes); record it again"),
    f"{R1}/no-messages.bag": everywhere("no message is in this recording; record it again"),
    R1: {"bag info": MANY_BAGS, "replay": MANY_BAGS, "info": MANY_BAGS},
    **ros2("mcap", "mcap"), **ros2("sqlite3", "db3"),
    f"{R2}/empty_dir": {"bag info": "no .mcap or .db3 file and no metadata.yaml", "info": "nothing in this folder", "replay": "no .mcap or .db3 file and no metadata.yaml"},
    "mcap/custom-camera-model.mcap": everywhere("its messages are json, not cdr as those of ROS 2 are; record the topics with `ros2 bag record`"),
    "colmap_truncated": {"info": CUT, "train project": CUT, "bag from-colmap project": CUT, "train": "not a COLMAP project (images/ and sparse/0/)", "bag from-colmap": "neither sparse/0 nor sparse"},
    "colmap_mismatch": {"info": MIXED, "train project": MIXED, "bag from-colmap project": MIXED, "train": "not a COLMAP project (images/ and sparse/0/)"},
    **{f"splats/minimal{name}": {"info": "4 Gaussians, SH degree 0", "convert": "3DGS .ply, 4 Gaussians, SH degree 0"} for name in ("-raw.spz", "-v2.spz", "-v3.spz", "-v4.spz", ".splat")},
    "splats/minimal.ksplat": {"info": "convert it first: npx @playcanvas/splat-transform", "convert": "convert it first: npx @playcanvas/splat-transform"},
    "isaac_depth_align": {"info": "nothing in this folder that this program knows", "train": "not a COLMAP project"},
    "isaac_depth_align/depth.npy": {"info": "float32 [270, 480]", "convert": "numpy [N,25] is not read, it holds no whole Gaussians"},
    **{f"isaac_depth_align/{name}.png": {"info": LFS} for name in ("disparity", "image_left")},
    "isaac_depth_align/rgb_camera_info.json": {"info": "a .json that is no report of a replay or training"},
    "README.txt": {"info": "not poses (stamp tx ty tz qx qy qz qw a line)", "replay": "unknown kind of recording '.txt'", "train": "not a COLMAP project", "convert": "maps are read from files that end in .ply"},
}
SUCCEEDS = {("bag info", NO_INPUT), ("info", NO_INPUT), *((c, t) for row in ROWS.values() for c, t in row.items() if "Gaussians, SH" in t or "float32" in t)}
OUTPUT = {"replay": ["--lossless", "--out", "out"], "train": ["out"], "train project": ["out"], "bag from-colmap": ["out"], "bag from-colmap project": ["out"], "convert": ["out.ply"]}


@needs_robustness
@pytest.mark.parametrize("name, command, text", [(name, command, text) for name, row in ROWS.items() for command, text in row.items()])
def test_other_peoples_files(name, command, text, tmp_path, capsys):
    path = ROBUSTNESS / name
    if command.endswith(" project"):
        (tmp_path / "p" / "images").mkdir(parents=True)
        (tmp_path / "p" / "sparse").mkdir()
        (tmp_path / "p" / "sparse" / "0").symlink_to(path)
        path = tmp_path / "p"
    before = sorted(tmp_path.iterdir())
    code = cli.main([*command.removesuffix(" project").split(), str(path), *OUTPUT.get(command, [])])
    said = capsys.readouterr()
    assert text.replace("{path}", str(path)) in said.out + said.err
    if (command, text) in SUCCEEDS:
        assert code == 0 and said.err == ""
        return
    sentence, *listing = said.err.splitlines()   # the topics that are there may follow, indented
    assert code == 2 and sentence.startswith(f"spirula: {path}") and all(line.startswith("  ") for line in listing)
    assert sorted(tmp_path.iterdir()) == before


@needs_robustness
def test_every_file_has_a_row():
    folders = [ROBUSTNESS / name for name in ROWS if (ROBUSTNESS / name).is_dir()]
    parts = {".yaml", ".gitkeep", ".bin", ".npy", ".json"}   # parts of what has a row
    alone = [f for f in ROBUSTNESS.rglob("*") if f.is_file() and f.suffix not in parts and f.name != ".gitkeep" and f.parent not in folders]
    assert [f for f in alone if str(f.relative_to(ROBUSTNESS)) not in ROWS] == []
    assert [name for name in ROWS if not (ROBUSTNESS / name).exists()] == []


# ------------------------------------------------------------------------------------------- layouts of small recordings

CAMERA, N = Camera(16, 12, 14, 15, 7.5, 5.5), 6
RGB = np.random.default_rng(0).integers(0, 256, (N, 12, 16, 3), np.uint8)
KINDS = {"/image": "image", "/camera_info": "info", "/pose": "pose", "/tf": "tf"}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> list[tuple[str, str, int, bytes]]:
    """(topic, type, ns, CDR) of every message."""
    path = tmp_path_factory.mktemp("source") / "bag"
    with BagWriter(path) as bag:
        for i, stamp in enumerate(range(1000 * S, 1000 * S + N * S // 10, S // 10)):
            pose = np.eye(4)
            pose[0, 3] = i
            bag.image("/image", stamp, "cam", RGB[i])
            bag.info("/camera_info", stamp, "cam", CAMERA)
            bag.pose("/pose", stamp, "map", pose)
            bag.tf(stamp, "map", "base", pose)
    with open_bag(path) as bag:
        return [(b.topic, b.type, b.recv_ns, b.raw) for b in messages(bag, Topics(**{kind: topic for topic, kind in KINDS.items()}))]


def write(path: Path, recorded, storage: StoragePlugin, compression: CompressionMode | None = None) -> Path:
    writer = Writer(path, version=9, storage_plugin=storage)
    if compression:
        writer.set_compression(compression, CompressionFormat.ZSTD)
    with writer:
        connections = {topic: writer.add_connection(topic, msgtype, typestore=TYPES) for topic, msgtype in {(t, m): 0 for t, m, *_ in recorded}}
        for topic, _, stamp, raw in recorded:
            writer.write(connections[topic], stamp, raw)
    return path


def same(path: Path, recorded, problem: str = "") -> None:
    with open_bag(path) as bag:
        assert (problem in bag.problem) if problem else bag.problem == ""
        stream, read = messages(bag, pick_topics(bag)), []
        try:
            for b in stream:
                read.append((b.topic, b.type, b.recv_ns, b.raw))
        except BagError as error:
            assert problem and f"{len(recorded)} of {len(recorded)} messages" in str(error)
    assert read == recorded


MCAP, SQLITE = StoragePlugin.MCAP, StoragePlugin.SQLITE3


@pytest.mark.parametrize("storage", [MCAP, SQLITE])
@pytest.mark.parametrize("compression", [None, CompressionMode.FILE, CompressionMode.MESSAGE, CompressionMode.STORAGE])
@pytest.mark.parametrize("metadata", [True, False])
def test_compressed_recordings(tmp_path, recorded, storage, compression, metadata):
    if storage is SQLITE and compression is CompressionMode.STORAGE:
        pytest.skip("sqlite3 has no compression of its own")
    path = write(tmp_path / "bag", recorded, storage, compression)
    if metadata:
        return same(path, recorded)
    (path / "metadata.yaml").unlink()
    if compression is CompressionMode.FILE:
        for given in (path, next(path.glob("*.zstd"))):
            with pytest.raises(BagError, match="compressed.*decompress it: zstd -d"):
                open_bag(given)
    else:
        same(path, recorded, "no metadata.yaml")


@pytest.mark.parametrize("storage", [MCAP, SQLITE])
@pytest.mark.parametrize("metadata", [True, False])
def test_recordings_of_several_files(tmp_path, recorded, storage, metadata):
    """As `ros2 bag record -b` splits them; rosbags writes one file, so each part is a recording first. x_10 comes after x_2."""
    (tmp_path / "bag").mkdir()
    size, names = len(recorded) // 12, []
    for i in range(12):
        part = write(tmp_path / f"part{i}", recorded[i * size:(i + 1) * size], storage)
        file, = (f for f in part.iterdir() if f.suffix in (".mcap", ".db3"))
        names.append(f"bag_{i}{file.suffix}")
        shutil.move(file, tmp_path / "bag" / names[-1])
    if not metadata:
        return same(tmp_path / "bag", recorded, "no metadata.yaml")
    text = (write(tmp_path / "whole", recorded, storage) / "metadata.yaml").read_text()
    import yaml
    info = yaml.safe_load(text)
    info["rosbag2_bagfile_information"] |= {"relative_file_paths": names, "files": []}
    (tmp_path / "bag" / "metadata.yaml").write_text(yaml.safe_dump(info))
    same(tmp_path / "bag", recorded)


def ros1(path: Path, recorded, chunk: Ros1Writer.CompressionFormat | None = None) -> Path:
    from rosbags.typesys import Stores, get_typestore
    noetic, writer = get_typestore(Stores.ROS1_NOETIC), Ros1Writer(path)
    noetic.register({"tf2_msgs/msg/TFMessage": TYPES.fielddefs["tf2_msgs/msg/TFMessage"]})
    if chunk:
        writer.set_compression(chunk)
    with writer:
        connections = {topic: writer.add_connection(topic, msgtype, typestore=noetic) for topic, msgtype in {(t, m): 0 for t, m, *_ in recorded}}
        for topic, msgtype, stamp, raw in recorded:
            writer.write(connections[topic], stamp, TYPES.cdr_to_ros1(raw, msgtype))
    return path


@pytest.mark.parametrize("chunk", [None, *Ros1Writer.CompressionFormat])
def test_ros1_bags_hold_the_same_messages(tmp_path, recorded, chunk):
    same(ros1(tmp_path / "a.bag", recorded, chunk), recorded)
    (tmp_path / "folder").mkdir()
    shutil.move(tmp_path / "a.bag", tmp_path / "folder")
    same(tmp_path / "folder", recorded, "")


def test_a_ros1_bag_is_replayed_as_its_ros2_twin(tmp_path, recorded, capsys):
    from spirula_ros.synthetic import make_bag
    make_bag("room", frames=5, size=(40, 30), say=lambda _: None)
    with open_bag("room") as bag:
        ros1(tmp_path / "room.bag", [(b.topic, b.type, b.recv_ns, b.raw) for b in messages(bag, pick_topics(bag))])
    for source, out in (("room", "two"), ("room.bag", "one")):
        assert cli.main(["replay", source, "--lossless", "--out", out, "--set", "engine.backend=cpu", "--set", "engine.threads=1"]) == 0
    assert Path("one/map.ply").read_bytes() == Path("two/map.ply").read_bytes()


def cut(path: Path, size: int) -> None:
    os.truncate(path, size)


def unindexed(path: Path) -> None:
    data = bytearray(path.read_bytes())
    at = data.index(b"index_pos=") + 10
    data[at:at + 8] = bytes(8)
    path.write_bytes(data)


@pytest.mark.parametrize("spoil, text", [
    (lambda p: cut(p, 40), "cut off at 40 bytes, in its header; copy it again"),
    (lambda p: cut(p, 5000), r"cut off at 5000 bytes, its index begins at \d+; copy it again, or run `rosbag reindex`"),
    (lambda p: cut(p, p.stat().st_size - 10), "cannot be read .*rosbag reindex"),
    (unindexed, "it has no index, its recorder did not finish; run `rosbag reindex`"),
    (lambda p: p.write_bytes(b"#ROSBAG V1.2\n" + bytes(100)), "not a ROS 1 bag of format 2.0; `rosbag fix`"),
    (lambda p: p.write_bytes(b"hello" * 100), "not a ROS 1 bag of format 2.0, whatever its name says")])
def test_damaged_ros1_bags_are_refused(tmp_path, recorded, spoil, text):
    spoil(ros1(tmp_path / "a.bag", recorded))
    with pytest.raises(BagError, match=f"^{tmp_path}/a.bag: {text}"):
        open_bag(tmp_path / "a.bag")


def test_damage_inside_a_ros1_bag_ends_in_words(tmp_path, recorded):
    whole = ros1(tmp_path / "a.bag", recorded).read_bytes()
    for seed in range(12):
        random = np.random.default_rng(seed)
        data, at = bytearray(whole), int(random.integers(0, len(whole) - 200))
        data[at:at + 200] = random.bytes(200)
        (tmp_path / "a.bag").write_bytes(data)
        try:
            with open_bag(tmp_path / "a.bag") as bag:
                for b in messages(bag, pick_topics(bag)):
                    b.msg
        except (BagError, convert.BadMessage) as error:
            assert "a.bag" in str(error) or "bytes are not a" in str(error)


@pytest.mark.parametrize("encoding", ["cdr", "xml"])
def test_mcap_of_other_recorders(tmp_path, recorded, encoding):
    """With another profile, as of recorders that are not rosbag2: read when the messages are CDR."""
    path = write(tmp_path / "bag", recorded, MCAP)
    file, = path.glob("*.mcap")
    data = file.read_bytes()
    assert data[17:25] == b"\4\0\0\0ros2"
    data = data[:17] + b"\4\0\0\0none" + data[25:]
    file = tmp_path / "other.mcap"
    file.write_bytes(data.replace(b"\3\0\0\0cdr", b"\3\0\0\0" + encoding.encode()))
    if encoding == "cdr":
        return same(file, recorded)
    with pytest.raises(BagError, match=f"{file}: its messages are {encoding}, not cdr"):
        open_bag(file)
