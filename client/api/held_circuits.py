"""Held circuits: leased on every hop for generations to come, and leased anew before their peers take them back."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

from molink.client.circuit import circuit_core as core
from molink.client.circuit.circuit_builder import ActiveCircuit, CircuitBuilder
from molink.client.circuit.reserving import (
    HopRefused,
    Report,
    ReservationRequest,
    describe,
    release,
    reserve_all,
    wait_ready,
)
from molink.client.circuit.session_request import SessionRequest, describe_session
from molink.client.epochs.kept_leases import KeptLeases, PlannedRoute
from molink.client.errors import as_said
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.shards.spec import SamplingParams

RENEWED_EVERY_S: Final = 10.0
"""A lease without a step makes way for others after 30 s, and ends after 60; one that is asked for in a new epoch is as
good as new. So a circuit is held as long as its client is there, and no longer."""
RENEWED_WITHIN_S: Final = 8.0
PATIENCE_S: Final = 4.0
"""For one hop's answer."""
_log = logging.getLogger(__name__)


class HeldCircuit:
    """A circuit that a generation could begin on at once. Also the FrameSink of what its hops say."""

    def __init__(
        self, builder: CircuitBuilder, circuit: ActiveCircuit, template: pb.SessionDescriptor,
        on_lost: Callable[["HeldCircuit", str], None],
    ) -> None:  # fmt: skip
        """`template` is the session's that it was formed for; `on_lost` hears why it stands no more."""
        self._builder = builder
        self._circuit = circuit
        self._template = template
        self._on_lost = on_lost
        self._asked = [circuit.descriptor]
        """Epochs of which hops may have a lease."""
        self._keeping: asyncio.Task[None] | None = None

    @property
    def planned(self) -> PlannedRoute:
        return PlannedRoute(self._circuit.route, self._circuit.peers)

    def begin(self, renewed_every_s: float = RENEWED_EVERY_S) -> None:
        """Holds it from now on."""
        self._builder.connection.register(self._template.session, self)
        self._keeping = asyncio.create_task(self._keep(renewed_every_s), name="hold a circuit")
        for link in self._circuit.links:
            if link.closed_because is not None:
                self.on_link_closed(link.peer_id, link.closed_because)

    def end(self) -> None:
        """Gives its leases back. What is asked of the same peers afterwards finds their room free."""
        if self._keeping is not None:
            self._keeping.cancel()
        connection = self._builder.connection
        connection.unregister(self._template.session)
        self._builder.end_session(self._circuit.descriptor)
        for descriptor in self._asked:
            for hop in descriptor.hops:
                link = connection.links.find(hop.peer_id)
                if link is not None:
                    release(link, descriptor)

    def on_tokens(self, sender: str, token: pb.Token) -> None:
        """Nothing was begun."""

    def on_failed(self, sender: str, failed: pb.Failed) -> None:
        if self._circuit.has(sender):
            self._on_lost(self, f"{sender}: {as_said(failed.detail)}")

    def on_leaving(self, sender: str, leaving: pb.Leaving) -> None:
        if self._circuit.has(sender) and not leaving.to_standby:
            self._on_lost(self, f"{sender} leaves")

    def on_link_closed(self, peer_id: str, reason: str) -> None:
        if self._circuit.has(peer_id):
            self._builder.report_failure(self._circuit, peer_id)
            self._on_lost(self, f"{peer_id} is gone: {as_said(reason)}")

    async def _keep(self, renewed_every_s: float) -> None:
        try:
            while True:
                await asyncio.sleep(renewed_every_s)
                await self._renew()
        except HopRefused as refused:
            self._on_lost(self, str(refused))
        except TimeoutError:
            self._on_lost(self, "its hops did not answer in time")

    async def _renew(self) -> None:
        """Has every hop lease it anew in the next epoch, for which the memory of the one before counts as free."""
        builder, planned = self._builder, self.planned
        descriptor = describe(
            self._template, planned.route, planned.peers, builder.spec, self._template.epoch + 1
        )
        self._asked.append(descriptor)
        asked = ReservationRequest(descriptor, planned.route, planned.peers, history_tokens=1)
        deadline_s = asyncio.get_running_loop().time() + RENEWED_WITHIN_S
        async with asyncio.timeout_at(deadline_s):
            leases = await reserve_all(builder.connection.links, asked, PATIENCE_S)
            await wait_ready(asked, leases, deadline_s, lambda _: None)
        self._asked = [descriptor]


class HeldCircuits:
    """Circuits of one model that are held. A generation that begins takes one of them."""

    def __init__(self, builder: CircuitBuilder, renewed_every_s: float = RENEWED_EVERY_S) -> None:
        self._builder = builder
        self._renewed_every_s = renewed_every_s
        self._held: list[HeldCircuit] = []
        self.changed = asyncio.Event()
        """Set when one was taken or lost; whoever holds them clears it."""

    @property
    def count(self) -> int:
        return len(self._held)

    async def add(self, tokens: int, timeout_s: float, report: Report = lambda _: None) -> None:
        """Forms one more circuit for a session of so many tokens, and holds it; peers load what they lack for it.

        Raises:
            NoCircuit, SwarmUnavailable: none formed within `timeout_s`.
            InvalidRequest: no circuit could have so many tokens.
        """
        builder, clock = self._builder, asyncio.get_running_loop().time
        asked = SessionRequest((0,), SamplingParams(max_new_tokens=max(1, tokens - 1)))
        template = describe_session(builder.spec, asked, builder.prefix_key)
        circuits = core.CircuitCore()
        first = circuits.handle(core.Begin(clock() + timeout_s), clock())[-1]
        circuit = await builder.build(circuits, first, template, 1, KeptLeases(), report)
        held = HeldCircuit(builder, circuit, template, self._lose)
        self._held.append(held)
        held.begin(self._renewed_every_s)

    def take(self) -> PlannedRoute | None:
        """Gives the leases of one back, to whoever asks for them next; returns its route. None: none is held."""
        if not self._held:
            return None
        held = self._held.pop(0)
        held.end()
        self.changed.set()
        return held.planned

    def keep_at_most(self, count: int) -> None:
        """Lets go of those beyond that number, the newest first."""
        while len(self._held) > count:
            self._held.pop().end()

    def describe(self) -> list[dict[str, Any]]:
        """Returns their hops, JSON-ready."""
        return [
            {
                "predicted_tpot_ms": round(held.planned.route.tpot_ms, 3),
                "hops": [
                    {"peer_id": hop.peer_id, "start": hop.span.start, "stop": hop.span.stop}
                    for hop in held.planned.route.hops
                ],
            }
            for held in self._held
        ]

    def _lose(self, held: HeldCircuit, reason: str) -> None:
        if held in self._held:
            _log.info("a circuit that was held is lost: %s", reason)
            self._held.remove(held)
            held.end()
            self.changed.set()
