"""Tables III to VI of the communication-patterns paper, number for number, and equations (1) to (7)."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.routing.parallelism.parallelism import Layout, Lengths
from molink.routing.parallelism.volumes import (
    Scope,
    Volume,
    all_gather_volume,
    all_reduce_volume,
    embedding_volume,
    gather_volume,
    hybrid_volume,
    pipeline_volume,
    point_to_point_volume,
    tensor_volume,
)
from molink.shards.spec import ModelSpec
from molink.simnet.devices.model_shapes import MODEL_SHAPES
from molink.simnet.papers.communication.operations import Operation, operations

THE_PAPER_S = Lengths(128, 128)
THE_PAPER_S_MODELS = ("llama-3.2-3b", "llama-3.1-8b", "llama-2-13b")
EIGHT = MODEL_SHAPES["llama-3.1-8b"].spec()

layouts = st.builds(Layout, st.sampled_from((1, 2, 4, 8)), st.sampled_from((1, 2, 4)))
lengths = st.builds(Lengths, st.integers(1, 4096), st.integers(1, 2048))
specs = st.sampled_from([MODEL_SHAPES[name].spec() for name in THE_PAPER_S_MODELS])


def found(layout: Layout, spec: ModelSpec = EIGHT) -> dict[tuple[str, str], tuple[int, tuple[int, ...]]]:
    """Count and shape by phase and operation."""
    return {(one.phase, one.kind): (one.count, one.shape) for one in operations(spec, layout, THE_PAPER_S)}


@pytest.mark.parametrize(("tensor", "logits"), [(2, 64128), (4, 32064)])
def test_table_3_operations_of_tensor_parallelism(tensor: int, logits: int) -> None:
    assert found(Layout(tensor=tensor)) == {
        ("prefill", "Allreduce"): (65, (128, 4096)),
        ("prefill", "Gather"): (1, (logits,)),
        ("decode", "Allreduce"): (8255, (1, 4096)),
        ("decode", "Gather"): (127, (logits,)),
    }


@pytest.mark.parametrize(
    ("model", "prefill", "decode"),
    [
        ("llama-3.2-3b", (786432, 57), (6144, 7239)),
        ("llama-3.1-8b", (1048576, 65), (8192, 8255)),
        ("llama-2-13b", (1310720, 81), (10240, 10287)),
    ],
)
def test_table_4_size_and_count_of_all_reduces(
    model: str, prefill: tuple[int, int], decode: tuple[int, int]
) -> None:
    spec = MODEL_SHAPES[model].spec()
    reduced = [one for one in operations(spec, Layout(tensor=4), THE_PAPER_S) if one.kind == "Allreduce"]
    assert [(one.message_bytes, one.count) for one in reduced] == [prefill, decode]


@pytest.mark.parametrize(("pipeline", "prefill", "decode"), [(2, 2, 254), (4, 6, 762)])
def test_table_5_operations_of_pipeline_parallelism(pipeline: int, prefill: int, decode: int) -> None:
    assert found(Layout(pipeline=pipeline)) == {
        ("prefill", "Send"): (prefill, (128, 4096)),
        ("prefill", "Recv"): (prefill, (128, 4096)),
        ("decode", "Send"): (decode, (1, 4096)),
        ("decode", "Recv"): (decode, (1, 4096)),
    }


def test_table_6_operations_of_hybrid_parallelism() -> None:
    assert found(Layout(tensor=2, pipeline=2)) == {
        ("prefill", "Allreduce"): (33, (128, 4096)),
        ("prefill", "Gather"): (1, (64128,)),
        ("prefill", "Allgather"): (2, (128, 4096)),
        ("prefill", "Send"): (2, (128, 2048)),
        ("prefill", "Recv"): (2, (128, 2048)),
        ("decode", "Allreduce"): (4191, (1, 4096)),
        ("decode", "Gather"): (127, (64128,)),
        ("decode", "Allgather"): (254, (1, 4096)),
        ("decode", "Send"): (254, (1, 2048)),
        ("decode", "Recv"): (254, (1, 2048)),
    }


def test_table_6_has_one_all_reduce_more_than_equation_4_the_embedding_s_of_the_first_stage() -> None:
    layout = Layout(tensor=2, pipeline=2)
    rows_bytes = 255 * 4096 * 2
    implied = all_reduce_volume(EIGHT, layout, THE_PAPER_S).bytes
    assert implied == 32 * rows_bytes  # 2L/p, and the factor 2(t-1)/t of two ranks is 1
    table = sum(
        one.corrected_bytes for one in operations(EIGHT, layout, THE_PAPER_S) if one.kind == "Allreduce"
    )
    assert table == 33 * rows_bytes == implied + embedding_volume(EIGHT, 2, THE_PAPER_S).bytes


def test_the_embedding_s_volume_is_printed_without_the_factor_that_equation_1_gives_it() -> None:
    literal = embedding_volume(EIGHT, 4, THE_PAPER_S, as_printed=True)
    implied = embedding_volume(EIGHT, 4, THE_PAPER_S)
    assert (literal.bytes, literal.corrected) == (255 * 4096 * 2, False)
    assert (implied.bytes, implied.corrected) == (1.5 * 255 * 4096 * 2, True)
    with_it = all_reduce_volume(EIGHT, Layout(tensor=4), THE_PAPER_S).bytes + implied.bytes
    assert with_it + gather_volume(EIGHT, 4, THE_PAPER_S).bytes == tensor_volume(EIGHT, 4, THE_PAPER_S).bytes
    assert (
        embedding_volume(EIGHT, 2, THE_PAPER_S, as_printed=True).bytes
        == embedding_volume(EIGHT, 2, THE_PAPER_S).bytes
    )


def test_the_text_s_count_of_sends_has_the_factor_2_only_once() -> None:
    """The text prints (p-1) x 2 x KV factor and explains the 2 as keys and values: with both, Table V would say 4."""
    literal, implied = (2 - 1) * 2 * 2, (2 - 1) * 2
    assert found(Layout(pipeline=2))[("prefill", "Send")][0] == implied != literal


def test_decoding_128_tokens_takes_127_times_the_operations_of_their_prefill() -> None:
    for layout in (Layout(2), Layout(4), Layout(1, 2), Layout(1, 4), Layout(2, 2)):
        counts = found(layout)
        for phase, kind in counts:
            assert counts[("decode", kind)][0] == 127 * counts[("prefill", kind)][0], (phase, kind)


def test_volumes_grow_with_the_length_as_figure_7_s_text_says_but_for_the_gathers() -> None:
    """1.50 times from 128 to 256 tokens, 1.67 from 256 to 512, about 2.5 over both: that is the growth of
    S_p + S_d - 1. Gathers of logits grow with S_d alone, so that with them the equations imply more."""

    def growth(volume: Callable[[Lengths], Volume]) -> tuple[float, float, float]:
        short, middle, long = (volume(Lengths(128, decoded)).bytes for decoded in (128, 256, 512))
        return round(middle / short, 2), round(long / middle, 2), round(long / short, 1)

    literal = (1.50, 1.67, 2.5)
    assert growth(lambda length: pipeline_volume(EIGHT, 4, length)) == literal
    assert growth(lambda length: all_reduce_volume(EIGHT, Layout(4), length)) == literal
    assert growth(lambda length: tensor_volume(EIGHT, 4, length)) == (1.52, 1.69, 2.6)
    assert growth(lambda length: hybrid_volume(EIGHT, Layout(2, 2), length)) == (1.60, 1.75, 2.8)


def test_figure_6_s_order_pipeline_below_hybrid_below_tensor_parallelism() -> None:
    for model in THE_PAPER_S_MODELS:
        spec = MODEL_SHAPES[model].spec()
        pipelined = pipeline_volume(spec, 4, THE_PAPER_S).bytes
        hybrid = hybrid_volume(spec, Layout(2, 2), THE_PAPER_S, first_stage=True).bytes
        assert pipelined < hybrid < tensor_volume(spec, 4, THE_PAPER_S).bytes


def test_equations_by_hand_for_the_8b_model_on_four_devices() -> None:
    """Each written out with its numbers: L 32, h 4096, v 128256, b 2, S_p + S_d - 1 = 255."""
    assert tensor_volume(EIGHT, 4, THE_PAPER_S).bytes == 65 * 255 * 4096 * 2 * 1.5 + 128 * 32064 * 2
    assert pipeline_volume(EIGHT, 4, THE_PAPER_S).bytes == 3 * 2 * 255 * 4096 * 2
    two = Layout(2, 2)
    assert all_reduce_volume(EIGHT, two, THE_PAPER_S).bytes == 32 * 255 * 4096 * 2 * 1.0
    assert all_gather_volume(EIGHT, two, THE_PAPER_S).bytes == 2 * 255 * 4096 * 2 * 0.5
    assert gather_volume(EIGHT, 2, THE_PAPER_S).bytes == 128 * 64128 * 2
    assert point_to_point_volume(EIGHT, two, THE_PAPER_S).bytes == 2 * 255 * 2048 * 2
    total = (32 + 1 + 1) * 255 * 4096 * 2 + 128 * 64128 * 2
    assert hybrid_volume(EIGHT, two, THE_PAPER_S).bytes == total


def test_each_volume_says_what_it_counts() -> None:
    two = Layout(2, 2)
    said = [
        (volume.equation, volume.scope, volume.corrected)
        for volume in (
            tensor_volume(EIGHT, 2, THE_PAPER_S),
            pipeline_volume(EIGHT, 2, THE_PAPER_S),
            hybrid_volume(EIGHT, two, THE_PAPER_S),
            all_reduce_volume(EIGHT, two, THE_PAPER_S),
            all_gather_volume(EIGHT, two, THE_PAPER_S),
            gather_volume(EIGHT, 2, THE_PAPER_S),
            point_to_point_volume(EIGHT, two, THE_PAPER_S),
        )
    ]
    assert said == [
        (1, Scope.RANK, True),
        (2, Scope.BOUNDARIES, False),
        (3, Scope.MIXED, True),
        (4, Scope.RANK, True),
        (5, Scope.BOUNDARIES, True),
        (6, Scope.RANK, False),
        (7, Scope.BOUNDARIES, False),
    ]


def test_our_links_carry_one_tensor_a_boundary() -> None:
    ours = pipeline_volume(EIGHT, 4, THE_PAPER_S, 1).bytes
    assert ours == pipeline_volume(EIGHT, 4, THE_PAPER_S).bytes / 2


@given(specs, layouts, lengths, st.sampled_from((1, 2)))
def test_operations_add_up_to_the_equations(
    spec: ModelSpec, layout: Layout, length: Lengths, tensors: int
) -> None:
    def moved(kind: str) -> float:
        return sum(
            one.corrected_bytes for one in operations(spec, layout, length, tensors) if one.kind == kind
        )

    embedding = embedding_volume(spec, layout.tensor, length).bytes
    assert moved("Allreduce") == pytest.approx(all_reduce_volume(spec, layout, length).bytes + embedding)
    assert moved("Allgather") == pytest.approx(all_gather_volume(spec, layout, length, tensors).bytes)
    assert moved("Gather") == pytest.approx(gather_volume(spec, layout.tensor, length).bytes)
    assert moved("Send") == pytest.approx(point_to_point_volume(spec, layout, length, tensors).bytes)
    assert moved("Recv") == moved("Send")


@given(specs, layouts, lengths)
def test_one_stage_is_equation_1_and_one_rank_equation_2(
    spec: ModelSpec, layout: Layout, length: Lengths
) -> None:
    alone = hybrid_volume(spec, Layout(layout.tensor, 1), length, first_stage=True)
    assert alone.bytes == pytest.approx(tensor_volume(spec, layout.tensor, length).bytes)
    piped = hybrid_volume(spec, Layout(1, layout.pipeline), length, first_stage=True)
    assert piped.bytes == pytest.approx(pipeline_volume(spec, layout.pipeline, length).bytes)


@given(specs, lengths)
def test_one_device_sends_nothing(spec: ModelSpec, length: Lengths) -> None:
    assert operations(spec, Layout(), length) == ()
    assert hybrid_volume(spec, Layout(), length, first_stage=True).bytes == 0


def test_operations_know_payload_and_what_a_rank_sends() -> None:
    one = Operation("prefill", "Allreduce", 3, (2, 5), 2, 1.5)
    assert (one.message_bytes, one.payload_bytes, one.corrected_bytes) == (20, 60, 90.0)


@pytest.mark.parametrize("values", [(0, 1), (1, 0)])
def test_layouts_and_lengths_of_nothing_are_refused(values: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="at least one"):
        Layout(*values)
    with pytest.raises(ValueError, match="at least one"):
        Lengths(*values)
