"""Orders to peers that take this client's: to those that were started with `--operator` and its identity."""

import json
from typing import Any, Final

from molink.client.circuit.connection import SwarmConnection
from molink.client.errors import InvalidRequest, SwarmUnavailable, as_said
from molink.peer.wire.link.link import LinkError
from molink.peer.wire.protocol import molink_pb2 as pb

ANSWERS_WITHIN_S: Final = 10.0
ACTIONS: Final = ("status", "drain", "resume", "leave", "serve")
MOST_BYTES: Final = 1024 * 1024


async def send_order(
    connection: SwarmConnection, peer_id: str, action: str, model: str = ""
) -> dict[str, Any]:
    """Sends one of ACTIONS to a peer, with the model of `serve`; returns what it says.

    Raises:
        InvalidRequest: there is no such order, or the peer does not take it from this client.
        SwarmUnavailable: the peer is not known, cannot be reached, or cannot do it now.
    """
    if action not in ACTIONS:
        raise InvalidRequest(f"an order is one of {', '.join(ACTIONS)}, not {action!r}", "action")
    view = next((one for one in connection.snapshot() if one.peer_id == peer_id), None)
    if view is None:
        raise SwarmUnavailable(f"no peer {peer_id} is known in this swarm")
    try:
        link = await connection.links.to(view.facts)
        order = pb.Request(order=pb.Order(action=action, model=model))
        response, payload = await link.request(order, ANSWERS_WITHIN_S)
    except LinkError as error:
        raise SwarmUnavailable(f"peer {peer_id} does not answer: {as_said(error.reason)}") from error
    if response.WhichOneof("body") == "refusal":
        detail = as_said(response.refusal.detail)
        if response.refusal.code == "request":
            raise InvalidRequest(f"peer {peer_id} refused: {detail}", "peer_id")
        raise SwarmUnavailable(f"peer {peer_id} cannot do it now: {detail}", busy=True)
    try:
        told = json.loads(bytes(payload[:MOST_BYTES]))
    except ValueError:
        told = None
    if not isinstance(told, dict):
        raise SwarmUnavailable(f"peer {peer_id} answered what is no report")
    return told
