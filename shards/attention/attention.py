"""Exact attention over packed ragged batches, registered with transformers' attention interface.

A step packs the new tokens of many sessions into one row [1, tokens, hidden], so that every matrix product of
the model is made once. Only attention tells the sessions apart: each attends to its own cache.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_utils import AttentionInterface

from molink.shards.attention.tiled_attention import attended_with

IMPLEMENTATION = "molink_packed"
"""Not registered with transformers' mask interface, so that models build no masks."""

_SLOT = "molink_slot"
_FLOAT32_BYTES = 4
_FUSED_DIM_LIMIT = 256
"""Largest head dimension for which transformers shares key heads inside the fused kernel."""
SCORES_BYTES = 32 * 1024**2
"""Where scores are written out, for no more queries at a time than have so many bytes of them in float32: a prompt's
chunk behind 8,000 tokens would have a gigabyte. Peers plan with it (`SCORES_BYTES` in `molink.peer.memory.memory`)."""
_EXACT_SCORES_BYTES = 512 * 1024**2
"""The same on a processor, where products of fewer rows are not always bitwise those of more."""
TILED_QUERIES = 24
"""From so many on, they attend to what comes before all of them in tiles."""


class AttentionRules(NamedTuple):
    """How one layer attends, as the model passes it to its attention function. A tuple, since one is made per
    call."""

    scaling: float | None
    sliding_window: int | None
    softcap: float | None
    sinks: Tensor | None
    """[heads] logits of a position that takes weight and gives nothing."""
    slopes: Tensor | None = None
    """[heads] by how much a key's logit falls with each position that it lies back (ALiBi)."""
    fuses: bool = True
    """False where torch's fused attention was dropped: scores are written out."""

    @property
    def plain(self) -> bool:
        """True if logits are scaled products and nothing else, in a window or not, and the fused call takes them."""
        return self.softcap is None and self.sinks is None and self.slopes is None and self.fuses


class AttendingBatch(Protocol):
    """What a step puts into its stage's slot while the model runs."""

    bitwise: bool
    """As in `BatchSlot`."""

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, rules: AttentionRules
    ) -> Tensor: ...


class BatchSlot:
    """Where attention modules of one stage find the batch that is running: the only owner of that state.

    Transformers calls attention functions without the cache, so each module carries a reference to its
    stage's slot.
    """

    __slots__ = ("batch", "bitwise", "exact", "fuses", "slopes", "writes_scores")

    def __init__(self, slopes: Tensor | None, *, exact: bool = True) -> None:
        """`exact`: steps of one session equal transformers' bit for bit; else all go the fastest way."""
        self.exact = exact
        self.batch: AttendingBatch | None = None
        self.bitwise = exact
        """Whether the step that runs is to equal transformers' bit for bit, not only up to rounding."""
        self.fuses = False
        """Whether the step that runs goes by a GPU's fused kernels, where modules have some (`kernels/fused.py`)."""
        self.slopes = slopes
        """As in `AttentionRules`, for models whose own code does not say."""
        self.writes_scores = False
        """True where this machine has dropped torch's fused attention."""

    def begin(self, batch: "AttendingBatch") -> None:
        """A step of this batch runs from now on."""
        self.bitwise = self.exact and batch.bitwise
        self.fuses = getattr(batch, "fuses", False)

    def install(self, layers: Iterable[nn.Module]) -> None:
        """Lets every module inside `layers` find this slot."""
        for layer in layers:
            for module in layer.modules():
                module.__dict__[_SLOT] = self


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,  # noqa: ANN401, ARG001 - whatever else a model passes: dropout, positions, cache flags
) -> tuple[Tensor, None]:
    """Attention of the batch in the module's slot: query [1, heads, tokens, dim] to output [1, tokens, heads,
    dim]."""
    if attention_mask is not None or position_bias is not None:
        raise NotImplementedError("it makes attention masks or biases of its own")
    slot: BatchSlot = module.__dict__[_SLOT]
    if slot.batch is None:
        raise RuntimeError("a model was run outside its stage")
    rules = AttentionRules(scaling, sliding_window, softcap, s_aux, slot.slopes, not slot.writes_scores)
    attended = slot.batch.attend(module, query, key, value, rules)
    return attended.transpose(1, 2).contiguous(), None


AttentionInterface.register(IMPLEMENTATION, packed_attention)


def layer_number(module: nn.Module) -> int:
    """Which layer of the whole model an attention module belongs to."""
    number: int = module.__dict__["layer_idx"]
    return number


def causal_mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """[queries, keys] booleans: may the i-th of the last `queries` positions see key j?"""
    position = torch.arange(keys - queries, keys, device=device)[:, None]
    column = torch.arange(keys, device=device)[None]
    mask = column <= position
    return mask & (column > position - window) if window else mask


