"""Sentences for the owner about how others reach a peer: what was tried, what it does instead, and the remedy. Pure."""

from dataclasses import dataclass

from molink.dht.identity.dialable import host_of
from molink.dht.records.records import PeerFacts


@dataclass(frozen=True, slots=True)
class RelaysAsked:
    """Relays that were asked."""

    offered: int
    answered: int
    within_s: float
    """Seconds that each was given."""


def reach_sentence(
    facts: PeerFacts, relay: str, told: str, asked: RelaysAsked, *, mapped: str = ""
) -> str | None:
    """None: there is nothing to say, for others can dial it. `relay` and `told` are what the owner has said, `mapped`
    what the router has (`ReachSettings`)."""
    if facts.grpc_addresses:
        return None
    over = ", ".join(host_of(one.address) for one in facts.relays)
    if not over:
        return _unreached(relay, asked)
    if told:
        return (
            f"--announce: relays see this machine there, and none that dialled {told} found this peer, so others reach "
            f"it over {over} instead. Forward that port to this machine, or leave --announce out"
        )
    if mapped:
        return (
            f"--port-mapping on: the router says that it passes {mapped} on, and most relays that dialled that port "
            f"did not find this peer, so others reach it over {over} instead. Open this machine's firewall for it, and "
            "a second router's if there is one, or leave --port-mapping out"
        )
    if relay == "on":
        return f"--relay on: others reach this peer over {over}"
    return f"Nobody can dial this peer: others reach it over {over}"


def _unreached(relay: str, asked: RelaysAsked) -> str:
    why = "--relay on" if relay == "on" else "Nobody can dial this peer"
    if asked.answered:
        tried = f"none of {asked.answered} that answered takes it"
    elif asked.offered:
        tried = f"none of {asked.offered} that peers of this swarm offer answered within {asked.within_s:g} s"
    else:
        tried = "no peer of this swarm offers one"
    others = "offer a relay (--offer-relay)"
    if asked.offered and not asked.answered:
        others = "offer a relay on a port that networks let out (--relay-port 443)"
    remedy = "forward this machine's ports and say with --announce where"
    if relay == "on":
        remedy = "leave --relay out"
    return (
        f"{why}, and of relays {tried}: it asks again every half minute, and is ready once one does. Have a peer that "
        f"others can dial {others}, or {remedy}"
    )
