"""Leases that a peer has granted, and when each was used last. Pure: the time is an argument."""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from molink.peer.memory.lease import Lease, LeaseKey

IDLE_S = 60.0
"""A lease without a step for so long ends, however often it is renewed: its client has given up the circuit by then."""
SPARED_S = 30.0
"""A lease without a step for so long ends as soon as another needs its room."""
ABANDONED_S = 10.0
"""A lease stays so long for a client whose link has closed: it may come back for its KV cache."""
MOST_KNOWN = 4096
"""Clients that are remembered to have stepped here."""


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """Lease times: how long a lease stands, in seconds."""

    ttl_s: float = 30.0
    """Unless it is renewed."""
    idle_s: float = IDLE_S
    spared_s: float = SPARED_S
    abandoned_s: float = ABANDONED_S


LEASE_TIMES = LeaseTimes()


class LeaseTable:
    """Leases by session, one each, with their last uses; and the clients that have stepped here."""

    __slots__ = ("_abandoned", "_known", "_leases", "_times", "_used_s")

    def __init__(self, times: LeaseTimes = LEASE_TIMES) -> None:
        self._times = times
        self._leases: dict[bytes, Lease] = {}
        self._used_s: dict[bytes, float] = {}
        """By session: when it was granted, or has stepped last."""
        self._abandoned: set[bytes] = set()
        """Sessions whose client is gone."""
        self._known: OrderedDict[str, None] = OrderedDict()
        """Clients that have stepped here, who did so last at the end."""

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    @property
    def standing(self) -> list[Lease]:
        """Leases that somebody needs: not those whose client is gone."""
        return [lease for lease in self if lease.key.session not in self._abandoned]

    def find(self, key: LeaseKey) -> Lease | None:
        """The lease of that session and epoch."""
        lease = self._leases.get(key.session)
        return lease if lease is not None and lease.key.epoch == key.epoch else None

    def of_session(self, session: bytes) -> Lease | None:
        """The session's lease, of whatever epoch."""
        return self._leases.get(session)

    def knows(self, owner: str) -> bool:
        """Whether a client has stepped here before."""
        return owner in self._known

    def is_idle(self, lease: Lease, now: float) -> bool:
        """True if nobody has used it for `idle_s`."""
        return now - self._used_s[lease.key.session] >= self._times.idle_s

    def spare(self, now: float) -> list[Lease]:
        """Leases that may make room for others, in the order in which they do: first those whose client is gone."""
        held = Counter(lease.owner for lease in self.standing)
        idle = [lease for lease in self if now - self._used_s[lease.key.session] >= self._times.spared_s]

        def order(lease: Lease) -> tuple[bool, int, float]:
            session = lease.key.session
            return session not in self._abandoned, -held[lease.owner], self._used_s[session]

        return sorted(idle, key=order)

    def grant(self, lease: Lease, now: float) -> None:
        """The session has this lease, in the place of an older one if it had one."""
        self._leases[lease.key.session] = lease
        self._used_s[lease.key.session] = now
        self._abandoned.discard(lease.key.session)

    def renew(self, lease: Lease) -> None:
        """The session's lease lasts longer; that is no use of it."""
        self._leases[lease.key.session] = lease

    def abandon(self, lease: Lease, now: float) -> None:
        """Its client is gone, for `abandoned_s` at most unless it asks for another epoch: whoever needs its room may
        have it at once."""
        self.renew(replace(lease, expires_s=min(lease.expires_s, now + self._times.abandoned_s)))
        session = lease.key.session
        self._used_s[session] = min(self._used_s[session], now - self._times.spared_s)
        self._abandoned.add(lease.key.session)

    def use(self, lease: Lease, now: float, *, stepped: bool) -> None:
        """The session has stepped, or waits for this peer and not for its client. What it did before its client was
        gone is no use of it any more."""
        if lease.key.session not in self._abandoned:
            self._used_s[lease.key.session] = now
        if stepped:
            self._known[lease.owner] = None
            self._known.move_to_end(lease.owner)
            if len(self._known) > MOST_KNOWN:
                self._known.popitem(last=False)

    def set_aside(self, lease: Lease) -> None:
        """To see what room there would be without it: it is to be put back, or to be ended."""
        del self._leases[lease.key.session]

    def put_back(self, leases: Iterable[Lease]) -> None:
        """They were set aside for nothing."""
        self._leases.update((lease.key.session, lease) for lease in leases)

    def end(self, leases: Iterable[Lease]) -> tuple[Lease, ...]:
        """Ends leases, also such as were set aside; returns them."""
        ended = tuple(leases)
        for lease in ended:
            self._leases.pop(lease.key.session, None)
            self._used_s.pop(lease.key.session, None)
            self._abandoned.discard(lease.key.session)
        return ended
