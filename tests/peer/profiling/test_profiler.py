"""A profile is measured with the model's own layers, is never zero, and is remembered."""

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.devices.brief_profile import StandingClock, measure_briefly, stop_the_clock
from support.devices.paged_reference import decoding_here
from support.models import tiny_models
from transformers import AutoConfig, AutoModelForCausalLM

from molink.dht.records.records import LayerLatency
from molink.peer.compute import backend
from molink.peer.compute.backend import MeasuredModel
from molink.peer.device.thread_choice import ProcessorTimes
from molink.peer.profiling import layer_bench, profiler
from molink.peer.profiling.layer_bench import BATCH_SIZES, FIRST_SIZES, PREFILL_TOKENS, LayerBench
from molink.peer.profiling.profile import FLOOR_MS, Profile, at_most_the_next
from molink.peer.profiling.profiler import (
    added_ms,
    cached_or_measured,
    measure,
)
from molink.shards.checkpoint.store import describe
from molink.shards.kv.kv_cache import SequenceCache
from molink.shards.spec import ModelSpec, Span


def save_model(folder: Path, layers: int) -> tuple[Path, ModelSpec]:
    """A model of random weights: what it says does not matter here."""
    model_type, changes = tiny_models.ARCHITECTURES["llama"]
    config = AutoConfig.for_model(model_type, **{**changes, "num_hidden_layers": layers})
    target = folder / f"llama-{layers}"
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(target)
    return target, describe(target)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ModelSpec]:
    return save_model(tmp_path_factory.mktemp("models"), 6)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> StandingClock:
    """Steps take what they would on a machine without other work: more for more rows, layers and context."""

    def cost(span: Span, caches: Sequence[SequenceCache], count: int) -> float:
        context = sum(cache.length for cache in caches)
        return 0.001 * len(span) * (1 + 0.01 * len(caches) * count) + 1e-6 * count * context

    return stop_the_clock(monkeypatch, cost)


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """As little is measured as can be, of what a test does not look at."""
    measure_briefly(monkeypatch)


def check(profile: Profile) -> None:
    sizes = [latency.batch_size for latency in profile.layer_latencies]
    times = [latency.layer_ms for latency in profile.layer_latencies]
    assert sizes == [size for size in BATCH_SIZES if size in sizes]
    assert set(sizes) >= set(FIRST_SIZES)
    assert profile.step_ms >= 0
    assert times == sorted(times)
    assert profile.embed_ms <= times[0]
    tokens = [latency.tokens for latency in profile.prefill_latencies]
    prefills = [latency.layer_ms for latency in profile.prefill_latencies]
    assert tokens == list(PREFILL_TOKENS[: len(tokens)])
    assert len(tokens) >= 1
    assert prefills == sorted(prefills)
    assert min(*times, *prefills, profile.embed_ms, profile.head_ms) >= FLOOR_MS
    assert profile.load_bytes_per_s > 0


@pytest.mark.full
@pytest.mark.parametrize(
    "layers", [1, 2, pytest.param(3, marks=pytest.mark.full), pytest.param(6, marks=pytest.mark.full)]
)
def test_models_of_any_depth_are_measured(tmp_path: Path, layers: int) -> None:
    folder, spec = save_model(tmp_path, layers)
    check(measure(MeasuredModel(folder, spec, "cpu")))


@pytest.mark.full
@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize("records", [False, True])
def test_a_head_is_not_lost_where_recorded_steps_always_have_it(
    model: tuple[Path, ModelSpec], monkeypatch: pytest.MonkeyPatch, records: bool
) -> None:
    """Steps through the last layer then take as long without logits as with them: others are what a head adds to."""
    if records:
        monkeypatch.setattr(backend, "decoding_in", lambda _way, _device: decoding_here(sizes=(1,))[0])
    folder, spec = model
    last = Span(spec.layers - 1, spec.layers)
    timed: list[tuple[Span, bool]] = []
    times_ms = LayerBench.step_times_ms

    def noting(self: LayerBench, *, want_logits: bool) -> list[float]:
        timed.append((self.span, want_logits))
        return times_ms(self, want_logits=want_logits)

    monkeypatch.setattr(LayerBench, "step_times_ms", noting)
    measure(MeasuredModel(folder, spec, "cpu"))
    assert (last, True) in timed
    assert ((last, False) in timed) is not records


