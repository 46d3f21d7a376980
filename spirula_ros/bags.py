"""rosbag2 recordings (mcap, sqlite3) and ROS 1 bags without ROS: `open_bag`, `pick_topics`, `messages`, `BagWriter`.

Only the message types of the intake are decoded, with the definitions of ROS 2 Kilted (their layout on the wire is the
same in every distribution since Foxy), so a bag with other, even unreadable, types and definitions can be used.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Iterator, NamedTuple

import yaml
from rosbags.rosbag2 import Reader

from .bag_files import BagError, complaint, mcap_encodings, message_bytes, salvage
from .bag_writer import TYPES, BagWriter
from .convert import MASK_NAME, BadMessage, looks_like_mask
from .pointcloud import NOT_SUPPORTED
from .ros1_bag import Ros1Reader

__all__ = ["KINDS", "Bag", "BagError", "BagMessage", "BagWriter", "TopicInfo", "Topics", "TopicsError", "messages", "open_bag", "pick_topics", "read"]
OF_CAMERA = ("image", "compressed", "depth", "points", "mask", "info")
STORAGE_SUFFIXES = (".mcap", ".db3", ".bag")
KINDS = {  # kind -> message types it can have
    "image": ("sensor_msgs/msg/Image",),
    "compressed": ("sensor_msgs/msg/CompressedImage",),
    "depth": ("sensor_msgs/msg/Image", "sensor_msgs/msg/CompressedImage"),
    "points": ("sensor_msgs/msg/PointCloud2",),
    "mask": ("sensor_msgs/msg/Image", "sensor_msgs/msg/CompressedImage"),
    "info": ("sensor_msgs/msg/CameraInfo",),
    "pose": ("geometry_msgs/msg/PoseStamped", "geometry_msgs/msg/PoseWithCovarianceStamped", "geometry_msgs/msg/TransformStamped"),
    "odom": ("nav_msgs/msg/Odometry",),
    "tf": ("tf2_msgs/msg/TFMessage",),
    "tf_static": ("tf2_msgs/msg/TFMessage",),
    "path": ("nav_msgs/msg/Path",),
}


# --------------------------------------------------------------------------------------------------------- reading

class TopicsError(BagError):
    """A recording without what a map needs. `why`: the text without the list of its topics."""

    def __init__(self, why: str, bag: "Bag"):
        super().__init__(f"{why}; the recording has:\n{_listing(bag)}")
        self.why = why


class TopicInfo(NamedTuple):
    type: str   # e.g. sensor_msgs/msg/Image
    count: int  # messages


@dataclass(frozen=True)
class Topics:
    """The topic that feeds each input; '' = none. `notes`: what else could have been meant. `rig`: (topic, kind, camera's name) of all that several cameras have; the
    fields have those of the first then."""
    image: str = ""
    compressed: str = ""
    depth: str = ""
    points: str = ""
    mask: str = ""
    info: str = ""
    pose: str = ""
    odom: str = ""
    tf: str = ""
    tf_static: str = ""
    path: str = ""
    notes: tuple[str, ...] = ()
    rig: tuple[tuple[str, str, str], ...] = ()

    def chosen(self) -> dict[str, str]:
        """{topic: kind} of the inputs that have one."""
        return {**{topic: kind for kind in KINDS if (topic := getattr(self, kind))}, **{topic: kind for topic, kind, _ in self.rig}}

    def camera_of(self, topic: str) -> str:
        """The name of the camera that the topic is of; '': of the only one, or of none."""
        return next((camera for other, _, camera in self.rig if other == topic), "")

    @property
    def images(self) -> list[str]:
        return [topic for topic, kind in self.chosen().items() if kind in ("image", "compressed")]

    @property
    def pose_source(self) -> str:
        """pose | odom | tf | path: the value for intake.pose_source."""
        return "pose" if self.pose else "odom" if self.odom else "path" if self.path and not self.tf else "tf"


class BagMessage(NamedTuple):
    kind: str       # a key of KINDS
    topic: str
    type: str
    recv_ns: int    # when it was recorded
    raw: bytes      # CDR: what a serialised publisher sends

    @property
    def msg(self) -> Any:
        """The message, decoded now. Raises BadMessage('bad_message')."""
        try:
            return TYPES.deserialize_cdr(self.raw, self.type)
        except Exception as error:  # rosbags raises what the broken bytes lead to: SerdeError, struct.error, ValueError, ..
            raise BadMessage("bad_message", f"{self.topic}: {len(self.raw)} bytes are not a {self.type} ({error}); was the recording damaged?") from None


@dataclass
class Bag:
    """An opened recording. `problem` is '' or says why it is incomplete; what is readable can still be used."""
    path: Path
    topics: dict[str, TopicInfo]
    start_ns: int
    end_ns: int
    problem: str = ""
    _readers: list[Any] = field(default_factory=list)  # rosbags' Reader, Ros1Reader or Salvaged, in recorded order

    @property
    def duration_s(self) -> float:
        return max(0, self.end_ns - self.start_ns) / 1e9

    def count(self, topics: Topics) -> int:
        """How many messages `messages(bag, topics)` yields, if the recording is whole: for a progress bar."""
        return sum(self.topics[t].count for t in topics.chosen())

    def images(self, topics: Topics) -> int:
        """.. and how many of them are images."""
        return sum(self.topics[topic].count for topic in topics.images)

    def close(self) -> None:
        while self._readers:
            self._readers.pop().close()

    def __enter__(self) -> "Bag":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def open_bag(path: str | Path) -> Bag:
    """A rosbag2 directory, or one .mcap, .db3 or ROS 1 .bag file. A recording that was cut off (recorder killed, disk full) opens with
    `problem` set as long as something in it is readable. Raises BagError for everything else."""
    path = Path(path)
    files = _storage_files(path)
    problems, readers = [], []
    if path.is_dir() and (path / "metadata.yaml").exists() and not any(complaint(f) for f in files):
        readers.append(_open_reader(path, path))
    else:
        if path.is_dir() and not (path / "metadata.yaml").exists() and files[0].suffix != ".bag":
            problems.append("there is no metadata.yaml (the recorder did not finish; `ros2 bag reindex` makes one)")
        for file in files:
            if (cut := complaint(file)):
                problems.append(f"{file.name}: {cut}")
                readers.append(salvage(file))
            else:
                readers.append(_open_reader(file, path))
    topics: dict[str, TopicInfo] = {}
    for c in (c for r in readers for c in r.connections):
        topics[c.topic] = TopicInfo(c.msgtype, c.msgcount + (topics[c.topic].count if c.topic in topics else 0))
    bag = Bag(path, dict(sorted(topics.items())), min(r.start_time for r in readers), max(r.end_time for r in readers), "; ".join(problems), readers)
    if not any(t.count for t in topics.values()):
        bag.close()
        raise BagError(f"{path}: no message is in this recording" + (f" ({bag.problem})" if bag.problem else "") + "; record it again")
    return bag


def _storage_files(path: Path) -> list[Path]:
    """The files that hold messages, in recorded order."""
    if not path.exists():
        raise BagError(f"{path}: does not exist")
    if path.is_file() and path.stat().st_size == 0:
        raise BagError(f"{path}: the recording is empty (0 bytes); record it again")
    if path.is_file():
        if path.suffix == ".zstd":
            raise BagError(f"{path}: a compressed storage file; give the folder of its metadata.yaml, or decompress it: zstd -d {path.name}")
        if path.suffix not in STORAGE_SUFFIXES:
            raise BagError(f"{path}: unknown kind of recording '{path.suffix}'; give a rosbag2 directory, a .mcap, .db3 or ROS 1 .bag file")
        files = [path]
    else:
        files = _files_in(path)
    if all(f.stat().st_size == 0 for f in files):
        raise BagError(f"{path}: the recording is empty (0 bytes); record it again")
    return files


def _files_in(path: Path) -> list[Path]:
    listed = []
    if (path / "metadata.yaml").exists():
        try:
            info = yaml.safe_load((path / "metadata.yaml").read_text())["rosbag2_bagfile_information"]
            listed = [path / Path(name).name for name in info["relative_file_paths"]]
        except (yaml.YAMLError, KeyError, TypeError, UnicodeDecodeError) as error:
            raise BagError(f"{path / 'metadata.yaml'}: cannot be understood ({error}); move it away to read the storage files without it") from None
        if (missing := [f.name for f in listed if not f.exists()]):
            raise BagError(f"{path}: metadata.yaml lists {', '.join(missing)}, which is not there; copy it, or give a single storage file")
    number = lambda f: (len(f.stem), f.stem)  # x_2 before x_10
    files = listed or sorted((f for f in path.iterdir() if f.suffix in STORAGE_SUFFIXES), key=number)
    if not files and (packed := sorted(f.name for f in path.glob("*.zstd"))):
        raise BagError(f"{path}: {packed[0]} is compressed and there is no metadata.yaml; decompress {'it' if len(packed) == 1 else f'all {len(packed)}'}: zstd -d *.zstd")
    if not files:
        raise BagError(f"{path}: no .mcap or .db3 file and no metadata.yaml; is this the directory of a rosbag2 recording?")
    if len(ros1 := [f.name for f in files if f.suffix == ".bag"]) > 1:
        raise BagError(f"{path}: {len(ros1)} ROS 1 bags ({', '.join(ros1[:3])}{' ..' if len(ros1) > 3 else ''}); name one, or join the parts of one recording: rosbags-convert --src PARTS --dst OUT")
    return files


def _open_reader(path: Path, bag_path: Path) -> Any:
    if path.suffix == ".bag":
        return Ros1Reader(path, TYPES)
    if path.suffix == ".mcap" and path.is_file() and (forms := mcap_encodings(path)) is not None:   # rosbags takes files with the profile of rosbag2 alone
        if "cdr" in forms:
            return salvage(path)
        raise BagError(f"{bag_path}: its messages are {' and '.join(sorted(forms)) or 'none'}, not cdr as those of ROS 2 are; record the topics with `ros2 bag record`")
    try:
        reader = Reader(path)
        reader.open()
        return reader
    except Exception as error:  # rosbags lets sqlite, zstd, struct, yaml and unicode errors through
        raise BagError(f"{bag_path}: cannot be read ({str(error) or type(error).__name__}); a ROS 2 recording (CDR messages in mcap or "
                       "sqlite3) is needed") from error


def messages(bag: Bag, topics: Topics) -> Iterator[BagMessage]:
    """The messages of the chosen topics, as `read` yields them."""
    return read(bag, topics.chosen())


def read(bag: Bag, kinds: dict[str, str]) -> Iterator[BagMessage]:
    """The messages of the topics in {topic: kind}, in recorded order. If the recording ends early, everything readable is yielded and
    then BagError says after how many messages."""
    expected, n = sum(bag.topics[topic].count for topic in kinds), 0
    try:
        for reader in list(bag._readers):
            wanted = [c for c in reader.connections if c.topic in kinds]
            for connection, recv_ns, raw in reader.messages(wanted) if wanted else ():
                n += 1
                yield BagMessage(kinds[connection.topic], connection.topic, connection.msgtype, recv_ns, message_bytes(raw))
    except GeneratorExit:
        raise
    except Exception as error:  # as in _open_reader: damaged bytes raise anything
        raise BagError(f"{bag.path}: damaged after {n} of {expected} messages ({str(error) or type(error).__name__}); what came before is good") from error
    if bag.problem or n < expected:
        raise BagError(f"{bag.path}: ended after {n} of {expected} messages" + (f": {bag.problem}" if bag.problem else "; its index promises more"))


# ------------------------------------------------------------------------------------------------- choosing topics

_DEPTH_WORDS, _OTHER_WORDS = ("depth",), ("disparity", "mask", "infra", "/ir", "confidence", "label", "semantic", "thermal", "fisheye", "debug", "render")
_GOOD_WORDS = ("color", "colour", "rgb")


def pick_topics(bag: Bag, overrides: dict[str, str | None] | None = None) -> Topics:
    """Chooses by type and name. overrides: {kind: topic}; '' = do not use that input, None = choose. Points are chosen only where there is no
    depth image; a mask never: which of its pixels are 0 its name does not say. Raises BagError, with the topics that exist, when an override is not there or has another type, or when image, info or poses are missing."""
    given = {k: v for k, v in (overrides or {}).items() if v is not None}
    if (unknown := set(given) - set(KINDS)):
        raise ValueError(f"unknown inputs {sorted(unknown)}; known: {', '.join(KINDS)}")
    for kind, topic in given.items():
        found = bag.topics.get(topic)
        if topic and (found is None or found.type not in KINDS[kind] or not found.count):
            why = "is not in" if found is None else "has no messages in" if not found.count else f"is a {found.type}, not {' or '.join(KINDS[kind])}, in"
            remedy = f" ({NOT_SUPPORTED[found.type]})" if found and found.type in NOT_SUPPORTED else ""
            raise BagError(f"--{kind.replace('_', '-')}-topic {topic} {why} {bag.path}{remedy}; it has:\n{_listing(bag)}")
    notes: list[str] = []
    masks = {t for t, i in bag.topics.items() if i.count and i.type in KINDS["mask"] and (t == given.get("mask") or MASK_NAME.search(t))}

    def choose(kind: str, score: Callable[[str], int]) -> str:
        if kind in given:
            return given[kind]
        candidates = [t for t, i in bag.topics.items() if i.count and i.type in KINDS[kind] and score(t) > -100 and t not in masks]
        if kind in ("image", "compressed") and len(candidates) > 1:
            masks.update(t for t in candidates if _holds_masks(bag, t))
            candidates = [t for t in candidates if t not in masks]
        best = sorted(candidates, key=lambda t: (-score(t), -bag.topics[t].count, t))
        if len(best) > 1 and kind not in ("tf", "tf_static"):
            notes.append(f"{kind}: {best[0]} (there is also {', '.join(best[1:4])})")
        return best[0] if best else ""

    image = choose("image", _image_score)
    compressed = "" if image else choose("compressed", _image_score)
    colour = image or compressed
    info = choose("info", lambda t: _info_score(t, colour))
    depth = "" if given.get("points") and "depth" not in given else choose("depth", lambda t: _depth_score(t, colour))
    points = given.get("points", "") if depth else choose("points", lambda t: -any(w in t for w in _DEPTH_WORDS))  # a lidar rather than a depth camera
    notes += [f"points: {t} cannot be used: {i.type}; {NOT_SUPPORTED[i.type]}" for t, i in bag.topics.items() if i.type in NOT_SUPPORTED and not (depth or points)]
    pose, odom = (choose(kind, lambda t: _shared_prefix(t, colour)) for kind in ("pose", "odom"))
    tf = choose("tf", lambda t: -1000 if "static" in t else 0)
    tf_static = choose("tf_static", lambda t: 0 if "static" in t else -1000)
    path = given.get("path", "")   # many a path is a plan
    if not path and (paths := [t for t, i in bag.topics.items() if i.count and i.type in KINDS["path"]]):
        notes.append(f"path: none; if one of {', '.join(paths[:3])} has corrected poses, name it")
    if masks and "mask" not in given:
        notes.append(f"mask: none; if what is 0 in {', '.join(sorted(masks)[:3])} is not of the scene, name it: --mask-topic")
    topics = Topics(image, compressed, depth, points, given.get("mask", ""), info, pose, odom, tf, tf_static, path, tuple(notes))
    named = [topic for kind in KINDS if (topic := getattr(topics, kind))]
    if twice := sorted({topic for topic in named if named.count(topic) > 1}):
        raise BagError(f"{bag.path}: {twice[0]} is named for two inputs: {', '.join(kind for kind in KINDS if getattr(topics, kind) == twice[0])}; it can be one")
    lacking = [("an image (sensor_msgs/Image or CompressedImage)", colour), ("a CameraInfo", info), ("poses (PoseStamped, Odometry, TF, or a path that is named)", pose or odom or tf or path)]
    if (missing := [what for what, topic in lacking if not topic]):
        why = f" ({bag.problem})" if bag.problem else ""
        raise TopicsError(f"{bag.path}: no topic with {', '.join(missing)}{why}: record image, CameraInfo and poses together", bag)
    return topics


def _holds_masks(bag: Bag, topic: str) -> bool:
    try:
        return looks_like_mask(next(messages(bag, Topics(image=topic))).msg)
    except (BadMessage, BagError, StopIteration):
        return False


def _image_score(topic: str) -> int:
    if any(w in topic for w in _DEPTH_WORDS):
        return -1000
    return 10 * any(w in topic for w in _GOOD_WORDS) - 20 * any(w in topic for w in _OTHER_WORDS) + 2 * ("rect" in topic) - 3 * ("right" in topic)


def _info_score(topic: str, colour: str) -> int:
    return _shared_prefix(topic, colour) + 100 * (topic == _sibling(colour, "camera_info")) - 20 * any(w in topic for w in _DEPTH_WORDS + _OTHER_WORDS)


def _depth_score(topic: str, colour: str) -> int:
    if not any(w in topic for w in _DEPTH_WORDS):
        return -1000
    return _shared_prefix(topic, colour) + 10 * ("aligned" in topic or "registered" in topic) - 5 * ("compressed" in topic.lower())


def _sibling(topic: str, name: str) -> str:
    """The topic of that name beside an image topic; /compressed is one level deeper."""
    return topic.removesuffix("/compressed").rpartition("/")[0] + "/" + name


def _shared_prefix(a: str, b: str) -> int:
    n = 0
    for x, y in zip(a.split("/")[1:], b.split("/")[1:]):
        if x != y:
            break
        n += 1
    return n


def _listing(bag: Bag) -> str:
    return "\n".join(f"  {t}  {i.type}  {i.count} messages" for t, i in bag.topics.items())
