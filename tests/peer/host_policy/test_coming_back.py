"""A peer that has paused holds again what it held, however long something is in the way, and unless others took its
place; a network that is too busy to hear of it ends nothing."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

import pytest
from support.links.data_plane import asynchronous, until
from support.swarms.lease_books import book

from molink.peer.announcing.announcer import Announcer
from molink.peer.host_policy import pausing as pausing_module
from molink.peer.host_policy import reloading, rules
from molink.peer.host_policy.pausing import Pausing
from molink.peer.host_policy.reloading import Reload
from molink.peer.host_policy.rules import HostPolicy, Readings
from molink.peer.memory.leases import LeaseBook
from molink.peer.serving.data_plane import DataPlane
from molink.shards.backoff import Backoff
from molink.shards.spec import Span

SPAN = Span(0, 3)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "PAUSE_AFTER_S", 0.0)
    monkeypatch.setattr(rules, "RESUME_AFTER_S", 0.0)
    monkeypatch.setattr(pausing_module, "LOOK_EVERY_S", 0.001)
    monkeypatch.setattr(pausing_module, "GRACE_S", 0.0)
    monkeypatch.setattr(reloading, "LOAD_AGAIN", Backoff(0.002, 0.004))


@dataclass
class Machine:
    """A volunteer's machine, and what pausing uses of the peer on it: loads fail with `problem` while there is one."""

    leases: LeaseBook = field(default_factory=lambda: book(max_sessions=8))
    unplugged: bool = False
    problem: Exception | None = None
    loads: int = 0
    said: int = 0
    abandoned: int = 0

    def read(self) -> Readings:
        return Readings(0, on_battery=self.unplugged)

    async def load(self, _: Span) -> None:
        self.loads += 1
        for promised in self.leases.loading:
            if self.problem is not None:
                self.leases.load_failed(promised)
                raise self.problem
            self.leases.loaded(promised)

    def abandon(self) -> None:
        self.abandoned += 1

    async def drop(self, spans: tuple[Span, ...]) -> None:
        self.leases.drop(*spans)

    async def announce_or_later(self, *, facts_too: bool = False) -> None:
        self.said += facts_too

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[Pausing]:
        """It has held SPAN, and holds nothing while it is on battery; then it runs on."""
        self.leases.preload(SPAN, 0.0)
        self.leases.loaded(SPAN)
        serving = SimpleNamespace(
            say_leaving=lambda *_: None,
            admission=SimpleNamespace(hand_back=lambda _: None),
            loader=self,
            stepper=SimpleNamespace(guessing=SimpleNamespace(source_of=None)),
        )
        parts = (self.leases, cast("DataPlane", serving), cast("Announcer", self))
        pausing = Pausing(HostPolicy(), "cpu", self.read, *parts, lambda _: None)
        keeping = asyncio.create_task(pausing.enforce())
        try:
            self.unplugged = True
            await until(lambda: pausing.paused_for is not None and not self.leases.held)
            yield pausing
            assert not keeping.done()
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)

    def plug_in(self) -> None:
        self.unplugged = False


PROBLEMS = [RuntimeError("CUDA out of memory: a game still holds the card"), KeyError("model.norm.weight")]


@pytest.mark.full
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda one: type(one).__name__)
@asynchronous
async def test_loads_that_fail_are_tried_again_until_one_succeeds(problem: Exception) -> None:
    machine = Machine(problem=problem)
    async with machine.paused() as pausing:
        machine.plug_in()
        await until(lambda: machine.loads >= 3)
        assert pausing.paused_for is None
        assert machine.leases.held == ()
        machine.problem = None
        await until(lambda: machine.leases.held == (SPAN,))
        assert machine.said == 1  # who avoided it has heard once that it is back


@pytest.mark.full
@asynchronous
async def test_what_was_refused_while_the_operator_drained_the_peer_is_loaded_when_it_takes_sessions_again() -> (
    None
):
    machine = Machine()
    async with machine.paused() as pausing:
        machine.leases.gate.drain()
        machine.plug_in()
        await until(lambda: pausing.paused_for is None and machine.said > 0)
        assert machine.leases.loading == machine.leases.held == ()
        machine.leases.gate.reopen("draining")
        await until(lambda: machine.leases.held == (SPAN,))


@pytest.mark.full
@asynchronous
async def test_a_pause_between_two_tries_ends_them_and_forgets_nothing() -> None:
    machine = Machine(problem=OSError("the disk is busy"))
    async with machine.paused() as pausing:
        machine.plug_in()
        await until(lambda: machine.loads >= 2)
        machine.unplugged = True
        await until(lambda: pausing.paused_for is not None and machine.abandoned == 2)  # at each pause
        machine.problem = None
        assert machine.leases.held == ()
        machine.plug_in()
        await until(lambda: machine.leases.held == (SPAN,))


def test_tries_come_ever_more_rarely_and_end_when_all_is_held() -> None:
    wish = Reload().joined((Span(0, 2), Span(2, 3)))
    assert wish.missing(()) == (SPAN,)
    waits: list[float] = []
    for _ in range(8):
        wish = wish.tried((Span(0, 1),), at_s=100.0)
        waits.append(wish.due_s - 100.0)
    assert wish.missing((Span(0, 1),)) == (Span(1, 3),)
    assert waits == sorted(waits)
    assert (waits[0], waits[-1]) == pytest.approx(
        (reloading.LOAD_AGAIN.first_s, reloading.LOAD_AGAIN.longest_s)
    )
    assert wish.tried((Span(0, 6),), at_s=100.0) == Reload()
    assert wish.joined((Span(4, 6),)) == Reload((SPAN, Span(4, 6)))


@pytest.mark.parametrize(
    ("present", "given_up"),
    [((), False), ((Span(0, 1),), False), ((Span(2, 4),), True), ((Span(0, 3), Span(5, 6)), True)],
)
def test_layers_whose_place_others_have_taken_are_wished_for_no_longer(
    present: tuple[Span, ...], given_up: bool
) -> None:
    assert Reload((SPAN,)).is_given_up(present) is given_up
