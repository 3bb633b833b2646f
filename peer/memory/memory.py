"""How a peer's `--memory` cap is divided between weights, KV cache and work space. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from molink.shards.spec import DTYPE_BYTES, ModelSpec, Span, merge_spans, missing_spans

MIN_KV_TOKENS = 16
"""A plan that leaves no room for the KV cache of so many tokens is refused: it could serve nobody."""

ROW_VECTORS = 24
"""Hidden-size vectors alive for one row at the peak of a layer: residual in and out 2, normed 1, query, key
and value 3, attention output 1, MLP output 1, gate, up and their product at 5 1/3 hidden sizes each 16."""

MATRIX_ROWS = 6
"""The largest matrix of a layer, in hidden sizes by hidden size: what is dequantized at a time."""

TABLE_ROWS = 64
"""Sessions whose decode rows attend together, each with a row in the tables of blocks."""
TABLE_TOKEN_BYTES = 128
"""Of a table, for each token of context: for each block of 16 tokens two addresses and two lengths of 8 bytes, as
latents have them (keys and values have one of each), TABLE_ROWS times."""
RECORDED_ROWS = 199
"""Of the results of all recorded steps together: 1, 2, 4, 8, 16, 24, 32, 48 and 64 (`shards/batching/decode.py`)."""
DRAWN_NUMBERS = 65_536
"""Of each row's vocabulary, that recorded drawings weigh together (`shards/sampling/weights.py`)."""
DRAWN_BYTES = 24
"""Of each of these: a copy of the logit, its weight in float64, and that once more."""
LIBRARY_STREAMS = 2
"""Streams on which matrix libraries have work space of their own: that of steps and that of recordings."""
LIBRARY_BYTES = 32 * 1024**2
"""Of a matrix library on one stream: what cuBLAS takes on Hopper, the most of all cards."""
PARTIAL_VECTORS = 1024
"""Hidden-size vectors of float32 in the partial results of attention that is split by length: two programs for each
processor of the largest cards."""
SCORES_BYTES = 4 * 32 * 1024**2
"""Attention that no library has is computed for as many queries at a time as have 32 MiB of scores; these, masked,
exponentiated and in another dtype."""
FRAGMENTS_SHARE = 0.01
FRAGMENTS_BYTES = 64 * 1024**2
"""What lies unused between pieces of memory on a GPU: such a share of all, and once more so much."""

MAX_LOGIT_ROWS = 64
"""Rows behind which a token may be drawn in one step; each needs its logits and a sorted copy."""

CAP_HEADROOM_SHARE = 0.1
CAP_HEADROOM_BYTES = 256 * 1024**2
"""What allocators keep, and what a program grows by beside weights, KV and work space, is no breach of the cap."""

_FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """A peer's memory, divided. The KV cache may take total - workspace - the weights that are committed."""

    total_bytes: int
    """The cap on weights, KV cache and work space together."""
    workspace_bytes: int
    """Set aside for what a step needs while it runs."""
    weight_limit_bytes: int
    """Weights may take at most this, so that some of the memory is always the KV cache's."""
    swap_bytes: int = 0
    """Memory of the host, beside the total, for the KV cache of sessions that wait while others take all of it."""

    def __post_init__(self) -> None:
        free_bytes = self.total_bytes - self.workspace_bytes
        if not 0 <= self.weight_limit_bytes <= free_bytes <= self.total_bytes:
            raise ValueError(
                f"work space of {self.workspace_bytes} and weights of {self.weight_limit_bytes} bytes "
                f"do not fit a total of {self.total_bytes}"
            )


