"""Where results go: `result.json`, and a table of comma-separated values beside each figure."""

import csv
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from molink.dht.commands import EXIT_USAGE, CommandFailed


def result_document(
    command: str, parameters: dict[str, object], rows: Sequence[dict[str, object]]
) -> dict[str, object]:
    """What `--json` prints and `result.json` holds."""
    return {"command": command, "parameters": parameters, "rows": list(rows)}


def output_folder(path: Path) -> Path:
    """The folder, made if it is not there; raises CommandFailed if it cannot be written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandFailed(
            f"--output {path} cannot be made: {error.strerror or error}; name another folder", EXIT_USAGE
        ) from error
    return path


def write_json(path: Path, document: dict[str, object]) -> None:
    """Indented, one line at the end."""
    path.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """None is an empty cell."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)
