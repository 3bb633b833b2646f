"""A client goes on looking at the swarm when for a while nobody answers."""

from types import TracebackType
from typing import Self

import pytest
from support.links.data_plane import asynchronous, until

from molink.client.circuit.connection import SwarmConnection
from molink.dht.node.discovery import BootstrapUnreachable
from molink.dht.records.records import PeerView


class ScriptedDiscovery:
    """Answers a pull, except the second one."""

    def __init__(self, error: Exception) -> None:
        self.pulls = 0
        self._error = error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def snapshot(self, *_: object) -> tuple[PeerView, ...]:
        return ()

    async def refresh(self) -> None:
        self.pulls += 1
        if self.pulls == 2:
            raise self._error

    async def connections(self) -> int:
        return 0

    async def changed(self, timeout_s: float) -> bool:
        return timeout_s > 0


@pytest.mark.parametrize("error", [BootstrapUnreachable([("12D3", "no answer")]), TimeoutError()], ids=repr)
@asynchronous
async def test_a_pull_that_nobody_answers_is_not_the_last(error: Exception) -> None:
    discovery = ScriptedDiscovery(error)
    connection = SwarmConnection([], None, view=discovery)
    async with connection:
        for pulls in (2, 3):
            await connection.refresh_soon(0.0)
            await until(lambda pulls=pulls: discovery.pulls == pulls)
