"""What `molink-simnet serve` leaves in a folder: numbers, figures, and a report that needs nothing else."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from molink.simnet.report import Report, write_report
from molink.simnet.results import write_json
from molink.simnet.serve_presets import Preset
from molink.simnet.serve_rows import ServeRow
from molink.simnet.serve_table import METRICS, shown_value, verdict_lines


def write_serving(
    folder: Path,
    document: dict[str, object],
    parameters: Mapping[str, object],
    preset: Preset,
    rows: Sequence[ServeRow],
) -> list[Path]:
    """The names of what was written. OSError if something cannot be."""
    from molink.simnet import serve_figures

    write_json(folder / "result.json", document)
    drawn = [
        ("The table as bars", serve_figures.draw_table(rows, folder)),
        (
            "Costs of prefill and decode (transmission paper, Figures 1 and 2)",
            serve_figures.draw_costs(folder),
        ),
        (
            "Competing transmissions (transmission paper, Figure 3; system paper, Figure 5)",
            serve_figures.draw_competition(folder),
        ),
        (
            "Bubbles (transmission paper, Figure 6; system paper, Figure 4)",
            serve_figures.draw_bubbles(folder),
        ),
    ]
    report = Report(
        title=preset.title,
        parameters=parameters,
        header=[
            "req/s",
            "Mbps",
            "ms",
            "policy",
            *(name for _, label, _, _ in METRICS for name in (label, "paper")),
        ],
        rows=[_cells(row) for row in rows],
        remarks=verdict_lines(preset, rows),
        figures=[(caption, paths[-1]) for caption, paths in drawn],
    )
    written = write_report(folder / "report.html", report)
    return [folder / "result.json", *(path for _, paths in drawn for path in paths), written]


def _cells(row: ServeRow) -> list[str]:
    cells = [f"{row.rate_rps:g}", f"{row.bandwidth_mbps:g}", f"{row.delay_ms:g}", row.technique or row.policy]
    for field, _, change, sign in METRICS:
        for prefix in ("", "paper_"):
            part = getattr(row, prefix + change)
            cells.append(shown_value(getattr(row, prefix + field), None if part is None else sign * part))
    return cells
