"""Claims on parts of a table that is copied from several peers at once. Pure.

Work stealing: each source is asked for the next part that nobody else is asked for, so that each gives the more the
faster it is, and a part that one is slow to give is asked for again elsewhere.
"""

import math
from collections.abc import Iterable, Sequence

from molink.dht.gossip.table import MAX_TAGS

_LEAST = 32
"""Peers in a part, if there are as many: each part is a stream, which deflates worse the shorter it is."""
FIRST = 16
"""Peers in the first part that a source gives: who can be dialled comes first, and may give others of the rest."""
_PARTS = 6
"""That a table is cut into, at least, if that makes none shorter."""


class CopyClaims:
    """Tags of peers whose records somebody has been asked for, each with the time when another may be."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._until: dict[int, float] = {}

    def take(self, wanted: Sequence[int], of: int, now: float) -> tuple[int, ...]:
        """Claims a part of what is wanted of a source; none if all of that is claimed. `of`: how many it has that were
        wanted at first."""
        most = FIRST if len(wanted) == of else min(MAX_TAGS, max(_LEAST, math.ceil(of / _PARTS)))
        part = tuple(tag for tag in wanted if self._until.get(tag, -math.inf) <= now)[:most]
        self._until |= dict.fromkeys(part, now + self._patience_s)
        return part

    def release(self, tags: Iterable[int]) -> None:
        """Ends claims: the records are here, or do not come."""
        for tag in tags:
            self._until.pop(tag, None)

    def free_at(self, wanted: Iterable[int]) -> float:
        """When the first of these may be claimed, if nobody releases it before."""
        return min((self._until.get(tag, -math.inf) for tag in wanted), default=math.inf)
