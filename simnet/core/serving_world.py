"""A circuit of peers that serves requests, in virtual time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from molink.peer.hop import events
from molink.peer.hop.hop_core import HopCore
from molink.peer.hop.session import DrawnToken, HopPlace, HopSettings
from molink.peer.memory.leases import LeaseKey
from molink.peer.profiling.profile import Profile
from molink.peer.profiling.step_times import StepTimes
from molink.peer.scheduling.in_flight_limit import Circuit
from molink.peer.scheduling.in_flight_rules import Rule
from molink.peer.scheduling.microbatch import BatchLimits
from molink.peer.scheduling.prefill_slices import SliceSizer
from molink.peer.scheduling.prompt_gathering import PromptGathering
from molink.routing.cost.pipeline import PipelineStage
from molink.routing.cost.prefill_chunks import Cut
from molink.shards.spec import ModelSpec, Span
from molink.simnet.core.channels import Channels
from molink.simnet.core.guessing import SimulatedSpeculation, TapeGuesser
from molink.simnet.core.request_desk import RequestDesk
from molink.simnet.core.request_load import Request
from molink.simnet.core.simulated_peer import ComputeS, SimulatedEngine, SimulatedPeer
from molink.simnet.core.simulated_sender import SimulatedSession
from molink.simnet.core.timeline import Timeline
from molink.simnet.core.wire import Wire

StagesOf = Callable[[Request], tuple[PipelineStage, ...]]
"""A request's circuit as its client predicts it."""
OPENING_MESSAGES = 3
"""One after the other before a prompt is at the head: every hop is asked for memory and answers that it is ready, and
the prompt goes to the head (`client/circuit/circuit_builder.py`). Clients are beside the head, on no line."""


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
    profiles: tuple[Profile, ...] | None = None
    """Of each peer, by which prompts are gathered, and computed in slices beside decode; None: neither."""
    opening_s: float = 0.0
    """From when there is room for a request to when its prompt is at the head: reserving, and starting."""
    hand_on_s: float = 0.0
    """At each peer: from when its engine is done to when the output is at the link."""
    to_client_s: float = 0.0
    """A token's way from the head to its client."""
    jitter_ms: float = 0.0
    seed: int = 0
    speculation: SimulatedSpeculation | None = None
    """None: nothing is guessed."""


class ServingWorld:
    """Owner of a circuit, its sessions, and the requests that wait for room."""

    def __init__(self, plan: SimulatedCircuit, timeline: Timeline) -> None:
        self._plan = plan
        self.timeline = timeline
        self._sessions = 0
        """That have begun and not ended."""
        self.desk = RequestDesk(timeline, plan.kv_tokens, plan.most_sessions, self._open)
        self.desk.to_client_s = plan.to_client_s
        self._circuit: Circuit = tuple((f"{hop}", span) for hop, span in enumerate(plan.spans))
        self.channels = [
            Channels(timeline, Wire(rate_mbps, plan.jitter_ms, plan.seed + hop), plan.policy)
            for hop, rate_mbps in enumerate(plan.uplink_mbps)
        ]
        self.peers = [self._peer(hop) for hop in range(len(plan.spans))]
        for hop in range(len(self.peers)):
            self._connect(hop)

    def check(self) -> None:
        """Raises AssertionError where bytes, memory or requests are not conserved."""
        self.desk.check()
        for channels in self.channels:
            channels.check(self.timeline.now_s)
        if not self._sessions and not all(peer.is_empty for peer in self.peers):
            raise AssertionError("something of ended sessions is left")

    def _peer(self, hop: int) -> SimulatedPeer:
        plan, channels = self._plan, self.channels[hop]
        settings = HopSettings(
            f"{hop}",
            plan.spec.activation_bytes,
            min(plan.spec.most_step_tokens, plan.limits.max_tokens),
            plan.limits,
            plan.rule,
            plan.cut,
            channels.heeds_due,
            channels.uses_forecasts,
        )
        core: HopCore[SimulatedSession, None]
        times = None if plan.profiles is None else StepTimes(plan.profiles[hop])
        if times is None:
            core = HopCore(settings)
        else:
            gathering = PromptGathering[SimulatedSession](times.predicted_ms, plan.limits.max_tokens)
            core = HopCore(settings, SliceSizer(times), gathering)
        return SimulatedPeer(
            self.timeline,
            plan.spec,
            settings.peer_id,
            core,
            channels,
            SimulatedEngine(plan.compute_s[hop], plan.hand_on_s, times),
            self._deliver,
        )

    def _connect(self, hop: int) -> None:
        """A peer to the next one, and to the previous one."""
        hops, delay_s = len(self.peers), self._plan.delay_s
        for other in dict.fromkeys(((hop + 1) % hops, (hop - 1) % hops)):
            if other != hop:
                self.peers[hop].sender.links[f"{other}"] = self.channels[hop].open(
                    delay_s[hop][other],
                    delay_s[other][hop],
                    self.channels[other].wire,
                    self.peers[other].handle,
                )

    # -- sessions

    def _open(self, request: Request) -> None:
        """Every hop is asked for memory, and is ready; then the prompt goes to the head."""
        key = LeaseKey(request.number.to_bytes(16, "big"), 1)
        stages, capacity = self._plan.stages_of(request), request.prompt_tokens + request.new_tokens
        hops = [
            SimulatedSession(
                key, HopPlace(self._circuit, hop, stages, request.prompt_tokens, capacity), request
            )
            for hop in range(len(self.peers))
        ]
        if self._plan.speculation is not None:
            hops[0].progress.guesser = TapeGuesser(self._plan.speculation, request.number, stages)
        for hop, session in enumerate(hops):
            session.before, session.after = hops[hop - 1], hops[(hop + 1) % len(hops)]
        self._sessions += 1
        begins, message_s = self.timeline.call, self._plan.opening_s / OPENING_MESSAGES
        begins(message_s, partial(self._lease, hops))
        started = events.PromptStarted(hops[0], request.prompt_tokens, 0, lambda _, __: None)
        begins(self._plan.opening_s, partial(self.peers[0].handle, started))

    def _lease(self, hops: Sequence[SimulatedSession]) -> None:
        for peer, session in zip(self.peers, hops, strict=True):
            peer.handle(events.SessionOpened(session))
        if self._plan.profiles is not None:
            self.peers[0].handle(events.PromptExpected(hops[0], hops[0].request.prompt_tokens))

    def _deliver(self, tokens: Sequence[DrawnToken[SimulatedSession, None]]) -> None:
        """Tokens are at the head, and on their way to its clients."""
        for session, *_ in tokens:
            if self.desk.token(session.request.number):
                self._end(session)

    def _end(self, session: SimulatedSession) -> None:
        self._sessions -= 1
        for peer in self.peers:
            peer.handle(events.SessionEnded(session))
            session = session.after
        self.desk.let_in()
