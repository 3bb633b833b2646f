"""Service administration: what operators ask about services, whichever gateway they ask."""

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

from molink.client.api.circuits_preview import CircuitsPreview
from molink.client.gateway.accounts.api_keys import ApiKey
from molink.client.gateway.accounts.database import Database
from molink.client.gateway.services.circuit_store import CircuitStore
from molink.client.gateway.services.operation_store import OperationStore
from molink.client.gateway.services.served_service import ServedService
from molink.client.gateway.services.service import (
    LongRunningOperation,
    Service,
    ServiceExists,
    ServiceNotPossible,
    ServiceSpecification,
    ServiceState,
    UnknownService,
)
from molink.client.gateway.services.service_keeper import ServiceKeeper
from molink.client.gateway.services.service_store import ServiceStore
from molink.client.gateway.services.service_swarm import ServiceHome
from molink.client.gateway.slots import WAITING_S

MOST_SERVICES: Final = 32
"""Each may have two processes that make tokens of text."""


class ServiceAdmin:
    """Administration of services."""

    def __init__(self, keeper: ServiceKeeper, store: ServiceStore, operations: OperationStore) -> None:
        self.operations = operations
        self._keeper = keeper
        self._store = store

    async def preview(self, name: str, specification: ServiceSpecification) -> dict[str, Any]:
        """Over which peers the service's circuits would go, and what is missing, JSON-ready. Nothing is loaded.

        Raises:
            ModelNotFound, SwarmUnavailable: as `AsyncSwarm.beside`.
        """
        served = self._keeper.served_of(name, specification)
        try:
            return (await _preview(served)).describe()
        finally:
            await served.close()

    async def deploy(self, name: str, specification: ServiceSpecification) -> LongRunningOperation:
        """Begins to deploy a service.

        Raises:
            ServiceExists: the name is taken, or there are too many.
            ServiceNotPossible: the peers that are there cannot hold it.
            ModelNotFound, SwarmUnavailable: as `AsyncSwarm.beside`.
        """
        if self._keeper.knows(name):
            raise ServiceExists(
                f"There is a service {name} already: delete it first, or choose another name."
            )
        if self._keeper.count >= MOST_SERVICES:
            raise ServiceExists(f"There are {MOST_SERVICES} services, which is the most: delete one first.")
        served = self._keeper.served_of(name, specification)
        try:
            preview = await _preview(served)
            if not preview.is_possible:
                missing = f" ({preview.missing_bytes} bytes are missing)" if preview.missing_bytes else ""
                raise ServiceNotPossible(
                    f"Of {preview.wanted} circuits, there is room for {len(preview.routes)}{missing}: "
                    f"{preview.reason}."
                )
            operation = await self._store.deploy(name, specification, self._keeper.gateway_id)
        except BaseException:
            await served.close()
            raise
        spare = self._keeper.adopt(served)
        if spare is not None:
            await spare.close()
        return operation

    async def delete(self, name: str) -> LongRunningOperation:
        """Begins to delete a service.

        Raises:
            UnknownService: there is none of that name.
        """
        operation = await self._store.begin_delete(name)
        self._keeper.wake()
        return operation

    async def cancel(self, operation_id: str) -> LongRunningOperation:
        """Asks for an operation to be undone.

        Raises:
            UnknownService: there is none of that id.
        """
        operation = await self.operations.cancel(operation_id)
        self._keeper.wake()
        return operation

    async def issue_key(self, name: str, overlap_s: float) -> tuple[ApiKey, bytes]:
        """As `ServiceStore.issue_key`."""
        return await self._store.issue_key(name, overlap_s)

    async def status(self, name: str) -> dict[str, Any]:
        """How a service is, JSON-ready.

        Raises:
            UnknownService: there is none of that name.
        """
        service = await self._store.get(name)
        requests, tokens = await self._store.usage(name)
        observed = self._keeper.observed(service, tokens)
        return _describe(service, observed) | {"requests": requests, "generated_tokens": tokens}

    async def all(self) -> list[dict[str, Any]]:
        """All services, JSON-ready, as `status` has them."""
        described = []
        for service in await self._store.all():
            with suppress(UnknownService):  # it has gone meanwhile
                described.append(await self.status(service.name))
        return described


@dataclass(frozen=True, slots=True)
class OpenServices:
    """Open services of a gateway: those that can be asked for, and what operators do with them."""

    keeper: ServiceKeeper
    admin: ServiceAdmin


@asynccontextmanager
async def opened_services(
    home: ServiceHome, database: Database, gateway_id: str, waits_s: float = WAITING_S
) -> AsyncIterator[OpenServices]:
    """Serves the services in a database, and works for those that this gateway has.

    Args:
        home: the swarm that they are on.
        database: opened by the caller.
        gateway_id: the same after a restart of this gateway: what was its own is so again at once.
        waits_s: longest wait of a generation for one of its service's circuits.
    """
    store, operations = ServiceStore(database), OperationStore(database)
    circuits = CircuitStore(database, gateway_id)
    async with ServiceKeeper(home, store, operations, circuits, gateway_id, waits_s) as keeper:
        yield OpenServices(keeper, ServiceAdmin(keeper, store, operations))


async def _preview(served: ServedService) -> CircuitsPreview:
    swarm = await served.open()
    asked = served.specification
    return await swarm.opened.preview(asked.minimum_circuits, asked.tokens(swarm.model.context_length))


def _describe(service: Service, observed: Mapping[str, Any]) -> dict[str, Any]:
    asked = service.specification
    since_s = service.running_since_s
    short = observed.get("held", 0) + observed.get("in_use", 0) < asked.minimum_circuits
    state = "degraded" if service.state is ServiceState.RUNNING and short else service.state.value
    return {
        "object": "service",
        "name": service.name,
        "state": state,
        "model": asked.model,
        "operation": service.operation_id,
        "created_at": round(service.created_at_s, 3),
        "uptime_s": None if since_s is None else round(max(0.0, time.time() - since_s), 3),
        "minimum_circuits": asked.minimum_circuits,
        "maximum_circuits": asked.maximum_circuits,
        "resources": {
            "gpu": asked.gpu,
            "gpu_count": asked.gpu_count,
            "memory_bytes": asked.memory_bytes,
            "regions": list(asked.regions),
            "partners": asked.partners,
            "tokens_per_circuit": asked.tokens_per_circuit,
        },
        "parameters": dict(asked.parameters),
        **observed,
    }
