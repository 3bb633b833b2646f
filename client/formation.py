"""Forming a circuit: plan, reserve every hop or none, wait until each is ready; if not, again with what was learnt."""

import asyncio
import random
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from molink.client.avoidance import AVOID_S, Avoidance
from molink.client.choosing import Chooser
from molink.client.connection import Connection
from molink.client.errors import InvalidRequest, NoCircuit, SwarmUnavailable
from molink.dht.records import PeerFacts, PeerView, ServedModel
from molink.peer.codecs import encodings_of_circuit
from molink.peer.link.link import Link, LinkError
from molink.peer.protocol import molink_pb2 as pb
from molink.peer.protocol.frames import MAX_HEADER_BYTES
from molink.routing import NoCircuit as NoCircuitFound
from molink.routing import Route
from molink.shards.prefix import common_prefix
from molink.shards.spec import ModelSpec

REQUEST_TIMEOUT_S = 5.0
READY_POLL_S = 1.0
FIRST_BACKOFF_S = 0.05
LONGEST_BACKOFF_S = 1.0
REQUEST_BYTES = 64
"""What a request's header holds beside its descriptor, at most."""

Report = Callable[[str], None]


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


class HopRefused(Exception):
    """A hop said no, or did not answer."""

    def __init__(self, peer_id: str, code: str, detail: str, retry_after_s: float = 0.0) -> None:
        super().__init__(f"{peer_id}: {detail}")
        self.peer_id = peer_id
        self.code = code
        self.detail = detail
        self.retry_after_s = retry_after_s


class Former:
    """Forms circuits for one model over one connection; remembers who failed."""

    def __init__(self, connection: Connection, spec: ModelSpec) -> None:
        self._connection = connection
        self._spec = spec
        self._avoidance = Avoidance()
        self._chooser = Chooser(connection, spec)
        self.prefix_key = secrets.token_bytes(32)
        """With which this client names the blocks of its prompts: peers tell from the names which of its prompts begin
        alike, as they do from activations, and cannot try whether a text that they guess is one of them."""

    def lost(self, facts: PeerFacts) -> None:
        """A peer of a circuit has failed: it is avoided, and known as less reliable."""
        self._chooser.lost(facts.peer_id)
        self.avoid(facts)

    def left(self, descriptor: pb.SessionDescriptor) -> None:
        """A session has left the circuit that was formed for it, and has given its leases back."""
        self._chooser.gives_back(descriptor)

    def avoid(self, facts: PeerFacts, seconds: float = AVOID_S, reason: str = "") -> None:
        """Leaves a peer out of circuits until it announces new facts, at most for `seconds`."""
        self._avoidance.add(facts, asyncio.get_running_loop().time(), seconds, reason)

    async def form(self, template: pb.SessionDescriptor, deadline_s: float, report: Report) -> Formed:
        """A ready circuit for the session that `template` describes (its hops are filled in here).

        Raises:
            InvalidRequest: a hop says that no peer could serve such a request.
            NoCircuit: until `deadline_s` (the loop's clock) the peers alive did not cover the model.
            SwarmUnavailable: nobody is there, or all refused until then.
        """
        clock = asyncio.get_running_loop().time
        backoff_s = FIRST_BACKOFF_S
        while True:
            error: NoCircuit | SwarmUnavailable
            wait_s = backoff_s * random.uniform(0.5, 1.5)
            try:
                route, peers = await self._plan(template)
                report(f"circuit of {len(route.hops)} peers found; reserving memory")
                async with asyncio.timeout_at(deadline_s):
                    return await self._settle(route, peers, template, deadline_s, report)
            except TimeoutError:
                names = ", ".join(peers[hop.peer_id].facts.name for hop in route.hops)
                raise SwarmUnavailable(f"the circuit over {names} was not ready in time") from None
            except (NoCircuit, SwarmUnavailable) as problem:
                error = problem
                report(str(problem))
                wait_s = max(wait_s, 0.2)
            except HopRefused as refusal:
                report(str(refusal))
                if refusal.code == "request":
                    raise InvalidRequest(f"peer {refusal}") from refusal
                busy = refusal.code in ("memory", "busy")
                error = SwarmUnavailable(
                    str(refusal), busy=busy, retry_after_s=max(1.0, refusal.retry_after_s)
                )
            if clock() + wait_s >= deadline_s:
                raise error
            await self._connection.refresh_soon(wait_s)
            backoff_s = min(backoff_s * 2, LONGEST_BACKOFF_S)

    async def _plan(self, template: pb.SessionDescriptor) -> tuple[Route, Mapping[str, PeerView]]:
        views = self._connection.snapshot(self._spec.model_hash)
        if not views:
            raise SwarmUnavailable(self._nobody())
        avoided, shunned = self._avoidance.at(views, asyncio.get_running_loop().time())
        peers = {view.peer_id: view for view in views}
        try:
            return await self._chooser.choose(views, template, avoided), peers
        except NoCircuitFound as cause:
            first = cause
        try:
            return await self._chooser.choose(views, template, shunned), peers
        except NoCircuitFound:
            by, said = self._avoidance.last_refusal(avoided) or (None, None)
            left = len(views) - len(avoided)
            raise NoCircuit(self._spec.name, left, first, refused_by=by, refusal=said) from first

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
        descriptor = _describe(template, route, peers, self._spec)
        if descriptor.ByteSize() + REQUEST_BYTES > MAX_HEADER_BYTES:
            raise InvalidRequest(
                f"the request and the {len(route.hops)} hops of its circuit take {descriptor.ByteSize()} bytes, and "
                f"{MAX_HEADER_BYTES} fit into a message: leave out logit_bias and stop_token_ids"
            )
        self._chooser.asks(descriptor)
        asked = [
            self._reserve(descriptor, hop, peers[one.peer_id].facts) for hop, one in enumerate(route.hops)
        ]
        try:
            answers = await asyncio.gather(*asked, return_exceptions=True)
            _raise_first(answers)
            links = tuple(answer for answer in answers if not isinstance(answer, BaseException))
            held = await self._wait_ready(descriptor, links, deadline_s, report)
            _report_codec(descriptor, peers, self._spec, report)
        except BaseException as error:
            self._give_back(descriptor)
            if isinstance(error, HopRefused):
                self._learn(error, peers)
            raise
        return Formed(route, descriptor, links, peers, common_prefix(held))

    async def _reserve(self, descriptor: pb.SessionDescriptor, hop: int, facts: PeerFacts) -> Link:
        try:
            link = await self._connection.links.to(facts)
            request = pb.Request(reserve=pb.Reserve(descriptor=descriptor, hop=hop))
            response, _ = await link.request(request, REQUEST_TIMEOUT_S)
        except LinkError as error:
            raise HopRefused(facts.peer_id, "lost", error.reason) from error
        _require_granted(response, facts.peer_id)
        return link

    async def _wait_ready(
        self, descriptor: pb.SessionDescriptor, links: tuple[Link, ...], deadline_s: float, report: Report
    ) -> list[tuple[int, int]]:
        """Of each hop how many tokens of the prompt's beginning it holds already: at least and at most, or none."""
        polls = [asyncio.create_task(_poll_ready(descriptor, link, deadline_s, report)) for link in links]
        try:
            return await asyncio.gather(*polls)
        finally:
            for poll in polls:
                poll.cancel()
            await asyncio.gather(*polls, return_exceptions=True)

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
        transient = refusal.code in ("memory", "busy", "epoch")
        seconds = max(0.3, refusal.retry_after_s) if transient else AVOID_S
        if transient and len(peers) == 1:
            return  # there is no other to turn to
        if refusal.code == "lost":
            self._chooser.lost(refusal.peer_id)
        self.avoid(view.facts, seconds, refusal.detail or refusal.code)


