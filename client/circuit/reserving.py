"""Reservation of a route: leases of all hops or of none, and waiting until each is ready."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from molink.client.circuit.scouting import sign_of_life
from molink.client.epochs.patience import LEAST_ANSWER_S
from molink.client.errors import InvalidRequest, as_said
from molink.dht.records.records import PeerFacts, PeerView
from molink.peer.wire.link.link import Link, LinkError
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.protocol.frames import MAX_HEADER_BYTES
from molink.routing import Route
from molink.routing.cost.encodings import encodings_of_circuit
from molink.shards.kv.prefix import common_position
from molink.shards.spec import ModelSpec

REQUEST_BYTES = 64
"""What a request's header holds beside its descriptor, at most."""
REQUEST_TIMEOUT_S = 5.0
PATIENCE_S = 2.0
"""What a hop's answer may take while there may be others that answer sooner. A dial that takes longer goes on."""
READY_POLL_S = 1.0
ON_THEIR_WAY_TOKENS = 32
"""Of a session that goes over: what its client has and its standby's copy has not, at most, as both take some time."""
WARM_POLL_S = 0.5
"""The same of a hop that has nothing to load: its answer says whether its engine stands still."""
READY_WITHIN_S = 0.5
"""What a hop that has all of its layers may take to be ready while its lease's answer waits for that: one round trip
less."""
WARM_READY_S = 10.0
"""Within which a hop that announced all of its layers as loaded is ready: it has its neighbour to dial, no more."""
WARM_READY_PART = 1 / 3
"""The same, of the time that the circuit has left: another one has to stand within that too."""
PROGRESS_S = 20.0
"""Within which a hop that loads layers has loaded something more."""
MOST_RETRY_AFTER_S = 60.0
CODES = frozenset(
    {"memory", "busy", "draining", "span", "epoch", "model", "load", "link", "request", "internal", "ability"}
)

Report = Callable[[str], None]


HistoryTokens: TypeAlias = Callable[[], int]
"""How many tokens a sequence has by now."""


class LinkSource(Protocol):
    """Source of links to peers, as `Links` is."""

    async def to(self, facts: PeerFacts) -> Link: ...


class HopRefused(Exception):
    """A hop said no, or did not answer."""

    def __init__(
        self, peer_id: str, code: str, detail: str, retry_after_s: float = 0.0, accuser: str = ""
    ) -> None:
        super().__init__(f"{peer_id}: {detail}")
        self.peer_id = peer_id
        self.code = code
        """One of CODES, `lost` if it could not be reached, or `slow` if it has not answered yet."""
        self.detail = detail
        self.retry_after_s = retry_after_s
        self.accuser = accuser
        """The hop that says so of this one; empty where the client knows it itself."""


@dataclass(frozen=True, slots=True)
class ReservationRequest:
    """Reservation request: a circuit whose hops are asked for leases."""

    descriptor: pb.SessionDescriptor
    route: Route
    peers: Mapping[str, PeerView]
    history_tokens: int
    """Of the sequence so far, of which at least the last one is stepped."""

    def begins_at(self, held: Sequence[tuple[int, int]]) -> int:
        """Returns the position from which on the sequence is stepped, where hops hold so much of it: 0 where
        log-probabilities of the prompt have yet to come."""
        told = self.descriptor
        scores = told.sampling.HasField("prompt_logprobs") and self.history_tokens == told.prompt_tokens
        return 0 if scores else common_position(held)


@dataclass(frozen=True, slots=True, eq=False)
class GrantedLease:
    """Granted lease of one hop."""

    link: Link
    held_tokens: tuple[int, int] | None = None
    """If the hop is ready, too: of the sequence's beginning it holds no more tokens than the second number, and can
    begin behind so many or fewer, down to the first, or behind none."""


GrantedLeases = tuple[GrantedLease, ...]
"""Of all hops of a circuit, in order."""


