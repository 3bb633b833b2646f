"""The volunteer's line about strangers: what was refused, how often and from whom, at most once a minute.

Whoever floods a peer must not flood its log too: refusals are counted, and the first of a quiet time is told at once.
"""

import logging
import time
import unicodedata
from collections import Counter
from collections.abc import Callable

INTERVAL_S = 60.0
"""Least time between two lines of one log."""
_MOST_KINDS = 16
_MOST_NAMES = 256
"""Of whom a count is kept by name; the others are counted together."""
_NAMED = 3
"""Of each kind, in a line."""
_MOST_CHARACTERS = 64
"""Of a name that somebody else may have chosen."""
_OTHERS = "others"


class RefusalLog:
    """Counts the refusals of one part of a process, and writes a warning about them once a minute at most.

    To be used from one thread. The count of a minute in which the refusals end is told with the next refusal.
    """

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._counts: dict[str, Counter[str]] = {}
        self._names = 0
        self._since_s: float | None = None
        """When the last line was written."""

    def refused(self, what: str, whom: str) -> None:
        """Counts a refusal.

        `what` names its kind in the plural, such as `unproven links`; `whom` an address or peer id, in whatever
        characters.
        """
        self._count(what if what in self._counts or len(self._counts) < _MOST_KINDS else "other things", whom)
        now = self._clock()
        if self._since_s is not None and now - self._since_s < INTERVAL_S:
            return
        within = "" if self._since_s is None else f" within {now - self._since_s:.0f} s"
        self._logger.warning("refused%s: %s", within, "; ".join(map(_told, self._counts.items())))
        self._since_s = now
        self._counts.clear()
        self._names = 0

    def _count(self, what: str, whom: str) -> None:
        counts = self._counts.setdefault(what, Counter())
        name = _printable(whom)
        if name not in counts:
            if self._names >= _MOST_NAMES:
                name = _OTHERS
            else:
                self._names += 1
        counts[name] += 1


def _told(item: tuple[str, Counter[str]]) -> str:
    what, counts = item
    named = [(name, count) for name, count in counts.most_common(_NAMED + 1) if name != _OTHERS][:_NAMED]
    others = counts.total() - sum(count for _, count in named)
    whom = [f"{name} ({count})" if len(counts) > 1 else name for name, count in named]
    return f"{counts.total()} {what} from {', '.join([*whom, *([f'others ({others})'] if others else [])])}"


def _printable(name: str) -> str:
    """`name` without what a terminal would obey, and not longer than a line has room for."""
    kept = name[:_MOST_CHARACTERS]
    return (
        "".join(
            "?" if unicodedata.category(character)[0] in "CZ" and character != " " else character
            for character in kept
        )
        or "?"
    )
