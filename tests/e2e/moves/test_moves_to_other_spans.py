"""A generation goes over to a circuit of other spans as it runs: computed anew there, it never waits for it."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from support.chaos.losses import know_all, session_of
from support.swarms.forked_peers import ForkedSwarm
from support.swarms.live_swarms import (
    BUNDLED,
    FORMATION_TIMEOUT_S,
    References,
    bundled_folder,
    generate,
)

from molink.client.api.swarm import AsyncSwarm
from molink.client.circuit import moves as moves_module
from molink.client.circuit import session as session_module
from molink.client.circuit.route_selector import BetterCircuit, RouteSelector, StandbyChoice
from molink.client.epochs.kept_leases import PlannedRoute
from molink.client.epochs.session_log import SessionLog
from molink.dht.records.records import PeerView
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.routing import Route
from molink.shards.spec import Span

pytestmark = [pytest.mark.real, pytest.mark.anyio, pytest.mark.full]

PROMPT = "KING RICHARD III:\nNow is the winter of our discontent"
NEW_TOKENS = 300
LATER_TOKENS = 16
HEARD_WITHIN_S = 120.0
CHOOSE = RouteSelector.choose
THREE = 3


async def joined(self: StandbyChoice, route: Route, descriptor: pb.SessionDescriptor) -> BetterCircuit | None:
    """Of three hops the last two are better one, at the peer that is on none of them; that circuit is the best."""
    if len(route.hops) < THREE:
        return None
    views = self._connection.snapshot(self._spec.model_hash)
    found = await CHOOSE(self._selector, views, descriptor, frozenset(route.peer_ids))
    hops = (route.hops[0], replace(found.hops[0], span=Span(6, 12)))
    return BetterCircuit(PlannedRoute(replace(found, hops=hops), {view.peer_id: view for view in views}), {})


async def test_a_generation_goes_over_to_a_circuit_of_fewer_hops_one_of_which_is_on_both_with_the_same_tokens(
    anyio_backend: str, references: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = bundled_folder()
    async with ForkedSwarm() as swarm:
        whole = await swarm.join("whole", "--model", BUNDLED, "--layers", "0:12")
        parts = zip(("low", "middle", "high"), ("0:6", "6:9", "9:12"), strict=True)
        await asyncio.gather(
            *(swarm.join(name, "--model", BUNDLED, "--layers", span) for name, span in parts)
        )

        async def choose_parts(
            self: RouteSelector,
            views: Sequence[PeerView],
            template: pb.SessionDescriptor,
            avoid: frozenset[str],
        ) -> Route:
            return await CHOOSE(self, views, template, avoid | {whole.peer_id})

        monkeypatch.setattr(RouteSelector, "choose", choose_parts)
        monkeypatch.setattr(StandbyChoice, "better", joined)
        monkeypatch.setattr(moves_module, "is_worth_computing", lambda *_: True)
        monkeypatch.setattr(session_module, "RENEW_EVERY_S", 0.3)
        async with AsyncSwarm(BUNDLED, initial_peers=swarm.addresses, partners="off") as client:
            await know_all(client, swarm)
            logs: list[SessionLog] = []
            pieces = client.stream_events(
                PROMPT, max_new_tokens=NEW_TOKENS, speculation="off", timeout_s=FORMATION_TIMEOUT_S
            )
            while True:
                async with asyncio.timeout(HEARD_WITHIN_S):
                    piece = await anext(pieces)
                if piece.generation is not None:
                    break
                logs = logs or [session_of(client).log]
            await pieces.aclose()
            generation = piece.generation
            later = await generate(client, PROMPT, LATER_TOKENS)
    expected = references.greedy(folder, references.ids(folder, PROMPT), NEW_TOKENS)
    assert generation.token_ids == expected
    assert later.token_ids == expected[:LATER_TOKENS]
    low = next(peer for peer in swarm.peers if peer.name == "low")
    assert logs[0].moves == 1, "the generation was over before it could go over"
    if not logs[0].losses:  # on a busy machine a peer may be taken for lost
        assert generation.epochs == 1
        assert [hop.peer_id for hop in generation.circuit.hops] == [low.peer_id, whole.peer_id]