def attend_sequence(
    query: Tensor, key: Tensor, value: Tensor, rules: AttentionRules, *, bitwise: bool = True
) -> Tensor:
    """Attention of a sequence's last positions over all its keys, exact.

    query [1, heads, queries, dim], key and value [1, key heads, keys, dim], heads a multiple of key heads:
    groups of query heads share a key head without repeating it. Returns [1, heads, queries, value dim]. Where
    transformers' `sdpa` implementation would make the same fused call, this makes it too, so that results are
    equal bit for bit; unless `bitwise` a single query's heads are folded, for on processors that call goes through keys
    and values anew for each of the heads that share them.
    """
    queries, keys = query.shape[2], key.shape[2]
    at_once = _queries_at_once(query, keys, rules)
    if at_once < queries:
        return torch.cat(
            [
                attend_sequence(
                    query[:, :, start : start + at_once],
                    key[:, :, : keys - max(0, queries - start - at_once)],
                    value[:, :, : keys - max(0, queries - start - at_once)],
                    rules,
                )
                for start in range(0, queries, at_once)
            ],
            2,
        )
    window = rules.sliding_window or None
    if window is not None and keys > window + queries - 1:
        keys = window + queries - 1
        key, value = key[:, :, -keys:], value[:, :, -keys:]
    if rules.slopes is not None:
        return _attend_with_biases(query, key, value, rules.slopes, rules)
    causal = queries > 1 and queries == keys and (window is None or queries <= window)
    mask = None if causal or queries == 1 else causal_mask(queries, keys, window, query.device)
    if rules.softcap is not None or rules.sinks is not None:
        if causal:
            mask = causal_mask(queries, keys, None, query.device)
        return attend_by_definition(query, key, value, mask, rules)
    shared = query.shape[1] != key.shape[1]
    folds = shared and queries == 1 and not bitwise
    if mask is None and not folds and (not shared or key.shape[3] == value.shape[3] <= _FUSED_DIM_LIMIT):
        if not rules.fuses:
            return written_attention(query, key, value, None, rules.scaling, causal=causal)
        return functional.scaled_dot_product_attention(
            query, key, value, is_causal=causal, scale=rules.scaling, enable_gqa=shared
        )
    if causal:
        mask = causal_mask(queries, keys, None, query.device)
    folded, mask = _fold_groups(query, key.shape[1], mask)
    attended = _attended(folded, key, value, mask, rules)
    return attended.reshape(1, query.shape[1], queries, value.shape[3])


def _attended(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, rules: AttentionRules
) -> Tensor:
    if not rules.fuses:
        return written_attention(query, key, value, mask, rules.scaling, causal=False)
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=rules.scaling)


def written_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None, *, causal: bool
) -> Tensor:
    """Computes `scaled_dot_product_attention` by products that write all scores: for processors on which the fused call
    fails."""
    attended: Tensor = torch.ops.aten._scaled_dot_product_attention_math(  # noqa: SLF001 - the public call chooses by itself
        query, key, value, mask, 0.0, causal, None, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )[0]
    return attended


def _queries_at_once(query: Tensor, keys: int, rules: AttentionRules) -> int:
    """As many as have no more than SCORES_BYTES of scores, where these are written out: by definition, and by all
    attention on Apple's GPUs."""
    heads, queries = query.shape[1], query.shape[2]
    if queries == 1 or (rules.plain and query.device.type != "mps"):
        return queries
    most_bytes = _EXACT_SCORES_BYTES if query.device.type == "cpu" else SCORES_BYTES
    return max(1, min(queries, most_bytes // (_FLOAT32_BYTES * heads * keys)))


def attend_up_to_rounding(query: Tensor, key: Tensor, value: Tensor, rules: AttentionRules) -> Tensor:
    """As `attend_sequence`, but only up to rounding: on a CPU several positions attend to most of the keys before them
    without a mask, and to their own apart."""
    if query.shape[2] == 1:
        return attend_sequence(query, key, value, rules, bitwise=query.device.type != "cpu")
    return attend_parts(query, [key], [value], rules)


def _merges(query: Tensor, key: Tensor, value: Tensor, rules: AttentionRules) -> bool:
    """Whether attention over some keys and over others can be merged by what they weigh."""
    return (
        query.device.type == "cpu"
        and (not rules.sliding_window or query.shape[2] == 1)
        and rules.plain
        and query.shape[3] == key.shape[3] == value.shape[3]
    )


def attend_parts(
    query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], rules: AttentionRules
) -> Tensor:
    """As `attend_sequence`, over keys and values that lie in several pieces, in order.

    Each piece is attended to where it lies and the results are merged by their log-sum-exp, which is exact (Dao et
    al., "FlashAttention-2", 2023, section 2.3). Where a layer's rules or the device do not allow that, the pieces are
    copied into one. What a window has passed is left out before.
    """
    if rules.sliding_window:
        seen = rules.sliding_window + query.shape[2] - 1
        keys, values = _latest(keys, seen), _latest(values, seen)
    queries = query.shape[2]
    whole = _seen_whole(keys, queries)
    key, value = _joined(keys[whole:]), _joined(values[whole:])
    at_once = whole == 0 and queries in (1, key.shape[2])
    if at_once or not _merges(query, key, value, rules):
        return attend_sequence(query, _joined([*keys[:whole], key]), _joined([*values[:whole], value]), rules)
    own = key.shape[2] if queries == 1 else queries
    attended, weight = _weighed(query, key[:, :, -own:], value[:, :, -own:], rules, causal=queries > 1)
    pieces = zip([*keys[:whole], key[:, :, :-own]], [*values[:whole], value[:, :, :-own]], strict=True)
    before = [(key, value) for key, value in pieces if key.shape[2]]
    if query.dtype is torch.float32 and queries >= TILED_QUERIES:
        return attended_with(query, before, rules.scaling, attended, weight)
    for key, value in before:
        other, other_weight = _weighed(query, key, value, rules, causal=False)
        share = torch.sigmoid(other_weight - weight).unsqueeze(-1)
        attended = torch.lerp(attended, other, share.to(attended.dtype))
        weight = torch.logaddexp(weight, other_weight)
    return attended


def _seen_whole(keys: Sequence[Tensor], queries: int) -> int:
    """How many of the pieces come before all queries; the queries' own keys are in those behind."""
    whole, behind = len(keys) - 1, keys[-1].shape[2]
    while whole and behind < queries:
        whole -= 1
        behind += keys[whole].shape[2]
    return whole


def _latest(parts: Sequence[Tensor], tokens: int) -> list[Tensor]:
    """The last tokens, at most so many."""
    latest: list[Tensor] = []
    for part in reversed(parts):
        if tokens > 0:
            latest.append(part[:, :, -tokens:])
        tokens -= part.shape[2]
    return latest[::-1]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), 2)


