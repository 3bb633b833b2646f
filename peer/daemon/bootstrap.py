"""Bootstraps a serving peer: builds its parts in order, and opens them."""

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace

from molink.dht.host.host import Listen, peer_id_in
from molink.dht.identity.dialable import Ranges, swarm_ranges
from molink.dht.identity.identity import Identity
from molink.dht.identity.swarm_key import SwarmKey
from molink.dht.node.discovery import Discovery
from molink.dht.node.joining import Fallback
from molink.dht.records.records import PeerView
from molink.peer.announcing.announcer import (
    Announcer,
    Measurements,
    PeerContact,
    ServingTerms,
    joining_machine,
    own_facts,
)
from molink.peer.announcing.placing import PlacementDriver
from molink.peer.announcing.prober import Prober
from molink.peer.compute.native_ways import NativeWays
from molink.peer.daemon.compute_setup import (
    ComputeSetup,
    lease_book,
    memory_of,
    open_compute_setup,
    planned_memory,
)
from molink.peer.daemon.draft import draft_cache_bytes, guesses_of, left_memory_bytes
from molink.peer.daemon.local_listener import HOST as METRICS_HOST
from molink.peer.daemon.metrics_server import MetricsServer
from molink.peer.daemon.operator_orders import CommandedPeer, OperatorOrders
from molink.peer.daemon.partner_terms import PartnerTerms, partner_terms
from molink.peer.daemon.parts import PeerParts
from molink.peer.daemon.reaching import (
    data_address,
    hosts_of,
    open_reach,
    prefer_predicted_relays,
    with_mapped_ports,
)
from molink.peer.daemon.running import say
from molink.peer.daemon.settings import JoinSettings, where_to_join
from molink.peer.device.device import (
    cap_gpu_memory,
    check_memory,
    choose_devices,
    describe_device,
    give_back_memory,
    why_not_others,
)
from molink.peer.device.machine import free_port
from molink.peer.drafting.draft_thread import DraftThread
from molink.peer.engine.guessing import HeadGuesses
from molink.peer.engine.hop_traces import HopTraces, resource_of
from molink.peer.engine.metrics import PeerMetrics
from molink.peer.host_policy.gpus import this_process
from molink.peer.host_policy.memory_guard import MemoryGuard, own_memory_bytes
from molink.peer.host_policy.pausing import Pausing
from molink.peer.host_policy.readings import ReadMachine, machine_reader
from molink.peer.masks.mask_worker import MaskedModel
from molink.peer.memory.leases import LeaseBook, Refused
from molink.peer.models.choosing import ask_for_model, choose_model, model_notes
from molink.peer.models.hub import HubAccess
from molink.peer.models.manifests import ManifestSource
from molink.peer.models.model import LocalModel, ModelRequest, keeping_packed, open_model
from molink.peer.profiling.profile import Profile
from molink.peer.profiling.step_times import StepTimes
from molink.peer.reach.moving import PunchingHandler
from molink.peer.redundancy.pair_roles import Roles
from molink.peer.serving.artifact_server import ArtifactServer
from molink.peer.serving.data_plane import DataPlane, DataPlaneSettings, KnownSwarm, OfferedCompute
from molink.peer.state_dir import StateDir
from molink.peer.wire.link.acceptor import require_free_port
from molink.peer.wire.link.certificate import Credentials, new_certificate
from molink.peer.wire.link.link import LinkHandler
from molink.routing.placement.placement import describe_preview
from molink.shards.checkpoint.catalog import BUNDLED_CONTENT, is_from_hub
from molink.shards.native.compiling import user_folder
from molink.shards.spec import GUESSES, PENALTIES, Span
from molink.shards.store.blobs import BlobStore
from molink.shards.text.token_masks import grammars_are_available
from molink.tracing import open_traces

_log = logging.getLogger(__name__)


class PeerError(Exception):
    """The peer cannot serve, for a reason that its owner can mend."""


