"""The loss of one peer of a circuit: its hop or the standby of one is killed in a generation's prompt or decode."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from support.links.data_plane import until
from support.swarms.live_swarms import BUNDLED, FORMATION_TIMEOUT_S

from molink.client.api.generation import Generation, Recovery, TextPiece
from molink.client.api.swarm import AsyncSwarm
from molink.client.circuit.session import ClientSession
from molink.client.local.local_swarm import LocalPeer, LocalSwarm
from molink.peer.wire.protocol import molink_pb2 as pb

TOKENS_LATER = 40
"""Of the stream: so many after a standby was there a peer is struck, or as soon as the copies hold the prompt."""
HEARD_WITHIN_S = 120.0
MOST_LOSSES = 5
MOST_GENERATIONS = 10
"""Asked for one after the other until one is struck: the first may be over before its copies have begun."""
LOOKS_EVERY_S = 10.0


def span_of(peer: LocalPeer) -> str:
    """Of a peer that is named START-STOP-ANYTHING."""
    return ":".join(peer.name.split("-")[:2])


async def know_all(client: AsyncSwarm, swarm: LocalSwarm) -> None:
    """Waits until the client has heard what each of the swarm's peers holds: tables come now and then."""
    names = {peer.peer_id for peer in swarm.peers}
    async with asyncio.timeout(HEARD_WITHIN_S):
        while names - {view.peer_id for view in client.connection.snapshot() if view.state.spans}:
            await client.connection.refresh_soon(LOOKS_EVERY_S)


def session_of(client: AsyncSwarm) -> ClientSession:
    """The one that runs."""
    (session,) = client.connection.sinks
    assert isinstance(session, ClientSession)
    return session


def watch_tokens(session: ClientSession) -> list[pb.Token]:
    """The session's latest token, once another one has come."""
    latest: list[pb.Token] = []
    watch = session.watch

    def record(token: pb.Token) -> None:
        latest[:] = [token]
        watch(token)

    session.watch = record
    return latest


async def hold_prompt(client: AsyncSwarm, latest: Sequence[pb.Token], standbys: Sequence[str]) -> bool:
    """Whether the copies of these standbys hold the prompt of that token's session, as they say now."""
    for token in latest:
        asked = pb.Request(await_ready=pb.AwaitReady(session=token.session, epoch=token.epoch, wait_ms=0))
        for standby in standbys:
            link = client.connection.links.find(standby)
            if link is None:
                return False
            response, _ = await link.request(asked, HEARD_WITHIN_S)
            if response.readiness.held_tokens < len(session_of(client).prompt):
                return False
    return bool(latest)


async def lose_in_decode(
    client: AsyncSwarm,
    swarm: LocalSwarm,
    at: int,
    prompt: str | Sequence[int],
    new_tokens: int,
    *,
    standby: bool = False,
    leaves: bool = False,
    **sampling: Any,  # noqa: ANN401 - whatever `generate` takes
) -> tuple[Generation, LocalPeer]:
    """Streams a generation, and kills the peer of hop `at`, or its standby, a little after it has one; or has it leave
    of its own accord."""
    generation, victims = await lose_together(
        client, swarm, (at,), prompt, new_tokens, standby=standby, leave=leaves, **sampling
    )
    return generation, victims[0]


@asynccontextmanager
async def taken_over(
    swarm: LocalSwarm,
    at: int,
    prompt: Sequence[int],
    new_tokens: int,
    back: Callable[[LocalPeer], Awaitable[object]],
    **sampling: Any,  # noqa: ANN401 - whatever `generate` takes
) -> AsyncIterator[tuple[AsyncSwarm, Generation, LocalPeer]]:
    """Does as `lose_in_decode`, until the lost peer's standby has gone on with its copy and computed no prompt
    again: on a busy machine it may be taken for lost as well. Until then `back` brings each lost peer back."""
    for _ in range(MOST_LOSSES):
        async with AsyncSwarm(BUNDLED, initial_peers=swarm.addresses) as client:
            generation, victim = await lose_in_decode(client, swarm, at, prompt, new_tokens, **sampling)
            if any(
                one.by_standby and 0 < one.recomputed_tokens < len(prompt)
                for one in recoveries_from(generation, victim)
            ):
                yield client, generation, victim
                return
        await back(victim)
    raise AssertionError("no standby has gone on with its copy")


