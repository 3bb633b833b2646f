"""Successors of simulated sessions: a better circuit of other spans computes a session anew, which decodes meanwhile.

As at a client (`molink.client.circuit.moves`, `successor.py` there) a better circuit is looked for now and then;
`SuccessorCore` says what becomes of it, and the session's own `CircuitCore` numbers the epochs. To the hops a successor
is one more session. Draws are the same on all circuits here, so that none is given up for another token.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from molink.client.circuit.circuit_core import MoveWanted, NotPrepared
from molink.client.epochs.moves_core import replaced_hops
from molink.client.epochs.successor_core import (
    MOST_GIVEN_UP,
    FormSuccessor,
    GiveSuccessorUp,
    SuccessorCore,
    SuccessorDrew,
    SuccessorEffect,
    SuccessorFailed,
    SuccessorOverdue,
    TakeOver,
    is_worth_computing,
)
from molink.peer.memory.leases import LeaseKey, Refused
from molink.routing import Route
from molink.routing.cost.terms import Demand
from molink.simnet.swarm.members.member import Member
from molink.simnet.swarm.sessions.context import SessionContext
from molink.simnet.swarm.sessions.generation import (
    DIALS_RTT,
    UNREACHABLE_S,
    Phase,
    SimulatedGeneration,
    Stepping,
)
from molink.simnet.swarm.sessions.progress import DecodeProgress
from molink.simnet.swarm.sessions.step_cost import PeerLoad, SimulatedHop, first_token_ms

FIRST_NUMBER = 2**64
"""Of successors: no request has it."""


@dataclass(slots=True, eq=False)
class SimulatedSuccessor:
    """A session that is begun anew on another circuit."""

    of: SimulatedGeneration
    number: int
    """That it has at its hops, and its session from the time on at which that goes over."""
    route: Route
    hops: tuple[SimulatedHop, ...]
    demand: Demand
    progress: DecodeProgress
    core: SuccessorCore = field(default_factory=SuccessorCore)
    epoch: int = 0
    """Of the latest start."""
    computed: int = 0
    """Tokens of the sequence that all hops hold."""
    decodes: bool = False

    @property
    def key(self) -> LeaseKey:
        """Of the latest start."""
        return LeaseKey(self.number.to_bytes(16, "big"), self.epoch)

    @property
    def taped(self) -> int:
        """Number of the request whose tokens it draws."""
        return self.of.taped

    def advance(self, now_s: float) -> None:
        """Counts the tokens since the last look, if it decodes."""
        if self.decodes:
            self.progress.count(now_s)
        self.progress.advanced_s = now_s

    def reload(self, at: int, load: PeerLoad) -> None:
        """The hop's peer is loaded otherwise from now on."""
        self.progress.reload(at, len(self.hops[at].span), load)


