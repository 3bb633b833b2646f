"""Logs of all programs: lines for people, or one JSON object for each record, for programs. On stderr."""

import json
import logging
import sys
import traceback
from datetime import UTC, datetime
from typing import Any, Final, TextIO

TEXT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_OWN_FIELDS: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
"""What every record has; anything else came with `extra`."""


class StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to whatever `sys.stderr` is when a record comes: what draws on the terminal meanwhile takes its place."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, stream: TextIO) -> None:
        raise AttributeError(f"records go to sys.stderr, not to {stream}")


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object in one line: `time` (ISO 8601, UTC), `level`, `logger`, `message`, the fields
    that came with it, and of an error `error` and `traceback`."""

    def format(self, record: logging.LogRecord) -> str:
        content: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        content |= {name: value for name, value in vars(record).items() if name not in _OWN_FIELDS}
        if record.exc_info is not None and record.exc_info[0] is not None:
            content["error"] = record.exc_info[0].__name__
            content["traceback"] = "".join(traceback.format_exception(*record.exc_info))
        return json.dumps(content, ensure_ascii=False, default=str)


def as_logged(line: str) -> str:
    """The line as it is to stand on stderr: a record of its own where records are JSON."""
    if not any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers):
        return line
    record = logging.makeLogRecord(
        {"name": "molink", "levelname": "INFO", "levelno": logging.INFO, "msg": line}
    )
    return JsonFormatter().format(record)


def log_to_stderr(level: int) -> None:
    """Writes what this product says of at least that level, and of everything else warnings; as text, until
    `log_as_json`."""
    root = logging.getLogger()
    if not root.handlers:
        handler = StderrHandler()
        handler.setFormatter(logging.Formatter(TEXT))
        root.addHandler(handler)
    logging.getLogger("molink").setLevel(level)


def log_as_json() -> None:
    """Has each record be one JSON object from now on."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, StderrHandler):
            handler.setFormatter(JsonFormatter())
