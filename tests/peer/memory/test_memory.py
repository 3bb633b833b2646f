"""How a memory cap is divided, and how sizes are read and written."""

import re
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from molink.peer.memory import memory
from molink.peer.memory.memory import (
    LIBRARY_BYTES,
    MIN_KV_TOKENS,
    SCORES_BYTES,
    MemoryPlan,
    format_bytes,
    gpu_reserve_bytes,
    most_kv_bytes,
    plan_memory,
    spare_pool_bytes,
    workspace_bytes,
)
from molink.shards.attention import attention
from molink.shards.batching.decode import BATCH_SIZES
from molink.shards.sampling.weights import DEVICE_SLICE
from molink.shards.spec import KV_BLOCK_TOKENS, ModelSpec, Span
from molink.sizes import parse_bytes


def make_spec(layers: int = 4, layer_bytes: int = 50_000_000, quantization: str = "none") -> ModelSpec:
    return ModelSpec(
        model_hash="0" * 64,
        content_hash="1" * 64,
        name="test/model",
        architecture="llama",
        layers=layers,
        hidden_size=256,
        vocabulary_size=1000,
        context_length=2048,
        dtype="bfloat16",
        quantization=quantization,
        layer_bytes=tuple(layer_bytes + 1000 * layer for layer in range(layers)),
        embed_bytes=7_000_000,
        head_bytes=9_000_000,
        kv_bytes_per_token=(1024,) * layers,
        stop_token_ids=(0,),
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10GB", 10_000_000_000),
        ("512MiB", 512 * 1024**2),
        ("12 MB", 12_000_000),
        ("1.5GiB", 3 * 1024**3 // 2),
        ("1.5g", 1_500_000_000),
        ("2Ti", 2 * 1024**4),
        ("64k", 64_000),
        ("  4096 ", 4096),
        ("100 bytes", 100),
        ("7B", 7),
        ("0.5kB", 500),
        ("0.3333KiB", 341),
    ],
)
def test_a_size_is_read_as_a_person_means_it(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", "GB", "ten GB", "-1GB", "1,5GB", "1.GB", "10 GBs", "1e9", "5iB", "10 G B", "١GB", "9" * 5000, "inf"],
)
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="such as 10GB, 512MiB"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["0", "0GB", "0.2B"])
def test_less_than_a_byte_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="less than one byte"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (1_500_000, "1.5 MB"),
        (999_949_000, "999.9 MB"),
        (999_999_999, "1.0 GB"),
        (16 * 10**12, "16.0 TB"),
    ],
)
def test_a_size_is_written_with_the_unit_that_suits_it(count: int, expected: str) -> None:
    assert format_bytes(count) == expected


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        format_bytes(-1)


@settings(deadline=None)
@given(st.integers(1, 10**18))
def test_a_written_size_is_read_back_within_its_rounding(count: int) -> None:
    assert parse_bytes(format_bytes(count)) == pytest.approx(count, rel=0.051)


@settings(deadline=None)
@given(st.text(max_size=20))
def test_any_text_is_a_positive_size_or_a_value_error(text: str) -> None:
    try:
        size = parse_bytes(text)
    except ValueError as error:
        size = None
        refusal = str(error)
    assert size >= 1 if size is not None else repr(text) in refusal


def test_weights_get_their_share_of_what_the_work_space_leaves() -> None:
    spec = make_spec()
    plan = plan_memory(spec, 1_000_000_000, max_batch_tokens=128)
    assert plan.workspace_bytes == workspace_bytes(spec, 128)
    assert plan.weight_limit_bytes == int(0.8 * (1_000_000_000 - plan.workspace_bytes))


def test_work_space_grows_with_the_batch_and_with_dequantization() -> None:
    spec = make_spec()
    assert workspace_bytes(spec, 1) < workspace_bytes(spec, 128) < workspace_bytes(spec, 512)
    assert workspace_bytes(make_spec(quantization="nf4"), 128) == workspace_bytes(spec, 128) + 6 * 256**2 * 2


def test_the_smallest_layer_may_be_held_even_beyond_the_share() -> None:
    spec = make_spec()
    layer = Span(1, 2)
    needed = workspace_bytes(spec, 64) + spec.weight_bytes(layer) + spec.kv_bytes(layer, MIN_KV_TOKENS)
    plan = plan_memory(spec, needed, 64, weight_share=0.1)
    assert plan.weight_limit_bytes == spec.weight_bytes(layer)
    with pytest.raises(ValueError, match="too little"):
        plan_memory(spec, needed - 1, 64, weight_share=0.1)


@settings(deadline=None)
@given(
    total=st.integers(-5, 400_000_000),
    tokens=st.integers(1, 2048),
    share=st.floats(0.01, 0.99),
    layers=st.integers(1, 3),
    quantization=st.sampled_from(["none", "int8", "nf4"]),
)
def test_a_plan_serves_at_least_one_layer_or_the_error_says_what_would(
    total: int, tokens: int, share: float, layers: int, quantization: str
) -> None:
    spec = make_spec(layers, quantization=quantization)
    try:
        plan = plan_memory(spec, total, tokens, share)
    except ValueError as error:
        found = re.search(r"at least (\S+),", str(error))
        assert found is not None
        enough = parse_bytes(found[1])
        assert enough > total
        plan = plan_memory(spec, enough, tokens, share)
    shared = plan.total_bytes - plan.workspace_bytes
    served = [
        layer
        for layer in (Span(start, start + 1) for start in range(layers))
        if spec.weight_bytes(layer) <= plan.weight_limit_bytes
        and spec.weight_bytes(layer) + spec.kv_bytes(layer, MIN_KV_TOKENS) <= shared
    ]
    assert served
    assert plan.weight_limit_bytes < shared