def release(link: Link, descriptor: pb.SessionDescriptor, further_blocks: bytes = b"") -> None:
    """Gives a lease back, without waiting for the answer: the peer frees it on receipt, or when it expires.

    `further_blocks` are the names of the session's blocks behind those that the descriptor names.
    """
    ended = pb.Release(session=descriptor.session, epoch=descriptor.epoch, further_blocks=further_blocks)
    link.post(pb.Request(id=0, release=ended))


async def _poll_ready(
    descriptor: pb.SessionDescriptor, link: Link, deadline_s: float, report: Report
) -> tuple[int, int]:
    clock = asyncio.get_running_loop().time
    while True:
        wait_ms = round(READY_POLL_S * 1000)
        asked = pb.AwaitReady(session=descriptor.session, epoch=descriptor.epoch, wait_ms=wait_ms)
        try:
            response, _ = await link.request(pb.Request(await_ready=asked), READY_POLL_S + REQUEST_TIMEOUT_S)
        except LinkError as error:
            raise HopRefused(link.peer_id, "lost", error.reason) from error
        _require_granted(response, link.peer_id)
        readiness = response.readiness
        if readiness.ready:
            held = max(readiness.prefix_tokens, readiness.window_prefix_tokens)
            return readiness.least_prefix_tokens, min(held, descriptor.prompt_tokens - 1)
        done, total = readiness.loaded_bytes, readiness.total_bytes
        report(f"peer {link.peer_id[-6:]} loads its layers: {done / 1e6:.0f} of {total / 1e6:.0f} MB")
        if clock() > deadline_s:
            raise HopRefused(link.peer_id, "busy", "its layers were not loaded in time", retry_after_s=5.0)


def _describe(
    template: pb.SessionDescriptor, route: Route, peers: Mapping[str, PeerView], spec: ModelSpec
) -> pb.SessionDescriptor:
    descriptor = pb.SessionDescriptor()
    descriptor.CopyFrom(template)
    descriptor.epoch += 1
    template.epoch = descriptor.epoch
    descriptor.hops.extend(
        pb.Hop(
            peer_id=hop.peer_id,
            start=hop.span.start,
            stop=hop.span.stop,
            quantization=spec.quantization,
            facts=peers[hop.peer_id].facts_record,
            predicted_compute_ms=hop.compute_ms,
            predicted_link_ms=hop.link_ms,
            uplink_mbps=hop.uplink_mbps or 0.0,
        )
        for hop in route.hops
    )
    return descriptor


def _report_codec(
    descriptor: pb.SessionDescriptor, peers: Mapping[str, PeerView], spec: ModelSpec, report: Report
) -> None:
    """Where a codec was asked for: how many links have it, since not every peer takes part."""
    asked = descriptor.activation_codec
    if not asked:
        return
    announced = [peers[hop.peer_id].facts.activation_codecs for hop in descriptor.hops]
    links = encodings_of_circuit(asked, spec.dtype, announced)[:-1]
    report(f"activations go as {asked} over {links.count(asked)} of {len(links)} links")


def _require_granted(response: pb.Response, peer_id: str) -> None:
    if response.WhichOneof("body") == "refusal":
        refusal = response.refusal
        raise HopRefused(
            refusal.peer_id or peer_id,
            refusal.code,
            refusal.detail,
            retry_after_s=refusal.retry_after_ms / 1000,
        )


def _raise_first(answers: list[Link | BaseException]) -> None:
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer


def _identity(model: ModelSpec | ServedModel) -> str:
    """What must be equal for two peers to serve the same model."""
    numbers = model.dtype if model.quantization == "none" else f"{model.dtype}, {model.quantization}"
    return f"{model.name} in {numbers} (contents {model.content_hash[:12]})"
