"""What a newcomer tries first: the version, completion, a prompt in a file, a disk that is full."""

import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
from support.pairwise import usually
from support.swarms.scripted_swarm import FIRST, Run, ScriptedSwarm

import molink

DEADLINE_S = 120.0


def test_a_prompt_may_come_from_stdin(run: Run, swarm: ScriptedSwarm, say: Callable[[str], None]) -> None:
    say("Two households\nboth alike")
    assert run("generate", "-") == (0, "But soft!\n", "")
    assert swarm.asked == ["Two households\nboth alike"]


def test_the_version_is_that_of_the_package(run: Run) -> None:
    assert run("--version") == (0, f"molink {version('molink')}\n", "")
    assert molink.__version__ == version("molink")


def test_a_shell_completes_commands(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("_MOLINK_COMPLETE", "complete_bash"),
        ("COMP_WORDS", "molink gen"),
        ("COMP_CWORD", "1"),
    ):
        monkeypatch.setenv(name, value)
    assert run()[:2] == (0, "generate\n")


@pytest.mark.full
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no file here is always full")
@pytest.mark.parametrize("option", usually(["--stream"], ["--json"]))
def test_a_full_disk_is_one_sentence(option: str) -> None:
    program = (
        "import sys; sys.path.insert(0, sys.argv.pop(1))\nfrom molink.client.commands import cli\n"
        "from molink.client.api import swarm\nfrom support.swarms.scripted_swarm import ScriptedSwarm\n"
        "class Opened(ScriptedSwarm):\n"
        "    def __init__(self, *_, **options): super().__init__(opened_with=options)\n"
        "swarm.AsyncSwarm = Opened\n"
        "cli.main()\n"
    )
    tests = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", program, tests, "generate", "x", option, "--initial-peers", FIRST]
    with open("/dev/full", "w") as full:  # noqa: PTH123 - as a shell opens it
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=DEADLINE_S, check=False
        )
    said = "molink: there is no room left on the disk: make room, and try again\n"
    assert (done.returncode, done.stderr) == (1, said)
