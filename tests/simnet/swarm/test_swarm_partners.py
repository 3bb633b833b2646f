"""Partners in simulated swarms: what a copy saves when a peer is lost, and that everything is given back."""

import json
from dataclasses import asdict, replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.client.epochs.patience import LEAST_ANSWER_S
from molink.peer.memory.lease_gate import DRAIN_S
from molink.peer.memory.leases import LeaseKey
from molink.routing.routes import partners
from molink.routing.routes.copy_forms import CopyCost, CopyForm
from molink.routing.routes.partners import COPY_SHARE
from molink.shards.spec import Span
from molink.simnet.core.matrices import bundled_matrix
from molink.simnet.core.request_load import Request
from molink.simnet.core.timeline import Timeline
from molink.simnet.core.traces import TraceRequest
from molink.simnet.devices.model_shapes import QWEN2_7B
from molink.simnet.presentation.tables import laid_out
from molink.simnet.swarm.factory import random_setup, snapshot_setup
from molink.simnet.swarm.members.accounts import SessionOutcome
from molink.simnet.swarm.members.member import Member
from molink.simnet.swarm.population.snapshot_file import parse_snapshot
from molink.simnet.swarm.report import swarm_row, swarm_series
from molink.simnet.swarm.sessions import gateway
from molink.simnet.swarm.sessions.context import SessionContext
from molink.simnet.swarm.sessions.copying import CopyScheduler, KvCopy
from molink.simnet.swarm.sessions.generation import Phase, SimulatedGeneration
from molink.simnet.swarm.settings import Churn, SwarmSettings
from molink.simnet.swarm.table import swarm_table
from molink.simnet.swarm.world import SwarmWorld

PROMPT, NEW = 400, 800
TRACE = (TraceRequest(0.0, PROMPT, NEW),)
HALVES = ((0, 14), (14, 28))
CHURNING = SwarmSettings(
    peers=40,
    duration_s=160.0,
    gateways=2,
    rate_rps=0.5,
    churn=Churn(300.0, crash_share=0.6),
    seed=3,
    partners=True,
)
LINE = CopyCost(CopyForm.KEYS_AND_VALUES, 28_672)
WIDE = replace(QWEN2_7B, name="wide", intermediate_size=60_000)
"""So large that a circuit has several hops."""
OFTEN = tuple(TraceRequest(at * 3.0, 40 + 10 * (at % 7), 30 + 20 * (at % 5)) for at in range(40))


def document(spans: tuple[tuple[int, int], ...]) -> str:
    """Peers p0, p1, ... that hold these spans, each slower than the one before."""
    one = {
        "model": "any", "model_hash": "ab", "free_weight_bytes": 0, "free_kv_bytes": 10**9, "sessions": 0, "queued": 0,
        "draining": False, "device": "cpu", "uplink_mbps": None,
    }  # fmt: skip
    rows = [
        {**one, "peer_id": f"p{at}", "name": f"p{at}", "spans": [list(span)], "layer_ms": 1.0 + at}
        for at, span in enumerate(spans)
    ]
    return json.dumps({"models": [{"model": "any", "model_hash": "ab", "layers": 28}], "peers": rows})


def world_of(
    gone: dict[str, tuple[float, bool]], spans: tuple[tuple[int, int], ...] = HALVES * 2, *, auto: bool = True
) -> SwarmWorld:
    """One session in a swarm in which these peers go after so many seconds, and crash or say so."""
    its = SwarmSettings(peers=len(spans), duration_s=1.0, gateways=1, partners=auto)
    cast = snapshot_setup(its, parse_snapshot(document(spans), "live.json", QWEN2_7B), TRACE)
    volunteers = [
        replace(one, stay_s=gone[one.facts.name][0], crashes=gone[one.facts.name][1])
        if one.facts.name in gone
        else one
        for one in cast.volunteers
    ]
    return SwarmWorld(replace(cast, volunteers=volunteers), its)


def member(world: SwarmWorld, name: str) -> Member:
    return next(one for one in world.members.values() if one.volunteer.facts.name == name)


def ran(world: SwarmWorld) -> SwarmWorld:
    world.run()
    (ended,) = world.accounts.ended
    assert ended.outcome is SessionOutcome.COMPLETED
    assert ended.tokens == NEW
    return world


def lost(at_s: float, *, crashes: bool = True, auto: bool = True) -> SwarmWorld:
    """The head goes in mid-decode."""
    return ran(world_of({"p0": (at_s, crashes)}, auto=auto))


@cache
def churned() -> SwarmWorld:
    world = SwarmWorld(random_setup(CHURNING, WIDE, bundled_matrix(), OFTEN), CHURNING)
    world.run()
    return world


