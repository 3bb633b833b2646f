"""How sessions live: forming a circuit, prefill, decode, losses, the end. The owner of all sessions of a world."""

from collections.abc import Callable

from numpy.random import Generator

from molink.client.session import RENEW_EVERY_S
from molink.peer.leases import Granted, Refused
from molink.routing import NoCircuit, Route
from molink.routing.terms import Demand
from molink.shards.spec import ModelSpec, Span
from molink.simnet.request_load import Request
from molink.simnet.swarm.accounts import Accounts, Outcome
from molink.simnet.swarm.gateway import Gateway
from molink.simnet.swarm.generation import DIALS_RTT, NOTICED_S, UNREACHABLE_S, Generation, Phase
from molink.simnet.swarm.member import Member
from molink.simnet.swarm.places import Places
from molink.simnet.swarm.step_cost import Hop, Load, first_token_ms, link_ms, own_ms
from molink.simnet.world.timeline import Timeline


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
    ) -> None:
        self._timeline = timeline
        self._model = model
        self._members = members
        self._places = places
        self._accounts = accounts
        self._rng = rng
        self._changed = changed
        self._running: dict[int, Generation] = {}

    def begin(self, request: Request, gateway: Gateway, timeout_s: float) -> None:
        """A request comes to a gateway, now."""
        now_s = self._timeline.now_s
        demand = Demand.of(request.prompt_tokens + request.new_tokens, request.prompt_tokens)
        one = Generation(request, gateway, demand, deadline_s=now_s + timeout_s)
        self._running[one.number] = one
        self._accounts.arrive(one.number, now_s)
        self._timeline.call(RENEW_EVERY_S, lambda: self._renew(one))
        self._attempt(one)

    def peer_gone(self, member: Member, *, told: bool) -> None:
        """A peer is gone: its sessions stall until that is noticed, at once if it has said so."""
        now_s = self._timeline.now_s
        stepping = (*member.decoding, *member.prefilling)
        member.decoding.clear()
        member.prefilling.clear()
        for number in stepping:
            one = self._running[number]
            one.advance(now_s)
            one.tokens = float(int(one.tokens))
            self._stop_stepping(one)
            one.phase, one.stalled_s = Phase.STALLED, now_s
            epoch = one.epoch
            self._timeline.call(
                0.0 if told else NOTICED_S,
                lambda one=one, epoch=epoch: self._recover(one, epoch, member),  # type: ignore[misc]
            )

    def _attempt(self, one: Generation) -> None:
        """Plans a circuit and asks its hops for leases."""
        now_s = self._timeline.now_s
        one.attempts += 1
        try:
            route = one.gateway.choose(one.demand, now_s, first=one.epoch == 0)
        except NoCircuit:
            self._again(one, Outcome.NO_CIRCUIT)
            return
        one.epoch += 1
        one.hops = self._hops(route)
        one.gateway.asks(one.key, route.peer_ids, now_s)
        waits_s: list[float] = []
        refusals: list[tuple[Member, Refused | None]] = []
        epoch = one.epoch
        for hop in one.hops:
            member = self._members[hop.peer_id]
            rtt_s = self._places.rtt_ms(one.gateway.peer_id, hop.peer_id) / 1000
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
        self._timeline.call(max(waits_s), lambda: self._settle(one, epoch, refusals))

    def _granted(self, member: Member, answer: Granted) -> None:
        self._accounts.granted += 1
        now_s = self._timeline.now_s
        for span in answer.to_load:
            load_s = member.load_s((span,))
            member.loads[span] = now_s + load_s
            self._timeline.call(load_s, lambda span=span: self._loaded(member, span))  # type: ignore[misc]
        self._changed(member)

    def _loaded(self, member: Member, span: Span) -> None:
        member.arrived(span)
        self._changed(member)

    def _settle(self, one: Generation, epoch: int, refusals: list[tuple[Member, Refused | None]]) -> None:
        """All hops have answered, or have not."""
        if one.phase is not Phase.FORMING or one.epoch != epoch:
            return
        now_s = self._timeline.now_s
        members = [self._members[hop.peer_id] for hop in one.hops]
        if not refusals:
            refusals = [(member, None) for member in members if not member.alive]
        if refusals:
            self._release(one)
            member, refusal = refusals[0]
            self._learn(one, member, refusal)
            self._again(one, Outcome.UNAVAILABLE)
            return
        one.gateway.linked.update(hop.peer_id for hop in one.hops)
        farthest_s = max(self._places.rtt_ms(one.gateway.peer_id, hop.peer_id) for hop in one.hops) / 1000
        ready_s = max(self._members[hop.peer_id].ready_s(hop.span, now_s) for hop in one.hops)
        begin_s = max(ready_s, now_s + farthest_s)
        if begin_s > one.deadline_s:
            self._timeline.call_at(one.deadline_s, lambda: self._give_up(one, epoch, Outcome.UNAVAILABLE))
        else:
            self._timeline.call_at(begin_s, lambda: self._start(one, epoch))

    def _learn(self, one: Generation, member: Member, refusal: Refused | None) -> None:
        """As `molink.client.formation` does: who is gone is avoided for long, who has no room briefly."""
        now_s, facts = self._timeline.now_s, member.volunteer.facts
        self._accounts.refuse("lost" if refusal is None else refusal.code)
        if refusal is None:
            one.gateway.lost(facts, now_s)
        else:
            one.gateway.refused(facts, now_s, max(0.3, refusal.retry_after_s), refusal.detail)

    def _again(self, one: Generation, problem: Outcome) -> None:
        now_s = self._timeline.now_s
        wait_s = one.next_wait_s(
            float(self._rng.uniform(0.5, 1.5)), nothing_found=problem is Outcome.NO_CIRCUIT
        )
        if now_s + wait_s >= one.deadline_s:
            self._give_up(one, one.epoch, problem)
            return
        one.gateway.refresh(now_s)
        self._timeline.call(wait_s, lambda: self._attempt(one))

    def _give_up(self, one: Generation, epoch: int, problem: Outcome) -> None:
        if one.phase is Phase.FORMING and one.epoch == epoch:
            self._end(one, Outcome.PEER_LOST if one.lost_before else problem)

    def _start(self, one: Generation, epoch: int) -> None:
        """The prompt, or the history after a loss, goes through the circuit."""
        if one.phase is not Phase.FORMING or one.epoch != epoch:
            return
        now_s = self._timeline.now_s
        members = [self._members[hop.peer_id] for hop in one.hops]
        if any(not member.alive for member in members):
            self._settle(one, epoch, [])
            return
        one.phase, one.advanced_s = Phase.PREFILL, now_s
        views = tuple(member.loaded_view(one.number) for member in members)
        demand = Demand.of(max(one.demand.tokens, one.history), one.history)
        if one.lost_before:
            one.recomputed_tokens += one.history
        client_ms = self._places.rtt_ms(one.gateway.peer_id, one.hops[0].peer_id)
        prefill_ms = first_token_ms(one.hops, views, self._model, demand, client_ms)
        for member in members:
            member.prefilling[one.number] = None
        self._reload(members)
        self._timeline.call(prefill_ms / 1000, lambda: self._first_token(one, epoch))

    def _first_token(self, one: Generation, epoch: int) -> None:
        if one.phase is not Phase.PREFILL or one.epoch != epoch:
            return
        now_s = self._timeline.now_s
        members = [self._members[hop.peer_id] for hop in one.hops]
        for at, member in enumerate(members):
            member.prefilling.pop(one.number, None)
            member.decoding[one.number] = at
        one.phase, one.advanced_s, one.lost_before = Phase.DECODE, now_s, False
        one.tokens += 1.0
        if one.first_token_s is None:
            one.first_token_s = now_s
        one.own_ms = [
            own_ms(hop, member.volunteer.facts, self._model, one.demand)
            for hop, member in zip(one.hops, members, strict=True)
        ]
        one.hop_ms = [0.0] * len(one.hops)
        self._reload(members)

    def _reload(self, members: list[Member]) -> None:
        """Those that decode on these peers go on at another rate."""
        now_s = self._timeline.now_s
        touched: dict[int, Generation] = {}
        for member in members:
            self._changed(member)
            if not member.decoding:
                continue
            load = Load.of(member.loaded_view(next(iter(member.decoding))))
            for number, at in member.decoding.items():
                if number not in touched:
                    touched[number] = other = self._running[number]
                    other.advance(now_s)
                touched[number].reload(at, load)
        for other in touched.values():
            self._schedule(other)

    def _schedule(self, one: Generation) -> None:
        """Has it looked at when it should be at its end. One look at a time: a later end is found out at the look."""
        one.due_s = one.finish_s()
        if one.due_s < one.rings_s:
            one.rings_s = one.due_s
            self._timeline.call_at(one.due_s, lambda at_s=one.due_s: self._look(one, at_s))  # type: ignore[misc]

    def _look(self, one: Generation, at_s: float) -> None:
        if at_s != one.rings_s:
            return
        one.rings_s = float("inf")
        if one.phase is not Phase.DECODE:
            return
        if one.due_s > self._timeline.now_s + 1e-9:
            self._schedule(one)
            return
        one.tokens = float(one.request.new_tokens)
        self._stop_stepping(one)
        self._end(one, Outcome.COMPLETED)

    def _recover(self, one: Generation, epoch: int, member: Member) -> None:
        """The loss is noticed: another circuit, without that peer."""
        if one.phase is not Phase.STALLED or one.epoch != epoch:
            return
        now_s = self._timeline.now_s
        one.losses += 1
        one.gateway.lost(member.volunteer.facts, now_s)
        self._release(one)
        one.phase, one.lost_before = Phase.FORMING, True
        one.deadline_s = one.recovery_deadline_s(now_s)
        one.backoff_s = min(one.backoff_s, 0.05)
        self._attempt(one)

    def _stop_stepping(self, one: Generation) -> None:
        members = [self._members[hop.peer_id] for hop in one.hops]
        for member in members:
            member.decoding.pop(one.number, None)
            member.prefilling.pop(one.number, None)
        self._reload([member for member in members if member.alive])

    def _renew(self, one: Generation) -> None:
        if one.phase is Phase.ENDED:
            return
        for hop in one.hops:
            member = self._members[hop.peer_id]
            if member.alive:
                member.book.renew(one.key, self._timeline.now_s)
        self._timeline.call(RENEW_EVERY_S, lambda: self._renew(one))

    def _release(self, one: Generation) -> None:
        one.gateway.gives_back(one.key, [hop.peer_id for hop in one.hops], self._timeline.now_s)
        for hop in one.hops:
            member = self._members[hop.peer_id]
            if member.book.release(one.key) is not None and member.alive:
                self._changed(member)

    def _end(self, one: Generation, outcome: Outcome) -> None:
        self._release(one)
        one.phase = Phase.ENDED
        self._accounts.end(one.ended(outcome, self._timeline.now_s))
        del self._running[one.number]

    def _hops(self, route: Route) -> tuple[Hop, ...]:
        count = len(route.hops)
        following = (*route.hops[1:], route.hops[0])
        return tuple(
            Hop(
                hop.peer_id,
                hop.span,
                link_ms(self._places.rtt_ms(hop.peer_id, after.peer_id)) if count > 1 else 0.0,
                self._members[hop.peer_id].volunteer.uplink_mbps,
            )
            for hop, after in zip(route.hops, following, strict=True)
        )
