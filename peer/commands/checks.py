"""Checks of `molink-peer doctor`, decided without input or output: what was found, and what its owner can do."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from molink.dht.identity.dialable import host_of
from molink.dht.membership.swarm_clock import SET_ASIDE_S, TOLERANCE_S
from molink.dht.records.records import PROTOCOL_VERSION, PeerView
from molink.peer.deaths import Death
from molink.peer.memory.memory import format_bytes
from molink.peer.reach.port_mapping import GatewayError
from molink.peer.reach.survey import DIRECT, RELAYED, REVERSED, Survey, SurveyedRelay, Trial

State = Literal["ok", "note", "problem"]
NOTED_CLOCK_S = 120.0
"""By which a clock may differ from the swarm's before its owner hears of it; records are a minute on their way."""
LITTLE_DISK_BYTES = 5_000_000_000
LONG_RELAY_S = 0.15
"""A relay farther away makes every token slow."""


@dataclass(frozen=True, slots=True)
class Check:
    """One finding."""

    name: str
    state: State
    found: str
    remedy: str = ""
    """One sentence; empty: there is nothing to mend."""


def swarm_check(initial_peers: Sequence[str], views: Sequence[PeerView], error: str) -> Check:
    """Whether the swarm was found. `error`: why not; empty: it was."""
    if not initial_peers:
        return Check(
            "swarm",
            "note",
            "no initial peers are configured, so nothing outside this machine was looked at",
            "name a peer of the swarm with --initial-peers",
        )
    if error:
        return Check(
            "swarm", "problem", error, "check the address, and that outgoing TCP connections are allowed"
        )
    return Check("swarm", "ok", f"{_counted(len(views), 'peer')} found")


def local_check(host: str) -> Check:
    """Of a peer that listens on this machine only."""
    found = f"the peer listens on {host}: only this machine reaches it"
    return Check(
        "dialable", "note", found, "open it to others with --listen 0.0.0.0, or join a swarm elsewhere"
    )


def reach_checks(survey: Survey, own_hosts: Sequence[str], port: int) -> list[Check]:
    """What relays say of this machine, and what became of each way. `own_hosts`: of this machine's interfaces."""
    return [
        *_dialable(survey, port),
        *_router(survey, own_hosts),
        *map(_relay, survey.relays),
        *map(_way, survey.trials),
    ]


def _dialable(survey: Survey, port: int) -> list[Check]:
    said = [one.answer.found for one in survey.relays if one.answer and one.answer.found is not None]
    seen = sorted({host_of(one.answer.observed) for one in survey.relays if one.answer})
    if not said:
        return [
            Check(
                "dialable",
                "note",
                "no relay was found that could dial this machine, so nobody can say",
                "have one dialable peer of the swarm offer a relay: --listen 0.0.0.0 --announce HOST",
            )
        ]
    check = Check("dialable", "ok", f"{sum(said)} of {_counted(len(said), 'relay')} reach port {port}")
    if 2 * sum(said) <= len(said):
        check = Check(
            "dialable",
            "note",
            check.found,
            f"forward TCP port {port} in the router and open it in the firewall; until then relays carry the peer",
        )
    address = Check("address", "ok", f"others see this machine as {', '.join(seen)}")
    if len({":" in host for host in seen}) < len(seen):
        address = Check(
            "address",
            "note",
            f"others see this machine at several addresses: {', '.join(seen)}",
            "name the one that others are to dial with --announce",
        )
    return [address, check]


def port_mapping_check(outer_host: str | GatewayError) -> Check:
    """Whether the router would map ports, at its outer address."""
    name = "port mapping"
    if isinstance(outer_host, GatewayError):
        return Check(
            name, "note", outer_host.found, f"if others cannot dial this machine, {outer_host.remedy}"
        )
    found = f"the router at {outer_host} answers UPnP: --port-mapping on has it pass this peer's ports on"
    return Check(name, "ok", found)


def kind_of_router(survey: Survey, own_hosts: Sequence[str]) -> str:
    """none, cone, hard or unknown."""
    seen = {host_of(one.answer.observed) for one in survey.relays if one.answer}
    if seen and seen <= set(own_hosts):
        return "none"
    return {None: "unknown", True: "hard", False: "cone"}[survey.hard]


def _router(survey: Survey, own_hosts: Sequence[str]) -> list[Check]:
    kind = kind_of_router(survey, own_hosts)
    if kind == "unknown":
        return []
    if kind == "none":
        return [Check("router", "ok", "none translates addresses")]
    if kind == "cone":
        return [
            Check("router", "ok", "cone: one outer port for every destination, so links can leave relays")
        ]
    return [
        Check(
            "router",
            "note",
            "hard: another outer port for each destination, so links to others behind such routers stay on relays",
            "forward the peer's ports, or set the router's NAT to endpoint-independent (full cone)",
        )
    ]


