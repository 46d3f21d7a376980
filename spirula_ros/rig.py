"""Several cameras (topics.cameras): their names, and where a name stands in a topic."""
from __future__ import annotations

import re

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
