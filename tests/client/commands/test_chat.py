"""A chat in the terminal: lines in, answers out, commands, and Ctrl-C."""

import asyncio
import io
import os
import signal
import sys
from collections.abc import AsyncGenerator, Callable, Iterable

import pytest
from support.swarms.scripted_swarm import Run, ScriptedSwarm

from molink.client.api.generation import TextPiece
from molink.client.errors import InvalidRequest, SwarmUnavailable


class Keyboard(io.StringIO):
    """Lines that somebody types at a terminal."""

    def isatty(self) -> bool:
        return True


def test_at_the_keyboard_commands_do_not_go_to_the_model(
    run: Run, swarm: ScriptedSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", Keyboard("/help\nhello\n/clear\n/nonsense\nagain\n/bye\nnever\n"))
    code, out, err = run("chat")
    assert code == 0
    assert swarm.asked == [[{"role": "user", "content": said}] for said in ("hello", "again")]
    assert out.count("But soft!") == 2
    assert "/bye ends the chat" in err
    assert "/nonsense is no command here" in err


@pytest.mark.parametrize("word", ["exit", "quit", "/exit", "/bye"])
def test_a_word_ends_the_chat(
    run: Run, swarm: ScriptedSwarm, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    monkeypatch.setattr(sys, "stdin", Keyboard(f"{word}\nhello\n"))
    assert run("chat")[0] == 0
    assert swarm.asked == []


def test_ctrl_c_stops_the_answer_and_not_the_chat(
    run: Run, swarm: ScriptedSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", Keyboard("first\nsecond\n"))
    monkeypatch.setattr(ScriptedSwarm, "stream_chat_events", stopped_once(ScriptedSwarm.stream_chat_events))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code, out, err = run("chat")
    finally:
        signal.signal(signal.SIGINT, before)
    assert code == 0
    assert "(stopped; Ctrl-C again ends the chat)" in err
    assert "But soft!" in out
    half = {"role": "assistant", "content": "Wherefore"}
    first, second = ({"role": "user", "content": said} for said in ("first", "second"))
    assert swarm.asked == [[first, half, second]]


def stopped_once(
    answer: Callable[..., AsyncGenerator[TextPiece, None]],
) -> Callable[..., AsyncGenerator[TextPiece, None]]:
    """At the first question somebody presses Ctrl-C in the middle of an answer; the second one is answered."""
    asked: list[object] = []

    async def stream(
        self: ScriptedSwarm, messages: Iterable[object], **sampling: object
    ) -> AsyncGenerator[TextPiece, None]:
        asked.append(messages)
        if len(asked) == 1:
            yield TextPiece("Wherefore")
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
        async for piece in answer(self, messages, **sampling):
            yield piece

    return stream


def test_a_chat_from_a_pipe_keeps_its_history(
    run: Run, swarm: ScriptedSwarm, say: Callable[[str], None]
) -> None:
    say("Who's there?\n\nNay, answer me")
    assert run("chat", "--system", "Be brief") == (0, "But soft!\nBut soft!\n", "")
    system = {"role": "system", "content": "Be brief"}
    first = {"role": "user", "content": "Who's there?"}
    answer = {"role": "assistant", "content": "But soft!"}
    second = {"role": "user", "content": "Nay, answer me"}
    assert swarm.asked == [[system, first], [system, first, answer, second]]


def test_an_error_of_one_turn_does_not_end_the_chat(
    run: Run, swarm: ScriptedSwarm, say: Callable[[str], None]
) -> None:
    say("one\ntwo\n")
    swarm.errors = [SwarmUnavailable("all peers are busy")]
    assert run("chat") == (0, "But soft!\n", "molink: all peers are busy\n")
    assert swarm.asked[1] == [{"role": "user", "content": "two"}]


def test_a_chat_without_any_answer_has_failed(
    run: Run, swarm: ScriptedSwarm, say: Callable[[str], None]
) -> None:
    say("one\n")
    swarm.errors = [SwarmUnavailable("all peers are busy")]
    code, out, err = run("chat")
    assert (code, out) == (1, "")
    assert err.splitlines() == [
        "molink: all peers are busy",
        "molink: no question was answered: the lines above say why",
    ]


def test_a_chat_that_outgrows_the_model_forgets_its_oldest_turn(
    run: Run, swarm: ScriptedSwarm, say: Callable[[str], None]
) -> None:
    say("one\ntwo\n")
    swarm.errors = [None, InvalidRequest("the prompt is too long", "prompt")]
    code, out, err = run("chat")
    assert (code, out) == (0, "But soft!\nBut soft!\n")
    assert "its oldest turn is forgotten" in err
    assert [len(messages) for messages in swarm.asked] == [1, 3, 1]


def test_a_chat_with_a_swarm_out_of_reach_fails(
    run: Run, swarm: ScriptedSwarm, say: Callable[[str], None]
) -> None:
    say("one\n")
    swarm.unreachable = SwarmUnavailable("nobody is there")
    assert run("chat") == (1, "", "molink: nobody is there\n")


def test_bytes_that_are_no_text_do_not_end_a_chat(
    run: Run, swarm: ScriptedSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xffb\r\n"), encoding="utf-8"))
    assert run("chat")[:2] == (0, "But soft!\n")
    assert swarm.asked == [[{"role": "user", "content": "a\ufffdb"}]]


def test_nothing_said_is_nothing_wrong(run: Run, swarm: ScriptedSwarm, say: Callable[[str], None]) -> None:
    say("")
    assert run("chat") == (0, "", "")
