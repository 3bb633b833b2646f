"""What a run says: one row of figures, and a series by minute. JSON-ready, and the same for the same seed."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from molink.simnet.swarm.members.accounts import MINUTE_S, EndedSession, SessionOutcome
from molink.simnet.swarm.members.traffic import BUDGET_KBIT_S, KINDS

if TYPE_CHECKING:
    from molink.simnet.swarm.world import SwarmWorld

_UNIT = "_kbit_s"


@dataclass(frozen=True, slots=True)
class SwarmRow:
    """One run. Times are means and percentiles over sessions; None where there is none to tell of."""

    name: str
    peers: int
    peers_at_end: int
    announced_at_end: int
    """Peers in the tables at the end: those that crashed among them, until what they said expires."""
    sessions: int
    completed: int
    success_rate: float
    no_circuit: int
    unavailable: int
    peer_lost: int
    tpot_mean_ms: float | None
    tpot_p50_ms: float | None
    tpot_p95_ms: float | None
    ttft_mean_ms: float | None
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None
    tokens_per_trip: float | None
    """That a time round a circuit brought, behind the first token; 1 without guesses."""
    tokens_per_s: float
    """That clients got, over the time in which requests came."""
    hops: float | None
    mean_open_sessions: float
    attempts_per_session: float
    leases_granted: int
    leases_refused: Mapping[str, int]
    losses: int
    """Peers that went away from under a session."""
    recomputed_tokens: int
    gone_over: int
    """Times that a session has left a peer that was about to go, without a pause: no losses."""
    succeeded: int
    """Times that a session has gone over to a better circuit of other spans, which had computed it anew."""
    successors_given_up: int
    switches: int
    """Losses after which a partner took the peer's place; after the others another circuit was planned."""
    stalls: int
    stall_p50_s: float | None
    """From the loss of a peer to the session's next token, of the sessions that got one."""
    stall_p95_s: float | None
    partners_found: int
    partners_lost: int
    without_partner: Mapping[str, int]
    """Hops that had none when their circuit was given up, by the reason."""
    replication_kbit_s: float
    """KV cache lines for partners that the average peer sends on the data plane."""
    copies_share: float
    """Of the KV cache that is leased, what copies have, on average over time."""
    joined: int
    left: int
    crashed: int
    moves: int
    """To other layers, that were made."""
    moves_called_off: int
    """Of which others had been told."""
    looks: int
    """At whether to move, and about how many more peers would have taken."""
    looks_left_out: int
    traffic_kbit_s: float
    """That the average peer sends on the control plane, in the minutes in which requests come."""
    busiest_minute_kbit_s: float
    budget_kbit_s: float
    traffic_by_kind_kbit_s: Mapping[str, float]
    largest_state_bytes: int
    mean_state_bytes: float
    gateway_pull_kbit_s: float
    """That the average gateway copies."""


def flat_rows(rows: Sequence[SwarmRow]) -> list[dict[str, object]]:
    """Rows with a field for each name of what is counted by name, 0 where only other rows have that name, as
    `leases_refused_full`, `traffic_by_kind_frames_kbit_s`; and the sum, as `leases_refused`."""
    counted = {
        field.name: sorted({key for row in rows for key in getattr(row, field.name)})
        for field in fields(SwarmRow)
        if any(isinstance(getattr(row, field.name), Mapping) for row in rows)
    }
    found = []
    for row in rows:
        flat: dict[str, object] = {}
        for name, value in asdict(row).items():
            if name not in counted:
                flat[name] = value
            elif not name.endswith(_UNIT):  # rates have their sum beside them
                flat[name] = sum(value.values())
            for key in counted.get(name, ()):
                flat[_field_of(name, key)] = value.get(key, 0)
        found.append(flat)
    return found


def _field_of(name: str, key: str) -> str:
    """Of one of a field's counts; the unit stays last."""
    unit = _UNIT if name.endswith(_UNIT) else ""
    plain = re.sub(r"\W+", "_", key).strip("_").lower()
    return f"{name.removesuffix(_UNIT)}_{plain}{unit}"