class Bootstrap:
    """Bootstraps a peer: finds the swarm and the model, measures the machine, begins to serve. `open` it once."""

    def __init__(
        self,
        settings: JoinSettings,
        state: StateDir,
        metrics: PeerMetrics,
        changed: asyncio.Event,
        report: Callable[[str], None],
        read_machine: ReadMachine | None,
        commanded: CommandedPeer,
    ) -> None:
        """`commanded` does what the operator orders, if the settings name one."""
        self._commanded = commanded
        self._settings = settings
        self._state = state
        self._metrics = metrics
        self._changed = changed
        self._report = report
        self._read_machine = read_machine
        self._guesses: HeadGuesses | None = None
        self._draft_bytes = 0
        """That a draft model takes of the device, beside what is planned for the model that is served."""

    async def open(self, stack: AsyncExitStack) -> PeerParts:
        """Everything stays open on `stack`. Raises PeerError, and what `Peer.run` turns into one."""
        devices = self._devices()
        settings = self._settings = await with_mapped_ports(stack, self._settings, self._state.ports(), say)
        identity = Identity.load_or_create(self._state.identity_key)
        key_file = settings.options.swarm_key
        swarm_key = SwarmKey.load(key_file) if key_file else None
        self._report("Looking for the swarm")
        discovery = await stack.enter_async_context(self._discovery(identity, swarm_key))
        # what this very peer said before it was started again binds nobody
        others = tuple(view for view in discovery.snapshot() if view.peer_id != identity.peer_id)
        ranges = await swarm_ranges(hosts_of(settings, discovery))
        model = replace(
            await self._model(others, devices, swarm_key, stack, ranges),
            exact=settings.options.exact == "on",
            ways=NativeWays(user_folder(), say),
        )
        for note in model_notes(model.spec, others, model.manifest.files):
            say(f"Note: {note}")
        settings = await self._with_guesses(stack, model, devices)
        computing, leases = await self._computing(stack, model, devices)
        guard = self._memory_guard(devices[0], leases)
        certificate = new_certificate(identity.peer_id)
        step_times = StepTimes(computing.profile)
        self._metrics.compare(step_times)
        name = settings.options.name or socket.gethostname()
        await self._open_traces(stack, identity.peer_id, name, model)
        offered = self._offered(model, computing, leases, step_times)
        serving = await stack.enter_async_context(
            DataPlane(
                identity,
                Credentials(identity.peer_id, certificate, swarm_key),
                offered,
                self._metrics,
                self._changed.set,
                self._data_plane_settings(computing, leases),
                KnownSwarm(discovery.knows, discovery.facts_of, ranges),
            )
        )
        address = data_address(settings, discovery, serving.port)
        told = address if settings.options.announce is not None else ""
        reach = await open_reach(stack, settings, identity, swarm_key, serving, discovery, told)
        prefer_predicted_relays(serving.links, discovery, identity.peer_id, model.spec)
        self._state.remember_ports(discovery.port, serving.port)
        await self._open_metrics(stack, serving)
        known = discovery.snapshot(model.spec.model_hash)
        partner = partner_terms(
            settings.options.partner, identity.peer_id, known, model.spec, settings.layers
        )
        if partner.problem:
            say(partner.problem)
        base = own_facts(
            identity,
            PeerContact(name, discovery.addresses, (address,), certificate),
            replace(describe_device(devices[0]), count=len(computing.devices)),
            model.spec,
            computing.profile,
            self._serving_terms(computing, offered, partner),
        )
        facts = await reach.settled(base)
        if (reached := reach.sentence(facts)) is not None:
            say(reached)
        prober = Prober(identity.peer_id, serving.links, lambda: discovery.snapshot(model.spec.model_hash))
        measured = Measurements(prober, serving.measure_line, step_times, model.fetch_bytes_per_s)
        announcer = Announcer(discovery, facts, model.spec, leases, serving.stepper, self._changed, measured)
        stack.push_async_callback(discovery.leave)
        pausing = self._pausing(computing, leases, serving, announcer)
        ranks = computing.ranks
        parts = PeerParts(
            discovery, model, leases, serving, announcer, None, ranks, pausing, guard, step_times, reach, base
        )
        if settings.layers is not None:
            await self._preload(parts, settings.layers)
            return parts
        return replace(parts, placing=await self._place_layers(parts, computing.profile, prober))

    async def _computing(
        self, stack: AsyncExitStack, model: LocalModel, devices: tuple[str, ...]
    ) -> tuple[ComputeSetup, LeaseBook]:
        """The measured devices, with a cap on their memory; it stays open on `stack`."""
        settings = self._settings
        planned_memory(model, devices, settings)  # where not even a layer fits, nothing is loaded
        require_free_port(settings.listen, settings.options.grpc_port or 0)  # nor where no link could come in
        computing = await open_compute_setup(
            stack, model, devices, settings, self._state.profiles, self._report
        )
        leases = lease_book(model, computing, settings)
        if computing.ranks is None:
            cap_gpu_memory(devices[0], leases.memory.total_bytes + self._draft_bytes)
        else:
            await asyncio.to_thread(computing.ranks.cap_memory, leases.memory.total_bytes)
        return computing, leases

    def _discovery(self, identity: Identity, swarm_key: SwarmKey | None) -> Discovery:
        settings = self._settings
        initial_peers = where_to_join(settings).initial_peers
        port = settings.options.port or free_port(settings.listen, self._state.ports()[0])
        announced_port = settings.announced_ports.control if settings.announced_ports is not None else None
        return Discovery(
            identity,
            listen=Listen(settings.listen, port, settings.options.announce, announced_port),
            initial_peers=initial_peers,
            swarm_key=swarm_key,
            durable=self._state,
            fallback=Fallback(self._state.remembered(initial_peers), settings.options.wait, self._report),
        )

    def _devices(self) -> tuple[str, ...]:
        """Those to compute on, which have room."""
        settings = self._settings
        devices = choose_devices(settings.options.device)
        unused = why_not_others(settings.options.device, devices[0])
        if unused is not None:
            say(unused)
        check_memory(devices, settings.memory_bytes)
        return devices

    async def _open_traces(self, stack: AsyncExitStack, peer_id: str, name: str, model: LocalModel) -> None:
        resource, collector = resource_of(peer_id, name, model.spec), self._settings.options.otlp_endpoint
        traces = await stack.enter_async_context(open_traces(collector, "molink-peer", resource))
        self._metrics.traces = None if traces is None else HopTraces(traces)

    def _offered(
        self, model: LocalModel, computing: ComputeSetup, leases: LeaseBook, step_times: StepTimes
    ) -> OfferedCompute:
        spec, masked = model.spec, None
        if grammars_are_available() and spec.stop_token_ids:
            masked = MaskedModel(model.folder, spec.vocabulary_size, spec.stop_token_ids)
        artifacts = ArtifactServer.of(model)
        return OfferedCompute(computing.backend, artifacts, leases, step_times, masked, self._guesses)

    def _serving_terms(
        self, computing: ComputeSetup, offered: OfferedCompute, partner: PartnerTerms
    ) -> ServingTerms:
        settings = self._settings
        return ServingTerms(
            settings.layers,
            computing.activation_codecs,
            computing.limits.max_tokens,
            partner.keeps_copies,
            partner.partner_peer_id,
            settings.options.roles in ("pairs", "auto"),
            settings.options.region or "",
            (PENALTIES, GUESSES, *offered.tail_abilities),
            () if self._guesses is None else self._guesses.announced,
        )

    async def _with_guesses(
        self, stack: AsyncExitStack, model: LocalModel, devices: tuple[str, ...]
    ) -> JoinSettings:
        """Opens what tokens are guessed from. Returns the settings, with the memory that this leaves."""
        option, memory_bytes = self._settings.options.draft, self._settings.memory_bytes
        self._report(f"Preparing what tokens are guessed from: {option}")
        guesses, taken_bytes = await asyncio.to_thread(guesses_of, option, model, memory_bytes, devices[0])
        if guesses is not None:
            self._metrics.watch_guesses(guesses.counts)
            if isinstance(guesses.draft, DraftThread):
                self._draft_bytes = taken_bytes
                await stack.enter_async_context(guesses.draft)
        left_bytes = left_memory_bytes(guesses, taken_bytes, memory_bytes, devices)
        self._guesses, self._settings = guesses, replace(self._settings, memory_bytes=left_bytes)
        return self._settings

    def _data_plane_settings(self, computing: ComputeSetup, leases: LeaseBook) -> DataPlaneSettings:
        settings = self._settings
        listen, port = settings.listen, settings.options.grpc_port
        return DataPlaneSettings(
            listen=(listen, port or free_port(listen, self._state.ports()[1])),
            activation_codecs=computing.activation_codecs,
            rule=settings.rule,
            limits=computing.limits,
            http_proxy=settings.options.http_proxy,
            transmission_policy=settings.options.transmission_policy,
            memory_bytes=leases.memory.total_bytes,
            wrap=self._handling,
            folder=self._state.path,
            copies=settings.options.partner != "off",
            roles=Roles(settings.options.roles),
        )

    def _handling(self, service: LinkHandler) -> LinkHandler:
        operators = self._settings.options.operator or ()
        return PunchingHandler(OperatorOrders(service, operators, self._commanded))

    async def _open_metrics(self, stack: AsyncExitStack, serving: DataPlane) -> None:
        self._metrics.watch(serving.measure_line)
        if self._settings.options.metrics_port is not None:
            served = await stack.enter_async_context(
                MetricsServer(self._metrics.registry, self._settings.options.metrics_port)
            )
            say(f"Metrics: http://{METRICS_HOST}:{served.port}/metrics")

    async def _model(
        self,
        views: tuple[PeerView, ...],
        devices: tuple[str, ...],
        swarm_key: SwarmKey | None,
        stack: AsyncExitStack,
        own_ranges: Ranges,
    ) -> LocalModel:
        """The store of weights, if they come from a hub, stays open on `stack`."""
        settings = self._settings
        options = settings.options
        identifier: str | None = options.model
        dtype: str = options.dtype
        quantization: str | None = options.quantization
        if identifier is None:
            choice = choose_model(views, BUNDLED_CONTENT, dtype, quantization)
            if choice.model is None:
                raise PeerError(ask_for_model(choice.others))
            identifier = choice.model
            if choice.served is not None:  # what its owner leaves open is as those have it who need help most
                dtype = choice.served.dtype if dtype == "auto" else dtype
                quantization = quantization or choice.served.quantization
            if choice.others:
                say(f"Note: this swarm also serves {', '.join(choice.others[:3])}: choose with --model")
            _log.info("no --model was given: serving %s", identifier)
        request = ModelRequest(identifier, dtype, quantization, options.model_name)
        asked = (request, views, self._state.digests, self._report)
        if not is_from_hub(identifier):
            return keeping_packed(
                await open_model(*asked),
                settings.store_dir,
                settings.store_bytes,
                stack,
            )
        try:
            store = stack.enter_context(BlobStore(settings.store_dir, settings.store_bytes))
        except OSError as error:
            raise PeerError(
                f"weights cannot be kept in {settings.store_dir} ({error.strerror or error}): "
                "choose another folder with --store-dir"
            ) from error
        async with ManifestSource(swarm_key, settings.options.http_proxy, own_ranges) as source:
            memory_bytes = memory_of(devices, settings.memory_bytes)
            named = tuple(map(peer_id_in, where_to_join(settings).initial_peers))
            access = HubAccess(store, source.ask, settings.layers, memory_bytes, named)
            return replace(await open_model(*asked, access), store=store)

    def _memory_guard(self, device: str, leases: LeaseBook) -> MemoryGuard | None:
        if device != "cpu":
            return None
        return MemoryGuard(
            leases.memory.total_bytes + draft_cache_bytes(self._guesses),
            leases,
            self._changed.set,
            own_memory_bytes,
            lambda: give_back_memory(device),
        )

    def _pausing(
        self, computing: ComputeSetup, leases: LeaseBook, serving: DataPlane, announcer: Announcer
    ) -> Pausing:
        rules, devices, ranks = self._settings.host_policy, computing.devices, computing.ranks
        own = this_process if ranks is None else lambda: (*this_process(), *ranks.ranks.pids)
        read = self._read_machine or machine_reader(rules, devices, own)
        return Pausing(rules, devices[0], read, leases, serving, announcer, say)

    async def _preload(self, parts: PeerParts, span: Span) -> None:
        """Exactly this span, from the start. Others hear of it before, and choose other layers meanwhile."""
        self._report(f"Loading layers {span}")
        answer = parts.leases.preload(span, asyncio.get_running_loop().time())
        if isinstance(answer, Refused):
            raise PeerError(f"layers {span} do not fit: {answer.detail}. Give more --memory or fewer layers")
        await parts.announcer.announce_or_later(facts_too=True)
        await parts.serving.loader.load(span)

    async def _place_layers(self, parts: PeerParts, profile: Profile, prober: Prober) -> PlacementDriver:
        """Takes the layers that the swarm needs most."""
        self._report("Measuring round trips to the swarm")
        await prober.probe()
        spec, leases = parts.model.spec, parts.leases
        placing = PlacementDriver(parts.discovery, spec, leases, parts.serving.loader, parts.announcer)
        await placing.join(
            lambda: joining_machine(parts.announcer.facts, spec, leases, profile, prober),
            lambda preview: say(describe_preview(preview)),
        )
        return placing