def workspace_bytes(spec: ModelSpec, max_batch_tokens: int) -> int:
    """What a step of `max_batch_tokens` rows needs while it runs, beside weights and KV cache.

        4 bytes x (max_batch_tokens x ROW_VECTORS x hidden_size
                   + 2 x min(max_batch_tokens, MAX_LOGIT_ROWS) x vocabulary_size)
        + for a quantized model, one dequantized matrix: MATRIX_ROWS x hidden_size^2 elements of the dtype

    In float32 whatever the dtype, as norms, softmax and sampling compute in it. Attention's scores are not
    counted: fused kernels never hold them whole.
    """
    rows = max_batch_tokens * ROW_VECTORS * spec.hidden_size
    logits = 2 * min(max_batch_tokens, MAX_LOGIT_ROWS) * spec.vocabulary_size
    matrix = MATRIX_ROWS * spec.hidden_size**2 * DTYPE_BYTES[spec.dtype] if spec.quantization != "none" else 0
    return _FLOAT32_BYTES * (rows + logits) + matrix


def gpu_reserve_bytes(spec: ModelSpec, total_bytes: int, library_bytes: int = LIBRARY_BYTES) -> int:
    """What a GPU of `total_bytes` holds beside weights, KV cache and a step's work space: tables of blocks, results and
    work space of recorded steps, what matrix libraries take for themselves (`library_bytes` on each stream, as
    measured), recorded drawings, partial results, scores of attention, and what fragmentation costs."""
    tables = len(set(spec.kv_windows or (None,))) * TABLE_TOKEN_BYTES * spec.context_length
    recorded = RECORDED_ROWS * max(spec.hidden_size, spec.vocabulary_size) * _FLOAT32_BYTES
    recorded += workspace_bytes(spec, TABLE_ROWS)
    recorded += TABLE_ROWS * _FLOAT32_BYTES * spec.vocabulary_size  # the logits that are drawn from
    recorded += TABLE_ROWS * DRAWN_BYTES * min(spec.vocabulary_size, DRAWN_NUMBERS)
    partial = PARTIAL_VECTORS * spec.hidden_size * _FLOAT32_BYTES
    fragments = int(FRAGMENTS_SHARE * total_bytes) + FRAGMENTS_BYTES
    return tables + recorded + LIBRARY_STREAMS * library_bytes + partial + SCORES_BYTES + fragments


def plan_memory(
    spec: ModelSpec,
    total_bytes: int,
    max_batch_tokens: int,
    weight_share: float = 0.8,
    reserve_bytes: int = 0,
) -> MemoryPlan:
    """Divides `total_bytes`. After the work space, weights may take `weight_share` of what is left (0 to 1,
    exclusive), or the smallest layer where that is more; the rest is the KV cache's, as is what weights do
    not use. `reserve_bytes` are kept free beside the work space, as `gpu_reserve_bytes` says.

    Raises:
        ValueError: not even the smallest layer and its KV cache of MIN_KV_TOKENS tokens would fit; it says
            how much is needed at least.
    """
    if max_batch_tokens < 1:
        raise ValueError(f"max_batch_tokens must be at least 1, got {max_batch_tokens}")
    if not 0.0 < weight_share < 1.0:
        raise ValueError(f"weight_share must be above 0 and below 1, got {weight_share}")
    workspace = workspace_bytes(spec, max_batch_tokens) + reserve_bytes
    needed, smallest = min(
        (spec.weight_bytes(layer) + spec.kv_bytes(layer, MIN_KV_TOKENS), spec.weight_bytes(layer))
        for layer in (Span(start, start + 1) for start in range(spec.layers))
    )
    available = total_bytes - workspace
    if available < needed:
        raise ValueError(
            f"{format_bytes(max(total_bytes, 0))} of memory is too little for {spec.name}: its smallest "
            f"layer with the KV cache of {MIN_KV_TOKENS} tokens takes {format_bytes(needed)}, and a step's "
            f"work space {format_bytes(workspace)}. Give at least "
            f"{math.ceil((workspace + needed) / 1000**2)}MB, or choose a smaller model or quantization"
        )
    return MemoryPlan(total_bytes, workspace, max(int(weight_share * available), smallest))


