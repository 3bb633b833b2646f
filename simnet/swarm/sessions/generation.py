"""One session in virtual time: a circuit is planned, leased and computed on; when a peer goes away, another one is.

Nothing is simulated token by token: a session advances at the rate of its circuit as it is loaded now, and the rate
changes when somebody joins or leaves one of its peers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from molink.client.circuit.circuit_core import CircuitCore
from molink.client.circuit.reserving import PATIENCE_S
from molink.client.circuit.scouting import ANSWER_S
from molink.client.epochs.kept_leases import KeptLeases
from molink.client.epochs.moves_core import MovesCore
from molink.client.epochs.patience import SEEN_TOKENS, SignOfLife, answers_until_s, ask_after_s, usual_s
from molink.client.epochs.successor_core import SequenceLengths
from molink.peer.memory.leases import LeaseKey
from molink.peer.wire.transport.keepalive import BUSY_LOST_AFTER_S, TICK_S
from molink.routing import PartnerChoice, Route
from molink.routing.cost.terms import Demand
from molink.simnet.core.request_load import Request
from molink.simnet.swarm.members.accounts import EndedSession, SessionOutcome
from molink.simnet.swarm.sessions.gateway import SimulatedGateway
from molink.simnet.swarm.sessions.progress import DecodeProgress, SessionRecord
from molink.simnet.swarm.sessions.step_cost import PeerLoad, SimulatedHop

NOTICED_S = BUSY_LOST_AFTER_S + TICK_S
"""After the last sign of life of a peer that a session uses its loss is known by its link, if not before by the token
that is overdue (`noticed_after_s`)."""
DIALS_RTT = 3.0
"""Round trips until a new link stands: TCP, TLS, and both ends' greeting."""
UNREACHABLE_S = PATIENCE_S
"""How long a peer that is gone is waited for."""


class Phase(Enum):
    """What a session is doing."""

    FORMING = "forming"
    PREFILL = "prefill"
    DECODE = "decode"
    STALLED = "stalled"
    """A peer is gone, and nobody has noticed yet."""
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class SimulatedLease:
    """What the hops of a circuit were asked for, in one epoch."""

    key: LeaseKey
    hops: tuple[SimulatedHop, ...]


class Stepping(Protocol):
    """What steps on the peers of a circuit: a session, or its successor."""

    @property
    def number(self) -> int:
        """That it has at its hops."""

    @property
    def taped(self) -> int:
        """Number of the request whose tokens it draws."""

    @property
    def hops(self) -> tuple[SimulatedHop, ...]: ...

    @property
    def demand(self) -> Demand: ...

    @property
    def progress(self) -> DecodeProgress: ...

    def advance(self, now_s: float) -> None: ...

    def reload(self, at: int, load: PeerLoad) -> None: ...


