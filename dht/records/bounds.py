"""Checks of single values that came off the network; each raises a ValueError that names the value."""

import math
import unicodedata

MAX_SEQUENCE = 2**53 - 1
MAX_LAYERS = 4096
MAX_TTL_S = 2**20


def text(name: str, value: str, most: int, least: int = 0) -> str:
    """`value`, if it has `least` to `most` characters and none that a terminal would obey."""
    if not least <= len(value) <= most:
        raise ValueError(f"{name} must have {least} to {most} characters, it has {len(value)}")
    if any(unicodedata.category(character)[0] in "CZ" and character != " " for character in value):
        raise ValueError(f"{name} must be printable")
    return value


def whole(name: str, value: int, most: int, least: int = 0) -> int:
    """`value`, if it is from `least` to `most`."""
    if not least <= value <= most:
        raise ValueError(f"{name} must be {least} to {most}, it is {value}")
    return value


def real(name: str, value: float, most: float, *, zero: bool = True) -> float:
    """`value`, if it is finite, not negative, not above `most`, and not zero unless `zero`."""
    if not math.isfinite(value) or value < 0 or value > most or (value == 0 and not zero):
        raise ValueError(f"{name} must be {'0' if zero else 'above 0'} to {most:g}, it is {value}")
    return value


def size(name: str, count: int, most: int) -> None:
    """Refuses more than `most` items."""
    if count > most:
        raise ValueError(f"at most {most} {name} are announced, there are {count}")
