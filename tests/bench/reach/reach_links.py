"""Links between two homes behind NATs, and the relay between them: what the product's own ends say, in namespaces."""

import sys
from contextlib import ExitStack
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.tables import Table
from support.links.homes import RELAY_PORT, dialled, started
from support.links.namespaces import Internet

DIRECT_BAR_MS, RELAYED_BAR_MS, PUNCHED_BAR_MS = 300, 500, 500
PUNCHED_ECHO_BAR_MS, RELAYED_ECHO_BAR_MS = 3, 5
ROUND_TRIP_MS = 40
GAP_BAR_MS = 2 * ROUND_TRIP_MS
LOAD_MBPS, LOAD_S = 100, 8.0
RELAY_BAR_CORES = 0.1
RELAY, ASKER, ASKED = "192.0.2.1", "203.0.113.10", "203.0.114.20"


def links(table: Table, rounds: int) -> None:
    """Homes 40 ms apart, relays 30 ms from each: until a link is usable, its echo of 4 KB, and the move to a hole."""
    direct = [dialled("port", "open", slow=True, wait_s=0.2) for _ in range(rounds)]
    leg = [dialled("port", "volunteer", slow=True, wait_s=0.2) for _ in range(rounds)]
    relayed = [dialled("symmetric", "symmetric", slow=True, wait_s=0.2) for _ in range(rounds)]
    moved = [dialled("port", "port", slow=True, echoes=False) for _ in range(rounds)]
    assert {run["way"] for run in (*direct, *leg)} == {"direct"}
    assert {run["way"] for run in relayed} == {"relayed"}
    assert {run["way"] for run in moved} == {"punched"}
    table.judge("direct: usable after", _of(direct, "usable_ms"), "ms", DIRECT_BAR_MS)
    usable_ms = median([run["usable_ms"] for run in (*relayed, *moved)])
    table.judge("relayed: usable after", usable_ms, "ms", RELAYED_BAR_MS)
    later_ms = median([run["moved_ms"] - run["usable_ms"] for run in moved])
    table.judge("punched: later than relayed by", later_ms, "ms", PUNCHED_BAR_MS)
    over_ms = _of(moved, "echo_ms") - _of(direct, "echo_ms")
    table.judge(
        "4 KB echo, punched over direct", over_ms, "ms", PUNCHED_ECHO_BAR_MS, direct_ms=_of(direct, "echo_ms")
    )
    legs_ms = 2 * _of(leg, "echo_ms")
    over_ms = _of(relayed, "echo_ms") - legs_ms
    table.judge("4 KB echo, relayed over its two legs", over_ms, "ms", RELAYED_ECHO_BAR_MS, legs_ms=legs_ms)
    table.note("4 KB echo: direct, punched, relayed, two legs", ", ".join(
        f"{ms:.1f}" for ms in (_of(direct, "echo_ms"), _of(moved, "echo_ms"), _of(relayed, "echo_ms"), legs_ms)
    ))  # fmt: skip
    gap_ms = max(run["gap_ms"] for run in moved)
    table.judge("longest gap of rows each 10 ms, moving", gap_ms, "ms", GAP_BAR_MS)
    assert all(run["in_order"] for run in moved)


def relay(table: Table, rounds: int) -> None:
    """A relay's processor time while one pair sends 100 Mbps over it, in pieces as a link's packets are."""
    for piece_bytes in (65536, 16384, 4096):
        found = [_relay_cores(piece_bytes) for _ in range(rounds)]
        cores, mbps = median([one for one, _ in found]), median([one for _, one in found])
        name = f"relay at {LOAD_MBPS} Mbps, pieces of {piece_bytes >> 10} KB"
        table.judge(name, cores * LOAD_MBPS / mbps, "cores", RELAY_BAR_CORES, mbps=mbps)


def _relay_cores(piece_bytes: int) -> tuple[float, float]:
    with ExitStack() as stack:
        net = stack.enter_context(Internet())
        volunteer = started(
            stack, net.command(net.volunteer(RELAY)), role="relay", port=RELAY_PORT, mbps=10 * LOAD_MBPS
        )
        places = [{"peer_id": volunteer.line()["peer_id"], "address": f"{RELAY}:{RELAY_PORT}"}]
        sink = started(stack, net.command(net.home("port", ASKED)), role="sink", relays=places)
        asked = {
            "to": sink.line()["peer_id"],
            "mbps": LOAD_MBPS,
            "seconds": LOAD_S,
            "piece_bytes": piece_bytes,
        }
        pump = started(stack, net.command(net.home("port", ASKER)), role="pump", relays=places, **asked)
        assert pump.line()["began"]
        volunteer.tell("")
        before = volunteer.line()
        mbps = float(pump.line()["mbps"])
        volunteer.tell("")
        after = volunteer.line()
        return (after["worked_s"] - before["worked_s"]) / (after["at_s"] - before["at_s"]), mbps


def _of(runs: list[dict[str, float]], name: str) -> float:
    return median([run[name] for run in runs])
