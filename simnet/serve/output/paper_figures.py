"""What the MoLink papers draw of stages and lines: Figures 1 to 3 and 6 of the transmission paper, 4 and 5 of the
system paper; and the same of any circuit, who sends what when."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from types import MappingProxyType

from molink.simnet.core.request_load import arrivals
from molink.simnet.presentation.figures import Figure, Lanes, Panel, Part, Series
from molink.simnet.serve.cells import Circuits
from molink.simnet.serve.output import competition
from molink.simnet.serve.output.competition import EngineStep, IterationCost, RunRecording, Transmission
from molink.simnet.serve.presets import Preset
from molink.simnet.serve.served_as import PETALS

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
_SETTLED_S = 30.0
"""Requests have come for so long when what the lines carry is drawn."""
_WINDOW_S = 4.0
_LANE_INCHES = 0.36


def costs() -> Figure:
    """Figures 1 and 2 of the transmission paper: what an iteration computes, and what it puts on the line."""
    prefill = [competition.prefill_cost(tokens) for tokens in _PROMPTS]
    decode = [competition.decode_cost(batch) for batch in _BATCHES]
    of_all = [("decode", decode, "sessions"), ("prefill", prefill, "tokens of the prompt")]
    both = [
        Series(what, [one.tokens for one in own], [getattr(one, field) for one in own])
        for _, own, _ in of_all  # not joined: sessions have contexts, a prompt has none
        for what, field in (("computation", "compute_ms"), ("line", "communication_ms"))
    ]
    return Figure(
        "figure-1-2-costs",
        "Costs of prefill and decode (transmission paper, Figures 1 and 2)",
        [
            *(
                Panel(_stacked(own), label, "ms", "stacked", title=phase)
                for phase, own, label in reversed(of_all)
            ),
            Panel(
                both, "sessions; tokens of a prompt", "ms", log_x=True, log_y=True, title="decode; prefill"
            ),
        ],
        ("phase", "tokens", "compute_ms", "communication_ms"),
        [
            (phase, one.tokens, one.compute_ms, one.communication_ms)
            for phase, own, _ in reversed(of_all)
            for one in own
        ],
        "LLaMA-30B, half of its layers on a server of RTX 4090s, 100 Mbps (roofline, not measured)",
    )


def _stacked(own: Sequence[IterationCost]) -> list[Series]:
    tokens = [f"{one.tokens}" for one in own]
    return [
        Series("computation", tokens, [one.compute_ms for one in own]),
        Series("line", tokens, [one.communication_ms for one in own]),
    ]


def competing() -> Figure:
    """Figure 3 of the transmission paper, 5 of the system paper: decode beside a prompt of 1,000 tokens."""
    runs = [("the prompt alone (Figure 3a)", competition.alone())]
    runs += [(name, competition.competition(policy)) for policy, name in _POLICIES]
    title = "LLaMA-30B on two stages, 100 Mbps: two micro-batches of four decode, a prompt of 1,000 tokens comes at 2 s"
    caption = "Competing transmissions (transmission paper, Figure 3; system paper, Figure 5)"
    return _stages("figure-3-competition", runs, _COMPETITION_S, title, caption)


def bubbles() -> Figure:
    """Figure 6 of the transmission paper, 4 of the system paper: as many micro-batches as stages, and more."""
    runs = [(f"{count} micro-batches", competition.bubbles(count)) for count in (2, 3, 4)]
    title = "Two stages of LLaMA-30B at 100 Mbps, 10 ms"
    caption = "Bubbles (transmission paper, Figure 6; system paper, Figure 4)"
    return _stages("figure-6-bubbles", runs, _BUBBLES_S, title, caption)


FIGURES: Mapping[str, Callable[[], Figure]] = MappingProxyType(
    {"costs": costs, "competition": competing, "bubbles": bubbles}
)
"""By the name that `--figure` takes. They depend on nothing."""


def wire(table: Preset, circuits: Circuits) -> Figure | None:
    """Which uplink sends what when in the first setting, as a prompt comes: a panel for each system, a line for each
    uplink. Petals has no lines between servers."""
    cells = [cell for cell in table.cells if cell.policy != PETALS]
    if not cells:
        return None
    first = cells[0]
    until_s = 4 * _SETTLED_S
    coming = arrivals(circuits.load.trace, first.setting.rate_rps, until_s)
    requests = list(takewhile(lambda one: one.arrival_s < until_s, coming))
    prompt_s = next((one.arrival_s for one in requests if one.arrival_s >= _SETTLED_S), _SETTLED_S)
    window_s = (prompt_s - _WINDOW_S / 8, prompt_s + 7 * _WINDOW_S / 8)
    runs: dict[str, RunRecording] = {}
    for cell in cells:
        if (cell.setting, cell.peers) == (first.setting, first.peers):
            scenario = circuits.scenario(cell)
            recorded = competition.record(scenario, cell.policy, cell.served_as, requests, window_s[1])
            runs[cell.technique or cell.policy] = recorded
    panels = []
    for name, recorded in runs.items():
        hops = 1 + max(one.stage for one in recorded.sending)
        lanes = {
            f"{hop + 1} to {(hop + 1) % hops + 1}": [one for one in recorded.sending if one.stage == hop]
            for hop in range(hops)
        }
        panels.append((f"{name}: uplinks busy {_busy(lanes.values(), window_s, ', ')}", lanes))
    title = (
        f"{table.model} on {first.peers} x {table.device}: {first.setting.rate_rps:g} requests/s, "
        f"{first.setting.bandwidth_mbps:g} Mbps, {first.setting.delay_ms:g} ms"
    )
    caption = "Who sends what when: the first setting of the table, for a few seconds"
    return _timelines("figure-wire", panels, window_s, title, caption)


def _stages(
    stem: str,
    runs: Iterable[tuple[str, RunRecording]],
    window_s: tuple[float, float],
    title: str,
    caption: str,
) -> Figure:
    """Two stages, and the line from the first to the second between them."""
    panels = []
    for name, recorded in runs:
        servers = [[one for one in recorded.computing if one.stage == stage] for stage in (0, 1)]
        line = [one for one in recorded.sending if one.stage == 0]
        lanes: dict[str, Sequence[EngineStep | Transmission]] = {
            "server 1": servers[0],
            "line": line,
            "server 2": servers[1],
        }
        panels.append((f"{name}: servers busy {_busy(servers, window_s, ' and ')}", lanes))
    return _timelines(stem, panels, window_s, title, caption)


def _busy(
    lanes: Iterable[Sequence[EngineStep | Transmission]], window_s: tuple[float, float], between: str
) -> str:
    return between.join(f"{100 * competition.busy(own, window_s):.0f} %" for own in lanes)


def _timelines(
    stem: str,
    panels: Sequence[tuple[str, Mapping[str, Sequence[EngineStep | Transmission]]]],
    window_s: tuple[float, float],
    title: str,
    caption: str,
) -> Figure:
    shown = []
    for name, lanes in panels:
        parts = {
            lane: [Part(one.start_s, one.taken_s, "prefill" if one.prefill else "decode") for one in own]
            for lane, own in lanes.items()
        }
        shown.append(Lanes(parts, window_s, name, [lane for lane in lanes if lane.startswith("server")]))
    rows = [
        (panel.title, lane, one.start_s, one.taken_s, one.kind)
        for panel in shown
        for lane, parts in panel.lanes.items()
        for one in parts
    ]
    most = max(len(lanes) for _, lanes in panels)
    header = ("run", "lane", "start_s", "taken_s", "phase")
    return Figure(stem, caption, shown, header, rows, title, 1, (12.0, 0.2 + _LANE_INCHES * (most + 1)))
