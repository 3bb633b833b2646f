"""The model that a peer joins with is the one that the swarm knows by that name."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from support.models.stored_models import alter_a_weight, copy_of, write_llama
from support.swarms.swarm_examples import facts_of, state_of

from molink.dht.identity.identity import Identity
from molink.dht.records.records import PeerView
from molink.peer.models.model import LocalModel, ModelRequest, open_model
from molink.shards.checkpoint.catalog import BUNDLED, resolve
from molink.shards.checkpoint.store import StoreError, describe
from molink.shards.errors import QuantizationUnavailable
from molink.shards.spec import Span


def opened(
    folder: Path, *views: PeerView, dtype: str = "auto", quantization: str | None = None
) -> LocalModel:
    told: list[str] = []
    asked = (ModelRequest(str(folder), dtype, quantization), views, folder.parent / "digests", told.append)
    return asyncio.run(open_model(*asked))


def serving(folder: Path, name: str, *, dtype: str = "float32", quantization: str = "none") -> PeerView:
    """A peer that serves what is in the folder now."""
    identity = Identity.generate()
    spec = describe(folder, dtype, quantization)
    model = replace(
        facts_of(identity).model,
        name=name,
        dtype=dtype,
        quantization=quantization,
        content_hash=spec.content_hash,
        model_hash=spec.model_hash,
        layers=spec.layers,
    )
    return PeerView(replace(facts_of(identity), model=model), state_of(identity), 0.0, b"")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "llama")


def test_a_folder_with_altered_weights_is_not_what_the_swarm_serves_under_its_name(folder: Path) -> None:
    others = serving(folder, str(folder))
    expected = opened(folder, others).spec.model_hash
    assert expected == others.facts.model.model_hash
    alter_a_weight(folder, "model.layers.3.mlp.up_proj.weight")
    with pytest.raises(
        StoreError, match=f"the model folder {folder} differs from what the swarm serves as {folder}"
    ):
        opened(folder, others)


def test_another_model_may_be_served_beside_under_another_name(folder: Path, tmp_path: Path) -> None:
    others = serving(folder, str(folder))
    other = copy_of(folder, tmp_path / "finetuned")
    alter_a_weight(other, "model.layers.3.mlp.up_proj.weight")
    assert opened(other, others).spec.model_hash != others.facts.model.model_hash


def test_of_dtypes_the_one_that_the_swarm_computes_in_is_taken(folder: Path) -> None:
    others = serving(folder, "anything", dtype="bfloat16")
    assert opened(folder, others).spec.model_hash == others.facts.model.model_hash
    assert opened(folder, others, dtype="float32").spec.dtype == "float32"


def test_the_quantization_of_the_swarm_is_taken_unless_the_owner_says_another(folder: Path) -> None:
    others = [serving(folder, "anything", quantization=one) for one in ("nf4", "int8", "nf4")]
    assert opened(folder, *others).spec.model_hash == others[0].facts.model.model_hash
    assert opened(folder, *others, quantization="int8").spec.model_hash == others[1].facts.model.model_hash
    assert opened(folder, *others, quantization="none").spec.quantization == "none"
    assert opened(folder, others[0], dtype="bfloat16").spec.quantization == "none"  # nobody has it so
    assert opened(folder).spec.quantization == "none"


def test_a_model_is_loaded_as_exact_as_its_owner_wants(folder: Path) -> None:
    model = opened(folder)
    for exact in (False, True):
        stage = replace(model, exact=exact).load(Span(0, 2), "cpu")
        assert stage.view(Span(0, 1)).exact is exact


def test_a_quantization_that_this_machine_lacks_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("molink.peer.models.model.find_spec", lambda _: None)
    with pytest.raises(QuantizationUnavailable, match="nf4 weights need bitsandbytes"):
        opened(folder, serving(folder, "anything", quantization="nf4"))


def test_an_altered_bundled_model_is_refused_even_by_the_first_of_a_swarm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, *_ = BUNDLED
    copy = copy_of(resolve(name), tmp_path / "copy")
    alter_a_weight(copy, "model.layers.3.mlp.up_proj.weight")
    monkeypatch.setattr("molink.shards.checkpoint.catalog.resolve", lambda _: copy)
    with pytest.raises(StoreError, match="Install MoLink again"):
        asyncio.run(open_model(ModelRequest(name), (), tmp_path / "digests", lambda _: None))