@pytest.mark.full
@pytest.mark.usefixtures("brief")
def test_progress_says_what_is_measured_and_where(model: tuple[Path, ModelSpec]) -> None:
    lines: list[str] = []
    measure(MeasuredModel(*model, "cpu"), lines.append)
    assert lines == [
        "Measuring layer 3 of llama-6 on cpu",
        "Measuring the embedding of llama-6 on cpu",
        "Measuring the head of llama-6 on cpu",
    ]


@pytest.mark.full
@pytest.mark.usefixtures("brief")
def test_a_slow_machine_is_not_measured_with_large_batches(
    model: tuple[Path, ModelSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_bench, "TOTAL_BUDGET_S", 0.0)
    assert [latency.batch_size for latency in measure(MeasuredModel(*model, "cpu")).layer_latencies] == [1]


@pytest.mark.full
def test_when_the_time_is_over_one_layer_has_been_measured_and_the_rest_is_extrapolated(
    model: tuple[Path, ModelSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiler, "PROFILE_BUDGET_S", 0.0)
    folder, spec = model
    lines: list[str] = []
    profile = measure(MeasuredModel(folder, spec, "cpu"), lines.append)
    assert lines == ["Measuring layer 3 of llama-6 on cpu"]
    (single,) = profile.layer_latencies
    assert profile.embed_ms == FLOOR_MS
    assert profile.head_ms == pytest.approx(
        max(FLOOR_MS, single.layer_ms * spec.head_bytes / spec.layer_bytes[3])
    )
    assert profile.prefill_latencies == ()
    assert (profile.decode_context_ms, profile.prefill_context_ms) == (0.0, 0.0)


@pytest.mark.full
def test_what_context_adds_is_found_where_it_is_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure_briefly(monkeypatch, "TOTAL_BUDGET_S", "SIZE_BUDGET_S", "PREFILL_BUDGET_S")
    monkeypatch.setattr(layer_bench, "CONTEXT_BUDGET_S", 60.0)
    model_type, changes = tiny_models.ARCHITECTURES["llama"]
    one_layer = {"num_hidden_layers": 1, "max_position_embeddings": 2048}
    config = AutoConfig.for_model(model_type, **{**changes, **one_layer})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    measured = MeasuredModel(tmp_path, describe(tmp_path), "cpu")
    profile = measure(measured)
    assert profile.decode_context_ms == pytest.approx(
        1.0, rel=0.3
    )  # a microsecond a token, less what short ones have
    assert profile.prefill_context_ms == pytest.approx(1.0, rel=0.3)


@pytest.mark.full
@pytest.mark.usefixtures("brief")
def test_a_slow_machine_is_not_measured_with_long_prompts(
    model: tuple[Path, ModelSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_bench, "PREFILL_BUDGET_S", 0.0)
    assert measure(MeasuredModel(*model, "cpu")).prefill_latencies == ()


@pytest.mark.full
def test_prompts_are_measured_as_far_as_the_context_goes(
    model: tuple[Path, ModelSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    measure_briefly(monkeypatch, "PREFILL_BUDGET_S")
    folder, spec = model
    measured = measure(MeasuredModel(folder, replace(spec, context_length=100), "cpu")).prefill_latencies
    assert [latency.tokens for latency in measured] == [16, 32, 64]


@pytest.mark.full
def test_a_short_context_is_enough(
    model: tuple[Path, ModelSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure_briefly(monkeypatch, "TOTAL_BUDGET_S", "PREFILL_BUDGET_S")
    folder, _ = model
    short = tmp_path / "short"
    short.mkdir()
    for file in folder.iterdir():
        (short / file.name).write_bytes(file.read_bytes())
    settings = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": 32}))
    spec = describe(short)
    assert spec.context_length == 32
    check(measure(MeasuredModel(short, spec, "cpu")))


@pytest.mark.usefixtures("brief")
def test_a_profile_is_measured_once_and_then_remembered(
    model: tuple[Path, ModelSpec], tmp_path: Path
) -> None:
    folder, spec = model
    lines: list[str] = []
    first = cached_or_measured(MeasuredModel(folder, spec, "cpu"), tmp_path / "profiles.json", lines.append)
    assert len(lines) == 3
    assert (
        cached_or_measured(MeasuredModel(folder, spec, "cpu"), tmp_path / "profiles.json", lines.append)
        == first
    )
    assert len(lines) == 3


def test_other_software_or_threads_are_measured_anew(
    model: tuple[Path, ModelSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, spec = model
    calls: list[int] = []

    def measured(*_: object) -> Profile:
        calls.append(1)
        return Profile((LayerLatency(1, float(len(calls))),), 1.0, 1.0, 1.0)

    monkeypatch.setattr(profiler, "measure", measured)
    cache = tmp_path / "profiles.json"
    first = cached_or_measured(MeasuredModel(folder, spec, "cpu"), cache)
    monkeypatch.setattr(profiler.torch, "__version__", "99.0")
    second = cached_or_measured(MeasuredModel(folder, spec, "cpu"), cache)
    monkeypatch.setattr(profiler.torch, "get_num_threads", lambda: 77)
    cached_or_measured(MeasuredModel(folder, spec, "cpu"), cache)
    assert len(calls) == 3
    assert first != second
    assert cached_or_measured(MeasuredModel(folder, spec, "cpu"), cache).layer_latencies[0].layer_ms == 3.0
    assert len(calls) == 3


def others_using(share: float) -> Callable[[], ProcessorTimes]:
    """Of ten processors, second after second."""
    seconds = itertools.count()
    return lambda: ProcessorTimes(now := next(seconds), share * 10 * now, 0.0, 10)


def test_what_was_chosen_on_a_busy_machine_is_measured_again(
    model: tuple[Path, ModelSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, spec = model
    cache = tmp_path / "profiles.json"
    counts = iter((2, 1))
    monkeypatch.setattr(
        profiler, "measure", lambda *_: Profile((LayerLatency(1, 5.0),), 6.0, 7.0, 8.0, threads=next(counts))
    )
    lines: list[str] = []
    monkeypatch.setattr(profiler, "processor_times", others_using(0.6))
    assert (
        cached_or_measured(MeasuredModel(folder, spec, "cpu"), cache, lines.append, threads=(2, 1)).threads
        == 2
    )
    assert lines == ["Other programs kept 60% of the processors busy: measured again at the next start"]
    monkeypatch.setattr(profiler, "processor_times", others_using(0.0))
    for _ in range(2):
        assert (
            cached_or_measured(
                MeasuredModel(folder, spec, "cpu"), cache, lines.append, threads=(2, 1)
            ).threads
            == 1
        )
    assert len(lines) == 1


def test_where_nothing_was_chosen_a_busy_machine_is_remembered_too(
    model: tuple[Path, ModelSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, spec = model
    cache = tmp_path / "profiles.json"
    good = Profile((LayerLatency(1, 5.0),), 6.0, 7.0, 8.0)
    monkeypatch.setattr(profiler, "processor_times", others_using(0.9))
    monkeypatch.setattr(profiler, "measure", lambda *_: good)
    cached_or_measured(MeasuredModel(folder, spec, "cpu"), cache, threads=(1,))
    monkeypatch.setattr(profiler, "measure", lambda *_: pytest.fail("it is remembered"))
    assert cached_or_measured(MeasuredModel(folder, spec, "cpu"), cache, threads=(1,)) == good


@pytest.mark.full
@pytest.mark.usefixtures("brief")
def test_the_fastest_count_of_threads_is_remembered_and_used_again(
    model: tuple[Path, ModelSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiler, "processor_times", others_using(0.0))
    folder, spec = model
    cache = tmp_path / "profiles.json"
    before = torch.get_num_threads()
    try:
        profile = cached_or_measured(MeasuredModel(folder, spec, "cpu"), cache, threads=(2, 1))
        assert profile.threads in (1, 2)
        assert torch.get_num_threads() == profile.threads
        torch.set_num_threads(3)
        assert cached_or_measured(MeasuredModel(folder, spec, "cpu"), cache, threads=(2, 1)) == profile
        assert torch.get_num_threads() == profile.threads
        assert cached_or_measured(MeasuredModel(folder, spec, "cpu"), cache, threads=(3,)).threads == 3
        assert cached_or_measured(MeasuredModel(folder, spec, "cpu"), cache).threads == 3
    finally:
        torch.set_num_threads(before)
    assert len(json.loads(cache.read_text())) == 2


@pytest.mark.parametrize(
    "damage",
    [
        "nonsense",
        [],
        {},
        {"layer_ms": {}, "prefill_layer_ms": {}, "embed_ms": 1, "head_ms": 1, "load_bytes_per_s": 1},
        {"layer_ms": {"2": 1.0}, "prefill_layer_ms": {}, "embed_ms": 1, "head_ms": 1, "load_bytes_per_s": 1},
        {"layer_ms": {"1": 0}, "prefill_layer_ms": {}, "embed_ms": 1, "head_ms": 1, "load_bytes_per_s": 1},
        {
            "layer_ms": {"1": 1.0},
            "prefill_layer_ms": {},
            "embed_ms": float("nan"),
            "head_ms": 1,
            "load_bytes_per_s": 1,
        },
        {"layer_ms": [1.0], "prefill_layer_ms": {}, "embed_ms": 1, "head_ms": 1, "load_bytes_per_s": 1},
        {"layer_ms": {"1": 1.0}, "embed_ms": 1, "head_ms": 1, "load_bytes_per_s": 1},
        {
            "layer_ms": {"1": 1.0},
            "prefill_layer_ms": {"16": 0},
            "embed_ms": 1,
            "head_ms": 1,
            "load_bytes_per_s": 1,
        },
        {
            "layer_ms": {"one": 1.0},
            "prefill_layer_ms": {},
            "embed_ms": 1,
            "head_ms": 1,
            "load_bytes_per_s": 1,
        },
    ],
)
def test_a_damaged_memory_is_measured_anew(
    model: tuple[Path, ModelSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: object
) -> None:
    folder, spec = model
    good = Profile((LayerLatency(1, 5.0),), 6.0, 7.0, 8.0)
    monkeypatch.setattr(profiler, "measure", lambda *_: good)
    cache = tmp_path / "profiles.json"
    cached_or_measured(MeasuredModel(folder, spec, "cpu"), cache)
    (key,) = json.loads(cache.read_text())
    cache.write_text(json.dumps({key: damage}))
    assert cached_or_measured(MeasuredModel(folder, spec, "cpu"), cache) == good
    monkeypatch.setattr(profiler, "measure", lambda *_: pytest.fail("it is remembered again"))
    assert cached_or_measured(MeasuredModel(folder, spec, "cpu"), cache) == good


def test_the_memory_stays_small(
    model: tuple[Path, ModelSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, spec = model
    cache = tmp_path / "profiles.json"
    cache.write_text(json.dumps({f"old {number}": {} for number in range(100)}))
    monkeypatch.setattr(profiler, "measure", lambda *_: Profile((LayerLatency(1, 5.0),), 6.0, 7.0, 8.0))
    cached_or_measured(MeasuredModel(folder, spec, "cpu"), cache)
    kept = list(json.loads(cache.read_text()))
    assert len(kept) == profiler.REMEMBERED
    assert kept[:-1] == [f"old {number}" for number in range(100)][-(profiler.REMEMBERED - 1) :]


@given(st.lists(st.floats(1e-4, 1e6), min_size=1, max_size=6))
def test_no_batch_is_slower_than_a_larger_one(times: list[float]) -> None:
    measured = [LayerLatency(size, layer_ms) for size, layer_ms in zip(BATCH_SIZES, times, strict=False)]
    cleaned = at_most_the_next(measured)
    assert [latency.layer_ms for latency in cleaned] == [min(times[index:]) for index in range(len(times))]
    assert [latency.batch_size for latency in cleaned] == list(BATCH_SIZES[: len(times)])


@given(st.lists(st.floats(0, 1e4), max_size=19), st.lists(st.floats(0, 1e4), max_size=19))
def test_what_keeps_some_steps_waiting_is_not_taken_for_the_time_of_an_end(
    waits_with_ms: list[float], waits_without_ms: list[float]
) -> None:
    with_ms = [0.5 + wait_ms for wait_ms in (*waits_with_ms, 0.0)]
    without_ms = [0.4 + wait_ms for wait_ms in (*waits_without_ms, 0.0)]
    assert added_ms(with_ms, without_ms) == pytest.approx(0.1)
    assert added_ms(without_ms, with_ms) == FLOOR_MS
