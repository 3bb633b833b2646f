"""Peers that serve a model of a hub: each fetches its own layers, and together they are the model."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from fake_hub import FakeHub, fake_hub, files_of
from live_swarms import References, generate
from tiny_models import make_tiny_model

from molink.client.errors import SwarmUnavailable
from molink.client.local_swarm import LocalSwarm
from molink.client.swarm import AsyncSwarm
from molink.shards.safetensors_header import read_header

pytestmark = [pytest.mark.e2e, pytest.mark.anyio]

MODEL = "someone/some-model"
PROMPT = (5, 9, 200, 31, 7)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("hub"), max_shard_size="300KB")


@pytest.fixture
def hub(folder: Path) -> Iterator[FakeHub]:
    with fake_hub(MODEL, files_of(folder)) as made:
        yield made


@pytest.fixture
async def swarm(hub: FakeHub, tmp_path: Path, anyio_backend: str) -> AsyncIterator[LocalSwarm]:
    environment = {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_OFFLINE": "0",
    }
    async with LocalSwarm(environment) as made:
        yield made


def options(tmp_path: Path, store: str, layers: str | None) -> tuple[str, ...]:
    span = () if layers is None else ("--layers", layers)
    return ("--model", MODEL, "--store-dir", str(tmp_path / store), "--dtype", "float32", *span)


def bytes_of(folder: Path, *parts: str) -> set[tuple[str, int]]:
    """Where in the files the tensors lie whose names hold one of `parts`."""
    return {
        (path.name, at)
        for path in folder.glob("*.safetensors")
        for tensor in read_header(path)
        if any(part in tensor.name for part in parts)
        for at in range(tensor.start, tensor.stop)
    }


def fetched(hub: FakeHub) -> set[tuple[str, int]]:
    ranges = hub.weight_ranges()
    return {(name, at) for name, own in ranges.items() for start, stop in own for at in range(start, stop)}


def layers(start: int, stop: int) -> list[str]:
    return [f"layers.{layer}." for layer in range(start, stop)]


async def check_tokens(swarm: LocalSwarm, folder: Path, references: References) -> None:
    async with AsyncSwarm(MODEL, initial_peers=swarm.addresses) as client:
        generation = await generate(client, PROMPT, 24)
    assert len(generation.circuit.hops) == 2
    assert generation.token_ids == references.greedy(folder, PROMPT, 24)


async def test_each_peer_fetches_its_own_layers_and_together_they_are_the_model(
    swarm: LocalSwarm, hub: FakeHub, folder: Path, tmp_path: Path, references: References
) -> None:
    await swarm.join("front", *options(tmp_path, "front", "0:2"))
    read = {asked.name for asked in hub.asked if asked.host == "content" and asked.stop > 2**16}
    assert read == {name for name in hub.files if name.endswith(".safetensors")}  # it had to know the model
    assert fetched(hub) == set()  # and kept its own layers on the way
    back = await swarm.join("back", *options(tmp_path, "back", "3:6"))
    assert fetched(hub) == bytes_of(folder, *layers(3, 6), "model.norm", "lm_head")
    await swarm.stop(back)
    await swarm.join("back", *options(tmp_path, "back", "2:6"))
    assert fetched(hub) == bytes_of(folder, *layers(2, 3))
    await check_tokens(swarm, folder, references)


async def test_a_peer_that_chooses_for_itself_fetches_what_it_chose_and_shares_the_store(
    swarm: LocalSwarm, hub: FakeHub, folder: Path, tmp_path: Path
) -> None:
    await swarm.join("first", *options(tmp_path, "shared", "0:6"))
    fetched(hub)
    await swarm.join("second", *options(tmp_path, "shared", None))
    assert fetched(hub) == set()


@pytest.mark.full
async def test_what_the_hub_has_changed_meanwhile_is_not_mixed_with_what_is_served(
    swarm: LocalSwarm, hub: FakeHub, folder: Path, tmp_path: Path
) -> None:
    await swarm.join("front", *options(tmp_path, "front", "0:2"))
    for name in [name for name in hub.files if name.endswith(".safetensors")]:
        hub.files[name] = hub.files[name][:-1] + bytes([hub.files[name][-1] ^ 1])
    with pytest.raises(SwarmUnavailable, match="not those of the model that is served"):
        await swarm.join("back", *options(tmp_path, "back", "2:6"))
    hub.gated = True
    with pytest.raises(SwarmUnavailable, match="accepted its terms"):
        await swarm.join("gated", *options(tmp_path, "gated", "2:6"))
