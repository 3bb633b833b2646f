"""`molink-simnet schedule` as its users meet it: the table, JSON, files, and one line for each mistake."""

import csv
import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from molink.commands import run_app
from molink.simnet.cli import app
from molink.simnet.core.matrices import bundled_matrix, read_matrix
from molink.simnet.papers.scheduling.comparison import Row

PNG = b"\x89PNG\r\n"
CONTRACT = {"testbed", "algorithm", "tpot_ms", "execution_s", "paper_tpot_ms", "paper_execution_s"}
FIGURES = ("figure-5-region-latencies", "figure-6-machine-latencies", "figure-7-algorithms")
TESTBED = "--testbed must be 1, 2, 3, 4 or all, several with commas between them"


def schedule(*arguments: str) -> int:
    return run_app(app, "molink-simnet", ["schedule", *arguments])


def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert schedule(*arguments, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert isinstance(result, dict)
    return result


def rows(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, object]]:
    found = document(capsys, *arguments)["rows"]
    assert isinstance(found, list)
    return found


def test_json_is_one_document_with_a_row_for_each_testbed_and_algorithm(
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = document(capsys, "--testbed", "1,3", "--seeds", "2", "--algorithms", "greedy,augmented")
    assert set(result) == {"command", "parameters", "rows"}
    assert result["command"] == "schedule"
    found = result["rows"]
    assert isinstance(found, list)
    assert [(row["testbed"], row["algorithm"]) for row in found] == [
        (testbed, algorithm) for testbed in (1, 3) for algorithm in ("greedy", "augmented")
    ]
    for row in found:
        assert set(row) == {field.name for field in fields(Row)} >= CONTRACT
        assert row["solved"] == row["seeds"] == 2
        assert row["tpot_low_ms"] <= row["tpot_ms"] <= row["tpot_high_ms"]
    assert (found[0]["paper_tpot_ms"], found[0]["paper_execution_s"]) == (224.12, 0.098)


def test_equal_seeds_give_equal_circuits_and_the_seed_moves_the_window(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def mean_ms(seed: int, seeds: int) -> float:
        (row,) = rows(capsys, "--algorithms", "augmented", "--seed", str(seed), "--seeds", str(seeds))
        value = row["tpot_ms"]
        assert isinstance(value, float)
        return value

    assert mean_ms(0, 2) == mean_ms(0, 2)
    assert mean_ms(0, 2) == pytest.approx((mean_ms(0, 1) + mean_ms(1, 1)) / 2)


def test_random_runs_once_for_each_number_of_permutations(capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(capsys, "--algorithms", "random", "--random-samples", "1,64", "--seeds", "2")
    assert [(row["algorithm"], row["family"], row["samples"]) for row in found] == [
        ("random1", "random", 1),
        ("random64", "random", 64),
    ]


def test_the_table_names_what_it_averages_and_shows_the_papers_values(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert schedule("--testbed", "4", "--seeds", "2", "--algorithms", "augmented") == 0
    shown = capsys.readouterr().out
    assert "means over 2 problems" in shown
    assert "testbed 4" in shown
    assert "419.84" in shown
    assert max(map(len, shown.splitlines())) <= 120


@pytest.mark.full
def test_output_holds_the_json_document_and_a_table_and_a_picture_of_each_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new" / "results"
    printed = document(
        capsys,
        "--testbed",
        "all",
        "--seeds",
        "1",
        "--algorithms",
        "augmented,random64",
        "--output",
        str(folder),
    )
    assert json.loads((folder / "result.json").read_text()) == printed
    assert {path.name for path in folder.iterdir()} == {
        "report.html",
        "result.json",
        *(f"{name}{suffix}" for name in FIGURES for suffix in (".csv", ".png")),
    }
    for name in FIGURES:
        assert (folder / f"{name}.png").read_bytes().startswith(PNG)
    with (folder / "figure-7-algorithms.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 8
    with (folder / "figure-6-machine-latencies.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 3 * 21**2 + 42**2
    again = read_matrix(folder / "figure-5-region-latencies.csv")
    assert again.rtt_ms.tolist() == bundled_matrix().rtt_ms.tolist()


def test_a_matrix_of_the_users_own_is_used_and_is_not_set_beside_the_paper(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "homes.csv"
    path.write_text("from,north,south\nnorth,0.5,30\nsouth,30,0.5\n")
    (row,) = rows(capsys, "--latency-matrix", str(path), "--seeds", "1", "--algorithms", "augmented")
    assert row["paper_tpot_ms"] is None
    assert isinstance(row["tpot_ms"], float)
    assert row["tpot_ms"] < 225


def test_less_memory_makes_longer_circuits(capsys: pytest.CaptureFixture[str]) -> None:
    common = ("--algorithms", "augmented", "--seeds", "2")
    (roomy,) = rows(capsys, *common)
    (narrow,) = rows(capsys, *common, "--gpu-memory", "a100=40,RTX3090=16")
    assert isinstance(roomy["hops"], float)
    assert isinstance(narrow["hops"], float)
    assert narrow["hops"] > roomy["hops"]


def test_any_number_of_machines_may_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = rows(capsys, "--machines", "60", "--seeds", "1", "--algorithms", "augmented")
    assert (row["testbed"], row["machines"], row["paper_tpot_ms"]) == (None, 60, None)


@pytest.mark.full
def test_algorithms_too_much_for_the_size_are_left_out_and_it_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert schedule("--machines", "100", "--seeds", "1", "--random-samples", "1", "--json") == 0
    captured = capsys.readouterr()
    assert "ilp4" not in {row["algorithm"] for row in json.loads(captured.out)["rows"]}
    assert "left out, too much for so many machines: ilp" in captured.err


def test_an_algorithm_that_cannot_search_so_many_machines_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert schedule("--machines", "10000", "--seeds", "1", "--algorithms", "balanced") == 2
    assert "balanced cannot search 10,000 machines: " in capsys.readouterr().err


def test_too_few_machines_for_the_model_end_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert schedule("--machines", "2", "--seeds", "1", "--algorithms", "augmented") == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("molink-simnet: no circuit covers the model: ")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--testbed", "1,5"], f"{TESTBED}, got '1,5'"),
        (["--testbed", "one"], f"{TESTBED}, got 'one'"),
        (["--testbed", ""], f"{TESTBED}, got ''"),
        (["--testbed", "", "--machines", "9"], "--testbed and --machines exclude each other"),
        (["--testbed", "1", "--machines", "9"], "--testbed and --machines exclude each other"),
        (["--machines", "0"], "Invalid value for '--machines'"),
        (["--machines", "10001"], "Invalid value for '--machines'"),
        (["--seeds", "0"], "Invalid value for '--seeds'"),
        (["--algorithms", "fastest"], "there is no algorithm 'fastest': choose from greedy, augmented"),
        (["--algorithms", "ilp-1"], "'ilp-1': the seconds of ilp must be above 0, got -1"),
        (["--algorithms", ","], "--algorithms must be names, got none"),
        (["--ilp-limits", "4,soon"], "--ilp-limits must be numbers with commas between them, got '4,soon'"),
        (["--ilp-limits", "0"], "--ilp-limits must be above 0 and finite, got 0"),
        (["--random-samples", "0"], "--random-samples must be at least 1, got 0"),
        (["--gpu-memory", "H100=80"], "--gpu-memory names 'H100': the testbeds have A100, RTX 3090, A10g"),
        (["--gpu-memory", "A100"], "--gpu-memory must be like A100=40, got 'A100'"),
        (["--gpu-memory", "A100=-1"], "--gpu-memory of A100 must be gigabytes, 0 or more, got -1"),
        (["--latency-matrix", "nowhere.csv"], "nowhere.csv cannot be read: No such file or directory"),
    ],
)
def test_a_mistake_ends_in_one_sentence_and_status_2(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert schedule(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"molink-simnet: {sentence}")
    assert captured.err.count("\n") == 1


def test_an_output_that_is_a_file_is_refused_before_anything_is_searched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = tmp_path / "taken"
    taken.write_text("")
    assert schedule("--algorithms", "augmented", "--output", str(taken)) == 2
    assert "cannot be made: File exists; name another folder" in capsys.readouterr().err


def test_as_a_process_it_prints_json_alone_on_stdout() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "molink.simnet.cli",
            "schedule",
            "--seeds",
            "1",
            "--algorithms",
            "augmented",
            "--json",
        ],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["rows"][0]["testbed"] == 1


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert schedule("--help") == 0
    assert "molink-simnet schedule --testbed all" in capsys.readouterr().out
