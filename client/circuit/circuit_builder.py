"""Circuit builder: drives `CircuitCore` with asyncio: plan, reserve every hop or none, wait until each is ready."""

import asyncio
import random
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from molink.client.circuit import circuit_core as core
from molink.client.circuit.blame import BlameLedger, BlameVerdict, second_choices
from molink.client.circuit.connection import SwarmConnection
from molink.client.circuit.quarantine import Quarantine
from molink.client.circuit.reserving import (
    GrantedLeases,
    HistoryTokens,
    HopRefused,
    Report,
    ReservationRequest,
    answer_patience_s,
    describe,
    prepare_all,
    release,
    report_codec,
    require_sendable,
    reserve_all,
    wait_ready,
)
from molink.client.circuit.route_selector import RouteSelector, StandbyChoice
from molink.client.epochs.circuit_events import AVOID_S
from molink.client.epochs.kept_leases import KeptLeases, PlannedRoute
from molink.client.epochs.queueing import GenerationQueue
from molink.client.errors import (
    InvalidRequest,
    NoCircuit,
    SwarmError,
    SwarmUnavailable,
    in_short,
    nobody_serves,
    out_of_room,
)
from molink.dht.records.records import PeerFacts, PeerView
from molink.peer.wire.link.link import Link
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.routing import NoCircuit as NoCircuitFound
from molink.routing import Route
from molink.shards.spec import ModelSpec

NEAR = 1.25
"""A circuit of peers that have answered before is preferred if it costs at most so many times as much."""


@dataclass(frozen=True, slots=True, eq=False)
class ActiveCircuit:
    """Active circuit: every hop has granted its lease and is ready."""

    route: Route
    descriptor: pb.SessionDescriptor
    links: tuple[Link, ...]
    peers: Mapping[str, PeerView]
    position: int
    """From which on the sequence is stepped: every hop's KV cache holds what comes before."""

    @property
    def head(self) -> Link:
        return self.links[0]

    def has(self, peer_id: str) -> bool:
        """Whether that peer is a hop of it."""
        return any(link.peer_id == peer_id for link in self.links)


