"""What a hostile or broken neighbour sends ends its own link or session, and names itself as the cause."""

import asyncio
from collections.abc import Callable

import pytest
from support.links.data_plane import DEADLINE_S, End, asynchronous, describe, hop_of, soon, until
from support.swarms.served_peer import HIGH, LOW, Served, failures_told, model, served

from molink.peer.engine.arrivals import MOST_TOKEN_BYTES
from molink.peer.models.model import LocalModel
from molink.peer.wire.link.link import Link
from molink.peer.wire.protocol import molink_pb2 as pb

__all__ = ["model"]


async def formed(peer: Served, neighbour: End, *, head: bool, session: int = 1) -> pb.SessionDescriptor:
    """A ready session in which the peer is the head or the tail, and the neighbour the other."""
    hops = [
        peer.hop(LOW if head else HIGH),
        hop_of(neighbour.identity, HIGH if head else LOW, neighbour.facts),
    ]
    asked = describe(hops if head else hops[::-1], session=session, spec=peer.spec)
    answer = await peer.reserve(asked, 0 if head else 1)
    assert answer.HasField("reserved"), answer
    assert (await peer.ready(asked)).readiness.ready
    await neighbour.linked(peer.identity.peer_id)
    return asked


def link_of(neighbour: End, peer: Served) -> Link:
    link = neighbour.links.find(peer.identity.peer_id)
    assert link is not None
    return link


TOKENS: dict[str, Callable[[pb.Token], None]] = {
    "beyond the vocabulary": lambda token: setattr(token, "token_id", 2**31),
    "far beyond the vocabulary": lambda token: setattr(token, "token_id", 2**32 - 1),
    "of a step that has not begun": lambda token: setattr(token, "step", 7),
    "larger than any": lambda token: setattr(token, "prompt_logprobs", bytes(MOST_TOKEN_BYTES)),
}


@pytest.mark.parametrize("case", TOKENS)
@asynchronous
async def test_a_tail_that_makes_up_tokens_is_named(model: LocalModel, case: str) -> None:
    async with served(model) as peer, End() as tail:
        failures = failures_told(peer)
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
        failures = failures_told(peer)
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


def activations(peer: Served, row: pb.ActivationRow, dtype: str = "float32") -> pb.Activations:
    return pb.Activations(rows=[row], hidden_size=peer.spec.hidden_size, dtype=dtype)


@pytest.mark.parametrize("sent", [4, 6])
@asynchronous
async def test_a_head_whose_payload_is_not_what_it_says_loses_its_link(model: LocalModel, sent: int) -> None:
    async with served(model) as peer, End() as head:
        asked = await formed(peer, head, head=False)
        row = pb.ActivationRow(session=asked.session, epoch=1, step=0, rows=5, sample=True)
        link_of(head, peer).post(activations(peer, row), bytes(sent * peer.spec.hidden_size * 4))
        await soon(head.handler.closed.get())
        await until(lambda: peer.serving.links.find(head.peer_id) is None)


ROWS: dict[str, dict[str, int]] = {
    "more rows than the session has room for": {"rows": 21},
    "more rows than a step may have": {"rows": 4000},
    "no rows": {"rows": 0},
    "a step that is not the next": {"rows": 5, "step": 7},
    "a beginning that is not here": {"rows": 5, "position": 4},
}


@pytest.mark.parametrize("case", ROWS)
@asynchronous
async def test_rows_that_do_not_fit_a_session_end_it_and_not_the_link_that_others_use(
    model: LocalModel, case: str
) -> None:
    async with served(model) as peer, End() as head:
        failures = failures_told(peer)
        asked = await formed(peer, head, head=False)
        link = link_of(head, peer)
        row = pb.ActivationRow(session=asked.session, epoch=1, sample=True, **ROWS[case])
        for _ in range(3):
            assert link.post(activations(peer, row), bytes(row.rows * peer.spec.hidden_size * 4))
        failed = await soon(failures.get())
        assert (failed.peer_id, failed.code) == (head.peer_id, "protocol")
        await link.request(pb.Request(get_manifest=pb.GetManifest(model_hash="")), DEADLINE_S)
        assert failures.empty()
        assert link.closed_because is None


@asynchronous
async def test_times_of_more_hops_than_came_before_end_their_session_alone(model: LocalModel) -> None:
    """Each hop adds its own, and what is no longer a message keeps everybody's tokens from being sent."""
    async with served(model) as peer, End() as head:
        failures = failures_told(peer)
        asked = await formed(peer, head, head=False)
        other = await formed(peer, head, head=False, session=2)
        for session, hops in ((asked, 400_000), (other, 1)):
            row = pb.ActivationRow(session=session.session, epoch=1, step=0, rows=5, sample=True)
            row.timings.extend([pb.HopTiming()] * hops)
            assert link_of(head, peer).post(activations(peer, row), bytes(5 * peer.spec.hidden_size * 4))
        failed = await soon(failures.get())
        assert (failed.session, failed.peer_id, failed.code) == (asked.session, head.peer_id, "protocol")
        token = (await soon(head.handler.frames.get()))[1].header.tokens[0]
        assert token.session == other.session
        assert failures.empty()