async def reserve_all(links: LinkSource, asked: ReservationRequest, patience_s: float) -> GrantedLeases:
    """The leases of all hops. Where no hop has anything to load, each is asked to be ready, too.

    Raises:
        HopRefused: the first one that did not; with the code `slow` if it has not answered within `patience_s`.
    """
    tasks = [
        asyncio.create_task(_reserve(links, asked, hop, patience_s)) for hop in range(len(asked.route.hops))
    ]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
        return tuple(task.result() for task in tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _reserve(links: LinkSource, asked: ReservationRequest, hop: int, patience_s: float) -> GrantedLease:
    peer_id = asked.route.hops[hop].peer_id
    # layers are loaded only once every hop has granted
    is_warm = not any(one.cold_spans for one in asked.route.hops)
    wait_ms = round(READY_WITHIN_S * 1000) if is_warm else 0
    request = pb.Request(reserve=pb.Reserve(descriptor=asked.descriptor, hop=hop, ready_within_ms=wait_ms))
    try:
        async with asyncio.timeout(patience_s):
            link = await links.to(asked.peers[peer_id].facts)
            response, _ = await link.request(request, REQUEST_TIMEOUT_S)
    except TimeoutError:
        raise HopRefused(peer_id, "slow", f"it has not answered within {patience_s:g} s") from None
    except LinkError as error:
        raise HopRefused(peer_id, "lost", as_said(error.reason)) from error
    _require_granted(response, peer_id, asked.descriptor)
    is_ready = response.WhichOneof("body") == "readiness" and response.readiness.ready
    return GrantedLease(link, _held_tokens(response.readiness, asked) if is_ready else None)


async def prepare_all(
    links: LinkSource, asked: ReservationRequest, deadline_s: float, history_tokens: HistoryTokens
) -> tuple[Link, ...]:
    """Tells all hops of the circuit of the next epoch, which begins at each with its first rows; returns the links to
    them when each could begin it. `history_tokens` is asked for the length of the sequence by then: a standby knows
    what its copy lacks only as of what has come last, which may be long ago.

    Raises:
        HopRefused: the first one that could not, with the code `slow` if not by the deadline (the loop's clock).
    """
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(_prepare(links, asked, hop, deadline_s, history_tokens))
            for hop in range(len(asked.route.hops))
        ]
    return tuple(task.result() for task in tasks)


async def _prepare(
    links: LinkSource,
    asked: ReservationRequest,
    hop: int,
    deadline_s: float,
    history_tokens: HistoryTokens,
) -> Link:
    clock, peer_id = asyncio.get_running_loop().time, asked.route.hops[hop].peer_id
    told = pb.Reserve(
        descriptor=asked.descriptor, hop=hop, prepare=True, ready_within_ms=round(READY_POLL_S * 1000)
    )
    try:
        async with asyncio.timeout_at(deadline_s):
            link = await links.to(asked.peers[peer_id].facts)
            while True:
                asked_s, least_tokens = clock(), history_tokens() - ON_THEIR_WAY_TOKENS
                response, _ = await link.request(pb.Request(reserve=told), READY_POLL_S + REQUEST_TIMEOUT_S)
                _require_granted(response, peer_id, asked.descriptor)
                held_tokens = response.readiness.held_tokens  # 0: it is no standby, or does not say
                if response.readiness.ready and (not held_tokens or held_tokens >= least_tokens):
                    return link
                # it answers when that time is over; one that answers sooner is not asked more often for it
                await asyncio.sleep(max(0.0, asked_s + READY_POLL_S - clock()))
    except TimeoutError:
        raise HopRefused(peer_id, "slow", "it could not begin the next epoch in time") from None
    except LinkError as error:
        raise HopRefused(peer_id, "lost", as_said(error.reason)) from error


async def wait_ready(
    asked: ReservationRequest, leases: GrantedLeases, deadline_s: float, report: Report
) -> list[tuple[int, int]]:
    """Waits until the hops of all leases are ready; each one's `GrantedLease.held_tokens`.

    Raises:
        HopRefused: one of them cannot be ready, or takes longer than what it announced lets expect.
    """
    polls = [
        asyncio.create_task(_poll_ready(asked, hop, lease, deadline_s, report))
        for hop, lease in enumerate(leases)
    ]
    try:
        return await asyncio.gather(*polls)
    finally:
        for poll in polls:
            poll.cancel()
        await asyncio.gather(*polls, return_exceptions=True)


def release(
    link: Link, descriptor: pb.SessionDescriptor, further_blocks: bytes = b"", valid_tokens: int = 0
) -> None:
    """Gives a lease back, without waiting for the answer: the peer frees it on receipt, or when it expires.

    `further_blocks` are the names of the session's blocks behind those that the descriptor names, of which the first
    `valid_tokens` tokens of the sequence can be in blocks that are shared.
    """
    ended = pb.Release(
        session=descriptor.session,
        epoch=descriptor.epoch,
        further_blocks=further_blocks,
        valid_tokens=valid_tokens,
    )
    link.post(pb.Request(id=0, release=ended))


