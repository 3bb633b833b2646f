"""How much is answered to whom: packets of who is not known, reservations, and parts of files."""

import asyncio
import logging
from collections.abc import Callable
from weakref import WeakSet

from molink.dht.refusals import RefusalLog
from molink.peer.memory.lease_rules import MIN_RETRY_S
from molink.peer.serving.budgets import Budget, RequestRate, RequestRates
from molink.peer.wire.link.link import Link
from molink.peer.wire.protocol import molink_pb2 as pb

RESERVATIONS = RequestRates(RequestRate(40.0, 128.0), RequestRate(80.0, 256.0), RequestRate(120.0, 320.0))
"""A session asks once. Checking a descriptor takes about a millisecond, beside which decode steps wait."""
PACKETS = RequestRates(RequestRate(200.0, 2000.0), RequestRate(400.0, 4000.0), RequestRate(1000.0, 8000.0))
"""Of who is not known, such as questions and signs of life, not what acknowledges something. To take one in takes a
quarter of a millisecond, gRPC's part included."""
REFUSAL_S = 0.25
"""What asks beyond the rate waits so long for its refusal, and what the link asks next waits behind it."""
FILE_PARTS = RequestRates(RequestRate(2.0, 256.0), RequestRate(8.0, 512.0), RequestRate(32.0, 1024.0))
"""Of a MiB. All that a client needs of a model is a few of them, once."""
_log = logging.getLogger(__name__)


class RequestRefused(Exception):
    """A request is answered with a refusal."""

    def __init__(self, code: str, detail: str, retry_after_s: float = 0.0, peer_id: str = "") -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail
        self.retry_after_s = retry_after_s
        self.peer_id = peer_id

    def to_message(self) -> pb.Refusal:
        retry_after_ms = round(self.retry_after_s * 1000)
        return pb.Refusal(
            code=self.code, detail=self.detail[:500], retry_after_ms=retry_after_ms, peer_id=self.peer_id
        )


class RequestLimits:
    """Rate limits of a peer's links, by identity, by network and for all together."""

    def __init__(self, is_known: Callable[[str], bool], is_announced: Callable[[str], bool]) -> None:
        """Whether an identity has stepped here before, and whether it has announced itself to the swarm."""
        self._is_known = is_known
        self._is_announced = is_announced
        self._known: WeakSet[Link] = WeakSet()
        """Links of who was found to be known once."""
        self._packets = Budget(PACKETS)
        self._reservations = Budget(RESERVATIONS)
        self._file_parts = Budget(FILE_PARTS)
        self._copies = Budget(RESERVATIONS)
        self._refusals = RefusalLog(_log)

    def pace(self, link: Link) -> float:
        """For how many seconds no further packet of that link is to be read (`link.Pace`)."""
        if link in self._known:
            return 0.0
        if self._is_known(link.peer_id) or self._is_announced(link.peer_id):
            self._known.add(link)
            return 0.0
        return self._packets.spend(link.peer_id, link.remote.network, asyncio.get_running_loop().time())

    async def spend_reservation(self, link: Link) -> None:
        """Raises RequestRefused, after a while, where more is asked than may be."""
        await self._spend(self._reservations, link, "reservations")

    async def spend_copy(self, link: Link) -> None:
        """As `spend_reservation`, of requests about second copies: they take nothing from reservations."""
        await self._spend(self._copies, link, "copies")

    async def spend_file_part(self, link: Link) -> None:
        """Raises RequestRefused, after a while, where more is asked than may be."""
        await self._spend(self._file_parts, link, "requests for files")

    async def _spend(self, budget: Budget, link: Link, what: str) -> None:
        now = asyncio.get_running_loop().time()
        wait_s = budget.spend(link.peer_id, link.remote.network, now, known=self._is_known(link.peer_id))
        if wait_s:
            await asyncio.sleep(REFUSAL_S)
            self._refusals.refused(f"{what} beyond the rate", link.peer_id)
            raise RequestRefused(
                "busy", f"this peer is asked for more {what} than it answers", max(MIN_RETRY_S, wait_s)
            )
