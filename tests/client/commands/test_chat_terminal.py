"""A chat at a terminal: blocks of Markdown, answers drawn while they come, questions that are kept."""

import io
import stat
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from rich.console import Console

from molink.client.commands.chat_terminal import MarkdownAnswer, PromptLines, complete_blocks

PIECES = [
    "# Title",
    "\n\n",
    "one",
    " two",
    "\n",
    "```py\n",
    "x = 1\n",
    "```\n",
    "- item\n",
    "  more\n",
    "~~~~",
    "|a|b|\n",
]


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=5)))
def test_no_character_is_lost_between_blocks(pieces: list[str]) -> None:
    complete, rest = complete_blocks("".join(pieces))
    assert complete + rest == "".join(pieces)


@given(st.lists(st.sampled_from(PIECES)))
def test_what_was_complete_stays_complete_as_more_comes(pieces: list[str]) -> None:
    text = "".join(pieces)
    for length in range(len(text)):
        earlier, _ = complete_blocks(text[:length])
        assert text.startswith(earlier)
        assert len(earlier) <= len(complete_blocks(text)[0])


@pytest.mark.parametrize(
    ("text", "complete"),
    [
        ("one\n\ntwo", "one\n\n"),
        ("one\n\n", ""),
        ("```\na\n\nb\n```\n\nc", "```\na\n\nb\n```\n\n"),
        ("```\na\n\nb", ""),
        ("~~~~\n~~~\n\nb\n~~~~\n\nc", "~~~~\n~~~\n\nb\n~~~~\n\n"),
        ("- a\n\n  still a", ""),
        ("- a\n\nb", "- a\n\n"),
    ],
)
def test_a_block_ends_at_an_empty_line_outside_of_code_and_of_a_lists_item(text: str, complete: str) -> None:
    assert complete_blocks(text)[0] == complete


def drawn(*pieces: str) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=60, height=10, _environ={"TERM": "xterm"})
    ticks = iter(range(10_000))
    answer = MarkdownAnswer(console, lambda: float(next(ticks)))
    for piece in pieces:
        answer.show(piece)
    answer.end()
    return out.getvalue()


def test_an_answer_is_drawn_while_it_comes_and_stands_there_whole() -> None:
    text = drawn("Say *so", "ft* ", "things\n\n", "- one\n", "- two\n", "\n`code`")
    assert "*soft*" not in text.rpartition("\x1b[?25h")[2]
    for part in ("soft", "things", " • ", "one", "two", "code"):
        assert part in text


def test_an_answer_longer_than_the_terminal_is_shown_by_its_last_lines() -> None:
    lines = drawn(*[f"- line {number}\n" for number in range(40)])
    assert "line 39" in lines
    assert lines.count("line 3\x1b") <= 2 or lines.count("line 3\n") <= 12


def test_a_terminal_gets_nothing_that_it_would_obey() -> None:
    assert "\x1b[31m" not in drawn("red \x1b[31m", " \x1b]0;title\x07\n\nnext")


def typed(keys: str, history: Path | None) -> list[str | None]:
    said: list[str | None] = []
    with create_pipe_input() as typing, create_app_session(input=typing, output=DummyOutput()):
        typing.send_text(keys)
        lines = PromptLines(history)
        while not said or said[-1] is not None:
            said.append(lines.read("You: "))
    return said


def test_what_was_said_is_kept_for_the_arrow_keys_of_a_later_chat_and_for_its_user_alone(
    tmp_path: Path,
) -> None:
    history = tmp_path / "states" / "chat_history"
    assert typed("first\rsecond\x1b\rline\r\x04", history) == ["first", "second\nline", None]
    if sys.platform != "win32":
        assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert typed("\x1b[A\x1b[A\x1b[A\r\x04", history) == ["first", None]


def test_without_a_history_nothing_is_kept(tmp_path: Path) -> None:
    assert typed("first\r\x04", None) == ["first", None]
    assert [path.name for path in tmp_path.rglob("*chat*")] == []
