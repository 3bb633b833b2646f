"""The circuits of one generation as a core without input or output: `handle(event, now_s)` returns what to do.

A circuit is planned, leased hop by hop, all or none, and started; if it cannot be, or a hop of it is lost, another one
is, in the next epoch, until the time is over. A client drives this with asyncio (`circuit_builder.py`, `session.py`),
the simulator in virtual time.
"""

from collections import Counter, deque
from dataclasses import dataclass, field
from enum import Enum

from molink.client.epochs import patience
from molink.client.epochs.circuit_events import (
    AwaitNews,
    Begin,
    End,
    GiveUp,
    GoOver,
    Lost,
    MoveWanted,
    NoRoute,
    NotPrepared,
    Overdue,
    Plan,
    Planned,
    Prepare,
    Prepared,
    Problem,
    Ready,
    Refusal,
    Release,
    ReservationRefused,
    Reserve,
    Seize,
    Start,
    Taken,
    Waited,
    Yielded,
)
from molink.shards.backoff import Backoff

BACKOFF = Backoff(first_s=0.05, longest_s=1.0)
LEAST_WITHOUT_ROUTE_S = 0.2
"""A swarm in which there is no circuit is not planned in again sooner."""
RECOVERY_S = 9.0
"""After the last sign of life of a peer that is lost, a new circuit has to stand within this time; if all hops of one
have granted their leases, and it does not get ready, within as long after that."""

__all__ = [
    "AwaitNews",
    "Begin",
    "CircuitCore",
    "CircuitPhase",
    "End",
    "GiveUp",
    "GoOver",
    "Lost",
    "MoveWanted",
    "NoRoute",
    "NotPrepared",
    "Overdue",
    "Plan",
    "Planned",
    "Prepare",
    "Prepared",
    "Problem",
    "Ready",
    "Refusal",
    "Release",
    "ReservationRefused",
    "Reserve",
    "Seize",
    "Start",
    "Taken",
    "Waited",
    "Yielded",
]


class CircuitPhase(Enum):
    """Phase of a generation's circuits."""

    IDLE = "idle"
    PLANNING = "planning"
    RESERVING = "reserving"
    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


FormingEvent = Begin | Planned | NoRoute | ReservationRefused | Overdue | Ready | Waited
MoveEvent = MoveWanted | Prepared | NotPrepared
Event = FormingEvent | MoveEvent | Yielded | Taken | Lost | End
Effect = Plan | Reserve | Seize | Prepare | GoOver | Release | AwaitNews | Start | GiveUp
_WHEN: dict[type[Event], frozenset[CircuitPhase]] = {
    Begin: frozenset({CircuitPhase.IDLE}),
    **dict.fromkeys((Planned, NoRoute), frozenset({CircuitPhase.PLANNING})),
    **dict.fromkeys((ReservationRefused, Overdue, Ready), frozenset({CircuitPhase.RESERVING})),
    Waited: frozenset({CircuitPhase.WAITING}),
    **dict.fromkeys((Yielded, Taken, Lost, MoveWanted), frozenset({CircuitPhase.RUNNING})),
    **dict.fromkeys((Prepared, NotPrepared), frozenset({CircuitPhase.RUNNING})),
    End: frozenset(CircuitPhase),
}


@dataclass(slots=True)
class _Forming:
    """The attempts at one circuit."""

    deadline_s: float = 0.0
    latest_s: float = 0.0
    """Beyond which the deadline never moves."""
    failures: int = 0
    doubtful: bool = False
    invalid: bool = False
    """Whether a hop has said that no peer could serve such a request."""
    seizes: bool = False
    """Whether the attempt is at the circuit that ran, with standbys in the places of hops that are lost."""

    @property
    def wait_s(self) -> float:
        """Before the next attempt; the events' draw spreads it."""
        return BACKOFF.after(self.failures + 1)

    def record_answers(self, now_s: float, *, all_granted: bool) -> None:
        """The deadline moves where all hops had granted. Whoever was lost can be replaced then, if not by those peers:
        a swarm that is slow as a whole, or where one hop after the other stands still for a moment, is waited for as
        long as for any token."""
        if all_granted:
            self.deadline_s = max(self.deadline_s, min(self.latest_s, now_s + RECOVERY_S))


@dataclass(slots=True)
class _RunningCircuit:
    """The circuit that runs."""

    started_s: float = 0.0
    tokens: int = 0
    """That it has yielded."""
    between_s: float = 0.0
    """What those behind the first have taken, together."""
    latest_s: deque[float] = field(default_factory=lambda: deque(maxlen=patience.SEEN_TOKENS))
    """What the latest of these have taken, each."""
    moves_to: tuple[str, ...] = ()
    """Of the hops of the circuit that is being prepared; empty: there is none."""


