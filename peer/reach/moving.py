"""Moves relayed links to a hole that both ends punch: coordinated over the link itself, made before it is broken.

Both ends have relays look at a fresh port and tell each other what was seen; then both dial at once. What comes of it
is TLS and proof as always, on a connection that resumes the link: nothing is lost, nothing comes twice. An end dials no
host but the one that the relay saw the other end come from, whatever that end says, and only where the swarm is.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

from molink.dht.identity.dialable import Ranges, host_of, may_dial
from molink.dht.membership.door import network_of
from molink.dht.records.records import PeerFacts, RelayAt
from molink.peer.reach.stays import Stays
from molink.peer.serving.budgets import Budget, RequestRate, RequestRates
from molink.peer.wire.link.dialled_connection import DialledConnection, way_of
from molink.peer.wire.link.link import Link, LinkError, LinkHandler
from molink.peer.wire.link.links import Links
from molink.peer.wire.link.second_way import resume_over
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.protocol.frames import Frame, ProtocolError
from molink.peer.wire.reach.packets import RelayError
from molink.peer.wire.reach.punching import ATTEMPTS, ObservedPort, attempt_after, observe_port, punch
from molink.peer.wire.reach.relay_client import RelayUser, endpoint
from molink.peer.wire.reach.ways import Punched

LOOK_SOON_S = 0.01
"""While one is about to come."""
EARLY_S = 5.0
"""A port that was looked at before there is a link is of use for so long."""
LOOK_AGAIN_S = 0.1
"""While a link is silent: between looks for links that are relayed, or silent."""
LOOK_EVERY_S = 0.5
"""At the latest: no new link is silent for so long."""
ANSWER_TIMEOUT_S = 5.0
START_TIMEOUT_S = 5.0
"""From telling the other end one's address to its word to begin."""
PUNCHES = RequestRates(RequestRate(0.2, 4.0), RequestRate(0.5, 8.0), RequestRate(2.0, 16.0))
"""Asked of this end: each has it dial for three seconds."""
FALSE_ADDRESS = "that is not where the relay sees you"
_log = logging.getLogger(__name__)


