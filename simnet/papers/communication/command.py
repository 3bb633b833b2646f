"""`molink-simnet communication`: what tensor and pipeline parallelism send, and which of them to choose."""

import math
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated

from molink.progress import Progress
from molink.routing.parallelism.layout_prediction import Goal, LayoutGoal, Prediction
from molink.routing.parallelism.parallelism import Layout, Lengths
from molink.simnet.core.matrices import latencies_between, read_matrix
from molink.simnet.core.traces import read_trace
from molink.simnet.devices.devices import DeviceProfile
from molink.simnet.devices.model_shapes import ModelShape, shape_named
from molink.simnet.devices.named_devices import CHOICES as DEVICES
from molink.simnet.devices.named_devices import device_named
from molink.simnet.papers.communication.advice import advise as advised
from molink.simnet.papers.communication.fabric import CHOICES as NETWORKS
from molink.simnet.papers.communication.fabric import fabric_named
from molink.simnet.papers.communication.figures import paper_figures
from molink.simnet.papers.communication.rows import operation_rows, predicted, time_rows, volume_rows
from molink.simnet.papers.communication.simulated_request import SimulatedRequest, simulate_request
from molink.simnet.papers.communication.tables import (
    advice_table,
    operations_table,
    times_table,
    volumes_table,
)
from molink.simnet.presentation.experiments import Run
from molink.simnet.presentation.options import Tensors, UnusedSeed, option
from molink.simnet.presentation.results import Findings

DEFAULT_TOKENS = 128
EXAMPLE = "molink-simnet communication --model llama-3.1-8b --tp 2 --pp 2 --prefill 128 --decode 128"


