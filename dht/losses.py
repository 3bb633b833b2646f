"""Who says of whom that it does not answer any more, and when that is believed. Pure.

Nobody's word is enough: two witnesses have to say so, and the peer has a minute to say something newer, which every
announcement is. So whoever can speak cannot be declared gone, and whoever lies makes it speak, no more.
"""

from collections import Counter
from dataclasses import dataclass, field

from molink.dht.records import PeerLoss

WITNESSES = 2
"""Of a loss, before anybody begins to wait for its refutation."""
MAX_WITNESSES = 4
"""That are remembered of one loss; more say nothing new."""
MAX_AHEAD = 24 * 3600 * 1000
"""How far beyond a peer's newest known state that of a witness may be: a day, as sequences count milliseconds. Whoever
could claim any would leave the peer no words to refute that with."""
MAX_LOSSES_OF_ONE = 24
"""Losses that one witness may tell of within `WINDOW_S`: a peer has 12 links at most."""
WINDOW_S = 600.0


@dataclass(slots=True)
class _Suspicion:
    sequences: dict[int, int] = field(default_factory=dict)
    """By witness, of the newest state that it knew."""
    since: float | None = None
    """When there were enough witnesses."""


class Losses:
    """The losses that are told of and neither refuted nor believed yet."""

    def __init__(self, refute_s: float) -> None:
        self._refute_s = refute_s
        self._suspicions: dict[int, _Suspicion] = {}
        self._told: Counter[int] = Counter()
        self._window_end = 0.0

    def add(self, loss: PeerLoss, now: float) -> bool:
        """Takes in what a witness, whose signature was checked, says. False: it is nothing new, or too much."""
        if now >= self._window_end:
            self._told.clear()
            self._window_end = now + WINDOW_S
        suspicion = self._suspicions.get(loss.peer_tag)
        known = suspicion.sequences if suspicion else {}
        if known.get(loss.witness_tag, -1) >= loss.sequence or (
            loss.witness_tag not in known and len(known) >= MAX_WITNESSES
        ):
            return False
        if self._told[loss.witness_tag] >= MAX_LOSSES_OF_ONE:
            return False
        self._told[loss.witness_tag] += 1
        suspicion = self._suspicions.setdefault(loss.peer_tag, _Suspicion())
        suspicion.sequences[loss.witness_tag] = loss.sequence
        if suspicion.since is None and len(suspicion.sequences) >= WITNESSES:
            suspicion.since = now
        return True

    def witnesses(self, peer_tag: int) -> int:
        """How many say that this peer is gone."""
        suspicion = self._suspicions.get(peer_tag)
        return len(suspicion.sequences) if suspicion else 0

    def refute(self, peer_tag: int, sequence: int) -> None:
        """The peer has said something of that sequence: whoever did not know it knew too little."""
        suspicion = self._suspicions.get(peer_tag)
        if suspicion is None:
            return
        for witness in [one for one, known in suspicion.sequences.items() if known < sequence]:
            del suspicion.sequences[witness]
        if len(suspicion.sequences) < WITNESSES:
            suspicion.since = None
        if not suspicion.sequences:
            del self._suspicions[peer_tag]

    def believed(self, now: float) -> tuple[int, ...]:
        """The tags of the peers that have not refuted their loss in time; they are forgotten here."""
        gone = tuple(
            tag
            for tag, suspicion in self._suspicions.items()
            if suspicion.since is not None and now >= suspicion.since + self._refute_s
        )
        for tag in gone:
            del self._suspicions[tag]
        return gone

    def forget(self, peer_tag: int) -> None:
        """The peer is remembered no more."""
        self._suspicions.pop(peer_tag, None)
