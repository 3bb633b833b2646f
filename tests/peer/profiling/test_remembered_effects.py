"""What quantized weights do to a model is measured at the first start with it."""

import json
from pathlib import Path

import pytest

from molink.peer.daemon import compute_setup
from molink.peer.models.model import LocalModel
from molink.shards.checkpoint.catalog import resolve
from molink.shards.checkpoint.store import describe, read_manifest


@pytest.fixture
def model() -> LocalModel:
    folder = resolve("molink/tiny-shakespeare")
    manifest = read_manifest(folder)
    return LocalModel(folder, manifest, describe(manifest, "float32", "nf4"))


def said(profiles: Path, model: LocalModel, what: str, measured: list[str]) -> str:
    def measure(_: LocalModel, device: str) -> str:
        measured.append(f"{what} on {device}")
        return f"the effect of {what}"

    return compute_setup.remembered_effect(profiles, model, "cpu", what, measure)


def test_a_later_start_says_the_same_and_measures_nothing(model: LocalModel, tmp_path: Path) -> None:
    measured: list[str] = []
    for _ in range(2):
        assert said(tmp_path / "profiles.json", model, "nf4", measured) == "the effect of nf4"
    assert measured == ["nf4 on cpu"]
    assert said(tmp_path / "profiles.json", model, "int8", measured) == "the effect of int8"
    assert measured == ["nf4 on cpu", "int8 on cpu"]


@pytest.mark.parametrize("content", [None, [], 7])
def test_what_is_remembered_wrongly_is_measured_again(
    content: object, model: LocalModel, tmp_path: Path
) -> None:
    measured: list[str] = []
    said(tmp_path / "profiles.json", model, "nf4", measured)
    (key,) = json.loads((tmp_path / "effects.json").read_text())
    (tmp_path / "effects.json").write_text(json.dumps({key: content}))
    assert said(tmp_path / "profiles.json", model, "nf4", measured) == "the effect of nf4"
    assert len(measured) == 2