class CircuitBuilder:
    """Circuit builder for one model over one connection; remembers who failed."""

    def __init__(self, connection: SwarmConnection, spec: ModelSpec, prefix_key: bytes | None = None) -> None:
        """`prefix_key`: 32 bytes; None: new ones, so that prompts share nothing with those of before."""
        self.connection = connection
        self.spec = spec
        self.quarantine = Quarantine()
        self.queue = GenerationQueue(on_room=self.quarantine.release_full_peers)
        self._blame = BlameLedger()
        self.route_selector = RouteSelector(connection, spec)
        self.standby_choice = StandbyChoice(connection, spec, self.quarantine, self.route_selector)
        self.prefix_key = prefix_key or secrets.token_bytes(32)
        """As `SwarmConnection.prefix_key`."""

    def report_failure(self, circuit: ActiveCircuit, at_fault: str, accuser: str = "") -> str:
        """Records the failure of a hop, as the client saw itself or as `accuser`, another hop, says. Without
        `at_fault` the circuit stood still, and all of its hops answered.

        Returns the peer that is left out of circuits from now on.
        """
        now_s = asyncio.get_running_loop().time()
        if not at_fault:
            avoided, _ = self.quarantine.excluded_peers(tuple(circuit.peers.values()), now_s)
            verdict = self._blame.stand_still([link.peer_id for link in circuit.links], now_s, avoided)
            if (
                verdict.leave != circuit.head.peer_id
            ):  # which may have no other in its place, then the head goes
                self.avoid(circuit.peers[circuit.head.peer_id].facts, certain=False)
        elif accuser:
            verdict = self._blame.accuse(accuser, at_fault, now_s, self._is_gone)
        else:
            self.route_selector.record_loss(at_fault)
            self.connection.probes.record_loss(at_fault)
            self.avoid(circuit.peers[at_fault].facts)
            return at_fault
        self._follow(verdict, circuit.peers)
        return verdict.leave

    def _follow(self, verdict: BlameVerdict, peers: Mapping[str, PeerView], reason: str = "") -> None:
        """Leaves out whom nobody could convict, if others can take its place, and takes back whom it blamed alone."""
        for peer_id in verdict.acquitted:
            self.quarantine.release_peer(peer_id)
        certain = self._is_gone(verdict.leave)
        if certain:
            self.route_selector.record_loss(verdict.leave)
        self.avoid(peers[verdict.leave].facts, reason=reason, certain=certain)

    def end_session(self, descriptor: pb.SessionDescriptor) -> None:
        """Records that a session has left its circuit, and has given its leases back."""
        self.route_selector.end_session(descriptor)

    def avoid(
        self, facts: PeerFacts, seconds: float = AVOID_S, reason: str = "", *, certain: bool = True
    ) -> None:
        """Leaves a peer out of circuits until it announces new facts, at most for `seconds`; if it is not `certain`
        that it failed, only while others can take its place."""
        now_s = asyncio.get_running_loop().time()
        self.quarantine.quarantine_peer(facts, now_s, seconds, reason, certain=certain)

    def _is_gone(self, peer_id: str) -> bool:
        """Whether the client itself has no link to that peer any more."""
        return self.connection.links.find(peer_id) is None

    async def prepare(
        self, planned: PlannedRoute, descriptor: pb.SessionDescriptor, tokens: HistoryTokens, until_s: float
    ) -> ActiveCircuit:
        """Has a session's next circuit prepared, while the present one goes on: it has so many `tokens` by then.

        Raises:
            HopRefused: a hop could not begin it, or not by `until_s` (the loop's clock). None of them is to.
        """
        asked = ReservationRequest(descriptor, planned.route, planned.peers, tokens())
        self.route_selector.begin_session(descriptor)
        try:
            links = await prepare_all(self.connection.links, asked, until_s, tokens)
        except BaseException as stopped:
            self.route_selector.end_session(descriptor)
            for hop in descriptor.hops:
                link = self.connection.links.find(hop.peer_id)
                if link is not None:
                    release(link, descriptor)
            if isinstance(stopped, ExceptionGroup):
                raise stopped.exceptions[0] from None
            raise
        return ActiveCircuit(planned.route, descriptor, links, planned.peers, position=0)

    async def build(
        self,
        circuit: core.CircuitCore,
        asked: core.Effect,
        template: pb.SessionDescriptor,
        history_tokens: int,
        kept: KeptLeases[pb.SessionDescriptor],
        report: Report,
    ) -> ActiveCircuit:
        """Forms a ready circuit for the session that `template` describes (its hops are filled in here), and that has
        so many tokens by now, as `circuit` goes on from what it has `asked` for. What is `kept` is not given back.

        Raises:
            InvalidRequest: a hop says that no peer could serve such a request.
            NoCircuit: until the deadline (the loop's clock) the peers alive did not cover the model.
            SwarmUnavailable: nobody is there, or all refused until then.
        """
        clock = asyncio.get_running_loop().time
        effect = asked
        planned, formed = kept.take_seized(), None
        problems: dict[core.Problem, SwarmError] = {}
        while True:
            match effect:
                case core.Plan(doubtful):
                    planned = kept.take_again() or await self._plan(template, problems, doubtful=doubtful)
                    event: core.Event = _answer(planned, problems, report)
                case core.Reserve(epoch) | core.Seize(epoch) if planned is not None:
                    route, peers = planned.route, planned.peers
                    descriptor = describe(template, route, peers, self.spec, epoch)
                    hops = ReservationRequest(descriptor, route, peers, history_tokens)
                    event, formed = await self._reserved(circuit, hops, kept, report, problems)
                case core.AwaitNews(wait_s, scout):
                    session = b"" if circuit.runs else template.session
                    if self.queue.is_put_back(session, event, problems, planned):
                        queued_s = await self.queue.wait_again(session, circuit.deadline_s - clock())
                    else:
                        queued_s = await self._wait(wait_s, scout=scout)
                    event = core.Waited(queued_s)
                case core.Start() if formed is not None:
                    return formed
                case core.GiveUp(cause):
                    raise problems[cause]
            *released, effect = circuit.handle(event, clock())
            if released:
                self._give_back(descriptor, kept)
            elif isinstance(effect, core.Seize):
                kept.keep(descriptor)
                self.route_selector.end_session(descriptor)
                planned = kept.take_seized()

    async def _reserved(
        self,
        circuit: core.CircuitCore,
        asked: ReservationRequest,
        kept: KeptLeases[pb.SessionDescriptor],
        report: Report,
        problems: dict[core.Problem, SwarmError],
    ) -> tuple[core.Event, ActiveCircuit | None]:
        """Reserves the hops and returns what they answer; an error that may follow is noted in `problems`."""
        require_sendable(asked.descriptor)
        leases: GrantedLeases = ()
        try:
            async with asyncio.timeout_at(circuit.deadline_s):
                leases = await self._lease(asked)
                return core.Ready(), await _settled(asked, leases, self.spec, circuit.deadline_s, report)
        except TimeoutError:
            names = ", ".join(asked.peers[hop.peer_id].facts.name for hop in asked.route.hops)
            late = SwarmUnavailable(f"the circuit over {names} was not ready in time", late=True)
            problems[core.Problem.NOT_READY] = late
            return core.Overdue(_draw(), bool(leases)), None
        except HopRefused as refused:
            report(str(refused))
            refusal = core.Refusal(refused.code, refused.retry_after_s)
            self._learn(refused, refusal, asked.peers)
            if refusal.code == "request":
                problems.setdefault(core.Problem.INVALID, InvalidRequest(f"peer {refused}"))
            else:
                problems[core.Problem.REFUSED] = SwarmUnavailable(
                    str(refused), busy=refusal.busy, retry_after_s=max(1.0, refusal.retry_after_s)
                )
            tried = PlannedRoute(asked.route, asked.peers)
            standby = kept.seize_without(tried, refused.peer_id) if refusal.is_gone else ""
            all_granted = bool(leases) and refusal.code != "lost"
            return core.ReservationRefused(refusal, _draw(), refused.peer_id, standby, all_granted), None
        except BaseException:
            circuit.handle(core.End(), asyncio.get_running_loop().time())
            self._give_back(asked.descriptor, kept)
            raise

    async def _wait(self, wait_s: float, *, scout: bool) -> float:
        """For news of the swarm, so long at most; nobody else is waited for (0)."""
        if scout:
            self._probe_others()
        if self.connection.probes.under_way:
            self.connection.refresh_now()
            await self.connection.probes.wait_any(wait_s)
        else:
            await self.connection.refresh_soon(wait_s)
        return 0.0

    def _probe_others(self) -> None:
        """Tries peers of the model that have not answered yet and are not left out, in any order."""
        views = self.connection.snapshot(self.spec.model_hash)
        avoided, _ = self.quarantine.excluded_peers(views, asyncio.get_running_loop().time())
        untried = [view for view in views if view.peer_id not in avoided]
        self.connection.probes.probe_peers(random.sample(untried, len(untried)), self._unreachable)

    def _unreachable(self, facts: PeerFacts) -> None:
        self.connection.probes.record_loss(facts.peer_id)
        self.avoid(facts, reason="it cannot be reached")

    async def _plan(
        self, template: pb.SessionDescriptor, problems: dict[core.Problem, SwarmError], *, doubtful: bool
    ) -> PlannedRoute | None:
        """Returns the route to try next; None, with the reason noted in `problems`, where there is none."""
        try:
            return await self._route(template, doubtful=doubtful)
        except (NoCircuit, SwarmUnavailable) as problem:
            problems[core.Problem.NO_ROUTE] = problem
            views = self.connection.snapshot(self.spec.model_hash)
            avoided, _ = self.quarantine.excluded_peers(views, asyncio.get_running_loop().time())
            full = avoided & self.quarantine.full_peers
            if full and await self._proven_route(views, template, avoided - full) is not None:
                # with those who are full there would be one: what lacks is room
                out = out_of_room(problems.get(core.Problem.REFUSED), self.quarantine.last_refusal(full))
                problems[core.Problem.NO_ROUTE] = out
            return None

    async def _route(self, template: pb.SessionDescriptor, *, doubtful: bool) -> PlannedRoute:
        """Where that is `doubtful`, a route of peers that have answered goes before all others."""
        views = self.connection.snapshot(self.spec.model_hash)
        if not views:
            raise SwarmUnavailable(nobody_serves(self.spec, self.connection.snapshot()))
        avoided, shunned = self.quarantine.excluded_peers(views, asyncio.get_running_loop().time())
        peers = {view.peer_id: view for view in views}
        proven = self.connection.probes.reachable(peers)
        unproven = frozenset(peers) - proven
        try:
            if doubtful:
                route = await self._proven_route(views, template, avoided | unproven)
                if route is not None:
                    return PlannedRoute(route, peers)
            route = await self.route_selector.choose(views, template, avoided)
            if doubtful or not proven or unproven.isdisjoint(route.peer_ids):
                return PlannedRoute(route, peers)
            known = await self._proven_route(views, template, avoided | unproven)
            near = known is not None and known.objective_ms <= NEAR * route.objective_ms
            return PlannedRoute(known if known is not None and near else route, peers)
        except NoCircuitFound as cause:
            first = cause
        for avoid in second_choices(avoided, shunned, self._blame, self.quarantine):
            try:
                return PlannedRoute(await self.route_selector.choose(views, template, avoid), peers)
            except NoCircuitFound:
                continue
        by, said = self.quarantine.last_refusal(avoided) or (None, None)
        left = len(views) - len(avoided)
        raise NoCircuit(self.spec.name, left, first, refused_by=by, refusal=said) from first

    async def can_do_without(self, peer_id: str, template: pb.SessionDescriptor) -> bool:
        """Whether a circuit could be planned without that peer, and those that are left out anyway."""
        views = self.connection.snapshot(self.spec.model_hash)
        avoided, _ = self.quarantine.excluded_peers(views, asyncio.get_running_loop().time())
        return await self._proven_route(views, template, avoided | {peer_id}) is not None

    async def _proven_route(
        self, views: Sequence[PeerView], template: pb.SessionDescriptor, avoid: frozenset[str]
    ) -> Route | None:
        try:
            return await self.route_selector.choose(views, template, avoid)
        except NoCircuitFound:
            return None

    async def settle(self, asked: ReservationRequest, deadline_s: float, report: Report) -> ActiveCircuit:
        """Reserves every hop of the route, and sees them ready, or raises HopRefused: any may have granted then."""
        return await _settled(asked, await self._lease(asked), self.spec, deadline_s, report)

    async def _lease(self, asked: ReservationRequest) -> GrantedLeases:
        self.route_selector.begin_session(asked.descriptor)
        leases = await reserve_all(self.connection.links, asked, answer_patience_s(asked.peers))
        for lease in leases:
            self.connection.probes.record_answer(lease.link.peer_id)
        self.queue.granted(asked.descriptor.session)
        return leases

    def _give_back(self, descriptor: pb.SessionDescriptor, kept: KeptLeases[pb.SessionDescriptor]) -> None:
        """Releases every hop that may have granted, those included whose answer did not come, but for those that have
        the session's KV cache."""
        self.route_selector.end_session(descriptor)
        for peer_id in kept.sort_out(descriptor):
            link = self.connection.links.find(peer_id)
            if link is not None:
                release(link, descriptor)

    def _learn(self, refused: HopRefused, refusal: core.Refusal, peers: Mapping[str, PeerView]) -> None:
        """Leaves out who said no: briefly if it only has no room now, longer if it cannot be reached."""
        view = peers.get(refused.peer_id)
        if view is None:
            return
        if refused.accuser:
            verdict = self._blame.accuse(
                refused.accuser, refused.peer_id, asyncio.get_running_loop().time(), self._is_gone
            )
            self._follow(verdict, peers, refused.detail)
            return
        if not refusal.is_gone:
            self.connection.probes.record_answer(refused.peer_id)
        if refusal.code == "lost":
            self.route_selector.record_loss(refused.peer_id)
            self.connection.probes.record_loss(refused.peer_id)
        seconds = refusal.left_out_s(len(peers))
        if seconds:
            reason = refused.detail or refusal.code
            now_s, certain = asyncio.get_running_loop().time(), refusal.code != "slow"
            left_out = (view.facts, now_s, seconds, reason)
            self.quarantine.quarantine_peer(*left_out, certain=certain, is_full=refusal.busy)


async def _settled(
    asked: ReservationRequest, leases: GrantedLeases, spec: ModelSpec, deadline_s: float, report: Report
) -> ActiveCircuit:
    held, links = await wait_ready(asked, leases, deadline_s, report), tuple(lease.link for lease in leases)
    report_codec(asked, spec, report)
    return ActiveCircuit(asked.route, asked.descriptor, links, asked.peers, asked.begins_at(held))


def _answer(
    planned: PlannedRoute | None, problems: Mapping[core.Problem, SwarmError], report: Report
) -> core.Planned | core.NoRoute:
    if planned is None:
        report(in_short(problems[core.Problem.NO_ROUTE]))
        return core.NoRoute(_draw())
    report(f"circuit found, hops: {len(planned.route.hops)}; reserving memory")
    return core.Planned(planned.route.peer_ids)


def _draw() -> float:
    """Evenly from 0.5 to 1.5: clients do not come again in unison."""
    return random.uniform(0.5, 1.5)
