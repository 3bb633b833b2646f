"""Drawings that are recorded give the tokens of those that are launched operation by operation."""

import math
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.devices.paged_reference import Tapes, decoding_here
from support.models.circuit_runs import engine_with
from support.properties import examples
from torch import Tensor

from molink.shards.device.device import Device
from molink.shards.kernels.drawing_kernels import checked, drawing_kernels_on
from molink.shards.sampling.drawing import Asked, LikelyTokens, likeliest_winner
from molink.shards.sampling.recordable import likeliest_of_all, race_of_all
from molink.shards.sampling.recorded_drawing import RecordedDrawing
from molink.shards.sampling.sample_request import SampleRequest
from molink.shards.sampling.sampling import Sampled, sample_each
from molink.shards.spec import SamplingParams, Span

TinyModel = Callable[[str], Path]
Drawings = dict[tuple[int, bool], tuple[RecordedDrawing, Tapes]]
SIZES = (1, 4)
VOCABULARIES = (3, 1500)
KINDS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-3, 0.7, 1.0, 100.0]),
    top_k=st.sampled_from([0, 1, 2, 40, 1200, 2**31 - 1]),
    top_p=st.sampled_from([1e-9, 0.5, 0.9, 0.999999, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.2]),
    logprobs=st.sampled_from([None, None, None, 2]),
)


class Operations:
    """Kernels that are the operations that they stand for; in a nucleus, after all tokens have been put in order."""

    def likeliest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return likeliest_of_all(logits)

    def race(self, logits: Tensor, asked: Asked) -> tuple[Tensor, Tensor]:
        return race_of_all(logits, asked)

    def race_of_likeliest(
        self, order: LikelyTokens, asked: Asked, totals: Tensor, vocabulary: int
    ) -> tuple[Tensor, Tensor]:
        return likeliest_winner(order, asked, totals, vocabulary)

    def race_in_nucleus(
        self, logits: Tensor, asked: Asked, totals: Tensor, _winners: Tensor
    ) -> tuple[Tensor, Tensor]:
        rows, vocabulary = logits.shape
        order = LikelyTokens.of(logits, torch.arange(rows), vocabulary, whole=True)
        return likeliest_winner(order, asked, totals, vocabulary)


class FirstToken(Operations):
    """Kernels that draw the first token whatever there is."""

    def race(self, logits: Tensor, asked: Asked) -> tuple[Tensor, Tensor]:
        totals, winners = race_of_all(logits, asked)
        return totals, torch.zeros_like(winners)


class FirstOfNucleus(Operations):
    """Kernels that are wrong where top_p cuts alone."""

    def race_in_nucleus(
        self, logits: Tensor, asked: Asked, totals: Tensor, winners: Tensor
    ) -> tuple[Tensor, Tensor]:
        _, unsettled = super().race_in_nucleus(logits, asked, totals, winners)
        return torch.zeros_like(winners), unsettled


@pytest.fixture(scope="module")
def drawings() -> Drawings:
    """By vocabulary and whether there are kernels, all sizes recorded."""
    made = {}
    for vocabulary, has_kernels in product(VOCABULARIES, (False, True)):
        tapes = Tapes()
        kernels = Operations() if has_kernels else None
        drawing = RecordedDrawing(vocabulary, SIZES, Device("cpu"), tapes, kernels)
        while drawing.record_next():
            continue
        made[vocabulary, has_kernels] = drawing, tapes
    return made


def described(drawn: list[Sampled | Exception]) -> list[object]:
    return [one if isinstance(one, Sampled) else (type(one), getattr(one, "row", None)) for one in drawn]


@settings(deadline=None, max_examples=examples(60))
@given(
    wanted=st.lists(KINDS, min_size=1, max_size=5),
    seed=st.integers(0, 2**31),
    vocabulary=st.sampled_from(VOCABULARIES),
    spread=st.sampled_from([0.0, 0.01, 1.0, 6.0]),
    poison=st.sampled_from([None, None, math.nan, -math.inf]),
    has_kernels=st.booleans(),
)
def test_tokens_are_those_that_are_drawn_operation_by_operation(
    drawings: Drawings,
    wanted: list[SamplingParams],
    seed: int,
    vocabulary: int,
    spread: float,
    poison: float | None,
    has_kernels: bool,
) -> None:
    logits = spread * torch.randn(len(wanted), vocabulary, generator=torch.Generator().manual_seed(seed))
    if poison is not None:
        logits[0, seed % vocabulary] = poison
    requests = [SampleRequest(params, seed, row) for row, params in enumerate(wanted)]
    recorded, _ = drawings[vocabulary, has_kernels]
    ours = sample_each(logits, requests, recorded=recorded)
    assert described(ours) == described(sample_each(logits, requests))


def test_rows_up_to_the_largest_size_are_drawn_in_one_launch_unless_they_want_more_than_tokens(
    drawings: Drawings,
) -> None:
    recorded, tapes = drawings[1500, False]
    logits = torch.randn(5, 1500)

    def launches(rows: int, **params: float) -> int:
        before = tapes.replays
        requests = [SampleRequest(SamplingParams(**params), 7, row) for row in range(rows)]  # type: ignore[arg-type]
        sample_each(logits[:rows], requests, recorded=recorded)
        return tapes.replays - before

    assert [launches(rows, temperature=0.8, top_p=0.9) for rows in (1, 3, 4, 5)] == [1, 1, 1, 0]
    assert launches(2, temperature=0.8, logprobs=3) == 0
    assert launches(2) == 0, "the likeliest token is one operation"


