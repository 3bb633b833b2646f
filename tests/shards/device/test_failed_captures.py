"""A recording that fails leaves the stream, the pool, the allocator and the steps that follow as they were."""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.devices.fake_cuda import FakeCuda, Kernels, fake_cuda
from support.devices.paged_reference import decoding_here
from support.models.circuit_runs import Run, finish, spec_for, start_run
from support.pairwise import usually
from torch import Tensor, nn

from molink.shards.batching.decode import Decoding
from molink.shards.batching.engine import Engine
from molink.shards.device.cuda_graphs import CudaGraphs
from molink.shards.device.device import Device
from molink.shards.device.waiting import WaitsForDevice, refusing_waits
from molink.shards.loading.loader import StageSettings, load_stage
from molink.shards.paged_attention.paged import BlockAddresses, Logits
from molink.shards.spec import Span

TinyModel = Callable[[str], Path]
WHOLE = Span(0, 6)
PROMPTS = ((1, 2, 3), (40, 41), (7, 8, 9, 10))
TOKENS = 6
SIZES = (1, 2, 4)


def engine_on(folder: Path, device: str, decoding: Decoding | None) -> Engine:
    stage = load_stage(folder, WHOLE, StageSettings("float32", device=device))
    engine = Engine(spec_for(stage), device, decoding=decoding)
    engine.attach(stage)
    return engine


def tokens_of(engine: Engine) -> list[list[int]]:
    runs: list[Run] = [start_run([(engine, WHOLE)], prompt, TOKENS) for prompt in PROMPTS]
    return finish([(engine, WHOLE)], runs, TOKENS)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("stage", "recorded_before"),
    usually(
        [("begin", 2), ("during", 0), ("end", 2), ("replay", 0)],
        [("begin", 0), ("during", 2), ("end", 0), ("replay", 2)],
    ),
)
def test_steps_go_on_after_a_capture_that_fails(
    tiny_model: TinyModel, caplog: pytest.LogCaptureFixture, stage: str, recorded_before: int
) -> None:
    folder = tiny_model("llama")
    expected = tokens_of(engine_on(folder, "cpu", None))

    def run(fake: FakeCuda) -> list[list[int]]:
        decoding = Decoding(Kernels(fake), CudaGraphs(Device("cuda:1")), SIZES)
        engine = engine_on(folder, "cuda:1", decoding)
        for _ in range(recorded_before):
            assert engine.record_next()
        fake.fails_at = stage
        assert engine.record_next()
        fake.fails_at = ""
        assert fake.stream is fake.default, "steps go where copies go"
        assert not fake.default.capturing
        assert fake.allocating == set(), "the allocator knows of no capture"
        assert engine.to_record() is None, "it is not tried again in the middle of something"
        captures = fake.captures
        tokens = tokens_of(engine)
        assert fake.captures == captures
        return tokens

    with fake_cuda(1) as fake, ThreadPoolExecutor(1, "engine") as thread:
        assert thread.submit(run, fake).result() == expected
        assert sum(fake.pools.values()) == recorded_before, "pools are held by what was recorded, and no more"
    (sentence,) = told(caplog)
    assert "decode steps on layers 0 to 6 are launched one operation at a time" in sentence
    assert "injected" in sentence


def test_another_span_is_recorded_after_a_capture_that_failed(tiny_model: TinyModel) -> None:
    folder = tiny_model("llama")

    def run(fake: FakeCuda) -> int:
        decoding = Decoding(Kernels(fake), CudaGraphs(Device("cuda:1")), SIZES)
        engine = engine_on(folder, "cuda:1", decoding)
        fake.fails_at = "end"
        engine.record_next()
        fake.fails_at = ""
        before = fake.captures
        engine.new_cache(Span(0, 2), 8)
        return fake.captures - before

    with fake_cuda(1) as fake, ThreadPoolExecutor(1, "engine") as thread:
        assert thread.submit(run, fake).result() == len(SIZES)
        assert fake.allocating == set()


