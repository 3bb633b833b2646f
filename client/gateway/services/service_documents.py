"""Documents that services and operations are described with under `/admin/v1`, as `/openapi.json` has them."""

from typing import Literal

from pydantic import Field, JsonValue

from molink.client.gateway.apis.documents import Document
from molink.client.gateway.services.service import OperationKind, OperationState


class OperationDocument(Document):
    """A long operation: what it is about, and how far it is. Times are seconds since 1970 (UTC)."""

    id: str
    object: Literal["operation"]
    kind: OperationKind
    subject: str
    state: OperationState
    message: str
    progress: float
    cancel_requested: bool
    created_at: float
    updated_at: float


class OperationListDocument(Document):
    """Operations, the newest first."""

    object: Literal["list"]
    data: list[OperationDocument]


class ServiceHopDocument(Document):
    """Layers [start, stop) on a peer."""

    peer_id: str
    start: int
    stop: int


class HeldCircuitDocument(Document):
    """A circuit that is held for a generation to come."""

    predicted_tpot_ms: float
    hops: list[ServiceHopDocument]


class ServiceResourcesDocument(Document):
    """What the peers of a service must have."""

    gpu: str
    gpu_count: int
    memory_bytes: int
    regions: list[str]
    partners: str
    tokens_per_circuit: int | None


class ServiceDocument(Document):
    """A service and how it is. What its gateway has said of it is left out until that has said something."""

    object: Literal["service"]
    name: str
    state: Literal["deploying", "running", "degraded", "deleting"]
    model: str
    operation: str
    created_at: float
    uptime_s: float | None
    minimum_circuits: int
    maximum_circuits: int
    resources: ServiceResourcesDocument
    parameters: dict[str, JsonValue]
    requests: int
    generated_tokens: int
    held: int = 0
    in_use: int = 0
    waiting: int = 0
    utilisation: float = 0.0
    throughput_tokens_per_s: float = 0.0
    model_hash: str | None = None
    circuits: list[HeldCircuitDocument] = Field(default_factory=list)
    observed_at: float = 0.0


class ServiceListDocument(Document):
    """The services, with their state."""

    object: Literal["list"]
    data: list[ServiceDocument]


class BegunServiceDocument(Document):
    """A service, and the operation that was begun."""

    object: Literal["service"]
    name: str
    operation: OperationDocument


class PreviewedHopDocument(Document):
    """A hop of a circuit that a service would have."""

    peer_id: str
    start: int
    stop: int
    load_bytes: int
    kv_bytes: int


class PreviewedCircuitDocument(Document):
    """A circuit that a service would have."""

    predicted_tpot_ms: float
    predicted_ttft_ms: float
    load_s: float
    hops: list[PreviewedHopDocument]


class RoutingPreviewDocument(Document):
    """The circuits that a service would have, and what is missing for the others."""

    possible: bool
    circuits_wanted: int
    tokens_per_circuit: int
    missing_bytes: int
    missing_layers: list[tuple[int, int]]
    reason: str | None
    load_bytes: int
    circuits: list[PreviewedCircuitDocument]


class ServicePreviewDocument(Document):
    """What a service would be; nothing is loaded."""

    object: Literal["preview"]
    name: str
    model: str
    routing: RoutingPreviewDocument


class ServiceKeyDocument(Document):
    """A key of a service, shown this once."""

    object: Literal["key"]
    id: str
    service: str
    key: str
