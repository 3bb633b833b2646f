"""Whether a peer takes anything new: it leaves, it is paused, or its memory is more than full. Pure."""

from collections.abc import Callable

from molink.peer.memory.lease import Refused

DRAIN_S = 30.0
"""Sessions of a peer that leaves may end, or go over to others, within this time before it goes."""


class LeaseGate:
    """Whether a lease book grants anything new; what was granted stays."""

    __slots__ = ("_closed", "_on_close")

    def __init__(self) -> None:
        self._closed: dict[str, Refused] = {}
        self._on_close: Callable[[], None] = _nothing

    @property
    def is_closed(self) -> bool:
        """Whether everything new is refused: for good after `drain`, else until it is opened again."""
        return bool(self._closed)

    @property
    def refusal(self) -> Refused | None:
        """What everything new is answered; None while it is open."""
        return self._closed.get("draining") or next(iter(self._closed.values()), None)

    def tell_closed(self, on_close: Callable[[], None]) -> None:
        """`on_close` ends what is here for as long as nothing else wants its place."""
        self._on_close = on_close

    def drain(self) -> None:
        """Refuse everything new from now on."""
        self.close(Refused("draining", "this peer is leaving the swarm: choose another", 0.0))

    def close(self, refusal: Refused) -> None:
        """Answer everything new with this until `reopen` of its code."""
        self._closed[refusal.code] = refusal
        self._on_close()

    def reopen(self, code: str) -> None:
        """What was closed with that code is open again, unless there is another reason."""
        self._closed.pop(code, None)


def _nothing() -> None:
    return None
