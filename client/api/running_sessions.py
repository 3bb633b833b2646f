"""Sessions that run, for whoever watches the swarm: their circuits and times, and nothing of prompts or answers."""

import asyncio
import secrets
import statistics
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

from molink.client.circuit.session import ClientSession
from molink.client.epochs.copy_lag import HopCopy
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.routing.routes.route import RouteHop

MEASURED_STEPS: Final = 32
"""The latest decode steps of a session, of whose times its hops' are the medians."""
ENDED_SHOWN_S: Final = 3.0
"""Sessions that have ended are shown for so long, so that nobody who looks now and then misses how they ended."""
MOST_ENDED: Final = 64
MOST_COUNTED_PEERS: Final = 10_000

REQUEST_TAG: ContextVar[str] = ContextVar("REQUEST_TAG", default="")
"""What whoever asks for a generation calls it, for everybody to see: set around the call that begins it."""


@dataclass(slots=True, eq=False)
class RunningSession:
    """Running session: one generation as watchers see it."""

    session: ClientSession
    model: str
    tag: str
    id: str = field(default_factory=lambda: secrets.token_hex(6))
    """Drawn for watchers: peers and clients know the session by another."""
    first: tuple[pb.HopTiming, ...] = ()
    """Of the step that drew the first token."""
    steps: deque[tuple[pb.HopTiming, ...]] = field(default_factory=lambda: deque(maxlen=MEASURED_STEPS))
    ended_s: float | None = None

    def record_token(self, token: pb.Token) -> None:
        """Records the times that the hops have attached to a token."""
        if not token.timings:
            return
        if self.first:
            self.steps.append(tuple(token.timings))
        else:
            self.first = tuple(token.timings)

    @property
    def phase(self) -> str:
        """`forming`, `prefill`, `decode`, `recovering` or `ended`."""
        log = self.session.log
        if self.ended_s is not None:
            return "ended"
        if log.recovering is not None:
            return "recovering"
        if log.route is None:
            return "forming"
        return "decode" if log.arrived_s else "prefill"

    def describe(self, began_s: float) -> dict[str, Any]:
        """Describes it, JSON-ready. `began_s`: when it was begun, by the loop's clock."""
        log = self.session.log
        copies = log.standbys if self.ended_s is not None else self.session.standbys.by_hop()
        hops = () if log.route is None else log.route.hops
        arrived_s = log.arrived_s
        tpot_ms = (arrived_s[-1] - arrived_s[0]) / (len(arrived_s) - 1) * 1000 if len(arrived_s) > 1 else None
        return {
            "id": self.id,
            "tag": self.tag,
            "model": self.model,
            "phase": self.phase,
            "hops": self._describe_hops(hops, log.names, copies),
            "tokens": len(arrived_s),
            "ttft_ms": _short((arrived_s[0] - began_s) * 1000) if arrived_s else None,
            "tpot_ms": _short(tpot_ms),
            "predicted_tpot_ms": None if log.route is None else _short(log.route.tpot_ms),
            "epochs": log.epochs,
            "moves": log.moves,
            "losses": len(log.losses),
        }

    def _describe_hops(
        self, hops: Sequence[RouteHop], names: Mapping[str, str], copies: Mapping[str, HopCopy]
    ) -> list[dict[str, Any]]:
        steps = [timings for timings in self.steps if len(timings) == len(hops)]
        described = []
        for at, hop in enumerate(hops):
            copy = copies.get(hop.peer_id)
            described.append(
                {
                    "peer_id": hop.peer_id,
                    "name": names.get(hop.peer_id, ""),
                    "start": hop.span.start,
                    "stop": hop.span.stop,
                    "partner": None if copy is None else copy.peer_id,
                    "copy_form": None if copy is None else copy.form,
                    "copy_behind_tokens": None if copy is None else copy.behind_tokens,
                    "predicted_compute_ms": _short(hop.compute_ms),
                    "predicted_link_ms": _short(hop.link_ms),
                    **_times([timings[at] for timings in steps], ""),
                    **_times([self.first[at]] if len(self.first) == len(hops) else [], "first_"),
                }
            )
        return described


class RunningSessions:
    """Those of one client that run or have just ended, of all of its models, and how many tokens each peer has had a
    part in."""

    def __init__(self) -> None:
        self.are_timed = False
        """Whether hops are asked for their times of each step: they take bytes of every step, so somebody must look."""
        self.tokens_served: Counter[str] = Counter()
        """By peer: tokens of sessions of this client's for which it computed its layers."""
        self._running: dict[RunningSession, float] = {}
        """With when each was begun."""
        self._ended: deque[tuple[RunningSession, float]] = deque(maxlen=MOST_ENDED)

    @contextmanager
    def following(self, session: ClientSession, model: str) -> Iterator[None]:
        """Shows a session of the model of that name for as long as the context lasts, and a moment more."""
        clock = asyncio.get_running_loop().time
        running, watch = RunningSession(session, model, REQUEST_TAG.get()), session.watch

        def record(token: pb.Token) -> None:
            watch(token)
            running.record_token(token)
            if session.log.route is not None:
                self.tokens_served.update(session.log.route.peer_ids)

        session.watch = record
        self._running[running] = clock()
        try:
            yield
        finally:
            session.watch = watch
            running.ended_s = clock()
            self._ended.append((running, self._running.pop(running)))
            if len(self.tokens_served) > MOST_COUNTED_PEERS:
                self.tokens_served = Counter(dict(self.tokens_served.most_common(MOST_COUNTED_PEERS // 2)))

    def describe(self) -> list[dict[str, Any]]:
        """Describes each, JSON-ready, in the order in which they began; first those that have ended."""
        oldest_s = asyncio.get_running_loop().time() - ENDED_SHOWN_S
        while self._ended and (self._ended[0][0].ended_s or 0.0) < oldest_s:
            self._ended.popleft()
        return [running.describe(began_s) for running, began_s in (*self._ended, *self._running.items())]


def _times(timings: Sequence[pb.HopTiming], prefix: str) -> dict[str, float | None]:
    """Medians of what one hop said, in milliseconds; None where it said nothing. A link's is one way."""
    median = statistics.median
    return {
        f"{prefix}compute_ms": _short(median(one.compute_us for one in timings) / 1000) if timings else None,
        f"{prefix}queue_ms": _short(median(one.queue_us for one in timings) / 1000) if timings else None,
        f"{prefix}link_ms": _short(median(one.link_rtt_us for one in timings) / 2000) if timings else None,
    }


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
