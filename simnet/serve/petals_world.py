"""Serving the way of Petals (Borzunov et al., 2022): the client is in the middle, and every session steps alone.

The client computes embedding and language-model head; for each step and server it sends hidden states and gets them
back. A server takes one request after the other. All clients stand at one machine, behind one uplink.
"""

from collections import deque
from dataclasses import dataclass
from functools import partial

from molink.peer.wire.transmission.classes import TrafficClass
from molink.shards.spec import Span
from molink.simnet.core.channels import Channels
from molink.simnet.core.frames import SimulatedFrame, activations_bytes
from molink.simnet.core.request_desk import RequestDesk
from molink.simnet.core.request_load import Request
from molink.simnet.core.serving_world import SimulatedCircuit
from molink.simnet.core.simulated_peer import ComputeS
from molink.simnet.core.timeline import Timeline
from molink.simnet.core.wire import Wire
from molink.simnet.devices.devices import SequenceChunk, work_of

SENDING = "concurrent"
"""Each request is a call of its own: all share the line."""


@dataclass(slots=True)
class _Session:
    """A session and its step that is under way."""

    request: Request
    tokens: int
    """That this step adds."""
    rows: int = 0
    """In the servers' KV caches before it."""
    server: int = 0
    """That has the step, or gets it."""


class _Server:
    """Takes one request after the other."""

    def __init__(self, world: "PetalsWorld", span: Span, compute_s: ComputeS) -> None:
        self.busy_s = 0.0
        self._world = world
        self._span = span
        self._compute_s = compute_s
        self._queue: deque[_Session] = deque()
        self._busy = False

    def take(self, session: _Session) -> None:
        self._queue.append(session)
        self._begin()

    def _begin(self) -> None:
        if self._busy or not self._queue:
            return
        self._busy = True
        session = self._queue.popleft()
        work = work_of([SequenceChunk(session.tokens, session.rows)])
        taken_s = self._compute_s(self._span, work, 0)
        self._world.timeline.call(taken_s, lambda: self._computed(session, taken_s))

    def _computed(self, session: _Session, taken_s: float) -> None:
        self.busy_s += taken_s
        self._busy = False
        self._world.answer(session)
        self._begin()


class PetalsWorld:
    """Owner of the servers, and of the clients between them."""

    def __init__(self, plan: SimulatedCircuit, timeline: Timeline) -> None:
        self.timeline = timeline
        self._plan = plan
        self.desk = RequestDesk(timeline, plan.kv_tokens, plan.most_sessions, self._start)
        stages = zip(plan.spans, plan.compute_s, strict=True)
        self.peers = [_Server(self, span, compute_s) for span, compute_s in stages]
        rates = (*plan.uplink_mbps, plan.uplink_mbps[0])
        self.channels = [
            Channels(timeline, Wire(rate_mbps, plan.jitter_ms, plan.seed + at), SENDING)
            for at, rate_mbps in enumerate(rates)
        ]
        for server, peer in enumerate(self.peers):
            delay_s, back_s = plan.delay_s[0][server], plan.delay_s[server][0]
            client_wire, wire = self.channels[-1].wire, self.channels[server].wire
            self.channels[-1].open(delay_s, back_s, wire, peer.take)
            self.channels[server].open(back_s, delay_s, client_wire, self._returned)

    def check(self) -> None:
        """Raises AssertionError where bytes, memory or requests are not conserved."""
        self.desk.check()
        for channels in self.channels:
            channels.check(self.timeline.now_s)

    def answer(self, session: _Session) -> None:
        """A server's answer goes to the client."""
        self._post(self.channels[session.server], 0, session)

    def _start(self, request: Request) -> None:
        self._send(_Session(request, request.prompt_tokens))

    def _send(self, session: _Session) -> None:
        self._post(self.channels[-1], session.server, session)

    def _post(self, channels: Channels, link: int, session: _Session) -> None:
        traffic_class = TrafficClass.DECODE if session.rows else TrafficClass.PREFILL
        size_bytes = activations_bytes(1, session.tokens, self._plan.spec.activation_bytes)
        whose = (session.request.number.to_bytes(16, "big"),)
        if not channels.post(link, SimulatedFrame(traffic_class, size_bytes, whose, session)):
            channels.when_room(partial(self._post, channels, link, session))

    def _returned(self, session: _Session) -> None:
        """The client has a server's answer: on to the next one, or a token is drawn."""
        session.server += 1
        if session.server < len(self.peers):
            self._send(session)
            return
        session.server = 0
        session.rows += session.tokens
        session.tokens = 1
        if self.desk.token(session.request.number):
            self.desk.let_in()
        else:
            self._send(session)
