"""One peer on several devices: whether they should share its layers, by what is predicted from measurements."""

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Protocol

from molink.configuration import SettingsError
from molink.peer.models.model import LocalModel
from molink.peer.profiling.profile import Profile
from molink.peer.ranks.backend import RankedBackend
from molink.routing.parallelism.layout_prediction import DeviceLink, DeviceRates, LayoutChoice, choose_layout
from molink.routing.parallelism.parallelism import Layout, Lengths
from molink.shards.batching.ways import DecodingWay
from molink.shards.loading.loader import folder_refusal
from molink.shards.spec import DTYPE_BYTES, ModelSpec, Span

REQUEST = Lengths(prefill_tokens=512, decode_tokens=128)
"""What layouts are compared by, unless somebody says otherwise: a question, and an answer of some length."""
SMALL_BYTES, LARGE_BYTES = 4, 16 * 2**20
"""Payloads whose all-reduces tell a link's latency and its bandwidth."""


@dataclass(frozen=True, slots=True)
class DeviceAlone:
    """What one device does alone, which each of the others is taken to do too."""

    profile: Profile
    memory_bytes: int
    """For weights and caches."""
    way: DecodingWay = DecodingWay.RECORDED
    """How it attends, and each rank would."""


async def open_ranks(
    stack: AsyncExitStack,
    model: LocalModel,
    devices: Sequence[str],
    span: Span,
    alone: DeviceAlone,
    say: Callable[[str], None],
) -> RankedBackend | None:
    """The ranks that share the model's layers, to be closed with `stack`; None if one device alone is better.

    Raises:
        SettingsError: the model's layers cannot be shared.
        RanksLost, OSError: the ranks cannot start.
    """
    refusal = folder_refusal(model.folder, len(devices))
    if refusal is not None:
        raise SettingsError(
            f"--device: {len(devices)} devices cannot share {model.spec.name}: {refusal}; "
            "start one peer for each, each with a --state-dir of its own"
        )
    async with AsyncExitStack() as opening:
        backend = await opening.enter_async_context(RankedBackend(model, devices, alone.way))
        link = measured_link(backend, len(devices))
        choice = compare(model.spec, span, len(devices), alone, link)
        for reason in choice.reasons:
            say(f"Predicted for {REQUEST.prefill_tokens} and {REQUEST.decode_tokens} tokens: {reason}")
        if choice.best.layout == Layout():
            say(f"One device alone is faster: using {devices[0]}. Start another peer on each other device")
            return None
        if choice.best.layout.pipeline > 1:
            say("A peer for each device would be faster than one on all, each with a --state-dir of its own")
        await stack.enter_async_context(opening.pop_all())
        return backend


class TimesAllReduce(Protocol):
    """What a link is measured with."""

    def all_reduce_s(self, payload_bytes: int) -> float: ...


def measured_link(backend: TimesAllReduce, ranks: int) -> DeviceLink:
    """From the times of a small and of a large all-reduce: 2(t-1) messages, 2(t-1)/t of the payload."""
    small_s, large_s = backend.all_reduce_s(SMALL_BYTES), backend.all_reduce_s(LARGE_BYTES)
    sent_bytes = 2 * (ranks - 1) / ranks * LARGE_BYTES
    return DeviceLink(sent_bytes / max(large_s - small_s, 1e-9), small_s / (2 * (ranks - 1)))


def compare(spec: ModelSpec, span: Span, devices: int, alone: DeviceAlone, link: DeviceLink) -> LayoutChoice:
    """One device, all of them with tensor parallelism, or all in a pipeline.

    Where all of them have no room for `span`, they will hold a part of it: they are compared as if they had room.
    """
    shared = [Layout(tensor=devices), Layout(pipeline=devices)]
    rates = measured_rates(spec, alone)
    try:
        return choose_layout(spec, span, [Layout(), *shared], rates, link, REQUEST)
    except ValueError:
        roomy = replace(rates, memory_bytes=float(spec.weight_bytes(spec.whole)) * 2**10)
        return choose_layout(spec, span, shared, roomy, link, REQUEST)


def measured_rates(spec: ModelSpec, alone: DeviceAlone) -> DeviceRates:
    """What a device reaches: a decode step reads a layer, a prefill multiplies by it. Launches are in both."""
    layer, profile = spec.layers // 2, alone.profile
    decode_s = profile.layer_latencies[0].layer_ms / 1000
    reading = spec.layer_bytes[layer] / decode_s
    prefill = max(profile.prefill_latencies, key=lambda one: one.tokens, default=None)
    tokens, prefill_s = (1, decode_s) if prefill is None else (prefill.tokens, prefill.layer_ms / 1000)
    operations = 2.0 * spec.layer_bytes[layer] / DTYPE_BYTES[spec.dtype] * tokens
    return DeviceRates(operations / prefill_s, reading, alone.memory_bytes, layer_s=0.0)
