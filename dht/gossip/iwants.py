"""Outstanding requests for records (IWANT): which neighbour is asked for what, and for how much at once. Pure.

A neighbour that announces what it does not have keeps its own place only: each link has an allowance of requests, which
grows with what it was asked for and sent, and shrinks with what it was asked for in vain, as broken promises count
against a peer in gossipsub (Vyzovitis et al. 2020, peer scoring, P7). What a link announced beyond that waits for it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

IWANT_TIMEOUT_S = 10.0
"""After so long another neighbour that announced the record is asked."""
FIRST_ALLOWANCE = 128
"""Ids, as one frame holds, that a new link may be asked for at once: they cost less than the connection did, so nobody
has more asked of a peer by coming again under other names."""
LEAST_ALLOWANCE = 8
"""Of a link that never sends what it announced, which may be of one that is overloaded."""
MOST_ALLOWANCE = 256
"""As many records as a link's queue holds."""
MOST_ANNOUNCED = 512
"""Ids of one link that are remembered until their records come, those that it is asked for among them."""


@dataclass(slots=True)
class _Announcer:
    """A link, and the records that were announced on it and have not come."""

    allowance: int = FIRST_ALLOWANCE
    asked: dict[bytes, float] = field(default_factory=dict)
    """By id, in the order asked: when it is overdue."""
    unasked: dict[bytes, None] = field(default_factory=dict)
    """Ids that another link is asked for, or that are more than this one may be asked for."""

    @property
    def room(self) -> int:
        """How much more it may be asked for now; below 0 where its allowance has shrunk."""
        return self.allowance - len(self.asked)


class OutstandingIwants:
    """Outstanding requests of one peer: each record is asked of one link at a time. All of it is bounded by link."""

    def __init__(self) -> None:
        self._links: dict[str, _Announcer] = {}
        self._asked: dict[bytes, str] = {}
        """By id, the link that is asked for it."""

    def open_link(self, link: str) -> None:
        """Begins with a link. What was announced on an older one to the same peer is forgotten: requests went there."""
        self.close_link(link)
        self._links[link] = _Announcer()

    def close_link(self, link: str) -> None:
        """Ends with a link: what it was asked for is asked of others that have it, else it is forgotten."""
        closed = self._links.pop(link, _Announcer())
        for name in closed.asked:
            del self._asked[name]

    def announced(self, link: str, names: Iterable[bytes], now: float) -> tuple[bytes, ...]:
        """Adds ids that were announced on a link, of records that are not here. Returns those to ask it for now."""
        if (announcer := self._links.get(link)) is None:
            return ()
        ask: list[bytes] = []
        for name in names:
            if name in announcer.asked or name in announcer.unasked:
                continue
            if len(announcer.asked) + len(announcer.unasked) >= MOST_ANNOUNCED:
                break
            if name not in self._asked and announcer.room > 0:
                self._ask(link, name, now)
                ask.append(name)
            else:
                announcer.unasked[name] = None
        return tuple(ask)

    def came(self, name: bytes, source: str | None) -> None:
        """Ends with a record that has come from `source`, true or not: nobody needs to be asked for it."""
        if (asked := self._asked.pop(name, None)) is not None:
            announcer = self._links[asked]
            del announcer.asked[name]
            if asked == source:
                announcer.allowance = min(MOST_ALLOWANCE, announcer.allowance + 1)
        for announcer in self._links.values():
            announcer.unasked.pop(name, None)

    def due(self, now: float) -> dict[str, list[bytes]]:
        """Ends requests that are overdue. Returns by link what to ask it for: what others have not sent in time, and
        what waited for it; the links that have sent most of what they were asked for are asked first."""
        for announcer in self._links.values():
            overdue = [name for name, overdue_at in announcer.asked.items() if overdue_at <= now]
            for name in overdue:
                del announcer.asked[name], self._asked[name]
            announcer.allowance = max(LEAST_ALLOWANCE, announcer.allowance - len(overdue))
        again: dict[str, list[bytes]] = {}
        for link, announcer in sorted(self._links.items(), key=lambda item: -item[1].allowance):
            if announcer.room <= 0:
                continue
            for name in [name for name in announcer.unasked if name not in self._asked][: announcer.room]:
                self._ask(link, name, now)
                again.setdefault(link, []).append(name)
        return again

    def _ask(self, link: str, name: bytes, now: float) -> None:
        announcer = self._links[link]
        announcer.unasked.pop(name, None)
        announcer.asked[name] = now + IWANT_TIMEOUT_S
        self._asked[name] = link
