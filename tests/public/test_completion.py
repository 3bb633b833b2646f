"""Completion on four shells: the script that a shell loads, and what the programs offer it."""

import subprocess
import sys
from collections.abc import Mapping

import pytest
from support.deadline import DEADLINE_S
from support.pairwise import usually

PROGRAMS = {
    "molink": "molink.client.commands.cli",
    "molink-peer": "molink.peer.commands.cli",
    "molink-gateway": "molink.client.gateway.cli",
    "molink-simnet": "molink.simnet.cli",
}
SHELLS = ("bash", "zsh", "fish", "powershell")


def completed(program: str, instruction: str, environment: Mapping[str, str]) -> str:
    variable = f"_{program}_COMPLETE".replace("-", "_").upper()
    done = subprocess.run(
        [sys.executable, "-c", f"from {PROGRAMS[program]} import main; main()"],
        env={variable: instruction, **environment},
        capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert done.stderr == ""
    return done.stdout


def offered(program: str, shell: str, words: str) -> str:
    """What is offered behind these words, the last of which is not complete."""
    last = words.rpartition(" ")[2]
    return completed(
        program,
        f"complete_{shell}",
        {
            "COMP_WORDS": words,
            "COMP_CWORD": str(words.count(" ")),
            "_TYPER_COMPLETE_ARGS": words,
            "_TYPER_COMPLETE_WORD_TO_COMPLETE": last,
            "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        },
    )


@pytest.mark.full
@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_each_program_has_a_script_for_each_shell(program: str, shell: str) -> None:
    script = completed(program, f"source_{shell}", {})
    assert program in script
    assert f"complete_{shell}" in script
    if shell == "bash" and sys.platform != "win32":
        subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=DEADLINE_S)


@pytest.mark.parametrize("shell", usually(["bash", "powershell"], SHELLS))
def test_commands_options_and_their_values_are_offered(shell: str) -> None:
    assert "generate" in offered("molink", shell, "molink gen")
    assert "--quiet-hours" in offered("molink-peer", shell, "molink-peer join --qui")
    values = offered("molink-peer", shell, "molink-peer join --dtype fl")
    assert "float32" in values
    assert "bfloat16" not in values


def test_names_and_values_of_what_is_written_down_are_offered() -> None:
    assert offered("molink", "bash", "molink config set quiet").split() == ["quiet_hours"]
    assert offered("molink", "bash", "molink config set on_battery p").split() == ["pause"]
    assert offered("molink-gateway", "bash", "molink-gateway --log-format j").split() == ["json"]
