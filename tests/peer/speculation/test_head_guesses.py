"""A head's guesses: of each client's own text and prediction, within bounds, and never from another client's."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import generate_latest
from support.links.data_plane import asynchronous
from support.models.tiny_models import greedy_references
from support.swarms.pipelines import stage
from support.swarms.served_circuit import served_circuit
from support.swarms.served_peer import model

from molink.peer.engine.guessing import (
    MOST_KEPT_TOKENS,
    MOST_PREDICTION_TOKENS,
    HeadGuesses,
    check_hints,
)
from molink.peer.engine.metrics import PeerMetrics
from molink.peer.models.model import LocalModel
from molink.peer.speculation.session_guesses import SessionGuesses
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.protocol.frames import ProtocolError

__all__ = ["model"]

TEXT = [at * at % 101 for at in range(60)]
FAR = (stage(1.0, 0.01, link_ms=30),) * 2


@dataclass(eq=False)
class Session:
    """What guesses need to know of a session."""

    client: str
    capacity_tokens: int = 500
    ended: bool = False
    plan: Any = field(init=False)
    owner: Any = field(init=False)

    def __post_init__(self) -> None:
        params = SimpleNamespace(temperature=0.0, grammar=None)
        self.plan = SimpleNamespace(capacity_tokens=self.capacity_tokens, stages=FAR, params=params, seed=0)
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


def test_so_many_tokens_are_kept_in_all_and_what_ends_makes_room() -> None:
    head = HeadGuesses(tables=False)
    large = pb.Start(prediction=[1] * (MOST_KEPT_TOKENS // 4))
    sessions = [Session("one") for _ in range(4)]
    assert [head(one, large) is not None for one in sessions] == [True, True, True, False]  # type: ignore[arg-type]
    sessions[0].ended = True
    assert head(sessions[3], large) is not None  # type: ignore[arg-type]


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


@asynchronous
async def test_a_prediction_brings_transformers_tokens_in_few_trips(model: LocalModel) -> None:
    prompt, new_tokens = [7 * at % 60 for at in range(9)], 40
    [expected] = greedy_references(model.folder, [prompt], new_tokens)
    head, made = HeadGuesses(tables=True), []

    def guesses(session: Any, start: pb.Start) -> SessionGuesses | None:  # noqa: ANN401 - a served session
        start.prediction.extend(expected)
        made.append(head(session, start))
        return made[-1]

    async with served_circuit(model, (3,), kv_tokens=400, guesses=guesses) as circuit:
        assert await circuit.generate([prompt], new_tokens) == [expected]
    assert sum(made[0].counts.accepted.values()) > new_tokens / 2


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
