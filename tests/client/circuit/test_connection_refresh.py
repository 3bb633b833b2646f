"""A client goes on looking at the swarm when for a while nobody answers, and loses nobody who may be there."""

from types import TracebackType
from typing import Self

import pytest
from support.links.data_plane import End, asynchronous, soon, until

from molink.client.circuit.connection import SwarmConnection
from molink.dht.node.discovery import BootstrapUnreachable
from molink.dht.records.records import PeerState, PeerView


class ScriptedDiscovery:
    """Answers a pull, except the second one."""

    def __init__(self, error: Exception, views: tuple[PeerView, ...] = ()) -> None:
        self.pulls = 0
        self._error = error
        self._views = views

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def snapshot(self, *_: object) -> tuple[PeerView, ...]:
        return self._views

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


@asynchronous
async def test_who_has_just_come_back_is_not_lost_to_a_pull_that_nobody_answers_while_a_link_is_open() -> (
    None
):
    async with End() as linked, End() as returned:
        views = tuple(
            PeerView(end.facts, PeerState(end.peer_id, 1, 60, 1, (), 0, 0, 0, 0), 0.0)
            for end in (linked, returned)
        )
        discovery = ScriptedDiscovery(BootstrapUnreachable([("12D3", "no answer")]), views)
        async with SwarmConnection([], None, view=discovery) as connection:
            await soon(connection.links.to(linked.facts))
            await connection.refresh_soon(0.0)
            await until(lambda: discovery.pulls == 2)
            assert connection.snapshot() == views
            await linked.links.close()
            await until(lambda: connection.links.find(linked.peer_id) is None)
            assert connection.snapshot() == ()
