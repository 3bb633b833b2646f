"""Service keeper: serves what the database says is deployed, and works for those services that this gateway has."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Self

from molink.client.gateway.accounts.errors import AccountsUnavailable
from molink.client.gateway.error_handlers import report
from molink.client.gateway.services.circuit_store import CircuitStore
from molink.client.gateway.services.operation_store import OperationStore
from molink.client.gateway.services.served_service import ServedService
from molink.client.gateway.services.service import (
    Service,
    ServiceNotReady,
    ServiceSpecification,
    ServiceState,
    UnknownService,
)
from molink.client.gateway.services.service_store import ServiceStore
from molink.client.gateway.services.service_swarm import ServiceHome, ServiceSwarm
from molink.client.gateway.services.service_work import ServiceWork
from molink.client.gateway.slots import WAITING_S
from molink.shards.spec import ModelSpec

SYNCS_EVERY_S: Final = 1.0
CLOSES_WITHIN_S: Final = 5.0
_log = logging.getLogger(__name__)


class ServiceKeeper:
    """Keeper of services. Open between `__aenter__` and `__aexit__`."""

    def __init__(
        self,
        home: ServiceHome,
        store: ServiceStore,
        operations: OperationStore,
        circuits: CircuitStore,
        gateway_id: str,
        waits_s: float = WAITING_S,
    ) -> None:
        """`waits_s`: longest wait of a generation for one of its service's circuits."""
        self._circuits = circuits
        self._operations = operations
        self._home = home
        self._waits_s = waits_s
        self._store = store
        self.gateway_id = gateway_id
        self._services: dict[str, Service] = {}
        self._served: dict[str, ServedService] = {}
        self._working: dict[tuple[str, ServiceState, str, bool], asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._syncing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._syncing = asyncio.create_task(self._keep_synced(), name="services")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """What is under way is left to the next gateway, or to this one when it starts again."""
        tasks = [task for task in (self._syncing, *self._working.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for served in self._served.values():
            self._close(served)
        if self._closing:
            await asyncio.wait(self._closing, timeout=CLOSES_WITHIN_S)
        with suppress(AccountsUnavailable):
            await self._store.give_up(self.gateway_id)

    def names(self) -> list[str]:
        """Names of the services that can be asked for."""
        return [name for name, one in self._services.items() if one.state is ServiceState.RUNNING]

    @property
    def count(self) -> int:
        """How many there are, in whatever state."""
        return len(self._services)

    def needed_model(self) -> str | None:
        """Returns the model whose services lack most circuits, as far as their gateways have said; None: none does."""
        lacking: Counter[str] = Counter()
        for service in self._services.values():
            if service.state is not ServiceState.DELETING:
                lacks = service.specification.minimum_circuits - self._circuits_of(service)
                lacking[service.specification.model] += max(0, lacks)
        model = max(lacking, key=lambda one: (lacking[one], one), default=None)
        return model if model is not None and lacking[model] else None

    def knows(self, name: str) -> bool:
        """Whether there is a service of that name."""
        return name in self._services

    def parameters(self, name: str) -> Mapping[str, float | int | list[str]]:
        """The service's parameters of requests that do not say; empty where there is none of that name."""
        service = self._services.get(name)
        return {} if service is None else service.specification.parameters

    def spec_of(self, name: str) -> ModelSpec | None:
        """Returns the service's model under its name; None while that is not open here."""
        served = self._served.get(name)
        return None if served is None or served.swarm is None else served.swarm.model

    async def get(self, name: str) -> ServiceSwarm:
        """The service of that name, to generate with for one request.

        Raises:
            UnknownService: there is none.
            ServiceNotReady: it is being deployed or deleted.
            SwarmError: its model cannot be opened.
        """
        service, served = self._services.get(name), self._served.get(name)
        if service is None or served is None:
            raise UnknownService(f"There is no service {name[:63]!r}.")
        if service.state is not ServiceState.RUNNING:
            raise ServiceNotReady(f"The service {name} is {service.state.value}.")
        return (await served.open()).for_request()

    def adopt(self, served: ServedService) -> ServedService | None:
        """Takes a service that was opened to be deployed; returns what is to be closed instead, if it was faster."""
        if served.name in self._served:
            return served
        self._served[served.name] = served
        self.wake()
        return None

    def wake(self) -> None:
        """Has it look at the database now."""
        self._wake.set()

    def observed(self, service: Service, tokens: int) -> Mapping[str, Any]:
        """What is seen of a service that has generated so many tokens: here, or else by the gateway that has it."""
        served = self._served.get(service.name)
        if service.owner_id != self.gateway_id or served is None:
            return service.observed
        return served.observe(tokens, time.time())

    async def _keep_synced(self) -> None:
        failed = False
        while True:
            try:
                await self._sync()
                failed = False
            except AccountsUnavailable as error:
                if not failed:
                    _log.warning("services cannot be read (%s)", error)
                failed = True
            except Exception as error:  # noqa: BLE001 - the boundary of a duty: services of others go on
                report(error)
            with suppress(TimeoutError):
                async with asyncio.timeout(SYNCS_EVERY_S):
                    await self._wake.wait()
            self._wake.clear()

    async def _sync(self) -> None:
        observed: dict[str, Mapping[str, Any]] = {}
        for name, service in self._services.items():
            if service.owner_id == self.gateway_id:
                _, tokens = await self._store.usage(name)
                observed[name] = self.observed(service, tokens)
        services = await self._store.sync(self.gateway_id, observed)
        self._services = {service.name: service for service in services}
        for name, service in self._services.items():
            if name in self._served and self._served[name].specification != service.specification:
                self._close(self._served.pop(name))  # another one has taken the name
            if name not in self._served:
                self._served[name] = self.served_of(name, service.specification)
        for name in self._served.keys() - self._services.keys():
            self._close(self._served.pop(name))
        await self._set_to_work()

    async def _set_to_work(self) -> None:
        """Begins what the states of own services ask for, and ends what they do not any more."""
        own = {one.work: one for one in self._services.values() if one.owner_id == self.gateway_id}
        over = [work for work, task in self._working.items() if work not in own or _has_failed(task)]
        ended = [self._working.pop(work) for work in over]
        for task in ended:
            task.cancel()
        await asyncio.gather(*ended, return_exceptions=True)
        for name, served in self._served.items():
            if self._services[name].owner_id != self.gateway_id:
                served.let_go()
        for work in own.keys() - self._working.keys():
            service = own[work]
            begun = ServiceWork(service, self._served[service.name], self._store, self._operations)
            self._working[work] = asyncio.create_task(begun.run(), name=f"service {service.name}")
            self._working[work].add_done_callback(self._worked)

    def _worked(self, task: "asyncio.Task[None]") -> None:
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            report(error)  # it is begun again with the next look at the database
        else:
            self._wake.set()

    def _circuits_of(self, service: Service) -> int:
        """Circuits that a service has, as far as that is known here."""
        served = self._served.get(service.name)
        if service.owner_id != self.gateway_id or served is None:
            return int(service.observed.get("held", 0)) + int(service.observed.get("in_use", 0))
        swarm = served.swarm
        return 0 if swarm is None else swarm.opened.held.count + swarm.places.everywhere[0]

    def served_of(self, name: str, specification: ServiceSpecification) -> ServedService:
        """Returns such a service, not opened."""
        return ServedService(self._home, name, specification, self._circuits, self._waits_s)

    def _close(self, served: ServedService) -> None:
        async def close() -> None:
            served.let_go()
            await served.end_generations()
            await served.close()

        task = asyncio.create_task(close(), name=f"close {served.name}")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


def _has_failed(task: "asyncio.Task[None]") -> bool:
    return task.done() and not task.cancelled() and task.exception() is not None
