"""Ranks that compute and send each other messages, in virtual time."""

from collections import Counter, defaultdict
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from molink.simnet.core.timeline import Timeline
from molink.simnet.papers.communication.fabric import Fabric
from molink.simnet.papers.communication.operations import Kind, Phase

Sent = Kind | Literal["Token"]
"""What a message is part of. Tokens that were drawn go back to the first stage; the paper leaves them out."""


@dataclass(frozen=True, slots=True)
class Compute:
    """The rank is busy for so long."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Receive:
    """The rank waits for the next message of that one."""

    source: int


Program = Generator[Compute | Receive, None, None]
"""What a rank does; it sends by calling `Ranks.send`, which takes it no time."""


class Key(NamedTuple):
    """What is counted apart."""

    rank: int
    phase: Phase
    kind: Sent


class Ranks:
    """Owns the lines and what was counted on them.

    From each rank to each other a line: messages of one line follow each other at its rate, and arrive its latency
    later. Lines do not disturb each other.
    """

    __slots__ = (
        "_arrived",
        "_fabric",
        "_free_at_s",
        "_programs",
        "_waiting",
        "calls",
        "sent_bytes",
        "timeline",
    )

    def __init__(self, fabric: Fabric) -> None:
        self.timeline = Timeline()
        self.calls: Counter[Key] = Counter()
        """Operations that a rank took part in."""
        self.sent_bytes: Counter[Key] = Counter()
        self._fabric = fabric
        self._free_at_s: dict[tuple[int, int], float] = {}
        self._arrived: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._waiting: dict[int, int] = {}
        self._programs: Sequence[Program] = ()

    def run(self, programs: Sequence[Program]) -> None:
        """Until all are done; program number i is rank i's.

        Raises:
            ValueError: some wait for a message that nobody sends.
        """
        self._programs = programs
        for rank in range(len(programs)):
            self._resume(rank)
        self.timeline.run()
        if self._waiting:
            raise ValueError(f"ranks wait for messages that nobody sends: {self._waiting}")

    def send(self, source: int, target: int, phase: Phase, kind: Sent, size_bytes: int) -> None:
        """Puts a message on the line; the rank goes on at once."""
        line, link, now_s = (source, target), self._fabric.link(source, target), self.timeline.now_s
        self.sent_bytes[Key(source, phase, kind)] += size_bytes
        free_at_s = max(now_s, self._free_at_s.get(line, 0.0)) + size_bytes / link.bytes_per_s
        self._free_at_s[line] = free_at_s
        self.timeline.call_at(free_at_s + link.latency_s, lambda: self._arrive(source, target))

    def call(self, rank: int, phase: Phase, kind: Kind) -> None:
        """Counts an operation that the rank begins."""
        self.calls[Key(rank, phase, kind)] += 1

    def _arrive(self, source: int, target: int) -> None:
        self._arrived[source, target] += 1
        if self._waiting.get(target) == source:
            del self._waiting[target]
            self._take(source, target)
            self._resume(target)

    def _take(self, source: int, target: int) -> None:
        self._arrived[source, target] -= 1

    def _resume(self, rank: int) -> None:
        """Lets a rank go on until it has to wait."""
        for wanted in self._programs[rank]:
            if isinstance(wanted, Compute):
                self.timeline.call(wanted.seconds, lambda: self._resume(rank))
                return
            if not self._arrived[wanted.source, rank]:
                self._waiting[rank] = wanted.source
                return
            self._take(wanted.source, rank)
