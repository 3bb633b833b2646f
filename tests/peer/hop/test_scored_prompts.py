"""A prompt whose tokens are scored, at the tail: each of its steps waits for the tokens behind its rows."""

from typing import Any

from support.swarms.hop_ring import core_of, session_of

from molink.peer.hop import events
from molink.shards.spec import Span

CIRCUIT = (("head", Span(0, 2)), ("tail", Span(2, 6)))
PROMPT = ((0, 0, 5, 0), (1, 5, 5, 0), (2, 10, 3, 1))
"""Step, position, tokens, and after how many of them a token is drawn."""


class Tail:
    """A tail's core with one session whose prompt is scored."""

    def __init__(self) -> None:
        self.core = core_of("tail")
        self.session = session_of(0, CIRCUIT, 1)
        self.session.progress.scores = True
        self.tell(events.SessionOpened(self.session))
        self.know(0)

    def tell(self, event: Any) -> list[int]:  # noqa: ANN401 - events of any session and payload
        """The steps that are to be computed now."""
        effects = self.core.handle(event, 0.0)
        batches = [one.steps for one in effects if isinstance(one, events.ComputeBatch)]
        return [one.step for steps in batches for one in steps]

    def know(self, tokens: int) -> list[int]:
        """So many tokens of the sequence are known."""
        return self.tell(events.DrawsAllowed(self.session, tokens))

    def arrive(self, step: int, position: int, tokens: int, draws: int) -> list[int]:
        row = (self.session, step, tokens, draws, True, position, None)
        return self.tell(events.RowsArrived("head", [row]))

    def computed(self) -> list[int]:
        return self.tell(events.BatchComputed([]))


def test_steps_wait_for_the_tokens_behind_them_and_are_computed_in_order() -> None:
    tail = Tail()
    assert [tail.arrive(*row) for row in PROMPT] == [[], [], []]
    assert tail.know(5) == []  # what comes behind the fifth is not known
    assert tail.know(6) == [0]
    assert tail.know(13) == []
    assert [tail.computed(), tail.computed()] == [[1], [2]]


def test_steps_that_wait_are_held_once_and_let_go_with_their_session() -> None:
    tail = Tail()
    for row in PROMPT[:2] * 3:
        assert tail.arrive(*row) == []
    assert tail.know(100) == [0]
    assert tail.computed() == [1]
    other = Tail()
    other.arrive(*PROMPT[0])
    other.tell(events.SessionEnded(other.session))
    assert other.core.is_empty
    assert other.know(100) == []
