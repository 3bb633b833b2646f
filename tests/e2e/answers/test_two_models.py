"""Models that look alike never mix; one model in two folders is one."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.models.tiny_models import LAYERS, VOCABULARY, make_tiny_model
from support.swarms.forked_peers import ForkedSwarm
from support.swarms.live_swarms import References, circuit_of, generate

from molink.client.api.swarm import AsyncSwarm
from molink.client.local.local_swarm import LocalPeer, LocalSwarm

pytestmark = [pytest.mark.real, pytest.mark.full, pytest.mark.anyio]

NEW_TOKENS = 40
CIRCUITS = {
    1: {"third": (0, 6)},
    2: {"first": (0, 3), "second": (3, 6)},
    3: {"first": (0, 2), "third": (2, 4), "second": (4, 6)},
    4: {"first": (0, 1), "third": (1, 3), "second": (3, 4), "fourth": (4, 6)},
}


@dataclass(frozen=True, slots=True, eq=False)
class Twins:
    """Two models of equal shapes in one swarm: `one` on several peers and in two folders, `other` on one."""

    swarm: LocalSwarm
    one: Path
    copy_of_one: Path
    other: Path

    def spans(self, names: dict[str, tuple[int, int]]) -> dict[LocalPeer, tuple[int, int]]:
        peers = {peer.name: peer for peer in self.swarm.peers}
        return {peers[name]: span for name, span in names.items()}


@pytest.fixture(scope="module")
async def twins(anyio_backend: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Twins]:
    one = make_tiny_model("llama", tmp_path_factory.mktemp("one"), seed=1)
    other = make_tiny_model("llama", tmp_path_factory.mktemp("other"), seed=2)
    copy = tmp_path_factory.mktemp("copy") / "another-name"
    shutil.copytree(one, copy)
    async with ForkedSwarm() as swarm:
        await swarm.join("first", "--model", str(one), "--layers", "0:4")
        await asyncio.gather(
            swarm.join("second", "--model", str(copy), "--layers", "2:6"),
            swarm.join("third", "--model", str(one), "--layers", "0:6"),
            swarm.join("stranger", "--model", str(other), "--layers", "0:6"),
        )
        yield Twins(swarm, one, copy, other)


def make_prompts() -> list[tuple[int, ...]]:
    """20 prompts of 1 to 900 tokens."""
    lengths = [1, 2, 3, 4, 5, 6, 8, 9, 15, 16, 20, 33, 47, 64, 65, 90, 200, 511, 600, 900]
    return [
        tuple((number * 31 + place * place * 7 + place) % (VOCABULARY - 2) + 2 for place in range(length))
        for number, length in enumerate(lengths)
    ]


@pytest.mark.parametrize(
    ("hops", "prompts"),
    [
        (3, make_prompts()[2::5]),
        *(pytest.param(hops, make_prompts(), marks=pytest.mark.full) for hops in CIRCUITS),
    ],
    ids=lambda value: str(value if isinstance(value, int) else len(value)),
)
async def test_a_random_model_gives_the_tokens_of_transformers(
    hops: int, prompts: list[tuple[int, ...]], twins: Twins, references: References
) -> None:
    """The circuits of 2, 3 and 4 hops go through peers that loaded the model from different folders."""
    if hops == 4:
        await twins.swarm.join("fourth", "--model", str(twins.copy_of_one), "--layers", "3:6")
    async with AsyncSwarm(str(twins.one), initial_peers=twins.swarm.addresses) as client:
        with circuit_of(client, twins.spans(CIRCUITS[hops])):
            for prompt in prompts[8:]:
                generation = await generate(client, prompt, NEW_TOKENS)
                assert len(generation.circuit.hops) == hops
                assert generation.token_ids == references.greedy(twins.one, prompt, NEW_TOKENS), len(prompt)
            together = await asyncio.gather(*(generate(client, prompt, NEW_TOKENS) for prompt in prompts[:8]))
    assert [generation.token_ids for generation in together] == [
        references.greedy(twins.one, prompt, NEW_TOKENS) for prompt in prompts[:8]
    ]


async def test_models_of_equal_shapes_and_different_weights_never_mix(
    twins: Twins, references: References
) -> None:
    [prompt] = make_prompts()[9:10]
    stranger = next(peer for peer in twins.swarm.peers if peer.name == "stranger")
    async with (
        AsyncSwarm(str(twins.one), initial_peers=twins.swarm.addresses) as one,
        AsyncSwarm(str(twins.other), initial_peers=twins.swarm.addresses) as other,
    ):
        assert one.model.model_hash != other.model.model_hash
        assert {model.model_hash for model in await one.models()} == {
            one.model.model_hash,
            other.model.model_hash,
        }
        ours, theirs = await asyncio.gather(
            generate(one, prompt, NEW_TOKENS), generate(other, prompt, NEW_TOKENS)
        )
    assert stranger.peer_id not in [hop.peer_id for hop in ours.circuit.hops]
    assert [hop.peer_id for hop in theirs.circuit.hops] == [stranger.peer_id]
    assert ours.token_ids == references.greedy(twins.one, prompt, NEW_TOKENS)
    assert theirs.token_ids == references.greedy(twins.other, prompt, NEW_TOKENS)
    assert ours.token_ids != theirs.token_ids


async def test_the_same_model_in_two_folders_is_one(twins: Twins, references: References) -> None:
    [prompt] = make_prompts()[10:11]
    async with (
        AsyncSwarm(str(twins.one), initial_peers=twins.swarm.addresses) as client,
        AsyncSwarm(str(twins.copy_of_one), initial_peers=twins.swarm.addresses) as client_of_copy,
    ):
        assert client.model.model_hash == client_of_copy.model.model_hash
        with circuit_of(client_of_copy, twins.spans({"first": (0, 4), "second": (4, 6)})):
            generation = await generate(client_of_copy, prompt, NEW_TOKENS)
    assert [(hop.name, hop.start, hop.stop) for hop in generation.circuit.hops] == [
        ("first", 0, 4),
        ("second", 4, LAYERS),
    ]
    assert generation.token_ids == references.greedy(twins.one, prompt, NEW_TOKENS)


async def test_a_client_without_a_copy_gets_the_tokenizer_from_the_peers(
    twins: Twins, references: References
) -> None:
    async with AsyncSwarm(str(twins.other), initial_peers=twins.swarm.addresses) as owner:
        model_hash = owner.model.model_hash
    text = "the quick brown fox"
    async with AsyncSwarm(model_hash[:12], initial_peers=twins.swarm.addresses) as client:
        assert client.model.model_hash == model_hash
        generation = await generate(client, text, NEW_TOKENS)
    prompt = references.ids(twins.other, text)
    assert generation.prompt_tokens == len(prompt)
    assert generation.token_ids == references.greedy(twins.other, prompt, NEW_TOKENS)


async def test_one_connection_serves_both_models_at_once(twins: Twins, references: References) -> None:
    prompts = make_prompts()[2:5]
    async with AsyncSwarm(str(twins.one), initial_peers=twins.swarm.addresses) as one:
        async with one.beside(str(twins.other)) as other:
            assert other.connection is one.connection
            assert other.model.model_hash != one.model.model_hash
            generations = await asyncio.gather(
                *(generate(swarm, prompt, NEW_TOKENS) for prompt in prompts for swarm in (one, other))
            )
            names = {one.model.name, other.model.name}
            assert {circuit["model"] for circuit in one.circuits()} == names
            assert one.circuits() == other.circuits() == (await one.snapshot())["circuits"]
        expected = [
            references.greedy(folder, prompt, NEW_TOKENS)
            for prompt in prompts
            for folder in (twins.one, twins.other)
        ]
        assert [generation.token_ids for generation in generations] == expected
        assert (await generate(one, prompts[0], NEW_TOKENS)).token_ids == expected[0]
