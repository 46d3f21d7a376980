"""The Fast DDS profile that images need. Imports nothing of ROS: launch files use it too."""
from __future__ import annotations

from typing import Mapping

from .share import share_directory

VARIABLES = ("FASTDDS_DEFAULT_PROFILES_FILE", "FASTRTPS_DEFAULT_PROFILES_FILE")  # Fast DDS 3 (Kilted and later), Fast DDS 2


def fastdds_profile(environment: Mapping[str, str]) -> dict[str, str]:
    """What to add to the environment of a process before it makes a participant: a profile with shared memory large
    enough for images. Nothing when the user has chosen a profile. (Both variables at once would load the file twice.)"""
    if any(environment.get(name) for name in VARIABLES):
        return {}
    old = environment.get("ROS_DISTRO", "") in ("foxy", "galactic", "humble", "iron", "jazzy")
    return {VARIABLES[old]: str(share_directory() / "config" / "fastdds.xml")}
