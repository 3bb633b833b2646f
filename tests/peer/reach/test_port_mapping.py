"""A router maps a peer's two ports while it serves, and no longer; what it does not do costs a sentence."""

import asyncio
import threading

import pytest
from support.links.data_plane import asynchronous, soon
from support.links.routers import HomeRouter

from molink.peer.reach import port_mapping
from molink.peer.reach.port_mapping import (
    AGAIN_S,
    LEASE_S,
    RENEW_EVERY_S,
    InnerPorts,
    MappedPorts,
    PortMapping,
)

INNER = InnerPorts(4001, 4002)
BOTH = {4001: (4001, LEASE_S), 4002: (4002, LEASE_S)}


def mapping(router: HomeRouter, inner: InnerPorts = INNER) -> tuple[PortMapping, list[str]]:
    said: list[str] = []
    return PortMapping(router.find, inner, said.append), said


@asynchronous
async def test_both_ports_are_mapped_for_an_hour_and_closed_when_the_peer_leaves() -> None:
    router = HomeRouter()
    ports, said = mapping(router)
    assert await soon(ports.open()) == MappedPorts("203.0.113.7", 4001, 4002)
    assert (router.mapped, said) == (BOTH, [])
    await soon(ports.close())
    assert router.mapped == {}


@asynchronous
async def test_the_port_of_a_relay_is_mapped_too_and_closed_with_the_others() -> None:
    router = HomeRouter(taken={443})
    ports, _ = mapping(router, InnerPorts(4001, 4002, 443))
    mapped = await soon(ports.open())
    assert mapped is not None
    assert mapped.relay is not None
    assert router.mapped == {**BOTH, mapped.relay: (443, LEASE_S)}
    assert mapped.relay not in (443, 4001, 4002)
    await soon(ports.close())
    assert router.mapped == {}


@asynchronous
async def test_a_router_that_maps_two_ports_and_no_more_serves_a_peer_without_a_relay() -> None:
    router = HomeRouter(most=2)
    ports, said = mapping(router, InnerPorts(4001, 4002, 443))
    assert await soon(ports.open()) == MappedPorts("203.0.113.7", 4001, 4002, None)
    assert (router.mapped, said) == (BOTH, [])


@asynchronous
async def test_a_port_that_another_machine_of_the_household_has_is_mapped_to_another_one_outside() -> None:
    router = HomeRouter(taken={4001})
    ports, _ = mapping(router)
    mapped = await soon(ports.open())
    assert mapped is not None
    assert mapped.data == 4002
    assert router.mapped == {mapped.control: (4001, LEASE_S), 4002: (4002, LEASE_S)}


@pytest.mark.parametrize(
    "host",
    [
        "192.168.178.1",
        "10.0.0.1",
        "100.64.3.2",
        "169.254.1.1",
        "127.0.0.1",
        "0.0.0.0",  # noqa: S104
        "",
        "router",
        "fe80::1",
    ],
)
@asynchronous
async def test_an_outer_address_that_the_internet_cannot_dial_is_refused_and_nothing_is_mapped(
    host: str,
) -> None:
    router = HomeRouter(host=host)
    ports, said = mapping(router)
    assert await soon(ports.open()) is None
    assert router.mapped == {}
    assert len(said) == 1
    assert "which the Internet cannot dial" in said[0]
    assert "over relays" in said[0]


@asynchronous
async def test_where_only_one_port_can_be_mapped_none_stays_so_and_the_owner_is_told_what_to_do() -> None:
    router = HomeRouter(most=1)
    ports, said = mapping(router)
    assert await soon(ports.open()) is None
    assert router.mapped == {}
    (sentence,) = said
    assert sentence.startswith("--port-mapping on: the router refuses (asked for ")
    assert "so the peer does without" in sentence
    assert "To change that, forward the ports by hand" in sentence
    assert "\n" not in sentence


@asynchronous
async def test_a_router_that_is_silent_does_not_hold_up_the_start_and_its_late_answer_is_taken_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = threading.Event()
    router = HomeRouter(before_found=answers.wait)
    ports, said = mapping(router)
    monkeypatch.setattr(port_mapping, "ANSWER_WITHIN_S", 0.01)
    assert await soon(ports.open()) is None
    assert "the router did not answer UPnP within 0.01 s" in said[0]
    answers.set()
    await soon(ports.close())
    assert router.mapped == {}


@asynchronous
async def test_the_lease_is_renewed_at_half_of_it_and_a_failure_is_said_once_and_tried_again() -> None:
    router, said = HomeRouter(), []
    waits: asyncio.Queue[float] = asyncio.Queue()
    go_on = asyncio.Semaphore(0)

    async def wait(delay_s: float) -> None:
        waits.put_nowait(delay_s)
        await go_on.acquire()

    ports = PortMapping(router.find, INNER, said.append, wait)
    await soon(ports.open())
    keeping = asyncio.create_task(ports.keep())

    async def next_wait() -> float:
        delay_s = await soon(waits.get())
        go_on.release()
        return delay_s

    assert await next_wait() == RENEW_EVERY_S == LEASE_S / 2
    router.mapped.clear()  # the router was started again
    assert await next_wait() == RENEW_EVERY_S
    assert await soon(waits.get()) == RENEW_EVERY_S
    assert router.mapped == BOTH
    router.refuses = True
    go_on.release()
    assert await next_wait() == AGAIN_S
    assert await soon(waits.get()) == AGAIN_S
    assert len(said) == 1
    assert "the router refuses, so the ports may close within 30 minutes" in said[0]
    router.refuses = False
    go_on.release()
    assert await soon(waits.get()) == RENEW_EVERY_S
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
