"""Trees and steps sent ahead are given their due: they win where they should, and cost what they compute."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from support.swarms.pipelines import stage

from molink.peer.speculation.guess_count import CircuitCosts
from molink.simnet.core.generations import GenerationTape
from molink.simnet.core.guessing import bundled_draft
from molink.simnet.papers.speculation.branches import BRANCHES, Branches
from molink.simnet.papers.speculation.variants import VARIANTS, Session, chain_ms, steps_ahead_ms, tree_ms

FAR = (stage(1.0, 0.01, link_ms=30.0),) * 4


@dataclass
class Repeating:
    """The same tokens again and again."""

    prompt: tuple[int, ...] = tuple(range(20)) * 3

    def tokens(self, first: int, count: int) -> tuple[int, ...]:
        return tuple((first + at) % 20 for at in range(count))


def test_where_all_guesses_are_right_steps_sent_ahead_are_worth_what_a_trip_has_no_room_for() -> None:
    session = Session(Repeating(), FAR, None, None, new_tokens=256)
    trip_ms = CircuitCosts(FAR).trip_ms(1)
    assert chain_ms(session) < trip_ms / 8
    assert steps_ahead_ms(session) < 0.5 * chain_ms(session)
    assert tree_ms(session) < trip_ms / 8


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_no_variant_takes_longer_than_guesses_that_are_all_wrong_nor_less_than_a_step(
    variant: Callable[[Session], float],
) -> None:
    tape = GenerationTape(0, 0.8)
    session = Session(tape, FAR, None, tape.drawing(), new_tokens=64)
    trip_ms = CircuitCosts(FAR).trip_ms(1)
    assert trip_ms / 16 < variant(session) < 1.1 * trip_ms


def test_nodes_of_a_tree_stand_behind_those_that_they_follow_and_share_one_chance() -> None:
    tape = GenerationTape(0)
    branches = Branches(tape.prompt, bundled_draft(), None)
    branches.extend(tape.tokens(0, 40))
    nodes = branches.tree(15)
    paths = [node.path for node in nodes]
    assert 5 < len(set(paths)) == len(paths) <= 15
    assert any(len(path) > 1 for path in paths)
    for at, path in enumerate(paths):
        assert path[:-1] in ((), *paths[:at])
    assert [node.together for node in nodes] == sorted((node.together for node in nodes), reverse=True)
    said = branches.behind(())
    assert 1 < len(said) <= BRANCHES + 2
    assert sum(chance for _, chance in said) <= 1 + 1e-9
    assert sum(node.together for node in nodes if len(node.path) == 1) <= 1 + 1e-9
