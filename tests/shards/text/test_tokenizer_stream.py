"""Text that comes token by token: nothing too early, nothing lost, nothing after a stop string."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models.tiny_models import make_tokenizer
from support.models.tokenizer_kinds import MAKERS, TEXTS
from support.properties import examples
from transformers import AutoTokenizer

from molink.shards.text.tokenizer import StopMatcher, TextStream, Tokenizer

relaxed = settings(deadline=None, max_examples=examples(60))


@pytest.fixture(scope="module", params=MAKERS)
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, Any, Path]:
    """(ours, transformers', folder) of one kind of tokenizer."""
    folder = tmp_path_factory.mktemp(request.param)
    MAKERS[request.param]().save_pretrained(folder)
    return Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder), folder


Both = tuple[Tokenizer, Any, Path]


@relaxed
@given(data=st.data())
def test_pieces_of_a_stream_join_to_the_decoding_of_any_ids(both: Both, data: st.DataObject) -> None:
    ours, reference, _ = both
    ids = data.draw(st.lists(st.integers(0, ours.vocabulary_size + 2), max_size=30))
    stream = TextStream(ours)
    pieces = [stream.push(token_id) for token_id in ids]
    pieces.append(stream.finish())

    whole = reference.decode(
        [token_id for token_id in ids if token_id < ours.vocabulary_size], skip_special_tokens=True
    )
    assert "".join(pieces) == whole
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in whole


@relaxed
@given(text=TEXTS)
def test_streamed_text_never_shows_half_a_character(both: Both, text: str) -> None:
    ours, _, _ = both
    ids = ours.encode(text)
    stream = TextStream(ours)
    so_far = ""
    for token_id in ids:
        so_far += stream.push(token_id)
        assert ours.decode(ids).startswith(so_far)
    assert so_far + stream.finish() == ours.decode(ids)


def test_a_character_is_streamed_with_its_last_byte_and_a_word_with_its_token(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    stream = TextStream(tokenizer)
    snowman = tokenizer.encode("☃")

    assert len(snowman) == 3
    assert [stream.push(token_id) for token_id in snowman] == ["", "", "☃"]
    assert "".join(stream.push(token_id) for token_id in tokenizer.encode(" Juliet is")) == " Juliet is"
    assert stream.finish() == ""


def test_garbage_bytes_do_not_stall_a_stream(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    half = tokenizer.encode("☃")[0]
    stream = TextStream(tokenizer)
    streamed = "".join(stream.push(half) for _ in range(20))

    assert streamed == "\ufffd" * 19
    assert stream.finish() == "\ufffd"


CUTS = st.lists(st.text("abcx ", max_size=4), max_size=12)


STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=4).map(tuple)


@given(pieces=CUTS, stops=STOPS)
def test_a_stop_string_is_found_however_the_text_is_cut(pieces: list[str], stops: tuple[str, ...]) -> None:
    matcher = StopMatcher(stops)
    out = "".join(matcher.push(piece) for piece in pieces) + matcher.finish()

    text = "".join(pieces)
    ends = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
    if ends:
        _, start, stop = min(ends)
        assert (out, matcher.matched) == (text[:start], stop)
    else:
        assert (out, matcher.matched) == (text, None)


@given(pieces=CUTS, stops=STOPS)
def test_only_text_that_may_begin_a_stop_string_is_held_back(
    pieces: list[str], stops: tuple[str, ...]
) -> None:
    matcher = StopMatcher(stops)
    text = out = ""
    for piece in pieces:
        text += piece
        out += matcher.push(piece)
        if matcher.matched is not None:
            return
        held = text[len(out) :]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(("a", ""))


def test_nothing_goes_out_after_a_match() -> None:
    matcher = StopMatcher(("END",))

    assert matcher.push("one EN") == "one "
    assert matcher.push("D two") == ""
    assert (matcher.push("three"), matcher.finish(), matcher.matched) == ("", "", "END")
