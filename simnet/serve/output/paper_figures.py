"""What the MoLink papers draw of stages and lines: Figures 1 to 3 and 6 of the transmission paper, 4 and 5 of the
system paper; and the same of any circuit, who sends what when."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from molink.simnet.presentation.pictures import Picture, new_figure, saved
from molink.simnet.presentation.results import write_csv
from molink.simnet.serve.output import competition
from molink.simnet.serve.output.competition import Computing, Cost, Recorded, Sending

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DECODE, _PREFILL = "#0072b2", "#e69f00"
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
_LANE = 0.8


@dataclass(frozen=True, slots=True)
class Lane:
    """A line of a timeline: an engine, or an uplink."""

    name: str
    parts: Sequence[Computing | Sending]
    is_engine: bool
    """Whose steps are drawn apart."""


def draw_costs(folder: Path) -> Picture:
    """Figures 1 and 2 of the transmission paper: what an iteration computes, and what it puts on the line."""
    stem = folder / "figure-1-2-costs"
    prefill = [competition.prefill_cost(tokens) for tokens in _PROMPTS]
    decode = [competition.decode_cost(batch) for batch in _BATCHES]
    write_csv(
        stem.with_suffix(".csv"),
        ["phase", "tokens", "compute_ms", "communication_ms"],
        [
            (phase, one.tokens, one.compute_ms, one.communication_ms)
            for phase, costs in (("prefill", prefill), ("decode", decode))
            for one in costs
        ],
    )
    figure = new_figure(12.0, 4.0)
    left, middle, right = figure.subplots(1, 3)
    _stacked(left, prefill, "prefill: tokens of the prompt")
    _stacked(middle, decode, "decode: sessions")
    for costs, filled in (
        (decode, True),
        (prefill, False),
    ):  # not joined: sessions have contexts, a prompt has none
        tokens = [one.tokens for one in costs]
        style = {"fillstyle": "full" if filled else "none"}
        labels = ("computation", "line") if filled else (None, None)
        right.loglog(tokens, [one.compute_ms for one in costs], "o-", color=_DECODE, label=labels[0], **style)
        right.loglog(
            tokens, [one.communication_ms for one in costs], "s-", color=_PREFILL, label=labels[1], **style
        )
    right.set(xlabel="sessions (filled), tokens of a prompt (hollow)", ylabel="ms")
    right.legend(frameon=False)
    figure.suptitle(
        "LLaMA-30B, half of its layers on a server of RTX 4090s, 100 Mbps (roofline, not measured)",
        fontsize=10,
    )
    return saved(figure, stem, "Costs of prefill and decode (transmission paper, Figures 1 and 2)")


def draw_competition(folder: Path) -> Picture:
    """Figure 3 of the transmission paper, 5 of the system paper: decode beside a prompt of 1,000 tokens."""
    runs = [("the prompt alone (Figure 3a)", competition.alone())]
    runs += [(name, competition.competition(policy)) for policy, name in _POLICIES]
    title = "LLaMA-30B on two stages, 100 Mbps: two micro-batches of four decode, a prompt of 1,000 tokens comes at 2 s"
    caption = "Competing transmissions (transmission paper, Figure 3; system paper, Figure 5)"
    return _draw_runs(folder / "figure-3-competition", runs, _COMPETITION_S, title, caption)


def draw_bubbles(folder: Path) -> Picture:
    """Figure 6 of the transmission paper, 4 of the system paper: as many micro-batches as stages, and more."""
    runs = [(f"{count} micro-batches", competition.bubbles(count)) for count in (2, 3, 4)]
    title = "Two stages of LLaMA-30B at 100 Mbps, 10 ms"
    caption = "Bubbles (transmission paper, Figure 6; system paper, Figure 4)"
    return _draw_runs(folder / "figure-6-bubbles", runs, _BUBBLES_S, title, caption)


FIGURES: Mapping[str, Callable[[Path], Picture]] = MappingProxyType(
    {"costs": draw_costs, "competition": draw_competition, "bubbles": draw_bubbles}
)
"""By the name that `--figure` takes. They depend on nothing."""


def draw_wire(
    runs: Sequence[tuple[str, Recorded]], window_s: tuple[float, float], title: str, folder: Path
) -> Picture:
    """Which uplink sends what when: a panel for each run, a line for each uplink."""
    panels = []
    for name, recorded in runs:
        hops = 1 + max(one.stage for one in recorded.sending)
        lanes = [
            Lane(
                f"{hop + 1} to {(hop + 1) % hops + 1}",
                [one for one in recorded.sending if one.stage == hop],
                is_engine=False,
            )
            for hop in range(hops)
        ]
        busy = ", ".join(f"{100 * competition.busy(lane.parts, window_s):.0f} %" for lane in lanes)
        panels.append((f"{name}: uplinks busy {busy}", lanes))
    caption = "Who sends what when: the first setting of the table, for a few seconds"
    return _timelines(folder / "figure-wire", panels, window_s, title, caption)


def _draw_runs(
    stem: Path, runs: Iterable[tuple[str, Recorded]], window_s: tuple[float, float], title: str, caption: str
) -> Picture:
    """Two stages, and the line from the first to the second between them."""
    panels = []
    for name, recorded in runs:
        servers = [[one for one in recorded.computing if one.stage == stage] for stage in (0, 1)]
        busy = " and ".join(f"{100 * competition.busy(own, window_s):.0f} %" for own in servers)
        line = [one for one in recorded.sending if one.stage == 0]
        lanes = [
            Lane("server 1", servers[0], is_engine=True),
            Lane("line", line, is_engine=False),
            Lane("server 2", servers[1], is_engine=True),
        ]
        panels.append((f"{name}: servers busy {busy}", lanes))
    return _timelines(stem, panels, window_s, title, caption)


def _timelines(
    stem: Path,
    panels: Sequence[tuple[str, Sequence[Lane]]],
    window_s: tuple[float, float],
    title: str,
    caption: str,
) -> Picture:
    write_csv(
        stem.with_suffix(".csv"),
        ["run", "lane", "start_s", "taken_s", "phase"],
        [
            (name, lane.name, one.start_s, one.taken_s, "prefill" if one.prefill else "decode")
            for name, lanes in panels
            for lane in lanes
            for one in lane.parts
        ],
    )
    figure = new_figure(12.0, 1.0 + 0.36 * sum(len(lanes) + 1 for _, lanes in panels))
    grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False).ravel()
    for axes, (name, lanes) in zip(grid, panels, strict=True):
        for number, lane in enumerate(reversed(lanes)):
            for prefill, colour in ((False, _DECODE), (True, _PREFILL)):
                spans = [(one.start_s, one.taken_s) for one in lane.parts if one.prefill is prefill]
                where = (number + (1 - _LANE) / 2, _LANE)
                edge = "white" if lane.is_engine else colour
                axes.broken_barh(spans, where, facecolor=colour, edgecolor=edge, linewidth=0.4)
        axes.set(xlim=window_s, ylim=(0, len(lanes)))
        places = [number + 0.5 for number in range(len(lanes))]
        axes.set_yticks(places, [lane.name for lane in reversed(lanes)], fontsize=8)
        axes.set_title(name, fontsize=8, loc="left")
    figure.axes[-1].set(xlabel="s; blue: decode, orange: prefill")
    figure.suptitle(title, fontsize=10)
    return saved(figure, stem, caption)


def _stacked(axes: "Axes", costs: Sequence[Cost], label: str) -> None:
    places = range(len(costs))
    computed = [one.compute_ms for one in costs]
    axes.bar(places, computed, color=_DECODE, label="computation")
    axes.bar(places, [one.communication_ms for one in costs], bottom=computed, color=_PREFILL, label="line")
    axes.set_xticks(places, [f"{one.tokens}" for one in costs])
    axes.set(xlabel=label, ylabel="ms")
