"""Standbys are sought again where there was none, take the places that copies are of, and are let go of in the end."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from support.circuits.generating import Generating, rest
from support.links.data_plane import DEADLINE_S, asynchronous, soon, until
from support.swarms.swarm_of_fakes import FakePeer

from molink.client.circuit import standbys as standbys_module
from molink.client.circuit.route_selector import StandbyChoice
from molink.client.epochs.kept_leases import KeptLeases, PlannedRoute
from molink.dht.records.records import PeerView
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.routing import Route, RouteHop
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


@pytest.mark.parametrize("keeps", [False, True], ids=["a new copy", "one that is there"])
@asynchronous
async def test_a_copy_that_is_asked_for_when_its_circuit_is_over_is_given_back_unless_it_was_there(
    monkeypatch: pytest.MonkeyPatch, keeps: bool
) -> None:
    """Who has a copy already is asked for it again on the next circuit, and stands by as long as the session lasts."""

    async def partners(*asked: object) -> Mapping[int, tuple[PeerView, CopyForm]]:
        return {1: (run.spare.view, CopyForm.INPUTS)} if 1 in asked[3] else {}  # type: ignore[operator]

    monkeypatch.setattr(standbys_module, "SEEK_AFTER_S", 0.0)
    monkeypatch.setattr(StandbyChoice, "partners", partners)
    run = Generating(spare=True)
    standbys = run.session.standbys
    if not keeps:
        run.spare.silent, run.spare.hang = {"reserve"}, asyncio.Event()
    got = asyncio.create_task(rest(run.session.tokens(DEADLINE_S)))
    await run.started()
    if keeps:
        await until(lambda: bool(standbys.by_hop()))
        run.spare.silent, run.spare.hang = {"reserve"}, asyncio.Event()
        standbys.begin(run.session._run.circuit)  # type: ignore[union-attr]  # noqa: SLF001 - as after a failover
    assert run.spare.hang is not None
    await soon(asyncio.ensure_future(run.spare.hang.wait()))
    standbys.pause()
    await until(lambda: all(task.get_name() != "seek standbys" for task in asyncio.all_tasks()))
    assert [epoch for _, epoch in run.spare.released] == ([] if keeps else [1])
    run.token(3, 1, finish=pb.STOP)
    await soon(got)
    assert [epoch for _, epoch in run.spare.released] == [1]


@asynchronous
async def test_a_circuit_that_is_planned_since_a_standby_had_no_room_is_not_mended_with_other_standbys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its hops are others: the tail is its second, and was the third of the circuit that copies are of."""
    run = Generating()
    first, second, tail = FakePeer(Span(0, 2)), FakePeer(Span(2, 4)), FakePeer(Span(4, 6))
    of_first, of_tail = FakePeer(Span(0, 2), layer_ms=5.0), FakePeer(Span(4, 6), layer_ms=5.0)
    other = FakePeer(Span(0, 4), layer_ms=20.0)
    run.low = first
    run.connection.peers[:] = [first, second, tail, of_first, of_tail, other]
    standbys = {0: of_first, 2: of_tail}

    async def partners(*asked: object) -> Mapping[int, tuple[PeerView, CopyForm]]:
        return {at: (peer.view, CopyForm.INPUTS) for at, peer in standbys.items() if at in asked[3]}  # type: ignore[operator]

    def lose_the_tail_too(line: str) -> None:
        tail.reachable = tail.reachable and "no room here" not in line

    monkeypatch.setattr(standbys_module, "SEEK_AFTER_S", 0.0)
    monkeypatch.setattr(StandbyChoice, "partners", partners)
    run.report = lose_the_tail_too
    got = asyncio.create_task(rest(run.session.tokens(DEADLINE_S)))
    await run.started()
    await until(lambda: len(run.session.standbys.by_hop()) == 2)
    standing = run.session.log.route
    assert standing is not None
    shorter = PlannedRoute(replace(standing, hops=standing.hops[1:]), {})
    assert run.session.standbys.circuit_without(shorter, (tail.peer_id,)) is None
    of_first.refuse["reserve"] = pb.Refusal(code="busy", detail="no room here")
    first.reachable = False
    run.session.on_link_closed(first.peer_id, "reset by peer")
    await until(lambda: bool(other.starts))
    route = [hop.peer_id for hop in other.reserved[-1].hops]
    assert route == [other.peer_id, of_tail.peer_id]
    assert not tail.reachable
    run.token(3, 1, finish=pb.STOP, epoch=other.starts[-1].epoch, sender=other)
    assert await soon(got) == [1]


def test_nothing_is_seized_any_more_once_another_circuit_is_planned() -> None:
    def route_of(*peer_ids: str) -> PlannedRoute:
        hops = tuple(RouteHop(one, Span(at, at + 1), (), 1.0, 1.0) for at, one in enumerate(peer_ids))
        return PlannedRoute(Route(hops, 1.0, 0.0), {})

    kept = KeptLeases[pb.SessionDescriptor]()
    kept.seize(route_of("standby", "tail"), lambda *_: route_of("standby", "standby of the tail"))
    seized = kept.take_seized()
    assert seized is not None
    assert kept.seize_without(seized, "tail") == "standby of the tail"
    assert kept.take_again() is None
    assert kept.take_seized() is None
    assert kept.seize_without(seized, "tail") == ""
