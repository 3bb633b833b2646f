"""An engine on a device enters it on every thread, and waits for it once a step."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from support.devices.fake_cuda import FakeCuda, Kernels, OnDevice, WrongPlace, fake_cuda
from support.models.circuit_runs import spec_for
from torch import Tensor

from molink.shards.batching.decode import Decoding
from molink.shards.batching.engine import Engine, Rows
from molink.shards.device import transfers as transfers_module
from molink.shards.device.cuda_graphs import CudaGraphs
from molink.shards.device.device import Device
from molink.shards.device.transfers import Transfers
from molink.shards.kv.kv_cache import SequenceCache
from molink.shards.loading.loader import StageSettings, load_stage
from molink.shards.spec import Span

TinyModel = Callable[[str], Path]
FIRST, LAST = Span(0, 3), Span(3, 6)


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    with fake_cuda(1) as fake:
        yield fake


@pytest.fixture
def device_thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1, "engine") as thread:
        yield thread


def engine_on(folder: Path, device: str, decoding: Decoding | None = None) -> Engine:
    stages = [load_stage(folder, span, StageSettings("float32", device=device)) for span in (FIRST, LAST)]
    engine = Engine(spec_for(stages[0]), device, decoding=decoding)
    for stage in stages:
        engine.attach(stage)
    return engine


def stepped(engine: Engine, span: Span, rows: Sequence[Rows], hidden: Tensor | None) -> Tensor:
    return engine.to_host([engine.step(span, rows, hidden)])[0]


def rows_of(caches: Sequence[SequenceCache], counts: Sequence[int], *, ids: bool) -> list[Rows]:
    return [
        Rows(cache, count, tuple(range(3, 3 + count)) if ids else None, logit_rows=int(index != 1))
        for index, (cache, count) in enumerate(zip(caches, counts, strict=True))
    ]


def through(engine: Engine, steps: Sequence[Sequence[int]]) -> list[list[Tensor]]:
    """What steps of so many new tokens of three sessions give behind each hop."""
    caches = {span: [engine.new_cache(span, 40) for _ in range(3)] for span in (FIRST, LAST)}
    given = []
    for counts in steps:
        hidden = stepped(engine, FIRST, rows_of(caches[FIRST], counts, ids=True), None)
        logits = stepped(engine, LAST, rows_of(caches[LAST], counts, ids=False), hidden)
        given.append([hidden, logits])
    return given


@pytest.mark.parametrize("by_address", [False, True])
def test_a_step_costs_one_wait_whatever_is_in_it(
    tiny_model: TinyModel, fake: FakeCuda, device_thread: ThreadPoolExecutor, *, by_address: bool
) -> None:
    steps = [(5, 2, 9), (1, 1, 1), (1, 17, 1), (1, 1, 1)]

    def run() -> tuple[list[list[Tensor]], int]:
        recorder = CudaGraphs(Device("cuda:1"))
        decoding = Decoding(Kernels(fake), recorder, (4,)) if by_address else None
        engine = engine_on(tiny_model("llama"), "cuda:1", decoding)
        while engine.record_next():
            continue
        before = len(fake.waits)
        return through(engine, steps), len(fake.waits) - before

    given, waits = device_thread.submit(run).result()
    assert waits == 2 * len(steps), "one for each step of each hop"
    assert fake.captures == (4 if by_address else 0), "two spans, and drawings behind the last layer"
    for ours, theirs in zip(given, through(engine_on(tiny_model("llama"), "cpu"), steps), strict=True):
        for mine, one in zip(ours, theirs, strict=True):
            assert type(mine) is Tensor
            torch.testing.assert_close(mine, one, atol=1e-4, rtol=1e-3)


def test_a_piece_of_a_prompt_ends_with_a_wait(
    tiny_model: TinyModel, fake: FakeCuda, device_thread: ThreadPoolExecutor
) -> None:
    def run() -> tuple[int, float]:
        engine = engine_on(tiny_model("llama"), "cuda:1")
        step = engine.begin_partial(
            FIRST, Rows(engine.new_cache(FIRST, 40), 32, tuple(range(32)), True), None
        )
        before, began_s = len(fake.waits), fake.now_s
        assert engine.advance_slice(engine.gather_slice([step], [16]), 3) == ((), None)
        engine.to_host(())
        return len(fake.waits) - before, fake.now_s - began_s

    assert device_thread.submit(run).result() == (1, 5.0)


def test_whatever_thread_loads_or_steps_enters_the_device_of_the_engine(
    tiny_model: TinyModel, fake: FakeCuda
) -> None:
    with ThreadPoolExecutor(1, "loader") as loader:
        engine = loader.submit(engine_on, tiny_model("llama"), "cuda:1").result()

    def elsewhere() -> tuple[int, list[list[Tensor]]]:
        before = fake.current
        return before, through(engine, [(4, 1, 1)])

    with ThreadPoolExecutor(1, "profiler") as profiler:
        before, given = profiler.submit(elsewhere).result()
        assert before == 0, "as CUDA has it on each new thread"
        assert profiler.submit(lambda: fake.current).result() == 1
    theirs = through(engine_on(tiny_model("llama"), "cpu"), [(4, 1, 1)])
    torch.testing.assert_close(given[0][1], theirs[0][1], atol=1e-4, rtol=1e-3)


def test_a_thread_that_has_not_entered_is_refused_by_the_fake(
    tiny_model: TinyModel, fake: FakeCuda, device_thread: ThreadPoolExecutor
) -> None:
    def run() -> Tensor:
        engine = engine_on(tiny_model("llama"), "cuda:1")
        return engine.step(FIRST, [Rows(engine.new_cache(FIRST, 8), 2, (1, 2), False)], None)

    hidden = device_thread.submit(run).result()
    assert isinstance(hidden, OnDevice)
    for touch in (lambda: hidden.to("cpu"), lambda: hidden + 1, hidden.tolist, fake.wait):
        with pytest.raises(WrongPlace, match="cuda:0 by thread MainThread"):
            touch()


def test_results_lie_in_kept_memory_until_nobody_has_them(
    fake: FakeCuda, device_thread: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> None:
        device = Device("cuda:1")
        device.enter()
        transfers = Transfers(device)
        there = [transfers.to_device(torch.full((4, 8), float(value)), torch.bfloat16) for value in range(6)]
        first, second = transfers.to_host(there[:2])
        places = {first.data_ptr(), second.data_ptr()}
        assert [first[0, 0].item(), second[0, 0].item()] == [0, 1]
        kept = memoryview(first.view(torch.uint8).numpy())
        del first
        (third,) = transfers.to_host(there[2:3])
        assert third.data_ptr() not in places, "a frame that waits in a link still has the first one's memory"
        assert torch.frombuffer(bytearray(kept), dtype=torch.bfloat16).eq(0).all()
        del kept, second
        again = transfers.to_host(there[3:5])
        assert {one.data_ptr() for one in again} == places
        assert [one[0, 0].item() for one in (third, *again)] == [2, 3, 4]
        monkeypatch.setattr(transfers_module, "MOST_KEPT_BYTES", 0)
        (beyond,) = transfers.to_host(there[5:])
        assert beyond[3, 7].item() == 5
        assert not fake.is_pinned(beyond)

    device_thread.submit(run).result()


def test_results_may_be_dropped_on_any_thread(fake: FakeCuda, device_thread: ThreadPoolExecutor) -> None:
    def copied() -> tuple[Transfers, list[Tensor]]:
        device = Device("cuda:1")
        device.enter()
        transfers = Transfers(device)
        return transfers, transfers.to_host([torch.ones(3, 5, device=device.place)])

    transfers, results = device_thread.submit(copied).result()
    place = results[0].data_ptr()
    assert threading.current_thread().name == "MainThread"
    results.clear()
    waits = len(fake.waits)
    again = device_thread.submit(lambda: transfers.to_host([torch.ones(5, 3, device="cuda:1")])).result()
    assert again[0].data_ptr() == place
    assert len(fake.waits) == waits + 1
