"""Compiling of the library for decode steps (decision 0028) beside serving: at the lowest priority, by one process of a
user at a time, and once for all of them."""

import asyncio
import ctypes
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from filelock import AsyncFileLock, Timeout

from molink.shards.native.compiling import compilation, kept_library, say_not_compiled

COMPILED_WITHIN_S: Final = 600.0
"""Beside other work, the waiting for another process that compiles included."""
_LOOK_AGAIN_S: Final = 0.5
"""Whether that other process is done."""
_LOWEST_PRIORITY: Final = ("nice", "-n", "19")


async def library_compiled_beside(folder: Path) -> ctypes.CDLL | None:
    """The library that is kept in `folder`, which the first process to ask for it compiles; None where it cannot be
    had. What is under way when this is cancelled is ended."""
    found = await asyncio.to_thread(kept_library, folder)
    how = compilation(folder) if found is None else None
    if how is None:
        return found
    try:
        async with asyncio.timeout(COMPILED_WITHIN_S), AsyncFileLock(how.lock, poll_interval=_LOOK_AGAIN_S):
            found = await asyncio.to_thread(kept_library, folder)
            if found is not None:
                return found
            with how.steps() as commands:
                for command in commands:
                    await _run(command)
        return await asyncio.to_thread(kept_library, folder)
    except (OSError, subprocess.SubprocessError, Timeout) as error:  # TimeoutError is an OSError
        say_not_compiled(error)
        return None


async def _run(command: Sequence[str]) -> None:
    """Raises OSError or CalledProcessError."""
    before = () if shutil.which(_LOWEST_PRIORITY[0]) is None else _LOWEST_PRIORITY
    process = await asyncio.create_subprocess_exec(
        *before,
        *command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        _, said = await process.communicate()
    finally:
        if process.returncode is None:  # with the processes that it has begun itself
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, stderr=said)
