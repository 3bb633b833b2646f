"""Values of a JSON document, of the type and within the bounds that are needed; errors name the key. Pure."""

import reprlib
from collections.abc import Mapping, Sequence

from molink.dht.records.records import Coordinate
from molink.shards.spec import Span

MOST_MS = 1e6
"""No time in such a document is longer: 17 minutes."""


class SnapshotError(ValueError):
    """The file is no such description; the message is one sentence that names it, and the line or the key."""


def objects(document: Mapping[str, object], key: str, where: str) -> Sequence[Mapping[str, object]]:
    """A list of objects. `where`, here and below, is what errors say before the key."""
    value = document.get(key)
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise SnapshotError(f"{where}, key {key}: a list of objects is needed")
    return value


def text(one: Mapping[str, object], key: str, where: str) -> str:
    """A string that can be encoded."""
    value = one.get(key)
    if not isinstance(value, str) or any("\ud800" <= character <= "\udfff" for character in value):
        raise SnapshotError(f"{where}, key {key}: a text is needed, got {_shown(value)}")
    return value


def number(one: Mapping[str, object], key: str, where: str, *, least: float, most: float) -> float:
    """A number within the bounds."""
    value = one.get(key)
    # NaN alone differs from itself; math.isfinite would fail on integers that are too large for it
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        raise SnapshotError(f"{where}, key {key}: a number is needed, got {_shown(value)}")
    if not least <= value <= most:
        raise SnapshotError(f"{where}, key {key}: {_shown(value)} is not from {least:g} to {most:g}")
    return value


def number_or(
    one: Mapping[str, object], key: str, where: str, otherwise: float, *, most: float = MOST_MS
) -> float:
    """A number from 0 on; `otherwise` if it is not there, as in documents of older versions."""
    return otherwise if one.get(key) is None else number(one, key, where, least=0, most=most)


def spans(one: Mapping[str, object], key: str, layers: int, where: str) -> list[Span]:
    """A list of [start, stop]."""
    value = one.get(key)
    if not isinstance(value, list):
        raise SnapshotError(f"{where}, key {key}: a list of [start, stop] is needed, got {_shown(value)}")
    return [_span(pair, key, layers, where) for pair in value]


def span_or_none(one: Mapping[str, object], key: str, layers: int, where: str) -> Span | None:
    """One [start, stop], if it is there."""
    value = one.get(key)
    return None if value is None else _span(value, key, layers, where)


def times_ms(one: Mapping[str, object], key: str, where: str) -> list[tuple[int, float]]:
    """Milliseconds by a whole number from 1 on, in its order; nothing if the key is not there."""
    value = one.get(key)
    if value is None:
        return []
    if not isinstance(value, dict):
        raise SnapshotError(f"{where}, key {key}: an object of milliseconds is needed, got {_shown(value)}")
    found = {}
    for size in value:
        if not (size.isascii() and size.isdigit() and 1 <= len(size) <= _MOST_DIGITS and int(size) > 0):
            raise SnapshotError(f"{where}, key {key}: {_shown(size)} is no whole number above 0")
        found[int(size)] = number(value, size, f"{where}, key {key}", least=0, most=MOST_MS)
    return sorted(found.items())


def coordinate_or_none(one: Mapping[str, object], key: str, where: str) -> Coordinate | None:
    """A network coordinate, if it is there."""
    value = one.get(key)
    if value is None:
        return None
    inside = f"{where}, key {key}"
    if not isinstance(value, dict):
        raise SnapshotError(f"{inside}: position, height_ms and error are needed, got {_shown(value)}")
    position = value.get("position")
    if not isinstance(position, list):
        raise SnapshotError(f"{inside}, key position: a list of numbers is needed, got {_shown(position)}")
    axes = {f"position[{axis}]": part for axis, part in enumerate(position)}
    parts = tuple(number(axes, axis, inside, least=-MOST_MS, most=MOST_MS) for axis in axes)
    height_ms, error = (number(value, each, inside, least=0, most=MOST_MS) for each in ("height_ms", "error"))
    try:
        return Coordinate(parts, height_ms, error)
    except ValueError as problem:
        raise SnapshotError(f"{inside}: {problem}") from None


_MOST_DIGITS = 7
"""A million tokens or sequences in one step are more than any has."""


def _span(value: object, key: str, layers: int, where: str) -> Span:
    start, stop = value if isinstance(value, list) and len(value) == 2 else (None, None)
    if type(start) is not int or type(stop) is not int or not 0 <= start < stop <= layers:
        raise SnapshotError(f"{where}, key {key}: {_shown(value)} is no span of {layers} layers")
    return Span(start, stop)


def _shown(value: object) -> str:
    """For an error's one line."""
    return reprlib.repr(value)
