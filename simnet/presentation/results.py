"""What a command has found out, and where it goes: to the terminal, to programs as JSON, and into a folder."""

import csv
import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from molink.client.commands.presentation import console
from molink.commands import EXIT_USAGE, CommandFailed, tell
from molink.progress import Progress
from molink.simnet.presentation.pictures import Picture
from molink.simnet.presentation.report import Report, write_report

if TYPE_CHECKING:
    from rich.table import Table

Draw = Callable[[Path], Sequence[Picture]]
"""Draws figures into a folder; may raise OSError."""


@dataclass(frozen=True, slots=True)
class Findings:
    """What one run of a command has found out."""

    command: str
    title: str
    """Of its report."""
    parameters: Mapping[str, object]
    """What it takes to run the same again."""
    rows: Sequence[Mapping[str, object]]
    tables: Sequence["Table"]
    """The same for people."""
    remarks: Sequence[str] = ()
    more: Mapping[str, object] = field(default_factory=dict)
    """What the document has beside its rows."""

    @property
    def document(self) -> dict[str, object]:
        """What `--json` prints and `result.json` holds."""
        return result_document(self.command, self.parameters, self.rows) | dict(self.more)


def result_document(
    command: str, parameters: Mapping[str, object], rows: Sequence[Mapping[str, object]]
) -> dict[str, object]:
    """JSON-ready."""
    return {"command": command, "parameters": dict(parameters), "rows": list(rows)}


def deliver(found: Findings, *, as_json: bool, folder: Path | None, draw: Draw | None = None) -> None:
    """Prints tables, or JSON and nothing else; fills the folder, if there is one.

    Raises:
        CommandFailed: the folder cannot be written to.
    """
    if as_json:
        print(json.dumps(found.document, indent=2, allow_nan=False))
    else:
        for shown in (*found.tables, *found.remarks):
            console().print(shown)
    if folder is None:
        return
    try:
        write_json(folder / "result.json", found.document)
        with Progress() as progress:
            progress.begin("drawing figures")
            pictures = draw(folder) if draw is not None else ()
        report = Report(found.title, found.parameters, found.tables, found.remarks, pictures)
        written = ["result.json", write_report(folder / "report.html", report).name]
    except OSError as error:
        why = error.strerror or error
        raise CommandFailed(f"the results cannot be written to {folder}: {why}") from error
    written += [path.name for picture in pictures for path in picture.files]
    tell(f"wrote {', '.join(written)} to {folder}")


def output_folder(path: Path | None) -> Path | None:
    """The folder, made if it is not there; None if none was named. To be called before a long run, not after it.

    Raises:
        CommandFailed: it cannot be made, or nothing can be written there.
    """
    if path is None:
        return None
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
