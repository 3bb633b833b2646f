"""Orders of an operator, which a peer takes that was started with `--operator ID`: from that identity and nobody else.

An order comes over a link. Its handshake has whoever dials sign, with the key of its identity, what this peer has drawn
for this connection alone, and the hash of this peer's certificate (`peer/wire/link/handshake.py`); what comes over the
link after that is TLS. So an order is the operator's, fresh, and for this peer, or it does not get here.
"""

import json
import logging
from collections.abc import Awaitable, Callable, Collection
from typing import Any, Final, Protocol

from molink.dht.refusals import RefusalLog
from molink.peer.models.choosing import HUB_ID
from molink.peer.wire.link.link import Link, LinkHandler
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.protocol.frames import Frame
from molink.shards.checkpoint.catalog import BUNDLED, is_from_hub

_log = logging.getLogger(__name__)


class OrderRefused(Exception):
    """An order of the operator that cannot be carried out; the text says why. `code`: `busy`, not now, or `request`,
    never."""

    def __init__(self, reason: str, code: str = "busy") -> None:
        super().__init__(reason)
        self.code = code


class CommandedPeer(Protocol):
    """A peer that does what its operator orders. Each returns what the operator is told, JSON-ready."""

    async def report(self) -> dict[str, Any]: ...

    async def drain(self) -> dict[str, Any]: ...

    async def resume(self) -> dict[str, Any]: ...

    async def depart(self) -> dict[str, Any]: ...

    async def serve(self, model: str) -> dict[str, Any]: ...


class OperatorOrders:
    """Takes orders out of what arrives on a peer's links; all else goes on to the handler behind."""

    def __init__(self, behind: LinkHandler, operators: Collection[str], peer: CommandedPeer) -> None:
        """`operators` are the identities whose orders are taken; none, unless the peer's owner says so."""
        self._behind = behind
        self._operators = frozenset(operators)
        self._actions: Final[dict[str, Callable[[pb.Order], Awaitable[dict[str, Any]]]]] = {
            "status": lambda _: peer.report(),
            "drain": lambda _: peer.drain(),
            "resume": lambda _: peer.resume(),
            "leave": lambda _: peer.depart(),
            "serve": lambda order: peer.serve(_ordered_model(order)),
        }
        self._refusals = RefusalLog(_log)

    def on_frame(self, link: Link, frame: Frame) -> None:
        self._behind.on_frame(link, frame)

    def on_closed(self, link: Link, reason: str) -> None:
        self._behind.on_closed(link, reason)

    async def on_request(self, link: Link, request: pb.Request) -> tuple[pb.Response, bytes]:
        if request.WhichOneof("body") != "order":
            return await self._behind.on_request(link, request)
        if link.peer_id not in self._operators:
            self._refusals.refused("orders of who is not its operator", link.peer_id)
            return _refusal("request", "this peer takes no orders from you")
        action = self._actions.get(request.order.action)
        if action is None:
            return _refusal("request", "this peer knows no such order; it may be older than its operator")
        try:
            told = json.dumps(await action(request.order)).encode()
        except OrderRefused as refused:
            return _refusal(refused.code, str(refused))
        except Exception:  # noqa: BLE001 - the request boundary: the link goes on
            _log.exception("the order %s failed", request.order.action)
            return _refusal("internal", "this peer failed; see its log")
        return pb.Response(content=pb.Content(total_bytes=len(told))), told


def _ordered_model(order: pb.Order) -> str:
    """Returns the model that an operator names. Raises `OrderRefused` for a folder: these are the owner's own."""
    if order.model not in BUNDLED and not (HUB_ID.fullmatch(order.model) and is_from_hub(order.model)):
        raise OrderRefused(
            "a model that is ordered comes with MoLink, or has a hub's name, OWNER/NAME", "request"
        )
    return order.model


def _refusal(code: str, detail: str) -> tuple[pb.Response, bytes]:
    return pb.Response(refusal=pb.Refusal(code=code, detail=detail)), b""
