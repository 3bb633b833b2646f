"""The serving emulation's tables; their columns are those of `serve`."""

from collections.abc import Sequence

from molink.simnet.emulate.rows import BASELINE, ServingRow
from molink.simnet.emulate.run import Emulation
from molink.simnet.presentation.tables import Column, Table
from molink.simnet.serve.output.table import METRICS, SETTINGS, failures, in_brackets

_RATE = (SETTINGS["rate_rps"],)
_TIMES = (Column("policy", "policy"), *METRICS[:3])
_USAGE = (
    Column("policy", "policy"),
    SETTINGS["micro_batches"],
    SETTINGS["prefill_chunk_tokens"],
    Column("throughput", "throughput_tps", "tokens/s", ".1f"),
    Column("decode\none way", "decode_one_way_ms", "ms", ".1f"),
    Column("99 % of\nthem", "decode_one_way_p99_ms", "ms", ".0f"),
    Column("engine\nbusy", "engine_busy", form=".0%"),
    Column("uplink\nbusy", "uplink_busy", form=".0%"),
    Column("CPU here,\nmost", lambda row: max(row.peer_cpu, row.driver_cpu, row.lines_cpu), form=".0%"),
)


def whose(emulation: Emulation) -> str:
    """Model and machines."""
    computing = "computed here" if emulation.device is None else f"timed as {emulation.device}"
    return f"{emulation.spec.name} on {emulation.peers} peers, {computing}"


def serving_table(emulation: Emulation, rows: Sequence[ServingRow]) -> Table:
    """A line for each row, rates apart; the paper's averages stand beside ours where it prints them."""
    title = (
        f"{whose(emulation)}; {emulation.bandwidth_mbps:g} Mbps, {emulation.delay_ms:g} ms one way; "
        f"averages over {emulation.duration_s:g} s"
    )
    return Table(title, _TIMES, rows, _RATE, (in_brackets(BASELINE), failures(rows)))


def usage_table(rows: Sequence[ServingRow]) -> Table:
    """How peers served, and what that took of what there is: a line for each row, rates apart."""
    return Table("How they served, and what it took", _USAGE, rows, _RATE)
