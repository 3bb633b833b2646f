"""Options of all commands: where values come from, which goes first, and how few the help begins with."""

import json
from pathlib import Path

import pytest

from molink.commands import run_app
from molink.simnet.cli import app

COMMANDS = ("communication", "cost", "emulate", "redundancy", "schedule", "serve", "swarm")
MOST_FIRST = 10
OPTIONS = {
    "communication": "model tp pp prefill decode tensors-per-boundary device network simulated-tokens advise devices "
    "goal max-ttft-ms",
    "cost": "table throughput-tps token-price devices device-price years power-w power-price rent-per-hour",
    "emulate": "peers bandwidth-mbps delay-ms policy micro-batches prefill-chunk rate duration warm-up compute model "
    "device tensors-per-boundary trace max-prompt-tokens max-new-tokens seed",
    "redundancy": "device workload instances policies rates interconnect-gbps arrivals sequence-ms duration warm-up "
    "seed jobs",
    "schedule": "testbed machines seeds algorithms ilp-limits random-samples latency-matrix layers layer-bytes "
    "gpu-memory noise one-way-share drawn-places seed",
    "serve": "preset policies sweep figure rate bandwidth-mbps delay-ms peers micro-batches prefill-chunk model device "
    "tensors-per-boundary software-ms duration warm-up trace seed jobs",
    "swarm": "peers hours gateways rate churn crash-share model from-snapshot without bandwidth-factor latency-matrix "
    "trace partner seed",
}
COMMON = "scenario set output json verbose debug help seed latency-matrix trace"


def run(*arguments: str) -> int:
    return run_app(app, "molink-simnet", list(arguments))


def written(folder: Path, text: str) -> str:
    path = folder / "scenario.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_begins_with_ten_options_and_has_all_of_them(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command, "--help") == 0
    shown = capsys.readouterr().out
    first, rest = shown.split("\nMore options:\n")
    lines = [line.split() for line in first.split("\nOptions:\n")[1].splitlines()]
    assert len([words for words in lines if words and words[0].startswith("-")]) == MOST_FIRST
    for name in (*OPTIONS[command].split(), *COMMON.split()):
        assert f" --{name}" in first + rest


@pytest.mark.parametrize(
    ("arguments", "rate", "devices"),
    [
        ((), 0.5, 3),
        (("--set", "rent-per-hour=0.25"), 0.25, 3),
        (("--set", "rent-per-hour=0.25", "--rent-per-hour", "0.125"), 0.125, 3),
        (("--set", "rent_per_hour=0.25", "--set", "devices=4"), 0.25, 4),
    ],
)
def test_a_command_line_goes_before_set_and_set_before_a_scenario(
    arguments: tuple[str, ...], rate: float, devices: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario = written(tmp_path, "throughput-tps = 120\nrent_per_hour = 0.5\ndevices = 3\n")
    for order in ((*arguments, "--scenario", scenario), ("--scenario", scenario, *arguments)):
        assert run("cost", *order, "--json") == 0
        machines = json.loads(capsys.readouterr().out)["parameters"]["machines"]
        assert machines == {"devices": devices, "rent_per_hour": rate}


def test_a_scenario_has_lists_and_switches_and_sweeps_as_options_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    advise = written(tmp_path, "advise = true\ndevices = 2\n")
    assert run("communication", "--scenario", advise, "--json") == 0
    assert json.loads(capsys.readouterr().out)["parameters"]["devices"] == 2
    search = written(tmp_path, 'algorithms = ["greedy", "augmented"]\nseeds = 1\n')
    assert run("schedule", "--scenario", search, "--json") == 0
    assert json.loads(capsys.readouterr().out)["parameters"]["algorithms"] == ["greedy", "augmented"]
    assert run("serve", "--set", "sweep=rate=often") == 2
    assert "--sweep rate must be numbers" in capsys.readouterr().err


def test_a_report_has_the_command_line_with_what_the_scenario_says(tmp_path: Path) -> None:
    scenario = written(tmp_path, "throughput-tps = 120\n")
    assert run("cost", "--scenario", scenario, "--set", "devices=3", "--output", str(tmp_path / "out")) == 0
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert f"molink-simnet cost --throughput-tps 120.0 --devices 3 --output {tmp_path / 'out'}" in page


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--set", "tabel=3"), "there is no option --tabel (did you mean table?)"),
        (("--set", "table"), "it must be like rate=0.2, got 'table'"),
        (("--set", "devices=many"), "Invalid value for '--devices': Input should be a valid integer"),
        (("--set", "devices=0"), "Invalid value for '--devices': Input should be greater than or equal to 1"),
        (("--scenario", "nowhere.toml"), "nowhere.toml cannot be read: No such file or directory"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("cost", *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert told in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "told"),
    [("devices = ", "is no TOML"), ("[devices]\nx = 1", "devices must be a value or several")],
)
def test_a_file_that_is_no_scenario_is_refused(
    text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("cost", "--scenario", written(tmp_path, text)) == 2
    assert told in capsys.readouterr().err
