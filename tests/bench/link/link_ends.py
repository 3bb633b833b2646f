"""The two ends of a link under test, each a process of its own that takes orders as lines of JSON.

`python link_ends.py receiver` or `sender`. Both read the same monotonic clock: on Linux, CLOCK_MONOTONIC is one for
all processes of a machine, so that a one-way delay is a difference. A message is on its way from the moment for which
it was scheduled until the whole of it has been handed over at the other end.
"""

import asyncio
import base64
import json
import os
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import molink.peer.wire.link  # noqa: F401 - before gRPC is imported: it says how gRPC polls, for the rivals as well

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import grpc
from bench.link import link_rivals as rivals
from bench.link.link_rivals import DECODE, HEAD, HOST, PREFILL
from support.links.data_plane import released
from support.swarms.swarm_examples import facts_of

from molink.dht.identity.identity import Identity
from molink.peer.wire.link.acceptor import Acceptor
from molink.peer.wire.link.certificate import Credentials, new_certificate, server_name
from molink.peer.wire.link.link import Link
from molink.peer.wire.link.link_resources import LinkResources
from molink.peer.wire.link.links import Links
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.protocol.frames import Frame
from molink.peer.wire.transmission.classes import TrafficClass
from molink.peer.wire.transport.message_memory import MessageMemory
from molink.peer.wire.transport.shared_uplink import SharedUplink

CLASSES = {DECODE: TrafficClass.DECODE, PREFILL: TrafficClass.PREFILL}
NUMBERS = 4
"""Prefills are numbered anew after so many: their messages are made before the clock runs."""
SPIN_S = 0.0015
"""The loop's timers are this inexact: so long before a message is due the sender only looks at the clock."""
EXPECTED = "+expected"
"""After a policy's name: the link is told when the next decode message comes, as a peer's prediction tells it."""

Order = dict[str, Any]


class Ours:
    """A receiving end of the product. `echo`: what comes is posted back."""

    def __init__(self, *, echo: bool = False) -> None:
        self._echo = echo
        self._deliver: rivals.Deliver = lambda _: None
        self._stack = AsyncExitStack()

    async def open(self, deliver: rivals.Deliver) -> list[dict[str, str | int]]:
        self._deliver = deliver
        identity = Identity.generate()
        certificate = new_certificate(identity.peer_id)
        links = await self._stack.enter_async_context(Links(identity, self, None, is_client=False))
        acceptor = await self._stack.enter_async_context(
            Acceptor(HOST, 0, Credentials(identity.peer_id, certificate), links, self)
        )
        encoded = base64.b64encode(certificate.der).decode()
        return [{"port": acceptor.port, "peer_id": identity.peer_id, "certificate": encoded}]

    async def close(self) -> None:
        await self._stack.aclose()

    def on_frame(self, link: Link, frame: Frame) -> None:
        if self._echo:
            link.post(frame.header, frame.payload, TrafficClass.DECODE)
        else:
            self._deliver(frame.payload)

    on_request = staticmethod(released)

    def on_closed(self, link: Link, reason: str) -> None:
        """The run is over."""


class OursSending:
    """The sending end of the product: one link for each other end; prefill on the first, decode on the last."""

    def __init__(self, policy: str, expects: bool) -> None:
        self.returned = asyncio.Event()
        self._expects = expects
        resources = LinkResources(SharedUplink(policy), MessageMemory())
        self._links = Links(Identity.generate(), self, None, is_client=False, resources=resources)
        self._stack = AsyncExitStack()
        self._by_kind: dict[int, Link] = {}

    async def open(self, ends: list[Order]) -> "OursSending":
        await self._stack.enter_async_context(self._links)
        links = []
        for end in ends:
            facts = replace(
                facts_of(Identity.generate()),
                peer_id=end["peer_id"],
                certificate=base64.b64decode(end["certificate"]),
                grpc_addresses=(end["address"],),
            )
            links.append(await self._links.to(facts))
        self._by_kind = {PREFILL: links[0], DECODE: links[-1]}
        return self

    def post(self, kind: int, message: bytes) -> None:
        if not self._by_kind[kind].post(
            pb.Activations(hidden_size=1, dtype="float32"), message, CLASSES[kind]
        ):
            raise RuntimeError(
                f"the link took no more: {self._by_kind[kind].closed_because or 'its queue is full'}"
            )

    def expect(self, at_s: float) -> None:
        if self._expects:
            self._links.expect_decode(self._by_kind[DECODE].peer_id, at_s)

    async def close(self) -> None:
        await self._stack.aclose()

    def on_frame(self, link: Link, frame: Frame) -> None:
        """The echo is back."""
        self.returned.set()

    on_request = staticmethod(released)

    def on_closed(self, link: Link, reason: str) -> None:
        self.returned.set()