@pytest.mark.parametrize("cut", [0.0, 0.7])
def test_of_more_equals_than_are_put_in_order_greedy_takes_the_lowest_id(
    drawings: Drawings, cut: float
) -> None:
    """The other row lets the likeliest be put in order."""
    recorded, tapes = drawings[1500, False]
    logits = torch.ones(2, 1500)
    requests = [
        SampleRequest(SamplingParams(), 7, 0),
        SampleRequest(SamplingParams(temperature=0.8, top_p=1 - cut), 7, 1),
    ]
    before = tapes.replays
    assert sample_each(logits, requests, recorded=recorded)[0] == Sampled(0, None, ())
    assert tapes.replays > before


def test_a_recording_that_fails_leaves_drawings_operation_by_operation(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Failing:
        def record(self, _: Callable[[], Tensor]) -> Callable[[], Tensor]:
            raise RuntimeError("no such card")

    drawing = RecordedDrawing(50, SIZES, Device("cpu"), Failing())
    assert drawing.record_next()
    assert not drawing.record_next()
    assert (
        "tokens are drawn one operation at a time: recording ended with RuntimeError: no such card"
        in caplog.text
    )
    logits, request = torch.randn(1, 50), SampleRequest(SamplingParams(temperature=1.0), 3, 4)
    assert sample_each(logits, [request], recorded=drawing) == sample_each(logits, [request])


def test_a_drawing_that_fails_when_it_is_played_is_made_good_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Breaking(Tapes):
        def record(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
            replay = super().record(step)

            def breaking() -> Tensor:
                if self.replays > 0:
                    raise RuntimeError("the card is gone")
                return replay()

            return breaking

    drawing = RecordedDrawing(50, (1,), Device("cpu"), Breaking())
    assert drawing.record_next()
    logits, request = torch.randn(1, 50), SampleRequest(SamplingParams(temperature=1.0), 3, 4)
    drawn = [sample_each(logits, [request], recorded=drawing) for _ in range(3)]
    assert drawn == [sample_each(logits, [request])] * 3
    assert caplog.text.count("tokens are drawn one operation at a time") == 1
    assert not drawing.record_next()


def test_kernels_that_draw_other_tokens_are_not_used(caplog: pytest.LogCaptureFixture) -> None:
    kernels = Operations()
    assert checked(kernels, torch.device("cpu")) is kernels
    assert caplog.text == ""
    for wrong in (FirstToken(), FirstOfNucleus()):
        caplog.clear()
        assert checked(wrong, torch.device("cpu")) is None
        assert "tokens are drawn without kernels: they draw others on cpu" in caplog.text
    assert drawing_kernels_on(torch.device("cpu")) is None


def test_recorded_drawings_are_made_of_the_kernels_that_there_are() -> None:
    used = []

    class Counted(Operations):
        def race(self, logits: Tensor, asked: Asked) -> tuple[Tensor, Tensor]:
            used.append("all")
            return super().race(logits, asked)

        def race_of_likeliest(
            self, order: LikelyTokens, asked: Asked, totals: Tensor, vocabulary: int
        ) -> tuple[Tensor, Tensor]:
            used.append("likeliest")
            return super().race_of_likeliest(order, asked, totals, vocabulary)

        def race_in_nucleus(
            self, logits: Tensor, asked: Asked, totals: Tensor, winners: Tensor
        ) -> tuple[Tensor, Tensor]:
            used.append("nucleus")
            return super().race_in_nucleus(logits, asked, totals, winners)

    class Again:
        """Plays a drawing by drawing again."""

        def record(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
            return step

    drawing = RecordedDrawing(50, (1,), Device("cpu"), Again(), Counted())
    while drawing.record_next():
        continue
    logits = torch.randn(1, 50)
    expected = {
        SamplingParams(temperature=1.0): ["all"],
        SamplingParams(temperature=1.0, top_p=0.5): ["all", "nucleus"],
        SamplingParams(temperature=1.0, top_p=0.1): ["all", "likeliest"],
        SamplingParams(temperature=1.0, top_p=0.5, top_k=3): ["all", "likeliest"],
    }
    for params, ways in expected.items():
        used.clear()
        request = SampleRequest(params, 3, 4)
        assert sample_each(logits, [request], recorded=drawing) == sample_each(logits, [request])
        assert used == ways


@pytest.mark.full
def test_drawings_are_recorded_where_the_last_layer_is_and_go_with_it(tiny_model: TinyModel) -> None:
    decoding, _, tapes = decoding_here(sizes=SIZES)
    engine = engine_with(tiny_model("llama"), (0, 3), (3, 6), decoding=decoding)
    while engine.record_next():
        continue
    assert len(tapes.sizes) == 4 * len(SIZES), (
        "two spans, and drawings with the likeliest in order and without"
    )
    drawing, logits = engine.recorded_drawing, torch.randn(1, engine.spec.vocabulary_size)
    assert drawing is not None
    request = SampleRequest(SamplingParams(temperature=1.0), 3, 4)
    before = tapes.replays
    sample_each(logits, [request], recorded=drawing)
    assert tapes.replays == before + 1
    engine.detach(Span(3, 6))
    sample_each(logits, [request], recorded=drawing)
    assert tapes.replays == before + 1
    assert not engine.record_next()
