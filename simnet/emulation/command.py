"""`molink-simnet emulate`: real peer processes serve a trace of requests over shaped lines."""

import asyncio
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from molink.client.progress import Progress
from molink.dht.commands import EXIT_USAGE, CommandFailed, Debug, Json, Verbose, start_logging, tell
from molink.peer.models.choosing import FIRST_MODEL
from molink.peer.models.model import open_model
from molink.peer.transmission.policies import POLICIES
from molink.shards.catalog import ModelNotFound
from molink.shards.spec import ModelSpec
from molink.shards.store import StoreError
from molink.simnet.emulation import options
from molink.simnet.emulation.child_process import EmulationError
from molink.simnet.emulation.figures import draw_serving
from molink.simnet.emulation.rows import differing, serving_rows
from molink.simnet.emulation.run import Cell, Emulation, Run, emulate
from molink.simnet.emulation.table import serving_table, usage_table
from molink.simnet.model_shapes import QWEN2_7B, shape_named
from molink.simnet.named_devices import device_named
from molink.simnet.options import (
    Output,
    Tensors,
    Trace,
    WarmUp,
    parse_micro_batches,
    parse_names,
    parse_numbers,
    require_not_negative,
    require_positive,
)
from molink.simnet.request_load import MOST_NEW_TOKENS, MOST_PROMPT_TOKENS, LengthLimits, kept
from molink.simnet.results import Findings, deliver, output_folder, result_document, write_json
from molink.simnet.serving.served_as import ServedAs, usual
from molink.simnet.traces import BUNDLED, bundled_trace, read_trace

EXAMPLE = "molink-simnet emulate --peers 3 --bandwidth-mbps 100 --delay-ms 30 --rate 0.2,0.3 --output results"
BUSY = 0.8
"""Of a core, or of all: beyond that this machine, not what it emulates, may set the pace."""


