"""Three real peers that hold the bundled model in nf4: the tokens of one stage that holds all of it."""

import pytest
from support.models.circuit_runs import greedy, spec_for
from support.swarms.forked_peers import ForkedSwarm
from support.swarms.live_swarms import BUNDLED, References, bundled_folder, generate, hops_of

from molink.client.api.swarm import AsyncSwarm
from molink.shards.batching.engine import Engine
from molink.shards.loading.loader import StageSettings, load_stage
from molink.shards.spec import Span

pytestmark = [pytest.mark.real, pytest.mark.anyio]

PROMPT = "ROMEO:\nBut, soft! what light"
NEW_TOKENS = 24


async def test_three_peers_in_nf4_give_the_tokens_of_the_whole_model_in_nf4(references: References) -> None:
    ids = references.ids(bundled_folder(), PROMPT)
    whole = Span(0, 12)
    stage = load_stage(bundled_folder(), whole, StageSettings("float32", "nf4"))
    engine = Engine(spec_for(stage), "cpu")
    engine.attach(stage)
    expected = greedy([(engine, whole)], ids, NEW_TOKENS)
    async with ForkedSwarm() as swarm:
        for name, layers in (("front", "0:4"), ("middle", "4:8"), ("back", "8:12")):
            # who joins has the quantization of the swarm, whether or not it names the model
            told = {"front": ("--model", BUNDLED, "--quantization", "nf4"), "middle": ("--model", BUNDLED)}
            peer = await swarm.join(name, "--layers", layers, *told.get(name, ()))
            effects = [
                line for line in peer.lines if line.startswith("Quantization nf4: the layers take 2.7 MB")
            ]
            assert len(effects) == 1
        stranger = await swarm.join("stranger", "--layers", "0:1", "--quantization", "none")
        notes = [line for line in stranger.lines if line.startswith("Note: ")]
        assert len(notes) == 1
        assert "is served in float32, nf4 here, and this peer adds it in float32:" in notes[0]
        async with AsyncSwarm(BUNDLED, initial_peers=swarm.addresses, quantization="nf4") as asking:
            generation = await generate(asking, ids, NEW_TOKENS)
            assert asking.model.quantization == "nf4"
    assert hops_of(generation) == [("front", 0, 4), ("middle", 4, 8), ("back", 8, 12)]
    assert list(generation.token_ids) == expected[: len(generation.token_ids)]
    assert len(generation.token_ids) == NEW_TOKENS
