"""What a step costs whatever its layers is told apart from what a layer costs, measured warm, and counted once."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.devices.brief_profile import StandingClock, stop_the_clock
from support.models.tiny_models import make_tiny_model
from support.swarms.swarm_examples import facts_of, state_of

from molink.dht.identity.identity import Identity
from molink.dht.records.facts_codec import facts_from_message, facts_to_message
from molink.dht.records.records import LayerLatency, PeerFacts, PeerView
from molink.peer.compute.backend import MeasuredDevice, MeasuredModel
from molink.peer.profiling import layer_bench, profiler
from molink.peer.profiling.layer_bench import on_bench
from molink.peer.profiling.profile import FLOOR_MS, Profile, StepWork, predicted_ms, separated, still_warming
from molink.peer.profiling.profile_json import from_json, to_json
from molink.peer.profiling.profiler import cached_or_measured, several_layers
from molink.routing.cost.cost import CostModel
from molink.routing.cost.pipeline import PipelineStage
from molink.routing.cost.reliability import PeerObservation
from molink.routing.cost.terms import Demand, peer_costs
from molink.shards.checkpoint.store import describe
from molink.shards.kv.kv_cache import SequenceCache
from molink.shards.spec import ModelSpec, Span

COMPILING_S = 3.0
SPEC = ModelSpec(
    "0" * 64, "1" * 64, "m", "llama", 1, 8, 16, 9000, "float32", "none", (100,), 30, 40, (1,), (0,)
)


def announced(step_ms: float) -> PeerFacts:
    return replace(facts_of(Identity.generate()), step_ms=step_ms)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ModelSpec]:
    folder = make_tiny_model("llama", tmp_path_factory.mktemp("models"), num_hidden_layers=8)
    return folder, describe(folder)


@given(
    st.dictionaries(st.sampled_from([1, 2, 8, 64]), st.floats(0.01, 1e3), min_size=1),
    st.floats(0, 1e3),
    st.integers(2, 8),
)
def test_layers_and_step_are_found_from_steps_through_one_layer_and_through_several(
    layer_ms: dict[int, float], step_ms: float, layers: int
) -> None:
    layer_ms.setdefault(1, 1.0)
    one = {size: step_ms + taken_ms for size, taken_ms in layer_ms.items() if size != 2}
    several = {size: step_ms + layers * taken_ms for size, taken_ms in layer_ms.items()}
    found, rest_ms = separated(one, several, layers)
    assert rest_ms == pytest.approx(step_ms, abs=1e-9)
    assert found == pytest.approx(layer_ms)


@given(st.floats(0.01, 100), st.floats(0.01, 100), st.integers(2, 8))
def test_whatever_was_measured_neither_a_layer_nor_a_step_is_less_than_nothing(
    one_ms: float, several_ms: float, layers: int
) -> None:
    found, step_ms = separated({1: one_ms}, {1: several_ms, 2: several_ms}, layers)
    assert min(found.values()) >= FLOOR_MS
    assert 0 <= step_ms <= one_ms


def test_where_only_one_layer_was_measured_all_of_it_is_the_layers() -> None:
    assert separated({}, {1: 2.0, 8: 3.0}, 1) == ({1: 2.0, 8: 3.0}, 0.0)


def test_a_step_is_predicted_with_its_own_cost_once_and_the_head_grows_as_layers_do() -> None:
    profile = Profile((LayerLatency(1, 1.0), LayerLatency(8, 3.0)), 0.5, 2.0, 1e9, step_ms=7.0)
    middle = StepWork(32, starts=False, ends=False, decode_contexts=(0,))
    assert predicted_ms(profile, middle) == pytest.approx(7 + 32)
    assert predicted_ms(profile, replace(middle, layers=16)) == pytest.approx(7 + 16)
    whole = StepWork(32, starts=True, ends=True, decode_contexts=(0,) * 8)
    assert predicted_ms(profile, whole) == pytest.approx(7 + 32 * 3 + 0.5 + 2 * 3)


def test_what_a_step_costs_is_announced_and_counted_once_by_routers_and_heads() -> None:
    facts = announced(4.0)
    assert facts_from_message(facts_to_message(facts)).step_ms == 4.0
    assert facts_from_message(facts_to_message(announced(0.0))).step_ms == 0.0
    view = PeerView(facts, replace(state_of(Identity.generate()), sessions=0, queued=0), 0.0)
    without = PeerView(replace(facts, step_ms=0.0), view.state, 0.0)
    dear, cheap = (
        peer_costs(one, PeerObservation(), SPEC, Demand.of(100), 1000.0, CostModel())
        for one in (view, without)
    )
    assert dear.hop_ms - cheap.hop_ms == pytest.approx(4.0)
    for layers in (1, 30):
        steps_ms = [one.step_ms(layers, first=False, last=False) for one in (dear, cheap)]
        assert steps_ms[0] - steps_ms[1] == pytest.approx(4.0)
        stages = [PipelineStage(one.facts, layers, 0.0, 0.0, 0.0, None, 100) for one in (view, without)]
        assert stages[0].decode_ms(4) - stages[1].decode_ms(4) == pytest.approx(4.0)
        assert stages[0].prefill_ms(64) - stages[1].prefill_ms(64) == pytest.approx(4.0)


def test_a_profile_is_remembered_with_it_and_one_without_it_is_read() -> None:
    profile = Profile((LayerLatency(1, 1.0),), 0.5, 2.0, 1e9, step_ms=0.25)
    assert from_json(to_json(profile)) == profile
    content = to_json(profile)
    del content["step_ms"]
    assert from_json(content) == replace(profile, step_ms=0.0)
    assert from_json({**to_json(profile), "step_ms": -1.0}) is None


@pytest.mark.parametrize(
    ("times_ms", "warming"),
    [([900.0, 1.0, 1.1], True), ([1.0, 1.0, 1.0], False), ([50.0, 1.0, 1.0], False), ([900.0], False)],
)
def test_a_first_step_that_compiled_is_told_from_a_busy_moment(times_ms: list[float], warming: bool) -> None:
    assert still_warming(times_ms) == warming


def test_so_many_layers_are_measured_as_there_are_and_as_memory_allows(model: tuple[Path, ModelSpec]) -> None:
    """Around the one that is measured alone, and without the ends of the model."""

    def measured(layers: int, layer_bytes: int, middle: int | None = None) -> Span:
        sizes, tokens = (layer_bytes,) * layers, model[1].kv_bytes_per_token[:1] * layers
        spec = replace(model[1], layers=layers, layer_bytes=sizes, kv_bytes_per_token=tokens, kv_windows=())
        first = layers // 2 if middle is None else middle
        return several_layers(spec, Span(first, first + 1))

    assert measured(8, 400 << 20) == Span(4, 6)
    assert measured(32, 100 << 20) == Span(14, 19)
    assert measured(80, 1) == Span(25, 57)
    assert [measured(layers, 1) for layers in (3, 4, 5, 8)] == [
        Span(1, 2),
        Span(1, 3),
        Span(1, 4),
        Span(1, 7),
    ]
    assert [measured(layers, 1, 0) for layers in (1, 2)] == [Span(0, 1), Span(0, 1)]


def compiling(patch: pytest.MonkeyPatch) -> StandingClock:
    """The clock of benches whose first step of each number of sequences takes as long as compiling does."""
    seen: set[tuple[Span, int]] = set()

    def cost(span: Span, caches: Sequence[SequenceCache], count: int) -> float:
        if count > 1 or (span, len(caches)) in seen:
            return 0.001
        seen.add((span, len(caches)))
        return COMPILING_S

    return stop_the_clock(patch, cost)


@pytest.mark.full
def test_what_compiles_is_not_measured_and_counts_against_no_budget(
    model: tuple[Path, ModelSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, spec = model
    monkeypatch.setattr(layer_bench, "TOTAL_BUDGET_S", 1000.0)
    monkeypatch.setattr(layer_bench, "SIZE_BUDGET_S", 0.0)
    monkeypatch.setattr(layer_bench, "BATCH_SIZES", (1, 8, 64))
    clock = compiling(monkeypatch)
    backend = MeasuredDevice(MeasuredModel(folder, spec, "cpu"))
    deadline_s = clock.perf_counter() + 1000
    with on_bench(backend, spec, "cpu", Span(4, 5), deadline_s, Span(3, 6)) as bench:
        latencies, _ = bench.layer_latencies()
        assert [one.batch_size for one in latencies] == [1, 8, 64]
        assert max(one.layer_ms for one in latencies) < COMPILING_S * 1000
        assert bench.steady
        assert bench.deadline_s >= deadline_s + 6 * COMPILING_S


@pytest.mark.full
def test_a_profile_that_was_measured_while_steps_compiled_is_not_remembered(
    model: tuple[Path, ModelSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for budget in ("TOTAL_BUDGET_S", "SIZE_BUDGET_S", "CONTEXT_BUDGET_S", "PIECE_BUDGET_S", "WARM_BUDGET_S"):
        monkeypatch.setattr(layer_bench, budget, 0.0)
    compiling(monkeypatch)
    cache, lines = tmp_path / "profiles.json", list[str]()
    profile = cached_or_measured(MeasuredModel(*model, "cpu"), cache, lines.append)
    assert not profile.steady
    assert lines[-1] == "Steps were still getting faster: measured again at the next start"
    assert not cache.exists()
    good = Profile((LayerLatency(1, 5.0),), 6.0, 7.0, 8.0)
    monkeypatch.setattr(profiler, "measure", lambda *_: good)
    assert cached_or_measured(MeasuredModel(*model, "cpu"), cache) == good
    monkeypatch.setattr(profiler, "measure", lambda *_: pytest.fail("it is remembered"))
    assert cached_or_measured(MeasuredModel(*model, "cpu"), cache) == good
