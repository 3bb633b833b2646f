"""Whatever strangers announce, hold or hand out, peers live, hear each other, and a newcomer is heard too."""

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.attackers.bystander import bystander
from support.attackers.lying_planes import (
    honest,
    links_held,
    now_ms,
    records_with_addresses,
    set_wall_clock,
    tell,
)
from support.links.raw_links import facts_of as link_facts_of
from support.swarms.live_swarms import References, free_ports
from support.swarms.swarm_examples import QUICK, facts_of, state_of

from molink.client.api.swarm import AsyncSwarm
from molink.client.local.local_swarm import LocalSwarm
from molink.dht.host.host import Listen
from molink.dht.identity.identity import Identity
from molink.dht.membership.membership import tag_of
from molink.dht.node.discovery import Discovery
from molink.dht.node.joining import Fallback
from molink.dht.records.announcement import sign_facts, sign_loss, sign_state
from molink.dht.records.records import PeerLoss
from molink.peer.state_dir import StateDir

HEARD_WITHIN_S = 120.0
UNDIALLABLE = ("/foo", "/ip4/127.0.0.1/tcp/99999", "/ip4/1.2.3.4.5/tcp/1", "/dns/x/tcp/-1", "/unix/tmp/x", "")
EIGHT_WEEKS_MS = 8 * 7 * 86_400_000


def ids(discoveries: Iterable[Discovery]) -> set[str]:
    return {discovery.identity.peer_id for discovery in discoveries}


async def until(observer: Discovery, holds: Callable[[set[str]], bool]) -> None:
    """Waits until those that the observer sees are as wanted."""
    async with asyncio.timeout(HEARD_WITHIN_S):
        while not holds({view.peer_id for view in observer.snapshot()}):
            await observer.changed(1.0)


async def all_hear(observers: Sequence[Discovery], speaker: Discovery, sessions: int) -> None:
    """What one says now reaches everybody."""
    await speaker.announce(None, replace(state_of(speaker.identity), sessions=sessions))
    async with asyncio.timeout(HEARD_WITHIN_S):
        for observer in observers:
            while not any(
                view.peer_id == speaker.identity.peer_id and view.state.sessions == sessions
                for view in observer.snapshot()
            ):
                await observer.changed(1.0)


@pytest.mark.full
@pytest.mark.anyio
async def test_addresses_that_nobody_can_dial_end_no_control_plane() -> None:
    async with contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(honest())
        planes = [first]
        planes += [await stack.enter_async_context(honest(*first.addresses)) for _ in range(2)]
        async with contextlib.AsyncExitStack() as leavers:
            leaving = [await leavers.enter_async_context(honest(*first.addresses))]
            liar = await stack.enter_async_context(honest(*first.addresses))
            await until(planes[-1], lambda seen: ids((*planes, *leaving, liar)) <= seen)
            lies = [
                record
                for address in 2 * UNDIALLABLE
                for record in records_with_addresses(Identity.generate(), (address,))
            ]
            await tell(liar, *lies)
        for plane in planes:
            await until(plane, lambda seen: not seen & ids(leaving))
        for speaker in planes:
            await all_hear(planes, speaker, 5)
        assert all(plane.failure is None for plane in planes)


@pytest.mark.real
@pytest.mark.full
@pytest.mark.anyio
async def test_peers_outlive_announcements_of_addresses_that_nobody_can_dial(
    attacked: LocalSwarm, client: AsyncSwarm, references: References
) -> None:
    served = link_facts_of(client, "front").model
    async with (
        bystander(attacked, client, references) as bystanding,
        honest(*attacked.addresses, model=served) as liar,
    ):
        before = bystanding.generations
        async with asyncio.timeout(HEARD_WITHIN_S):
            while bystanding.generations < before + 3:
                for address in UNDIALLABLE:
                    await tell(liar, *records_with_addresses(Identity.generate(), (address,), served))
                await asyncio.sleep(0.1)
        await liar.leave()


@pytest.mark.full
@pytest.mark.anyio
async def test_whoever_takes_all_links_of_two_peers_keeps_no_newcomer_from_being_heard() -> None:
    async with honest() as ada, honest(*ada.addresses) as bob:
        await until(ada, lambda seen: ids((ada, bob)) <= seen)
        async with (
            links_held((*ada.addresses, *bob.addresses), 11),
            honest(*ada.addresses, *bob.addresses) as eve,
        ):
            for observer in (ada, bob, eve):
                await until(observer, lambda seen: ids((ada, bob, eve)) <= seen)
            for number, speaker in enumerate((eve, ada, eve, bob, eve)):
                await all_hear((ada, bob, eve), speaker, 10 + number)


@pytest.mark.anyio
@pytest.mark.parametrize("kept", [True, False])
async def test_a_peer_whose_clock_was_wrong_is_heard_after_a_restart(tmp_path: Path, kept: bool) -> None:
    identity = Identity.generate()
    with StateDir(tmp_path) as durable:
        async with honest() as ada, honest(*ada.addresses) as bob:
            async with Discovery(
                identity, initial_peers=ada.addresses, timing=QUICK, durable=durable
            ) as before:
                await set_wall_clock(before, lambda: time.time() + 600.0)
                await before.announce(replace(facts_of(identity), addresses=()), state_of(identity))
                await until(bob, lambda seen: identity.peer_id in seen)
                await before.leave()
            await until(bob, lambda seen: identity.peer_id not in seen)
            async with honest(*ada.addresses, identity=identity, durable=durable if kept else None) as after:
                for observer in (ada, bob):
                    await until(observer, lambda seen: identity.peer_id in seen)
                await all_hear((ada, bob), after, 8)


