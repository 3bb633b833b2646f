"""Messages of simulated ranks, counted, against the communication-patterns paper's equations and tables."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.properties import examples

from molink.commands import run_app
from molink.routing.parallelism.layout_prediction import DeviceLink, all_reduce_s
from molink.routing.parallelism.parallelism import Layout, Lengths
from molink.routing.parallelism.volumes import TOKEN_BYTES
from molink.simnet.cli import app
from molink.simnet.devices.devices import DEVICES
from molink.simnet.devices.model_shapes import MODEL_SHAPES
from molink.simnet.papers.communication.collectives import (
    Communicator,
    gather,
    part_sizes,
    ring_all_gather,
    ring_all_reduce,
)
from molink.simnet.papers.communication.fabric import FABRICS, Fabric, fabric_named, tensor_sizes
from molink.simnet.papers.communication.figures import paper_figures
from molink.simnet.papers.communication.printed import LENGTHS, PRINTED_TABLES
from molink.simnet.papers.communication.ranks import Key, Ranks, Receive
from molink.simnet.papers.communication.rows import all_ranks_bytes, operation_rows, predicted, volume_rows
from molink.simnet.papers.communication.simulated_request import SimulatedRequest, simulate_request

DEVICE, CARDINAL = DEVICES["h100-94"], FABRICS["cardinal"]
SLOW = Fabric("slow", DeviceLink(1000.0, 1.0), DeviceLink(1000.0, 1.0), 1)
EVEN = ("llama-3.2-1b", "llama-3.1-8b", "qwen3-8b", "mixtral-8x7b")
"""Their sizes and layers are divisible by eight."""

layouts = st.builds(Layout, st.sampled_from((1, 2, 4, 8)), st.sampled_from((1, 2, 4)))
lengths = st.builds(Lengths, st.integers(1, 300), st.integers(1, 3))


def simulated(
    model: str, layout: Layout, length: Lengths, tensors: int = 2, fabric: Fabric = CARDINAL
) -> SimulatedRequest:
    return simulate_request(MODEL_SHAPES[model], layout, length, DEVICE, fabric, tensors)


@settings(max_examples=examples(40), deadline=None)
@given(st.sampled_from(EVEN), layouts, lengths, st.sampled_from((1, 2)))
def test_messages_add_up_to_the_equations_exactly(
    model: str, layout: Layout, length: Lengths, tensors: int
) -> None:
    shape, request = MODEL_SHAPES[model], simulated(model, layout, length, tensors)
    for row in operation_rows(shape, layout, length, tensors, request):
        assert (row.counted, row.counted_bytes) == (row.count, row.corrected_bytes), row
    sent = sum(size for key, size in request.sent_bytes.items() if key.kind != "Token")
    assert sent == all_ranks_bytes(shape.spec(), layout, length, tensors)
    for volume in volume_rows(shape.spec(), layout, length, tensors, request):
        if volume.all_ranks_bytes is not None:
            assert volume.counted_bytes == volume.all_ranks_bytes, volume


@settings(max_examples=examples(20), deadline=None)
@given(layouts, lengths)
def test_every_rank_of_a_stage_reduces_as_much_as_any_other(layout: Layout, length: Lengths) -> None:
    sent = simulated("llama-3.1-8b", layout, length).sent_bytes
    for stage in range(layout.pipeline):
        ranks = range(stage * layout.tensor, (stage + 1) * layout.tensor)
        assert len({sent.get(Key(rank, "prefill", "Allreduce"), 0) for rank in ranks}) == 1


def test_each_token_goes_back_to_the_first_stage() -> None:
    sent = simulated("llama-3.2-1b", Layout(1, 4), Lengths(16, 5)).sent_bytes
    tokens = sum(size for key, size in sent.items() if key.kind == "Token")
    assert tokens == 5 * TOKEN_BYTES


@pytest.mark.parametrize("number", PRINTED_TABLES)
def test_counted_messages_are_those_of_tables_3_to_6(number: str) -> None:
    """At 128 tokens and 128: counts, shapes and sizes by the operations; counts by messages for the short ones."""
    compared = 0
    for (model, layout), lines in PRINTED_TABLES[number].items():
        rows = operation_rows(MODEL_SHAPES[model], layout, LENGTHS, 2, None)
        found = {(row.stage, row.operation): row for row in rows}
        for (phase, kind), printed in lines.items():
            row = found[phase, kind]
            assert row.count == row.paper_count == printed.count
            compared += 1
            if printed.shape is not None:
                assert row.shape == printed.shape
                compared += 1
            if printed.message_bytes is not None:
                assert row.message_bytes == printed.message_bytes
                compared += 1
    assert compared == {"III": 16, "IV": 12, "V": 16, "VI": 20}[number]


@given(st.integers(1, 8), st.integers(0, 500))
def test_parts_are_whole_and_as_even_as_can_be(parts: int, elements: int) -> None:
    sizes = part_sizes(elements, parts)
    assert sum(sizes) == elements
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(2, 8), st.integers(1, 200))
def test_rings_send_what_their_factors_say_of_any_size(members: int, elements: int) -> None:
    group = range(members)
    ranks = Ranks(SLOW)
    ranks.run([ring_all_reduce(Communicator(ranks, group, place), "decode", elements, 2) for place in group])
    assert sum(ranks.sent_bytes.values()) == 2 * (members - 1) * elements * 2
    ranks = Ranks(SLOW)
    ranks.run([ring_all_gather(Communicator(ranks, group, place), "decode", elements, 2) for place in group])
    assert sum(ranks.sent_bytes.values()) == (members - 1) * elements * 2


@given(st.integers(2, 8), st.integers(1, 50))
def test_an_all_reduce_of_messages_takes_what_routing_predicts(members: int, rows: int) -> None:
    ranks, group = Ranks(SLOW), range(members)
    ranks.run(
        [ring_all_reduce(Communicator(ranks, group, place), "decode", members * rows, 2) for place in group]
    )
    assert ranks.timeline.now_s == pytest.approx(all_reduce_s(2 * members * rows, members, SLOW.inside))


def test_a_gather_ends_when_the_last_part_has_come() -> None:
    ranks, group = Ranks(SLOW), range(4)
    ranks.run([gather(Communicator(ranks, group, place), "decode", 4000, 2) for place in group])
    assert ranks.timeline.now_s == pytest.approx(1.0 + 2000 / 1000)
    assert ranks.sent_bytes == {Key(rank, "decode", "Gather"): 2000 for rank in (1, 2, 3)}


def test_messages_of_a_line_follow_each_other() -> None:
    ranks = Ranks(SLOW)

    def takes_two():  # type: ignore[no-untyped-def]  # noqa: ANN202
        yield Receive(0)
        yield Receive(0)

    for _ in range(2):
        ranks.send(0, 1, "decode", "Send", 3000)
    ranks.run([iter(()), takes_two()])  # type: ignore[list-item]
    assert ranks.timeline.now_s == pytest.approx(2 * 3.0 + 1.0)


def test_waiting_for_what_nobody_sends_is_an_error() -> None:
    ranks = Ranks(SLOW)
    with pytest.raises(ValueError, match="nobody sends"):
        ranks.run([ring_all_reduce(Communicator(ranks, range(2), 0), "decode", 8, 2)])


@pytest.mark.parametrize("layout", [Layout(), Layout(2), Layout(4), Layout(1, 2), Layout(1, 4)])
def test_within_a_node_simulation_and_prediction_agree(layout: Layout) -> None:
    """The prediction leaves out the embedding's all-reduce, the gather and the second tensor of a boundary."""
    shape, length = MODEL_SHAPES["llama-3.1-8b"], Lengths(128, 9)
    request, prediction = (
        simulated(shape.name, layout, length),
        predicted(shape, layout, length, DEVICE, CARDINAL),
    )
    assert prediction is not None
    assert request.ttft_s == pytest.approx(prediction.ttft_s, rel=0.03)
    assert request.tpot_s == pytest.approx(prediction.tpot_s, rel=0.03)


