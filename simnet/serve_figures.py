"""A serving table as grouped bars, and what the MoLink papers draw of stages and lines, as pictures and tables."""

from collections.abc import Sequence
from dataclasses import astuple, fields
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from molink.simnet import competition
from molink.simnet.competition import Computing, Cost
from molink.simnet.results import write_csv
from molink.simnet.schedule_figures import new_figure, saved
from molink.simnet.serve_rows import ServeRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_METRICS = (
    ("ttft_s", "TTFT, s"),
    ("tpot_s", "TPOT, s"),
    ("latency_s", "latency, s"),
    ("throughput_tps", "tokens/s"),
)
_COLOURS = ("#999999", "#56b4e9", "#e69f00", "#0072b2", "#009e73", "#cc79a7", "#000000")
_GROUP = 0.8
_PROMPTS = (64, 128, 256, 512, 1024, 2048)
_BATCHES = (1, 2, 4, 8, 16, 32)
_POLICIES = (
    ("fifo", "serial (Figure 3b)"),
    ("concurrent", "concurrent (Figure 3c; system paper 5a)"),
    ("paper", "Algorithm 1 (Figure 3d)"),
    ("fixed-chunk", "fixed chunks (system paper 5b)"),
    ("molink", "ours"),
)
_COMPETITION_S = (1.8, 3.8)
_BUBBLES_S = (2.0, 2.5)


def draw_table(rows: Sequence[ServeRow], folder: Path) -> list[Path]:
    """A panel for each metric, a group of bars for each setting; what the paper prints is drawn hollow over them."""
    stem = folder / "serving"
    write_csv(stem.with_suffix(".csv"), [field.name for field in fields(ServeRow)], map(astuple, rows))
    settings = list(dict.fromkeys(_setting(row) for row in rows))
    names = list(dict.fromkeys(row.technique or row.policy for row in rows))
    figure = new_figure(12.0, 8.0)
    for axes, (metric, label) in zip(figure.subplots(2, 2).flat, _METRICS, strict=True):
        for number, name in enumerate(names):
            own = {_setting(row): row for row in rows if (row.technique or row.policy) == name}
            _bars(axes, [own.get(one) for one in settings], metric, name, (number, len(names)))
        axes.set_xticks(range(len(settings)), [_label(one) for one in settings], fontsize=7)
        axes.set(ylabel=label)
        axes.grid(visible=True, axis="y", linewidth=0.4, alpha=0.5)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.suptitle("Averages over requests; dashed: the paper's", fontsize=11)
    return saved(figure, stem)


def draw_costs(folder: Path) -> list[Path]:
    """Figures 1 and 2 of the transmission paper: what an iteration computes, and what it puts on the line."""
    stem = folder / "figure-1-2-costs"
    prefill = [competition.prefill_cost(tokens) for tokens in _PROMPTS]
    decode = [competition.decode_cost(batch) for batch in _BATCHES]
    write_csv(
        stem.with_suffix(".csv"),
        ["phase", "tokens", "compute_ms", "communication_ms"],
        [
            (phase, *astuple(one))
            for phase, costs in (("prefill", prefill), ("decode", decode))
            for one in costs
        ],
    )
    figure = new_figure(12.0, 4.0)
    left, middle, right = figure.subplots(1, 3)
    _stacked(left, prefill, "prefill: tokens of the prompt")
    _stacked(middle, decode, "decode: sessions")
    tokens = [one.tokens for one in (*decode, *prefill)]
    right.loglog(
        tokens, [one.compute_ms for one in (*decode, *prefill)], "o-", color=_COLOURS[3], label="computation"
    )
    right.loglog(
        tokens, [one.communication_ms for one in (*decode, *prefill)], "s-", color=_COLOURS[2], label="line"
    )
    right.set(xlabel="tokens", ylabel="ms")
    right.legend(frameon=False)
    figure.suptitle(
        "LLaMA-30B, half of its layers on a server of RTX 4090s, 100 Mbps (roofline, not measured)",
        fontsize=10,
    )
    return saved(figure, stem)


