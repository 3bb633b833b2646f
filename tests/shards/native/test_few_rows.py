"""Decode steps by the compiled library give what torch's operations give, and only where they do."""

import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from support.models.circuit_runs import engine_with
from support.pairwise import usually
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from molink.shards.batching.engine import Engine, Rows
from molink.shards.kernels import fused_layers
from molink.shards.kernels.few_rows_layers import FewRowsLayer
from molink.shards.kv.prefix import block_names
from molink.shards.matrices import products
from molink.shards.matrices.int8_products import BytePacking, byte_product, memory_of
from molink.shards.matrices.linear import packed_for_onednn
from molink.shards.matrices.nf4_products import kernel_takes
from molink.shards.matrices.quantized_matrices import Int8Matrices, Nf4Matrices
from molink.shards.native import few_rows
from molink.shards.native.compiling import (
    COMPILER,
    compilation,
    compiled_library,
    kept_library,
    user_folder,
)
from molink.shards.native.few_rows import FewRows, Form
from molink.shards.spec import KV_BLOCK_TOKENS, Span

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64",
    reason="it is compiled on Linux for x86-64 only",
)

LAYERS = (0, 2)
SIZES = {
    "vocab_size": 384, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "eos_token_id": 1, "bos_token_id": 0,
}  # fmt: skip
CONFIGS = {
    "llama": lambda: LlamaConfig(**SIZES),
    "tied": lambda: LlamaConfig(tie_word_embeddings=True, **SIZES),
    "windows": lambda: MistralConfig(sliding_window=9, **SIZES),
    "biases": lambda: Qwen2Config(**SIZES),
    "norms of heads": lambda: Qwen3Config(**SIZES),
}
PROMPT = tuple(range(5, 18))
STEPS = 90
"""Beyond a tile of keys."""


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Folders of models whose matrices are few; they count as many."""
    monkeypatch.setattr(few_rows, "LEAST_BYTES", 0)
    monkeypatch.setattr(products, "LEAST_WEIGHTS", 0)

    def make(name: str) -> Path:
        torch.manual_seed(3)
        whole = AutoModelForCausalLM.from_config(CONFIGS[name]())
        for parameter in whole.parameters():
            parameter.data.normal_(0, 0.06).add_(0.9 if parameter.ndim == 1 else 0)
        whole.save_pretrained(tmp_path / "model")
        return tmp_path / "model"

    return make


@pytest.fixture
def nothing_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Has what is loaded from now on find no library, and not wait for one."""

    def forget() -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setattr(few_rows, "LEAST_BYTES", sys.maxsize)

    return forget


