"""Standbys are sought again where there was none: peers load layers, come, and have room again."""

import asyncio
from collections.abc import Mapping, Sequence

import pytest
from support.circuits.generating import Generating, rest
from support.links.data_plane import asynchronous, soon, until

from molink.client.circuit import standbys as standbys_module
from molink.client.circuit.route_selector import StandbyChoice
from molink.dht.records.records import PeerView
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.routing import Route
from molink.routing.routes.copy_forms import CopyForm
from molink.shards.backoff import Backoff


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
    got = asyncio.create_task(rest(run.session.tokens(5.0)))
    await run.started()
    await until(lambda: bool(run.spare.reserved))
    assert sought[0] == [0, 1]
    assert pulled == [1], "the swarm is looked at anew at once, and then as it is anyway"
    await until(lambda: sought[-1] == [0])
    run.token(3, 1, finish=pb.STOP)
    await soon(got)
    assert [copy.peer_id for copy in run.session.log.standbys.values()] == [run.spare.peer_id]
