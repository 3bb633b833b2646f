"""Records of peers about themselves, as values. Signing and encoding are in `announcement.py`."""

from dataclasses import dataclass, field

from molink.shards.spec import MAX_STEP_TOKENS, ModelSpec, Span

PROTOCOL_VERSION = 4
"""Raised when old and new peers could misunderstand each other; other versions are left out of circuits."""
COORDINATE_DIMENSIONS = 4
"""Beside the height. On round trips between 21 cloud regions more predict no better."""
MAX_COORDINATE_MS = 10_000.0
"""Farthest from the origin along each axis, and highest."""
MAX_COORDINATE_ERROR = 1.5
LOOKUP, TABLES = "lookup", "tables"
"""Drafts that are no model: the longest match in the sequence itself; n-grams of a client's earlier generations."""


@dataclass(frozen=True, slots=True)
class DeviceProperties:
    """Properties of the devices that a peer computes on."""

    kind: str
    """`cpu`, `cuda` or `mps`."""
    name: str
    """The GPU's or processor's name, such as `NVIDIA H200`."""
    count: int
    memory_bytes: int
    """Memory of one device."""
    system: str
    """Operating system and machine, such as `Linux x86_64`."""
    processors: int


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that a peer serves, as far as a router must know it."""

    model_hash: str
    content_hash: str
    name: str
    architecture: str
    dtype: str
    quantization: str
    layers: int

    @classmethod
    def of(cls, spec: ModelSpec) -> "ServedModel":
        """Returns what of a model's description is announced."""
        return cls(
            model_hash=spec.model_hash,
            content_hash=spec.content_hash,
            name=spec.name,
            architecture=spec.architecture,
            dtype=spec.dtype,
            quantization=spec.quantization,
            layers=spec.layers,
        )


@dataclass(frozen=True, slots=True)
class LayerLatency:
    """Measured time of one decode step through one layer at one batch size."""

    batch_size: int
    layer_ms: float


@dataclass(frozen=True, slots=True)
class PrefillLatency:
    """Measured time of so many tokens of one prompt through one layer, in one step."""

    tokens: int
    layer_ms: float


@dataclass(frozen=True, slots=True)
class LinkMeasurement:
    """A round trip that a peer measured to another peer."""

    peer_id: str
    rtt_ms: float


@dataclass(frozen=True, slots=True)
class Coordinate:
    """Network coordinate of a peer among the others: round trips are predicted by distance plus both heights.

    Raises ValueError if a value is out of bounds.
    """

    position: tuple[float, ...]
    """COORDINATE_DIMENSIONS numbers, in milliseconds of round trip."""
    height_ms: float
    """Of the access link, which is on every path; above 0."""
    error: float
    """How wrong its predictions have been of late, relative to what was measured; above 0."""

    def __post_init__(self) -> None:
        if len(self.position) != COORDINATE_DIMENSIONS:
            raise ValueError(
                f"a position has {COORDINATE_DIMENSIONS} dimensions, this one {len(self.position)}"
            )
        if not all(abs(part) <= MAX_COORDINATE_MS for part in self.position):
            raise ValueError(f"a position must be within {MAX_COORDINATE_MS:g} ms, it is {self.position}")
        for name, value, most in (
            ("height_ms", self.height_ms, MAX_COORDINATE_MS),
            ("error", self.error, MAX_COORDINATE_ERROR),
        ):
            if not 0 < value <= most:
                raise ValueError(f"{name} must be above 0 and at most {most:g}, it is {value}")


@dataclass(frozen=True, slots=True)
class RelayAt:
    """A relay: the peer that it is of, and where it listens."""

    peer_id: str
    address: str
    """host:port."""


@dataclass(frozen=True, slots=True)
class AnnouncedDraft:
    """Draft that a peer guesses tokens with where it is the head of a circuit."""

    name: str
    """LOOKUP, TABLES, or what a draft model is called."""
    tokenizer: bytes = b""
    """The first 8 bytes of the SHA-256 of a draft model's tokenizer.json; empty: it is no model, and guesses from
    sequences themselves."""
    guess_ms: float = 0.0
    """That one guess takes; 0: too little to count. On the wire in single precision."""


