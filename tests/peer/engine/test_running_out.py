"""A peer that runs out of descriptors, threads or memory for a while goes on when there are some again."""

import asyncio
from collections.abc import Callable
from typing import cast

import psutil
import pytest
from support.links.data_plane import asynchronous, soon

from molink.dht.host.bridge import ThreadStoppedError
from molink.peer.announcing.announcer import Announcer
from molink.peer.daemon import peer as peer_module
from molink.peer.daemon.peer import _keep_up
from molink.peer.host_policy import pausing as pausing_module
from molink.peer.host_policy.pausing import Pausing
from molink.peer.host_policy.rules import HostPolicy, Readings
from molink.peer.memory.leases import LeaseBook
from molink.peer.serving.data_plane import DataPlane

SHORTAGES = [
    OSError(24, "Too many open files"),
    MemoryError(),
    RuntimeError("can't start new thread"),
    TimeoutError("the network took longer than 5 s"),
]


@pytest.mark.parametrize("shortage", SHORTAGES, ids=lambda error: type(error).__name__)
def test_a_duty_begins_again_after_a_shortage(shortage: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_module, "RETRY_S", 0.0)
    begun = []

    async def duty() -> None:
        begun.append(1)
        if len(begun) < 3:
            raise shortage

    asyncio.run(_keep_up(duty))
    assert len(begun) == 3


@pytest.mark.parametrize("error", [ThreadStoppedError("the network"), RuntimeError("a fault"), ValueError()])
def test_a_duty_that_fails_for_another_reason_ends(error: Exception) -> None:
    async def duty() -> None:
        raise error

    with pytest.raises(type(error)):
        asyncio.run(_keep_up(duty))


@pytest.mark.parametrize(
    "shortage", [*SHORTAGES, psutil.AccessDenied()], ids=lambda error: type(error).__name__
)
def test_what_cannot_be_read_for_a_while_is_read_again(
    shortage: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pausing_module, "LOOK_EVERY_S", 0.0)

    @asynchronous
    async def scenario() -> None:
        read_again, reads = asyncio.Event(), []
        wake: Callable[[], object] = read_again.set
        loop = asyncio.get_running_loop()

        def read() -> Readings:
            reads.append(1)
            if len(reads) == 1:
                raise shortage
            loop.call_soon_threadsafe(wake)
            return Readings(minute_of_day=0)

        parts = (
            cast("LeaseBook", None),
            cast("DataPlane", None),
            cast("Announcer", None),
        )
        pausing = Pausing(HostPolicy(), "cpu", read, *parts, lambda _: None)
        keeping = asyncio.create_task(pausing.enforce())
        await soon(read_again.wait())
        assert not keeping.done()
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)

    scenario()