@pytest.mark.anyio
async def test_two_liars_cannot_make_a_peer_unheard_after_its_restart() -> None:
    identity = Identity.generate()
    async with honest() as ada, honest(*ada.addresses) as liar, honest(*ada.addresses) as other:
        async with honest(*ada.addresses, identity=identity) as victim:
            await until(ada, lambda seen: ids((liar, other, victim)) <= seen)
            for ahead_s in (86_000, 3_600, 25):
                for one in (liar, other):
                    loss = PeerLoss(
                        tag_of(one.identity.peer_id), tag_of(identity.peer_id), now_ms() + 1000 * ahead_s
                    )
                    await tell(one, sign_loss(loss, one.identity))
            await all_hear((ada, liar, other), victim, 4)
            sequence = ada.membership.sequence_of(tag_of(identity.peer_id))
            assert sequence <= now_ms() + 31_000
        async with honest(*ada.addresses, identity=identity) as victim:
            await all_hear((ada, liar, other), victim, 6)


@pytest.mark.anyio
async def test_old_records_are_not_alive_because_a_stranger_calls_them_new() -> None:
    old, records = now_ms() - EIGHT_WEEKS_MS, []
    for number in range(20):  # signed beforehand: who falls silent for as long as that may take is not alive
        identity = Identity.generate()
        facts = facts_of(identity, sequence=old + number, ttl_s=86_400)
        state = state_of(identity, sequence=old + number + 50, facts_sequence=old + number, ttl_s=86_400)
        records += [(identity, sign_facts(facts, identity), sign_state(state, identity))]
    async with honest() as ada, honest(*ada.addresses) as bob, honest(*ada.addresses) as liar:
        await until(liar, lambda seen: ids((ada, bob, liar)) <= seen)
        for identity, facts_record, state_record in records:
            liar.membership.receive(facts_record)
            liar.membership.receive(state_record)
            assert identity.peer_id in {view.peer_id for view in liar.snapshot()}
        async with Discovery(
            Identity.generate(),
            initial_peers=liar.addresses,
            timing=QUICK,
            listen=None,
            fallback=Fallback(wait_s=HEARD_WITHIN_S),
        ) as client:
            await until(client, lambda seen: ids((ada, bob, liar)) <= seen)
            await client.refresh()
            assert {view.peer_id for view in client.snapshot()} == ids((ada, bob, liar))
        async with honest(*liar.addresses) as newcomer:
            await until(newcomer, lambda seen: ids((ada, bob, liar, newcomer)) == seen)


@pytest.mark.full
@pytest.mark.anyio
async def test_who_starts_before_its_initial_peer_waits_and_says_so() -> None:
    founder = Identity.generate()
    (port,) = free_ports(1)
    address = f"/ip4/127.0.0.1/tcp/{port}/p2p/{founder.peer_id}"
    waiting = asyncio.Event()
    loop = asyncio.get_running_loop()

    def report(line: str) -> None:
        assert "Waiting for the initial peers" in line
        loop.call_soon_threadsafe(waiting.set)

    early = Discovery(
        Identity.generate(),
        initial_peers=(address,),
        timing=QUICK,
        fallback=Fallback((), HEARD_WITHIN_S, report),
    )
    entering = asyncio.create_task(early.__aenter__())
    async with asyncio.timeout(HEARD_WITHIN_S):
        await waiting.wait()
        async with honest(identity=founder, listen=Listen("127.0.0.1", port)):
            await entering
            await until(early, lambda seen: seen == {founder.peer_id})
            await early.__aexit__(None, None, None)


@pytest.mark.attack
@pytest.mark.anyio
async def test_under_all_of_it_at_once_every_honest_word_is_heard() -> None:
    """Links that are held, addresses that nobody can dial, false losses, old records: while each speaks three times."""
    async with contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(honest())
        planes = [first]
        planes += [await stack.enter_async_context(honest(*first.addresses)) for _ in range(3)]
        liars = [await stack.enter_async_context(honest(*first.addresses)) for _ in range(2)]
        await until(planes[-1], lambda seen: ids((*planes, *liars)) <= seen)
        await stack.enter_async_context(links_held([plane.addresses[0] for plane in planes], 4))

        async def lie(liar: Discovery) -> None:
            while True:
                stranger, victim = Identity.generate(), random.choice(planes).identity
                told = PeerLoss(tag_of(liar.identity.peer_id), tag_of(victim.peer_id), now_ms() + 20_000)
                old = now_ms() - EIGHT_WEEKS_MS
                await tell(
                    liar,
                    *records_with_addresses(stranger, (random.choice(UNDIALLABLE),)),
                    sign_loss(told, liar.identity),
                    sign_facts(facts_of(stranger, sequence=old), stranger),
                )
                await asyncio.sleep(0.25)

        lying = [asyncio.create_task(lie(liar)) for liar in liars]
        try:
            newcomer = await stack.enter_async_context(honest(*first.addresses))
            for number in range(3):
                for speaker in (*planes, newcomer):
                    await all_hear((*planes, newcomer), speaker, 20 + number)
        finally:
            for task in lying:
                task.cancel()
            await asyncio.gather(*lying, return_exceptions=True)
        assert all(plane.failure is None for plane in (*planes, newcomer))