@pytest.fixture
def in_torch(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens went through each layer that was computed by torch's operations."""
    seen: list[int] = []
    own = fused_layers._rotated

    def rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        seen.append(heads.shape[1])
        return own(heads, cos, sin)

    monkeypatch.setattr(fused_layers, "_rotated", rotated)
    return seen


@pytest.fixture
def compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file with a line for each call of the compiler, which has made its results before: the real one takes
    seconds."""
    library = compiled_library(user_folder())
    assert library is not None
    made = library._name  # where ctypes has it from
    calls, programs = tmp_path / "calls", tmp_path / "programs"
    programs.mkdir()
    script = f'#!/bin/sh\nfor result; do :; done\necho "$result" >> "{calls}"\ncp "{made}" "$result"\n'
    (programs / COMPILER).write_text(script)
    (programs / COMPILER).chmod(0o700)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    compiled_library.cache_clear()
    yield calls
    compiled_library.cache_clear()


def kept_in(folder: Path) -> list[Path]:
    """The libraries, newest last."""
    return sorted(folder.glob("*.so"), key=lambda path: path.stat().st_mtime_ns)


def library() -> FewRows:
    found = compiled_library(user_folder())
    assert found is not None
    return FewRows(found)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def logits_of(
    engine: Engine, steps: int = STEPS, before: Callable[[int], object] = lambda _: None
) -> list[Tensor]:
    """Of a prompt, and of so many steps of one token each, the same ones whatever came before. `before` is told of each
    of these."""
    span, found = Span(*LAYERS), []
    cache = engine.new_cache(span, len(PROMPT) + steps)
    parts = [PROMPT, *((7 * at % 300,) for at in range(steps))]
    for at, part in enumerate(parts, start=-1):
        before(at)
        found.append(engine.step(span, [Rows(cache, len(part), part, logit_rows=1)], None)[0])
    return found


def logits_together(engine: Engine, lengths: Sequence[int], steps: int) -> list[list[Tensor]]:
    """Of so many steps of one token for each of several sessions, behind prompts of these lengths. The first two share
    the blocks of their beginning."""
    span, found = Span(*LAYERS), []
    shared = tuple(range(5, 5 + KV_BLOCK_TOKENS))
    caches = []
    for at, length in enumerate(lengths):
        own = tuple((11 * at + 3 * token) % 300 for token in range(length))
        prompt = shared + own if at < 2 else own
        names = block_names(prompt, b"model")
        cache = engine.new_cache(span, len(prompt) + steps, names, reserve=at % 2 == 0)
        rest = prompt[cache.length :]
        engine.step(span, [Rows(cache, len(rest), rest, logit_rows=0)], None)
        cache.name_blocks(names)
        caches.append(cache)
    for step in range(steps):
        rows = [Rows(cache, 1, ((7 * step + at) % 300,), logit_rows=1) for at, cache in enumerate(caches)]
        found.append(list(engine.step(span, rows, None)))
    return found


def logits_of_guesses(engine: Engine, counts: Sequence[int], steps: int) -> Tensor:
    """Of so many steps of so many tokens of each session, of which all but the first are cut off with the next step but
    one token that stays."""
    span, found = Span(*LAYERS), []
    caches = [engine.new_cache(span, 40 + 60 * at + 3 * steps + 16) for at in range(len(counts))]
    for at, cache in enumerate(caches):
        prompt = tuple((11 * at + 3 * token) % 300 for token in range(40 + 60 * at))
        engine.step(span, [Rows(cache, len(prompt), prompt, logit_rows=0)], None)
    for step in range(steps):
        rows = []
        for at, (cache, count) in enumerate(zip(caches, counts, strict=True)):
            engine.begin_behind(cache, min(cache.length, 40 + 60 * at + 2 * step))
            ids = tuple((7 * (step + place) + at) % 300 for place in range(count))
            rows.append(Rows(cache, count, ids, logit_rows=count))
        found.append(engine.step(span, rows, None))
    return torch.cat(found)


def in_panels(weight: Tensor) -> tuple[Form, Tensor]:
    """The form of such weights in panels, and the weights as they lie in them."""
    rows, columns = weight.shape
    if weight.dtype is torch.float32:
        return Form.FLOAT_PANELS, weight.view(rows // 64, 64, columns).transpose(1, 2).contiguous()
    pairs = weight.view(rows // 64, 64, columns // 2, 2)
    return Form.HALF_PANELS, pairs.transpose(1, 2).contiguous()


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("shape", [(64, 64), (192, 448), (512, 2048), (2048, 192)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packed", [True, False])
def test_a_product_of_few_rows_is_that_of_torch_up_to_rounding(
    shape: tuple[int, int], dtype: torch.dtype, packed: bool
) -> None:
    weight, row = drawn(*shape).to(dtype), drawn(1, 1, shape[1], seed=1).to(dtype)
    owner, (form, panels) = library(), in_panels(weight)
    matrix = owner.matrix(form, panels.data_ptr(), shape) if packed else owner.rows_of(weight)
    assert matrix is not None
    assert matrix.takes(row)
    found = matrix.product(row)
    assert found.shape == (1, 1, shape[0])
    assert error(found, row.double() @ weight.double().t()) < (1e-6 if dtype is torch.float32 else 3e-3)


def test_products_with_bytes_are_bit_for_bit_those_of_onednn() -> None:
    packing, shape = BytePacking(), (192, 448)
    owner = library()
    quantized = Int8Matrices.of(drawn(*shape).bfloat16())
    if not packing.takes(*shape, torch.bfloat16):
        pytest.skip("the processor has no exact product of bytes")
    packed = packing.pack(quantized.weight.data)
    matrix = owner.matrix(Form.BYTE_PANELS, memory_of(packed).data_ptr(), shape, quantized.scales.data)
    if matrix is None:
        pytest.skip("the processor has no wide product of bytes")
    rows = drawn(16, shape[1], seed=2).bfloat16()
    rows[3] *= 1000
    together = byte_product(rows, packed, quantized.scales.data)
    for row, expected in zip(rows, together, strict=True):
        assert torch.equal(matrix.product(row[None])[0], expected)
    for count in range(1, matrix.most_rows + 1):
        assert torch.equal(matrix.product(rows[:count]), together[:count])


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_product_with_nf4_is_that_of_the_unpacked_matrix_up_to_rounding(count: int) -> None:
    shape = (192, 448)
    if not kernel_takes(*shape, torch.bfloat16):
        pytest.skip("the processor has no product with nf4")
    quantized = Nf4Matrices.of(drawn(*shape).bfloat16())
    weight, scales = quantized.kernel_form(...)
    matrix = library().matrix(Form.NF4_PANELS, weight.data_ptr(), shape, scales)
    assert matrix is not None
    assert matrix.most_rows == 4
    rows, plain = drawn(count, shape[1], seed=1).bfloat16(), quantized.unpacked().float()
    assert error(matrix.product(rows), rows.float() @ plain.t()) < 4e-3


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_gives_the_same_bits_in_any_company(dtype: torch.dtype, packed: bool) -> None:
    shape, owner = (192, 448), library()
    weight, rows = drawn(*shape).to(dtype), drawn(16, 448, seed=4).to(dtype)
    form, panels = in_panels(weight)
    matrix = owner.matrix(form, panels.data_ptr(), shape) if packed else owner.rows_of(weight)
    assert matrix is not None
    alone = torch.cat([matrix.product(row[None]) for row in rows])
    for count in range(1, matrix.most_rows + 1):
        assert torch.equal(matrix.product(rows[:count]), alone[:count])
    assert error(alone, rows.double() @ weight.double().t()) < (1e-6 if dtype is torch.float32 else 3e-3)


@pytest.mark.parametrize("shape", [(96, 64), (64, 100)])
def test_matrices_of_other_sizes_are_left_to_torch(shape: tuple[int, int]) -> None:
    assert library().rows_of(torch.zeros(shape)) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_onednn_packs_is_used_where_it_lies_in_panels_and_nowhere_else(dtype: torch.dtype) -> None:
    """It depends on the processor: without products of bfloat16 these lie as they are."""
    weight, owner = drawn(192, 448).to(dtype), library()
    form, panels = in_panels(weight)
    packed = packed_for_onednn(weight)
    if packed is None:
        return
    matrix = owner.matrix(form, memory_of(packed).data_ptr(), (192, 448))
    found = owner.alike(matrix, lambda row: products.packed_product(row, packed))
    assert (found is not None) == torch.equal(memory_of(packed).view(dtype), panels.flatten())


def test_a_matrix_that_lies_otherwise_than_expected_is_left_to_torch() -> None:
    """As another release of oneDNN might pack it."""
    weight, owner = drawn(128, 128), library()
    matrix = owner.matrix(Form.FLOAT_PANELS, weight.data_ptr(), (128, 128))
    assert owner.alike(matrix, lambda row: functional.linear(row, weight)) is None


@pytest.mark.parametrize("name", usually(["windows", "biases", "norms of heads"], CONFIGS))
def test_tokens_alone_go_through_layers_in_one_call_each_and_give_the_same_up_to_rounding(
    name: str, made: Callable[[str], Path], in_torch: list[int]
) -> None:
    """Windows, biases, norms of heads, tied heads; the first token is computed both ways."""
    folder = made(name)
    expected = logits_of(engine_with(folder, LAYERS))
    engine = engine_with(folder, LAYERS, exact=False)
    in_torch.clear()
    found = logits_of(engine)
    assert [tokens for tokens in in_torch if tokens == 1] == [1]
    for one, two in zip(expected, found, strict=True):
        torch.testing.assert_close(two, one, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize(
    ("name", "sessions"), [("llama", 2), ("windows", 3), ("norms of heads", 8), ("llama", 16)]
)
def test_tokens_of_several_sessions_go_through_layers_together_and_give_the_same_up_to_rounding(
    name: str, sessions: int, made: Callable[[str], Path], in_torch: list[int]
) -> None:
    """Of different lengths, with shared beginnings, and in several runs of blocks; the first step is computed both
    ways. A processor with few registers has one row at a time."""
    folder, lengths = made(name), [3 + 29 * (5 * at % 7) for at in range(sessions)]
    expected = logits_together(engine_with(folder, LAYERS), lengths, 12)
    engine = engine_with(folder, LAYERS, exact=False)
    in_torch.clear()
    found = logits_together(engine, lengths, 12)
    together = [tokens for tokens in in_torch if tokens == sessions]
    assert len(together) == (1 if library().most_rows > 1 else 12 * len(range(*LAYERS)))
    for one, two in zip(expected, found, strict=True):
        torch.testing.assert_close(torch.stack(two), torch.stack(one), atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize(
    ("name", "counts"), [("llama", (5,)), ("windows", (3, 1, 4)), ("norms of heads", (2, 4))]
)
def test_so_do_several_tokens_of_one_session_each_of_which_sees_those_before_it(
    name: str, counts: Sequence[int], made: Callable[[str], Path], in_torch: list[int]
) -> None:
    """As guesses are, of which some are cut off again."""
    folder = made(name)
    expected = logits_of_guesses(engine_with(folder, LAYERS), counts, 12)
    engine = engine_with(folder, LAYERS, exact=False)
    in_torch.clear()
    found = logits_of_guesses(engine, counts, 12)
    together = [tokens for tokens in in_torch if tokens == sum(counts)]
    assert len(together) == (1 if library().most_rows > 1 else 12 * len(range(*LAYERS)))
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("quantization", ["none", "int8", "nf4"])
def test_so_they_do_in_every_form_of_weights(
    quantization: str, made: Callable[[str], Path], in_torch: list[int], nothing_kept: Callable[[], None]
) -> None:
    folder = made("llama")
    engine = engine_with(folder, LAYERS, dtype="bfloat16", quantization=quantization, exact=False)
    in_torch.clear()
    found = logits_of(engine, 20)
    alone = len([tokens for tokens in in_torch if tokens == 1])
    nothing_kept()
    other = engine_with(folder, LAYERS, dtype="bfloat16", quantization=quantization, exact=False)
    in_torch.clear()
    expected = logits_of(other, 20)
    every = 20 * len(range(*LAYERS))
    assert len([tokens for tokens in in_torch if tokens == 1]) == every
    assert alone in (1, every)  # all where the form was not the fastest for these sizes
    if quantization == "none":
        assert alone == 1
    assert error(torch.stack(found), torch.stack(expected)) < 0.05


def test_a_layer_that_gives_something_else_keeps_to_torch(
    made: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made("llama")
    own, calls = FewRowsLayer._run, []

    def run(layer: FewRowsLayer, *inputs: Tensor) -> Tensor:
        calls.append(1)
        return own(layer, *inputs) * 1.01  # type: ignore[arg-type] # as it is called

    monkeypatch.setattr(FewRowsLayer, "_run", run)
    expected = logits_of(engine_with(folder, LAYERS), 5)
    found = logits_of(engine_with(folder, LAYERS, exact=False), 5)
    assert len(calls) == (
        2 if library().most_rows >= len(PROMPT) else 1
    )  # once with the prompt's rows, once with one
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), atol=2e-4, rtol=1e-3)


def test_exact_stages_and_small_ones_compile_nothing(
    made: Callable[[str], Path], nothing_kept: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made("llama")
    nothing_kept()
    monkeypatch.setattr(few_rows, "compiled_library", lambda _folder: pytest.fail("it was compiled"))
    assert not engine_with(folder, LAYERS).late_library.awaits_library
    assert engine_with(folder, LAYERS, exact=False).late_library.awaits_library


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_library_that_comes_between_two_steps_computes_the_next_one(
    dtype: str, made: Callable[[str], Path], in_torch: list[int], nothing_kept: Callable[[], None]
) -> None:
    """The same session goes on; its first step with the library is computed both ways."""
    folder, library = made("norms of heads"), compiled_library(user_folder())
    assert library is not None
    nothing_kept()
    expected = logits_of(engine_with(folder, LAYERS, dtype=dtype, exact=False), 40)
    engine = engine_with(folder, LAYERS, dtype=dtype, exact=False)
    in_torch.clear()
    found = logits_of(engine, 40, lambda at: engine.late_library.bind_library(library) if at == 20 else None)
    assert len([tokens for tokens in in_torch if tokens == 1]) == 20 * len(range(*LAYERS)) + 1
    assert not engine.late_library.awaits_library
    assert error(torch.stack(found), torch.stack(expected)) < (1e-4 if dtype == "float32" else 0.05)


@pytest.mark.usefixtures("compilers")
def test_a_library_is_kept_and_needs_no_compiler_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kept_library(tmp_path / "kept") is None
    assert compiled_library(tmp_path / "kept") is not None
    (kept,) = kept_in(tmp_path / "kept")
    compiled_library.cache_clear()
    monkeypatch.setenv("PATH", "")
    assert kept_library(tmp_path / "kept") is not None
    assert compiled_library(tmp_path / "kept") is not None
    assert {path.name for path in kept.parent.iterdir()} <= {kept.name, "lock"}


@pytest.mark.usefixtures("compilers")
def test_a_library_is_neither_read_nor_kept_where_others_may_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "kept"
    assert compiled_library(folder) is not None
    (kept,) = kept_in(folder)
    folder.chmod(0o770)
    kept.unlink()  # not written over: this process has it mapped
    kept.write_bytes(b"another's")
    compiled_library.cache_clear()
    assert compiled_library(folder) is not None
    assert kept.read_bytes() == b"another's"
    assert compilation(folder) is None
    compiled_library.cache_clear()
    monkeypatch.setenv("PATH", "")
    assert compiled_library(folder) is None


@pytest.mark.usefixtures("compilers")
def test_without_a_compiler_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert compiled_library(tmp_path / "kept") is None
    assert compilation(tmp_path / "kept") is None


@pytest.mark.usefixtures("compilers")
@pytest.mark.parametrize("end", [100, -1, -5000])
def test_a_kept_library_that_is_spoilt_is_made_anew(tmp_path: Path, end: int) -> None:
    whole, spoilt = tmp_path / "whole", tmp_path / "spoilt"
    compiled_library(whole)
    (kept,) = kept_in(whole)
    spoilt.mkdir(mode=0o700)
    again = spoilt / kept.name
    again.write_bytes(kept.read_bytes()[:end])
    assert compiled_library(spoilt) is not None
    assert again.stat().st_size == kept.stat().st_size


def test_of_threads_that_want_a_library_at_once_one_compiles(tmp_path: Path, compilers: Path) -> None:
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: compiled_library(tmp_path / "kept"), range(4)))
    assert None not in found
    assert len(compilers.read_text().splitlines()) == 2  # it compiles and links
    assert len(kept_in(tmp_path / "kept")) == 1


def test_what_a_process_left_that_was_ended_as_it_compiled_is_removed(
    tmp_path: Path, compilers: Path
) -> None:
    left = tmp_path / "kept" / "unfinished-xyz"
    left.mkdir(mode=0o700, parents=True)
    (left / "few_rows.o").write_bytes(b"half")
    (tmp_path / "kept").chmod(0o700)
    assert compiled_library(tmp_path / "kept") is not None
    assert not left.exists()
    assert compilers.exists()
