"""What a hostile or broken neighbour sends ends its own link or session, and names itself as the cause."""

import asyncio
from collections.abc import Callable

import pytest
from data_plane import End, asynchronous, describe, hop_of, soon, until
from served_peer import HIGH, LOW, Served, model, served

from molink.peer.link.link import Link
from molink.peer.models.model import LocalModel
from molink.peer.protocol import molink_pb2 as pb

__all__ = ["model"]


async def formed(peer: Served, neighbour: End, *, head: bool) -> pb.SessionDescriptor:
    """A ready session in which the peer is the head or the tail, and the neighbour the other."""
    hops = [
        peer.hop(LOW if head else HIGH),
        hop_of(neighbour.identity, HIGH if head else LOW, neighbour.facts),
    ]
    asked = describe(hops if head else hops[::-1], spec=peer.spec)
    answer = await peer.reserve(asked, 0 if head else 1)
    assert answer.HasField("reserved"), answer
    assert (await peer.ready(asked)).readiness.ready
    return asked


def link_of(neighbour: End, peer: Served) -> Link:
    link = neighbour.links.find(peer.identity.peer_id)
    assert link is not None
    return link


def listen(peer: Served) -> asyncio.Queue[pb.Failed]:
    failures: asyncio.Queue[pb.Failed] = asyncio.Queue()

    def on_frame(link: Link, frame: object) -> None:
        header = frame.header  # type: ignore[attr-defined]
        if isinstance(header, pb.Failed):
            failures.put_nowait(header)

    peer.client.handler.on_frame = on_frame  # type: ignore[method-assign,assignment]
    return failures


TOKENS: dict[str, Callable[[pb.Token], None]] = {
    "beyond the vocabulary": lambda token: setattr(token, "token_id", 2**31),
    "far beyond the vocabulary": lambda token: setattr(token, "token_id", 2**32 - 1),
    "of a step that has not begun": lambda token: setattr(token, "step", 7),
}


@pytest.mark.parametrize("case", TOKENS)
@asynchronous
async def test_a_tail_that_makes_up_tokens_is_named(model: LocalModel, case: str) -> None:
    async with served(model) as peer, End() as tail:
        failures = listen(peer)
        asked = await formed(peer, tail, head=True)
        start = pb.Start(session=asked.session, epoch=1, token_ids=[5, 6, 7, 8, 9])
        assert peer.link.post(start)
        await soon(tail.handler.frames.get())
        token = pb.Token(session=asked.session, epoch=1, step=0, position=5, token_id=3)
        TOKENS[case](token)
        assert link_of(tail, peer).post(pb.Tokens(tokens=[token]))
        failed = await soon(failures.get())
        assert failed.peer_id == tail.peer_id


@asynchronous
async def test_a_tail_that_never_ends_is_stopped_at_the_capacity(model: LocalModel) -> None:
    async with served(model) as peer, End() as tail:
        failures = listen(peer)
        asked = await formed(peer, tail, head=True)
        peer.link.post(pb.Start(session=asked.session, epoch=1, token_ids=[5, 6, 7, 8, 9]))
        failure = asyncio.create_task(failures.get())
        for step, position in enumerate(range(5, 40)):
            frame = asyncio.create_task(tail.handler.frames.get())
            await soon(asyncio.wait({frame, failure}, return_when=asyncio.FIRST_COMPLETED))
            if not frame.done():
                frame.cancel()
                break
            token = pb.Token(session=asked.session, epoch=1, step=step, position=position, token_id=3)
            link_of(tail, peer).post(pb.Tokens(tokens=[token]))
        failed = await soon(failure)
        assert (failed.peer_id, failed.code) != (peer.identity.peer_id, "engine")


ACTIVATIONS: dict[str, tuple[int, int, int]] = {  # rows said, bytes' rows, times
    "too few bytes": (5, 4, 1),
    "too many bytes": (5, 6, 1),
    "more rows than the session has room for": (21, 21, 1),
    "more rows than a step may have": (4000, 4000, 1),
}


@pytest.mark.parametrize("case", ACTIVATIONS)
@asynchronous
async def test_a_head_that_sends_what_does_not_fit_loses_its_link(model: LocalModel, case: str) -> None:
    rows, sent, _ = ACTIVATIONS[case]
    async with served(model) as peer, End() as head:
        asked = await formed(peer, head, head=False)
        header = pb.Activations(
            rows=[pb.ActivationRow(session=asked.session, epoch=1, step=0, rows=rows, sample=True)],
            hidden_size=peer.spec.hidden_size,
            dtype="float32",
        )
        link_of(head, peer).post(header, bytes(sent * peer.spec.hidden_size * 4))
        await soon(head.handler.closed.get())
        await until(lambda: peer.serving.links.find(head.peer_id) is None)
