"""What happens to a generation's circuits, and what is done about it: the events and effects of `CircuitCore`."""

from dataclasses import dataclass
from enum import Enum

AVOID_S = 60.0
"""How long a peer that failed is left out, unless it announces itself anew, or nobody else can take its place."""
SLOW_S = 10.0
"""A hop that has not answered in time is left out for so long, if others can take its place."""
LEAST_REFUSED_S = 0.3
_TRANSIENT = frozenset({"memory", "busy", "epoch"})


class Problem(Enum):
    """Problem for which a generation gets no circuit."""

    NO_ROUTE = "no route"
    REFUSED = "refused"
    NOT_READY = "not ready"
    INVALID = "invalid"
    """Hops of two circuits say that no peer could serve such a request."""
    FRUITLESS = "fruitless"
    """Circuit after circuit yields nothing."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Refusal of a hop, or that it did not answer."""

    code: str
    """As the peer says; `lost` if it could not be reached, `slow` if it has not answered yet."""
    retry_after_s: float = 0.0

    @property
    def is_gone(self) -> bool:
        """Whether the hop did not answer: nothing is known of what it holds."""
        return self.code in ("lost", "slow")

    @property
    def busy(self) -> bool:
        """Whether there may be room later."""
        return self.code in ("memory", "busy")

    def left_out_s(self, peers: int) -> float:
        """For how long whoever said so is left out: briefly if it only has no room now. 0: there is no other among
        so many peers to turn to."""
        if self.code == "slow":
            return SLOW_S
        if self.code not in _TRANSIENT:
            return AVOID_S
        return max(LEAST_REFUSED_S, self.retry_after_s) if peers > 1 else 0.0


@dataclass(frozen=True, slots=True)
class Begin:
    """Event: a circuit has to stand by then."""

    deadline_s: float


@dataclass(frozen=True, slots=True)
class Planned:
    """Event: answers `Plan`."""

    peer_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NoRoute:
    """Event: answers `Plan`: as far as is known, nobody or not enough is there."""

    draw: float
    """Evenly from 0.5 to 1.5: clients do not come again in unison."""


@dataclass(frozen=True, slots=True)
class ReservationRefused:
    """Event: answers `Reserve` or `Seize`."""

    refusal: Refusal
    draw: float
    peer_id: str = ""
    """Of the hop that refused."""
    standby: str = ""
    """Who keeps a copy of the KV cache of that hop, if it is one of a circuit that was seized."""
    all_granted: bool = False
    """Whether every hop had granted its lease, so that each span has a living holder: one of them has not got ready."""


@dataclass(frozen=True, slots=True)
class Overdue:
    """Event: answers `Reserve` or `Seize`: not all hops were ready at the deadline."""

    draw: float = 1.0
    all_granted: bool = False
    """As of `ReservationRefused`."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Event: answers `Reserve` or `Seize`: all hops have granted, and are ready."""


@dataclass(frozen=True, slots=True)
class Waited:
    """Event: answers `AwaitNews`."""

    queued_s: float = 0.0
    """Of that, for its turn behind others of the same client: the circuit has as much longer to stand."""


@dataclass(frozen=True, slots=True)
class Yielded:
    """Event: the running circuit has yielded its next token."""


@dataclass(frozen=True, slots=True)
class Taken:
    """Event: the token has been taken, and from now on the next one is waited for."""


@dataclass(frozen=True, slots=True)
class Lost:
    """Event: a hop of the running circuit has failed, or the circuit stood still."""

    unheard_s: float = 0.0
    """Since the last sign of life of that hop."""
    first_token_s: float = 0.0
    """Predicted from the start of the circuit to its first token."""
    stood_still: bool = False
    peer_id: str = ""
    standby: str = ""
    """Who keeps a copy of the hop's KV cache."""
    stays: bool = False
    """Whether all hops of the circuit are as good as before: it did not come to begin its epoch."""


@dataclass(frozen=True, slots=True)
class MoveWanted:
    """Event: the session is to go on over a circuit of these peers without a pause."""

    peer_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Prepared:
    """Event: answers `Prepare`: every hop knows of the epoch, and holds what it is to begin behind, or will soon; or
    a circuit of other spans has come as far."""


@dataclass(frozen=True, slots=True)
class NotPrepared:
    """Event: answers `Prepare`: some hop could not begin that epoch."""


@dataclass(frozen=True, slots=True)
class End:
    """Event: the generation is complete, or nobody wants it any more."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Effect: look for a route."""

    doubtful: bool
    """Whether somebody did not answer: routes of peers that have answered go before all others."""


@dataclass(frozen=True, slots=True)
class Reserve:
    """Effect: ask all hops of the planned route for leases in this epoch, and see them ready by then."""

    epoch: int
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Seize:
    """Effect: as `Reserve`, of the circuit that ran, with the standby in the place of the hop that alone gives back;
    without a standby of the same hops."""

    epoch: int
    deadline_s: float
    peer_id: str
    standby: str


@dataclass(frozen=True, slots=True)
class Prepare:
    """Effect: tell all hops of the circuit of this epoch, while the one before goes on. Answered once, unless that is
    lost or over meanwhile."""

    epoch: int


@dataclass(frozen=True, slots=True)
class GoOver:
    """Effect: the running epoch ends with its next token, and this one, which is prepared, goes on behind that."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Release:
    """Effect: whatever hops may have granted in that epoch is given back."""

    epoch: int


@dataclass(frozen=True, slots=True)
class AwaitNews:
    """Effect: wait so long, for news of the swarm at most."""

    wait_s: float
    scout: bool
    """Whether peers that have not answered yet are tried meanwhile."""


@dataclass(frozen=True, slots=True)
class Start:
    """Effect: the circuit of that epoch stands: the history goes to its head."""

    epoch: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Effect: there will be no circuit."""

    problem: Problem
    after_loss: bool
    """Whether one had been running."""