@dataclass(frozen=True, slots=True)
class PeerFacts:
    """The part of an announcement that rarely changes: sent when it does, about 1 KB."""

    peer_id: str
    """The libp2p peer id (base58) of `public_key`."""
    public_key: bytes
    """32 bytes, Ed25519."""
    sequence: int
    """Grows with every new statement of this peer, over restarts too."""
    ttl_s: int
    """Seconds after receipt at which the statement is forgotten. 0 takes it back at once."""
    protocol_version: int
    version: str
    """The software's version, for people."""
    name: str
    addresses: tuple[str, ...]
    """libp2p multiaddresses, each ending in /p2p/PEER_ID."""
    grpc_addresses: tuple[str, ...]
    """host:port of the data plane; empty if nobody can dial this peer."""
    certificate: bytes
    """DER of the TLS certificate that the data plane presents."""
    device: DeviceProperties
    model: ServedModel
    span_limit: Span | None
    """Layers that this peer is willing to hold; None: any."""
    layer_latencies: tuple[LayerLatency, ...]
    """In order of batch size, at least that of batch size 1."""
    embed_ms: float
    head_ms: float
    load_bytes_per_s: float
    """How fast this peer turns stored weights into held layers."""
    links: tuple[LinkMeasurement, ...] = ()
    coordinate: Coordinate | None = None
    """On the wire in single precision."""
    uplink_mbps: float | None = None
    """What this peer's line was measured to carry away from it, in megabits per second; None: nobody knows yet."""
    activation_codecs: tuple[str, ...] = ()
    """Lossy encodings that this peer takes and sends where a session asks for them. Its dtype's own numbers always."""
    prefill_latencies: tuple[PrefillLatency, ...] = ()
    """In order of tokens; empty if none was measured."""
    decode_context_ms: float = 0.0
    """What 1000 further tokens of context add to one sequence's decode step through one layer; 0: not measured.
    On the wire in single precision, as is the next."""
    prefill_context_ms: float = 0.0
    """What 1000 tokens of context add to one token of a prompt through one layer; 0: not measured."""
    step_ms: float = 0.0
    """What a step takes however many layers it goes through, and of however many sessions; 0: not measured. On the wire
    in single precision."""
    step_tokens: int = MAX_STEP_TOKENS
    """Most new tokens of one session that a step may have here. Peers that do not say take MAX_STEP_TOKENS."""
    relay_address: str = ""
    """host:port at which this peer joins connections of others; empty: it does not."""
    relays: tuple[RelayAt, ...] = ()
    """Where this peer is asked for, if nobody can dial it."""
    cone: bool = False
    """Whether its NAT gives it one outer port for every destination, so that it can punch holes with others of the
    kind. Said by a peer that nobody can dial, once two relays have told it."""
    keeps_copies: bool = False
    """Whether it keeps second copies of others' KV caches, and lets others keep them of its own."""
    partner_peer_id: str = ""
    """The only peer that may keep copies of its own, if its owner has named one."""
    sampling_abilities: tuple[str, ...] = ()
    """What it can do where it draws tokens as a circuit's tail, beside what every peer can: PENALTIES, GRAMMARS."""
    pairs: bool = False
    """Whether its sessions may go over to their partners while it computes prompts: copies are of keys and values then,
    where its line is not known to be too thin."""
    region: str = ""
    """Where its owner says that it is, for people to see; routers go by what is measured."""
    drafts: tuple[AnnouncedDraft, ...] = ()
    """What it guesses tokens with where it is the head; none: it does not."""


@dataclass(frozen=True, slots=True)
class PeerState:
    """The part of an announcement that changes: at most 150 bytes signed."""

    peer_id: str
    sequence: int
    """Shares one growing number with the peer's facts."""
    ttl_s: int
    """0: the peer is leaving and must be forgotten."""
    facts_sequence: int
    """The facts that this state goes with."""
    spans: tuple[Span, ...]
    """Layers held, ready to serve this second."""
    free_weight_bytes: int
    """Memory that could be filled with further layers."""
    free_kv_bytes: int
    """Memory that leases for new sessions could get."""
    sessions: int
    """Sessions leased now."""
    queued: int
    """Steps that wait for the device."""
    draining: bool = False
    """Serves what it has, takes nothing new."""
    loading: tuple[Span, ...] = ()
    """Layers on their way, or about to be: others need not take them too. No circuit goes by it."""


@dataclass(frozen=True, slots=True)
class PeerLoss:
    """Suspicion that a witness has of a peer that it had a link to: it does not answer any more."""

    witness_tag: int
    peer_tag: int
    sequence: int
    """Of the newest state that the witness knows. A newer one refutes it."""


@dataclass(frozen=True, slots=True)
class PeerView:
    """One peer as the directory knows it: verified, alive, facts and state together."""

    facts: PeerFacts
    state: PeerState
    age_s: float
    """Seconds since the newest of the two was received."""
    facts_record: bytes = field(default=b"", repr=False)
    """The signed facts as received, to hand on to others."""
    answers: bool = True
    """False: whoever made this view had a link to the peer, lost it, and cannot reach it any more. The swarm may know
    better, and will soon."""

    @property
    def peer_id(self) -> str:
        return self.facts.peer_id
