"""One generation as the client owns it: its epochs, its tokens, and what happens when a peer is lost.

A session lives on one circuit at a time. When a hop fails, the session goes on in a new epoch on another circuit, which
steps of the history what not all of its hops hold; tokens are numbered by their position, so none repeats and none is
skipped.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from molink.client.circuit import circuit_core as core
from molink.client.circuit import patience
from molink.client.circuit.circuit_builder import ActiveCircuit, CircuitBuilder
from molink.client.circuit.kept_leases import KeptLeases, PlannedRoute
from molink.client.circuit.reserving import Report, release
from molink.client.circuit.scouting import ask_signs_of_life
from molink.client.circuit.session_request import SessionRequest, describe_session
from molink.client.circuit.standbys import Standbys
from molink.client.circuit.token_rules import HeadAtFault, TokenRules, TokenStream
from molink.client.errors import NoCircuit, PeerLost, SwarmError, SwarmUnavailable, as_said
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.routing.routes.planner import Route
from molink.shards.kv.prefix import MAX_PREFIX_BLOCKS, NAME_BYTES, block_names
from molink.shards.spec import Span

RENEW_EVERY_S = 8.0
SPARE_EVENTS = 8
"""Room for losses in the queue, beside tokens: each circuit has at most one."""


@dataclass(frozen=True, slots=True)
class HopLost:
    """A hop of the present circuit has failed."""

    epoch: int
    peer_id: str
    """Empty where it is not known which: the circuit yields nothing, and all of its hops answer."""
    code: str
    detail: str
    accuser: str = ""
    """The hop that says so of another; empty where the client knows it itself, or the hop says it of itself."""


@dataclass(slots=True)
class SessionLog:
    """Session log: what became of a session, for reports."""

    route: Route | None = None
    names: dict[str, str] = field(default_factory=dict)
    epochs: int = 0
    losses: list[HopLost] = field(default_factory=list)
    standbys: Mapping[str, str] = field(default_factory=dict)
    """Who kept copies at the end, by the hops' peers."""
    recoveries: list["HopRecovery"] = field(default_factory=list)
    recovering: "HopRecovery | None" = None
    """Of the latest loss, while no token has come since."""
    prefill_s: float = 0.0
    """From the start on the latest circuit to its first token."""
    arrived_s: list[float] = field(default_factory=list)
    """When each new token came in, by the loop's clock, however late it is taken."""

    def record_token(self, at_s: float, started_s: float | None) -> None:
        """Records a token, the first of a circuit that was started then, or a later one."""
        self.arrived_s.append(at_s)
        if started_s is not None:
            self.prefill_s = at_s - started_s
        if self.recovering is not None:
            self.recoveries.append(replace(self.recovering, seconds=at_s - self.recovering.lost_s))
            self.recovering = None

    def record_recovery(self, tokens: int, route: Route, seized: PlannedRoute | None) -> None:
        """Records that a circuit stands after a loss, if there was one, and that so many tokens are computed again."""
        if self.recovering is not None:
            by_standby = seized is not None and route.peer_ids == seized.route.peer_ids
            self.recovering = replace(self.recovering, recomputed_tokens=tokens, by_standby=by_standby)


