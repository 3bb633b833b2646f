"""Checks of single values that came off the network; each raises a ValueError that names the value."""

import math
import re
import unicodedata

MAX_SEQUENCE = 2**53 - 1
MAX_LAYERS = 4096
MAX_TTL_S = 2**20

_HOST_AND_PORT = re.compile(r"(?:\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253}):([0-9]{1,5})")


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


def host_and_port(name: str, value: str) -> str:
    """`value`, if it is host:port with an IPv6 host in brackets."""
    found = _HOST_AND_PORT.fullmatch(text(name, value, most=262, least=3))
    if found is None or not 1 <= int(found.group(1)) <= 65535:
        raise ValueError(f"{name} must be host:port, it is {value!r}")
    return value
