"""Packed attention is softmax attention, written out in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from molink.shards.attention import attention, tiled_attention
from molink.shards.attention.attention import AttentionRules, attend_parts, attend_sequence


def by_definition(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rules: AttentionRules
) -> torch.Tensor:
    """One query at a time, one head at a time."""
    heads, queries, keys = query.shape[1], query.shape[2], key.shape[2]
    groups = heads // key.shape[1]
    out = torch.zeros(1, heads, queries, value.shape[3], dtype=torch.float64)
    scaling = query.shape[3] ** -0.5 if rules.scaling is None else rules.scaling
    for head in range(heads):
        for index in range(queries):
            position = keys - queries + index
            first = 0 if not rules.sliding_window else max(0, position - rules.sliding_window + 1)
            seen = key[0, head // groups, first : position + 1].double()
            logits = seen @ query[0, head, index].double() * scaling
            if rules.softcap:
                logits = torch.tanh(logits / rules.softcap) * rules.softcap
            weights = torch.exp(logits)
            total = weights.sum()
            if rules.sinks is not None:
                total = total + torch.exp(rules.sinks[head].double())
            values = value[0, head // groups, first : position + 1].double()
            out[0, head, index] = (weights / total) @ values
    return out


@settings(deadline=None)
@given(
    key_heads=st.integers(1, 3),
    groups=st.integers(1, 3),
    queries=st.integers(1, 7),
    past=st.integers(0, 9),
    value_dim=st.sampled_from([4, 8]),
    scaling=st.sampled_from([None, 0.3]),
    window=st.sampled_from([None, 1, 3, 8]),
    softcap=st.sampled_from([None, 2.0]),
    sinks=st.booleans(),
)
def test_attention_is_that_of_its_definition(
    key_heads: int,
    groups: int,
    queries: int,
    past: int,
    value_dim: int,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    sinks: bool,
) -> None:
    generator = torch.Generator().manual_seed(1000 * queries + past)
    heads = key_heads * groups
    query = torch.randn(1, heads, queries, 8, generator=generator)
    key = torch.randn(1, key_heads, past + queries, 8, generator=generator)
    value = torch.randn(1, key_heads, past + queries, value_dim, generator=generator)
    rules = AttentionRules(
        scaling, window, softcap, torch.randn(heads, generator=generator) if sinks else None
    )
    attended = attend_sequence(query, key, value, rules)
    assert attended.shape == (1, heads, queries, value_dim)
    torch.testing.assert_close(
        attended.double(), by_definition(query, key, value, rules), atol=2e-5, rtol=1e-4
    )


@pytest.mark.parametrize("queries", [1, 6])
def test_attention_over_strided_caches_needs_no_copy(queries: int) -> None:
    cache = torch.randn(2, 1, 2, 50, 8)
    key, value = cache.narrow(3, 0, 6).unbind(0)
    query = torch.randn(1, 4, queries, 8)
    rules = AttentionRules(None, None, None, None)
    strided = attend_sequence(query, key, value, rules)
    assert torch.equal(strided, attend_sequence(query, key.contiguous(), value.contiguous(), rules))


@settings(deadline=None)
@given(
    pieces=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    share=st.floats(0, 1),
    groups=st.integers(1, 2),
    value_dim=st.sampled_from([4, 8]),
    scaling=st.sampled_from([None, 0.3]),
    window=st.sampled_from([None, 3]),
    softcap=st.sampled_from([None, 2.0]),
    scale=st.sampled_from([1.0, 30.0]),
    tile_bytes=st.sampled_from([64, 512, 1 << 20]),
    tiled_queries=st.sampled_from([1, 100]),
)
def test_attention_over_pieces_is_that_over_their_whole(
    pieces: list[int],
    share: float,
    groups: int,
    value_dim: int,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    scale: float,
    tile_bytes: int,
    tiled_queries: int,
) -> None:
    """In tiles of whatever size, and without."""
    keys = sum(pieces)
    queries = max(1, round(share * keys))
    generator = torch.Generator().manual_seed(100 * keys + queries)
    query = torch.randn(1, 2 * groups, queries, 8, generator=generator) * scale
    key = torch.randn(1, 2, keys, 8, generator=generator)
    value = torch.randn(1, 2, keys, value_dim, generator=generator)
    rules = AttentionRules(scaling, window, softcap, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiled_attention, "TILE_BYTES", tile_bytes)
        patch.setattr(attention, "TILED_QUERIES", tiled_queries)
        attended = attend_parts(query, key.split(pieces, 2), value.split(pieces, 2), rules)
    torch.testing.assert_close(
        attended.double(), by_definition(query, key, value, rules), atol=2e-5, rtol=1e-4
    )


@pytest.mark.parametrize(("early", "late"), [(0, 0), (300, 0), (-300, 0), (0, 300), (0, -300), (300, -300)])
def test_logits_beyond_what_powers_of_float32_can_hold_are_weighed_all_the_same(
    early: float, late: float
) -> None:
    """Of keys that come before all queries, and of the queries' own."""
    queries, past = 30, 70
    generator = torch.Generator().manual_seed(5)
    query, key, value = (
        torch.randn(1, 2, count, 8, generator=generator)
        for count in (queries, past + queries, past + queries)
    )
    query[..., 0] = 1.0
    key[:, :, :past, 0], key[:, :, past:, 0] = early, late
    rules = AttentionRules(1.0, None, None, None)
    assert queries >= attention.TILED_QUERIES
    attended = attend_parts(query, key.split(40, 2), value.split(40, 2), rules)
    torch.testing.assert_close(
        attended.double(), by_definition(query, key, value, rules), atol=1e-4, rtol=1e-4
    )
