"""How circuits form: planned by the session's gateway, leased hop by hop, and tried again until the time is over."""

from collections.abc import Callable

from numpy.random import Generator

from molink.peer.memory.leases import Granted, Refused
from molink.routing import NoCircuit
from molink.shards.spec import Span
from molink.simnet.swarm.members.accounts import Outcome
from molink.simnet.swarm.members.member import Member
from molink.simnet.swarm.sessions.context import Scene
from molink.simnet.swarm.sessions.generation import DIALS_RTT, UNREACHABLE_S, Generation, Phase


class Forming:
    """Calls `formed` when a session's circuit stands, `given_back` with one whose leases are to be returned, and
    `failed` when no time is left; each hears the turn of the session that it is about."""

    def __init__(
        self,
        scene: Scene,
        rng: Generator,
        *,
        formed: Callable[[Generation, int], None],
        given_back: Callable[[Generation], None],
        failed: Callable[[Generation, Outcome], None],
    ) -> None:
        self._scene = scene
        self._rng = rng
        self._formed = formed
        self._given_back = given_back
        self._failed = failed

    def attempt(self, one: Generation) -> None:
        """Plans a circuit and asks its hops for leases."""
        scene, now_s = self._scene, self._scene.now_s
        one.attempts += 1
        try:
            route = one.gateway.choose(one.demand, now_s, first=one.epoch == 0)
        except NoCircuit:
            self._again(one, Outcome.NO_CIRCUIT)
            return
        one.planned(route, scene.hops_of(route))
        one.gateway.asks(one.key, route.peer_ids, now_s)
        waits_s: list[float] = []
        refusals: list[tuple[Member, Refused | None]] = []
        turn = one.turn
        for hop in one.hops:
            member = scene.members[hop.peer_id]
            rtt_s = scene.places.rtt_ms(one.gateway.peer_id, hop.peer_id) / 1000
            dials = 1 + (0.0 if hop.peer_id in one.gateway.linked else DIALS_RTT)
            if not member.alive:
                waits_s.append(UNREACHABLE_S)
                refusals.append((member, None))
                continue
            waits_s.append(rtt_s * dials)
            answer = member.request(one.key, hop.span, one.demand.tokens, one.gateway.peer_id, now_s)
            if isinstance(answer, Refused):
                refusals.append((member, answer))
            else:
                self._granted(member, answer)
        scene.timeline.call(max(waits_s), lambda: self.settle(one, turn, refusals))

    def settle(self, one: Generation, turn: int, refusals: list[tuple[Member, Refused | None]]) -> None:
        """All hops have answered, or have not; without a refusal it is looked whether one is gone."""
        if not one.waits_for(Phase.FORMING, turn):
            return
        scene, now_s = self._scene, self._scene.now_s
        members = scene.members_of(one)
        if not refusals:
            refusals = [(member, None) for member in members if not member.alive]
        if refusals:
            self._given_back(one)
            member, refusal = refusals[0]
            self._learn(one, member, refusal)
            self._again(one, Outcome.UNAVAILABLE)
            return
        one.gateway.linked.update(hop.peer_id for hop in one.hops)
        farthest_s = max(scene.places.rtt_ms(one.gateway.peer_id, hop.peer_id) for hop in one.hops) / 1000
        ready_s = max(scene.members[hop.peer_id].ready_s(hop.span, now_s) for hop in one.hops)
        begin_s = max(ready_s, now_s + farthest_s)
        if begin_s > one.deadline_s:
            scene.timeline.call_at(one.deadline_s, lambda: self._give_up(one, turn, Outcome.UNAVAILABLE))
        else:
            scene.timeline.call_at(begin_s, lambda: self._formed(one, turn))

    def _granted(self, member: Member, answer: Granted) -> None:
        self._scene.accounts.granted += 1
        now_s = self._scene.now_s
        for span in answer.to_load:
            load_s = member.load_s((span,))
            member.loads[span] = now_s + load_s
            self._scene.timeline.call(load_s, lambda span=span: self._loaded(member, span))  # type: ignore[misc]
        self._scene.changed(member)

    def _loaded(self, member: Member, span: Span) -> None:
        member.arrived(span)
        self._scene.changed(member)

    def _learn(self, one: Generation, member: Member, refusal: Refused | None) -> None:
        """As `molink.client.circuit.circuit_builder` does: who is gone is avoided for long, who has no room briefly."""
        now_s, facts = self._scene.now_s, member.volunteer.facts
        self._scene.accounts.refuse("lost" if refusal is None else refusal.code)
        if refusal is None:
            one.gateway.lost(facts, now_s)
        else:
            one.gateway.refused(facts, now_s, max(0.3, refusal.retry_after_s), refusal.detail)

    def _again(self, one: Generation, problem: Outcome) -> None:
        now_s = self._scene.now_s
        wait_s = one.next_wait_s(
            float(self._rng.uniform(0.5, 1.5)), nothing_found=problem is Outcome.NO_CIRCUIT
        )
        if now_s + wait_s >= one.deadline_s:
            self._give_up(one, one.turn, problem)
            return
        one.gateway.refresh(now_s)
        self._scene.timeline.call(wait_s, lambda: self.attempt(one))

    def _give_up(self, one: Generation, turn: int, problem: Outcome) -> None:
        if one.waits_for(Phase.FORMING, turn):
            self._failed(one, Outcome.PEER_LOST if one.lost_before else problem)
