"""What became of the requests of a run, counted as it happens and checked at its end."""

from dataclasses import dataclass, field
from enum import StrEnum

from molink.simnet.swarm.members.member import NotConserved

MINUTE_S = 60.0


class SessionOutcome(StrEnum):
    """How a session ended. Each ends once."""

    COMPLETED = "completed"
    NO_CIRCUIT = "no circuit"
    """Until its time was over, the peers that its gateway knew did not cover the model."""
    UNAVAILABLE = "unavailable"
    """Until then, peers refused or did not answer."""
    PEER_LOST = "peer lost"
    """A peer went away in mid-generation, and no circuit formed again in time."""


@dataclass(frozen=True, slots=True)
class EndedSession:
    """One session that has ended."""

    number: int
    outcome: SessionOutcome
    arrival_s: float
    end_s: float
    prompt_tokens: int
    tokens: int
    """That its client got."""
    ttft_ms: float | None
    """From the request to the first token at the client; None if there was none."""
    tpot_ms: float | None
    """Mean of the tokens after the first, pauses included; None if there were fewer than two."""
    hops: int
    attempts: int
    """Circuits that were planned for it."""
    losses: int
    """Peers that went away from under it."""
    recomputed_tokens: int
    """Of its history, after losses."""
    trips: float = 0.0
    """Times round its circuits, each of which brought a token, or with guesses several."""


@dataclass(slots=True)
class PartnerCounts:
    """What came of partners."""

    found: int = 0
    """Leases that partners have granted."""
    none: dict[str, int] = field(default_factory=dict)
    """Hops that had none when their circuit was given up, by the reason."""
    lost: int = 0
    """Partners that went away."""
    switches: int = 0
    """Losses after which a partner took the hop's place."""
    copied_bytes: float = 0.0
    leased_bytes: int = 0
    """KV cache that is leased, minute by minute, all added up; the next is what copies have of it."""
    copy_leased_bytes: int = 0

    def count_none(self, reason: str) -> None:
        """A hop gets none."""
        self.none[reason] = self.none.get(reason, 0) + 1


@dataclass(slots=True)
class Accounts:
    """Sessions by what has become of them, and how many were open when."""

    ended: list[EndedSession] = field(default_factory=list)
    arrived: int = 0
    granted: int = 0
    """Leases."""
    refused: dict[str, int] = field(default_factory=dict)
    """Refusals of leases by their code, and `lost`: peers that were not there any more."""
    stalls_s: list[float] = field(default_factory=list)
    """From each loss of a peer to the session's next token, of those that got one."""
    gone_over: int = 0
    """Times that a session has left a peer that was about to go, without a pause."""
    succeeded: int = 0
    """Times that a session has gone over to a better circuit of other spans, which had computed it anew."""
    successors_given_up: int = 0
    """Circuits that have computed a session anew, or were about to, and had to be left."""
    partners: PartnerCounts = field(default_factory=PartnerCounts)
    crashed: int = 0
    left: int = 0
    joined: int = 0
    _open: dict[int, float] = field(default_factory=dict)
    _session_s: float = 0.0
    _counted_s: float = 0.0
    _finished: set[int] = field(default_factory=set)

    def arrive(self, number: int, now_s: float) -> None:
        """A request comes."""
        self._count(now_s)
        self.arrived += 1
        self._open[number] = now_s

    def end(self, ended: EndedSession) -> None:
        """A session ends. Raises NotConserved if it has ended before, or never came."""
        if self._open.pop(ended.number, None) != ended.arrival_s:
            raise NotConserved(f"session {ended.number} ends, and is not open")
        self._open[ended.number] = ended.arrival_s
        self._count(ended.end_s)
        del self._open[ended.number]
        self._finished.add(ended.number)
        self.ended.append(ended)

    def refuse(self, code: str) -> None:
        """A hop of a planned circuit did not grant its lease."""
        self.refused[code] = self.refused.get(code, 0) + 1

    @property
    def open(self) -> int:
        """Sessions that have not ended."""
        return len(self._open)

    @property
    def mean_open(self) -> float:
        """Sessions in the system, on average over the time since the first came: counted at every change."""
        return self._session_s / self._counted_s if self._counted_s else 0.0

    @property
    def counted_s(self) -> float:
        """Until when `mean_open` counts."""
        return self._counted_s

    def check(self) -> None:
        """Raises NotConserved unless every session that came has ended, once."""
        if self._open or len(self._finished) != self.arrived or len(self.ended) != self.arrived:
            raise NotConserved(
                f"{self.arrived} sessions came, {len(self.ended)} ended, {len(self._open)} are still open"
            )

    def _count(self, now_s: float) -> None:
        self._session_s += len(self._open) * (now_s - self._counted_s)
        self._counted_s = now_s
