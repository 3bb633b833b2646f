"""`molink-simnet cost`: cost-profit margins of the MoLink system paper, and of anyone's swarm."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from molink.commands import EXIT_USAGE, CommandFailed, Debug, Json, Verbose, start_logging
from molink.simnet.papers.cost.margins import Owned, Rented, income_per_hour, margin
from molink.simnet.papers.cost.paper import COST_TABLES, PrintedCosts
from molink.simnet.presentation.options import Output, require_not_negative, require_positive
from molink.simnet.presentation.results import Findings, deliver, output_folder

if TYPE_CHECKING:
    from rich.table import Table as RichTable

EXAMPLE = "molink-simnet cost --throughput-tps 120 --devices 3 --device-price 1600 --token-price 0.25"

TableOption = Annotated[
    str | None,
    typer.Option("--table", metavar="3|4", help="Only this table of the paper.", show_default=False),
]
Throughput = Annotated[
    float | None,
    typer.Option(
        "--throughput-tps", metavar="TPS", help="Of your own swarm: tokens a second.", show_default=False
    ),
]
TokenPrice = Annotated[
    float, typer.Option("--token-price", metavar="MONEY", help="Of a million output tokens.")
]
Devices = Annotated[int, typer.Option(metavar="N", min=1, help="Of your own swarm.")]
DevicePrice = Annotated[float, typer.Option("--device-price", metavar="MONEY", help="Of one, to buy.")]
Years = Annotated[float, typer.Option(metavar="YEARS", help="That it is used.")]
Power = Annotated[float, typer.Option("--power-w", metavar="W", help="Of one device.")]
PowerPrice = Annotated[float, typer.Option("--power-price", metavar="MONEY", help="Of a kilowatt-hour.")]
Rent = Annotated[
    float | None,
    typer.Option(
        "--rent-per-hour", metavar="MONEY", help="Of one device, instead of buying it.", show_default=False
    ),
]


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
    table: TableOption = None,
    throughput_tps: Throughput = None,
    token_price: TokenPrice = 1.8,
    devices: Devices = 2,
    device_price: DevicePrice = 12999.0,
    years: Years = 5.0,
    power_w: Power = 450.0,
    power_price: PowerPrice = 0.538,
    rent_per_hour: Rent = None,
    output: Output = None,
    as_json: Json = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """What serving earns beyond its cost.

    With --throughput-tps, of your own swarm. Otherwise the paper's Tables 3 (machines at home, in yuan) and 4 (machines
    of a cloud, in dollars): margins by the prices of their captions, and by the cost from which the printed margins
    follow, since the two differ.
    """
    start_logging(verbose=verbose, debug=debug)
    if table is not None and table not in COST_TABLES:
        raise CommandFailed(f"--table must be 3 or 4, got {table}", EXIT_USAGE)
    try:
        require_positive("--years", years)
        for option, value in (
            ("--throughput-tps", throughput_tps),
            ("--token-price", token_price),
            ("--device-price", device_price),
            ("--power-w", power_w),
            ("--power-price", power_price),
            ("--rent-per-hour", rent_per_hour),
        ):
            require_not_negative(option, 0.0 if value is None else value)
        if throughput_tps is None:
            rows = [row for name in COST_TABLES if table in (None, name) for row in _of_paper(name)]
        else:
            machines = (
                Owned(devices, device_price, years, power_w, power_price)
                if rent_per_hour is None
                else Rented(devices, rent_per_hour)
            )
            rows = [_own(throughput_tps, token_price, machines)]
    except ValueError as error:
        raise CommandFailed(str(error), EXIT_USAGE) from error
    parameters: dict[str, object] = {"table": table, "throughput_tps": throughput_tps}
    if throughput_tps is not None:
        parameters |= {"token_price": token_price, "machines": asdict(machines)}
    found = Findings("cost", "Cost-profit margins", parameters, [asdict(row) for row in rows], [_table(rows)])
    deliver(found, as_json=as_json, folder=output_folder(output))


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


def _table(rows: list[CostRow]) -> "RichTable":
    from rich.table import Table

    with_paper = any(row.paper_margin is not None for row in rows)
    table = Table(title="Cost-profit margins", title_justify="left")
    headings = ["table", "setting", "system", "tokens/s", "income\nan hour", "cost\nan hour", "margin"]
    headings += ["cost that the\nprinted ones imply", "margin\nby that", "paper"] if with_paper else []
    for heading in headings:
        table.add_column(heading, justify="left" if heading in headings[:3] else "right")
    for number, row in enumerate(rows):
        ends = number + 1 == len(rows) or rows[number + 1].setting != row.setting
        cells = [row.table, row.setting, row.system, f"{row.throughput_tps:g}", f"{row.income_per_hour:.3f}"]
        cells += [f"{row.cost_per_hour:.3f}", f"{100 * row.margin:.1f} %"]
        if row.implied_cost_per_hour is not None and row.implied_margin is not None:
            cells += [f"{row.implied_cost_per_hour:.3f}", f"{100 * row.implied_margin:.1f} %"]
        if row.paper_margin is not None:
            cells.append(f"{100 * row.paper_margin:.1f} %")
        table.add_row(*cells, end_section=ends)
    return table
