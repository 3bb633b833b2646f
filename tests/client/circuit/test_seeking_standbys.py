"""Standbys are sought again where there was none: peers load layers, come, and have room again."""

import asyncio
from collections.abc import Mapping, Sequence

import pytest
from support.circuits.generating import Generating, rest
from support.links.data_plane import DEADLINE_S, asynchronous, soon, until
from support.swarms.swarm_of_fakes import FakePeer

from molink.client.circuit import standbys as standbys_module
from molink.client.circuit.route_selector import StandbyChoice
from molink.dht.records.records import PeerView
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.routing import Route
from molink.routing.routes.copy_forms import CopyForm
from molink.shards.backoff import Backoff
from molink.shards.spec import Span


@asynchronous
async def test_a_hop_for_which_there_was_nobody_gets_a_standby_as_soon_as_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sought: list[Sequence[int]] = []
    pulled: list[int] = []

    async def partners(
        _: StandbyChoice,
        __: Route,
        ___: pb.SessionDescriptor,
        hops: Sequence[int],
        ____: frozenset[str],
        _____: frozenset[str],
    ) -> Mapping[int, tuple[PeerView, CopyForm]]:
        sought.append(hops)
        return {1: (run.spare.view, CopyForm.INPUTS)} if len(sought) > 3 and 1 in hops else {}

    monkeypatch.setattr(standbys_module, "SEEK_AFTER_S", 0.0)
    monkeypatch.setattr(standbys_module, "SEEK_AGAIN", Backoff(0.01, 0.02))
    monkeypatch.setattr(StandbyChoice, "partners", partners)
    monkeypatch.setattr(StandbyChoice, "refresh_now", lambda _: pulled.append(len(sought)))
    run = Generating(spare=True)
    got = asyncio.create_task(rest(run.session.tokens(DEADLINE_S)))
    await run.started()
    await until(lambda: bool(run.spare.reserved))
    assert sought[0] == [0, 1]
    assert pulled == [1], "the swarm is looked at anew at once, and then as it is anyway"
    await until(lambda: sought[-1] == [0])
    run.token(3, 1, finish=pb.STOP)
    await soon(got)
    assert [copy.peer_id for copy in run.session.log.standbys.values()] == [run.spare.peer_id]


@asynchronous
async def test_who_kept_a_copy_of_one_hop_and_then_keeps_that_of_another_is_named_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen: dict[int, FakePeer] = {}

    async def partners(*asked: object) -> Mapping[int, tuple[PeerView, CopyForm]]:
        return {at: (peer.view, CopyForm.INPUTS) for at, peer in chosen.items() if at in asked[3]}  # type: ignore[operator]

    monkeypatch.setattr(standbys_module, "SEEK_AFTER_S", 0.0)
    monkeypatch.setattr(standbys_module, "SEEK_AGAIN", Backoff(0.01, 0.02))
    monkeypatch.setattr(StandbyChoice, "partners", partners)
    run = Generating(spare=True)
    other = FakePeer(Span(3, 6), layer_ms=9.0)
    run.connection.peers.append(other)
    chosen |= {0: other, 1: run.spare}
    got = asyncio.create_task(rest(run.session.tokens(DEADLINE_S)))
    await run.started()
    standbys = run.session.standbys
    await until(lambda: len(standbys.by_hop()) == 2)
    del chosen[1]
    chosen[0] = run.spare
    standbys.seek_for({run.high.peer_id: (other.view, CopyForm.INPUTS)})
    standbys.lose(other.peer_id)
    await until(lambda: standbys.substitute(run.low.peer_id) == run.spare.peer_id)
    for peer in (run.low, run.high, run.spare, other):
        for descriptor in peer.reserved:
            named = [hop.standby_facts for hop in descriptor.hops if hop.standby_facts]
            assert len(set(named)) == len(named), "nobody is named as the standby of two hops"
    run.token(3, 1, finish=pb.STOP)
    await soon(got)
