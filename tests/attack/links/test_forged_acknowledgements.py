"""A receiver that lies about what it has received, and when, slows down its own link and nobody's prompts."""

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from support.attackers.bystander import bystander
from support.links.raw_links import dialled, facts_of, question_of
from support.swarms.live_swarms import References, bundled_folder, generate

from molink.client.api.swarm import AsyncSwarm
from molink.client.local.local_swarm import LocalPeer, LocalSwarm
from molink.dht.identity.identity import Identity
from molink.dht.records.records import PeerFacts
from molink.peer.daemon.control import call_peer
from molink.peer.wire.link.handshake import prove
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.protocol import packets
from molink.peer.wire.protocol.frames import decode, encode, expect
from molink.peer.wire.transmission.classes import TrafficClass
from molink.shards.checkpoint import store

WORDS = (
    "before",
    "we",
    "proceed",
    "any",
    "further",
    "hear",
    "me",
    "speak",
    "resolved",
    "rather",
    "to",
    "die",
    "than",
)
PROMPT_WORDS = 400
LEAST_PROMPT_TOKENS = 500
ASKED_AT_ONCE = 24
"""Files that are asked for and have not come: bulk waits on the link all the while."""
ACKNOWLEDGED = 60
"""Forged at least in every run. Once strangers have asked for as many files as they may, refusals are all that comes to
be acknowledged."""
BETWEEN_ACKS_S = 0.013
"""300 acknowledgements in 4 s."""
ATTACK_S = 15.0
LEAST_PART = 0.1
"""Of the uplink as it was known before: no less is announced. Forged acknowledgements took it to a thousandth."""
KNOWN_WITHIN_S = 60.0
TOGETHER = 4
"""Prompts that are sent until it is."""
DEADLINE_S = 120.0
PROMPT_TAKES_S = 10.0
"""With the machine to itself. An honest prompt takes tenths of a second; beside forged acknowledgements it took up to a
minute."""

Stamp = Callable[[int, float], int]
"""What an acknowledgement says of the forger's clock, in microseconds: of its number and the true time."""

_random = random.Random(7)
LIES: dict[str, Stamp] = {
    "stamps that run away": lambda number, now_s: round((now_s + 0.4 * number) * 1e6),
    "stamps that stand still": lambda number, now_s: 10**12 + number,  # noqa: ARG005
    "stamps that jump": lambda number, now_s: round((now_s + _random.uniform(0.0, 3600.0)) * 1e6),  # noqa: ARG005
}


class Forger:
    """A client that asks a peer for files all the while, and what has come of them."""

    def __init__(self, call: "grpc.aio.StreamStreamCall[bytes, bytes]", model_hash: str) -> None:
        sha256 = store.read_manifest(bundled_folder()).files["tokenizer.json"]
        self.arrived: asyncio.Queue[packets.Data] = asyncio.Queue()
        self._call = call
        self._wanted = pb.GetFile(model_hash=model_hash, sha256=sha256)
        self._requests = itertools.count(1)
        self._writing = asyncio.Lock()

    async def write(self, data: bytes) -> None:
        async with self._writing:
            await self._call.write(data)

    async def ask(self) -> None:
        number = next(self._requests)
        content = encode(pb.Request(id=number, get_file=self._wanted))
        await self.write(
            packets.encode_data(TrafficClass.CONTROL, number, len(content), 0, number, memoryview(content))
        )

    async def read(self) -> None:
        while isinstance(data := await self._call.read(), bytes):
            packet = packets.decode(data)
            if isinstance(packet, packets.Ping):
                await self.write(packets.encode_pong(packet.number))
            elif isinstance(packet, packets.Close):
                pytest.fail(f"the peer has closed the forger's link: {packet.reason}")
            elif isinstance(packet, packets.Data):
                self.arrived.put_nowait(packet)


