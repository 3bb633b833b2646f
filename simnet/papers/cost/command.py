"""`molink-simnet cost`: cost-profit margins of the MoLink system paper, and of anyone's swarm."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from molink.simnet.core.matrices import read_matrix
from molink.simnet.core.traces import read_trace
from molink.simnet.papers.cost.margins import Owned, Rented, income_per_hour, margin
from molink.simnet.papers.cost.paper import COST_TABLES, PrintedCosts
from molink.simnet.presentation.experiments import Run
from molink.simnet.presentation.options import (
    UnusedMatrix,
    UnusedSeed,
    UnusedTrace,
    option,
    require_not_negative,
    require_positive,
)
from molink.simnet.presentation.results import Findings
from molink.simnet.presentation.tables import Column, Table

EXAMPLE = "molink-simnet cost --throughput-tps 120 --devices 3 --device-price 1600 --token-price 0.25"

_OWN = "Cost-profit margins of your own figures"
_BY = (Column("table", "table"), Column("setting", "setting"))
_COLUMNS = (
    Column("system", "system"),
    Column("throughput", "throughput_tps", "tokens/s", "g"),
    Column("income", "income_per_hour", "an hour", ".3f"),
    Column("cost", "cost_per_hour", "an hour", ".3f"),
    Column("margin", "margin", form=".1%", printed="paper_margin"),
    Column("cost that the\npaper's imply", "implied_cost_per_hour", form=".3f"),
    Column("margin\nby that", "implied_margin", form=".1%"),
)


@dataclass(frozen=True, slots=True)
class CostRow:
    """One cell. Margins are parts of the cost; money is in the table's currency."""

    table: str
    setting: str
    system: str
    throughput_tps: float
    income_per_hour: float
    cost_per_hour: float
    """By the prices of the table's caption, or by those that were given."""
    margin: float
    implied_cost_per_hour: float | None
    """From which the paper's margins follow."""
    implied_margin: float | None
    paper_margin: float | None


def cost(
    table: Annotated[str | None, option("Only this table of the paper.", "3|4")] = None,
    throughput_tps: Annotated[float | None, option("Of your own swarm: tokens a second.", "TPS")] = None,
    token_price: Annotated[float, option("Of a million output tokens.", "MONEY")] = 1.8,
    devices: Annotated[int, option("Of your own swarm.", "N", least=1)] = 2,
    device_price: Annotated[float, option("Of one, to buy.", "MONEY")] = 12999.0,
    years: Annotated[float, option("That it is used.", "YEARS")] = 5.0,
    power_w: Annotated[float, option("Of one device.", "W")] = 450.0,
    power_price: Annotated[float, option("Of a kilowatt-hour.", "MONEY")] = 0.538,
    rent_per_hour: Annotated[float | None, option("Of one device, instead of buying it.", "MONEY")] = None,
    latency_matrix: UnusedMatrix = None,
    trace: UnusedTrace = None,
    seed: UnusedSeed = 0,
) -> Run:
    """What serving earns beyond its cost.

    With --throughput-tps, of your own swarm. Otherwise the paper's Tables 3 (machines at home, in yuan) and 4 (machines
    of a cloud, in dollars): margins by the prices of their captions, and by the cost from which the printed margins
    follow, since the two differ.
    """
    if table is not None and table not in COST_TABLES:
        raise ValueError(f"--table must be 3 or 4, got {table}")
    require_positive("--years", years)
    for name, value in (
        ("--throughput-tps", throughput_tps),
        ("--token-price", token_price),
        ("--device-price", device_price),
        ("--power-w", power_w),
        ("--power-price", power_price),
        ("--rent-per-hour", rent_per_hour),
    ):
        require_not_negative(name, 0.0 if value is None else value)
    if latency_matrix is not None:
        read_matrix(latency_matrix)
    if trace is not None:
        read_trace(trace)
    parameters: dict[str, object] = {
        "table": table,
        "throughput_tps": throughput_tps,
        "latency_matrix": None if latency_matrix is None else str(latency_matrix),
        "trace": None if trace is None else str(trace),
        "seed": seed,
    }
    if throughput_tps is None:
        rows = [row for name in COST_TABLES if table in (None, name) for row in _of_paper(name)]
    else:
        machines = (
            Owned(devices, device_price, years, power_w, power_price)
            if rent_per_hour is None
            else Rented(devices, rent_per_hour)
        )
        rows = [_own(throughput_tps, token_price, machines)]
        parameters |= {"token_price": token_price, "machines": asdict(machines)}
    title, by = ("Cost-profit margins", _BY) if throughput_tps is None else (_OWN, ())
    found = Findings("cost", title, parameters, rows, [Table(title, _COLUMNS, rows, by=by)])

    def run(_: Path | None) -> Findings:
        return found

    return run


def _of_paper(name: str) -> Iterator[CostRow]:
    printed: PrintedCosts = COST_TABLES[name]
    for (setting, system), cell in printed.cells.items():
        income = income_per_hour(cell.throughput_tps, printed.token_price)
        cost_per_hour = printed.machines[system].cost_per_hour
        implied = printed.implied_cost_per_hour(system)
        yield CostRow(
            table=name,
            setting=setting,
            system=system,
            throughput_tps=cell.throughput_tps,
            income_per_hour=income,
            cost_per_hour=cost_per_hour,
            margin=margin(income, cost_per_hour),
            implied_cost_per_hour=implied,
            implied_margin=margin(income, implied),
            paper_margin=cell.margin,
        )


def _own(throughput_tps: float, token_price: float, machines: Owned | Rented) -> CostRow:
    income = income_per_hour(throughput_tps, token_price)
    cost_per_hour = machines.cost_per_hour
    return CostRow(
        table="own",
        setting="",
        system="yours",
        throughput_tps=throughput_tps,
        income_per_hour=income,
        cost_per_hour=cost_per_hour,
        margin=margin(income, cost_per_hour),
        implied_cost_per_hour=None,
        implied_margin=None,
        paper_margin=None,
    )
