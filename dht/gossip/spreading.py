"""Which records pass over which link: pushed whole, or offered by name and sent to whoever asks. Pure.

A flood that pushes brings each record once over every link, 8 times to a peer that needs it once. An offer is 8
bytes. It costs a round trip and the wait until it leaves, so pushes remain where there is little to say.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

NAME_BYTES = 8
MAX_NAMES = 128
"""In one frame."""
ASK_TIMEOUT_S = 10.0
"""After so long another neighbour that offered the record is asked."""
_MAX_RECORDS = 4096
_MAX_SEEN = 65_536
_MAX_ASKED = 4096
_MAX_ASKED_OF_ONE = 512
_MAX_WAITING = 4096

_Value = TypeVar("_Value")


def name_of(record: bytes) -> bytes:
    """What a record is offered by. Whoever gets another record by it than was meant learns it from the next repair."""
    return hashlib.sha256(record).digest()[:NAME_BYTES]


def names_in(body: bytes) -> tuple[bytes, ...]:
    """The names in an offer or an ask. Raises ValueError if these are not 1 to 128 of them."""
    if not body or len(body) % NAME_BYTES or len(body) > MAX_NAMES * NAME_BYTES:
        raise ValueError(f"1 to {MAX_NAMES} names of {NAME_BYTES} bytes, these are {len(body)} bytes")
    return tuple(body[at : at + NAME_BYTES] for at in range(0, len(body), NAME_BYTES))


class Spreading:
    """What one peer has lately heard, to hand on, and what its neighbours have offered. Every memory is bounded."""

    def __init__(self) -> None:
        self._records: OrderedDict[bytes, bytes] = OrderedDict()
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._asked: dict[bytes, tuple[str, float, list[str]]] = {}
        """By name: who was asked, when that is overdue, and who else has it."""
        self._waiting: dict[str, dict[bytes, None]] = {}
        """By link, the names to be offered there next."""

    def open(self, link: str) -> None:
        """There is a link to that peer."""
        self._waiting[link] = {}

    def close(self, link: str) -> None:
        """There is none any more: what it was asked for is overdue."""
        self._waiting.pop(link, None)
        for name, (asked, _, others) in list(self._asked.items()):
            if asked == link:
                self._asked[name] = (asked, 0.0, others)

    def heard(self, record: bytes) -> None:
        """A record has arrived, true or not: nobody needs to be asked for it."""
        name = name_of(record)
        self._asked.pop(name, None)
        _remember(self._seen, name, None, _MAX_SEEN)

    def hand_on(self, record: bytes, source: str | None, *, push: bool) -> tuple[str, ...]:
        """Takes in a true and new record that came from `source`. Returns the links to push it to; without `push` it
        will be offered to them instead."""
        self.heard(record)
        name = name_of(record)
        _remember(self._records, name, record, _MAX_RECORDS)
        to = tuple(link for link in self._waiting if link != source)
        if push:
            return to
        for link in to:
            if len(self._waiting[link]) < _MAX_WAITING:
                self._waiting[link][name] = None
        return ()

    def offers(self) -> Iterator[tuple[str, tuple[bytes, ...]]]:
        """What is to be offered now, by link, at most 128 names each time; it does not wait any more then."""
        for link, waiting in self._waiting.items():
            names = list(waiting)
            waiting.clear()
            for at in range(0, len(names), MAX_NAMES):
                yield link, tuple(names[at : at + MAX_NAMES])

    def offered(self, link: str, names: Iterable[bytes], now: float) -> tuple[bytes, ...]:
        """A neighbour offers records. Returns those to ask it for."""
        ask: list[bytes] = []
        outstanding = sum(asked == link for asked, _, _ in self._asked.values())
        for name in names:
            self._waiting.get(link, {}).pop(name, None)  # it has that
            if name in self._seen:
                continue
            if name in self._asked:
                others = self._asked[name][2]
                if link not in others and link != self._asked[name][0] and len(others) < len(self._waiting):
                    others.append(link)
            elif len(self._asked) < _MAX_ASKED and outstanding + len(ask) < _MAX_ASKED_OF_ONE:
                self._asked[name] = (link, now + ASK_TIMEOUT_S, [])
                ask.append(name)
        return tuple(ask)

    def asked(self, names: Sequence[bytes]) -> tuple[bytes, ...]:
        """A neighbour asks for records: those that are still here."""
        return tuple(self._records[name] for name in names if name in self._records)

    def overdue(self, now: float) -> dict[str, list[bytes]]:
        """What neighbours have not sent in time, by whom to ask instead. What nobody else has is forgotten."""
        again: dict[str, list[bytes]] = {}
        for name, (_, due, others) in list(self._asked.items()):
            if now < due:
                continue
            living = [link for link in others if link in self._waiting]
            if not living:
                del self._asked[name]
                continue
            self._asked[name] = (living[0], now + ASK_TIMEOUT_S, living[1:])
            again.setdefault(living[0], []).append(name)
        return again


def _remember(memory: OrderedDict[bytes, _Value], name: bytes, value: _Value, most: int) -> None:
    memory[name] = value
    memory.move_to_end(name)
    if len(memory) > most:
        memory.popitem(last=False)
