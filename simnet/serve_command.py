"""`molink-simnet serve`: the serving tables of the MoLink papers, in virtual time."""

import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path

from molink.client.presentation import console
from molink.client.progress import Progress
from molink.dht.commands import EXIT_USAGE, CommandFailed, Debug, Json, Verbose, start_logging, tell
from molink.simnet import serve_options as options
from molink.simnet.emulate_options import (
    parse_micro_batches,
    parse_rates,
    require_not_negative,
    require_positive,
)
from molink.simnet.model_shapes import MODEL_SHAPES
from molink.simnet.named_devices import device_named
from molink.simnet.paper_serving import Setting
from molink.simnet.request_load import kept
from molink.simnet.results import output_folder, result_document, write_json
from molink.simnet.serve_presets import DURATION_S, WARM_UP_S, Preset, PresetCell, preset
from molink.simnet.serve_rows import serve_rows
from molink.simnet.serve_scenario import SOFTWARE_MS, Scenario, Stage
from molink.simnet.serve_table import serve_table
from molink.simnet.simulated_serving import Load, SimulatedRun, simulate_serving
from molink.simnet.spans import even_spans
from molink.simnet.traces import BUNDLED, bundled_trace, read_trace

EXAMPLE = "molink-simnet serve --preset molink-table2 --output results"


