"""Discovery with real hosts on loopback: who is there is seen, who is not is not."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import replace
from typing import Any

import psutil
import pytest
from support.attackers.lying_planes import set_wall_clock, tell
from support.swarms.swarm_examples import OTHER_MODEL, QUICK, facts_of, state_of

from molink.dht.host.host import Listen
from molink.dht.identity.identity import Identity
from molink.dht.identity.swarm_key import SwarmKey
from molink.dht.membership.membership import tag_of
from molink.dht.node.discovery import BootstrapUnreachable, Discovery, PortInUse
from molink.dht.records.announcement import sign_facts, sign_loss, sign_state
from molink.dht.records.records import PROTOCOL_VERSION, PeerFacts, PeerLoss, PeerView, RelayAt

PATIENCE_S = 120.0
RARE = replace(QUICK, interval_s=600.0, refute_s=1.0, redial_before_loss_s=0.2)
PATIENT = replace(
    RARE,
    anti_entropy_interval_s=20.0,
    redial_s=2.0,
    upkeep_s=0.5,
    silence_s=30.0,
    bootstrap_timeout_s=PATIENCE_S,
)
"""Many peers of one process keep it busy."""
HIDDEN = 12
"""Peers that nobody can dial, beside one that everybody can."""
Condition = Callable[[tuple[PeerView, ...]], bool]


@contextlib.asynccontextmanager
async def peer(*initial: str, swarm_key: SwarmKey | None = None) -> AsyncIterator[Discovery]:
    """A peer that has announced itself."""
    identity = Identity.generate()
    async with Discovery(identity, initial_peers=initial, timing=QUICK, swarm_key=swarm_key) as discovery:
        await discovery.announce(replace(facts_of(identity), addresses=()), state_of(identity))
        yield discovery


async def until(discovery: Discovery, condition: Condition) -> tuple[PeerView, ...]:
    """Waits until the view is as wanted."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition(views := discovery.snapshot()):
            await discovery.changed(PATIENCE_S)
    return views


def exactly(*expected: Discovery) -> Condition:
    ids = sorted(discovery.identity.peer_id for discovery in expected)
    return lambda views: [view.peer_id for view in views] == ids


async def all_see(observers: Iterable[Discovery], *expected: Discovery) -> None:
    for observer in observers:
        await until(observer, exactly(*expected))


async def all_have_links(observers: Iterable[Discovery], count: int) -> None:
    """Waits until each has links with so many others."""
    async with asyncio.timeout(PATIENCE_S):
        while not all(one.stats.neighbours >= count for one in observers):  # noqa: ASYNC110 - a link is told to nobody
            await asyncio.sleep(0.05)


def run(scenario: Callable[[], Any]) -> None:
    asyncio.run(scenario())


def test_three_peers_find_each_other_through_the_first() -> None:
    async def scenario() -> None:
        async with peer() as ada, peer(*ada.addresses) as bob, peer(*ada.addresses) as eve:
            await all_see((ada, bob, eve), ada, bob, eve)
            (view,) = (view for view in bob.snapshot() if view.peer_id == ada.identity.peer_id)
            assert view.facts.addresses == ada.addresses
            assert view.state.spans == state_of(ada.identity).spans

    run(scenario)


def test_a_swarm_is_joined_through_any_peer_and_outlives_its_first() -> None:
    async def scenario() -> None:
        async with contextlib.AsyncExitStack() as others:
            async with peer() as first:
                second = await others.enter_async_context(peer(*first.addresses))
                third = await others.enter_async_context(peer(*first.addresses))
                await all_see((second, third), first, second, third)
            await all_see((second, third), second, third)
            fourth = await others.enter_async_context(peer(*second.addresses))
            await all_see((second, third, fourth), second, third, fourth)

    run(scenario)


def test_two_swarms_become_one_through_a_peer_that_knows_both() -> None:
    async def scenario() -> None:
        async with (
            peer() as ada,
            peer(*ada.addresses) as bob,
            peer() as eve,
            peer(*ada.addresses, *eve.addresses) as bridge,
        ):
            await all_see((ada, bob, eve, bridge), ada, bob, eve, bridge)

    run(scenario)


