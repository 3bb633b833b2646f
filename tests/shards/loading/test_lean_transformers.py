"""A process that loads transformers without what it never uses computes the same, and has the rest when it is asked."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.deadline import DEADLINE_S
from support.models.circuit_runs import greedy, spec_for
from support.models.tiny_models import LAYERS

from molink.shards.batching.engine import Engine
from molink.shards.checkpoint.store import read_manifest
from molink.shards.errors import WeightsError
from molink.shards.loading import stage_builder
from molink.shards.loading.loader import LoadCache, StageSettings, load_stage
from molink.shards.spec import Span

TinyModel = Callable[[str], Path]
PROMPT = (5, 9, 200, 31, 7)
HEAVY = (
    "sympy",
    "accelerate",
    "torch._dynamo.utils",
    "torch._prims",
    "torch.distributed.tensor",
    "torch.export.decomp_utils",
    "torch.utils._debug_mode",
    "torch._inductor",
)
PROGRAM = f"""
import sys
from pathlib import Path
from molink.shards.loading.lean_transformers import LazyPackage, load_lean_transformers
load_lean_transformers()
sys.path.insert(0, sys.argv[3])
from support.models.circuit_runs import greedy, spec_for
from molink.shards.batching.engine import Engine
from molink.shards.loading.loader import LoadCache, StageSettings, load_stage
from molink.shards.spec import Span
from molink.shards.checkpoint.store import read_manifest
folder, digests, whole = Path(sys.argv[1]), Path(sys.argv[2]), Span(0, {LAYERS})
manifest, cache = read_manifest(folder, digests), LoadCache(digests)
stage = load_stage(folder, whole, StageSettings("float32"), manifest=manifest, cache=cache)
engine = Engine(spec_for(stage, "float32"), "cpu")
engine.attach(stage)
print(*greedy([(engine, whole)], {PROMPT}, 6))
print(*sorted({set(HEAVY)}.intersection(sys.modules)))
print(isinstance(sys.modules["transformers"], LazyPackage))
"""
WHOLE = """
import sys
from molink.shards.loading.lean_transformers import bring_in_meta_kernels, load_lean_transformers
load_lean_transformers()
import torch
assert bring_in_meta_kernels()
assert not bring_in_meta_kernels()
from torch import _meta_registrations
assert _meta_registrations.meta_index_Tensor
import transformers
assert transformers.LlamaConfig().model_type == "llama"
assert transformers.models.llama.LlamaModel is transformers.LlamaModel
from transformers.core_model_loading import WeightRenaming
from transformers.processing_utils import transformers_module
assert transformers_module.LlamaConfig is transformers.LlamaConfig
assert WeightRenaming("first", "second").rename_source_key("a.first")[0] == "a.second"
"""
COMPILER = """
from molink.shards.loading.lean_transformers import load_lean_transformers
load_lean_transformers()
import torch
import torch._dynamo
assert torch._dynamo.config.cache_size_limit
torch.Generator().manual_seed(0)
import torch._prims
torch.Generator().manual_seed(0)
assert torch.export.Dim("tokens").__name__ == "tokens"
one = torch.ones(1)
assert torch.cond(one.sum() > 0, torch.neg, torch.abs, (one,)).item() == -1
"""


def run(program: str, *arguments: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_later_start_computes_the_same_without_the_compiler_sympy_or_accelerate(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    folder, digests, whole = tiny_model("llama"), tmp_path / "digests", Span(0, LAYERS)
    stage = load_stage(
        folder,
        whole,
        StageSettings("float32"),
        manifest=read_manifest(folder, digests),
        cache=LoadCache(digests=digests),
    )
    engine = Engine(spec_for(stage, "float32"), "cpu")
    engine.attach(stage)
    expected = greedy([(engine, whole)], PROMPT, 6)
    tokens, heavy, is_lazy = run(PROGRAM, str(folder), str(digests), str(Path(__file__).parents[2]))
    assert tokens.split() == [str(one) for one in expected]
    assert heavy == ""
    assert is_lazy == "True", "the list of all architectures' files was made"


@pytest.mark.full
@pytest.mark.parametrize(
    "program", [WHOLE, pytest.param(COMPILER, marks=pytest.mark.full)], ids=["kinds", "compiler"]
)
def test_what_was_left_out_is_there_for_whoever_uses_it(program: str) -> None:
    assert run(program) == []


def test_where_a_meta_kernel_is_missing_those_that_were_left_out_are_brought_in(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled, tried = stage_builder._filled, list[bool]()

    def missing_once(*arguments: object) -> object:
        tried.append(True)
        if len(tried) == 1:
            raise NotImplementedError("Could not run 'aten::arange' with arguments from the 'Meta' backend")
        return filled(*arguments)

    folder = tiny_model("llama")
    load_stage(folder, Span(0, 1), StageSettings("float32"))  # its kind is checked
    monkeypatch.setattr(stage_builder, "_filled", missing_once)
    monkeypatch.setattr(stage_builder, "bring_in_meta_kernels", lambda: len(tried) == 1)
    assert load_stage(folder, Span(0, 1), StageSettings("float32")).span == Span(0, 1)
    tried.clear()
    monkeypatch.setattr(stage_builder, "bring_in_meta_kernels", lambda: False)
    with pytest.raises(WeightsError, match="Meta"):
        load_stage(folder, Span(0, 1), StageSettings("float32"))
