"""Whatever fails on a device, the peer serves by the next way with the right tokens, and one sentence says so."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.devices.fused_reference import WrittenKernels
from support.devices.paged_reference import Tapes, WrittenOut, decoding_here
from support.models.circuit_runs import start_run, step_runs
from support.models.tiny_models import make_tiny_model
from support.pairwise import usually
from torch import Tensor

from molink.configuration import SettingsError
from molink.peer.compute import first_step
from molink.peer.compute.backend import DeviceBackend
from molink.peer.compute.first_step import Proof, prove
from molink.peer.models.model import LocalModel
from molink.shards.batching.decode import Decoding
from molink.shards.batching.engine import Engine
from molink.shards.batching.ways import DecodingWay
from molink.shards.checkpoint.store import describe, read_manifest
from molink.shards.kernels.fused import Activation, FusedKernels
from molink.shards.loading import stage_builder
from molink.shards.paged_attention.paged import BlockAddresses, Logits, NotPaged


class OutOfResources(Exception):
    """As Triton's: no RuntimeError."""


class CompilationError(Exception):
    """As Triton's: no RuntimeError."""


FAILURES = (
    OutOfResources("out of resource: shared memory, Required: 155648, Hardware limit: 101376"),
    CompilationError("at 3:4: Unsupported conversion"),
    RuntimeError("Failed to find C compiler. Please specify via CC environment variable."),
    RuntimeError("CUDA error: no kernel image is available for execution on the device"),
    ImportError("DLL load failed while importing libtriton"),
    NotPaged("heads of 512 in torch.float32 do not fit the card's 65536 bytes of shared memory"),
    AssertionError(),
)


class Failing(WrittenOut):
    """Attention that raises, or computes something else."""

    def __init__(self, failure: Exception | None) -> None:
        super().__init__()
        self.failure = failure

    def attend(
        self, query: Tensor, places: BlockAddresses, slot: int, key_heads: int, logits: Logits
    ) -> Tensor:
        if self.failure is not None:
            raise self.failure
        return super().attend(query, places, slot, key_heads, logits) * 1.5