def test_a_ring_over_two_nodes_is_slower_than_one_within_and_not_slower_than_the_prediction() -> None:
    """The prediction takes every message for one over the slow line; in a ring of two nodes two lines of eight are."""
    shape, length = MODEL_SHAPES["llama-3.2-3b"], Lengths(128, 3)
    inside = simulated(shape.name, Layout(4), length)
    across, prediction = (
        simulated(shape.name, Layout(8), length),
        predicted(shape, Layout(8), length, DEVICE, CARDINAL),
    )
    assert prediction is not None
    assert inside.tpot_s < across.tpot_s < prediction.tpot_s


def test_networks_by_name_and_by_numbers() -> None:
    assert fabric_named("100mbps,30ms").between == DeviceLink(12.5e6, 0.03)
    assert fabric_named("2.5gbps, 0ms").inside == DeviceLink(312.5e6, 0.0)
    assert CARDINAL.link(0, 3) == CARDINAL.inside != CARDINAL.link(3, 4)
    assert tensor_sizes(8) == (1, 2, 4, 8)
    for text in ("string", "0mbps,1ms", "1mbps", "1..2mbps,1ms"):
        with pytest.raises(ValueError, match="--network must be"):
            fabric_named(text)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert run_app(app, "molink-simnet", ["communication", *arguments, "--json"]) == 0
    document: dict[str, object] = json.loads(capsys.readouterr().out)
    return document


