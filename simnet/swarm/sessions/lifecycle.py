"""How sessions live: prefill, decode, losses, the end. The owner of all sessions of a world."""

from collections.abc import Iterator, Sequence

from numpy.random import Generator

from molink.client.circuit import circuit_core as core
from molink.client.circuit.session import RENEW_EVERY_S
from molink.client.epochs.kept_leases import PlannedRoute
from molink.peer.memory.leases import LeaseKey
from molink.routing.cost.terms import Demand
from molink.simnet.core.request_load import Request
from molink.simnet.swarm.members.accounts import SessionOutcome
from molink.simnet.swarm.members.member import Member
from molink.simnet.swarm.sessions.context import SessionContext
from molink.simnet.swarm.sessions.forming import CircuitForming
from molink.simnet.swarm.sessions.gateway import SimulatedGateway
from molink.simnet.swarm.sessions.generation import (
    NOTICED_S,
    Phase,
    SimulatedGeneration,
    SimulatedLease,
    Stepping,
)
from molink.simnet.swarm.sessions.guessed_trips import (
    NOTHING_GUESSED,
    GuessedTrips,
    guessed_trips,
    load_of,
    stages_of,
)
from molink.simnet.swarm.sessions.partnering import Partnering
from molink.simnet.swarm.sessions.planned_moves import PlannedMoves
from molink.simnet.swarm.sessions.step_cost import PeerLoad, first_token_ms, own_ms
from molink.simnet.swarm.sessions.succession import SimulatedSuccessor, Succession


