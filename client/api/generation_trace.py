"""Spans of one generation as its client sees it: when its circuit stood, its first token, the others, what was lost."""

import asyncio
import statistics
import sys
import time
from collections import deque
from typing import Final, Self

from molink.client.circuit.session import ClientSession
from molink.client.epochs.session_log import SessionLog
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.tracing import CURRENT_SPAN, Attribute, TraceSpan

MEASURED_STEPS: Final = 256
"""The latest decode steps, of whose times those of hops are the medians."""
_S: Final = 1_000_000_000
_LEFT: Final = (GeneratorExit, asyncio.CancelledError)
"""What ends a generation whose client has gone away: no fault."""


class GenerationTrace:
    """Generation trace: a span from the call to the last token, with parts for circuit, prefill and decode."""

    def __init__(self, span: TraceSpan, now_s: float, now_ns: int) -> None:
        """`now_s` by the loop's clock is `now_ns` by the system's."""
        self._span = span
        self._offset_ns = now_ns - round(now_s * _S)
        self._began_s = now_s
        self._prefill_s = 0.0
        self._session: ClientSession | None = None
        self._steps: deque[tuple[pb.HopTiming, ...]] = deque(maxlen=MEASURED_STEPS)

    @classmethod
    def begin(cls, model: str) -> Self | None:
        """Begins one as a part of the span that is under way; None if there is none, which is all that it costs."""
        request = CURRENT_SPAN.get()
        if request is None:
            return None
        span = request.begin("generation", {"gen_ai.request.model": model, "gen_ai.provider.name": "molink"})
        return None if span is None else cls(span, asyncio.get_running_loop().time(), time.time_ns())

    @property
    def context(self) -> bytes:
        """By which hops become parts of it."""
        return self._span.context.to_bytes()

    def follow(self, session: ClientSession) -> None:
        """Hears of the session's tokens from now on: it has not begun."""
        before, self._session = session.watch, session

        def watch(token: pb.Token) -> None:
            before(token)
            if len(session.log.arrived_s) == 1:
                self._prefill_s = session.log.prefill_s
            elif token.timings:
                self._steps.append(tuple(token.timings))

        session.watch = watch

    def end(self) -> None:
        """The session has ended, or whoever asked has gone away: in a `finally`, whose error it notes by its kind."""
        if self._session is None:
            return
        error, log = sys.exception(), self._session.log
        if log.arrived_s:
            first_s, last_s = log.arrived_s[0], log.arrived_s[-1]
            started_s = first_s - self._prefill_s
            self._span.record("form circuit", self._ns(self._began_s), self._ns(started_s))
            self._span.record("prefill", self._ns(started_s), self._ns(first_s))
            self._span.record("decode", self._ns(first_s), self._ns(last_s), self._hops(log))
        self._span.end(
            {
                "gen_ai.usage.input_tokens": len(self._session.prompt),
                "gen_ai.usage.output_tokens": len(log.arrived_s),
                "molink.cached_tokens": log.cached_tokens,
                "molink.epochs": log.epochs,
                "molink.losses": len(log.losses),
                "molink.moves": log.moves,
            },
            fault="" if error is None or isinstance(error, _LEFT) else type(error).__name__,
        )

    def _ns(self, at_s: float) -> int:
        return self._offset_ns + round(at_s * _S)

    def _hops(self, log: SessionLog) -> dict[str, Attribute]:
        """The hops of the last circuit, and the medians of what they said of their steps on it."""
        if log.route is None:
            return {}
        hops = log.route.hops
        attributes: dict[str, Attribute] = {
            "molink.hop.peer_ids": [hop.peer_id for hop in hops],
            "molink.hop.spans": [str(hop.span) for hop in hops],
        }
        steps = [timings for timings in self._steps if len(timings) == len(hops)]
        if steps:
            by_hop = list(zip(*steps, strict=True))
            median = statistics.median
            attributes |= {
                "molink.hop.compute_ms": [median(one.compute_us for one in hop) / 1000 for hop in by_hop],
                "molink.hop.queue_ms": [median(one.queue_us for one in hop) / 1000 for hop in by_hop],
                "molink.hop.link_ms": [median(one.link_rtt_us for one in hop) / 2000 for hop in by_hop],
            }
        return attributes
