"""Successor circuit of a session, where a better one has other spans: the sequence is computed anew there while the
session decodes as before, and it goes over when the successor has come as far.

Hops know nothing of that. To them a successor is another session of the same client, which begins with all that there
is of the sequence. Its tail draws the tokens that the running circuit's draws, since draws depend on seed and position;
one that draws others ends it. Nothing waits for a successor, and nothing is lost with it.
"""

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from molink.client.circuit import circuit_core as core
from molink.client.circuit.circuit_builder import ActiveCircuit, CircuitBuilder
from molink.client.circuit.reserving import HopRefused, Report, ReservationRequest, describe, release
from molink.client.circuit.session_request import Speculation, start_of
from molink.client.epochs.kept_leases import PlannedRoute
from molink.client.epochs.session_tokens import SessionTokens
from molink.client.errors import as_said
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.routing import Route

STARTS = 2
"""On what there is of the sequence; and, when that is computed, on what has come meanwhile, which is a short chunk."""
WITHIN_S = 20.0
"""A successor that has not come as far by then is given up."""
WORTH = 2.0
"""The tokens that are to come have to gain so many times what the successor takes to compute those before."""
MOST_COMPUTING_S = WITHIN_S / 2
"""A sequence that takes longer is not computed anew: predictions may be wrong by so much."""


@dataclass(frozen=True, slots=True)
class MovingSession:
    """What its moves need of a session."""

    template: pb.SessionDescriptor
    speculation: Speculation
    tokens: SessionTokens
    circuits: core.CircuitCore
    go_over: Callable[[ActiveCircuit], None]
    """That circuit is prepared: from the next token on the session is on it."""
    take_over: Callable[[pb.SessionDescriptor, ActiveCircuit, pb.Token], bool]
    """A circuit of another session, which that template describes, has drawn the token that comes next: from now on the
    session is that one. False: it is no such token, or none is wanted."""
    report: Report


def is_worth_computing(session: MovingSession, standing: Route, other: Route) -> bool:
    """Whether the tokens that are to come gain enough by a route on which those before are computed anew in time:
    predictions are for the prompt, and a longer sequence takes longer in proportion."""
    tokens, template = len(session.tokens.arrived), session.template
    standing_ms = max(standing.tpot_ms, 1000 * session.circuits.measured_s)
    computing_ms = other.ttft_ms * tokens / max(1, template.prompt_tokens)
    gain_ms = (standing_ms - other.tpot_ms) * (template.capacity_tokens - tokens)
    return WORTH * computing_ms < gain_ms and computing_ms <= 1000 * MOST_COMPUTING_S


class Successor:
    """Owner of one attempt. Also the FrameSink of its circuit's frames until the session goes over."""

    def __init__(self, builder: CircuitBuilder, session: MovingSession, planned: PlannedRoute) -> None:
        self._template = pb.SessionDescriptor()
        self._template.CopyFrom(session.template)
        self._template.session = secrets.token_bytes(16)
        self._builder = builder
        self._session = session
        self._planned = planned
        self._descriptor = pb.SessionDescriptor()
        """Of the latest start."""
        self._circuit: ActiveCircuit | None = None
        self._drawn = 0
        """Tokens that have come over the circuit since it was started last."""
        self._fault = ""
        self._news = asyncio.Event()
        self._is_taken = False

    async def come_level(self) -> None:
        """Returns when the session has gone over.

        Raises:
            HopRefused: it does not come to that.
        """
        self._builder.connection.register(self._template.session, self)
        try:
            async with asyncio.timeout(WITHIN_S):
                for _ in range(STARTS):
                    if not self._is_taken:
                        await self._start()
                        await self._until(lambda: self._drawn > 0)
                await self._until(lambda: self._is_taken)
        except TimeoutError:
            raise HopRefused("", "slow", "its successor does not come as far") from None
        finally:
            if not self._is_taken:
                self._builder.connection.unregister(self._template.session)
                self._leave()
                if self._session.circuits.is_preparing:
                    self._session.circuits.handle(core.NotPrepared(), asyncio.get_running_loop().time())

    def end(self, reason: str) -> None:
        """The session goes on as it is."""
        self._fault = self._fault or reason
        self._news.set()

    def on_tokens(self, sender: str, token: pb.Token) -> None:
        circuit, sequence = self._circuit, self._session.tokens.arrived
        if circuit is None or (sender, token.epoch) != (circuit.head.peer_id, circuit.descriptor.epoch):
            return
        self._drawn += 1
        self._news.set()
        if token.position == len(sequence):
            self._is_taken = self._session.take_over(self._template, circuit, token)
            if not self._is_taken:
                self.end("its successor drew what cannot be the next token")
        elif token.position > len(sequence) or sequence[token.position] != token.token_id:
            self.end("its successor draws other tokens")

    def on_failed(self, sender: str, failed: pb.Failed) -> None:
        self._end_with(sender, as_said(failed.detail) or as_said(failed.code))

    def on_leaving(self, sender: str, leaving: pb.Leaving) -> None:
        self._end_with(sender, as_said(leaving.reason))

    def on_link_closed(self, peer_id: str, reason: str) -> None:
        self._end_with(peer_id, as_said(reason))

    def _end_with(self, peer_id: str, reason: str) -> None:
        if peer_id in self._planned.route.peer_ids:
            self.end(f"its successor's hop {peer_id[-8:]} is lost ({reason})")

    async def _start(self) -> None:
        """Has the circuit formed, in an epoch of its own, and steps what its hops do not hold."""
        self._circuit, self._drawn = None, 0
        route, peers, builder = self._planned.route, self._planned.peers, self._builder
        now_s, circuits = asyncio.get_running_loop().time(), self._session.circuits
        builder.end_session(self._descriptor)
        if circuits.is_preparing:
            circuits.handle(core.NotPrepared(), now_s)
        circuits.handle(core.MoveWanted(route.peer_ids), now_s)
        sequence = tuple(self._session.tokens.arrived)
        self._descriptor = describe(self._template, route, peers, builder.spec, circuits.last_epoch)
        asked = ReservationRequest(self._descriptor, route, peers, len(sequence))
        circuit = await builder.settle(asked, now_s + WITHIN_S, _tell_nobody)
        start = start_of(self._template, self._session.speculation, sequence, circuit.position)
        if not circuit.head.post(start):
            raise HopRefused(circuit.head.peer_id, "lost", "the head takes no more")
        self._circuit = circuit

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not self._fault:
            if holds():
                return
            self._news.clear()
            await self._news.wait()
        raise HopRefused("", "move", self._fault)

    def _leave(self) -> None:
        """Gives back whatever hops may have granted."""
        self._builder.end_session(self._descriptor)
        for hop in self._descriptor.hops:
            link = self._builder.connection.links.find(hop.peer_id)
            if link is not None:
                release(link, self._descriptor)


def _tell_nobody(_: str) -> None:
    """What a circuit that nobody waits for is at is told to nobody."""
