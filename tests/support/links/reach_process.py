"""One process of a test with namespaces: a relay, or a home that stays at relays or can be dialled, and perhaps dials
another home.

Run as `python -m support.links.reach_process` with one argument in JSON; writes lines of JSON. Ends with its stdin.
"""

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

from support.links.data_plane import DEADLINE_S, until
from support.links.reach_ends import RelayedEnd

from molink.dht.identity.identity import Identity
from molink.dht.records.announcement import sign_facts, verify_facts
from molink.dht.records.records import PeerFacts, RelayAt
from molink.peer.reach.relay import Relay
from molink.peer.reach.relay_limits import RelayLimits
from molink.peer.reach.stays import Stays
from molink.peer.wire.link.dialled_connection import DialledConnection
from molink.peer.wire.link.link import Link
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.reach.relay_client import RelayUser
from molink.peer.wire.reach.ways import Relayed
from molink.peer.wire.transmission.classes import TrafficClass
from molink.routing.latency.relayed_links import MOST_RELAYED_MBPS

ECHOES = 20
ECHO_BYTES = 4096
AFTER_S = 0.5
"""Of decode on the way that is left."""


def say(**values: object) -> None:
    print(json.dumps(values), flush=True)


async def relay(asked: dict[str, Any]) -> None:
    """Says after each line that it reads how long its processor has worked."""
    identity = Identity.generate()
    limits = replace(RelayLimits(), mbps=asked.get("mbps", MOST_RELAYED_MBPS))
    async with Relay("0.0.0.0", asked["port"], identity, None, limits):  # noqa: S104
        say(peer_id=identity.peer_id)
        while await asyncio.to_thread(sys.stdin.readline):
            say(worked_s=time.process_time(), at_s=time.monotonic())


async def home(asked: dict[str, Any]) -> None:
    relays, public = tuple(RelayAt(**one) for one in asked["relays"]), asked.get("public", "")
    async with RelayedEnd("0.0.0.0" if public else "127.0.0.1") as end:  # noqa: S104
        if public:
            facts = replace(end.end.facts, grpc_addresses=(f"{public}:{end.port}",))
        else:
            facts = await end.stay(*relays[: asked.get("stays", 2)])
        if asked.get("punches", True):
            await end.punch(*relays)
        echoing = asyncio.create_task(echo(end))
        say(facts=sign_facts(facts, end.end.identity).hex())
        try:
            reading = asyncio.create_task(asyncio.to_thread(sys.stdin.readline))
            line = await reading
            if line.strip():
                echoing.cancel()
                await dial(end, verify_facts(bytes.fromhex(line.strip())), asked)
                await asyncio.to_thread(sys.stdin.read)
        finally:
            echoing.cancel()


async def echo(end: RelayedEnd) -> None:
    while True:
        peer_id, frame = await end.end.handler.frames.get()
        link = end.end.links.find(peer_id)
        if link is not None:
            link.post(frame.header, bytes(frame.payload), TrafficClass.DECODE)


def way_of(link: Link) -> str:
    return link.connection.way if isinstance(link.connection, DialledConnection) else ""


