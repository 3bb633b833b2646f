"""What a command has found out, and where it goes: to the terminal, to programs as JSON, and into a folder."""

import csv
import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from molink.client.commands.presentation import console
from molink.commands import EXIT_USAGE, CommandFailed, missing_extra, tell
from molink.progress import Progress
from molink.simnet.presentation.figures import Figure
from molink.simnet.presentation.report import Report, render
from molink.simnet.presentation.tables import Table, laid_out


def _no_figures() -> Sequence[Figure]:
    return ()


def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True)
class Findings:
    """What one run of a command has found out: the one description of its table, JSON, figures and report."""

    command: str
    title: str
    """Of its report."""
    parameters: Mapping[str, object]
    """What it takes to run the same again."""
    rows: Sequence[Any]
    """Flat: dataclasses, or mappings."""
    tables: Sequence[Table]
    """The same for people."""
    remarks: Sequence[str] = ()
    more: Mapping[str, object] = field(default_factory=dict)
    """What the document has beside its rows."""
    figures: Callable[[], Sequence[Figure]] = _no_figures
    """Asked for only if there is a folder to draw them into."""
    judge: Callable[[], None] = _nothing
    """Called last; says what makes the numbers doubtful, and may raise CommandFailed."""

    @property
    def document(self) -> dict[str, object]:
        """What `--json` prints and `result.json` holds."""
        return result_document(self.command, self.parameters, self.rows) | dict(self.more)


def result_document(command: str, parameters: Mapping[str, object], rows: Sequence[Any]) -> dict[str, object]:
    """JSON-ready."""
    flat = [one if isinstance(one, Mapping) else asdict(one) for one in rows]
    return {"command": command, "parameters": dict(parameters), "rows": flat}


def deliver(found: Findings, command_line: str, *, as_json: bool, folder: Path | None) -> None:
    """Prints tables, or JSON and nothing else; fills the folder, if there is one.

    Raises:
        CommandFailed: the folder cannot be written to.
    """
    from molink.simnet.presentation.terminal import show

    grids = [laid_out(one) for one in found.tables if one.rows]
    if as_json:
        print(json.dumps(found.document, indent=2, allow_nan=False))
    else:
        for grid in grids:
            show(grid, console())
        for remark in found.remarks:
            console().print(remark, markup=False)
    if folder is not None:
        _fill(folder, found, command_line, grids)
    found.judge()


def _fill(folder: Path, found: Findings, command_line: str, grids: Sequence[Any]) -> None:
    try:
        write_json(folder / "result.json", found.document)
        with Progress() as progress:
            progress.begin("drawing figures")
            pictures = [(one, path) for one in found.figures() if (path := _drawn(one, folder)) is not None]
        date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        report = Report(found.title, date, command_line, found.parameters, grids, found.remarks, pictures)
        (folder / "report.html").write_text(render(report), encoding="utf-8")
    except OSError as error:
        why = error.strerror or error
        raise CommandFailed(f"the results cannot be written to {folder}: {why}") from error
    written = ["result.json", "report.html"]
    written += [name for figure, _ in pictures for name in (f"{figure.stem}.csv", f"{figure.stem}.png")]
    tell(f"wrote {', '.join(written)} to {folder}")


def _drawn(figure: Figure, folder: Path) -> Path | None:
    from molink.simnet.presentation.drawing import draw

    write_csv(folder / f"{figure.stem}.csv", figure.header, figure.rows)
    if not figure.panels:
        return None
    path = folder / f"{figure.stem}.png"
    draw(figure, path)
    return path


def output_folder(path: Path | None) -> Path | None:
    """The folder, made if it is not there; None if none was named. To be called before a long run, not after it.

    Raises:
        CommandFailed: it cannot be made, nothing can be written there, or nothing is there to draw with.
    """
    if path is None:
        return None
    lacking = missing_extra("matplotlib")
    if lacking is not None:
        raise CommandFailed(f"--output draws figures: {lacking}")
    done = "made"
    try:
        path.mkdir(parents=True, exist_ok=True)
        done = "written to"
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise CommandFailed(
            f"--output {path} cannot be {done}: {error.strerror or error}; name another folder", EXIT_USAGE
        ) from error
    return path


def write_json(path: Path, document: Mapping[str, object]) -> None:
    """Indented, one line at the end."""
    path.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """None is an empty cell."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)
