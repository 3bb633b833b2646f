"""Seeds, matrices and traces of the user's own: every command takes them, and uses them where they mean something."""

import json
from pathlib import Path
from typing import Any

import pytest

from molink.commands import run_app
from molink.simnet.cli import app
from molink.simnet.core.matrices import latencies_between, mean_link_ms, parse_matrix

MATRIX = "from,a,b,c\na,2,100,200\nb,120,2,40\nc,200,40,2\n"
TRACE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.5,300,40\n2023-11-16 18:15:50.5,500,61\n"
)
FAST = {
    "cost": "",
    "schedule": "--seeds 1 --algorithms greedy",
    "communication": "--pp 2 --simulated-tokens 0",
    "serve": "--duration 5 --warm-up 0 --policies molink --rate 0.4 --jobs 1",
    "redundancy": "--rates 1 --duration 10 --policies vllm",
    "swarm": "--peers 12 --hours 0.02 --rate 0.2 --gateways 2 --model qwen2-7b",
}
"""Emulations start processes: only their mistakes are tried here."""


@pytest.fixture
def own_data(tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "matrix.csv").write_text(MATRIX)
    (tmp_path / "trace.csv").write_text(TRACE)
    return ("--latency-matrix", f"{tmp_path / 'matrix.csv'}", "--trace", f"{tmp_path / 'trace.csv'}")


def run(*arguments: str) -> int:
    return run_app(app, "molink-simnet", list(arguments))


def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run(*arguments, "--json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("command", FAST)
def test_every_command_takes_them_and_says_so_in_its_parameters(
    command: str, own_data: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    found = document(capsys, command, *FAST[command].split(), *own_data, "--seed", "3")["parameters"]
    assert (found["seed"], found["latency_matrix"], found["trace"]) == (3, own_data[1], own_data[3])


@pytest.mark.parametrize("command", [*FAST, "emulate"])
@pytest.mark.parametrize("option", ["--latency-matrix", "--trace"])
def test_a_file_of_another_kind_is_refused_even_where_it_changes_nothing(
    command: str, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other.csv").write_text("no such table\n1\n")
    assert run(command, *FAST.get(command, "").split(), option, f"{tmp_path / 'other.csv'}") == 2
    assert "other.csv" in capsys.readouterr().err


def test_machines_are_in_the_regions_by_turns_half_a_mean_round_trip_apart() -> None:
    found = latencies_between(parse_matrix(MATRIX, "matrix"), 4)
    assert found[0] == (0.0, 55.0, 100.0, 1.0)
    assert found[1] == (55.0, 0.0, 20.0, 55.0)
    assert mean_link_ms(found) == pytest.approx((55 + 20 + 100 + 1) / 4)


def test_serving_takes_the_time_of_its_links(
    own_data: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("serve", *FAST["serve"].split(), *own_data[2:])
    (far,) = document(capsys, *words, *own_data[:2])["rows"]
    (near,) = document(capsys, *words, "--delay-ms", "0", "--bandwidth-mbps", f"{far['bandwidth_mbps']:g}")[
        "rows"
    ]
    assert far["delay_ms"] == pytest.approx((55 + 20 + 100) / 3)
    assert far["paper_tpot_s"] is None
    assert far["tpot_s"] - near["tpot_s"] == pytest.approx(0.175, abs=0.01)


def test_ranks_in_far_regions_wait_for_each_other(
    own_data: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("communication", "--pp", "3", "--network", "10gbps,1ms", "--decode", "4", "--prefill", "4")
    far = {one["source"]: one["tpot_ms"] for one in document(capsys, *words, *own_data[:2])["times"]}
    near = {one["source"]: one["tpot_ms"] for one in document(capsys, *words)["times"]}
    assert far["simulated"] - near["simulated"] == pytest.approx(55 + 20 + 100 - 3)


def test_a_trace_says_how_long_the_mean_request_is(
    own_data: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    found = document(capsys, "communication", *FAST["communication"].split(), *own_data[2:])["parameters"]
    assert (found["prefill"], found["decode"]) == (400, 50)
    assert run("communication", "--prefill", "4", *own_data[2:]) == 2
    assert "--trace" in capsys.readouterr().err


def test_instances_with_copies_serve_the_lengths_of_a_trace(
    own_data: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    (row,) = document(capsys, "redundancy", *FAST["redundancy"].split(), *own_data[2:])["rows"]
    assert row["workload"] == "trace"
    assert 40 * 10 <= row["tokens_per_instance_s"] * 4 * 10 <= 61 * 11


@pytest.mark.parametrize("command", ["serve", "emulate"])
def test_a_matrix_and_one_delay_exclude_each_other(
    command: str, own_data: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command, *own_data[:2], "--delay-ms", "5") == 2
    assert "--delay-ms" in capsys.readouterr().err
