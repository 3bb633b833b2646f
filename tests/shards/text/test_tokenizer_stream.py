"""Text that comes token by token: nothing too early, nothing lost, nothing after a stop string."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models.tiny_models import make_tokenizer
from support.models.tokenizer_kinds import MAKERS, TEXTS
from support.properties import examples
from transformers import AutoTokenizer

from molink.shards.text.text_stream import clean_up_spaces
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


@relaxed
@given(data=st.data())
def test_pieces_of_a_long_stream_of_few_tokens_join_to_its_decoding(both: Both, data: st.DataObject) -> None:
    ours, reference, _ = both
    bad = [at for at in range(ours.vocabulary_size) if "\ufffd" in ours.token_text(at)]
    few = data.draw(st.lists(st.sampled_from([*bad, *range(ours.vocabulary_size)]), min_size=1, max_size=4))
    ids = [few[at % len(few)] for at in data.draw(st.lists(st.integers(0, 3), max_size=80))] * 3
    stream = TextStream(ours)
    streamed = "".join(stream.push(token_id) for token_id in ids)
    assert streamed + stream.finish() == reference.decode(ids, skip_special_tokens=True)


def test_however_long_half_characters_come_few_tokens_are_decoded_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    whole = list(tokenizer.encode("☃"))
    half = whole[1]
    decoded = 0
    decode_raw = Tokenizer.decode_raw

    def counted(of: Tokenizer, ids: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(ids)
        return decode_raw(of, ids)

    monkeypatch.setattr(Tokenizer, "decode_raw", counted)
    stream, ids = TextStream(tokenizer), [half] * 2000 + whole + [half] * 1000 + whole[:2]
    streamed = "".join(map(stream.push, ids)) + stream.finish()
    assert decoded < 50 * len(ids)
    assert streamed == decode_raw(tokenizer, ids)


@relaxed
@given(
    words=st.lists(st.sampled_from([" .", " '", " n't", " 's", " ,", "a", " b", " ", "' ", "."]), max_size=40)
)
def test_spaces_before_punctuation_are_removed_from_long_text_as_from_all_of_it_at_once(
    words: list[str],
) -> None:
    text = "".join(words) * 40
    stream, piece = TextStream(cast("Tokenizer", WordPieces())), "".join(words)
    streamed = "".join(map(stream.push, [piece] * 40)) + stream.finish()  # type: ignore[list-item]
    assert streamed == clean_up_spaces(text)


class WordPieces:
    """A tokenizer whose tokens are their text."""

    cleans_up_spaces = True

    def has_text(self, _: str) -> bool:
        return True

    def is_byte_token(self, _: str) -> bool:
        return False

    def decode_raw(self, ids: list[str]) -> str:
        return "".join(ids)


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