class Lifecycle:
    """Drives sessions over the members of a swarm."""

    def __init__(self, context: SessionContext, rng: Generator, *, partners: bool = False) -> None:
        self._context = context
        self._partnering = Partnering(context, wanted=partners)
        self._succession = Succession(
            context,
            decode_on=self._decode_on,
            reload=self._reload,
            took_over=self._took_over,
        )
        self._moves = PlannedMoves(context, self._partnering, self._went_over, self._succession.end)
        self._forming = CircuitForming(
            context,
            rng,
            self._partnering,
            formed=self._start,
            given_back=self._give_back,
            failed=self._end,
        )

    def begin(self, request: Request, gateway: SimulatedGateway, timeout_s: float) -> None:
        """A request comes to a gateway, now."""
        now_s = self._context.now_s
        one = SimulatedGeneration(request, gateway)
        self._context.running[one.number] = one
        self._context.accounts.arrive(one.number, now_s)
        self._context.timeline.call(RENEW_EVERY_S, lambda: self._renew(one))
        self._forming.go_on(one, core.Begin(now_s + timeout_s))

    def peer_leaves(self, member: Member, within_s: float) -> None:
        """A peer says that it leaves, and serves for so long: its sessions go over to others, as far as there are."""
        self._moves.leave(member, within_s)
        for lease in tuple(member.book.leases):
            self._succession.fail(int.from_bytes(lease.key.session, "big"), "a hop is about to leave")

    def peer_gone(self, member: Member, *, told: bool) -> None:
        """A peer is gone: its sessions stall until that is noticed, at once if it has said so."""
        stepping = (*member.decoding, *member.prefilling)
        member.decoding.clear()
        member.prefilling.clear()
        for number in stepping:
            if number in self._context.successors:
                self._succession.fail(number, "a hop is gone")
            elif number in self._context.running:
                self._stall(self._context.running[number], member, told=told)
        self._partnering.peer_gone(member, told=told)

    def _stall(self, one: SimulatedGeneration, member: Member, *, told: bool) -> None:
        if one.phase is Phase.DECODE:
            one.circuit.handle(core.Yielded(), self._context.now_s)
        noticed_s = (
            0.0
            if told
            else min(
                NOTICED_S,
                one.noticed_after_s(_answered_after_s(self._context, one, member), self._context.now_s),
            )
        )
        one.stall(self._context.now_s)
        self._succession.end(one)
        self._stop_stepping(one)
        turn = one.turn
        self._context.timeline.call(noticed_s, lambda: self._recover(one, turn, member))

    def _start(self, one: SimulatedGeneration) -> None:
        """The circuit stands: nothing is kept any more at peers that are not on it."""
        self._release_kept(one, [hop.peer_id for hop in one.hops])
        self._partnering.begin(one)
        self._prefill(one)

    def _prefill(self, one: SimulatedGeneration) -> None:
        """The prompt, or after a loss what is lacking of the history, goes through the circuit: at least the token that
        was under way."""
        members, turn = self._context.members_of(one), one.turn
        one.phase, one.progress.advanced_s = Phase.PREFILL, self._context.now_s
        views = tuple(member.loaded_view(one.number) for member in members)
        lacking = one.history - one.computed
        if one.record.lost_s is not None:
            one.record.recomputed_tokens += lacking
        if self._context.relaying is not None:
            self._context.relaying.begin(one, lacking, self._context.now_s)
        demand = Demand.of(max(one.demand.tokens, lacking), max(1, lacking))
        client_ms = self._context.places.rtt_ms(one.gateway.peer_id, one.hops[0].peer_id)
        prefill_ms = first_token_ms(one.hops, views, self._context.model, demand, client_ms)
        for member in members:
            member.prefilling[one.number] = None
        self._reload(members)
        self._context.timeline.call(prefill_ms / 1000, lambda: self._first_token(one, turn))

    def _first_token(self, one: SimulatedGeneration, turn: int) -> None:
        if not one.waits_for(Phase.PREFILL, turn):
            return
        now_s = self._context.now_s
        members = self._context.members_of(one)
        for member in members:
            member.prefilling.pop(one.number, None)
        one.phase, progress, record = Phase.DECODE, one.progress, one.record
        progress.advanced_s = now_s
        progress.tokens += 1.0
        if record.first_token_s is None:
            record.first_token_s = now_s
        if record.lost_s is not None:
            self._context.accounts.stalls_s.append(now_s - record.lost_s)
            record.lost_s = None
        self._decode_on(one, members)
        self._partnering.first_token(one)

    def _decode_on(self, one: Stepping, members: list[Member], left: Sequence[Member] = ()) -> None:
        """Its tokens come from these from now on, and from those that it has `left` no more."""
        for at, member in enumerate(members):
            member.decoding[one.number] = at
        for guessed in _guesses(self._context, one, members):
            one.progress.guessed = guessed
            one.progress.own_ms = [
                own_ms(hop, member.volunteer.facts, self._context.model, one.demand, guessed.rows)
                for hop, member in zip(one.hops, members, strict=True)
            ]
            one.progress.hop_ms = [0.0] * len(one.hops)
            self._reload([*members, *left])

    def _went_over(self, one: SimulatedGeneration, before: SimulatedLease) -> None:
        """The next token comes over the circuit that was prepared."""
        one.advance(self._context.now_s)
        self._context.accounts.gone_over += 1
        if self._context.relaying is not None:
            self._context.relaying.begin(one, 0, self._context.now_s)
        earlier = [self._context.members[hop.peer_id] for hop in before.hops]
        for member in earlier:
            member.decoding.pop(one.number, None)
        members = self._context.members_of(one)
        self._release_kept(one, [hop.peer_id for hop in one.hops])
        self._decode_on(one, members, [member for member in earlier if member not in members])
        self._partnering.gone_over(one)

    def _took_over(self, successor: SimulatedSuccessor) -> None:
        """The session is the one that was begun anew from now on, and has left its circuit."""
        one, context, now_s = successor.of, self._context, self._context.now_s
        before, left = one.leased, context.members_of(one)
        one.circuit.handle(core.Prepared(), now_s)
        context.accounts.succeeded += 1
        self._partnering.release(one)  # copies are of the session that was
        if context.relaying is not None:
            context.relaying.end(one, now_s)
        for member in left:
            member.decoding.pop(one.number, None)
        one.kept.keep(before)
        one.gateway.gives_back(before.key, [hop.peer_id for hop in before.hops], now_s)
        self._release_kept(one, ())
        context.renumber(one, successor.number)
        one.turn += 1
        one.route, one.hops = successor.route, successor.hops
        if context.relaying is not None:
            context.relaying.begin(one, 0, now_s)
        members = context.members_of(one)
        self._decode_on(one, members, [member for member in left if member not in members])
        self._partnering.begin(one)
        self._partnering.first_token(one)

    def _reload(self, members: list[Member]) -> None:
        """Those that decode on these peers go on at another rate."""
        context, now_s = self._context, self._context.now_s
        touched: dict[int, Stepping] = {}
        for member in members:
            self._context.changed(member)
            if not member.decoding:
                continue
            guessed = (context.stepping(number).progress.guessed.rows - 1 for number in member.decoding)
            load = PeerLoad.of(member.loaded_view(next(iter(member.decoding))), sum(guessed))
            for number, at in member.decoding.items():
                if number not in touched:
                    touched[number] = other = context.stepping(number)
                    other.advance(now_s)
                touched[number].reload(at, load)
        for number in touched:
            if number in context.running:
                self._schedule(context.running[number])

    def _schedule(self, one: SimulatedGeneration) -> None:
        """Has it looked at when it should be at its end. One look at a time: a later end is found out at the look."""
        progress = one.progress
        progress.due_s = due_s = progress.finish_s()
        if due_s < progress.rings_s:
            progress.rings_s = due_s
            self._context.timeline.call_at(due_s, lambda: self._look(one, due_s))

    def _look(self, one: SimulatedGeneration, at_s: float) -> None:
        progress = one.progress
        if at_s != progress.rings_s:
            return
        progress.rings_s = float("inf")
        if one.phase is not Phase.DECODE:
            return
        if progress.due_s > self._context.now_s + 1e-9:
            self._schedule(one)
            return
        progress.end()
        self._stop_stepping(one)
        self._forming.go_on(one, core.End())
        self._end(one, SessionOutcome.COMPLETED)

    def _recover(self, one: SimulatedGeneration, turn: int, member: Member) -> None:
        """The loss is noticed: the session's core knows what is to be done."""
        if not one.waits_for(Phase.STALLED, turn):
            return
        now_s, told = self._context.now_s, not member.volunteer.crashes
        one.record.losses += 1
        one.gateway.lost(member.volunteer.facts, now_s)
        one.gateway.gives_back(one.key, [hop.peer_id for hop in one.hops], now_s)
        standby = self._partnering.substitute(one, member.peer_id)
        first_s = one.predicted_first_s
        has_yielded = one.circuit.first_token_since_s is None
        if not standby and not told and has_yielded and one.route is not None:
            one.kept.try_again(PlannedRoute(one.route, {}), first_s)
        one.kept.keep(one.leased)
        one.phase = Phase.FORMING
        unheard_s = now_s - one.record.stalled_s
        self._forming.go_on(one, core.Lost(unheard_s, first_s, peer_id=member.peer_id, standby=standby))

    def _stop_stepping(self, one: SimulatedGeneration) -> None:
        members = self._context.members_of(one)
        for member in members:
            member.decoding.pop(one.number, None)
            member.prefilling.pop(one.number, None)
        self._reload([member for member in members if member.alive])

    def _renew(self, one: SimulatedGeneration) -> None:
        if one.phase is Phase.ENDED:
            return
        for hop in one.hops:
            member = self._context.members[hop.peer_id]
            if member.alive:
                member.book.used(one.key, self._context.now_s)
                member.book.renew(one.key, self._context.now_s)
        self._partnering.renew(one)
        better = self._succession.look(one)
        if better is not None:
            self._moves.leave_for(one, *better)
        self._context.timeline.call(RENEW_EVERY_S, lambda: self._renew(one))

    def _give_back(self, one: SimulatedGeneration) -> None:
        """Hops that may have granted in the present epoch have nothing of it any more, but for those that have the
        session's KV cache from an earlier one."""
        leased = one.leased
        if self._context.relaying is not None:
            self._context.relaying.end(one, self._context.now_s)
        one.gateway.gives_back(leased.key, [hop.peer_id for hop in leased.hops], self._context.now_s)
        for peer_id in one.kept.sort_out(leased):
            _release(self._context, peer_id, leased.key)

    def _release_kept(self, one: SimulatedGeneration, but: Sequence[str]) -> None:
        for peer_id, leased in one.kept.take_all_but(but):
            _release(self._context, peer_id, leased.key)

    def _end(self, one: SimulatedGeneration, outcome: SessionOutcome) -> None:
        self._succession.end(one)
        one.phase = Phase.ENDED
        is_of_one_circuit = not one.record.losses and one.number == one.taped
        if outcome is SessionOutcome.COMPLETED and is_of_one_circuit:
            one.gateway.served(one.hops[0].peer_id, one.progress.trips, one.progress.tokens - 1)
        self._release_kept(one, ())
        self._partnering.release(one)
        self._context.accounts.end(one.ended(outcome, self._context.now_s))
        del self._context.running[one.number]


