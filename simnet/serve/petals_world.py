"""Serving the way of Petals (Borzunov et al., 2022): the client is in the middle, and every session steps alone.

The client computes embedding and language-model head; for each step and server it sends hidden states and gets them
back. A server takes one request after the other. All clients stand at one machine, behind one uplink.
"""

from collections import deque
from dataclasses import dataclass

from molink.peer.memory.leases import LeaseKey
from molink.simnet.core import frames
from molink.simnet.core.channels import Channels
from molink.simnet.core.frames import SimulatedFrame, SimulatedRow
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
class _Progress:
    """How far a session is."""

    request: Request
    rows: int = 0
    """In the servers' KV caches."""
    step: int = 0
    server: int = 0
    """That has the step, or gets it."""


class _Server:
    """Takes one request after the other."""

    def __init__(self, world: "PetalsWorld", number: int, compute_s: ComputeS) -> None:
        self.busy_s = 0.0
        self._world = world
        self._number = number
        self._compute_s = compute_s
        self._queue: deque[SimulatedRow] = deque()
        self._busy = False

    def take(self, row: SimulatedRow) -> None:
        self._queue.append(row)
        self._begin()

    def _begin(self) -> None:
        if self._busy or not self._queue:
            return
        self._busy = True
        row = self._queue.popleft()
        taken_s = self._compute_s(work_of([SequenceChunk(row.count, self._world.context(row.key))]), 0)
        self._world.timeline.call(taken_s, lambda: self._computed(row, taken_s))

    def _computed(self, row: SimulatedRow, taken_s: float) -> None:
        self.busy_s += taken_s
        self._busy = False
        self._world.back(self._number, row)
        self._begin()


class PetalsWorld:
    """Owner of the servers, and of the clients between them."""

    def __init__(self, plan: SimulatedCircuit, timeline: Timeline) -> None:
        self.timeline = timeline
        self._plan = plan
        self._sessions: dict[LeaseKey, _Progress] = {}
        self.desk = RequestDesk(timeline, plan.kv_tokens, plan.most_sessions, self._start)
        self.peers = [_Server(self, number, compute_s) for number, compute_s in enumerate(plan.compute_s)]
        rates = (*plan.uplink_mbps, plan.uplink_mbps[0])
        self.channels = [
            Channels(timeline, Wire(rate_mbps, plan.jitter_ms, plan.seed + at), SENDING)
            for at, rate_mbps in enumerate(rates)
        ]
        for server in range(len(self.peers)):
            delay_s, back_s = plan.delay_s[0][server], plan.delay_s[server][0]
            client_wire, wire = self.channels[-1].wire, self.channels[server].wire
            self.channels[-1].open(delay_s, back_s, wire, self._deliver(server))
            self.channels[server].open(back_s, delay_s, client_wire, self._returned)

    def check(self) -> None:
        """Raises AssertionError where bytes, memory or requests are not conserved."""
        self.desk.check()
        for channels in self.channels:
            channels.check(self.timeline.now_s)

    def context(self, key: LeaseKey) -> int:
        """Tokens before the step that the session takes."""
        return self._sessions[key].rows

    def back(self, server: int, row: SimulatedRow) -> None:
        """A server's answer goes to the client."""
        self._post(self.channels[server], 0, row)

    def _start(self, request: Request) -> None:
        key = LeaseKey(request.number.to_bytes(16, "big"), 1)
        self._sessions[key] = _Progress(request)
        self._send(SimulatedRow(key, 0, request.prompt_tokens, sample=True, prefill=True))

    def _send(self, row: SimulatedRow) -> None:
        self._post(self.channels[-1], self._sessions[row.key].server, row)

    def _post(self, channels: Channels, link: int, row: SimulatedRow) -> None:
        frame = frames.activations((row,), self._plan.spec.activation_bytes, row.prefill)
        if not channels.post(link, frame):
            channels.when_room(lambda: self._post(channels, link, row))

    def _deliver(self, server: int) -> frames.Deliver:
        return lambda frame: self.peers[server].take(frame.rows[0])

    def _returned(self, frame: SimulatedFrame) -> None:
        """The client has a server's answer: on to the next one, or a token is drawn."""
        [row] = frame.rows
        session = self._sessions[row.key]
        session.server += 1
        if session.server < len(self.peers):
            self._send(row)
            return
        session.server = 0
        session.rows += row.count
        session.step += 1
        if self.desk.token(session.request.number):
            del self._sessions[row.key]
            self.desk.let_in()
        else:
            self._send(SimulatedRow(row.key, session.step, 1, sample=True, prefill=False))
