"""What a peer says of itself, and when: at once when its load or its links change, and from time to time."""

import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version

from molink.dht.identity.identity import Identity
from molink.dht.node.discovery import Discovery
from molink.dht.records.records import (
    PROTOCOL_VERSION,
    AnnouncedDraft,
    DeviceProperties,
    PeerFacts,
    PeerState,
    PeerView,
    ServedModel,
)
from molink.peer.announcing.placement_core import Claim, claimed
from molink.peer.announcing.prober import PROBE_EVERY_S, Prober
from molink.peer.engine.stepping import Stepper
from molink.peer.memory.leases import LeaseBook, announced_free_bytes
from molink.peer.profiling.profile import Profile
from molink.peer.profiling.step_times import StepTimes, worth_announcing
from molink.peer.wire.link.certificate import Certificate
from molink.peer.wire.transport.line_quality import MeasureLine, announced_mbps
from molink.routing.placement.placement import JoiningMachine
from molink.shards.spec import GUESSES, MAX_STEP_TOKENS, PENALTIES, ModelSpec, Span, merge_spans

LOOK_EVERY_S = 5.0
"""Between looks at whether the load has changed without anybody saying so."""
UPLINK_GAP_S = 60.0
"""Least time between announcements of an uplink: facts are large, and each goes to the whole swarm."""
PROFILE_GAP_S = 60.0
"""The same for a refined profile."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Measurements:
    """What a peer measures of itself while it serves."""

    prober: Prober
    """Round trips."""
    line: MeasureLine
    """Its uplink and its links, from their own traffic."""
    step_times: StepTimes
    fetch_bytes_per_s: Callable[[], float | None] = lambda: None
    """At which weights come that are not on this machine; None: nothing was fetched."""


@dataclass(frozen=True, slots=True)
class PeerContact:
    """Where others find a peer, and how they know it."""

    name: str
    addresses: tuple[str, ...]
    """Of the control plane, as multiaddresses."""
    grpc_addresses: tuple[str, ...]
    """Of the data plane, as HOST:PORT."""
    certificate: Certificate


@dataclass(frozen=True, slots=True)
class ServingTerms:
    """What a peer takes part in."""

    span_limit: Span | None = None
    """None: any layers."""
    activation_codecs: tuple[str, ...] = ()
    step_tokens: int = MAX_STEP_TOKENS
    keeps_copies: bool = False
    partner_peer_id: str = ""
    pairs: bool = False
    region: str = ""
    sampling_abilities: tuple[str, ...] = (PENALTIES, GUESSES)
    drafts: tuple[AnnouncedDraft, ...] = ()


@dataclass(slots=True)
class _Told:
    """What others have been told of what rarely changes."""

    profile: Profile
    profile_at_s: float = -math.inf
    uplink_mbps: float | None = None
    uplink_at_s: float = -math.inf
    facts_due: bool = False
    """Whether the next announcement has to say it, since one that was to say it has failed."""


class Announcer:
    """Keeps the swarm informed of one serving peer."""

    def __init__(
        self,
        discovery: Discovery,
        facts: PeerFacts,
        spec: ModelSpec,
        leases: LeaseBook,
        stepper: Stepper,
        changed: asyncio.Event,
        measured: Measurements,
    ) -> None:
        self.facts = facts
        self._discovery = discovery
        self._spec = spec
        self._leases = leases
        self._stepper = stepper
        self._changed = changed
        self._measured = measured
        self._told = _Told(measured.step_times.profile)
        self._claim = Claim()

    def own_view(self) -> PeerView:
        """This peer as it is this moment, whatever it has told others."""
        return PeerView(replace(self._current_facts(), ttl_s=1), replace(self._state(), ttl_s=1), age_s=0.0)

    async def claim(self, claim: Claim) -> None:
        """Tells others what this peer is going to load and to drop, until something else is claimed; of nothing they
        hear when they next hear of it. The lease book knows nothing of it.

        Raises:
            TimeoutError: the network is too busy for others to hear what is going to be dropped. What is only going to
                be loaded they hear later then.
            ThreadStoppedError: it has stopped.
        """
        before, self._claim = self._claim, claim
        if claim.drop:
            await self.announce(facts_too=True)
        elif claim != Claim():
            await self.announce_or_later(facts_too=True)
        elif before != claim:
            self._changed.set()

    async def announce(self, *, facts_too: bool = False) -> None:
        """Says how things stand now; with `facts_too` also what rarely changes, as the first time. Facts that could not
        be said go with the next announcement, whoever makes it.

        Raises:
            TimeoutError: the network is too busy.
            ThreadStoppedError: it has stopped.
        """
        due, self._told.facts_due = facts_too or self._told.facts_due, False
        told = claimed(replace(self._state(), loading=merge_spans(self._leases.loading)), self._claim)
        said = False
        try:
            await self._discovery.announce(self._current_facts() if due else None, told)
            said = True
        finally:
            self._told.facts_due |= due and not said

    async def announce_or_later(self, *, facts_too: bool = False) -> None:
        """As `announce`, but what the network is too busy for now is said when `keep_announced` next looks: nothing
        that a peer has to do at this moment waits for it.

        Raises:
            ThreadStoppedError: the network has stopped.
        """
        try:
            await self.announce(facts_too=facts_too)
        except TimeoutError as error:
            _log.warning("announced later: %s", error)
            self._changed.set()

    async def tell_facts(self, facts: PeerFacts) -> None:
        """Announces other facts than before: where this peer is reached has changed."""
        self.facts = facts
        await self.announce(facts_too=True)

    async def keep_announced(self) -> None:
        """Announces whenever something has changed, until cancelled."""
        while True:
            try:
                async with asyncio.timeout(LOOK_EVERY_S):
                    await self._changed.wait()
            except TimeoutError:
                pass
            self._changed.clear()
            changed = (self._uplink_changed(), self._profile_changed())
            await self.announce(facts_too=any(changed))

    async def keep_probing(self) -> None:
        """Measures round trips until cancelled: at once when somebody new appears, else from time to time."""
        clock = asyncio.get_running_loop().time
        while True:
            seen, known = self._discovery.version, self._peer_ids()
            if await self._measured.prober.probe():
                await self.announce(facts_too=True)
            deadline_s = clock() + PROBE_EVERY_S
            while (left_s := deadline_s - clock()) > 0 and not self._peer_ids() - known:
                await self._discovery.changed(left_s, since=seen)
                seen = self._discovery.version

    def _current_facts(self) -> PeerFacts:
        return replace(
            self.facts,
            links=self._measured.prober.measurements(),
            coordinate=self._measured.prober.coordinate,
            uplink_mbps=self._told.uplink_mbps,
            layer_latencies=self._told.profile.layer_latencies,
            prefill_latencies=self._told.profile.prefill_latencies,
            embed_ms=self._told.profile.embed_ms,
            head_ms=self._told.profile.head_ms,
            step_ms=self._told.profile.step_ms,
            load_bytes_per_s=loading_rate(self.facts.load_bytes_per_s, self._measured.fetch_bytes_per_s()),
        )

    def _profile_changed(self) -> bool:
        """Takes over what steps have taught, if the swarm should hear of it."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self._told.profile_at_s < PROFILE_GAP_S:
            return False
        refined = self._measured.step_times.refined()
        if not worth_announcing(self._told.profile, refined):
            return False
        self._told.profile, self._told.profile_at_s = refined, now_s
        return True

    def _uplink_changed(self) -> bool:
        """Takes over what the line was measured to carry, if the swarm should hear of it."""
        now_s = asyncio.get_running_loop().time()
        mbps = announced_mbps(self._told.uplink_mbps, self._measured.line().uplink_bytes_per_s)
        if mbps == self._told.uplink_mbps or now_s - self._told.uplink_at_s < UPLINK_GAP_S:
            return False
        self._told.uplink_mbps, self._told.uplink_at_s = mbps, now_s
        return True

    def _peer_ids(self) -> set[str]:
        return {view.peer_id for view in self._discovery.snapshot(self._spec.model_hash)}

    def _state(self) -> PeerState:
        leases = self._leases
        free_weight_bytes, free_kv_bytes = announced_free_bytes(self._spec, self.facts.span_limit, leases)
        return PeerState(
            peer_id=self.facts.peer_id,
            sequence=0,
            ttl_s=0,
            facts_sequence=0,
            spans=leases.held,
            free_weight_bytes=free_weight_bytes,
            free_kv_bytes=free_kv_bytes,
            sessions=len(leases.leases),
            queued=self._stepper.queued,
            draining=leases.gate.is_closed,
        )