async def dial(end: RelayedEnd, facts: PeerFacts, asked: dict[str, Any]) -> None:
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    link = await end.end.links.to(facts, DEADLINE_S)
    usable_ms = (loop.time() - began_s) * 1000
    first_way, first_ms = way_of(link), await echo_ms(end, link) if asked.get("echoes", True) else None
    came: list[tuple[int, float]] = []
    coming = asyncio.create_task(note(end, came))
    sent = await push(link, 0, lambda: way_of(link) != first_way, asked.get("wait_s", 4.0))
    moved_ms = round((loop.time() - began_s) * 1000) if way_of(link) != first_way else None
    if asked["parts"]:
        say(moved=moved_ms is not None)
        await asyncio.to_thread(sys.stdin.readline)
        sent = await push(link, sent, lambda: way_of(link) == first_way, DEADLINE_S)
    if asked["forgets"]:
        say(sent=sent)
        await asyncio.to_thread(sys.stdin.readline)
        lost = link.connection
        sent = await push(link, sent, lambda: link.connection is not lost, DEADLINE_S)
    sent = await push(link, sent, lambda: False, AFTER_S)
    async with asyncio.timeout(DEADLINE_S):
        while len(came) < sent:  # noqa: ASYNC110 - frames tell nobody else
            await asyncio.sleep(0.01)
    coming.cancel()
    say(
        way=way_of(link),
        first_way=first_way,
        usable_ms=round(usable_ms),
        first_echo_ms=first_ms,
        echo_ms=await echo_ms(end, link),
        moved_ms=moved_ms,
        in_order=[number for number, _ in came] == list(range(sent)),
        gap_ms=max((later - earlier) * 1000 for (_, earlier), (_, later) in pairwise(came)),
        sent=sent,
        closed=link.closed_because,
    )


async def note(end: RelayedEnd, came: list[tuple[int, float]]) -> None:
    """The numbers that come back, and when."""
    while True:
        _, frame = await end.end.handler.frames.get()
        came.append((frame.header.hidden_size, asyncio.get_running_loop().time()))  # type: ignore[attr-defined]


async def sink(asked: dict[str, Any]) -> None:
    """Stays at a relay, and reads all that comes over it."""
    user = RelayUser(Identity.generate(), None)
    server = await asyncio.start_server(swallow, "127.0.0.1", 0)
    at = ("127.0.0.1", server.sockets[0].getsockname()[1])
    async with server, Stays(user, at, lambda _: None) as stays:
        stays.keep(tuple(RelayAt(**one) for one in asked["relays"]))
        await until(lambda: bool(stays.relays))
        say(peer_id=user.identity.peer_id)
        await asyncio.to_thread(sys.stdin.read)


async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while await reader.read(1 << 16):
        pass
    writer.close()


async def pump(asked: dict[str, Any]) -> None:
    """Sends pieces of so many bytes to a peer over a relay, at a rate, for as long as is asked."""
    (relay_at,) = (RelayAt(**one) for one in asked["relays"])
    user = RelayUser(Identity.generate(), None)
    opened = await Relayed(asked["to"], relay_at, user).open()
    loop, piece, sent = asyncio.get_running_loop(), bytes(asked["piece_bytes"]), 0
    began_s = loop.time()
    say(began=True)
    while (passed_s := loop.time() - began_s) < asked["seconds"]:
        if sent * 8 / 1e6 > asked["mbps"] * passed_s:
            await asyncio.sleep(0.001)
            continue
        await loop.sock_sendall(opened.connection, piece)
        sent += len(piece)
    say(mbps=sent * 8 / 1e6 / (loop.time() - began_s))
    opened.connection.close()


async def push(link: Link, first: int, done: Callable[[], bool], most_s: float) -> int:
    """A decode row each 10 ms, until that is so; the number of the next."""
    clock = asyncio.get_running_loop().time
    until_s, number = clock() + most_s, first
    while clock() < until_s and not done():
        link.post(pb.Activations(hidden_size=number), bytes(64), TrafficClass.DECODE)
        number += 1
        await asyncio.sleep(0.01)
    return number


async def echo_ms(end: RelayedEnd, link: Link) -> float:
    clock = asyncio.get_running_loop().time
    times = []
    for _ in range(ECHOES):
        began_s = clock()
        link.post(pb.Activations(hidden_size=1), bytes(ECHO_BYTES), TrafficClass.DECODE)
        async with asyncio.timeout(DEADLINE_S):
            await end.end.handler.frames.get()
        times.append((clock() - began_s) * 1000)
    return round(statistics.median(times), 2)


def main() -> None:
    asked = json.loads(sys.argv[1])
    asyncio.run({"relay": relay, "home": home, "sink": sink, "pump": pump}[asked["role"]](asked))


if __name__ == "__main__":
    main()
