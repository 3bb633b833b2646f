"""Routes of nodes under `/admin/v1`: registering with a token, and what who may operate does with nodes."""

from typing import Annotated, Any, Final

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field, model_validator

from molink.client.gateway.apis.documents import answers
from molink.client.gateway.nodes.node_admin import NodeAdmin
from molink.client.gateway.nodes.node_documents import (
    AccessDocument,
    BegunNodeDocument,
    NodeListDocument,
    NodeStatusDocument,
)
from molink.dht.identity.identity import public_key_of

NODES: Final = "/admin/v1/nodes"
ACCESS: Final = f"{NODES}/access"
"""Where machines register, with a key of the scope access."""
_STRICT: Final = ConfigDict(extra="forbid", strict=True)
Words = Annotated[str, Field(max_length=300)]


class GpuDescriptor(BaseModel):
    """A graphics card of a machine."""

    model_config = _STRICT

    maker: Words
    name: Words
    driver: Words | None = None


class NodeDescriptor(BaseModel):
    """A machine as it describes itself: nobody checks whether that is true."""

    model_config = _STRICT

    hostname: Words
    system: Words
    system_version: Words
    release: Words = ""
    machine: Words = ""
    processor: Words | None = None
    processors: Annotated[int, Field(ge=0, le=2**20)] | None = None
    memory_bytes: Annotated[int, Field(ge=0, lt=2**60)]
    gpus: Annotated[list[GpuDescriptor], Field(max_length=64)] = []
    addresses: Annotated[list[Words], Field(max_length=256)] = []


class AccessRequest(BaseModel):
    """POST /admin/v1/nodes/access."""

    model_config = _STRICT

    peer_id: Annotated[str, Field(max_length=100)]
    node: NodeDescriptor

    @model_validator(mode="after")
    def _is_an_identitys(self) -> "AccessRequest":
        try:
            public_key_of(self.peer_id)
        except ValueError:
            raise ValueError("peer_id must be a peer's identity, such as 12D3KooW") from None
        return self


class DrainRequest(BaseModel):
    """POST /admin/v1/nodes/{peer_id}/drain."""

    model_config = _STRICT


class ServeRequest(BaseModel):
    """POST /admin/v1/nodes/{peer_id}/serve."""

    model_config = _STRICT

    model: Annotated[str, Field(min_length=1, max_length=200)]


def add_nodes(app: FastAPI, admin: NodeAdmin) -> None:
    """Adds the routes of nodes."""

    @app.post(ACCESS, **answers(AccessDocument, status=201))
    async def node_access(body: AccessRequest, request: Request) -> Response:
        """Registers a machine, by the token that its operator gave; says which swarm to join and what to serve."""
        told = await admin.register(request.state.caller, body.peer_id, body.node.model_dump())
        return JSONResponse(told, 201, headers={"Cache-Control": "no-store"})

    @app.get(NODES, **answers(NodeListDocument))
    async def list_nodes() -> dict[str, Any]:
        """The machines that have registered."""
        return {"object": "list", "operator": admin.operator_id, "data": await admin.all()}

    @app.get(f"{NODES}/{{peer_id}}", **answers(NodeStatusDocument))
    async def node_status(peer_id: str) -> dict[str, Any]:
        """What a machine is, and what it does now."""
        return await admin.status(peer_id)

    @app.post(f"{NODES}/{{peer_id}}/drain", **answers(BegunNodeDocument, status=202))
    async def drain_node(peer_id: str, body: DrainRequest) -> dict[str, Any]:
        """Lets the sessions of a machine go on elsewhere; it takes no new ones."""
        del body
        return {"object": "node", "peer_id": peer_id, "operation": (await admin.drain(peer_id)).describe()}

    @app.post(f"{NODES}/{{peer_id}}/serve", **answers(BegunNodeDocument, status=202))
    async def serve_model(peer_id: str, body: ServeRequest) -> dict[str, Any]:
        """Has a machine serve another model: sessions handed over, then loaded anew."""
        operation = await admin.serve(peer_id, body.model)
        return {"object": "node", "peer_id": peer_id, "operation": operation.describe()}

    @app.delete(f"{NODES}/{{peer_id}}", **answers(BegunNodeDocument, status=202))
    async def exit_node(peer_id: str) -> dict[str, Any]:
        """Has a machine leave: sessions handed over, memory freed, its entry and token gone."""
        return {"object": "node", "peer_id": peer_id, "operation": (await admin.exit(peer_id)).describe()}
