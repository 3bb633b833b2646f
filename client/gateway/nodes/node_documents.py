"""Documents that nodes are described with under `/admin/v1/nodes`, as `/openapi.json` has them."""

from typing import Literal

from pydantic import Field, JsonValue

from molink.client.gateway.apis.documents import Document
from molink.client.gateway.services.service_documents import OperationDocument


class AccessDocument(Document):
    """What a machine needs to join: the swarm, whose orders it takes, what to serve if its owner does not say."""

    object: Literal["node"]
    peer_id: str
    operator: str
    initial_peers: list[str]
    swarm_key: str | None
    model: str | None


class NodeDocument(Document):
    """A machine as it described itself when it registered."""

    object: Literal["node"]
    peer_id: str
    token_id: str
    operator: str
    registered_at: float
    descriptor: dict[str, JsonValue]


class NodeListDocument(Document):
    """The machines that have registered, and whose orders they take."""

    object: Literal["list"]
    operator: str
    data: list[NodeDocument]


class NodeStatusDocument(Document):
    """How a machine is, as it says itself; `status` is null, with the reason, where it does not answer. Of one that has
    not registered there is no more than that."""

    object: Literal["node"]
    peer_id: str
    token_id: str = ""
    operator: str = ""
    registered_at: float = 0.0
    descriptor: dict[str, JsonValue] = Field(default_factory=dict)
    reachable: bool
    reason: str | None
    status: dict[str, JsonValue] | None


class BegunNodeDocument(Document):
    """A machine, and the operation that was begun."""

    object: Literal["node"]
    peer_id: str
    operation: OperationDocument
