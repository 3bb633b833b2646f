"""Which tokens a grammar lets come next, by llguidance (extra `grammars`).

A grammar is a stranger's input: what it may take is limited by llguidance's own fuel, so that no call here lasts long,
and whatever goes wrong with one grammar is an error of it alone.
"""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, TypeVar

from molink.shards.grammar import Grammar
from molink.shards.text.tokenizer import Tokenizer

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

    def follow(self, token_ids: Sequence[int]) -> None:
        """These tokens were generated. Raises GrammarFailed: the grammar does not allow them, or takes too much."""
        if token_ids:
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
        return mask, not bits & ~self._tokenizer.stops

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
