"""A head's guesses: of each client's own text and prediction, within bounds, and never from another client's."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import generate_latest
from support.links.data_plane import asynchronous
from support.swarms.pipelines import stage
from support.swarms.served_peer import model

from molink.peer.daemon.draft import open_draft
from molink.peer.engine.guessing import (
    DRAFTED_SESSIONS,
    MOST_KEPT_TOKENS,
    MOST_PREDICTION_TOKENS,
    HeadGuesses,
    SessionGuessing,
    check_hints,
)
from molink.peer.engine.metrics import PeerMetrics
from molink.peer.hop.session import HopProgress
from molink.peer.models.model import LocalModel
from molink.peer.speculation.draft_model import DraftModel
from molink.peer.speculation.lookup import MOST_TEXT_TOKENS
from molink.peer.speculation.session_guesses import SessionGuesses
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.protocol.frames import ProtocolError
from molink.shards.checkpoint.catalog import resolve
from molink.shards.checkpoint.store import read_manifest

__all__ = ["model"]

TEXT = [at * at % 101 for at in range(60)]
FAR = (stage(1.0, 0.01, link_ms=30),) * 2


@dataclass(eq=False)
class Session:
    """What guesses need to know of a session."""

    client: str
    capacity_tokens: int = 500
    ended: bool = False
    is_head: bool = True
    drawing: object = None
    progress: HopProgress = field(default_factory=HopProgress)
    plan: Any = field(init=False)
    owner: Any = field(init=False)

    def __post_init__(self) -> None:
        params = SimpleNamespace(temperature=0.0, grammar=None)
        self.plan = SimpleNamespace(
            capacity_tokens=self.capacity_tokens, stages=FAR, params=params, seed=0, speculates=True, hops=(),
            vocabulary=1024,
        )  # fmt: skip
        self.owner = SimpleNamespace(peer_id=self.client)


def begun(head: HeadGuesses, client: str, **start: Any) -> SessionGuesses:  # noqa: ANN401 - fields of a start
    guesses = head(Session(client), pb.Start(**start))  # type: ignore[arg-type]
    assert guesses is not None
    guesses.extend([200])
    return guesses


@pytest.mark.parametrize("other", [{"client": "other"}, {"client": "one", "guess_scope": b"another user"}])
def test_what_a_client_generated_is_guessed_for_him_and_for_no_other(other: dict[str, Any]) -> None:
    head = HeadGuesses(tables=True)
    first = begun(head, "one")
    for token in TEXT:
        first.extend([token])

    again, elsewhere = begun(head, "one"), begun(head, **other)
    for one in (again, elsewhere):
        one.extend(TEXT[:5])
    assert again.propose(4) == tuple(TEXT[5:9])
    assert elsewhere.propose(4) == ()


def test_with_lookup_alone_nothing_is_kept_of_earlier_generations() -> None:
    head = HeadGuesses(tables=False)
    begun(head, "one").extend(TEXT)
    again = begun(head, "one")
    again.extend(TEXT[:5])
    assert again.propose(4) == ()


def test_a_prediction_is_guessed_from_its_beginning() -> None:
    assert begun(HeadGuesses(tables=False), "one", prediction=TEXT).propose(4) == tuple(TEXT[:4])


@pytest.mark.parametrize("kind", ["predictions", "texts"])
def test_one_client_leaves_others_what_their_tokens_are_guessed_from(kind: str) -> None:
    head, session = HeadGuesses(tables=False), Session("stranger")
    start, count = pb.Start(prediction=[1] * (MOST_KEPT_TOKENS // 8 - session.capacity_tokens)), 8
    if kind == "texts":
        session = Session("stranger", capacity_tokens=MOST_TEXT_TOKENS)
        start, count = pb.Start(), MOST_KEPT_TOKENS // MOST_TEXT_TOKENS
    theirs = [head(session, start) for _ in range(count)]  # type: ignore[arg-type]
    assert None not in theirs
    own = begun(head, "honest", prediction=[201, *TEXT])
    assert own.propose(2) == (201, TEXT[0])
    own.extend([*TEXT, *TEXT[:4]])
    assert own.propose(2) == tuple(TEXT[4:6])
    if kind == "texts":
        assert head(session, start) is None  # type: ignore[arg-type]


LARGE = pb.Start(token_ids=[200], prediction=[1] * (MOST_KEPT_TOKENS // 4))


@dataclass(eq=False)
class Begun:
    """A session at its head, from epoch to epoch."""

    guessing: SessionGuessing
    start: pb.Start
    session: Any = field(default_factory=lambda: Session("one"))

    def __post_init__(self) -> None:
        self.guessing.begin(self.session, self.start)

    @property
    def is_guessed(self) -> bool:
        guesser = self.session.progress.guesser
        return guesser is not None and bool(guesser.source.candidates(1))

    def go_on(self) -> None:
        """In another epoch of the same head."""
        older, self.session = self.session, Session("one")
        older.ended = True
        self.guessing.end(older)
        self.guessing.keep(older, self.session)

    def begin_again(self) -> None:
        """In another epoch, which is started on the sequence."""
        self.go_on()
        self.guessing.begin(self.session, self.start)

    async def end(self) -> None:
        self.session.ended = True
        self.guessing.end(self.session)
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    "later", [None, Begun.go_on, Begun.begin_again], ids=["first", "moved", "begun again"]
)
@pytest.mark.parametrize("drafts", [False, True], ids=["tokens", "draft"])
@asynchronous
async def test_so_much_is_kept_in_all_and_what_ends_makes_room(
    later: Callable[[Begun], None] | None, drafts: bool, model: LocalModel
) -> None:
    """Tokens to look things up in, and sequences of a draft model: of sessions in later epochs too."""
    start, most = (pb.Start(token_ids=[200]), DRAFTED_SESSIONS) if drafts else (LARGE, 3)
    guessing = SessionGuessing(model.spec, lambda _: None)
    guessing.source_of = HeadGuesses(tables=False, draft=small_draft() if drafts else None)
    begun = [Begun(guessing, start) for _ in range(most)]
    if later is not None:
        for one in begun:
            later(one)
        await asyncio.sleep(0)
    assert all(one.is_guessed for one in begun)
    assert not Begun(guessing, start).is_guessed
    await begun.pop().end()
    last = Begun(guessing, start)
    assert last.is_guessed


def test_who_is_head_and_tail_guesses_from_what_it_is_told_as_the_head(model: LocalModel) -> None:
    """A session has moved to a peer that has all layers, and draws as its penalties say: it hears the sequence as the
    tail, late, and once more as the head, with what else to guess from."""
    guessing, session = SessionGuessing(model.spec, lambda _: None), Session("one", drawing=object())
    starts: list[pb.Start] = []

    def source_of(session: Any, start: pb.Start) -> SessionGuesses | None:  # noqa: ANN401 - a served session
        starts.append(start)
        return HeadGuesses(tables=False)(session, start)

    guessing.source_of = source_of
    guessing.await_sequence(session, 5, 9)  # type: ignore[arg-type] # as all below
    told = [
        pb.History(token_ids=TEXT[:5]),
        pb.History(position=5, token_ids=[9]),
        pb.History(token_ids=[*TEXT[:5], 9, 8], guess_scope=b"ada", prediction=[7]),
    ]
    for history in (*told, *told):
        guessing.on_history(session, session.owner, history)  # type: ignore[arg-type]
    assert [(bytes(start.guess_scope), list(start.prediction)) for start in starts] == [(b"ada", [7])]


def small_draft() -> DraftModel:
    served, draft = "molink/tiny-shakespeare", "molink/tiny-shakespeare-draft"
    return open_draft(draft, served, dict(read_manifest(resolve(served)).files), None)


@pytest.mark.parametrize(
    "start",
    [
        pb.Start(prediction=[10**6]),
        pb.Start(prediction=[1] * (MOST_PREDICTION_TOKENS + 1)),
        pb.Start(guess_scope=bytes(17)),
    ],
    ids=["beyond the vocabulary", "too long", "scope"],
)
def test_hints_that_cannot_be_are_refused(start: pb.Start, model: LocalModel) -> None:
    with pytest.raises(ProtocolError):
        check_hints(start, model.spec)
    check_hints(pb.Start(prediction=[1, 2], guess_scope=bytes(16)), model.spec)


def test_what_was_guessed_is_counted_by_source_over_all_sessions() -> None:
    head, metrics = HeadGuesses(tables=False), PeerMetrics()
    metrics.watch_guesses(head.counts)
    for _ in range(2):
        guesses = begun(head, "one", prediction=TEXT)
        assert len(guesses.propose(4)) == 4
        guesses.record(4, 3)
        guesses.extend([*TEXT[:3], 150])
    shown = generate_latest(metrics.registry).decode()
    assert 'molink_guesses_total{source="prediction"} 8.0' in shown
    assert 'molink_accepted_guesses_total{source="prediction"} 6.0' in shown
    assert "molink_guessing_trips_total 2.0" in shown
