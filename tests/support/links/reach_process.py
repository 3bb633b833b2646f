"""One process of a test with namespaces: a relay, or a home that stays at relays, and perhaps dials another home.

Run as `python -m support.links.reach_process` with one argument in JSON; writes lines of JSON. Ends with its stdin.
"""

import asyncio
import json
import statistics
import sys
from typing import Any

from support.links.reach_ends import RelayedEnd

from molink.dht.identity.identity import Identity
from molink.dht.records.announcement import sign_facts, verify_facts
from molink.dht.records.records import PeerFacts, RelayAt
from molink.peer.reach.relay import Relay
from molink.peer.wire.link.dialled_connection import DialledConnection
from molink.peer.wire.link.link import Link
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.transmission.classes import TrafficClass

ECHOES = 20
ECHO_BYTES = 4096


def say(**values: object) -> None:
    print(json.dumps(values), flush=True)


async def relay(port: int) -> None:
    identity = Identity.generate()
    async with Relay("0.0.0.0", port, identity, None):  # noqa: S104
        say(peer_id=identity.peer_id)
        await asyncio.to_thread(sys.stdin.read)


async def home(asked: dict[str, Any]) -> None:
    relays = tuple(RelayAt(**one) for one in asked["relays"])
    async with RelayedEnd() as end:
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
    link = await end.end.links.to(facts, 5.0)
    usable_ms = (loop.time() - began_s) * 1000
    first_way, first_ms = way_of(link), await echo_ms(end, link)
    numbers: list[int] = []
    sent, moved_ms = 0, None
    until_s = began_s + asked.get("wait_s", 4.0)
    while loop.time() < until_s and (moved_ms is None or sent < 50):
        if moved_ms is None and way_of(link) != first_way:
            moved_ms, until_s = (loop.time() - began_s) * 1000, loop.time() + 2.0
        link.post(pb.Activations(hidden_size=sent), bytes(64), TrafficClass.DECODE)
        sent += 1
        await asyncio.sleep(0.01)
    async with asyncio.timeout(5.0):
        while len(numbers) < sent:
            _, frame = await end.end.handler.frames.get()
            numbers.append(frame.header.hidden_size)  # type: ignore[attr-defined]
    say(
        way=way_of(link),
        first_way=first_way,
        usable_ms=round(usable_ms),
        first_echo_ms=first_ms,
        echo_ms=await echo_ms(end, link),
        moved_ms=moved_ms and round(moved_ms),
        in_order=numbers == list(range(sent)),
        sent=sent,
        closed=link.closed_because,
    )


async def echo_ms(end: RelayedEnd, link: Link) -> float:
    clock = asyncio.get_running_loop().time
    times = []
    for _ in range(ECHOES):
        began_s = clock()
        link.post(pb.Activations(hidden_size=1), bytes(ECHO_BYTES), TrafficClass.DECODE)
        async with asyncio.timeout(5.0):
            await end.end.handler.frames.get()
        times.append((clock() - began_s) * 1000)
    return round(statistics.median(times), 2)


def main() -> None:
    asked = json.loads(sys.argv[1])
    if asked["role"] == "relay":
        asyncio.run(relay(asked["port"]))
    else:
        asyncio.run(home(asked))


if __name__ == "__main__":
    main()
