"""Paged attention beside its definition in float64: blocks strewn over memory that is NaN wherever no row may look."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from gpu.kernels.pairs import pairwise
from torch import Tensor

from molink.shards.paged_attention.paged import BlockAddresses, Logits, PagedAttention, RotaryAngles
from molink.shards.spec import KV_BLOCK_TOKENS

TOLERANCES = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}
"""Largest difference, relative to the largest number of the row: some units in the last place of the dtype, since both
the weights and the result are rounded to it."""
HEAD_DIMS = (64, 80, 96, 128, 192, 256)
GROUPS = (1, 2, 3, 4, 5, 6, 7, 8)
SLOT = 2
"""Of the keys, so that what is before and behind them must stay as it is."""
_SLOTS = 6
CardLike = TypeVar("CardLike")


@dataclass(frozen=True, slots=True)
class Shape:
    """One call for rows of these lengths; a row of length 0 is nobody's."""

    head_dim: int
    dtype: str
    group: int
    """Query heads that share a key head."""
    key_heads: int
    window: int | None
    lengths: tuple[int, ...]
    softcap: float | None = None
    sinks: bool = False
    rotates: bool = False
    """Whether keys are turned by their positions where they are stored, and queries beside them."""

    def __str__(self) -> str:
        window = "" if self.window is None else f", window {self.window}"
        window += "" if self.softcap is None else f", capped at {self.softcap:.0f}"
        window += ", sinks" if self.sinks else ""
        window += ", rotated" if self.rotates else ""
        rows = f"{len(self.lengths)} rows of up to {max(self.lengths)}"
        return f"{self.dtype}, heads of {self.head_dim}, {self.group} to a key, {rows}{window}"


RAGGED = (1, 15, 0, 16, 17, 65, 200)
_MANY = tuple(itertools.islice(itertools.cycle((33, 1, 70)), 24))


class _Scene(NamedTuple):
    """What of a shape is neither head size nor dtype nor group."""

    key_heads: int
    window: int | None
    lengths: tuple[int, ...]
    softcap: float | None = None
    sinks: bool = False
    rotates: bool = False


