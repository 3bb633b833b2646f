"""Dialled connection: a gRPC call of this end, with the channel that is its own and the way that it goes."""

import asyncio
from typing import Protocol

import grpc
import grpc.aio


class GrpcStream(Protocol):
    """gRPC stream: what is used of a grpc.aio call."""

    async def read(self) -> object: ...

    async def write(self, message: bytes) -> None: ...

    def cancel(self) -> bool: ...

    async def code(self) -> grpc.StatusCode: ...

    async def initial_metadata(self) -> grpc.aio.Metadata: ...

    async def trailing_metadata(self) -> grpc.aio.Metadata: ...

    async def details(self) -> str: ...


class DialledConnection:
    """A call of this end, with the channel that is its own."""

    def __init__(
        self, call: GrpcStream, channel: grpc.aio.Channel, way: str = "direct", host: str = ""
    ) -> None:
        """`way` is its name; `host`: where whoever opened the way sees the other end."""
        self.stream = call
        self.way = way
        self.host = host
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._channel = channel

    def lost(self) -> None:
        if not self.gone.done():
            self.gone.set_result(None)

    async def close(self) -> None:
        self.lost()
        self.stream.cancel()
        await self._channel.close()


def way_of(connection: object) -> str:
    """The name of the way that a connection goes; empty: the other end has dialled it, and knows."""
    return connection.way if isinstance(connection, DialledConnection) else ""
