"""The suite that proves a GPU runs here in its small form, and says why something does not hold."""

import importlib
import json
import lzma
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.deadline import DEADLINE_S

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The suite's own, which need nothing but the standard library."""
    monkeypatch.syspath_prepend(ROOT / "tests")
    found = ModuleType("modules")
    for name in ("gpu.gpu_cases", "gpu.gpu_machine", "gpu.gpu_run", "gpu.wheels.pack_wheels"):
        setattr(found, name.rpartition(".")[2], importlib.import_module(name))
    return found


def suite(*arguments: str, where: Path, timeout_s: float = 200.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "tests" / "gpu"), *arguments],
        capture_output=True, text=True, timeout=timeout_s, check=False, cwd=where,
    )  # fmt: skip


def verdict(modules: ModuleType, told: Mapping[str, Any], **more: object) -> tuple[str, str]:
    """Of a case of one part."""
    case = modules.gpu_cases.CASES[0]
    part = modules.gpu_run.Part(case, 0, 1, told=told, **more)
    result = modules.gpu_run.judged(case, [part], 3.0)
    return result.verdict, result.reason


def test_the_package_that_the_suite_makes_is_this_checkouts(modules: ModuleType, tmp_path: Path) -> None:
    modules.gpu_machine.link_package(tmp_path)
    told = subprocess.run(
        [sys.executable, "-c", "import molink.shards.spec; print(molink.SamplingParams.__module__)"],
        capture_output=True, text=True, timeout=DEADLINE_S, check=False, cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert told.stdout.strip() == "molink.shards.spec", told.stderr


@pytest.mark.full
def test_a_small_case_runs_and_its_figures_are_in_the_file(tmp_path: Path) -> None:
    done = suite("--device", "cpu", "--only", "sampling", where=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "sampling          holds" in done.stdout
    found = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    assert found["holds"] is True
    assert [case["name"] for case in found["cases"]] == ["sampling"]
    assert any("with top_p" in row["name"] and row["figure"] > 0 for row in found["cases"][0]["rows"])


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_every_case_holds_in_its_small_form(tmp_path: Path) -> None:
    done = suite("--device", "cpu", "--budget-s", "1100", where=tmp_path, timeout_s=1150)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--device", "cuda:99"), "--device cuda:99 is not there"),
        (("--device", "cpu", "--only", "nothing"), "there is no case nothing: choose from"),
    ],
)
def test_what_cannot_be_run_is_said_in_a_sentence(
    arguments: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    done = suite(*arguments, where=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(said)
    assert not (tmp_path / "gpu.json").exists()


def test_the_worst_of_what_a_case_found_is_its_verdict(modules: ModuleType) -> None:
    good, bad = {"name": "one", "held": True}, {"name": "other", "held": False}
    assert verdict(modules, {"rows": [good]}) == ("holds", "")
    assert verdict(modules, {"rows": [good, bad]}) == ("MISSED", "other")
    assert verdict(modules, {"rows": [good], "error": "KeyError: 1"}) == ("FAILED", "KeyError: 1")
    assert verdict(modules, {"rows": [], "not_run": "no Triton"}) == ("not run", "no Triton")
    assert verdict(modules, {"rows": []})[0] == "FAILED"
    assert verdict(modules, {}, returncode=-11) == (
        "FAILED",
        "its process ended with status -11 and said nothing",
    )
    assert verdict(modules, {"rows": [good]}, timed_out=True) == ("TIMED OUT", "it was ended after 3 s")


def test_only_what_can_be_divided_is_divided_and_only_on_a_card(modules: ModuleType) -> None:
    cases = {case.name: case for case in modules.gpu_cases.CASES}
    assert len(cases) == len(modules.gpu_cases.CASES)
    parts = modules.gpu_cases.processes_for
    assert parts(cases["architectures"], 16, 80_000_000_000) == 12
    assert parts(cases["architectures"], 16, 8_000_000_000) == 2
    assert parts(cases["architectures"], 16, None) == 1
    assert parts(cases["decode"], 16, 80_000_000_000) == 1


def test_packed_wheels_are_unpacked_with_the_libraries_of_one_card(
    modules: ModuleType, tmp_path: Path
) -> None:
    wheel, target = tmp_path / "some-1-py3-none-any.whl", tmp_path / "unpacked"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in (
            "__init__.py",
            "libbitsandbytes_cpu.so",
            "libbitsandbytes_cuda130.so",
            "libbitsandbytes_cuda124.so",
        ):
            archive.writestr(f"some/{name}", b"x" * 100)
    packed = modules.pack_wheels.pack(wheel, modules.pack_wheels.kept_for("130"))
    assert not wheel.exists()
    assert lzma.decompress(packed.read_bytes())[:2] == b"PK"
    assert modules.gpu_machine.unpack_wheels(tmp_path, target) == (packed.name,)
    names = {path.name for path in (target / "some").iterdir()}
    assert names == {"__init__.py", "libbitsandbytes_cpu.so", "libbitsandbytes_cuda130.so"}


@pytest.mark.parametrize("content", [None, b"no wheel"])
def test_a_folder_without_wheels_or_with_others_is_refused(
    content: bytes | None, modules: ModuleType, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "some.whl.xz").write_bytes(content)
    with pytest.raises(ValueError, match=r"holds no wheels|is no wheel"):
        modules.gpu_machine.unpack_wheels(tmp_path, tmp_path / "unpacked")
