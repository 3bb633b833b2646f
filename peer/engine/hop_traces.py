"""Spans of this peer's hops: what it did for each session whose client traces it. They go to its own operator only."""

from dataclasses import dataclass
from typing import Final

from molink.peer.engine.sessions import ServedSession
from molink.peer.memory.leases import LeaseKey
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.shards.spec import ModelSpec
from molink.tracing import Attribute, Traces, TraceSpan

MOST_TRACED: Final = 256
"""Sessions that are traced at a time: whoever asks decides that one is."""


@dataclass(slots=True)
class _TracedHop:
    """One session's span, and the sums of its steps."""

    span: TraceSpan
    steps: int = 0
    queue_us: int = 0
    compute_us: int = 0
    link_rtt_us: int = 0
    """The latest."""


class HopTraces:
    """A span for each traced session here: from its lease to its end, with the times of all of its steps together."""

    def __init__(self, traces: Traces) -> None:
        self._traces = traces
        self._hops: dict[LeaseKey, _TracedHop] = {}

    def begin(self, session: ServedSession) -> None:
        """A lease was granted: `SessionTable` says so."""
        plan = session.plan
        if plan.trace_context is None or len(self._hops) >= MOST_TRACED:
            return
        attributes: dict[str, Attribute] = {
            "molink.hop.index": session.place.hop,
            "molink.hop.start_layer": session.span.start,
            "molink.hop.stop_layer": session.span.stop,
            "molink.epoch": session.key.epoch,
            "gen_ai.usage.input_tokens": plan.prompt_tokens,
        }
        span = self._traces.begin(f"hop {session.span}", plan.trace_context, attributes, kind="server")
        if span is not None:
            self._hops[session.key] = _TracedHop(span)

    def record_step(self, session: ServedSession, timing: pb.HopTiming) -> None:
        """A step of it was computed."""
        hop = self._hops.get(session.key)
        if hop is None:
            return
        if not hop.steps:
            hop.span.note("first step")
        hop.steps += 1
        hop.queue_us += timing.queue_us
        hop.compute_us += timing.compute_us
        hop.link_rtt_us = timing.link_rtt_us

    def end(self, session: ServedSession) -> None:
        """It has left the table."""
        hop = self._hops.pop(session.key, None)
        if hop is None:
            return
        attributes: dict[str, Attribute] = {
            "molink.hop.steps": hop.steps,
            "molink.hop.queue_ms": hop.queue_us / 1000,
            "molink.hop.compute_ms": hop.compute_us / 1000,
        }
        if hop.link_rtt_us:
            attributes["molink.hop.link_rtt_ms"] = hop.link_rtt_us / 1000
        hop.span.end(attributes)


def resource_of(peer_id: str, name: str, spec: ModelSpec) -> dict[str, str]:
    """What a collector is told of the peer that sends spans."""
    return {"service.instance.id": peer_id, "molink.peer.name": name, "gen_ai.request.model": spec.name}