async def forge(facts: PeerFacts, stamp: Stamp, *, least: int = 0, least_s: float = 0.0) -> int:
    """Asks a peer for files all the while and acknowledges them late, one by one, with false stamps, at least so many
    and for so long; how often."""
    clock, forged = asyncio.get_running_loop().time, 0
    async with dialled(facts) as call:
        question = await question_of(call)
        proof = prove(
            question, Identity.generate(), facts.certificate, None, link_id=bytes(16), is_client=True
        )
        await call.write(encode(proof))
        welcome = await call.read()
        assert isinstance(welcome, bytes)
        expect(decode(welcome), pb.Welcome)
        forger = Forger(call, facts.model.model_hash)
        reading = asyncio.create_task(forger.read(), name="forger reads")
        try:
            for _ in range(ASKED_AT_ONCE):
                await forger.ask()
            until_s = clock() + least_s
            while forged < least or clock() < until_s:
                async with asyncio.timeout(DEADLINE_S):
                    packet = await forger.arrived.get()
                forged += 1
                stamped = packets.Ack(packet.sequence, stamp(forged, clock()), ((packet.sequence, 0),))
                await forger.write(packets.encode_ack(stamped))
                if packet.offset + len(packet.payload) == packet.message_bytes:
                    await forger.ask()
                await asyncio.sleep(BETWEEN_ACKS_S)
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
    return forged


@asynccontextmanager
async def forging(
    facts: PeerFacts,
    stamp: Stamp,
    **least: Any,  # noqa: ANN401 - as `forge` takes it
) -> AsyncIterator["asyncio.Task[int]"]:
    """A forger at work for as long as the block runs, and as `forge` says."""
    task = asyncio.create_task(forge(facts, stamp, **least), name="forger")
    try:
        yield task
        await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def prompt(client: AsyncSwarm, references: References, within_s: float = DEADLINE_S) -> None:
    """An honest prompt, like none before it: its token must come and be transformers'."""
    words = " ".join(_random.choices(WORDS, k=PROMPT_WORDS))
    ids = references.ids(bundled_folder(), words)
    assert len(ids) >= LEAST_PROMPT_TOKENS
    async with asyncio.timeout(within_s):
        generation = await generate(client, words, 1)
    assert generation.token_ids == references.greedy(bundled_folder(), ids, 1)


async def uplink_mbps(peer: LocalPeer) -> float | None:
    """What the peer takes its uplink to carry, and announces; None: it does not know yet."""
    status = await call_peer(peer.state_dir, "status", DEADLINE_S)
    mbps = status["uplink_mbps"]
    assert mbps is None or isinstance(mbps, float | int)
    return mbps


async def known_uplink_mbps(peer: LocalPeer, client: AsyncSwarm, references: References) -> float:
    """What it is once it is known: when something has waited for the line, as of prompts that come together."""
    async with asyncio.timeout(KNOWN_WITHIN_S):
        while (mbps := await uplink_mbps(peer)) is None:
            await asyncio.gather(*(prompt(client, references) for _ in range(TOGETHER)))
    return mbps


@pytest.mark.anyio
@pytest.mark.real
@pytest.mark.full
async def test_prompts_come_beside_forged_acknowledgements(
    attacked: LocalSwarm, client: AsyncSwarm, references: References
) -> None:
    facts, stamp = facts_of(client, "front"), LIES["stamps that run away"]
    async with bystander(attacked, client, references), forging(facts, stamp, least=ACKNOWLEDGED) as forger:
        while not forger.done():
            await prompt(client, references)
    assert forger.result() >= ACKNOWLEDGED


@pytest.mark.anyio
@pytest.mark.attack
async def test_forged_acknowledgements_change_neither_prompts_nor_uplink(
    attacked: LocalSwarm, client: AsyncSwarm, references: References
) -> None:
    front = next(peer for peer in attacked.peers if peer.name == "front")
    for _ in range(3):
        await prompt(client, references, PROMPT_TAKES_S)
    before_mbps = await known_uplink_mbps(front, client, references)
    async with bystander(attacked, client, references):
        for stamp in LIES.values():
            async with forging(facts_of(client, "front"), stamp, least_s=ATTACK_S) as forger:
                while not forger.done():
                    await prompt(client, references, PROMPT_TAKES_S)
            assert forger.result() >= ATTACK_S
            after_mbps = await uplink_mbps(front)
            assert after_mbps is not None
            assert after_mbps >= LEAST_PART * before_mbps
    await prompt(client, references, PROMPT_TAKES_S)
