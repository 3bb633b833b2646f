"""A serving table as grouped bars, and a sweep as lines."""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from molink.simnet.presentation.figures import Figure, Panel, Series, table_of
from molink.simnet.presentation.tables import Column
from molink.simnet.serve.output.table import METRICS, SETTINGS, shown_chunk
from molink.simnet.serve.presets import Preset
from molink.simnet.serve.rows import ServeRow


def table_figure(rows: Sequence[Any], whose: str, caption: str, columns: int = 2) -> Figure:
    """A panel for each metric, a group of bars for each setting; what the paper prints is dashed over them. Rows are
    those of `serve`, or of `emulate`."""
    names = list(dict.fromkeys(map(_system, rows)))
    varying = [name for name in list(SETTINGS)[:3] if len({getattr(row, name) for row in rows}) > 1] or [
        "rate_rps"
    ]
    panels = []
    for metric in METRICS:
        series = []
        for name in names:
            own = [row for row in rows if _system(row) == name]
            groups = [
                "\n".join(f"{getattr(row, one):g} {SETTINGS[one].unit}" for one in varying) for row in own
            ]
            series += list(_both(name, own, groups, metric))
        panels.append(Panel(series, "", f"{metric.name}, {metric.unit}", "bars"))
    printed = "; dashed: printed in the paper" if any(row.paper_tpot_s is not None for row in rows) else ""
    header, lines = table_of(rows)
    title = f"{whose}: averages over requests{printed}"
    return Figure("serving", caption, panels, header, lines, title, columns, (6.0, 3.6))


def sweep_figures(table: Preset, rows: Sequence[ServeRow]) -> list[Figure]:
    """A picture for each metric: a line for each system over what is swept first, a panel for each combination of what
    else is swept; what the paper prints is hollow."""
    return [
        _of_metric(table, rows, one) for one in METRICS if any(_value(row, one) is not None for row in rows)
    ]


def whose(table: Preset, rows: Sequence[ServeRow]) -> str:
    """Model and machines."""
    counts = sorted({row.peers for row in rows})
    return f"{table.model} on {f'{counts[0]} x ' if len(counts) == 1 else ''}{table.device}"


def _of_metric(table: Preset, rows: Sequence[ServeRow], metric: Column) -> Figure:
    over, others = table.swept[0], table.swept[1:]
    label = _label(over)
    panels = []
    for panel in product(*(dict.fromkeys(_at(row, name) for row in rows) for name in others)):
        own = [row for row in rows if tuple(_at(row, name) for name in others) == panel]
        series = [
            one
            for system in dict.fromkeys(map(_system, rows))
            if (
                mine := sorted(
                    (row for row in own if _system(row) == system), key=lambda row: _order(row, over, rows)
                )
            )
            for one in _both(system, mine, [_at(row, over) for row in mine], metric)
        ]
        title = ", ".join(
            f"{value} {SETTINGS[name].unit or SETTINGS[name].name}"
            for name, value in zip(others, panel, strict=True)
        )
        panels.append(Panel(series, label, f"{metric.name}, {metric.unit}", title=title))
    printed = any(getattr(row, metric.printed) is not None for row in rows)
    hollow = "; hollow: printed in the paper" if printed else ""
    header, lines = table_of(rows)
    return Figure(
        f"sweep-{str(metric.value).rsplit('_', 1)[0]}",
        f"{metric.name}, {metric.unit} by {label}",
        panels,
        header,
        lines,
        f"{whose(table, rows)}\naverages over requests{hollow}",
        size=(max(4.4, 6.4 / len(panels)), 3.6),
    )


def _both(name: str, rows: Sequence[Any], x: Sequence[Any], metric: Column) -> Iterator[Series]:
    """Ours, and what the paper prints."""
    yield Series(name, x, [_value(row, metric) for row in rows])
    yield Series(name, x, [getattr(row, metric.printed, None) for row in rows], printed=True)


def _value(row: Any, metric: Column) -> float | None:  # noqa: ANN401 - a row of `serve` or `emulate`
    found: float | None = getattr(row, str(metric.value))
    return found


def _at(row: ServeRow, name: str) -> Any:  # noqa: ANN401 - a number or a word
    value = getattr(row, name)
    return shown_chunk(value) if name == "prefill_chunk_tokens" else value


def _order(row: ServeRow, over: str, rows: Sequence[ServeRow]) -> float:
    """Numbers in their order, words as they come."""
    value = _at(row, over)
    if not isinstance(value, str):
        return float(value)
    return list(dict.fromkeys(_at(one, over) for one in rows)).index(value)


def _label(name: str) -> str:
    setting = SETTINGS[name]
    return f"{setting.name}, {setting.unit}" if setting.unit else setting.name


def _system(row: Any) -> str:  # noqa: ANN401 - a row of `serve` or `emulate`
    return getattr(row, "technique", "") or str(row.policy)
