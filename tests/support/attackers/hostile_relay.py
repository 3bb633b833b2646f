"""Relays that lie: one that proves who it is and follows a script, one whose line changes or swallows bytes."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Self

from molink.dht.identity.identity import Identity, peer_id_of
from molink.dht.records.records import RelayAt
from molink.peer.wire.reach.packets import Packet, RelayProof, read_relay, write_relay
from molink.peer.wire.reach.relay_client import accept
from molink.peer.wire.reach.relay_proof import new_challenge, prove_relay

Script = Callable[[socket.socket, Packet], Awaitable[None]]
"""What it does with a connection whose user is proven, and with the question."""


class HostileRelay:
    """A relay on loopback that checks nobody."""

    def __init__(self, script: Script, observed: str = "127.0.0.1:4000") -> None:
        """`observed`: where it says that it sees whoever comes."""
        self.identity = Identity.generate()
        self.visits: list[str] = []
        """Peer ids of those who came."""
        self._script = script
        self._observed = observed
        self._conversations: set[asyncio.Task[None]] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))

    @property
    def at(self) -> RelayAt:
        return RelayAt(self.identity.peer_id, f"127.0.0.1:{self._listener.getsockname()[1]}")

    async def __aenter__(self) -> Self:
        self._listener.setblocking(False)
        self._accepting = asyncio.create_task(self._accept())
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [self._accepting, *self._conversations]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()

    async def _accept(self) -> None:
        while True:
            connection, _, _ = await accept(self._listener)
            task = asyncio.create_task(self._converse(connection))
            self._conversations.add(task)
            task.add_done_callback(self._conversations.discard)
            task.add_done_callback(
                lambda _, connection=connection: connection.close()
            )  # it may end before it begins

    async def _converse(self, connection: socket.socket) -> None:
        with suppress(OSError):
            challenge = new_challenge()
            await write_relay(connection, challenge)
            proof = await read_relay(connection)
            assert isinstance(proof, RelayProof)
            self.visits.append(peer_id_of(proof.public_key))
            await write_relay(connection, prove_relay(challenge, proof, self._observed, self.identity, None))
            await self._script(connection, await read_relay(connection))


class HostileLine:
    """Passes connections on to an address, and after so many bytes of one changes or swallows what comes."""

    def __init__(self, relay: RelayAt, after_bytes: int, change: Callable[[bytes], bytes]) -> None:
        self._relay = relay
        self._after_bytes = after_bytes
        self._change = change
        self.changed = 0
        """Parts that were."""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._pass_on, "127.0.0.1", 0)
        self._carrying: set[asyncio.Task[None]] = set()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._carrying:
            task.cancel()
        await asyncio.gather(*self._carrying, return_exceptions=True)

    @property
    def at(self) -> RelayAt:
        return RelayAt(self._relay.peer_id, f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}")

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._carrying.add(task)
        task.add_done_callback(self._carrying.discard)
        host, _, port = self._relay.address.rpartition(":")
        ends = [writer]
        try:
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
            ends.append(far_writer)
            left = [self._after_bytes]
            await asyncio.gather(self._copy(reader, far_writer, left), self._copy(far_reader, writer, left))
        finally:
            for end in ends:
                end.transport.abort()

    async def _copy(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, left: list[int]
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(4096):
                left[0] -= len(data)
                if left[0] < 0:
                    data = self._change(data)
                    self.changed += 1
                writer.write(data)
                await writer.drain()
            writer.write_eof()


def flipped(data: bytes) -> bytes:
    """With one bit changed."""
    return bytes((data[0] ^ 1,)) + data[1:]


def swallowed(_: bytes) -> bytes:
    """Nothing arrives, and nobody hears that."""
    return b""