def communication(
    model: Annotated[str, option("Any model of `serve`, such as llama-2-13b.", "NAME")] = "llama-3.1-8b",
    tp: Annotated[int, option("Ranks that share each layer.", "T", least=1)] = 1,
    pp: Annotated[int, option("Stages that share the layers.", "P", least=1)] = 1,
    prefill: Annotated[
        int | None, option(f"Tokens of the prompt. Default: {DEFAULT_TOKENS}.", "S", least=1)
    ] = None,
    decode: Annotated[
        int | None, option(f"Tokens generated. Default: {DEFAULT_TOKENS}.", "S", least=1)
    ] = None,
    tensors_per_boundary: Tensors = 2,
    device: Annotated[str, option(f"Of every rank: {DEVICES}.", "NAME")] = "h100-94",
    network: Annotated[str, option(f"Between ranks: {NETWORKS}.", "NAME")] = "cardinal",
    simulated_tokens: Annotated[
        int | None,
        option("Count messages of so many tokens only, 0: of none. Default: of all.", "N", least=0),
    ] = None,
    advise: Annotated[
        bool, option("Compare all layouts instead of describing one.", None, "--advise")
    ] = False,
    devices: Annotated[int, option("With --advise: at most so many.", "N", least=1, most=64)] = 8,
    goal: Annotated[Goal, option("With --advise: what is to be short.")] = "latency",
    max_ttft_ms: Annotated[
        float | None, option("With --advise: layouts later than that come last.", "MS", least=0.0)
    ] = None,
    latency_matrix: Annotated[
        Path | None,
        option(
            "Round trips in ms between your own regions, in place of --network's latency between nodes: the first node "
            "is in the first region, the next in the next, and again from the first.",
            "FILE.csv",
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        option(
            "In place of --prefill and --decode: the mean prompt and the mean answer of these requests, rounded.",
            "FILE.csv",
        ),
    ] = None,
    seed: UnusedSeed = 0,
) -> Run:
    """Count what ranks send.

    Operations, shapes and volumes of one request under tensor parallelism, pipeline parallelism or both, by the
    equations of the communication-patterns paper and as counted of simulated messages, beside what it prints. With
    --advise: predicted times of all layouts of some devices, the best first. Figures are the paper's 1 and 4 to 10.
    """
    shape, profile, fabric = shape_named(model), device_named(device), fabric_named(network)
    if latency_matrix is not None:
        nodes = -(-(devices if advise else tp * pp) // fabric.node_devices)
        fabric = replace(fabric, latency_ms=latencies_between(read_matrix(latency_matrix), nodes))
    lengths = _lengths(prefill, decode, trace)
    parameters: dict[str, object] = {
        "model": model,
        "prefill": lengths.prefill_tokens,
        "decode": lengths.decode_tokens,
        "tensors_per_boundary": tensors_per_boundary,
        "device": device,
        "network": network,
        "latency_matrix": None if latency_matrix is None else str(latency_matrix),
        "trace": None if trace is None else str(trace),
        "seed": seed,
    }
    if advise:
        wanted = LayoutGoal(goal, math.inf if max_ttft_ms is None else max_ttft_ms / 1000)
        parameters |= {"devices": devices, "goal": goal, "max_ttft_ms": max_ttft_ms}
        advice = advised(shape, devices, profile, fabric, lengths, wanted, tensors_per_boundary)
        title = f"{shape.name} on at most {devices} x {profile.name} over {fabric.name}, by {goal}"
        shown = advice_table(f"{title}\n{advice[0].reason}", advice)
        found = Findings("communication", title, parameters, advice, [shown], figures=paper_figures)
        return lambda _: found
    _check(shape, tp, pp)
    layout = Layout(tp, pp)
    decoded = lengths.decode_tokens
    tokens = decoded if simulated_tokens is None else min(simulated_tokens, decoded)
    parameters |= {"tp": tp, "pp": pp, "simulated_tokens": tokens}

    def run(_: Path | None) -> Findings:
        """Beside the rows of operations, the document has those of volumes and times."""
        simulated: SimulatedRequest | None = None
        if tokens:
            counted = replace(lengths, decode_tokens=tokens)
            with Progress() as progress:
                progress.begin(f"counting messages of {layout.devices} ranks, {tokens} tokens")
                simulated = simulate_request(shape, layout, counted, profile, fabric, tensors_per_boundary)
        complete = simulated if tokens == decoded else None
        operations = operation_rows(shape, layout, lengths, tensors_per_boundary, complete)
        volumes = volume_rows(shape.spec(), layout, lengths, tensors_per_boundary, complete)
        prediction = predicted(shape, layout, lengths, profile, fabric)
        times = list(time_rows(shape, layout, lengths, prediction, simulated))
        title = f"{shape.name}, {layout}, {lengths.prefill_tokens} tokens of prompt, {decoded} generated"
        shown = [operations_table(title, operations), volumes_table(volumes if operations else [])]
        return Findings(
            "communication",
            title,
            parameters,
            operations,
            [*shown, times_table(times)],
            _remarks(shape, layout, profile, prediction),
            more={"volumes": [asdict(row) for row in volumes], "times": [asdict(row) for row in times]},
            figures=paper_figures,
        )

    return run


def _lengths(prefill: int | None, decode: int | None, trace: Path | None) -> Lengths:
    """What is given, or means of a trace: what is sent grows with tokens, so that these are means too."""
    if trace is None:
        return Lengths(prefill or DEFAULT_TOKENS, decode or DEFAULT_TOKENS)
    if prefill is not None or decode is not None:
        raise ValueError("--trace says how many tokens there are: leave out --prefill and --decode")
    requests = read_trace(trace)
    return Lengths(
        round(fmean(one.prompt_tokens for one in requests)),
        round(fmean(one.generated_tokens for one in requests)),
    )


def _check(shape: ModelShape, tp: int, pp: int) -> None:
    if pp > shape.layers:
        raise ValueError(f"{shape.name} has {shape.layers} layers: --pp {pp} stages are too many")
    if shape.heads % tp:
        raise ValueError(
            f"{shape.name} has {shape.heads} attention heads, which --tp {tp} ranks cannot share evenly"
        )


def _remarks(
    shape: ModelShape, layout: Layout, device: DeviceProfile, prediction: Prediction | None
) -> list[str]:
    """What the times leave out: whether there is room. Of experts only the weights are known, evenly divided."""
    spec = shape.spec()
    needed = spec.weight_bytes(spec.whole) / layout.devices if prediction is None else prediction.device_bytes
    if needed <= device.memory_bytes:
        return []
    return [
        f"It does not fit: each of {layout.devices} devices would hold {needed / 1e9:.0f} GB, and {device.name} has "
        f"{device.memory_bytes / 1e9:.0f} GB. Take more ranks: the times are those that it would have with room"
    ]
