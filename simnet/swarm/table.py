"""What `molink-simnet swarm` shows to people: a line for each figure, a column for each run."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from molink.simnet.swarm.report import SwarmRow

if TYPE_CHECKING:
    from rich.table import Table


def swarm_table(rows: Sequence[SwarmRow]) -> "Table":
    """Of at least one run."""
    from rich.table import Table

    table = Table(title="A swarm in virtual time", title_justify="left")
    table.add_column("what")
    for row in rows:
        table.add_column(row.name, justify="right")
    lines = [_lines(row) for row in rows]
    for number, (what, _, ends) in enumerate(lines[0]):
        table.add_row(what, *(one[number][1] for one in lines), end_section=ends)
    return table


def _lines(row: SwarmRow) -> list[tuple[str, str, bool]]:
    """What, how much, and whether a section ends with it."""
    refused = ", ".join(f"{count} {code}" for code, count in row.leases_refused.items()) or "none"
    lines = [
        ("peers at the beginning, at the end", f"{row.peers:,}, {row.peers_at_end:,}", False),
        ("came, left, crashed", f"{row.joined:,}, {row.left:,}, {row.crashed:,}", False),
        ("peers in the tables at the end", f"{row.announced_at_end:,}", False),
        ("moves to other layers, called off", f"{row.moves:,}, {row.moves_called_off:,}", False),
        ("looks at whether to move, left out", f"{row.looks:,}, {row.looks_left_out:,}", True),
        ("sessions", f"{row.sessions:,}", False),
        ("completed", f"{row.completed:,} ({100 * row.success_rate:.2f} %)", False),
        (
            "no circuit, unavailable, peer lost",
            f"{row.no_circuit}, {row.unavailable}, {row.peer_lost}",
            False,
        ),
        ("open on average", f"{row.mean_open_sessions:.1f}", True),
        ("TPOT mean, median, 95 %", _times(row.tpot_mean_ms, row.tpot_p50_ms, row.tpot_p95_ms), False),
        ("TTFT mean, median, 95 %", _times(row.ttft_mean_ms, row.ttft_p50_ms, row.ttft_p95_ms), False),
        ("tokens a second", f"{row.tokens_per_s:.1f}", False),
        ("hops", "-" if row.hops is None else f"{row.hops:.1f}", True),
        ("circuits planned for a session", f"{row.attempts_per_session:.2f}", False),
        ("leases granted", f"{row.leases_granted:,}", False),
        ("hops that refused or were gone", refused, False),
        ("losses in mid-session, tokens recomputed", f"{row.losses:,}, {row.recomputed_tokens:,}", False),
        ("from a loss to the next token median, 95 %", _stall(row), True),
        *_partner_lines(row),
        ("control plane of a peer, budget", f"{row.traffic_kbit_s:.1f}, {row.budget_kbit_s:g} kbit/s", False),
        ("in the busiest minute", f"{row.busiest_minute_kbit_s:.1f} kbit/s", False),
    ]
    lines += [
        (f"  {kind}", f"{kbit_s:.2f} kbit/s", False) for kind, kbit_s in row.traffic_by_kind_kbit_s.items()
    ]
    return [
        *lines,
        ("announcement mean, largest", f"{row.mean_state_bytes:.0f}, {row.largest_state_bytes} bytes", False),
        ("tables that a gateway copies", f"{row.gateway_pull_kbit_s:.1f} kbit/s", False),
    ]


def _partner_lines(row: SwarmRow) -> list[tuple[str, str, bool]]:
    """None where nobody sought a partner."""
    if not (row.partners_found or row.without_partner):
        return []
    without = ", ".join(f"{count:,} {reason}" for reason, count in row.without_partner.items()) or "none"
    return [
        ("partners found, lost", f"{row.partners_found:,}, {row.partners_lost:,}", False),
        ("hops that got none", without, False),
        ("losses that a partner took over", f"{row.switches:,}", False),
        (
            "copies of a peer, of leased KV cache",
            f"{row.replication_kbit_s:.1f} kbit/s, {100 * row.copies_share:.1f} %",
            True,
        ),
    ]


def _stall(row: SwarmRow) -> str:
    if row.stall_p50_s is None or row.stall_p95_s is None:
        return "-"
    return f"{row.stall_p50_s:.1f}, {row.stall_p95_s:.1f} s"


def _times(mean_ms: float | None, median_ms: float | None, high_ms: float | None) -> str:
    if mean_ms is None or median_ms is None or high_ms is None:
        return "-"
    return f"{mean_ms:,.0f}, {median_ms:,.0f}, {high_ms:,.0f} ms"
