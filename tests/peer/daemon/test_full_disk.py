"""A start needs no room in the state directory for what the next start can do without: it says what that will cost."""

import errno
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from molink.peer.compute import known_proofs
from molink.peer.compute.backend import MeasuredModel
from molink.peer.compute.first_step import Proof
from molink.peer.compute.known_proofs import known_or_proven
from molink.peer.daemon.compute_setup import remembered_effect
from molink.peer.models.model import LocalModel
from molink.peer.profiling import profiler
from molink.peer.profiling.profile import Profile
from molink.peer.profiling.profiler import cached_or_measured
from molink.peer.state_dir import StateDir
from molink.shards.batching.ways import DecodingWay

PROFILE = Profile((), 0.1, 0.1, 1e9, threads=torch.get_num_threads())
PROOF = Proof(DecodingWay.RECORDED, None, 8_519_680)
SPEC = SimpleNamespace(model_hash="0" * 64)


def profile(folder: Path) -> object:
    measured = SimpleNamespace(spec=SPEC, device="cpu", way=DecodingWay.RECORDED)
    return cached_or_measured(cast("MeasuredModel", measured), folder / "profiles.json")


def proof(folder: Path) -> object:
    model = cast("LocalModel", SimpleNamespace(spec=SPEC))
    return known_or_proven(model, "meta", folder / "proofs.json", lambda: (), lambda *_: PROOF)


def effect(folder: Path) -> object:
    model = cast("LocalModel", SimpleNamespace(spec=SPEC))
    return remembered_effect(folder / "profiles.json", model, "cpu", "nf4", lambda *_: "little")


def ports(folder: Path) -> object:
    with StateDir(folder) as state:
        state.remember_ports(4001, 4002)
        return state.ports()


@pytest.mark.parametrize(
    ("remembered", "found", "costs"),
    [
        (profile, PROFILE, "measures again"),
        (proof, PROOF, "tries a layer again"),
        (effect, "little", "measures again"),
        (ports, (None, None), "takes other ports"),
    ],
)
def test_what_was_found_out_is_used_although_it_cannot_be_remembered(
    remembered: Callable[[Path], object],
    found: object,
    costs: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(**_: object) -> tuple[int, str]:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(profiler, "measure", lambda *_: PROFILE)
    monkeypatch.setattr(profiler, "stays_the_best", lambda _: True)
    monkeypatch.setattr(known_proofs, "own_files", list)
    monkeypatch.setattr(tempfile, "mkstemp", full)
    with caplog.at_level(logging.WARNING):
        assert remembered(tmp_path) == found
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "No space left on device" in warning
    assert costs in warning
