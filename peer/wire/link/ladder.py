"""Ladder of dials to one peer: where the local network sees it, its addresses, then the relays at which it stays.

Each rung has its time to start; whoever proves itself first ends the others. Of addresses those of IPv6 come first. A
peer with a relay of its own has the other end dial that before it asks other relays, since that is a direct way.
"""

import asyncio
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from molink.dht.identity.identity import Identity
from molink.dht.identity.swarm_key import SwarmKey
from molink.dht.records.records import RelayAt
from molink.peer.wire.link.connection import Connection
from molink.peer.wire.reach.relay_client import RelayUser
from molink.peer.wire.reach.splice import Splices
from molink.peer.wire.reach.ways import Called, Expect, LocalTarget, Relayed, Reversed, Way

STAGGER_S = 0.25
"""Between the dials of one peer's addresses (RFC 8305, section 5)."""
LOCAL_S = 0.3
"""Where the local network sees it a peer is dialled alone for so long."""
DIRECT_S = 1.5
"""Its addresses have so long before its relays are asked."""
LOOK_TIMEOUT_S = 2.0
"""For a look at the certificate of who answers in a peer's place."""
NEXT_RELAY_S = 0.6
"""Between the rungs of relays."""
ENDED_LATELY_S = 60.0
"""A relay over which a way ended so lately goes last: it may be what ended it."""
MOST_ENDED = 256


@dataclass(frozen=True, slots=True)
class Rung:
    """One dial: when it starts, in seconds after the first, and what is dialled."""

    start_s: float
    address: str
    """host:port of the peer, or of the relay."""
    way: Way | None = None
    """None: the address is dialled directly."""
    relay: RelayAt | None = None


class Ladder:
    """Makes the rungs of each dial, and owns the splices of ways that are not direct."""

    def __init__(self, identity: Identity, swarm_key: SwarmKey | None, folder: Path | None = None) -> None:
        """`folder`: where unix sockets are made; by default a new one for each."""
        self.user = RelayUser(identity, swarm_key)
        self.splices = Splices()
        self.expect: Expect | None = None
        """What this process's own relay offers, if it has one that others can dial."""
        self.call: Expect | None = None
        """What it offers for who stays there."""
        self.local: Callable[[str], tuple[str, ...]] = lambda _: ()
        """Where the local network says that a peer is, as host:port. Only the peer's certificate proves it."""
        self.on_joined: Callable[[str], None] = lambda _: None
        """Hears of a peer id as soon as a relay has joined a connection to it."""
        self._folder = folder
        self._ended: dict[str, float] = {}
        """When a way over a relay ended last, by peer id of the relay."""

    def record_end(self, relay: RelayAt, now_s: float) -> None:
        """Records that a way over a relay has ended: another one is taken first then, for a while."""
        self._ended.pop(relay.peer_id, None)
        self._ended[relay.peer_id] = now_s
        if len(self._ended) > MOST_ENDED:
            del self._ended[next(iter(self._ended))]

    def rungs(
        self,
        peer_id: str,
        addresses: Sequence[str],
        relays: Sequence[RelayAt],
        *,
        now_s: float = 0.0,
        stays_here: bool = False,
    ) -> tuple[Rung, ...]:
        """The rungs to a peer, by when they start. `relays` in the order in which they are preferred; `stays_here`:
        at this process's own relay."""
        relays = sorted(relays, key=lambda relay: self._ended_s(relay, now_s))
        local = self.local(peer_id)
        rungs = [Rung(0.0, address) for address in local]
        start_s = LOCAL_S if local else 0.0
        others = [address for address in ipv6_first(addresses) if address not in local]
        rungs += [Rung(start_s + at * STAGGER_S, address) for at, address in enumerate(others)]
        start_s += DIRECT_S if others else 0.0
        if stays_here and self.call is not None:
            rungs.append(Rung(start_s, "", Called(peer_id, self.call)))
            start_s += NEXT_RELAY_S
        elif relays and self.expect is not None:
            way = Reversed(peer_id, relays[0], self.user, self.expect)
            rungs.append(Rung(start_s, relays[0].address, way, relays[0]))
            start_s += NEXT_RELAY_S
        rungs += [
            Rung(
                start_s + at * NEXT_RELAY_S,
                relay.address,
                Relayed(peer_id, relay, self.user, on_joined=self.on_joined),
                relay,
            )
            for at, relay in enumerate(relays)
        ]
        return tuple(rungs)

    def _ended_s(self, relay: RelayAt, now_s: float) -> float:
        """When a way over it ended; 0: it did not lately."""
        ended_s = self._ended.get(relay.peer_id, 0.0)
        return ended_s if now_s - ended_s < ENDED_LATELY_S else 0.0

    def target(self) -> LocalTarget:
        """A local target for a way of this process."""
        return LocalTarget(self.splices, self._folder)


def ipv6_first(addresses: Sequence[str]) -> tuple[str, ...]:
    """The same addresses as host:port, in their order, those of IPv6 before the others (RFC 8305, section 4)."""
    return tuple(sorted(addresses, key=lambda address: not address.startswith("[")))


class Connected(Protocol):
    """Connected: what a dial gives, such as Resumed."""

    @property
    def connection(self) -> Connection: ...


ConnectedT = TypeVar("ConnectedT", bound=Connected)


async def first_connected(
    dials: Sequence["asyncio.Task[ConnectedT]"], timeout_s: float | None
) -> ConnectedT | None:
    """What the first that succeeds gives; None if all have failed, or none has succeeded within `timeout_s`."""
    deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
    under_way = {dial for dial in dials if not dial.done()}
    while under_way:
        left_s = None if deadline is None else max(0.0, deadline - asyncio.get_running_loop().time())
        done, under_way = await asyncio.wait(under_way, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        for dial in done:
            if not dial.cancelled() and dial.exception() is None:
                return dial.result()
        if not done:
            return None
    return None


async def abandon_dials(dials: Sequence["asyncio.Task[ConnectedT]"], won: ConnectedT | None) -> None:
    """Ends the dials that are still under way, and closes what they opened besides the one that has won; that too if
    this is cancelled, for then nobody gets it."""
    for dial in dials:
        dial.cancel()
    try:
        await asyncio.gather(*dials, return_exceptions=True)
    except asyncio.CancelledError:
        won = None
        raise
    finally:
        for dial in dials:
            opened = _opened(dial)
            if opened is not None and opened is not won:
                await opened.connection.close()


def _opened(dial: "asyncio.Future[ConnectedT]") -> ConnectedT | None:
    """What an ended dial has opened."""
    if not dial.done() or dial.cancelled() or dial.exception() is not None:
        return None
    return dial.result()


async def certificate_at(address: str, timeout_s: float = LOOK_TIMEOUT_S) -> bytes | None:
    """The certificate of whoever answers there in time, unchecked; None if nobody does."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port), ssl=context)
    except (OSError, TimeoutError, ValueError):
        return None
    try:
        session: ssl.SSLObject = writer.get_extra_info("ssl_object")
        return session.getpeercert(binary_form=True)
    finally:
        writer.transport.abort()
