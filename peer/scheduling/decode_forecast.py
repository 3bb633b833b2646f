"""Tells the links when decode needs them next, as the transmission paper predicts it from profiles (section 4.2)."""

import asyncio
import math
import time
from collections.abc import Callable

from molink.peer.scheduling.decode_watch import DecodeBatch
from molink.peer.wire.transmission.decode_times import (
    DecodePipeline,
    DecodeProfile,
    FirstBatch,
    PipelineLink,
    RunningBatch,
    decode_finish_s,
)
from molink.routing.cost.pipeline import PipelineStage

CIRCUITS_REMEMBERED = 256


class DecodeForecast:
    """A DecodeWatch that passes on, per link, when its next decode is predicted to be sent."""

    def __init__(self, expect: Callable[[str, float], None], clock: Callable[[float], float]) -> None:
        """`expect` is told the neighbour's peer id and the time; `clock` turns a time of a batch into one of the links'
        clock."""
        self._expect = expect
        self._clock = clock
        self._circuits: dict[int, tuple[tuple[PipelineStage, ...], DecodePipeline]] = {}
        """By the id of the stages, which are kept with it."""

    def computing(self, batch: DecodeBatch) -> None:
        """Cases 1 and 2: the step that runs is sent when it is computed."""
        running = RunningBatch(self._clock(batch.at_s), batch.tokens)
        self._tell(batch, running, None)

    def awaiting(self, first: DecodeBatch) -> None:
        """Case 3: the next step is the one that comes back after a whole circuit."""
        self._tell(first, None, FirstBatch(self._clock(first.at_s), first.tokens))

    def _tell(self, batch: DecodeBatch, running: RunningBatch | None, first: FirstBatch | None) -> None:
        finish_s = decode_finish_s(self._circuit_of(batch.stages), batch.hop, running, first)
        if finish_s is not None:
            for peer_id in batch.next_peer_ids:
                self._expect(peer_id, finish_s)

    def _circuit_of(self, stages: tuple[PipelineStage, ...]) -> DecodePipeline:
        if (known := self._circuits.get(id(stages))) is not None:
            return known[1]
        if len(self._circuits) >= CIRCUITS_REMEMBERED:
            self._circuits.clear()
        circuit = circuit_of(stages)
        self._circuits[id(stages)] = stages, circuit
        return circuit


def circuit_of(stages: tuple[PipelineStage, ...]) -> DecodePipeline:
    """The stages as the predictor takes them. A bandwidth that nobody has measured takes no time."""
    return DecodePipeline(
        profiles=tuple(_profile(stage) for stage in stages),
        hops=tuple(
            PipelineLink(
                stage.link_ms / 1000,
                math.inf if stage.uplink_mbps is None else stage.uplink_mbps * 1e6 / 8,
            )
            for stage in stages
        ),
        activation_bytes=stages[0].sent_bytes,
        token_bytes=stages[-1].sent_bytes,
    )


def _profile(stage: PipelineStage) -> DecodeProfile:
    sizes = sorted({latency.batch_size for latency in stage.facts.layer_latencies})
    return DecodeProfile(tuple((size, stage.decode_ms(size) / 1000) for size in sizes))


def on_loop_clock(at_s: float) -> float:
    """A time of `time.perf_counter`, which measures steps, on the clock of the event loop, which links go by."""
    return asyncio.get_running_loop().time() - (time.perf_counter() - at_s)