def most_kv_bytes(pool_bytes: int, swap_bytes: int, leased: Sequence[int]) -> int:
    """The largest KV cache that one more session could be granted, beside sessions of `leased` bytes; below 0 where
    these are too many.

    All of them fit the pool; or each of them does, and all and once more the largest fit pool and swap space: a session
    is swapped out whole, so that one too many may be there.
    """
    largest, left_bytes = max(leased, default=0), pool_bytes - sum(leased)
    if not swap_bytes or largest > pool_bytes:
        return left_bytes
    swapped = left_bytes + swap_bytes
    return max(left_bytes, min(pool_bytes, swapped // 2 if swapped >= 2 * largest else swapped - largest))


def spare_pool_bytes(pool_bytes: int, swap_bytes: int, leased: Sequence[int]) -> int:
    """By how much the pool could shrink without breaking the promise to sessions of `leased` bytes."""
    largest, left_bytes = max(leased, default=0), pool_bytes - sum(leased)
    if not swap_bytes:
        return left_bytes
    return max(left_bytes, min(pool_bytes, left_bytes + swap_bytes) - largest)


def is_over_cap(taken_bytes: int, cap_bytes: int, *, was_over: bool) -> bool:
    """Whether a process that takes so much is beyond cap and headroom; once beyond, until half the headroom is free."""
    headroom_bytes = CAP_HEADROOM_SHARE * cap_bytes + CAP_HEADROOM_BYTES
    return taken_bytes > cap_bytes + headroom_bytes * (0.5 if was_over else 1.0)


class Holdings:
    """Which layers' weights have a claim on a peer's memory: those it holds and those it is loading.

    `held` could be stepped this second, `loading` was ordered and has not ended; both in as few spans as
    possible.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self.held: tuple[Span, ...] = ()
        self.loading: tuple[Span, ...] = ()

    @property
    def committed_bytes(self) -> int:
        return self.bytes_of((*self.held, *self.loading))

    def bytes_of(self, spans: tuple[Span, ...]) -> int:
        """Weights of the spans together, each layer and what the ends of the model carry counted once."""
        return self._spec.held_bytes(spans)

    def added_bytes(self, spans: tuple[Span, ...]) -> int:
        """What holding these spans too would take."""
        return self.bytes_of((*self.held, *self.loading, *spans)) - self.committed_bytes

    def cold(self, span: Span) -> tuple[Span, ...]:
        """The parts of the span that are neither held nor on their way."""
        return missing_spans(span, (*self.held, *self.loading))

    def order(self, spans: tuple[Span, ...]) -> None:
        """Cold layers are on their way from now on."""
        self.loading = merge_spans((*self.loading, *spans))

    def arrive(self, span: Span) -> None:
        """The span is held from now on."""
        self.held = merge_spans((*self.held, span))
        self.loading = _without(self.loading, span)

    def fail(self, span: Span) -> tuple[Span, ...]:
        """What was on its way of this span is not any more; returns it."""
        failed = common_spans(self.loading, span)
        self.loading = _without(self.loading, span)
        return failed

    def drop(self, span: Span) -> None:
        """The span is held no longer."""
        self.held = _without(self.held, span)


def common_spans(spans: tuple[Span, ...], other: Span) -> tuple[Span, ...]:
    """The parts of `spans` that are in `other`."""
    return tuple(
        Span(max(span.start, other.start), min(span.stop, other.stop))
        for span in spans
        if max(span.start, other.start) < min(span.stop, other.stop)
    )


def _without(spans: tuple[Span, ...], removed: Span) -> tuple[Span, ...]:
    return tuple(left for span in spans for left in missing_spans(span, (removed,)))


def format_bytes(count: int) -> str:
    """`count` bytes (0 or more) for people, in powers of 1000: `512 B`, `1.5 GB`."""
    if count < 0:
        raise ValueError(f"a size cannot be negative, got {count}")
    if count < 1000:
        return f"{count} B"
    size = float(count)
    unit = "B"
    for larger in ("kB", "MB", "GB", "TB", "PB"):
        if size < 999.95:
            break
        size /= 1000
        unit = larger
    return f"{size:.1f} {unit}"
