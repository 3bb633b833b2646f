"""All rows of a step are drawn together: as each would be alone, in one wait for the device, in float32 if need be."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.devices.sampling_by_row import sample_by_row
from support.properties import examples
from torch.utils._python_dispatch import TorchDispatchMode

from molink.shards.sampling.drawing import Pick, candidates_on, draw
from molink.shards.sampling.sample_request import SampleRequest
from molink.shards.sampling.sampling import BrokenLogits, Sampled, sample_each
from molink.shards.sampling.weights import GROUP, SLICE, weighing_dtype
from molink.shards.spec import SamplingParams

VOCABULARY = SLICE + 3 * GROUP + 7
CANDIDATES = candidates_on(torch.device("cpu"))
READINGS = (
    "item",
    "tolist",
    "cpu",
    "numpy",
    "nonzero",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "unique",
)
WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "unique_dim")
MIXED = (
    SamplingParams(),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=1.0, top_k=40),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=1.2, top_k=100, top_p=0.8, logprobs=5),
    SamplingParams(logprobs=20),
    SamplingParams(temperature=0.9, top_p=0.95, logprobs=0, logit_bias=((3, 2.0), (5, -100.0))),
    SamplingParams(temperature=1.0, logprobs=3),
)
"""One of each kind."""


def peaked(rows: int, vocabulary: int, seed: int = 0) -> torch.Tensor:
    """Logits as models make them: a few hundred tokens have nearly all of the probability."""
    generator = torch.Generator().manual_seed(seed)
    return 4 * torch.randn(rows, vocabulary, generator=generator)


def asked(rows: int, kinds: Sequence[SamplingParams] = MIXED) -> list[SampleRequest]:
    return [SampleRequest(kinds[row % len(kinds)], 11 + row, 100 + row) for row in range(rows)]


class Operations(TorchDispatchMode):
    """What is computed, by name; refuses tensors of some dtype."""

    def __init__(self, without: torch.dtype | None = None) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._without = without

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        self.counts[func.__name__.split(".")[0]] += 1
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(one, torch.Tensor):
                assert one.dtype != self._without, f"{func} makes {one.dtype}"
        return made


@contextmanager
def readings(patch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How often tensors are read on the host, by the ways in which that can be done."""
    counts: Counter[str] = Counter()

    def counted(name: str) -> None:
        original = getattr(torch.Tensor, name)

        def read(*args: object) -> object:
            counts[name] += 1
            return original(*args)

        patch.setattr(torch.Tensor, name, read)

    with patch.context() as within:
        patch = within
        for name in READINGS:
            counted(name)
        with Operations() as operations:
            yield counts
        counts.update({name: operations.counts[name] for name in WAITING if operations.counts[name]})


def same(together: Sequence[Sampled | Exception], by_row: Sequence[Sampled | Exception]) -> None:
    for one, other in zip(together, by_row, strict=True):
        if isinstance(other, Exception):
            assert type(one) is type(other)
            assert getattr(one, "row", None) == getattr(other, "row", None)
            continue
        assert isinstance(one, Sampled)
        assert one.token_id == other.token_id
        assert (one.logprob is None) == (other.logprob is None)
        assert one.logprob == pytest.approx(other.logprob, abs=1e-9)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]
        assert [told for _, told in one.top] == pytest.approx([told for _, told in other.top], abs=1e-9)


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-3, 0.3, 0.7, 1.0, 1.5, 5.0, 100.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 40, 1000, 1024, 1500, 2**31 - 1]),
    top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.99, 0.999999, 1.0]),
    logprobs=st.sampled_from([None, None, 0, 1, 5, 20]),
    logit_bias=st.lists(
        st.tuples(st.integers(0, 60), st.sampled_from([-100.0, 0.1, 3.0, 100.0])), max_size=3
    ).map(tuple),
)


@settings(deadline=None, max_examples=examples(80))
@given(
    wanted=st.lists(PARAMS, min_size=1, max_size=8),
    seed=st.integers(0, 2**64 - 1),
    vocabulary=st.sampled_from([1, 3, 50, 511, 513, 1025, 3000]),
    spread=st.sampled_from([0.0, 0.01, 1.0, 6.0]),
    coarse=st.booleans(),
    poison=st.sampled_from([None, math.nan, math.inf, -math.inf]),
)
def test_rows_drawn_together_are_those_drawn_one_by_one(
    wanted: list[SamplingParams],
    seed: int,
    vocabulary: int,
    spread: float,
    coarse: bool,
    poison: float | None,
) -> None:
    logits = spread * peaked(len(wanted), vocabulary, seed % 2**31)
    if coarse:  # many are equal, as a bfloat16 model's are
        logits = logits.bfloat16().float()
    if poison is not None:
        logits[0, seed % vocabulary] = poison
    requests = [SampleRequest(params, seed, row) for row, params in enumerate(wanted)]
    same(sample_each(logits, requests), sample_by_row(logits, requests))


