"""Products are right wherever in memory their operands begin: mapped files begin where their headers end."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from support.models.circuit_runs import greedy, spec_for
from support.models.stored_models import write_model
from support.models.tiny_models import LAYERS
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from molink.peer.models.model import LocalModel
from molink.shards.batching.engine import Engine
from molink.shards.checkpoint.store import describe, read_manifest
from molink.shards.matrices import packed_layers
from molink.shards.matrices.linear import ways_for
from molink.shards.matrices.packed_layers import write_aligned
from molink.shards.matrices.products import ALIGNED_BYTES, Scratch, aligned
from molink.shards.matrices.quantized_matrices import Int8Matrices, Nf4Matrices, QuantizedMatrices
from molink.shards.native.compiling import compiled_library
from molink.shards.native.few_rows import FewRows
from molink.shards.spec import Span
from molink.shards.store.blobs import BlobStore

OUT, COLUMNS = 64, 128
ROWS = (1, 4, 5, 16, 128)
OFFSETS = range(ALIGNED_BYTES)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LEGACY_PADDING = 8
"""safetensors' writer ends headers at multiples of so many bytes."""


def displaced(tensor: Tensor, offset: int) -> Tensor:
    """A copy that begins `offset` bytes behind a multiple of ALIGNED_BYTES, as far as its numbers can."""
    offset -= offset % tensor.itemsize
    room = torch.empty(tensor.nbytes + 2 * ALIGNED_BYTES, dtype=torch.uint8)
    start = -room.data_ptr() % ALIGNED_BYTES + offset
    copy = room[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def moved(matrices: QuantizedMatrices, offset: int) -> QuantizedMatrices:
    weight, scales = displaced(matrices.weight.data, offset), displaced(matrices.scales.data, offset)
    return type(matrices)(weight, scales, matrices.shape, matrices.dtype)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [Int8Matrices, Nf4Matrices])
def test_quantized_products_are_equal_at_every_offset(
    kind: type[Int8Matrices] | type[Nf4Matrices], dtype: torch.dtype, rows: int
) -> None:
    matrices, inputs = kind.of(drawn(1, OUT, COLUMNS).to(dtype)), drawn(rows, rows, COLUMNS).to(dtype)
    ways: list[Callable[[QuantizedMatrices, Tensor], Tensor]] = [
        lambda matrices, inputs, way=way: way(matrices, ..., inputs) for way in matrices.ways_here()
    ]
    ways.append(lambda matrices, inputs: matrices.multiply(inputs, None))
    if matrices.has_kernel:
        ways.append(lambda matrices, inputs: matrices.multiply_form(matrices.kernel_form(...), inputs))
    with torch.inference_mode():
        expected = [way(matrices, inputs) for way in ways]
        for offset in OFFSETS:
            elsewhere, rows_there = moved(matrices, offset), displaced(inputs, offset)
            for way, product in zip(ways, expected, strict=True):
                torch.testing.assert_close(way(elsewhere, rows_there), product)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_products_are_equal_at_every_offset(dtype: torch.dtype, rows: int) -> None:
    weight, inputs = drawn(2, OUT, COLUMNS).to(dtype), drawn(rows, rows, COLUMNS).to(dtype)
    ways = ways_for(dtype, Scratch())
    with torch.inference_mode():
        expected = [way(inputs, weight, None) for way in ways]
        for offset in OFFSETS:
            weight_there, rows_there = displaced(weight, offset), displaced(inputs, offset)
            for way, product in zip(ways, expected, strict=True):
                found = way(rows_there, weight_there, None)
                torch.testing.assert_close(found, product, rtol=2**-6, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_rows_are_equal_at_every_offset(dtype: torch.dtype, tmp_path: Path) -> None:
    library = compiled_library(tmp_path)
    if library is None:  # a system on which none is compiled
        assert FewRows().rows_of(torch.zeros(OUT, COLUMNS, dtype=dtype)) is None
        return
    few_rows, weight = FewRows(library), drawn(3, OUT, COLUMNS).to(dtype)
    kept = few_rows.rows_of(weight)
    assert kept is not None
    for count in range(1, kept.most_rows + 1):
        inputs = drawn(count, count, COLUMNS).to(dtype)
        expected = kept.product(inputs)
        for offset in OFFSETS:
            there = displaced(weight, offset)
            matrix = few_rows.rows_of(there)
            assert matrix is not None
            assert torch.equal(matrix.product(displaced(inputs, offset)), expected)


class Addresses(TorchDispatchMode):
    """Notes how operands of one operation are aligned."""

    def __init__(self, operation: str) -> None:
        super().__init__()
        self.operation = operation
        self.found: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - torch's own signature
        if self.operation in str(func):
            self.found += [one.data_ptr() % ALIGNED_BYTES for one in args if isinstance(one, Tensor)]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchs_product_with_bytes_gets_aligned_operands_only(dtype: torch.dtype) -> None:
    """Elsewhere it ends the process on processors with AVX-512, and on these alone."""
    matrices, inputs = Int8Matrices.of(drawn(4, OUT, COLUMNS).to(dtype)), drawn(5, 2, COLUMNS).to(dtype)
    with Addresses("_weight_int8pack_mm") as addresses:
        for offset in OFFSETS:
            moved(matrices, offset).multiply(displaced(inputs, offset), None)
    assert len(addresses.found) == 3 * len(OFFSETS)
    assert set(addresses.found) == {0}


def test_only_what_is_not_aligned_is_copied() -> None:
    tensor = displaced(drawn(6, OUT), 0)
    assert aligned(tensor) is tensor
    for offset in range(tensor.itemsize, ALIGNED_BYTES, tensor.itemsize):
        copy = aligned(displaced(tensor, offset))
        assert copy.data_ptr() % ALIGNED_BYTES == 0
        assert torch.equal(copy, tensor)


@pytest.mark.parametrize("name_length", range(1, 12))
def test_tensors_of_a_written_file_are_aligned(name_length: int, tmp_path: Path) -> None:
    """Behind them those that end between two multiples, of which nothing can be aligned."""
    tensors = {
        "odd": torch.arange(3, dtype=torch.uint8),
        "lone": torch.tensor(1.5),
        "n" * name_length: drawn(7, 16),
        "weight": torch.arange(128, dtype=torch.int8).view(2, 64),
        "halves": drawn(8, 4, 32).bfloat16(),
        "none": torch.empty(0, 4),
    }
    path = tmp_path / "layer"
    write_aligned(path, tensors, {"said": "so"})
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"said": "so"}
        assert set(file.keys()) == set(tensors)
        found = {name: file.get_tensor(name) for name in tensors}
        for name, tensor in tensors.items():
            assert torch.equal(found[name], tensor)
            assert tensor.nbytes % ALIGNED_BYTES or found[name].data_ptr() % ALIGNED_BYTES == 0
    write_aligned(tmp_path / "again", dict(reversed(tensors.items())), {"said": "so"})
    assert (tmp_path / "again").read_bytes() == path.read_bytes()