def test_the_command_counts_as_table_6_does(capsys: pytest.CaptureFixture[str]) -> None:
    document = run(capsys, "--model", "llama-3.1-8b", "--tp", "2", "--pp", "2")
    rows = document["rows"]
    assert isinstance(rows, list)
    assert len(rows) == 10
    for row in rows:
        assert row["count"] == row["counted"] == row["paper_count"]
        assert row["shape"] == row["paper_shape"]
        assert row["corrected_bytes"] == row["counted_bytes"]
        assert row["bytes"] == row["count"] * row["message_bytes"]
    assert {row["source"] for row in document["times"]} == {"predicted", "simulated"}  # type: ignore[attr-defined]


def test_one_tensor_a_boundary_halves_what_crosses_it(capsys: pytest.CaptureFixture[str]) -> None:
    few = ("--pp", "4", "--decode", "4")
    two, one = (run(capsys, *few, "--tensors-per-boundary", number)["rows"] for number in ("2", "1"))
    assert isinstance(two, list)
    assert isinstance(one, list)
    assert [row["bytes"] for row in two] == [2 * row["bytes"] for row in one]


def test_of_one_simulated_token_nothing_follows_for_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    times = run(capsys, "--simulated-tokens", "1")["times"]
    assert isinstance(times, list)
    simulated = next(row for row in times if row["source"] == "simulated")
    assert simulated["ttft_ms"] > 0
    assert (simulated["tpot_ms"], simulated["latency_s"]) == (None, None)


@pytest.mark.parametrize("network", ["nvlink", "100mbps,30ms"])
def test_advice_is_in_order_and_names_every_layout(capsys: pytest.CaptureFixture[str], network: str) -> None:
    rows = run(capsys, "--advise", "--devices", "4", "--network", network, "--goal", "tpot")["rows"]
    assert isinstance(rows, list)
    assert [row["rank"] for row in rows] == list(range(1, 8))
    assert [row["tpot_ms"] for row in rows] == sorted(row["tpot_ms"] for row in rows)
    assert len({(row["tp"], row["pp"]) for row in rows}) == 7
    assert all(row["reason"].startswith(f"TP={row['tp']} PP={row['pp']}:") for row in rows)
    assert (rows[0]["tp"] > 1) == (network == "nvlink")


def test_advice_keeps_a_limit_on_the_first_token(capsys: pytest.CaptureFixture[str]) -> None:
    long = (
        "--advise",
        "--devices",
        "4",
        "--network",
        "1600gbps,0.05ms",
        "--prefill",
        "4096",
        "--goal",
        "tpot",
    )
    free = run(capsys, *long)["rows"]
    assert isinstance(free, list)
    fastest = min(row["ttft_ms"] for row in free)
    assert free[0]["ttft_ms"] > fastest
    kept = run(capsys, *long, "--max-ttft-ms", str(fastest * 1.001))["rows"]
    assert isinstance(kept, list)
    assert kept[0]["ttft_ms"] == fastest


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--model", "abacus"), "no known shape"),
        (("--pp", "33"), "too many"),
        (("--tp", "3"), "llama-3.1-8b has 32 attention heads, which --tp 3 ranks cannot share evenly"),
        (("--model", "lama-3.1-8b"), "(did you mean llama-3.1-8b?)"),
        (("--device", "rtx4090"), "(did you mean rtx-4090?)"),
        (("--network", "string"), "--network must be"),
        (("--device", "abacus"), "has no profile"),
        (("--advise", "--model", "mixtral-8x7b"), "has experts"),
        (("--advise", "--model", "llama-3.1-405b", "--device", "rtx-3060", "--devices", "2"), "fits"),
    ],
)
def test_what_cannot_be_is_said_in_one_sentence(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], complaint: str
) -> None:
    assert run_app(app, "molink-simnet", ["communication", *arguments]) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "tp", "fits"),
    [("llama-2-70b", "1", False), ("llama-2-70b", "2", True), ("deepseek-v3", "4", False)],
)
def test_times_of_a_model_without_room_say_so(
    model: str, tp: str, *, fits: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--model", model, "--tp", tp, "--device", "h100-94", "--simulated-tokens", "0")
    assert run_app(app, "molink-simnet", ["communication", *arguments]) == 0
    assert ("It does not fit" in capsys.readouterr().out) is not fits


@pytest.mark.full
def test_figures_are_those_of_the_paper_with_what_it_prints() -> None:
    drawn = paper_figures(Lengths(16, 2))
    assert [int(figure.stem.split("-")[1]) for figure in drawn] == [1, 4, 5, 6, 7, 8, 9, 10]
    assert ("TP=4 PP=2", "paper", 15.15, None, 103) in drawn[-1].rows
