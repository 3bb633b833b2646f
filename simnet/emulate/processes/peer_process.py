"""An emulated peer as its driver sees it: a process that is started, asked for counters, and ended."""

from dataclasses import asdict
from types import TracebackType
from typing import Self

from molink.dht.records.announcement import verify_facts
from molink.dht.records.records import PeerState, PeerView
from molink.shards.spec import Span
from molink.simnet.emulate.processes.child_process import ChildProcess
from molink.simnet.emulate.processes.peer import PeerConfiguration, PeerCounters, PeerReport


class PeerProcess:
    """One peer between `__aenter__` and `__aexit__`."""

    def __init__(self, configuration: PeerConfiguration) -> None:
        self._span = Span(configuration.start, configuration.stop)
        self._child = ChildProcess("peer", asdict(configuration), f"peer {configuration.name}")

    async def __aenter__(self) -> Self:
        """Starts it, and waits until it is ready; raises EmulationError if it does not get so far."""
        await self._child.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._child.__aexit__(kind, error, trace)

    @property
    def view(self) -> PeerView:
        """The peer as a client of its swarm would know it: its own signed facts, all of its layers held."""
        report = self._report
        record = bytes.fromhex(report.facts)
        facts = verify_facts(record)
        state = PeerState(
            peer_id=facts.peer_id,
            sequence=1,
            ttl_s=facts.ttl_s,
            facts_sequence=facts.sequence,
            spans=(self._span,),
            free_weight_bytes=0,
            free_kv_bytes=report.free_kv_bytes,
            sessions=0,
            queued=0,
        )
        return PeerView(facts, state, age_s=0.0, facts_record=record)

    @property
    def most_sessions(self) -> int:
        return self._report.most_sessions

    async def counters(self) -> PeerCounters:
        """What it has used so far; raises EmulationError if it has ended, or does not answer."""
        return PeerCounters(**await self._child.ask("counters"))

    @property
    def _report(self) -> PeerReport:
        return PeerReport(**self._child.first_words)
