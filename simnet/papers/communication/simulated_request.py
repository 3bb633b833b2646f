"""One request on tensor-parallel stages, every message of it simulated.

Ranks compute as the roofline of their device says, a t-th each of what one alone would; what the engine itself takes
for a step is left out, as in `routing/layout_prediction`. Nothing overlaps within a rank: it waits for each operation.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from molink.routing.parallelism.parallelism import Layout, Lengths
from molink.routing.parallelism.volumes import PAPER_TENSORS_PER_BOUNDARY, TOKEN_BYTES
from molink.shards.spec import Span
from molink.simnet.devices.devices import DeviceProfile, SequenceChunk
from molink.simnet.devices.model_shapes import ModelShape, even_spans
from molink.simnet.papers.communication.collectives import (
    Communicator,
    gather,
    part_sizes,
    ring_all_gather,
    ring_all_reduce,
)
from molink.simnet.papers.communication.fabric import Fabric
from molink.simnet.papers.communication.operations import Phase
from molink.simnet.papers.communication.ranks import Compute, Key, Program, Ranks, Receive


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """When tokens were there, and what was sent."""

    token_times_s: tuple[float, ...]
    calls: dict[Key, int]
    sent_bytes: dict[Key, int]
    communication_s: float
    """Part of the request in which no stage computed."""

    @property
    def ttft_s(self) -> float:
        return self.token_times_s[0]

    @property
    def tpot_s(self) -> float:
        """Mean of the tokens after the first; 0 where there are none."""
        later = len(self.token_times_s) - 1
        return (self.token_times_s[-1] - self.token_times_s[0]) / later if later else 0.0


def simulate_request(
    shape: ModelShape,
    layout: Layout,
    lengths: Lengths,
    device: DeviceProfile,
    fabric: Fabric,
    tensors_per_boundary: int = PAPER_TENSORS_PER_BOUNDARY,
) -> SimulatedRequest:
    """A lone request, from its prompt on the first stage's ranks to its last token.

    Raises:
        ValueError: more stages than layers.
    """
    request = _Request(shape, layout, lengths, device, Ranks(fabric), tensors_per_boundary)
    spans = even_spans(shape.layers, layout.pipeline)
    times_s: list[float] = []
    computed_s: list[float] = []
    programs = [
        request.program(stage, place, span, times_s, computed_s)
        for stage, span in enumerate(spans)
        for place in range(layout.tensor)
    ]
    request.ranks.run(programs)
    calls, sent = dict(request.ranks.calls), dict(request.ranks.sent_bytes)
    return SimulatedRequest(tuple(times_s), calls, sent, times_s[-1] - sum(computed_s))


@dataclass(frozen=True, slots=True)
class _Request:
    """What is common to all ranks."""

    shape: ModelShape
    layout: Layout
    lengths: Lengths
    device: DeviceProfile
    ranks: Ranks
    tensors_per_boundary: int

    def program(
        self, stage: int, place: int, span: Span, times_s: list[float], computed_s: list[float]
    ) -> Program:
        """What the rank at that place of that stage does. The first of a stage notes what it computes, the very first
        when it knows a token."""
        own = self.group(stage)[place]
        drawer = self.group(self.layout.pipeline - 1)[0]
        for phase, rows, context in self.steps():
            yield from self.entering(stage, place, phase, rows)
            for seconds, reductions in self.computing(span, rows, context):
                if place == 0:
                    computed_s.append(seconds)
                yield Compute(seconds)
                for _ in range(reductions):
                    yield from self.reduced(stage, place, phase, rows)
            yield from self.leaving(stage, place, phase, rows)
            if own == drawer:
                for target in self.group(0):
                    if target != own:
                        self.ranks.send(own, target, phase, "Token", TOKEN_BYTES)
            elif stage == 0:
                yield Receive(drawer)
            if own == 0:
                times_s.append(self.ranks.timeline.now_s)

    def group(self, stage: int) -> range:
        return range(stage * self.layout.tensor, (stage + 1) * self.layout.tensor)

    def steps(self) -> Iterator[tuple[Phase, int, int]]:
        """Phase, rows and the context before them."""
        yield "prefill", self.lengths.prefill_tokens, 0
        for step in range(self.lengths.decode_tokens - 1):
            yield "decode", 1, self.lengths.prefill_tokens + step

    def entering(self, stage: int, place: int, phase: Phase, rows: int) -> Program:
        """Rows are embedded, or come from the stage before, each rank's part of them from its counterpart."""
        if stage == 0:
            yield from self.reduced(stage, place, phase, rows)
            return
        group = self.group(stage)
        for _ in range(self.tensors_per_boundary):
            self.ranks.call(group[place], phase, "Recv")
            yield Receive(self.group(stage - 1)[place])
        if len(group) > 1:
            among = Communicator(self.ranks, group, place)
            elements, element_bytes = rows * self.shape.hidden_size, self.shape.element_bytes
            for _ in range(self.tensors_per_boundary):
                yield from ring_all_gather(among, phase, elements, element_bytes)

    def leaving(self, stage: int, place: int, phase: Phase, rows: int) -> Program:
        """Logits are gathered where tokens are drawn, or rows go to the next stage."""
        group, element_bytes = self.group(stage), self.shape.element_bytes
        if stage < self.layout.pipeline - 1:
            part = rows * part_sizes(self.shape.hidden_size, len(group))[place]
            for _ in range(self.tensors_per_boundary):
                self.ranks.call(group[place], phase, "Send")
                target = self.group(stage + 1)[place]
                self.ranks.send(group[place], target, phase, "Send", part * element_bytes)
        elif len(group) > 1:
            among = Communicator(self.ranks, group, place)
            yield from gather(among, phase, self.shape.vocabulary_size, element_bytes)

    def reduced(self, stage: int, place: int, phase: Phase, rows: int) -> Program:
        group = self.group(stage)
        if len(group) > 1:
            elements, element_bytes = rows * self.shape.hidden_size, self.shape.element_bytes
            among = Communicator(self.ranks, group, place)
            yield from ring_all_reduce(among, phase, elements, element_bytes)

    def computing(self, span: Span, rows: int, context: int) -> Iterator[tuple[float, int]]:
        """Seconds, and how many all-reduces follow them: half a layer and one each. Whole spans where none do."""
        chunk = [SequenceChunk(rows, context)]
        ranks = self.layout.tensor
        device = replace(
            self.device,
            step_s=0.0,
            flops_per_s=self.device.flops_per_s * ranks,
            memory_bytes_per_s=self.device.memory_bytes_per_s * ranks,
        )
        whole_s = device.compute_s(self.shape, span, chunk, 1)
        if ranks == 1:
            yield whole_s, 0
            return
        layers_s = 0.0
        for layer in span:
            layer_s = device.compute_s(self.shape, Span(layer, layer + 1), chunk, 0)
            layers_s += layer_s
            yield layer_s / 2, 1
            yield layer_s / 2, 1
        if span.stop == self.shape.layers:
            yield whole_s - layers_s, 0
