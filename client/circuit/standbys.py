"""Standbys of a session: who keeps second copies of its hops' KV caches, chosen and asked beside the generation.

Nothing waits for them. For a hop whose standby is gone, or refuses, another is sought; a hop that is lost has its
standby in its place, if it has one.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from molink.client.circuit.circuit_builder import ActiveCircuit
from molink.client.circuit.kept_leases import PlannedRoute
from molink.client.circuit.reserving import REQUEST_TIMEOUT_S, release
from molink.dht.records.records import PeerView
from molink.peer.wire.link.link import Link, LinkError
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.routing import Route
from molink.routing.routes.copy_forms import CopyForm

SEEK_AFTER_S = 0.25
"""A generation that is over by then has no copies made of it: it would be over before they are of use."""
MOST_ROUNDS = 8
"""Of choices for one circuit: where copies are refused again and again, the swarm has no room for them."""
_log = logging.getLogger(__name__)


class StandbySource(Protocol):
    """Source of choices and of links, as a circuit builder is."""

    async def partners(
        self, route: Route, descriptor: pb.SessionDescriptor, hops: Sequence[int], taken: frozenset[str]
    ) -> Mapping[int, tuple[PeerView, CopyForm]]: ...

    async def link_to(self, view: PeerView) -> Link: ...


@dataclass(frozen=True, slots=True, eq=False)
class Standby:
    """A peer that keeps a copy of a hop."""

    view: PeerView
    link: Link
    form: CopyForm
    """In which that copy comes."""


class Standbys:
    """Owner of one session's standbys. Frames of theirs come to the session, which tells."""

    def __init__(self, source: StandbySource, *, wanted: bool) -> None:
        """Without `wanted` there never are any."""
        self._source = source
        self._wanted = wanted
        self._circuit: ActiveCircuit | None = None
        self._descriptor = pb.SessionDescriptor()
        self._standing: dict[int, Standby] = {}
        """By hop."""
        self._refused: set[str] = set()
        """Peers that are not asked again for this circuit."""
        self._lacking = asyncio.Event()
        self._seeking: asyncio.Task[None] | None = None

    @property
    def peer_ids(self) -> tuple[str, ...]:
        """Of those that keep a copy now."""
        return tuple(one.view.peer_id for one in self._standing.values())

    def by_hop(self) -> Mapping[str, str]:
        """Of the hops' peers those that have a standby, and which."""
        hops = () if self._circuit is None else self._circuit.route.hops
        return {hops[at].peer_id: one.view.peer_id for at, one in self._standing.items()}

    def begin(self, circuit: ActiveCircuit) -> None:
        """The circuit stands: its hops are given standbys from now on. Who keeps a copy of a hop that is on it as
        before is asked to go on."""
        self.pause()
        if not self._wanted:
            return
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

    def take_over(self, peer_id: str) -> PlannedRoute:
        """The circuit with the standby in that peer's place; it is a standby no more.

        Raises:
            KeyError: there is none.
        """
        circuit = self._circuit
        if circuit is None:
            raise KeyError(peer_id)
        at = self._hop_of(peer_id)
        view = self._standing.pop(at).view
        hops = list(circuit.route.hops)
        hops[at] = replace(hops[at], peer_id=view.peer_id, cold_spans=())
        return PlannedRoute(replace(circuit.route, hops=tuple(hops)), {**circuit.peers, view.peer_id: view})

    def lose(self, peer_id: str) -> bool:
        """That peer keeps its copy no longer, or is gone; whether it was a standby."""
        at = next((at for at, one in self._standing.items() if one.view.peer_id == peer_id), None)
        if at is None:
            return False
        del self._standing[at]
        self._refused.add(peer_id)
        self._lacking.set()
        return True

    def renew(self) -> None:
        """Copies last as long as leases do."""
        for one in self._standing.values():
            asked = pb.AwaitReady(session=self._descriptor.session, epoch=self._descriptor.epoch, wait_ms=0)
            one.link.post(pb.Request(id=0, await_ready=asked))

    def release(self) -> None:
        """No copy is needed any more."""
        self.pause()
        for one in self._standing.values():
            release(one.link, self._descriptor)
        self._standing.clear()
        self._refused.clear()

    def _let_go_of_others(self, circuit: ActiveCircuit) -> None:
        """Those whose hop is not on the circuit that stands now have nothing to keep."""
        before = () if self._circuit is None else self._circuit.route.hops
        now = circuit.route.hops
        for at, one in tuple(self._standing.items()):
            is_same = at < len(now) and now[at].span == before[at].span
            if not is_same or circuit.has(one.view.peer_id):
                release(one.link, self._descriptor)
                del self._standing[at]

    def _hop_of(self, peer_id: str) -> int:
        """The number of that peer's hop; -1 if it has none."""
        hops = () if self._circuit is None else self._circuit.route.hops
        return next((at for at, hop in enumerate(hops) if hop.peer_id == peer_id), -1)

    async def _seek(self, circuit: ActiveCircuit) -> None:
        await asyncio.sleep(SEEK_AFTER_S)
        for _ in range(MOST_ROUNDS):
            await self._lacking.wait()
            self._lacking.clear()
            before = {
                at: (one.view, one.form) for at, one in self._standing.items() if not self._is_asked(at)
            }
            hops = [at for at in range(len(circuit.route.hops)) if at not in self._standing]
            taken = frozenset((*self.peer_ids, *self._refused))
            found = await self._source.partners(circuit.route, self._descriptor, hops, taken) if hops else {}
            asked = {**before, **found}
            await asyncio.gather(*(self._ask(circuit, at, *choice) for at, choice in asked.items()))

    def _is_asked(self, at: int) -> bool:
        """Whether the hop's standby has been asked in this epoch."""
        return bool(self._descriptor.hops[at].standby_facts)

    async def _ask(self, circuit: ActiveCircuit, at: int, view: PeerView, form: CopyForm) -> None:
        """The hop hears who its standby is, and then that one is asked for a copy."""
        hop = self._descriptor.hops[at]
        hop.standby_facts, hop.standby_form = view.facts_record, pb.CopyForm.ValueType(form)
        try:
            link = await self._source.link_to(view)
            told = pb.Reserve(descriptor=self._descriptor, hop=at)
            await _granted(circuit.links[at], pb.Request(reserve=told))
            asked = pb.Reserve(descriptor=self._descriptor, hop=at, copy=True)
            await _granted(link, pb.Request(reserve=asked))
        except LinkError as error:
            _log.debug("no copy on %s: %s", view.peer_id, error)
            hop.standby_facts = b""
            self._standing.pop(at, None)
            self._refused.add(view.peer_id)
            self._lacking.set()
        else:
            self._standing[at] = Standby(view, link, form)


async def _granted(link: Link, request: pb.Request) -> None:
    """Raises LinkError unless it is granted."""
    response, _ = await link.request(request, REQUEST_TIMEOUT_S)
    if response.WhichOneof("body") == "refusal":
        raise LinkError(link.peer_id, response.refusal.detail)
