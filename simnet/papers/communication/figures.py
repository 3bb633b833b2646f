"""Figures 1 and 4 to 10 of the communication-patterns paper with our numbers, each as a picture and a table.

Volumes are the equations', times the prediction's and the simulation's; hatched bars are what the paper's text prints.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

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
from molink.simnet.presentation.pictures import COLOURS, Picture, new_figure, saved
from molink.simnet.presentation.results import write_csv

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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

Series = Mapping[str, Sequence[float | None]]


def draw_figures(folder: Path, lengths: Lengths = LENGTHS) -> list[Picture]:
    """All of them; `lengths` is the request whose messages are counted, the paper's unless it is told otherwise."""
    across_models = [(model, Layout(tensor=4)) for model in MODELS]
    stages = [("llama-3.1-8b", Layout(pipeline=stages)) for stages in (2, 4)]
    drawn = [
        _draw_shares(folder),
        _draw_counts(folder / "figure-4-tensor-parallelism", 4, across_models, "Allreduce", lengths),
        _draw_counts(folder / "figure-5-pipeline-parallelism", 5, stages, "Send", lengths),
        _draw_volumes(folder),
        _draw_growth(folder),
    ]
    for number, model, layouts in (
        (8, "llama-3.2-3b", [Layout(tensor=ranks) for ranks in (2, 4, 8)]),
        (9, "llama-3.2-3b", [Layout(pipeline=stages) for stages in (2, 4, 8)]),
        (10, "llama-2-13b", [Layout(8), Layout(4, 2), Layout(2, 4), Layout(pipeline=8)]),
    ):
        drawn.append(_draw_times(folder, number, model, layouts))
    return drawn


def _times(model: str, layout: Layout) -> list[TimeRow]:
    shape = MODEL_SHAPES[model]
    short = replace(LENGTHS, decode_tokens=TIMED_TOKENS)
    simulated = simulate_request(shape, layout, short, _DEVICE, _FABRIC, _TENSORS)
    prediction = predicted(shape, layout, LENGTHS, _DEVICE, _FABRIC)
    return list(time_rows(shape, layout, LENGTHS, prediction, simulated))


def _draw_shares(folder: Path) -> Picture:
    """Figure 1: how much of a request is communication, simulated."""
    layouts = (Layout(2), Layout(4), Layout(1, 2), Layout(1, 4), Layout(2, 2))
    simulated = [
        next(row for row in _times("llama-3.1-8b", layout) if row.source == "simulated") for layout in layouts
    ]
    latencies = [row.latency_s or 0.0 for row in simulated]
    shares = [row.communication_share or 0.0 for row in simulated]
    series = {
        "computation": [whole * (1 - share) for whole, share in zip(latencies, shares, strict=True)],
        "communication": [whole * share for whole, share in zip(latencies, shares, strict=True)],
    }
    stem = folder / "figure-1-shares"
    rows = zip([str(layout) for layout in layouts], *series.values(), strict=True)
    write_csv(stem.with_suffix(".csv"), ("layout", "computation_s", "communication_s"), rows)
    figure = new_figure(6.4, 4.0)
    axes = figure.subplots()
    _bars(axes, [str(layout) for layout in layouts], series, "s of the request")
    axes.set_title("llama-3.1-8b: simulated computation and communication")
    return saved(figure, stem, "Computation and communication of a request (Figure 1)")


def _draw_counts(
    stem: Path, number: int, settings: Sequence[tuple[str, Layout]], operation: str, lengths: Lengths
) -> Picture:
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
    counts: Series = {
        "equations": [row.count for row in found],
        "counted": [row.counted for row in found],
        "paper": [row.paper_count for row in found],
    }
    sizes: Series = {
        "equations": [row.corrected_bytes / 1e6 for row in found],
        "counted": [None if row.counted_bytes is None else row.counted_bytes / 1e6 for row in found],
    }
    header = ("setting", "count", "counted", "paper_count", "corrected_mb", "counted_mb")
    lines = [label.replace("\n", " ") for label in labels]
    rows_of_csv = zip(lines, *counts.values(), *sizes.values(), strict=True)
    write_csv(stem.with_suffix(".csv"), header, rows_of_csv)
    figure = new_figure(max(7.0, 1.7 * len(labels)), 6.4)
    above, below = figure.subplots(2, 1)
    _bars(above, labels, counts, "operations of one rank")
    _bars(below, labels, sizes, "MB that one rank sends")
    _decades(above)
    above.set_title(
        f"{operation}: {lengths.prefill_tokens} tokens of prompt, {lengths.decode_tokens} generated"
    )
    return saved(figure, stem, f"Operations and bytes: {operation} (Figure {number})")


