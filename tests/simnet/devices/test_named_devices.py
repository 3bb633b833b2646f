"""Devices by name, and by what a peer measured of its own machine."""

import json
from pathlib import Path
from typing import Any

import pytest

from molink.commands import run_app
from molink.peer.profiling.profile_json import to_json
from molink.shards.spec import Span
from molink.simnet.cli import app
from molink.simnet.devices.devices import DEVICES, SequenceChunk
from molink.simnet.devices.model_shapes import MODEL_SHAPES, QWEN2_7B
from molink.simnet.devices.named_devices import device_named
from molink.simnet.devices.timed_profile import timed_profile


def written(folder: Path, **changed: object) -> str:
    """The file of a peer with an RTX 4090 that measured Qwen2-7B; returns the name of the device in it."""
    measured = timed_profile(QWEN2_7B, DEVICES["rtx-4090"])
    content: dict[str, Any] = {
        "device": {"name": "Some GPU", "memory_bytes": 24 * 2**30},
        "model": "Qwen/Qwen2-7B-Instruct",
        "dtype": "float16",
        **to_json(measured),
    }
    path = folder / "machine.json"
    path.write_text(json.dumps(content | changed))
    return f"profile:{path}"


def test_a_measured_device_takes_what_was_measured_of_rows_and_of_prompts(tmp_path: Path) -> None:
    device, original = device_named(written(tmp_path)), DEVICES["rtx-4090"]
    assert (device.name, device.memory_bytes) == ("Some GPU", 24 * 2**30)
    for chunks in ([SequenceChunk(1, 512)], [SequenceChunk(64, 0)], [SequenceChunk(2048, 0)]):
        taken_s = device.compute_s(QWEN2_7B, Span(0, 28), chunks, 0)
        assert taken_s == pytest.approx(original.compute_s(QWEN2_7B, Span(0, 28), chunks, 0), rel=0.1)


def test_another_model_is_estimated_by_its_size(tmp_path: Path) -> None:
    device = device_named(written(tmp_path))
    larger = MODEL_SHAPES["llama-2-70b"]
    ratio = larger.layer_parameters(1) / QWEN2_7B.layer_parameters(1)
    one, other = (device.compute_s(s, Span(1, 2), [SequenceChunk(1, 0)], 0) for s in (QWEN2_7B, larger))
    assert (other - device.step_s) / (one - device.step_s) == pytest.approx(ratio, rel=0.01)


def test_a_device_measured_without_prompts_has_the_rate_of_rows(tmp_path: Path) -> None:
    device = device_named(written(tmp_path, prefill_layer_ms={}))
    row_s = device.compute_s(QWEN2_7B, Span(1, 2), [SequenceChunk(1, 0)], 0) - device.step_s
    assert device.compute_s(QWEN2_7B, Span(1, 2), [SequenceChunk(9, 0)], 0) - device.step_s >= 8.9 * row_s


@pytest.mark.full
def test_serving_is_simulated_on_a_measured_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["--policies", "molink", "--rate", "0.2", "--duration", "20", "--warm-up", "0", "--jobs", "1"]
    device = written(tmp_path)
    assert run_app(app, "molink-simnet", ["serve", *few, "--device", device, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["parameters"]["device"] == device
    assert document["rows"][0]["tpot_s"] > 0


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"model": "someone/else"}, "whose sizes are not known"),
        ({"layer_ms": {}}, "json prints: it lacks the times of a layer"),
        ({"layer_ms": {"1": 0.0}}, "json prints: it lacks the times of a layer"),
        ({"device": None}, "json prints: 'NoneType'"),
        ({"device": {"name": "x"}}, "json prints: it lacks 'memory_bytes'"),
        ({"device": {"name": "x", "memory_bytes": 0}}, "memory"),
        ({"dtype": "float8"}, "json prints: it lacks 'float8', or does not know it"),
    ],
)
def test_files_that_say_too_little_are_refused(
    tmp_path: Path, changed: dict[str, object], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        device_named(written(tmp_path, **changed))


def test_devices_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="choose from rtx-3060"):
        device_named("abacus")
    with pytest.raises(ValueError, match="cannot be read"):
        device_named(f"profile:{tmp_path / 'missing.json'}")
