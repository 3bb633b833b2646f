"""What a command of `molink-simnet` waits for before it begins."""

import subprocess
import sys

HEAVY = {"torch", "transformers", "libp2p", "grpc", "matplotlib"}
COMMANDS = ("communication", "cost", "emulate", "redundancy", "schedule", "serve", "swarm")


def test_the_command_line_and_each_process_that_runs_a_cell_load_nothing_heavy() -> None:
    program = "import molink.simnet.cli, sys; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", program], check=True, timeout=180, capture_output=True, text=True
    ).stdout.split()
    assert "molink.simnet.cli" in loaded
    assert HEAVY.isdisjoint(loaded)


def test_all_commands_are_there() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "molink.simnet.cli", "--help"],
        check=True,
        timeout=180,
        capture_output=True,
        text=True,
    ).stdout
    assert all(f" {command} " in shown for command in COMMANDS)
