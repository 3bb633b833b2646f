"""A chat in the terminal: lines in, answers out, one after the other."""

import asyncio
import io
import re
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Unpack

from anyio.from_thread import BlockingPortal, start_blocking_portal

from molink.client.api.generation import Generation
from molink.client.api.sampling import Sampling
from molink.client.api.swarm import AsyncSwarm
from molink.client.commands.chat_terminal import AnswerView, MarkdownAnswer, PlainAnswer, PromptLines
from molink.client.commands.presentation import circuit_of, console, end_line, summary
from molink.client.errors import InvalidRequest, SwarmError
from molink.commands import plain, tell
from molink.progress import Progress

STOP_TIMEOUT_S = 5.0
LONGEST_WAIT_S = 0.25
"""How long Ctrl-C may go unheeded where waiting for a thread cannot be interrupted."""
INVITATION = "You: "
_GOODBYES = frozenset({"exit", "quit", "/bye", "/exit", "/quit"})
_HELP = (
    "/clear forgets what was said, /bye ends the chat; Ctrl-C stops an answer, and between answers the chat"
)


@dataclass(frozen=True, slots=True)
class ChatTerminal:
    """What the user wants of a terminal, where both input and output are one."""

    markdown: bool = True
    history: Path | None = None
    """Where what was said is kept for later chats; None: nowhere."""

    def opened(self) -> tuple[PromptLines | None, Callable[[], AnswerView]]:
        """What reads lines (None: the interpreter's own `input`, or a pipe), and what makes the view of an answer."""
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            return None, PlainAnswer
        out = console()
        return PromptLines(self.history), (lambda: MarkdownAnswer(out)) if self.markdown else PlainAnswer


@dataclass(slots=True, eq=False)
class Conversation:
    """Conversation: what was said so far, and how to go on. A turn that fails leaves nothing behind."""

    swarm: AsyncSwarm
    progress: Progress
    timeout_s: float
    sampling: Sampling
    system: str | None = None
    view: Callable[[], AnswerView] = PlainAnswer
    """Makes what shows the next answer."""
    tells_figures: bool = False
    """Whether each answer is followed by its circuit and times, on stderr."""
    turns: list[Mapping[str, str]] = field(default_factory=list)
    """User and assistant in turn."""

    async def answer(self, said: str) -> None:
        """Streams the model's answer to stdout. The oldest turns are forgotten when the context is full.

        Raises:
            SwarmError: there is no answer, or only a part of one.
        """
        while True:
            try:
                await self._answer(said)
            except InvalidRequest as error:
                if error.parameter != "prompt" or not self.turns:
                    raise
                del self.turns[:2]
                tell("(the chat has grown too long for the model: its oldest turn is forgotten)")
            else:
                return

    async def _answer(self, said: str) -> None:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        asked = {"role": "user", "content": said}
        messages = [*system, *self.turns, asked]
        text = ""
        generation: Generation | None = None
        view: AnswerView | None = None
        self.progress.begin("Looking for a circuit")
        pieces = self.swarm.stream_chat_events(messages, timeout_s=self.timeout_s, **self.sampling)
        try:
            async with aclosing(pieces):
                async for piece in pieces:
                    generation = piece.generation
                    if piece.text:
                        self.progress.end()
                        view = view or self.view()
                        view.show(piece.text)
                        text += piece.text
        except asyncio.CancelledError:  # what was said up to here was said
            if text:
                self.turns += [asked, {"role": "assistant", "content": text}]
            raise
        finally:
            self.progress.end()
            if view is not None:
                view.end()
        if view is None:
            end_line(text)
        self.turns += [asked, {"role": "assistant", "content": text}]
        if self.tells_figures and generation is not None:
            tell(f"({circuit_of(generation)}; {summary(generation)})")


def converse(
    swarm: AsyncSwarm,
    progress: Progress,
    system: str | None,
    timeout_s: float,
    terminal: ChatTerminal,
    **sampling: Unpack[Sampling],
) -> bool:
    """Chats until the end of the input. Returns whether anything was answered, or nothing was asked.

    The swarm lives on a loop in a thread of its own, so that this one can wait for the keyboard.

    Raises:
        SwarmError: the swarm cannot be reached.
    """
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # bytes that are no characters do not end a chat
    answered, failed = 0, 0
    progress.begin("Asking the swarm")
    with start_blocking_portal("asyncio") as portal, portal.wrap_async_context_manager(swarm):
        progress.end()
        if sys.stdin.isatty():
            tell(f"Talking with {plain(swarm.model.name)}; /bye ends it, /help says what else there is")
        lines, view = terminal.opened()
        conversation = Conversation(
            swarm, progress, timeout_s, sampling, system, view, tells_figures=sys.stderr.isatty()
        )
        while (said := _next_line(lines)) is not None:
            word = said.strip()
            if not word or (sys.stdin.isatty() and _is_command(word, conversation)):
                continue
            if sys.stdin.isatty() and word.lower() in _GOODBYES:
                break
            try:
                answered += _turn(portal, conversation, said)
            except SwarmError as error:
                failed += 1
                tell(f"molink: {plain(str(error))}")
    return answered > 0 or failed == 0


def _is_command(word: str, conversation: Conversation) -> bool:
    """Does what a line such as /help asks for, if it does. One that ends the chat is none of these."""
    if word.lower() in _GOODBYES or re.fullmatch(r"/[a-z?]+", word) is None:
        return False
    if word == "/clear":
        conversation.turns.clear()
        tell("(what was said is forgotten)")
    else:
        tell(_HELP if word in ("/help", "/?") else f"{word} is no command here: {_HELP}")
    return True


def _turn(portal: BlockingPortal, conversation: Conversation, said: str) -> bool:
    """One answer: whether it came. At the keyboard Ctrl-C ends the answer alone, and else the chat after it."""
    ended = threading.Event()
    stopped = False
    turn: Future[None] | None = None

    async def answer() -> None:
        try:
            await conversation.answer(said)
        finally:
            ended.set()

    def stop(_: int, __: FrameType | None) -> None:
        nonlocal stopped
        stopped = True
        if turn is not None:
            turn.cancel()

    before = signal.signal(signal.SIGINT, stop)
    try:
        turn = portal.start_task_soon(answer)
        if stopped:
            turn.cancel()
        while not turn.done():
            wait((turn,), LONGEST_WAIT_S)
        if not turn.cancelled():
            turn.result()
            return True
        ended.wait(STOP_TIMEOUT_S)
    finally:
        signal.signal(signal.SIGINT, before)
    if not sys.stdin.isatty():
        raise KeyboardInterrupt
    tell("(stopped; Ctrl-C again ends the chat)")
    return False


def _next_line(lines: PromptLines | None) -> str | None:
    """Reads what the user says next, without its line break; None at the end of the input."""
    if sys.stdin.isatty():
        try:
            said = input(INVITATION) if lines is None else lines.read(INVITATION)
        except EOFError:
            said = None
        except KeyboardInterrupt:
            print()
            raise
        if said is None:
            print()
        return said
    line = sys.stdin.readline()
    return line.rstrip("\r\n") if line else None
