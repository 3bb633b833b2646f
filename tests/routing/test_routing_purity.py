"""Decisions know no clock, no chance, no network and no torch."""

import ast
import subprocess
import sys
from pathlib import Path

import molink.routing

BARRED = ("torch", "transformers", "grpc", "libp2p", "trio", "asyncio", "anyio")
BARRED_IN_SOURCE = (*BARRED, "time", "random", "secrets", "socket", "threading", "datetime", "os")

PROGRAM = f"""
import sys

class Bar:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {BARRED!r}:
            raise ImportError("barred: " + name)
        return None

sys.meta_path.insert(0, Bar())
import numpy as np
from molink.routing import Circuit, CircuitProblem, Hop, NoCircuit, Snapshot, plan, plan_circuit
problem = CircuitProblem(np.ones(2), np.zeros((2, 2)), np.array([2, 2]), np.array([1, 1, 1]))
print(plan_circuit(problem).tpot_ms, sorted(set(sys.modules) & set({BARRED!r})))
"""


def test_planning_runs_where_torch_grpc_libp2p_and_asyncio_are_barred() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=180, check=False
    )
    assert done.stdout.split() == ["3.0", "[]"], done.stderr


def test_no_source_file_reads_a_clock_draws_numbers_or_talks_to_anyone() -> None:
    files = sorted(Path(molink.routing.__file__).resolve().parent.rglob("*.py"))
    assert len(files) > 5
    for file in files:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for statement in ast.walk(tree):
            names: list[str] = []
            if isinstance(statement, ast.Import):
                names = [alias.name for alias in statement.names]
            elif isinstance(statement, ast.ImportFrom):
                names = [statement.module or ""]
            elif isinstance(statement, ast.Attribute) and isinstance(statement.value, ast.Name):
                names = ["random"] if (statement.value.id, statement.attr) == ("np", "random") else []
            found = {name.partition(".")[0] for name in names} & set(BARRED_IN_SOURCE)
            assert not found, f"{file.name} uses {', '.join(found)}"
