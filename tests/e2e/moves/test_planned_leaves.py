"""A peer that leaves in mid-generation hands its session over: no token changes, and nothing is lost."""

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from support.chaos.losses import know_all, session_of
from support.swarms.forked_peers import ForkedSwarm
from support.swarms.live_swarms import (
    BUNDLED,
    FORMATION_TIMEOUT_S,
    References,
    bundled_folder,
    mostly_right,
)

from molink.client.api.generation import Generation
from molink.client.api.swarm import AsyncSwarm
from molink.client.circuit.session import ClientSession
from molink.client.local.local_swarm import LocalPeer, LocalSwarm

pytestmark = [pytest.mark.real, pytest.mark.anyio]

PROMPT = "KING RICHARD III:\nNow is the winter of our discontent"
NEW_TOKENS = 200
"""The peer leaves behind some 30 tokens and has gone behind some 100. With guesses four times as many are asked for."""
TOKENS_LATER = 20
HEARD_WITHIN_S = 120.0
MOST_LEAVES = 5
"""On a busy machine a generation may be over before it is handed over, or a peer be taken for lost."""


HALVES, WHOLE = (0, 6, 12), (0, 12)


@pytest.mark.parametrize(
    ("cuts", "at", "guesses"),
    [
        (HALVES, 0, False),
        *[
            pytest.param(cuts, at, guesses, marks=pytest.mark.full)
            for cuts, at, guesses in (
                (HALVES, 1, False),
                (HALVES, 0, True),
                (HALVES, 1, True),
                (WHOLE, 0, True),
            )
        ],
    ],
)
async def test_a_peer_that_leaves_hands_its_session_over_and_goes_when_it_has(
    anyio_backend: str, cuts: Sequence[int], at: int, guesses: bool, references: References
) -> None:
    """With guesses of which every second one is wrong, too."""
    folder, new_tokens, asked = bundled_folder(), NEW_TOKENS, dict[str, Any](speculation="off")
    if guesses:
        new_tokens = 4 * NEW_TOKENS
        expected = references.greedy(folder, references.ids(folder, PROMPT), new_tokens)
        asked = {"prediction": mostly_right(expected, wrong_every=2)}
    async with ForkedSwarm() as swarm:
        for start, stop in pairwise(cuts):
            for one in "ab":
                await swarm.join(f"{start}-{one}", "--model", BUNDLED, "--layers", f"{start}:{stop}")
        for _ in range(MOST_LEAVES):
            session, generation, victim = await leave_in_decode(swarm, at, new_tokens, **asked)
            assert generation.token_ids == references.greedy(
                folder, references.ids(folder, PROMPT), new_tokens
            )
            assert (
                generation.accepted_tokens <= generation.guessed_tokens
            )  # how many travel is decided by times
            if victim is None:
                continue
            assert victim.peer_id not in [hop.peer_id for hop in generation.circuit.hops]
            if (session.log.moves, session.log.losses, generation.recoveries) == (1, [], ()):
                assert generation.epochs == 1
                return
            start = int(victim.name.partition("-")[0])
            stop = cuts[list(cuts).index(start) + 1]
            await swarm.join(victim.name, "--model", BUNDLED, "--layers", f"{start}:{stop}")
    raise AssertionError("no session was handed over without a loss")


async def leave_in_decode(
    swarm: LocalSwarm,
    at: int,
    new_tokens: int,
    **asked: Any,  # noqa: ANN401 - whatever `generate` takes
) -> tuple[ClientSession, Generation, LocalPeer | None]:
    """A generation whose hop `at` leaves a little after it has a standby, and goes; None: it was over before."""
    async with AsyncSwarm(BUNDLED, initial_peers=swarm.addresses) as client:
        await know_all(client, swarm)
        tokens = leave_at = 0
        victim: LocalPeer | None = None
        left: asyncio.Task[int] | None = None
        pieces = client.stream_events(
            PROMPT, max_new_tokens=new_tokens, timeout_s=FORMATION_TIMEOUT_S, **asked
        )
        while True:
            async with asyncio.timeout(HEARD_WITHIN_S):
                piece = await anext(pieces)
            tokens += len(piece.token_ids)
            if piece.generation is not None:
                break
            session = session_of(client)
            assert session.log.route is not None
            hop = session.log.route.hops[at].peer_id
            if not leave_at and session.standbys.substitute(hop):
                leave_at = tokens + TOKENS_LATER
            if left is None and leave_at and tokens >= leave_at:
                victim = next(peer for peer in swarm.peers if peer.peer_id == hop)
                left = asyncio.create_task(swarm.stop(victim))
        assert left is None or await left == 0
    return session, piece.generation, victim
