"""What an earlier load found out is not found out again, as long as nobody writes to the files."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.models.circuit_runs import greedy, spec_for
from support.models.stored_models import alter_a_weight, copy_of
from support.models.tiny_models import LAYERS

from molink.shards.batching.engine import Engine
from molink.shards.checkpoint import verification
from molink.shards.checkpoint.store import Manifest, read_manifest
from molink.shards.errors import WeightsError
from molink.shards.loading import self_check as checking
from molink.shards.loading import stage_builder
from molink.shards.loading.lazy_tensors import LoadCounter
from molink.shards.loading.loader import LoadCache, StageSettings, load_stage
from molink.shards.model.stage import Stage
from molink.shards.spec import Span

PROMPT = (5, 9, 200, 31, 7)
WHOLE = Span(0, LAYERS)
TinyModel = Callable[[str], Path]


@pytest.fixture
def folder(tiny_model: TinyModel, tmp_path: Path) -> Path:
    return copy_of(tiny_model("llama"), tmp_path / "llama")


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was hashed, looked through or tried."""
    done: list[str] = []
    entry, inspect, check = verification._entry, LoadCounter.inspect, checking._check

    def hashing(name: str, *rest: object) -> object:
        done.append(f"hash {name}")
        return entry(name, *rest)

    def inspecting(self: LoadCounter, name: str, tensor: torch.Tensor) -> None:
        done.append(f"inspect {name}")
        inspect(self, name, tensor)

    tried = stage_builder._tried

    def stepping(*arguments: object) -> object:
        done.append("step")
        return tried(*arguments)

    monkeypatch.setattr(stage_builder, "_tried", stepping)

    def trying(flags: object) -> checking.SelfCheckResult:
        done.append("check")
        return check(flags)

    monkeypatch.setattr(verification, "_entry", hashing)
    monkeypatch.setattr(LoadCounter, "inspect", inspecting)
    monkeypatch.setattr(checking, "_check", trying)
    return done


def load(
    folder: Path, digests: Path, manifest: Manifest, span: Span = WHOLE, dtype: str = "float32"
) -> Stage:
    return load_stage(folder, span, StageSettings(dtype), manifest=manifest, cache=LoadCache(digests=digests))


def tokens_of(stage: Stage) -> list[int]:
    engine = Engine(spec_for(stage, "float32"), "cpu")
    engine.attach(stage)
    return greedy([(engine, WHOLE)], PROMPT, 6)


def test_a_later_load_hashes_inspects_and_checks_nothing_and_computes_the_same(
    folder: Path, tmp_path: Path, work: list[str]
) -> None:
    digests = tmp_path / "digests"
    manifest = read_manifest(folder, digests)
    first = load(folder, digests, manifest)
    assert {"check", "step"} <= set(work)
    assert any(one.startswith("inspect ") for one in work)
    assert not any(one.startswith("hash ") for one in work)  # the manifest was read just before
    work.clear()
    later = load(folder, digests, manifest)
    assert work == []
    assert (
        tokens_of(later) == tokens_of(first) == tokens_of(load_stage(folder, WHOLE, StageSettings("float32")))
    )


def test_on_processors_weights_that_stay_as_they_are_take_no_memory_of_their_own(
    folder: Path, tmp_path: Path
) -> None:
    digests = tmp_path / "digests"
    stage = load(folder, digests, read_manifest(folder, digests))
    size = (folder / "model.safetensors").stat().st_size
    assert {parameter.untyped_storage().nbytes() for parameter in stage.parameters()} == {size}
    converted = load(folder, digests, read_manifest(folder, digests), dtype="bfloat16")
    assert all(parameter.untyped_storage().nbytes() < size for parameter in converted.parameters())


def test_a_file_that_was_written_to_is_hashed_again_and_refused(folder: Path, tmp_path: Path) -> None:
    digests = tmp_path / "digests"
    manifest = read_manifest(folder, digests)
    load(folder, digests, manifest)
    alter_a_weight(folder, "model.layers.3.mlp.up_proj.weight")
    with pytest.raises(WeightsError, match="layer 3"):
        load(folder, digests, manifest)


def test_without_digests_nothing_is_believed(folder: Path, tmp_path: Path, work: list[str]) -> None:
    manifest = read_manifest(folder)
    load(folder, tmp_path / "empty", manifest, Span(1, 3))
    assert sum(one.startswith("hash ") for one in work) == 2 * 9


def test_what_is_not_a_number_is_refused_at_every_load(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    digests = tmp_path / "digests"
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = torch.nan
    save_file(tensors, path, metadata={"format": "pt"})
    manifest = read_manifest(folder, digests)
    for _ in range(2):
        with pytest.raises(WeightsError, match="not a number"):
            load(folder, digests, manifest)


@pytest.mark.parametrize("content", [b"", b"[]", b'{"batching": "so", "reason": ""}', b'{"batching": 1}'])
def test_a_damaged_note_of_a_check_is_made_anew(
    content: bytes, folder: Path, tmp_path: Path, work: list[str]
) -> None:
    digests = tmp_path / "digests"
    manifest = read_manifest(folder, digests)
    load(folder, digests, manifest, Span(1, 2))
    (note,) = digests.glob("self-check-*")
    expected = note.read_bytes()
    note.write_bytes(content)
    work.clear()
    load(folder, digests, manifest, Span(1, 2))
    assert "check" in work
    assert note.read_bytes() == expected


def test_other_layers_weights_or_numbers_are_tried_anew(
    folder: Path, tmp_path: Path, work: list[str]
) -> None:
    digests = tmp_path / "digests"
    load(folder, digests, read_manifest(folder, digests))
    work.clear()
    load(folder, digests, read_manifest(folder, digests), Span(1, 3))
    load(folder, digests, read_manifest(folder, digests), dtype="bfloat16")
    load_stage(
        folder,
        WHOLE,
        StageSettings("float32", exact=True),
        manifest=read_manifest(folder),
        cache=LoadCache(digests=digests),
    )
    alter_a_weight(folder, "model.layers.3.mlp.up_proj.weight")
    load(folder, digests, read_manifest(folder, digests))
    assert work.count("step") == 4


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"0": {"dtype": "nn"}}', b'{"0": 1}'])
def test_a_damaged_note_of_a_trial_is_made_anew(
    content: bytes, folder: Path, tmp_path: Path, work: list[str]
) -> None:
    digests = tmp_path / "digests"
    manifest = read_manifest(folder, digests)
    layouts = load(folder, digests, manifest, Span(1, 2)).layouts
    (note,) = digests.glob("trial-*")
    expected = note.read_bytes()
    note.write_bytes(content)
    work.clear()
    assert load(folder, digests, manifest, Span(1, 2)).layouts == layouts
    assert "step" in work
    assert note.read_bytes() == expected
