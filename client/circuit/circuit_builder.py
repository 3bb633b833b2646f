"""Forming a circuit: plan, reserve every hop or none, wait until each is ready; if not, again with what was learnt."""

import asyncio
import random
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from molink.client.circuit.blame import BlameLedger, Verdict
from molink.client.circuit.connection import Connection
from molink.client.circuit.quarantine import AVOID_S, Avoidance
from molink.client.circuit.reserving import (
    REQUEST_TIMEOUT_S,
    Asked,
    HopRefused,
    Report,
    describe,
    release,
    report_codec,
    reserve_all,
    wait_ready,
)
from molink.client.circuit.route_selector import Chooser
from molink.client.errors import InvalidRequest, NoCircuit, SwarmUnavailable
from molink.dht.records.records import PeerFacts, PeerView, ServedModel
from molink.peer.wire.link.link import Link
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.protocol.frames import MAX_HEADER_BYTES
from molink.routing import NoCircuit as NoCircuitFound
from molink.routing import Route
from molink.shards.kv.prefix import common_prefix
from molink.shards.spec import ModelSpec

FIRST_BACKOFF_S = 0.05
LONGEST_BACKOFF_S = 1.0
REQUEST_BYTES = 64
"""What a request's header holds beside its descriptor, at most."""
PATIENCE_S = 2.0
"""What a hop's answer may take while there may be others that answer sooner. A dial that takes longer goes on."""
SLOW_S = 10.0
"""A hop that has taken longer is left out for so long, if others can take its place."""
MOST_TAKEN_BACK = 8
"""Peers that are left out of which each is tried alone, before all of them are."""
NEAR = 1.25
"""A circuit of peers that have answered before is preferred if it is charged no more than so many times as much."""


@dataclass(frozen=True, slots=True, eq=False)
class Formed:
    """A circuit whose every hop has granted its lease and is ready."""

    route: Route
    descriptor: pb.SessionDescriptor
    links: tuple[Link, ...]
    peers: Mapping[str, PeerView]
    prefix_tokens: int
    """Tokens of the prompt's beginning that every hop holds in its KV cache."""

    @property
    def head(self) -> Link:
        return self.links[0]

    def has(self, peer_id: str) -> bool:
        """Whether that peer is a hop of it."""
        return any(link.peer_id == peer_id for link in self.links)


