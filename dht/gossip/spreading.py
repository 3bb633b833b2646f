"""Lazy-push gossip: records are pushed whole, or announced by id (IHAVE) and sent to whoever asks (IWANT). Pure.

As in Plumtree (Leitao, Pereira and Rodrigues, 2007, section 3) and gossipsub.

A flood that pushes brings each record once over every link, 8 times to a peer that needs it once. An id is 8
bytes. Announcing it costs a round trip and the wait until it leaves, so pushes remain where there is little to say.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from molink.dht.gossip.iwants import OutstandingIwants

RECORD_ID_BYTES = 8
MAX_RECORD_IDS = 128
"""In one frame."""
_MAX_RECORDS = 4096
_MAX_SEEN = 65_536
_MAX_WAITING = 4096
_MAX_OFFERED = 2048
"""Ids announced on a link that may be asked for there. A neighbour remembers fewer (`iwants.MOST_ANNOUNCED`)."""
MAX_GONE = 32
"""Latest words of leaving and accusations, which are announced to each new link: no table holds them, and who changes
links would miss what had been announced on the new one before, and was yet to be on the old."""

_Value = TypeVar("_Value")


def record_id(record: bytes) -> bytes:
    """The id of a record: 8 bytes of its SHA-256. If two records share one, anti-entropy brings the other."""
    return hashlib.sha256(record).digest()[:RECORD_ID_BYTES]


def parse_record_ids(body: bytes) -> tuple[bytes, ...]:
    """The record ids in an IHAVE or IWANT. Raises ValueError if these are not 1 to 128 of them."""
    if not body or len(body) % RECORD_ID_BYTES or len(body) > MAX_RECORD_IDS * RECORD_ID_BYTES:
        raise ValueError(
            f"1 to {MAX_RECORD_IDS} names of {RECORD_ID_BYTES} bytes, these are {len(body)} bytes"
        )
    return tuple(body[at : at + RECORD_ID_BYTES] for at in range(0, len(body), RECORD_ID_BYTES))


class LazyPush:
    """Lazy push of one peer: records heard lately, and ids that neighbours have announced. All of it is bounded."""

    def __init__(self) -> None:
        self._records: OrderedDict[bytes, bytes] = OrderedDict()
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._iwants = OutstandingIwants()
        self._waiting: dict[str, dict[bytes, bool]] = {}
        """By link, the ids to be announced there next, and whether they are urgent."""
        self._offered: dict[str, OrderedDict[bytes, None]] = {}
        """By link, the ids that were announced there and not asked for."""
        self._gone: OrderedDict[bytes, None] = OrderedDict()

    def open_link(self, link: str) -> None:
        """Begins with a link to that peer."""
        self._waiting[link] = dict.fromkeys(self._gone, True)
        self._offered[link] = OrderedDict()
        self._iwants.open_link(link)

    def close_link(self, link: str) -> None:
        """Ends with a link: what its peer was asked for others are asked for next, or it is forgotten."""
        self._waiting.pop(link, None)
        self._offered.pop(link, None)
        self._iwants.close_link(link)

    def record_seen(self, record: bytes, source: str | None) -> None:
        """Records that a record has arrived from `source`, true or not: nobody needs to be asked for it."""
        name = record_id(record)
        self._iwants.came(name, source)
        _remember(self._seen, name, None, _MAX_SEEN)

    def forward(
        self, record: bytes, source: str | None, *, push: bool, gone: bool = False, urgent: bool = False
    ) -> tuple[str, ...]:
        """Forwards a true and new record that came from `source`. Returns the links to push it to; without `push` its
        id will be announced to them instead. `gone`: it says that a peer is gone, which is urgent; `urgent`: its id
        goes even where others wait."""
        self.record_seen(record, source)
        name = record_id(record)
        _remember(self._records, name, record, _MAX_RECORDS)
        if gone:
            _remember(self._gone, name, None, MAX_GONE)
        to = tuple(link for link in self._waiting if link != source)
        if push:
            return to
        for link in to:
            if len(self._waiting[link]) < _MAX_WAITING:
                self._waiting[link][name] = urgent or gone
        return ()

    def take_ihaves(self, link: str, *, urgent: bool = False) -> Iterator[tuple[bytes, ...]]:
        """Takes the ids to be announced on a link now (IHAVE), at most 128 each time; none where it has ended.
        `urgent`: those only."""
        waiting = self._waiting.get(link, {})
        names = [name for name, is_urgent in waiting.items() if is_urgent or not urgent]
        for name in names:
            del waiting[name]
            _remember(self._offered[link], name, None, _MAX_OFFERED)
        for at in range(0, len(names), MAX_RECORD_IDS):
            yield tuple(names[at : at + MAX_RECORD_IDS])

    def receive_ihave(self, link: str, names: Iterable[bytes], now: float) -> tuple[bytes, ...]:
        """A neighbour announces records (IHAVE). Returns the ids to ask it for (IWANT)."""
        told, waiting = tuple(names), self._waiting.get(link, {})
        offered: dict[bytes, None] = self._offered.get(link, OrderedDict())
        for name in told:  # it has that
            waiting.pop(name, False)
            offered.pop(name, None)
        return self._iwants.announced(link, (name for name in told if name not in self._seen), now)

    def receive_iwant(self, link: str, names: Sequence[bytes]) -> tuple[bytes, ...]:
        """A neighbour asks for records (IWANT). Returns those that are still here. What was announced on its link is
        sent once, and nothing else: ids are small, and records are not."""
        offered: dict[bytes, None] = self._offered.get(link, OrderedDict())
        asked = [name for name in names if offered.pop(name, name) is None]
        return tuple(self._records[name] for name in asked if name in self._records)

    def retry_iwants(self, now: float) -> dict[str, list[bytes]]:
        """Retries what neighbours have not sent in time, by whom to ask instead, and asks for what had to wait. What
        nobody else has is forgotten."""
        return self._iwants.due(now)


def _remember(memory: OrderedDict[bytes, _Value], name: bytes, value: _Value, most: int) -> None:
    memory[name] = value
    memory.move_to_end(name)
    if len(memory) > most:
        memory.popitem(last=False)
