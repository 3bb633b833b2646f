"""Traces of requests: when each came, how long its prompt was and how long its answer.

Comma-separated, with one of two headers: `arrival_s,prompt_tokens,generated_tokens`, or that of Azure's public traces,
`TIMESTAMP,ContextTokens,GeneratedTokens`, whose times are dates.
"""

import csv
import io
import math
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from importlib.resources import files
from pathlib import Path

BUNDLED = "azure_conversation.csv"
HEADER = ("arrival_s", "prompt_tokens", "generated_tokens")
AZURE_HEADER = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_MOST_TOKENS = 10**7
_EPOCH = datetime(2000, 1, 1)


class TraceError(ValueError):
    """The text is no such trace; the message is one sentence that names file, line and column."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line of a trace."""

    arrival_s: float
    """Since the trace's first request."""
    prompt_tokens: int
    generated_tokens: int


@cache
def bundled_trace() -> tuple[TraceRequest, ...]:
    """Azure's conversations of November 2023; `data/PROVENANCE.md` says where they come from."""
    text = files("molink.simnet").joinpath("data", BUNDLED).read_text(encoding="utf-8")
    return parse_trace(text, BUNDLED)


def read_trace(path: Path) -> tuple[TraceRequest, ...]:
    """The trace in a file; raises TraceError if it cannot be read or holds something else."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path} is no text in UTF-8: byte {error.start} is out of place") from error
    return parse_trace(text, str(path))


def parse_trace(text: str, name: str) -> tuple[TraceRequest, ...]:
    """The requests that `text` holds, in order of arrival; `name` is what errors call the file. Blank lines are left
    out.

    Raises:
        TraceError: another header, no request, a cell that is no such number, or times that go back.
    """
    reader = csv.reader(io.StringIO(text), strict=True)
    header: tuple[str, ...] | None = None
    requests: list[TraceRequest] = []
    first_s = latest_s = 0.0
    try:
        for line in reader:
            cells = tuple(cell.strip() for cell in line)
            where = f"{name}, line {reader.line_num}"
            if not any(cells):
                continue
            if header is None:
                header = _header(cells, where)
                continue
            if len(cells) != len(header):
                raise TraceError(f"{where} has {len(cells)} cells, the header {len(header)}")
            arrival_s = _seconds(cells[0], header, where)
            if not requests:
                first_s = latest_s = arrival_s
            if arrival_s < latest_s:
                raise TraceError(
                    f"{where}, column 1 ({header[0]}): the time is before that of the line above"
                )
            latest_s = arrival_s
            prompt, generated = (_tokens(cells, column, header, where) for column in (1, 2))
            requests.append(TraceRequest(arrival_s - first_s, prompt, generated))
    except csv.Error as error:
        raise TraceError(f"{name}, line {reader.line_num}, is no comma-separated text: {error}") from error
    if not requests:
        raise TraceError(f"{name} has no request: it needs the header {','.join(HEADER)} and a line for each")
    return tuple(requests)


def _header(cells: tuple[str, ...], where: str) -> tuple[str, ...]:
    if cells not in (HEADER, AZURE_HEADER):
        raise TraceError(f"{where}: the header must be {','.join(HEADER)} or {','.join(AZURE_HEADER)}")
    return cells


def _seconds(cell: str, header: tuple[str, ...], where: str) -> float:
    where = f"{where}, column 1 ({header[0]})"
    try:
        if header == HEADER:
            seconds = float(cell)
        else:  # Azure's have seven digits of a second, one more than dates here have
            whole, _, fraction = cell.partition(".")
            date = datetime.fromisoformat(whole).replace(tzinfo=None)
            seconds = (date - _EPOCH).total_seconds() + float(f"0.{fraction or 0}")
    except ValueError:
        kind = "number of seconds" if header == HEADER else "time such as 2023-11-16 18:15:46.6805900"
        raise TraceError(f"{where}: {cell!r} is no {kind}") from None
    if not math.isfinite(seconds):
        raise TraceError(f"{where}: {cell!r} is no time")
    return seconds


def _tokens(cells: tuple[str, ...], column: int, header: tuple[str, ...], where: str) -> int:
    where = f"{where}, column {column + 1} ({header[column]})"
    try:
        tokens = int(cells[column])
    except ValueError:
        raise TraceError(f"{where}: {cells[column]!r} is no number of tokens") from None
    if not 1 <= tokens <= _MOST_TOKENS:
        raise TraceError(f"{where}: {tokens} is no number of tokens (1 to {_MOST_TOKENS})")
    return tokens