class Succession:
    """Owner of the successors of a world: `decode_on` has one decode at its hops, `reload` those at whose peers another
    load is, and `took_over` hears of one that its session goes on as."""

    def __init__(
        self,
        context: SessionContext,
        *,
        decode_on: Callable[[Stepping, list[Member]], None],
        reload: Callable[[list[Member]], None],
        took_over: Callable[[SimulatedSuccessor], None],
    ) -> None:
        self._context = context
        self._decode_on = decode_on
        self._reload = reload
        self._took_over = took_over
        self._numbers = itertools.count(FIRST_NUMBER)
        self._by_session: dict[int, SimulatedSuccessor] = {}
        """By the session's number."""

    def look(self, one: SimulatedGeneration) -> tuple[Route, Mapping[str, str]] | None:
        """Begins the session anew, if a better circuit of other spans is worth it. Returns a better one of the same
        spans, and who takes whose place there."""
        record, route, now_s = one.record, one.route, self._context.now_s
        if one.phase is not Phase.DECODE or one.circuit.is_preparing or route is None:
            return None
        one.advance(now_s)
        if not one.lengths.is_worth_moving or not one.moves.is_idle:
            return None
        other = one.gateway.better(route, one.demand, one.key, now_s)
        if (
            other is None
            or other.peer_ids == route.peer_ids
            or any(hop.cold_spans for hop in other.hops)  # something would have to be loaded for it
        ):
            return None
        if (replaced := replaced_hops(route, other)) is not None:
            return other, replaced
        is_given_up = record.successors_given_up >= MOST_GIVEN_UP
        if is_given_up or not is_worth_computing(one.lengths, route, one.progress.tpot_ms / 1000, other):
            return None
        progress = DecodeProgress(one.progress.new_tokens)
        number, hops = next(self._numbers), self._context.hops_of(other)
        found = SimulatedSuccessor(one, number, other, hops, one.demand, progress)
        self._by_session[one.number] = self._context.successors[number] = found
        self._do(found, found.core.begin(now_s))
        self._context.timeline.call_at(found.core.deadline_s, lambda: self._tell(found, SuccessorOverdue()))
        return None

    def end(self, one: SimulatedGeneration) -> None:
        """The session has lost its circuit, or is over: its successor is of no use any more."""
        found = self._by_session.get(one.number)
        if found is not None:
            self._leave(found)

    def fail(self, number: int, reason: str) -> None:
        """A hop of that successor is gone, or leaves."""
        found = [one for one in self._by_session.values() if one.number == number]
        for one in found:
            self._tell(one, SuccessorFailed(reason))

    def _tell(
        self, one: SimulatedSuccessor, event: SuccessorDrew | SuccessorFailed | SuccessorOverdue
    ) -> None:
        if self._context.successors.get(one.number) is one:
            self._do(one, one.core.handle(event))

    def _do(self, one: SimulatedSuccessor, effect: SuccessorEffect | None) -> None:
        match effect:
            case FormSuccessor():
                self._form(one)
            case GiveSuccessorUp():
                one.of.record.successors_given_up += 1
                self._context.accounts.successors_given_up += 1
                self._leave(one)
            case TakeOver():
                one.of.progress.tokens = float(int(one.of.progress.tokens) + 1)
                del self._by_session[one.of.number]
                self._took_over(one)
            case None:
                self._watch(one)

    def _form(self, one: SimulatedSuccessor) -> None:
        """Asks the hops side by side, in an epoch of its own; the first no ends it."""
        context, circuit, now_s = self._context, one.of.circuit, self._context.now_s
        self._stop_stepping(one)
        one.of.gateway.gives_back(one.key, [hop.peer_id for hop in one.hops], now_s)
        if circuit.is_preparing:
            circuit.handle(NotPrepared(), now_s)
        circuit.handle(MoveWanted(one.route.peer_ids), now_s)
        one.epoch = circuit.last_epoch
        one.of.gateway.asks(one.key, [hop.peer_id for hop in one.hops], now_s)
        answers_s = []
        for at, hop in enumerate(one.hops):
            member = context.members[hop.peer_id]
            dials = 1 + (0.0 if hop.peer_id in one.of.gateway.linked else DIALS_RTT)
            asked_s = context.places.rtt_ms(one.of.gateway.peer_id, hop.peer_id) / 1000 * dials
            answer = (
                member.request(one.key, hop.span, one.demand.tokens, one.of.gateway.peer_id, now_s)
                if member.alive
                else None
            )
            if answer is None or isinstance(answer, Refused):
                after_s = UNREACHABLE_S if answer is None else asked_s
                failed = SuccessorFailed(f"{hop.peer_id} does not grant it")
                context.timeline.call(after_s, partial(self._tell_of, one, one.epoch, failed))
                return
            context.changed(member)
            answers_s.append(asked_s + context.dialled_s(one.hops, at))
        context.timeline.call(max(answers_s), partial(self._start, one, one.epoch))

    def _start(self, one: SimulatedSuccessor, epoch: int) -> None:
        """All hops have granted: what they do not hold of the sequence goes through the circuit."""
        if not self._is_at(one, epoch):
            return
        context, members = self._context, self._members(one)
        if not all(member.alive for member in members):
            self._tell(one, SuccessorFailed("a hop is gone"))
            return
        one.of.gateway.linked.update(hop.peer_id for hop in one.hops)
        context.link(one.hops)
        one.of.advance(context.now_s)
        history = one.of.history
        lacking = max(1, history - one.computed)
        views = tuple(member.loaded_view(one.number) for member in members)
        demand = Demand.of(max(one.demand.tokens, lacking), lacking)
        client_ms = context.places.rtt_ms(one.of.gateway.peer_id, one.hops[0].peer_id)
        prefill_ms = first_token_ms(one.hops, views, context.model, demand, client_ms)
        for member in members:
            member.prefilling[one.number] = None
        self._reload(members)
        context.timeline.call(prefill_ms / 1000, partial(self._first_token, one, epoch, history))

    def _first_token(self, one: SimulatedSuccessor, epoch: int, history: int) -> None:
        if not self._is_at(one, epoch):
            return
        members = self._members(one)
        for member in members:
            member.prefilling.pop(one.number, None)
        one.computed, one.decodes = history, True
        one.progress.advanced_s = self._context.now_s
        one.progress.tokens = float(history - one.of.request.prompt_tokens + 1)
        self._decode_on(one, members)
        self._drew(one)

    def _drew(self, one: SimulatedSuccessor) -> None:
        """A token has come over its circuit."""
        now_s, prompt_tokens = self._context.now_s, one.of.request.prompt_tokens
        one.advance(now_s)
        one.of.advance(now_s)
        length = prompt_tokens + int(one.of.progress.tokens)
        position = prompt_tokens + int(one.progress.tokens + 1e-9) - 1
        self._tell(one, SuccessorDrew(min(position, length), length, is_same=True))

    def _watch(self, one: SimulatedSuccessor) -> None:
        """Looks again when it would draw the token that comes next, as it is loaded now."""
        lacking = int(one.of.progress.tokens) + 1 - one.progress.tokens
        again_s = max(lacking * one.progress.tpot_ms, one.progress.tpot_ms / 2) / 1000
        self._context.timeline.call(again_s, partial(self._look_again, one, one.epoch))

    def _look_again(self, one: SimulatedSuccessor, epoch: int) -> None:
        if self._is_at(one, epoch) and one.decodes:
            self._drew(one)

    def _tell_of(self, one: SimulatedSuccessor, epoch: int, failed: SuccessorFailed) -> None:
        if self._is_at(one, epoch):
            self._tell(one, failed)

    def _is_at(self, one: SimulatedSuccessor, epoch: int) -> bool:
        return self._context.successors.get(one.number) is one and one.epoch == epoch

    def _members(self, one: SimulatedSuccessor) -> list[Member]:
        return [self._context.members[hop.peer_id] for hop in one.hops]

    def _stop_stepping(self, one: SimulatedSuccessor) -> None:
        members = self._members(one)
        one.decodes = False
        for member in members:
            member.decoding.pop(one.number, None)
            member.prefilling.pop(one.number, None)
        self._reload([member for member in members if member.alive])

    def _leave(self, one: SimulatedSuccessor) -> None:
        """Gives back whatever hops have of it."""
        now_s, circuit = self._context.now_s, one.of.circuit
        self._stop_stepping(one)
        del self._by_session[one.of.number]
        del self._context.successors[one.number]
        one.of.gateway.gives_back(one.key, [hop.peer_id for hop in one.hops], now_s)
        if circuit.is_preparing:
            circuit.handle(NotPrepared(), now_s)
        for member in self._members(one):
            if member.book.release(one.key) is not None and member.alive:
                self._context.changed(member)
