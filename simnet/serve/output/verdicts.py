"""In how many cells of a serving table ours gains at least what the paper's system does. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from molink.simnet.serve.output.order import METRICS, MORE_IS_BETTER, OURS
from molink.simnet.serve.paper import MOLINK, SYSTEM_OF
from molink.simnet.serve.presets import Preset
from molink.simnet.serve.rows import ServeRow, by_setting


@dataclass(frozen=True, slots=True)
class Count:
    """Of cells for which the paper prints both."""

    reached: int
    cells: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """Ours against one baseline."""

    subject: str
    baseline: str
    system: str
    """That the baseline stands for, whose printed values count."""
    counts: tuple[tuple[str, Count], ...]
    """By metric, where the paper prints it."""


def verdicts(preset: Preset, rows: Sequence[ServeRow]) -> tuple[Verdict, ...]:
    """One for each system that the paper's own is compared with; none where ours did not run."""
    return tuple(_verdicts(preset, by_setting(preset, rows)))


def _verdicts(preset: Preset, settings: Sequence[Sequence[ServeRow]]) -> Iterator[Verdict]:
    names = dict.fromkeys(row.system for rows in settings for row in rows if _is_baseline(row, preset))
    for name in names:
        compared = [found for rows in settings if (found := _compared(name, rows)) is not None]
        counts = []
        for metric, field in METRICS:
            pairs = [pair for one in compared if (pair := _gains(field, *one)) is not None]
            if pairs:
                counts.append((metric, Count(sum(ours >= papers for ours, papers in pairs), len(pairs))))
        if counts:
            base = compared[0][1]
            yield Verdict(compared[0][0].system, name, SYSTEM_OF[base.policy], tuple(counts))


def _is_baseline(row: ServeRow, preset: Preset) -> bool:
    if row.technique:
        return row.technique == preset.baseline
    return SYSTEM_OF.get(row.policy, MOLINK) != MOLINK


def _compared(baseline: str, rows: Sequence[ServeRow]) -> tuple[ServeRow, ServeRow, ServeRow] | None:
    """Of one setting: ours at its fullest, the baseline, and the row that has the printed values of the paper's own."""
    ours = [row for row in rows if row.policy == OURS]
    base = [row for row in rows if row.system == baseline]
    printed = [row for row in rows if SYSTEM_OF.get(row.policy) == MOLINK and row.paper_ttft_s is not None]
    if not (ours and base and printed):
        return None
    return ours[-1], base[0], printed[-1]


def _gains(field: str, ours: ServeRow, base: ServeRow, printed: ServeRow) -> tuple[float, float] | None:
    """By how much ours is better than the baseline, and the paper's than its own; None where a value is missing."""
    values = (
        getattr(ours, field),
        getattr(base, field),
        getattr(printed, f"paper_{field}"),
        getattr(base, f"paper_{field}"),
    )
    if any(not value for value in values):
        return None
    own, of, paper, paper_of = values
    if field == MORE_IS_BETTER:
        return own / of - 1, paper / paper_of - 1
    return 1 - own / of, 1 - paper / paper_of
