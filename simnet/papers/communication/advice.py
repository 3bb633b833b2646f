"""Which layout to serve a model with on devices of one kind: routing's choice, as a table."""

from dataclasses import dataclass

from molink.routing.parallelism.layout_prediction import LayoutGoal, choose_layout, predict
from molink.routing.parallelism.parallelism import Layout, Lengths
from molink.simnet.devices.devices import DeviceProfile
from molink.simnet.devices.model_shapes import ModelShape
from molink.simnet.papers.communication.fabric import Fabric, tensor_sizes
from molink.simnet.papers.communication.rows import all_ranks_bytes, device_rates


@dataclass(frozen=True, slots=True)
class AdviceRow:
    """One layout, and what is predicted of it."""

    rank: int
    """1 is the best."""
    tp: int
    pp: int
    ttft_ms: float
    tpot_ms: float
    latency_s: float
    communication_share: float
    all_ranks_bytes: float
    """What all ranks send for one request."""
    device_gb: float
    """Weights and cache of the device that holds the most."""
    fits: bool
    reason: str


def advise(
    shape: ModelShape,
    devices: int,
    device: DeviceProfile,
    fabric: Fabric,
    lengths: Lengths,
    goal: LayoutGoal,
    tensors_per_boundary: int = 1,
) -> list[AdviceRow]:
    """All layouts of at most so many devices, the best first, by `choose_layout`.

    Lines are the slowest that so many devices use together, in every layout.

    Raises:
        ValueError: no layout fits, or the model is a mixture of experts; one sentence.
    """
    if shape.experts is not None:
        raise ValueError(f"{shape.name} has experts: times of their layouts are not predicted")
    spec = shape.spec()
    layouts = [
        Layout(tensor, pipeline)
        for tensor in tensor_sizes(devices)
        if shape.heads % tensor == 0
        for pipeline in range(1, min(devices // tensor, shape.layers) + 1)
    ]
    rates, link = device_rates(device, lengths.prefill_tokens), fabric.slowest(Layout(devices))
    choice = choose_layout(spec, spec.whole, layouts, rates, link, lengths, goal)
    named = {str(layout): layout for layout in layouts}
    rows = []
    for number, reason in enumerate(choice.reasons, 1):
        layout = named[reason.partition(":")[0]]
        found = predict(spec, spec.whole, layout, rates, link, lengths)
        rows.append(
            AdviceRow(
                rank=number,
                tp=layout.tensor,
                pp=layout.pipeline,
                ttft_ms=1e3 * found.ttft_s,
                tpot_ms=1e3 * found.tpot_s,
                latency_s=found.latency_s,
                communication_share=found.communication_s / found.latency_s,
                all_ranks_bytes=all_ranks_bytes(spec, layout, lengths, tensors_per_boundary),
                device_gb=found.device_bytes / 1e9,
                fits=found.fits,
                reason=reason,
            )
        )
    return rows
