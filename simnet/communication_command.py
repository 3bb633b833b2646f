"""`molink-simnet communication`: what tensor and pipeline parallelism send, and which of them to choose."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from molink.client.presentation import console
from molink.dht.commands import EXIT_USAGE, CommandFailed, Debug, Json, Verbose, start_logging, tell
from molink.routing.layout_prediction import Goal
from molink.routing.parallelism import Layout, Lengths
from molink.simnet.communication import options
from molink.simnet.communication.advice import advise as advised
from molink.simnet.communication.fabric import Fabric, fabric_named
from molink.simnet.communication.rows import operation_rows, predicted, time_rows, volume_rows
from molink.simnet.communication.simulated_request import SimulatedRequest, simulate_request
from molink.simnet.communication.tables import advice_table, operations_table, times_table, volumes_table
from molink.simnet.devices import DeviceProfile
from molink.simnet.model_shapes import MODEL_SHAPES, ModelShape
from molink.simnet.named_devices import device_named
from molink.simnet.results import output_folder, result_document, write_json

if TYPE_CHECKING:
    from rich.table import Table

EXAMPLE = "molink-simnet communication --model llama-3.1-8b --tp 2 --pp 2 --prefill 128 --decode 128"


def communication(
    model: options.Model = "llama-3.1-8b",
    tp: options.Tensor = 1,
    pp: options.Pipeline = 1,
    prefill: options.Prefill = 128,
    decode: options.Decode = 128,
    tensors_per_boundary: options.Tensors = 2,
    device: options.Device = "h100-94",
    network: options.Network = "cardinal",
    simulated_tokens: options.SimulatedTokens = None,
    advise: options.Advise = False,
    devices: options.Devices = 8,
    goal: options.GoalOption = "latency",
    max_ttft_ms: options.MostTtft = None,
    output: options.Output = None,
    as_json: Json = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Count what ranks send.

    Operations, shapes and volumes of one request under tensor parallelism, pipeline parallelism or both, by the
    equations of the communication-patterns paper and as counted of simulated messages, beside what it prints. With
    --advise: predicted times of all layouts of some devices, the best first.
    """
    start_logging(verbose=verbose, debug=debug)
    try:
        if model not in MODEL_SHAPES:
            raise ValueError(f"--model {model} has no known shape: choose from {', '.join(MODEL_SHAPES)}")
        shape, profile, fabric = MODEL_SHAPES[model], device_named(device), fabric_named(network)
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
            document, tables = _advice(
                parameters, shape, devices, profile, fabric, lengths, goal, limit_ms, tensors_per_boundary
            )
        else:
            if simulated_tokens is None:
                simulated_tokens = decode
            parameters |= {"tp": tp, "pp": pp, "simulated_tokens": min(simulated_tokens, decode)}
            document, tables = _described(
                parameters, shape, Layout(tp, pp), profile, fabric, lengths, tensors_per_boundary
            )
    except ValueError as error:
        raise CommandFailed(str(error), EXIT_USAGE) from error
    if as_json:
        print(json.dumps(document, indent=2, allow_nan=False))
    else:
        for table in tables:
            console().print(table)
    if output is not None:
        _write(output_folder(output), document)


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
) -> tuple[dict[str, object], Sequence["Table"]]:
    rows = advised(shape, devices, device, fabric, lengths, goal, max_ttft_ms, tensors)
    document = result_document("communication", parameters, [asdict(row) for row in rows])
    title = (
        f"{shape.name} on at most {devices} x {device.name} over {fabric.name}, by {goal}\n{rows[0].reason}"
    )
    return document, [advice_table(title, rows)]


def _described(
    parameters: dict[str, object],
    shape: ModelShape,
    layout: Layout,
    device: DeviceProfile,
    fabric: Fabric,
    lengths: Lengths,
    tensors: int,
) -> tuple[dict[str, object], Sequence["Table"]]:
    """Beside the rows of operations, the document has those of volumes and times."""
    if layout.pipeline > shape.layers:
        raise ValueError(
            f"{shape.name} has {shape.layers} layers: --pp {layout.pipeline} stages are too many"
        )
    tokens = int(str(parameters["simulated_tokens"]))
    simulated: SimulatedRequest | None = None
    if tokens:
        counted = replace(lengths, decode_tokens=tokens)
        simulated = simulate_request(shape, layout, counted, device, fabric, tensors)
    complete = simulated if tokens == lengths.decode_tokens else None
    operations = operation_rows(shape, layout, lengths, tensors, complete)
    volumes = volume_rows(shape.spec(), layout, lengths, tensors, complete)
    prediction = predicted(shape, layout, lengths, device, fabric)
    times = list(time_rows(shape, layout, lengths, prediction, simulated))
    document = result_document("communication", parameters, [asdict(row) for row in operations])
    document |= {"volumes": [asdict(row) for row in volumes], "times": [asdict(row) for row in times]}
    title = f"{shape.name}, {layout}, {lengths.prefill_tokens} tokens of prompt, {lengths.decode_tokens} generated"
    if not operations:
        return document, [times_table(times)]
    return document, [operations_table(title, operations), volumes_table(volumes), times_table(times)]


def _write(folder: Path, document: dict[str, object]) -> None:
    from molink.simnet.communication.figures import draw_figures

    try:
        write_json(folder / "result.json", document)
        written = draw_figures(folder)
    except OSError as error:
        raise CommandFailed(
            f"the results cannot be written to {folder}: {error.strerror or error}"
        ) from error
    tell(f"wrote result.json and {len(written)} files of figures to {folder}")
