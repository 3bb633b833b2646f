"""In a large swarm circuits and placements are looked for among few peers, and are as good as among all."""

from collections.abc import Collection
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from support.circuits.circuit_cases import MODEL, peer, snapshot_of

from molink.dht.records.records import AnnouncedDraft, Coordinate, LayerLatency, PeerView
from molink.routing import Criteria, NoCircuit, Snapshot, replan_incumbent
from molink.routing.cost.terms import Demand
from molink.routing.latency.coordinates import COORDINATE_DIMENSIONS
from molink.routing.placement.neighbourhood import neighbours
from molink.routing.routes.shortlist import (
    MOST_POSED,
    REDRAW_S,
    Shortlist,
    SnapshotPeers,
    candidates,
    narrowed,
    replan_incumbent_among,
)
from molink.shards.spec import GUESSES

MANY = 3 * MOST_POSED
TOKENS, PROMPT = 100, 50


def coordinate(x_ms: float) -> Coordinate:
    return Coordinate((x_ms,) + (0.0,) * (COORDINATE_DIMENSIONS - 1), 1.0, 0.1)


def somebody(number: int, *, layer_ms: float, x_ms: float | None) -> PeerView:
    start = 2 * (number % 4)
    return peer(
        f"p{number:04}", (start, start + 2), layer_latencies=(LayerLatency(1, layer_ms),),
        coordinate=None if x_ms is None else coordinate(x_ms),
    )  # fmt: skip


def crowd(count: int = MANY, seed: int = 0) -> tuple[PeerView, ...]:
    rng = np.random.default_rng(seed)
    return tuple(
        somebody(at, layer_ms=float(rng.uniform(1.0, 9.0)), x_ms=float(rng.uniform(0.0, 300.0)))
        for at in range(count)
    )


@dataclass
class Asked:
    """Known peers; how many a snapshot was asked for of, each time."""

    views: tuple[PeerView, ...]
    counts: list[int] = field(default_factory=list)

    @property
    def count(self) -> int:
        return len(self.views)

    def snapshot(self, peer_ids: Collection[str] | None = None) -> Snapshot:
        found = SnapshotPeers(Snapshot(self.views, MODEL)).snapshot(peer_ids)
        self.counts.append(len(found.peers))
        return found


def test_in_a_small_swarm_it_is_the_choice_among_all() -> None:
    known = Asked(crowd(MOST_POSED))
    standing, shortlist = replan_incumbent_among(None, None, known, TOKENS, prompt_tokens=PROMPT, now_s=0.0)
    assert shortlist is None
    assert known.counts == [MOST_POSED]
    assert standing.route == replan_incumbent(None, known.snapshot(), TOKENS, prompt_tokens=PROMPT).route


@pytest.mark.parametrize("seed", range(3))
def test_among_the_shortlist_a_circuit_is_as_good_as_among_all(seed: int) -> None:
    views = crowd(seed=seed)
    known = Asked(views)
    standing, shortlist = replan_incumbent_among(None, None, known, TOKENS, prompt_tokens=PROMPT, now_s=0.0)
    best = replan_incumbent(None, snapshot_of(*views), TOKENS, prompt_tokens=PROMPT)
    assert standing.route.objective_ms <= 1.02 * best.route.objective_ms
    assert shortlist is not None
    assert known.counts[-1] == len(shortlist.posed) < 1.2 * MOST_POSED


@pytest.mark.parametrize("seed", range(2))
def test_where_tokens_are_guessed_a_head_that_guesses_well_is_among_the_few_though_it_is_slow(
    seed: int,
) -> None:
    drafts = (AnnouncedDraft("lookup"), AnnouncedDraft("small", bytes(8), 0.1))
    slow = tuple(somebody(4 * at, layer_ms=6.5, x_ms=0.0) for at in range(1000, 1005))
    slow = tuple(
        replace(view, facts=replace(view.facts, coordinate=coordinate(60.0 * at), drafts=drafts))
        for at, view in enumerate(slow)
    )
    views = tuple(
        replace(view, facts=replace(view.facts, sampling_abilities=(GUESSES,)))
        for view in (*crowd(seed=seed), *slow)
    )
    criteria, known = Criteria(guesses=True), Asked(views)
    drafting = {view.peer_id for view in slow}
    demand, snapshot = Demand.of(TOKENS, PROMPT), Snapshot(views, MODEL)
    assert not drafting & {*candidates(snapshot, demand, MOST_POSED)}
    assert drafting & {*candidates(snapshot, demand, MOST_POSED, criteria)}
    standing, shortlist = replan_incumbent_among(
        None, None, known, TOKENS, prompt_tokens=PROMPT, now_s=0.0, criteria=criteria
    )
    without, _ = replan_incumbent_among(None, None, known, TOKENS, prompt_tokens=PROMPT, now_s=0.0)
    assert standing.route.hops[0].peer_id in drafting
    assert standing.route.objective_ms < 0.95 * without.route.objective_ms
    assert shortlist is not None
    later = shortlist.kept_up(known, demand, 2 * REDRAW_S, criteria)
    assert drafting & {*later.posed}