def emulate_serving(
    peers: options.Peers = 3,
    bandwidth_mbps: options.Bandwidth = 100.0,
    delay_ms: options.Delay = 30.0,
    policy: options.Policy = options.COMPARED,
    micro_batches: options.MicroBatches = None,
    prefill_chunk: options.PrefillChunk = None,
    rate: options.Rate = "0.2,0.3",
    duration: options.Duration = 300.0,
    warm_up: WarmUp = 60.0,
    compute: options.ComputeOption = "timed",
    model: options.Model = None,
    device: options.Device = "rtx-4090",
    tensors_per_boundary: Tensors = 1,
    trace: Trace = None,
    max_prompt_tokens: options.MostPrompt = MOST_PROMPT_TOKENS,
    max_new_tokens: options.MostNew = MOST_NEW_TOKENS,
    seed: options.Seed = 0,
    output: Output = None,
    as_json: Json = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Serve a trace on peer processes over shaped lines.

    Real peers, each a process of its own behind an uplink of its own, serve requests over one circuit of even spans,
    once for each policy and rate. A policy stands for a system: its peers send, circulate micro-batches and compute
    prompts as that system does (concurrent: vLLM, zeromq: Helix, paper: that paper's MoLink). Shows averages of time
    to first token (TTFT), time per output token (TPOT) and latency, beside those of the transmission paper (its Table
    2) where it prints them.
    """
    start_logging(verbose=verbose, debug=debug)
    try:
        rule = None if micro_batches is None else _rule(micro_batches)
        cells = [
            Cell(name, rate_rps, _served_as(name, peers, rule, prefill_chunk))
            for rate_rps in parse_numbers("--rate", rate)
            for name in parse_names("--policy", policy, POLICIES)
        ]
        require_positive("--bandwidth-mbps", bandwidth_mbps)
        require_not_negative("--delay-ms", delay_ms)
        spec = _spec(compute, model, device, tensors_per_boundary)
        emulation = Emulation(
            spec=spec,
            device=device if compute == "timed" else None,
            tensors_per_boundary=tensors_per_boundary,
            peers=peers,
            bandwidth_mbps=bandwidth_mbps,
            delay_ms=delay_ms,
            trace=kept(
                bundled_trace() if trace is None else read_trace(trace),
                LengthLimits(max_prompt_tokens, max_new_tokens),
                spec,
            ),
            warm_up_s=warm_up,
            duration_s=duration,
            seed=seed,
        )
        _ = emulation.spans
    except ValueError as error:
        raise CommandFailed(str(error), EXIT_USAGE) from error
    folder = output_folder(output)
    parameters = _parameters(emulation, cells, BUNDLED if trace is None else str(trace))
    runs = _all_runs(emulation, cells, parameters, folder)
    rows = serving_rows(emulation, runs)
    found = Findings(
        "emulate",
        f"{spec.name} served by {peers} peer processes over shaped lines",
        parameters,
        [asdict(row) for row in rows],
        [serving_table(emulation, rows), usage_table(rows)],
    )
    deliver(found, as_json=as_json, folder=folder, draw=lambda where: [draw_serving(rows, where)])
    _judge(emulation, runs)


def _rule(text: str) -> str:
    found = parse_micro_batches("--micro-batches", text)
    if len(found) > 1:
        raise ValueError(f"--micro-batches is one rule or number, got {text!r}")
    return found[0]


def _served_as(policy: str, peers: int, rule: str | None, prefill_chunk: int | None) -> ServedAs:
    served_as = usual(policy, peers)
    return replace(
        served_as,
        micro_batches=rule or served_as.micro_batches,
        prefill_chunk_tokens=prefill_chunk or served_as.prefill_chunk_tokens,
    )


def _spec(compute: options.Compute, model: str | None, device: str, tensors_per_boundary: int) -> ModelSpec:
    if compute == "timed":
        shape = shape_named(model or QWEN2_7B.name)
        device_named(device)
        return replace(shape, tensors_per_boundary=tensors_per_boundary).spec()
    if tensors_per_boundary != 1:
        raise ValueError("--tensors-per-boundary needs --compute timed: engines that compute send one")
    with tempfile.TemporaryDirectory(prefix="molink-emulate-") as folder:
        digests = Path(folder) / "digests"
        opened = open_model(model or FIRST_MODEL, "auto", "none", (), digests, lambda _: None)
        try:
            return asyncio.run(opened).spec
        except (ModelNotFound, StoreError, OSError) as error:
            raise ValueError(str(error)) from error


def _all_runs(
    emulation: Emulation, cells: Sequence[Cell], parameters: dict[str, object], folder: Path | None
) -> list[Run]:
    """One after the other: at the same time they would take each other's processors. What is done is written."""
    runs: list[Run] = []
    with Progress() as progress:
        for number, cell in enumerate(cells, start=1):
            what = f"run {number} of {len(cells)}, {cell.policy} at {cell.rate_rps:g} requests/s"
            progress.begin(what)

            def report(line: str, what: str = what) -> None:
                progress.report(f"{what}: {line}")

            try:
                runs.append(asyncio.run(emulate(emulation, cell, report)))
            except EmulationError as error:
                raise CommandFailed(str(error)) from error
            if folder is not None:
                rows = [asdict(row) for row in serving_rows(emulation, runs)]
                write_json(folder / "result.json", result_document("emulate", parameters, rows))
    return runs


def _judge(emulation: Emulation, runs: Sequence[Run]) -> None:
    """Says what makes the numbers doubtful; raises CommandFailed where tokens are not what they should be."""
    cores = os.cpu_count() or 1
    for run in runs:
        name = f"{run.cell.policy} at {run.cell.rate_rps:g} requests/s"
        parts = (*run.usage.processes, run.usage.driver, run.usage.lines)
        busiest, together = max(parts), sum(parts) / cores
        if busiest > BUSY or (emulation.device is not None and together > BUSY):
            tell(
                f"{name}: this machine was at its limit (the busiest process took {100 * busiest:.0f} % of a core, "
                f"all {100 * together:.0f} % of {cores}), so the times are this machine's too"
            )
        errors = [outcome.error for outcome in run.outcomes if outcome.error is not None]
        if errors:
            tell(f"{name}: {len(errors)} requests failed, the first because {errors[0]}")
    for run, requests in differing(runs):
        raise CommandFailed(
            f"{requests} requests got other tokens under {run.cell.policy} than under {runs[0].cell.policy}"
        )


def _parameters(emulation: Emulation, cells: Sequence[Cell], trace: str) -> dict[str, object]:
    """What it takes to run the same again."""
    return {
        "policies": {cell.policy: asdict(cell.served_as) for cell in cells},
        "rates_rps": list(dict.fromkeys(cell.rate_rps for cell in cells)),
        "peers": emulation.peers,
        "spans": [[span.start, span.stop] for span in emulation.spans],
        "bandwidth_mbps": emulation.bandwidth_mbps,
        "delay_ms": emulation.delay_ms,
        "model": emulation.spec.name,
        "dtype": emulation.spec.dtype,
        "compute": "real" if emulation.device is None else "timed",
        "device": emulation.device,
        "tensors_per_boundary": emulation.tensors_per_boundary,
        "trace": trace,
        "trace_requests": len(emulation.trace),
        "warm_up_s": emulation.warm_up_s,
        "duration_s": emulation.duration_s,
        "seed": emulation.seed,
    }
