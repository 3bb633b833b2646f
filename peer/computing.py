"""With what a peer computes: one device or several together, how fast they were measured to be, and in which encodings
its activations may travel."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from molink.peer.backend import Backend, DeviceBackend
from molink.peer.codecs import opted_in
from molink.peer.device import default_memory_bytes
from molink.peer.first_step import first_step
from molink.peer.models.model import LocalModel
from molink.peer.profiling.codec_effect import measure_codec
from molink.peer.profiling.profile import Profile
from molink.peer.profiling.profiler import cached_or_measured
from molink.peer.profiling.quantization_effect import measure_quantization
from molink.peer.profiling.threads import counts_to_try
from molink.peer.ranks.backend import RankedBackend
from molink.peer.ranks.choice import open_ranks
from molink.peer.running import say
from molink.peer.settings import JoinSettings


@dataclass(frozen=True, slots=True, eq=False)
class Computing:
    """What a peer computes with."""

    backend: Backend
    ranks: RankedBackend | None
    """The same, if it is several devices."""
    devices: tuple[str, ...]
    """Those that share every layer; mostly one."""
    profile: Profile
    activation_codecs: tuple[str, ...]


async def open_computing(
    stack: AsyncExitStack,
    model: LocalModel,
    devices: tuple[str, ...],
    settings: JoinSettings,
    profiles: Path,
    report: Callable[[str], None],
) -> Computing:
    """One device, or several that share every layer if that is predicted to be faster; they stay open on `stack`.
    What works of it is tried first, and said where it is less than could be expected.

    `profiles` is the file that remembers measurements. Raises WeightsError, UnsupportedArchitecture, and
    SettingsError where the device cannot compute the model.
    """
    device = devices[0]
    report(f"Trying a layer of {model.spec.name} on {device}")
    proof = await asyncio.to_thread(first_step, model, device)
    if proof.sentence is not None:
        say(proof.sentence)
    report(f"Measuring this machine with {model.spec.name}")
    measuring = (model.folder, model.spec, device, profiles, report, model.stand_ins())
    threads = counts_to_try(device, settings.threads)
    profile = await asyncio.to_thread(cached_or_measured, *measuring, threads=threads, way=proof.way)
    ranks: RankedBackend | None = None
    if len(devices) > 1:
        span = settings.layers or model.spec.whole
        memory_bytes = min(map(default_memory_bytes, devices))
        ranks = await open_ranks(stack, model, devices, span, profile, memory_bytes, say, proof.way)
    if ranks is None:
        devices = devices[:1]
    else:
        profile = await asyncio.to_thread(cached_or_measured, *measuring, ranks.standing_in(), len(devices))
    if model.spec.quantization != "none":
        report(f"Measuring what {model.spec.quantization} weights do to {model.spec.name}")
        say(str(await asyncio.to_thread(measure_quantization, model, device)))
    codecs = opted_in(settings.activation_codec, model.spec.dtype)
    for codec in codecs if model.spec.layers > 1 else ():
        report(f"Measuring what {codec} activations do to {model.spec.name}")
        say(str(await asyncio.to_thread(measure_codec, model, device, codec)))
    backend = DeviceBackend(model, device, proof.way) if ranks is None else ranks
    return Computing(backend, ranks, devices, profile, codecs)


def memory_of(devices: tuple[str, ...], wanted_bytes: int | None) -> int:
    """What all devices together may hold: what their owner says, else what they have free by default."""
    return wanted_bytes or len(devices) * min(map(default_memory_bytes, devices))
