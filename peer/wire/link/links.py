"""All links of one process: dialled on demand, accepted from others, one in use for each remote.

Two peers that dial each other at once get two links. Both ends then use the one that the smaller peer id dialled; the
end that dialled the other closes it when nothing has travelled on it for a while.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable
from types import TracebackType
from typing import Self

from molink.dht.identity.dialable import ANYWHERE, Ranges
from molink.dht.identity.identity import Identity
from molink.dht.identity.swarm_key import SwarmKey
from molink.dht.records.records import PeerFacts
from molink.peer.wire.link.connection import Connection
from molink.peer.wire.link.dialling import Dialler
from molink.peer.wire.link.handshake import LINK_ID_BYTES, Remote
from molink.peer.wire.link.link import Link, LinkError, LinkHandler, Resumed
from molink.peer.wire.link.link_resources import LinkResources
from molink.peer.wire.link.second_way import keep_second_way
from molink.peer.wire.transport.line_quality import LineQuality
from molink.peer.wire.transport.message_memory import MessageMemory
from molink.peer.wire.transport.shared_uplink import SharedUplink

_log = logging.getLogger(__name__)


class Links:
    """Links of one process. Dial with `to`, look up with `find`; accepted links come in through `accepted`."""

    # A link in use that closes is replaced by a spare, if there is one: that may be when the other end closes what it
    # takes for a spare, or when it has lost a link that seems open here.

    def __init__(
        self,
        identity: Identity,
        handler: LinkHandler,
        swarm_key: SwarmKey | None,
        *,
        is_client: bool,
        http_proxy: str | None = None,
        own_ranges: Ranges = ANYWHERE,
        resources: LinkResources | None = None,
    ) -> None:
        """`http_proxy` is the URL of a proxy that links are dialled through with CONNECT. Of the environment only
        `no_proxy` counts then: hosts that are dialled directly all the same. Announced addresses are dialled in
        `own_ranges` only (`dht/identity/dialable.py`). `resources`: by default the usual ones.
        """
        self._identity = identity
        self.handler = handler
        """Hears of frames and ends of links that are made from now on."""
        self._resources = resources or LinkResources(SharedUplink(), MessageMemory())
        self.dialler = Dialler(
            identity,
            swarm_key,
            is_client=is_client,
            http_proxy=http_proxy,
            own_ranges=own_ranges,
            folder=self._resources.folder,
            dial_s=self._resources.times.dial_s,
        )
        self._links: dict[str, Link] = {}
        """In use, by peer id."""
        self._spares: list[Link] = []
        self._opened_s: dict[Link, float] = {}
        self._accepted: dict[tuple[str, bytes], Link] = {}
        """Those that others dialled, by peer id and link id."""
        self._dialled: dict[Link, PeerFacts] = {}
        """Those that this end dialled, and closes when they are spare, and whom it dialled."""
        self._dialling: dict[str, asyncio.Task[Link]] = {}
        self._running: set[asyncio.Task[None]] = set()
        self.is_relayed: Callable[[Link], bool] = lambda _: False
        """Whether a link goes over a relay now."""
        self.host_of: Callable[[str], str | None] = lambda _: None
        """Where a relay saw a peer that comes over it now."""
        self.newest_facts: Callable[[str], PeerFacts | None] = lambda _: None
        """What the swarm knows of a peer now: by that a link whose connection broke is dialled again."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for dialling in self._dialling.values():
            dialling.cancel()
        await asyncio.gather(*self._dialling.values(), return_exceptions=True)
        await self.close()

    async def close(self) -> None:
        """Ends every link."""
        for link in tuple(self._opened_s):
            link.close("this end is stopping")
        await asyncio.gather(*self._running, return_exceptions=True)
        await self.dialler.ladder.splices.close()

    @property
    def uses_deadlines(self) -> bool:
        """Whether messages of a class leave as they are due (see `Link.post`)."""
        return self._resources.uplink.uses_deadlines

    def dial_in(self, ranges: Ranges) -> None:
        """From now on announced addresses of other ranges are not dialled."""
        self.dialler.ranges = ranges

    def cancel(self, session: bytes) -> None:
        """Drops what waits to be sent for a session alone."""
        self._resources.uplink.cancel(session, asyncio.get_running_loop().time())

    def expect_decode(self, peer_id: str, at_s: float) -> None:
        """Tells the scheduler when the next decode is predicted to go to a peer, on the event loop's clock."""
        link = self.find(peer_id)
        if link is not None:
            link.expect_decode(at_s)

    def line_quality(self) -> LineQuality:
        """Line quality: what the links' own traffic has measured of this machine's line."""
        links = self.all()
        if any(map(self.is_relayed, links)):  # a relay's rate is not that of this machine's line
            return LineQuality(None, tuple(link.quality for link in links if not self.is_relayed(link)))
        return LineQuality(self._resources.uplink.bytes_per_s, tuple(link.quality for link in links))

    def find(self, peer_id: str) -> Link | None:
        """The open link to a peer or client, if there is one."""
        link = self._links.get(peer_id)
        if link is not None and link.closed_because is None:
            return link
        return next(
            (one for one in self._spares if one.peer_id == peer_id and one.closed_because is None), None
        )

    def in_use(self, link: Link) -> bool:
        """Whether this is the link to its remote, or was until it closed just now."""
        return self._links.get(link.peer_id) is link

    def dialled(self) -> dict[Link, PeerFacts]:
        """Open links that this end dialled, and by which facts."""
        return {link: facts for link, facts in self._dialled.items() if link.closed_because is None}

    def all(self) -> tuple[Link, ...]:
        """Every open link that is in use."""
        return tuple(link for link in self._links.values() if link.closed_because is None)

    async def to(self, facts: PeerFacts, timeout_s: float | None = None) -> Link:
        """The link to a peer: the open one, or a new one. `timeout_s`: by default that of this process's links.

        Raises:
            LinkError: nobody answers there, or the one who does is not that peer.
        """
        link = self.find(facts.peer_id)
        if link is not None:
            return link
        dialling = self._dialling.get(facts.peer_id)
        if dialling is None:
            dialling = asyncio.create_task(self._dial(facts), name=f"dial {facts.peer_id}")
            self._dialling[facts.peer_id] = dialling
            dialling.add_done_callback(lambda _: self._dialling.pop(facts.peer_id, None))
            dialling.add_done_callback(_retrieve)
        if timeout_s is None:
            timeout_s = self._resources.times.dial_s
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(dialling)
        except TimeoutError:
            raise LinkError(facts.peer_id, f"not reached within {timeout_s:g} s") from None

    def accept(self, link_id: bytes, remote: Remote, connection: Connection) -> asyncio.Task[None]:
        """Takes in a link that the other end dialled; done when it has ended."""
        link = Link(link_id, remote, connection, self.handler, self._resources)
        self._accepted[link.peer_id, link_id] = link
        return self._start(link)

    def accepted(self, peer_id: str, link_id: bytes) -> Link | None:
        """The link of that id that this peer dialled, if it is open."""
        return self._accepted.get((peer_id, link_id))

    def _forget(self, link: Link) -> None:
        """The link has closed."""
        self._opened_s.pop(link, None)
        self._dialled.pop(link, None)
        self._accepted.pop((link.peer_id, link.link_id), None)
        if link in self._spares:
            self._spares.remove(link)
        if self.in_use(link):
            del self._links[link.peer_id]
            spare = self.find(link.peer_id)
            if spare is not None:
                self._spares.remove(spare)
                self._links[spare.peer_id] = spare

    def _take(self, link: Link) -> None:
        """Puts a new link to use, or aside."""
        self._opened_s[link] = asyncio.get_running_loop().time()
        standing = self.find(link.peer_id)
        if standing is not None and self._prefers(standing, link):
            self._spares.append(link)
            return
        if standing is not None and standing not in self._spares:
            self._spares.append(standing)
        self._links[link.peer_id] = link
        if standing is not None and standing.remote.is_client and link.remote.is_client:
            standing.close("its client has come with another link")  # who has one process, and lost this one

    def _prefers(self, standing: Link, new: Link) -> bool:
        """Whether the older of two open links stays in use: only if the two ends dialled each other at once, and then
        by whose peer id is smaller, which both ends know. Else the other end has lost the older link."""
        if self._opened_s[new] - self._opened_s[standing] > self._resources.times.at_once_s:
            return False
        dialled, accepted = standing in self._dialled, standing not in self._dialled
        smaller_here = self._identity.peer_id < new.peer_id
        if (new in self._dialled) == dialled:
            return False
        return dialled if smaller_here else accepted

    async def _dial(self, facts: PeerFacts) -> Link:
        link_id = secrets.token_bytes(LINK_ID_BYTES)
        connection = await self.dialler.dial(facts, link_id)

        async def redial(link: Link) -> Resumed:
            return await self.dialler.redial(self._newest(facts), link_id, link.received)

        link = Link(
            link_id,
            Remote(facts.peer_id, is_client=False),
            connection,
            self.handler,
            self._resources,
            redial,
        )
        self._dialled[link] = facts
        self._start(link)
        return link

    def _newest(self, facts: PeerFacts) -> PeerFacts:
        """What is known now of a peer that was dialled by these: it may have other addresses and relays by then."""
        known = self.newest_facts(facts.peer_id)
        return facts if known is None or known.sequence < facts.sequence else known

    def _start(self, link: Link) -> asyncio.Task[None]:
        self._take(link)
        task = asyncio.create_task(self._run(link), name=f"link {link.peer_id}")
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def _run(self, link: Link) -> None:
        minding = [asyncio.create_task(self._retire(link), name=f"retire {link.peer_id}")]
        if (facts := self._dialled.get(link)) is not None:
            second = keep_second_way(link, lambda: self.dialler.knock(self._newest(facts)))
            minding.append(asyncio.create_task(second, name=f"second way {link.peer_id}"))
        try:
            reason = await link.run()
            _log.debug("link to %s ended: %s", link.peer_id, reason)
        finally:
            for task in minding:
                task.cancel()
            self._forget(link)
            await asyncio.gather(*minding, return_exceptions=True)

    async def _retire(self, link: Link) -> None:
        """Closes the link once it is spare and of no use any more, if this end dialled it."""
        spare_quiet_s = self._resources.times.spare_quiet_s
        while link in self._dialled:
            quiet_s = link.quiet_s if link in self._spares else 0.0
            if quiet_s >= spare_quiet_s:
                link.close("another link to this peer is in use")
                return
            await asyncio.sleep(spare_quiet_s - quiet_s)


def _retrieve(task: "asyncio.Task[Link]") -> None:
    """Marks a failed dial's error as seen, for when all who waited for it have given up."""
    if not task.cancelled():
        task.exception()
