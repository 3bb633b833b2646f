"""A peer is killed in mid-generation: its standby goes on with its copy, and the prompt is not computed again."""

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise

import pytest
from support.chaos.losses import (
    MOST_LOSSES,
    lose_in_decode,
    lose_in_prompt,
    lose_together,
    recoveries_from,
    session_of,
    span_of,
    taken_over,
)
from support.swarms.forked_peers import ForkedSwarm
from support.swarms.live_swarms import (
    BUNDLED,
    FORMATION_TIMEOUT_S,
    References,
    bundled_folder,
    mostly_right,
)

from molink.client.api.swarm import AsyncSwarm
from molink.client.local.local_swarm import LocalPeer, LocalSwarm

pytestmark = [pytest.mark.real, pytest.mark.full, pytest.mark.anyio]

PROMPT = "KING RICHARD III:\nNow is the winter of our discontent"
NEW_TOKENS = 200
"""Its copy has begun behind some 20 tokens, and a peer is killed 40 later, or once the copy holds the prompt."""
LAYERS = 12


async def join_spans(swarm: LocalSwarm, count: int) -> None:
    """Two peers for each of so many spans of equal length."""
    cuts = [LAYERS * at // count for at in range(count + 1)]
    spans = list(pairwise(cuts))
    names = [(f"{start}-{stop}-{one}", f"{start}:{stop}") for start, stop in spans for one in "ab"]
    first, *others = names
    await swarm.join(first[0], "--model", BUNDLED, "--layers", first[1])
    await asyncio.gather(*(swarm.join(name, "--model", BUNDLED, "--layers", span) for name, span in others))


@pytest.fixture(scope="module")
async def halves(anyio_backend: str) -> AsyncIterator[LocalSwarm]:
    async with ForkedSwarm() as swarm:
        await join_spans(swarm, 2)
        yield swarm


@pytest.fixture(scope="module")
async def quarters(anyio_backend: str) -> AsyncIterator[LocalSwarm]:
    async with ForkedSwarm() as swarm:
        await join_spans(swarm, 4)
        yield swarm


async def check_that_the_standby_goes_on(
    swarm: LocalSwarm, at: int, new_tokens: int, references: References, *, guesses: bool = False
) -> None:
    folder = bundled_folder()
    prompt = (references.ids(folder, PROMPT) * 6)[:100]
    expected = references.greedy(folder, prompt, new_tokens)
    predicted = {"speculation": "auto", "prediction": mostly_right(expected, wrong_every=2)}

    async def back(victim: LocalPeer) -> None:
        await swarm.join(victim.name, "--model", BUNDLED, "--layers", span_of(victim))

    asked = taken_over(swarm, at, prompt, new_tokens, back, **(predicted if guesses else {}))
    async with asked as (_, generation, victim):
        assert generation.token_ids == expected
        assert generation.accepted_tokens <= generation.guessed_tokens  # how many travel is decided by times
        assert generation.epochs >= 2
        assert victim.peer_id not in [hop.peer_id for hop in generation.circuit.hops]
    await back(victim)


@pytest.mark.parametrize("at", [0, pytest.param(1, marks=pytest.mark.full)], ids=["head", "tail"])
async def test_the_standby_of_a_killed_peer_goes_on_with_its_copy(
    at: int, halves: LocalSwarm, references: References
) -> None:
    await check_that_the_standby_goes_on(halves, at, NEW_TOKENS, references)


@pytest.mark.full
@pytest.mark.parametrize("at", [0, 1], ids=["head", "tail"])
async def test_so_it_does_with_guesses_on_their_way_of_which_every_second_is_wrong(
    at: int, halves: LocalSwarm, references: References
) -> None:
    await check_that_the_standby_goes_on(halves, at, 4 * NEW_TOKENS, references, guesses=True)


@pytest.mark.full
async def test_the_standbys_of_two_peers_that_are_killed_together_both_go_on(
    halves: LocalSwarm, references: References
) -> None:
    folder = bundled_folder()
    prompt = (references.ids(folder, PROMPT) * 6)[:100]
    for _ in range(MOST_LOSSES):
        async with AsyncSwarm(BUNDLED, initial_peers=halves.addresses) as client:
            generation, victims = await lose_together(client, halves, (0, 1), prompt, NEW_TOKENS)
        for victim in victims:
            await halves.join(victim.name, "--model", BUNDLED, "--layers", span_of(victim))
        assert generation.token_ids == references.greedy(folder, prompt, NEW_TOKENS)
        recovery = generation.recoveries[-1]
        if recovery.by_standby and 0 < recovery.recomputed_tokens < len(prompt):
            return
    raise AssertionError("no standbys have gone on with their copies")


@pytest.mark.parametrize("at", [pytest.param(0, marks=pytest.mark.full), 1], ids=["head", "tail"])
async def test_a_peer_that_is_killed_in_the_prompt_changes_no_token(
    at: int, halves: LocalSwarm, references: References
) -> None:
    folder = bundled_folder()
    prompt = (references.ids(folder, PROMPT) * 12)[:180]
    async with AsyncSwarm(BUNDLED, initial_peers=halves.addresses) as client:
        generation, victim = await lose_in_prompt(client, halves, at, prompt, 24)
    await halves.join(victim.name, "--model", BUNDLED, "--layers", span_of(victim))
    assert generation.token_ids == references.greedy(folder, prompt, 24)


async def test_the_loss_of_a_standby_changes_nothing(halves: LocalSwarm, references: References) -> None:
    folder = bundled_folder()
    async with AsyncSwarm(BUNDLED, initial_peers=halves.addresses) as client:
        generation, victim = await lose_in_decode(client, halves, 0, PROMPT, NEW_TOKENS, standby=True)
    await halves.join(victim.name, "--model", BUNDLED, "--layers", span_of(victim))
    assert generation.token_ids == references.greedy(folder, references.ids(folder, PROMPT), NEW_TOKENS)
    assert recoveries_from(generation, victim) == []


async def test_who_wants_no_partners_has_none(halves: LocalSwarm) -> None:
    async with AsyncSwarm(BUNDLED, initial_peers=halves.addresses, partners="off") as client:
        async for piece in client.stream_events(PROMPT, max_new_tokens=60, timeout_s=FORMATION_TIMEOUT_S):
            if piece.generation is None:
                assert session_of(client).standbys.by_hop() == {}


@pytest.mark.full
@pytest.mark.parametrize("at", [0, 1, 3], ids=["head", "middle", "tail"])
async def test_among_four_spans_the_standby_of_a_killed_peer_goes_on(
    at: int, quarters: LocalSwarm, references: References
) -> None:
    await check_that_the_standby_goes_on(quarters, at, 2 * NEW_TOKENS, references)
