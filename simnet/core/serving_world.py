"""A circuit of peers that serves requests, in virtual time."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from molink.peer.memory.leases import LeaseKey
from molink.peer.scheduling.decode_forecast import circuit_of
from molink.peer.scheduling.in_flight_limit import InFlightLimit
from molink.peer.scheduling.in_flight_rules import Rule
from molink.peer.scheduling.microbatch import BatchLimits
from molink.peer.scheduling.pipeline import Circuit, PipelineStage
from molink.peer.scheduling.prefill_chunks import Cut, lengths_within
from molink.shards.spec import ModelSpec, Span
from molink.simnet.core.channels import Channels
from molink.simnet.core.frames import FrameKind, SimulatedFrame, SimulatedRow
from molink.simnet.core.request_desk import RequestDesk
from molink.simnet.core.request_load import Request
from molink.simnet.core.sessions import SimulatedSession
from molink.simnet.core.simulated_peer import CircuitPosition, ComputeS, SimulatedPeer
from molink.simnet.core.timeline import Alarm, Timeline
from molink.simnet.core.wire import Wire

StagesOf = Callable[[Request], tuple[PipelineStage, ...]]
"""A request's circuit as its client predicts it."""


@dataclass(frozen=True, slots=True)
class SimulatedCircuit:
    """A simulated circuit, peer by peer in its order."""

    spec: ModelSpec
    spans: tuple[Span, ...]
    compute_s: tuple[ComputeS, ...]
    uplink_mbps: tuple[float, ...]
    delay_s: tuple[tuple[float, ...], ...]
    """One way, from each peer to each."""
    kv_tokens: int
    """That fit the KV cache of every peer."""
    most_sessions: int
    policy: str
    """Of transmission."""
    rule: Rule
    """By which micro-batches circulate."""
    cut: Cut
    """Of prompts."""
    limits: BatchLimits
    stages_of: StagesOf
    opening_s: float = 0.0
    """From when there is room for a request to when its prompt is at the head: reserving, and starting."""
    hand_on_s: float = 0.0
    """At each peer: from when its engine is done to when the output is at the link."""
    to_client_s: float = 0.0
    """A token's way from the head to its client."""
    jitter_ms: float = 0.0
    seed: int = 0


class ServingWorld:
    """Owner of a circuit, its sessions, and the requests that wait for room."""

    def __init__(self, plan: SimulatedCircuit, timeline: Timeline) -> None:
        self._plan = plan
        self.timeline = timeline
        self._sessions: dict[LeaseKey, SimulatedSession] = {}
        self.desk = RequestDesk(timeline, plan.kv_tokens, plan.most_sessions, self._open_session)
        self.desk.to_client_s = plan.to_client_s
        self._in_flight_limit: InFlightLimit[LeaseKey] = InFlightLimit(plan.rule, plan.limits.max_sessions)
        self._circuit: Circuit = tuple((f"{hop}", span) for hop, span in enumerate(plan.spans))
        self._look = Alarm(timeline, self._look_again)
        self.channels = [
            Channels(timeline, Wire(rate_mbps, plan.jitter_ms, plan.seed + hop), plan.policy)
            for hop, rate_mbps in enumerate(plan.uplink_mbps)
        ]
        hops = len(plan.spans)
        self.peers = [
            SimulatedPeer(
                timeline,
                CircuitPosition(hop, hops, span, plan.spec.activation_bytes, plan.hand_on_s),
                self._sessions,
                self.channels[hop],
                plan.compute_s[hop],
                plan.limits,
            )
            for hop, span in enumerate(plan.spans)
        ]
        self._connect()

    def check(self) -> None:
        """Raises AssertionError where bytes, memory or requests are not conserved."""
        self.desk.check()
        for channels in self.channels:
            channels.check(self.timeline.now_s)
        if not self._sessions and any(peer.waiting for peer in self.peers):
            raise AssertionError("steps of ended sessions wait")

    def _open_session(self, request: Request) -> None:
        self.timeline.call(self._plan.opening_s, lambda: self._start(request))

    def _start(self, request: Request) -> None:
        key = LeaseKey(request.number.to_bytes(16, "big"), 1)
        stages, hops = self._plan.stages_of(request), len(self.peers)
        self._sessions[key] = SimulatedSession(
            key, request, stages, circuit_of(stages), [0] * hops, [0.0] * hops
        )
        self._sessions[key].chunks.extend(
            lengths_within(self._plan.cut, self._plan.limits, stages, request.prompt_tokens)
        )
        self._add_chunk(key)
        self.peers[0].pump()

    def _end(self, session: SimulatedSession) -> None:
        del self._sessions[session.key]
        self._in_flight_limit.forget_session(session.key)
        for peer in self.peers:
            peer.forget_session(session.key)
        self.desk.let_in()

    # -- the head

    def _add_chunk(self, key: LeaseKey) -> None:
        session = self._sessions[key]
        if session.chunks:
            tokens = session.chunks.popleft()
            self._add(session, tokens, sample=not session.chunks, prefill=True)

    def _on_head_stepped(self, rows: Sequence[SimulatedRow]) -> None:
        self._in_flight_limit.record_computed([row.key for row in rows])
        self._release()
        for row in rows:
            if row.prefill and row.key in self._sessions:
                self._add_chunk(row.key)

    def _on_drawn(self, rows: Sequence[SimulatedRow]) -> None:
        """Tokens are at the head, and at its clients with it."""
        now_s, limit = self.timeline.now_s, self._in_flight_limit
        for row in rows:
            key = row.key
            session = self._sessions[key]
            if self.desk.token(session.request.number):
                self._end(session)
            elif len(self.peers) == 1:
                self._next_step(session)
            else:
                if key not in limit:
                    limit.add_session(key, self._circuit, session.stages)
                limit.record_return(key, now_s)
        self._release()
        self.peers[0].pump()

    def _release(self) -> None:
        for key in self._in_flight_limit.release_ready(self.timeline.now_s):
            self._next_step(self._sessions[key])
        self._look.set(due_s if (due_s := self._in_flight_limit.due_s()) is not None else math.inf)

    def _look_again(self) -> None:
        self._release()
        self.peers[0].pump()

    def _next_step(self, session: SimulatedSession) -> None:
        self._add(session, 1, sample=True, prefill=False)

    def _add(self, session: SimulatedSession, count: int, *, sample: bool, prefill: bool) -> None:
        """The session's next step waits at the head."""
        step = session.next_step
        session.next_step = step + 1
        self.peers[0].add_step(SimulatedRow(session.key, step, count, sample, prefill))

    # -- links

    def _connect(self) -> None:
        """Each peer to the next one, and back."""
        hops = len(self.peers)
        for hop, peer in enumerate(self.peers):
            if hops == 1:
                break
            after, before = (hop + 1) % hops, (hop - 1) % hops
            peer.next_link = self._open_link(hop, after)
            peer.previous_link = self._open_link(hop, before) if before != after else peer.next_link
        self.peers[0].on_computed = self._on_head_stepped
        self.peers[-1].on_drawn = self._on_drawn

    def _open_link(self, hop: int, other: int) -> int:
        delay_s = self._plan.delay_s

        def deliver(frame: SimulatedFrame) -> None:
            if frame.kind is FrameKind.WINDOW_UPDATE:
                self.peers[other].on_window_update(frame)
            elif frame.kind is FrameKind.TOKENS:
                self._on_drawn(frame.rows)
            else:
                self.peers[other].on_activations(frame)

        back_wire = self.channels[other].wire
        return self.channels[hop].open(delay_s[hop][other], delay_s[other][hop], back_wire, deliver)
