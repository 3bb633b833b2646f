"""Text out of tokens, as soon as it is certain, and strings that end it."""

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from molink.shards.text.tokenizer import Tokenizer

_REPLACEMENT: Final = "\ufffd"
_HELD_BY_CLEANUP: Final = 64
"""Each of the ten replacements looks 4 characters ahead, so text this far from the end no longer changes."""
_MOST_CLEANED: Final = 1024
"""Characters that are looked at again and again."""
_CUT_EVERY: Final = 16
"""Tokens that end in the middle of a character, after which it is looked for where it begins."""
_CHARACTER_BYTES: Final = 4
"""Tokens that one character may take, as each has a byte or more."""


class TextStream:
    """Detokenizes one generation as it comes. The pieces joined are what `Tokenizer.decode` makes of all ids.

    A tokenizer's decoder sees a whole list of tokens: a first space is dropped, characters are put together
    out of bytes. So the new text is the difference between two decodings that start at the same earlier
    token.
    """

    def __init__(self, tokenizer: "Tokenizer", kept: frozenset[int] = frozenset()) -> None:
        """`kept` are special tokens that are seen as they are written."""
        self._tokenizer = tokenizer
        self._kept = kept
        self._window: list[int] = []
        """Ids still looked at: those of the piece before the present one, then the present one's."""
        self._context = 0
        """How many of them belong to the piece before."""
        self._yielded = 0
        """Characters of the window's text that are out already."""
        self._raw = ""
        self._cleaned = 0

    def push(self, token_id: int) -> str:
        """The text that has become certain with this token, maybe none. Special tokens have no text, but those that
        are kept."""
        if token_id in self._kept:
            text = self._advance(final=True) + self._tokenizer.token_text(token_id)
            self._window.clear()
            self._context = self._yielded = 0
            return self._clean(text, final=False)
        if not self._tokenizer.has_text(token_id):
            return ""
        self._window.append(token_id)
        if self._tokenizer.is_byte_token(token_id):
            return ""  # one that does not fit would turn the whole run of byte tokens into U+FFFD
        return self._clean(self._advance(final=False), final=False)

    def finish(self) -> str:
        """The text still held back, at the end of the generation."""
        return self._clean(self._advance(final=True), final=True)

    def _advance(self, *, final: bool) -> str:
        text = self._tokenizer.decode_raw(self._window)
        # A character whose last bytes are to come shows as one replacement character at the end.
        certain = len(text) - (not final and text.endswith(_REPLACEMENT))
        piece = text[self._yielded : certain]
        self._yielded = max(certain, self._yielded)
        if certain == len(text):
            del self._window[: self._context]
            self._context = len(self._window)
            self._yielded = len(self._tokenizer.decode_raw(self._window))
        elif len(self._window) % _CUT_EVERY == 0:
            self._cut(text)
        return piece

    def _cut(self, text: str) -> None:
        """Takes tokens out of the window, whose text that is, that bytes to come cannot change: a model may end in the
        middle of a character without end, and each token would decode all of that again."""
        tokens = len(self._window)
        for at in range(tokens - _CHARACTER_BYTES, max(self._context, tokens - _CUT_EVERY), -1):
            before = self._tokenizer.decode_raw(self._window[:at])
            behind = self._tokenizer.decode_raw(self._window[at:])
            if before + behind == text and len(before) <= self._yielded:
                del self._window[:at]
                self._context, self._yielded = 0, self._yielded - len(before)
                return

    def _clean(self, piece: str, *, final: bool) -> str:
        """What is certain after spaces before punctuation are removed, for the few tokenizers that do it."""
        if not self._tokenizer.cleans_up_spaces:
            return piece
        self._raw += piece
        cleaned = clean_up_spaces(self._raw)
        certain = len(cleaned) if final else max(self._cleaned, len(cleaned) - _HELD_BY_CLEANUP)
        piece, self._cleaned = cleaned[self._cleaned : certain], certain
        if len(self._raw) > _MOST_CLEANED:
            self._forget_cleaned()
        return piece

    def _forget_cleaned(self) -> None:
        """Takes text out that is certain, up to a space behind a letter: no replacement reaches over that."""
        for at in range(len(self._raw) - 4 * _HELD_BY_CLEANUP, 0, -1):
            if self._raw[at] == " " and self._raw[at - 1].isalnum():
                self._cleaned -= len(clean_up_spaces(self._raw[:at]))
                self._raw = self._raw[at:]
                return


class StopMatcher:
    """Looks for stop strings in text that comes in pieces, however it is cut.

    Text that could be the beginning of a stop string is held back. Of several stop strings the one that is
    complete first counts, of those complete at once the longest.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        """Raises `ValueError` if a stop string is empty."""
        if not all(stops):
            raise ValueError("a stop string cannot be empty")
        self._stops = stops
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that was found; None as long as there is none."""
        return self._matched

    def push(self, text: str) -> str:
        """The text that can go out now; at a match, what was before it; after a match, nothing."""
        if self._matched is not None:
            return ""
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, self._matched = min(found)
            self._held = ""
            return text[:at]
        held = max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """The text still held back, at the end of the generation: it was no stop string after all."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


def clean_up_spaces(text: str) -> str:
    """Without the spaces that WordPiece tokenizers leave before punctuation and English contractions."""
    for mark in (".", "?", "!", ","):
        text = text.replace(f" {mark}", mark)
    text = text.replace(" ' ", "'")
    for ending in ("n't", "'m", "'s", "'ve", "'re"):
        text = text.replace(f" {ending}", ending)
    return text
