"""Tokenizing and chat templates in processes with limits of time and memory: `TextWork` for models of strangers.

Whatever a tokenizer or a template does, at worst it ends its process and fails the request that it was for: the process
is killed at its deadline or when it has grown too large, and the next job starts another one. Nothing is pickled: jobs
and answers are JSON and bytes over a pipe.
"""

import array
import asyncio
import hashlib
import json
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import psutil

from molink.client.errors import SwarmUnavailable
from molink.client.text.early_text import EarlyProcess, begin_process
from molink.client.text.text_work import PLAIN_CHAT, TEXT_ASKER, ChatOptions
from molink.client.text.text_worker import ID_FORMAT, LENGTHS, MAX_BODY_BYTES, MAX_HEADER_BYTES
from molink.shards.text.tokenizer import TokenizerError

if TYPE_CHECKING:
    from molink.shards.text.chat_template import Message

WATCHED_EVERY_S: Final = 0.1
"""Between looks at how large a process has grown that works on one job for longer."""
KILLED_WITHIN_S: Final = 5.0
MAX_ANSWER_BYTES: Final = 2**26
_TOO_SLOW: Final = "did not end within {seconds:.2g} s"
_TOO_LARGE: Final = "took over {megabytes:,} MB of memory"
_ENDED: Final = "ended the process that it ran in"
_TOO_MANY: Final = "too many texts wait to be turned into tokens: try again in a moment"


@dataclass(frozen=True, slots=True)
class TextLimits:
    """Limits of text work."""

    processes: int = 2
    """At once. A chat template never has the last of them, so that one that loops holds up no plain text."""
    waiting: int = 1024
    """Jobs that wait for a process, a quarter of them one asker's who is not this machine's user; more are refused."""
    waiting_s: float = 15.0
    """Longest wait for one."""
    job_s: float = 5.0
    """A job of a short text."""
    job_s_per_mb: float = 5.0
    """What every million bytes of text add."""
    load_s: float = 30.0
    """Starting a process and loading the tokenizer."""
    memory_bytes: int = 512 * 2**20
    """Of one process."""
    memory_bytes_per_file_byte: int = 32
    """What every byte of the tokenizer's files adds: vocabularies become trees and tables."""
    converting_bytes: int = 2**30
    """What is added where there is no tokenizer.json: transformers makes a tokenizer out of older files."""
    most_memory_bytes: int = 2**32

    def deadline_s(self, text_bytes: int) -> float:
        """Returns how long a job may take, in seconds."""
        return self.job_s + self.job_s_per_mb * text_bytes / 1e6

    def memory_for(self, files: Mapping[str, bytes]) -> int:
        """Returns how many bytes a process may take with such a tokenizer."""
        needed = self.memory_bytes + self.memory_bytes_per_file_byte * sum(map(len, files.values()))
        return min(
            needed + (0 if "tokenizer.json" in files else self.converting_bytes), self.most_memory_bytes
        )


