"""The process that a command begins early is the one that tokenizes, and none is left."""

import asyncio
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from molink.client.text import early_text
from molink.client.text.early_text import early_process
from molink.client.text.text_processes import TextProcesses
from molink.shards.checkpoint.catalog import resolve
from molink.shards.text.tokenizer import Tokenizer, read_files

pytestmark = pytest.mark.anyio
DEADLINE_S = 120.0
FOLDER = resolve("molink/tiny-shakespeare")


def children() -> list[psutil.Process]:
    found = []
    for one in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # one of another test, which ends just now
            if "molink.client.text.text_worker" in " ".join(one.cmdline()):
                found.append(one)
    return found


async def test_the_first_text_is_tokenized_by_the_process_that_is_there() -> None:
    async with asyncio.timeout(DEADLINE_S), early_process() as early:
        (begun,) = children()
        async with TextProcesses(read_files(FOLDER), early=early) as work:
            assert await work.encode("ROMEO:") == Tokenizer.from_folder(FOLDER).encode("ROMEO:")
            assert work.process_ids == (begun.pid,)
    assert not children()


async def test_a_process_that_nobody_took_ends_with_the_command() -> None:
    async with asyncio.timeout(DEADLINE_S), early_process():
        assert len(children()) == 1
    assert not children()


async def test_where_no_process_can_be_begun_the_command_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_text.sys, "executable", str(Path("no", "such", "python")))
    async with asyncio.timeout(DEADLINE_S), early_process() as early:
        assert early.take() is None
