"""The lines of an emulation as its driver sees them: a process between the peers."""

from collections.abc import Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Self

from molink.simnet.emulate.processes.child_process import ChildProcess
from molink.simnet.emulate.processes.lines import LinesConfiguration, LinesCounters

__all__ = ["LinesConfiguration", "LinesCounters", "LinesProcess"]


class LinesProcess:
    """One uplink for each home, between `__aenter__` and `__aexit__`."""

    def __init__(self, configuration: LinesConfiguration) -> None:
        self._child = ChildProcess("lines", asdict(configuration), "the lines' process")

    async def __aenter__(self) -> Self:
        """Starts it; raises EmulationError if it does not get ready."""
        await self._child.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._child.__aexit__(kind, error, trace)

    @property
    def proxies(self) -> tuple[str, ...]:
        """For each home the URL of the HTTP proxy through which it reaches the others."""
        return tuple(self._child.first_words["proxies"])

    async def settle(self, addresses: Sequence[Sequence[str]]) -> None:
        """Says which addresses (host:port) are at which home."""
        await self._child.ask({"addresses": [list(home) for home in addresses]})

    async def counters(self) -> LinesCounters:
        """What has passed so far; raises EmulationError if it has ended, or does not answer."""
        answer = await self._child.ask("counters")
        return LinesCounters(answer["at_s"], answer["cpu_s"], tuple(answer["busy_s"]))
