"""A process for text work that is begun before it is known what it is to load: beside what the command itself imports.

Nothing that takes long is imported here.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

OWN_GROUP: int = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)
"""On Windows a process can only be asked to end if it has its own; elsewhere there is no such flag."""


async def begin_process() -> asyncio.subprocess.Process:
    """A process that runs `molink.client.text.text_worker`. Raises OSError where there is none to be had."""
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "MALLOC_ARENA_MAX": "1"}
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "molink.client.text.text_worker",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        env=environment, creationflags=OWN_GROUP,
    )  # fmt: skip


class EarlyProcess:
    """One that is there already, for whoever takes it."""

    def __init__(self, process: asyncio.subprocess.Process | None) -> None:
        self._process = process

    def take(self) -> asyncio.subprocess.Process | None:
        """The process, once: whoever takes it ends it. None: there is none any more."""
        process, self._process = self._process, None
        return process


@asynccontextmanager
async def early_process() -> AsyncIterator[EarlyProcess]:
    """It is ended with the block, unless somebody has taken it."""
    try:
        early = EarlyProcess(await begin_process())
    except OSError:  # whoever needs one is told so
        early = EarlyProcess(None)
    try:
        yield early
    finally:
        process = early.take()
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
