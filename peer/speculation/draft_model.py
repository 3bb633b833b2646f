"""A small model that guesses for a large one: a few Llama layers in NumPy, one token at a time. Pure.

It has the large model's tokenizer, and its own KV cache for each session, which goes back to what was accepted. It is
computed where guesses are asked for, so that it has to be small: a token of half a million parameters takes about a
fifth of a millisecond of one core, which at eight guesses is some 2 % of a trip of 100 ms. Of a sequence it sees the
end.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from molink.peer.speculation.draft_drawing import DraftDrawing, first_ranked

Floats: TypeAlias = NDArray[np.float32]
SEEN_TOKENS = 64
"""Of a sequence that it begins with: the last so many."""
MOST_DRAFTED = 8
"""Of one trip."""


@dataclass(frozen=True, slots=True)
class DraftShape:
    """What a Llama's configuration says of how it computes."""

    heads: int
    kv_heads: int
    head_dim: int
    norm_epsilon: float
    rope_theta: float
    most_positions: int


@dataclass(frozen=True, slots=True, eq=False)
class DraftLayer:
    """One layer's matrices, [inputs, outputs]."""

    attention_norm: Floats
    query: Floats
    key: Floats
    value: Floats
    output: Floats
    mlp_norm: Floats
    gate: Floats
    up: Floats
    down: Floats


@dataclass(frozen=True, slots=True, eq=False)
class DraftModel:
    """A whole model, as large as `size_bytes`, that nobody changes."""

    shape: DraftShape
    embedding: Floats
    """[vocabulary, hidden]."""
    layers: tuple[DraftLayer, ...]
    norm: Floats
    head: Floats
    """[hidden, vocabulary]."""
    guess_ms: float = 0.0
    """That a guess was measured to take; 0: it was not."""

    @property
    def size_bytes(self) -> int:
        """Of the weights."""
        matrices = [
            self.embedding,
            self.norm,
            *(() if np.may_share_memory(self.head, self.embedding) else (self.head,)),
        ]
        for layer in self.layers:
            matrices += [getattr(layer, name) for name in DraftLayer.__slots__]
        return sum(matrix.nbytes for matrix in matrices)

    @property
    def cache_bytes(self) -> int:
        """Of one session's KV cache, at most."""
        shape = self.shape
        return 2 * 4 * len(self.layers) * shape.kv_heads * shape.head_dim * shape.most_positions

    @classmethod
    def of(cls, shape: DraftShape, layers: int, tensors: Mapping[str, Floats]) -> "DraftModel":
        """The model of a checkpoint's tensors, by their names. Raises KeyError where one is missing."""

        def matrix(name: str) -> Floats:
            return np.ascontiguousarray(tensors[name].T)

        made = []
        for number in range(layers):
            at = f"model.layers.{number}"
            made.append(
                DraftLayer(
                    tensors[f"{at}.input_layernorm.weight"],
                    matrix(f"{at}.self_attn.q_proj.weight"),
                    matrix(f"{at}.self_attn.k_proj.weight"),
                    matrix(f"{at}.self_attn.v_proj.weight"),
                    matrix(f"{at}.self_attn.o_proj.weight"),
                    tensors[f"{at}.post_attention_layernorm.weight"],
                    matrix(f"{at}.mlp.gate_proj.weight"),
                    matrix(f"{at}.mlp.up_proj.weight"),
                    matrix(f"{at}.mlp.down_proj.weight"),
                )
            )
        embedding = tensors["model.embed_tokens.weight"]
        head = tensors.get("lm_head.weight", embedding)
        return cls(shape, embedding, tuple(made), tensors["model.norm.weight"], head.T)


class DraftCache:
    """Owns the keys and values of one sequence, up to any of its tokens."""

    def __init__(self, model: DraftModel) -> None:
        shape = model.shape
        size = (len(model.layers), 2, shape.kv_heads, SEEN_TOKENS, shape.head_dim)
        self._model = model
        self._kept: Floats = np.empty(size, np.float32)
        self.tokens: list[int] = []
        """Those that it holds."""

    @property
    def vocabulary(self) -> int:
        """Token ids are below."""
        return len(self._model.embedding)

    def truncate(self, tokens: int) -> None:
        """Only the first so many are held."""
        del self.tokens[tokens:]

    def step(self, token_ids: Sequence[int]) -> Floats:
        """Computes these tokens behind those that are held. Returns the logits of what comes next, [vocabulary]."""
        model, shape, begin = self._model, self._model.shape, len(self.tokens)
        end = begin + len(token_ids)
        self._make_room(end)
        self.tokens += token_ids
        hidden = model.embedding[list(token_ids)]
        turn = _turns(shape, begin, end)
        hidden_from = np.triu(np.full((len(token_ids), end), -np.inf, np.float32), begin + 1)
        for layer, kept in zip(model.layers, self._kept, strict=True):
            hidden = hidden + _attended(shape, layer, kept, hidden, turn, hidden_from)
            inner = _normed(hidden, layer.mlp_norm, shape.norm_epsilon)
            gate = inner @ layer.gate
            hidden = hidden + (gate / (1 + np.exp(-gate)) * (inner @ layer.up)) @ layer.down
        logits: Floats = _normed(hidden[-1], model.norm, shape.norm_epsilon) @ model.head
        return logits

    def _make_room(self, tokens: int) -> None:
        while tokens > self._kept.shape[3]:
            self._kept = np.concatenate([self._kept, np.empty_like(self._kept)], 3)


