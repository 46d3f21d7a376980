"""Several cameras (topics.cameras): their names, and which topics of a recording are whose. Nothing here needs ROS."""
from __future__ import annotations

import re
from dataclasses import replace

from . import bags
from .errors import InputError
from .params import RosConfig

PLACE = "{camera}"   # of a camera's name in a topic


def cameras_of(ros: RosConfig) -> list[str]:
    """The names in topics.cameras; [''] when there is one camera. Raises ValueError for names that no topic can have, and when {camera} is missing in a topic
    of several cameras, or is there without topics.cameras."""
    topics, intake = ros.topics, ros.intake
    names = [name.strip() for name in topics.cameras.split(",")] if topics.cameras.strip() else [""]
    if topics.cameras.strip() and (len(set(names)) < len(names) or not all(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_/]*", name) for name in names)):
        raise ValueError(f"topics.cameras = '{topics.cameras}': must be different names of letters, digits, _ and /, with commas between them")
    used = {"topics.image": topics.image, "topics.camera_info": topics.camera_info}
    if intake.depth != "ignore" and intake.depth_source == "image":
        used["topics.depth"] = topics.depth
        if topics.depth_info:
            used["topics.depth_info"] = topics.depth_info
    if intake.mask != "off":
        used["topics.mask"] = topics.mask
    for row, topic in used.items():
        if len(names) > 1 and PLACE not in topic:
            raise ValueError(f"{row} = '{topic}' is the same for all {len(names)} of topics.cameras; put {PLACE} where their names differ")
    for row, text in {**used, "topics.points": topics.points, "intake.camera_frame": intake.camera_frame}.items():
        if names == [""] and PLACE in text:
            raise ValueError(f"{row} = '{text}' has {PLACE}, but topics.cameras is empty; name the cameras there")
    return names


def pick_topics(bag: bags.Bag, overrides: dict[str, str | None], ros: RosConfig) -> bags.Topics:
    """As bags.pick_topics, for every camera of topics.cameras: {camera} in the overrides is replaced by its name, and what none is given for is chosen beside
    its image. Raises BagError, and InputError when two cameras would have the same topic."""
    try:
        names = cameras_of(ros)
    except ValueError as error:
        raise InputError(str(error)) from None
    if len(names) == 1:
        return bags.pick_topics(bag, {kind: topic and topic.replace(PLACE, names[0]) for kind, topic in overrides.items()})
    found = [bags.pick_topics(bag, {kind: topic and topic.replace(PLACE, name) for kind, topic in overrides.items()}) for name in names]
    whose: dict[str, tuple[str, str]] = {}
    for name, topics in zip(names, found):
        for kind in bags.OF_CAMERA:
            if (topic := getattr(topics, kind)) and whose.setdefault(topic, (name, kind)) != (name, kind):
                if kind == "points":
                    whose[topic] = "", kind   # a lidar that all of them see
                    continue
                raise InputError(f"{topic} would be the {kind} of camera {whose[topic][0]} and of {name}; name the topics of topics.cameras with {PLACE} (topics.{'camera_info' if kind == 'info' else kind})")
    return replace(found[0], rig=tuple((topic, kind, name) for topic, (name, kind) in whose.items()), notes=tuple(dict.fromkeys(note for topics in found for note in topics.notes)))
