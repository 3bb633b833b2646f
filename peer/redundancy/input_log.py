"""Inputs of sessions, kept as they came, so that a standby can compute its copy from them. Pure.

A log is the rows of consecutive tokens up to the one that was computed last. All logs of a peer share one budget: when
it is spent, those of sessions that nobody keeps a copy of go first, and then the rows that standbys have.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from molink.routing.routes.copy_forms import TOKEN_ID_BYTES

MOST_LOGGED_BYTES = 256 * 1024 * 1024
LOGGED_PART = 1 / 32
"""Of a peer's memory."""
SEGMENT_BYTES = 64 * 1024
"""Rows that came together and are no fewer bytes are kept as they came: to copy those of a prompt takes a peer's loop
milliseconds. Others are collected in segments of about so much."""


def log_limit_bytes(memory_bytes: int | None) -> int:
    """Returns what the logs of a peer with so much memory may take; None: nobody has limited it."""
    return (
        MOST_LOGGED_BYTES if memory_bytes is None else min(MOST_LOGGED_BYTES, int(memory_bytes * LOGGED_PART))
    )


@dataclass(slots=True, eq=False)
class InputLogs:
    """Owns the memory of all logs of a peer."""

    limit_bytes: int
    used_bytes: int = 0
    _logs: "dict[InputLog, None]" = field(default_factory=dict)

    def open(self, encoding: str, row_bytes: int) -> "InputLog":
        """A new log of rows that are so long, each in that encoding; `InputLog.close` ends it."""
        log = InputLog(self, encoding, row_bytes)
        self._logs[log] = None
        return log

    def closed(self, log: "InputLog") -> None:
        """The log, which is empty, is no more."""
        self._logs.pop(log, None)

    def make_room(self, size_bytes: int, asking: "InputLog") -> bool:
        """Whether so many bytes more are within the budget now."""
        if size_bytes > self.limit_bytes:
            return False
        for log in self._droppable(asking):
            if self.used_bytes + size_bytes <= self.limit_bytes:
                break
            log.drop()
        return self.used_bytes + size_bytes <= self.limit_bytes

    def _droppable(self, asking: "InputLog") -> "Iterator[InputLog]":
        logs = tuple(self._logs)
        yield from (log for log in logs if log is not asking and log.kept_tokens is None)
        yield from (log for log in logs if log.kept_tokens is not None)


@dataclass(slots=True, eq=False)
class InputLog:
    """Rows [start, end) of one session at one hop."""

    _owner: InputLogs
    encoding: str
    """Of the rows; empty: they are token ids."""
    row_bytes: int
    start: int = 0
    certain: int = 0
    """Up to there no row is a guess's: those behind may be refused, and others come in their places."""
    kept_tokens: int | None = None
    """So many tokens of the sequence a standby has; None: nobody keeps a copy."""
    closed: bool = False
    """Whether its session has left; what was still being computed then is not recorded."""
    _segments: deque[bytearray | memoryview] = field(default_factory=deque)
    _bytes: int = 0
    """Of all segments."""

    @property
    def end(self) -> int:
        """Behind the last row."""
        return self.start + self._bytes // self.row_bytes

    def record(self, position: int, rows: bytes | memoryview, guesses: int = 0) -> None:
        """Those of the tokens from a position on have been computed, the last so many of them guesses; what followed
        that position is no more. Many rows are not copied, and must stay as they are.

        With a gap before them, and where there is no room for them, the log begins anew.
        """
        if self.closed:
            return
        if not self.start <= position <= self.end:
            self._cut(self.start)
            self.start = position
        self._cut(position)
        if self._owner.make_room(len(rows), self):
            self._append(rows)
        else:
            self._cut(self.start)
            self.start = position + len(rows) // self.row_bytes
        self.certain = self.end - guesses

    def read(self, start: int, stop: int) -> bytes:
        """The rows of tokens [start, stop).

        Raises:
            ValueError: not all of them are here (any more).
        """
        if not self.start <= start <= stop <= self.end:
            raise ValueError(f"of tokens [{start}, {stop}) only [{self.start}, {self.end}) are here")
        first, last = (start - self.start) * self.row_bytes, (stop - self.start) * self.row_bytes
        parts = []
        for segment in self._segments:
            if first < len(segment) and last > 0:
                parts.append(memoryview(segment)[max(0, first) : last])
            first, last = first - len(segment), last - len(segment)
        return b"".join(parts)

    def drop(self) -> None:
        """Gives memory back: all of it where nobody keeps a copy, else that of the rows that the standby has."""
        rows = self.end - self.start
        if self.kept_tokens is not None:
            rows = max(0, min(rows, self.kept_tokens - self.start))
        self.start += rows
        left_bytes = self._bytes - rows * self.row_bytes
        while self._bytes > left_bytes:
            first = self._segments.popleft()
            self._count(-len(first))
            if self._bytes < left_bytes:
                rest = bytearray(first[len(first) - (left_bytes - self._bytes) :])
                self._segments.appendleft(rest)
                self._count(len(rest))

    def close(self) -> None:
        """The log ends, and its memory is free."""
        self.closed = True
        self._cut(self.start)
        self._owner.closed(self)

    def _cut(self, position: int) -> None:
        left_bytes = (position - self.start) * self.row_bytes
        while self._bytes > left_bytes:
            last = self._segments.pop()
            self._count(-len(last))
            if self._bytes < left_bytes:
                self._append(bytes(last[: left_bytes - self._bytes]))

    def _append(self, rows: bytes | memoryview) -> None:
        """Behind all others."""
        last = self._segments[-1] if self._segments else None
        if len(rows) >= SEGMENT_BYTES:
            self._segments.append(memoryview(rows))
        elif isinstance(last, bytearray) and len(last) < SEGMENT_BYTES:
            last += rows
        else:
            self._segments.append(bytearray(rows))
        self._count(len(rows))

    def _count(self, size_bytes: int) -> None:
        """So many bytes more, or fewer, are kept."""
        self._bytes += size_bytes
        self._owner.used_bytes += size_bytes


def token_rows(token_ids: tuple[int, ...] | list[int]) -> bytes:
    """The rows of a head's log."""
    return b"".join(token_id.to_bytes(TOKEN_ID_BYTES, "little") for token_id in token_ids)
