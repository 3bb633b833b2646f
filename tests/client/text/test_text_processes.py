"""Tokenizers and chat templates of strangers: whatever they do, they fail their own request, and soon."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import psutil
import pytest

from molink.client.errors import SwarmUnavailable
from molink.client.text.text_processes import TextLimits, TextProcesses
from molink.client.text.text_work import TEXT_ASKER
from molink.shards.checkpoint import catalog
from molink.shards.checkpoint.model_files import TOKENIZER_FILES
from molink.shards.text.tokenizer import Tokenizer, TokenizerError

pytestmark = pytest.mark.anyio

DEADLINE_S = 120.0
CHAT = [{"role": "user", "content": "hi"}]
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
GROWTH = "{% set n = namespace(x='a' * 16) %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
FAST = TextLimits(job_s=2.0, job_s_per_mb=1.0)
PATIENT = TextLimits(job_s=DEADLINE_S)


def bundled() -> dict[str, bytes]:
    folder = catalog.resolve("molink/tiny-shakespeare")
    return {name: (folder / name).read_bytes() for name in TOKENIZER_FILES if (folder / name).is_file()}


def with_template(template: str) -> dict[str, bytes]:
    return bundled() | {"chat_template.jinja": template.encode()}


def with_tokenizer(**parts: object) -> dict[str, bytes]:
    document = json.loads(bundled()["tokenizer.json"]) | parts
    return bundled() | {"tokenizer.json": json.dumps(document).encode()}


DOUBLINGS = {
    "type": "Sequence",
    "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 40,
}
BACKTRACKING = {
    "type": "Split",
    "pattern": {"Regex": "(?:x+x+)+y"},
    "behavior": "Isolated",
    "invert": False,
}


@pytest.fixture
async def work() -> AsyncIterator[TextProcesses]:
    async with TextProcesses(bundled()) as made:
        yield made


async def test_the_ids_are_those_of_the_tokenizer_in_this_process(work: TextProcesses) -> None:
    tokenizer = Tokenizer.from_files(bundled())
    assert await work.encode("Où est ROMEO? ☃") == tokenizer.encode("Où est ROMEO? ☃")
    assert await work.encode_chat(CHAT) == tokenizer.apply_chat_template(CHAT)


async def test_nothing_runs_before_it_is_needed_and_nothing_afterwards() -> None:
    async with TextProcesses(bundled()) as work:
        assert work.process_ids == ()
        await work.encode("a")
        [pid] = work.process_ids
        assert psutil.pid_exists(pid)
    assert not psutil.pid_exists(pid)


async def test_the_event_loop_may_be_that_of_another_thread() -> None:
    async def encode() -> tuple[int, ...]:
        async with TextProcesses(bundled()) as work:
            return await work.encode("a")

    ids = await asyncio.to_thread(lambda: asyncio.run(encode()))
    assert ids == Tokenizer.from_files(bundled()).encode("a")


async def test_equal_texts_at_once_are_tokenized_once() -> None:
    async with TextProcesses(bundled(), TextLimits(waiting=0, processes=1)) as work:
        texts = await asyncio.gather(*(work.encode("word " * 1000) for _ in range(16)))
    assert len(set(texts)) == 1


async def test_beyond_the_most_that_may_wait_a_text_is_refused_at_once() -> None:
    async with TextProcesses(bundled(), TextLimits(waiting=1, processes=1)) as work:
        outcomes = await asyncio.gather(*(work.encode(f"text {n}") for n in range(3)), return_exceptions=True)
    assert [isinstance(outcome, tuple) for outcome in outcomes] == [True, True, False]
    assert isinstance(outcomes[2], SwarmUnavailable)
    assert outcomes[2].busy


async def asked_by(asker: str, work: TextProcesses, text: str, ended: list[str]) -> None:
    """Has a text turned into tokens, or counts it as refused."""
    TEXT_ASKER.set(asker)
    try:
        await work.encode(text)
        ended.append(asker)
    except SwarmUnavailable:
        ended.append(f"{asker}: refused")


@pytest.mark.parametrize("text", ["another text", "text 6"])
async def test_whoever_comes_behind_many_texts_of_one_asker_waits_for_one_of_them_and_not_for_all(
    text: str,
) -> None:
    ended: list[str] = []
    async with TextProcesses(bundled(), TextLimits(processes=1)) as work, asyncio.timeout(DEADLINE_S):
        texts = [("greedy", f"text {n}") for n in range(8)] + [("late", text), ("later", text)]
        await asyncio.gather(*(asked_by(asker, work, one, ended) for asker, one in texts))
    assert ended[:4] == ["greedy", "greedy", "late", "later"]
    assert len(ended) == len(texts)


async def test_a_quarter_of_what_may_wait_is_one_askers_and_more_is_this_machines_users() -> None:
    ended: list[str] = []
    async with TextProcesses(bundled(), TextLimits(waiting=8, processes=1)) as work:
        askers = ["greedy"] * 4 + [""] * 3 + ["late"]
        async with asyncio.timeout(DEADLINE_S):
            numbered = enumerate(askers)
            await asyncio.gather(*(asked_by(asker, work, f"text {n}", ended) for n, asker in numbered))
    assert sorted(ended) == sorted([*["greedy"] * 3, "greedy: refused", *[""] * 3, "late"])


@pytest.mark.parametrize(
    ("files", "text", "limits", "said"),
    [
        (with_template(LOOP), None, FAST, "did not end within 2 s"),
        (with_template(GROWTH), None, PATIENT, "MB of memory"),
        (with_template("{{ raise_exception('\x1b[2J no') }}"), None, PATIENT, "refuses these messages: ?"),
        (with_tokenizer(normalizer=DOUBLINGS), "a" * 99, FAST, "of this model (took over|did not end|ended)"),
        (
            with_tokenizer(pre_tokenizer=BACKTRACKING),
            "x" * 40_000,
            FAST,
            "the tokenizer of this model (ended the process|did not end)",
        ),
    ],
    ids=["a looping template", "a growing template", "a refusing template", "doublings", "backtracking"],
)
async def test_text_work_that_does_not_end_well_fails_its_own_request_and_no_other(
    files: Mapping[str, bytes], text: str | None, limits: TextLimits, said: str
) -> None:
    async with TextProcesses(files, limits) as work, asyncio.timeout(DEADLINE_S):
        with pytest.raises(TokenizerError, match=said):
            await (work.encode_chat(CHAT) if text is None else work.encode(text))
        assert await work.encode("b") == Tokenizer.from_files(bundled()).encode("b")


async def test_looping_templates_hold_up_no_plain_text() -> None:
    async with TextProcesses(with_template(LOOP), TextLimits(job_s=DEADLINE_S)) as work:
        chats = [
            asyncio.create_task(work.encode_chat([{"role": "user", "content": str(n)}])) for n in range(3)
        ]
        async with asyncio.timeout(DEADLINE_S / 2):
            for text in ("a", "b", "c"):
                await work.encode(text)
        assert not any(chat.done() for chat in chats)
        for chat in chats:
            chat.cancel()
        await asyncio.gather(*chats, return_exceptions=True)


async def test_a_tokenizer_that_cannot_be_loaded_says_so() -> None:
    async with TextProcesses(bundled() | {"tokenizer.json": b"{"}) as work:
        with pytest.raises(TokenizerError, match=r"tokenizer.json is damaged"):
            await work.encode("a")
        assert work.process_ids == ()


async def test_half_a_character_is_refused(work: TextProcesses) -> None:
    with pytest.raises(TokenizerError, match="half of a character"):
        await work.encode("\ud800")
    with pytest.raises(TokenizerError, match="half of a character"):
        await work.encode_chat([{"role": "user", "content": "\ud800"}])


@pytest.mark.parametrize("template", ["{{ messages[0].content }}", LOOP], ids=["idle", "busy"])
def test_its_processes_end_when_the_process_that_started_them_is_killed(
    template: str, tmp_path: Path
) -> None:
    (tmp_path / "template").write_text(template)
    program = f"""
import asyncio, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from test_text_processes import CHAT, with_template
from molink.client.text.text_processes import TextLimits, TextProcesses
async def main():
    async with TextProcesses(with_template(Path({str(tmp_path / "template")!r}).read_text())) as work:
        await work.encode("a")
        asking = asyncio.create_task(work.encode_chat(CHAT))
        await asyncio.sleep(0)
        print(*work.process_ids, flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert pids
        workers = [psutil.Process(pid) for pid in pids]
        parent.kill()
    _, alive = psutil.wait_procs(workers, timeout=DEADLINE_S)
    assert alive == []
