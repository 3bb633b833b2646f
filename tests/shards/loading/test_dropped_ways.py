"""A stage without some native ways computes by others, and what it computes stays the same up to rounding."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.circuit_runs import spec_for, start_run, step_runs
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from molink.shards.batching.engine import Engine
from molink.shards.loading.loader import StageSettings, load_stage
from molink.shards.loading.trial_jobs import COUNTS
from molink.shards.matrices import products, quantized_matrices
from molink.shards.matrices.products import Timings
from molink.shards.native.native_way import NativeWay, TrialJob
from molink.shards.spec import Span

TinyModel = Callable[[str], Path]
LAYERS = 6
WHOLE = Span(0, LAYERS)
HALVES = "torch.bfloat16"
FUSED = {"scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu"}


class Dropping:
    """A trial that drops these ways."""

    def __init__(self, *dropped: NativeWay) -> None:
        self.dropped = frozenset[str](dropped)
        self.jobs: list[TrialJob] = []
        self.chosen: set[str] = set()

    def try_ways(self, jobs: Sequence[TrialJob]) -> frozenset[str]:
        self.jobs += jobs
        return self.dropped

    def try_library(self) -> bool:
        return NativeWay.COMPILED not in self.dropped

    def chose(self, names: Collection[str]) -> None:
        self.chosen |= set(names)


class Calls(TorchDispatchMode):
    """Operations that were called, each with the dtype of its first operand."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[str, str]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - torch's own signature
        if args and isinstance(args[0], Tensor):
            self.found.add((str(func).split(".")[1], str(args[0].dtype)))
        return func(*args, **(kwargs or {}))


def computed(
    folder: Path, dtype: str, quantization: str, ways: Dropping
) -> tuple[Tensor, set[tuple[str, str]]]:
    """Logits after a prompt and two tokens, and what computed them."""
    with Calls() as loading:
        stage = load_stage(folder, WHOLE, StageSettings(dtype, quantization, ways=ways))
    engine = Engine(spec_for(stage, dtype), "cpu")
    engine.attach(stage)
    circuit = [(engine, WHOLE)]
    run = start_run(circuit, (5, 9, 200, 31), 3)
    with Calls() as calls:
        step_runs(circuit, [run])
    assert loading.found
    return run.logits[-1].double(), calls.found


@pytest.mark.parametrize(
    ("way", "dtype", "quantization", "operations"),
    [
        (NativeWay.ATTENTION, "float32", "none", FUSED),
        (NativeWay.ATTENTION, "bfloat16", "none", FUSED),
        (NativeWay.LINEAR, "bfloat16", "none", {"linear", "addmm", "mm"}),
        (NativeWay.LINEAR, "bfloat16", "int8", {"linear", "addmm", "mm", "_weight_int8pack_mm"}),
        (NativeWay.TORCH_BYTES, "bfloat16", "int8", {"_weight_int8pack_mm"}),
    ],
)
def test_a_stage_without_a_way_computes_by_another(
    way: NativeWay,
    dtype: str,
    quantization: str,
    operations: set[str],
    tiny_model: TinyModel,
) -> None:
    folder, trusted, without = tiny_model("llama"), Dropping(), Dropping(way)
    if way is NativeWay.LINEAR and quantization == "int8":  # the product with bytes is another one
        without = Dropping(way, NativeWay.TORCH_BYTES)
    expected, before = computed(folder, dtype, quantization, trusted)
    found, calls = computed(folder, dtype, quantization, without)
    assert float((found - expected).norm() / expected.norm()) < (1e-4 if dtype == "float32" else 0.1)
    kinds = {HALVES} if way is NativeWay.LINEAR else {"torch.float32", HALVES, "torch.uint8", "torch.int8"}
    assert {name for name, kind in before if name in operations and kind in kinds}
    assert not {name for name, kind in calls if name in operations and kind in kinds}
    assert way not in without.chosen
    assert way in {job.way for job in trusted.jobs}


def test_nf4_is_unpacked_without_bitsandbytes(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, way = tiny_model("llama"), NativeWay.BITSANDBYTES
    expected, _ = computed(folder, "float32", "nf4", Dropping())

    def unpack(*_: object) -> Tensor:
        raise AssertionError("bitsandbytes unpacks")

    monkeypatch.setattr(quantized_matrices, "unpack_into", unpack)
    with pytest.raises(AssertionError, match="bitsandbytes unpacks"):
        computed(folder, "float32", "nf4", Dropping())
    found, _ = computed(folder, "float32", "nf4", Dropping(way))
    assert float((found - expected).norm() / expected.norm()) < 1e-4


def test_large_matrices_are_packed_and_compiled_only_if_they_may_be(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "LEAST_WEIGHTS", 1)
    monkeypatch.setattr(products, "TIMED_ROWS", (1,))
    monkeypatch.setattr(Timings, "pays", lambda *_: True)
    folder = tiny_model("llama")
    packed = (NativeWay.ONEDNN_PACKED, NativeWay.ONEDNN_BYTES, NativeWay.COMPILED)
    for quantization in ("none", "int8"):
        trusted, without = Dropping(), Dropping(*packed)
        expected, _ = computed(folder, "bfloat16", quantization, trusted)
        found, calls = computed(folder, "bfloat16", quantization, without)
        assert float((found - expected).norm() / expected.norm()) < 0.1
        assert not without.chosen & set(packed)
        assert not {name for name, _ in calls} & {"qlinear_pointwise"}


@pytest.mark.parametrize("quantization", ["none", "int8", "nf4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_jobs_name_each_matrix_once_where_it_lies(
    dtype: str, quantization: str, tiny_model: TinyModel
) -> None:
    ways = Dropping()
    stage = load_stage(tiny_model("llama"), WHOLE, StageSettings(dtype, quantization, ways=ways))
    assert len(set(ways.jobs)) == len(ways.jobs)
    assert {job.threads for job in ways.jobs} == {torch.get_num_threads()}
    head = stage.model.get_output_embeddings().weight
    offsets = {
        (job.rows, job.columns): job.offset
        for job in ways.jobs
        if job.way == NativeWay.LINEAR and job.form == "none"
    }
    assert tuple(head.shape) in offsets
    assert {1, 4, 128} <= set(COUNTS)
    assert ways.chosen


def test_a_stage_of_exact_steps_packs_nothing(tiny_model: TinyModel) -> None:
    ways = Dropping()
    load_stage(tiny_model("llama"), WHOLE, StageSettings("bfloat16", "int8", exact=True, ways=ways))
    packed = {NativeWay.ONEDNN_PACKED, NativeWay.ONEDNN_BYTES, NativeWay.COMPILED}
    assert not {job.way for job in ways.jobs} & packed