def _draw_volumes(folder: Path) -> Picture:
    """Figure 6: the strategies' volumes as the equations print them, per rank or over boundaries."""
    specs = [MODEL_SHAPES[model].spec() for model in MODELS]
    series = {name: [of(spec, LENGTHS).bytes / 1e6 for spec in specs] for name, of in _STRATEGIES.items()}
    stem = folder / "figure-6-volumes"
    write_csv(
        stem.with_suffix(".csv"),
        ("model", *(f"{name}, MB" for name in series)),
        zip(MODELS, *series.values(), strict=True),
    )
    figure = new_figure(6.4, 4.0)
    axes = figure.subplots()
    _bars(axes, MODELS, series, "MB by equations (1) to (3)")
    axes.set_title("Volume of a request, 128 tokens and 128")
    return saved(figure, stem, "Volumes by strategy (Figure 6)")


def _draw_growth(folder: Path) -> Picture:
    """Figure 7: the same by tokens generated."""
    figure = new_figure(12.0, 3.8)
    lines: list[tuple[object, ...]] = []
    for axes, model in zip(figure.subplots(1, len(MODELS)), MODELS, strict=True):
        spec = MODEL_SHAPES[model].spec()
        for number, (name, volume) in enumerate(_STRATEGIES.items()):
            sizes = [volume(spec, Lengths(128, decoded)).bytes / 1e6 for decoded in _DECODED]
            axes.plot(_DECODED, sizes, marker="o", color=COLOURS[number], label=name)
            lines += [(model, name, decoded, size) for decoded, size in zip(_DECODED, sizes, strict=True)]
        axes.set(title=model, xlabel="tokens generated", ylabel="MB by equations (1) to (3)", yscale="log")
        axes.set_xticks(_DECODED)
        axes.grid(visible=True, linewidth=0.4, alpha=0.5)
        axes.legend(frameon=False)
    stem = folder / "figure-7-growth"
    write_csv(stem.with_suffix(".csv"), ("model", "strategy", "decode_tokens", "volume_mb"), lines)
    return saved(figure, stem, "Volumes by tokens generated (Figure 7)")


def _draw_times(folder: Path, number: int, model: str, layouts: Sequence[Layout]) -> Picture:
    """Figures 8 to 10: latency, TTFT and TPOT of a lone request."""
    found = {layout: {row.source: row for row in _times(model, layout)} for layout in layouts}
    sources = ("predicted", "simulated", "paper")
    lines = [
        (str(layout), source, row.latency_s, row.ttft_ms, row.tpot_ms)
        for layout, rows in found.items()
        for source, row in rows.items()
    ]
    stem = folder / f"figure-{number}-times"
    write_csv(stem.with_suffix(".csv"), ("layout", "source", "latency_s", "ttft_ms", "tpot_ms"), lines)
    figure = new_figure(12.0, 3.8)
    for axes, field in zip(figure.subplots(1, 3), ("latency_s", "ttft_ms", "tpot_ms"), strict=True):
        series = {
            source: [getattr(rows[source], field) if source in rows else None for rows in found.values()]
            for source in sources
        }
        label, unit = field.rsplit("_", 1)
        shown = label if label == "latency" else label.upper()
        _bars(axes, [str(layout).replace(" ", "\n") for layout in layouts], series, f"{shown}, {unit}")
        _decades(axes)
    printed = sum(PRINTED_TIMES[model, layout].tpot_ms is not None for layout in layouts)
    figure.suptitle(f"{model}: paper's values of {printed} layouts; ours without the engine's own time")
    return saved(figure, stem, f"Latency, TTFT and TPOT of {model} (Figure {number})")


def _bars(axes: "Axes", groups: Sequence[str], series: Series, label: str) -> None:
    """Side by side in each group; None leaves a gap."""
    width = 0.8 / len(series)
    for number, (name, values) in enumerate(series.items()):
        places = [
            group + (number - (len(series) - 1) / 2) * width
            for group, value in enumerate(values)
            if value is not None
        ]
        heights = [value for value in values if value is not None]
        if not heights:
            continue
        hatch = "//" if name == "paper" else None
        axes.bar(places, heights, width, color=COLOURS[number], hatch=hatch, label=name)
    axes.set_xticks(range(len(groups)), groups, fontsize=8)
    axes.set_ylabel(label)
    axes.grid(visible=True, axis="y", linewidth=0.4, alpha=0.5)
    axes.legend(frameon=False, fontsize=8)


def _decades(axes: "Axes") -> None:
    """A logarithmic axis from a whole decade, so that bars of all pictures begin alike."""
    axes.set_yscale("log")
    axes.set_ylim(bottom=10.0 ** math.floor(math.log10(axes.get_ylim()[0])))
