"""Failure detector: suspicions of peers that others gossip, and when they are confirmed. Pure.

After SWIM (Das, Gupta and Motivala, 2002, section 4.2: suspect, refute, confirm), with strangers among the witnesses.

Nobody's word is enough: two witnesses have to say so, and the peer has a minute to say something newer, which every
announcement is. So whoever can speak cannot be declared gone, and whoever lies makes it speak, no more.
"""

from collections import Counter, OrderedDict
from dataclasses import dataclass

from molink.dht.records.records import PeerLoss

WITNESSES = 2
"""Of a loss, before anybody begins to wait for its refutation."""
MAX_WITNESSES = 4
"""That are remembered of one loss; more say nothing new."""
MAX_AHEAD_MS = 30_000
"""How far beyond what a peer can have said by now, by its newest known state and the time since, that of a witness may
be: what is on its way, and clocks that were set. Whoever could claim any would take a peer's numbers as far ahead."""
MAX_LOSSES_OF_ONE = 24
"""Losses that one witness may tell of within `WINDOW_S`: a peer has 12 links at most."""
MAX_FALSE = 6
"""Of these that were refuted: then it is not listened to for the rest of that time. An honest witness is wrong
where its own line was, or where somebody plays dead."""
LEAST_LOSSES = 96
"""Within `WINDOW_S`, of all witnesses together: and twice as many as there are peers, as each may go and has two
witnesses at least."""
NETWORK_SHARE = 2
"""One network's witnesses may tell of one in so many of these."""
WINDOW_S = 600.0
DEFER_S = 60.0
"""For so long an accusation is kept whose witness is not known yet, or claims what is on its way: gossip brings each
record once, and not in the order in which they were said."""
MAX_DEFERRED = 64


@dataclass(slots=True)
class _Suspicion:
    sequences: dict[int, int]
    """By witness, of the newest state that it knew."""
    accused: float
    """When the first witness of those that count was heard."""
    since: float | None = None
    """When there were enough witnesses."""


class FailureDetector:
    """Failure detector: the suspicions that are neither refuted nor confirmed yet."""

    def __init__(self, refute_s: float) -> None:
        self._refute_s = refute_s
        self._suspicions: dict[int, _Suspicion] = {}
        self._told: Counter[int] = Counter()
        self._false: Counter[int] = Counter()
        self._of_network: Counter[str] = Counter()
        self._window_end = 0.0

    def record_suspicion(self, loss: PeerLoss, now: float, network: str = "", peers: int = 0) -> bool:
        """Takes in what a witness of that network, whose signature was checked, says. False: it is nothing new, or too
        much, or the witness has said too much that was false. `peers`: how many are known."""
        if now >= self._window_end:
            for counts in (self._told, self._false, self._of_network):
                counts.clear()
            self._window_end = now + WINDOW_S
        suspicion = self._suspicions.get(loss.peer_tag)
        known = suspicion.sequences if suspicion else {}
        if known.get(loss.witness_tag, -1) >= loss.sequence or (
            loss.witness_tag not in known and len(known) >= MAX_WITNESSES
        ):
            return False
        if not self._may_tell(loss.witness_tag, network, max(LEAST_LOSSES, 2 * peers)):
            return False
        self._told[loss.witness_tag] += 1
        self._of_network[network] += 1
        suspicion = self._suspicions.setdefault(loss.peer_tag, _Suspicion({}, now))
        suspicion.sequences[loss.witness_tag] = loss.sequence
        if suspicion.since is None and len(suspicion.sequences) >= WITNESSES:
            suspicion.since = now
        return True

    def _may_tell(self, witness: int, network: str, most: int) -> bool:
        return (
            self._told[witness] < MAX_LOSSES_OF_ONE
            and self._false[witness] < MAX_FALSE
            and self._of_network[network] < most // NETWORK_SHARE
            and self._of_network.total() < most
        )

    def count_witnesses(self, peer_tag: int) -> int:
        """Counts the witnesses that say that this peer is gone."""
        suspicion = self._suspicions.get(peer_tag)
        return len(suspicion.sequences) if suspicion else 0

    def is_suspected(self, peer_tag: int) -> bool:
        """Whether so many say that this peer is gone that it has to say something newer."""
        suspicion = self._suspicions.get(peer_tag)
        return suspicion is not None and suspicion.since is not None

    def undecided(self, before: float) -> tuple[int, ...]:
        """Returns the tags of the peers that too few witnesses call gone, the first of them before that time."""
        return tuple(
            tag
            for tag, suspicion in self._suspicions.items()
            if suspicion.since is None and suspicion.accused <= before
        )

    def refute(self, peer_tag: int, sequence: int) -> None:
        """Refutes suspicions: the peer has said something of that sequence, and who knew less was wrong."""
        suspicion = self._suspicions.get(peer_tag)
        if suspicion is None:
            return
        for witness in [one for one, known in suspicion.sequences.items() if known < sequence]:
            del suspicion.sequences[witness]
            self._false[witness] += 1
        if len(suspicion.sequences) < WITNESSES:
            suspicion.since = None
        if not suspicion.sequences:
            del self._suspicions[peer_tag]

    def take_confirmed(self, now: float) -> tuple[int, ...]:
        """Takes the tags of the peers that have not refuted their loss in time; they are forgotten here."""
        gone = tuple(
            tag
            for tag, suspicion in self._suspicions.items()
            if suspicion.since is not None and now >= suspicion.since + self._refute_s
        )
        for tag in gone:
            del self._suspicions[tag]
        return gone

    def forget_peer(self, peer_tag: int) -> None:
        """Forgets all suspicions of a peer."""
        self._suspicions.pop(peer_tag, None)


class DeferredSuspicions:
    """Queue of accusations that cannot be judged yet: at most 64, each for a minute."""

    def __init__(self) -> None:
        self._until: OrderedDict[bytes, float] = OrderedDict()
        """By record. The first is the oldest."""

    def defer(self, record: bytes, now: float) -> None:
        """Keeps a record for a while, in the place of the oldest if there is no room."""
        self._until.setdefault(record, now + DEFER_S)
        if len(self._until) > MAX_DEFERRED:
            self._until.popitem(last=False)

    def take(self, now: float) -> tuple[tuple[bytes, float], ...]:
        """Takes all records that are not too old, each with the time until when it may be kept."""
        records = tuple((record, until) for record, until in self._until.items() if now < until)
        self._until.clear()
        return records

    def put_back(self, record: bytes, until: float) -> None:
        """Keeps a record that was taken and still cannot be judged."""
        self._until[record] = until