def serve(
    preset_name: options.PresetName = "molink-table2",
    policies: options.Policies = None,
    rate: options.Rate = None,
    bandwidth_mbps: options.Bandwidth = None,
    delay_ms: options.Delay = None,
    peers: options.Peers = None,
    model: options.Model = None,
    device: options.Device = None,
    micro_batches: options.MicroBatches = None,
    prefill_chunk: options.PrefillChunk = None,
    tensors_per_boundary: options.Tensors = 2,
    software_ms: options.Software = SOFTWARE_MS,
    duration: options.Duration = DURATION_S,
    warm_up: options.WarmUp = WARM_UP_S,
    trace: options.Trace = None,
    seed: options.Seed = 0,
    jobs: options.Jobs = None,
    output: options.Output = None,
    as_json: Json = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Serve a trace on a simulated circuit.

    Peers decide with the product's own objects, in virtual time: batches, micro-batches, chunks of prompts, what the
    uplink carries next. Each policy stands for a system, as in `emulate`. Shows averages of time to first token
    (TTFT), time per output token (TPOT), latency and throughput, beside what the paper prints.
    """
    start_logging(verbose=verbose, debug=debug)
    try:
        table = preset(preset_name, None if policies is None else _names(policies))
        table = _changed(table, rate, bandwidth_mbps, delay_ms, peers, model, device)
        table = replace(
            table,
            tensors_per_boundary=tensors_per_boundary,
            cells=_served(table.cells, parse_micro_batches(micro_batches), prefill_chunk),
        )
        require_not_negative("--software-ms", software_ms)
        requests = bundled_trace() if trace is None else read_trace(trace)
        scenario = _scenario(table, software_ms, seed)
        kept_requests = kept(requests, table.limits, scenario.shape.spec())
    except ValueError as error:
        raise CommandFailed(str(error), EXIT_USAGE) from error
    folder = None if output is None else output_folder(output)
    load = Load(kept_requests, 1.0, warm_up, duration, seed)
    runs = _all_runs(table, scenario, load, jobs or os.cpu_count() or 1)
    rows = serve_rows(table, runs)
    parameters = _parameters(table, scenario, load, BUNDLED if trace is None else str(trace))
    document = result_document("serve", parameters, [asdict(row) for row in rows])
    if as_json:
        print(json.dumps(document, indent=2, allow_nan=False))
    else:
        console().print(serve_table(table, rows))
    if folder is not None:
        _write(folder, document)


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip().lower() for name in text.split(",") if name.strip()))


def _changed(
    table: Preset,
    rate: str | None,
    bandwidth_mbps: str | None,
    delay_ms: str | None,
    peers: int | None,
    model: str | None,
    device: str | None,
) -> Preset:
    """The table at other settings, of which the paper prints nothing."""
    if model is not None and model not in MODEL_SHAPES:
        raise ValueError(f"--model {model} has no known shape: choose from {', '.join(MODEL_SHAPES)}")
    other_machines = (peers or table.peers, model or table.model, device or table.device) != (
        table.peers, table.model, table.device,
    )  # fmt: skip
    rates = None if rate is None else parse_rates(rate)
    bandwidths = None if bandwidth_mbps is None else _numbers("--bandwidth-mbps", bandwidth_mbps)
    delays = None if delay_ms is None else _numbers("--delay-ms", delay_ms)
    for one in bandwidths or ():
        require_positive("--bandwidth-mbps", one)
    for one in delays or ():
        require_not_negative("--delay-ms", one)
    known = {(cell.setting, cell.policy, cell.technique): cell for cell in table.cells}
    cells: dict[tuple[Setting, str, str], PresetCell] = {}
    for cell in table.cells:
        own = cell.setting
        for setting in (
            Setting(*values)
            for values in product(
                rates or (own.rate_rps,), bandwidths or (own.bandwidth_mbps,), delays or (own.delay_ms,)
            )
        ):
            key = (setting, cell.policy, cell.technique)
            found = known.get(key, replace(cell, setting=setting, printed=None))
            cells[key] = replace(found, printed=None) if other_machines else found
    ordered = sorted(
        cells.values(), key=lambda cell: list(dict.fromkeys(one[0] for one in cells)).index(cell.setting)
    )
    return replace(
        table,
        cells=tuple(ordered),
        peers=peers or table.peers,
        model=model or table.model,
        device=device or table.device,
    )


def _numbers(option: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        raise ValueError(f"{option} must be numbers with commas between them, got {text!r}") from None


def _served(
    cells: Sequence[PresetCell], micro_batches: str | None, prefill_chunk: int | None
) -> tuple[PresetCell, ...]:
    return tuple(
        replace(
            cell,
            served_as=replace(
                cell.served_as,
                micro_batches=micro_batches or cell.served_as.micro_batches,
                prefill_chunk_tokens=prefill_chunk or cell.served_as.prefill_chunk_tokens,
            ),
        )
        for cell in cells
    )


def _scenario(table: Preset, software_ms: float, seed: int) -> Scenario:
    """Its lines are those of the first cell; each cell has its own."""
    shape = replace(MODEL_SHAPES[table.model], tensors_per_boundary=table.tensors_per_boundary)
    device = device_named(table.device)
    stages = tuple(Stage(device, span) for span in even_spans(shape.layers, table.peers))
    setting = table.cells[0].setting
    return Scenario(shape, stages, setting.bandwidth_mbps, setting.delay_ms, software_ms, seed=seed)


def _run(scenario: Scenario, load: Load, cell: PresetCell) -> SimulatedRun:
    """In a process of its own."""
    setting = cell.setting
    there = replace(scenario, bandwidth_mbps=setting.bandwidth_mbps, delay_ms=setting.delay_ms)
    return simulate_serving(there, cell.policy, cell.served_as, replace(load, rate_rps=setting.rate_rps))


def _all_runs(table: Preset, scenario: Scenario, load: Load, jobs: int) -> list[SimulatedRun]:
    """As many at a time as there are jobs. A process each: they only compute."""
    found: dict[int, SimulatedRun] = {}
    with Progress() as progress:
        progress.begin(f"{table.name}: 0 of {len(table.cells)} cells")
        for number, run in _finished(table, scenario, load, jobs):
            found[number] = run
            progress.report(f"{table.name}: {len(found)} of {len(table.cells)} cells")
    return [found[number] for number in range(len(table.cells))]


def _finished(table: Preset, scenario: Scenario, load: Load, jobs: int) -> Iterator[tuple[int, SimulatedRun]]:
    if jobs == 1 or len(table.cells) == 1:
        for number, cell in enumerate(table.cells):
            yield number, _run(scenario, load, cell)
        return
    with ProcessPoolExecutor(min(jobs, len(table.cells)), mp_context=get_context("spawn")) as pool:
        busiest_first = sorted(range(len(table.cells)), key=lambda at: -table.cells[at].setting.rate_rps)
        running = {pool.submit(_run, scenario, load, table.cells[at]): at for at in busiest_first}
        for done in as_completed(running):
            yield running[done], done.result()


def _write(folder: Path, document: dict[str, object]) -> None:
    try:
        write_json(folder / "result.json", document)
    except OSError as error:
        raise CommandFailed(
            f"the results cannot be written to {folder}: {error.strerror or error}"
        ) from error
    tell(f"wrote result.json to {folder}")


def _parameters(table: Preset, scenario: Scenario, load: Load, trace: str) -> dict[str, object]:
    """What it takes to run the same again."""
    return {
        "preset": table.name,
        "policies": list(dict.fromkeys(cell.policy for cell in table.cells)),
        "model": scenario.shape.name,
        "device": table.device,
        "peers": table.peers,
        "spans": [[stage.span.start, stage.span.stop] for stage in scenario.stages],
        "tensors_per_boundary": table.tensors_per_boundary,
        "software_ms": scenario.software_ms,
        "trace": trace,
        "trace_requests": len(load.trace),
        "max_prompt_tokens": table.limits.prompt_tokens,
        "max_new_tokens": table.limits.new_tokens,
        "warm_up_s": load.warm_up_s,
        "duration_s": load.duration_s,
        "seed": load.seed,
    }