def test_after_a_crash_only_what_was_not_copied_is_computed_again() -> None:
    early, late, without = lost(6.0), lost(60.0), lost(60.0, auto=False)
    for world in (early, late):
        assert world.accounts.partners.switches == world.accounts.ended[0].losses == 1
        assert world.accounts.ended[0].attempts == 1
    assert 50 < early.accounts.ended[0].recomputed_tokens < PROMPT + 50
    assert late.accounts.ended[0].recomputed_tokens <= 2
    assert without.accounts.partners.switches == 0
    assert without.accounts.ended[0].recomputed_tokens > PROMPT + 50


def test_after_a_crash_the_next_token_comes_sooner_from_a_partner() -> None:
    crashed, without = lost(60.0), lost(60.0, auto=False)
    stalls_s = [world.accounts.stalls_s for world in (crashed, without)]
    assert [len(each) for each in stalls_s] == [1, 1]
    assert LEAST_ANSWER_S < stalls_s[0][0] < stalls_s[1][0]


@pytest.mark.parametrize("auto", [True, False])
def test_a_session_leaves_a_peer_that_says_that_it_goes_without_a_pause(auto: bool) -> None:
    world, quiet = lost(60.0, crashes=False, auto=auto), ran(world_of({}, auto=auto))
    assert world.accounts.gone_over == 1
    assert world.accounts.stalls_s == []
    assert (world.accounts.ended[0].losses, world.accounts.ended[0].attempts) == (0, 1)
    assert world.accounts.ended[0].recomputed_tokens == 0
    assert world.accounts.left == 1, "it has gone before its time was over"
    slower = 1.0 + (3.0 - 1.0) * 14 / quiet.accounts.ended[0].tpot_ms  # type: ignore[operator]
    assert world.accounts.ended[0].tpot_ms < slower * quiet.accounts.ended[0].tpot_ms  # type: ignore[operator]


def test_a_session_that_has_nowhere_to_go_over_to_loses_a_peer_that_leaves_when_that_goes() -> None:
    world = world_of({"p0": (30.0, False), "p2": (20.0, True)}, (*HALVES * 2, (0, 13)))
    world.run()
    (ended,) = world.accounts.ended
    assert world.accounts.gone_over == 0
    assert ended.losses == 1
    assert ended.outcome is SessionOutcome.PEER_LOST
    assert ended.end_s > 30.0 + DRAIN_S


def test_without_a_living_partner_the_history_is_computed_again_on_another_circuit() -> None:
    world = ran(world_of({"p2": (50.0, True), "p0": (60.0, True)}, (*HALVES * 2, (0, 14), (0, 13))))
    assert world.accounts.partners.lost == 1
    assert world.accounts.partners.switches == 1, "another partner was found for the one that was lost"
    world = ran(world_of({"p2": (59.0, True), "p0": (60.0, True)}, (*HALVES * 2, (0, 14))))
    assert world.accounts.partners.switches == 0
    assert world.accounts.ended[0].attempts == 3, "the same circuit was tried once more"
    assert world.accounts.ended[0].recomputed_tokens > PROMPT


def test_a_partner_in_a_peers_place_gets_a_partner_of_its_own_whose_copy_begins_anew() -> None:
    world = ran(world_of({"p0": (40.0, True), "p2": (100.0, True)}, (*HALVES * 2, (0, 14))))
    assert world.accounts.partners.switches == 2
    assert world.accounts.ended[0].recomputed_tokens <= 4


def test_the_loss_of_a_partner_alone_is_not_noticed_by_the_session() -> None:
    world, quiet = ran(world_of({"p2": (30.0, True)})), ran(world_of({}))
    assert world.accounts.partners.lost == 1
    assert world.accounts.ended[0].losses == 0
    assert world.accounts.ended[0].tpot_ms == pytest.approx(quiet.accounts.ended[0].tpot_ms)


def test_two_hops_that_are_lost_together_are_both_taken_over() -> None:
    world = ran(world_of({"p0": (60.0, True), "p1": (60.5, True)}))
    assert world.accounts.partners.switches == 2
    assert world.accounts.ended[0].attempts == 1
    assert world.accounts.ended[0].recomputed_tokens <= 4
    assert len(world.accounts.stalls_s) == 1


def test_partners_lease_their_memory_and_get_it_back() -> None:
    world = world_of({})
    seen: list[tuple[int, int]] = []

    def look() -> None:
        books = [member(world, f"p{at}").book for at in range(4)]
        seen.extend((len(book.leases), len(book.copies)) for book in books)

    world.timeline.call(30.0, look)
    ran(world)
    assert seen == [(1, 0), (1, 0), (0, 1), (0, 1)]
    assert all(not one.book.leases and not one.copies for one in world.members.values())
    row = swarm_row(world, "swarm")
    assert row.copies_share == pytest.approx(0.5)
    assert row.partners_found == 2


