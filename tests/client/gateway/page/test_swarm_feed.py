"""The swarm's events: the whole at first, then what changes, to as many as the gateway bears."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from typing import Any

import httpx
import pytest
from support.page.page_swarm import PageSwarm, circuit_of, hops_of, page_snapshot
from support.swarms.fake_swarm import CHAT, DEADLINE_S, FakeSwarm, gateway

from molink.client.errors import SwarmUnavailable
from molink.client.gateway.page import swarm_feed
from molink.client.gateway.page.swarm_feed import (
    MOST_LISTENERS,
    MOST_OF_ONE_ADDRESS,
    QUEUED_EVENTS,
    SwarmFeed,
)
from molink.client.gateway.shares import LOCAL
from molink.client.gateway.slots import GatewayBusy, GatewayStopping

STRANGER = "198.51.100.7"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swarm_feed, "LOOKS_EVERY_S", 0.01)
    monkeypatch.setattr(swarm_feed, "PEERS_EVERY_S", 0.01)


@pytest.fixture
def swarm() -> PageSwarm:
    return PageSwarm.of(4)


async def told(events: AsyncGenerator[bytes, None]) -> tuple[str, dict[str, Any]]:
    """The next event's name and data."""
    async with asyncio.timeout(DEADLINE_S):
        name, data = (await anext(events)).decode().strip().split("\n", 1)
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


@pytest.mark.anyio
async def test_a_listener_has_the_whole_at_first_and_then_what_changes(swarm: PageSwarm) -> None:
    async with aclosing(SwarmFeed(swarm).events(LOCAL)) as events:
        name, state = await told(events)
        assert (name, len(state["peers"]), state["ready"]) == ("state", 4, True)
        left = swarm.state["peers"].pop()
        swarm.state = page_snapshot(swarm.state["peers"])
        name, change = await told(events)
        assert (name, change["gone"], change["ready"]) == ("change", [left["peer_id"]], False)


@pytest.mark.anyio
async def test_circuits_are_told_as_they_go(swarm: PageSwarm) -> None:
    async with aclosing(SwarmFeed(swarm).events(LOCAL)) as events:
        await told(events)
        swarm.running = [circuit_of(hops_of(swarm.state["peers"]), tokens=5)]
        assert [one["tokens"] for one in (await told(events))[1]["circuits"]] == [5]
        swarm.running = []
        assert (await told(events))[1] == {"circuits": []}


@pytest.mark.anyio
async def test_hops_are_timed_only_while_somebody_watches(swarm: PageSwarm) -> None:
    feed = SwarmFeed(swarm)
    assert not swarm.times_hops
    async with aclosing(feed.events(LOCAL)) as one, aclosing(feed.events(LOCAL)) as other:
        await told(one)
        await told(other)
        assert swarm.times_hops
        await one.aclose()
        assert swarm.times_hops
    assert not swarm.times_hops


@pytest.mark.anyio
async def test_a_heartbeat_comes_where_nothing_changes(
    swarm: PageSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swarm_feed, "HEARTBEAT_S", 0.02)
    async with aclosing(SwarmFeed(swarm).events(LOCAL)) as events:
        await told(events)
        async with asyncio.timeout(DEADLINE_S):
            assert (await anext(events)).startswith(b":")


@pytest.mark.anyio
async def test_who_takes_nothing_is_ended_and_the_others_go_on(swarm: PageSwarm) -> None:
    feed = SwarmFeed(swarm)
    async with aclosing(feed.events(STRANGER)) as slow, aclosing(feed.events(LOCAL)) as quick:
        await told(slow)
        await told(quick)
        for tokens in range(QUEUED_EVENTS + 2):
            swarm.running = [circuit_of(hops_of(swarm.state["peers"]), tokens=tokens)]
            assert [one["tokens"] for one in (await told(quick))[1]["circuits"]] == [tokens]
        async with asyncio.timeout(DEADLINE_S):
            assert [event async for event in slow] == []


@pytest.mark.anyio
async def test_so_many_of_one_address_listen_and_so_many_in_all(swarm: PageSwarm) -> None:
    feed = SwarmFeed(swarm)
    async with AsyncExitStack() as stack:

        async def listen(user: str) -> None:
            await told(await stack.enter_async_context(aclosing(feed.events(user))))

        for _ in range(MOST_OF_ONE_ADDRESS):
            await listen(STRANGER)
        with pytest.raises(GatewayBusy):
            feed.admit(STRANGER)
        for _ in range(MOST_LISTENERS - MOST_OF_ONE_ADDRESS):
            await listen(LOCAL)
        with pytest.raises(GatewayBusy):
            await listen(LOCAL)
        with pytest.raises(GatewayBusy):
            feed.admit("203.0.113.9")
    feed.admit(STRANGER)


@pytest.mark.anyio
async def test_a_gateway_that_stops_ends_all_streams_and_begins_none(swarm: PageSwarm) -> None:
    feed = SwarmFeed(swarm)
    async with aclosing(feed.events(LOCAL)) as events:
        await told(events)
        feed.stop()
        async with asyncio.timeout(DEADLINE_S):
            assert [event async for event in events] == []
    with pytest.raises(GatewayStopping):
        feed.admit(LOCAL)


@pytest.mark.anyio
async def test_a_swarm_that_cannot_say_for_a_while_is_watched_on(
    swarm: PageSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> list[dict[str, Any]]:
        failed.set()
        raise SwarmUnavailable("not now")

    failed = asyncio.Event()
    async with aclosing(SwarmFeed(swarm).events(LOCAL)) as events:
        await told(events)
        with monkeypatch.context() as patched:
            patched.setattr(PageSwarm, "circuits", lambda _: fails())
            async with asyncio.timeout(DEADLINE_S):
                await failed.wait()
        swarm.running = [circuit_of(hops_of(swarm.state["peers"]))]
        assert len((await told(events))[1]["circuits"]) == 1


def test_events_come_over_http(swarm: PageSwarm) -> None:
    invite = "/ip4/198.51.100.1/tcp/1/p2p/X"
    with (
        gateway(swarm, invites=[invite]) as url,
        httpx.stream("GET", f"{url}/v1/swarm/events", timeout=DEADLINE_S) as response,
    ):
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = response.iter_lines()
        assert next(lines) == "event: state"
        assert json.loads(next(lines).removeprefix("data: "))["invites"] == [invite]


def test_a_tag_reaches_the_circuit_and_nothing_that_is_no_tag(swarm: FakeSwarm) -> None:
    with gateway(swarm) as url:
        for tag in ("a1b2", "<script>", "x" * 33, ""):
            headers = {"X-Molink-Tag": tag} if tag else {}
            assert httpx.post(
                f"{url}/v1/chat/completions", json=CHAT, headers=headers, timeout=DEADLINE_S
            ).is_success
    assert swarm.tags == ["a1b2", "", "", ""]
