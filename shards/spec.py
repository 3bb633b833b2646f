"""What a model is and what is asked of it, as values. No torch here: every world may import this file."""

import reprlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from numbers import Integral, Real

from molink.shards.grammar import Grammar

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Numeric types that a circuit can compute in, with the bytes of one element."""

QUANTIZATIONS = ("none", "int8", "nf4")

INT8_BLOCK = 64
"""Values of an activation that share a scale in int8. Smaller blocks are more exact: one outlier spoils fewer."""
ACTIVATION_CODECS = ("none", "float16", "bfloat16", "int8")
"""How activations may travel between peers: in the model's own numbers, or, if all agree, in fewer bytes."""

PENALTIES, GRAMMARS = "penalties", "grammars"
"""What a circuit's tail may be able to do where it draws tokens: heed what has been in the sequence (penalties), and
mask what a grammar forbids."""
PROMPT_LOGPROBS = "prompt_logprobs"
"""What a tail may be able to do beside these, and then can with penalties: tell the log-probabilities of the prompt."""
GUESSES = "guesses"
"""What a hop may be able to do, announced with these: compute guesses beside a decode step's token, and go back."""

MOST_GUESSED_TOKENS = 15
"""Of one decode step: with the token before them 16 rows, which compiled layers take together (decision 0038)."""

GUESS_SOURCES = ("other", "lookup", "table", "prediction", "draft", "grammar")
"""Where guesses come from: the text so far, tables of earlier generations, what the client predicts, a draft model,
what a grammar leaves. In messages each is its index, and an index beyond them is another source."""

KV_BLOCK_TOKENS = 16
"""The KV cache is given out, shared and dropped in blocks of so many tokens."""

STATES_KEPT = 2
"""Of each session, where layers keep states: those behind its latest step, and those before it."""
MOST_PROMPT_LOGPROBS_BYTES = 512 * 1024
"""Of one prompt: they travel in one message, as decode does."""
MAX_STEP_TOKENS = 512
"""New tokens of one session in one step, at most: layers with a window keep room for so many beside it."""


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Consecutive decoder layers [start, stop)."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(f"a span needs 0 <= start < stop, got [{self.start}, {self.stop})")

    def __len__(self) -> int:
        return self.stop - self.start

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.stop))

    def __contains__(self, layer: object) -> bool:
        return isinstance(layer, int) and self.start <= layer < self.stop

    def __str__(self) -> str:
        return f"[{self.start}, {self.stop})"

    def covers(self, other: "Span") -> bool:
        """Whether every layer of `other` is in this span."""
        return self.start <= other.start and other.stop <= self.stop


def merge_spans(spans: tuple[Span, ...]) -> tuple[Span, ...]:
    """The same layers in as few spans as possible, in order."""
    merged: list[Span] = []
    for span in sorted(spans):
        if merged and span.start <= merged[-1].stop:
            merged[-1] = Span(merged[-1].start, max(merged[-1].stop, span.stop))
        else:
            merged.append(span)
    return tuple(merged)


