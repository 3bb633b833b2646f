"""Routes of services and operations under `/admin/v1`: for who may operate."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any, Final

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response

from molink.client.gateway.accounts.api_keys import key_text
from molink.client.gateway.accounts.errors import AccountsUnavailable
from molink.client.gateway.accounts.gatekeeper import Gatekeeper
from molink.client.gateway.apis.answer import WAITING, ServerSentEvent
from molink.client.gateway.apis.documents import answers
from molink.client.gateway.models.served_models import ServedModels
from molink.client.gateway.services.operation_store import OperationStore
from molink.client.gateway.services.service import (
    LongRunningOperation,
    OperationState,
    OperatorKeyMissing,
    ServiceExists,
)
from molink.client.gateway.services.service_admin import ServiceAdmin
from molink.client.gateway.services.service_documents import (
    BegunServiceDocument,
    OperationDocument,
    OperationListDocument,
    ServiceDocument,
    ServiceKeyDocument,
    ServiceListDocument,
    ServicePreviewDocument,
)
from molink.client.gateway.services.service_requests import DeployRequest, KeyRequest
from molink.client.gateway.streams import EventStream

SERVICES: Final = "/admin/v1/services"
OPERATIONS: Final = "/admin/v1/operations"
LOOKS_EVERY_S: Final = 0.2
COMMENTS_AFTER_S: Final = 10.0
LONGEST_S: Final = 3600.0
"""After which a stream of an operation ends; it can be asked for again."""


def add_services(app: FastAPI, admin: ServiceAdmin, models: ServedModels, gatekeeper: Gatekeeper) -> None:
    """Adds the routes of services, and of operations."""
    _add_operations(app, admin)

    @app.get(SERVICES, **answers(ServiceListDocument))
    async def list_services() -> dict[str, Any]:
        """The services, with their state."""
        return {"object": "list", "data": await admin.all()}

    @app.post(SERVICES, **answers(BegunServiceDocument, status=202))
    async def deploy_service(body: DeployRequest) -> dict[str, Any]:
        """Deploys a service: its circuits are held from then on. The operation tells how far it is."""
        if await models.has_model(body.name):
            raise ServiceExists(f"A model has the name {body.name}: choose another one.")
        operation = await admin.deploy(body.name, body.specification())
        return {"object": "service", "name": body.name, "operation": operation.describe()}

    @app.post(f"{SERVICES}/preview", **answers(ServicePreviewDocument))
    async def preview_service(body: DeployRequest) -> dict[str, Any]:
        """Says what circuits a service would have, or how many bytes are missing. Nothing is loaded."""
        preview = await admin.preview(body.name, body.specification())
        return {"object": "preview", "name": body.name, "model": body.model, "routing": preview}

    @app.get(f"{SERVICES}/{{name}}", **answers(ServiceDocument))
    async def service_status(name: str) -> dict[str, Any]:
        """The state of a service, and what it serves."""
        return await admin.status(name)

    @app.post(f"{SERVICES}/{{name}}/keys", **answers(ServiceKeyDocument, status=201))
    async def service_key(name: str, body: KeyRequest) -> Response:
        """Makes a key of the service, shown this once; older ones end after `overlap_s` seconds."""
        await admin.status(name)
        if not gatekeeper.has_operator:
            raise OperatorKeyMissing(
                "As soon as there is a key, every request needs one, and none may operate: make one first, with "
                "`molink-gateway keys create NAME --scope operate`."
            )
        key, secret = await admin.issue_key(name, body.overlap_s)
        made = {"object": "key", "id": key.id, "service": name, "key": key_text(key.id, secret)}
        return JSONResponse(made, 201, headers={"Cache-Control": "no-store"})

    @app.delete(f"{SERVICES}/{{name}}", **answers(BegunServiceDocument, status=202))
    async def delete_service(name: str) -> dict[str, Any]:
        """Deletes a service: its keys and leases end."""
        operation = await admin.delete(name)
        return {"object": "service", "name": name, "operation": operation.describe()}


def _add_operations(app: FastAPI, admin: ServiceAdmin) -> None:
    """Adds the routes of operations, whatever they are about."""

    @app.get(OPERATIONS, **answers(OperationListDocument))
    async def list_operations() -> dict[str, Any]:
        """The operations that run or have ended of late."""
        return {"object": "list", "data": [one.describe() for one in await admin.operations.all()]}

    @app.get(f"{OPERATIONS}/{{operation_id}}", **answers(OperationDocument))
    async def operation_state(operation_id: str) -> dict[str, Any]:
        """How far an operation is."""
        return (await admin.operations.get(operation_id)).describe()

    @app.get(f"{OPERATIONS}/{{operation_id}}/events", response_class=EventStream, status_code=200)
    async def operation_events(operation_id: str) -> Response:
        """The same as it changes, as events, until it has ended."""
        first = await admin.operations.get(operation_id)
        return EventStream(_events(admin.operations, first))

    @app.delete(f"{OPERATIONS}/{{operation_id}}", **answers(OperationDocument, status=202))
    async def cancel_operation(operation_id: str) -> dict[str, Any]:
        """Cancels an operation that runs."""
        return (await admin.cancel(operation_id)).describe()


async def _events(operations: OperationStore, first: LongRunningOperation) -> AsyncGenerator[bytes, None]:
    """What changes of an operation, until it has ended: `progress`, and at last `end`. Whichever gateway does it."""
    clock = asyncio.get_running_loop().time
    until_s, told, told_s = clock() + LONGEST_S, None, clock()
    operation = first
    while clock() < until_s:
        if operation.state is not OperationState.RUNNING:
            yield ServerSentEvent(operation.describe(), "end").encoded()
            return
        if operation != told:
            told, told_s = operation, clock()
            yield ServerSentEvent(operation.describe(), "progress").encoded()
        elif clock() - told_s > COMMENTS_AFTER_S:
            told_s = clock()
            yield WAITING.encoded()
        await asyncio.sleep(LOOKS_EVERY_S)
        with suppress(AccountsUnavailable):  # it is looked at again
            operation = await operations.get(first.id)
