"""What the options of `spirula` hold, from text. Raises argparse.ArgumentTypeError, or ValueError where argparse's own words say enough."""
from __future__ import annotations

import argparse

EXPORTS = ("ply", "compressed.ply", "spz", "splat")  # formats of maps that are read back, by suffix

def positive(text: str) -> float:
    if not 0 < (value := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"'{text}' must be above 0")
    return value


def not_negative(text: str) -> float:
    if not 0 <= (value := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"'{text}' must be 0 or more")
    return value


def whole(low: int):
    def whole_number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"'{text}' must be a whole number, written in digits, like {low}") from None
        if value < low:
            raise argparse.ArgumentTypeError(f"'{text}' must be {low} or more")
        if value >= 2**31:   # the engine takes an int, and would say another number
            raise argparse.ArgumentTypeError(f"'{text}' must be {2**31 - 1} or less")
        return value
    return whole_number


def port(text: str) -> int:
    if not 0 <= (value := int(text)) <= 65535:
        raise argparse.ArgumentTypeError(f"'{text}' must be a port, 0 to 65535; 0 = any that is free")
    return value


def count(low: int):
    def whole_count(text: str) -> int:
        value = scaled(text, {"k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "": 1})
        if not (low <= value < 2**32 and value == int(value)):
            raise argparse.ArgumentTypeError(f"'{text}' must be a whole number from {low} to {2**32 - 1}, like 500e3 or 10M")
        return int(value)
    return whole_count


def mebibytes(text: str) -> int:
    value = scaled(text, {"": 1, "mib": 1, "gib": 1024, "mb": 1e6 / 2**20, "gb": 1e9 / 2**20})
    if not 1 <= value < 2**40:
        raise argparse.ArgumentTypeError(f"'{text}' must be 1 MiB or more, like 8192, 8GiB or 8GB")
    return int(value)


def scaled(text: str, units: dict[str, float]) -> float:
    """A number with one of the units behind it, or NaN."""
    number = text.strip().rstrip("".join(units).upper() + "".join(units))
    try:
        return float(number) * units[text.strip()[len(number):].lower()]
    except (KeyError, ValueError):
        return float("nan")


def size(text: str) -> tuple[int, int]:
    try:
        width, height = (int(word) for word in text.lower().split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}': write it as 160x120") from None
    if not (1 <= width <= 32767 and 1 <= height <= 32767):
        raise argparse.ArgumentTypeError(f"'{text}': both must be 1..32767")
    return width, height


def numbers(count: int):
    def several_numbers(text: str) -> tuple[float, ...]:
        try:
            values = tuple(float(word) for word in text.replace(",", " ").split())
        except ValueError:
            values = ()
        if len(values) != count or not all(abs(v) < float("inf") for v in values):
            raise argparse.ArgumentTypeError(f"'{text}': {count} numbers are needed")
        return values
    return several_numbers


def step_numbers(text: str) -> tuple[int, ...]:
    try:
        steps = tuple(int(word) for word in text.split(","))
    except ValueError:
        steps = (-1,)
    if min(steps) < 0:
        raise argparse.ArgumentTypeError(f"'{text}': write steps as 1000,7000")
    return steps
