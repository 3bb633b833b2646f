"""Standbys of the hops of simulated circuits: chosen, leased, and put in the place of a peer that is gone.

The choice is the product's, and so are the lease books that grant the memory, in which a copy is what it is at a real
peer: gone before a lease is refused, and a lease itself in the epoch in which its peer takes the hop's place. When it
does, and what follows if it cannot, each session's `CircuitCore` decides.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from molink.peer.memory.leases import Lease, Refused
from molink.routing import PartnerChoice, Route
from molink.routing.routes.partners import SEEK_AGAIN
from molink.simnet.swarm.members.accounts import MINUTE_S
from molink.simnet.swarm.members.member import Member
from molink.simnet.swarm.sessions.context import SessionContext
from molink.simnet.swarm.sessions.copying import CopyScheduler, KvCopy
from molink.simnet.swarm.sessions.generation import NOTICED_S, UNREACHABLE_S, Phase, SimulatedGeneration

WHOLE_TOKENS = 2.0
"""A copy that lacks no more is whole by the time that a session has gone over: the rest is on its way."""


class Partnering:
    """The owner of all copies of a world."""

    def __init__(self, context: SessionContext, *, wanted: bool) -> None:
        """Without `wanted` there are none but for hops whose peers leave."""
        self._context = context
        self._wanted = wanted
        self._copying = CopyScheduler(context)
        self._copies: dict[int, dict[int, KvCopy]] = {}
        """By the session's number, by the hop's."""
        self._without: dict[int, dict[int, str]] = {}
        """Hops that have none now, and why there was none at first, in the same way."""
        self._refused: dict[int, set[str]] = {}
        """By the session's number, peers that are not asked again."""
        self._looking: dict[int, int] = {}
        """By the session's number, the turn in which one is sought again."""
        self._seized: dict[int, tuple[int, int]] = {}
        """By the session's number, the turn in which standbys are to be in lost peers' places, and how many."""
        context.timeline.call(MINUTE_S, self._sample)

    def begin(self, one: SimulatedGeneration) -> None:
        """The circuit stands: its hops have standbys sought. Copies of hops that are on it as before go on."""
        turn, count = self._seized.pop(one.number, (0, 0))
        if turn == one.turn:
            self._context.accounts.partners.switches += count
        else:
            self._count_without(one)
        on_it = {hop.peer_id for hop in one.hops}
        for at, copy in tuple(self._copies.setdefault(one.number, {}).items()):
            member = self._context.members[copy.partner]
            is_of_it = at < len(one.hops) and one.hops[at].span == copy.span and copy.partner not in on_it
            if not is_of_it or isinstance(self._granted(one, at, member), Refused):
                self._drop(one, at)
            elif copy.source != one.hops[at].peer_id:
                self._copying.end(copy)
                copy.source = one.hops[at].peer_id
                self._context.accounts.partners.found += 1
        self.seek(one)

    def seek(self, one: SimulatedGeneration, looks: int = 1) -> None:
        """Hops without a partner get one, if there is any. While some have none one is sought again, ever more rarely:
        `looks` counts how often by now."""
        copies = self._copies.setdefault(one.number, {})
        members = self._context.members
        wanting = [self._wanted or members[hop.peer_id].book.gate.is_closed for hop in one.hops]
        hops = [at for at, wants in enumerate(wanting) if wants and at not in copies]
        if one.route is None or not hops:
            return
        taken = frozenset(copy.partner for copy in copies.values()) | self._refused.get(one.number, set())
        choices = one.gateway.partners(one.route, one.demand, hops, taken, self._context.now_s)
        without = self._without.setdefault(one.number, {})
        for at, choice in zip(hops, choices, strict=True):
            found = self._asked(one, at, choice)
            if isinstance(found, str):
                if self._wanted:
                    without.setdefault(at, found)
                continue
            without.pop(at, None)
            copies[at] = found
            if one.phase is Phase.DECODE:
                self._copying.begin(found)
        if without and self._wanted:
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

    def substitute(self, one: SimulatedGeneration, peer_id: str) -> str:
        """Who keeps a copy of that peer's hop; empty: nobody."""
        copy = self._copies.get(one.number, {}).get(_hop_of(one, peer_id))
        return "" if copy is None else copy.partner

    def seize(self, one: SimulatedGeneration, peer_id: str) -> None:
        """The circuit that is asked for next: a standby in the place of the peer that is gone, with the lines that it
        has."""
        at, (before, count) = _hop_of(one, peer_id), self._seized.get(one.number, (one.turn, 0))
        copy = self._copies[one.number].pop(at)
        self._copying.end(copy)
        self._context.members[copy.partner].copies.pop(one.number)
        if one.route is None:
            return
        route = _with_standby(one.route, copy)
        one.planned(route, self._context.hops_of(route), min(one.computed, int(copy.lines)))
        self._seized[one.number] = one.turn, 1 + (count if before == one.turn - 1 else 0)

    def hand_over(self, one: SimulatedGeneration, left: Mapping[str, PartnerChoice | None]) -> Route | None:
        """The circuit to go over to from one whose hops are to be left, for peers that are chosen or for standbys,
        once these have all of the hops' caches: until then they get them before all that can wait. None while they
        have not, or there are none."""
        copies = self._copies.setdefault(one.number, {})
        ready, route = True, one.route
        for peer_id, choice in left.items():
            at = _hop_of(one, peer_id)
            if choice is not None and (at not in copies or copies[at].partner != choice.peer_id):
                self._choose(one, at, choice)
            elif at not in copies:
                self.seek(one)
            copy = copies.get(at)
            if copy is None or self._copying.hasten(copy) > WHOLE_TOKENS:
                ready = False
            elif route is not None:
                route = _with_standby(route, copy)
        return route if ready else None

    def _choose(self, one: SimulatedGeneration, at: int, choice: PartnerChoice) -> None:
        """That peer keeps the hop's copy from now on, in place of who does, unless it refuses."""
        if choice.peer_id in self._refused.get(one.number, set()):
            return
        for other, copy in tuple(self._copies[one.number].items()):
            if other == at or copy.partner == choice.peer_id:
                self._drop(one, other)
        found = self._asked(one, at, choice)
        if isinstance(found, KvCopy):
            self._copies[one.number][at] = found
            self._copying.begin(found)

    def gone_over(self, one: SimulatedGeneration) -> None:
        """The session is on the circuit that `hand_over` gave."""
        self._seized[one.number] = one.turn, 0
        self.begin(one)
        self.first_token(one)

    def renew(self, one: SimulatedGeneration) -> None:
        """Copies last as leases do, and say how far behind they are."""
        for copy in self._copies.get(one.number, {}).values():
            book = self._context.members[copy.partner].book
            book.copies.renew(copy.key, self._context.now_s)
            book.copies.record_lag(copy.key.session, one.history - int(copy.lines))

    def release(self, one: SimulatedGeneration) -> None:
        """The session is over: so are the copies of it."""
        self._count_without(one)
        self._looking.pop(one.number, None)
        self._seized.pop(one.number, None)
        self._refused.pop(one.number, None)
        for at in tuple(self._copies.get(one.number, {})):
            self._drop(one, at)
        self._copies.pop(one.number, None)

    def _count_without(self, one: SimulatedGeneration) -> None:
        """The circuit of the hops that had none is given up."""
        for reason in self._without.pop(one.number, {}).values():
            self._context.accounts.partners.count_none(reason)

    def _drop(self, one: SimulatedGeneration, at: int) -> None:
        copy = self._copies[one.number].pop(at)
        self._copying.end(copy)
        member = self._context.members[copy.partner]
        member.copies.pop(one.number, None)
        member.book.copies.release(copy.key)

    def _ended(self, member: Member, lease: Lease) -> None:
        """The partner needs the memory, or leaves: another is sought, unless the session itself has given it back."""
        number = int.from_bytes(lease.key.session, "big")
        at = member.copies.pop(number, None)
        if at is None:
            return
        one = self._context.running[number]
        self._copying.end(self._copies[number].pop(at))
        self._context.accounts.partners.lost += 1
        self._seek_after(0.0, one, member)

    def _asked(self, one: SimulatedGeneration, at: int, choice: PartnerChoice) -> KvCopy | str:
        """The copy that a partner has granted, or why there is none."""
        copy = KvCopy.of(one, at, choice)
        if copy is None:
            return str(choice.reason)
        member = self._context.members[copy.partner]
        if not member.alive:
            self._seek_after(UNREACHABLE_S, one, member)
            return "lost"
        member.book.copies.tell_ended(partial(self._ended, member))
        answer = self._granted(one, at, member)
        if isinstance(answer, Refused):
            self._refused.setdefault(one.number, set()).add(member.peer_id)
            return f"refused: {answer.code}"
        self._context.accounts.partners.found += 1
        one.gateway.linked.add(member.peer_id)
        self._context.links.add(frozenset((copy.source, copy.partner)))
        member.copies[one.number] = at
        return copy

    def _granted(self, one: SimulatedGeneration, at: int, member: Member) -> Lease | Refused:
        """Memory for a copy of that hop, in the session's present epoch."""
        book, now_s = member.book, self._context.now_s
        book.expire(now_s)
        book.copies.expire(now_s)
        key, span = one.key, one.hops[at].span
        answer = book.copies.request(key, span, one.demand.tokens, one.gateway.peer_id, now_s)
        kept = self._copies.get(one.number, {}).get(at)
        if kept is not None and isinstance(answer, Lease):
            kept.key = key
        return answer

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
        """By then it is known that the peer keeps its copy no longer; the hop has a partner sought for it, unless the
        circuit is another or about to be."""
        self._refused.setdefault(one.number, set()).add(gone.peer_id)
        turn = one.turn

        def seek() -> None:
            if one.phase is Phase.ENDED:
                return
            if not gone.alive:
                one.gateway.lost(gone.volunteer.facts, self._context.now_s)
            if one.waits_for(Phase.DECODE, turn) or one.waits_for(Phase.PREFILL, turn):
                self.seek(one)

        self._context.timeline.call(wait_s, seek)

    def _sample(self) -> None:
        """What of the leased memory is copies', once a minute."""
        partners = self._context.accounts.partners
        books = [member.book for member in self._context.members.values() if member.alive]
        copied_bytes = sum(book.copies.kv_bytes for book in books)
        leased_bytes = sum(lease.kv_bytes for book in books for lease in book.leases)
        partners.leased_bytes += leased_bytes + copied_bytes
        partners.copy_leased_bytes += copied_bytes
        self._context.timeline.call(MINUTE_S, self._sample)


def _hop_of(one: SimulatedGeneration, peer_id: str) -> int:
    return next(at for at, hop in enumerate(one.hops) if hop.peer_id == peer_id)


def _with_standby(route: Route, copy: KvCopy) -> Route:
    """The route with who keeps the copy in the hop's place."""
    hops = list(route.hops)
    hops[copy.at] = replace(hops[copy.at], peer_id=copy.partner, cold_spans=())
    return replace(route, hops=tuple(hops), tpot_ms=copy.tpot_ms)
