"""What a hostile neighbour makes of guesses ends its session alone, and names it; guesses that are late cost speed."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from support.circuits.guesses import GuessingHead, Oracle
from support.links.data_plane import End, asynchronous, describe, hop_of, soon
from support.swarms.served_peer import HIGH, LOW, Served, failures_told, model, served

from molink.dht.records.records import PeerFacts
from molink.peer.hop.speculation import MOST_GUESSES
from molink.peer.models.model import LocalModel
from molink.peer.wire.link.link import Link
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.shards.spec import GUESSES, PENALTIES

__all__ = ["model"]

PROMPT = [5, 6, 7, 8, 9]


async def formed(peer: Served, neighbour: End, *, head: bool, session: int = 1) -> pb.SessionDescriptor:
    """A ready session in which the peer is the head or the tail, and the neighbour the other; its head may guess."""
    hops = [
        peer.hop(LOW if head else HIGH),
        hop_of(neighbour.identity, HIGH if head else LOW, able(neighbour)),
    ]
    asked = describe(hops if head else hops[::-1], session=session, spec=peer.spec)
    asked.speculates = True
    asked.sampling.ClearField("stop_token_ids")
    answer = await peer.reserve(asked, 0 if head else 1)
    assert answer.HasField("reserved"), answer
    assert (await peer.ready(asked)).readiness.ready
    await neighbour.linked(peer.identity.peer_id)
    return asked


def able(neighbour: End) -> PeerFacts:
    """It announces that it takes guesses."""
    return replace(neighbour.facts, sampling_abilities=(PENALTIES, GUESSES))


def link_of(neighbour: End, peer: Served) -> Link:
    link = neighbour.links.find(peer.identity.peer_id)
    assert link is not None
    return link


class FalseHead:
    """A neighbour that is the head of a peer's sessions."""

    def __init__(self, peer: Served, end: End) -> None:
        self.peer = peer
        self.end = end
        self.link = link_of(end, peer)

    def rows(
        self, session: pb.SessionDescriptor, step: int, rows: int, position: int, **more: object
    ) -> None:
        row = pb.ActivationRow(
            session=session.session,
            epoch=1,
            step=step,
            rows=rows,
            position=position,
            sample=True,
            **more,  # type: ignore[arg-type]
        )
        size = self.peer.spec.hidden_size
        header = pb.Activations(rows=[row], hidden_size=size, dtype="float32")
        assert self.link.post(header, bytes(rows * size * 4))

    def guesses(self, session: pb.SessionDescriptor, step: int, *ids: int) -> None:
        guess = pb.Guess(session=session.session, epoch=1, step=step, token_ids=ids)
        assert self.link.post(pb.Guesses(guesses=[guess]))

    async def drawn(self) -> list[pb.Token]:
        """The tokens of the next frame."""
        _, frame = await soon(self.end.handler.frames.get())
        return list(frame.header.tokens)

    async def begin(self, session: pb.SessionDescriptor) -> None:
        self.rows(session, 0, 5, 0, prefill=True)
        (token,) = await self.drawn()
        assert token.position == 5


HEADS: dict[str, Callable[[FalseHead, pb.SessionDescriptor], None]] = {
    "guesses beyond the vocabulary": lambda head, asked: head.guesses(asked, 1, 3, 2**31),
    "more guesses than a step may have": lambda head, asked: head.guesses(
        asked, 1, *[3] * (MOST_GUESSES + 1)
    ),
    "no guesses": lambda head, asked: head.guesses(asked, 1),
    "guesses of a step far ahead": lambda head, asked: head.guesses(asked, 7, 3),
    "rows of more guesses than a step may have": lambda head, asked: head.rows(
        asked, 1, MOST_GUESSES + 2, 5, guesses=MOST_GUESSES + 1
    ),
    "rows that are all guesses": lambda head, asked: head.rows(asked, 1, 3, 5, guesses=3),
    "more guesses than numbers go": lambda head, asked: head.rows(asked, 1, 3, 5, guesses=2**32 - 1),
    "guesses in a prompt": lambda head, asked: head.rows(asked, 1, 3, 5, guesses=2, prefill=True),
    "more rows than a decode step has": lambda head, asked: head.rows(asked, 1, MOST_GUESSES + 2, 5),
    "guesses beyond the capacity": lambda head, asked: head.rows(asked, 1, 16, 5, guesses=15),
}


@pytest.mark.parametrize("case", HEADS)
@asynchronous
async def test_a_head_that_guesses_what_nobody_may_ends_that_session_alone(
    model: LocalModel, case: str
) -> None:
    async with served(model) as peer, End() as end:
        failures = failures_told(peer)
        asked = await formed(peer, end, head=False)
        other = await formed(peer, end, head=False, session=2)
        head = FalseHead(peer, end)
        await head.begin(asked)
        await head.begin(other)
        HEADS[case](head, asked)
        failed = await soon(failures.get())
        assert (failed.session, failed.peer_id, failed.code) == (asked.session, end.peer_id, "protocol")
        head.guesses(other, 1, 3, 4)
        head.rows(other, 1, 3, 5, guesses=2)
        first, *_ = await head.drawn()
        assert (first.session, first.position, first.guessed) == (other.session, 6, 2)
        assert failures.empty()
        assert head.link.closed_because is None