def receiving(way: str) -> rivals.Receiving:
    """The listening end of a way to send."""
    match way:
        case "fifo" | "concurrent":
            return rivals.GrpcReceiving()
        case "control":
            return rivals.ControlReceiving()
        case "zeromq":
            return rivals.ZmqReceiving()
        case "raw":
            return rivals.RawReceiving()
    return Ours()


async def sending(way: str, ends: list[Order], order: Order) -> rivals.Sending:
    """The connected end of a way to send. `policy:NAME` is a link of the product under that policy."""
    first, last = ends[0]["address"], ends[-1]["address"]
    match way:
        case "fifo":
            return await rivals.GrpcSending(first).open()
        case "concurrent":
            return await rivals.ConcurrentSending({PREFILL: first, DECODE: last}).open()
        case "control":
            return await rivals.ControlSending(first, order["window_bytes"]).open()
        case "zeromq":
            return rivals.ZmqSending(first)
        case "raw":
            return rivals.RawSending(first)
    policy = way.removeprefix("policy:")
    return await OursSending(policy.removesuffix(EXPECTED), policy.endswith(EXPECTED)).open(ends)


class Receiver:
    """Takes orders: open (listens, answers with the ends), close (answers with what arrived when)."""

    def __init__(self) -> None:
        self._opened: list[rivals.Receiving] = []
        self._arrivals: list[tuple[int, int, float]] = []
        self._notify = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._cpu_s = 0.0

    async def obey(self, order: Order) -> Order:
        match order["do"]:
            case "open":
                self._arrivals = []
                self._opened = [receiving(order["way"]) for _ in range(order["ends"])]
                tell = (HOST, order["tell"])
                ends = [
                    (await one.open(lambda message: self._deliver(message, tell)))[0] for one in self._opened
                ]
                self._cpu_s = time.process_time()
                return {"ends": ends}
            case "close":
                cpu_s = time.process_time() - self._cpu_s
                for one in self._opened:
                    await one.close()
                return {"arrivals": self._arrivals, "cpu_s": cpu_s}
            case "echo":
                return await self._echo()
        raise ValueError(order["do"])

    def _deliver(self, message: bytes | memoryview, tell: tuple[str, int]) -> None:
        now_s = time.monotonic()
        kind, number = HEAD.unpack_from(message)
        self._arrivals.append((kind, number, now_s))
        if kind == PREFILL:
            self._notify.sendto(number.to_bytes(4, "little"), tell)

    async def _echo(self) -> Order:
        """Ends that send everything back: the product's, gRPC's, and gRPC's with the same ciphers."""
        identity = Identity.generate()
        certificate = new_certificate(identity.peer_id)
        secure = grpc.ssl_server_credentials([(certificate.key_pem, certificate.pem)])
        self._opened = [
            Ours(echo=True),
            rivals.GrpcReceiving(echo=True),
            rivals.GrpcReceiving(echo=True, credentials=secure),
        ]
        ends = [(await one.open(lambda _: None))[0] for one in self._opened]
        ends[2] |= {"pem": certificate.pem.decode(), "name": server_name(identity.peer_id)}
        return {"ends": ends}


