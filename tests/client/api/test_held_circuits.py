"""Held circuits: leased on every hop, leased anew, given to who begins, and held no more once they are lost."""

import asyncio
from typing import cast

import pytest
from support.links.data_plane import SPEC, asynchronous, soon, until
from support.swarms.swarm_of_fakes import FakeConnection, FakePeer

from molink.client.api.held_circuits import HeldCircuits
from molink.client.api.opened_swarm import OpenedSwarm, SwarmOptions
from molink.client.api.overview import SwarmOverview
from molink.client.api.running_sessions import RunningSessions
from molink.client.circuit.circuit_builder import CircuitBuilder
from molink.client.circuit.connection import SwarmConnection
from molink.client.errors import InvalidRequest, SwarmError
from molink.client.models.model_resolver import ResolvedModel
from molink.client.text.text_work import TextWork
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.shards.spec import SamplingParams, Span
from molink.shards.text.tokenizer import Tokenizer

LOW, HIGH = Span(0, 3), Span(3, 6)
SOON_S = 0.01
NEVER_S = 3600.0
WITHIN_S = 120.0


class Holding:
    """One client over fakes."""

    def __init__(self, *peers: FakePeer, renewed_every_s: float = NEVER_S) -> None:
        self.connection = FakeConnection(*peers)
        self.builder = CircuitBuilder(cast("SwarmConnection", self.connection), SPEC)
        self.held = HeldCircuits(self.builder, renewed_every_s)


def leases(peer: FakePeer) -> set[tuple[bytes, int]]:
    """Those that the peer was asked for, and that were not given back."""
    return {(one.session, one.epoch) for one in peer.reserved} - set(peer.released)


@asynchronous
async def test_a_circuit_is_leased_on_every_hop_and_given_back_to_whoever_begins_on_it() -> None:
    low, high = FakePeer(LOW), FakePeer(HIGH)
    client = Holding(low, high)
    await client.held.add(64, WITHIN_S)
    await client.held.add(64, WITHIN_S)
    assert client.held.count == 2
    assert [one.capacity_tokens for one in (*low.reserved, *high.reserved)] == [64] * 4
    assert len(leases(low)) == len(leases(high)) == 2
    [first, _] = client.held.describe()
    assert [hop["peer_id"] for hop in first["hops"]] == [low.peer_id, high.peer_id]
    planned = client.held.take()
    assert planned is not None
    assert planned.route.peer_ids == (low.peer_id, high.peer_id)
    assert client.held.changed.is_set()
    assert len(leases(low)) == len(leases(high)) == client.held.count == 1
    client.held.keep_at_most(0)
    assert leases(low) == leases(high) == set()
    assert client.connection.sinks == {}
    assert client.held.take() is None


@asynchronous
async def test_leases_are_asked_for_anew_in_ever_higher_epochs_of_one_session() -> None:
    low, high = FakePeer(LOW), FakePeer(HIGH)
    client = Holding(low, high, renewed_every_s=SOON_S)
    await client.held.add(64, WITHIN_S)
    await until(lambda: min(len(low.reserved), len(high.reserved)) >= 5)
    for peer in (low, high):
        assert len({one.session for one in peer.reserved}) == 1
        epochs = [one.epoch for one in peer.reserved]
        assert epochs == list(range(epochs[0], epochs[0] + len(epochs)))
        assert peer.released == []
    client.held.keep_at_most(0)
    for peer in (low, high):
        assert (peer.reserved[-1].session, peer.reserved[-1].epoch) in peer.released


@pytest.mark.parametrize("how", ["refused", "link", "failed", "leaving"])
def test_a_circuit_that_is_lost_gives_back_what_it_has_and_is_held_no_more(how: str) -> None:
    @asynchronous
    async def lose() -> None:
        low, high = FakePeer(LOW), FakePeer(HIGH)
        client = Holding(low, high, renewed_every_s=SOON_S if how == "refused" else NEVER_S)
        await client.held.add(64, WITHIN_S)
        [sink] = client.connection.sinks.values()
        match how:
            case "refused":
                high.refuse["reserve"] = pb.Refusal(code="busy", detail="full")
            case "link":
                sink.on_link_closed(high.peer_id, "reset")
            case "failed":
                sink.on_failed(high.peer_id, pb.Failed(detail="paused"))
            case "leaving":
                sink.on_leaving(high.peer_id, pb.Leaving(to_standby=True))
                assert client.held.count == 1
                sink.on_leaving(high.peer_id, pb.Leaving())
        await soon(client.held.changed.wait())
        assert client.held.count == 0
        assert leases(low) == leases(high) == set()
        assert client.connection.sinks == {}

    lose()


@asynchronous
async def test_a_stranger_to_the_circuit_ends_nothing() -> None:
    low, high, other = FakePeer(LOW), FakePeer(HIGH), FakePeer()
    client = Holding(low, high)
    await client.held.add(64, WITHIN_S)
    [sink] = client.connection.sinks.values()
    sink.on_link_closed(other.peer_id, "reset")
    sink.on_failed(other.peer_id, pb.Failed(detail="lies"))
    sink.on_leaving(other.peer_id, pb.Leaving())
    assert client.held.count == 1
    client.held.keep_at_most(0)


@asynchronous
async def test_what_cannot_be_formed_holds_nothing() -> None:
    low, high = FakePeer(LOW), FakePeer(HIGH)
    high.refuse["reserve"] = pb.Refusal(code="memory", detail="full")
    client = Holding(low, high)
    with pytest.raises(SwarmError):
        await client.held.add(64, 0.3)
    assert client.held.count == 0
    assert leases(low) == set()


@asynchronous
async def test_who_stops_while_a_circuit_is_formed_leaves_no_lease() -> None:
    low, high = FakePeer(LOW), FakePeer(HIGH)
    high.silent, high.hang = {"reserve"}, asyncio.Event()
    client = Holding(low, high)
    adding = asyncio.create_task(client.held.add(64, NEVER_S))
    await soon(high.hang.wait())
    adding.cancel()
    await asyncio.gather(adding, return_exceptions=True)
    assert client.held.count == 0
    assert leases(low) == leases(high) == set()


@asynchronous
async def test_what_cannot_be_served_takes_no_circuit_that_is_held() -> None:
    client = Holding(FakePeer(LOW), FakePeer(HIGH))
    await client.held.add(64, WITHIN_S)
    swarm = OpenedSwarm(
        SwarmOptions(None, None, None, None, None, "none", "off", str),
        cast("SwarmConnection", client.connection),
        ResolvedModel(SPEC, {}, from_peers=False),
        client.builder,
        cast("TextWork", None),
        cast("Tokenizer", None),
        RunningSessions(),
        cast("SwarmOverview", None),
        client.held,
    )
    with pytest.raises(InvalidRequest, match="ask for fewer of the likeliest"):
        swarm.session([1] * 10_000, SamplingParams(max_new_tokens=1, prompt_logprobs=20))
    assert client.held.count == 1
    swarm.session([1], SamplingParams(max_new_tokens=1))
    assert client.held.count == 0