def swarm_row(world: "SwarmWorld", name: str) -> SwarmRow:
    """Of a run that has ended."""
    accounts, traffic, ended = world.accounts, world.traffic, world.accounts.ended
    partners, peers = accounts.partners, [each.peers for each in world.minutes]
    lasted_s = max(MINUTE_S, world.timeline.now_s)
    outcomes = {outcome: sum(one.outcome is outcome for one in ended) for outcome in SessionOutcome}
    tpots = [one.tpot_ms for one in ended if one.tpot_ms is not None]
    ttfts = [one.ttft_ms for one in ended if one.ttft_ms is not None]
    hops = [one.hops for one in ended if one.outcome is SessionOutcome.COMPLETED]
    by_kind = {kind: traffic.mean_kbit_s(kind, world.settings.duration_s) for kind in KINDS}
    return SwarmRow(
        name=name,
        peers=world.settings.peers,
        peers_at_end=sum(member.alive for member in world.members.values()),
        announced_at_end=len(world.bulletin),
        sessions=accounts.arrived,
        completed=outcomes[SessionOutcome.COMPLETED],
        success_rate=outcomes[SessionOutcome.COMPLETED] / max(1, accounts.arrived),
        no_circuit=outcomes[SessionOutcome.NO_CIRCUIT],
        unavailable=outcomes[SessionOutcome.UNAVAILABLE],
        peer_lost=outcomes[SessionOutcome.PEER_LOST],
        tpot_mean_ms=_mean(tpots),
        tpot_p50_ms=_percentile(tpots, 50),
        tpot_p95_ms=_percentile(tpots, 95),
        ttft_mean_ms=_mean(ttfts),
        ttft_p50_ms=_percentile(ttfts, 50),
        ttft_p95_ms=_percentile(ttfts, 95),
        tokens_per_trip=_tokens_per_trip(ended),
        tokens_per_s=sum(one.tokens for one in ended) / world.settings.duration_s,
        hops=_mean(hops),
        mean_open_sessions=accounts.mean_open,
        attempts_per_session=sum(one.attempts for one in ended) / max(1, accounts.arrived),
        leases_granted=accounts.granted,
        leases_refused=dict(sorted(accounts.refused.items())),
        losses=sum(one.losses for one in ended),
        recomputed_tokens=sum(one.recomputed_tokens for one in ended),
        gone_over=accounts.gone_over,
        succeeded=accounts.succeeded,
        successors_given_up=accounts.successors_given_up,
        switches=partners.switches,
        stalls=len(accounts.stalls_s),
        stall_p50_s=_percentile(accounts.stalls_s, 50),
        stall_p95_s=_percentile(accounts.stalls_s, 95),
        partners_found=partners.found,
        partners_lost=partners.lost,
        without_partner=dict(sorted(partners.none.items())),
        replication_kbit_s=partners.copied_bytes
        * 8
        / 1000
        / lasted_s
        / (_mean(peers) or world.settings.peers),
        copies_share=partners.copy_leased_bytes / max(1, partners.leased_bytes),
        joined=accounts.joined,
        left=accounts.left,
        crashed=accounts.crashed,
        moves=world.moves.made,
        moves_called_off=world.moves.called_off,
        looks=world.moves.looks,
        looks_left_out=world.moves.left_out,
        traffic_kbit_s=sum(by_kind.values()),
        busiest_minute_kbit_s=max((sum(each.traffic_kbit_s.values()) for each in world.minutes), default=0.0),
        budget_kbit_s=BUDGET_KBIT_S,
        traffic_by_kind_kbit_s=by_kind,
        largest_state_bytes=max(traffic.state_bytes, default=0),
        mean_state_bytes=_mean(traffic.state_bytes) or 0.0,
        gateway_pull_kbit_s=traffic.pulled_bytes * 8 / 1000 / lasted_s / max(1, len(world.gateways)),
    )


SERIES = (
    "minute",
    "peers",
    "announced",
    "open_sessions",
    "ended",
    "success_rate",
    "tpot_ms",
    "ttft_ms",
    "moves",
    *KINDS,
)


def swarm_series(world: "SwarmWorld") -> list[dict[str, float | int | None]]:
    """By minute: sessions count in the one in which they ended; `KINDS` are kbit/s that the average peer sends."""
    ended: dict[int, list[EndedSession]] = {}
    for one in world.accounts.ended:
        ended.setdefault(int(one.end_s // MINUTE_S) + 1, []).append(one)
    series = []
    for each in world.minutes:
        those = ended.get(each.minute, [])
        completed = sum(one.outcome is SessionOutcome.COMPLETED for one in those)
        series.append(
            {
                "minute": each.minute,
                "peers": each.peers,
                "announced": each.announced,
                "open_sessions": each.open_sessions,
                "ended": len(those),
                "success_rate": completed / len(those) if those else None,
                "tpot_ms": _mean([one.tpot_ms for one in those if one.tpot_ms is not None]),
                "ttft_ms": _mean([one.ttft_ms for one in those if one.ttft_ms is not None]),
                "moves": world.moves.made_in[each.minute],
                **each.traffic_kbit_s,
            }
        )
    return series


def _tokens_per_trip(ended: Sequence[EndedSession]) -> float | None:
    """Without the first tokens, which prompts bring."""
    trips = sum(one.trips for one in ended)
    return sum(max(0, one.tokens - 1) for one in ended) / trips if trips else None


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return float(np.percentile(values, percent)) if values else None