def _scenes(longest: int) -> list[_Scene]:
    """Windows that end within a block and beyond one, rows alone and many, one long row among short ones, logits that
    are capped and with sinks."""
    return [
        _Scene(2, None, RAGGED),
        _Scene(2, 20, RAGGED),
        _Scene(2, 100, (longest // 2, 1, 300)),
        _Scene(2, None, (longest,)),
        _Scene(1, None, _MANY),
        _Scene(2, None, (40, 5, longest, 90, *_MANY[:9])),
        _Scene(2, None, RAGGED, softcap=3.0),
        _Scene(2, None, (300, 0, 1), sinks=True),
        _Scene(1, 20, _MANY, softcap=20.0, sinks=True),
        _Scene(2, None, RAGGED, rotates=True),
    ]


def _shape(head_dim: int, dtype: str, group: int, scene: _Scene) -> Shape:
    return Shape(head_dim, dtype, group, *scene)


def shapes(longest: int, head_dims: tuple[int, ...] = HEAD_DIMS) -> list[Shape]:
    """Every head size and dtype with every group and in every scene."""
    ragged, *others = _scenes(longest)
    found = []
    for head_dim, dtype in itertools.product(head_dims, TOLERANCES):
        found += [_shape(head_dim, dtype, group, ragged) for group in GROUPS]
        groups = itertools.cycle((4, 8, 3, 2))
        found += [_shape(head_dim, dtype, next(groups), scene) for scene in others]
    return found


def paired_shapes(longest: int, cards: Sequence[CardLike]) -> list[tuple[CardLike, Shape]]:
    """Few shapes and the card of each, in which every two of head size, dtype, group, scene and card meet."""
    chosen = pairwise(_scenes(longest), GROUPS, HEAD_DIMS, [*TOLERANCES], cards)
    return [(card, _shape(head_dim, dtype, group, scene)) for scene, group, head_dim, dtype, card in chosen]


@dataclass(frozen=True, slots=True)
class Compared:
    """What came of a call."""

    difference: float
    """Largest, relative to the largest number of the row; NaN where memory was read that no row may see."""
    stored: bool
    """Whether each row's key and value are where they belong, and nothing else changed."""

    def faults(self, shape: Shape) -> list[str]:
        bar = TOLERANCES[shape.dtype]
        wrong = (
            [] if self.difference <= bar else [f"{shape}: off by {self.difference:.1e} (at most {bar:.0e})"]
        )
        return wrong if self.stored else [*wrong, f"{shape}: stored elsewhere"]


def compared(attention: PagedAttention, shape: Shape, device: str, seed: int = 0) -> Compared:
    """One step's `store` and `attend` beside the definition."""
    made = Made(shape, device, seed)
    before = made.memory.clone()
    with poisoned():
        made.store_with(attention)
        logits = Logits(made.scaling, shape.softcap, made.sinks)
        attended = attention.attend(made.query, made.places, SLOT, shape.key_heads, logits)
    expected = made.by_definition()
    apart = (attended[0].transpose(0, 1).double() - expected).abs().amax((1, 2))
    relative = apart / expected.abs().amax((1, 2)).clamp(min=1e-30)
    empty = torch.tensor([length == 0 for length in shape.lengths], device=device)
    difference = torch.where(empty, apart, relative).max()
    made.store_into(before)
    return Compared(float(difference), _same(before, made.memory) and made.turned_exactly)


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory that torch hands out uninitialised is full of NaN meanwhile."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode=deterministic)


class Made:
    """Rows, and keys and values that they see, in two extents and out of order."""

    def __init__(self, shape: Shape, device: str, seed: int) -> None:
        self.shape = shape
        self.scaling = shape.head_dim**-0.5
        dtype = getattr(torch, shape.dtype)
        generator = torch.Generator(device).manual_seed(seed)
        rows, heads, dim = len(shape.lengths), shape.key_heads, shape.head_dim
        blocks = [-(-length // KV_BLOCK_TOKENS) for length in shape.lengths]
        self._extent_tokens = (sum(blocks) + 3) * KV_BLOCK_TOKENS
        self.memory = torch.full(
            (_SLOTS, heads, self._extent_tokens, dim), float("nan"), dtype=dtype, device=device
        )

        def drawn(count: int, length: int) -> Tensor:
            states = torch.randn(1, length, count, dim, generator=generator, device=device)
            return states.to(dtype).transpose(1, 2)

        self.query = drawn(heads * shape.group, rows) * 2
        self.fresh = drawn(heads, rows), drawn(heads, rows)
        self.sinks = drawn(heads * shape.group, 1)[0, :, 0, 0].contiguous() if shape.sinks else None
        self._seen = [
            (drawn(heads, length)[0], drawn(heads, length)[0]) if length else None for length in shape.lengths
        ]
        order = torch.randperm(sum(blocks) + 3, generator=torch.Generator().manual_seed(seed)).tolist()
        self._at = [[order.pop() for _ in range(count)] for count in blocks]
        """Of each row's blocks, which block of the memory each is."""
        table = torch.zeros(rows, 2 * max(1, *blocks), dtype=torch.long)
        vector_bytes = dim * self.memory.itemsize
        for row, places in enumerate(self._at):
            for index, place in enumerate(places):
                table[row, 2 * index] = self.memory.data_ptr() + place * KV_BLOCK_TOKENS * vector_bytes
                table[row, 2 * index + 1] = self._extent_tokens
        starts = [self._start(length) for length in shape.lengths]
        bounds = torch.tensor([starts, list(shape.lengths)], dtype=torch.long)
        self.places = BlockAddresses(table.to(device), bounds.to(device))
        self.turned_exactly = True
        for row, seen in enumerate(self._seen):
            if seen is not None:
                for part, states in enumerate(seen):
                    states[:, -1] = self.fresh[part][0, :, row]
                    self._write(row, part, states[:, :-1], starts[row])

    def store_with(self, attention: PagedAttention) -> None:
        """What is stored and asked is what the definition has: turned, if the shape says so, by the kernel."""
        if not self.shape.rotates:
            attention.store(self.fresh[0], self.fresh[1], self.places, SLOT)
            return
        angles = torch.arange(len(self.shape.lengths), device=self.query.device)[:, None] * 0.3
        angles = angles * torch.linspace(1, 0.01, self.shape.head_dim // 2, device=self.query.device)
        cos, sin = (
            torch.cat((part, part), -1).to(self.query.dtype)[None] for part in (angles.cos(), angles.sin())
        )
        plain = self.query.clone(), self.fresh[0].clone()
        turned, key = _turn(self.query, cos, sin), _turn(self.fresh[0], cos, sin)
        for row, seen in enumerate(self._seen):
            if seen is not None:
                seen[0][:, -1] = key[0, :, row]
        self.fresh = key, self.fresh[1]
        attention.rotate_and_store(
            RotaryAngles(plain[0], cos, sin), plain[1], self.fresh[1], self.places, SLOT
        )
        self.turned_exactly = _same(plain[0], turned)
        self.query = plain[0]

    def _start(self, length: int) -> int:
        return 0 if self.shape.window is None else max(0, length - self.shape.window)

    def _write(self, row: int, part: int, states: Tensor, start: int) -> None:
        """Tokens from `start` on, block by block."""
        for index, place in enumerate(self._at[row]):
            first = max(start, index * KV_BLOCK_TOKENS)
            stop = min(states.shape[1], (index + 1) * KV_BLOCK_TOKENS)
            if first < stop:
                to = place * KV_BLOCK_TOKENS - index * KV_BLOCK_TOKENS
                self.memory[SLOT + part, :, first + to : stop + to] = states[:, first:stop]

    def store_into(self, memory: Tensor) -> None:
        """What `store` has to do."""
        for row, length in enumerate(self.shape.lengths):
            if length:
                place = self._at[row][(length - 1) // KV_BLOCK_TOKENS] * KV_BLOCK_TOKENS
                for part in (0, 1):
                    token = place + (length - 1) % KV_BLOCK_TOKENS
                    memory[SLOT + part, :, token] = self.fresh[part][0, :, row]

    def by_definition(self) -> Tensor:
        """[rows, heads, dim] in float64: softmax of scaled products, capped and beside a sink if the shape says so."""
        queries = self.query[0].transpose(0, 1).double()
        results = []
        for row, seen in enumerate(self._seen):
            if seen is None:
                results.append(torch.zeros_like(queries[row]))
                continue
            start = self._start(self.shape.lengths[row])
            keys, values = (states[:, start:].double() for states in seen)
            grouped = queries[row].view(self.shape.key_heads, self.shape.group, -1)
            logits = grouped @ keys.mT * self.scaling
            if self.shape.softcap is not None:
                logits = self.shape.softcap * torch.tanh(logits / self.shape.softcap)
            if self.sinks is not None:
                sinks = self.sinks.double().view(self.shape.key_heads, self.shape.group, 1)
                logits = torch.cat([logits, sinks], -1)
            weights = torch.softmax(logits, -1)[..., : keys.shape[1]]
            results.append((weights @ values).reshape_as(queries[row]))
        return torch.stack(results)


def _turn(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As architectures do: each product is rounded, and their sum."""
    half = states.shape[-1] // 2
    other = torch.cat((-states[..., half:], states[..., :half]), -1)
    return states * cos[:, None] + other * sin[:, None]


def _same(one: Tensor, other: Tensor) -> bool:
    """Equal bit for bit, NaN included."""
    kind = {4: torch.int32, 2: torch.int16}[one.itemsize]
    return torch.equal(one.contiguous().view(kind), other.contiguous().view(kind))
