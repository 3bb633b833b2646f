"""A peer dies in mid-generation, in which guesses are right and wrong: with spare memory the stream goes on, without it
the client hears why. No hang."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import psutil
import pytest
from support.swarms.forked_peers import ForkedSwarm
from support.swarms.live_swarms import (
    BUNDLED,
    FORMATION_TIMEOUT_S,
    References,
    bundled_folder,
    circuit_of,
    generate,
    mostly_right,
)

from molink.client.api.generation import Generation
from molink.client.api.swarm import AsyncSwarm
from molink.client.errors import NoCircuit, PeerLost
from molink.client.local.local_swarm import LocalPeer, LocalSwarm

pytestmark = [pytest.mark.real, pytest.mark.anyio]

PROMPT = "KING RICHARD III:\nNow is the winter of our discontent"
NEW_TOKENS = 120
STRUCK_AFTER = 12
"""Tokens that the client has when the peer dies."""
HEARD_WITHIN_S = 120.0
"""From one piece of the stream to the next."""
THIRDS = ((0, 4), (4, 8), (8, 12))
PLACES = {"head": 0, "middle": 1, "tail": 2}
MIDDLE_FIRST = (
    "middle",
    pytest.param("head", marks=pytest.mark.full),
    pytest.param("tail", marks=pytest.mark.full),
)

Strike = Callable[[LocalPeer], Awaitable[None]]


@pytest.fixture(scope="module")
async def full_swarm(anyio_backend: str) -> AsyncIterator[LocalSwarm]:
    """Three peers that hold a third of the layers each, and take no others."""
    async with ForkedSwarm() as swarm:
        await join_third(swarm, "head")
        await asyncio.gather(join_third(swarm, "middle"), join_third(swarm, "tail"))
        yield swarm


@pytest.fixture(scope="module")
async def spare_swarm(full_swarm: LocalSwarm) -> LocalSwarm:
    """The same, and a fourth peer that may hold any layers and has room for all."""
    await full_swarm.join("spare", "--model", BUNDLED, "--memory", "1GB")
    return full_swarm


async def join_third(swarm: LocalSwarm, place: str) -> LocalPeer:
    start, stop = THIRDS[PLACES[place]]
    return await swarm.join(place, "--model", BUNDLED, "--layers", f"{start}:{stop}")


async def thirds_of(swarm: LocalSwarm) -> dict[LocalPeer, tuple[int, int]]:
    """The three peers with a third each. One that an earlier test has killed comes back."""
    for place in PLACES.keys() - {peer.name for peer in swarm.peers}:
        await join_third(swarm, place)
    peers = {peer.name: peer for peer in swarm.peers}
    return {peers[place]: THIRDS[number] for place, number in PLACES.items()}


def expected(references: References) -> tuple[int, ...]:
    folder = bundled_folder()
    return references.greedy(folder, references.ids(folder, PROMPT), NEW_TOKENS)


@dataclass
class Struck:
    """A stream whose circuit lost a peer."""

    victim: str = ""
    tokens: list[int] = field(default_factory=list)
    generation: Generation | None = None


async def strike_while_streaming(
    client: AsyncSwarm,
    swarm: LocalSwarm,
    place: str,
    strike: Strike,
    struck: Struck,
    references: References,
) -> None:
    """Streams PROMPT's continuation, which is mostly predicted, through the three thirds and strikes the one at
    `place`.

    Each piece, or the error, has to come within HEARD_WITHIN_S of the one before.
    """
    predicted = mostly_right(expected(references))
    pieces = client.stream_events(
        PROMPT, max_new_tokens=NEW_TOKENS, prediction=predicted, timeout_s=FORMATION_TIMEOUT_S
    )
    try:
        while struck.generation is None:
            async with asyncio.timeout(HEARD_WITHIN_S):
                piece = await anext(pieces)
            struck.tokens.extend(piece.token_ids)
            struck.generation = piece.generation
            if not struck.victim and len(struck.tokens) >= STRUCK_AFTER:
                victim = next(peer for peer in swarm.peers if peer.name == place)
                struck.victim = victim.peer_id
                await strike(victim)
    finally:
        await pieces.aclose()


async def freeze(peer: LocalPeer) -> None:
    """The process stands still and its connections stay open: nobody says that it is gone."""
    psutil.Process(peer.process.pid).suspend()


async def thaw(swarm: LocalSwarm, references: References) -> None:
    """All go on and serve again. The one that stood still finds that its neighbours have hung up meanwhile, which costs
    the first session that comes its way an epoch: that is this one."""
    for peer in swarm.peers:
        psutil.Process(peer.process.pid).resume()
    async with AsyncSwarm(BUNDLED, initial_peers=swarm.addresses) as client:
        with circuit_of(client, await thirds_of(swarm)):
            generation = await generate(client, PROMPT, NEW_TOKENS)
    assert generation.token_ids == expected(references)


async def check_that_it_goes_on(
    client: AsyncSwarm, swarm: LocalSwarm, place: str, strike: Strike, references: References
) -> None:
    """The circuit is the three thirds; the spare peer is found only once a peer is lost."""
    narrow = circuit_of(client, await thirds_of(swarm))
    struck = Struck()

    async def open_and_strike(victim: LocalPeer) -> None:
        narrow.__exit__(None, None, None)
        await strike(victim)

    narrow.__enter__()
    await strike_while_streaming(client, swarm, place, open_and_strike, struck, references)
    generation = struck.generation
    assert generation is not None
    assert tuple(struck.tokens) == generation.token_ids == expected(references)
    assert generation.epochs >= 2, "on a busy machine another may be taken for lost besides"
    assert struck.victim not in [hop.peer_id for hop in generation.circuit.hops]
    assert (
        generation.accepted_tokens <= generation.guessed_tokens
    )  # how many guesses travel is decided by times
    assert generation.trips + generation.accepted_tokens == len(struck.tokens)


async def check_that_it_fails(
    client: AsyncSwarm, swarm: LocalSwarm, place: str, strike: Strike, references: References
) -> str:
    """The error names the peer and comes after tokens that are right. Returns the peer's id."""
    struck = Struck()
    with circuit_of(client, await thirds_of(swarm)), pytest.raises((PeerLost, NoCircuit)) as caught:
        await strike_while_streaming(client, swarm, place, strike, struck, references)
    assert struck.victim in str(caught.value)
    assert tuple(struck.tokens) == expected(references)[: len(struck.tokens)]
    return struck.victim


