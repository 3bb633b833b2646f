"""A tail that draws by the tokens before waits for the client to tell them, and believes nobody else.

What a client says while a step is computed changes nothing of it, and nothing of the others' steps.
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.links.data_plane import asynchronous, until
from support.swarms.served_peer import Served, model, served

from molink.peer.engine.steps import StepInput, StepPayload, compute
from molink.peer.engine.tail_drawing import TailDrawing
from molink.peer.hop.session import HopProgress
from molink.peer.masks.mask_worker import NextMask
from molink.peer.models.model import LocalModel
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.shards.batching.engine import Rows
from molink.shards.grammar import Grammar
from molink.shards.spec import SamplingParams, Span

__all__ = ["model"]

PROMPT = [5, 6, 7, 8, 9]
VOCABULARY = 8
BEFORE = [1, 2, 3]
"""A prompt whose client speaks while a step is computed."""
WHOLE = Span(0, 1)
GREEDY = SamplingParams(max_new_tokens=9, temperature=0.0)
CONSTRAINED = SamplingParams(
    max_new_tokens=9, temperature=0.0, repetition_penalty=1.5, grammar=Grammar.regex("any")
)


async def ready(peer: Served, **sampling: float) -> pb.SessionDescriptor:
    """A session of this peer alone that asks for that, ready to start."""
    descriptor = peer.alone()
    for name, value in sampling.items():
        setattr(descriptor.sampling, name, value)
    assert (await peer.reserve(descriptor)).HasField("reserved")
    assert (await peer.ready(descriptor)).readiness.ready
    return descriptor


@pytest.mark.parametrize(
    ("history", "penalty"),
    [
        (pb.History(position=0, token_ids=[2**31]), 1.5),
        (pb.History(position=0, token_ids=[5] * 4096), 1.5),
        (pb.History(position=2**32 - 1, token_ids=[5]), 1.5),
        (pb.History(position=0), 1.5),
        (pb.History(position=0, token_ids=PROMPT), 0.0),
    ],
    ids=["beyond the vocabulary", "too long", "far away", "empty", "nobody asked"],
)
@asynchronous
async def test_what_cannot_be_the_sequence_closes_the_clients_link(
    model: LocalModel, history: pb.History, penalty: float
) -> None:
    async with served(model) as peer:
        descriptor = await ready(peer, repetition_penalty=penalty)
        history.session, history.epoch = descriptor.session, 1
        peer.link.post(history)
        await until(lambda: peer.link.closed_because is not None)


@asynchronous
async def test_a_history_of_an_unknown_session_or_an_old_epoch_has_no_effect(model: LocalModel) -> None:
    async with served(model) as peer:
        descriptor = await ready(peer, repetition_penalty=1.5)
        peer.link.post(pb.History(session=bytes(16), epoch=1, token_ids=PROMPT))
        peer.link.post(pb.History(session=descriptor.session, epoch=7, token_ids=PROMPT))
        assert (await peer.ready(descriptor)).readiness.ready


@pytest.mark.parametrize(
    "sampling",
    [
        {"frequency_penalty": 3.0},
        {"presence_penalty": float("nan")},
        {"repetition_penalty": -1.0},
        {"min_p": 2.0},
        {"min_tokens": 2**31},
    ],
    ids=str,
)
@asynchronous
async def test_a_descriptor_with_what_no_request_may_have_is_refused(
    model: LocalModel, sampling: dict[str, float]
) -> None:
    async with served(model) as peer:
        descriptor = peer.alone()
        for name, value in sampling.items():
            setattr(descriptor.sampling, name, value)
        refusal = (await peer.reserve(descriptor)).refusal
        assert refusal.code == "request"
        assert next(iter(sampling)) in refusal.detail


class CountingEngine:
    """Has the token behind each row be its number, and lets the client speak meanwhile."""

    spec = SimpleNamespace(layers=1)
    recorded_drawing = None

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        self._meanwhile = meanwhile

    def step(self, _: Span, rows: Sequence[Rows], __: torch.Tensor | None) -> torch.Tensor:
        for row in rows:
            row.cache.length += row.count  # type: ignore[misc]
        self._meanwhile()
        return torch.eye(VOCABULARY)[: sum(row.logit_rows for row in rows)]

    def to_host(self, _: object) -> None:
        """It is there."""


def step_of(params: SamplingParams, ids: Sequence[int], guesses: int = 0) -> StepInput:
    """A peer's that is a session's only hop, behind the prompt."""
    drawing = TailDrawing(params, len(BEFORE), VOCABULARY) if params.needs_sequence else None
    session: Any = SimpleNamespace(
        span=WHOLE,
        cache=SimpleNamespace(closed=False, length=len(BEFORE)),
        is_tail=True,
        drawing=drawing,
        plan=SimpleNamespace(params=params, seed=0, prompt_tokens=len(BEFORE)),
        progress=HopProgress(),
    )
    return StepInput(
        session, 1, WHOLE, len(ids), 0.0, prefill=False, draws=guesses + 1,
        payload=StepPayload(token_ids=tuple(ids)), position=len(BEFORE),
    )  # fmt: skip


def knows(drawing: TailDrawing | None, expected: Sequence[int]) -> TailDrawing:
    """Of the prompt and a token behind it, with what a grammar lets come."""
    assert drawing is not None
    assert drawing.grammar is not None
    assert drawing.learn(0, [*BEFORE, 0], is_drawn=False)
    at = len(BEFORE) + 1
    masks = [NextMask(at + place, bytes([0b11111111])) for place in range(1 + len(expected))]
    drawing.grammar.next = NextMask(at, masks[0].allowed, expected=tuple(expected), behind=tuple(masks[1:]))
    return drawing


@pytest.mark.parametrize("meets_grammar", [True, False])
def test_a_mask_that_comes_while_a_step_with_guesses_is_computed_fails_nobody(*, meets_grammar: bool) -> None:
    hasty, other = step_of(CONSTRAINED, [0, 1, 2], 2), step_of(GREEDY, [0])
    drawing = knows(hasty.session.drawing, [1, 2] if meets_grammar else [7])
    draws = 3 if meets_grammar else 1

    def meanwhile() -> None:
        assert drawing.grammar is not None
        drawing.grammar.next = NextMask(len(BEFORE) + 2, bytes([0b10000000]))

    output = compute(CountingEngine(meanwhile), (hasty, other))  # type: ignore[arg-type]
    assert output.failures == ()
    assert [[drawn.token_id for drawn in each] for each in output.sampled] == [[0, 1, 2], [3]]
    assert output.positions == (4, 4)
    assert len(hasty.payload.guesses) == draws - 1


def test_a_session_of_which_too_little_is_known_fails_alone() -> None:
    hasty, other = step_of(CONSTRAINED, [0]), step_of(GREEDY, [0])
    output = compute(CountingEngine(lambda: None), (hasty, other))  # type: ignore[arg-type]
    assert [failure.one for failure in output.failures] == [hasty]
    assert [[drawn.token_id for drawn in each] for each in output.sampled] == [[0]]


def test_a_tail_that_draws_hears_of_no_token_that_it_has_not_drawn() -> None:
    one = step_of(CONSTRAINED, [0])
    drawing = knows(one.session.drawing, [])
    told: list[bool] = []
    compute(CountingEngine(lambda: told.append(drawing.learn(4, [5], is_drawn=False))), (one,))  # type: ignore[arg-type]
    assert told == [False]
    assert drawing.known == len(BEFORE) + 1
    assert drawing.learn(4, [6], is_drawn=True)
    assert drawing.generated_behind(0) == (0, 6)
