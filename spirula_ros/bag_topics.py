"""Which topics of a recording are whose, for one camera or several (topics.cameras). Nothing here needs ROS."""
from __future__ import annotations

from dataclasses import replace

from . import bags
from .errors import InputError
from .params import RosConfig
from .rig import PLACE, cameras_of


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
