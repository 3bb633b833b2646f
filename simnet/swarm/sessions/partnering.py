"""Partners of the hops of simulated circuits: chosen, leased, and put in the place of a peer that is gone.

The choice is the product's, and so are the lease books that grant the memory; copies are leases there like any other,
where real ones are of a class of their own.
"""

from dataclasses import replace

from molink.client.circuit.circuit_core import Refusal
from molink.peer.memory.leases import Refused
from molink.routing import PartnerChoice
from molink.routing.routes.partners import SEEK_AGAIN
from molink.shards.spec import missing_spans
from molink.simnet.swarm.members.accounts import MINUTE_S
from molink.simnet.swarm.members.member import Member
from molink.simnet.swarm.sessions.context import SessionContext
from molink.simnet.swarm.sessions.copying import CopyScheduler, KvCopy
from molink.simnet.swarm.sessions.generation import (
    DIALS_RTT,
    NOTICED_S,
    UNREACHABLE_S,
    Phase,
    SimulatedGeneration,
)


class Partnering:
    """The owner of all copies of a world."""

    def __init__(self, context: SessionContext) -> None:
        self._context = context
        self._copying = CopyScheduler(context)
        self._copies: dict[int, dict[int, KvCopy]] = {}
        """By the session's number, by the hop's."""
        self._without: dict[int, dict[int, str]] = {}
        """Hops that have none now, and why there was none at first, in the same way."""
        self._looking: dict[int, int] = {}
        """By the session's number, the turn in which one is sought again."""
        context.timeline.call(MINUTE_S, self._sample)

    def seek(self, one: SimulatedGeneration, looks: int = 1) -> None:
        """Hops without a partner get one, if there is any. While some have none one is sought again, ever more rarely:
        `looks` counts how often by now."""
        copies = self._copies.setdefault(one.number, {})
        hops = [at for at in range(len(one.hops)) if at not in copies]
        if one.route is None or not hops:
            return
        taken = frozenset(copy.partner for copy in copies.values())
        choices = one.gateway.partners(one.route, one.demand, hops, taken, self._context.now_s)
        without = self._without.setdefault(one.number, {})
        for at, choice in zip(hops, choices, strict=True):
            found = self._asked(one, at, choice)
            if isinstance(found, str):
                without.setdefault(at, found)
                continue
            without.pop(at, None)
            copies[at] = found
            if one.phase is Phase.DECODE:
                self._copying.begin(found)
        if without:
            self._seek_again(one, looks)

    def first_token(self, one: SimulatedGeneration) -> None:
        """The history is computed: it is copied from now on, and what follows."""
        for copy in self._copies.get(one.number, {}).values():
            self._copying.begin(copy)

    def peer_gone(self, member: Member, *, told: bool) -> None:
        """What it has sent stays where it is. What it kept is lost; when that is noticed, other partners are sought."""
        self._copying.end_all(member.peer_id)
        for number, at in member.copies.items():
            one = self._context.running[number]
            self._copying.end(self._copies[number].pop(at))
            self._context.accounts.partners.lost += 1
            self._seek_after(0.0 if told else NOTICED_S, one, member)
        member.copies.clear()

    def take_over(self, one: SimulatedGeneration, gone: Member) -> float | None:
        """A living partner takes the place of the peer that is gone, with the lines that it has; returns the seconds
        until its neighbours have dialled it. None if there is no such partner."""
        at = next(at for at, hop in enumerate(one.hops) if hop.peer_id == gone.peer_id)
        copy = self._copies.get(one.number, {}).pop(at, None)
        if copy is None or one.route is None:
            return None
        context, now_s = self._context, self._context.now_s
        self._copying.end(copy)
        context.members[copy.partner].copies.pop(one.number)
        one.gateway.gives_back(one.key, [gone.peer_id], now_s)
        one.gateway.asks(one.key, [copy.partner], now_s)
        hops = list(one.route.hops)
        hops[at] = replace(hops[at], peer_id=copy.partner)
        one.route = replace(one.route, hops=tuple(hops), tpot_ms=copy.tpot_ms)
        one.hops = context.hops_of(one.route)
        one.computed = min(one.computed, int(copy.lines))
        context.accounts.partners.switches += 1
        return self._dialled_s(one, at)

    def renew(self, one: SimulatedGeneration) -> None:
        """Leases of partners last as those of hops do."""
        for copy in self._copies.get(one.number, {}).values():
            book = self._context.members[copy.partner].book
            book.used(one.key, self._context.now_s)
            book.renew(one.key, self._context.now_s)

    def release(self, one: SimulatedGeneration) -> None:
        """The circuit is given up: so are the copies of it."""
        self._looking.pop(one.number, None)
        for reason in self._without.pop(one.number, {}).values():
            self._context.accounts.partners.count_none(reason)
        for copy in self._copies.pop(one.number, {}).values():
            self._copying.end(copy)
            member = self._context.members[copy.partner]
            del member.copies[one.number]
            member.book.release(one.key)
            self._context.changed(member)

    def _asked(self, one: SimulatedGeneration, at: int, choice: PartnerChoice) -> KvCopy | str:
        """The copy that a partner has granted, or why there is none."""
        partners, now_s = self._context.accounts.partners, self._context.now_s
        copy = KvCopy.of(one, at, choice, self._context.model)
        if copy is None:
            return str(choice.reason)
        member, span = self._context.members[copy.partner], one.hops[at].span
        facts = member.volunteer.facts
        if not member.alive:
            self._seek_after(UNREACHABLE_S, one, member)
            return "lost"
        if missing_spans(span, member.book.held):
            return "refused: span"
        answer = member.request(one.key, span, one.demand.tokens, one.gateway.peer_id, now_s)
        if isinstance(answer, Refused):
            one.gateway.refused(facts, now_s, Refusal(answer.code, answer.retry_after_s), answer.detail)
            return f"refused: {answer.code}"
        partners.found += 1
        one.gateway.linked.add(member.peer_id)
        member.copies[one.number] = at
        self._context.changed(member)
        return copy

    def _seek_again(self, one: SimulatedGeneration, looks: int) -> None:
        """Later the swarm is another: for the circuit that it is now, if that still stands."""
        turn = one.turn
        if self._looking.get(one.number) == turn:
            return
        self._looking[one.number] = turn

        def seek() -> None:
            if self._looking.get(one.number) == turn:
                del self._looking[one.number]
                if self._without.get(one.number):
                    self.seek(one, looks + 1)

        self._context.timeline.call(SEEK_AGAIN.after(looks), seek)

    def _seek_after(self, wait_s: float, one: SimulatedGeneration, gone: Member) -> None:
        """By then it is known that the peer is gone; the hop has a partner sought for it, unless the circuit is another
        or about to be."""
        turn = one.turn

        def seek() -> None:
            if one.phase is Phase.ENDED:
                return
            one.gateway.lost(gone.volunteer.facts, self._context.now_s)
            if one.waits_for(Phase.DECODE, turn) or one.waits_for(Phase.PREFILL, turn):
                self.seek(one)

        self._context.timeline.call(wait_s, seek)

    def _dialled_s(self, one: SimulatedGeneration, at: int) -> float:
        """The neighbours dial the partner side by side; a head's or only hop's neighbour, the gateway, has a link."""
        rtt_ms, count, partner = self._context.places.rtt_ms, len(one.hops), one.hops[at].peer_id
        if count == 1:
            return rtt_ms(one.gateway.peer_id, partner) / 1000
        around = (one.hops[(at - 1) % count].peer_id, one.hops[(at + 1) % count].peer_id)
        return DIALS_RTT * max(rtt_ms(other, partner) for other in around) / 1000

    def _sample(self) -> None:
        """What of the leased memory is copies', once a minute."""
        partners = self._context.accounts.partners
        partners.leased_bytes += sum(
            lease.kv_bytes
            for member in self._context.members.values()
            if member.alive
            for lease in member.book.leases
        )
        partners.copy_leased_bytes += sum(
            copy.kv_bytes for copies in self._copies.values() for copy in copies.values()
        )
        self._context.timeline.call(MINUTE_S, self._sample)
