"""A client's own copy of a model has to be the one that the swarm serves under that name."""

from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from support.links.data_plane import asynchronous
from support.models.stored_models import alter_a_weight, write_llama
from support.swarms.swarm_of_fakes import FakeConnection, FakePeer

from molink.client.circuit.connection import SwarmConnection
from molink.client.errors import ModelNotFound
from molink.client.models.model_resolver import open_model
from molink.shards.checkpoint.store import describe
from molink.shards.spec import Span


def swarm_that_serves(folder: Path, name: str) -> SwarmConnection:
    spec = describe(folder, "float32")
    peer = FakePeer(Span(0, spec.layers))
    facts = peer.view.facts
    model = replace(
        facts.model,
        name=name,
        content_hash=spec.content_hash,
        model_hash=spec.model_hash,
        dtype="float32",
        quantization="none",
    )
    peer.view = replace(peer.view, facts=replace(facts, model=model))
    return cast("SwarmConnection", FakeConnection(peer))


@asynchronous
async def test_an_altered_copy_is_refused_in_one_sentence(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "llama")
    connection = swarm_that_serves(folder, str(folder))
    access = await open_model(connection, str(folder), None, None)
    assert access.spec.model_hash == connection.snapshot()[0].facts.model.model_hash
    alter_a_weight(folder, "model.layers.3.mlp.up_proj.weight")
    with pytest.raises(ModelNotFound, match=f"the model folder {folder} differs from what the swarm serves"):
        await open_model(connection, str(folder), None, None)


@asynchronous
async def test_a_damaged_copy_is_refused_in_one_sentence(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "llama")
    connection = swarm_that_serves(folder, "llama")
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelNotFound, match="not a whole safetensors file"):
        await open_model(connection, str(folder), None, None)