def _weighed(
    query: Tensor, key: Tensor, value: Tensor, rules: AttentionRules, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """Attention [1, heads, queries, dim] over some of a sequence's keys, and the logarithm [1, heads, queries] of what
    they weigh. `causal`: they are the queries' own, of which each sees those up to its own; else each sees all, and
    heads that share keys go through them together."""
    folded = query if causal else query.reshape(1, key.shape[1], -1, query.shape[3])
    attended, weight = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(  # noqa: SLF001 - nothing public gives the weights
        folded, key, value, 0.0, causal, scale=rules.scaling
    )
    return attended.reshape(query.shape), weight.reshape(query.shape[:3])


def _fold_groups(query: Tensor, key_heads: int, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Query heads that share a key head become further queries of that head."""
    groups = query.shape[1] // key_heads
    if groups == 1:
        return query, mask
    folded = query.reshape(1, key_heads, groups * query.shape[2], query.shape[3])
    return folded, mask if mask is None else mask.repeat(groups, 1)


def alibi_slopes(heads: int) -> Tensor:
    """[heads] slopes of linear biases (Press et al. 2022, section 3): a geometric series; where `heads` is no power of
    two, the series of the largest one below and every second of the next."""
    whole = 1 << (heads.bit_length() - 1)
    exponents = [8 * (head + 1) / whole for head in range(whole)]
    exponents += [4 * (2 * head + 1) / whole for head in range(heads - whole)]
    return torch.tensor([2.0**-exponent for exponent in exponents])


def _attend_with_biases(
    query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, rules: AttentionRules
) -> Tensor:
    heads, queries, keys, key_heads = query.shape[1], query.shape[2], key.shape[2], key.shape[1]
    position = torch.arange(keys - queries, keys, device=query.device)[:, None]
    back = torch.arange(keys, device=query.device)[None] - position
    bias = (slopes[:, None, None] * back).masked_fill(back > 0, -torch.inf).to(query.dtype)
    folded, _ = _fold_groups(query, key_heads, None)
    attended = _attended(folded, key, value, bias.view(1, key_heads, -1, keys), rules)
    return attended.reshape(1, heads, queries, value.shape[3])


def attend_by_definition(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, rules: AttentionRules
) -> Tensor:
    """Softmax attention written out, for what the fused kernels lack: capped logits and sinks."""
    heads, queries, key_heads = query.shape[1], query.shape[2], key.shape[1]
    folded, mask = _fold_groups(query, key_heads, mask)
    scaling = rules.scaling if rules.scaling is not None else query.shape[3] ** -0.5
    logits = torch.matmul(folded, key.transpose(2, 3)) * scaling
    if rules.softcap is not None:
        logits = torch.tanh(logits / rules.softcap) * rules.softcap
    if mask is not None:
        logits = logits.masked_fill(~mask, torch.finfo(logits.dtype).min)
    if rules.sinks is None:
        weights = functional.softmax(logits, -1, dtype=torch.float32).to(value.dtype)
    else:
        sinks = rules.sinks.view(1, key_heads, -1, 1, 1).expand(-1, -1, -1, queries, -1)
        logits = torch.cat([logits, sinks.reshape(1, key_heads, -1, 1).to(logits.dtype)], -1)
        logits = logits - logits.amax(-1, keepdim=True)
        weights = functional.softmax(logits, -1, dtype=logits.dtype)[..., :-1].to(value.dtype)
    return torch.matmul(weights, value).reshape(1, heads, queries, value.shape[3])