def test_the_circuit_that_stands_is_kept_though_the_pools_are_drawn_again() -> None:
    known = Asked(crowd())
    standing, shortlist = replan_incumbent_among(None, None, known, TOKENS, prompt_tokens=PROMPT, now_s=0.0)
    assert shortlist is not None
    elsewhere = Shortlist(
        tuple(one for one in shortlist.drawn if one not in standing.route.peer_ids),
        tuple(one for one in shortlist.posed if one not in standing.route.peer_ids), 0.0, 0.0,
    )  # fmt: skip
    again, kept = replan_incumbent_among(standing, elsewhere, known, TOKENS, prompt_tokens=PROMPT, now_s=1.0)
    assert again.route.peer_ids == standing.route.peer_ids
    assert kept is elsewhere
    _, drawn = replan_incumbent_among(
        standing, elsewhere, known, TOKENS, prompt_tokens=PROMPT, now_s=REDRAW_S
    )
    assert drawn is not None
    assert set(standing.route.peer_ids) <= set(drawn.posed)


def test_where_the_shortlist_has_no_circuit_another_is_drawn_without_those_to_avoid() -> None:
    known = Asked(crowd())
    _, shortlist = replan_incumbent_among(None, None, known, TOKENS, prompt_tokens=PROMPT, now_s=0.0)
    assert shortlist is not None
    avoid = Criteria(avoid=frozenset(shortlist.posed))
    standing, other = replan_incumbent_among(
        None, shortlist, known, TOKENS, prompt_tokens=PROMPT, now_s=1.0, criteria=avoid
    )
    assert other is not None
    assert not {*standing.route.peer_ids, *other.posed} & avoid.avoid
    with pytest.raises(NoCircuit):
        replan_incumbent_among(
            None, shortlist, known, TOKENS, prompt_tokens=PROMPT, now_s=1.0,
            criteria=Criteria(avoid=frozenset(view.peer_id for view in known.views)),
        )  # fmt: skip


def test_peers_without_a_coordinate_are_looked_at_where_the_others_are_too_few() -> None:
    placed = crowd(100)
    unplaced = tuple(somebody(at, layer_ms=1.0, x_ms=None) for at in range(1000, 1000 + MANY))
    chosen = candidates(Snapshot((*placed, *unplaced), MODEL), Demand.of(TOKENS, PROMPT), MOST_POSED)
    assert len(chosen) == MOST_POSED
    assert {view.peer_id for view in placed} < set(chosen)


def test_who_alone_holds_a_layer_is_looked_at_without_a_coordinate_too() -> None:
    """The first two layers are held by newcomers alone, and nobody has memory for more."""
    placed = tuple(view for view in crowd(4 * MANY // 3) if view.state.spans[0].start > 0)
    newcomers = tuple(somebody(4 * at, layer_ms=9.0, x_ms=None) for at in range(1000, 1003))
    known = Asked((*placed, *newcomers))
    standing, _ = replan_incumbent_among(None, None, known, TOKENS, prompt_tokens=PROMPT, now_s=0.0)
    assert standing.route.hops[0].peer_id in {view.peer_id for view in newcomers}


def test_a_snapshot_is_narrowed_only_where_it_is_large() -> None:
    few = snapshot_of(*crowd(MOST_POSED))
    demand = Demand.of(TOKENS, PROMPT)
    assert narrowed(few, demand) is few
    assert len(narrowed(snapshot_of(*crowd()), demand).peers) < 1.2 * MOST_POSED


def test_a_peer_compares_itself_with_those_nearest_to_it() -> None:
    views = crowd()
    near = neighbours(views, coordinate(100.0), 40)
    farthest_ms = max(
        abs(view.facts.coordinate.position[0] - 100.0) for view in near if view.facts.coordinate
    )
    left = [view for view in views if view not in near]
    assert len(near) == 40
    assert all(
        abs(view.facts.coordinate.position[0] - 100.0) >= farthest_ms
        for view in left
        if view.facts.coordinate
    )
    assert neighbours(views[:40], coordinate(100.0), 40) == views[:40]


def test_a_peer_that_does_not_know_where_it_is_compares_itself_with_peers_from_everywhere() -> None:
    views = crowd()
    chosen = neighbours(views, None, 40)
    assert len(set(chosen)) == 40
    assert chosen[0] is views[0]
    assert chosen[-1] in views[-MANY // 40 :]
