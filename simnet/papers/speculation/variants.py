"""Milliseconds per token of one session on an idle circuit, by how its guesses travel: in a chain, as the product has
them, in a tree, or in steps of which several are on their way. Over recorded generations; guessing takes no time.

What is compared with the chain is given what it could have at best. Of a tree all nodes are rows of one step, with no
more to send than a chain of as many (SpecInfer, Miao et al. 2024). Steps on their way that turn out to be behind a
wrong guess cost nothing from then on, and others follow each other as closely as the busiest engine or uplink lets them
(PipeInfer, Butler et al. 2024).
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import Protocol

from molink.peer.speculation.draft_drawing import DraftDrawing
from molink.peer.speculation.draft_model import DraftModel
from molink.peer.speculation.guess_count import CircuitCosts
from molink.peer.speculation.ngram_tables import NgramTable
from molink.peer.speculation.session_guesses import LEAST_CHANCE, MOST_GUESSES, SessionGuesses
from molink.routing.cost.pipeline import PipelineStage
from molink.simnet.papers.speculation.branches import Branch, Branches

MOST_STEPS = 6
"""On their way at once."""


class Tape(Protocol):
    """A prompt, and what is generated behind it, as `GenerationTape` has it."""

    prompt: tuple[int, ...]

    def tokens(self, first: int, count: int) -> tuple[int, ...]:
        """So many generated tokens from that one on."""


@dataclass(frozen=True, slots=True)
class Session:
    """What is generated, and where."""

    tape: Tape
    stages: tuple[PipelineStage, ...]
    draft: DraftModel | None
    drawing: DraftDrawing | None
    new_tokens: int

    def branches(self) -> Branches:
        return Branches(self.tape.prompt, self.draft, self.drawing)


def chain_ms(session: Session) -> float:
    """Of a token with a chain, of as many guesses as pay: the product's."""
    costs = CircuitCosts(session.stages)
    guesses = SessionGuesses(
        NgramTable(), stages=session.stages, draft=session.draft, drawing=session.drawing
    )
    guesses.extend(session.tape.prompt)
    now_ms, generated = 0.0, 0
    while generated < session.new_tokens:
        travelling = guesses.propose(MOST_GUESSES)
        coming = session.tape.tokens(generated, len(travelling) + 1)
        right = _common(travelling, coming)
        now_ms += costs.trip_ms(1 + len(travelling))
        guesses.extend(coming[: right + 1])
        generated += right + 1
    return now_ms / generated


def tree_ms(session: Session) -> float:
    """Of a token with a tree, of as many guesses as pay."""
    costs, branches = CircuitCosts(session.stages), session.branches()
    now_ms, generated = 0.0, 0
    while generated < session.new_tokens:
        nodes = branches.tree(MOST_GUESSES)
        nodes = nodes[: _best_count([one.together for one in nodes], costs)]
        coming = session.tape.tokens(generated, len(nodes) + 1)
        right = _deepest(nodes, coming)
        now_ms += costs.trip_ms(1 + len(nodes))
        branches.extend(coming[: right + 1])
        generated += right + 1
    return now_ms / generated


def steps_ahead_ms(session: Session) -> float:
    """Of a token with chains, of which the next goes on its way while those before are not back."""
    costs, branches = CircuitCosts(session.stages), session.branches()
    now_ms, free_ms, generated = 0.0, 0.0, 0
    chain: list[int] = []
    """Guesses behind what is certain, all of them on their way."""
    chances: list[float] = []
    """That all up to there are right."""
    on_way: deque[tuple[float, int]] = deque()
    """When each step is back, and how much of the chain is known to be right or wrong with it."""

    def extended(most: int) -> int:
        """How many guesses the chain has more."""
        before = len(chain)
        while len(chain) - before < most:
            behind = branches.behind(tuple(chain))
            together = (chances[-1] if chances else 1.0) * (behind[0][1] if behind else 0.0)
            if together < LEAST_CHANCE:
                break
            chain.append(behind[0][0])
            chances.append(together)
        return len(chain) - before

    while generated < session.new_tokens:
        if now_ms >= free_ms and len(on_way) < MOST_STEPS:
            if not on_way:
                before = len(chain)
                extended(MOST_GUESSES)
                count = _best_count(chances[before:], costs)
                del chain[before + count :], chances[before + count :]
                rows = 1 + count
            else:
                rows = extended(MOST_GUESSES)
            if rows:
                free_ms = now_ms + costs.pace_ms(rows)
                on_way.append((now_ms + costs.of_rows(rows).way_ms, len(chain)))
                continue
        back_ms, known = on_way[0]
        if now_ms < free_ms < back_ms and len(on_way) < MOST_STEPS and extended(1):
            del chain[-1], chances[-1]
            now_ms = free_ms
            continue
        now_ms = back_ms
        on_way.popleft()
        coming = session.tape.tokens(generated, known + 1)
        right = _common(chain[:known], coming)
        certain = coming[: right + 1]
        goes_on = right == known < len(chain) and chain[known] == coming[known]
        generated += len(certain)
        branches.extend(certain)
        if goes_on:
            del chain[: known + 1], chances[: known + 1]
            on_way = deque((at_ms, of - known - 1) for at_ms, of in on_way)
        else:
            chain, chances = [], []
            on_way.clear()
            free_ms = now_ms
    return now_ms / generated


VARIANTS: Mapping[str, Callable[[Session], float]] = MappingProxyType(
    {"chain": chain_ms, "tree": tree_ms, "steps ahead": steps_ahead_ms}
)
"""The first is the product's."""


def _common(guessed: Sequence[int], coming: Sequence[int]) -> int:
    """How many of the first guesses are right."""
    return next((at for at, one in enumerate(guessed) if one != coming[at]), len(guessed))


def _deepest(nodes: Sequence[Branch], coming: Sequence[int]) -> int:
    """How many guesses the longest path has of which all are right."""
    right = (len(one.path) for one in nodes if one.path == tuple(coming[: len(one.path)]))
    return max(right, default=0)


def _best_count(together: Sequence[float], costs: CircuitCosts) -> int:
    """How many of the guesses, with the chance of each that it becomes a token, bring the most tokens in a time."""
    rates = [
        tokens / costs.trip_ms(1 + count) for count, tokens in enumerate(accumulate(together, initial=1.0))
    ]
    return max(range(len(rates)), key=rates.__getitem__)
