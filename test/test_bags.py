"""bags.py: what is written is read, in both storages; every damaged, foreign or empty recording is refused in words."""
import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import messages as m
import numpy as np
import pytest
from rosbags.rosbag2 import Writer

from shared_data import ROBUSTNESS, needs_robustness
from spirula_gpu.camera import Camera
from spirula_ros import convert
from spirula_ros.bags import BagError, BagWriter, TopicInfo, Topics, messages, open_bag, pick_topics
from spirula_ros.pointcloud import points_from_msg
from spirula_ros.poses import matrix_from_pose

S = 10**9
CAMERA = Camera(80, 60, 70, 71, 39.5, 30.5)
T = matrix_from_pose((1, 2, 3), np.array([0.1, 0.2, 0.3, np.sqrt(1 - 0.14)]))
N = 30
rng = np.random.default_rng(0)
RGB = rng.integers(0, 256, (N, 60, 80, 3), np.uint8)
DEPTH = rng.uniform(0.5, 5, (N, 60, 80)).astype(np.float32)


def write(path: Path, storage: str) -> Path:
    with BagWriter(path, storage) as bag:
        for i in range(N):
            stamp = 1000 * S + i * 100_000_000
            bag.image("/camera/color/image_raw", stamp, "cam", RGB[i])
            bag.depth("/camera/depth/image_raw", stamp, "cam", DEPTH[i] if i % 2 else (DEPTH[i] * 1000).astype(np.uint16))
            bag.info("/camera/color/camera_info", stamp, "cam", CAMERA)
            bag.pose("/camera/pose", stamp, "map", T)
            bag.odom("/odom", stamp, "odom", "base", T)
            bag.tf(stamp, "map", "odom", T)
        bag.tf(stamp, "base", "cam", T, static=True)
        assert bag.count == 6 * N + 1
    return path


@pytest.fixture(scope="session", params=["mcap", "sqlite3"])
def bag_path(request, tmp_path_factory):
    return write(tmp_path_factory.mktemp(request.param) / "bag", request.param)


def storage_file(path: Path) -> Path:
    return next(f for f in path.iterdir() if f.suffix in (".mcap", ".db3"))


def test_round_trip(bag_path):
    with open_bag(bag_path) as bag:
        topics = pick_topics(bag)
        assert topics == Topics(image="/camera/color/image_raw", depth="/camera/depth/image_raw", info="/camera/color/camera_info", pose="/camera/pose",
                                odom="/odom", tf="/tf", tf_static="/tf_static")
        assert bag.problem == "" and bag.count(topics) == 6 * N + 1 and bag.duration_s == pytest.approx((N - 1) / 10)
        read = list(messages(bag, topics))
    assert [b.recv_ns for b in read] == sorted(b.recv_ns for b in read)
    by_kind = {kind: [b for b in read if b.kind == kind] for kind in ("image", "depth", "info", "pose", "odom", "tf", "tf_static")}
    assert {k: len(v) for k, v in by_kind.items()} == dict.fromkeys(by_kind, N) | {"tf_static": 1}
    for i in range(N):
        stamp = 1000 * S + i * 100_000_000
        for kind in ("image", "depth", "info", "pose", "odom"):
            assert convert.stamp_ns(by_kind[kind][i].msg.header) == by_kind[kind][i].recv_ns == stamp
        np.testing.assert_array_equal(convert.image_to_rgb(by_kind["image"][i].msg), RGB[i])
        np.testing.assert_allclose(convert.depth_to_m(by_kind["depth"][i].msg), DEPTH[i], atol=0 if i % 2 else 1.001e-3)
        assert convert.camera_from_info(by_kind["info"][i].msg) == CAMERA
        for msg in (by_kind["pose"][i].msg, by_kind["odom"][i].msg, by_kind["tf"][i].msg.transforms[0]):
            np.testing.assert_allclose(convert.pose_from_msg(msg), T, atol=1e-12)
    odom, static = by_kind["odom"][0].msg, by_kind["tf_static"][0].msg.transforms[0]
    assert (odom.header.frame_id, odom.child_frame_id) == ("odom", "base")
    assert (static.header.frame_id, static.child_frame_id) == ("base", "cam")


