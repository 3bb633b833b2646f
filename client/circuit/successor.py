"""Successor circuit of a session, where a better one has other spans: the sequence is computed anew there while the
session decodes as before, and it goes over when the successor has come as far.

Hops know nothing of that. To them a successor is another session of the same client, which begins with all that there
is of the sequence. Its tail draws the tokens that the running circuit's draws, since draws depend on seed and position;
one that draws others ends it. Nothing waits for a successor, and nothing is lost with it. `SuccessorCore` decides.
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
from molink.client.epochs.successor_core import (
    FormSuccessor,
    GiveSuccessorUp,
    SequenceLengths,
    SuccessorCore,
    SuccessorDrew,
    SuccessorEffect,
    SuccessorFailed,
    SuccessorOverdue,
    TakeOver,
)
from molink.client.errors import as_said
from molink.peer.wire.protocol import molink_pb2 as pb


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

    @property
    def lengths(self) -> SequenceLengths:
        """Of the session's sequence now, with what waits to be taken."""
        template, tokens = self.template, len(self.tokens.arrived)
        return SequenceLengths(template.prompt_tokens, tokens, template.capacity_tokens)


class Successor:
    """Owner of one attempt. Also the FrameSink of its circuit's frames until the session goes over."""

    def __init__(self, builder: CircuitBuilder, session: MovingSession, planned: PlannedRoute) -> None:
        self._template = pb.SessionDescriptor()
        self._template.CopyFrom(session.template)
        self._template.session = secrets.token_bytes(16)
        self._builder = builder
        self._session = session
        self._planned = planned
        self._asked: list[pb.SessionDescriptor] = []
        """Epochs of which hops may have a lease, the latest start's last."""
        self._circuit: ActiveCircuit | None = None
        self._core = SuccessorCore()
        self._next: SuccessorEffect | None = None
        """What is to be done, outside of callbacks."""
        self._news = asyncio.Event()
        self._is_taken = False

    async def come_level(self) -> None:
        """Returns when the session has gone over.

        Raises:
            HopRefused: it does not come to that.
        """
        self._builder.connection.register(self._template.session, self)
        self._next = self._core.begin(asyncio.get_running_loop().time())
        try:
            async with asyncio.timeout_at(self._core.deadline_s):
                while not self._is_taken:
                    await self._do_next()
        except TimeoutError:
            self._note(self._core.handle(SuccessorOverdue()))
            await self._do_next()
        finally:
            if not self._is_taken:
                self._builder.connection.unregister(self._template.session)
                self._leave()
                if self._session.circuits.is_preparing:
                    self._session.circuits.handle(core.NotPrepared(), asyncio.get_running_loop().time())

    def end(self, reason: str) -> None:
        """The session goes on as it is."""
        self._note(self._core.handle(SuccessorFailed(reason)))

    def on_tokens(self, sender: str, token: pb.Token) -> None:
        circuit, sequence = self._circuit, self._session.tokens.arrived
        if circuit is None or (sender, token.epoch) != (circuit.head.peer_id, circuit.descriptor.epoch):
            return
        is_same = token.position >= len(sequence) or sequence[token.position] == token.token_id
        effect = self._core.handle(SuccessorDrew(token.position, len(sequence), is_same))
        if not isinstance(effect, TakeOver):
            self._note(effect)
            return
        self._is_taken = self._session.take_over(self._template, circuit, token)
        self._news.set()
        if not self._is_taken:
            self.end("its successor drew what cannot be the next token")

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
        self._circuit = None
        route, peers, builder = self._planned.route, self._planned.peers, self._builder
        now_s, circuits = asyncio.get_running_loop().time(), self._session.circuits
        for earlier in self._asked:
            builder.end_session(earlier)
        if circuits.is_preparing:
            circuits.handle(core.NotPrepared(), now_s)
        circuits.handle(core.MoveWanted(route.peer_ids), now_s)
        sequence = tuple(self._session.tokens.arrived)
        descriptor = describe(self._template, route, peers, builder.spec, circuits.last_epoch)
        self._asked.append(descriptor)
        asked = ReservationRequest(descriptor, route, peers, len(sequence))
        circuit = await builder.settle(asked, self._core.deadline_s, _tell_nobody)
        self._asked = [descriptor]
        start = start_of(self._template, self._session.speculation, sequence, circuit.position)
        if not circuit.head.post(start):
            raise HopRefused(circuit.head.peer_id, "lost", "the head takes no more")
        self._circuit = circuit

    def _note(self, effect: SuccessorEffect | None) -> None:
        if effect is not None:
            self._next = effect
            self._news.set()

    async def _do_next(self) -> None:
        """What the core has asked for, or waits until it asks for something.

        Raises:
            HopRefused: a hop has refused, or the core gives the successor up.
        """
        effect, self._next = self._next, None
        match effect:
            case FormSuccessor():
                await self._start()
            case GiveSuccessorUp(reason):
                raise HopRefused("", "move", reason)
            case _:
                self._news.clear()
                await self._news.wait()

    def _leave(self) -> None:
        """Gives back whatever hops may have granted: one that has refused a later start has the lease of an earlier."""
        for descriptor in self._asked:
            self._builder.end_session(descriptor)
            for hop in descriptor.hops:
                link = self._builder.connection.links.find(hop.peer_id)
                if link is not None:
                    release(link, descriptor)


def _tell_nobody(_: str) -> None:
    """What a circuit that nobody waits for is at is told to nobody."""
