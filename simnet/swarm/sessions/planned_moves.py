"""Planned moves of simulated sessions: hops that leave, and hops that a better circuit is without, are left for others.

What is to be left, and until when, is each session's `MovesCore`, as at a client (`molink.client.circuit.moves`). The
hop's standby, or one that is chosen now, gets what its copy lacks before all that can wait; each session's
`CircuitCore` numbers the epoch that is prepared meanwhile. Who cannot go over in time loses its peer as if that had
crashed, but for the time until it is noticed.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from molink.client.circuit.circuit_core import MoveWanted, NotPrepared, Prepared
from molink.client.epochs.moves_core import LOOK_AGAIN_S
from molink.peer.memory.leases import LeaseKey, Refused
from molink.routing import PartnerChoice, Route
from molink.routing.routes.copy_forms import CopyForm, computing_ms, copy_costs
from molink.simnet.swarm.members.member import Member, NotConserved
from molink.simnet.swarm.sessions.context import SessionContext
from molink.simnet.swarm.sessions.generation import DIALS_RTT, Phase, SimulatedGeneration, SimulatedLease
from molink.simnet.swarm.sessions.partnering import Partnering
from molink.simnet.swarm.sessions.step_cost import SimulatedHop


class PlannedMoves:
    """Has sessions leave the peers that they are to leave. `went_over` hears of a session on its next circuit, and what
    its hops were asked for before."""

    def __init__(
        self,
        context: SessionContext,
        partnering: Partnering,
        went_over: Callable[[SimulatedGeneration, SimulatedLease], None],
        to_leave: Callable[[SimulatedGeneration], None],
    ) -> None:
        """`to_leave` hears of a session that a hop of its circuit is about to leave."""
        self._context = context
        self._partnering = partnering
        self._went_over = went_over
        self._to_leave = to_leave
        self._preparing: set[int] = set()
        """Numbers of the sessions whose next circuit is being prepared."""
        self._waiting: set[int] = set()
        """Those that are looked at again."""

    def leave(self, member: Member, within_s: float) -> None:
        """The clients of all sessions that it has a lease of hear that they have to be elsewhere by then."""
        for lease in member.book.leases:
            one = self._context.running.get(int.from_bytes(lease.key.session, "big"))
            if one is not None:
                way_s = self._context.places.rtt_ms(one.gateway.peer_id, member.peer_id) / 2000
                told = partial(self._told, one, member.peer_id, within_s - way_s)
                self._context.timeline.call(way_s, told)

    def _told(self, one: SimulatedGeneration, leaving: str, within_s: float) -> None:
        """The session's client hears it: what it has begun elsewhere is given up."""
        self._to_leave(one)
        one.moves.note_leaving(leaving, self._context.now_s, within_s)
        self._look(one)

    def leave_for(self, one: SimulatedGeneration, better: Route, replaced: Mapping[str, str]) -> None:
        """A better circuit has others at the same spans in these peers' places."""
        spans = {hop.peer_id: hop.span for hop in better.hops}
        choices: dict[str, PartnerChoice | None] = {}
        for peer_id, other in replaced.items():
            model, span = self._context.model, spans[other]
            cost = copy_costs(model, span, model.dtype)[0]
            if cost.form is not CopyForm.KEYS_AND_VALUES:
                view = self._context.members[other].loaded_view(one.number)
                cost = replace(cost, token_ms=computing_ms(view, span, math.inf))
            choices[peer_id] = PartnerChoice(other, better.tpot_ms, None, cost)
        one.moves.note_better(choices, self._context.now_s)
        self._look(one)

    def _look(self, one: SimulatedGeneration) -> None:
        """Sees whether the session can leave the hops that it is to leave, and looks again until it is too late."""
        now_s, moves = self._context.now_s, one.moves
        if one.phase is Phase.ENDED:
            return
        peer_ids = [hop.peer_id for hop in one.hops]
        left = moves.to_leave(peer_ids)
        if left and now_s >= moves.deadline_s(left):
            moves.drop_better()
        if not moves.wants(peer_ids, now_s):
            return
        if one.phase is Phase.DECODE and one.number not in self._preparing:
            route = self._partnering.hand_over(one, left)
            if route is not None:
                self._prepare(one, route)
        if one.number not in self._waiting:
            self._waiting.add(one.number)
            self._context.timeline.call(LOOK_AGAIN_S, partial(self._look_again, one, one.number))

    def _look_again(self, one: SimulatedGeneration, number: int) -> None:
        self._waiting.discard(number)
        self._look(one)

    def _prepare(self, one: SimulatedGeneration, route: Route) -> None:
        one.circuit.handle(MoveWanted(route.peer_ids), self._context.now_s)
        self._preparing.add(one.number)
        hops = self._context.hops_of(route)
        prepared = partial(self._prepared, one, one.turn, route, hops)
        self._context.timeline.call(self._prepares_s(one, hops), prepared)

    def _prepares_s(self, one: SimulatedGeneration, hops: tuple[SimulatedHop, ...]) -> float:
        """Until every hop has said that it could begin the epoch: it has dialled its neighbours by then."""
        places = self._context.places
        waits_s = []
        for at, hop in enumerate(hops):
            dials = 1 + (0.0 if hop.peer_id in one.gateway.linked else DIALS_RTT)
            asked_s = places.rtt_ms(one.gateway.peer_id, hop.peer_id) / 1000 * dials
            waits_s.append(asked_s + self._context.dialled_s(hops, at))
        return max(waits_s)

    def _prepared(
        self, one: SimulatedGeneration, turn: int, route: Route, hops: tuple[SimulatedHop, ...]
    ) -> None:
        """The epoch is prepared, unless the circuit is lost or the session over by now."""
        self._preparing.discard(one.number)
        if not one.waits_for(Phase.DECODE, turn):
            return
        now_s, before = self._context.now_s, one.leased
        if not self._can_go_over(one, hops):
            one.circuit.handle(NotPrepared(), now_s)
            one.moves.record_failed()
            return
        key = LeaseKey(before.key.session, one.circuit.last_epoch)
        for hop in hops:
            self._go_on(one, hop, key)
        one.circuit.handle(Prepared(), now_s)
        one.gateway.gives_back(before.key, [hop.peer_id for hop in before.hops], now_s)
        one.gateway.asks(key, [hop.peer_id for hop in hops], now_s)
        self._context.link(hops)
        one.kept.keep(before)
        one.route, one.hops = route, hops
        one.moves.record_moved()
        self._went_over(one, before)

    def _can_go_over(self, one: SimulatedGeneration, hops: tuple[SimulatedHop, ...]) -> bool:
        """Whether each of these hops is there, and is one of the session's or keeps the copy that it needs."""
        members, now = self._context.members, {hop.peer_id for hop in one.hops}
        return all(
            members[hop.peer_id].alive
            and (hop.peer_id in now or members[hop.peer_id].copies.get(one.number) == at)
            for at, hop in enumerate(hops)
        )

    def _go_on(self, one: SimulatedGeneration, hop: SimulatedHop, key: LeaseKey) -> None:
        """The hop goes on in that epoch with the lease that it has, or with its copy, which is one from now on."""
        member, now_s = self._context.members[hop.peer_id], self._context.now_s
        owner = one.gateway.peer_id
        answer = member.book.advance(key, hop.span, one.demand.tokens, owner, now_s)
        if isinstance(answer, Refused):
            raise NotConserved(f"{hop.peer_id} does not go on with what it has: {answer.detail}")