@pytest.mark.full
@pytest.mark.parametrize("place", MIDDLE_FIRST)
async def test_without_spare_memory_a_killed_peer_is_an_error_and_its_return_mends_the_swarm(
    place: str, full_swarm: LocalSwarm, references: References
) -> None:
    async with AsyncSwarm(BUNDLED, initial_peers=full_swarm.addresses) as client:
        victim = await check_that_it_fails(client, full_swarm, place, full_swarm.kill, references)
        thirds = await thirds_of(full_swarm)
        assert victim in [peer.peer_id for peer in thirds]
        with circuit_of(client, thirds):
            generation = await generate(client, PROMPT, NEW_TOKENS)
    assert generation.token_ids == expected(references)
    assert victim in [hop.peer_id for hop in generation.circuit.hops]


@pytest.mark.full
@pytest.mark.parametrize("place", PLACES)
async def test_without_spare_memory_a_silent_peer_is_an_error_and_its_return_mends_the_swarm(
    place: str, full_swarm: LocalSwarm, references: References
) -> None:
    async with AsyncSwarm(BUNDLED, initial_peers=full_swarm.addresses) as client:
        try:
            await check_that_it_fails(client, full_swarm, place, freeze, references)
        finally:
            await thaw(full_swarm, references)


@pytest.mark.full
@pytest.mark.parametrize("place", MIDDLE_FIRST)
async def test_the_stream_goes_on_with_the_same_tokens_when_a_peer_falls_silent(
    place: str, spare_swarm: LocalSwarm, references: References
) -> None:
    async with AsyncSwarm(BUNDLED, initial_peers=spare_swarm.addresses) as client:
        try:
            await check_that_it_goes_on(client, spare_swarm, place, freeze, references)
        finally:
            await thaw(spare_swarm, references)


@pytest.mark.parametrize("place", MIDDLE_FIRST)
async def test_the_stream_goes_on_with_the_same_tokens_when_a_peer_is_killed(
    place: str, spare_swarm: LocalSwarm, references: References
) -> None:
    async with AsyncSwarm(BUNDLED, initial_peers=spare_swarm.addresses) as client:
        await check_that_it_goes_on(client, spare_swarm, place, spare_swarm.kill, references)