def test_rows_of_a_vocabulary_that_is_weighed_in_slices_are_those_drawn_one_by_one() -> None:
    for spread in (0.25, 1.0):
        logits = spread * peaked(24, VOCABULARY)
        logits[5, 7] = math.nan
        requests = asked(24)
        same(sample_each(logits, requests), sample_by_row(logits, requests))


def test_a_batch_of_mixed_rows_costs_one_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, requests = peaked(64, VOCABULARY), asked(64)
    with readings(monkeypatch) as counts:
        sample_each(logits, requests)
    assert counts == {"tolist": 1}


def test_rows_whose_likeliest_tokens_are_not_enough_cost_all_together_a_second_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits, requests = peaked(20, 3 * CANDIDATES), asked(20)
    logits[::4] *= 0.001
    logits[1::4] = 0
    with readings(monkeypatch) as counts:
        drawn = sample_each(logits, requests)
    assert counts == {"tolist": 2}
    same(drawn, sample_by_row(logits, requests))


def test_drawing_reads_nothing_on_a_device_that_has_nothing_to_read() -> None:
    picks = [
        Pick(one.params.temperature, one.params.top_k, one.params.top_p, one.params.logprobs, 0.5)
        for one in asked(64)
    ]
    logits = torch.empty(64, VOCABULARY, device="meta")
    for candidates in (CANDIDATES, VOCABULARY):
        drawn = draw(logits, picks, candidates, torch.float64)
        assert drawn.packed(torch.float64).shape == (64 * 3 + 32 * (1 + 2 * 20),)


def test_operations_do_not_grow_with_rows() -> None:
    counts = []
    for rows in (8, 64):
        logits, requests = peaked(rows, VOCABULARY), asked(rows)
        with Operations() as operations:
            sample_each(logits, requests)
        counts.append(operations.counts)
    assert counts[0] == counts[1]


def test_greedy_rows_cost_one_argmax_for_all() -> None:
    with Operations() as operations:
        sample_each(peaked(64, VOCABULARY), asked(64, [SamplingParams()]))
    assert operations.counts["argmax"] == 1
    assert not {"topk", "sort", "exp_", "cumsum", "index_select"} & set(operations.counts)


def test_where_there_is_no_float64_tokens_are_drawn_in_float32() -> None:
    logits, requests = peaked(64, VOCABULARY), asked(64)
    logits[9] *= 0.01
    logits[17, 3] = math.nan
    with Operations(without=torch.float64):
        narrow = sample_each(logits, requests, torch.float32)
    exact = sample_by_row(logits, requests)
    assert isinstance(narrow[17], BrokenLogits)
    for one, other in zip(narrow, exact, strict=True):
        if isinstance(one, Sampled) and isinstance(other, Sampled):
            assert one.token_id == other.token_id
            assert [token for token, _ in one.top] == [token for token, _ in other.top]
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
    assert weighing_dtype(torch.device("mps")) is torch.float32
    assert {weighing_dtype(torch.device(device)) for device in ("cpu", "cuda")} == {torch.float64}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_whatever_the_race_a_token_is_drawn_that_may_be_drawn(dtype: torch.dtype) -> None:
    logits = torch.full((3, 2000), -math.inf)
    logits[:, [3, 700, 1500]] = torch.tensor([0.0, 1.0, -1.0])
    allowed = {3, 700, 1500}, {700}, {3, 700}
    seen: list[set[int]] = [set(), set(), set()]
    for key in range(300):
        picks = [Pick(1.0, key=key), Pick(1e-300, 5, key=key), Pick(1.0, 0, 0.9, key=key)]
        drawn = draw(logits, picks, CANDIDATES, dtype)
        assert not drawn.unsettled.any()
        for one, token in zip(seen, drawn.tokens.flatten().tolist(), strict=True):
            one.add(token)
    assert tuple(seen) == allowed


def test_a_request_that_cannot_be_fails_alone() -> None:
    logits = peaked(4, 100)
    requests = asked(4, [SamplingParams(temperature=1.0)])
    requests[1] = SampleRequest(SamplingParams(temperature=1.0), 2**64, 0)
    requests[2] = SampleRequest(SamplingParams(logit_bias=((100, 1.0),)), 0, 0)
    drawn = sample_each(logits, requests)
    assert [isinstance(one, Exception) for one in drawn] == [False, True, True, False]
    alone = sample_each(logits[[0, 3]], [requests[0], requests[3]])
    assert [drawn[0], drawn[3]] == alone
