"""With what a peer computes: one device or several together, how fast they were measured to be, and in which encodings
its activations may travel."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch

from molink.peer.backend import Backend, DeviceBackend
from molink.peer.codecs import opted_in
from molink.peer.device import default_memory_bytes, describe_device
from molink.peer.models.model import LocalModel
from molink.peer.profiling.codec_effect import measure_codec
from molink.peer.profiling.profile import Profile
from molink.peer.profiling.profiler import REMEMBERED, cached_or_measured
from molink.peer.profiling.quantization_effect import measure_quantization
from molink.peer.profiling.threads import counts_to_try
from molink.peer.ranks.backend import RankedBackend
from molink.peer.ranks.choice import open_ranks
from molink.peer.running import say
from molink.peer.settings import JoinSettings
from molink.peer.state_dir import read_json, write_json


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

    `profiles` is the file that remembers measurements. Raises WeightsError, UnsupportedArchitecture.
    """
    report(f"Measuring this machine with {model.spec.name}")
    device = devices[0]
    measuring = (model.folder, model.spec, device, profiles, report, model.stand_ins())
    threads = counts_to_try(device, settings.threads)
    profile = await asyncio.to_thread(cached_or_measured, *measuring, threads=threads)
    ranks: RankedBackend | None = None
    if len(devices) > 1:
        span = settings.layers or model.spec.whole
        memory_bytes = min(map(default_memory_bytes, devices))
        ranks = await open_ranks(stack, model, devices, span, profile, memory_bytes, say)
    if ranks is None:
        devices = devices[:1]
    else:
        profile = await asyncio.to_thread(cached_or_measured, *measuring, ranks.standing_in(), len(devices))
    if model.spec.quantization != "none":
        report(f"Measuring what {model.spec.quantization} weights do to {model.spec.name}")
        effect = await asyncio.to_thread(
            _remembered, profiles, model, device, model.spec.quantization, measure_quantization
        )
        say(effect)
    codecs = opted_in(settings.activation_codec, model.spec.dtype)
    for codec in codecs if model.spec.layers > 1 else ():
        report(f"Measuring what {codec} activations do to {model.spec.name}")
        say(
            await asyncio.to_thread(
                _remembered, profiles, model, device, codec, partial(measure_codec, name=codec)
            )
        )
    backend = DeviceBackend(model, device) if ranks is None else ranks
    return Computing(backend, ranks, devices, profile, codecs)


def _remembered(
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
        write_json(cache, {**dict(list(known.items())[-(REMEMBERED - 1) :]), key: said})
    return said


def memory_of(devices: tuple[str, ...], wanted_bytes: int | None) -> int:
    """What all devices together may hold: what their owner says, else what they have free by default."""
    return wanted_bytes or len(devices) * min(map(default_memory_bytes, devices))
