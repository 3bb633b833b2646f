"""`molink-simnet communication`: what tensor and pipeline parallelism send, and which of them to choose."""

import math
from dataclasses import asdict, replace

from molink.commands import EXIT_USAGE, CommandFailed, Debug, Json, Verbose, start_logging
from molink.progress import Progress
from molink.routing.parallelism.layout_prediction import Goal, Prediction
from molink.routing.parallelism.parallelism import Layout, Lengths
from molink.simnet.devices.devices import DeviceProfile
from molink.simnet.devices.model_shapes import ModelShape, shape_named
from molink.simnet.devices.named_devices import device_named
from molink.simnet.papers.communication import options
from molink.simnet.papers.communication.advice import advise as advised
from molink.simnet.papers.communication.fabric import Fabric, fabric_named
from molink.simnet.papers.communication.figures import draw_figures
from molink.simnet.papers.communication.rows import operation_rows, predicted, time_rows, volume_rows
from molink.simnet.papers.communication.simulated_request import SimulatedRequest, simulate_request
from molink.simnet.papers.communication.tables import (
    advice_table,
    operations_table,
    times_table,
    volumes_table,
)
from molink.simnet.presentation.options import Output, Tensors
from molink.simnet.presentation.results import Findings, deliver, output_folder

EXAMPLE = "molink-simnet communication --model llama-3.1-8b --tp 2 --pp 2 --prefill 128 --decode 128"


def communication(
    model: options.Model = "llama-3.1-8b",
    tp: options.Tensor = 1,
    pp: options.Pipeline = 1,
    prefill: options.Prefill = 128,
    decode: options.Decode = 128,
    tensors_per_boundary: Tensors = 2,
    device: options.Device = "h100-94",
    network: options.Network = "cardinal",
    simulated_tokens: options.SimulatedTokens = None,
    advise: options.Advise = False,
    devices: options.Devices = 8,
    goal: options.GoalOption = "latency",
    max_ttft_ms: options.MostTtft = None,
    output: Output = None,
    as_json: Json = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Count what ranks send.

    Operations, shapes and volumes of one request under tensor parallelism, pipeline parallelism or both, by the
    equations of the communication-patterns paper and as counted of simulated messages, beside what it prints. With
    --advise: predicted times of all layouts of some devices, the best first. Figures are the paper's 1 and 4 to 10.
    """
    start_logging(verbose=verbose, debug=debug)
    folder = output_folder(output)
    try:
        shape, profile, fabric = shape_named(model), device_named(device), fabric_named(network)
        lengths = Lengths(prefill, decode)
        parameters: dict[str, object] = {
            "model": model,
            "prefill": prefill,
            "decode": decode,
            "tensors_per_boundary": tensors_per_boundary,
            "device": device,
            "network": network,
        }
        if advise:
            limit_ms = math.inf if max_ttft_ms is None else max_ttft_ms
            parameters |= {"devices": devices, "goal": goal, "max_ttft_ms": max_ttft_ms}
            found = _advice(
                parameters, shape, devices, profile, fabric, lengths, goal, limit_ms, tensors_per_boundary
            )
        else:
            if simulated_tokens is None:
                simulated_tokens = decode
            parameters |= {"tp": tp, "pp": pp, "simulated_tokens": min(simulated_tokens, decode)}
            found = _described(
                parameters, shape, Layout(tp, pp), profile, fabric, lengths, tensors_per_boundary
            )
    except ValueError as error:
        raise CommandFailed(str(error), EXIT_USAGE) from error
    deliver(found, as_json=as_json, folder=folder, draw=draw_figures)


def _advice(
    parameters: dict[str, object],
    shape: ModelShape,
    devices: int,
    device: DeviceProfile,
    fabric: Fabric,
    lengths: Lengths,
    goal: Goal,
    max_ttft_ms: float,
    tensors: int,
) -> Findings:
    rows = advised(shape, devices, device, fabric, lengths, goal, max_ttft_ms, tensors)
    title = f"{shape.name} on at most {devices} x {device.name} over {fabric.name}, by {goal}"
    table = advice_table(f"{title}\n{rows[0].reason}", rows)
    return Findings("communication", title, parameters, [asdict(row) for row in rows], [table])


def _described(
    parameters: dict[str, object],
    shape: ModelShape,
    layout: Layout,
    device: DeviceProfile,
    fabric: Fabric,
    lengths: Lengths,
    tensors: int,
) -> Findings:
    """Beside the rows of operations, the document has those of volumes and times."""
    if layout.pipeline > shape.layers:
        raise ValueError(
            f"{shape.name} has {shape.layers} layers: --pp {layout.pipeline} stages are too many"
        )
    if shape.heads % layout.tensor:
        raise ValueError(
            f"{shape.name} has {shape.heads} attention heads, which --tp {layout.tensor} ranks cannot share evenly"
        )
    tokens = int(str(parameters["simulated_tokens"]))
    simulated: SimulatedRequest | None = None
    if tokens:
        counted = replace(lengths, decode_tokens=tokens)
        with Progress() as progress:
            progress.begin(f"counting messages of {layout.devices} ranks, {counted.decode_tokens} tokens")
            simulated = simulate_request(shape, layout, counted, device, fabric, tensors)
    complete = simulated if tokens == lengths.decode_tokens else None
    operations = operation_rows(shape, layout, lengths, tensors, complete)
    volumes = volume_rows(shape.spec(), layout, lengths, tensors, complete)
    prediction = predicted(shape, layout, lengths, device, fabric)
    times = list(time_rows(shape, layout, lengths, prediction, simulated))
    title = f"{shape.name}, {layout}, {lengths.prefill_tokens} tokens of prompt, {lengths.decode_tokens} generated"
    counted_tables = [operations_table(title, operations), volumes_table(volumes)] if operations else []
    return Findings(
        "communication",
        title,
        parameters,
        [asdict(row) for row in operations],
        [*counted_tables, times_table(times)],
        _remarks(shape, layout, device, prediction),
        more={"volumes": [asdict(row) for row in volumes], "times": [asdict(row) for row in times]},
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