def test_rclpy_reads_the_same_arrays(bag_path):
    """The recorded bytes, deserialised by ROS itself."""
    serialization = pytest.importorskip("rclpy.serialization")
    with open_bag(bag_path) as bag:
        seen = set()
        for recorded in messages(bag, pick_topics(bag, {"tf": "", "tf_static": ""})):
            if recorded.kind in seen:
                continue
            seen.add(recorded.kind)
            package, _, name = recorded.type.split("/")
            theirs = serialization.deserialize_message(recorded.raw, getattr(importlib.import_module(f"{package}.msg"), name))
            decode = {"image": convert.image_to_rgb, "depth": convert.depth_to_m, "info": convert.camera_from_info}.get(recorded.kind, convert.pose_from_msg)
            np.testing.assert_array_equal(decode(theirs), decode(recorded.msg))
            assert convert.stamp_ns(theirs.header) == convert.stamp_ns(recorded.msg.header)
    assert seen == {"image", "depth", "info", "pose", "odom"}


def test_ros_can_play_it(bag_path):
    """QoS in the metadata, as rosbag2 writes it: reliable; latched only for /tf_static; type hashes are those of the installed ROS."""
    import yaml
    info = yaml.safe_load((bag_path / "metadata.yaml").read_text())["rosbag2_bagfile_information"]
    assert info["storage_identifier"] in ("mcap", "sqlite3") and info["message_count"] == 6 * N + 1
    for entry in info["topics_with_message_count"]:
        topic = entry["topic_metadata"]
        qos, = topic["offered_qos_profiles"]
        assert qos["reliability"] == "reliable" and qos["history"] == "keep_last"
        assert qos["durability"] == ("transient_local" if topic["name"] == "/tf_static" else "volatile")
        package, _, name = topic["type"].split("/")
        description = Path(pytest.importorskip(f"{package}.msg").__file__).parents[1]
        hashes = list(description.rglob(f"{name}.json")) or list(Path(os.environ["AMENT_PREFIX_PATH"].split(os.pathsep)[0]).glob(f"share/{package}/msg/{name}.json"))
        if hashes:
            assert topic["type_description_hash"] in hashes[0].read_text()


def test_a_single_file_and_a_directory_without_metadata(bag_path, tmp_path):
    with open_bag(storage_file(bag_path)) as bag:
        assert bag.problem == "" and len(list(messages(bag, pick_topics(bag)))) == 6 * N + 1
    shutil.copy(storage_file(bag_path), tmp_path)
    with open_bag(tmp_path) as bag:
        assert "no metadata.yaml" in bag.problem
        stream, read = messages(bag, pick_topics(bag)), []
        with pytest.raises(BagError, match=f"{6 * N + 1} of {6 * N + 1}.*reindex"):
            for recorded in stream:
                read.append(recorded)
        assert len(read) == 6 * N + 1


@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 0.9, 0.999])
@pytest.mark.parametrize("with_metadata", [True, False])
def test_a_truncated_recording_gives_what_is_readable(bag_path, tmp_path, share, with_metadata):
    copy = tmp_path / "cut"
    shutil.copytree(bag_path, copy)
    file = storage_file(copy)
    os.truncate(file, int(share * file.stat().st_size))
    if not with_metadata:
        (copy / "metadata.yaml").unlink()
    try:
        bag = open_bag(copy)
        topics = pick_topics(bag)
    except BagError as error:  # so little is left that it cannot be used
        assert share < 0.5 and "cut off" in str(error)
        return
    with bag:
        assert "cut off" in bag.problem
        images = []
        with pytest.raises(BagError, match=r"ended after \d+ of \d+ messages.*cut off"):
            for recorded in messages(bag, topics):
                if recorded.kind == "image":
                    images.append(convert.image_to_rgb(recorded.msg))
    assert len(images) <= N and len(images) >= (share - 0.25) * N
    np.testing.assert_array_equal(images, RGB[:len(images)])


def test_damage_in_the_middle_never_crashes(bag_path, tmp_path):
    """Overwritten stretches: messages come or BagError / BadMessage do; nothing else."""
    whole = storage_file(bag_path).read_bytes()
    for seed in range(12):
        random = np.random.default_rng(seed)
        data, at = bytearray(whole), int(random.integers(0, len(whole) - 5000))
        data[at:at + 5000] = random.bytes(5000)
        file = tmp_path / f"{seed}{storage_file(bag_path).suffix}"
        file.write_bytes(data)
        try:
            with open_bag(file) as bag:
                for recorded in messages(bag, pick_topics(bag)):
                    try:
                        recorded.msg
                    except convert.BadMessage as bad:
                        assert bad.reason == "bad_message"
        except BagError:
            pass


