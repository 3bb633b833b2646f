"""Sweeps: which cells they have, what stays beside them of the paper's, and one sentence for each mistake."""

import csv
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.commands import run_app
from molink.simnet.cli import app
from molink.simnet.serve.paper import LineSetting
from molink.simnet.serve.presets import PRESETS, SYSTEM_OF, Preset, preset
from molink.simnet.serve.served_as import usual
from molink.simnet.serve.sweep import QUANTITIES, Changes, changed, parse_changes

FEW = st.lists(st.integers(1, 9), min_size=1, max_size=3, unique=True)


def swept(name: str, *sweeps: str, policies: str = "concurrent,molink") -> Preset:
    return changed(preset(name, policies.split(",")), parse_changes({}, sweeps, None, None))


def serve(*arguments: str) -> int:
    return run_app(app, "molink-simnet", ["serve", *arguments])


def test_a_sweep_has_each_value_at_the_centre_of_the_paper_s_tables() -> None:
    table = swept("molink-table2", "mbps=50,100,400")
    assert [(cell.setting, cell.policy) for cell in table.cells] == [
        (LineSetting(0.2, mbps, 30), policy) for mbps in (50, 100, 400) for policy in ("concurrent", "molink")
    ]
    assert [cell.printed is not None for cell in table.cells] == [False, False, True, True, False, False]


def test_two_sweeps_have_all_combinations_the_first_outermost() -> None:
    table = swept("molink-table2", "rate=0.1,0.3", "ms=10,50", policies="molink")
    found = [(cell.setting.rate_rps, cell.setting.delay_ms) for cell in table.cells]
    assert found == [(0.1, 10), (0.1, 50), (0.3, 10), (0.3, 50)]
    assert table.swept == ("rate_rps", "delay_ms")


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "molink-ablation"])
def test_any_policy_joins_a_table_with_what_the_paper_prints_of_its_system(name: str) -> None:
    settings = {cell.setting for cell in PRESETS[name].cells}
    table = preset(name, tuple(SYSTEM_OF))
    assert sorted((str(cell.setting), cell.policy) for cell in table.cells) == sorted(
        (str(setting), policy) for setting in settings for policy in SYSTEM_OF
    )
    for setting in settings:
        own = {cell.policy: cell for cell in table.cells if cell.setting == setting}
        assert own["fixed-chunk"].printed == own["molink"].printed is not None
        assert own["petals"].served_as == usual("petals", table.peers)
    assert {cell.policy for cell in preset(name, ("petals",)).cells} == {"petals"}


@given(st.sampled_from(sorted(PRESETS)), FEW, FEW, FEW)
def test_every_combination_is_there_once_for_each_system(
    name: str, rates: list[int], peers: list[int], chunks: list[int]
) -> None:
    values = {"rate_rps": rates, "peers": peers, "prefill_chunk_tokens": chunks}
    table = changed(preset(name), Changes(values, tuple(values)))
    found = [
        (cell.setting.rate_rps, cell.peers, cell.served_as.prefill_chunk_tokens, cell.policy, cell.technique)
        for cell in table.cells
    ]
    systems = {(cell.policy, cell.technique) for cell in preset(name).cells}
    assert len(set(found)) == len(rates) * len(peers) * len(chunks) * len(systems)


def test_stages_bring_their_own_micro_batches_where_a_system_has_one_for_each() -> None:
    cells = swept("molink-table2", "stages=2,4").cells
    assert [(cell.peers, cell.served_as) for cell in cells] == [
        (peers, usual(policy, peers)) for peers in (2, 4) for policy in ("concurrent", "molink")
    ]
    assert all(cell.printed is None for cell in cells)


def test_chunks_are_tokens_or_left_to_heads() -> None:
    cells = swept("molink-table2", "chunk=computed,256", policies="molink").cells
    assert [cell.served_as.prefill_chunk_tokens for cell in cells] == [None, 256]


def test_without_changes_a_table_is_the_paper_s() -> None:
    for table in PRESETS.values():
        assert changed(table, Changes()) == table


