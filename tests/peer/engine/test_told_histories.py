"""A tail that draws by the tokens before waits for the client to tell them, and believes nobody else."""

import pytest
from support.links.data_plane import asynchronous, until
from support.swarms.served_peer import Served, model, served

from molink.peer.models.model import LocalModel
from molink.peer.wire.protocol import molink_pb2 as pb

__all__ = ["model"]

PROMPT = [5, 6, 7, 8, 9]


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
