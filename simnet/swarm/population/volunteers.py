"""Volunteers as values: what they bring, where they live, how long they stay."""

import hashlib
import math
from dataclasses import dataclass, replace

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.random import Generator

from molink.dht.identity.identity import Identity
from molink.dht.records.records import (
    LOOKUP,
    PROTOCOL_VERSION,
    TABLES,
    AnnouncedDraft,
    Coordinate,
    PeerFacts,
    ServedModel,
)
from molink.peer.memory.memory import MemoryPlan
from molink.shards.spec import GUESSES, PENALTIES, ModelSpec, Span
from molink.simnet.swarm.population.hardware import MIX, CardKind
from molink.simnet.swarm.population.places import RegionPlaces
from molink.simnet.swarm.settings import Churn

_UPLINK_MEDIAN_MBPS, _UPLINK_SPREAD = 25.0, 0.8
"""Log-normal: a fifth has less than 13 Mbps, a fifth more than 49. An assumption about homes with cable and fibre."""
_DOWNLINK_FACTOR = 4.0
"""How much more a home's line carries towards it."""
_MBPS_BYTES = 125_000
_CERTIFICATE_BYTES, _CERTIFICATE_RANDOM_BYTES = 370, 195
"""Of a peer's certificate, and how many of them are its own: keys, signature and serial number."""


@dataclass(frozen=True, slots=True, eq=False)
class Volunteer:
    """Somebody with a machine."""

    identity: Identity
    facts: PeerFacts
    memory: MemoryPlan
    uplink_mbps: float | None
    """What the line carries away; None: as much as a router assumes of a line that nobody measured."""
    fetch_bytes_per_s: float | None
    """What it carries towards the home; None: the weights are there already."""
    stay_s: float = math.inf
    crashes: bool = False
    """Whether it goes without a word."""
    spans: tuple[Span, ...] | None = None
    """What it holds from the start; None: it chooses for itself."""
    region: int = 0
    kind: int = 0

    @property
    def peer_id(self) -> str:
        return self.facts.peer_id


def identity_of(seed: int, name: str) -> Identity:
    """The same identity for the same name, in the world of one seed."""
    return Identity(
        Ed25519PrivateKey.from_private_bytes(hashlib.sha256(f"molink-swarm/{seed}/{name}".encode()).digest())
    )


def plain_facts(identity: Identity, spec: ModelSpec, name: str, kind: CardKind) -> PeerFacts:
    """What such a machine announces, but for where it is. Ports and certificate say nothing, and are as long as real
    ones and as different."""
    profile = kind.profile
    noise = hashlib.shake_256(b"molink-facts" + identity.public_key).digest(_CERTIFICATE_RANDOM_BYTES + 6)
    home, ports = ".".join(map(str, noise[:3])), (20_000 + 128 * noise[3], 20_001 + 128 * noise[4])
    return PeerFacts(
        peer_id=identity.peer_id,
        public_key=identity.public_key,
        sequence=0,
        ttl_s=1,
        protocol_version=PROTOCOL_VERSION,
        version="0",
        name=name,
        addresses=(f"/ip4/10.{home}/tcp/{ports[0]}/p2p/{identity.peer_id}",),
        grpc_addresses=(f"10.{home}:{ports[1]}",),
        certificate=bytes(_CERTIFICATE_BYTES - _CERTIFICATE_RANDOM_BYTES) + noise[6:],
        device=kind.device,
        model=ServedModel.of(spec),
        span_limit=None,
        layer_latencies=profile.layer_latencies,
        embed_ms=profile.embed_ms,
        head_ms=profile.head_ms,
        step_ms=profile.step_ms,
        load_bytes_per_s=profile.load_bytes_per_s,
        prefill_latencies=profile.prefill_latencies,
        decode_context_ms=profile.decode_context_ms,
        prefill_context_ms=profile.prefill_context_ms,
        keeps_copies=True,
        sampling_abilities=(PENALTIES, GUESSES),
        drafts=(AnnouncedDraft(LOOKUP), AnnouncedDraft(TABLES)),
    )  # fmt: skip


class Recruiter:
    """Draws volunteers; the same generator draws the same ones."""

    def __init__(
        self,
        spec: ModelSpec,
        kinds: tuple[CardKind, ...],
        places: RegionPlaces,
        churn: Churn,
        seed: int,
        rng: Generator,
    ) -> None:
        self._spec = spec
        self._kinds = kinds
        self._places = places
        self._churn = churn
        self._seed = seed
        self._rng = rng
        self._count = 0
        shares = [MIX[kind.name] for kind in kinds]
        self._shares = [share / sum(shares) for share in shares]

    def draw(self) -> Volunteer:
        """The next one, with a home of its own."""
        rng, name = self._rng, f"volunteer-{self._count}"
        self._count += 1
        number = int(rng.choice(len(self._kinds), p=self._shares))
        kind, identity = self._kinds[number], identity_of(self._seed, name)
        home = self._places.draw(rng, identity.peer_id)
        uplink_mbps = round(float(rng.lognormal(math.log(_UPLINK_MEDIAN_MBPS), _UPLINK_SPREAD)), 1)
        stay_s = self._churn.mean_stay_s
        stay_s = float(rng.exponential(stay_s)) if math.isfinite(stay_s) else math.inf
        coordinate: Coordinate = self._places.coordinate(home)
        facts = replace(
            plain_facts(identity, self._spec, name, kind), coordinate=coordinate, uplink_mbps=uplink_mbps
        )
        return Volunteer(
            identity=identity,
            facts=facts,
            memory=kind.memory,
            uplink_mbps=uplink_mbps,
            fetch_bytes_per_s=uplink_mbps * _DOWNLINK_FACTOR * _MBPS_BYTES,
            stay_s=stay_s,
            crashes=bool(rng.random() < self._churn.crash_share),
            region=home.region,
            kind=number,
        )