def test_tensors_with_memory_in_common_are_not_written(tmp_path: Path) -> None:
    whole = drawn(9, 64)
    with pytest.raises(ValueError, match="memory in common"):
        write_aligned(tmp_path / "layer", {"whole": whole, "part": whole[:16]}, {})
    write_aligned(tmp_path / "layer", {"first": whole[:16], "rest": whole[16:]}, {})


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BlobStore]:
    with BlobStore(tmp_path / "store", 2**30) as opened:
        yield opened


@pytest.mark.parametrize("residue", range(0, ALIGNED_BYTES, LEGACY_PADDING))
def test_packed_files_of_earlier_versions_are_read_aligned(
    residue: int, tmp_path: Path, store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With bfloat16, int8 and four rows, what lay elsewhere ended the process on AVX-512."""
    folder = write_model("llama", tmp_path / "llama")
    manifest = read_manifest(folder)
    model = LocalModel(folder, manifest, describe(manifest, "bfloat16", "int8"), store=store)
    starts: list[int] = []

    def write_as_before(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        for spaces in range(0, ALIGNED_BYTES, LEGACY_PADDING):
            save_file(tensors, path, {"matrices": metadata["matrices"] + " " * spaces})
            start = 8 + int.from_bytes(path.read_bytes()[:8], "little")
            if start % ALIGNED_BYTES == residue:
                break
        starts.append(start)

    with monkeypatch.context() as patched:
        patched.setattr(packed_layers, "write_aligned", write_as_before)
        made = model.load(Span(0, LAYERS), "cpu")
    assert {start % ALIGNED_BYTES for start in starts} == {residue}
    loaded = model.load(Span(0, LAYERS), "cpu")
    assert len(starts) == LAYERS, "it was not made anew"
    matrices = [module for module in loaded.model.modules() if isinstance(module, QuantizedMatrices)]
    layers = [tensor for matrix in matrices for tensor in (matrix.weight, matrix.scales)]
    assert layers
    assert {tensor.data_ptr() % ALIGNED_BYTES for tensor in layers} == {0}
    prompt, tokens = (5, 9, 200, 31), []
    for stage in (made, loaded):
        engine = Engine(spec_for(stage, "bfloat16"), "cpu")
        engine.attach(stage)
        tokens.append(greedy([(engine, Span(0, LAYERS))], prompt, 6))
    assert tokens[0] == tokens[1]