@pytest.mark.parametrize("share", [0.0, 1.0, -1.0, float("nan")])
def test_a_share_that_leaves_nothing_for_one_side_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="weight_share"):
        plan_memory(make_spec(), 10**9, 16, share)


def test_a_batch_of_no_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="max_batch_tokens"):
        plan_memory(make_spec(), 10**9, 0)


@pytest.mark.parametrize("parts", [(100, 60, 50), (100, -1, 50), (100, 50, -1), (100, 101, 0)])
def test_parts_that_do_not_fit_the_total_are_no_plan(parts: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        MemoryPlan(*parts)


LEASED = st.lists(st.integers(1, 60), max_size=8)


def keeps_its_promise(pool: int, swap: int, leased: list[int]) -> bool:
    """All fit the pool, or each does and whoever is one too many has room in the swap space."""
    together, largest = sum(leased), max(leased, default=0)
    return together <= pool or (swap > 0 and largest <= pool and together + largest <= pool + swap)


@given(pool=st.integers(0, 200), swap=st.integers(0, 200), leased=LEASED, asked=st.integers(1, 250))
def test_a_session_is_let_in_if_and_only_if_all_promises_can_be_kept(
    pool: int, swap: int, leased: list[int], asked: int
) -> None:
    assume(keeps_its_promise(pool, swap, leased))
    fits = asked <= most_kv_bytes(pool, swap, leased)
    assert fits == keeps_its_promise(pool, swap, [*leased, asked])
    if not swap:
        assert most_kv_bytes(pool, swap, leased) == spare_pool_bytes(pool, 0, leased) == pool - sum(leased)


@given(pool=st.integers(0, 200), swap=st.integers(0, 200), leased=LEASED, taken=st.integers(0, 200))
def test_weights_take_no_more_than_promises_leave(
    pool: int, swap: int, leased: list[int], taken: int
) -> None:
    assume(keeps_its_promise(pool, swap, leased) and taken <= pool)
    fits = taken <= spare_pool_bytes(pool, swap, leased)
    assert fits == keeps_its_promise(pool - taken, swap, leased)
    assert fits == (most_kv_bytes(pool - taken, swap, leased) >= 0)


@given(
    pool=st.integers(1, 100),
    swap=st.integers(1, 200),
    asked=st.lists(st.integers(1, 60), max_size=12),
    steps=st.lists(st.tuples(st.integers(0, 11), st.integers(1, 60)), max_size=60),
)
def test_what_is_swapped_out_never_exceeds_the_swap_space(
    pool: int, swap: int, asked: list[int], steps: list[tuple[int, int]]
) -> None:
    """Sessions grow as they step; who has not stepped for longest is swapped out whole, until the step fits."""
    leased: list[int] = []
    for one in asked:
        if one <= most_kv_bytes(pool, swap, leased):
            leased.append(one)
    sizes, resident = [0] * len(leased), []
    for session, grown in steps:
        if session >= len(leased):
            continue
        sizes[session] = min(leased[session], sizes[session] + grown)
        resident = [one for one in resident if one != session]
        while sum(sizes[one] for one in (*resident, session)) > pool:
            resident.pop(0)
        resident.append(session)
        assert sum(sizes) - sum(sizes[one] for one in resident) <= swap


def test_what_a_gpu_holds_beside_the_plan_is_counted_as_the_engine_makes_it() -> None:
    assert sum(BATCH_SIZES) == memory.RECORDED_ROWS, "each recorded step has its own result"
    assert BATCH_SIZES[-1] == memory.TABLE_ROWS
    assert memory.DRAWN_NUMBERS == DEVICE_SLICE
    assert memory.TABLE_TOKEN_BYTES == memory.TABLE_ROWS * 4 * 8 // KV_BLOCK_TOKENS
    assert SCORES_BYTES == 4 * attention.SCORES_BYTES


def test_a_gpus_reserve_grows_with_context_vocabulary_libraries_and_memory() -> None:
    spec, total = make_spec(), 8 * 10**9
    reserve = gpu_reserve_bytes(spec, total)
    longer = replace(spec, context_length=spec.context_length + 1000)
    assert gpu_reserve_bytes(longer, total) - reserve == 128 * 1000
    windows = (None,) * (spec.layers - 1) + (256,)
    two_kinds = replace(spec, kv_windows=windows)
    assert gpu_reserve_bytes(two_kinds, total) - reserve == 128 * spec.context_length, "each kind has a table"
    wider = replace(spec, vocabulary_size=spec.vocabulary_size + 1000)
    assert gpu_reserve_bytes(wider, total) - reserve == 1000 * (4 * (199 + 2 * 64) + 64 * (4 + 24))
    assert gpu_reserve_bytes(spec, total, 2 * LIBRARY_BYTES) - reserve == 2 * LIBRARY_BYTES
    assert gpu_reserve_bytes(spec, 2 * total) - reserve == total // 100


@given(total=st.integers(2 * 10**9, 80 * 10**9), context=st.sampled_from((2048, 32768, 131072)))
def test_reserve_work_space_weights_and_kv_cache_never_exceed_the_total(total: int, context: int) -> None:
    spec = replace(make_spec(), context_length=context)
    reserve = gpu_reserve_bytes(spec, total)
    plan = plan_memory(spec, total, 512, reserve_bytes=reserve)
    assert plan.workspace_bytes == workspace_bytes(spec, 512) + reserve
    assert plan.workspace_bytes + plan.weight_limit_bytes <= total