@dataclass(frozen=True, slots=True)
class HopRecovery:
    """Recovery from the loss of a hop."""

    peer_id: str
    span: Span | None
    lost_s: float
    """When the client knew, by the loop's clock."""
    recomputed_tokens: int = 0
    by_standby: bool = False
    """Whether the hop's standby went on with its copy; else another circuit did."""
    seconds: float = 0.0
    """From then to the next token."""


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A token of the present circuit, and when it came in."""

    token: pb.Token
    at_s: float


class ClientSession:
    """Client session: drives one generation over `circuit_builder.connection`. Also the FrameSink of its frames.

    Raises:
        InvalidRequest: prompt and new tokens together are more than a message takes.
    """

    def __init__(
        self, circuit_builder: CircuitBuilder, asked: SessionRequest, report: Report = lambda _: None
    ) -> None:
        self.log = SessionLog()
        self.watch: Callable[[pb.Token], None] = lambda _: None
        self._circuit_builder = circuit_builder
        self._report = report
        self._history = list(asked.prompt)
        self._template = describe_session(circuit_builder.spec, asked, circuit_builder.prefix_key)
        self._events: asyncio.Queue[_Arrival | HopLost] = asyncio.Queue(
            self._template.capacity_tokens - len(asked.prompt) + SPARE_EVENTS
        )
        """Tokens that `TokenStream` lets in, so never more than were asked for, and the loss of the circuit."""
        self._circuit: ActiveCircuit | None = None
        self._intake: TokenStream | None = None
        """None from the loss of a circuit on: nothing that comes behind that counts."""
        self.standbys = Standbys(circuit_builder.standby_choice, wanted=asked.partners)
        self._circuits = core.CircuitCore()
        self._kept = KeptLeases()

    @property
    def prompt_tokens(self) -> int:
        """As many as were asked to go on from."""
        return self._template.prompt_tokens

    async def tokens(self, timeout_s: float) -> AsyncGenerator[pb.Token, None]:
        """Yields every new token in order; ends after the one whose `finish` is set.

        Raises:
            NoCircuit, SwarmUnavailable: no circuit formed within `timeout_s`.
            PeerLost: a peer was lost in mid-generation and no circuit formed again.
        """
        clock = asyncio.get_running_loop().time
        connection = self._circuit_builder.connection
        connection.register(self._template.session, self)
        renewing = asyncio.create_task(self._keep_leases(), name="renew leases")
        try:
            begin = core.Begin(clock() + timeout_s)
            await self._begin(self._circuits.handle(begin, clock())[-1])
            while True:
                event = await self._next_event()
                if isinstance(event, HopLost):
                    if event.epoch == self._template.epoch:
                        await self._recover(event)
                    continue
                token = event.token
                if token.epoch != self._template.epoch or token.position != len(self._history):
                    continue  # from a circuit that this session has left
                self._history.append(token.token_id)
                self.log.record_token(event.at_s, self._circuits.first_token_since_s)
                self._circuits.handle(core.Yielded(), clock())
                if token.finish != pb.NOT_FINISHED:
                    self.log.standbys = self.standbys.by_hop()
                self.watch(token)
                yield token
                if token.finish != pb.NOT_FINISHED:
                    return
                self._circuits.handle(core.Taken(), clock())
        finally:
            renewing.cancel()
            connection.unregister(self._template.session)
            self._circuits.handle(core.End(), clock())
            self._release()
            self.standbys.release()

    def on_tokens(self, sender: str, token: pb.Token) -> None:
        """Tokens are the head's to send: what any other peer says that it drew is not the circuit's.

        A head that sends what cannot be a token of this session is lost, like one that is gone.
        """
        circuit, intake = self._circuit, self._intake
        if circuit is None or intake is None or sender != circuit.head.peer_id:
            return
        if token.epoch != self._template.epoch:
            return
        try:
            if intake.takes(token):
                self._events.put_nowait(_Arrival(token, asyncio.get_running_loop().time()))
        except HeadAtFault as fault:
            self._lose(HopLost(self._template.epoch, sender, "protocol", str(fault)))

    def on_failed(self, sender: str, failed: pb.Failed) -> None:
        """A hop may blame any hop of its circuit, and nobody else."""
        if self.standbys.lose(sender) or self._circuit is None or not self._circuit.has(sender):
            return
        at_fault = failed.peer_id if self._circuit.has(failed.peer_id) else sender
        accuser = "" if at_fault == sender else sender
        code = as_said(failed.code) or "lost"
        self._lose(HopLost(failed.epoch, at_fault, code, as_said(failed.detail) or code, accuser))

    def on_link_closed(self, peer_id: str, reason: str) -> None:
        if self.standbys.lose(peer_id):
            return
        if self._circuit is not None and self._circuit.has(peer_id):
            self._lose(HopLost(self._template.epoch, peer_id, "lost", as_said(reason)))

    def _lose(self, loss: HopLost) -> None:
        """The first loss of a circuit ends it; what is said of it later is of no use any more."""
        if loss.epoch == self._template.epoch and self._intake is not None:
            self._intake = None
            self._events.put_nowait(loss)

    async def _begin(self, asked: core.Effect, seized: PlannedRoute | None = None) -> None:
        """A circuit for a new epoch, started on the history so far."""
        self._circuit = self._intake = None
        circuit = await self._circuit_builder.build(
            self._circuits, asked, self._template, len(self._history), self._kept, self._report
        )
        self._circuit = circuit
        self.log.record_recovery(len(self._history) - circuit.position, circuit.route, seized)
        self._release_kept(circuit.route.peer_ids)
        rules = TokenRules.of(self._template, self._circuit_builder.spec)
        self._intake = TokenStream(rules, len(self._history), len(circuit.links))
        self.log.route = circuit.route
        self.log.epochs = self._circuits.runs
        self.log.names.update({peer_id: view.facts.name for peer_id, view in circuit.peers.items()})
        start = pb.Start(
            session=self._template.session,
            epoch=self._template.epoch,
            token_ids=self._history,
            position=circuit.position,
        )
        for link in circuit.links:
            if link.closed_because is not None:
                self._lose(HopLost(self._template.epoch, link.peer_id, "lost", as_said(link.closed_because)))
                return
        if not circuit.head.post(start):
            self._lose(HopLost(self._template.epoch, circuit.head.peer_id, "lost", "the head takes no more"))
            return
        self.standbys.begin(circuit)

    async def _next_event(self) -> _Arrival | HopLost:
        """The next token or loss. Hops are asked for a sign of life where it is overdue; a circuit that yields nothing
        for longer than it could take is lost."""
        clock = asyncio.get_running_loop().time
        since_s, asked = clock(), 0
        while True:
            patience_s, ask_s = self._patience_s(asked)
            try:
                async with asyncio.timeout_at(since_s + min(patience_s, ask_s)):
                    return await self._events.get()
            except TimeoutError:
                circuit = self._circuit
            asked += 1
            if circuit is None:
                continue
            is_over = clock() - since_s >= patience_s
            signs = await ask_signs_of_life(circuit.links, self._template.session, circuit.descriptor.epoch)
            fault = patience.hop_at_fault(signs, self._token_s(circuit.route), is_over=is_over)
            if not self._events.empty():
                continue
            if fault is not None and (is_over or await self._has_other(fault.peer_id)):
                did = "it did not answer" if fault.after_s is None else "its engine stood still"
                self._lose(HopLost(self._template.epoch, fault.peer_id, "stalled", did))
            elif is_over:
                self._lose(HopLost(self._template.epoch, "", "stalled", "the circuit stood still"))

    def _patience_s(self, asked: int) -> tuple[float, float]:
        """Returns how long the next event may take, and when hops are asked that have been so often before."""
        route = self.log.route
        if route is None:
            return patience.LEAST_FIRST_S, patience.LEAST_FIRST_S
        is_first = self._circuits.first_token_since_s is not None
        ask_s = patience.ask_after_s(
            route.tpot_ms / 1000, self._circuits.measured_s, asked, is_first=is_first
        )
        first_s = self._predicted_first_s(route)
        return self._circuits.patience_s(first_s, route.tpot_ms / 1000), ask_s

    def _token_s(self, route: Route) -> float:
        """Returns what the next token should take."""
        if self._circuits.first_token_since_s is not None:
            return self._predicted_first_s(route)
        return max(route.tpot_ms / 1000, self._circuits.measured_s)

    def _predicted_first_s(self, route: Route) -> float:
        """After a loss what was generated before it is part of the prompt."""
        return route.ttft_ms / 1000 * len(self._history) / max(1, self._template.prompt_tokens)

    async def _has_other(self, peer_id: str) -> bool:
        """Whether there is a circuit without that peer: the only one that there is gets the time that it may take."""
        return await self._circuit_builder.can_do_without(peer_id, self._template)

    async def _recover(self, loss: HopLost) -> None:
        """Goes on elsewhere, without the peer that failed.

        Raises:
            PeerLost: not within RECOVERY_S of the lost peer's last sign of life, or circuit after circuit yields
                nothing.
        """
        circuit, clock = self._circuit, asyncio.get_running_loop().time
        if circuit is None:
            return
        left = self._circuit_builder.report_failure(circuit, loss.peer_id, loss.accuser)
        self.log.losses.append(replace(loss, peer_id=loss.peer_id or left))
        self._report(f"peer {left[-8:]} is left out ({loss.detail}); looking for another circuit")
        span = next((hop.span for hop in circuit.route.hops if hop.peer_id == left), None)
        unheard_s = next((link.unheard_s for link in circuit.links if link.peer_id == loss.peer_id), 0.0)
        waited_s = clock() - self._circuits.step_since_s
        first_s = self._predicted_first_s(circuit.route)
        standby = self.standbys.substitute(left) if loss.peer_id else ""
        self.standbys.pause()
        if loss.code == "lost" and not standby and self._circuits.first_token_since_s is None:
            self._kept.try_again(PlannedRoute(circuit.route, circuit.peers), first_s)
        lost = core.Lost(unheard_s, first_s, not loss.peer_id, left, standby)
        *_, asked = self._circuits.handle(lost, clock())
        self.log.recovering = HopRecovery(left, span, clock())
        self._circuit = None
        self._kept.keep(circuit.descriptor)
        self._circuit_builder.end_session(circuit.descriptor)
        seized = self._seize(asked) if isinstance(asked, core.Seize) else None
        if isinstance(asked, core.GiveUp):
            raise PeerLost(
                left, span, f"{loss.detail}; no token within {waited_s:.0f} s on {self.log.epochs} circuits"
            )
        try:
            await self._begin(asked, seized)
        except (NoCircuit, SwarmUnavailable) as error:
            raise _lost(loss, left, span, error) from error

    def _seize(self, asked: core.Seize) -> PlannedRoute:
        """The circuit with the standby in the lost hop's place. What hops compute from there on is upon what another
        peer has sent: none of it gets a name under which later prompts would find it."""
        self._report(f"peer {asked.standby[-8:]} takes its place with its copy of the KV cache")
        seized = self.standbys.take_over(asked.peer_id)
        self._kept.seize(seized)
        self._template.prefix_blocks = b""
        return seized

    async def _keep_leases(self) -> None:
        """Renews the leases however fast tokens come and however slowly they are taken, until cancelled."""
        while True:
            await asyncio.sleep(RENEW_EVERY_S)
            self._renew()

    def _renew(self) -> None:
        self.standbys.renew()
        circuit = self._circuit
        if circuit is None:
            return
        asked = pb.AwaitReady(session=self._template.session, epoch=self._template.epoch, wait_ms=0)
        for link in circuit.links:
            link.post(pb.Request(id=0, await_ready=asked))

    def _release(self) -> None:
        """Gives all leases back."""
        circuit, self._circuit = self._circuit, None
        if circuit is not None:
            self._kept.keep(circuit.descriptor)
            self._circuit_builder.end_session(circuit.descriptor)
        self._release_kept(())

    def _release_kept(self, peer_ids: Collection[str]) -> None:
        """Gives leases of circuits back that the session has left, but for those that have gone on at these peers."""
        further = self._further_blocks()
        # what hops hold of the latest token, or beyond it, may be something else that was tried and refused
        valid_tokens = len(self._history) - 1
        for peer_id, descriptor in self._kept.take_all_but(peer_ids):
            link = self._circuit_builder.connection.links.find(peer_id)
            if link is not None:
                release(link, descriptor, further, valid_tokens)

    def _further_blocks(self) -> bytes:
        """Names of the blocks that have filled since the descriptor named the prompt's: the next prompt of a chat
        begins with them."""
        if any(one.by_standby for one in self.log.recoveries) or self.log.recovering is not None:
            return b""
        named = len(self._template.prefix_blocks) // NAME_BYTES
        return b"".join(block_names(self._history, self._circuit_builder.prefix_key)[named:MAX_PREFIX_BLOCKS])


def _lost(loss: HopLost, left: str, span: Span | None, error: SwarmError) -> PeerLost:
    return PeerLost(
        left,
        span,
        f"{loss.detail}; no circuit took its place within {core.RECOVERY_S:g} s: {error}",
    )
