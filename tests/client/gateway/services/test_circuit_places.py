"""Places of a service at gateways that share a database: together no more circuits than the maximum, and none lost."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.swarms.fake_swarm import DEADLINE_S, MODEL, FakeHeldCircuits

from molink.client.errors import SwarmUnavailable
from molink.client.gateway.accounts.database import Database, opened_database
from molink.client.gateway.accounts.errors import AccountsUnavailable
from molink.client.gateway.services.circuit_places import (
    CircuitPlaces,
    LeasesCircuits,
    PlaceTerms,
    RequestPlaces,
)
from molink.client.gateway.services.circuit_store import CircuitGrant, CircuitStore
from molink.client.gateway.services.service import CircuitDemand, OperationState, ServiceSpecification
from molink.client.gateway.services.service_store import ServiceStore

pytestmark = pytest.mark.anyio
MAXIMUM = 3


@dataclass(slots=True)
class Gateway:
    places: CircuitPlaces
    held: FakeHeldCircuits

    @property
    def circuits(self) -> int:
        return self.places.in_use + self.held.count


@dataclass(slots=True)
class Watch:
    """How many circuits several gateways have together, at most, whenever a generation begins."""

    gateways: list[Gateway] = field(default_factory=list)
    most: int = 0
    order: list[int] = field(default_factory=list)
    """Which gateway's generation began when."""

    async def generate(self, at: int) -> None:
        async with self.gateways[at].places.place(RequestPlaces()) as has_begun:
            self.order.append(at)
            has_begun()
            self.most = max(self.most, sum(one.places.in_use for one in self.gateways))
            await asyncio.sleep(0.02)


@asynccontextmanager
async def gateway(store: LeasesCircuits, waits_s: float = DEADLINE_S) -> AsyncIterator[Gateway]:
    held = FakeHeldCircuits()
    places = CircuitPlaces(PlaceTerms("poet", MAXIMUM, waits_s), store, held)
    keeping = asyncio.create_task(places.keep_leased())
    try:
        yield Gateway(places, held)
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


@asynccontextmanager
async def deployed(url: str, folder: Path) -> AsyncIterator[tuple[Database, ServiceStore, str]]:
    async with opened_database(url, folder) as database:
        services = ServiceStore(database)
        operation = await services.deploy("poet", ServiceSpecification(model=MODEL), "g0")
        yield database, services, operation.id


@asynccontextmanager
async def gateways(url: str, folder: Path, count: int = 2) -> AsyncIterator[list[Gateway]]:
    async with deployed(url, folder) as (database, _, _), AsyncExitStack() as stack:
        stores = [CircuitStore(database, f"g{number}") for number in range(count)]
        yield [await stack.enter_async_context(gateway(store)) for store in stores]


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            if holds():
                return
            await asyncio.sleep(0.005)


@contextmanager
def forming(one: Gateway) -> Iterator["asyncio.Task[None]"]:
    """A circuit that does not stand until it is told to."""
    one.held.may_stand.clear()
    task = asyncio.create_task(one.places.form(one.held.add(256, DEADLINE_S)))
    try:
        yield task
    finally:
        one.held.may_stand.set()


async def test_gateways_together_have_no_more_generations_than_the_maximum_and_each_has_its_turn(
    url: str, tmp_path: Path
) -> None:
    async with gateways(url, tmp_path, 3) as serving, asyncio.timeout(DEADLINE_S):
        watch, is_over = Watch(serving), asyncio.Event()

        async def flood() -> None:
            while not is_over.is_set():
                await watch.generate(0)

        flooding = [asyncio.create_task(flood()) for _ in range(2 * MAXIMUM)]
        await until(lambda: len(watch.order) >= MAXIMUM)
        await asyncio.gather(*(watch.generate(at) for at in (1, 2, 1, 2)))
        is_over.set()
        await asyncio.gather(*flooding)
        assert (watch.most, sorted(set(watch.order))) == (MAXIMUM, [0, 1, 2])


@pytest.mark.full
async def test_a_circuit_that_is_held_for_later_makes_way_for_another_gateways_generation(
    url: str, tmp_path: Path
) -> None:
    async with gateways(url, tmp_path) as (holder, other), AsyncExitStack() as generations:
        holder.places.want_spare(2)
        await until(lambda: holder.places.free == 2)
        for _ in range(2):
            await holder.places.form(holder.held.add(256, DEADLINE_S))
        for count in range(1, MAXIMUM + 1):
            await generations.enter_async_context(other.places.place(RequestPlaces()))
            assert holder.circuits + other.circuits <= MAXIMUM
            left = min(2, MAXIMUM - count)
            await until(lambda left=left, count=count: (holder.circuits, other.circuits) == (left, count))  # type: ignore[misc]


