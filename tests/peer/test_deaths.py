"""The fatal signals that ended a peer's last starts are found in what faulthandler has written, and in nothing else."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from molink.peer.deaths import (
    SOON_S,
    Death,
    FaultLog,
    death_in,
    find_deaths,
    past_deaths,
    software_here,
    unread_death,
    ways_to_leave_out,
)

SIGNALS = ("SIGSEGV", "SIGILL", "SIGFPE", "SIGBUS", "SIGABRT")
DIES = """
import os, signal, sys
from pathlib import Path
from molink.peer.deaths import FaultLog
with FaultLog(Path(sys.argv[1]), sys.argv[3]) as faults:
    faults.use({"int8", "few_rows"})
    if sys.argv[2] != "none":
        os.kill(os.getpid(), getattr(signal, sys.argv[2]))
"""
LINUX = b"""ways ["few_rows"]
ways ["int8"]
Fatal Python error: Segmentation fault

Thread 0x00007f0000000001 (most recent call first):
  File "/home/erika/venv/lib/python3.11/threading.py", line 320 in wait

Current thread 0x00007f0000000000 (most recent call first):
  File "/home/erika/venv/lib/python3.11/site-packages/torch/_ops.py", line 1123 in __call__
  File "/home/erika/venv/lib/python3.11/site-packages/molink/shards/matrices/int8_products.py", line 98 in product

Extension modules: numpy._core._multiarray_umath (total: 1)
"""
WINDOWS = b"""ways ["int8"]\r
Windows fatal exception: access violation\r
\r
Current thread 0x00001a2c (most recent call first):\r
  File "C:\\Users\\erika\\venv\\Lib\\site-packages\\torch\\_ops.py", line 1123 in __call__\r
"""


def die(folder: Path, by: str, process: str = "") -> int:
    """The exit status of a process with a fault file that ends so; "none": as it should."""
    command = [sys.executable, "-c", DIES, str(folder), by, process]
    return subprocess.run(command, check=False, timeout=300).returncode


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals; its words are tested below")
@pytest.mark.parametrize("name", SIGNALS)
def test_the_next_start_knows_which_signal_ended_the_last(name: str, tmp_path: Path) -> None:
    assert die(tmp_path, name) == -getattr(signal, name)
    past = find_deaths(tmp_path)
    (death,) = past.deaths
    assert (death.signal, death.ways) == (name, ("few_rows", "int8"))
    assert death.software == software_here()
    (said,) = past.sentences(tmp_path)
    assert said.startswith(f"The last start was ended by {name} at ")
    assert "Fatal Python error" in (tmp_path / "last-fault.log").read_text()
    assert not past.left_out

    again = find_deaths(tmp_path)
    assert again.deaths == past.deaths
    assert again.sentences(tmp_path) == []


@pytest.mark.parametrize("by", ["SIGKILL", "SIGTERM", "none"] if sys.platform != "win32" else ["none"])
def test_a_peer_that_was_killed_or_has_left_did_not_die(by: str, tmp_path: Path) -> None:
    die(tmp_path, by)
    assert unread_death(tmp_path) is None
    past = find_deaths(tmp_path)
    assert past.deaths == ()
    assert past.sentences(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
def test_two_deaths_within_ten_minutes_have_their_ways_left_out(tmp_path: Path) -> None:
    for _ in range(2):
        die(tmp_path, "SIGILL")
        past = find_deaths(tmp_path)
    assert past.left_out == {"few_rows", "int8"}
    assert len(past.sentences(tmp_path)) == 2
    assert "does without the native ways few_rows, int8" in past.sentences(tmp_path)[1]
    assert find_deaths(tmp_path).left_out == past.left_out  # and so does every start after it
    (tmp_path / "deaths.json").unlink()
    assert not find_deaths(tmp_path).left_out


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
def test_ranks_that_die_together_are_one_death(tmp_path: Path) -> None:
    for process in ("rank0", "rank1"):
        die(tmp_path, "SIGSEGV", process)
    assert die(tmp_path, "none") == 0
    past = find_deaths(tmp_path)
    assert [death.signal for death in past.deaths] == ["SIGSEGV"]
    assert not past.left_out
    assert not list(tmp_path.glob("faults*"))


def test_what_faulthandler_says_is_understood_on_each_system() -> None:
    here = death_in(LINUX, 5.0, "software")
    assert here == Death(5.0, "SIGSEGV", "torch/_ops.py line 1123", ("int8",), "software")
    windows = death_in(WINDOWS, 5.0, "software")
    assert windows == here


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("Fatal Python error: Floating point exception", "SIGFPE"),
        ("Fatal Python error: Floating-point exception", "SIGFPE"),
        ("Windows fatal exception: code 0xc000001d", "SIGILL"),
        ("Windows fatal exception: stack overflow", "SIGSEGV"),
        ("Windows fatal exception: code 0x8001010d", None),  # others handle it
        ("Fatal Python error: _PyMem_DebugFree: bad ID", None),  # SIGABRT follows
        ("say Fatal Python error: Aborted", None),
    ],
)
def test_only_fatal_signals_count(words: str, name: str | None) -> None:
    death = death_in(f"\n{words}\n\n".encode(), 0.0, "")
    assert (None if death is None else death.signal) == name


def test_ways_are_left_out_only_for_deaths_in_a_row_of_this_software() -> None:
    one = Death(1000.0, "SIGSEGV", "", ("a",), "now")
    soon, late = replace(one, at_s=1000.0 + SOON_S, ways=("b",)), replace(one, at_s=1001.0 + SOON_S)
    assert ways_to_leave_out([one], "now") == frozenset()
    assert ways_to_leave_out([one, soon], "now") == {"a", "b"}
    assert ways_to_leave_out([one, late], "now") == frozenset()
    assert ways_to_leave_out([one, soon], "other") == frozenset()
    assert ways_to_leave_out([one, replace(soon, software="other")], "now") == frozenset()
    assert ways_to_leave_out([soon, one], "now") == {"a", "b"}  # the clock was put back


@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"deaths": 5}', '{"deaths": [5, {"at_s": "x"}, {"ways": 5}]}']
)
def test_a_damaged_history_is_none(content: str, tmp_path: Path) -> None:
    (tmp_path / "deaths.json").write_text(content)
    (tmp_path / "faults.log").write_bytes(b"ways [5\nways {}\n\xff\xfe Fatal")
    assert past_deaths(tmp_path) == ()
    assert find_deaths(tmp_path).deaths == ()


def test_a_fault_file_is_its_owners_alone(tmp_path: Path) -> None:
    with FaultLog(tmp_path) as faults:
        if os.name == "posix":
            assert faults.path.stat().st_mode & 0o077 == 0
        assert unread_death(tmp_path) is None
