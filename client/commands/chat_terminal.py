"""A chat at a terminal: questions with a history and editing, answers as Markdown while they come."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from molink.client.commands.presentation import end_line, harmless, write_text

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyPressEvent
    from rich.console import Console
    from rich.live import Live
    from rich.segment import Segments

COMMANDS: Final = ("/bye", "/clear", "/help")
DRAWN_EVERY_S: Final = 0.07
"""What is not complete is drawn again no more often: each time it is read as Markdown from its beginning."""
_FENCES: Final = ("```", "~~~")


class AnswerView(Protocol):
    """Shows one answer as it comes."""

    def show(self, piece: str) -> None: ...

    def end(self) -> None:
        """It is complete, or was cut off."""
        ...


class PlainAnswer:
    """Plain answer: the text as it is."""

    def __init__(self) -> None:
        self._last = ""

    def show(self, piece: str) -> None:
        write_text(piece)
        self._last = piece or self._last

    def end(self) -> None:
        end_line(self._last)


class MarkdownAnswer:
    """Markdown answer: each block is drawn for good when it is complete, the last one again and again before."""

    def __init__(self, out: "Console", clock: Callable[[], float] = time.monotonic) -> None:
        self._out = out
        self._clock = clock
        self._open_block = ""
        self._live: Live | None = None
        self._drawn_s = -DRAWN_EVERY_S

    def show(self, piece: str) -> None:
        complete, self._open_block = complete_blocks(self._open_block + harmless(piece))
        if complete:
            self._print(complete)
            self._out.print()
        now_s = self._clock()
        if self._open_block.strip() and now_s - self._drawn_s >= DRAWN_EVERY_S:
            self._drawn_s = now_s
            self._draw()

    def end(self) -> None:
        self._print(self._open_block)
        self._open_block = ""

    def _print(self, text: str) -> None:
        from rich.markdown import Markdown

        if self._live is not None:
            self._live.stop()
            self._live = None
        if text.strip():
            self._out.print(Markdown(text))

    def _draw(self) -> None:
        from rich.live import Live

        if self._live is None:
            self._live = Live(console=self._out, transient=True, auto_refresh=False, vertical_overflow="crop")
            self._live.start()
        self._live.update(self._last_lines(), refresh=True)

    def _last_lines(self) -> "Segments":
        """As much of the open block as the terminal is high: a longer one could not be drawn over again."""
        from rich.markdown import Markdown
        from rich.segment import Segment, Segments

        lines = self._out.render_lines(Markdown(self._open_block), pad=False)[-max(1, self._out.height - 2) :]
        return Segments([segment for line in lines for segment in (*line, Segment.line())])


class PromptLines:
    """Lines that somebody types at a terminal. Alt-Enter begins a new line within a question."""

    def __init__(self, history: Path | None) -> None:
        """`history` is the file that keeps what was said, for later chats; None: it is forgotten."""
        self._session = _prompt_session(history)

    def read(self, invitation: str) -> str | None:
        """The next line; None at the end of the input. Raises KeyboardInterrupt for Ctrl-C."""
        try:
            return self._session.prompt(invitation)
        except EOFError:
            return None


def complete_blocks(text: str) -> tuple[str, str]:
    """Splits Markdown behind its last complete block: at an empty line outside of fenced code, behind which another
    block has begun that is not indented, and so no part of a list's item."""
    cut = position = 0
    fence, after_empty = "", False
    for line in text.splitlines(keepends=True):
        stripped = line.strip()
        if not fence and after_empty and stripped and not line[0].isspace():
            cut = position
        if fence:
            fence = "" if stripped.startswith(fence) and set(stripped) == {fence[0]} else fence
        elif stripped.startswith(_FENCES):
            fence = stripped[: len(stripped) - len(stripped.lstrip(stripped[0]))]
        after_empty = not stripped and not fence
        position += len(line)
    return text[:cut], text[cut:]


def _prompt_session(history: Path | None) -> "PromptSession[str]":
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings

    bindings = KeyBindings()

    @bindings.add("escape", "enter")
    def _(event: "KeyPressEvent") -> None:
        event.current_buffer.insert_text("\n")

    kept: History = InMemoryHistory()
    if history is not None:
        history.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        history.touch(mode=0o600)
        kept = FileHistory(str(history))
    return PromptSession(
        history=kept,
        completer=WordCompleter(list(COMMANDS), sentence=True),
        complete_while_typing=False,
        key_bindings=bindings,
        prompt_continuation="   > ",
    )
