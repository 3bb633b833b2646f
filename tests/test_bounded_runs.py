"""Bounds of a test run: each is shown on an inner run of pytest in a process of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.bounded_runs import is_chosen, workers

TESTS = Path(__file__).parent
PLUGINS = ("xdist", "pytest_timeout", "support.bounded_runs")
HANGING = """
import asyncio
import pytest

@pytest.mark.timeout(1)
def test_spins():
    while True:
        pass

@pytest.mark.timeout(1)
def test_is_swallowed():
    def spin():
        while True:
            pass
    async def waits():
        asyncio.get_running_loop().call_soon(spin)
        await asyncio.Event().wait()
    asyncio.run(waits())

def test_comes_after():
    pass
"""
HANGING_BEHIND_A_FAILURE = """
import pytest

@pytest.fixture
def spinning():
    yield
    while True:
        pass

@pytest.mark.timeout(1)
def test_fails(spinning):
    raise ValueError

def test_comes_after():
    pass
"""


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the tests in `folder` with the plugin alone."""
    (folder / "pytest.ini").write_text("[pytest]\ntimeout_grace = 5\n")
    plugins = [option for plugin in PLUGINS for option in ("-p", plugin)]
    environment = {"PYTHONPATH": str(TESTS), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *plugins, *arguments],
        cwd=folder, env=os.environ | environment, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip


@pytest.mark.full
def test_a_test_that_hangs_is_named_and_the_next_one_runs(tmp_path: Path) -> None:
    (tmp_path / "test_hanging.py").write_text(HANGING)
    (tmp_path / "test_hanging_behind_a_failure.py").write_text(HANGING_BEHIND_A_FAILURE)
    ended = run_pytest(tmp_path, "-n", "2", "-rfE")
    summary = ended.stdout[ended.stdout.index("short test summary") :]
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "FAILED test_hanging.py::test_spins - Failed: Timeout" in summary
    assert re.search(
        r"worker 'gw\d' crashed while running 'test_hanging.py::test_is_swallowed'", ended.stdout
    )
    assert "FAILED test_hanging_behind_a_failure.py::test_fails" in summary
    assert ended.stderr.count("Timeout (0:00:06)!") == 2, "faulthandler writes where each process hangs"
    assert "in spin" in ended.stderr
    assert "2 passed" in summary


@pytest.mark.full
def test_each_test_of_a_dying_worker_is_run_once(tmp_path: Path) -> None:
    """Also the last, which has no next one that a worker waits for."""
    dying = "import os\nimport pytest\n" + "".join(
        f"def test_{at}():\n    {'os._exit(1)' if at in (1, 2, 4) else 'pass'}\n" for at in range(6)
    )
    (tmp_path / "test_dying.py").write_text(dying)
    (tmp_path / "test_single.py").write_text("def test_single():\n    pass\n")
    ended = run_pytest(tmp_path, "-n", "1")
    crashes = re.findall(r"crashed while running 'test_dying.py::(test_\d)'", ended.stdout)
    assert sorted(set(crashes)) == ["test_1", "test_2", "test_4"]
    assert "3 failed, 4 passed" in ended.stdout


@pytest.mark.full
@pytest.mark.parametrize(("minutes", "words"), [("0", ["were not started"]), ("60", ["2 passed"])])
def test_no_test_starts_after_the_last_minute(minutes: str, words: list[str], tmp_path: Path) -> None:
    (tmp_path / "test_two.py").write_text("def test_one():\n    pass\ndef test_two():\n    pass\n")
    ended = run_pytest(tmp_path, "-n", "1", "--minutes", minutes)
    assert ended.returncode == 0, ended.stdout
    assert all(word in ended.stdout for word in words)


@pytest.mark.parametrize(
    ("marks", "named", "chosen"),
    [
        (set(), set(), True),
        ({"real"}, set(), True),
        ({"real", "full"}, {"real"}, False),
        ({"real", "full"}, {"real", "full"}, True),
        ({"full", "attack"}, {"full"}, False),
        ({"full", "attack"}, {"attack"}, True),
        ({"fuzz"}, {"real", "full", "triton"}, False),
    ],
)
def test_long_tests_and_those_apart_run_if_named(marks: set[str], named: set[str], chosen: bool) -> None:
    assert is_chosen(marks, named) is chosen


def test_there_is_a_worker_for_each_processor_that_has_memory() -> None:
    assert workers(2, 16e9) == 2
    assert workers(64, 16e9) == 10
    assert workers(8, 1e9) == 1
