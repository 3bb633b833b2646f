"""What `serve` shows and writes: a table that fits, verdicts that count, a report that needs nothing else."""

import io
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from molink.simnet import cli
from molink.simnet.lines.line import Line
from molink.simnet.presentation.tables import laid_out
from molink.simnet.presentation.terminal import show
from molink.simnet.serve.output import competition
from molink.simnet.serve.output.order import orders
from molink.simnet.serve.output.table import order_lines, serve_table, verdict_lines
from molink.simnet.serve.output.verdicts import Count, verdicts
from molink.simnet.serve.presets import PRESETS
from molink.simnet.serve.rows import ServeRow, serve_rows
from molink.simnet.serve.simulated import SimulatedRun

COLUMNS = 120


def rows_of(name: str) -> list[ServeRow]:
    """As if every cell had come out as wide as values get; ours a tenth of the baseline's times."""
    preset = PRESETS[name]
    empty = SimulatedRun((), 0.0, (0.0,), (0.0,), (), 0)
    rows = serve_rows(preset, [empty] * len(preset.cells))
    return [
        replace(
            row,
            ttft_s=1.234 if row.policy == "molink" else 12.34,
            tpot_s=0.0123 if row.policy == "molink" else 0.123,
            latency_s=12.3 if row.policy == "molink" else 123.4,
            throughput_tps=1234.5 if row.policy == "molink" else 123.4,
            ttft_reduction=-0.55,
            tpot_reduction=0.55,
            latency_reduction=0.55,
            throughput_gain=0.55,
        )
        for row in rows
    ]


@pytest.mark.parametrize("columns", [80, COLUMNS])
@pytest.mark.parametrize("name", PRESETS)
def test_no_word_of_a_table_is_cut_in_a_narrow_terminal(name: str, columns: int) -> None:
    rows = rows_of(name)
    written = io.StringIO()
    show(laid_out(serve_table(PRESETS[name], rows)), Console(file=written, width=columns, color_system=None))
    lines = written.getvalue().splitlines()
    assert all(len(line) <= columns for line in lines)
    for word in ("TTFT", "TPOT", "printed", *(row.technique or row.policy for row in rows)):
        assert word in written.getvalue()
    assert "…" not in written.getvalue()


@pytest.mark.parametrize("name", PRESETS)
def test_each_baseline_has_one_line_that_fits(name: str) -> None:
    lines = verdict_lines(PRESETS[name], rows_of(name))
    assert lines
    assert all(len(line) <= COLUMNS for line in lines)


def test_a_verdict_counts_the_cells_in_which_ours_gains_at_least_as_much() -> None:
    preset = PRESETS["molink-table2"]
    rows = rows_of("molink-table2")
    [vllm, helix] = verdicts(preset, rows)
    assert (vllm.system, helix.system) == ("vLLM", "Helix")
    assert dict(vllm.counts) == {metric: Count(4, 4) for metric in ("TTFT", "TPOT", "latency")}
    worse = [
        replace(row, ttft_s=100.0) if row.policy == "molink" and row.rate_rps == 0.2 else row for row in rows
    ]
    assert dict(verdicts(preset, worse)[0].counts)["TTFT"] == Count(3, 4)
    assert verdicts(preset, [row for row in rows if row.policy != "molink"]) == ()


def as_printed(name: str) -> list[ServeRow]:
    """As if every cell had come out as the paper prints it."""
    return [
        replace(
            row,
            ttft_s=row.paper_ttft_s,
            tpot_s=row.paper_tpot_s,
            latency_s=row.paper_latency_s,
            throughput_tps=row.paper_throughput_tps or 0.0,
        )
        for row in rows_of(name)
    ]


@pytest.mark.parametrize("name", PRESETS)
def test_what_the_paper_prints_is_in_the_papers_order(name: str) -> None:
    found = orders(PRESETS[name], as_printed(name))
    assert {one.metric for one in found} >= {"TTFT", "TPOT"}
    assert all(one.kept == one.pairs > 0 and not one.swapped for one in found)


