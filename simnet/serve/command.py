"""`molink-simnet serve`: the serving tables of the MoLink papers, and sweeps, in virtual time."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from molink.commands import EXIT_USAGE, CommandFailed
from molink.peer.device.device import processor_count
from molink.simnet.core.matrices import read_matrix
from molink.simnet.core.request_load import kept
from molink.simnet.core.traces import BUNDLED, bundled_trace, read_trace
from molink.simnet.devices.model_shapes import shape_named
from molink.simnet.presentation.experiments import Run
from molink.simnet.presentation.figures import Figure
from molink.simnet.presentation.options import (
    MICRO_BATCHES,
    Jobs,
    LineLatencies,
    Tensors,
    Trace,
    WarmUp,
    option,
    parse_names,
    require_not_negative,
    require_positive,
)
from molink.simnet.presentation.parallel_runs import run_all
from molink.simnet.presentation.results import Findings
from molink.simnet.presentation.tables import Column, Table
from molink.simnet.serve.cells import Circuits, circuits_of, in_regions
from molink.simnet.serve.output.figures import sweep_figures, table_figure, whose
from molink.simnet.serve.output.paper_figures import FIGURES, wire
from molink.simnet.serve.output.table import order_lines, serve_table, verdict_lines
from molink.simnet.serve.paper import SYSTEM_OF
from molink.simnet.serve.presets import DURATION_S, PRESETS, WARM_UP_S, Preset, PresetCell, preset
from molink.simnet.serve.rows import ServeRow, serve_rows
from molink.simnet.serve.scenario import SOFTWARE_MS
from molink.simnet.serve.simulated import RequestLoad
from molink.simnet.serve.sweep import QUANTITIES, changed, parse_changes

EXAMPLE = """molink-simnet serve --preset molink-table2 --output results
  molink-simnet serve --sweep mbps=50,100,200 --sweep rate=0.1,0.2 --duration 300 --output results"""


def serve(
    preset_name: Annotated[
        str, option(f"Which table: {', '.join(PRESETS)}.", "NAME", "--preset")
    ] = "molink-table2",
    policies: Annotated[
        str | None, option(f"These instead of the table's, with commas: {', '.join(SYSTEM_OF)}.", "NAMES")
    ] = None,
    rate: Annotated[
        str | None, option("Requests a second, with commas, instead of the table's.", "RATES")
    ] = None,
    sweep: Annotated[
        list[str] | None,
        option(
            f"Values of one of {', '.join(QUANTITIES)}, such as rate=0.1,0.2; again for all combinations with "
            "another. What is not swept is as in the middle of the paper's tables, or as other options say. "
            "micro-batches: numbers or rules; chunk: tokens of a prompt in a step, or computed: heads choose.",
            "NAME=VALUES",
        ),
    ] = None,
    duration: Annotated[float, option("Virtual seconds that are measured.", "S", least=0.1)] = DURATION_S,
    figure: Annotated[
        str | None,
        option(
            f"Draw only these into --output: {', '.join(FIGURES)} or all. They come with every table, too.",
            "NAMES",
        ),
    ] = None,
    bandwidth_mbps: Annotated[str | None, option("Of each uplink, instead of the table's.", "MBPS")] = None,
    delay_ms: Annotated[str | None, option("One way, instead of the table's.", "MS")] = None,
    peers: Annotated[int | None, option("Machines instead of the table's.", "N", least=1)] = None,
    micro_batches: Annotated[str | None, option(f"For every policy: {MICRO_BATCHES}.", "RULE")] = None,
    prefill_chunk: Annotated[
        int | None, option("Prompts are computed in such steps, for every policy.", "TOKENS", least=1)
    ] = None,
    speculation: Annotated[
        str | None,
        option(
            "Guessed tokens of a trip: auto, draft (a draft model too), off (unless told) or a number; several with "
            "commas.",
            "auto|draft|off|K",
        ),
    ] = None,
    temperature: Annotated[
        str | None, option("Of the recorded generations that are guessed: 0 (unless told) or 0.8.", "T")
    ] = None,
    model: Annotated[str | None, option("Instead of the table's.", "NAME")] = None,
    device: Annotated[str | None, option("As for emulate, instead of the table's.", "NAME")] = None,
    tensors_per_boundary: Tensors = 2,
    software_ms: Annotated[
        float, option("What taking in a message costs beside its way.", "MS")
    ] = SOFTWARE_MS,
    warm_up: WarmUp = WARM_UP_S,
    latency_matrix: LineLatencies = None,
    trace: Trace = None,
    seed: Annotated[int, option("Where in the trace to begin.", "S", least=0)] = 0,
    jobs: Jobs = None,
) -> Run:
    """Serve a trace on a simulated circuit.

    Peers decide with the product's own objects, in virtual time: batches, micro-batches, chunks of prompts, what the
    uplink carries next. Each policy stands for a system, as in `emulate`. Shows averages of time to first token
    (TTFT), time per output token (TPOT), latency and throughput, beside what the paper prints: of one of the papers'
    tables, or of a sweep over settings of your own.
    """
    if figure is not None:
        return _figures(figure)
    given = {
        "rate": rate,
        "mbps": bandwidth_mbps,
        "ms": delay_ms,
        "peers": None if peers is None else f"{peers}",
        "micro-batches": micro_batches,
        "chunk": None if prefill_chunk is None else f"{prefill_chunk}",
        "speculation": speculation,
        "temperature": temperature,
    }
    chosen = None if policies is None else parse_names("--policies", policies)
    changes = parse_changes(given, sweep or (), model, device)
    table = replace(changed(preset(preset_name, chosen), changes), tensors_per_boundary=tensors_per_boundary)
    matrix = None if latency_matrix is None else read_matrix(latency_matrix)
    if matrix is not None:
        if "delay_ms" in changes.values:
            raise ValueError(
                "--latency-matrix says how far machines are apart: leave out --delay-ms and --sweep ms"
            )
        table = in_regions(table, matrix)
    require_not_negative("--software-ms", software_ms)
    require_positive("--duration", duration)
    require_not_negative("--warm-up", warm_up)
    requests = bundled_trace() if trace is None else read_trace(trace)
    served = kept(requests, table.limits, shape_named(table.model).spec())
    circuits = circuits_of(
        table, RequestLoad(served, 1.0, warm_up, duration, seed), software_ms, seed, matrix
    )

    def run(_: Path | None) -> Findings:
        at_once = jobs or processor_count()
        rows = serve_rows(table, run_all(circuits.run, table.cells, at_once, weight=_weight, name=table.name))
        return Findings(
            "serve",
            table.title,
            _parameters(table, circuits, software_ms, BUNDLED if trace is None else f"{trace}")
            | {"latency_matrix": None if latency_matrix is None else f"{latency_matrix}"},
            rows,
            [serve_table(table, rows)],
            [*verdict_lines(table, rows), *order_lines(table, rows)],
            figures=lambda: _drawn(table, rows, circuits),
        )

    return run


def _drawn(table: Preset, rows: list[ServeRow], circuits: Circuits) -> list[Figure]:
    """What was run; with a table of the papers also their figures."""
    sent = wire(table, circuits)
    between = [] if sent is None else [sent]
    if table.swept:
        return [*sweep_figures(table, rows), *between]
    own = table_figure(rows, whose(table, rows), "The table as bars")
    return [own, *between, *(figure() for figure in FIGURES.values())]


def _weight(cell: PresetCell) -> float:
    return cell.setting.rate_rps


def _figures(names: str) -> Run:
    """Figures that depend on no run."""
    chosen = parse_names("--figure", names, ("all", *FIGURES))

    def run(folder: Path | None) -> Findings:
        if folder is None:
            raise CommandFailed("--figure needs --output: where to draw", EXIT_USAGE)
        drawn = {name: figure() for name, figure in FIGURES.items() if name in chosen or "all" in chosen}
        rows = [
            {"figure": name, "caption": one.caption, "file": f"{one.stem}.png"} for name, one in drawn.items()
        ]
        title = "Figures of the MoLink papers"
        columns = [
            Column("name", lambda row: row["figure"]),
            Column("what it shows", lambda row: row["caption"]),
        ]
        shown = Table(title, columns, rows)
        return Findings(
            "serve", title, {"figures": list(drawn)}, rows, [shown], figures=lambda: list(drawn.values())
        )

    return run


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
        "speculation": list(dict.fromkeys(cell.served_as.speculation for cell in cells)),
        "temperatures": list(dict.fromkeys(cell.served_as.temperature for cell in cells)),
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