@asynchronous
async def test_guesses_that_are_late_or_never_come_are_not_accepted(model: LocalModel) -> None:
    async with served(model) as peer, End() as end:
        asked = await formed(peer, end, head=False)
        head = FalseHead(peer, end)
        await head.begin(asked)
        head.rows(asked, 1, 3, 5, guesses=2)
        (first,) = await head.drawn()
        head.rows(asked, 2, 3, 6, guesses=2)
        (second,) = await head.drawn()
        assert (first.position, second.position, second.guessed) == (6, 7, 2)
        head.guesses(asked, 2, first.token_id, second.token_id)
        head.guesses(asked, 1, first.token_id, second.token_id)
        head.rows(asked, 3, 3, 7, guesses=2)
        (third,) = await head.drawn()
        assert third.position == 8
        # rows of zeros draw the same again, so that a guess can be known to be right
        head.guesses(asked, 4, third.token_id, (third.token_id + 1) % 60)
        head.rows(asked, 4, 3, 8, guesses=2)
        trip = await head.drawn()
        assert [token.position for token in trip][:1] == [9]
        assert len(trip) == (2 if trip[0].token_id == third.token_id else 1)


@asynchronous
async def test_a_stranger_that_knows_a_session_cannot_guess_for_it(model: LocalModel) -> None:
    async with served(model) as peer, End() as end, End() as stranger:
        failures = failures_told(peer)
        asked = await formed(peer, end, head=False)
        head = FalseHead(peer, end)
        await head.begin(asked)
        link = await stranger.links.to(peer.facts)
        guess = pb.Guess(session=asked.session, epoch=1, step=1, token_ids=[2**31])
        assert link.post(pb.Guesses(guesses=[guess]))
        await link.request(pb.Request(get_manifest=pb.GetManifest(model_hash="")), 5.0)
        assert failures.empty()
        head.rows(asked, 1, 1, 5)
        assert len(await head.drawn()) == 1


GUESSED = [21, 22, 23, 24]
TAILS: dict[str, list[tuple[int, int]]] = {
    "behind one that was not guessed": [(6, 30), (7, 31)],
    "behind one that was guessed for another place": [(6, 22), (7, 23)],
    "more than there were guesses": [(6, 21), (7, 22), (8, 23), (9, 24), (10, 25), (11, 26)],
    "ahead of all that was asked": [(12, 21)],
    "behind a gap": [(8, 23)],
    "from one on that it has sent": [(5, 20), (6, 21)],
    "beyond the vocabulary": [(6, 21), (7, 2**31)],
    "and expects more than may be guessed": [(6, 30)],
}
"""Position and token of each."""
EXPECTED = {"and expects more than may be guessed": [7] * 16}


@pytest.mark.parametrize("case", TAILS)
@asynchronous
async def test_a_tail_that_goes_on_where_nobody_asked_it_to_is_named(model: LocalModel, case: str) -> None:
    guesses = GuessingHead(Oracle, [[*PROMPT, 20, *GUESSED, 25, 26]])
    async with served(model, guesses=guesses) as peer, End() as tail:
        failures = failures_told(peer)
        asked = await formed(peer, tail, head=True)
        assert peer.link.post(pb.Start(session=asked.session, epoch=1, token_ids=PROMPT))
        await soon(tail.handler.frames.get())
        first = pb.Token(session=asked.session, epoch=1, step=0, position=5, token_id=20)
        assert link_of(tail, peer).post(pb.Tokens(tokens=[first]))
        _, told = await soon(tail.handler.frames.get())
        assert list(told.header.guesses[0].token_ids) == GUESSED
        _, frame = await soon(tail.handler.frames.get())
        assert [(row.rows, row.guesses, row.position) for row in frame.header.rows] == [(5, 4, 5)]
        tokens = [
            pb.Token(session=asked.session, epoch=1, step=1, position=position, token_id=token_id)
            for position, token_id in TAILS[case]
        ]
        tokens[-1].expected.extend(EXPECTED.get(case, ()))
        assert link_of(tail, peer).post(pb.Tokens(tokens=tokens))
        failed = await soon(failures.get())
        assert (failed.peer_id, failed.code) == (tail.peer_id, "protocol")
        assert link_of(tail, peer).closed_because is None


@asynchronous
async def test_a_step_begins_behind_what_was_accepted_and_nowhere_else(model: LocalModel) -> None:
    guesses = GuessingHead(Oracle, [[*PROMPT, 20, *GUESSED, 25, 26]])
    async with served(model, guesses=guesses) as peer, End() as tail:
        asked = await formed(peer, tail, head=True)
        assert peer.link.post(pb.Start(session=asked.session, epoch=1, token_ids=PROMPT))
        await soon(tail.handler.frames.get())
        key = {"session": asked.session, "epoch": 1}
        link = link_of(tail, peer)
        link.post(pb.Tokens(tokens=[pb.Token(**key, step=0, position=5, token_id=20)]))
        await soon(tail.handler.frames.get())
        await soon(tail.handler.frames.get())
        trip = [
            pb.Token(**key, step=1, position=6, token_id=21),
            pb.Token(**key, step=1, position=7, token_id=9),
        ]
        for _ in range(2):  # a repeat has no effect
            link.post(pb.Tokens(tokens=trip))
        _, frame = await soon(tail.handler.frames.get())
        if isinstance(frame.header, pb.Guesses):
            _, frame = await soon(tail.handler.frames.get())
        (row,) = frame.header.rows
        assert (row.step, row.position) == (2, 7)
        assert guesses.sources[0].records == [(4, 1)]
