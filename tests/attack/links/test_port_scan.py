"""A client learns nothing of a volunteer's network by naming hops, and has nobody knock at others' doors."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from support.links.data_plane import End, asynchronous, facts_at, soon
from support.swarms.served_peer import Served, model, served

from molink.dht.identity.dialable import Ranges, own_ranges
from molink.dht.identity.identity import Identity
from molink.peer.models.model import LocalModel
from molink.peer.serving.data_plane import DataPlaneSettings, KnownSwarm
from molink.peer.serving.dials import BACKOFF, SHARED_FAILURES, DialBackoff
from molink.peer.serving.timeouts import ServingTimeouts
from molink.peer.wire.link.certificate import new_certificate
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.shards.address_ranges import AddressRange

__all__ = ["model"]

PUBLIC: Ranges = frozenset({AddressRange.PUBLIC})
HERE = own_ranges(["127.0.0.1"])
SOON = ServingTimeouts(unreached_s=0.4)
HASTY = DataPlaneSettings(timeouts=SOON)
"""Neighbours are given up soon."""


class Door:
    """A port of this network that is none of the swarm's business, and counts who knocks."""

    def __init__(self) -> None:
        self.knocks = 0
        self.address = ""

    async def knocked(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.knocks += 1
        try:
            await reader.read(1)
        finally:  # also when the loop ends meanwhile
            writer.transport.abort()


@asynccontextmanager
async def door() -> AsyncIterator[Door]:
    found = Door()
    server = await asyncio.start_server(found.knocked, "127.0.0.1", 0)
    async with server:
        found.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield found


async def asked_for(peer: Served, address: str, session: int = 1, **facts: str) -> tuple[pb.Refusal, float]:
    """What a client hears of a circuit whose next hop is said to be at that address, and after how many seconds."""
    stranger = Identity.generate()
    claimed = facts_at(stranger, new_certificate(stranger.peer_id), address)
    asked = peer.with_neighbour(stranger, claimed)
    asked.session = bytes([session]) * 16
    started = time.perf_counter()
    assert (await peer.reserve(asked)).HasField("reserved")
    refusal = (await peer.ready(asked)).refusal
    taken_s = time.perf_counter() - started
    await peer.release(asked)
    return refusal, taken_s


@asynchronous
async def test_no_door_of_a_private_network_is_knocked_at_where_the_swarm_is_not(model: LocalModel) -> None:
    async with served(model, settings=HASTY, swarm=KnownSwarm(own_ranges=PUBLIC)) as peer, door() as shut:
        port = shut.address.rpartition(":")[2]
        hosts = ("127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "0.0.0.0")  # noqa: S104 - to be dialled
        for session, host in enumerate(hosts, 1):
            refusal, _ = await asked_for(peer, f"{host}:{port}", session)
            assert (refusal.code, refusal.detail) == ("link", "it could not be reached")
        assert shut.knocks == 0


@asynchronous
async def test_where_the_swarm_is_its_neighbours_are_dialled(model: LocalModel) -> None:
    async with served(model, swarm=KnownSwarm(own_ranges=HERE)) as peer, End() as neighbour:
        asked = peer.with_neighbour(neighbour.identity, neighbour.facts)
        assert (await peer.reserve(asked)).HasField("reserved")
        assert (await peer.ready(asked)).readiness.ready


@asynchronous
async def test_refused_reset_silent_and_not_allowed_read_the_same_and_take_as_long(model: LocalModel) -> None:
    async def reset(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    told_all = asyncio.Event()

    async def silent(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await told_all.wait()
        writer.close()

    async with (
        served(model, kv_tokens=4000, settings=HASTY, swarm=KnownSwarm(own_ranges=HERE)) as peer,
        await asyncio.start_server(reset, "127.0.0.1", 0) as resets,
        await asyncio.start_server(silent, "127.0.0.1", 0) as stays_silent,
    ):
        ports = [server.sockets[0].getsockname()[1] for server in (resets, stays_silent)]
        addresses = [f"127.0.0.1:{port}" for port in (*ports, 1)] + ["10.255.255.1:22"]
        told = [await asked_for(peer, address, number) for number, address in enumerate(addresses, 1)]
        told_all.set()
        assert {(refusal.code, refusal.detail) for refusal, _ in told} == {
            ("link", "it could not be reached")
        }
        assert all(taken_s >= SOON.unreached_s for _, taken_s in told)


@pytest.mark.attack
@asynchronous
async def test_a_door_that_many_identities_claim_is_knocked_at_a_few_times_only(model: LocalModel) -> None:
    async with served(model, kv_tokens=4000, settings=HASTY) as peer, door() as victim:
        for session in range(1, 13):
            refusal, _ = await asked_for(peer, victim.address, session)
            assert refusal.code == "link"
        assert 1 <= victim.knocks <= SHARED_FAILURES * 4  # gRPC knocks again where a door was shut


@asynchronous
async def test_the_newest_facts_that_the_swarm_knows_are_dialled_and_not_what_a_client_hands_on(
    model: LocalModel,
) -> None:
    async with (
        End() as neighbour,
        served(model, swarm=KnownSwarm(newest_facts=lambda _: replace(neighbour.facts, sequence=9))) as peer,
        door() as elsewhere,
    ):
        old = replace(neighbour.facts, grpc_addresses=(elsewhere.address,), sequence=3)
        asked = peer.with_neighbour(neighbour.identity, old)
        assert (await peer.reserve(asked)).HasField("reserved")
        assert (await soon(peer.ready(asked))).readiness.ready
        assert elsewhere.knocks == 0


def test_a_claim_that_failed_waits_longer_each_time_and_no_longer_than_the_longest() -> None:
    backoff, now = DialBackoff(), 0.0
    waits = []
    for _ in range(12):
        backoff.failed("a", "192.0.2.1:1", now)
        began = now
        while not backoff.may_dial("a", "192.0.2.1:1", now):
            now += 1.0
        waits.append(now - began)
    assert waits == sorted(waits)
    assert waits[-1] == BACKOFF.longest_s


def test_one_dial_counts_once_however_many_sessions_have_waited_for_it() -> None:
    backoff, alone = DialBackoff(), DialBackoff()
    for _ in range(8):
        backoff.failed("a", "192.0.2.1:1", 5.0)
    alone.failed("a", "192.0.2.1:1", 5.0)
    for now in (5.0, 5.0 + BACKOFF.first_s - 0.1, 5.0 + BACKOFF.first_s):
        assert backoff.may_dial("a", "192.0.2.1:1", now) == alone.may_dial("a", "192.0.2.1:1", now)
    assert backoff.may_dial("a", "192.0.2.1:1", 5.0 + BACKOFF.first_s)
    assert backoff.may_dial("b", "192.0.2.1:1", 5.0)


def test_who_has_answered_at_an_address_is_dialled_whoever_claims_it_in_vain() -> None:
    backoff = DialBackoff()
    backoff.answered("honest", "192.0.2.1:1")
    for number in range(40):
        backoff.failed(f"sybil {number}", "192.0.2.1:1", 0.0)
    assert backoff.may_dial("honest", "192.0.2.1:1", 0.0)
    assert not backoff.may_dial("sybil 40", "192.0.2.1:1", 0.0)
    assert backoff.may_dial("sybil 40", "192.0.2.2:1", 0.0)