async def _poll_ready(
    asked: ReservationRequest, hop: int, lease: GrantedLease, deadline_s: float, report: Report
) -> tuple[int, int]:
    if lease.held_tokens is not None:
        return lease.held_tokens
    link = lease.link
    clock, descriptor = asyncio.get_running_loop().time, asked.descriptor
    loads = bool(asked.route.hops[hop].cold_spans)
    loaded_bytes, stands_since_s = -1, clock()
    warm_until_s = stands_since_s + min(WARM_READY_S, WARM_READY_PART * (deadline_s - stands_since_s))
    while True:
        wait_s = READY_POLL_S if loads else max(0.0, min(WARM_POLL_S, warm_until_s - clock()))
        request = pb.AwaitReady(
            session=descriptor.session, epoch=descriptor.epoch, wait_ms=round(wait_s * 1000)
        )
        try:
            async with asyncio.timeout_at(None if loads else warm_until_s + LEAST_ANSWER_S):
                response, _ = await link.request(
                    pb.Request(await_ready=request), READY_POLL_S + REQUEST_TIMEOUT_S
                )
        except TimeoutError:
            raise HopRefused(link.peer_id, "slow", "it has granted its lease, and is silent now") from None
        except LinkError as error:
            raise HopRefused(link.peer_id, "lost", as_said(error.reason)) from error
        _require_granted(response, link.peer_id, descriptor)
        readiness = response.readiness
        if readiness.ready:
            return _held_tokens(readiness, asked)
        if not loads and sign_of_life(link.peer_id, 0.0, readiness).is_stuck(asked.route.trip_ms / 1000):
            raise HopRefused(link.peer_id, "slow", "its engine stands still")
        done, total = readiness.loaded_bytes, readiness.total_bytes
        report(f"peer {link.peer_id[-8:]} loads its layers: {done / 1e6:.0f} of {total / 1e6:.0f} MB")
        if loads and done > loaded_bytes:
            loaded_bytes, stands_since_s = done, clock()
        if not loads and clock() >= warm_until_s:
            raise HopRefused(link.peer_id, "slow", "it was not ready in time")
        if clock() > deadline_s or clock() - stands_since_s > PROGRESS_S:
            raise HopRefused(link.peer_id, "busy", "it was not ready in time", retry_after_s=5.0)


def _held_tokens(readiness: pb.Readiness, asked: ReservationRequest) -> tuple[int, int]:
    return readiness.least_held_tokens, min(readiness.held_tokens, asked.history_tokens - 1)


def answer_patience_s(peers: Mapping[str, PeerView]) -> float:
    """Returns the deadline of one hop's answer: with nobody else to turn to, that of a dial and a request."""
    return PATIENCE_S if len(peers) > 1 else 2 * REQUEST_TIMEOUT_S


def describe(
    template: pb.SessionDescriptor, route: Route, peers: Mapping[str, PeerView], spec: ModelSpec, epoch: int
) -> pb.SessionDescriptor:
    """The session that `template` describes, in that epoch, which it then is in, on that route."""
    descriptor = pb.SessionDescriptor()
    template.epoch = epoch
    descriptor.CopyFrom(template)
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


def require_sendable(descriptor: pb.SessionDescriptor) -> None:
    """Raises InvalidRequest unless hops can be asked for leases of that session in one message."""
    if descriptor.ByteSize() + REQUEST_BYTES > MAX_HEADER_BYTES:
        raise InvalidRequest(
            f"the request and the {len(descriptor.hops)} hops of its circuit take {descriptor.ByteSize()} bytes, "
            f"and {MAX_HEADER_BYTES} fit into a message: leave out logit_bias and stop_token_ids"
        )


def report_codec(asked: ReservationRequest, spec: ModelSpec, report: Report) -> None:
    """Reports how many links have the codec that was asked for, since not every peer takes part."""
    codec = asked.descriptor.activation_codec
    if not codec:
        return
    announced = [asked.peers[hop.peer_id].facts.activation_codecs for hop in asked.descriptor.hops]
    links = encodings_of_circuit(codec, spec.dtype, announced)[:-1]
    report(f"activations go as {codec} over {links.count(codec)} of {len(links)} links")


def _require_granted(response: pb.Response, peer_id: str, descriptor: pb.SessionDescriptor) -> None:
    """A hop may say that it or another of the circuit refuses, in one of the known ways, and nothing else."""
    if response.WhichOneof("body") != "refusal":
        return
    refusal = response.refusal
    accuses = refusal.peer_id != peer_id and any(hop.peer_id == refusal.peer_id for hop in descriptor.hops)
    raise HopRefused(
        refusal.peer_id if accuses else peer_id,
        refusal.code if refusal.code in CODES else "internal",
        as_said(refusal.detail),
        retry_after_s=min(refusal.retry_after_ms / 1000, MOST_RETRY_AFTER_S),
        accuser=peer_id if accuses else "",
    )
