"""Tiny models for the tests of `shards/`, made once for all of them."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.models.hub_models import HubSide, hub_side
from support.models.stored_models import write_llama
from support.models.tiny_models import make_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Gives the folder of a tiny model by its name in `tiny_models.ARCHITECTURES`."""
    made: dict[str, Path] = {}
    folder = tmp_path_factory.mktemp("tiny-models")

    def get(architecture: str) -> Path:
        if architecture not in made:
            made[architecture] = make_tiny_model(architecture, folder)
        return made[architecture]

    return get


@pytest.fixture(scope="session")
def sharded_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama in several weight files, as large models come."""
    return write_llama(tmp_path_factory.mktemp("sharded") / "llama", max_shard_size="300KB")


@pytest.fixture
def side(sharded_llama: Path, tmp_path: Path) -> Iterator[HubSide]:
    """A hub with that model."""
    with hub_side(sharded_llama, tmp_path) as made:
        yield made
