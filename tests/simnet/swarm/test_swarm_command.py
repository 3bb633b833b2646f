"""`molink-simnet swarm` as its users meet it: JSON, files, what-ifs, and one line for each mistake."""

import contextlib
import csv
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.commands import run_app
from molink.simnet.cli import app
from molink.simnet.devices.model_shapes import QWEN2_7B
from molink.simnet.swarm.population.snapshot_file import SnapshotError, parse_snapshot

SMALL = ("--hours", "0.02", "--rate", "0.2", "--gateways", "2", "--model", "qwen2-7b")
FIGURES = ("swarm-minutes", "swarm-tpot", "swarm-success-rate", "swarm-traffic")
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def swarm(*arguments: str) -> int:
    return run_app(app, "molink-simnet", ["swarm", *arguments])


def live(peers: int = 4) -> dict[str, Any]:
    """As `molink-peer status --json` describes a swarm."""
    return {
        "models": [{"model": "any", "model_hash": "ab", "layers": 8}],
        "peers": [
            {
                "peer_id": f"12D3Koo{at}", "name": f"p{at}", "model": "any", "model_hash": "ab", "device": "cpu",
                "spans": [[4 * (at % 2), 4 * (at % 2) + 4]], "free_weight_bytes": 0, "free_kv_bytes": 10**9,
                "sessions": 0, "queued": 0, "draining": False, "layer_ms": 1.0 + at, "uplink_mbps": None,
            }
            for at in range(peers)
        ],
    }  # fmt: skip


def written(folder: Path, document: object) -> str:
    path = folder / "live.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    return str(path)


def test_json_and_files_say_the_same_of_a_small_swarm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert swarm("--peers", "12", *SMALL, "--json", "--output", str(tmp_path)) == 0
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert document == json.loads((tmp_path / "result.json").read_text())
    assert all(f"{figure}.csv" in printed.err for figure in FIGURES)
    (row,) = document["rows"]
    assert not [name for name, value in row.items() if isinstance(value, list | dict)]
    assert row["leases_refused"] == 0
    by_kind = [value for name, value in row.items() if name.startswith("traffic_by_kind_")]
    assert sum(by_kind) == pytest.approx(row["traffic_kbit_s"])
    assert row["completed"] == row["sessions"] > 0
    assert row["tpot_p50_ms"] > 0
    for figure in FIGURES:
        assert (tmp_path / f"{figure}.png").read_bytes().startswith(b"\x89PNG")
        lines = list(csv.reader((tmp_path / f"{figure}.csv").read_text().splitlines()))
        assert len(lines) == 1 + len(document["series"]["swarm"])


def test_a_snapshot_runs_before_and_after_a_peer_leaves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert swarm("--from-snapshot", written(tmp_path, live()), *SMALL, "--without", "p0", "--json") == 0
    before, after = json.loads(capsys.readouterr().out)["rows"]
    assert (before["name"], after["name"]) == ("before", "after")
    assert (before["peers"], after["peers"]) == (4, 3)
    assert after["tpot_p50_ms"] > before["tpot_p50_ms"]


@pytest.mark.full
def test_without_the_last_holder_of_a_layer_nobody_is_served_if_the_others_hold_last_copies_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert swarm("--from-snapshot", written(tmp_path, live(2)), *SMALL, "--without", "p1", "--json") == 0
    before, after = json.loads(capsys.readouterr().out)["rows"]
    assert before["success_rate"] == 1.0
    assert after["no_circuit"] == after["sessions"] > 0