def test_a_copy_is_no_session_to_those_who_choose_circuits() -> None:
    world = world_of({})
    seen: list[tuple[int, int]] = []
    world.timeline.call(
        30.0, lambda: seen.extend((one.state().sessions, len(one.copies)) for one in world.members.values())
    )
    ran(world)
    assert seen == [(1, 0), (1, 0), (0, 1), (0, 1)]


def test_who_refuses_is_counted_and_the_hop_goes_without() -> None:
    world = world_of({})

    def leave() -> None:
        member(world, "p2").book.gate.drain()

    world.timeline.call(0.01, leave)
    ran(world)
    assert world.accounts.partners.none == {"refused: draining": 1}
    assert world.accounts.partners.found == 1


def test_without_the_option_nobody_keeps_a_copy() -> None:
    world = ran(world_of({}, auto=False))
    row = swarm_row(world, "swarm")
    assert (row.partners_found, row.switches, row.replication_kbit_s, row.copies_share) == (0, 0, 0.0, 0.0)
    assert row.without_partner == {}


@pytest.mark.full
def test_every_session_ends_once_and_every_copy_is_given_back_however_peers_come_and_go() -> None:
    world = churned()
    world.check()
    accounts = world.accounts
    assert sorted(one.number for one in accounts.ended) == list(range(accounts.arrived))
    assert accounts.partners.switches > 0
    assert accounts.partners.lost > 0
    assert accounts.partners.switches <= sum(one.losses for one in accounts.ended)
    assert all(not one.copies and not one.book.leases for one in world.members.values() if one.alive)
    row = swarm_row(world, "swarm")
    assert 0 < row.copies_share < 0.5
    assert row.replication_kbit_s > 0


@pytest.mark.full
def test_equal_seeds_give_equal_bytes() -> None:
    few = replace(CHURNING, peers=16, duration_s=30.0, churn=Churn(100.0, crash_share=0.6))
    worlds = [SwarmWorld(random_setup(few, WIDE, bundled_matrix(), OFTEN), few) for _ in range(2)]
    for world in worlds:
        world.run()
    assert worlds[0].accounts.gone_over > 0
    texts = [
        json.dumps(
            [
                asdict(swarm_row(world, "swarm")),
                swarm_series(world),
                [asdict(one) for one in world.accounts.ended],
            ]
        )
        for world in worlds
    ]
    assert texts[0] == texts[1]


@pytest.mark.full
def test_the_table_tells_of_partners() -> None:
    table = laid_out(swarm_table([swarm_row(churned(), "swarm")]))
    assert "losses that a partner took over" in [line.cells[0].text for line in table.lines]


def test_the_choice_is_the_products_own() -> None:
    assert gateway.choose_partners is partners.choose_partners


def generation(scene: SessionContext, number: int, prompt_tokens: int) -> SimulatedGeneration:
    one = SimulatedGeneration(Request(number, 0.0, prompt_tokens, 10_000), None, phase=Phase.DECODE)  # type: ignore[arg-type]
    one.progress.tpot_ms, one.progress.tokens = 100.0, 1.0
    scene.running[number] = one
    return one


@given(
    st.lists(st.integers(1, 2000), min_size=1, max_size=5),
    st.lists(st.floats(0.0, 50.0), min_size=1, max_size=6),
)
def test_copies_never_have_more_lines_than_were_computed_nor_take_more_than_their_share(
    prompts: list[int], waits_s: list[float]
) -> None:
    world = world_of({})
    scene = SessionContext(
        Timeline(), world.setup.model, world.members, world.setup.places, world.accounts, lambda _: None
    )
    source = Member(world.setup.volunteers[0], world.setup.model)
    scene.members[source.peer_id] = source
    copying, copies = CopyScheduler(scene), []
    for number, prompt_tokens in enumerate(prompts):
        one = generation(scene, number, prompt_tokens)
        source.decoding[number] = 0
        copies.append(KvCopy(one, 0, source.peer_id, "partner", LeaseKey(b"", 1), Span(0, 14), 100.0, LINE))
        copying.begin(copies[-1])
    elapsed_s = 0.0
    for wait_s in waits_s:
        scene.timeline.run(elapsed_s := elapsed_s + wait_s)
        for copy in copies:
            before = copy.lines
            copying.end(copy)
            copying.begin(copy)
            assert before <= copy.lines <= copy.one.history
        assert world.accounts.partners.copied_bytes <= COPY_SHARE * 20e6 / 8 * elapsed_s * (1 + 1e-9) + 1e-6
        assert sum(copy.lines * copy.line_bytes for copy in copies) == pytest.approx(
            world.accounts.partners.copied_bytes
        )