def test_single_changes_keep_the_table_s_other_settings() -> None:
    table = changed(PRESETS["molink-table2"], parse_changes({"mbps": "50"}, (), None, None))
    assert [cell.setting.rate_rps for cell in table.cells if cell.policy == "molink"] == [0.7, 0.3, 0.2, 0.1]
    assert {cell.setting.bandwidth_mbps for cell in table.cells} == {50}
    assert all(cell.printed is None for cell in table.cells)


def test_other_machines_have_nothing_printed() -> None:
    table = changed(PRESETS["molink-table2"], Changes(device="rtx-3060"))
    assert all(cell.printed is None for cell in table.cells)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("rate",), "--sweep must be like rate=0.1,0.2,0.4, got 'rate'"),
        (("speed=1",), f"--sweep has no quantity 'speed': choose from {', '.join(QUANTITIES)}"),
        (("rate=fast",), "--sweep rate must be numbers with commas between them, got 'fast'"),
        (("rate=0",), "--sweep rate must be above 0 and finite, got 0"),
        (("ms=-1",), "--sweep ms must be 0 or more and finite, got -1"),
        (("mbps=",), "--sweep mbps must be numbers with commas between them, got ''"),
        (("peers=2.5",), "--sweep peers must be whole numbers with commas between them, got '2.5'"),
        (("peers=29",), "28 layers can be split among 1 to 28 peers, not 29"),
        (("micro-batches=many",), "--sweep micro-batches: 'many' is neither a number nor one of"),
        (("chunk=0",), "--sweep chunk must be at least 1, got 0"),
        (("rate=1", "--sweep", "rate=2"), "--sweep rate and --sweep both say what rate is"),
        (("mbps=1", "--bandwidth-mbps", "2"), "--sweep mbps and --bandwidth-mbps both say what mbps is"),
        (
            ("rate=0.1", "--policies", "magic"),
            "molink-table2 compares concurrent, zeromq, petals, fixed-chunk, paper, molink, not magic",
        ),
        (
            ("rate=0.1", "--preset", "molink-ablation", "--policies", "petals"),
            "molink-ablation compares concurrent, paper, molink, not petals",
        ),
        (("rate=0.1", "--duration", "inf"), "--duration must be above 0 and finite, got inf"),
        (("rate=0.1", "--warm-up", "inf"), "--warm-up must be 0 or more and finite, got inf"),
        (("rates=0.1",), "--sweep has no quantity 'rates' (did you mean rate?)"),
        (("rate=0.1", "--model", "qwen-9000"), "--model qwen-9000 has no known shape"),
    ],
)
def test_a_mistake_is_one_sentence(
    arguments: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve("--sweep", *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert sentence in captured.err
    assert captured.err.count("\n") == 1


def test_figures_of_the_papers_need_a_folder_and_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve("--figure", "all") == 2
    assert "--figure needs --output" in capsys.readouterr().err
    assert serve("--figure", "none") == 2
    assert "--figure must be of all, costs, competition, bubbles, got none" in capsys.readouterr().err


@pytest.mark.full
def test_a_sweep_writes_a_picture_for_each_metric_and_a_row_for_each_cell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,generated_tokens\n0,700,3\n1,60,4\n2,5,2\n")
    short = (
        "--policies",
        "molink",
        "--duration",
        "10",
        "--warm-up",
        "0",
        "--jobs",
        "1",
        "--trace",
        str(trace),
    )
    sweeps = ("--sweep", "chunk=computed,512", "--sweep", "rate=0.2,0.4")
    assert serve(*sweeps, *short, "--output", str(tmp_path), "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document == json.loads((tmp_path / "result.json").read_text())
    assert document["parameters"]["sweep"] == ["chunk", "rate"]
    assert [(row["prefill_chunk_tokens"], row["rate_rps"]) for row in document["rows"]] == [
        (None, 0.2), (None, 0.4), (512, 0.2), (512, 0.4),
    ]  # fmt: skip
    names = {path.stem for path in tmp_path.glob("*.png")}
    assert names == {"sweep-ttft", "sweep-tpot", "sweep-latency", "sweep-throughput", "figure-wire"}
    with (tmp_path / "sweep-ttft.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 4
