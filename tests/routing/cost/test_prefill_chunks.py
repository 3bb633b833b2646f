"""How a prompt is cut: into what is predicted to give its first token soonest."""

import heapq
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.swarms.pipelines import pipelines, stage

from molink.routing.cost.pipeline import STEP_OVERHEAD_MS, PipelineStage
from molink.routing.cost.prefill import prefill_ms
from molink.routing.cost.prefill_chunks import (
    LEAST_TOKENS,
    WORTH,
    chunk_lengths,
    equal_chunks,
    most_chunk_tokens,
)

MOST = 448


def simulated_ms(stages: Sequence[PipelineStage], lengths: Sequence[int]) -> float:
    """The same prefill event by event: a device and an uplink of every stage, each first come, first served."""
    events = [(0.0, number, 0) for number in range(len(lengths))]
    free_ms = [0.0] * (2 * len(stages))
    end_ms = 0.0
    while events:
        now_ms, number, resource = heapq.heappop(events)
        one = stages[resource // 2]
        if resource % 2 == 0:
            context_tokens, ends = sum(lengths[:number]), number == len(lengths) - 1
            taken_ms = one.prefill_ms(lengths[number], context_tokens, ends=ends) + STEP_OVERHEAD_MS
            after_ms = 0.0
        else:
            last = resource == len(free_ms) - 1
            taken_ms, after_ms = 0.0 if last else one.transfer_ms(lengths[number]), one.link_ms
        free_ms[resource] = max(now_ms, free_ms[resource]) + taken_ms
        if resource + 1 < len(free_ms):
            heapq.heappush(events, (free_ms[resource] + after_ms, number, resource + 1))
        else:
            end_ms = max(end_ms, free_ms[resource] + after_ms)
    return end_ms


@given(pipelines(), st.integers(1, 5000), st.integers(1, 600))
def test_every_token_is_in_one_chunk_and_no_chunk_exceeds_the_budget(
    stages: list[PipelineStage], prompt_tokens: int, most_tokens: int
) -> None:
    lengths = chunk_lengths(stages, prompt_tokens, most_tokens)
    assert sum(lengths) == prompt_tokens
    assert min(lengths) >= 1
    assert max(lengths) <= most_tokens


@given(pipelines(), st.lists(st.integers(1, MOST), min_size=1, max_size=20))
def test_the_prediction_is_what_a_simulation_of_every_chunk_gives(
    stages: list[PipelineStage], lengths: list[int]
) -> None:
    assert prefill_ms(stages, lengths) == pytest.approx(simulated_ms(stages, lengths))


@given(pipelines(), st.integers(1, 2000))
def test_no_equal_cut_in_chunks_that_are_allowed_is_predicted_to_be_much_faster(
    stages: list[PipelineStage], prompt_tokens: int
) -> None:
    chosen_ms = prefill_ms(stages, chunk_lengths(stages, prompt_tokens, MOST))
    for count in range(-(-prompt_tokens // MOST), max(1, prompt_tokens // LEAST_TOKENS) + 1):
        length = -(-prompt_tokens // count)
        rest = prompt_tokens - length * (count - 1)
        if rest >= 1:
            assert chosen_ms * 0.94 <= prefill_ms(stages, [length] * (count - 1) + [rest])


@given(pipelines(), st.integers(1, 4000))
def test_the_choice_is_never_predicted_to_be_slower_than_the_longest_chunks(
    stages: list[PipelineStage], prompt_tokens: int
) -> None:
    longest = [MOST] * (prompt_tokens // MOST) + [prompt_tokens % MOST] * (prompt_tokens % MOST > 0)
    chosen = chunk_lengths(stages, prompt_tokens, MOST)
    assert prefill_ms(stages, chosen) <= prefill_ms(stages, longest) / WORTH**2 + 1e-9


def test_a_circuit_of_one_hop_takes_as_few_steps_as_the_budget_allows() -> None:
    assert chunk_lengths([stage()], 900, MOST) == (300, 300, 300)


def test_a_prompt_is_cut_finer_where_more_stages_would_wait_for_it() -> None:
    cuts = [len(chunk_lengths([stage(4.0, 0.2)] * stages, 900, MOST)) for stages in (1, 2, 4, 8)]
    assert cuts == sorted(cuts)
    assert cuts[0] < cuts[-1]


def test_a_prompt_is_cut_finer_where_the_uplink_is_slow() -> None:
    fast, slow = [stage(uplink_mbps=mbps, link_ms=15.0) for mbps in (10_000.0, 50.0)]
    assert len(chunk_lengths([slow, slow], 900, MOST)) > len(chunk_lengths([fast, fast], 900, MOST))


def test_what_every_step_costs_keeps_chunks_long() -> None:
    cheap, dear = stage(0.1, 0.2), stage(60.0, 0.2)
    assert len(chunk_lengths([dear] * 3, 900, MOST)) < len(chunk_lengths([cheap] * 3, 900, MOST))


def test_the_first_chunk_is_shorter_where_only_the_last_stage_is_slow() -> None:
    lengths = chunk_lengths([stage(1.0, 0.2), stage(1.0, 0.2), stage(30.0, 1.0)], 900, MOST)
    assert lengths[0] < lengths[1]


def test_the_last_chunk_is_shorter_where_only_the_first_stage_is_slow() -> None:
    lengths = chunk_lengths([stage(30.0, 1.0), stage(1.0, 0.2), stage(1.0, 0.2)], 900, MOST)
    assert lengths[-1] < lengths[-2]


def test_a_short_prompt_stays_whole() -> None:
    assert chunk_lengths([stage(0.01, 1.0)] * 5, LEAST_TOKENS, MOST) == (LEAST_TOKENS,)


@pytest.mark.parametrize(("prompt_tokens", "most_tokens"), [(0, 1), (1, 0), (-1, 5)])
def test_lengths_that_are_not_positive_are_refused(prompt_tokens: int, most_tokens: int) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        chunk_lengths([stage()], prompt_tokens, most_tokens)


@given(st.integers(1, 5000), st.integers(1, 3000), st.integers(1, 3000))
def test_chunks_of_a_given_size_are_as_few_as_can_be_and_equal_but_for_one_token(
    prompt_tokens: int, tokens: int, most_tokens: int
) -> None:
    lengths = equal_chunks(tokens)([], prompt_tokens, most_tokens)
    assert sum(lengths) == prompt_tokens
    assert len(lengths) == -(-prompt_tokens // min(tokens, most_tokens))
    assert 1 <= min(lengths) <= max(lengths) <= min(min(lengths) + 1, tokens, most_tokens)


def test_a_chunk_has_a_token() -> None:
    with pytest.raises(ValueError, match="at least 1 token"):
        equal_chunks(0)


@pytest.mark.parametrize(
    ("announced", "longest"), [((512, 512), 448), ((2048, 512), 448), ((2048, 1024), 960), ((40,), 1)]
)
def test_a_chunk_leaves_room_for_decode_at_the_hop_that_takes_least(
    announced: tuple[int, ...], longest: int
) -> None:
    assert most_chunk_tokens(announced) == longest
