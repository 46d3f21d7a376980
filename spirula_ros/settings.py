"""Both configurations of a run from a file, options and `--set name=value`, in this order of rising precedence."""
from __future__ import annotations

from typing import Any, Iterable, NamedTuple

import yaml

from spirula_gpu.config import Config, unknown

from . import params
from .errors import InputError
from .params import RosConfig
from .share import config_file


class Settings(NamedTuple):
    config: Config
    ros: RosConfig
    given: frozenset[str]  # names that were set by the user


def settings(file: str | None, options: dict[str, Any], assignments: list[str]) -> Settings:
    """options: {dotted name: value or None}, None = not given. Raises InputError."""
    values = read_file(file) if file else {}
    values.update({name: value for name, value in options.items() if value is not None})
    values.update(read_assignments(assignments, params.rows()))
    try:
        ros, config = params.split(values)
    except ValueError as error:
        raise InputError(str(error)) from None
    return Settings(config, ros, frozenset(values))


def read_file(name: str) -> dict[str, Any]:
    """{dotted name: value} of a ROS parameter file or plain nested YAML; `name` is a path or that of an installed config/<name>.yaml."""
    try:
        path = config_file(name)
    except FileNotFoundError as error:
        raise InputError(f"--config {error}") from None
    try:
        tree = yaml.safe_load(path.read_text()) or {}
        for value in list(tree.values()):
            if isinstance(value, dict) and "ros__parameters" in value:
                tree = value["ros__parameters"]
                break
        return {f"{group}.{leaf}": value for group, rows in tree.items() if group != "use_sim_time" for leaf, value in rows.items()}
    except (yaml.YAMLError, AttributeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not a parameter file (group: {{name: value}}): {error}") from None


def read_assignments(assignments: list[str], rows: Iterable[tuple], listed_by: str = "spirula params") -> dict[str, Any]:
    """{dotted name: value} of 'group.name=value'; the value is YAML, or the text itself where the row is text. rows: those that there are."""
    defaults = {name: default for name, default, _ in rows}
    values = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals:
            raise InputError(f"--set {assignment}: write group.name=value; `{listed_by}` lists the names")
        if name not in defaults:
            raise InputError(f"--set {assignment}: {unknown(name, defaults)}; `{listed_by}` lists all")
        try:
            values[name] = text if isinstance(defaults[name], str) else yaml.safe_load(text)
        except yaml.YAMLError:
            raise InputError(f"--set {assignment}: '{text}' is not a value") from None
    return values