def _relay(relay: SurveyedRelay) -> Check:
    place, name = relay.relay.address, "relay"
    if relay.round_trip_s is None:
        return Check(
            name,
            "note",
            f"{place} does not answer",
            "others are used; a relay on port 443 passes most firewalls",
        )
    if relay.answer is None:
        return Check(
            name,
            "note",
            f"{place} answers, but not as that relay",
            "others are used; nothing is to be done here",
        )
    found = f"{place}, {relay.round_trip_s * 1000:.0f} ms away"
    if relay.round_trip_s > LONG_RELAY_S:
        return Check(name, "note", found, "a relay in this part of the world would make relayed links faster")
    return Check(name, "ok", found)


def _way(trial: Trial) -> Check:
    name = f"way {trial.way}"
    if trial.took_s is not None:
        rtt = "" if trial.rtt_ms is None else f", then {trial.rtt_ms:.0f} ms a round trip"
        return Check(name, "ok", f"usable in {trial.took_s:.2f} s to {trial.to}{rtt}")
    if not trial.to:
        return Check(name, "note", f"not tried: {trial.why_not}", _untried(trial.way))
    if trial.way == DIRECT:
        remedy = "allow outgoing TCP connections to any port; until then a relay on port 443 carries them"
    elif trial.way == REVERSED:
        remedy = "forward the relay's TCP port, too, and name it with --relay-port; until then relays carry such links"
    elif trial.way == RELAYED:
        remedy = "allow outgoing TCP connections to the relay's port, or have a relay on --relay-port 443"
    else:
        remedy = "links stay on relays: forward the peer's ports, or put the router's NAT to full cone"
    return Check(
        name, "note" if trial.way != DIRECT else "problem", f"to {trial.to}: {trial.why_not}", remedy
    )


def _untried(way: str) -> str:
    return "have a dialable peer of the swarm offer a relay" if way == RELAYED else ""


def clock_check(views: Sequence[PeerView], wall_s: float) -> list[Check]:
    """This machine's clock beside those of the swarm. A sequence is its author's clock in milliseconds, or up to
    SET_ASIDE_S more if the author was started again."""
    clocks = [view.state.sequence / 1000 + view.age_s for view in views]
    if not clocks:
        return []
    ahead_s = wall_s - median(clocks)
    if -NOTED_CLOCK_S - SET_ASIDE_S <= ahead_s <= NOTED_CLOCK_S:
        return [Check("clock", "ok", "as the swarm's")]
    if ahead_s > 0:
        found = f"{ahead_s:.0f} s ahead of the swarm's"
    else:
        found = f"{-ahead_s - SET_ASIDE_S:.0f} to {-ahead_s:.0f} s behind the swarm's"
    state: State = "problem" if abs(ahead_s) > TOLERANCE_S else "note"
    return [Check("clock", state, found, "set the clock, and have the system keep it by NTP")]


def disk_checks(folders: Mapping[str, tuple[str, int | None]]) -> list[Check]:
    """Free bytes of the disks of folders, by the option that names each; None: it cannot be written."""
    checks = []
    for option, (folder, free_bytes) in folders.items():
        if free_bytes is None:
            found, remedy = f"{folder} cannot be written", f"name another folder with {option}"
            checks.append(Check("disk", "problem", found, remedy))
        elif free_bytes < LITTLE_DISK_BYTES:
            found, remedy = (
                f"{format_bytes(free_bytes)} free for {folder}",
                f"make room, or name another disk with {option}",
            )
            checks.append(Check("disk", "note", found, remedy))
        else:
            checks.append(Check("disk", "ok", f"{format_bytes(free_bytes)} free for {folder}"))
    return checks


def device_checks(device: str, cards: Sequence[str], unused: str | None) -> list[Check]:
    """What is computed on. `unused`: a sentence about a GPU that is not, with what to do."""
    found = f"computes on {device}" + (f"; cards: {', '.join(cards)}" if cards else "")
    if unused is not None:
        return [Check("device", "problem", found, unused)]
    return [Check("device", "ok", found)]


def death_checks(deaths: Sequence[Death]) -> list[Check]:
    """Fatal signals that ended the peer before, the newest last."""
    if not deaths:
        return []
    times = "" if len(deaths) == 1 else f", the newest of {len(deaths)} such deaths"
    remedy = "if it comes again, report it with what `molink-peer doctor --report` prints"
    return [Check("last death", "note", f"{deaths[-1]}{times}", remedy)]


def version_checks(versions: Mapping[str, str], views: Sequence[PeerView]) -> list[Check]:
    """`versions` of what runs here; `views`: peers of other protocols among them."""
    found = ", ".join(f"{name} {version}" for name, version in versions.items())
    newer = [view for view in views if view.facts.protocol_version > PROTOCOL_VERSION]
    if newer:
        found = f"{found}; {_counted(len(newer), 'peer')} of the swarm speak a newer protocol"
        return [Check("versions", "problem", found, "pip install --upgrade molink")]
    return [Check("versions", "ok", found)]


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