class DraftLookup:
    """Owns what a draft model has seen of one sequence."""

    def __init__(self, model: DraftModel, drawing: DraftDrawing | None = None) -> None:
        """`drawing`: how the tokens are drawn; None: the likeliest ones are taken."""
        self._model = model
        self._drawing = drawing
        self._cache = DraftCache(model)
        self._length = 0
        """Of the whole sequence."""
        self._tokens: list[int] = []
        """The end of the sequence that the model sees, from the first token that it saw on."""
        self.unasked_trips = 0
        """In a row: the latest ones, for which nothing was asked."""

    @property
    def guess_ms(self) -> float:
        """As `DraftModel.guess_ms`."""
        return self._model.guess_ms

    def share_ms(self, _: int) -> float:
        """What a guess takes, beside however many sessions: each is computed by itself."""
        return self._model.guess_ms

    def begin_with(self, tokens: Sequence[int]) -> None:
        """The sequence begins with these."""
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """The sequence has these tokens more. What is too far back is seen no more."""
        self._length += len(tokens)
        self._tokens += tokens
        if len(self._tokens) + MOST_DRAFTED > self._model.shape.most_positions:
            self._tokens, self._cache = self._tokens[-SEEN_TOKENS:], DraftCache(self._model)
        if not self._cache.tokens:
            del self._tokens[:-SEEN_TOKENS]

    def begin(self) -> "DraftChain":
        """Guesses of what comes behind the sequence."""
        held = self._cache.tokens
        same = next(
            (at for at, pair in enumerate(zip(held, self._tokens, strict=False)) if pair[0] != pair[1]), None
        )
        self._cache.truncate(min(len(held), len(self._tokens) - 1) if same is None else same)
        return DraftChain(self._cache, self._tokens[len(held) :], self._drawing, self._length)


class DraftChain:
    """A row of guesses of a draft model, one after the other. One chain at a time has its cache."""

    def __init__(
        self, cache: DraftCache, coming: Sequence[int], drawing: DraftDrawing | None, position: int
    ) -> None:
        """`coming` are tokens of the sequence that the cache does not hold; one at least. The first guess is for that
        position of the sequence."""
        self._cache = cache
        self._coming = list(coming)
        self._drawing = drawing
        self._position = position
        self._left = MOST_DRAFTED

    def guess(self) -> tuple[int, int] | None:
        """The next token, and how strong a guess it is; None: so many are enough, a token came that the model does not
        have, or its numbers are broken."""
        if not self._left or max(self._coming) >= self._cache.vocabulary:
            return None
        self._left -= 1
        logits = self._cache.step(self._coming)
        self._coming = []
        if not np.isfinite(logits).all():
            self._left = 0
            return None
        return first_ranked(self._drawing, logits, self._position, 1)[0]

    def follow(self, token: int) -> None:
        """The sequence goes on with this token, whoever guessed it."""
        self._coming.append(token)
        self._position += 1


def _attended(
    shape: DraftShape,
    layer: DraftLayer,
    kept: Floats,
    hidden: Floats,
    turn: tuple[Floats, Floats],
    mask: Floats,
) -> Floats:
    """What attention adds to the hidden states; keys and values are kept."""
    count, end = mask.shape
    inner = _normed(hidden, layer.attention_norm, shape.norm_epsilon)
    query = _turned((inner @ layer.query).reshape(count, shape.heads, shape.head_dim), turn)
    key = _turned((inner @ layer.key).reshape(count, shape.kv_heads, shape.head_dim), turn)
    value = (inner @ layer.value).reshape(count, shape.kv_heads, shape.head_dim)
    kept[0, :, end - count : end], kept[1, :, end - count : end] = key.swapaxes(0, 1), value.swapaxes(0, 1)
    together = shape.heads // shape.kv_heads
    grouped = query.reshape(count, shape.kv_heads, together, shape.head_dim).transpose(1, 2, 0, 3)
    scores = grouped @ kept[0, :, None, :end].swapaxes(-1, -2) / np.float32(shape.head_dim**0.5) + mask
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    mixed = (weights @ kept[1, :, None, :end]).transpose(2, 0, 1, 3)
    added: Floats = mixed.reshape(count, shape.heads * shape.head_dim) @ layer.output
    return added


def _normed(hidden: Floats, weight: Floats, epsilon: float) -> Floats:
    normed: Floats = (
        hidden / np.sqrt((hidden * hidden).mean(-1, keepdims=True) + np.float32(epsilon)) * weight
    )
    return normed


def _turns(shape: DraftShape, begin: int, end: int) -> tuple[Floats, Floats]:
    """Cosines and sines of rotary position embeddings, [positions, 1, half a head]."""
    half = np.arange(0, shape.head_dim, 2) / shape.head_dim
    angles = np.arange(begin, end)[:, None] * shape.rope_theta**-half
    return np.cos(angles)[:, None].astype(np.float32), np.sin(angles)[:, None].astype(np.float32)


def _turned(states: Floats, turn: tuple[Floats, Floats]) -> Floats:
    cosines, sines = turn
    first, second = np.split(states, 2, -1)
    return np.concatenate([first * cosines - second * sines, second * cosines + first * sines], -1)
