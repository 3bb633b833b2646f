"""Planned moves of one session: who of its circuit is to be left, and the circuit that takes its place without a pause.

A hop that leaves says so while it still serves. Its standby takes its place, or one that is chosen now and has first
to have the hop's copy; meanwhile tokens go on coming. A move that cannot be is not made: the circuit goes on as it is
until its hop is gone, which then costs what a loss costs.
"""

import asyncio
import logging
from dataclasses import dataclass, field, replace

from molink.client.circuit import circuit_core as core
from molink.client.circuit.circuit_builder import ActiveCircuit, CircuitBuilder
from molink.client.circuit.reserving import HopRefused, describe, release
from molink.client.circuit.session_request import Speculation, needs_history
from molink.client.circuit.standbys import Standbys
from molink.client.circuit.successor import MovingSession, Successor
from molink.client.circuit.token_rules import HeadAtFault, TokenStream
from molink.client.epochs.circuit_events import AVOID_S
from molink.client.epochs.kept_leases import PlannedRoute
from molink.client.epochs.moves_core import LOOK_AGAIN_S, MovesCore
from molink.client.epochs.session_log import HopLost
from molink.client.epochs.session_tokens import SessionTokens
from molink.client.epochs.successor_core import is_worth_computing
from molink.dht.records.records import PeerView
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.routing.routes.copy_forms import CopyForm
from molink.shards.spec import MOST_GUESSED_TOKENS

MOST_EARLY = 8 * (1 + MOST_GUESSED_TOKENS)
"""Tokens of an epoch, of eight steps at most, that wait for the last one of the epoch before, which comes over another
link."""
LEAVES_WITH = ("lost", "paused")
"""What becomes of a session at a hop that goes: its link closes, or it is handed back."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TokenArrival:
    """A token of the present circuit, and when it came in."""

    token: pb.Token
    at_s: float


@dataclass(slots=True, eq=False)
class RunningCircuit:
    """The circuit that a session is on."""

    circuit: ActiveCircuit
    intake: TokenStream | None
    """None once the circuit is lost: nothing that comes behind that counts."""
    before: ActiveCircuit | None = None
    """The circuit that it goes over from, until the first token has come over this one."""
    early: list[TokenArrival] = field(default_factory=list)

    @property
    def circuits(self) -> tuple[ActiveCircuit, ...]:
        """Those that the session depends on, in the order of their epochs."""
        return (self.circuit,) if self.before is None else (self.before, self.circuit)

    @property
    def has_ended(self) -> bool:
        """Whether the last token of the generation has come, though it may wait to be taken."""
        return self.intake is not None and self.intake.ended

    def is_lost(self) -> bool:
        """Whether the circuit is: another one is formed, or will be."""
        return self.intake is None

    def left_for(self, peer_id: str) -> str:
        """Who is left for that peer, and has the session's KV cache as long as no token has come over this circuit;
        empty: nobody, or nobody any more."""
        if self.before is None:
            return ""
        pairs = zip(self.before.links, self.circuit.links, strict=True)
        left = (old for old, new in pairs if new.peer_id == peer_id != old.peer_id)
        return next((old.peer_id for old in left if old.closed_because is None), "")

    def back_to(self, peer_id: str) -> PlannedRoute:
        """This circuit, with that peer of the one before as the hop that it was."""
        circuit, before = self.circuit, self.before or self.circuit
        pairs = zip(before.route.hops, circuit.route.hops, strict=True)
        hops = tuple(old if old.peer_id == peer_id else new for old, new in pairs)
        return PlannedRoute(replace(circuit.route, hops=hops), {**before.peers, **circuit.peers})

    def has(self, peer_id: str) -> bool:
        """Whether that peer is a hop that the session depends on."""
        return any(one.has(peer_id) for one in self.circuits)

    def is_at(self, epoch: int) -> bool:
        """Whether the session is in that epoch, or about to leave it."""
        return any(one.descriptor.epoch == epoch for one in self.circuits)

    def sends(self, sender: str, epoch: int) -> bool:
        """Whether that peer is the head in that epoch."""
        return any(one.descriptor.epoch == epoch and one.head.peer_id == sender for one in self.circuits)

    def lost_at(self, loss: HopLost, now_s: float) -> HopLost:
        """The loss as it is heard of then."""
        links = self.circuit.links
        unheard_s = next((link.unheard_s for link in links if link.peer_id == loss.peer_id), 0.0)
        return replace(loss, at_s=now_s, unheard_s=unheard_s)

    def refuses_grammar(self, loss: HopLost) -> bool:
        """Whether it is over because the tail cannot draw by the grammar that was asked for: nor could another."""
        asked, tail = self.circuit.descriptor.sampling.HasField("grammar"), self.circuit.links[-1]
        return asked and loss.code == "grammar" and (loss.peer_id, loss.accuser) == (tail.peer_id, "")

    def cannot_go_over(self, loss: HopLost) -> bool:
        """Whether it is over because the move that is under way cannot be made, which is nobody's fault. Without one
        these are words like any other of a hop that fails."""
        return self.before is not None and loss.code in ("move", "copy")

    def in_order(self, arrival: TokenArrival, intake: TokenStream) -> list[TokenArrival]:
        """The tokens that are next now that this one has come.

        Raises:
            HeadAtFault: it is no token of this session.
        """
        token, before = arrival.token, self.before
        if before is not None and token.epoch != before.descriptor.epoch and token.position > intake.expected:
            if len(self.early) >= MOST_EARLY:
                raise HeadAtFault("it sent tokens before the last one of the epoch before")
            self.early.append(arrival)
            return []
        taken = [arrival] if intake.takes(token) else []
        while self.early and self.early[0].token.position == intake.expected:
            early = self.early.pop(0)
            taken += [early] if intake.takes(early.token) else []
        return taken


@dataclass(frozen=True, slots=True)
class WantedMove:
    """A circuit that a session is to go over to."""

    planned: PlannedRoute
    deadline_s: float
    """By the loop's clock."""
    left: ActiveCircuit
    """The one that it is on until then."""