def test_changes_are_told_at_once() -> None:
    async def scenario() -> None:
        async with peer() as ada, peer(*ada.addresses) as bob:
            await all_see((ada, bob), ada, bob)
            await bob.announce(None, replace(state_of(bob.identity), sessions=7, draining=True))
            await until(ada, lambda views: any(v.state.sessions == 7 and v.state.draining for v in views))
            named = replace(facts_of(bob.identity), addresses=(), name="renamed", model=OTHER_MODEL)
            await bob.announce(named, state_of(bob.identity))
            await until(ada, lambda views: any(view.facts.name == "renamed" for view in views))
            assert [view.peer_id for view in ada.snapshot(OTHER_MODEL.model_hash)] == [bob.identity.peer_id]

    run(scenario)


def test_a_leave_is_seen_before_the_state_expires() -> None:
    async def scenario() -> None:
        slow = replace(QUICK, interval_s=600.0)
        async with peer() as ada:
            identity = Identity.generate()
            async with Discovery(identity, initial_peers=ada.addresses, timing=slow) as bob:
                await bob.announce(replace(facts_of(identity), addresses=()), state_of(identity))
                await until(ada, exactly(ada, bob))
                await bob.leave()
                await until(ada, exactly(ada))
                assert bob.identity.peer_id not in {view.peer_id for view in bob.snapshot()}

    run(scenario)


@contextlib.asynccontextmanager
async def rarely_speaking(*initial: str) -> AsyncIterator[Discovery]:
    """A peer whose state is good for half an hour, and which goes without a word."""
    identity = Identity.generate()
    async with Discovery(identity, initial_peers=initial, timing=RARE) as discovery:
        await discovery.announce(replace(facts_of(identity), addresses=()), state_of(identity))
        yield discovery


def test_who_goes_without_a_word_is_forgotten_long_before_its_state_expires() -> None:
    async def scenario() -> None:
        async with rarely_speaking() as ada, rarely_speaking(*ada.addresses) as bob:
            async with rarely_speaking(*ada.addresses, *bob.addresses) as eve:
                await all_see((ada, bob, eve), ada, bob, eve)
            await all_see((ada, bob), ada, bob)

    run(scenario)


def test_who_cannot_be_dialled_is_asked_for_over_its_relays_before_it_is_missed() -> None:
    async def is_there(_: PeerFacts) -> bool:
        return True

    async def is_not_there(_: PeerFacts) -> bool:
        return False

    async def scenario() -> None:
        identity = Identity.generate()
        relays = (RelayAt(Identity.generate().peer_id, "192.0.2.1:443"),)
        hidden = replace(facts_of(identity), addresses=(), grpc_addresses=(), relays=relays)
        async with rarely_speaking() as ada, rarely_speaking(*ada.addresses) as bob:
            ada.over_relays, bob.over_relays = is_there, is_not_there
            initial = (*ada.addresses, *bob.addresses)
            async with Discovery(identity, initial_peers=initial, timing=RARE) as eve:
                await eve.announce(hidden, state_of(identity))
                await all_see((ada, bob, eve), ada, bob, eve)
                await all_have_links((ada, bob), 2)  # who has none with it does not hear that it has gone
            await all_see((bob,), ada, bob)
            await all_see((ada,), ada, bob, eve)

    run(scenario)


@pytest.mark.full
def test_where_hardly_anybody_can_be_dialled_all_see_all_and_everybody_has_a_link() -> None:
    async def scenario() -> None:
        async with contextlib.AsyncExitStack() as stack:
            everybody: list[Discovery] = []
            initial: tuple[str, ...] = ()
            relays = (RelayAt(Identity.generate().peer_id, "192.0.2.1:443"),)
            for _ in range(1 + HIDDEN):
                identity = Identity.generate()
                one = await stack.enter_async_context(
                    Discovery(identity, initial_peers=initial, timing=PATIENT)
                )
                facts = replace(facts_of(identity), addresses=(), relays=relays if initial else ())
                await one.announce(facts, state_of(identity))
                initial = initial or one.addresses
                everybody.append(one)
            await all_see(everybody, *everybody)
            await all_have_links(everybody, 1)

    run(scenario)


