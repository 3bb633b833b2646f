"""A line of progress on stderr while nothing else is to be seen. Nothing of it reaches stdout."""

import logging
import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from molink.commands import plain, tell

if TYPE_CHECKING:
    from rich.status import Status

QUIET_S = 2.0
"""Where stderr is no terminal: shorter work passes without a line, and lines come no more often."""
_log = logging.getLogger("molink")


class Progress:
    """In a terminal a line that changes and goes away; elsewhere, for whoever asks (--verbose), the latest line, now
    and then, if it is new: who reads a program's stderr is told of failures alone.

    `report` may be called from any thread, and shows nothing once `end` was called, until `begin` is.
    """

    def __init__(self) -> None:
        self._status: Status | None = None
        self._shown_s: float | None = None
        self._shown = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def begin(self, line: str) -> None:
        """Work begins that may take long."""
        self._shown_s = time.monotonic()
        if self._status is not None:
            self.report(line)
        elif sys.stderr.isatty():
            from rich.console import Console
            from rich.markup import escape

            self._status = Console(stderr=True, highlight=False).status(escape(plain(line)))
            self._status.start()

    def report(self, line: str) -> None:
        """What the work is doing now."""
        now_s = time.monotonic()
        if self._status is not None:
            from rich.markup import escape

            self._status.update(escape(plain(line)))
        elif not _log.isEnabledFor(logging.INFO):
            return
        elif self._shown_s is not None and now_s - self._shown_s >= QUIET_S and line != self._shown:
            self._shown_s, self._shown = now_s, line
            tell(plain(line))

    def end(self) -> None:
        """The work has ended, or something else is to be seen: the line goes away."""
        if self._status is not None:
            self._status.stop()
        self._status = self._shown_s = None
