"""Devices by what commands call them: a name that is known, or a file that a peer measured of its own machine."""

import json
from dataclasses import dataclass
from pathlib import Path

from molink.simnet.devices import DEVICES, DeviceProfile
from molink.simnet.model_shapes import MODEL_SHAPES, ModelShape

MEASURED = "profile:"
"""Before the path of what `molink-peer profile --json` printed."""
CHOICES = f"{', '.join(DEVICES)}, or {MEASURED}FILE.json as molink-peer profile --json prints it"


def device_named(text: str) -> DeviceProfile:
    """The device of that name or file.

    Raises:
        ValueError: there is none, or the file says nothing that can be used; one sentence.
    """
    if text.startswith(MEASURED):
        return _measured(text.removeprefix(MEASURED))
    if text not in DEVICES:
        raise ValueError(f"--device {text} has no profile: choose from {CHOICES}")
    return DEVICES[text]


@dataclass(frozen=True, slots=True)
class _Measurement:
    """What a step's time can be made from. Times are those of one layer."""

    name: str
    memory_bytes: int
    row_s: float
    """Of one row's decode step."""
    prompts: tuple[tuple[int, float], ...]
    """Tokens of a prompt in one step, and its time; in order of tokens."""
    embed_s: float


def _measured(path: str) -> DeviceProfile:
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        model = str(content["model"])
        prefills = [(int(one["tokens"]), one["layer_ms"] / 1000) for one in content["prefill_latencies"]]
        measurement = _Measurement(
            name=str(content["device"]["name"]),
            memory_bytes=int(content["device"]["memory_bytes"]),
            row_s=content["layer_latencies"][0]["layer_ms"] / 1000,
            prompts=tuple(sorted(prefills)),
            embed_s=content["embed_ms"] / 1000,
        )
    except OSError as error:
        raise ValueError(f"--device {MEASURED}{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path} is not what molink-peer profile --json prints: {error!r}") from error
    shape = _shape_of(model)
    if shape is None:
        raise ValueError(f"{path} was measured with {model}, whose sizes are not known here")
    return _as_roofline(measurement, shape)


def _shape_of(model: str) -> ModelShape | None:
    """That whose name is the longest within the model's: `Qwen/Qwen2-7B-Instruct` is `qwen2-7b`."""
    within = [name for name in MODEL_SHAPES if name in model.lower()]
    return MODEL_SHAPES[max(within, key=len)] if within else None


def _as_roofline(measured: _Measurement, shape: ModelShape) -> DeviceProfile:
    """Rates from the model that was measured, with which any other is estimated.

    One row's time is reading a layer; what further tokens of a prompt take is multiplying. Launches, which no
    measurement of one model separates, are part of both, so that a larger model than the one measured seems slower than
    it is.
    """
    layer = shape.layers // 2
    parameters = shape.layer_parameters(layer)
    if not measured.row_s > 0:
        raise ValueError(f"a layer of {shape.name} cannot have taken {measured.row_s} s")
    token_s, overhead_s = _line(measured.prompts or ((1, measured.row_s),))
    return DeviceProfile(
        name=measured.name,
        memory_bytes=measured.memory_bytes,
        memory_bytes_per_s=shape.read_parameters(layer, 1) * shape.element_bytes / measured.row_s,
        flops_per_s=2.0 * shape.row_parameters(layer) / token_s,
        memory_efficiency=1.0,
        compute_efficiency=1.0,
        half_rate_rows=overhead_s / token_s * shape.row_parameters(layer) / parameters,
        layer_s=0.0,
        step_s=measured.embed_s,
    )


def _line(prompts: tuple[tuple[int, float], ...]) -> tuple[float, float]:
    """Seconds of each token and seconds besides, through the shortest and the longest prompt."""
    (few, short_s), (many, long_s) = prompts[0], prompts[-1]
    if many == few or long_s <= short_s:
        return long_s / many, 0.0
    token_s = min((long_s - short_s) / (many - few), long_s / many)
    return token_s, long_s - many * token_s
