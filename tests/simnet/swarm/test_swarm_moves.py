"""Simulated peers move to other layers as the product's do: when, which, and what never happens."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng
from support.properties import examples

from molink.peer.memory.leases import Granted, LeaseKey
from molink.routing.placement.rebalancing import LOOK_EVERY_S, SETTLE_S, SETTLED
from molink.shards.spec import Span
from molink.simnet.core.timeline import Timeline
from molink.simnet.core.traces import TraceRequest
from molink.simnet.devices.model_shapes import QWEN2_7B
from molink.simnet.swarm.factory import snapshot_setup
from molink.simnet.swarm.members import moving
from molink.simnet.swarm.members.accounts import SessionOutcome
from molink.simnet.swarm.members.announcing import LOSS_BELIEVED_S
from molink.simnet.swarm.members.bulletin import Bulletin, Notice
from molink.simnet.swarm.members.initial_placement import InitialPlacement
from molink.simnet.swarm.members.member import Member, NotConserved
from molink.simnet.swarm.members.moving import MoveSchedule
from molink.simnet.swarm.members.placing import MoveCounts, VirtualPlacementDriver
from molink.simnet.swarm.population.snapshot_file import LiveSwarm, parse_snapshot
from molink.simnet.swarm.report import swarm_row, swarm_series
from molink.simnet.swarm.settings import SwarmSettings
from molink.simnet.swarm.world import SwarmWorld

FIRST, SECOND, WHOLE = Span(0, 4), Span(4, 8), Span(0, 8)
TRACE = tuple(TraceRequest(at * 3.0, 40, 30) for at in range(40))
KEY = LeaseKey(b"x" * 16, 0)
SPEECH_S = 2.0
"""Until what a peer has to say is in the tables, and those of gateways, at most: pace, gap and pull."""


def live(*held: Span) -> LiveSwarm:
    """Peers with room for half of the model, or for what they hold."""
    one = {
        "model": "any", "model_hash": "ab", "device": "cpu", "free_weight_bytes": 10**7, "free_kv_bytes": 10**9,
        "sessions": 0, "queued": 0, "draining": False, "layer_ms": 1.0, "uplink_mbps": None,
    }  # fmt: skip
    peers = [
        {**one, "peer_id": f"peer-{at}", "name": f"p{at}", "spans": [[span.start, span.stop]]}
        for at, span in enumerate(held)
    ]
    document = {"models": [{"model": "any", "model_hash": "ab", "layers": 8}], "peers": peers}
    return parse_snapshot(json.dumps(document), "live.json", QWEN2_7B)


def ran(swarm: LiveSwarm, duration_s: float = 120.0) -> SwarmWorld:
    its = SwarmSettings(len(swarm.volunteers), duration_s, gateways=1, rate_rps=0.3)
    world = SwarmWorld(snapshot_setup(its, swarm, TRACE), its)
    world.run()
    return world


@dataclass
class Alone:
    """Members that hear of one another at once, and nothing but moves."""

    swarm: LiveSwarm
    seed: int = 0
    told: Callable[[Member], None] = lambda _: None
    timeline: Timeline = field(default_factory=Timeline)
    bulletin: Bulletin = field(default_factory=Bulletin)
    moves: MoveCounts = field(default_factory=MoveCounts)
    members: dict[str, Member] = field(default_factory=dict)

    def begin(self) -> None:
        for volunteer in self.swarm.volunteers:
            member = self.members[volunteer.peer_id] = Member(volunteer, self.swarm.model)
            member.hold(volunteer.spans or ())
            self.changed(member)
        model, rng = self.swarm.model, default_rng(self.seed)
        placing = VirtualPlacementDriver(
            self.timeline, model, self.bulletin, self.moves, InitialPlacement(model), self.changed
        )
        MoveSchedule(self.timeline, self.members, self.bulletin, placing, rng).begin()

    def changed(self, member: Member) -> None:
        state = replace(member.state(), ttl_s=100_000 if member.alive else 0)
        self.bulletin.put(Notice(member.volunteer.facts, state, self.timeline.now_s))
        if member.claim.load:
            self.told(member)

    @property
    def held(self) -> list[tuple[Span, ...]]:
        return [member.book.held for member in self.members.values() if member.alive]

    @property
    def mover(self) -> Member:
        """The one of greatest id: the others' copies are there for it to drop its own."""
        return self.members[max(self.members)]


def test_a_layer_without_a_holder_is_served_again_after_a_look_the_word_and_the_load() -> None:
    world = ran(live(FIRST, FIRST, SECOND).without("p2"))
    (mover,) = [one for one in world.members.values() if one.book.held == (SECOND,)]
    least_s = SETTLE_S + mover.load_s((SECOND,))
    assert least_s < mover.placement.held_since_s <= least_s + LOOK_EVERY_S[1] + 1e-9
    row = swarm_row(world, "after")
    assert (row.moves, row.success_rate) == (1, 1.0)
    assert sum(int(line["moves"] or 0) for line in swarm_series(world)) == 1
    first_token_s = min(one.arrival_s + (one.ttft_ms or 0) / 1000 for one in world.accounts.ended)
    assert first_token_s > mover.placement.held_since_s


