"""How long pieces of prompts take is always known: measured before what can wait, or found from other times."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.devices.brief_profile import StandingClock, measure_briefly, stop_the_clock
from support.models.tiny_models import make_tiny_model

from molink.dht.records.records import LayerLatency, PrefillLatency
from molink.peer.compute.backend import MeasuredModel
from molink.peer.profiling import profiler
from molink.peer.profiling.layer_bench import LayerBench
from molink.peer.profiling.profile import PIECE_TOKENS, Profile, SliceLatency, slices_of
from molink.peer.profiling.profiler import cached_or_measured, measure
from molink.peer.profiling.step_times import StepTimes
from molink.peer.scheduling import prefill_slices
from molink.peer.scheduling.prefill_slices import RemainingPrefill, SliceSizer
from molink.shards.checkpoint.store import describe
from molink.shards.spec import ModelSpec

PREFILLS = (PrefillLatency(16, 8.0), PrefillLatency(64, 23.0), PrefillLatency(128, 46.0))
UNMEASURED = Profile(
    (LayerLatency(1, 6.0),), 0.1, 6.0, 1e9, PREFILLS, prefill_context_ms=0.2, step_ms=0.5
)  # a layer of 1B on a slow processor
PROMPT = RemainingPrefill(400, 0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ModelSpec]:
    folder = make_tiny_model(
        "llama", tmp_path_factory.mktemp("models"), num_hidden_layers=4, max_position_embeddings=2048
    )
    return folder, describe(folder)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> StandingClock:
    measure_briefly(monkeypatch, "CONTEXT_BUDGET_S", "PIECE_BUDGET_S")
    return stop_the_clock(monkeypatch)


@pytest.mark.full
def test_pieces_are_measured_before_the_time_goes_to_contexts_and_ends(
    model: tuple[Path, ModelSpec], clock: StandingClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly(_: LayerBench) -> tuple[float, float]:
        clock.pass_s(profiler.PROFILE_BUDGET_S)
        return 0.0, 0.0

    monkeypatch.setattr(LayerBench, "context_costs_ms", slowly)
    lines: list[str] = []
    profile = measure(MeasuredModel(*model, "cpu"), lines.append)
    assert len(lines) == 1
    assert [one.tokens for one in profile.slice_latencies] == list(PIECE_TOKENS)
    assert slices_of(profile) == profile.slice_latencies


@pytest.mark.full
def test_where_decode_steps_took_all_the_time_prompts_are_still_cut_and_a_later_start_cuts_them_too(
    model: tuple[Path, ModelSpec], clock: StandingClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = LayerBench.layer_latencies

    def slowly(bench: LayerBench) -> tuple[tuple[LayerLatency, ...], float]:
        found = measured(bench)
        clock.pass_s(2 * profiler.PROFILE_BUDGET_S)
        return found

    monkeypatch.setattr(LayerBench, "layer_latencies", slowly)
    first = cached_or_measured(MeasuredModel(*model, "cpu"), tmp_path / "profiles.json")
    monkeypatch.setattr(profiler, "measure", lambda *_: pytest.fail("it is remembered"))
    later = cached_or_measured(MeasuredModel(*model, "cpu"), tmp_path / "profiles.json")
    assert first.slice_latencies == () == first.prefill_latencies
    monkeypatch.setattr(prefill_slices, "LEAST_BUDGET_MS", 0.0)  # by this clock all of them takes less
    for profile in (first, later):
        assert [one.tokens for one in slices_of(profile)] == list(PIECE_TOKENS)
        assert SliceSizer(StepTimes(profile)).next_slice(4, [PROMPT], 1) != SliceSizer(
            StepTimes(profile)
        ).next_slice(4, [PROMPT], 0)


def test_a_prompt_is_computed_in_pieces_beside_decode_though_no_piece_was_measured() -> None:
    sizes = SliceSizer(StepTimes(UNMEASURED))
    assert sizes.next_slice(16, [PROMPT], 0).layers == 16
    beside = sizes.next_slice(16, [PROMPT], 1)
    assert beside.layers < 16 or sum(beside.tokens) < PROMPT.tokens


def test_pieces_that_were_measured_are_believed_first() -> None:
    measured = (SliceLatency(16, 1.0, 0.5),)
    assert slices_of(replace(UNMEASURED, slice_latencies=measured)) == measured


def test_pieces_take_what_parts_of_prompts_take_and_a_step_and_the_context() -> None:
    found = {one.tokens: one for one in slices_of(UNMEASURED)}
    assert found[64].layer_ms == pytest.approx(23.5)
    assert found[64].context_ms == pytest.approx(0.2 * 64)
    assert found[256].layer_ms > found[128].layer_ms == pytest.approx(46.5)


@given(
    st.lists(st.floats(1e-4, 1e3), min_size=1, max_size=4).map(sorted),
    st.lists(st.floats(1e-4, 1e4), max_size=6).map(sorted),
    st.floats(0, 10),
)
def test_whatever_was_measured_more_tokens_take_no_less(
    decode_ms: list[float], prefill_ms: list[float], context_ms: float
) -> None:
    decode = tuple(map(LayerLatency, (1, 8, 16, 64), decode_ms))
    prefill = tuple(map(PrefillLatency, PIECE_TOKENS, prefill_ms))
    found = slices_of(Profile(decode, 0.1, 0.1, 1e9, prefill, prefill_context_ms=context_ms))
    assert all(one.layer_ms > 0 for one in found)
    for fewer, more in pairwise(found):
        assert fewer.layer_ms <= more.layer_ms * (1 + 1e-9)
        assert fewer.context_ms <= more.context_ms
