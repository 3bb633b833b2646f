"""Devices by what commands call them: a name that is known, or a file that a peer measured of its own machine."""

import json
from pathlib import Path

from molink.peer.profiling.profile import Profile
from molink.peer.profiling.profile_json import from_json
from molink.shards.spec import DTYPE_BYTES
from molink.simnet.devices.devices import DEVICES, DeviceProfile
from molink.simnet.devices.model_shapes import MODEL_SHAPES, ModelShape
from molink.simnet.suggestions import did_you_mean

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
        raise ValueError(
            f"--device {text} has no profile{did_you_mean(text, DEVICES)}: choose from {CHOICES}"
        )
    return DEVICES[text]


def _measured(path: str) -> DeviceProfile:
    what = f"{path} is not what molink-peer profile --json prints"
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"--device {MEASURED}{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what}: {error}") from error
    profile = from_json(content)
    if profile is None:
        raise ValueError(f"{what}: it lacks the times of a layer, or one of them cannot be")
    try:
        model, element_bytes = str(content["model"]), DTYPE_BYTES[content["dtype"]]
        name, memory_bytes = str(content["device"]["name"]), int(content["device"]["memory_bytes"])
    except KeyError as error:
        raise ValueError(f"{what}: it lacks {error}, or does not know it") from error
    except (ValueError, TypeError) as error:
        raise ValueError(f"{what}: {error}") from error
    shape = _shape_of(model)
    if shape is None:
        raise ValueError(f"{path} was measured with {model}, whose sizes are not known here")
    return _as_roofline(profile, shape, name, memory_bytes, element_bytes)


def _shape_of(model: str) -> ModelShape | None:
    """That whose name is the longest within the model's: `Qwen/Qwen2-7B-Instruct` is `qwen2-7b`."""
    within = [name for name in MODEL_SHAPES if name in model.lower()]
    return MODEL_SHAPES[max(within, key=len)] if within else None


def _as_roofline(
    measured: Profile, shape: ModelShape, name: str, memory_bytes: int, element_bytes: int
) -> DeviceProfile:
    """Rates from the model that was measured, with which any other is estimated.

    One row's time is reading a layer, whose elements have so many bytes; what further tokens of a prompt take is
    multiplying. Launches, which no measurement of one model separates, are part of both, so that a larger model than
    the one measured seems slower than it is.
    """
    layer = shape.layers // 2
    parameters = shape.layer_parameters(layer)
    row_s = measured.layer_latencies[0].layer_ms / 1000
    prompts = tuple((one.tokens, one.layer_ms / 1000) for one in measured.prefill_latencies)
    token_s, overhead_s = _line(prompts or ((1, row_s),))
    return DeviceProfile(
        name=name,
        memory_bytes=memory_bytes,
        memory_bytes_per_s=shape.read_parameters(layer, 1) * element_bytes / row_s,
        flops_per_s=2.0 * shape.row_parameters(layer) / token_s,
        memory_efficiency=1.0,
        compute_efficiency=1.0,
        half_rate_rows=overhead_s / token_s * shape.row_parameters(layer) / parameters,
        layer_s=0.0,
        step_s=measured.embed_ms / 1000,
    )


def _line(prompts: tuple[tuple[int, float], ...]) -> tuple[float, float]:
    """Seconds of each token and seconds besides, through the shortest and the longest prompt."""
    (few, short_s), (many, long_s) = prompts[0], prompts[-1]
    if many == few or long_s <= short_s:
        return long_s / many, 0.0
    token_s = min((long_s - short_s) / (many - few), long_s / many)
    return token_s, long_s - many * token_s
