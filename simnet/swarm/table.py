"""What `molink-simnet swarm` shows to people: a line for each figure, a column for each run."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from molink.simnet.presentation.figures import Figure, Panel, Series
from molink.simnet.presentation.tables import Column, Table
from molink.simnet.swarm.members.traffic import BUDGET_KBIT_S, KINDS
from molink.simnet.swarm.report import SERIES, SwarmRow


def swarm_table(rows: Sequence[SwarmRow]) -> Table:
    """Of at least one run."""
    return Table("A swarm in virtual time", _LINES, rows, on_its_side="name")


def _fields(*names: str, form: str = ",") -> Column:
    """The line's name, and the fields whose values are in it."""
    return Column(names[0], lambda row: ", ".join(format(getattr(row, name), form) for name in names[1:]))


def _times(name: str, metric: str, unit: str = "ms") -> Column:
    """Mean, if there is one, median and 95th percentile."""

    def value(row: SwarmRow) -> str | None:
        found = [getattr(row, f"{metric}_{part}_{unit}", None) for part in ("mean", "p50", "p95")]
        known = [one for one in found if one is not None]
        form = ",.0f" if unit == "ms" else ".1f"
        return ", ".join(format(one, form) for one in known) or None

    return Column(name, value, unit)


def _counts(name: str, field: str) -> Column:
    def value(row: SwarmRow) -> str:
        return ", ".join(f"{count:,} {why}" for why, count in getattr(row, field).items()) or "none"

    return Column(name, value)


def _kind(kind: str) -> Column:
    return Column(kind, lambda row: row.traffic_by_kind_kbit_s[kind], "kbit/s", ".2f", sub=True)


def _sought(column: Column) -> Column:
    """Left out where nobody sought a partner."""

    def value(row: SwarmRow) -> object:
        made = column.value(row) if callable(column.value) else getattr(row, column.value)
        return made if row.partners_found or row.without_partner else None

    return replace(column, value=value)


def _ends(column: Column) -> Column:
    return replace(column, ends=True)


_LINES = (
    _fields("peers at the beginning, at the end", "peers", "peers_at_end"),
    _fields("came, left, crashed", "joined", "left", "crashed"),
    _fields("peers in the tables at the end", "announced_at_end"),
    _fields("moves to other layers, called off", "moves", "moves_called_off"),
    _ends(_fields("looks at whether to move, left out", "looks", "looks_left_out")),
    _fields("sessions", "sessions"),
    Column("completed", lambda row: f"{row.completed:,} ({row.success_rate:.2%})"),
    _fields("no circuit, unavailable, peer lost", "no_circuit", "unavailable", "peer_lost"),
    Column("open on average", "mean_open_sessions", form=".1f", ends=True),
    _times("TPOT mean, median, 95 %", "tpot"),
    _times("TTFT mean, median, 95 %", "ttft"),
    Column("tokens of a trip", "tokens_per_trip", form=".2f"),
    Column("throughput", "tokens_per_s", "tokens/s", ".1f"),
    Column("hops", "hops", form=".1f", ends=True),
    Column("circuits planned for a session", "attempts_per_session", form=".2f"),
    Column("leases granted", "leases_granted", form=","),
    _counts("hops that refused or were gone", "leases_refused"),
    _fields("losses in mid-session, tokens recomputed", "losses", "recomputed_tokens"),
    Column("sessions that left a peer before it went", "gone_over", form=","),
    _fields("sessions gone over to other spans, given up", "succeeded", "successors_given_up"),
    _ends(_times("from a loss to the next token median, 95 %", "stall", "s")),
    _sought(_fields("partners found, lost", "partners_found", "partners_lost")),
    _sought(_counts("hops that got none", "without_partner")),
    _sought(Column("losses that a partner took over", "switches", form=",")),
    _sought(Column("copies of a peer", "replication_kbit_s", "kbit/s", ".1f")),
    _sought(Column("copies, of leased KV cache", "copies_share", form=".1%", ends=True)),
    Column("control plane of a peer", "traffic_kbit_s", "kbit/s", ".1f"),
    *map(_kind, KINDS),
    Column("its budget", "budget_kbit_s", "kbit/s", "g"),
    Column("in the busiest minute", "busiest_minute_kbit_s", "kbit/s", ".1f"),
    Column(
        "announcement mean, largest",
        lambda row: f"{row.mean_state_bytes:.0f}, {row.largest_state_bytes}",
        "bytes",
    ),
    Column("tables that a gateway copies", "gateway_pull_kbit_s", "kbit/s", ".1f"),
)


Minutes = Sequence[Mapping[str, float | int | None]]
_FIGURES: Mapping[str, tuple[str, Sequence[str]]] = {
    "tpot": ("TPOT of sessions that ended, ms", ("tpot_ms",)),
    "success-rate": ("sessions that were completed, of those that ended", ("success_rate",)),
    "traffic": ("control plane, kbit/s that a peer sends", KINDS),
}
_MINUTES: Sequence[tuple[str, Sequence[str]]] = (
    ("peers", ("peers", "announced")),
    ("sessions", ("open_sessions", "ended")),
    ("moves to other layers", ("moves",)),
)


def swarm_figures(runs: Mapping[str, Minutes]) -> list[Figure]:
    """TPOT, success rate and traffic over time, with a line for each run, or for each kind of traffic; and who was
    there, whose table, `swarm-minutes.csv`, has the whole series."""
    there = [_panel(runs, label, columns) for label, columns in _MINUTES]
    caption = "Peers, sessions and moves by minute"
    drawn = [Figure("swarm-minutes", caption, there, ("run", *SERIES), _lines(runs, SERIES))]
    for name, (label, columns) in _FIGURES.items():
        panel = _panel(runs, label, columns, BUDGET_KBIT_S if name == "traffic" else None)
        header = ("run", "minute", *columns)
        caption = f"{label[0].upper()}{label[1:]}"
        drawn.append(
            Figure(f"swarm-{name}", caption, [panel], header, _lines(runs, header[1:]), size=(7.5, 3.8))
        )
    return drawn


def _panel(
    runs: Mapping[str, Minutes], label: str, columns: Sequence[str], limit: float | None = None
) -> Panel:
    """A line for each run and column, over the minutes."""
    series = [
        Series(
            ", ".join(part for part in (run, column) if len(columns) > 1 or part == run),
            [line["minute"] or 0 for line in minutes],
            [line[column] for line in minutes],
        )
        for run, minutes in runs.items()
        for column in columns
    ]
    return Panel(series, "minutes", label, limit=limit, limit_name="budget")


def _lines(runs: Mapping[str, Minutes], columns: Sequence[str]) -> list[list[object]]:
    return [[run, *(line[column] for column in columns)] for run, minutes in runs.items() for line in minutes]