def test_without_the_last_holder_another_moves_if_it_has_room(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = live(3)
    for one in document["peers"]:
        one["free_weight_bytes"] = 10**7
    assert swarm("--from-snapshot", written(tmp_path, document), *SMALL, "--without", "p1", "--json") == 0
    before, after = json.loads(capsys.readouterr().out)["rows"]
    assert (before["moves"], after["moves"]) == (0, 1)
    assert before["success_rate"] == after["success_rate"] == 1.0
    assert after["ttft_p95_ms"] > before["ttft_p95_ms"]


def test_more_bandwidth_brings_first_tokens_earlier(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        swarm("--from-snapshot", written(tmp_path, live()), *SMALL, "--bandwidth-factor", "2", "--json") == 0
    )
    before, after = json.loads(capsys.readouterr().out)["rows"]
    assert after["ttft_p50_ms"] < before["ttft_p50_ms"]
    assert after["tpot_p50_ms"] < before["tpot_p50_ms"]


def test_with_partners_a_snapshots_peers_keep_copies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = written(tmp_path, live())
    assert swarm("--from-snapshot", document, *SMALL, "--partner", "auto", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["parameters"]["partner"] == "auto"
    assert shown["rows"][0]["partners_found"] > 0


def test_people_get_a_table_with_a_column_for_each_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert swarm("--from-snapshot", written(tmp_path, live()), *SMALL, "--bandwidth-factor", "2") == 0
    shown = capsys.readouterr().out
    assert "before" in shown
    assert "after" in shown
    assert "kbit/s" in shown


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{\n  oops", "live.json, line 2, is no JSON"),
        ("[]", "is no JSON object"),
        ('{"models": []}', "models: one model is needed, there are 0"),
        (
            '{"models": [{"layers": "8", "model_hash": "ab"}]}',
            "models[0], key layers: a number is needed, got '8'",
        ),
        ('{"models": [{"layers": 8, "model_hash": "ab"}], "peers": []}', "key peers: nobody serves"),
        ('{"models": [{"layers": 8, "model_hash": "ab"}]}', "key peers: a list of objects"),
    ],
)
def test_a_file_that_is_no_snapshot_is_refused_by_line_or_key(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "live.json"
    path.write_text(text, encoding="utf-8")
    assert swarm("--from-snapshot", str(path), *SMALL) == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert shown.count("\n") == 1


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("spans", [[0, 9]], "peers[1], key spans: [0, 9] is no span of 8 layers"),
        ("spans", None, "peers[1], key spans: a list"),
        ("layer_ms", -1, "peers[1], key layer_ms: -1 is not from 0"),
        ("uplink_mbps", "fast", "peers[1], key uplink_mbps: a number is needed, got 'fast'"),
        ("peer_id", "12D3Koo0", "peers[1], key peer_id: '12D3Koo0' is there twice"),
    ],
)
def test_a_wrong_value_of_a_peer_is_named_by_its_key(key: str, value: object, said: str) -> None:
    document = live()
    document["peers"][1][key] = value
    with pytest.raises(SnapshotError) as error:
        parse_snapshot(json.dumps(document), "live.json", QWEN2_7B)
    assert said in str(error.value)


@given(st.sampled_from(("models", "peers", "links")), JSON_VALUES)
def test_no_document_does_more_than_be_refused(key: str, value: object) -> None:
    document = {**live(), key: value}
    with contextlib.suppress(SnapshotError):
        assert parse_snapshot(json.dumps(document), "live.json", QWEN2_7B).volunteers


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--without", "p0"), "give --from-snapshot"),
        (("--hours", "0"), "--hours must be above 0"),
        (("--churn", "-1"), "--churn must be 0 or more"),
        (("--crash-share", "2"), "from 0 to 1"),
        (("--partner", "p1"), "--partner is auto or off, not p1"),
        (("--model", "none"), "--model none has no known shape"),
    ],
)
def test_a_mistake_gives_one_line(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert swarm("--peers", "4", *arguments) == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert shown.count("\n") == 1


def test_a_bad_matrix_is_refused_by_row_and_column(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "matrix.csv"
    path.write_text("to,a,b\na,1,2\nb,x,1\n", encoding="utf-8")
    assert swarm("--peers", "4", *SMALL, "--latency-matrix", str(path)) == 2
    assert "matrix.csv, row 3 (b), column 2 (a): 'x' is no number" in capsys.readouterr().err


def test_a_peer_that_is_not_there_cannot_leave(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert swarm("--from-snapshot", written(tmp_path, live()), *SMALL, "--without", "nobody") == 2
    assert "--without nobody: no peers" in capsys.readouterr().err
