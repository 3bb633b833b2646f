"""The library for decode steps is compiled beside serving, once for all of a user's processes."""

import asyncio
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from molink.peer.compute.library_compiler import library_compiled_beside
from molink.shards.native.compiling import COMPILER, compiled_library, kept_library, user_folder

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64",
    reason="it is compiled on Linux for x86-64 only",
)


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Puts a shell script in the compiler's place, which is told what to make by its last argument, $result, and may
    copy it from $made. Returns a file for its words."""
    assert compiled_library(user_folder()) is not None
    made, said = next(user_folder().glob("*.so")), tmp_path / "said"

    def install(script: str) -> Path:
        program = tmp_path / "programs" / COMPILER
        program.parent.mkdir()
        last = f'for result; do :; done; made="{made}"; exec 3>>"{said}"'
        program.write_text(f"#!/bin/sh\n{last}\n{script}\n")
        program.chmod(0o700)
        monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
        return said

    return install


def test_peers_that_want_it_at_once_have_it_compiled_once_at_the_lowest_priority(
    tmp_path: Path, compiler: Callable[[str], Path]
) -> None:
    async def at_once() -> list[object]:
        return await asyncio.gather(*(library_compiled_beside(tmp_path / "kept") for _ in range(3)))

    said = compiler('echo "$(nice)" >&3; cp "$made" "$result"')
    assert None not in asyncio.run(at_once())
    assert said.read_text().split() == ["19", "19"]  # it compiles and links
    assert kept_library(tmp_path / "kept") is not None
    assert None not in asyncio.run(at_once())
    assert len(said.read_text().split()) == 2


def test_a_compiler_that_fails_is_no_failure_of_the_peer(
    tmp_path: Path, compiler: Callable[[str], Path]
) -> None:
    said = compiler("echo called >&3; exit 1")
    assert asyncio.run(library_compiled_beside(tmp_path / "kept")) is None
    assert said.read_text().split() == ["called"]
    assert kept_library(tmp_path / "kept") is None


def test_a_peer_that_leaves_ends_the_compiler(tmp_path: Path, compiler: Callable[[str], Path]) -> None:
    words = tmp_path / "words"
    os.mkfifo(words)
    compiler(f'echo $$ > "{words}"; exec sleep 1000')

    async def leave() -> psutil.Process:
        task = asyncio.create_task(library_compiled_beside(tmp_path / "kept"))
        process = psutil.Process(int(await asyncio.to_thread(words.read_text)))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return process

    assert not asyncio.run(leave()).is_running()
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["lock"]


def test_where_nothing_can_be_kept_nothing_is_compiled(
    tmp_path: Path, compiler: Callable[[str], Path]
) -> None:
    said = compiler("echo called >&3")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept").chmod(0o777)
    assert asyncio.run(library_compiled_beside(tmp_path / "kept")) is None
    assert not said.exists()