class LateFailing(WrittenKernels):
    """Fused kernels that are right while layers are loaded, and later, when they are to, fail or compute nonsense."""

    def __init__(self, *, wrong: bool) -> None:
        super().__init__()
        self._wrong = wrong
        self.fails = False

    def gate(self, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        if self.fails and not self._wrong:
            raise RuntimeError("an illegal instruction was encountered")
        return super().gate(gate, up, activation) * (3 if self.fails else 1)


class NotRecording(Tapes):
    def __init__(self, failure: Exception) -> None:
        super().__init__()
        self.failure = failure

    def record(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        step()
        raise self.failure


def made(architecture: str, folder: Path) -> LocalModel:
    stored = make_tiny_model(architecture, folder)
    manifest = read_manifest(stored, folder / f"{architecture}-digests")
    return LocalModel(stored, manifest, describe(manifest, "float32", "none", name="tiny"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LocalModel:
    return made("llama", tmp_path_factory.mktemp("tiny"))


def proved(model: LocalModel, decodings: Callable[[DecodingWay, str], Decoding | None]) -> Proof:
    return prove(model, "cpu", decodings=decodings)


def serves_as_without(model: LocalModel, way: DecodingWay, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is served in that way are the tokens of sessions that attend one by one."""

    def tokens(decoding: Decoding | None) -> list[list[int]]:
        with monkeypatch.context() as patched:
            patched.setattr("molink.peer.compute.backend.decoding_in", lambda _way, _device: decoding)
            backend = DeviceBackend(model, "cpu", way)
        whole = model.spec.whole
        backend.load(whole, lambda _done, _total: None)()
        runs = [start_run([(backend.engine, whole)], text, 6, chunk=9) for text in ((1, 2, 3), (4, 5) * 10)]
        for _ in range(12):
            step_runs([(backend.engine, whole)], [run for run in runs if len(run.tokens) < 6])
            if all(len(run.tokens) >= 6 for run in runs):
                break
        return [run.tokens for run in runs]

    decoding, _, _ = decoding_here(records=way is not DecodingWay.LAUNCHED, fuses=way is DecodingWay.FUSED)
    assert tokens(None if way is DecodingWay.TORCH else decoding) == tokens(None)


@pytest.mark.full
def test_where_all_works_steps_are_recorded_and_nothing_is_said(
    model: LocalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoding, attention, tapes = decoding_here()
    assert proved(model, lambda _way, _device: decoding) == Proof(DecodingWay.FUSED, None)
    assert tapes.replays > 0, "the recorded step was played"
    assert 1 in attention.rows, "a row beside a prompt attended too"
    serves_as_without(model, DecodingWay.FUSED, monkeypatch)


@pytest.mark.full
@pytest.mark.parametrize("wrong", [False, True], ids=["raises", "computes something else"])
def test_where_fused_kernels_fail_steps_are_recorded_without_them(
    model: LocalModel,
    wrong: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels = LateFailing(wrong=wrong)
    monkeypatch.setattr(stage_builder, "fused_on", lambda _device: FusedKernels(kernels, kernels))

    def decodings(way: DecodingWay, _device: str) -> Decoding:
        kernels.fails = way is DecodingWay.FUSED
        return Decoding(WrittenOut(), Tapes(), fuses=way is DecodingWay.FUSED)

    proof = proved(model, decodings)
    assert proof.way is DecodingWay.RECORDED
    assert proof.sentence is not None
    assert (
        "computes with Triton's kernels in recorded steps, because the fused ones fail here" in proof.sentence
    )
    assert ("off by" if wrong else "illegal instruction") in proof.sentence
    serves_as_without(model, proof.way, monkeypatch)


@pytest.mark.parametrize(
    "failure",
    usually(FAILURES[::3], FAILURES),
    ids=lambda failure: type(failure).__name__,
)
def test_whatever_a_kernel_raises_torch_attends(
    model: LocalModel, failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    proof = proved(
        model,
        lambda way, _device: Decoding(Failing(failure), Tapes() if way is not DecodingWay.LAUNCHED else None),
    )
    assert proof.way is DecodingWay.TORCH
    assert proof.sentence is not None
    assert proof.sentence.startswith(
        "Note: cpu computes with torch's own attention, session by session, because"
    )
    assert type(failure).__name__ in proof.sentence
    assert "\n" not in proof.sentence
    serves_as_without(model, proof.way, monkeypatch)


@pytest.mark.full
def test_a_missing_compiler_is_to_be_installed(model: LocalModel) -> None:
    failure = RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")
    sentence = proved(model, lambda _way, _device: Decoding(Failing(failure), None)).sentence
    assert sentence is not None
    assert sentence.endswith("install one, such as gcc, and start again")


@pytest.mark.full
def test_a_kernel_that_computes_something_else_is_not_used(model: LocalModel) -> None:
    proof = proved(model, lambda _way, _device: Decoding(Failing(None), None))
    assert proof.way is DecodingWay.TORCH
    assert proof.sentence is not None
    assert "its results are off by" in proof.sentence


@pytest.mark.full
@pytest.mark.parametrize(
    "failure", usually(FAILURES[:2], FAILURES[:4]), ids=lambda failure: type(failure).__name__
)
def test_where_recording_fails_kernels_are_launched(
    model: LocalModel, failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decodings(way: DecodingWay, _device: str) -> Decoding:
        return Decoding(WrittenOut(), NotRecording(failure) if way is not DecodingWay.LAUNCHED else None)

    proof = proved(model, decodings)
    assert proof.way is DecodingWay.LAUNCHED
    assert proof.sentence is not None
    assert "launched step by step, because" in proof.sentence
    assert str(failure)[:20] in proof.sentence
    serves_as_without(model, proof.way, monkeypatch)


@pytest.mark.full
def test_kernels_that_cannot_even_be_imported_are_a_way_that_fails(model: LocalModel) -> None:
    def decodings(_way: DecodingWay, _device: str) -> Decoding:
        raise FAILURES[4]

    proof = proved(model, decodings)
    assert proof.way is DecodingWay.TORCH
    assert proof.sentence is not None
    assert "ImportError: DLL load failed" in proof.sentence


@pytest.mark.full
def test_layers_that_are_never_recorded_are_no_failure(tmp_path: Path) -> None:
    model = made("bloom", tmp_path)
    decoding, _, tapes = decoding_here()
    assert proved(model, lambda _way, _device: decoding) == Proof(DecodingWay.FUSED, None)
    assert tapes.replays == 0


def refused(
    model: LocalModel, monkeypatch: pytest.MonkeyPatch, fails: Callable[[object], Exception | None]
) -> str:
    """What is said where a layer of some specifications cannot be stepped."""
    step = Engine.step

    def failing(engine: Engine, *inputs: object) -> Tensor:
        failure = fails(engine.spec)
        if failure is not None:
            raise failure
        return step(engine, *inputs)  # type: ignore[arg-type]

    monkeypatch.setattr(Engine, "step", failing)
    with pytest.raises(SettingsError) as error:
        prove(model, "cpu")
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_device_that_cannot_compute_at_all_is_refused(
    model: LocalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = refused(model, monkeypatch, lambda _: FAILURES[3])
    assert said.startswith(
        "--device cpu cannot compute tiny in float32 (RuntimeError: CUDA error: no kernel image"
    )
    assert said.endswith("type --device cpu")


def test_numbers_that_a_device_cannot_compute_with_are_named_with_those_that_it_can(
    model: LocalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = refused(
        replace(model, spec=replace(model.spec, dtype="float16")),
        monkeypatch,
        lambda spec: None if spec.dtype == "float32" else TypeError("no such dtype"),  # type: ignore[attr-defined]
    )
    assert "(TypeError: no such dtype): type --dtype float32" in said


def test_a_quantization_that_a_card_cannot_do_is_named_with_what_to_type(
    model: LocalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = describe(model.manifest, "float32", "nf4", name="tiny")
    said = refused(
        replace(model, spec=spec),
        monkeypatch,
        lambda spec: None if spec.quantization == "none" else NotImplementedError("nf4 needs CUDA"),  # type: ignore[attr-defined]
    )
    assert said.startswith(
        "--device cpu cannot compute tiny in nf4 in float32 (NotImplementedError: nf4 needs CUDA)"
    )
    assert said.endswith("type --quantization none, or --device cpu")


@pytest.mark.full
def test_a_card_too_small_for_one_layer_is_told_what_it_has(
    model: LocalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_step, "free_memory_bytes", lambda _: 2_000_000)
    said = refused(model, monkeypatch, lambda _: torch.OutOfMemoryError("CUDA out of memory"))
    assert "one layer of tiny takes" in said
    assert (
        "2.0 MB of its memory are free: choose a smaller model, --quantization nf4, or --device cpu" in said
    )