def recoveries_from(generation: Generation, victim: LocalPeer) -> list[Recovery]:
    """Those from the loss of that peer. On a busy machine another may be taken for lost besides, or instead: the
    victim is left with it."""
    return [one for one in generation.recoveries if one.hop.peer_id == victim.peer_id]


async def lose_together(
    client: AsyncSwarm,
    swarm: LocalSwarm,
    hops: Sequence[int],
    prompt: str | Sequence[int],
    new_tokens: int,
    *,
    standby: bool = False,
    leave: bool = False,
    **sampling: Any,  # noqa: ANN401 - as above
) -> tuple[Generation, list[LocalPeer]]:
    """Streams a generation, and kills the peers of these hops, or their standbys, once there are copies of the prompt;
    or has them leave. Without guesses, unless told: with them it would be over before its copies have begun."""
    await know_all(client, swarm)
    sampling = {"speculation": "off"} | sampling
    for _ in range(MOST_GENERATIONS):
        pieces = client.stream_events(
            prompt, max_new_tokens=new_tokens, timeout_s=FORMATION_TIMEOUT_S, **sampling
        )
        generation, victims = await _strike(client, swarm, hops, pieces, standby=standby, leave=leave)
        if victims:
            return generation, victims
    raise AssertionError("each generation was over before its copies had begun")


async def _strike(
    client: AsyncSwarm,
    swarm: LocalSwarm,
    hops: Sequence[int],
    pieces: AsyncGenerator[TextPiece, None],
    *,
    standby: bool,
    leave: bool,
) -> tuple[Generation, list[LocalPeer]]:
    """Does as `lose_together`, one generation; no victims: it was over before."""
    victims: list[LocalPeer] = []
    leaving: list[asyncio.Task[int]] = []
    tokens, strike_at = 0, 0
    latest: list[pb.Token] | None = None
    try:
        while True:
            async with asyncio.timeout(HEARD_WITHIN_S):
                piece = await anext(pieces)
            tokens += len(piece.token_ids)
            if piece.generation is not None:
                return piece.generation, victims
            session = session_of(client)
            latest = watch_tokens(session) if latest is None else latest
            route = session.log.route
            assert route is not None
            serving = [route.hops[at].peer_id for at in hops]
            keeping = [session.standbys.substitute(hop) for hop in serving]
            if all(keeping) and not strike_at:
                strike_at = tokens + TOKENS_LATER
            if victims or not all(keeping) or tokens < strike_at:
                continue
            if await hold_prompt(client, latest, keeping):
                peers = {peer.peer_id: peer for peer in swarm.peers}
                victims = [peers[peer_id] for peer_id in (keeping if standby else serving)]
                if leave:
                    leaving = [asyncio.create_task(swarm.stop(victim)) for victim in victims]
                else:
                    await asyncio.gather(*map(swarm.kill, victims))
    finally:
        await pieces.aclose()
        await asyncio.gather(*leaving)


async def lose_in_prompt(
    client: AsyncSwarm, swarm: LocalSwarm, at: int, prompt: Sequence[int], new_tokens: int
) -> tuple[Generation, LocalPeer]:
    """Streams a generation, and kills the peer of hop `at` once the circuit is chosen, before the first token."""
    pieces = client.stream_events(prompt, max_new_tokens=new_tokens, timeout_s=FORMATION_TIMEOUT_S)
    first = asyncio.ensure_future(anext(pieces))
    await until(lambda: bool(client.connection.sinks) and session_of(client).log.route is not None)
    route = session_of(client).log.route
    assert route is not None
    (victim,) = [peer for peer in swarm.peers if peer.peer_id == route.hops[at].peer_id]
    await swarm.kill(victim)
    async with asyncio.timeout(HEARD_WITHIN_S):
        await first
        generation = [piece.generation async for piece in pieces][-1]
    assert generation is not None
    return generation, victim