def missing_spans(wanted: Span, held: tuple[Span, ...]) -> tuple[Span, ...]:
    """The parts of `wanted` that `held` does not cover, in order."""
    missing: list[Span] = []
    start = wanted.start
    for span in merge_spans(held):
        if span.stop <= start or span.start >= wanted.stop:
            continue
        if span.start > start:
            missing.append(Span(start, span.start))
        start = max(start, span.stop)
    if start < wanted.stop:
        missing.append(Span(start, wanted.stop))
    return tuple(missing)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model as peers, routers and clients speak of it: what it is called and what each part of it costs.

    Sizes are those in memory, in the dtype and quantization that the swarm computes in.
    """

    model_hash: str
    """64 hexadecimal digits over content, dtype and quantization: equal hashes serve the same numbers."""
    content_hash: str
    """64 hexadecimal digits over configuration, tensors and tokenizer files, whatever the dtype."""
    name: str
    """What people call it, such as `molink/tiny-shakespeare`. A label, not an identity."""
    architecture: str
    """`model_type` of the configuration, such as `llama`."""
    layers: int
    hidden_size: int
    vocabulary_size: int
    context_length: int
    """Most tokens that one sequence may have, prompt and generation together."""
    dtype: str
    quantization: str
    layer_bytes: tuple[int, ...]
    """Weights of each decoder layer."""
    embed_bytes: int
    """Weights that the head of a circuit holds besides its layers: embeddings of tokens and positions."""
    head_bytes: int
    """Weights that the tail of a circuit holds besides its layers: final norm and language-model head."""
    kv_bytes_per_token: tuple[int, ...]
    """KV cache of one token in each layer."""
    stop_token_ids: tuple[int, ...]
    """Tokens that end a generation, as the model's generation configuration says."""
    kv_windows: tuple[int | None, ...] = ()
    """How many of the latest tokens, its own included, a token sees in each layer (None: all); () where all layers
    see all."""
    shared_bytes: int = 0
    """What embedding and head have in common where they are tied: a peer with both ends holds it once."""
    state_bytes: tuple[int, ...] = ()
    """What each layer keeps of a sequence beside, however long it is; empty: nothing."""

    def __post_init__(self) -> None:
        if (
            self.layers < 1
            or len(self.layer_bytes) != self.layers
            or len(self.kv_bytes_per_token) != self.layers
        ):
            raise ValueError(
                f"layers={self.layers} needs as many layer_bytes ({len(self.layer_bytes)}) "
                f"and kv_bytes_per_token ({len(self.kv_bytes_per_token)})"
            )
        if len(self.kv_windows) not in (0, self.layers):
            raise ValueError(
                f"layers={self.layers} needs as many kv_windows, or none: {len(self.kv_windows)}"
            )
        if self.state_bytes and len(self.state_bytes) != self.layers:
            raise ValueError(
                f"layers={self.layers} needs as many state_bytes ({len(self.state_bytes)}) or none"
            )
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPE_BYTES)}, got {self.dtype!r}")
        if self.quantization not in QUANTIZATIONS:
            raise ValueError(
                f"quantization must be one of {', '.join(QUANTIZATIONS)}, got {self.quantization!r}"
            )

    @property
    def whole(self) -> Span:
        return Span(0, self.layers)

    @property
    def activation_bytes(self) -> int:
        """One token's hidden state on the wire, in the model's own numbers."""
        return row_bytes(self.dtype, self.hidden_size)

    def weight_bytes(self, span: Span) -> int:
        """Weights of the span, with the embedding if it starts the model and the head if it ends it."""
        return self.held_bytes((span,))

    def held_bytes(self, spans: tuple[Span, ...]) -> int:
        """Weights of the spans on one peer together: each layer, and what the ends of the model share, once."""
        merged = merge_spans(spans)
        if not merged:
            return 0
        starts, ends = merged[0].start == 0, merged[-1].stop == self.layers
        layers = sum(sum(self.layer_bytes[span.start : span.stop]) for span in merged)
        ends_bytes = starts * self.embed_bytes + ends * self.head_bytes
        return layers + ends_bytes - (self.shared_bytes if starts and ends else 0)

    @property
    def most_step_tokens(self) -> int:
        """New tokens that one step of a session may have: layers with windows keep room for no more."""
        return MAX_STEP_TOKENS if any(self.kv_windows) else self.context_length

    def kv_bytes(self, span: Span, tokens: int) -> int:
        """KV cache that one sequence of up to `tokens` tokens ever has in the span, in whole blocks, and its states,
        also those before its latest step."""
        windows = self.kv_windows or (None,) * self.layers
        return STATES_KEPT * sum(self.state_bytes[span.start : span.stop]) + KV_BLOCK_TOKENS * sum(
            most_kv_blocks(tokens, windows[layer]) * self.kv_bytes_per_token[layer] for layer in span
        )


def row_bytes(encoding: str, hidden_size: int) -> int:
    """One token's hidden state on the wire: in numbers of a dtype, or in int8 with a float32 scale for each block.

    Raises ValueError for any other encoding.
    """
    if encoding == "int8":
        return hidden_size + 4 * -(-hidden_size // INT8_BLOCK)
    if encoding not in DTYPE_BYTES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPE_BYTES)}, got {encoding!r}")
    return hidden_size * DTYPE_BYTES[encoding]