def loading_rate(load_bytes_per_s: float, fetch_bytes_per_s: float | None) -> float:
    """Bytes per second of weights that are fetched before they are loaded, unless they are on the disk (None)."""
    return (
        load_bytes_per_s if fetch_bytes_per_s is None else 1 / (1 / load_bytes_per_s + 1 / fetch_bytes_per_s)
    )


def joining_machine(
    facts: PeerFacts, spec: ModelSpec, leases: LeaseBook, profile: Profile, prober: Prober
) -> JoiningMachine:
    """This peer, which announces `facts`, as placement is asked about it before it holds anything; its weights are on
    its disk."""
    free_weight_bytes, free_kv_bytes = announced_free_bytes(spec, None, leases)
    return JoiningMachine(
        peer_id=facts.peer_id,
        free_weight_bytes=free_weight_bytes,
        free_kv_bytes=free_kv_bytes,
        layer_latencies=profile.layer_latencies,
        embed_ms=profile.embed_ms,
        head_ms=profile.head_ms,
        step_ms=profile.step_ms,
        load_bytes_per_s=profile.load_bytes_per_s,
        rtt_ms={link.peer_id: link.rtt_ms for link in prober.measurements()},
        coordinate=prober.coordinate,
        held=leases.held,
        relays=facts.relays,
        cone=facts.cone,
        drafts=facts.drafts,
    )


def own_facts(
    identity: Identity,
    contact: PeerContact,
    device: DeviceProperties,
    spec: ModelSpec,
    profile: Profile,
    terms: ServingTerms = ServingTerms(),
) -> PeerFacts:
    """The part of the announcement that rarely changes. Sequence and time to live are filled in when it is sent."""
    return PeerFacts(
        peer_id=identity.peer_id,
        public_key=identity.public_key,
        sequence=0,
        ttl_s=0,
        protocol_version=PROTOCOL_VERSION,
        version=version("molink"),
        name=contact.name[:64],
        addresses=contact.addresses,
        grpc_addresses=contact.grpc_addresses,
        certificate=contact.certificate.der,
        device=device,
        model=ServedModel.of(spec),
        span_limit=terms.span_limit,
        layer_latencies=profile.layer_latencies,
        embed_ms=profile.embed_ms,
        head_ms=profile.head_ms,
        step_ms=profile.step_ms,
        load_bytes_per_s=profile.load_bytes_per_s,
        activation_codecs=terms.activation_codecs,
        prefill_latencies=profile.prefill_latencies,
        decode_context_ms=profile.decode_context_ms,
        prefill_context_ms=profile.prefill_context_ms,
        step_tokens=terms.step_tokens,
        keeps_copies=terms.keeps_copies,
        partner_peer_id=terms.partner_peer_id,
        pairs=terms.pairs,
        region=terms.region,
        sampling_abilities=terms.sampling_abilities,
        drafts=terms.drafts,
    )
