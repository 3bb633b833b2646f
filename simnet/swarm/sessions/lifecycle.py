"""How sessions live: prefill, decode, losses, the end. The owner of all sessions of a world."""

from collections.abc import Callable

from numpy.random import Generator

from molink.client.circuit.session import RENEW_EVERY_S
from molink.routing.cost.terms import Demand
from molink.shards.spec import ModelSpec
from molink.simnet.core.request_load import Request
from molink.simnet.core.timeline import Timeline
from molink.simnet.swarm.members.accounts import Accounts, Outcome
from molink.simnet.swarm.members.member import Member
from molink.simnet.swarm.population.places import Places
from molink.simnet.swarm.sessions.context import Scene
from molink.simnet.swarm.sessions.forming import Forming
from molink.simnet.swarm.sessions.gateway import Gateway
from molink.simnet.swarm.sessions.generation import NOTICED_S, Generation, Phase
from molink.simnet.swarm.sessions.partnering import Partnering
from molink.simnet.swarm.sessions.step_cost import Load, first_token_ms, own_ms


class Lifecycle:
    """Drives sessions over the members of a swarm. `changed` hears whose load is another now."""

    def __init__(
        self,
        timeline: Timeline,
        model: ModelSpec,
        members: dict[str, Member],
        places: Places,
        accounts: Accounts,
        rng: Generator,
        changed: Callable[[Member], None],
        *,
        partners: bool = False,
    ) -> None:
        self._scene = Scene(timeline, model, members, places, accounts, changed)
        self._forming = Forming(
            self._scene, rng, formed=self._start, given_back=self._release, failed=self._end
        )
        self._partnering = Partnering(self._scene) if partners else None

    def begin(self, request: Request, gateway: Gateway, timeout_s: float) -> None:
        """A request comes to a gateway, now."""
        now_s = self._scene.now_s
        demand = Demand.of(request.prompt_tokens + request.new_tokens, request.prompt_tokens)
        one = Generation(request, gateway, demand, deadline_s=now_s + timeout_s)
        self._scene.running[one.number] = one
        self._scene.accounts.arrive(one.number, now_s)
        self._scene.timeline.call(RENEW_EVERY_S, lambda: self._renew(one))
        self._forming.attempt(one)

    def peer_gone(self, member: Member, *, told: bool) -> None:
        """A peer is gone: its sessions stall until that is noticed, at once if it has said so."""
        stepping = (*member.decoding, *member.prefilling)
        member.decoding.clear()
        member.prefilling.clear()
        for number in stepping:
            one = self._scene.running[number]
            self._stall(one, member, told=told)
        if self._partnering is not None:
            self._partnering.peer_gone(member, told=told)

    def _stall(self, one: Generation, member: Member, *, told: bool) -> None:
        one.stall(self._scene.now_s)
        self._stop_stepping(one)
        turn = one.turn
        self._scene.timeline.call(0.0 if told else NOTICED_S, lambda: self._recover(one, turn, member))

    def _start(self, one: Generation, turn: int) -> None:
        """The circuit stands."""
        if not one.waits_for(Phase.FORMING, turn):
            return
        if all(member.alive for member in self._scene.members_of(one)):
            self._prefill(one)
        else:
            self._forming.settle(one, turn, [])

    def _prefill(self, one: Generation) -> None:
        """The prompt, or after a loss what is lacking of the history, goes through the circuit: at least the token that
        was under way."""
        members, turn = self._scene.members_of(one), one.turn
        one.phase, one.advanced_s = Phase.PREFILL, self._scene.now_s
        views = tuple(member.loaded_view(one.number) for member in members)
        lacking = one.history - one.computed
        if one.lost_before:
            one.recomputed_tokens += lacking
        if self._partnering is not None:
            self._partnering.seek(one)
        demand = Demand.of(max(one.demand.tokens, lacking), max(1, lacking))
        client_ms = self._scene.places.rtt_ms(one.gateway.peer_id, one.hops[0].peer_id)
        prefill_ms = first_token_ms(one.hops, views, self._scene.model, demand, client_ms)
        for member in members:
            member.prefilling[one.number] = None
        self._reload(members)
        self._scene.timeline.call(prefill_ms / 1000, lambda: self._first_token(one, turn))

    def _first_token(self, one: Generation, turn: int) -> None:
        if not one.waits_for(Phase.PREFILL, turn):
            return
        now_s = self._scene.now_s
        members = self._scene.members_of(one)
        for at, member in enumerate(members):
            member.prefilling.pop(one.number, None)
            member.decoding[one.number] = at
        one.phase, one.advanced_s, one.lost_before = Phase.DECODE, now_s, False
        one.tokens += 1.0
        if one.first_token_s is None:
            one.first_token_s = now_s
        if one.lost_s is not None:
            self._scene.accounts.stalls_s.append(now_s - one.lost_s)
            one.lost_s = None
        one.own_ms = [
            own_ms(hop, member.volunteer.facts, self._scene.model, one.demand)
            for hop, member in zip(one.hops, members, strict=True)
        ]
        one.hop_ms = [0.0] * len(one.hops)
        self._reload(members)
        if self._partnering is not None:
            self._partnering.first_token(one)

    def _reload(self, members: list[Member]) -> None:
        """Those that decode on these peers go on at another rate."""
        now_s = self._scene.now_s
        touched: dict[int, Generation] = {}
        for member in members:
            self._scene.changed(member)
            if not member.decoding:
                continue
            load = Load.of(member.loaded_view(next(iter(member.decoding))))
            for number, at in member.decoding.items():
                if number not in touched:
                    touched[number] = other = self._scene.running[number]
                    other.advance(now_s)
                touched[number].reload(at, load)
        for other in touched.values():
            self._schedule(other)

    def _schedule(self, one: Generation) -> None:
        """Has it looked at when it should be at its end. One look at a time: a later end is found out at the look."""
        one.due_s = one.finish_s()
        if one.due_s < one.rings_s:
            one.rings_s = one.due_s
            self._scene.timeline.call_at(one.due_s, lambda at_s=one.due_s: self._look(one, at_s))  # type: ignore[misc]

    def _look(self, one: Generation, at_s: float) -> None:
        if at_s != one.rings_s:
            return
        one.rings_s = float("inf")
        if one.phase is not Phase.DECODE:
            return
        if one.due_s > self._scene.now_s + 1e-9:
            self._schedule(one)
            return
        one.tokens = float(one.request.new_tokens)
        self._stop_stepping(one)
        self._end(one, Outcome.COMPLETED)

    def _recover(self, one: Generation, turn: int, member: Member) -> None:
        """The loss is noticed: a partner in the peer's place, or another circuit without that peer."""
        if not one.waits_for(Phase.STALLED, turn):
            return
        now_s = self._scene.now_s
        one.losses += 1
        one.gateway.lost(member.volunteer.facts, now_s)
        one.lost_before = True
        if self._partnering is not None:
            dialled_s = self._partnering.take_over(one, member)
            if dialled_s is not None:
                turn = one.turn
                self._scene.timeline.call(dialled_s, lambda: self._resume(one, turn))
                return
        self._release(one)
        one.phase = Phase.FORMING
        one.deadline_s = one.recovery_deadline_s(now_s)
        one.backoff_s = min(one.backoff_s, 0.05)
        self._forming.attempt(one)

    def _resume(self, one: Generation, turn: int) -> None:
        """The partner is linked: the session goes on, unless yet another peer is gone."""
        if not one.waits_for(Phase.STALLED, turn):
            return
        gone = next((member for member in self._scene.members_of(one) if not member.alive), None)
        if gone is None:
            self._prefill(one)
        else:
            self._stall(one, gone, told=not gone.volunteer.crashes)

    def _stop_stepping(self, one: Generation) -> None:
        members = self._scene.members_of(one)
        for member in members:
            member.decoding.pop(one.number, None)
            member.prefilling.pop(one.number, None)
        self._reload([member for member in members if member.alive])

    def _renew(self, one: Generation) -> None:
        if one.phase is Phase.ENDED:
            return
        for hop in one.hops:
            member = self._scene.members[hop.peer_id]
            if member.alive:
                member.book.used(one.key, self._scene.now_s)
                member.book.renew(one.key, self._scene.now_s)
        if self._partnering is not None:
            self._partnering.renew(one)
        self._scene.timeline.call(RENEW_EVERY_S, lambda: self._renew(one))

    def _release(self, one: Generation) -> None:
        if self._partnering is not None:
            self._partnering.release(one)
        one.gateway.gives_back(one.key, [hop.peer_id for hop in one.hops], self._scene.now_s)
        for hop in one.hops:
            member = self._scene.members[hop.peer_id]
            if member.book.release(one.key) is not None and member.alive:
                self._scene.changed(member)

    def _end(self, one: Generation, outcome: Outcome) -> None:
        self._release(one)
        one.phase = Phase.ENDED
        self._scene.accounts.end(one.ended(outcome, self._scene.now_s))
        del self._scene.running[one.number]
