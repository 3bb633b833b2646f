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


Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries, keys and values."""


def random_inputs(heads: tuple[int, int], queries: int, keys: int, value_dim: int, seed: int) -> Inputs:
    """Of so many heads of queries and of keys; the queries are the last of the keys' positions."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(1, heads[0], queries, 8, generator=generator),
        torch.randn(1, heads[1], keys, 8, generator=generator),
        torch.randn(1, heads[1], keys, value_dim, generator=generator),
    )


@st.composite
def short_sequences(draw: st.DrawFn) -> tuple[Inputs, AttentionRules]:
    """A few queries behind a few keys, under any rules."""
    key_heads, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    queries, past = draw(st.integers(1, 7)), draw(st.integers(0, 9))
    heads, seed = (key_heads * groups, key_heads), 1000 * queries + past
    inputs = random_inputs(heads, queries, past + queries, draw(st.sampled_from([4, 8])), seed)
    sinks = torch.randn(heads[0], generator=torch.Generator().manual_seed(seed + 1))
    rules = AttentionRules(
        draw(st.sampled_from([None, 0.3])),
        draw(st.sampled_from([None, 1, 3, 8])),
        draw(st.sampled_from([None, 2.0])),
        sinks if draw(st.booleans()) else None,
    )
    return inputs, rules


@settings(deadline=None)
@given(short_sequences())
def test_attention_is_that_of_its_definition(case: tuple[Inputs, AttentionRules]) -> None:
    (query, key, value), rules = case
    attended = attend_sequence(query, key, value, rules)
    assert attended.shape == (*query.shape[:3], value.shape[3])
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


@st.composite
def pieces_of_sequences(draw: st.DrawFn) -> tuple[Inputs, list[int], AttentionRules]:
    """Queries, small or large, behind keys that come in pieces of these lengths."""
    pieces = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    keys = sum(pieces)
    queries = max(1, round(draw(st.floats(0, 1)) * keys))
    heads = (2 * draw(st.integers(1, 2)), 2)
    inputs = random_inputs(heads, queries, keys, draw(st.sampled_from([4, 8])), 100 * keys + queries)
    inputs[0].mul_(draw(st.sampled_from([1.0, 30.0])))
    rules = AttentionRules(
        draw(st.sampled_from([None, 0.3])),
        draw(st.sampled_from([None, 3])),
        draw(st.sampled_from([None, 2.0])),
        None,
    )
    return inputs, pieces, rules


@settings(deadline=None)
@given(
    case=pieces_of_sequences(),
    tile_bytes=st.sampled_from([64, 512, 1 << 20]),
    tiled_queries=st.sampled_from([1, 100]),
)
def test_attention_over_pieces_is_that_over_their_whole(
    case: tuple[Inputs, list[int], AttentionRules], tile_bytes: int, tiled_queries: int
) -> None:
    """In tiles of whatever size, and without."""
    (query, key, value), pieces, rules = case
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
