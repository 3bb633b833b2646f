"""`molink-simnet emulate` as its users meet it: real peer processes, every request once, and one line for mistakes."""

import csv
import json
from dataclasses import fields
from pathlib import Path

import pytest

from molink.commands import run_app
from molink.shards.spec import Span
from molink.simnet.cli import app
from molink.simnet.core.request_load import Request, RequestOutcome
from molink.simnet.devices.model_shapes import QWEN2_7B, even_spans
from molink.simnet.emulate.rows import ServingRow, differing, serving_rows, serving_table, usage_table
from molink.simnet.emulate.run import Emulation, EmulationCell, EmulationRun, Usage, progress_line
from molink.simnet.presentation.tables import laid_out
from molink.simnet.serve.served_as import ServedAs, usual

CONTRACT = {
    "policy",
    "rate_rps",
    "bandwidth_mbps",
    "delay_ms",
    "ttft_s",
    "tpot_s",
    "latency_s",
    "throughput_tps",
}
CONTRACT |= {"paper_ttft_s", "paper_tpot_s", "paper_latency_s"}
VLLM, OURS = ServedAs("3", 2048), ServedAs("molink", None)
USAGE = Usage((0.5, 0.25), (0.1, 0.2), 0.05, 0.03, (0.4, 0.3), 30.0)
EMULATION = Emulation(QWEN2_7B.spec(), "rtx-4090", 1, 3, 100.0, 30.0, (), 0.0, 60.0, 0)


def emulate(*arguments: str) -> int:
    return run_app(app, "molink-simnet", ["emulate", *arguments])


def outcome(number: int, token_s: tuple[float, ...], error: str | None = None) -> RequestOutcome:
    request = Request(number, 10.0, 5, len(token_s))
    return RequestOutcome(request, (7,) * len(token_s), token_s, (), error)


def test_layers_are_split_as_evenly_as_can_be_the_head_first() -> None:
    assert even_spans(28, 3) == (Span(0, 10), Span(10, 19), Span(19, 28))
    assert even_spans(2, 2) == (Span(0, 1), Span(1, 2))
    with pytest.raises(ValueError, match="1 to 2 peers, not 3"):
        even_spans(2, 3)


def test_rows_are_averages_of_what_ended_with_the_reduction_against_concurrent() -> None:
    slow = (outcome(0, (12.0, 13.0, 14.0)), outcome(1, (14.0,)), outcome(2, (11.0,), error="lost"))
    fast = (outcome(0, (11.0, 11.5, 12.0)), outcome(1, (12.0,)))
    runs = [
        EmulationRun(EmulationCell("concurrent", 0.2, VLLM), slow, USAGE),
        EmulationRun(EmulationCell("molink", 0.2, OURS), fast, USAGE),
    ]
    base, row = serving_rows(EMULATION, runs)
    assert (base.requests, base.failed, base.ttft_s, base.tpot_s, base.latency_s) == (3, 1, 3.0, 1.0, 4.0)
    assert (row.ttft_s, row.tpot_s, row.latency_s) == (1.5, 0.5, 2.0)
    assert (row.ttft_reduction, row.tpot_reduction, row.latency_reduction) == (0.5, 0.5, 0.5)
    assert (base.ttft_reduction, base.paper_ttft_s, row.paper_ttft_s) == (0.0, 3.74, 3.30)
    assert row.paper_latency_reduction == pytest.approx(1 - 93 / 111)
    assert (row.engine_busy, row.uplink_busy, row.peer_cpu, row.lines_cpu) == (0.5, 0.4, 0.2, 0.03)


def test_a_rate_that_the_paper_does_not_print_has_no_numbers_of_it_and_no_request_no_times() -> None:
    (row,) = serving_rows(EMULATION, [EmulationRun(EmulationCell("molink", 0.25, OURS), (), USAGE)])
    assert (row.paper_ttft_s, row.ttft_s, row.ttft_reduction, row.requests) == (None, None, None, 0)


def test_other_tokens_than_those_of_the_first_policy_are_found() -> None:
    first = EmulationRun(
        EmulationCell("concurrent", 0.2, VLLM), (outcome(0, (11.0,)), outcome(1, (11.0,))), USAGE
    )
    other = RequestOutcome(Request(1, 10.0, 5, 1), (8,), (11.0,), ())
    second = EmulationRun(EmulationCell("molink", 0.2, OURS), (outcome(0, (12.0,)), other), USAGE)
    assert differing([first, second]) == [(second, 1)]


