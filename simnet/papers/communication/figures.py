"""Figures 1 and 4 to 10 of the communication-patterns paper with our numbers.

Volumes are the equations', times the prediction's and the simulation's; hatched bars are what the paper's text prints.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from molink.routing.parallelism.parallelism import Layout, Lengths
from molink.routing.parallelism.volumes import Volume, hybrid_volume, pipeline_volume, tensor_volume
from molink.shards.spec import ModelSpec
from molink.simnet.devices.devices import DEVICES
from molink.simnet.devices.model_shapes import MODEL_SHAPES
from molink.simnet.papers.communication.fabric import FABRICS
from molink.simnet.papers.communication.printed import LENGTHS, PRINTED_TIMES
from molink.simnet.papers.communication.rows import (
    OperationRow,
    TimeRow,
    operation_rows,
    predicted,
    time_rows,
)
from molink.simnet.papers.communication.simulated_request import simulate_request
from molink.simnet.presentation.figures import Figure, Panel, Series
from molink.simnet.presentation.tables import PRINTED

MODELS = ("llama-3.2-3b", "llama-3.1-8b", "llama-2-13b")
TIMED_TOKENS = 9
"""Tokens simulated where only times matter: the later ones take as long."""
_DEVICE, _FABRIC, _TENSORS = DEVICES["h100-94"], FABRICS["cardinal"], 2
_DECODED = (128, 256, 512)
_STRATEGIES: Mapping[str, Callable[[ModelSpec, Lengths], Volume]] = {
    "TP=4": lambda spec, lengths: tensor_volume(spec, 4, lengths),
    "TP=2 PP=2": lambda spec, lengths: hybrid_volume(spec, Layout(2, 2), lengths, first_stage=True),
    "PP=4": lambda spec, lengths: pipeline_volume(spec, 4, lengths),
}
_SOURCES = ("predicted", "simulated", "paper")
_TIMES = (("latency_s", "latency, s"), ("ttft_ms", "TTFT, ms"), ("tpot_ms", "TPOT, ms"))


def paper_figures(lengths: Lengths = LENGTHS) -> list[Figure]:
    """All of them; `lengths` is the request whose messages are counted, the paper's unless it is told otherwise."""
    across_models = [(model, Layout(tensor=4)) for model in MODELS]
    stages = [("llama-3.1-8b", Layout(pipeline=stages)) for stages in (2, 4)]
    return [
        _shares(),
        _counts("figure-4-tensor-parallelism", 4, across_models, "Allreduce", lengths),
        _counts("figure-5-pipeline-parallelism", 5, stages, "Send", lengths),
        _volumes(),
        _growth(),
        _lone(8, "llama-3.2-3b", [Layout(tensor=ranks) for ranks in (2, 4, 8)]),
        _lone(9, "llama-3.2-3b", [Layout(pipeline=stages) for stages in (2, 4, 8)]),
        _lone(10, "llama-2-13b", [Layout(8), Layout(4, 2), Layout(2, 4), Layout(pipeline=8)]),
    ]


def _times(model: str, layout: Layout) -> dict[str, TimeRow]:
    """By where they are from."""
    shape = MODEL_SHAPES[model]
    short = replace(LENGTHS, decode_tokens=TIMED_TOKENS)
    simulated = simulate_request(shape, layout, short, _DEVICE, _FABRIC, _TENSORS)
    prediction = predicted(shape, layout, LENGTHS, _DEVICE, _FABRIC)
    return {row.source: row for row in time_rows(shape, layout, LENGTHS, prediction, simulated)}


def _shares() -> Figure:
    """Figure 1: how much of a request is communication, simulated."""
    rows = []
    for layout in (Layout(2), Layout(4), Layout(1, 2), Layout(1, 4), Layout(2, 2)):
        found = _times("llama-3.1-8b", layout)["simulated"]
        latency_s, share = found.latency_s or 0.0, found.communication_share or 0.0
        rows.append((str(layout), latency_s * (1 - share), latency_s * share))
    names = [row[0] for row in rows]
    computed = Series("computation", names, [row[1] for row in rows])
    sent = Series("communication", names, [row[2] for row in rows])
    return Figure(
        "figure-1-shares",
        "Computation and communication of a request (Figure 1)",
        [Panel([computed, sent], "", "s of the request", "bars")],
        ("layout", "computation_s", "communication_s"),
        rows,
        "llama-3.1-8b: simulated computation and communication",
        size=(6.4, 3.4),
    )


