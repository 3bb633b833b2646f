"""A connection is closed also where whoever was to have it, or to close it, is cancelled: gRPC keeps a call that nobody
ends."""

import asyncio
import contextlib
import math
from types import SimpleNamespace

import pytest
from support.links.data_plane import End, asynchronous

from molink.peer.wire.link.acceptor import Acceptor, require_free_port
from molink.peer.wire.link.active_connection import ActiveConnection
from molink.peer.wire.link.certificate import Credentials
from molink.peer.wire.link.ladder import abandon_dials
from molink.peer.wire.link.link import Resumed


class Held:
    """A connection whose stream says nothing, and takes its time to end."""

    def __init__(self) -> None:
        self.stream = self
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.reading, self.ending = asyncio.Event(), asyncio.Event()
        self.closed = False

    async def read(self) -> object:
        self.reading.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        self.ending.set()
        return await asyncio.Event().wait()

    async def write(self, message: bytes, /) -> None:
        raise AssertionError(message)

    def lost(self) -> None:
        pass

    async def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("cancelled", [False, True])
def test_the_dial_that_has_won_is_closed_where_nobody_gets_it(*, cancelled: bool) -> None:
    @asynchronous
    async def run() -> None:
        won, other = Resumed(Held(), 0), Resumed(Held(), 0)

        async def opened(resumed: Resumed) -> Resumed:
            return resumed

        dials = [asyncio.create_task(opened(one)) for one in (won, other)]
        await asyncio.gather(*dials)
        ending = asyncio.create_task(abandon_dials(dials, won))
        await asyncio.sleep(0)  # it waits for the dials now
        if cancelled:
            ending.cancel()
        await asyncio.gather(ending, return_exceptions=True)
        assert ending.cancelled() == cancelled
        assert [one.connection.closed for one in (won, other)] == [cancelled, True]  # type: ignore[attr-defined]

    run()


@asynchronous
async def test_a_connection_is_closed_where_letting_it_go_is_cancelled() -> None:
    held = Held()
    traffic = SimpleNamespace(next_packet=lambda _: math.inf)
    carried = ActiveConnection(held, traffic, lambda _: None, "peer")  # type: ignore[arg-type]
    await held.reading.wait()
    ending = asyncio.create_task(carried.let_go(None, dialled=True))
    await held.ending.wait()
    ending.cancel()
    await asyncio.gather(ending, return_exceptions=True)
    assert ending.cancelled()
    assert held.closed


@asynchronous
async def test_a_port_is_free_where_closing_its_links_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    closing = asyncio.Event()
    async with End(is_client=True) as end:
        credentials = Credentials(end.peer_id, end.certificate)
        acceptor = await Acceptor("127.0.0.1", 0, credentials, end.links, end.handler).__aenter__()

        async def close() -> None:
            closing.set()
            await asyncio.Event().wait()

        with monkeypatch.context() as patch:
            patch.setattr(end.links, "close", close)
            ending = asyncio.create_task(acceptor.__aexit__(None, None, None))
            await closing.wait()
            ending.cancel()
            await asyncio.gather(ending, return_exceptions=True)
        assert ending.cancelled()
        require_free_port("127.0.0.1", acceptor.port)