class TextProcesses:
    """One model's tokenizer and chat template, in processes that are started when they are first needed."""

    def __init__(
        self,
        files: Mapping[str, bytes],
        limits: TextLimits | None = None,
        early: EarlyProcess | None = None,
    ) -> None:
        """`files` are the tokenizer's, contents by name. An `early` process is the first one."""
        self._files = dict(files)
        self._limits = limits or TextLimits()
        self._early = early
        self._idle: list[_Process] = []
        self._processes: set[_Process] = set()
        self._running = 0
        self._rendering = 0
        """Jobs of the chat template under way."""
        self._waiting: dict[str, deque[_WaitingJob]] = {}
        """By who asked (TEXT_ASKER), whose turn is next first."""
        self._jobs: dict[tuple[str, bytes], asyncio.Task[tuple[int, ...]]] = {}
        """Those that wait or run, by who asked and what they are to do."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        jobs = tuple(self._jobs.values())
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        await asyncio.gather(*(process.end() for process in tuple(self._processes)))
        self._processes.clear()
        self._idle.clear()

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Of the processes that run now."""
        return tuple(process.pid for process in self._processes)

    async def encode(self, text: str) -> tuple[int, ...]:
        return await self._done("encode", _utf8(text))

    async def encode_chat(
        self, messages: "Sequence[Message]", chat: ChatOptions = PLAIN_CHAT
    ) -> tuple[int, ...]:
        asked = {
            "messages": [dict(message) for message in messages],
            "tools": [dict(tool) for tool in chat.tools],
            "variables": dict(chat.variables),
        }
        try:
            plain = json.dumps(asked, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise TokenizerError(f"a chat message must be made of JSON values: {error}") from error
        return await self._done("chat", _utf8(plain))

    async def _done(self, kind: str, body: bytes) -> tuple[int, ...]:
        """The answer. Who asks for what is being done for him already, as the choices of one request do, shares it; not
        what is another's, which waits for that one's turn."""
        key = TEXT_ASKER.get(), hashlib.sha256(kind.encode() + body).digest()
        job = self._jobs.get(key)
        if job is None:
            job = self._jobs[key] = asyncio.create_task(self._run(kind, body), name=f"text: {kind}")
            job.add_done_callback(lambda done: self._forget(key, done))
        # A job goes on when nobody waits for it any more: it ends within its limits, and to kill its process would
        # let whoever asks and leaves cost a start each time.
        return await asyncio.shield(job)

    def _forget(self, key: tuple[str, bytes], job: "asyncio.Task[tuple[int, ...]]") -> None:
        self._jobs.pop(key, None)
        if not job.cancelled():
            job.exception()  # seen, if all who waited have gone

    async def _run(self, kind: str, body: bytes) -> tuple[int, ...]:
        await self._admit(kind)
        try:
            process = self._idle.pop() if self._idle else await self._start()
            try:
                header = {"job": kind}
                ids = await process.ask(_WHO[kind], header, body, self._limits.deadline_s(len(body)))
            finally:
                await self._put_back(process)
        finally:
            self._release(kind)
        if len(ids) % 4:
            raise TokenizerError(f"{_WHO[kind]} gave half an answer")
        return tuple(array.array(ID_FORMAT, ids))

    async def _admit(self, kind: str) -> None:
        """Waits for a place. Raises `SwarmUnavailable` where too many wait, or for too long."""
        if self._has_place(kind):
            self._take(kind)
            return
        asker = TEXT_ASKER.get()
        if not self._may_wait(asker):
            raise SwarmUnavailable(_TOO_MANY, busy=True)
        waiting = _WaitingJob(kind, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(asker, deque()).append(waiting)
        try:
            async with asyncio.timeout(self._limits.waiting_s):
                await waiting.place
        except (asyncio.CancelledError, TimeoutError) as error:
            if waiting in self._waiting.get(asker, ()):
                self._leave_queue(asker, waiting)
            elif not waiting.place.cancelled():
                self._release(kind)
            if isinstance(error, TimeoutError):
                raise SwarmUnavailable(_TOO_MANY, busy=True) from error
            raise

    def _may_wait(self, asker: str) -> bool:
        most, own = self._limits.waiting, len(self._waiting.get(asker, ()))
        if asker and own >= max(1, most // 4):
            return False
        return sum(map(len, self._waiting.values())) < most

    def _leave_queue(self, asker: str, waiting: "_WaitingJob") -> None:
        self._waiting[asker].remove(waiting)
        if not self._waiting[asker]:
            del self._waiting[asker]

    def _has_place(self, kind: str) -> bool:
        if self._running >= self._limits.processes:
            return False
        return kind != "chat" or self._rendering < max(1, self._limits.processes - 1)

    def _take(self, kind: str) -> None:
        self._running += 1
        self._rendering += kind == "chat"

    def _release(self, kind: str) -> None:
        self._running -= 1
        self._rendering -= kind == "chat"
        while (chosen := self._next()) is not None:
            asker, waiting = chosen
            self._leave_queue(asker, waiting)
            if asker in self._waiting:  # before his next turn all others have theirs
                self._waiting[asker] = self._waiting.pop(asker)
            if not waiting.place.done():
                self._take(waiting.kind)
                waiting.place.set_result(None)

    def _next(self) -> "tuple[str, _WaitingJob] | None":
        """The first job that has a place of whoever's turn it is, with who asked."""
        for asker, queue in self._waiting.items():
            for waiting in queue:
                if self._has_place(waiting.kind):
                    return asker, waiting
        return None

    async def _start(self) -> "_Process":
        memory_bytes = self._limits.memory_for(self._files)
        try:
            begun = None if self._early is None else self._early.take()
            process = _Process(begun or await begin_process(), memory_bytes)
        except OSError as error:  # no descriptors, no memory: it may be otherwise in a moment
            raise SwarmUnavailable(
                f"no process could be started to turn text into tokens: {error.strerror}", busy=True
            ) from error
        self._processes.add(process)
        header = {
            "job": "load",
            "files": {name: len(content) for name, content in self._files.items()},
            "memory_bytes": memory_bytes,
        }
        try:
            await process.ask("the tokenizer", header, b"".join(self._files.values()), self._limits.load_s)
        except BaseException:
            await process.end()
            self._processes.discard(process)
            raise
        return process

    async def _put_back(self, process: "_Process") -> None:
        if process.usable:
            self._idle.append(process)
            return
        await process.end()
        self._processes.discard(process)


@dataclass(frozen=True, slots=True, eq=False)
class _WaitingJob:
    kind: str
    place: "asyncio.Future[None]"


class _Process:
    """One worker process. Not usable any more once a job in it was given up."""

    def __init__(self, process: asyncio.subprocess.Process, memory_bytes: int) -> None:
        self._process = process
        self._memory_bytes = memory_bytes
        self._watched = psutil.Process(process.pid)
        self.usable = True

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ask(self, who: str, header: Mapping[str, Any], body: bytes, limit_s: float) -> bytes:
        """The body of the answer to a job.

        Raises:
            TokenizerError: the job failed, or went beyond its limits; the sentence begins with `who`.
        """
        asking = asyncio.create_task(self._exchange({**header, "processor_s": limit_s}, body))
        usable, self.usable = self.usable, False
        try:
            said, content = await self._watch(who, asking, limit_s)
        except (OSError, asyncio.IncompleteReadError) as error:
            raise TokenizerError(f"{who} of this model {_ENDED}") from error
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        if said.get("memory"):
            raise TokenizerError(f"{who} of this model {self._too_large()}")
        self.usable = usable
        if "refused" in said:
            raise TokenizerError(str(said["refused"]))
        return content

    async def end(self) -> None:
        """Ends the process, whatever it does."""
        self.usable = False
        with suppress(ProcessLookupError):
            self._process.kill()
        if self._process.stdin is not None:
            self._process.stdin.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(KILLED_WITHIN_S):
                await self._process.wait()

    async def _watch(
        self, who: str, asking: "asyncio.Task[tuple[dict[str, Any], bytes]]", limit_s: float
    ) -> tuple[dict[str, Any], bytes]:
        clock = asyncio.get_running_loop().time
        deadline_s = clock() + limit_s
        while True:
            await asyncio.wait((asking,), timeout=min(WATCHED_EVERY_S, max(0.0, deadline_s - clock())))
            if asking.done():
                return asking.result()
            if clock() >= deadline_s:
                raise TokenizerError(f"{who} of this model {_TOO_SLOW.format(seconds=limit_s)}")
            if self._rss_bytes() > self._memory_bytes:
                raise TokenizerError(f"{who} of this model {self._too_large()}")

    def _rss_bytes(self) -> int:
        try:
            return int(self._watched.memory_info().rss)
        except psutil.Error:  # it has ended: the pipe says so
            return 0

    def _too_large(self) -> str:
        return _TOO_LARGE.format(megabytes=self._memory_bytes // 10**6)

    async def _exchange(self, header: Mapping[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        asked, answers = self._process.stdin, self._process.stdout
        if asked is None or answers is None:
            raise BrokenPipeError
        encoded = json.dumps(header).encode()
        asked.write(LENGTHS.pack(len(encoded), len(body)) + encoded)
        asked.write(body)
        await asked.drain()
        header_bytes, body_bytes = LENGTHS.unpack(await answers.readexactly(LENGTHS.size))
        if header_bytes > MAX_HEADER_BYTES or body_bytes > MAX_ANSWER_BYTES:
            raise BrokenPipeError
        said = json.loads(await answers.readexactly(header_bytes))
        return said, await answers.readexactly(body_bytes)


_WHO: Final = {"encode": "the tokenizer", "chat": "the chat template or tokenizer"}


def _utf8(text: str) -> bytes:
    try:
        body = text.encode()
    except UnicodeEncodeError as error:
        raise TokenizerError("the text holds half of a character") from error
    if len(body) > MAX_BODY_BYTES:
        raise TokenizerError(f"a text of {len(body)} bytes is too long")
    return body
