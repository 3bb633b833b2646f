"""Standbys of a session: who keeps second copies of its hops' KV caches, chosen and asked beside the generation.

Nothing waits for them. For a hop whose standby is gone, or refuses, another is sought; a hop that is lost has its
standby in its place, if it has one.
"""

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

from molink.client.circuit.circuit_builder import ActiveCircuit
from molink.client.circuit.reserving import REQUEST_TIMEOUT_S, release
from molink.client.epochs.copy_lag import CopyLag, HopCopy
from molink.client.epochs.kept_leases import PlannedRoute
from molink.dht.records.records import PeerView
from molink.peer.wire.link.link import Link, LinkError
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.routing import Route
from molink.routing.routes.copy_forms import CopyForm
from molink.routing.routes.partners import SEEK_AGAIN

SEEK_AFTER_S = 0.25
"""A generation that is over by then has no copies made of it: it would be over before they are of use."""
SILENT_HOP_S = 1.0
"""After a hop did not answer its own client, its standby is sought again so much later."""
HANDS_OVER_WITHIN_S = 1.0
"""A hop that is to be left answers within that; the move does not wait for longer."""
MOST_ROUNDS = 8
"""Of choices for one circuit: where copies are refused again and again, the swarm has no room for them."""
_log = logging.getLogger(__name__)


class StandbySource(Protocol):
    """Source of choices and of links, as a circuit builder is."""

    async def partners(
        self,
        route: Route,
        descriptor: pb.SessionDescriptor,
        hops: Sequence[int],
        taken: frozenset[str],
        without_time: frozenset[str],
    ) -> Mapping[int, tuple[PeerView, CopyForm]]: ...

    async def link_to(self, view: PeerView) -> Link: ...

    def refresh_now(self) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Standby:
    """A peer that keeps a copy of a hop."""

    view: PeerView
    link: Link
    form: CopyForm
    """In which that copy comes."""
    lag: CopyLag = field(default_factory=CopyLag)


@dataclass(frozen=True, slots=True)
class _Unfit:
    """Peers that some copies are not for, as was found out."""

    refused: set[str] = field(default_factory=set)
    """Those that are not asked again for this circuit."""
    without_time: set[str] = field(default_factory=set)
    """Standbys that have not kept up with computing a copy: from now on they get keys and values, or nothing."""


