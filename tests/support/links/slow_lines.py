"""Lines with delay and a rate between namespaces, where the kernel has none (`slow_internet.c`)."""

import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

SOURCE = Path(__file__).with_name("slow_internet.c")
COMPILE_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Line:
    """What one place adds to every way that begins or ends there."""

    delay_ms: float
    mbps: float = 1000.0
    """Of what leaves it."""


class SlowLines:
    """The process between the places, between `__enter__` and `__exit__`."""

    def __enter__(self) -> Self:
        with tempfile.TemporaryDirectory() as folder:
            program = Path(folder) / "slow_internet"
            command = ["gcc", "-O2", "-o", str(program), str(SOURCE)]
            subprocess.run(command, check=True, timeout=COMPILE_TIMEOUT_S)
            self._process = subprocess.Popen(
                [str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            self._tell("")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()

    def place(self, namespace: str, address: str, line: Line) -> None:
        """Puts a device `wan` into a namespace."""
        self._tell(f"place {namespace} {address} {line.delay_ms * 1000:.0f} {line.mbps}")

    def readdress(self, namespace: str, address: str) -> None:
        """What goes to that address goes there from now on, and nothing to the old one."""
        self._tell(f"address {namespace} {address}")

    def _tell(self, order: str) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(order + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "ok\n", order
