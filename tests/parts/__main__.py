"""The parts of `make test`, each a process: `python tests/parts [NAME ...]`, by default all.

Four take turns on two cores: real peers wait for longer than they compute, and others compute meanwhile. More would
save nothing, since both cores are busy, and have real peers wait for a turn. The system shares the cores by niceness:
first real peers and those that are attacked, then the long parts; `make check` and decisions take the time that they
leave. Each line says whose it is.

To load torch, transformers, gRPC and the tests takes a processor six seconds for each part. So one process loads them,
and parts are forked from it, where processes can be: nothing has run in it but imports. Decisions have a process that
loads no torch, in which no thread of a peer runs beside them.
"""

import gc
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
USUAL = "not full and not attack and not fuzz and not chaos and not triton"
AT_A_TIME = 4
"""Parts beside those that take what these leave."""
PEERS = ("tests/e2e",)
ATTACKED = ("tests/attack", "tests/dht/node", "tests/simnet/emulate")
SHARDS = ("tests/shards",)
ENGINES = tuple(
    f"tests/peer/{room}" for room in ("engine", "hop", "ranks", "redundancy", "serving", "speculation")
)
COMPUTED = (
    "tests/simnet/emulate",
    "tests/simnet/papers/test_guessing_variants.py",
    "tests/simnet/serve/test_speculation.py",
)
"""Of simnet, what loads torch."""
DECISIONS = ("tests/routing", "tests/simnet")
DISCOVERY = ("tests/dht", "tests/attack", "tests/client", *COMPUTED)


@dataclass(frozen=True, slots=True)
class Part:
    """Some of the tests."""

    paths: tuple[str, ...] = ()
    """None: all."""
    left_out: tuple[str, ...] = ()
    marked: str = "not e2e"
    niceness: int = 5

    @property
    def arguments(self) -> list[str]:
        """What pytest is told."""
        return [
            "-m",
            f"{self.marked} and {USUAL}",
            *self.paths,
            *(f"--ignore={one}" for one in self.left_out),
        ]


CHECK = "check"
"""The part that is `make check`."""
LEFTOVER_NICENESS = 10
DECIDED = Part(DECISIONS, COMPUTED, niceness=LEFTOVER_NICENESS)
PARTS = {
    "e2e": Part(PEERS, marked="e2e", niceness=0),
    "attacks": Part(ATTACKED, marked="e2e", niceness=0),
    "units": Part(left_out=(*PEERS, *SHARDS, *ENGINES, *DECISIONS, *DISCOVERY)),
    "engines": Part(ENGINES),
    "shards": Part(SHARDS),
    "discovery": Part(DISCOVERY),
}
"""In their order; `units` is whatever the other parts leave."""


class Parts:
    """Those that run, and how those that have run ended."""

    def __init__(self) -> None:
        self.running: dict[int, str] = {}
        self._printers: list[subprocess.Popen[bytes]] = []
        self.failed: list[str] = []

    def _printer(self, name: str) -> int:
        """Where a part of this name writes."""
        said, saying = os.pipe()
        self._printers.append(subprocess.Popen(["sed", "-u", f"s/^/{name:<9} | /"], stdin=said))
        os.close(said)
        return saying

    def start(self, name: str, argv: Sequence[str], niceness: int) -> None:
        saying = self._printer(name)
        nice = ["nice", "-n", str(niceness), *argv]
        self.running[subprocess.Popen(nice, stdout=saying, stderr=saying).pid] = name
        os.close(saying)

    def fork(self, name: str, part: Part) -> None:
        saying = self._printer(name)
        pid = os.fork()
        if pid == 0:
            os.dup2(saying, 1)
            os.dup2(saying, 2)
            os.close(saying)
            os.nice(part.niceness)
            sys.exit(pytest.main(part.arguments))
        os.close(saying)
        self.running[pid] = name

    def wait(self) -> None:
        """Until one part has ended."""
        while (name := self.running.pop((ended := os.wait())[0], None)) is None:
            pass
        if os.waitstatus_to_exitcode(ended[1]) != 0:
            self.failed.append(name)

    def close(self) -> None:
        """Until all that they said is printed."""
        for printer in self._printers:
            printer.wait()


def load() -> bool:
    """Imports all tests and what they import; says whether parts can be forked from here: no thread may be there. What
    fails to be imported is told by the part whose it is."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # else its threads are there from the first tokenizer on
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider"])
    del os.environ["TOKENIZERS_PARALLELISM"]
    gc.freeze()
    return len(list(Path("/proc/self/task").iterdir())) == 1


def argv(part: Part) -> list[str]:
    return [sys.executable, "-m", "pytest", *part.arguments]


def main(names: Sequence[str]) -> int:
    os.chdir(ROOT)
    chosen = names or (CHECK, "decisions", *PARTS)
    parts = Parts()
    if CHECK in chosen:
        parts.start(CHECK, ["make", "--no-print-directory", "IS_SET_UP=yes", "check"], LEFTOVER_NICENESS)
    if "decisions" in chosen:
        parts.start("decisions", argv(DECIDED), LEFTOVER_NICENESS)
    beside = len(parts.running)
    forks = sys.platform == "linux" and len(chosen) > 1 and load()
    for name, part in PARTS.items():
        if name not in chosen:
            continue
        while len(parts.running) >= AT_A_TIME + beside:
            parts.wait()
        if forks:
            parts.fork(name, part)
        else:
            parts.start(name, argv(part), part.niceness)
    while parts.running:
        parts.wait()
    parts.close()
    if parts.failed:
        print("failed:", *parts.failed)
    return len(parts.failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
