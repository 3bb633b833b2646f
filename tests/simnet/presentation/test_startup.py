"""What a command of `molink-simnet` waits for before it begins."""

import subprocess
import sys

import pytest

COMMANDS = ("communication", "cost", "emulate", "redundancy", "schedule", "serve", "swarm")


@pytest.mark.parametrize("heavy", ["torch", "transformers", "libp2p", "grpc", "matplotlib"])
def test_the_command_line_and_each_process_that_runs_a_cell_load_no(heavy: str) -> None:
    loaded = f"import molink.simnet.cli, sys; sys.exit({heavy!r} in sys.modules)"
    subprocess.run([sys.executable, "-c", loaded], check=True, timeout=60)


def test_all_commands_are_there() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "molink.simnet.cli", "--help"],
        check=True,
        timeout=60,
        capture_output=True,
        text=True,
    ).stdout
    assert all(f" {command} " in shown for command in COMMANDS)
