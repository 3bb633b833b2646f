"""`molink-simnet serve`: the serving tables of the MoLink papers, and sweeps, in virtual time."""

import os
from dataclasses import asdict, replace
from pathlib import Path

from molink.commands import EXIT_USAGE, CommandFailed, Debug, Json, Verbose, start_logging
from molink.simnet.core.request_load import kept
from molink.simnet.core.traces import BUNDLED, bundled_trace, read_trace
from molink.simnet.devices.model_shapes import shape_named
from molink.simnet.presentation.options import (
    Jobs,
    Output,
    Tensors,
    Trace,
    WarmUp,
    parse_names,
    require_not_negative,
    require_positive,
)
from molink.simnet.presentation.parallel_runs import run_all
from molink.simnet.presentation.results import Findings, deliver, output_folder
from molink.simnet.serve import options
from molink.simnet.serve.cells import Circuits, circuits_of
from molink.simnet.serve.output.output import draw_serving
from molink.simnet.serve.output.paper_figures import FIGURES
from molink.simnet.serve.output.table import order_lines, serve_table, verdict_lines
from molink.simnet.serve.presets import DURATION_S, WARM_UP_S, Preset, PresetCell, preset
from molink.simnet.serve.rows import serve_rows
from molink.simnet.serve.scenario import SOFTWARE_MS
from molink.simnet.serve.simulated import Load
from molink.simnet.serve.sweep import QUANTITIES, changed, parse_changes

EXAMPLE = """molink-simnet serve --preset molink-table2 --output results
  molink-simnet serve --sweep mbps=50,100,200 --sweep rate=0.1,0.2 --duration 300 --output results"""


def serve(
    preset_name: options.PresetName = "molink-table2",
    policies: options.Policies = None,
    sweep: options.Sweep = None,
    figure: options.FigureNames = None,
    rate: options.Rate = None,
    bandwidth_mbps: options.Bandwidth = None,
    delay_ms: options.Delay = None,
    peers: options.Peers = None,
    micro_batches: options.MicroBatches = None,
    prefill_chunk: options.PrefillChunk = None,
    model: options.Model = None,
    device: options.Device = None,
    tensors_per_boundary: Tensors = 2,
    software_ms: options.Software = SOFTWARE_MS,
    duration: options.Duration = DURATION_S,
    warm_up: WarmUp = WARM_UP_S,
    trace: Trace = None,
    seed: options.Seed = 0,
    jobs: Jobs = None,
    output: Output = None,
    as_json: Json = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Serve a trace on a simulated circuit.

    Peers decide with the product's own objects, in virtual time: batches, micro-batches, chunks of prompts, what the
    uplink carries next. Each policy stands for a system, as in `emulate`. Shows averages of time to first token
    (TTFT), time per output token (TPOT), latency and throughput, beside what the paper prints: of one of the papers'
    tables, or of a sweep over settings of your own.
    """
    start_logging(verbose=verbose, debug=debug)
    if figure is not None:
        _figures(figure, output_folder(output), as_json)
        return
    given = {
        "rate": rate,
        "mbps": bandwidth_mbps,
        "ms": delay_ms,
        "peers": None if peers is None else f"{peers}",
        "micro-batches": micro_batches,
        "chunk": None if prefill_chunk is None else f"{prefill_chunk}",
    }
    try:
        chosen = None if policies is None else parse_names("--policies", policies)
        changes = parse_changes(given, sweep or (), model, device)
        table = replace(
            changed(preset(preset_name, chosen), changes), tensors_per_boundary=tensors_per_boundary
        )
        require_not_negative("--software-ms", software_ms)
        require_positive("--duration", duration)
        require_not_negative("--warm-up", warm_up)
        requests = bundled_trace() if trace is None else read_trace(trace)
        served = kept(requests, table.limits, shape_named(table.model).spec())
        load = Load(served, 1.0, warm_up, duration, seed)
        circuits = circuits_of(table, load, software_ms, seed)
    except ValueError as error:
        raise CommandFailed(str(error), EXIT_USAGE) from error
    folder = output_folder(output)
    runs = run_all(circuits.run, table.cells, jobs or os.cpu_count() or 1, weight=_weight, name=table.name)
    rows = serve_rows(table, runs)
    found = Findings(
        "serve",
        table.title,
        _parameters(table, circuits, software_ms, BUNDLED if trace is None else f"{trace}"),
        [asdict(row) for row in rows],
        [serve_table(table, rows)],
        [*verdict_lines(table, rows), *order_lines(table, rows)],
    )
    deliver(
        found, as_json=as_json, folder=folder, draw=lambda where: draw_serving(where, table, rows, circuits)
    )


def _weight(cell: PresetCell) -> float:
    return cell.setting.rate_rps


def _figures(names: str, folder: Path | None, as_json: bool) -> None:
    """Draws figures that depend on no run."""
    from rich.table import Table

    try:
        chosen = parse_names("--figure", names, ("all", *FIGURES))
        if folder is None:
            raise ValueError("--figure needs --output: where to draw")
    except ValueError as error:
        raise CommandFailed(str(error), EXIT_USAGE) from error
    drawn = {name: draw(folder) for name, draw in FIGURES.items() if name in chosen or "all" in chosen}
    table = Table(title="Figures of the MoLink papers", title_justify="left")
    table.add_column("name")
    table.add_column("what it shows")
    for name, picture in drawn.items():
        table.add_row(name, picture.caption)
    rows = [{"figure": name, "caption": one.caption, "file": one.png.name} for name, one in drawn.items()]
    found = Findings("serve", "Figures of the MoLink papers", {"figures": list(drawn)}, rows, [table])
    deliver(found, as_json=as_json, folder=folder, draw=lambda _: list(drawn.values()))


def _parameters(table: Preset, circuits: Circuits, software_ms: float, trace: str) -> dict[str, object]:
    """What it takes to run the same again."""
    cells, load = table.cells, circuits.load
    names = {one.field: name for name, one in QUANTITIES.items()}
    return {
        "preset": table.name,
        "sweep": [names[name] for name in table.swept],
        "policies": list(dict.fromkeys(cell.policy for cell in cells)),
        "rates_rps": list(dict.fromkeys(cell.setting.rate_rps for cell in cells)),
        "bandwidths_mbps": list(dict.fromkeys(cell.setting.bandwidth_mbps for cell in cells)),
        "delays_ms": list(dict.fromkeys(cell.setting.delay_ms for cell in cells)),
        "micro_batches": list(dict.fromkeys(cell.served_as.micro_batches for cell in cells)),
        "prefill_chunk_tokens": list(dict.fromkeys(cell.served_as.prefill_chunk_tokens for cell in cells)),
        "peers": list(circuits.by_peers),
        "model": table.model,
        "device": table.device,
        "tensors_per_boundary": table.tensors_per_boundary,
        "software_ms": software_ms,
        "trace": trace,
        "trace_requests": len(load.trace),
        "max_prompt_tokens": table.limits.prompt_tokens,
        "max_new_tokens": table.limits.new_tokens,
        "warm_up_s": load.warm_up_s,
        "duration_s": load.duration_s,
        "seed": load.seed,
    }