@dataclass(slots=True)
class CircuitCore:
    """Core of one generation's circuits, one at a time; it alone numbers their epochs. Times are those of any one
    clock."""

    phase: CircuitPhase = CircuitPhase.IDLE
    epoch: int = 0
    """Of the circuit that runs, or is being formed."""
    last_epoch: int = 0
    """The highest number that was given: that of an epoch which is prepared is above the one that runs."""
    peer_ids: tuple[str, ...] = ()
    """Of the present circuit's hops, in order."""
    runs: int = 0
    """Circuits that were started."""
    step_since_s: float = 0.0
    """Since when the next token is waited for, whatever became of circuits."""
    _forming: _Forming = field(default_factory=_Forming)
    _run: _RunningCircuit = field(default_factory=_RunningCircuit)
    _fruitless: int = 0
    """Circuits in a row that yielded nothing."""
    _stood_still: Counter[tuple[str, ...]] = field(default_factory=Counter)
    """How often a circuit of these peers has."""

    @property
    def deadline_s(self) -> float:
        """By when a circuit has to stand."""
        return self._forming.deadline_s

    @property
    def first_token_since_s(self) -> float | None:
        """Start of the running circuit, if its first token is waited for."""
        return self._run.started_s if self._run.tokens == 0 else None

    @property
    def is_preparing(self) -> bool:
        """Whether another circuit is being prepared for the one that runs."""
        return self.phase is CircuitPhase.RUNNING and bool(self._run.moves_to)

    @property
    def measured_s(self) -> float:
        """What a token of the running circuit has taken in the mean; 0 where that is not known."""
        return self._run.between_s / max(1, self._run.tokens - 1)

    def token_s(self, first_token_s: float, next_token_s: float) -> float:
        """Returns what the next token should take; what is predicted of the circuit's first one and of each further
        one is given."""
        run = self._run
        if run.tokens == 0:
            return first_token_s
        return patience.usual_s(next_token_s, self.measured_s, run.latest_s)

    def ask_after_s(self, next_token_s: float, asked: int) -> float:
        """Returns after how long without a token hops are asked for a sign of life, if they have been so often."""
        return patience.ask_after_s(self.token_s(0.0, next_token_s), asked, is_first=self._run.tokens == 0)

    def patience_s(self, first_token_s: float, next_token_s: float, *, goes_over: bool = False) -> float:
        """Returns how long the running circuit's next token may take before it is lost; what is predicted of its first
        one and of each further one is given. `goes_over`: an epoch that was prepared is to begin with it."""
        if goes_over:
            return patience.begin_s(next_token_s, self.measured_s)
        if self._run.tokens == 0:
            return patience.first_token_s(first_token_s, self._stood_still[self.peer_ids])
        return patience.next_token_s(next_token_s, self.measured_s)

    def handle(self, event: Event, now_s: float) -> tuple[Effect, ...]:
        """Returns what to do next, in order; the last effect but `Release`, `Start` and `GiveUp` is to be answered,
        once.

        Raises:
            ValueError: nobody has asked for such an answer.
        """
        if self.phase not in _WHEN[type(event)]:
            raise ValueError(f"{type(event).__name__} comes while a generation is {self.phase.value}")
        if isinstance(event, FormingEvent):
            return self._form(event, now_s)
        if isinstance(event, Lost):
            return self._lost(event, now_s)
        if isinstance(event, MoveEvent):
            return self._move(event)
        if isinstance(event, End):
            holds = self.phase in (CircuitPhase.RESERVING, CircuitPhase.RUNNING)
            self.phase = CircuitPhase.ENDED
            return (Release(self.epoch),) if holds else ()
        self._step(event, now_s)
        return ()

    def _form(self, event: FormingEvent, now_s: float) -> tuple[Effect, ...]:
        match event:
            case Begin(deadline_s):
                self.step_since_s = now_s
                effects = self._plan_until(deadline_s)
            case Planned(peer_ids):
                self.phase, self.peer_ids = CircuitPhase.RESERVING, peer_ids
                self.epoch = self.last_epoch = self.last_epoch + 1
                effects = (Reserve(self.epoch, self.deadline_s),)
            case NoRoute(draw):
                effects = self._without_route(draw, now_s)
            case ReservationRefused():
                effects = self._refused(event, now_s)
            case Overdue(draw, all_granted):
                self._forming.record_answers(now_s, all_granted=all_granted)
                again = self._again(self._forming.wait_s * draw, Problem.NOT_READY, now_s)
                effects = (Release(self.epoch), *again)
            case Ready():
                effects = self._start(now_s)
            case Waited(queued_s):
                self._forming.deadline_s += queued_s
                self._forming.latest_s += queued_s
                effects = self._plan()
        return effects

    def _plan_until(self, deadline_s: float, latest_s: float = 0.0) -> tuple[Effect, ...]:
        self._forming = _Forming(deadline_s, max(deadline_s, latest_s))
        return self._plan()

    def _plan(self) -> tuple[Effect, ...]:
        self.phase, self._forming.seizes = CircuitPhase.PLANNING, False
        return (Plan(self._forming.doubtful),)

    def _without_route(self, draw: float, now_s: float) -> tuple[Effect, ...]:
        if self._forming.invalid:
            return self._give_up(Problem.INVALID)
        wait_s = max(self._forming.wait_s * draw, LEAST_WITHOUT_ROUTE_S)
        return self._again(wait_s, Problem.NO_ROUTE, now_s)

    def _refused(self, refused: ReservationRefused, now_s: float) -> tuple[Effect, ...]:
        """A hop that is gone from the circuit that was to be seized has its standby in its place, too: the others keep
        what they hold for the epoch after."""
        forming, released, refusal = self._forming, Release(self.epoch), refused.refusal
        forming.record_answers(now_s, all_granted=refused.all_granted)
        if forming.seizes and refused.standby and refusal.is_gone:
            loss = Lost(peer_id=refused.peer_id, standby=refused.standby)
            if _has_standby(self.peer_ids, loss) and now_s < forming.deadline_s:
                return (self._seize(loss, forming.deadline_s, forming.latest_s),)
        if refusal.code == "request":
            if forming.invalid:
                return (released, *self._give_up(Problem.INVALID))
            forming.invalid = True
            return (released, *self._plan())
        forming.doubtful = forming.doubtful or refusal.is_gone
        return (released, *self._again(forming.wait_s * refused.draw, Problem.REFUSED, now_s))

    def _again(self, wait_s: float, problem: Problem, now_s: float) -> tuple[Effect, ...]:
        forming = self._forming
        if now_s + wait_s >= forming.deadline_s:
            return self._give_up(problem)
        forming.failures += 1
        self.phase = CircuitPhase.WAITING
        return (AwaitNews(wait_s, scout=forming.doubtful),)

    def _start(self, now_s: float) -> tuple[Effect, ...]:
        if self.runs == 0:
            self.step_since_s = now_s
        self.phase, self._run = CircuitPhase.RUNNING, _RunningCircuit(now_s)
        self.runs += 1
        return (Start(self.epoch),)

    def _step(self, event: Yielded | Taken, now_s: float) -> None:
        run = self._run
        if isinstance(event, Yielded):
            if run.tokens:
                run.between_s += now_s - self.step_since_s
                run.latest_s.append(now_s - self.step_since_s)
            run.tokens += 1
            self._fruitless = 0
        self.step_since_s = now_s

    def _lost(self, loss: Lost, now_s: float) -> tuple[Effect, ...]:
        self._fruitless += self._run.tokens == 0
        self._stood_still[self.peer_ids] += loss.stood_still
        most_s = patience.step_s(patience.first_token_s(loss.first_token_s))
        if self._fruitless >= patience.MOST_FRUITLESS or now_s - self.step_since_s > most_s:
            return (Release(self.epoch), *self._give_up(Problem.FRUITLESS))
        deadline_s = now_s + max(0.0, RECOVERY_S - loss.unheard_s)
        latest_s = max(deadline_s, self.step_since_s + most_s)
        if loss.stays or _has_standby(self.peer_ids, loss):
            return (self._seize(loss, deadline_s, latest_s),)
        return (Release(self.epoch), *self._plan_until(deadline_s, latest_s))

    def _seize(self, loss: Lost, deadline_s: float, latest_s: float) -> Seize:
        """Where it is refused for another reason than a further loss, another circuit is planned."""
        self._forming = _Forming(deadline_s, latest_s, seizes=True)
        self.phase = CircuitPhase.RESERVING
        self.epoch = self.last_epoch = self.last_epoch + 1
        if loss.stays:
            return Seize(self.epoch, deadline_s, "", "")
        self.peer_ids = tuple(loss.standby if one == loss.peer_id else one for one in self.peer_ids)
        return Seize(self.epoch, deadline_s, loss.peer_id, loss.standby)

    def _move(self, event: MoveEvent) -> tuple[Effect, ...]:
        """What was prepared counts no more once the circuit that runs is lost: `Prepared` is an error then."""
        run = self._run
        if isinstance(event, MoveWanted) == bool(run.moves_to):
            raise ValueError(f"{type(event).__name__} comes while a circuit is, or none is, being prepared")
        match event:
            case MoveWanted(peer_ids):
                self.last_epoch += 1
                run.moves_to = peer_ids
                return (Prepare(self.last_epoch),)
            case NotPrepared():
                run.moves_to = ()
                return (Release(self.last_epoch),)
            case Prepared():
                self.epoch, self.peer_ids, run.moves_to = self.last_epoch, run.moves_to, ()
                return (GoOver(self.epoch),)

    def _give_up(self, problem: Problem) -> tuple[Effect, ...]:
        self.phase = CircuitPhase.ENDED
        return (GiveUp(problem, after_loss=self.runs > 0),)


def _has_standby(peer_ids: tuple[str, ...], loss: Lost) -> bool:
    """Whether somebody who is on no place of the circuit has a copy of what the lost hop held."""
    return bool(loss.standby) and loss.peer_id in peer_ids and loss.standby not in peer_ids