@pytest.mark.parametrize("crashes", [False, True])
def test_when_the_only_holder_goes_in_the_middle_another_takes_its_layers(crashes: bool) -> None:
    swarm = live(FIRST, FIRST, SECOND)
    *others, last = swarm.volunteers
    leaves_s = 31.0
    world = ran(replace(swarm, volunteers=(*others, replace(last, stay_s=leaves_s, crashes=crashes))), 400.0)
    (mover,) = [one for one in world.members.values() if one.alive and one.book.held == (SECOND,)]
    takes_s = SETTLE_S + mover.load_s((SECOND,))
    noticed_s = leaves_s + (LOSS_BELIEVED_S if crashes else 0.0)
    assert leaves_s + takes_s < mover.placement.held_since_s <= noticed_s + LOOK_EVERY_S[1] + takes_s + 1e-9
    assert world.moves.made == 1
    later = [one for one in world.accounts.ended if one.arrival_s > mover.placement.held_since_s + SPEECH_S]
    assert later
    assert all(one.outcome is SessionOutcome.COMPLETED for one in later)


def test_leased_layers_stay_for_as_long_as_the_lease_lasts() -> None:
    swarm = Alone(live(FIRST, FIRST))
    swarm.begin()
    lease = swarm.mover.request(KEY, FIRST, 16, "somebody", 0.0)
    assert isinstance(lease, Granted)
    swarm.timeline.run(lease.lease.expires_s - 1.0)
    assert swarm.held == [(FIRST,), (FIRST,)]
    assert swarm.moves.made == 0
    swarm.mover.book.release(KEY)
    swarm.changed(swarm.mover)
    swarm.timeline.run(100.0)
    assert swarm.mover.book.held == (SECOND,)


def test_a_session_that_comes_after_the_word_keeps_its_layers() -> None:
    swarm = Alone(live(FIRST, FIRST), told=lambda one: one.request(KEY, FIRST, 16, "somebody", 0.0))
    swarm.begin()
    swarm.timeline.run(20.0)
    assert swarm.held == [(FIRST,), (FIRST,)]
    assert swarm.moves.called_off == swarm.moves.told > 0
    assert not swarm.mover.claim.load


def test_while_it_moves_it_says_what_it_loads_and_not_what_it_is_going_to_drop() -> None:
    said: list[tuple[tuple[Span, ...], tuple[Span, ...]]] = []
    swarm = Alone(live(FIRST, FIRST), told=lambda one: said.append((one.state().spans, one.state().loading)))
    swarm.begin()
    swarm.timeline.run(20.0)
    assert said
    assert set(said[:-1]) == {((), (SECOND,))}
    assert (swarm.mover.state().spans, swarm.mover.state().loading) == ((SECOND,), ())


def test_a_peer_that_goes_while_it_moves_leaves_the_hole_to_the_next() -> None:
    gone: list[Member] = []

    def leaves(one: Member) -> None:
        if not gone:
            gone.append(one)
            one.alive = False
            swarm.changed(one)

    swarm = Alone(live(FIRST, FIRST, FIRST), told=leaves)
    swarm.begin()
    swarm.timeline.run(30.0)
    assert (swarm.moves.cut_short, swarm.moves.made) == (1, 1)
    assert sorted(swarm.held) == [(FIRST,), (SECOND,)]


@settings(max_examples=examples(30))
@given(st.integers(2, 8), st.integers(0, 2**32 - 1))
def test_of_any_number_with_the_same_layers_no_more_move_than_pays_and_never_the_last(
    count: int, seed: int
) -> None:
    swarms = [Alone(live(*[FIRST] * count), seed) for _ in range(2)]
    for swarm in swarms:
        swarm.begin()
        while swarm.timeline.next_s < 130.0:
            swarm.timeline.step()
            assert (FIRST,) in swarm.held
        moved = swarm.held.count((SECOND,))
        assert 1 <= moved <= count // 2
        assert swarm.held.count((FIRST,)) == count - moved
        assert swarm.moves.made == moved
    assert swarms[0].moves == swarms[1].moves


def test_the_last_copies_stay_where_nobody_can_help() -> None:
    swarm = Alone(live(FIRST))
    swarm.begin()
    swarm.timeline.run(300.0)
    assert swarm.held == [(FIRST,)]
    assert swarm.moves.told == 0


@pytest.mark.parametrize(("few", "large", "each"), [(99, 99, None), (1, 99, 2), (1, 1, 1)])
def test_in_larger_swarms_fewer_looks_are_taken_and_those_left_out_are_counted(
    few: int, large: int, each: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moving, "FEW", few)
    monkeypatch.setattr(moving, "LARGE", large)
    monkeypatch.setattr(moving, "DRAWN", 1)
    swarm = Alone(live(*[WHOLE] * 40))
    swarm.begin()
    turns = 5
    swarm.timeline.run(turns * SETTLED.turn_s)
    expected = 2 * moving.LOOKS_IN_A_TURN * turns
    if each is None:
        assert swarm.moves.looks == pytest.approx(expected, rel=0.1)
        assert swarm.moves.left_out == 0
    else:
        assert swarm.moves.looks == each * turns
        assert swarm.moves.looks + swarm.moves.left_out == expected


def test_who_has_just_loaded_its_layers_does_not_look_in_a_swarm_that_serves() -> None:
    swarm = Alone(live(WHOLE, WHOLE))
    swarm.begin()
    for member in swarm.members.values():
        member.placement.held_since_s = 0.0
    swarm.timeline.run(SETTLED.min_hold_s - SETTLED.turn_s)
    looks = swarm.moves.looks
    swarm.timeline.run(SETTLED.min_hold_s + 3 * SETTLED.turn_s)
    assert looks <= moving.LOOKS_IN_A_TURN * 1.5
    assert swarm.moves.looks > looks


def test_moves_that_do_not_add_up_are_an_error() -> None:
    with pytest.raises(NotConserved, match="of 1 moves"):
        MoveCounts(told=1, called_off=1, cut_short=1).check()
