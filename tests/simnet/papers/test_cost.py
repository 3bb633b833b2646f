"""Costs and margins, against every number of the MoLink system paper's Tables 3 and 4."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.commands import run_app
from molink.simnet.cli import app
from molink.simnet.papers.cost.margins import Owned, Rented, implied_cost_per_hour, income_per_hour, margin
from molink.simnet.papers.cost.paper import A100, COST_TABLES, FOUR_4090, H20, TABLE_3, TABLE_4
from molink.simnet.serve.paper import MOLINK, SYSTEM_TABLE_2, VLLM, LineSetting

CELLS = [(name, line, system) for name, table in COST_TABLES.items() for line, system in table.cells]


@pytest.mark.parametrize(("name", "line", "system"), CELLS)
def test_the_implied_cost_gives_every_printed_margin(name: str, line: str, system: str) -> None:
    table = COST_TABLES[name]
    cell = table.cells[line, system]
    income = income_per_hour(cell.throughput_tps, table.token_price)
    # printed to a whole percent in Table 4, to a tenth in Table 3
    assert margin(income, table.implied_cost_per_hour(system)) == pytest.approx(cell.margin, abs=0.009)


def test_captions_and_margins_contradict_each_other_as_we_say() -> None:
    assert TABLE_3.machines[MOLINK].cost_per_hour == pytest.approx(1.078, abs=0.001)
    assert TABLE_3.implied_cost_per_hour(MOLINK) == pytest.approx(0.770, abs=0.001)
    assert TABLE_4.implied_cost_per_hour(H20) == pytest.approx(TABLE_4.machines[H20].cost_per_hour, abs=0.005)
    assert TABLE_4.implied_cost_per_hour(A100) == pytest.approx(1.20, abs=0.005)
    assert TABLE_4.implied_cost_per_hour(FOUR_4090) / 4 == pytest.approx(0.283, abs=0.001)


def test_the_gain_over_vllm_of_458_percent_is_over_petals_at_the_throughput_of_table_2() -> None:
    fast = SYSTEM_TABLE_2[LineSetting(0.5, 10000, 10), MOLINK].throughput_tps
    assert fast == 119.11
    assert TABLE_3.cells["10 Gbps, 0.5/s", MOLINK].throughput_tps == 105.687
    assert fast / 21.332 - 1 == pytest.approx(4.58, abs=0.01)


@given(tps=st.floats(0.01, 1e5), price=st.floats(0.01, 100), cost=st.floats(0.01, 1e4))
def test_a_cost_follows_from_its_margin(tps: float, price: float, cost: float) -> None:
    income = income_per_hour(tps, price)
    found = margin(income, cost)
    if found > -0.999:
        assert implied_cost_per_hour(tps, price, found) == pytest.approx(cost, rel=1e-6)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="years above 0"):
        Owned(1, 1.0, 0.0, 1.0, 1.0)
    with pytest.raises(ValueError, match="no negative rent"):
        Rented(1, -1.0)
    with pytest.raises(ValueError, match="costs above 0"):
        margin(1.0, 0.0)
    with pytest.raises(ValueError, match="no cost gives"):
        implied_cost_per_hour(1.0, 1.0, -1.0)


def test_the_command_prints_both_readings_of_each_cell(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(app, "molink-simnet", ["cost", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["rows"]) == len(CELLS)
    row = next(
        one for one in document["rows"] if (one["setting"], one["system"]) == ("100 Mbps, 0.5/s", VLLM)
    )
    assert row["paper_margin"] == pytest.approx(-0.245)
    assert row["implied_margin"] == pytest.approx(-0.245, abs=0.001)
    assert row["margin"] == pytest.approx(-0.461, abs=0.001)


def test_the_command_reckons_with_the_users_own_prices(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "cost --throughput-tps 100 --token-price 1 --devices 2 --rent-per-hour 0.1 --json"
    assert run_app(app, "molink-simnet", arguments.split()) == 0
    [row] = json.loads(capsys.readouterr().out)["rows"]
    assert row["income_per_hour"] == pytest.approx(0.36)
    assert row["cost_per_hour"] == pytest.approx(0.2)
    assert row["margin"] == pytest.approx(0.8)
    assert run_app(app, "molink-simnet", ["cost", "--throughput-tps", "1", "--years", "0"]) == 2
    assert "--years must be above 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--throughput-tps", "-1"), "--throughput-tps must be 0 or more and finite, got -1"),
        (("--throughput-tps", "1", "--years", "0"), "--years must be above 0 and finite, got 0"),
        (("--throughput-tps", "1", "--power-w", "nan"), "--power-w must be 0 or more and finite, got nan"),
        (("--throughput-tps", "1", "--rent-per-hour", "0"), "a margin is of costs above 0, not of 0"),
        (("--table", "5"), "--table must be 3 or 4, got 5"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_option(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(app, "molink-simnet", ["cost", *arguments]) == 2
    assert capsys.readouterr().err == f"molink-simnet: {said}\n"