class HolePuncher:
    """Moves the links of one peer, between `__aenter__` and `__aexit__`, and answers those who would move theirs."""

    def __init__(
        self, links: Links, user: RelayUser, stays: Stays, observers: Callable[[], tuple[RelayAt, ...]]
    ) -> None:
        """`observers`: relays that are asked where they see a port of this machine."""
        self._links = links
        self._user = user
        self._stays = stays
        self._observers = observers
        self._moving: dict[Link, asyncio.Task[None]] = {}
        self._waiting: dict[Link, tuple[ObservedPort, str, asyncio.TimerHandle]] = {}
        """Links whose other end has yet to say that both begin: this end's port, the other's address."""
        self._punching: set[asyncio.Task[None]] = set()
        self._budget = Budget(PUNCHES)
        self._looking: asyncio.Task[None] | None = None
        self._early: dict[str, asyncio.Task[ObservedPort]] = {}
        """By peer id: looks at ports for links that are about to come."""
        self._joined = asyncio.Event()
        """Another of those is about to come."""

    async def __aenter__(self) -> Self:
        self._links.dialler.ladder.on_joined = self._observe_early
        self._looking = asyncio.create_task(self._look(), name="look for relayed links")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._links.dialler.ladder.on_joined = lambda _: None
        tasks = [*self._moving.values(), *self._punching]
        if self._looking is not None:
            tasks.append(self._looking)
            self._looking = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for link in tuple(self._waiting):
            self._forget(link)
        early = tuple(self._early.items())
        for peer_id, observing in early:
            self._forget_early(peer_id, observing)
        await asyncio.gather(*(observing for _, observing in early), return_exceptions=True)

    def is_relayed(self, link: Link) -> bool:
        """Whether a link goes over a relay now, as far as this end knows."""
        return way_of(link.connection) == "relayed" or self._stays.guests.serves(link.peer_id)

    # -- the end that dialled

    async def _look(self) -> None:
        while True:
            silent_in_s = min((link.seems_dead_in_s() for link in self._links.all()), default=LOOK_EVERY_S)
            if silent_in_s <= 0.0:
                self._stays.doubt()
            for link, facts in self._links.dialled().items():
                if way_of(link.connection) == "relayed" and link not in self._moving:
                    task = asyncio.create_task(self._keep_trying(link, facts), name=f"move {link.peer_id}")
                    self._moving[link] = task
                    task.add_done_callback(lambda _, link=link: self._moving.pop(link, None))  # type: ignore[misc]
            wait_s = LOOK_SOON_S if self._early else min(max(silent_in_s, LOOK_AGAIN_S), LOOK_EVERY_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._joined.wait()
            self._joined.clear()

    def _observe_early(self, peer_id: str) -> None:
        """A connection to that peer has been joined, and is about to be a link: relays look at a port meanwhile."""
        if peer_id not in self._early:
            observing = asyncio.create_task(
                observe_port(self._observers(), self._user), name=f"observe for {peer_id}"
            )
            self._early[peer_id] = observing
            self._joined.set()
            asyncio.get_running_loop().call_later(EARLY_S, self._forget_early, peer_id, observing)

    def _forget_early(self, peer_id: str, observing: "asyncio.Task[ObservedPort]") -> None:
        """Unless an attempt has taken it."""
        if self._early.get(peer_id) is observing:
            del self._early[peer_id]
            observing.add_done_callback(_close_observed)
            observing.cancel()

    async def _observed(self, peer_id: str) -> ObservedPort:
        """A port of this machine for an attempt, which closes it. Raises RelayError."""
        observing = self._early.pop(peer_id, None)
        if observing is None:
            return await observe_port(self._observers(), self._user)
        try:
            return await observing
        except asyncio.CancelledError:
            observing.add_done_callback(_close_observed)
            raise

    async def _keep_trying(self, link: Link, facts: PeerFacts) -> None:
        """Until the link is not relayed any more; where both ends are hard, seldom: either may come to another
        network."""
        clock = asyncio.get_running_loop().time
        began_s, number = clock(), 0
        while link.closed_because is None:
            attempt = attempt_after(number)
            await asyncio.sleep(max(0.0, began_s + attempt.after_s - clock()))
            if way_of(link.connection) != "relayed":
                return
            try:
                if not await self._try(link, facts, attempt.shift_s):
                    number = max(number, len(ATTEMPTS) - 1)
            except (OSError, TimeoutError, ProtocolError) as error:  # or the other end says a false address
                _log.debug("punching to %s failed: %s", link.peer_id, error)
            number += 1

    async def _try(self, link: Link, facts: PeerFacts, shift_s: float) -> bool:
        """One attempt. False: none will succeed, as both ends are."""
        mine = await self._observed(link.peer_id)
        try:
            asked = pb.Request(punch=pb.Punch(address=mine.address, hard=mine.hard))
            response, _ = await link.request(asked, ANSWER_TIMEOUT_S)
            theirs = response.punch
            if response.WhichOneof("body") != "punch":
                raise LinkError(link.peer_id, response.refusal.detail or "it does not punch")
            if mine.hard and theirs.hard:
                return False
            _require_host(theirs.address, _host_of(link), self._links.dialler.ranges)
            half_way_s = (link.rtt_ms or 0.0) / 2000
            begun = asyncio.ensure_future(link.request(pb.Request(punch_now=pb.PunchNow()), ANSWER_TIMEOUT_S))
            begun.add_done_callback(
                lambda ended: ended.cancelled() or ended.exception()
            )  # the punch shows it
            try:
                await asyncio.sleep(max(0.0, half_way_s + shift_s))
                connection = await punch(mine.port, theirs.address)
            finally:
                begun.cancel()
        finally:
            mine.close()
        way = Punched(connection, host_of(theirs.address))
        knock = await self._links.dialler.knock_over(facts, way)
        if not link.move(resume_over(knock)):
            await knock.connection.close()
        return True

    # -- the end that was dialled

    async def answer(self, link: Link, request: pb.Request) -> pb.Response:
        """Answers `punch` and `punch_now`.

        Raises:
            ProtocolError: this end does not do that now.
        """
        if request.WhichOneof("body") == "punch_now":
            self._begin(link)
            return pb.Response(released=pb.Released())
        host = self._stays.guests.host_of(link.peer_id)
        if host is None:
            raise ProtocolError("this link came over no relay")
        _require_host(request.punch.address, host, self._links.dialler.ranges)
        now = asyncio.get_running_loop().time()
        if link in self._waiting or self._budget.spend(link.peer_id, network_of(host), now):
            raise ProtocolError("this is asked more often than may be")
        mine = await observe_port(self._observers(), self._user)
        gone = link.closed_because is not None or self._looking is None
        if (mine.hard and request.punch.hard) or link in self._waiting or gone:
            mine.close()
        else:
            timer = asyncio.get_running_loop().call_later(START_TIMEOUT_S, self._forget, link)
            self._waiting[link] = mine, request.punch.address, timer
        return pb.Response(punch=pb.Punch(address=mine.address, hard=mine.hard))

    def _forget(self, link: Link) -> None:
        mine, _, timer = self._waiting.pop(link)
        timer.cancel()
        mine.close()

    def _begin(self, link: Link) -> None:
        if link not in self._waiting:
            raise ProtocolError("no punch was asked for")
        mine, target, timer = self._waiting.pop(link)
        timer.cancel()
        task = asyncio.create_task(self._punch_and_serve(mine, target), name=f"punch {link.peer_id}")
        self._punching.add(task)
        task.add_done_callback(self._punching.discard)

    async def _punch_and_serve(self, mine: ObservedPort, target: str) -> None:
        try:
            await self._stays.guests.serve(await punch(mine.port, target))
        except OSError as error:
            _log.debug("punching to %s failed: %s", target, error)
        finally:
            mine.close()


class PunchingHandler:
    """A LinkHandler before another one: questions about holes are answered by the puncher, all else goes on."""

    def __init__(self, handler: LinkHandler) -> None:
        self._handler = handler
        self.puncher: HolePuncher | None = None

    def on_frame(self, link: Link, frame: Frame) -> None:
        self._handler.on_frame(link, frame)

    async def on_request(self, link: Link, request: pb.Request) -> tuple[pb.Response, bytes]:
        if self.puncher is None or request.WhichOneof("body") not in ("punch", "punch_now"):
            return await self._handler.on_request(link, request)
        try:
            return await self.puncher.answer(link, request), b""
        except (ProtocolError, RelayError, ValueError) as error:
            return pb.Response(refusal=pb.Refusal(code="request", detail=str(error)[:200])), b""

    def on_closed(self, link: Link, reason: str) -> None:
        self._handler.on_closed(link, reason)


def _close_observed(observing: "asyncio.Task[ObservedPort]") -> None:
    if not observing.cancelled() and observing.exception() is None:
        observing.result().close()


def _host_of(link: Link) -> str:
    return link.connection.host if isinstance(link.connection, DialledConnection) else ""


def _require_host(address: str, host: str, ranges: Ranges) -> None:
    """Raises ProtocolError if an address that the other end says is not of the host where the relay sees it, or not
    where the swarm is."""
    try:
        said, port = endpoint(address)
    except ValueError:
        said, port = "", 0
    if not host or said != host or not 1024 <= port <= 65535 or not may_dial(host, ranges):
        raise ProtocolError(FALSE_ADDRESS)
