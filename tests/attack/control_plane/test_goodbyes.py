"""A peer that goes is missed, with or without a word; who comes back finds the swarm, whoever has gone meanwhile."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import pytest
from support.swarms.forked_peers import ForkedSwarm
from support.swarms.live_swarms import BUNDLED, free_ports, run_program

from molink.client.local.local_swarm import LocalPeer, LocalSwarm
from molink.dht.identity.identity import Identity
from molink.peer.daemon.control import call_peer

pytestmark = [pytest.mark.real, pytest.mark.full, pytest.mark.anyio]

PATIENCE_S = 120.0
OPTIONS = ("--model", BUNDLED, "--memory", "600MB")
ENDING = [name for name in ("SIGHUP", "SIGTERM") if hasattr(signal, name)]
Status = Mapping[str, Any]


@pytest.fixture(scope="module")
async def swarm(anyio_backend: str) -> AsyncIterator[LocalSwarm]:
    """One peer that holds the first half, to which others come."""
    async with ForkedSwarm() as swarm:
        await swarm.join("front", *OPTIONS, "--layers", "0:6")
        yield swarm


async def status_until(peer: LocalPeer, wanted: Callable[[Status], bool]) -> Status:
    """What the peer knows, as soon as it is as wanted."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            status = await call_peer(peer.state_dir, "status", PATIENCE_S)
            if wanted(status):
                return status
            await asyncio.sleep(0.1)


def of_swarm(status: Status, name: str) -> Status | None:
    return next((one for one in status["peers"] if one["name"] == name), None)


def knows(name: str) -> Callable[[Status], bool]:
    return lambda status: of_swarm(status, name) is not None


def is_complete(status: Status) -> bool:
    return bool(status["models"][0]["complete"])


async def test_a_killed_peer_is_marked_where_its_links_were(swarm: LocalSwarm) -> None:
    front = swarm.peers[0]
    back = await swarm.join("killed", *OPTIONS, "--layers", "6:12")
    await status_until(front, lambda status: knows("killed")(status) and is_complete(status))
    await swarm.kill(back)
    status = await status_until(
        front, lambda status: (of_swarm(status, "killed") or {}).get("answers") is False
    )
    assert not is_complete(status)
    shown = await run_program("molink.peer", "status", "--state-dir", str(front.state_dir))
    assert "killed (does not answer)" in shown.out
    assert "nobody holds layers 6:12" in shown.out


@pytest.mark.parametrize("name", ENDING)
async def test_a_peer_that_is_told_to_end_says_goodbye(swarm: LocalSwarm, name: str) -> None:
    front = swarm.peers[0]
    back = await swarm.join(f"ended by {name}", *OPTIONS, "--layers", "6:12")
    await status_until(front, knows(back.name))
    back.process.send_signal(getattr(signal, name))
    async with asyncio.timeout(PATIENCE_S):
        assert await back.process.wait() == 0
    await status_until(front, lambda status: not knows(back.name)(status))


async def test_a_member_comes_back_although_the_founder_is_gone() -> None:
    async with ForkedSwarm() as swarm:
        founder = await swarm.join("founder", *OPTIONS, "--layers", "0:6")
        member = await swarm.join("member", *OPTIONS, "--layers", "0:6")
        other = await swarm.join("other", *OPTIONS, "--layers", "6:12")
        await status_until(member, lambda status: len(status["peers"]) == 3)
        assert await swarm.stop(member) == 0
        known = member.state_dir / "swarm.json"
        assert other.address in json.loads(known.read_text())["addresses"]
        assert os.name == "nt" or known.stat().st_mode & 0o777 == 0o600
        await swarm.kill(founder)
        back = await swarm.join("member", *OPTIONS, "--layers", "0:6", initial_peers=(founder.address,))
        status = await status_until(back, is_complete)
        assert of_swarm(status, "other")
        await status_until(other, is_complete)


async def test_who_starts_first_waits_for_whom_it_was_told_of() -> None:
    async with ForkedSwarm() as swarm:
        (port,) = free_ports(1)
        folder = swarm.folder / "founder"
        folder.mkdir(mode=0o700)
        identity = Identity.load_or_create(folder / "identity.key")
        address = f"/ip4/127.0.0.1/tcp/{port}/p2p/{identity.peer_id}"
        early = asyncio.create_task(
            swarm.join("early", *OPTIONS, "--layers", "6:12", "--wait", "300", initial_peers=(address,))
        )
        try:
            await swarm.join("founder", *OPTIONS, "--layers", "0:6", "--port", str(port), initial_peers=())
            async with asyncio.timeout(PATIENCE_S):
                peer = await early
            await status_until(peer, is_complete)
        finally:
            early.cancel()
            await asyncio.gather(early, return_exceptions=True)
