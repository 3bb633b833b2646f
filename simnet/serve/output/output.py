"""The figures that `molink-simnet serve` leaves."""

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from molink.simnet.core.request_load import arrivals
from molink.simnet.presentation.pictures import Picture
from molink.simnet.serve.cells import Circuits
from molink.simnet.serve.output.competition import record
from molink.simnet.serve.output.figures import draw_sweep, draw_table
from molink.simnet.serve.output.paper_figures import FIGURES, draw_wire
from molink.simnet.serve.presets import Preset
from molink.simnet.serve.rows import ServeRow
from molink.simnet.serve.served_as import PETALS

_SETTLED_S = 30.0
"""Requests have come for so long when what the lines carry is drawn."""
_WINDOW_S = 4.0


def draw_serving(folder: Path, table: Preset, rows: Sequence[ServeRow], circuits: Circuits) -> list[Picture]:
    """What was run; with a table of the papers also their figures."""
    wire = [] if all(cell.policy == PETALS for cell in table.cells) else [_draw_wire(folder, table, circuits)]
    if table.swept:
        return [*draw_sweep(table, rows, folder), *wire]
    return [draw_table(table, rows, folder), *wire, *(draw(folder) for draw in FIGURES.values())]


def _draw_wire(folder: Path, table: Preset, circuits: Circuits) -> Picture:
    """Of the first setting, when a prompt comes; Petals has no lines between servers."""
    first = next(cell for cell in table.cells if cell.policy != PETALS)
    until_s = 4 * _SETTLED_S
    coming = arrivals(circuits.load.trace, first.setting.rate_rps, until_s)
    requests = list(takewhile(lambda one: one.arrival_s < until_s, coming))
    prompt_s = next((one.arrival_s for one in requests if one.arrival_s >= _SETTLED_S), _SETTLED_S)
    window_s = (prompt_s - _WINDOW_S / 8, prompt_s + 7 * _WINDOW_S / 8)
    alike = [
        cell
        for cell in table.cells
        if (cell.setting, cell.peers) == (first.setting, first.peers) and cell.policy != PETALS
    ]
    runs = {
        cell.technique or cell.policy: record(
            circuits.scenario(cell), cell.policy, cell.served_as, requests, window_s[1]
        )
        for cell in alike
    }
    title = (
        f"{table.model} on {first.peers} x {table.device}: {first.setting.rate_rps:g} requests/s, "
        f"{first.setting.bandwidth_mbps:g} Mbps, {first.setting.delay_ms:g} ms"
    )
    return draw_wire(list(runs.items()), window_s, title, folder)
