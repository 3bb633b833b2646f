"""Peers whose engine is on a device: its thread hands over what is there, and the event loop never touches it."""

import threading
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from support.devices.fake_cuda import STEP_S, FakeCuda, Kernels, OnDevice, fake_cuda
from support.links.data_plane import asynchronous
from support.models.tiny_models import VOCABULARY, greedy_references
from support.swarms import served_peer
from support.swarms.served_circuit import served_circuit
from support.swarms.served_peer import model

from molink.dht.records.records import LayerLatency
from molink.peer.compute.backend import DeviceBackend
from molink.peer.engine import slice_executor, stepping, steps
from molink.peer.engine.slice_executor import SliceExecutor, SliceOutput, StepSlice
from molink.peer.engine.steps import StepInput, StepOutput, compute
from molink.peer.models.model import LocalModel
from molink.peer.profiling.profile import Profile, SliceLatency
from molink.routing.cost.prefill_chunks import equal_chunks
from molink.shards import codec
from molink.shards.batching import ways
from molink.shards.batching.decode import Decoding
from molink.shards.batching.engine import Engine
from molink.shards.device.cuda_graphs import CudaGraphs
from molink.shards.device.device import Device

__all__ = ["model"]

SLOW = Profile((LayerLatency(1, 0.001),), 0.001, 0.001, 1e9, slice_latencies=(SliceLatency(16, 1e3, 1e3),))
"""Pieces are the smallest there are: 16 tokens through a layer."""


def prompt_of(tokens: int) -> list[int]:
    return [(7 * position + tokens) % VOCABULARY for position in range(tokens)]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """A second card, on which the engines of served peers are, with the clock of what it computes."""
    with fake_cuda(1) as fake:

        def decoding_on(device: str, *, records: bool, fuses: bool) -> Decoding:
            return Decoding(Kernels(fake), CudaGraphs(Device(device)) if records else None, (1, 2, 4), fuses)

        monkeypatch.setattr(ways, "decoding_on", decoding_on)
        monkeypatch.setattr(served_peer, "DeviceBackend", lambda model, _: DeviceBackend(model, "cuda:1"))
        yield fake


class Watch:
    """What each step and each piece took by the device's clock, how often it waited, and on which thread."""

    def __init__(self, fake: FakeCuda, patch: pytest.MonkeyPatch) -> None:
        self.taken_s: list[float] = []
        self.waits: list[int] = []
        self.threads: Counter[str] = Counter()
        self.outputs: list[StepOutput] = []
        self.pieces = 0
        self._fake = fake
        piece_by_piece = SliceExecutor.compute
        clock = SimpleNamespace(perf_counter=lambda: fake.now_s)

        def computed(engine: Engine, inputs: tuple[StepInput, ...]) -> StepOutput:
            before = fake.waited
            output = compute(engine, inputs)
            self._note(before, output.compute_s)
            self.outputs.append(output)
            return output

        def computed_piece(owner: SliceExecutor, piece: StepSlice) -> SliceOutput:
            before = fake.waited
            output = piece_by_piece(owner, piece)
            self._note(before, output.taken_s)
            self.pieces += 1
            return output

        for module in (steps, slice_executor):
            patch.setattr(module, "time", clock)
        patch.setattr(stepping, "compute", computed)
        patch.setattr(SliceExecutor, "compute", computed_piece)

    def _note(self, before: int, taken_s: float) -> None:
        self.waits.append(self._fake.waited - before)
        self.taken_s.append(taken_s)
        self.threads[threading.current_thread().name] += 1


@pytest.mark.full
@asynchronous
async def test_a_step_of_a_hop_waits_once_and_its_time_is_the_devices(
    model: LocalModel, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [prompt_of(tokens) for tokens in (3, 40, 5)]
    async with served_circuit(model, (2, 4), kv_tokens=400, cut=equal_chunks(16)) as circuit:
        watch = Watch(fake, monkeypatch)
        tokens = await circuit.generate(prompts, 12)
    assert tokens == greedy_references(model.folder, prompts, 12)
    assert set(watch.waits) == {1}
    assert set(watch.taken_s) == {STEP_S}, "of middle hops and of prompts' first chunks at the tail too"
    assert set(watch.threads) == {"engine"}
    assert fake.waited == 0, "the event loop"
    handed = [output.hidden for output in watch.outputs] + [
        rows for output in watch.outputs for _, rows in output.frames
    ]
    assert not any(isinstance(one, OnDevice) for one in handed)
    assert fake.captures > 0


@pytest.mark.full
@asynchronous
async def test_a_piece_of_a_prompt_is_over_when_its_time_is_taken(
    model: LocalModel, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [prompt_of(tokens) for tokens in (3, 300)]
    served = served_circuit(model, (3,), kv_tokens=800, cut=equal_chunks(60), profile=SLOW)
    async with served as circuit:
        watch = Watch(fake, monkeypatch)
        tokens = await circuit.generate(prompts, 20)
    assert tokens == greedy_references(model.folder, prompts, 20)
    assert watch.pieces > 4
    assert set(watch.waits) == {1}
    assert set(watch.taken_s) == {STEP_S}


@pytest.mark.parametrize("encoding", ["float32", "bfloat16", "float16", "int8"])
def test_what_is_encoded_on_a_device_is_what_is_encoded_here(fake: FakeCuda, encoding: str) -> None:
    hidden = torch.randn(5, 200, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    hidden[1, 3], hidden[2, 70], hidden[3, 0] = float("nan"), float("inf"), float("-inf")
    if encoding == "float16":
        hidden[1, 3] = 1e30
    made: list[bytes] = []

    def encoded() -> None:
        device = Device("cuda:1")
        device.enter()
        there = hidden.to(device.place)
        waits = len(fake.waits)
        result = codec.encoded(there, encoding)
        assert len(fake.waits) == waits
        made.append(bytes(codec.bytes_of(result.to("cpu"))))

    thread = threading.Thread(target=encoded)
    thread.start()
    thread.join()
    assert made == [bytes(codec.encode(hidden, encoding))]
