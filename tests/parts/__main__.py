"""The parts of `make test`, each a process: `python tests/parts [NAME ...]`, by default all; with `--full` first, those
of `make test-full`.

All run at once on two cores: real peers wait for longer than they compute, and others compute meanwhile. The system
shares the cores by niceness: first real peers and those that are attacked, then discovery, which waits for sockets for
longest and would end last, then other long parts; check and decisions take the time that they leave. Each line says
whose it is; what failed is told once more at the end.

To load torch, transformers, gRPC and the tests takes a processor six seconds for each part. So one process loads them,
and parts are forked from it, where processes can be: nothing has run in it but imports. Decisions have a process that
loads no torch, in which no thread of a peer runs beside them.
"""

import gc
import os
import re
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from tempfile import mkdtemp

import pytest

ROOT = Path(__file__).parents[2]
FULL = "not fuzz and not attack and not chaos and not environments"
USUAL = f"{FULL} and not full and not triton"
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
    marked: str = f"not e2e and {USUAL}"
    niceness: int = 5
    options: tuple[str, ...] = ()
    """What else pytest is told."""

    @property
    def arguments(self) -> list[str]:
        """What pytest is told."""
        return [
            "-m",
            self.marked,
            *self.options,
            *self.paths,
            *(f"--ignore={one}" for one in self.left_out),
        ]


CHECK = "check"
"""The part that is `make check`."""
LEFTOVER_NICENESS = 10
DECIDED = Part(DECISIONS, COMPUTED, niceness=LEFTOVER_NICENESS)
PARTS = {
    "e2e": Part(PEERS, marked=f"e2e and {USUAL}", niceness=0),
    "attacks": Part(ATTACKED, marked=f"e2e and {USUAL}", niceness=0),
    "discovery": Part(DISCOVERY, niceness=2),
    "units": Part(left_out=(*PEERS, *SHARDS, *ENGINES, *DECISIONS, *DISCOVERY)),
    "engines": Part(ENGINES),
    "shards": Part(SHARDS),
}
"""`units` is whatever the other parts leave."""
PATIENT = ("--hypothesis-profile=full", "--timeout=900")
FULL_PARTS = {
    "others": Part(left_out=SHARDS, marked=FULL, niceness=0, options=PATIENT),
    "shards": Part(SHARDS, marked=FULL, options=PATIENT),
}
"""Two that last about as long. Each test has a quarter of an hour: one that is late ends its part."""
PRINTER = 'tee "$1" | sed -u "s/^/$2 | /"'
TOLD_LINES = 40
FAILURE = re.compile(r"^(FAILED|ERROR|E  ) .*", re.MULTILINE)
"""A line by which pytest says what failed."""


class Parts:
    """Those that run, and how those that have run ended."""

    def __init__(self, folder: Path) -> None:
        self.running: dict[int, str] = {}
        self.failed: list[str] = []
        self._folder = folder
        self._printers: set[int] = set()

    def start(self, name: str, niceness: int, argv: Sequence[str]) -> None:
        """Runs a program."""
        if (pid := self._forked(name, niceness)) == 0:
            os.execvp(argv[0], argv)
        self.running[pid] = name

    def fork(self, name: str, part: Part) -> None:
        """Runs pytest as it is loaded here."""
        if (pid := self._forked(name, part.niceness)) == 0:
            sys.exit(pytest.main(part.arguments))
        self.running[pid] = name

    def _forked(self, name: str, niceness: int) -> int:
        """As `os.fork`; what the new process says is printed behind its name."""
        said, saying = os.pipe()
        if (printer := os.fork()) == 0:
            os.dup2(said, 0)
            os.execvp("sh", ["sh", "-c", PRINTER, "sh", str(self._folder / name), f"{name:<9}"])
        self._printers.add(printer)
        os.close(said)
        if (pid := os.fork()) == 0:
            self.running.clear()
            self._printers.clear()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.dup2(saying, 1)
            os.dup2(saying, 2)
            os.nice(niceness)
        os.close(saying)
        return pid

    def wait(self) -> None:
        """Until one part has ended."""
        while True:
            pid, status = os.wait()
            self._printers.discard(pid)
            if (name := self.running.pop(pid, None)) is not None:
                break
        if os.waitstatus_to_exitcode(status) != 0:
            self.failed.append(name)

    def close(self) -> None:
        """Ends those that still run, and waits until all that was said is printed."""
        for pid in self.running:
            os.kill(pid, signal.SIGTERM)
        while self._printers:
            self._printers.discard(os.wait()[0])

    def told(self, name: str) -> str:
        """What a part that failed said of it, in short: among all that parts say it is far from the end."""
        said = (self._folder / name).read_text(errors="replace")
        lines = [found.group() for found in FAILURE.finditer(said)] or said.splitlines()
        return "\n".join(f"{name:<9} | {line}" for line in lines[-TOLD_LINES:])


class Freezing:
    """What is loaded is no garbage to pytest either, which looks for some when it ends."""

    def pytest_sessionfinish(self) -> None:
        gc.freeze()


def load() -> bool:
    """Imports all tests and what they import; says whether parts can be forked from here: no thread may be there. What
    fails to be imported is told by the part whose it is."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # else its threads are there from the first tokenizer on
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        ended = pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider"], [Freezing()])
    if ended == pytest.ExitCode.INTERRUPTED:
        raise KeyboardInterrupt
    del os.environ["TOKENIZERS_PARALLELISM"]
    gc.freeze()
    return len(list(Path("/proc/self/task").iterdir())) == 1


def argv(part: Part) -> list[str]:
    return [sys.executable, "-m", "pytest", *part.arguments]


def run(parts: Parts, chosen: Sequence[str], known: Mapping[str, Part]) -> None:
    if CHECK in chosen:
        parts.start(CHECK, LEFTOVER_NICENESS, ["make", "--no-print-directory", "IS_SET_UP=yes", "check"])
    if "decisions" in chosen:
        parts.start("decisions", LEFTOVER_NICENESS, argv(DECIDED))
    forks = sys.platform == "linux" and len(chosen) > 1 and load()
    for name, part in known.items():
        if name not in chosen:
            continue
        if forks:
            parts.fork(name, part)
        else:
            parts.start(name, part.niceness, argv(part))
    while parts.running:
        parts.wait()


def main(names: Sequence[str]) -> int:
    os.chdir(ROOT)
    # As `python -m pytest` has it: processes that tests spawn import tests from there.
    sys.path[0] = str(ROOT)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder, owner = Path(mkdtemp()), os.getpid()
    parts = Parts(folder)
    is_full = bool(names) and names[0] == "--full"
    try:
        try:
            if is_full:
                run(parts, names[1:] or tuple(FULL_PARTS), FULL_PARTS)
            else:
                run(parts, names or (CHECK, "decisions", *PARTS), PARTS)
        finally:
            parts.close()
        for name in parts.failed:
            print(parts.told(name))
    finally:
        if os.getpid() == owner:  # a part that was forked comes by here as well, when it ends
            shutil.rmtree(folder)
    if parts.failed:
        print("failed:", *parts.failed)
    return len(parts.failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
