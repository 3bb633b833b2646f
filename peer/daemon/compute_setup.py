"""Sets up what a peer computes with: one device or several together, how fast they were measured to be, how
their memory is divided, and in which encodings activations may travel."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch

from molink.peer.compute.backend import Backend, DeviceBackend, MeasuredModel
from molink.peer.compute.known_proofs import known_or_proven
from molink.peer.daemon.running import say
from molink.peer.daemon.settings import JoinSettings, SettingsError
from molink.peer.device.device import (
    default_memory_bytes,
    describe_device,
    free_memory_bytes,
    give_back_memory,
)
from molink.peer.device.threads import counts_to_try
from molink.peer.memory.leases import LeaseBook
from molink.peer.memory.memory import LIBRARY_BYTES, MemoryPlan, format_bytes, gpu_reserve_bytes, plan_memory
from molink.peer.models.model import LocalModel
from molink.peer.profiling.lossy_effects import measure_codec, measure_quantization
from molink.peer.profiling.profile import Profile
from molink.peer.profiling.profiler import REMEMBERED, cached_or_measured
from molink.peer.ranks.backend import RankedBackend
from molink.peer.ranks.choice import DeviceAlone, open_ranks
from molink.peer.scheduling.microbatch import BatchLimits, batch_limits
from molink.peer.scheduling.step_limit import longest_step
from molink.peer.state_dir import read_json, remember_json
from molink.routing.cost.encodings import opted_in
from molink.shards.spec import ModelSpec


@dataclass(frozen=True, slots=True, eq=False)
class ComputeSetup:
    """The devices that a peer computes with, their profile, and the limits of a step."""

    backend: Backend
    ranks: RankedBackend | None
    """The same, if it is several devices."""
    devices: tuple[str, ...]
    """Those that share every layer; mostly one."""
    profile: Profile
    activation_codecs: tuple[str, ...]
    limits: BatchLimits
    """How much steps together, which is what its memory is set aside for and what it announces."""
    library_bytes: int | None
    """As in `first_step.Proof`."""


async def open_compute_setup(
    stack: AsyncExitStack,
    model: LocalModel,
    devices: tuple[str, ...],
    settings: JoinSettings,
    profiles: Path,
    report: Callable[[str], None],
) -> ComputeSetup:
    """One device, or several that share every layer if that is predicted to be faster; they stay open on `stack`.
    What works of it is tried first, and said where it is less than could be expected.

    `profiles` is the file that remembers measurements. Raises WeightsError, UnsupportedArchitecture, and
    SettingsError where the device cannot compute the model.
    """
    device = devices[0]
    if device != "cpu":
        report(f"Trying a layer of {model.spec.name} on {device}")
    proof = await asyncio.to_thread(known_or_proven, model, device, profiles.with_name("proofs.json"))
    if proof.sentence is not None:
        say(proof.sentence)
    report(f"Measuring this machine with {model.spec.name}")
    measured = MeasuredModel(model.folder, model.spec, device, model.stand_ins(), ways=model.ways)
    alone = replace(measured, way=proof.way)
    threads = counts_to_try(device, settings.options.threads)
    profile = await asyncio.to_thread(cached_or_measured, alone, profiles, report, threads=threads)
    ranks: RankedBackend | None = None
    if len(devices) > 1:
        span = settings.layers or model.spec.whole
        one = DeviceAlone(profile, min(map(default_memory_bytes, devices)), proof.way)
        ranks = await open_ranks(stack, model, devices, span, one, say)
    if ranks is None:
        devices = devices[:1]
    else:
        shared = partial(cached_or_measured, ranks=ranks.standing_in(), rank_count=len(devices))
        profile = await asyncio.to_thread(shared, measured, profiles, report)
    if model.spec.quantization != "none":
        report(f"Measuring what {model.spec.quantization} weights do to {model.spec.name}")
        effect = await asyncio.to_thread(
            remembered_effect, profiles, model, device, model.spec.quantization, measure_quantization
        )
        say(effect)
    codecs = opted_in(settings.options.activation_codec, model.spec.dtype)
    for codec in codecs if model.spec.layers > 1 else ():
        report(f"Measuring what {codec} activations do to {model.spec.name}")
        say(
            await asyncio.to_thread(
                remembered_effect, profiles, model, device, codec, partial(measure_codec, name=codec)
            )
        )
    backend = DeviceBackend(model, device, proof.way) if ranks is None else ranks
    limits = limits_on(devices, model.spec, profile, memory_of(devices, settings.memory_bytes))
    return ComputeSetup(backend, ranks, devices, profile, codecs, limits, proof.library_bytes)


def limits_on(devices: tuple[str, ...], spec: ModelSpec, profile: Profile, memory_bytes: int) -> BatchLimits:
    """How much steps together on devices of so much memory: more on a GPU alone, where it pays."""
    if len(devices) > 1 or not devices[0].startswith("cuda"):
        return batch_limits(spec)
    longest = longest_step(spec, profile.prefill_latencies, profile.step_ms, memory_bytes)
    return batch_limits(spec, BatchLimits(max_tokens=longest))


def remembered_effect(
    profiles: Path, model: LocalModel, device: str, what: str, measure: Callable[[LocalModel, str], object]
) -> str:
    """The sentence that says what a quantization or a codec does to the model, measured at the first start with it."""
    cache = profiles.with_name("effects.json")
    versions = f"torch {torch.__version__}/molink {version('molink')}"
    key = f"{model.spec.model_hash}/{what}/{describe_device(device).name}/{versions}"
    known = read_json(cache)
    said = known.pop(key, None)
    if not isinstance(said, str):
        said = str(measure(model, device))
        newest = dict(list(known.items())[-(REMEMBERED - 1) :])
        remember_json(cache, {**newest, key: said}, "the next start measures again")
    return said


def memory_of(devices: tuple[str, ...], wanted_bytes: int | None) -> int:
    """What all devices together may hold: what their owner says, else what they have free by default; of GPUs no more
    than others leave free now."""
    if wanted_bytes is None:
        return len(devices) * min(map(default_memory_bytes, devices))
    if not devices[0].startswith("cuda"):
        return wanted_bytes
    return min(wanted_bytes, len(devices) * min(map(free_memory_bytes, devices)))


def planned_memory(
    model: LocalModel,
    devices: tuple[str, ...],
    settings: JoinSettings,
    library_bytes: int | None = None,
    limits: BatchLimits | None = None,
) -> MemoryPlan:
    """How the devices' memory is divided, with work space for steps of these limits, or of those that all peers keep.

    Raises:
        SettingsError: it is too little for one layer, or the model has not the layers that are asked for; it says
            what to type instead.
    """
    span = settings.layers
    if span is not None and span.stop > model.spec.layers:
        raise SettingsError(
            f"--layers {span.start}:{span.stop}: {model.spec.name} has {model.spec.layers} layers"
        )
    spec, total = model.spec, memory_of(devices, settings.memory_bytes)
    total -= (len(devices) - 1) * spec.embed_bytes  # every rank has the whole embedding
    reserve = reserve_of(spec, devices, total, library_bytes)
    try:
        most_tokens = (limits or batch_limits(spec)).max_tokens
        plan = plan_memory(spec, total, most_tokens, reserve_bytes=reserve)
    except ValueError as error:
        raise SettingsError(f"{error}, or type --device cpu" if reserve else str(error)) from error
    return replace(plan, swap_bytes=_swap_bytes(devices, settings))


def lease_book(model: LocalModel, computing: ComputeSetup, settings: JoinSettings) -> LeaseBook:
    """Who may use which part of the memory that is there once the devices are open and measured.

    Raises:
        SettingsError: it is too little.
    """
    device = computing.devices[0]
    if device.startswith("cuda"):
        give_back_memory(device)  # what measuring took is free
    memory = planned_memory(model, computing.devices, settings, computing.library_bytes, computing.limits)
    wanted_bytes = settings.memory_bytes
    if wanted_bytes is not None and memory.total_bytes < wanted_bytes and len(computing.devices) == 1:
        say(
            f"Note: of --memory {format_bytes(wanted_bytes)} only {format_bytes(memory.total_bytes)} are used: "
            f"other programs hold the rest of {device}"
        )
    return LeaseBook(
        model.spec,
        memory,
        span_limit=settings.layers,
        max_sessions_per_owner=settings.options.sessions_per_client,
    )


def reserve_of(
    spec: ModelSpec, devices: tuple[str, ...], total_bytes: int, library_bytes: int | None = None
) -> int:
    """What GPUs hold beside the rest, all together; of a processor nothing."""
    if devices[0] == "cpu":
        return 0
    measured = LIBRARY_BYTES if library_bytes is None else library_bytes
    return len(devices) * gpu_reserve_bytes(spec, total_bytes // len(devices), measured)


def _swap_bytes(devices: tuple[str, ...], settings: JoinSettings) -> int:
    swap_bytes = settings.swap_bytes or 0
    if swap_bytes and (len(devices) > 1 or not devices[0].startswith("cuda")):
        raise SettingsError(
            f"--swap-space is the host's memory beside that of one GPU, and this peer computes on "
            f"{', '.join(devices)}: give it more --memory instead"
        )
    return swap_bytes
