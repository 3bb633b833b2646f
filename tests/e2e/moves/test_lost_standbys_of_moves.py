"""A hop leaves, and the standby that was ready to take its place is killed, or stands still for a moment, before it
has: nothing is lost by that."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import psutil
import pytest
from support.chaos.losses import MOST_GENERATIONS, know_all, session_of
from support.links.data_plane import until
from support.swarms.forked_peers import ForkedSwarm
from support.swarms.live_swarms import (
    BUNDLED,
    FORMATION_TIMEOUT_S,
    References,
    bundled_folder,
)

from molink.client.api.generation import Generation
from molink.client.api.swarm import AsyncSwarm
from molink.client.circuit.circuit_builder import ActiveCircuit, CircuitBuilder
from molink.client.circuit.session import ClientSession
from molink.client.local.local_swarm import LocalPeer

pytestmark = [pytest.mark.real, pytest.mark.anyio, pytest.mark.full]

PROMPT = "KING RICHARD III:\nNow is the winter of our discontent"
NEW_TOKENS = 120
TOKENS_LATER = 20
HEARD_WITHIN_S = 120.0
FEW_TOKENS = 8
"""Computed again at most where the hop that was to be left goes on: no copy is gone on with."""
STANDS_S = 0.5
PREPARE = CircuitBuilder.prepare

Befall = Callable[[LocalPeer, ActiveCircuit], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Left:
    """A generation whose tail has left."""

    generation: Generation
    session: ClientSession
    tail: str
    """Who has left."""
    standby: str
    """Who was to take its place."""


async def leave_tail(befall: Befall, monkeypatch: pytest.MonkeyPatch) -> Left:
    """Has the tail of a generation leave; `befall` comes over its standby as soon as all hops have said that they could
    begin the next epoch."""
    for _ in range(MOST_GENERATIONS):
        if (left := await _leave_tail(befall, monkeypatch)) is not None:
            return left
    raise AssertionError("each generation was over before its hop could leave")


async def _leave_tail(befall: Befall, monkeypatch: pytest.MonkeyPatch) -> Left | None:
    """Does as `leave_tail`, one generation; None: it was over before."""
    struck: list[LocalPeer] = []
    leaving: list[asyncio.Task[int]] = []
    async with ForkedSwarm() as swarm:
        await swarm.join("first", "--model", BUNDLED, "--layers", "0:6")
        others = zip(("second", "third", "fourth"), ("0:6", "6:12", "6:12"), strict=True)
        await asyncio.gather(
            *(swarm.join(name, "--model", BUNDLED, "--layers", span) for name, span in others)
        )
        async with AsyncSwarm(BUNDLED, initial_peers=swarm.addresses) as client:

            async def prepare_and_strike(self: CircuitBuilder, *asked: Any) -> ActiveCircuit:  # noqa: ANN401
                circuit = await PREPARE(self, *asked)
                if not struck:
                    (standby,) = [peer for peer in swarm.peers if peer.peer_id == circuit.links[-1].peer_id]
                    struck.append(standby)
                    await befall(standby, circuit)
                return circuit

            monkeypatch.setattr(CircuitBuilder, "prepare", prepare_and_strike)
            await know_all(client, swarm)
            pieces = client.stream_events(
                PROMPT, max_new_tokens=NEW_TOKENS, speculation="off", timeout_s=FORMATION_TIMEOUT_S
            )
            tokens = leave_at = 0
            while True:
                async with asyncio.timeout(HEARD_WITHIN_S):
                    piece = await anext(pieces)
                generation, tokens = piece.generation, tokens + len(piece.token_ids)
                if generation is not None:
                    break
                session = session_of(client)
                assert session.log.route is not None
                tail = session.log.route.hops[-1].peer_id
                if not leave_at and session.standbys.substitute(tail):
                    leave_at = tokens + TOKENS_LATER
                if not leaving and leave_at and tokens >= leave_at:
                    (left,) = [peer for peer in swarm.peers if peer.peer_id == tail]
                    leaving.append(asyncio.create_task(swarm.stop(left)))
            await pieces.aclose()
        assert [await one for one in leaving] == [0] * len(leaving)
    if not struck:
        return None
    return Left(generation, session, left.peer_id, struck[0].peer_id)


def expected(references: References) -> tuple[int, ...]:
    folder = bundled_folder()
    return references.greedy(folder, references.ids(folder, PROMPT), NEW_TOKENS)


@pytest.mark.parametrize("is_noticed", [True, False], ids=["before_the_word", "with_the_word"])
async def test_a_standby_that_dies_after_it_said_that_it_could_begin_costs_no_token(
    is_noticed: bool, anyio_backend: str, references: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the word to the head: the session has gone over to a standby that is no more, and goes back."""

    async def kill(standby: LocalPeer, circuit: ActiveCircuit) -> None:
        standby.process.kill()
        if is_noticed:
            await until(lambda: circuit.links[-1].closed_because is not None)

    left = await leave_tail(kill, monkeypatch)
    generation = left.generation
    assert generation.token_ids == expected(references)
    assert generation.circuit.hops[-1].peer_id == left.tail
    assert left.session.log.moves == 0
    lost = [one for one in generation.recoveries if one.hop.peer_id == left.standby]
    assert len(lost) == (0 if is_noticed else 1)
    assert all(one.recomputed_tokens <= FEW_TOKENS for one in lost)


async def test_a_standby_that_stands_still_for_a_moment_when_it_is_to_begin_is_waited_for(
    anyio_backend: str, references: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def suspend(standby: LocalPeer, _: ActiveCircuit) -> None:
        process = psutil.Process(standby.process.pid)
        process.suspend()
        asyncio.get_running_loop().call_later(STANDS_S, process.resume)

    left = await leave_tail(suspend, monkeypatch)
    generation = left.generation
    assert generation.token_ids == expected(references)
    if left.session.log.losses:  # on a busy machine it stands still for longer than is waited for
        assert generation.recoveries
    else:
        assert generation.circuit.hops[-1].peer_id == left.standby
        assert (left.session.log.moves, generation.epochs, generation.recoveries) == (1, 1, ())