class Standbys:
    """Owner of one session's standbys. Frames of theirs come to the session, which tells."""

    def __init__(self, source: StandbySource, *, wanted: bool) -> None:
        """Without `wanted` there are none but for hops that are to be left (`seek_for`)."""
        self._source = source
        self._wanted = wanted
        self._circuit: ActiveCircuit | None = None
        self._descriptor = pb.SessionDescriptor()
        self._standing: dict[int, Standby] = {}
        """By hop."""
        self._unfit = _Unfit()
        self._wished: dict[str, tuple[PeerView, CopyForm] | None] = {}
        """By the peer of a hop that is to be left, who is to take its place, and in which form the copy goes there;
        None: whoever is chosen."""
        self._lacking = asyncio.Event()
        self._changed = asyncio.Event()
        """Somebody keeps a copy now, or does no longer."""
        self._seeking: asyncio.Task[None] | None = None
        self.were_asked = False
        """Whether any peer may have kept a copy of this session: a later circuit with it goes on upon that."""
        self._looking: asyncio.Task[None] | None = None

    def by_hop(self) -> Mapping[str, HopCopy]:
        """Of the hops' peers those that have a standby, and what it keeps."""
        hops = () if self._circuit is None else self._circuit.route.hops
        return {
            hops[at].peer_id: HopCopy(one.view.peer_id, one.form.name.lower(), one.lag.lacking_tokens)
            for at, one in self._standing.items()
        }

    def begin(self, circuit: ActiveCircuit) -> None:
        """The circuit stands: its hops are given standbys from now on. Who keeps a copy of a hop that is on it as
        before is asked to go on."""
        self.pause()
        self._let_go_of_others(circuit)
        self._circuit = circuit
        self._descriptor = pb.SessionDescriptor()
        self._descriptor.CopyFrom(circuit.descriptor)
        self._lacking.set()
        self._seeking = asyncio.create_task(self._seek(circuit), name="seek standbys")

    def pause(self) -> None:
        """The circuit is over; those who keep copies of it keep them."""
        if self._seeking is not None:
            self._seeking.cancel()
            self._seeking = None

    def substitute(self, peer_id: str) -> str:
        """Who keeps a copy of that peer's hop; empty: nobody."""
        found = self._standing.get(self._hop_of(peer_id))
        return "" if found is None or found.link.closed_because is not None else found.view.peer_id

    def seek_for(self, leaving: Mapping[str, tuple[PeerView, CopyForm] | None]) -> None:
        """The hops of these peers are to be left: each gets a standby, the one that is named or whoever is chosen."""
        self._wished = dict(leaving)
        for at, one in tuple(self._standing.items()):
            wished = leaving.get(self._peer_of(at))
            if one.view.peer_id in leaving or (wished and wished[0].peer_id != one.view.peer_id):
                release(one.link, self._descriptor)
                del self._standing[at]
                self._descriptor.hops[at].standby_facts = b""  # it may be named as that of another hop
        self._lacking.set()

    async def wait_changed(self, wait_s: float) -> None:
        """Until somebody else keeps a copy, or `wait_s` are over."""
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._changed.wait()

    async def hand_over(self, peer_ids: Collection[str]) -> None:
        """These hops are told to send what their standbys lack before all that can wait. When they have answered it is
        on its way, so that standbys that say that they lack nothing know it."""
        circuit = self._circuit
        telling = [
            circuit.links[at].request(
                pb.Request(reserve=pb.Reserve(descriptor=self._descriptor, hop=at, hand_over=True)),
                HANDS_OVER_WITHIN_S,
            )
            for at, hop in enumerate(() if circuit is None else circuit.route.hops)
            if circuit is not None and hop.peer_id in peer_ids and at in self._standing
        ]
        await asyncio.gather(*telling, return_exceptions=True)  # who does not answer hands over all the same

    def circuit_without(
        self, circuit: ActiveCircuit | PlannedRoute, peer_ids: Collection[str]
    ) -> PlannedRoute | None:
        """That circuit with standbys in the places of those of these peers that have one; None: none has. What is kept
        of a hop is of no use on a circuit on which its peer is another hop."""
        hops, peers = list(circuit.route.hops), dict(circuit.peers)
        copied = () if self._circuit is None else self._circuit.route.hops
        for at, (hop, one) in enumerate(zip(circuit.route.hops, copied, strict=False)):
            is_copied = (hop.peer_id, hop.span) == (one.peer_id, one.span)
            if is_copied and hop.peer_id in peer_ids and self.substitute(hop.peer_id):
                view = self._standing[at].view
                hops[at] = replace(hop, peer_id=view.peer_id, cold_spans=())
                peers[view.peer_id] = view
        if hops == list(circuit.route.hops):
            return None
        return PlannedRoute(replace(circuit.route, hops=tuple(hops)), peers)

    def lose(self, peer_id: str) -> bool:
        """That peer keeps its copy no longer, or is gone; whether it was a standby."""
        at = next((at for at, one in self._standing.items() if one.view.peer_id == peer_id), None)
        if at is None:
            return False
        del self._standing[at]
        self._descriptor.hops[at].standby_facts = b""
        self._unfit.refused.add(peer_id)
        self._lacking.set()
        self._changed.set()
        return True

    def renew(self, history_tokens: int) -> None:
        """Copies last as long as leases do. Their standbys say how far they have come: who does not catch up with
        computing gets keys and values, or another one is sought; else its copy stays behind."""
        if self._looking is None or self._looking.done():
            standing = tuple(self._standing.values())

            async def look() -> None:
                await asyncio.gather(*(self._renew(one, history_tokens) for one in standing))

            # a task: who cancels what `gather` returns is told that nobody took note
            self._looking = asyncio.create_task(look(), name="renew copies")

    def release(self) -> None:
        """No copy is needed any more."""
        self.pause()
        if self._looking is not None:
            self._looking.cancel()
        for one in self._standing.values():
            release(one.link, self._descriptor)
        self._standing.clear()
        self._unfit.refused.clear()

    async def _renew(self, one: Standby, history_tokens: int) -> None:
        asked = pb.AwaitReady(session=self._descriptor.session, epoch=self._descriptor.epoch, wait_ms=0)
        try:
            response, _ = await one.link.request(pb.Request(await_ready=asked), REQUEST_TIMEOUT_S)
        except LinkError:
            return  # if its link has closed, the session tells
        if response.WhichOneof("body") != "readiness":
            return
        is_late = one.lag.record(history_tokens, response.readiness.held_tokens)
        if is_late and one.form is not CopyForm.KEYS_AND_VALUES:
            self._unfit.without_time.add(one.view.peer_id)
            self._lacking.set()

    def _let_go_of_others(self, circuit: ActiveCircuit) -> None:
        """Those whose hop is not on the circuit that stands now have nothing to keep."""
        before = () if self._circuit is None else self._circuit.route.hops
        now = circuit.route.hops
        for at, one in tuple(self._standing.items()):
            is_same = at < len(now) and now[at].span == before[at].span
            is_hop = circuit.has(one.view.peer_id)
            if not is_same and not is_hop:
                release(one.link, self._descriptor)
            if not is_same or is_hop:
                del self._standing[at]

    def _hop_of(self, peer_id: str) -> int:
        """The number of that peer's hop; -1 if it has none."""
        hops = () if self._circuit is None else self._circuit.route.hops
        return next((at for at, hop in enumerate(hops) if hop.peer_id == peer_id), -1)

    async def _seek(self, circuit: ActiveCircuit) -> None:
        """Sees that hops have standbys. Where nobody can be one now, the swarm may change: it is looked at again."""
        await asyncio.sleep(SEEK_AFTER_S)
        rounds = fruitless = 0
        while rounds < MOST_ROUNDS:
            with suppress(TimeoutError):
                async with asyncio.timeout(SEEK_AGAIN.after(fruitless) if fruitless else None):
                    await self._lacking.wait()
            self._lacking.clear()
            before = {
                at: (one.view, one.form)
                for at, one in self._standing.items()
                if not self._descriptor.hops[at].standby_facts
            }
            asked = {**before, **await self._chosen(circuit)}
            rounds += bool(asked)
            answered = await asyncio.gather(
                *(self._ask(circuit, at, *choice) for at, choice in asked.items())
            )
            if not all(answered):
                await asyncio.sleep(SILENT_HOP_S)
                self._lacking.set()
            lacks = any(
                at not in self._standing and (self._wanted or hop.peer_id in self._wished)
                for at, hop in enumerate(circuit.route.hops)
            )
            fruitless = fruitless + 1 if lacks else 0
            if fruitless == 1:
                self._source.refresh_now()  # those who came last may not be known to hold their layers yet

    async def _chosen(self, circuit: ActiveCircuit) -> dict[int, tuple[PeerView, CopyForm]]:
        """Who is to keep copies of the hops that have no standby, and in which form."""
        hops = [
            at
            for at in range(len(circuit.route.hops))
            if (kept := self._standing.get(at)) is None
            or (_is_behind(kept, self._unfit.without_time) and self._peer_of(at) not in self._wished)
        ]
        wished = {at: one for at in hops if (one := self._wished.get(self._peer_of(at))) is not None}
        wished = {at: one for at, one in wished.items() if one[0].peer_id not in self._unfit.refused}
        left = [at for at in hops if at not in wished and (self._wanted or self._peer_of(at) in self._wished)]
        if not left:
            return wished
        named = (view.peer_id for view, _ in wished.values())
        standing = (one.view.peer_id for at, one in self._standing.items() if at not in left)
        taken = frozenset((*standing, *self._unfit.refused, *self._wished, *named))
        without_time = frozenset(self._unfit.without_time)
        found = await self._source.partners(circuit.route, self._descriptor, left, taken, without_time)
        return {**wished, **found}

    def _peer_of(self, at: int) -> str:
        return "" if self._circuit is None else self._circuit.route.hops[at].peer_id

    async def _ask(self, circuit: ActiveCircuit, at: int, view: PeerView, form: CopyForm) -> bool:
        """The hop hears who its standby is, and then that one is asked for a copy. Returns whether the hop, whose fault
        that would not be the standby's, has answered."""
        descriptor = self._descriptor
        hop = descriptor.hops[at]
        hop.standby_facts, hop.standby_form = view.facts_record, pb.CopyForm.ValueType(form)
        try:
            link = await self._source.link_to(view)
            told = pb.Reserve(descriptor=descriptor, hop=at)
            await _granted(circuit.links[at], pb.Request(reserve=told))
            self.were_asked, kept = True, self._standing.get(at)
            keeps = kept is not None and kept.view.peer_id == view.peer_id
            await _granted_copy(link, descriptor, at, keeps=keeps)
        except LinkError as error:
            _log.debug("no copy on %s: %s", view.peer_id, error)
            hop.standby_facts = b""
            if error.peer_id == hop.peer_id:
                return False
            self._replace(at, None)
            self._unfit.refused.add(view.peer_id)
            self._lacking.set()
        else:
            self._replace(at, Standby(view, link, form))
        self._changed.set()
        return True

    def _replace(self, at: int, by: Standby | None) -> None:
        """That hop's copy is kept there from now on, or nowhere."""
        before = self._standing.pop(at, None)
        if by is not None:
            self._standing[at] = by
        if before is not None and (by is None or before.view.peer_id != by.view.peer_id):
            release(before.link, self._descriptor)


def _is_behind(standby: Standby, without_time: Collection[str]) -> bool:
    """Whether that copy does not catch up, and could if it came otherwise, or elsewhere."""
    return standby.form is not CopyForm.KEYS_AND_VALUES and standby.view.peer_id in without_time


async def _granted_copy(link: Link, descriptor: pb.SessionDescriptor, hop: int, *, keeps: bool) -> None:
    """Raises LinkError unless that peer keeps a copy of the hop now. Whoever is cancelled meanwhile does not know: what
    it may grant is given back, unless it `keeps` an earlier copy of the hop, which has an owner already."""
    try:
        await _granted(link, pb.Request(reserve=pb.Reserve(descriptor=descriptor, hop=hop, copy=True)))
    except asyncio.CancelledError:
        if not keeps:
            release(link, descriptor)
        raise


async def _granted(link: Link, request: pb.Request) -> None:
    """Raises LinkError unless it is granted."""
    response, _ = await link.request(request, REQUEST_TIMEOUT_S)
    if response.WhichOneof("body") == "refusal":
        raise LinkError(link.peer_id, response.refusal.detail)