@pytest.mark.parametrize("encoding", ["", "float8"])
@asynchronous
async def test_rows_of_no_known_encoding_end_their_link_for_a_reason(
    model: LocalModel, encoding: str
) -> None:
    async with served(model) as peer, End() as head:
        asked = await formed(peer, head, head=False)
        row = pb.ActivationRow(session=asked.session, epoch=1, step=0, rows=5, sample=True)
        link_of(head, peer).post(activations(peer, row, encoding), bytes(5 * peer.spec.hidden_size * 4))
        reason = await soon(head.handler.closed.get())
        assert "encoding" in str(reason) or "dtype" in str(reason)


POSITIONS: dict[str, tuple[int, int]] = {
    "ahead of what the cache holds": (2, 7),
    "further back than the step before": (2, 4),
    "back at the beginning": (2, 0),
    "beyond the numbers of a position": (2, 2**32 - 1),
}


@pytest.mark.parametrize("case", POSITIONS)
@asynchronous
async def test_a_position_that_is_not_allowed_ends_its_session_and_no_other(
    model: LocalModel, case: str
) -> None:
    async with served(model) as peer, End() as head:
        failures = failures_told(peer)
        asked = await formed(peer, head, head=False)
        other = await formed(peer, head, head=False, session=2)
        step, position = POSITIONS[case]
        for session in (asked, other):
            for one, at, rows in ((0, 0, 5), (1, 5, 1)):
                row = pb.ActivationRow(
                    session=session.session, epoch=1, step=one, rows=rows, position=at, prefill=True
                )
                link_of(head, peer).post(activations(peer, row), bytes(rows * peer.spec.hidden_size * 4))
        repeat = pb.ActivationRow(session=asked.session, epoch=1, step=1, rows=1, position=position)
        link_of(head, peer).post(activations(peer, repeat), bytes(peer.spec.hidden_size * 4))
        row = pb.ActivationRow(session=asked.session, epoch=1, step=step, rows=1, position=position)
        link_of(head, peer).post(activations(peer, row), bytes(peer.spec.hidden_size * 4))
        failed = await soon(failures.get())
        assert (failed.session, failed.peer_id, failed.code) == (asked.session, head.peer_id, "protocol")
        row = pb.ActivationRow(
            session=other.session, epoch=1, step=2, rows=1, position=6, sample=True, prefill=True
        )
        link_of(head, peer).post(activations(peer, row), bytes(peer.spec.hidden_size * 4))
        token = (await soon(head.handler.frames.get()))[1].header.tokens[0]
        assert (token.session, token.position) == (other.session, 7)
        assert failures.empty()


@asynchronous
async def test_rows_in_another_encoding_than_was_agreed_on_end_their_session_alone(model: LocalModel) -> None:
    async with served(model) as peer, End() as head:
        failures = failures_told(peer)
        asked = await formed(peer, head, head=False)
        row = pb.ActivationRow(session=asked.session, epoch=1, rows=5, sample=True)
        payload = bytes(5 * peer.spec.hidden_size * 2)
        assert link_of(head, peer).post(activations(peer, row, "bfloat16"), payload)
        failed = await soon(failures.get())
        assert (failed.peer_id, failed.code) == (head.peer_id, "protocol")
        assert link_of(head, peer).closed_because is None


@asynchronous
async def test_a_stranger_that_knows_a_session_cannot_send_rows_or_tokens_of_it(model: LocalModel) -> None:
    async with served(model) as peer, End() as tail, End() as stranger:
        failures = failures_told(peer)
        asked = await formed(peer, tail, head=True)
        assert peer.link.post(pb.Start(session=asked.session, epoch=1, token_ids=[5, 6, 7, 8, 9]))
        await soon(tail.handler.frames.get())
        link = await stranger.links.to(peer.facts)
        token = pb.Token(session=asked.session, epoch=1, step=0, position=5, token_id=2**31)
        row = pb.ActivationRow(session=asked.session, epoch=1, step=1, rows=1)
        assert link.post(pb.Tokens(tokens=[token]))
        assert link.post(activations(peer, row), bytes(peer.spec.hidden_size * 4))
        await link.request(pb.Request(get_manifest=pb.GetManifest(model_hash="")), DEADLINE_S)
        assert failures.empty()
        token.token_id = 3
        assert link_of(tail, peer).post(pb.Tokens(tokens=[token]))
        _, frame = await soon(tail.handler.frames.get())
        assert [row.step for row in frame.header.rows] == [1]
