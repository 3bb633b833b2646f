"""How circuits form and are given up: each session's `CircuitCore` decides, and here it is done in virtual time."""

from collections.abc import Callable
from dataclasses import dataclass

from numpy.random import Generator

from molink.client.circuit import circuit_core as core
from molink.peer.memory.leases import Granted, Refused
from molink.routing import NoCircuit
from molink.shards.spec import Span
from molink.simnet.swarm.members.accounts import SessionOutcome
from molink.simnet.swarm.members.member import Member
from molink.simnet.swarm.sessions.context import SessionContext
from molink.simnet.swarm.sessions.generation import DIALS_RTT, UNREACHABLE_S, SimulatedGeneration
from molink.simnet.swarm.sessions.partnering import Partnering

_LOST, _SLOW = core.Refusal("lost"), core.Refusal("slow")


@dataclass(frozen=True, slots=True)
class _No:
    """What the gateway hears of a hop that does not grant."""

    after_s: float
    member: Member
    refusal: core.Refusal
    detail: str = ""


class CircuitForming:
    """Calls `formed` when a session's circuit stands, `given_back` with one whose leases are to be returned, and
    `failed` when no time is left."""

    def __init__(
        self,
        context: SessionContext,
        rng: Generator,
        partnering: Partnering,
        *,
        formed: Callable[[SimulatedGeneration], None],
        given_back: Callable[[SimulatedGeneration], None],
        failed: Callable[[SimulatedGeneration, SessionOutcome], None],
    ) -> None:
        self._context = context
        self._rng = rng
        self._formed = formed
        self._given_back = given_back
        self._partnering = partnering
        self._failed = failed

    def go_on(self, one: SimulatedGeneration, event: core.Event) -> None:
        """Something has happened to the session's circuit."""
        for effect in one.circuit.handle(event, self._context.now_s):
            match effect:
                case core.Plan():
                    self._plan(one)
                case core.Reserve():
                    self._reserve(one)
                case core.Seize(_, _, peer_id):
                    self._partnering.seize(one, peer_id)
                    self._reserve(one)
                case core.Release():
                    self._given_back(one)
                case core.AwaitNews(wait_s):
                    one.gateway.refresh(self._context.now_s)
                    self._context.timeline.call(wait_s, lambda: self.go_on(one, core.Waited()))
                case core.Start():
                    self._formed(one)
                case core.GiveUp(problem, after_loss):
                    self._failed(one, _outcome(problem, after_loss=after_loss))

    def _plan(self, one: SimulatedGeneration) -> None:
        one.record.attempts += 1
        again = one.kept.take_again()
        try:
            route = (
                one.gateway.choose(one.demand, self._context.now_s, first=one.circuit.epoch == 0)
                if again is None
                else again.route
            )
        except NoCircuit:
            self.go_on(one, core.NoRoute(self._draw()))
            return
        one.planned(route, self._context.hops_of(route))
        self.go_on(one, core.Planned(route.peer_ids))

    def _reserve(self, one: SimulatedGeneration) -> None:
        """Asks the hops side by side; the first no ends it."""
        context, now_s = self._context, self._context.now_s
        one.gateway.asks(one.key, [hop.peer_id for hop in one.hops], now_s)
        answers_s: list[float] = []
        noes: list[_No] = []
        for at, hop in enumerate(one.hops):
            member = context.members[hop.peer_id]
            if not member.alive:
                noes.append(_No(UNREACHABLE_S, member, _SLOW))
                continue
            dials = 1 + (0.0 if hop.peer_id in one.gateway.linked else DIALS_RTT)
            asked_s = context.places.rtt_ms(one.gateway.peer_id, hop.peer_id) / 1000 * dials
            answers_s.append(asked_s + context.dialled_s(one.hops, at))
            answer = member.request(one.key, hop.span, one.demand.tokens, one.gateway.peer_id, now_s)
            if isinstance(answer, Refused):
                refusal = core.Refusal(answer.code, answer.retry_after_s)
                noes.append(_No(answers_s[-1], member, refusal, answer.detail))
            else:
                self._granted(member, answer)
        if noes:
            first = min(noes, key=lambda no: no.after_s)
            context.timeline.call(first.after_s, lambda: self._refused(one, first))
        else:
            are_ready = all(
                context.members[hop.peer_id].ready_s(hop.span, now_s) <= now_s for hop in one.hops
            )
            context.timeline.call(max(answers_s), lambda: self._settle(one, are_ready=are_ready))

    def _settle(self, one: SimulatedGeneration, *, are_ready: bool) -> None:
        """All hops have granted. Those that lack layers load them, and the gateway asks when they are ready."""
        context, now_s = self._context, self._context.now_s
        if self._lacks_one(one):
            return
        one.gateway.linked.update(hop.peer_id for hop in one.hops)
        context.link(one.hops)
        if are_ready:
            self._ready(one)
            return
        farthest_s = max(context.places.rtt_ms(one.gateway.peer_id, hop.peer_id) for hop in one.hops) / 1000
        ready_s = max(context.members[hop.peer_id].ready_s(hop.span, now_s) for hop in one.hops)
        begin_s = max(ready_s, now_s + farthest_s)
        if begin_s > one.circuit.deadline_s:
            context.timeline.call_at(one.circuit.deadline_s, lambda: self._overdue(one))
        else:
            context.timeline.call_at(begin_s, lambda: self._ready(one))

    def _overdue(self, one: SimulatedGeneration) -> None:
        """Layers that are being loaded go on loading: another attempt finds more of them."""
        self.go_on(one, core.Overdue(self._draw(), all_granted=True))

    def _ready(self, one: SimulatedGeneration) -> None:
        if not self._lacks_one(one):
            self.go_on(one, core.Ready())

    def _lacks_one(self, one: SimulatedGeneration) -> bool:
        gone = next((member for member in self._context.members_of(one) if not member.alive), None)
        if gone is not None:
            self._refused(one, _No(0.0, gone, _LOST))
        return gone is not None

    def _refused(self, one: SimulatedGeneration, no: _No) -> None:
        self._context.accounts.refuse(no.refusal.code)
        one.gateway.refused(no.member.volunteer.facts, self._context.now_s, no.refusal, no.detail)
        peer_id, standby = no.member.peer_id, ""
        if no.refusal.is_gone:
            standby = self._partnering.substitute(one, peer_id)
        if standby:
            one.kept.keep(one.leased)  # it goes on in the next epoch, if it is seized once more
        self.go_on(one, core.ReservationRefused(no.refusal, self._draw(), peer_id, standby))

    def _granted(self, member: Member, answer: Granted) -> None:
        self._context.accounts.granted += 1
        now_s = self._context.now_s
        for span in answer.to_load:
            load_s = member.load_s((span,))
            member.loads[span] = now_s + load_s
            self._context.timeline.call(load_s, lambda span=span: self._loaded(member, span))  # type: ignore[misc]
        self._context.changed(member)

    def _loaded(self, member: Member, span: Span) -> None:
        member.arrived(span)
        self._context.changed(member)

    def _draw(self) -> float:
        return float(self._rng.uniform(0.5, 1.5))


def _outcome(problem: core.Problem, *, after_loss: bool) -> SessionOutcome:
    if after_loss:
        return SessionOutcome.PEER_LOST
    return SessionOutcome.NO_CIRCUIT if problem is core.Problem.NO_ROUTE else SessionOutcome.UNAVAILABLE