async def test_a_circuit_that_is_being_formed_makes_way_for_a_generation(url: str, tmp_path: Path) -> None:
    async with (
        gateways(url, tmp_path) as (one, _),
        asyncio.timeout(DEADLINE_S),
        AsyncExitStack() as generations,
    ):
        for _ in range(MAXIMUM - 1):
            await generations.enter_async_context(one.places.place(RequestPlaces()))
        one.places.want_spare(1)
        await until(lambda: one.places.free > 0)
        with forming(one) as task:
            await asyncio.sleep(0)
            await generations.enter_async_context(one.places.place(RequestPlaces()))
            await task
        assert (one.held.count, one.places.in_use) == (0, MAXIMUM)


async def test_who_waits_no_more_takes_no_place(url: str, tmp_path: Path) -> None:
    async with gateways(url, tmp_path) as serving, asyncio.timeout(DEADLINE_S):
        watch = Watch(serving)
        async with AsyncExitStack() as generations:
            for _ in range(MAXIMUM):
                await generations.enter_async_context(serving[0].places.place(RequestPlaces()))
            waiting = [asyncio.create_task(watch.generate(at)) for at in (0, 0, 1)]
            await until(lambda: [one.places.waiting for one in serving] == [2, 1])
            waiting[0].cancel()
            waiting[2].cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert watch.order == [0]
        assert [one.places.in_use for one in serving] == [0, 0]
        await asyncio.gather(*(watch.generate(1) for _ in range(MAXIMUM)))


async def test_a_service_that_is_gone_has_no_places_and_one_of_that_name_begins_with_all(
    url: str, tmp_path: Path
) -> None:
    async with deployed(url, tmp_path) as (database, services, operation_id):
        first, second = CircuitStore(database, "g1"), CircuitStore(database, "g2")
        assert (await first.exchange("poet", 2, CircuitDemand(in_use=2))).circuits == 2
        answer = await second.exchange("poet", 2, CircuitDemand(waiting=1))
        assert answer == CircuitGrant(0, in_use_elsewhere=2, waiting_elsewhere=0)
        await services.remove("poet", operation_id, OperationState.SUCCEEDED, "gone")
        assert await first.exchange("poet", 2, CircuitDemand(in_use=2)) == CircuitGrant(0)
        await services.deploy("poet", ServiceSpecification(model=MODEL), "g2")
        assert await second.exchange("poet", 2, CircuitDemand(waiting=2)) == CircuitGrant(2)


@pytest.mark.full
async def test_without_the_database_what_was_leased_goes_on_and_more_is_refused_as_such(
    url: str, tmp_path: Path
) -> None:
    class Failing(CircuitStore):
        fails = False

        async def exchange(self, service: str, maximum: int, demand: CircuitDemand) -> CircuitGrant:
            if self.fails:
                raise AccountsUnavailable("it did not answer in time")
            return await super().exchange(service, maximum, demand)

    async with deployed(url, tmp_path) as (database, _, _):
        store = Failing(database, "g1")
        async with gateway(store, waits_s=2.0) as one:
            watch = Watch([one])
            async with one.places.place(RequestPlaces()):
                pass
            store.fails = True
            await watch.generate(0)  # on the place that it still has
            async with one.places.place(RequestPlaces()):
                with pytest.raises(AccountsUnavailable):
                    await watch.generate(0)
            store.fails = False
            async with (
                one.places.place(RequestPlaces()),
                one.places.place(RequestPlaces()),
                one.places.place(RequestPlaces()),
            ):
                with pytest.raises(SwarmUnavailable, match="all 3 circuits of the service poet are in use"):
                    await watch.generate(0)


async def test_a_request_waits_for_places_that_its_own_generations_have(url: str, tmp_path: Path) -> None:
    async with (
        deployed(url, tmp_path) as (database, _, _),
        gateway(CircuitStore(database, "g1"), waits_s=0.3) as one,
        AsyncExitStack() as others,
    ):
        one.places.want_spare(MAXIMUM)
        await until(lambda: one.places.free == MAXIMUM)
        for _ in range(MAXIMUM - 1):
            await others.enter_async_context(one.places.place(RequestPlaces()))
        request = RequestPlaces()

        async def generate() -> None:
            async with one.places.place(request):
                pass

        async with one.places.place(request):
            later = asyncio.create_task(generate())
            await until(lambda: one.places.waiting == 1)
            with pytest.raises(SwarmUnavailable):
                await Watch([one]).generate(0)  # it came behind, and its time is over
            assert not later.done()
        await later
        assert one.places.in_use == MAXIMUM - 1