def test_who_is_called_gone_and_is_not_says_so() -> None:
    async def scenario() -> None:
        async with (
            rarely_speaking() as ada,
            rarely_speaking(*ada.addresses) as bob,
            rarely_speaking(*ada.addresses) as eve,
        ):
            await all_see((ada, bob, eve), ada, bob, eve)
            tag = tag_of(ada.identity.peer_id)
            before = ada.membership.sequence_of(tag)
            for liar in (bob, eve):
                told = PeerLoss(tag_of(liar.identity.peer_id), tag, before)
                record = sign_loss(told, liar.identity)

                liar.membership.receive(record)
                await tell(liar, record)
            async with asyncio.timeout(PATIENCE_S):
                for observer in (bob, eve):
                    while observer.membership.sequence_of(tag) <= before:
                        await observer.changed(1.0)
                    assert observer.membership.witnesses(tag) == 0
            await all_see((bob, eve), ada, bob, eve)

    run(scenario)


def test_a_peer_that_comes_back_is_seen_although_its_clock_went_back() -> None:
    async def scenario() -> None:
        identity = Identity.generate()
        async with peer() as ada:
            facts = replace(facts_of(identity), addresses=())
            async with Discovery(identity, initial_peers=ada.addresses, timing=QUICK) as before:
                await set_wall_clock(before, lambda: 4e9)
                await before.announce(facts, state_of(identity))
                await until(ada, exactly(ada, before))
                await before.leave()
            await until(ada, exactly(ada))
            async with Discovery(identity, initial_peers=ada.addresses, timing=QUICK) as after:
                await set_wall_clock(after, lambda: 1e9)
                async with peer(*ada.addresses) as witness:
                    await until(witness, exactly(ada, witness))
                    old = replace(facts_of(identity, sequence=int(4e12) + 5), name="old")
                    after.membership.receive(sign_facts(old, identity))
                    await after.announce(facts, state_of(identity))
                    await all_see((ada, witness), ada, witness, after)
                    assert after.stats.neighbours

    run(scenario)


def test_a_client_sees_the_peers_and_nobody_sees_the_client() -> None:
    async def scenario() -> None:
        async with peer() as ada, peer(*ada.addresses) as bob:
            await all_see((ada, bob), ada, bob)
            identity = Identity.generate()
            async with Discovery(identity, initial_peers=ada.addresses, timing=QUICK, listen=None) as client:
                assert client.addresses == ()
                await until(client, exactly(ada, bob))
                with pytest.raises(ValueError, match="client"):
                    await client.announce(facts_of(identity), state_of(identity))
                await client.refresh()
                assert client.stats.messages_out.get("gossip", 0) == 0
                async with peer(*bob.addresses) as late:
                    await until(client, exactly(ada, bob, late))
                    await until(late, exactly(ada, bob, late))
                await until(client, exactly(ada, bob))
            listening = {
                connection.laddr.port
                for connection in psutil.Process().net_connections("tcp")
                if connection.status == psutil.CONN_LISTEN
            }
            assert len(listening & {_port(ada), _port(bob)}) == 2

    run(scenario)


@pytest.mark.full
def test_a_client_goes_on_when_the_peer_it_started_from_is_gone() -> None:
    async def scenario() -> None:
        async with contextlib.AsyncExitStack() as others:
            async with peer() as ada:
                bob = await others.enter_async_context(peer(*ada.addresses))
                await all_see((ada, bob), ada, bob)
                client = await others.enter_async_context(
                    Discovery(Identity.generate(), initial_peers=ada.addresses, timing=QUICK, listen=None)
                )
                await until(client, exactly(ada, bob))
            await until(client, exactly(bob))
            eve = await others.enter_async_context(peer(*bob.addresses))
            await until(client, exactly(bob, eve))

    run(scenario)


def test_an_outsider_without_the_swarm_key_is_refused() -> None:
    async def scenario() -> None:
        key = SwarmKey.generate()
        async with peer(swarm_key=key) as ada, peer(*ada.addresses, swarm_key=key) as member:
            await all_see((ada, member), ada, member)
            for outsiders_key in (None, SwarmKey.generate()):
                hasty = replace(QUICK, dial_timeout_s=0.5)
                outsider = Discovery(
                    Identity.generate(), initial_peers=ada.addresses, timing=hasty, swarm_key=outsiders_key
                )
                with pytest.raises(BootstrapUnreachable, match="swarm key"):
                    async with outsider:
                        pytest.fail("an outsider got in")
            await until(ada, exactly(ada, member))

    run(scenario)