@pytest.mark.full
def test_layers_are_recorded_after_all_that_was_recorded_is_gone(
    tiny_model: TinyModel, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny_model("llama")

    def run(fake: FakeCuda) -> int:
        decoding = Decoding(Kernels(fake), CudaGraphs(Device("cuda:1")), SIZES)
        engine = engine_on(folder, "cuda:1", decoding)
        while engine.record_next():
            continue
        engine.detach(WHOLE)
        assert sum(fake.pools.values()) == 0
        before = fake.captures
        engine.attach(load_stage(folder, WHOLE, StageSettings("float32", device="cuda:1")))
        while engine.record_next():
            continue
        return fake.captures - before

    with fake_cuda(1) as fake, ThreadPoolExecutor(1, "engine") as thread:
        assert thread.submit(run, fake).result() == 3 * len(SIZES), "steps, and drawings that cut and do not"
    assert told(caplog) == []


@pytest.mark.full
def test_a_replay_that_fails_in_a_step_is_made_good_in_the_same_step(
    tiny_model: TinyModel, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny_model("llama")
    expected = tokens_of(engine_on(folder, "cpu", None))

    def run(fake: FakeCuda) -> list[list[int]]:
        decoding = Decoding(Kernels(fake), CudaGraphs(Device("cuda:1")), SIZES)
        engine = engine_on(folder, "cuda:1", decoding)
        while engine.record_next():
            continue
        fake.fails_at = "replay"
        return tokens_of(engine)

    with fake_cuda(1) as fake, ThreadPoolExecutor(1, "engine") as thread:
        assert thread.submit(run, fake).result() == expected
    assert len(told(caplog)) == 1


class OutOfResources(Exception):
    """As Triton's: no RuntimeError."""


class Fails(Kernels):
    """Paged attention that the device cannot make, from some call on."""

    def __init__(self, fake: FakeCuda, after: int) -> None:
        super().__init__(fake)
        self._left = after

    def attend(
        self, query: Tensor, places: BlockAddresses, slot: int, key_heads: int, logits: Logits
    ) -> Tensor:
        self._left -= 1
        if self._left < 0:
            raise OutOfResources("out of resource: shared memory, Required: 155648, Hardware limit: 101376")
        return super().attend(query, places, slot, key_heads, logits)


@pytest.mark.parametrize("after", [0, 10, 20])
def test_kernels_that_cannot_run_leave_sessions_to_attend_one_after_the_other(
    tiny_model: TinyModel, caplog: pytest.LogCaptureFixture, after: int
) -> None:
    """At once, while steps are recorded, and in the middle of a step."""
    folder = tiny_model("llama")
    expected = tokens_of(engine_on(folder, "cpu", None))

    def run(fake: FakeCuda) -> list[list[int]]:
        recorder = CudaGraphs(Device("cuda:1")) if after == 10 else None
        return tokens_of(engine_on(folder, "cuda:1", Decoding(Fails(fake, after), recorder, SIZES)))

    with fake_cuda(1) as fake, ThreadPoolExecutor(1, "engine") as thread:
        assert thread.submit(run, fake).result() == expected
        assert fake.allocating == set()
    sentences = told(caplog)
    assert "sessions on layers [0, 6) attend one after the other" in sentences[-1]
    assert all("OutOfResources: out of resource: shared memory" in sentence for sentence in sentences)
    assert len(sentences) == (2 if after == 10 else 1), "one for each way that is given up"


def test_layers_that_wait_for_the_device_are_found_before_a_capture(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As experts do that ask how many tokens each of them has."""
    stage = load_stage(
        tiny_model("llama"), WHOLE, StageSettings("float32", exact=True)
    )  # by its modules' own forward
    kind = type(stage.model.get_submodule("model.layers.3.mlp"))
    forward = kind.forward

    def asks(self: nn.Module, states: Tensor) -> Tensor:
        result: Tensor = forward(self, states) if bool(states.isfinite().all()) else states
        return result

    monkeypatch.setattr(kind, "forward", asks)
    decoding, attention, tapes = decoding_here(sizes=SIZES)
    engine = Engine(spec_for(stage), "cpu", decoding=decoding)
    engine.attach(stage)
    assert engine.to_record() is None
    assert tokens_of(engine) == tokens_of(engine_on(tiny_model("llama"), "cpu", None))
    assert tapes.sizes == []
    assert max(attention.rows) == 3, "rows attend together all the same"
    (sentence,) = told(caplog)
    assert "waits for the device" in sentence


ROWS = torch.arange(12.0).view(3, 4)


@pytest.mark.parametrize(
    "operation",
    [
        lambda: ROWS * float(ROWS.sum()),
        lambda: ROWS if ROWS.isfinite().all() else -ROWS,
        lambda: torch.stack(torch.where(ROWS > 3)),
        lambda: ROWS[ROWS > 3],
        lambda: ROWS[(ROWS > 3).nonzero(as_tuple=True)],
        lambda: ROWS.clone().index_put_((ROWS > 3,), torch.zeros(())),
        lambda: ROWS.repeat_interleave(torch.tensor([1, 0, 2]), 0),
        lambda: torch.unique(ROWS),
        lambda: ROWS.to(torch.float64, copy=True).to("meta"),
    ],
)
def test_what_waits_is_refused_before_it_runs(operation: Callable[[], Tensor]) -> None:
    with pytest.raises(WaitsForDevice, match="waits for the device"):
        refusing_waits(operation)
    with torch.inference_mode(), pytest.raises(WaitsForDevice, match="waits for the device"):
        refusing_waits(operation)


@pytest.mark.parametrize(
    "operation",
    [
        lambda: ROWS[torch.tensor([0, 2])],
        lambda: nn.functional.softmax(ROWS.to(torch.bfloat16), -1),
        lambda: torch.where(ROWS > 3, ROWS, 0.0).index_add(0, torch.tensor([1]), ROWS[:1]),
        lambda: torch.empty(3, 4).copy_(ROWS),
    ],
)
def test_what_does_not_wait_is_computed(operation: Callable[[], Tensor]) -> None:
    assert torch.equal(refusing_waits(operation), operation())
    with torch.inference_mode():
        assert torch.equal(refusing_waits(operation), operation())


@pytest.mark.parametrize(
    ("major", "dtype", "waits"),
    [
        (8, torch.bfloat16, True),
        (12, torch.bfloat16, True),
        (9, torch.bfloat16, False),
        (9, torch.float16, True),
    ],
)
def test_products_of_experts_wait_where_the_card_has_none_by_group(
    monkeypatch: pytest.MonkeyPatch, major: int, dtype: torch.dtype, *, waits: bool
) -> None:
    from molink.shards.device import waiting

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (major, 0))
    matrix = SimpleNamespace(is_cuda=True, dtype=dtype, device="cuda:0")
    assert waiting.lacks_grouped_products(matrix) is waits  # type: ignore[arg-type]
    assert not waiting.lacks_grouped_products(ROWS)