def test_refused_paths(tmp_path):
    def refused(path, match):
        with pytest.raises(BagError, match=match) as caught:
            open_bag(path)
        assert str(path) in str(caught.value)

    refused(tmp_path / "nothing", "does not exist")
    refused(tmp_path, "no .mcap or .db3")
    for name in ("a.mcap", "a.db3"):
        (tmp_path / name).touch()
        refused(tmp_path / name, "0 bytes")
    refused(tmp_path, "0 bytes")
    (tmp_path / "a.txt").write_text("hello")
    refused(tmp_path / "a.txt", "unknown kind")
    for name in ("b.mcap", "b.db3"):
        (tmp_path / name).write_bytes(b"hello, this is not a recording" * 10)
        refused(tmp_path / name, "cannot be read")
    (tmp_path / "m").mkdir()
    for text, match in (("a: [", "cannot be understood"), ("a: 1", "cannot be understood"),
                        ("rosbag2_bagfile_information: {relative_file_paths: [gone.mcap]}", "lists gone.mcap")):
        (tmp_path / "m" / "metadata.yaml").write_text(text)
        with pytest.raises(BagError, match=match):
            open_bag(tmp_path / "m")


def test_an_empty_recording_is_refused(tmp_path):
    for storage in ("mcap", "sqlite3"):
        with BagWriter(tmp_path / storage, storage):
            pass
        with pytest.raises(BagError, match="no message"):
            open_bag(tmp_path / storage)


def test_the_writer_refuses_and_cleans_up(tmp_path):
    (tmp_path / "there").mkdir()
    with pytest.raises(BagError, match="exists already"):
        BagWriter(tmp_path / "there")
    with pytest.raises(BagError, match="unknown"):
        BagWriter(tmp_path / "x", "hdf5")
    (tmp_path / "file").touch()
    with pytest.raises(BagError, match="cannot be written"):
        BagWriter(tmp_path / "file" / "bag")
    with pytest.raises(ZeroDivisionError):
        with BagWriter(tmp_path / "broken") as bag:
            bag.pose("/p", S, "map", T)
            1 / 0
    assert not list(tmp_path.glob("*broken*"))
    with pytest.raises(ValueError, match="float32"):
        with BagWriter(tmp_path / "bad") as bag:
            bag.depth("/d", S, "cam", np.zeros((2, 2)))


