"""A package that a processor is too old for is not imported, and a sentence says so."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from molink import processor, safe_import
from molink.processor import macos_flags, processor_flags
from molink.safe_import import import_refusal

DIES = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
HAS_X86 = processor.is_x86()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The module `picky` in a folder that children find too."""
    information = tmp_path / "picky-1.5.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: picky\nVersion: 1.5\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(safe_import, "NEEDED_FLAGS", {"picky": frozenset({"avx"})})
    monkeypatch.setattr(safe_import, "is_x86", lambda: True)
    return tmp_path / "picky.py"


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
def test_an_import_that_dies_on_this_processor_is_refused(package: Path) -> None:
    package.write_text(DIES)
    said = import_refusal("picky", "choose --quantization none", flags={"sse4_2"})
    assert said == (
        "importing picky 1.5 ends with SIGILL on this processor, which lacks avx: choose --quantization none"
    )


@pytest.mark.parametrize(
    ("content", "flags"),
    [
        ("", {"sse4_2"}),  # it needs less than it was thought to
        ("raise ImportError('broken')", {"sse4_2"}),  # its own import says so
        (DIES, {"sse4_2", "avx"}),  # nothing is tried where nothing is in doubt
    ],
)
def test_an_import_that_does_not_die_is_not_refused(package: Path, content: str, flags: set[str]) -> None:
    package.write_text(content)
    assert import_refusal("picky", "", flags=flags) is None


def test_other_kinds_of_processors_and_absent_packages_are_not_asked(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package.write_text(DIES)
    monkeypatch.setattr(safe_import, "NEEDED_FLAGS", {"no_such_package": frozenset({"avx"})})
    assert import_refusal("no_such_package", "", flags={"sse4_2"}) is None
    monkeypatch.setattr(safe_import, "NEEDED_FLAGS", {"picky": frozenset({"avx"})})
    monkeypatch.setattr(safe_import, "is_x86", lambda: False)
    assert import_refusal("picky", "", flags={"sse4_2"}) is None


OLD_NUMPY = """
import sys
from molink import safe_import
def refusal(package, remedy):
    return f"importing {package} ends with SIGILL on this processor: {remedy}"
from molink import commands
commands.import_refusal = refusal
from molink.peer.commands import cli
cli.main(["swarm-key", sys.argv[1]])
"""


def test_a_program_says_that_the_processor_is_too_old_for_numpy(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", OLD_NUMPY, str(tmp_path / "key")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith("molink-peer: importing numpy ends with SIGILL on this processor: ")
    assert ended.stderr.count("\n") == 1
    assert not (tmp_path / "key").exists()


@pytest.mark.skipif(not HAS_X86 or sys.platform not in ("linux", "darwin", "win32"), reason="of x86 alone")
def test_this_processor_is_asked_what_it_can_do() -> None:
    flags = processor_flags()
    assert flags is not None
    assert "sse4_2" in flags  # numpy has been imported by these tests


def test_macos_words_are_those_of_linux() -> None:
    intel = "machdep.cpu.features: FPU SSE4.1 SSE4.2 AVX1.0\nmachdep.cpu.leaf7_features: AVX2 BMI1\n"
    assert macos_flags(intel) >= {"sse4_2", "avx", "avx2"}
    apple = "hw.optional.arm.FEAT_BF16: 1\nhw.optional.arm.FEAT_SME: 0\nhw.optional.neon: 1\n"
    assert macos_flags(apple) == {"feat_bf16", "neon"}


@pytest.mark.skipif(sys.platform == "win32", reason="Windows leaves no core files")
def test_the_child_leaves_no_core_dump() -> None:
    died = subprocess.run([sys.executable, "-c", safe_import._child("os") + f"; {DIES}"], check=False)  # noqa: SLF001 - what the child runs
    assert died.returncode == -signal.SIGILL
