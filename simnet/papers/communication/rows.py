"""What `molink-simnet communication` says of one layout: operations, volumes and times."""

from collections.abc import Iterator
from dataclasses import dataclass

from molink.routing.parallelism.layout_prediction import DeviceRates, Prediction, predict
from molink.routing.parallelism.parallelism import Layout, Lengths
from molink.routing.parallelism.volumes import (
    Volume,
    all_gather_volume,
    all_reduce_volume,
    embedding_volume,
    gather_volume,
    hybrid_volume,
    pipeline_volume,
    point_to_point_volume,
    tensor_volume,
)
from molink.shards.spec import ModelSpec
from molink.simnet.devices.devices import DeviceProfile
from molink.simnet.devices.model_shapes import ModelShape
from molink.simnet.papers.communication.fabric import Fabric
from molink.simnet.papers.communication.operations import Kind, Operation, operations
from molink.simnet.papers.communication.printed import LENGTHS, PRINTED_TIMES, printed_operation
from molink.simnet.papers.communication.ranks import Key, Sent
from molink.simnet.papers.communication.simulated_request import SimulatedRequest


@dataclass(frozen=True, slots=True)
class OperationRow:
    """Equal operations of one stage of a request: prefill or decode."""

    stage: str
    operation: str
    count: int
    shape: tuple[int, ...]
    message_bytes: int
    """Payload of one of them."""
    bytes: int
    """Payload of all of them."""
    corrected_bytes: float
    """What a rank sends for them; of Recv what it is sent."""
    scope: str
    """Whose operations and bytes these are."""
    counted: int | None
    """Of the same rank in the simulation; None: nothing was simulated."""
    counted_bytes: int | None
    paper_count: int | None
    paper_shape: tuple[int, ...] | None
    paper_message_bytes: int | None


@dataclass(frozen=True, slots=True)
class VolumeRow:
    """One equation of the paper's section III. Bytes of one request."""

    volume: str
    equation: int | None
    scope: str
    corrected: bool
    """Collectives as what an algorithm sends; otherwise all is payload."""
    bytes: float
    all_ranks_bytes: float | None
    """What all ranks send together for the same; None for sums of different kinds as they are printed."""
    counted_bytes: int | None
    """By all ranks of the simulation."""


@dataclass(frozen=True, slots=True)
class TimeRow:
    """Where times are from: routing's prediction, the simulation of messages, or the paper."""

    source: str
    ttft_ms: float | None
    tpot_ms: float | None
    latency_s: float | None
    communication_share: float | None


SCOPES: dict[Kind, str] = {
    "Allreduce": "one rank of the first stage",
    "Gather": "one rank of the last stage, not the one that gathers",
    "Allgather": "one rank of each stage after the first, together",
    "Send": "one rank of each stage but the last, together",
    "Recv": "one rank of each stage after the first, together",
}


def operation_rows(
    shape: ModelShape,
    layout: Layout,
    lengths: Lengths,
    tensors: int,
    simulated: SimulatedRequest | None,
) -> list[OperationRow]:
    """As Tables III to VI have them, with their own numbers beside those where they print that setting."""
    rows = []
    for one in operations(shape.spec(), layout, lengths, tensors):
        printed = None
        if lengths == LENGTHS and tensors == 2:
            printed = printed_operation((shape.name, layout), one.phase, one.kind)
        counted = None if simulated is None else _counted(simulated, layout, one)
        rows.append(
            OperationRow(
                stage=one.phase,
                operation=one.kind,
                count=one.count,
                shape=one.shape,
                message_bytes=one.message_bytes,
                bytes=one.payload_bytes,
                corrected_bytes=one.corrected_bytes,
                scope=SCOPES[one.kind],
                counted=None if counted is None else counted[0],
                counted_bytes=None if counted is None else counted[1],
                paper_count=None if printed is None else printed.count,
                paper_shape=None if printed is None else printed.shape,
                paper_message_bytes=None if printed is None else printed.message_bytes,
            )
        )
    return rows


def _counted(simulated: SimulatedRequest, layout: Layout, one: Operation) -> tuple[int, int]:
    """Operations and bytes of the last rank of the stages that the table speaks of."""
    stages = {
        "Allreduce": range(1),
        "Gather": range(layout.pipeline - 1, layout.pipeline),
        "Send": range(layout.pipeline - 1),
    }.get(one.kind, range(1, layout.pipeline))
    ranks = [(stage + 1) * layout.tensor - 1 for stage in stages]
    calls = sum(simulated.calls.get(Key(rank, one.phase, one.kind), 0) for rank in ranks)
    if one.kind == "Recv":
        senders = [Key(rank - layout.tensor, one.phase, "Send") for rank in ranks]
    else:
        senders = [Key(rank, one.phase, one.kind) for rank in ranks]
    return calls, sum(simulated.sent_bytes.get(key, 0) for key in senders)


