"""The benchmark of a GPU's engine runs through all its cases without one."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "engine" / "engine_gpu.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )


@pytest.mark.full
def test_every_case_runs_with_a_tiny_model_on_a_processor(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert runpy.run_path(str(SCRIPT))["main"](["--tiny"]) == 0
    said = capsys.readouterr().out
    for case in ("agreement", "alone", "batch", "peers", "prefill"):
        assert f"\n{case}: " in said
    assert "difference of logits over logits" in said


@pytest.mark.full
def test_compiled_parts_and_unrecorded_steps_agree_too() -> None:
    done = run("--tiny", "--compile", "--plain", "--only", "agreement")
    assert done.returncode == 0, done.stderr
    assert "missed: none" in done.stdout


@pytest.mark.full
def test_without_a_gpu_it_says_so_and_measures_nothing() -> None:
    done = run()
    assert done.returncode == 2, done.stderr
    assert done.stdout.startswith("no CUDA device")
