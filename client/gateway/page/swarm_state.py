"""State of the swarm as the page draws it, and what of it has changed. Pure decisions."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

Json = dict[str, Any]
MOST_PEERS: Final = 1000
"""That a page is told of: those of circuits first, then those that hold most."""
MOST_CIRCUITS: Final = 64
SHOWN_OF_A_PEER: Final = (
    "name",
    "model",
    "device",
    "region",
    "spans",
    "sessions",
    "queued",
    "draining",
    "answers",
    "keeps_copies",
    "tokens_served",
    "layer_ms",
    "uplink_mbps",
    "coordinate",
)
"""What a page needs. Whatever else is known of a peer, such as its age, changes all the time and is not drawn."""
SHOWN_OF_A_SWARM: Final = ("model", "models", "ready", "reason", "planned")


def page_state(snapshot: Mapping[str, Any], circuits: Sequence[Json], invites: Sequence[str]) -> Json:
    """Returns what the page is told.

    Args:
        snapshot: what `/v1/swarm` has.
        circuits: those in use now.
        invites: addresses that the operator lets everybody see.
    """
    shown = list(circuits[-MOST_CIRCUITS:])
    on_circuits = {hop["peer_id"] for circuit in shown for hop in circuit["hops"]}
    peers = [peer for peer in snapshot.get("peers", ()) if peer.get("same_protocol", True)]
    if len(peers) > MOST_PEERS:
        peers = sorted(peers, key=lambda peer: (peer["peer_id"] not in on_circuits, -_held(peer)))
    return {
        **{name: snapshot.get(name) for name in SHOWN_OF_A_SWARM},
        "invites": list(invites),
        "peers_in_all": len(peers),
        "peers": {peer["peer_id"]: _shown(peer) for peer in peers[:MOST_PEERS]},
        "circuits": shown,
    }


def changes(before: Json, after: Json) -> Json:
    """Returns what differs, empty if nothing does: whole values, but of peers only those that differ, and in `gone` the
    ids of those that are there no more."""
    changed = {name: value for name, value in after.items() if name != "peers" and value != before.get(name)}
    known, now = before["peers"], after["peers"]
    peers = {peer_id: peer for peer_id, peer in now.items() if peer != known.get(peer_id)}
    gone = [peer_id for peer_id in known if peer_id not in now]
    return changed | ({"peers": peers} if peers else {}) | ({"gone": gone} if gone else {})


def _shown(peer: Mapping[str, Any]) -> Json:
    return {name: peer[name] for name in SHOWN_OF_A_PEER if peer.get(name) is not None}


def _held(peer: Mapping[str, Any]) -> int:
    """How many layers it holds."""
    return sum(stop - start for start, stop in peer.get("spans", ()))
