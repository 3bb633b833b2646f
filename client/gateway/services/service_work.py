"""Service work: what the gateway that has a service does for it: deploys it, holds its circuits, deletes it.

Each of the three begins from whatever is there, so that a gateway which starts again goes on with what another has
begun. Only `ServiceStore` says what has happened.
"""

import asyncio
import logging
from contextlib import suppress
from functools import partial
from typing import Final

from molink.client.errors import SwarmError
from molink.client.gateway.accounts.errors import AccountsUnavailable
from molink.client.gateway.services.operation_store import OperationStore
from molink.client.gateway.services.served_service import ServedService
from molink.client.gateway.services.service import OperationState, Scaling, Service, ServiceState
from molink.client.gateway.services.service_store import ServiceStore
from molink.client.gateway.services.service_swarm import ServiceSwarm

DEPLOYS_WITHIN_S: Final = 900.0
"""Peers may have to load tens of gigabytes for it."""
FORMS_WITHIN_S: Final = 20.0
"""A further circuit of a service that runs."""
RETRIES_AFTER_S: Final = 3.0
LOOKS_EVERY_S: Final = 1.0
TELLS_EVERY_S: Final = 0.5
_log = logging.getLogger(__name__)


class ServiceWork:
    """Work for one service, in one of its states."""

    def __init__(
        self, service: Service, served: ServedService, store: ServiceStore, operations: OperationStore
    ) -> None:
        self._service = service
        self._served = served
        self._store = store
        self._operations = operations
        self._message = ""
        """What is being done, for whoever watches the operation."""

    async def run(self) -> None:
        """Does what the state asks for, until it is done or cancelled; once more after the database did not answer."""
        while True:
            try:
                return await self._work()
            except AccountsUnavailable as error:
                _log.warning("service %s: the database does not answer (%s)", self._service.name, error)
                await asyncio.sleep(RETRIES_AFTER_S)

    async def _work(self) -> None:
        name, operation_id = self._service.name, self._service.operation_id
        match self._service.state, self._service.cancels:
            case ServiceState.DEPLOYING, False:
                await self._deploy()
            case ServiceState.DEPLOYING, True:
                self._served.let_go()
                await self._store.remove(
                    name, operation_id, OperationState.CANCELLED, "The service was not deployed."
                )
            case ServiceState.DELETING, False:
                await self._delete()
            case ServiceState.DELETING, True:
                await self._store.keep(name, operation_id)
            case _:
                await self._hold()

    async def _deploy(self) -> None:
        """Holds as many circuits as it has at least, or undoes it all."""
        name, operation_id = self._service.name, self._service.operation_id
        telling = asyncio.create_task(self._keep_telling(), name="tell progress")
        try:
            async with asyncio.timeout(DEPLOYS_WITHIN_S):
                await self._hold_minimum()
        except (SwarmError, TimeoutError) as error:
            self._served.let_go()
            reason = str(error) or f"its circuits did not stand within {DEPLOYS_WITHIN_S:g} s"
            await self._store.remove(name, operation_id, OperationState.FAILED, f"Not deployed: {reason}")
        else:
            await self._store.deployed(name, operation_id)
        finally:
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)

    async def _hold_minimum(self) -> None:
        self._message = "The model is being opened."
        swarm = await self._served.open()
        asked = self._service.specification
        swarm.places.want_spare(asked.minimum_circuits)
        while (held := swarm.opened.held.count) < asked.minimum_circuits:
            if held >= swarm.places.free:  # another gateway had the service, and its circuits, a moment ago
                await _until_changed(swarm)
                continue
            which = f"Circuit {held + 1} of {asked.minimum_circuits}"
            self._message = f"{which} is being formed."
            await swarm.opened.held.add(
                asked.tokens(swarm.model.context_length),
                DEPLOYS_WITHIN_S,
                partial(self._note, which),
            )

    def _note(self, which: str, line: str) -> None:
        self._message = f"{which}: {line}"

    async def _hold(self) -> None:
        """Holds what is wanted beside the circuits in use, until cancelled."""
        asked = self._service.specification
        clock = asyncio.get_running_loop().time
        scaling = Scaling(asked.minimum_circuits, asked.maximum_circuits)
        while True:
            try:
                swarm = await self._served.open()
                held, places = swarm.opened.held, swarm.places
                generations = places.in_use + places.waiting
                wanted = scaling.wanted(clock(), generations)
                places.want_spare(max(0, wanted - generations))
                spare = max(0, wanted - places.in_use)
                places.trim(spare)
                if held.count < min(spare, places.free):
                    await places.form(held.add(asked.tokens(swarm.model.context_length), FORMS_WITHIN_S))
                else:
                    await _until_changed(swarm)
            except SwarmError as error:
                _log.info("service %s lacks a circuit: %s", self._service.name, error)
                await asyncio.sleep(RETRIES_AFTER_S)

    async def _delete(self) -> None:
        """Begins nothing more, lets generations end, gives everything back."""
        name, operation_id = self._service.name, self._service.operation_id
        await self._operations.tell(operation_id, "Generations that are under way may end.", 0.25)
        await self._served.end_generations()
        self._served.let_go()
        await self._store.remove(
            name, operation_id, OperationState.SUCCEEDED, "The service is gone, and so are its keys."
        )

    async def _keep_telling(self) -> None:
        """Writes down how far deploying is, until cancelled."""
        told = ""
        while True:
            swarm, message = self._served.swarm, self._message
            if message != told:
                held = 0 if swarm is None else swarm.opened.held.count
                with suppress(AccountsUnavailable):
                    part = held / self._service.specification.minimum_circuits if held else 0.0
                    await self._operations.tell(self._service.operation_id, message, min(0.99, part))
                    told = message
            await asyncio.sleep(TELLS_EVERY_S)


async def _until_changed(swarm: ServiceSwarm) -> None:
    """Until circuits were taken or lost, or it is time to look again."""
    events = (swarm.places.changed, swarm.opened.held.changed)
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=LOOKS_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
    for event in events:
        event.clear()
