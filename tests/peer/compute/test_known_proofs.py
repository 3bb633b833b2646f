"""A proof is remembered only if all worked, and only as long as all that it depends on is as it was."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from molink.peer.compute import known_proofs
from molink.peer.compute.first_step import Proof
from molink.peer.compute.known_proofs import known_or_proven
from molink.peer.device.graphics_cards import Card
from molink.peer.models.model import LocalModel
from molink.shards.batching.ways import DecodingWay
from molink.shards.checkpoint.catalog import resolve
from molink.shards.checkpoint.store import describe, read_manifest

CARD = Card("NVIDIA", "NVIDIA GeForce RTX 4090", (8, 9), "570.86", (12, 8))
WORKS = Proof(DecodingWay.RECORDED, None, 8_519_680)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> LocalModel:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: CARD.name)
    folder = resolve("molink/tiny-shakespeare")
    manifest = read_manifest(folder)
    return LocalModel(folder, manifest, describe(manifest, "bfloat16"))


class Proving:
    def __init__(self, proof: Proof = WORKS) -> None:
        self.proof = proof
        self.times = 0

    def __call__(self, _: LocalModel, __: str) -> Proof:
        self.times += 1
        return self.proof


def proven(model: LocalModel, memory: Path, proving: Proving, card: Card = CARD) -> Proof:
    return known_or_proven(model, "cuda:0", memory, lambda: [card], proving)


def test_a_later_start_proves_nothing(model: LocalModel, tmp_path: Path) -> None:
    proving = Proving()
    assert [proven(model, tmp_path / "proofs.json", proving) for _ in range(3)] == [WORKS] * 3
    assert proving.times == 1


def test_another_model_card_driver_library_or_edited_module_is_proven_again(
    model: LocalModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, proving = tmp_path / "proofs.json", Proving()
    proven(model, memory, proving)
    proven(replace(model, spec=replace(model.spec, model_hash="0" * 64)), memory, proving)
    proven(model, memory, proving, replace(CARD, name="NVIDIA GeForce RTX 4080"))
    proven(model, memory, proving, replace(CARD, driver="575.51"))
    with monkeypatch.context() as patched:
        patched.setattr(known_proofs, "_version", lambda library: f"{library} 9")
        proven(model, memory, proving)
    with monkeypatch.context() as patched:
        patched.setattr(known_proofs, "own_files", lambda: [("engine.py", 1, 2)])
        proven(model, memory, proving)
    assert proving.times == 6
    proven(model, memory, proving)
    assert proving.times == 6, "what was proven first is remembered still"


def test_a_proof_depends_on_all_modules_that_compute() -> None:
    named = {name for name, _, _ in known_proofs.own_files()}
    assert named >= {
        "spec.py",
        "engine.py",
        "decode.py",
        "triton_layers.py",
        "quantized_matrices.py",
        "known_proofs.py",
    }


def test_what_did_not_work_is_tried_again_at_each_start(model: LocalModel, tmp_path: Path) -> None:
    proving = Proving(Proof(DecodingWay.TORCH, "Note: cuda:0 computes with torch's attention, because ..."))
    for _ in range(2):
        assert proven(model, tmp_path / "proofs.json", proving) == proving.proof
    assert proving.times == 2


@pytest.mark.parametrize("content", [7, {}, {"way": "WARP"}, {"way": "RECORDED", "library_bytes": "8"}])
def test_what_is_remembered_wrongly_is_proven_again(
    content: object, model: LocalModel, tmp_path: Path
) -> None:
    memory, proving = tmp_path / "proofs.json", Proving()
    proven(model, memory, proving)
    (key,) = json.loads(memory.read_text())
    memory.write_text(json.dumps({key: content}))
    assert proven(model, memory, proving) == WORKS
    assert proving.times == 2
