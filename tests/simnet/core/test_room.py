"""Who waits for room gets it in the order of coming, and only as much as there is."""

import asyncio

import pytest
from support.links.data_plane import asynchronous, soon, until

from molink.simnet.core.room import Room


class Visitor:
    """Stays in the room until told to leave."""

    def __init__(self, room: Room, tokens: int) -> None:
        self.inside = False
        self._leave = asyncio.Event()
        self.task = asyncio.create_task(self._visit(room, tokens))

    async def _visit(self, room: Room, tokens: int) -> None:
        async with room.taken(tokens):
            self.inside = True
            await self._leave.wait()
        self.inside = False

    async def leave(self) -> None:
        self._leave.set()
        await soon(self.task)


@asynchronous
async def test_nobody_overtakes_even_where_there_is_room_for_them() -> None:
    room = Room(tokens=10, sessions=5)
    first, large, small = Visitor(room, 6), Visitor(room, 8), Visitor(room, 1)
    await until(lambda: first.inside)
    assert not large.inside
    assert not small.inside
    assert room.waiting == 2
    await first.leave()
    await until(lambda: large.inside and small.inside)
    await large.leave()
    await small.leave()


@asynchronous
async def test_sessions_are_limited_too_and_who_gives_up_lets_the_next_in() -> None:
    room = Room(tokens=100, sessions=1)
    first, second, third = Visitor(room, 1), Visitor(room, 1), Visitor(room, 1)
    await until(lambda: first.inside)
    second.task.cancel()
    await asyncio.gather(second.task, return_exceptions=True)
    await first.leave()
    await until(lambda: third.inside)
    await third.leave()
    again = Visitor(room, 100)
    await until(lambda: again.inside)
    await again.leave()


@asynchronous
async def test_what_never_fits_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        async with Room(tokens=10, sessions=1).taken(11):
            pass