@pytest.mark.parametrize("storage", ["mcap", "sqlite3"])
def test_a_recording_is_there_when_it_is_whole(tmp_path, storage, monkeypatch):
    """What a killed process leaves has another name, and the next one writes over it."""
    script = "import os, sys; from spirula_ros.bags import BagWriter; bag = BagWriter(*sys.argv[1:]); bag.message('/s', 'std_msgs/msg/String', __import__('types').SimpleNamespace(data='x'), 1); os.kill(os.getpid(), 15)"
    path = tmp_path / "bag"
    assert subprocess.run([sys.executable, "-c", script, path, storage]).returncode == -15
    assert not path.exists() and (tmp_path / ".bag.part").exists()
    with BagWriter(path, storage) as bag:
        bag.pose("/p", S, "map", T)
        assert not path.exists()
    assert [p.name for p in tmp_path.iterdir()] == ["bag"]
    with open_bag(path) as bag:
        assert bag.topics["/p"].count == 1 and not bag.problem
    monkeypatch.setattr(Writer, "close", lambda self: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(BagError, match="cannot be finished .No space left on device."):
        with BagWriter(tmp_path / "full", storage):
            pass
    assert [p.name for p in tmp_path.iterdir()] == ["bag"]


# ------------------------------------------------------------------------------------------------- choosing topics

def record(path: Path, topics: dict[str, str]) -> Path:
    with BagWriter(path) as bag:
        for i, (topic, msgtype) in enumerate(topics.items()):
            bag.message(topic, msgtype, m.blank(msgtype), S + i)
    return path


IMAGE, INFO, POSE = "sensor_msgs/msg/Image", "sensor_msgs/msg/CameraInfo", "geometry_msgs/msg/PoseStamped"
REALSENSE = {"/camera/infra1/image_rect_raw": IMAGE, "/camera/infra1/camera_info": INFO, "/camera/depth/image_rect_raw": IMAGE, "/camera/depth/camera_info": INFO,
             "/camera/aligned_depth_to_color/image_raw": IMAGE, "/camera/aligned_depth_to_color/camera_info": INFO,
             "/camera/color/image_raw": IMAGE, "/camera/color/camera_info": INFO, "/tf": "tf2_msgs/msg/TFMessage", "/tf_static": "tf2_msgs/msg/TFMessage"}


def test_topics_of_a_realsense(tmp_path):
    with open_bag(record(tmp_path / "bag", REALSENSE)) as bag:
        topics = pick_topics(bag)
        assert topics.image == "/camera/color/image_raw" and topics.info == "/camera/color/camera_info"
        assert topics.depth == "/camera/aligned_depth_to_color/image_raw"
        assert (topics.tf, topics.tf_static, topics.pose_source) == ("/tf", "/tf_static", "tf")
        assert any("infra1" in note for note in topics.notes)
        chosen = pick_topics(bag, {"image": "/camera/infra1/image_rect_raw", "depth": "", "pose": None})
        assert chosen.image == "/camera/infra1/image_rect_raw" and chosen.info == "/camera/infra1/camera_info" and chosen.depth == ""


def test_compressed_topics_and_two_cameras(tmp_path):
    compressed = "sensor_msgs/msg/CompressedImage"
    with open_bag(record(tmp_path / "bag", {"/front/image_raw/compressed": compressed, "/front/camera_info": INFO, "/rear/camera_info": INFO,
                                            "/front/depth/image/compressedDepth": compressed, "/pose": POSE})) as bag:
        topics = pick_topics(bag)
        assert (topics.image, topics.compressed, topics.info) == ("", "/front/image_raw/compressed", "/front/camera_info")
        assert topics.depth == "/front/depth/image/compressedDepth" and topics.pose_source == "pose"


@pytest.mark.parametrize("mask", ["/people", "/camera/color/people_mask"])   # by what is in it; by its name
def test_masks_are_no_images(tmp_path, mask):
    def bag(name, *images):
        with BagWriter(tmp_path / name) as out:
            for topic, image in images:
                out.image(topic, S, "cam", image)
            out.info("/camera_info", S, "cam", CAMERA)
            out.pose("/p", S, "map", T)
        return tmp_path / name
    two = np.where(DEPTH[0] > 2, 255, 0).astype(np.uint8)
    with open_bag(bag("both", (mask, two), ("/zoom", RGB[0]), ("/z_mono", RGB[0, ..., 0]))) as found:
        topics = pick_topics(found)
        assert topics.image == "/z_mono" and topics.mask == "" and not any(mask in note for note in topics.notes if note.startswith("image")), topics
        assert f"mask: none; if what is 0 in {mask} is not of the scene, name it: --mask-topic" in topics.notes
        named = pick_topics(found, {"mask": mask, "image": "/zoom"})
        assert named.mask == mask and not any(note.startswith(("mask", "image")) for note in named.notes)
    with open_bag(bag("alone", ("/camera/masks", two))) as found, pytest.raises(BagError, match="no topic with an image"):
        pick_topics(found)


def test_refused_topics_list_what_is_there(tmp_path):
    with open_bag(record(tmp_path / "bag", {"/image": IMAGE, "/odom": "nav_msgs/msg/Odometry"})) as bag:
        with pytest.raises(BagError, match="no topic with a CameraInfo: record image, CameraInfo and poses together;(.|\n)*/image  sensor_msgs/msg/Image  1 messages"):
            pick_topics(bag)
        with pytest.raises(BagError, match="--image-topic /imgae is not in(.|\n)*/image "):
            pick_topics(bag, {"image": "/imgae"})
        with pytest.raises(BagError, match="is a nav_msgs/msg/Odometry, not sensor_msgs/msg/Image"):
            pick_topics(bag, {"image": "/odom"})
        with pytest.raises(ValueError, match="unknown inputs"):
            pick_topics(bag, {"imu": "/imu"})
    with open_bag(record(tmp_path / "bag2", {"/image": IMAGE, "/camera_info": INFO})) as bag:
        with pytest.raises(BagError, match="no topic with poses"):
            pick_topics(bag)


# ------------------------------------------------------------------------------------- recordings of other people

@needs_robustness
def test_every_third_party_recording_opens_or_is_refused_in_words():
    paths = {p.parent if p.name == "metadata.yaml" else p for p in ROBUSTNESS.rglob("*") if p.name == "metadata.yaml" or p.suffix in (".mcap", ".db3", ".bag")}
    assert len(paths) > 30
    outcomes = {}
    for path in sorted(paths | {ROBUSTNESS / "rosbag2" / "rosbag2_tests" / "resources" / "empty_dir", ROBUSTNESS}):
        try:
            with open_bag(path) as bag:
                outcomes[path] = sum(i.count for i in bag.topics.values())
                with pytest.raises(BagError, match="no topic with an image"):
                    pick_topics(bag)
        except BagError as error:
            outcomes[path] = str(error)
            assert str(path) in str(error) and len(str(error)) > len(str(path)) + 20
    for path, outcome in outcomes.items():
        if path.name == "wrong_rmw_test":
            assert "wrong_format" in outcome
        if path.name in ("wbag", "talker", "cdr_test"):
            assert isinstance(outcome, int) and outcome > 0


@needs_robustness
def test_several_files_are_read_in_order_with_and_without_metadata():
    for storage in ("mcap", "sqlite3"):
        resources = ROBUSTNESS / "rosbag2" / "rosbag2_py" / "test" / "resources" / storage
        with open_bag(resources / "reindex_test_bags" / "multiple_files") as bag:
            assert "no metadata.yaml" in bag.problem and len(bag._readers) == 3
            starts = [r.start_time for r in bag._readers]
            assert starts == sorted(starts) and bag.start_ns == starts[0]
        with open_bag(resources / "wbag") as bag:
            assert bag.problem == ""


# -------------------------------------------------------------------------------------------------- points and masks

def lidar_bag(path: Path, storage: str = "mcap", depth: bool = False) -> Path:
    with BagWriter(path, storage) as bag:
        bag.image("/cam/image", S, "cam", RGB[0])
        bag.info("/cam/camera_info", S, "cam", CAMERA)
        bag.pose("/pose", S, "map", T)
        bag.points("/lidar/points", S, "lidar", POINTS)
        bag.points("/depth_camera/points", S, "lidar", POINTS[:1])
        bag.image("/cam/mask", S, "cam", RGB[0, ..., 0])
        if depth:
            bag.depth("/cam/depth", S, "cam", DEPTH[0])
    return path


POINTS = rng.normal(0, 3, (500, 3)).astype(np.float32)


@pytest.mark.parametrize("storage", ["mcap", "sqlite3"])
def test_points_and_masks_come_back(tmp_path, storage):
    with open_bag(lidar_bag(tmp_path / "bag", storage)) as bag:
        topics = pick_topics(bag, {"mask": "/cam/mask"})
        read = {b.kind: b for b in messages(bag, topics)}
    assert (topics.points, topics.depth, topics.image, topics.mask) == ("/lidar/points", "", "/cam/image", "/cam/mask")
    np.testing.assert_array_equal(points_from_msg(read["points"].msg), POINTS)
    np.testing.assert_array_equal(convert.mask_from_msg(read["mask"].msg), RGB[0, ..., 0] != 0)
    serialization = pytest.importorskip("rclpy.serialization")
    from sensor_msgs.msg import PointCloud2
    np.testing.assert_array_equal(points_from_msg(serialization.deserialize_message(read["points"].raw, PointCloud2)), POINTS)


def test_which_depth_is_chosen(tmp_path):
    with open_bag(lidar_bag(tmp_path / "bag", depth=True)) as bag:
        chosen = lambda **given: (pick_topics(bag, given).depth, pick_topics(bag, given).points)
        assert chosen() == ("/cam/depth", "") and pick_topics(bag).mask == ""
        assert chosen(depth="") == ("", "/lidar/points")
        assert chosen(points="/depth_camera/points") == ("", "/depth_camera/points")
        assert chosen(points="/lidar/points", depth="/cam/depth") == ("/cam/depth", "/lidar/points")
        assert chosen(points="", depth="") == ("", "")
        with pytest.raises(BagError, match="--points-topic /cam/image is a sensor_msgs/msg/Image, not sensor_msgs/msg/PointCloud2"):
            chosen(points="/cam/image")


def test_clouds_of_other_types_are_named_with_the_remedy(tmp_path):
    livox = "livox_ros_driver2/msg/CustomMsg"
    with open_bag(lidar_bag(tmp_path / "bag")) as bag:
        bag.topics = {t: i for t, i in bag.topics.items() if "points" not in t} | {"/livox/lidar": TopicInfo(livox, 3)}
        assert any("/livox/lidar" in note and "xfer_format: 0" in note for note in pick_topics(bag).notes)
        with pytest.raises(BagError, match="CustomMsg, not sensor_msgs/msg/PointCloud2.*xfer_format: 0"):
            pick_topics(bag, {"points": "/livox/lidar"})


def test_one_topic_is_not_two_inputs(bag_path):
    with open_bag(bag_path) as bag:
        depth = pick_topics(bag).depth
        with pytest.raises(BagError, match=f"{depth} is named for two inputs: image, depth; it can be one"):
            pick_topics(bag, {"image": depth})
