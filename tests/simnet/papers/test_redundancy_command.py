"""`molink-simnet redundancy` as its users meet it: the table, JSON, files, and one line for each mistake."""

import csv
import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from molink.commands import run_app
from molink.simnet.cli import app
from molink.simnet.papers.redundancy.claims import claims
from molink.simnet.papers.redundancy.figures import LATENCY_FIGURES, latency_figure
from molink.simnet.papers.redundancy.rows import RedundancyRow, redundancy_rows
from molink.simnet.papers.redundancy.run import RedundancyCell, simulate

PNG = b"\x89PNG\r\n"
CONTRACT = {
    *("policy", "device", "workload", "instances", "rate_rps", "ttft_s", "tbt_s", "tbt_max_s", "jct_s"),
    *("tokens_per_instance_s", "peak_memory_gb"),
}
SHORT = ("--duration", "3", "--warm-up", "1", "--jobs", "1")


def redundancy(*arguments: str) -> int:
    return run_app(app, "molink-simnet", ["redundancy", *SHORT, *arguments])


def test_json_has_a_row_for_each_cell_with_the_paper_s_values_beside(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert redundancy("--rates", "4,6", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["command"] == "redundancy"
    assert [(row["rate_rps"], row["policy"]) for row in result["rows"]] == [
        (rate, policy) for rate in (4.0, 6.0) for policy in ("vllm", "splitwise", "accellm", "molink")
    ]
    for row in result["rows"]:
        assert set(row) == {field.name for field in fields(RedundancyRow)} >= CONTRACT
    for own in result["rows"][2:4]:
        assert (own["paper_extra_memory_gb"], own["paper_jct_reduction_up_to"]) == (1.0, 0.3)
        assert own["extra_memory_gb"] == own["peak_memory_gb"] - max(
            row["peak_memory_gb"] for row in result["rows"][:2]
        )
    assert {claim["policy"] for claim in result["claims"]} == {"accellm", "molink"}
    assert {claim["paper"] for claim in result["claims"]} >= {0.3, 0.5, 1.0}


@pytest.mark.full
def test_the_same_command_prints_the_same_bytes_with_one_process_and_with_two(
    capsys: pytest.CaptureFixture[str],
) -> None:
    printed = []
    for jobs in ("1", "2"):
        assert redundancy("--rates", "4", "--policies", "vllm,accellm", "--jobs", jobs, "--json") == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]


@pytest.mark.full
def test_every_figure_is_a_picture_and_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert redundancy("--rates", "4", "--interconnect-gbps", "100,3600", "--output", str(tmp_path)) == 0
    assert "accellm" in capsys.readouterr().out
    pictures = sorted(tmp_path.glob("*.png"))
    assert [int(path.name.split("-")[1]) for path in pictures] == [10, 11, 16, 3, 4, 5, 9]
    for path in pictures:
        assert path.read_bytes().startswith(PNG)
        with path.with_suffix(".csv").open(encoding="utf-8", newline="") as file:
            header, *lines = csv.reader(file)
        assert lines
        assert all(len(line) == len(header) for line in lines)
    assert json.loads((tmp_path / "result.json").read_text())["parameters"]["interconnect_gbps"] == [
        100,
        3600,
    ]


def test_each_workload_has_the_figure_that_the_paper_has() -> None:
    assert sorted(LATENCY_FIGURES.values()) == [11, 12, 13, 14, 15]
    assert latency_figure("h100", "light") == "figure-13-light-h100"
    assert latency_figure("910b2", "heavy") == "latency-heavy-910b2"


def test_a_claim_agrees_if_ours_is_near_to_it_and_names_where() -> None:
    cell = RedundancyCell("vllm", "h100", "mixed", 4, 4.0, 3600.0, 0.0, 1.0, "burst")
    rows = redundancy_rows([simulate(replace(cell, policy=policy)) for policy in ("splitwise", "accellm")])
    found = {
        claim.claim: claim for claim in claims([rows[0], replace(rows[1], jct_reduction_splitwise=0.25)])
    }
    assert found["JCT below Splitwise's, up to"].agrees
    assert (found["JCT below Splitwise's, up to"].ours, found["JCT below Splitwise's, up to"].rate_rps) == (
        0.25,
        4.0,
    )
    assert "JCT below vLLM's, up to" not in found
    assert claims(rows[:1]) == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--device", "rtx-4090"), "--device rtx-4090 is not in the paper: choose from h100, 910b2"),
        (("--workload", "none"), "--workload must be one of light, mixed, heavy, got 'none'"),
        (("--arrivals", "none"), "--arrivals must be one of burst, poisson, got 'none'"),
        (("--duration", "inf"), "--duration must be above 0 and finite, got inf"),
        (("--policies", "acellm"), "got acellm (did you mean accellm?)"),
        (("--instances", "5"), "--instances must be 4, 8 or 16, several with commas between them, got '5'"),
        (
            ("--policies", "none"),
            "--policies must be of vllm, splitwise, accellm, molink, molink-pairs, molink-auto, got none",
        ),
        (("--rates", "4,x"), "--rates must be numbers with commas between them, got '4,x'"),
        (("--rates", "0.1"), "must let 10 requests come to be averaged"),
        (("--interconnect-gbps", "0"), "--interconnect-gbps must be above 0 and finite, got 0"),
        (("--sequence-ms", "-1"), "--sequence-ms must be 0 or more and finite, got -1"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_to_do(
    arguments: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert redundancy(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert told in captured.err
    assert len(captured.err.strip().splitlines()) == 1
