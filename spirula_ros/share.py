"""Installed files that are not Python: launch/, config/, package.xml."""
import xml.etree.ElementTree as ElementTree
from pathlib import Path


def share_directory() -> Path:
    """share/spirula_ros of the installation that this module belongs to: the folder that ament's index names, found
    without its environment variables. pip and colcon both keep Python packages somewhere below the prefix."""
    for prefix in Path(__file__).absolute().parents:
        if (prefix / "share" / "spirula_ros" / "package.xml").is_file():
            return prefix / "share" / "spirula_ros"
    raise FileNotFoundError(f"no share/spirula_ros above {__file__}: spirula_ros is not installed; run `pip install .` or `colcon build`")


def config_file(name: str) -> Path:
    """`name` if it is a file, else the installed config/<name>.yaml. Raises FileNotFoundError that lists what is installed."""
    path = Path(name).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        raise FileNotFoundError(f"{name}: a folder; give a parameter file in it (`spirula params` prints one)")
    path = share_directory() / "config" / f"{name}.yaml"
    if not path.is_file():
        there = ", ".join(sorted(p.stem for p in path.parent.glob("*.yaml")))
        raise FileNotFoundError(f"{name}: no such file, and no installed configuration of that name ({there})")
    return path


def version() -> str:
    """The version in package.xml, where alone it is written."""
    return ElementTree.parse(share_directory() / "package.xml").getroot().findtext("version")
