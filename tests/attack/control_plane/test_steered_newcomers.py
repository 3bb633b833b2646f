"""What a newcomer serves whose owner has not said what: nothing that it knows from an announcement alone."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from support.links.raw_links import facts_of as facts_in
from support.models.fake_hub import fake_hub
from support.models.tiny_models import make_tiny_model
from support.swarms.forked_peers import ForkedSwarm
from support.swarms.live_swarms import BUNDLED
from support.swarms.swarm_examples import facts_of, state_of

from molink.client.api.swarm import AsyncSwarm
from molink.client.errors import SwarmUnavailable
from molink.client.local.local_swarm import LocalSwarm
from molink.dht.identity.identity import Identity
from molink.dht.node.discovery import Discovery
from molink.shards.checkpoint.catalog import BUNDLED_CONTENT
from molink.shards.spec import Span

pytestmark = [pytest.mark.real, pytest.mark.full, pytest.mark.anyio]


@asynccontextmanager
async def liar(name: str, initial_peers: tuple[str, ...] = ()) -> AsyncIterator[str]:
    """Announces that it serves part of a model of that name; yields its address."""
    identity = Identity.generate()
    async with Discovery(identity, initial_peers=initial_peers) as discovery:
        facts = facts_of(identity)
        digits = f"{abs(hash(name)):064x}"[-64:]
        model = replace(facts.model, name=name, content_hash=digits, model_hash=digits[::-1])
        facts = replace(facts, model=model, addresses=(), grpc_addresses=(), span_limit=None)
        await discovery.announce(facts, replace(state_of(identity), spans=(Span(0, 1),)))
        yield discovery.addresses[0]
        await discovery.leave()


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    """A folder of this machine that a stranger knows of."""
    return make_tiny_model("llama", tmp_path / "private")


async def test_one_false_announcement_has_a_newcomer_serve_nothing_but_what_comes_with_molink(
    attacked: LocalSwarm, trap: Path
) -> None:
    async with (
        liar(str(trap), attacked.addresses) as first,
        liar("evil/model", attacked.addresses) as second,
        ForkedSwarm() as swarm,
    ):
        addresses = (first, second, *attacked.addresses)
        newcomer = await swarm.join("newcomer", "--memory", "600MB", initial_peers=addresses)
        assert str(trap) not in "\n".join(newcomer.lines)
        async with AsyncSwarm(BUNDLED, initial_peers=(newcomer.address,)) as client:
            served = facts_in(client, "newcomer").model
        assert (served.name, served.content_hash) == (BUNDLED, BUNDLED_CONTENT[BUNDLED])


async def test_where_only_others_are_served_the_owner_is_told_what_to_type_and_nothing_is_fetched(
    trap: Path, tmp_path: Path
) -> None:
    model = json.loads((trap / "config.json").read_text())
    with fake_hub("evil/model", {"config.json": json.dumps(model).encode()}) as hub:
        environment = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "hub")}
        async with (
            liar(str(trap)) as first,
            liar("evil/model", (first,)) as second,
            ForkedSwarm(environment) as swarm,
        ):
            with pytest.raises(SwarmUnavailable) as refused:
                await swarm.join("newcomer", "--memory", "600MB", initial_peers=(first, second))
        assert hub.asked == []
    assert "start with --model evil/model" in str(refused.value)
    assert str(trap) not in str(refused.value)
    assert set(BUNDLED_CONTENT) == {BUNDLED, f"{BUNDLED}-draft"}