@dataclass(slots=True, eq=False)
class SimulatedGeneration:
    """The state of one session. Its life is `molink.simnet.swarm.sessions.lifecycle`'s."""

    request: Request
    gateway: SimulatedGateway
    phase: Phase = Phase.FORMING
    circuit: CircuitCore = field(default_factory=CircuitCore)
    kept: KeptLeases[SimulatedLease] = field(default_factory=KeptLeases[SimulatedLease])
    """What hops of circuits that it has left may still have of it."""
    turn: int = 0
    """Grows with each circuit and each loss: what was to happen before that does not."""
    route: Route | None = None
    """As it was planned; `hops` are the same with the true ways between them."""
    hops: tuple[SimulatedHop, ...] = ()
    computed: int = 0
    """Tokens of whose history all hops have the lines, as of the beginning of the present prefill or stall."""
    moves: MovesCore[PartnerChoice] = field(default_factory=MovesCore[PartnerChoice])
    """Hops that it is to leave."""
    record: SessionRecord = field(default_factory=SessionRecord)
    progress: DecodeProgress = field(init=False)

    def __post_init__(self) -> None:
        self.progress = DecodeProgress(self.request.new_tokens)

    @property
    def number(self) -> int:
        """That it has at its hops: its request's, until it goes over to a successor."""
        return self.record.successor or self.request.number

    @property
    def taped(self) -> int:
        """Number of the request whose tokens it draws."""
        return self.request.number

    @property
    def demand(self) -> Demand:
        """What it asks of a circuit."""
        prompt_tokens = self.request.prompt_tokens
        return Demand.of(prompt_tokens + self.request.new_tokens, prompt_tokens)

    @property
    def lengths(self) -> SequenceLengths:
        """Of its sequence now."""
        request = self.request
        return SequenceLengths(
            request.prompt_tokens, self.history, request.prompt_tokens + request.new_tokens
        )

    @property
    def key(self) -> LeaseKey:
        """Of the present epoch."""
        return LeaseKey(self.number.to_bytes(16, "big"), self.circuit.epoch)

    @property
    def leased(self) -> SimulatedLease:
        """What the hops of the present circuit were asked for."""
        return SimulatedLease(self.key, self.hops)

    @property
    def predicted_first_s(self) -> float:
        """Until the first token of the present circuit, as its route lets expect."""
        if self.route is None:
            return 0.0
        return self.route.ttft_ms / 1000 * self.history / max(1, self.request.prompt_tokens)

    def planned(self, route: Route, hops: tuple[SimulatedHop, ...], computed: int = 0) -> None:
        """Another circuit is to be tried, whose hops have so many tokens of the history."""
        self.turn += 1
        self.computed = computed
        self.route, self.hops = route, hops

    def waits_for(self, phase: Phase, turn: int) -> bool:
        """Whether it is still doing that, and in that turn."""
        return self.phase is phase and self.turn == turn

    def stall(self, now_s: float) -> None:
        """A peer is gone: tokens that were not complete are lost."""
        self.advance(now_s)
        self.progress.tokens = float(int(self.progress.tokens))
        if self.phase is Phase.DECODE:
            self.computed = self.history
        self.phase, self.record.stalled_s = Phase.STALLED, now_s
        self.record.lost_s = now_s if self.record.lost_s is None else self.record.lost_s
        self.turn += 1

    def noticed_after_s(self, answers_s: Sequence[float], now_s: float) -> float:
        """Returns after how long its client knows of a hop that has gone silent now, by asking all hops for a sign of
        life when the next token is overdue; the others answer after `answers_s`."""
        progress, is_first = self.progress, self.phase is not Phase.DECODE
        predicted_s = 0.0 if self.route is None else self.route.trip_ms / 1000
        waited_s = now_s - progress.advanced_s
        measured_s = 0.0 if is_first else progress.trip_ms / 1000
        if not is_first:
            trips = progress.tokens / progress.guessed.tokens + waited_s / measured_s
            waited_s = (trips - int(trips)) * measured_s
        latest_s = [measured_s] * min(SEEN_TOKENS, int(progress.tokens))
        token_s, asked = usual_s(predicted_s, measured_s, latest_s), 0
        while (after_s := ask_after_s(token_s, asked, is_first=is_first)) < waited_s:
            asked += 1
        signs = [SignOfLife("", None), *(SignOfLife("", came_s) for came_s in answers_s)]
        return after_s - waited_s + answers_until_s(signs, ANSWER_S)

    def reload(self, at: int, load: PeerLoad) -> None:
        """The hop's peer is loaded otherwise from now on."""
        self.progress.reload(at, len(self.hops[at].span), load)

    @property
    def history(self) -> int:
        """Tokens that a new circuit has to compute first."""
        return self.request.prompt_tokens + int(self.progress.tokens)

    def advance(self, now_s: float) -> None:
        """Counts the tokens since the last look, if it decodes."""
        if self.phase is Phase.DECODE:
            self.progress.count(now_s)
        self.progress.advanced_s = now_s

    def ended(self, outcome: SessionOutcome, now_s: float) -> EndedSession:
        """What is to be told of it."""
        tokens, first_token_s = int(self.progress.tokens + 1e-6), self.record.first_token_s
        tpot_ms = None
        if first_token_s is not None and tokens > 1 and outcome is SessionOutcome.COMPLETED:
            tpot_ms = 1000 * (now_s - first_token_s) / (tokens - 1)
        arrival_s = self.request.arrival_s
        return EndedSession(
            number=self.request.number,
            outcome=outcome,
            arrival_s=arrival_s,
            end_s=now_s,
            prompt_tokens=self.request.prompt_tokens,
            tokens=tokens,
            ttft_ms=None if first_token_s is None else 1000 * (first_token_s - arrival_s),
            tpot_ms=tpot_ms,
            hops=len(self.hops),
            attempts=self.record.attempts,
            losses=self.record.losses,
            recomputed_tokens=self.record.recomputed_tokens,
            trips=self.progress.trips,
        )