class Sender:
    """Takes orders: run (connects, sends as told, answers when what was scheduled), echo (round trips)."""

    def __init__(self) -> None:
        self._bell = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._bell.bind((HOST, 0))
        self._bell.setblocking(False)

    async def obey(self, order: Order) -> Order:
        match order["do"]:
            case "hello":
                return {"tell": self._bell.getsockname()[1]}
            case "run":
                return await self._run(order)
            case "echo":
                return await echo(order)
        raise ValueError(order["do"])

    async def _run(self, order: Order) -> Order:
        """`decode_bytes` every `interval_s` from the beginning; after `lead_s` `prefills` of `prefill_bytes` one
        after the other, or as many as begin within `prefill_for_s`; decode goes on for `tail_s`. At most `limit_s`."""
        rest = os.urandom(max(order["prefill_bytes"] - HEAD.size, 0))
        messages = [HEAD.pack(PREFILL, number) + rest for number in range(NUMBERS)]
        way = await sending(order["way"], order["ends"], order)
        cpu_s, begin_s = time.process_time(), time.monotonic()
        scheduled: list[float] = []
        prefills: list[tuple[float, float | None]] = []
        decoding = asyncio.create_task(self._decode(way, order, scheduled))
        try:
            async with asyncio.timeout(order["limit_s"]):
                await asyncio.sleep(order["lead_s"])
                prefilling_s = time.monotonic()
                while (
                    len(prefills) < order["prefills"]
                    or time.monotonic() - prefilling_s < order["prefill_for_s"]
                ):
                    number = len(prefills) % NUMBERS
                    prefills.append((time.monotonic(), None))
                    way.post(PREFILL, messages[number])
                    await self._told(number)
                    prefills[-1] = (prefills[-1][0], time.monotonic())
                await asyncio.sleep(order["tail_s"])
        except TimeoutError:
            pass
        cpu_s, took_s = time.process_time() - cpu_s, time.monotonic() - begin_s
        decoding.cancel()
        (failed,) = await asyncio.gather(decoding, return_exceptions=True)
        await asyncio.sleep(order["drain_s"])
        await way.close()
        trouble = "" if isinstance(failed, asyncio.CancelledError) else repr(failed)
        return {
            "scheduled": scheduled,
            "prefills": prefills,
            "cpu_s": cpu_s,
            "took_s": took_s,
            "trouble": trouble,
        }

    async def _told(self, number: int) -> None:
        """Until the other end has told, off the link, that the prefill has arrived."""
        loop = asyncio.get_running_loop()
        while int.from_bytes(await loop.sock_recv(self._bell, 16), "little") != number:
            continue

    async def _decode(self, way: rivals.Sending, order: Order, scheduled: list[float]) -> None:
        if not order["interval_s"]:
            await asyncio.Event().wait()
        rest = os.urandom(order["decode_bytes"] - HEAD.size)
        next_s = time.monotonic() + order["interval_s"]
        while True:
            if isinstance(way, OursSending):
                way.expect(next_s)
            await asyncio.sleep(max(0.0, next_s - time.monotonic() - SPIN_S))
            while time.monotonic() < next_s:  # noqa: ASYNC110 - what it waits for is the time
                await asyncio.sleep(0)
            way.post(DECODE, HEAD.pack(DECODE, len(scheduled)) + rest)
            scheduled.append(next_s)
            next_s += order["interval_s"]


async def echo(order: Order) -> Order:
    """Seconds of interleaved round trips of one message through the three ends of `Receiver._echo`."""
    ours_end, plain_end, secure_end = order["ends"]
    for end in order["ends"]:
        end["address"] = f"{HOST}:{end['port']}"
    message = os.urandom(order["bytes"])
    ours = await OursSending("molink", False).open([ours_end])
    credentials = grpc.ssl_channel_credentials(secure_end["pem"].encode())
    streams = [
        await rivals.GrpcSending(plain_end["address"]).open(),
        await rivals.GrpcSending(secure_end["address"], credentials, secure_end["name"]).open(),
    ]

    async def through_ours() -> None:
        ours.returned.clear()
        ours.post(DECODE, message)
        await ours.returned.wait()

    async def through(stream: rivals.GrpcSending) -> None:
        await stream.call.write(message)
        await stream.call.read()

    trips: list[Callable[[], Awaitable[None]]] = [
        through_ours,
        lambda: through(streams[0]),
        lambda: through(streams[1]),
    ]
    took_s: list[list[float]] = [[], [], []]
    for index in range(order["count"] + 20):
        for trip, times in zip(trips, took_s, strict=True):
            begin_s = time.perf_counter()
            await trip()
            if index >= 20:
                times.append(time.perf_counter() - begin_s)
    await ours.close()
    for stream in streams:
        await stream.close()
    return {"ours_s": took_s[0], "plain_s": took_s[1], "secure_s": took_s[2]}


async def main(role: str) -> None:
    """Obeys until the input ends."""
    worker = Receiver() if role == "receiver" else Sender()
    while line := await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(await worker.obey(json.loads(line))), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