def test_a_policy_stands_for_a_system_with_its_micro_batches_and_steps_of_prompts() -> None:
    assert usual("concurrent", 3) == usual("zeromq", 3) == VLLM
    assert usual("concurrent", 5).micro_batches == "5"
    assert (usual("paper", 3).micro_batches, usual("fixed-chunk", 3).micro_batches) == (
        "transmission",
        "system",
    )
    assert usual("molink", 3) == OURS


def test_a_run_says_how_far_it_is_and_what_it_waits_for() -> None:
    assert progress_line(7.0, 20.0, 3, 0).startswith("7 of 20 s, 3 in progress")
    assert progress_line(31.4, 20.0, 9, 2) == "31 s: 2 of the measured requests have not ended, 9 in progress"


def test_tables_have_a_line_for_each_policy_and_what_the_paper_prints() -> None:
    served = {"concurrent": VLLM, "molink": OURS, "paper": ServedAs("transmission", 2048)}
    quick = (outcome(0, tuple(11.0 + 0.125 * step for step in range(1000))),)
    slow = (outcome(0, tuple(11.9 + 0.1875 * step for step in range(1000))),)
    outcomes = {"concurrent": quick, "molink": slow, "paper": slow}
    runs = [
        EmulationRun(EmulationCell(name, 0.3, how), outcomes[name], USAGE) for name, how in served.items()
    ]
    rows = serving_rows(EMULATION, runs)
    served_table, used = laid_out(serving_table(EMULATION, rows)), laid_out(usage_table(rows))
    assert [line.cells[0].text for line in served_table.lines] == list(served)
    assert [line.cells[2].text for line in used.lines] == ["2048", "computed", "2048"]
    assert ("printed\ns" in served_table.headings) == any(row.paper_ttft_s is not None for row in rows)


@pytest.mark.real
@pytest.mark.full
@pytest.mark.parametrize(
    ("compute", "tensors"), [("timed", 2), pytest.param("real", 1, marks=pytest.mark.full)]
)
def test_every_request_ends_once_with_exactly_its_tokens(
    compute: str, tensors: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,generated_tokens\n0,700,9\n0.2,5,1\n0.5,60,20\n")
    quick = ("--peers", "2", "--bandwidth-mbps", "1000", "--delay-ms", "1", "--warm-up", "0", "--rate", "3")
    where = ("--trace", str(trace), "--output", str(tmp_path), "--json", "--policy", "molink")
    sends = ("--compute", compute, "--tensors-per-boundary", str(tensors))
    assert emulate(*quick, "--duration", "0.9", *sends, *where) == 0
    document = json.loads(capsys.readouterr().out)
    assert set(document) == {"command", "parameters", "rows"}
    assert document["parameters"]["policies"] == {
        "molink": {"micro_batches": "molink", "prefill_chunk_tokens": None}
    }
    assert document["parameters"]["tensors_per_boundary"] == tensors
    assert document["parameters"]["spans"] == (
        [[0, 14], [14, 28]] if compute == "timed" else [[0, 6], [6, 12]]
    )
    (row,) = document["rows"]
    assert set(row) == {field.name for field in fields(ServingRow)} >= CONTRACT
    assert (row["requests"], row["failed"]) == (3, 0)
    assert 0 < row["ttft_s"] < row["latency_s"]
    assert json.loads((tmp_path / "result.json").read_text()) == document
    with (tmp_path / "serving.csv").open() as file:
        assert [line["policy"] for line in csv.DictReader(file)] == ["molink"]
    assert (tmp_path / "serving.png").read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--policy", "telepathy"), "--policy must be of"),
        (("--micro-batches", "many"), "--micro-batches: 'many' is neither"),
        (("--micro-batches", "65"), "--micro-batches: 1 to 64 micro-batches"),
        (("--rate", "often"), "--rate must be numbers"),
        (("--rate", "0"), "--rate must be above 0"),
        (("--bandwidth-mbps", "0"), "--bandwidth-mbps must be above 0"),
        (("--delay-ms", "-1"), "--delay-ms must be 0 or more"),
        (("--model", "qwen-9000"), "has no known shape"),
        (("--device", "abacus"), "has no profile"),
        (("--max-prompt-tokens", "1", "--max-new-tokens", "1"), "no request of the trace"),
        (("--trace", "none.csv"), "none.csv cannot be read"),
        (("--compute", "real", "--tensors-per-boundary", "2"), "needs --compute timed"),
        (("--compute", "real", "--peers", "13"), "12 layers can be split among 1 to 12 peers"),
    ],
)
def test_mistakes_are_one_sentence(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert emulate(*arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