class Former:
    """Forms circuits for one model over one connection; remembers who failed."""

    def __init__(self, connection: Connection, spec: ModelSpec) -> None:
        self._connection = connection
        self._spec = spec
        self._avoidance = Avoidance()
        self._blame = BlameLedger()
        self._chooser = Chooser(connection, spec)
        self.prefix_key = secrets.token_bytes(32)
        """With which this client names the blocks of its prompts: peers tell from the names which of its prompts begin
        alike, as they do from activations, and cannot try whether a text that they guess is one of them."""

    def failed(self, circuit: Formed, at_fault: str, accuser: str = "") -> str:
        """A hop of the circuit has failed, as the client saw itself or as `accuser`, another hop, says. Without
        `at_fault` the circuit stood still, and all of its hops answered.

        Returns the peer that is left out of circuits from now on.
        """
        now_s = asyncio.get_running_loop().time()
        if not at_fault:
            avoided, _ = self._avoidance.at(tuple(circuit.peers.values()), now_s)
            verdict = self._blame.stand_still([link.peer_id for link in circuit.links], now_s, avoided)
            if (
                verdict.leave != circuit.head.peer_id
            ):  # which may have no other in its place, then the head goes
                self.avoid(circuit.peers[circuit.head.peer_id].facts, certain=False)
        elif accuser:
            verdict = self._blame.accuse(accuser, at_fault, now_s, self._is_gone)
        else:
            self._chooser.lost(at_fault)
            self._connection.scouts.lost(at_fault)
            self.avoid(circuit.peers[at_fault].facts)
            return at_fault
        self._follow(verdict, circuit.peers)
        return verdict.leave

    def _follow(self, verdict: Verdict, peers: Mapping[str, PeerView], reason: str = "") -> None:
        """Leaves out whom nobody could convict, if others can take its place, and takes back whom it blamed alone."""
        for peer_id in verdict.acquitted:
            self._avoidance.acquit(peer_id)
        certain = self._is_gone(verdict.leave)
        if certain:
            self._chooser.lost(verdict.leave)
        self.avoid(peers[verdict.leave].facts, reason=reason, certain=certain)

    def left(self, descriptor: pb.SessionDescriptor) -> None:
        """A session has left the circuit that was formed for it, and has given its leases back."""
        self._chooser.gives_back(descriptor)

    def avoid(
        self, facts: PeerFacts, seconds: float = AVOID_S, reason: str = "", *, certain: bool = True
    ) -> None:
        """Leaves a peer out of circuits until it announces new facts, at most for `seconds`; if it is not `certain`
        that it failed, only while others can take its place."""
        now_s = asyncio.get_running_loop().time()
        self._avoidance.add(facts, now_s, seconds, reason, certain=certain)

    def _is_gone(self, peer_id: str) -> bool:
        """Whether the client itself has no link to that peer any more."""
        return self._connection.links.find(peer_id) is None

    async def form(self, template: pb.SessionDescriptor, deadline_s: float, report: Report) -> Formed:
        """A ready circuit for the session that `template` describes (its hops are filled in here).

        Raises:
            InvalidRequest: a hop says that no peer could serve such a request.
            NoCircuit: until `deadline_s` (the loop's clock) the peers alive did not cover the model.
            SwarmUnavailable: nobody is there, or all refused until then.
        """
        clock = asyncio.get_running_loop().time
        backoff_s = FIRST_BACKOFF_S
        doubtful = False  # somebody did not answer: others are tried side by side
        invalid: InvalidRequest | None = None
        while True:
            error: NoCircuit | SwarmUnavailable
            wait_s = backoff_s * random.uniform(0.5, 1.5)
            try:
                route, peers = await self._plan(template, doubtful=doubtful)
                report(f"circuit of {len(route.hops)} peers found; reserving memory")
                async with asyncio.timeout_at(deadline_s):
                    return await self._settle(route, peers, template, deadline_s, report)
            except TimeoutError:
                names = ", ".join(peers[hop.peer_id].facts.name for hop in route.hops)
                raise SwarmUnavailable(f"the circuit over {names} was not ready in time") from None
            except (NoCircuit, SwarmUnavailable) as problem:
                if invalid is not None:
                    raise invalid from None
                error = problem
                report(str(problem))
                wait_s = max(wait_s, 0.2)
            except HopRefused as refusal:
                report(str(refusal))
                if refusal.code == "request":
                    if invalid is not None:  # two say so
                        raise invalid from refusal
                    invalid = InvalidRequest(f"peer {refusal}")
                    continue
                busy = refusal.code in ("memory", "busy")
                error = SwarmUnavailable(
                    str(refusal), busy=busy, retry_after_s=max(1.0, refusal.retry_after_s)
                )
                doubtful = doubtful or refusal.code in ("lost", "slow")
            if clock() + wait_s >= deadline_s:
                raise error
            if doubtful:
                self._scout()
            if self._connection.scouts.under_way:
                self._connection.refresh_now()
                await self._connection.scouts.wait(wait_s)
            else:
                await self._connection.refresh_soon(wait_s)
            backoff_s = min(backoff_s * 2, LONGEST_BACKOFF_S)

    def _scout(self) -> None:
        """Tries peers of the model that have not answered yet and are not left out, in any order."""
        views = self._connection.snapshot(self._spec.model_hash)
        avoided, _ = self._avoidance.at(views, asyncio.get_running_loop().time())
        untried = [view for view in views if view.peer_id not in avoided]
        self._connection.scouts.send(random.sample(untried, len(untried)), self._unreachable)

    def _unreachable(self, facts: PeerFacts) -> None:
        self._connection.scouts.lost(facts.peer_id)
        self.avoid(facts, reason="it cannot be reached")

    async def _plan(
        self, template: pb.SessionDescriptor, *, doubtful: bool
    ) -> tuple[Route, Mapping[str, PeerView]]:
        """The route to try next. Where that is `doubtful`, one of peers that have answered goes before all others."""
        views = self._connection.snapshot(self._spec.model_hash)
        if not views:
            raise SwarmUnavailable(self._nobody())
        avoided, shunned = self._avoidance.at(views, asyncio.get_running_loop().time())
        peers = {view.peer_id: view for view in views}
        proven = self._connection.scouts.proven(peers)
        unproven = frozenset(peers) - proven
        try:
            if doubtful:
                route = await self._proven_route(views, template, avoided | unproven)
                if route is not None:
                    return route, peers
            route = await self._chooser.choose(views, template, avoided)
            if doubtful or not proven or unproven.isdisjoint(route.peer_ids):
                return route, peers
            known = await self._proven_route(views, template, avoided | unproven)
            near = known is not None and known.objective_ms <= NEAR * route.objective_ms
            return (known if known is not None and near else route), peers
        except NoCircuitFound as cause:
            first = cause
        # Of two, one of which accuses the other, one is at fault: without the accuser it may do.
        accusers = self._blame.accusers_of(avoided) & peers.keys()
        # Who was only slow comes back before who was part of what went wrong.
        doubts = {
            peer_id: (self._blame.weight(peer_id), -self._avoidance.since_s(peer_id)) for peer_id in avoided
        }
        taken_back = sorted(avoided - shunned, key=doubts.__getitem__)[:MOST_TAKEN_BACK]
        for avoid in (
            (avoided - self._blame.accused()) | accusers | shunned,
            *(avoided - {peer_id} for peer_id in taken_back),
            shunned,
        ):
            try:
                return await self._chooser.choose(views, template, avoid), peers
            except NoCircuitFound:
                continue
        by, said = self._avoidance.last_refusal(avoided) or (None, None)
        left = len(views) - len(avoided)
        raise NoCircuit(self._spec.name, left, first, refused_by=by, refusal=said) from first

    async def _proven_route(
        self, views: Sequence[PeerView], template: pb.SessionDescriptor, avoid: frozenset[str]
    ) -> Route | None:
        try:
            return await self._chooser.choose(views, template, avoid)
        except NoCircuitFound:
            return None

    def _nobody(self) -> str:
        """That nobody serves the model; what is served instead, in case this machine's copy was meant to be that."""
        others = {view.facts.model for view in self._connection.snapshot()}
        names = ", ".join(sorted(map(_identity, others)))
        wanted = f"no peer that serves {_identity(self._spec)} is known yet"
        return f"{wanted}; the swarm serves {names}" if others else wanted

    async def _settle(
        self,
        route: Route,
        peers: Mapping[str, PeerView],
        template: pb.SessionDescriptor,
        deadline_s: float,
        report: Report,
    ) -> Formed:
        """Reserves every hop of the route, all or none, and sees them ready."""
        descriptor = describe(template, route, peers, self._spec)
        if descriptor.ByteSize() + REQUEST_BYTES > MAX_HEADER_BYTES:
            raise InvalidRequest(
                f"the request and the {len(route.hops)} hops of its circuit take {descriptor.ByteSize()} bytes, and "
                f"{MAX_HEADER_BYTES} fit into a message: leave out logit_bias and stop_token_ids"
            )
        asked = Asked(descriptor, route, peers)
        self._chooser.asks(descriptor)
        try:
            links = await reserve_all(self._connection.links, asked, self._patience_s(peers))
            for link in links:
                self._connection.scouts.answered(link.peer_id)
            held = await wait_ready(asked, links, deadline_s, report)
            report_codec(asked, self._spec, report)
        except BaseException as error:
            self._give_back(descriptor)
            if isinstance(error, HopRefused):
                self._learn(error, peers)
            raise
        return Formed(route, descriptor, links, peers, common_prefix(held))

    def _patience_s(self, peers: Mapping[str, PeerView]) -> float:
        """Who has nobody else to turn to waits as long as a dial and a request take at most."""
        return PATIENCE_S if len(peers) > 1 else 2 * REQUEST_TIMEOUT_S

    def _give_back(self, descriptor: pb.SessionDescriptor) -> None:
        """Releases every hop that may have granted, those included whose answer did not come."""
        self._chooser.gives_back(descriptor)
        for hop in descriptor.hops:
            link = self._connection.links.find(hop.peer_id)
            if link is not None:
                release(link, descriptor)

    def _learn(self, refusal: HopRefused, peers: Mapping[str, PeerView]) -> None:
        """Who said no is left out: briefly if it only has no room now, longer if it cannot be reached."""
        view = peers.get(refusal.peer_id)
        if view is None:
            return
        if refusal.accuser:
            verdict = self._blame.accuse(
                refusal.accuser, refusal.peer_id, asyncio.get_running_loop().time(), self._is_gone
            )
            self._follow(verdict, peers, refusal.detail)
            return
        if refusal.code not in ("slow", "lost"):
            self._connection.scouts.answered(refusal.peer_id)
        transient = refusal.code in ("memory", "busy", "epoch")
        seconds = max(0.3, refusal.retry_after_s) if transient else AVOID_S
        if transient and len(peers) == 1:
            return  # there is no other to turn to
        if refusal.code == "slow":
            self.avoid(view.facts, SLOW_S, refusal.detail, certain=False)
            return
        if refusal.code == "lost":
            self._chooser.lost(refusal.peer_id)
            self._connection.scouts.lost(refusal.peer_id)
        self.avoid(view.facts, seconds, refusal.detail or refusal.code)


def _identity(model: ModelSpec | ServedModel) -> str:
    """What must be equal for two peers to serve the same model."""
    numbers = model.dtype if model.quantization == "none" else f"{model.dtype}, {model.quantization}"
    return f"{model.name} in {numbers} (contents {model.content_hash[:12]})"