def _release(context: SessionContext, peer_id: str, key: LeaseKey) -> None:
    member = context.members[peer_id]
    if member.book.release(key) is not None and member.alive:
        context.changed(member)


def _guesses(context: SessionContext, one: Stepping, members: list[Member]) -> Iterator[GuessedTrips]:
    """What is guessed of a session that begins to decode: nothing as yet, and then as is decided beside the load that
    there is with it."""
    yield NOTHING_GUESSED
    progress = one.progress
    left_tokens = progress.new_tokens - int(progress.tokens)
    if context.speculation is None or left_tokens <= 0:
        return
    facts = [member.volunteer.facts for member in members]
    stages = stages_of(one.hops, facts, context.model, one.demand.tokens / 2)
    beside = (context.stepping(number) for number in members[0].decoding if number != one.number)
    others = [other.progress.guessed for other in beside if other.hops == one.hops]
    load = load_of(others, progress.trip_ms, stages)
    yield guessed_trips(context.speculation, one.taped, left_tokens, stages, load)


def _answered_after_s(context: SessionContext, one: SimulatedGeneration, silent: Member) -> list[float]:
    """When those hops answer their client's question for a sign of life that are still there."""
    peers = [hop.peer_id for hop in one.hops if hop.peer_id != silent.peer_id]
    living = [peer_id for peer_id in peers if context.members[peer_id].alive]
    return [context.places.rtt_ms(one.gateway.peer_id, peer_id) / 1000 for peer_id in living]