def most_kv_blocks(tokens: int, window: int | None) -> int:
    """Blocks that a layer of that window holds at most at once of a sequence of up to `tokens` tokens.

    During a step these are the blocks of the window before the first new token and of at most MAX_STEP_TOKENS new
    ones, wherever the first of them lies in its block.
    """
    all_blocks = -(-tokens // KV_BLOCK_TOKENS)
    if window is None:
        return all_blocks
    seen = window - 1 + MAX_STEP_TOKENS
    return min(all_blocks, (seen + KV_BLOCK_TOKENS - 2) // KV_BLOCK_TOKENS + 1)


class SamplingError(ValueError):
    """A field of `SamplingParams` has a value that it cannot have: `parameter` names it."""

    def __init__(self, parameter: str, value: object, allowed: str) -> None:
        super().__init__(f"{parameter} must be {allowed}, got {reprlib.repr(value)}")
        self.parameter = parameter


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tail of a circuit chooses the next token, and when a generation ends.

    logit_bias is added to the logits, then come the penalties, and what a grammar or min_tokens forbids is left out.
    temperature 0 is greedy and ignores min_p, top_k, top_p and seed. Otherwise the logits are divided by it, cut to
    tokens that are at least min_p times as likely as the likeliest, to the top_k most likely (0: all) and then to the
    smallest set of probability top_p, and a token is drawn in an exponential race whose numbers depend on (seed,
    position, token id) alone (`sampling/race.py`), so that any peer that takes over draws the same.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    """Strings that end the text; they are cut from it. Looked for by the client."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a generation, beside the model's own."""
    ignore_eos: bool = False
    """Go on past the model's own stop tokens."""
    logprobs: int | None = None
    """None: no log-probabilities. n: the chosen token's and those of the n most likely, 0 to 20. They are of the logits
    with logit_bias, before penalties, masks and all that follows."""
    prompt_logprobs: int | None = None
    """None: none of the prompt. n: log-probabilities of the prompt's tokens from the second one on, each with those of
    the n most likely at its place, 0 to 20; of the model's own logits. Not with a grammar."""
    logit_bias: tuple[tuple[int, float], ...] = field(default=())
    """(token id, added to its logit) pairs, at most 300."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit for each time that it was generated, -2 to 2 (OpenAI's formula)."""
    presence_penalty: float = 0.0
    """Taken once from the logit of each token that was generated, -2 to 2 (OpenAI's formula)."""
    repetition_penalty: float = 1.0
    """The logits of tokens of the prompt and of generated ones are divided by it where they are positive, else
    multiplied, 0.01 to 100 (Keskar et al. 2019, CTRL, section 4.1; as transformers does it). Comes before the two
    above."""
    min_p: float = 0.0
    """Tokens that are less likely than so many times the likeliest are left out, 0 to 1, after temperature."""
    min_tokens: int = 0
    """Before so many tokens none that ends the generation is drawn, unless the grammar lets nothing else come; at most
    max_new_tokens."""
    grammar: Grammar | None = None
    """What all of the generated text is; the model's own stop tokens then end it."""

    def __post_init__(self) -> None:
        """Raises SamplingError: a value is of another type, or out of range."""
        temperature, top_p, seed, logprobs = self.temperature, self.top_p, self.seed, self.logprobs
        checks = (
            ("max_new_tokens", _is_whole(self.max_new_tokens, 1), "a whole number from 1 to 2**31 - 1"),
            ("temperature", _is_number(temperature, 0, 100), "a number from 0 to 100"),
            ("top_k", _is_whole(self.top_k, 0), "a whole number from 0 (all) to 2**31 - 1"),
            ("top_p", _is_number(top_p, 0, 1) and top_p > 0, "a number above 0 and at most 1"),
            (
                "seed",
                seed is None or _is_whole(seed, 0, 2**64 - 1),
                "None or a whole number from 0 to 2**64 - 1",
            ),
            ("stop", _are(self.stop, 16, _is_text), "at most 16 strings, none of them empty"),
            ("stop_token_ids", _are(self.stop_token_ids, 64, _is_token_id), "at most 64 token ids"),
            ("ignore_eos", isinstance(self.ignore_eos, bool), "True or False"),
            (
                "logprobs",
                logprobs is None or _is_whole(logprobs, 0, 20),
                "None or a whole number from 0 to 20",
            ),
            (
                "prompt_logprobs",
                self.prompt_logprobs is None
                or (_is_whole(self.prompt_logprobs, 0, 20) and self.grammar is None),
                "None or, without a grammar, a whole number from 0 to 20",
            ),
            (
                "logit_bias",
                _are(self.logit_bias, 300, _is_bias),
                "at most 300 pairs of a token id and a number from -100 to 100",
            ),
            ("frequency_penalty", _is_number(self.frequency_penalty, -2, 2), "a number from -2 to 2"),
            ("presence_penalty", _is_number(self.presence_penalty, -2, 2), "a number from -2 to 2"),
            (
                "repetition_penalty",
                _is_number(self.repetition_penalty, 0.01, 100),
                "a number from 0.01 to 100",
            ),
            ("min_p", _is_number(self.min_p, 0, 1), "a number from 0 to 1"),
            (
                "min_tokens",
                _is_whole(self.min_tokens, 0)
                and not (_is_whole(self.max_new_tokens, 1) and self.min_tokens > self.max_new_tokens),
                "a whole number from 0 to max_new_tokens",
            ),
            ("grammar", self.grammar is None or isinstance(self.grammar, Grammar), "None or a Grammar"),
            (
                "ignore_eos",
                not (self.grammar is not None and self.ignore_eos),
                "False with a grammar, whose text ends",
            ),
        )
        for name, holds, allowed in checks:
            if not holds:
                raise SamplingError(name, getattr(self, name), allowed)

    @property
    def has_penalties(self) -> bool:
        """Whether a draw depends on how often tokens were before it."""
        return bool(self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1)

    @property
    def needs_sequence(self) -> bool:
        """Whether a tail has to know the tokens before those that it draws."""
        return self.has_penalties or self.grammar is not None or self.prompt_logprobs is not None


def prompt_logprobs_bytes(prompt_tokens: int, likeliest: int) -> int:
    """The bytes of a prompt's log-probabilities on the wire, with so many of the likeliest tokens at each place."""
    return (prompt_tokens - 1) * (4 + 8 * likeliest)


def _is_whole(value: object, least: int, most: int = 2**31 - 1) -> bool:
    return isinstance(value, Integral) and _is_number(value, least, most)


def _is_number(value: object, least: float, most: float) -> bool:
    return not isinstance(value, bool) and isinstance(value, Real) and not value < least and value <= most


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _is_token_id(value: object) -> bool:
    return _is_whole(value, 0)


def _is_bias(value: object) -> bool:
    match value:
        case (token_id, bias):
            return _is_token_id(token_id) and _is_number(bias, -100, 100)
    return False


def _are(values: object, most: int, holds: Callable[[object], bool]) -> bool:
    return isinstance(values, tuple) and len(values) <= most and all(map(holds, values))