def test_nothing_forged_altered_or_foreign_reaches_a_snapshot() -> None:
    async def scenario() -> None:
        async with peer() as ada, peer(*ada.addresses) as mallory:
            await all_see((ada, mallory), ada, mallory)
            victim, future = Identity.generate(), Identity.generate()
            good = sign_facts(facts_of(victim), victim)
            state = sign_state(state_of(victim), victim)
            now_ms = int(1000 * time.time())
            stranger = replace(facts_of(future, sequence=now_ms), protocol_version=PROTOCOL_VERSION + 1)
            its_state = state_of(future, sequence=now_ms + 1, facts_sequence=now_ms)
            sent = (
                good[:40] + bytes((good[40] ^ 1,)) + good[41:],
                b"\xf1" + bytes(64) + good[65:],
                state[:-1],
                b"\x51" + bytes(64) + state[65:],
                b"garbage",
                bytes(4000),
                sign_facts(stranger, future),
                sign_state(its_state, future),
            )

            await tell(mallory, *sent)
            async with asyncio.timeout(PATIENCE_S):
                while future.peer_id not in {view.peer_id for view in ada.snapshot(other_versions=True)}:
                    await ada.changed(PATIENCE_S)
            assert {view.peer_id for view in ada.snapshot()} <= {
                ada.identity.peer_id,
                mallory.identity.peer_id,
            }
            refusals = ada.stats.refusals
            assert refusals["forged"] + refusals["malformed"] >= 4

    run(scenario)


def test_unreachable_initial_peers_are_named_with_the_reason() -> None:
    async def scenario() -> None:
        stranger = Identity.generate().peer_id
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"/ip4/127.0.0.1/tcp/{free.getsockname()[1]}/p2p/{stranger}"
        async with peer() as ada:
            impostor = f"/ip4/127.0.0.1/tcp/{_port(ada)}/p2p/{stranger}"
            with pytest.raises(BootstrapUnreachable) as failure:
                async with Discovery(Identity.generate(), initial_peers=(address, impostor), timing=QUICK):
                    pytest.fail("nobody is there")
            assert [tried for tried, _ in failure.value.attempts] == [address, impostor]
            assert all(reason for _, reason in failure.value.attempts)
            async with peer(address, *ada.addresses) as bob:
                await all_see((ada, bob), ada, bob)

    run(scenario)


def test_a_port_that_is_taken_is_refused() -> None:
    async def scenario() -> None:
        async with peer() as ada:
            with pytest.raises(PortInUse, match=str(_port(ada))):
                async with Discovery(
                    Identity.generate(), listen=Listen("127.0.0.1", _port(ada)), timing=QUICK
                ):
                    pytest.fail("the port was shared")

    run(scenario)


@pytest.mark.parametrize("address", ["", "127.0.0.1:4001", "/ip4/127.0.0.1/tcp/4001", "/p2p/x"])
def test_what_is_no_address_of_a_peer_is_refused_before_anything_starts(address: str) -> None:
    with pytest.raises(ValueError, match="p2p"):
        Discovery(Identity.generate(), initial_peers=(address,))


def test_cycles_leave_no_threads_and_no_sockets() -> None:
    async def scenario() -> None:
        async with peer() as ada:
            async with peer(*ada.addresses) as bob:
                await until(bob, exactly(ada, bob))
            process = psutil.Process()
            threads, descriptors = _threads(), _descriptors(process)
            for _ in range(20):
                async with peer(*ada.addresses) as bob:
                    await until(bob, lambda views: len(views) >= 2)
            async with asyncio.timeout(PATIENCE_S):
                while ada.stats.connections or _descriptors(process) > descriptors:
                    await ada.changed(0.2)
            assert _threads() <= threads

    run(scenario)


def _port(discovery: Discovery) -> int:
    return int(discovery.addresses[0].split("/")[4])


def _threads() -> set[threading.Thread]:
    """All but the workers of pools, which come where all others are busy, and stay for a while."""
    workers = ("asyncio_", "Trio thread")
    return {thread for thread in threading.enumerate() if not thread.name.startswith(workers)}


def _descriptors(process: psutil.Process) -> int:
    return process.num_handles() if psutil.WINDOWS else process.num_fds()
