"""Prediction of TTFT and TPOT of a layout of equal devices for one request, and the choice among layouts. Pure.

A step of a layer takes as long as the slower of reading and multiplying (a roofline: Williams et al., 2009), on every
rank a t-th of both, and what launches cost on top, which no division shortens. A ring all-reduce of n bytes between t
ranks takes 2(t-1) messages and 2(t-1)/t n bytes of a rank's link (Thakur et al., 2005, section 5); a boundary one
message and n bytes. Volume alone would mislead: few bytes in many messages are slow where a message is
(communication-patterns paper, Figures 8 and 10).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

from molink.routing.parallelism.parallelism import Layout, Lengths
from molink.routing.parallelism.volumes import all_reduce_factor
from molink.shards.spec import DTYPE_BYTES, ModelSpec, Span

Goal = Literal["ttft", "tpot", "latency"]
"""What is to be short: the time to the first token, the time of each further one, or of the whole request."""

REDUCTIONS_PER_LAYER = 2
"""After attention's output projection and after the MLP's; mixtures with a shared expert have one more."""


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """One device as steps see it: what is reached, not what the maker promises."""

    flops_per_s: float
    memory_bytes_per_s: float
    memory_bytes: float
    """For weights and KV caches."""
    layer_s: float
    """For each layer of a step besides: launches that nothing hides."""

    def __post_init__(self) -> None:
        _require_numbers(self, may_be_zero=("layer_s",))


@dataclass(frozen=True, slots=True)
class DeviceLink:
    """The way between two devices, the slowest of those that a layout uses."""

    bytes_per_s: float
    latency_s: float
    """Of a message without content, with what starting it costs."""

    def __post_init__(self) -> None:
        _require_numbers(self, may_be_zero=("latency_s",))


@dataclass(frozen=True, slots=True)
class Prediction:
    """Prediction of a layout for a lone request."""

    layout: Layout
    ttft_s: float
    tpot_s: float
    """Mean of the tokens after the first; 0 where there are none."""
    communication_s: float
    """Part of the whole request that devices spend on each other."""
    latency_s: float
    """From the request to its last token."""
    device_bytes: float
    """Weights and KV cache on the device that holds the most."""
    fits: bool

    def value_s(self, goal: Goal) -> float:
        return {"ttft": self.ttft_s, "tpot": self.tpot_s, "latency": self.latency_s}[goal]


@dataclass(frozen=True, slots=True)
class LayoutGoal:
    """Goal of a layout: which time is to be least, and the longest that a first token may take."""

    minimised: Goal = "latency"
    max_ttft_s: float = math.inf


@dataclass(frozen=True, slots=True)
class LayoutChoice:
    """Choice of a layout: the best, and why."""

    best: Prediction
    reasons: tuple[str, ...]
    """One sentence for each layout considered, the best first."""


def predict(
    spec: ModelSpec, span: Span, layout: Layout, device: DeviceRates, link: DeviceLink, lengths: Lengths
) -> Prediction:
    """TTFT and TPOT of one request through `span` on `layout.devices` equal devices, nothing else running.

    Layers are divided over stages as evenly as they can be, the head over the ranks of its stage; the prompt goes
    through the stages at once.

    Raises:
        ValueError: more stages than layers, or a span beyond the model.
    """
    if span.stop > spec.layers or layout.pipeline > len(span):
        raise ValueError(f"{span} of {spec.layers} layers cannot have {layout.pipeline} stages")
    prefill = _step(spec, span, layout, device, link, lengths.prefill_tokens, 0)
    steps = lengths.decode_tokens - 1
    first = _step(spec, span, layout, device, link, 1, lengths.prefill_tokens)
    last = _step(spec, span, layout, device, link, 1, lengths.prefill_tokens + max(0, steps - 1))
    tpot_s = (first[0] + last[0]) / 2 if steps else 0.0
    communication_s = prefill[1] + steps * first[1]
    held = _device_bytes(spec, span, layout, lengths.prefill_tokens + lengths.decode_tokens)
    return Prediction(
        layout,
        ttft_s=prefill[0],
        tpot_s=tpot_s,
        communication_s=communication_s,
        latency_s=prefill[0] + steps * tpot_s,
        device_bytes=held,
        fits=held <= device.memory_bytes,
    )


def choose_layout(
    spec: ModelSpec,
    span: Span,
    layouts: Sequence[Layout],
    device: DeviceRates,
    link: DeviceLink,
    lengths: Lengths,
    goal: LayoutGoal = LayoutGoal(),
) -> LayoutChoice:
    """Returns the layout that is best for `goal` among those that fit the devices' memory and keep its limit.

    If none keeps it, the limit is dropped; of equals the one with fewer devices wins.

    Raises:
        ValueError: no layout fits: it names the memory that is missing.
    """
    predictions = [
        predict(spec, span, layout, device, link, lengths)
        for layout in layouts
        if layout.pipeline <= len(span)
    ]
    fitting = [prediction for prediction in predictions if prediction.fits]
    if not fitting:
        least = min((prediction.device_bytes for prediction in predictions), default=math.inf)
        raise ValueError(
            f"no layout of {span} fits: the best needs {least / 1e9:.1f} GB on each device, "
            f"which has {device.memory_bytes / 1e9:.1f} GB"
        )

    def order(prediction: Prediction) -> tuple[bool, bool, float, int]:
        late = prediction.ttft_s > goal.max_ttft_s
        return not prediction.fits, late, prediction.value_s(goal.minimised), prediction.layout.devices

    ranked = sorted(predictions, key=order)
    return LayoutChoice(ranked[0], tuple(_reason(prediction, goal.max_ttft_s) for prediction in ranked))


def all_reduce_s(payload_bytes: float, ranks: int, link: DeviceLink) -> float:
    """Seconds of one ring all-reduce."""
    return 2 * (ranks - 1) * link.latency_s + all_reduce_factor(ranks) * payload_bytes / link.bytes_per_s


def _step(
    spec: ModelSpec,
    span: Span,
    layout: Layout,
    device: DeviceRates,
    link: DeviceLink,
    rows: int,
    context: int,
) -> tuple[float, float]:
    """Seconds of one step of a lone sequence with `context` tokens before it, and of that on communication."""
    ranks = layout.tensor
    element_bytes = DTYPE_BYTES[spec.dtype]
    windows = spec.kv_windows or (None,) * spec.layers
    computing_s = 0.0
    for layer in span:
        reading_s = spec.layer_bytes[layer] / ranks / device.memory_bytes_per_s
        multiplying_s = 2.0 * spec.layer_bytes[layer] / element_bytes * rows / ranks / device.flops_per_s
        attended, kept = _attended(rows, context, windows[layer])
        kv_bytes = kept * spec.kv_bytes_per_token[layer]
        attention_s = max(
            kv_bytes / ranks / device.memory_bytes_per_s,
            4.0 * attended * spec.hidden_size / ranks / device.flops_per_s,
        )
        computing_s += max(reading_s, multiplying_s) + attention_s + device.layer_s
    if span.stop == spec.layers:
        computing_s += spec.head_bytes / ranks / device.memory_bytes_per_s
    payload = rows * spec.activation_bytes
    communication_s = REDUCTIONS_PER_LAYER * len(span) * all_reduce_s(payload, ranks, link)
    boundaries = layout.pipeline - 1
    communication_s += boundaries * (link.latency_s + payload / link.bytes_per_s)
    if boundaries:
        communication_s += link.latency_s  # the token's way back
    return computing_s + communication_s, communication_s


def _attended(rows: int, context: int, attention_window: int | None) -> tuple[float, int]:
    """Counts the pairs of tokens that attention compares in a layer, and how many tokens' keys and values it reads.

    A token sees itself and what is before it; with an attention window, only the last `attention_window` of these.
    """
    seen = attention_window or context + rows
    growing = min(rows, max(0, seen - context))  # tokens that see all that is before them
    pairs = growing * context + growing * (growing + 1) / 2 + (rows - growing) * seen
    return pairs, min(context, seen - 1) + rows


def _device_bytes(spec: ModelSpec, span: Span, layout: Layout, tokens: int) -> float:
    """Of the stage that holds the most: layers divided evenly, the first stages taking what is left over."""
    layers, rest = divmod(len(span), layout.pipeline)
    most, start = 0.0, span.start
    for stage in range(layout.pipeline):
        part = Span(start, start + layers + (1 if stage < rest else 0))
        start = part.stop
        embed_bytes = spec.embed_bytes if part.start == 0 else 0
        divided = spec.weight_bytes(part) - embed_bytes + spec.kv_bytes(part, tokens)
        most = max(most, embed_bytes + divided / layout.tensor)
    return most


def _reason(prediction: Prediction, max_ttft_s: float) -> str:
    text = (
        f"{prediction.layout}: first token after {prediction.ttft_s * 1e3:.1f} ms, then one every "
        f"{prediction.tpot_s * 1e3:.2f} ms, {prediction.communication_s / prediction.latency_s:.0%} of the time "
        "between devices"
    )
    if not prediction.fits:
        return f"{text}; it does not fit: {prediction.device_bytes / 1e9:.1f} GB on a device"
    if prediction.ttft_s > max_ttft_s:
        return f"{text}; the first token is later than {max_ttft_s * 1e3:.0f} ms"
    return text


def _require_numbers(value: DeviceRates | DeviceLink, may_be_zero: tuple[str, ...]) -> None:
    for field in fields(value):
        number = getattr(value, field.name)
        if not math.isfinite(number) or number < 0 or (number == 0 and field.name not in may_be_zero):
            raise ValueError(f"{field.name} must be finite and above 0, got {number}")
