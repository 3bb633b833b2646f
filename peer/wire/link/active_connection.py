"""Active connection of a link: its reading and its writing task, from the first packet to the last one."""

import asyncio
from collections.abc import Callable
from typing import Any

from molink.peer.wire.link.connection import BREAKS, FAREWELL_S, Connection, PacketPump
from molink.peer.wire.transport.packet_engine import PacketEngine


class ActiveConnection:
    """Active connection: owns a connection while a link uses it. Begins to carry at once, and ends with `let_go`."""

    def __init__(
        self,
        connection: Connection,
        packets: PacketEngine,
        deliver: Callable[[memoryview], None],
        peer_id: str,
        pace: Callable[[], float] | None = None,
    ) -> None:
        """`peer_id` is the other end's: tasks are called after it. `pace`: as the packet pump's."""
        self._connection = connection
        self._carrier = PacketPump(connection.stream, packets, deliver, pace)
        self._reading = asyncio.create_task(self._carrier.read(), name=f"link {peer_id} read")
        self._writing = asyncio.create_task(self._carrier.write(), name=f"link {peer_id} write")

    def wake(self) -> None:
        """Wakes the writer: there may be something to send."""
        self._carrier.wake()

    def lost(self) -> None:
        """Ends the connection: it is gone, or has to be."""
        self._connection.lost()

    async def ended(self, closing: "asyncio.Future[Any]") -> "asyncio.Task[str]":
        """Waits until it breaks, or `closing` is done; returns the task that says why, if it has ended at all."""
        await asyncio.wait(
            (self._reading, self._writing, closing, self._connection.gone),
            return_when=asyncio.FIRST_COMPLETED,
        )
        if self._writing.done() and not self._reading.done() and not closing.done():
            # the other end's last packet may be there
            await asyncio.wait({self._reading}, timeout=FAREWELL_S)
        return self._reading if self._reading.done() else self._writing

    async def let_go(self, farewell: bytes | None, *, dialled: bool) -> None:
        """Leaves the connection, after a last packet if there is one. `dialled`: by this end."""
        try:
            if farewell is not None and not self._writing.done():
                self._carrier.say_last(farewell)
                async with asyncio.timeout(FAREWELL_S):
                    await asyncio.wait({self._writing})
                    if dialled:  # a call that is cancelled takes back what it has not delivered
                        await self._hear_the_end()
        except (TimeoutError, *BREAKS):
            pass
        finally:
            self._carrier.stop_timer()
            for task in (self._reading, self._writing):
                task.cancel()
            try:
                await asyncio.gather(self._reading, self._writing, return_exceptions=True)
            finally:  # also where this is cancelled: gRPC keeps a call that nobody ends
                await self._connection.close()

    async def _hear_the_end(self) -> None:
        if self._reading.done():
            await self._carrier.read()
        else:
            await asyncio.wait({self._reading})