def _counts(
    stem: str, number: int, settings: Sequence[tuple[str, Layout]], operation: str, lengths: Lengths
) -> Figure:
    """Figures 4 and 5: operations and their bytes, by the equations, counted of messages, and printed."""
    found: list[OperationRow] = []
    labels: list[str] = []
    for model, layout in settings:
        shape = MODEL_SHAPES[model]
        simulated = simulate_request(shape, layout, lengths, _DEVICE, _FABRIC, _TENSORS)
        rows = operation_rows(shape, layout, lengths, _TENSORS, simulated)
        own = [row for row in rows if row.operation == operation]
        found += own
        labels += [f"{model}\n{layout}\n{row.stage}" for row in own]
    counted_mb = [None if row.counted_bytes is None else row.counted_bytes / 1e6 for row in found]
    counts = [
        Series("equations", labels, [row.count for row in found]),
        Series("counted", labels, [row.counted for row in found]),
        Series(PRINTED, labels, [row.paper_count for row in found], printed=True),
    ]
    sizes = [
        Series("equations", labels, [row.corrected_bytes / 1e6 for row in found]),
        Series("counted", labels, counted_mb),
    ]
    lines = [label.replace("\n", " ") for label in labels]
    title = f"{operation}: {lengths.prefill_tokens} tokens of prompt, {lengths.decode_tokens} generated"
    return Figure(
        stem,
        f"Operations and bytes: {operation} (Figure {number})",
        [
            Panel(counts, "", "operations of one rank", "bars", log_y=True),
            Panel(sizes, "", "MB that one rank sends", "bars"),
        ],
        ("setting", "count", "counted", "paper_count", "corrected_mb", "counted_mb"),
        list(zip(lines, *(one.y for one in (*counts, *sizes)), strict=True)),
        title,
        columns=1,
        size=(max(7.0, 1.7 * len(labels)), 3.0),
    )


def _volumes() -> Figure:
    """Figure 6: the strategies' volumes as the equations print them, per rank or over boundaries."""
    specs = [MODEL_SHAPES[model].spec() for model in MODELS]
    series = [
        Series(name, MODELS, [of(spec, LENGTHS).bytes / 1e6 for spec in specs])
        for name, of in _STRATEGIES.items()
    ]
    return Figure(
        "figure-6-volumes",
        "Volumes by strategy (Figure 6)",
        [Panel(series, "", "MB by equations (1) to (3)", "bars")],
        ("model", *(f"{name}, MB" for name in _STRATEGIES)),
        list(zip(MODELS, *(one.y for one in series), strict=True)),
        "Volume of a request, 128 tokens and 128",
        size=(6.4, 3.4),
    )


def _growth() -> Figure:
    """Figure 7: the same by tokens generated."""
    panels = []
    for model in MODELS:
        spec = MODEL_SHAPES[model].spec()
        series = [
            Series(name, _DECODED, [volume(spec, Lengths(128, decoded)).bytes / 1e6 for decoded in _DECODED])
            for name, volume in _STRATEGIES.items()
        ]
        panels.append(
            Panel(series, "tokens generated", "MB by equations (1) to (3)", title=model, log_y=True)
        )
    lines = [
        (panel.title, one.name, decoded, size)
        for panel in panels
        for one in panel.series
        for decoded, size in zip(one.x, one.y, strict=True)
    ]
    header = ("model", "strategy", "decode_tokens", "volume_mb")
    return Figure("figure-7-growth", "Volumes by tokens generated (Figure 7)", panels, header, lines)


def _lone(number: int, model: str, layouts: Sequence[Layout]) -> Figure:
    """Figures 8 to 10: latency, TTFT and TPOT of a lone request."""
    found = {layout: _times(model, layout) for layout in layouts}
    lines = [
        (str(layout), source, row.latency_s, row.ttft_ms, row.tpot_ms)
        for layout, rows in found.items()
        for source, row in rows.items()
    ]
    names = [str(layout).replace(" ", "\n") for layout in layouts]
    panels = []
    for field, label in _TIMES:
        series = []
        for source in _SOURCES:
            values = [getattr(rows[source], field) if source in rows else None for rows in found.values()]
            printed = source == "paper"
            series.append(Series(PRINTED if printed else source, names, values, printed=printed))
        panels.append(Panel(series, "", label, "bars", log_y=True))
    known = sum(PRINTED_TIMES[model, layout].tpot_ms is not None for layout in layouts)
    return Figure(
        f"figure-{number}-times",
        f"Latency, TTFT and TPOT of {model} (Figure {number})",
        panels,
        ("layout", "source", "latency_s", "ttft_ms", "tpot_ms"),
        lines,
        f"{model}: paper's values of {known} layouts; ours without the engine's own time",
    )