def draw_competition(folder: Path) -> list[Path]:
    """Figure 3 of the transmission paper, 5 of the system paper: decode beside a prompt of 1,000 tokens."""
    runs = [(name, competition.competition(policy)) for policy, name in _POLICIES]
    title = "LLaMA-30B on two stages, 100 Mbps: two micro-batches of four decode, a prompt of 1,000 tokens comes at 2 s"
    return _timelines(folder / "figure-3-competition", runs, _COMPETITION_S, title)


def draw_bubbles(folder: Path) -> list[Path]:
    """Figure 6 of the transmission paper, 4 of the system paper: as many micro-batches as stages, and more."""
    runs = [(f"{count} micro-batches", competition.bubbles(count)) for count in (2, 3, 4)]
    return _timelines(
        folder / "figure-6-bubbles", runs, _BUBBLES_S, "Two stages of LLaMA-30B at 100 Mbps, 10 ms"
    )


def _timelines(
    stem: Path, runs: Sequence[tuple[str, Sequence[Computing]]], window_s: tuple[float, float], title: str
) -> list[Path]:
    write_csv(
        stem.with_suffix(".csv"),
        ["run", *(field.name for field in fields(Computing))],
        [(name, *astuple(one)) for name, steps in runs for one in steps],
    )
    figure = new_figure(12.0, 1.0 + 1.1 * len(runs))
    for axes, (name, steps) in zip(figure.subplots(len(runs), 1, sharex=True).flat, runs, strict=True):
        for one in steps:
            axes.broken_barh(
                [(one.start_s, one.taken_s)], (0.1 + (1 - one.stage), 0.8),
                color=_COLOURS[2] if one.prefill else _COLOURS[3], edgecolor="white", linewidth=0.5,
            )  # fmt: skip
        busy = " and ".join(f"{100 * competition.busy(steps, stage, window_s):.0f} %" for stage in (0, 1))
        axes.set(xlim=window_s, ylim=(0, 2))
        axes.set_yticks((1.5, 0.5), ("server 1", "server 2"))
        axes.set_title(f"{name}: busy {busy}", fontsize=8, loc="left")
    figure.axes[-1].set(xlabel="s; blue: decode, orange: prefill")
    figure.suptitle(title, fontsize=10)
    return saved(figure, stem)


def _bars(
    axes: "Axes", rows: Sequence[ServeRow | None], metric: str, name: str, place: tuple[int, int]
) -> None:
    number, count = place
    width = _GROUP / count
    places = np.arange(len(rows)) + (number - (count - 1) / 2) * width
    colour = _COLOURS[number % len(_COLOURS)]
    axes.bar(
        places, [getattr(row, metric, None) or 0.0 for row in rows], 0.9 * width, color=colour, label=name
    )
    printed = [getattr(row, f"paper_{metric}", None) or 0.0 for row in rows]
    axes.bar(places, printed, 0.9 * width, fill=False, edgecolor=colour, linestyle="--")


def _stacked(axes: "Axes", costs: Sequence[Cost], label: str) -> None:
    places = range(len(costs))
    computed = [one.compute_ms for one in costs]
    axes.bar(places, computed, color=_COLOURS[3], label="computation")
    axes.bar(
        places, [one.communication_ms for one in costs], bottom=computed, color=_COLOURS[2], label="line"
    )
    axes.set_xticks(places, [f"{one.tokens}" for one in costs])
    axes.set(xlabel=label, ylabel="ms")


def _setting(row: ServeRow) -> tuple[float, float, float]:
    return row.rate_rps, row.bandwidth_mbps, row.delay_ms


def _label(setting: tuple[float, float, float]) -> str:
    rate_rps, bandwidth_mbps, delay_ms = setting
    return f"{rate_rps:g}/s\n{bandwidth_mbps:g} Mbps\n{delay_ms:g} ms"
