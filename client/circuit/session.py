"""One generation as the client owns it: its epochs, its tokens, and what happens when a peer is lost.

A session lives on one circuit at a time. When a hop fails, the session goes on in a new epoch on another circuit, which
steps of the history what not all of its hops hold; tokens are numbered by their position, so none repeats and none is
skipped. A hop that leaves says so before, and the session goes over to a circuit that was prepared meanwhile: with one
token the running epoch ends, and the next one begins behind it.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from dataclasses import replace

from molink.client.circuit import circuit_core as core
from molink.client.circuit.circuit_builder import ActiveCircuit, CircuitBuilder
from molink.client.circuit.moves import RunningCircuit, SessionMoves, TokenArrival, tell_head
from molink.client.circuit.reserving import Report, release
from molink.client.circuit.scouting import ask_signs_of_life
from molink.client.circuit.session_request import (
    SessionRequest,
    describe_session,
    further_blocks,
    needs_history,
    start_of,
)
from molink.client.circuit.standbys import Standbys
from molink.client.circuit.successor import MovingSession
from molink.client.circuit.token_rules import HeadAtFault, TokenRules, TokenStream
from molink.client.epochs import patience
from molink.client.epochs.kept_leases import KeptLeases, PlannedRoute
from molink.client.epochs.session_log import HopLost, HopRecovery, SessionLog
from molink.client.epochs.session_tokens import SessionTokens
from molink.client.errors import InvalidRequest, NoCircuit, PeerLost, SwarmUnavailable, as_said
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.routing.routes.planner import Route

RENEW_EVERY_S = 8.0
SPARE_EVENTS = 8
"""Room for losses in the queue, beside tokens: each circuit has at most one."""


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
        self._template = describe_session(circuit_builder.spec, asked, circuit_builder.prefix_key)
        self._speculation = asked.speculation
        tells_tails = needs_history(self._template.sampling)
        self._tokens = SessionTokens(self._template, asked.prompt, tells_tails=tells_tails)
        self._events: asyncio.Queue[TokenArrival | HopLost] = asyncio.Queue(
            self._template.capacity_tokens - len(asked.prompt) + SPARE_EVENTS
        )
        """Tokens that `TokenStream` lets in, so never more than were asked for, and the loss of the circuit."""
        self._run: RunningCircuit | None = None
        self.standbys = Standbys(circuit_builder.standby_choice, wanted=asked.partners)
        self._circuits = core.CircuitCore()
        self._stands = asked.stands
        owned = self._template, asked.speculation, self._tokens, self._circuits
        moving = MovingSession(*owned, self._go_over, self._take_over, report)
        self._moves = SessionMoves(circuit_builder, self.standbys, moving)
        self._kept = KeptLeases[pb.SessionDescriptor](_again=asked.begins_on)

    @property
    def prompt(self) -> Sequence[int]:
        """The token ids that were asked to go on from."""
        return self._tokens.history[: self._template.prompt_tokens]

    async def tokens(self, timeout_s: float) -> AsyncGenerator[pb.Token, None]:
        """Yields every new token in order; ends after the one whose `finish` is set.

        Raises:
            NoCircuit, SwarmUnavailable: no circuit formed within `timeout_s`.
            PeerLost: a peer was lost in mid-generation and no circuit formed again.
        """
        clock = asyncio.get_running_loop().time
        connection, queue = self._circuit_builder.connection, self._circuit_builder.queue
        connection.register(place := self._template.session, self)
        renewing = asyncio.create_task(self._keep_leases(), name="renew leases")
        try:
            await queue.enter(place, self._speculation.scope, timeout_s, at_once=self._kept.has_next)
            await self._begin(self._circuits.handle(core.Begin(clock() + timeout_s), clock())[-1])
            while True:
                event = await self._next_event()
                if isinstance(event, HopLost):
                    if self._run is not None and self._run.refuses_grammar(event):
                        raise InvalidRequest(event.detail, "grammar")
                    await self._recover(event)
                    continue
                token = event.token
                self._tokens.history.append(token.token_id)
                self.log.record_token(event.at_s, self._circuits.first_token_since_s)
                self.log.trips.record_token(token.epoch, token.step, token.guessed, token.guess_sources)
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
            self._moves.stop()
            connection.unregister(self._template.session)
            self._circuits.handle(core.End(), clock())
            self._circuit_builder.route_selector.record_trips(self._template, self.log, self._speculation)
            self._release()
            self.standbys.release()
            queue.leave(place)

    def on_tokens(self, sender: str, token: pb.Token) -> None:
        """Tokens are the head's to send: what any other peer says that it drew is not the circuit's.

        A head that sends what cannot be a token of this session is lost, like one that is gone.
        """
        run = self._run
        if run is None or run.intake is None or not run.sends(sender, token.epoch):
            return
        try:
            taken = run.in_order(TokenArrival(token, asyncio.get_running_loop().time()), run.intake)
        except HeadAtFault as fault:
            self._lose(HopLost(token.epoch, sender, "protocol", str(fault)))
            return
        for one in taken:
            self._events.put_nowait(one)
            self._tokens.arrive(one.token, run.circuit.links[-1], run.circuit.descriptor.epoch)
        if taken and run.before is not None and taken[-1].token.epoch == self._template.epoch:
            self._leave_circuit(run, run.before)

    def on_failed(self, sender: str, failed: pb.Failed) -> None:
        """A hop may blame hops of its circuit alone. A standby speaks of its copy until its session goes over to it."""
        run = self._run
        self.standbys.lose(sender)
        if run is None or not run.has(sender):
            return
        at_fault = failed.peer_id if run.has(failed.peer_id) else sender
        accuser = "" if at_fault == sender else sender
        code = as_said(failed.code) or "lost"
        self._lose(HopLost(failed.epoch, at_fault, code, as_said(failed.detail) or code, accuser))

    def on_link_closed(self, peer_id: str, reason: str) -> None:
        self.standbys.lose(peer_id)
        if self._run is not None and self._run.has(peer_id):
            self._lose(HopLost(self._template.epoch, peer_id, "lost", as_said(reason)))

    def on_leaving(self, sender: str, leaving: pb.Leaving) -> None:
        """A hop says of itself alone that it leaves, or that its standby has more time; of its session nothing is lost
        by that."""
        if leaving.to_standby:
            self._moves.note_better_at_standby(sender, leaving.within_ms / 1000)
            self._moves.begin(self._run)
            return
        self._report(f"peer {sender[-8:]} is about to leave ({as_said(leaving.reason)})")
        self._moves.note_leaving(sender, leaving.within_ms / 1000)
        self._moves.begin(self._run)

    def _lose(self, loss: HopLost) -> None:
        """The first loss of a circuit ends it; what is said of it later is of no use any more."""
        run = self._run
        if run is not None and run.intake is not None and run.is_at(loss.epoch):
            run.intake = None
            self._events.put_nowait(run.lost_at(loss, asyncio.get_running_loop().time()))

    async def _begin(self, asked: core.Effect, seized: PlannedRoute | None = None) -> None:
        """A circuit for a new epoch, started on the history so far."""
        self._run = None
        circuit = await self._circuit_builder.build(
            self._circuits, asked, self._template, len(self._tokens.history), self._kept, self._report
        )
        self._kept.keep(circuit.descriptor)  # who is cancelled while others are waited for gives it back
        await self._stands(PlannedRoute(circuit.route, circuit.peers))
        self.log.record_recovery(len(self._tokens.history) - circuit.position, circuit.route, seized)
        self._release_kept(circuit.route.peer_ids)
        rules = TokenRules.of(self._template, self._circuit_builder.spec)
        self._run = RunningCircuit(circuit, TokenStream(rules, len(self._tokens.history), len(circuit.links)))
        self.log.record_circuit(circuit.route, circuit.peers, circuit.position, self._circuits.runs)
        start = start_of(self._template, self._speculation, self._tokens.history, circuit.position)
        for link in circuit.links:
            if link.closed_because is not None:
                self._lose(HopLost(self._template.epoch, link.peer_id, "lost", as_said(link.closed_because)))
                return
        if not self._tokens.begin(circuit.links, self._template.epoch):
            at = circuit.links[-1].peer_id
            self._lose(HopLost(self._template.epoch, at, "lost", "the tail takes no more"))
            return
        if not circuit.head.post(start):
            self._lose(HopLost(self._template.epoch, circuit.head.peer_id, "lost", "the head takes no more"))
            return
        self.standbys.begin(circuit)
        self._moves.begin(self._run)

    async def _next_event(self) -> TokenArrival | HopLost:
        """The next token or loss. Hops are asked for a sign of life where it is overdue; a circuit that yields nothing
        for longer than it could take is lost."""
        clock = asyncio.get_running_loop().time
        queued_times = self._circuit_builder.route_selector.queued_times
        since_s, asked, times = clock(), 0, 1
        while True:
            patience_s, ask_s = self._patience_s(asked)
            patience_s *= times
            try:
                async with asyncio.timeout_at(since_s + min(patience_s, ask_s)):
                    return await self._events.get()
            except TimeoutError:
                run = self._run
            asked += 1
            if run is None:
                continue
            circuit = run.circuit
            is_over = clock() - since_s >= patience_s
            signs = await ask_signs_of_life(circuit.links, self._template.session, circuit.descriptor.epoch)
            token_s = self._circuits.token_s(*self._predicted_s(circuit.route))
            fault = patience.hop_at_fault(signs, token_s, is_over=is_over)
            # the only circuit that there is gets the time that it may take
            can_go = self._circuit_builder.can_do_without
            is_left = fault is not None and (is_over or await can_go(fault.peer_id, self._template))
            if not self._events.empty():
                continue
            if fault is not None and is_left:
                self._lose(HopLost(self._template.epoch, fault.peer_id, "stalled", fault.fault))
            elif is_over and run.before is not None:
                self._lose(HopLost(self._template.epoch, "", "move", "the next epoch has not begun"))
            elif is_over and times == 1 and (more := queued_times(circuit.route.peer_ids, signs)) > 1:
                times = more
            elif is_over:
                self._lose(HopLost(self._template.epoch, "", "stalled", "the circuit stood still"))

    def _patience_s(self, asked: int) -> tuple[float, float]:
        """Returns how long the next event may take, and when hops are asked that have been so often before."""
        route = self.log.route
        if route is None:
            return patience.LEAST_FIRST_S, patience.LEAST_FIRST_S
        first_s, next_s = self._predicted_s(route)
        goes_over = self._run is not None and self._run.before is not None
        patience_s = self._circuits.patience_s(first_s, next_s, goes_over=goes_over)
        return patience_s, self._circuits.ask_after_s(next_s, asked)

    def _predicted_s(self, route: Route) -> tuple[float, float]:
        """Of the first token, and of each further one. What was generated before a loss is part of the prompt then."""
        parts = len(self._tokens.history) / max(1, self._template.prompt_tokens)
        return route.ttft_ms / 1000 * parts, route.trip_ms / 1000

    async def _recover(self, loss: HopLost) -> None:
        """Goes on elsewhere, without the peer that failed.

        Raises:
            PeerLost: not in the time that `CircuitCore` gives it, or circuit after circuit yields nothing.
        """
        run, clock = self._run, asyncio.get_running_loop().time
        if run is None:
            return
        self._moves.stop()
        circuit = run.circuit
        is_planned = self._moves.excuses(loss, run)
        left = loss.peer_id
        if not is_planned:
            left = self._circuit_builder.report_failure(circuit, loss.peer_id, loss.accuser)
            self.log.losses.append(replace(loss, peer_id=loss.peer_id or left))
        self._report(f"peer {left[-8:]} is left out ({loss.detail}); looking for another circuit")
        span = next((hop.span for hop in circuit.route.hops if hop.peer_id == left), None)
        waited_s = clock() - self._circuits.step_since_s
        first_s, _ = self._predicted_s(circuit.route)
        stays = run.before is not None and (loss.code == "move" or not circuit.has(left))
        standby = ""
        if loss.peer_id and not stays:
            standby = run.left_for(left) or self.standbys.substitute(left)
        self.standbys.pause()
        may_return = loss.code == "lost" and not (is_planned or standby or stays)
        if may_return and self._circuits.first_token_since_s is None:
            self._kept.try_again(PlannedRoute(circuit.route, circuit.peers), first_s)
        stood_still = not loss.peer_id and not is_planned
        lost = core.Lost(loss.unheard_s, first_s, stood_still, left, standby, stays)
        *_, asked = self._circuits.handle(lost, clock())
        self.log.recovering = HopRecovery(left, span, lost_s := clock())
        self._run = None
        for one in run.circuits:
            self._kept.keep(one.descriptor)
            self._circuit_builder.end_session(one.descriptor)
        seized = self._seize(asked, run) if isinstance(asked, core.Seize) else None
        if seized or self.standbys.were_asked:
            # hops may compute upon a copy from here on, which another peer has sent: later prompts find none of it
            self.log.is_nameless, self._template.prefix_blocks = True, b""
        if isinstance(asked, core.GiveUp):
            raise PeerLost(
                left, span, f"{loss.detail}; no token within {waited_s:.0f} s on {self.log.epochs} circuits"
            )
        try:
            await self._begin(asked, seized)
        except (NoCircuit, SwarmUnavailable) as error:
            within_s = max(core.RECOVERY_S, round(clock() - lost_s))
            raise loss.not_replaced(left, span, within_s, error) from error

    def _seize(self, asked: core.Seize, run: RunningCircuit) -> PlannedRoute:
        """The circuit with the standby in the lost hop's place, or the hop that was to be left for the lost one."""
        circuit = run.circuit
        if asked.standby and run.left_for(asked.peer_id) == asked.standby:
            self._report(f"peer {asked.standby[-8:]} is not left yet")
            seized = run.back_to(asked.standby)
        else:
            if asked.standby:
                self._report(f"peer {asked.standby[-8:]} takes its place with its copy of the KV cache")
            same = PlannedRoute(circuit.route, circuit.peers)
            seized = self.standbys.circuit_without(circuit, (asked.peer_id,)) or same
        self._kept.seize(seized, self.standbys.circuit_without)
        return seized

    def _go_over(self, circuit: ActiveCircuit) -> None:
        """From the next token on the session is on that circuit."""
        run = self._run
        if run is None:
            return
        before = run.circuit
        move = pb.Move(
            session=self._template.session,
            epoch=before.descriptor.epoch,
            next_epoch=circuit.descriptor.epoch,
            peer_id=circuit.head.peer_id,
        )
        self._circuits.handle(core.Prepared(), asyncio.get_running_loop().time())
        self._template.epoch = circuit.descriptor.epoch
        self.log.is_nameless, self._template.prefix_blocks = True, b""
        self.standbys.pause()
        run.circuit, run.before = circuit, before
        self._tokens.go_over(circuit.links[-1], self._template.epoch)
        if not before.head.post(move):
            self._lose(HopLost(self._template.epoch, before.head.peer_id, "lost", "the head takes no more"))

    def _take_over(self, template: pb.SessionDescriptor, circuit: ActiveCircuit, token: pb.Token) -> bool:
        """A circuit of other spans has come as far: from now on the session is the one that was begun there."""
        run, connection = self._run, self._circuit_builder.connection
        if run is None or run.intake is None or run.intake.ended:
            return False
        intake = TokenStream(run.intake.rules, run.intake.expected, len(circuit.links))
        if intake.refuses(token):
            return False
        self._circuits.handle(core.Prepared(), asyncio.get_running_loop().time())
        self.standbys.release()  # copies are of the session that was
        connection.unregister(self._template.session)
        self._template.CopyFrom(template)
        connection.register(self._template.session, self)
        run.circuit, run.before, run.intake = circuit, run.circuit, intake
        self.on_tokens(circuit.head.peer_id, token)
        return True

    def _leave_circuit(self, run: RunningCircuit, before: ActiveCircuit) -> None:
        """The first token has come over the circuit that the session has gone over to."""
        run.before, circuit = None, run.circuit
        self._moves.record_moved()
        self.log.record_move(circuit.route, circuit.peers)
        tell_head(circuit, before, self._tokens, self._speculation)
        self._kept.keep(before.descriptor)
        self._circuit_builder.end_session(before.descriptor)
        is_same = before.descriptor.session == circuit.descriptor.session
        self._release_kept(circuit.route.peer_ids if is_same else ())
        self.standbys.begin(circuit)
        self._moves.begin(self._run)

    async def _keep_leases(self) -> None:
        """Renews the leases however fast tokens come and however slowly they are taken, until the last has come."""
        while self._run is None or not self._run.has_ended:
            await asyncio.sleep(RENEW_EVERY_S)
            self.standbys.renew(len(self._tokens.history))
            asked = pb.AwaitReady(session=self._template.session, epoch=self._template.epoch, wait_ms=0)
            run = self._run
            for link in () if run is None else run.circuit.links:
                link.post(pb.Request(id=0, await_ready=asked))
            if run is not None and run.before is None:
                await self._moves.look_for_better(run.circuit)
                self._moves.begin(self._run)

    def _release(self) -> None:
        """Gives all leases back."""
        run, self._run = self._run, None
        for circuit in () if run is None else run.circuits:
            self._kept.keep(circuit.descriptor)
        self._release_kept(())

    def _release_kept(self, peer_ids: Collection[str]) -> None:
        """Gives leases of circuits back that the session has left, but for those that have gone on at these peers."""
        key = self._circuit_builder.prefix_key
        is_nameless = self.log.is_nameless or self.log.recovering is not None
        further = b"" if is_nameless else further_blocks(self._tokens.history, self._template, key)
        # what hops hold of the latest token, or beyond it, may be something else that was tried and refused
        valid_tokens = len(self._tokens.history) - 1
        for peer_id, descriptor in self._kept.take_all_but(peer_ids):
            self._circuit_builder.end_session(descriptor)
            link = self._circuit_builder.connection.links.find(peer_id)
            if link is not None:
                release(link, descriptor, further, valid_tokens)
