"""Which tokens a grammar lets come next, by llguidance (extra `grammars`).

A grammar is a stranger's input: what it may take is limited by llguidance's own fuel, so that no call here lasts long,
and whatever goes wrong with one grammar is an error of it alone.
"""

from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

from molink.shards.grammar import Grammar
from molink.shards.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

T = TypeVar("T")
MOST_SAID = 400
LIMITS: dict[str, Any] = {
    "max_items_in_row": 1_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 25_000,
    "max_lexer_states": 16_000,
    "max_grammar_size": 200_000,
    "precompute_large_lexemes": False,
    "verbose_errors": False,
}
"""Of one grammar: some 20 ms to read it, as much for a mask, and 32 MB, by llguidance's own account."""
MOST_CHOICES = 16
"""Where a grammar leaves no more tokens than these, the one that came where it left the same before is expected."""
MOST_FORCED_CHOICES = 64
"""A text that is forced can begin with so many tokens, each its beginning."""
MOST_HABITS = 1024
_WHITESPACE = r"[ \t\n\r]{0,20}"
"""Between the parts of JSON: models may format it, and none fills a generation with it."""


class GrammarFailed(ValueError):
    """A grammar cannot be understood, or takes too much; the message says so to who asked for it."""


def grammars_are_available() -> bool:
    """Whether what computes masks is installed."""
    return find_spec("llguidance") is not None


class MaskTokenizer:
    """A model's tokens as their texts, for the masks of all sessions. Immutable."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, stop_ids: Sequence[int]) -> None:
        """`vocabulary` is the model's, `stop_ids` are its tokens that end a generation.

        Raises:
            GrammarFailed: nothing ends a text of this model, or its tokenizer is not understood.
        """
        from llguidance import LLTokenizer

        if not stop_ids:
            raise GrammarFailed("this model has no token that ends a text, which a grammar needs")
        size = max(vocabulary, tokenizer.vocabulary_size)
        self.inner: LLTokenizer = _guarded(
            "this model's tokenizer serves no grammars",
            lambda: LLTokenizer(tokenizer.to_json(), n_vocab=size, eos_token=list(stop_ids)),
        )
        self.tokens = (1 << vocabulary) - 1
        """A bit for each token of the model, as masks have them."""
        self.stops = sum(1 << token_id for token_id in set(stop_ids))


class TokenMasks:
    """The masks of one session: follows what is generated, and says what may come next. Used from one thread at a
    time."""

    def __init__(self, tokenizer: MaskTokenizer, grammar: Grammar) -> None:
        """Raises GrammarFailed."""
        from llguidance import LLMatcher, LLParserLimits

        self._tokenizer = tokenizer
        self._matcher: LLMatcher = _guarded(
            "the grammar is not understood",
            lambda: LLMatcher(
                tokenizer.inner, _source(grammar), log_level=0, limits=LLParserLimits(**LIMITS)
            ),
        )
        self._require("the grammar is not understood")
        self._coming: list[tuple[int, int]] = []
        """For the next token, and those behind it as far as that has been asked: which may come, and which of them is
        expected; below 0: none."""
        self._last = -1
        """The token before the next one."""
        self._habits: dict[int, int] = {}
        """What came last, by the hash of what could have come, and of the token before."""

    def follow(self, token_ids: Sequence[int]) -> None:
        """These tokens were generated. Raises GrammarFailed: the grammar does not allow them, or takes too much."""
        if token_ids:
            self._learn(token_ids)
            _guarded("the grammar failed", lambda: self._matcher.consume_tokens(list(token_ids)))
            self._require("what was generated is not of the grammar, or that takes too much")

    def next(self) -> tuple[bytes, bool]:
        """The tokens that may come next, a bit for each, and whether all of these end the text.

        Raises:
            GrammarFailed: the grammar takes too much, or nothing may come.
        """
        mask = _guarded("the grammar failed", self._matcher.compute_bitmask)
        self._require("the grammar takes too much, or leaves nothing that could come")
        bits = int.from_bytes(mask, "little") & self._tokenizer.tokens
        if not bits:
            raise GrammarFailed("the grammar leaves no token that could come")
        self._coming = [(bits, -1)]
        return mask, not bits & ~self._tokenizer.stops

    def expected(self, most: int) -> list[tuple[int, bytes, bool]]:
        """What probably comes now, at most so many tokens: where the grammar leaves one only, or a text that is forced,
        and where it leaves the few that it left before, when the one came. With each, what `next` would say behind it.
        To be asked behind `next`."""
        found: list[tuple[int, bytes, bool]] = []
        matcher: LLMatcher | None = None
        while self._coming and len(found) < most:
            bits = self._coming[-1][0]
            if bits.bit_count() > MOST_FORCED_CHOICES:
                break
            try:
                matcher = matcher or _guarded("the grammar failed", self._matcher.deep_copy)
                before = found[-1][0] if found else self._last
                likely = _guarded("the grammar failed", partial(self._followed, matcher, bits, before))
            except GrammarFailed:
                break  # the session's own token may be another one, and if it is this one it fails then
            if likely is None:
                break
            token, mask = likely
            behind = int.from_bytes(mask, "little") & self._tokenizer.tokens
            self._coming[-1] = bits, token
            self._coming.append((behind, -1))
            found.append((token, mask, not behind & ~self._tokenizer.stops))
        return found

    def _followed(self, matcher: "LLMatcher", bits: int, before: int) -> tuple[int, bytes] | None:
        """The token that probably comes where these may, and the mask behind it, to which the matcher goes on."""
        token = self._likely(matcher, bits, before)
        if token is None or not matcher.consume_token(token):
            return None
        mask = matcher.compute_bitmask()
        leaves = int.from_bytes(mask, "little") & self._tokenizer.tokens
        return (token, mask) if leaves and not matcher.is_error() else None

    def _likely(self, matcher: "LLMatcher", bits: int, before: int) -> int | None:
        """The token that probably comes where these may, behind that one; None: nobody knows, or the text ends."""
        if bits & (bits - 1) == 0:
            token = bits.bit_length() - 1
        elif forced := matcher.compute_ff_tokens():
            token = int(forced[0])
        else:
            token = self._habits.get(hash((bits, before)), -1) if bits.bit_count() <= MOST_CHOICES else -1
        return token if token >= 0 and bits >> token & 1 and not self._tokenizer.stops >> token & 1 else None

    def _learn(self, token_ids: Sequence[int]) -> None:
        for token, (bits, expected) in zip(token_ids, self._coming, strict=False):
            if bits.bit_count() <= MOST_CHOICES:
                if len(self._habits) == MOST_HABITS:
                    self._habits.clear()
                self._habits[hash((bits, self._last))] = token
            self._last = token
            if token != expected:
                break
        self._coming, self._last = [], token_ids[-1]

    def _require(self, what: str) -> None:
        if self._matcher.is_error():
            raise GrammarFailed(f"{what}: {self._matcher.get_error()}"[:MOST_SAID])


def _source(grammar: Grammar) -> str:
    from llguidance import LLMatcher

    match grammar.kind:
        case "json_schema":
            options: Any = {"whitespace_pattern": _WHITESPACE}
            return LLMatcher.grammar_from_json_schema(grammar.text, defaults=options)
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
    return LLMatcher.grammar_from_lark(grammar.text)


def _guarded(what: str, call: Callable[[], T]) -> T:
    """What `call` returns. Raises GrammarFailed: it failed, however."""
    try:
        return call()
    except GrammarFailed:
        raise
    except BaseException as error:
        # a panic inside the library is a BaseException of no public type
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise GrammarFailed(f"{what}: {error}"[:MOST_SAID]) from error
        raise
