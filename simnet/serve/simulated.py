"""One cell of `serve`: requests served by a simulated circuit, and what came of it."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from molink.simnet.core.request_load import AFTERMATH_S, RequestOutcome, arrivals
from molink.simnet.core.serving_world import ServingWorld
from molink.simnet.core.timeline import Timeline
from molink.simnet.core.traces import TraceRequest
from molink.simnet.serve.petals_world import PetalsWorld
from molink.simnet.serve.scenario import Scenario, circuit_plan
from molink.simnet.serve.served_as import PETALS, ServedAs

_YOUNG, _MIDDLE, _OLD = 50_000, 20, 20
"""Objects, and collections of those younger, after which Python looks for garbage. At every 700th object that took 4 to
13 % of a circuit's time; nearly all that a circuit makes goes without it. Whole swarms gained nothing."""


@dataclass(frozen=True, slots=True)
class RequestLoad:
    """What comes, and of which part averages are made."""

    trace: tuple[TraceRequest, ...]
    rate_rps: float
    warm_up_s: float
    duration_s: float
    seed: int = 0


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """A finished cell."""

    outcomes: tuple[RequestOutcome, ...]
    """Of the requests that came while it was measured."""
    throughput_tps: float
    """Tokens that all requests together got while it was measured, a second."""
    engine_busy: tuple[float, ...]
    """Of each peer: the part of the time in which its engine computed."""
    uplink_busy: tuple[float, ...]
    decode_ways_ms: tuple[float, ...]
    """Ascending: of every decode frame, from when it was given to the link to when it had come."""
    events: int


def simulate_serving(scenario: Scenario, policy: str, served_as: ServedAs, load: RequestLoad) -> SimulatedRun:
    """Serves the load; virtual time from 0 to the end of the last measured request.

    Raises:
        ValueError: the model does not fit, or no policy or rule has that name.
        AssertionError: bytes, memory or requests were not conserved, which is a fault of the simulator.
    """
    timeline = Timeline()
    plan = circuit_plan(scenario, policy, served_as)
    world = PetalsWorld(plan, timeline) if policy == PETALS else ServingWorld(plan, timeline)
    end_s = load.warm_up_s + load.duration_s
    first = int(np.random.default_rng(load.seed).integers(len(load.trace)))
    world.desk.arrive(arrivals(load.trace, load.rate_rps, end_s, first))
    coming = arrivals(load.trace, load.rate_rps, end_s, first)
    measured = [
        request.number
        for request in takewhile(lambda one: one.arrival_s < end_s, coming)
        if request.arrival_s >= load.warm_up_s
    ]
    with seldom_collected():
        timeline.run(load.warm_up_s)
        tokens = world.desk.tokens
        timeline.run(end_s)
        tokens = world.desk.tokens - tokens
        busy = [peer.busy_s / end_s for peer in world.peers]
        uplinks = [channels.wire.busy_s(end_s) / end_s for channels in world.channels]
        _finish(world, timeline, measured, end_s + AFTERMATH_S)
    world.check()
    ways_s = sorted(way for channels in world.channels for way in channels.decode_ways_s)
    return SimulatedRun(
        outcomes=tuple(world.desk.outcome(number) for number in measured),
        throughput_tps=tokens / load.duration_s,
        engine_busy=tuple(busy),
        uplink_busy=tuple(uplinks),
        decode_ways_ms=tuple(1000 * way for way in ways_s),
        events=timeline.events,
    )


def _finish(
    world: ServingWorld | PetalsWorld, timeline: Timeline, numbers: Sequence[int], until_s: float
) -> None:
    """The load stays up until the last measured request has ended."""
    left = set(numbers)
    while left and timeline.now_s < until_s:
        timeline.run(timeline.now_s + 1.0)
        left -= world.desk.ended


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Within the block, what is there already is not looked at for garbage, and what comes is seldom."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(_YOUNG, _MIDDLE, _OLD)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