def test_a_pair_that_comes_the_other_way_is_named() -> None:
    """In Table 2 the paper has zeromq's TTFT before concurrent's at all four rates, and its TPOT at three of them."""
    preset = PRESETS["molink-table2"]
    rows = [
        replace(row, tpot_s=9.9) if row.policy == "zeromq" else row for row in as_printed("molink-table2")
    ]
    ttft, tpot, latency = orders(preset, rows)
    assert (ttft.kept, latency.kept) == (ttft.pairs, latency.pairs)
    assert tpot.swapped == {("zeromq", "concurrent"): 3}
    assert (tpot.kept, tpot.pairs) == (9, 12)
    [_, line, _] = order_lines(preset, rows)
    assert line == "TPOT in the paper's order: 9 of 12 pairs of policies; concurrent 3x before zeromq"


def test_the_papers_own_policy_stands_for_its_system_and_ours_only_where_it_did_not_run() -> None:
    preset = PRESETS["molink-table2"]
    rows = [
        replace(row, ttft_s=99.0) if row.policy == "molink" else row for row in as_printed("molink-table2")
    ]
    assert orders(preset, rows)[0].swapped == {}
    ours = [row for row in rows if row.policy != "paper"]
    assert set(orders(preset, ours)[0].swapped) == {("molink", "concurrent"), ("molink", "zeromq")}


def test_decode_of_a_large_model_computes_and_its_prefill_transmits() -> None:
    """Section 3.1 of the transmission paper, with its LLaMA-30B."""
    assert competition.LLAMA_30B.spec().activation_bytes == 13_312
    prefill, decode = competition.prefill_cost(1000), competition.decode_cost(4)
    assert prefill.communication_ms > 2 * prefill.compute_ms
    assert decode.compute_ms > 2 * decode.communication_ms
    assert prefill.communication_ms == pytest.approx(1065, rel=0.01)


def test_more_micro_batches_than_stages_fill_the_bubbles() -> None:
    runs = [competition.bubbles(count).computing for count in (2, 3)]
    few, more = (competition.busy([one for one in steps if one.stage == 1], (2.0, 2.5)) for steps in runs)
    assert more > few + 0.1


def test_a_line_carries_one_thing_after_the_other_and_a_prompt_for_as_long_as_it_is() -> None:
    """Figure 3a of the transmission paper: 1,000 ms."""
    sent = [one for one in competition.alone().sending if one.stage == 0]
    assert all(one.start_s + one.taken_s <= after.start_s + 1e-9 for one, after in pairwise(sent))
    prefill = [one for one in sent if one.prefill]
    assert sum(one.taken_s for one in prefill) == pytest.approx(1.065, rel=0.01)


def test_decode_goes_ahead_of_a_prompt_where_the_policy_says_so() -> None:
    """Figures 3b and 3d: behind a whole prompt the second server waits for it."""

    def longest_pause_s(policy: str) -> float:
        decode = [
            one for one in competition.competition(policy).sending if one.stage == 0 and not one.prefill
        ]
        return max(after.start_s - one.start_s for one, after in pairwise(decode))

    assert longest_pause_s("fifo") > 1.0 > 3 * longest_pause_s("molink")


def test_a_line_that_carries_at_once_is_the_line_that_is_offered_and_departs() -> None:
    carrying, offering = Line[None](10.0, 1.0, 2.0, seed=3), Line[None](10.0, 1.0, 2.0, seed=3)
    for number in range(50):
        at_s = 0.01 * (number // 3)
        offering.offer(None, 1000 * (number % 7 + 1), at_s)
        [(_, arrives_s)] = offering.depart(1e9)
        assert carrying.carry(1000 * (number % 7 + 1), at_s) == arrives_s
    assert carrying.counters() == offering.counters()
    offering.offer(None, 1, 1.0)
    with pytest.raises(IndexError):
        offering.carry(1, 1.0)


@pytest.mark.full
def test_serve_writes_figures_and_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = "serve --preset molink-table2 --rate 0.3 --policies concurrent,molink --duration 20 --warm-up 1 --jobs 1"
    with pytest.raises(SystemExit) as ended:
        cli.main([*command.split(), "--output", str(tmp_path), "--json"])
    assert ended.value.code in (0, None)
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 2
    written = {path.name for path in tmp_path.iterdir()}
    assert {"result.json", "report.html", "serving.png", "serving.csv", "figure-3-competition.png"} <= written