def volume_rows(
    spec: ModelSpec, layout: Layout, lengths: Lengths, tensors: int, simulated: SimulatedRequest | None
) -> list[VolumeRow]:
    """Equations (4) to (7), and the sum that is printed for the layout: (1), (2) or (3)."""

    def sent(*kinds: Sent) -> int | None:
        if simulated is None:
            return None
        return sum(size for key, size in simulated.sent_bytes.items() if key.kind in kinds)

    def row(name: str, volume: Volume, everyone: float | None, *kinds: Sent) -> VolumeRow:
        return VolumeRow(
            name, volume.equation, volume.scope, volume.corrected, volume.bytes, everyone, sent(*kinds)
        )

    ranks = layout.tensor
    reduced = all_reduce_volume(spec, layout, lengths)
    embedded = embedding_volume(spec, ranks, lengths)
    gathered = gather_volume(spec, ranks, lengths)
    shared = all_gather_volume(spec, layout, lengths, tensors)
    passed = point_to_point_volume(spec, layout, lengths, tensors)
    everyone = ranks * (reduced.bytes * layout.pipeline + embedded.bytes)
    rows = [
        row("all-reduces of layers", reduced, None),
        row("all-reduces of embeddings", embedded, None),
        VolumeRow("all-reduces", None, "all ranks", True, everyone, everyone, sent("Allreduce")),
        row("all-gathers", shared, ranks * shared.bytes, "Allgather"),
        row("gathers of logits", gathered, (ranks - 1) * gathered.bytes, "Gather"),
        row("sends", passed, ranks * passed.bytes, "Send"),
    ]
    if layout.pipeline == 1:
        total, name = tensor_volume(spec, ranks, lengths), "tensor parallelism"
    elif ranks == 1:
        total, name = pipeline_volume(spec, layout.pipeline, lengths, tensors), "pipeline parallelism"
    else:
        total, name = hybrid_volume(spec, layout, lengths, tensors), "hybrid parallelism"
    whole = all_ranks_bytes(spec, layout, lengths, tensors)
    return [*rows, row(name, total, whole, "Allreduce", "Allgather", "Gather", "Send")]


def all_ranks_bytes(spec: ModelSpec, layout: Layout, lengths: Lengths, tensors: int) -> float:
    """What all ranks send together for one request, the way back of tokens left out."""
    ranks = layout.tensor
    alike = all_reduce_volume(spec, layout, lengths).bytes * layout.pipeline
    alike += embedding_volume(spec, ranks, lengths).bytes
    alike += all_gather_volume(spec, layout, lengths, tensors).bytes
    alike += point_to_point_volume(spec, layout, lengths, tensors).bytes
    return ranks * alike + (ranks - 1) * gather_volume(spec, ranks, lengths).bytes


def device_rates(device: DeviceProfile, rows: int) -> DeviceRates:
    """The device as layouts are predicted with it; products at the rate that so many rows reach."""
    reached = device.compute_efficiency * rows / (rows + device.half_rate_rows)
    return DeviceRates(
        flops_per_s=device.flops_per_s * reached,
        memory_bytes_per_s=device.memory_bytes_per_s * device.memory_efficiency,
        memory_bytes=device.memory_bytes,
        layer_s=device.layer_s,
    )


def predicted(
    shape: ModelShape, layout: Layout, lengths: Lengths, device: DeviceProfile, fabric: Fabric
) -> Prediction | None:
    """Routing's prediction over the slowest line that the layout uses; None of a mixture of experts, whose layers it
    would take to be read whole."""
    if shape.experts is not None:
        return None
    spec, link = shape.spec(), fabric.slowest(layout)
    return predict(spec, spec.whole, layout, device_rates(device, lengths.prefill_tokens), link, lengths)


def time_rows(
    shape: ModelShape,
    layout: Layout,
    lengths: Lengths,
    prediction: Prediction | None,
    simulated: SimulatedRequest | None,
) -> Iterator[TimeRow]:
    """Latencies are those of `lengths`, however many tokens were simulated."""
    if prediction is not None:
        share = prediction.communication_s / prediction.latency_s
        yield TimeRow(
            "predicted", 1e3 * prediction.ttft_s, 1e3 * prediction.tpot_s, prediction.latency_s, share
        )
    if simulated is not None:
        share = simulated.communication_s / simulated.token_times_s[-1]
        if len(simulated.token_times_s) == 1 < lengths.decode_tokens:  # of later tokens nothing is known
            yield TimeRow("simulated", 1e3 * simulated.ttft_s, None, None, share)
        else:
            latency_s = simulated.ttft_s + (lengths.decode_tokens - 1) * simulated.tpot_s
            yield TimeRow("simulated", 1e3 * simulated.ttft_s, 1e3 * simulated.tpot_s, latency_s, share)
    printed = PRINTED_TIMES.get((shape.name, layout))
    if printed is not None and lengths == LENGTHS:
        yield TimeRow("paper", printed.ttft_ms, printed.tpot_ms, printed.latency_s, None)