class SessionMoves:
    """Owner of the move of one session that is under way; what it knows of hops that it is to leave is its core's."""

    def __init__(self, circuit_builder: CircuitBuilder, standbys: Standbys, session: MovingSession) -> None:
        self._circuit_builder = circuit_builder
        self._standbys = standbys
        self._session = session
        self._core: MovesCore[tuple[PeerView, CopyForm]] = MovesCore()
        self._elsewhere: PlannedRoute | None = None
        """The better circuit of other spans, if the core knows of one."""
        self._successor: Successor | None = None
        self._moving: asyncio.Task[None] | None = None

    def begin(self, run: RunningCircuit | None) -> None:
        """Has a move made, if one is wanted, and none is under way."""
        if run is None or run.before is not None or not self.wants(run.circuit):
            return
        if self._moving is None or self._moving.done():
            self._moving = asyncio.create_task(self._move(run), name="move a session")

    def stop(self) -> None:
        """Ends the move that is under way."""
        self._core.elsewhere = False
        if self._moving is not None:
            self._moving.cancel()
            self._moving = None

    def note_leaving(self, peer_id: str, within_s: float) -> None:
        """That peer is about to leave."""
        self._core.note_leaving(peer_id, asyncio.get_running_loop().time(), within_s)
        if self._successor is not None:
            self._successor.end("a hop is about to leave")

    def note_better_at_standby(self, peer_id: str, within_s: float) -> None:
        """That peer says that its standby, which has a copy, has more time for the session. No standby, no move."""
        if self._core.is_idle and self._standbys.substitute(peer_id):
            self._core.note_better({peer_id: None}, asyncio.get_running_loop().time(), within_s)

    def excuses(self, loss: HopLost, run: RunningCircuit) -> bool:
        """Whether that is a hop that goes as it has said, or a move that cannot be made, and no failure. Who leaves is
        left out of circuits all the same, if others can take its place, and excused once: who says so and stays may
        only want to fail, or to hold up moves, unblamed."""
        if run.before is not None and run.cannot_go_over(loss):
            for peer_id in set(self._core.leaving).intersection(run.before.route.peer_ids):
                if not self._excuse(peer_id, run.before):
                    self._circuit_builder.report_failure(run.before, peer_id)
            return True
        may_go = loss.code in LEAVES_WITH and self._core.may_go(loss.peer_id, loss.at_s)
        return may_go and self._excuse(loss.peer_id, run.circuit)

    def _excuse(self, peer_id: str, circuit: ActiveCircuit) -> bool:
        now_s = asyncio.get_running_loop().time()
        return self._circuit_builder.quarantine.excuse_leaving(circuit.peers[peer_id].facts, now_s, AVOID_S)

    async def look_for_better(self, circuit: ActiveCircuit) -> None:
        """Notes which peers of that circuit are to be left for others with which it would really be better, or which
        other circuit is to be gone over to, if the tokens that are still to come are worth it.

        What strangers announce is planned with. Whoever renews leases awaits this: no error of it may end that, for
        then every hop would seem to fail as soon as its lease is over.
        """
        try:
            await self._look_for_better(circuit)
        except Exception:  # noqa: BLE001 - the boundary of a stream: it goes on as it is
            _log.exception("no better circuit could be looked for")

    async def _look_for_better(self, circuit: ActiveCircuit) -> None:
        template, lengths = self._session.template, self._session.lengths
        if not lengths.is_worth_moving or not self._core.is_idle:
            return
        found = await self._circuit_builder.standby_choice.better(circuit.route, circuit.descriptor)
        if found is None:
            return
        if found.replaced:
            self._core.note_better(found.replaced, asyncio.get_running_loop().time())
            return
        # what a tail of another session knows of the tokens before would have to be told it beside the running one's
        if not self._core.may_compute_anew or needs_history(template.sampling):
            return
        measured_s, other = self._session.circuits.measured_s, found.planned
        if is_worth_computing(lengths, circuit.route, measured_s, other.route):
            self._core.elsewhere, self._elsewhere = True, other

    def wants(self, circuit: ActiveCircuit) -> bool:
        """Whether a hop of that circuit is to be left."""
        return self._core.wants(circuit.route.peer_ids, asyncio.get_running_loop().time())

    def record_failed(self, refused: HopRefused) -> None:
        """The circuit could not be prepared: whoever refused to go on upon its copy is not asked again. A standby whose
        copy was not whole in time keeps it, but for a hop that leaves: that one has no other time."""
        is_kept = refused.code == "slow" and not self._core.leaving
        if not (self._core.elsewhere or is_kept):
            self._standbys.lose(refused.peer_id)
        self._core.record_failed()

    def record_moved(self) -> None:
        """The session has gone over: who was left for a better one may keep the copy now."""
        self._core.record_moved()
        self._standbys.seek_for(dict.fromkeys(self._core.leaving))

    async def _move(self, run: RunningCircuit) -> None:
        """Has the next circuit prepared while this one goes on, and goes over to it."""
        session, clock = self._session, asyncio.get_running_loop().time
        while not run.is_lost() and self.wants(run.circuit):
            try:
                if self._core.elsewhere and self._elsewhere is not None:
                    await self._compute_elsewhere(self._elsewhere)
                    return
                wanted = await self._next_circuit(run.circuit)
                if wanted is None:
                    return
                session.circuits.handle(core.MoveWanted(wanted.planned.route.peer_ids), clock())
                circuit = await self._prepare(wanted)
            except HopRefused as refused:
                if run.is_lost():  # by the same: a task group tells that, and not that it ends
                    return
                session.report(f"a move is not made: {refused}")
                if session.circuits.is_preparing:
                    session.circuits.handle(core.NotPrepared(), clock())
                self.record_failed(refused)
            else:
                session.go_over(circuit)
                return

    async def _compute_elsewhere(self, planned: PlannedRoute) -> None:
        """The session goes over to a circuit of other spans, or HopRefused is raised."""
        self._successor = Successor(self._circuit_builder, self._session, planned)
        try:
            await self._successor.come_level()
        finally:
            self._successor = None

    async def _next_circuit(self, circuit: ActiveCircuit) -> WantedMove | None:
        """The circuit to go over to from that one, once there are standbys for the hops that are to be left; None:
        there will be none in time."""
        clock, moves = asyncio.get_running_loop().time, self._core
        left = moves.to_leave(circuit.route.peer_ids)
        deadline_s = moves.deadline_s(left)
        self._standbys.seek_for({**dict.fromkeys(moves.leaving), **left})
        while not all(map(self._standbys.substitute, left)) and clock() < deadline_s:
            await self._standbys.wait_changed(min(LOOK_AGAIN_S, deadline_s - clock()))
        if moves.lacks_better([peer_id for peer_id in left if self._standbys.substitute(peer_id)]):
            moves.drop_better()
            left = moves.to_leave(circuit.route.peer_ids)
        planned = self._standbys.circuit_without(circuit, left)
        if planned is None or clock() >= deadline_s:
            moves.drop_better()
            return None
        await self._standbys.hand_over(left)
        return WantedMove(planned, deadline_s, circuit)

    async def _prepare(self, wanted: WantedMove) -> ActiveCircuit:
        """The circuit, prepared in the epoch that was given to it.

        Raises:
            HopRefused: a hop could not begin it, or can no longer now that all others could.
        """
        session, upcoming = self._session, pb.SessionDescriptor()
        upcoming.CopyFrom(session.template)
        upcoming.prefix_blocks = b""  # what is computed from there on is upon what another peer has sent
        planned, builder, epoch = wanted.planned, self._circuit_builder, session.circuits.last_epoch
        descriptor = describe(upcoming, planned.route, planned.peers, builder.spec, epoch)
        circuit = await builder.prepare(
            planned, descriptor, lambda: len(session.tokens.history), wanted.deadline_s
        )
        for old, new in zip(wanted.left.route.hops, circuit.route.hops, strict=True):
            if new.peer_id not in (old.peer_id, self._standbys.substitute(old.peer_id)):
                builder.end_session(circuit.descriptor)
                for link in circuit.links:
                    release(link, circuit.descriptor)
                raise HopRefused(new.peer_id, "lost", "it was ready, and keeps its copy no longer")
        return circuit


def tell_head(
    circuit: ActiveCircuit, left: ActiveCircuit, tokens: SessionTokens, speculation: Speculation
) -> None:
    """Tells the head of the circuit that a session has gone over to what it may guess from, if it is another than that
    of the one it has left. A successor's has heard it with the start. Who announces no drafts guesses nothing, and may
    not know what to do with it."""
    head = circuit.head
    if circuit.descriptor.session != left.descriptor.session:
        return
    if speculation.wanted and head.peer_id != left.head.peer_id and circuit.peers[head.peer_id].facts.drafts:
        tokens.tell_head(head, circuit.descriptor.epoch, speculation.prediction, speculation.scope)
