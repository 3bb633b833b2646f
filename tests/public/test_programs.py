"""The programs end quietly by Ctrl-C from their first moments on, and are what is installed under their names."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support.deadline import DEADLINE_S

from molink import programs

SCRIPTS: dict[str, str] = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())[
    "project"
]["scripts"]
INTERRUPTED = """
import signal, sys
from molink import programs
signal.signal(signal.SIGINT, signal.default_int_handler)
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
getattr(programs, sys.argv[1])()
"""


@pytest.mark.parametrize("script", SCRIPTS)
def test_ctrl_c_while_modules_are_loaded_ends_quietly(script: str) -> None:
    module, function = SCRIPTS[script].split(":")
    assert module == programs.__name__
    command = [sys.executable, "-c", INTERRUPTED, function, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
