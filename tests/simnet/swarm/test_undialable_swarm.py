"""Swarms of which most volunteers cannot be dialled: who relays, what links take, and what the command says of it."""

import json
from dataclasses import replace
from functools import cache

import pytest

from molink.commands import run_app
from molink.routing.latency.relayed_links import is_undialable, needs_relay, relay_offers, relayed_mbps
from molink.simnet.cli import app
from molink.simnet.core.matrices import bundled_matrix
from molink.simnet.core.traces import TraceRequest
from molink.simnet.devices.model_shapes import QWEN2_7B
from molink.simnet.swarm.factory import random_setup
from molink.simnet.swarm.population.reach import SwarmReach
from molink.simnet.swarm.relay_report import relay_row
from molink.simnet.swarm.report import swarm_row
from molink.simnet.swarm.settings import Churn, SwarmSettings
from molink.simnet.swarm.world import SwarmWorld

LONG_LAYERS = replace(QWEN2_7B, name="wide", intermediate_size=60_000)
"""So large that a circuit has several hops."""
TRACE = tuple(TraceRequest(at * 3.0, 40 + 10 * (at % 7), 30 + 20 * (at % 5)) for at in range(40))
SETTINGS = SwarmSettings(
    peers=30, duration_s=200.0, gateways=2, rate_rps=0.2, churn=Churn(300.0, 0.5), seed=3, undialable=0.9
)


@cache
def ran(settings: SwarmSettings = SETTINGS) -> SwarmWorld:
    world = SwarmWorld(random_setup(settings, LONG_LAYERS, bundled_matrix(), TRACE), settings)
    world.run()
    return world


def reach_of(settings: SwarmSettings) -> SwarmReach:
    reach = random_setup(settings, LONG_LAYERS, bundled_matrix(), TRACE).reach
    assert reach is not None
    return reach


def test_whoever_cannot_be_dialled_stays_at_up_to_three_that_can() -> None:
    setup = random_setup(SETTINGS, LONG_LAYERS, bundled_matrix(), TRACE)
    relays = {one.peer_id for one in setup.volunteers if one.facts.relay_address}
    hidden = [one.facts for one in setup.volunteers if is_undialable(one.facts)]
    assert len(relays) + len(hidden) == len(setup.volunteers)
    assert hidden
    assert relays
    for facts in hidden:
        assert not facts.addresses
        assert len(facts.relays) == min(3, len(relays))
        assert {relay.peer_id for relay in facts.relays} <= relays


def test_the_same_volunteers_come_with_and_without() -> None:
    without = random_setup(replace(SETTINGS, undialable=0.0), LONG_LAYERS, bundled_matrix(), TRACE)
    hidden = random_setup(SETTINGS, LONG_LAYERS, bundled_matrix(), TRACE)
    assert [(one.peer_id, one.uplink_mbps, one.stay_s) for one in hidden.volunteers] == [
        (one.peer_id, one.uplink_mbps, one.stay_s) for one in without.volunteers
    ]
    assert without.reach is None


def test_the_first_to_come_can_be_dialled_whatever_is_drawn() -> None:
    reach = reach_of(replace(SETTINGS, undialable=1.0))
    assert reach.dialable == 1
    assert reach.undialable == SETTINGS.peers - 1


def test_a_way_is_as_long_as_its_legs_and_only_where_routers_expect_a_relay() -> None:
    setup = random_setup(SETTINGS, LONG_LAYERS, bundled_matrix(), TRACE)
    assert setup.reach is not None
    direct = random_setup(replace(SETTINGS, undialable=0.0), LONG_LAYERS, bundled_matrix(), TRACE).places
    relayed = 0
    for one in setup.volunteers:
        for other in setup.volunteers:
            if one is other:
                continue
            relay = setup.reach.relay_between(one.peer_id, other.peer_id)
            assert (relay is not None) == needs_relay(one.facts, other.facts)
            legs = [(one.peer_id, other.peer_id)]
            if relay is not None:
                relayed += 1
                legs = [(one.peer_id, relay), (relay, other.peer_id)]
            expected = sum(direct.rtt_ms(*leg) for leg in legs)
            assert setup.places.rtt_ms(one.peer_id, other.peer_id) == pytest.approx(expected)
    assert relayed


def test_who_loses_a_relay_says_nothing_and_who_loses_another_says_where_it_stays_by_then() -> None:
    setup = random_setup(replace(SETTINGS, undialable=0.6), LONG_LAYERS, bundled_matrix(), TRACE)
    assert setup.reach is not None
    one = next(one for one in setup.volunteers if is_undialable(one.facts))
    first, second, third = (relay.peer_id for relay in one.facts.relays)
    assert one.peer_id in setup.reach.gone(first)
    assert setup.reach.moved(one, first) is None
    assert one.peer_id in setup.reach.gone(second)
    moved = setup.reach.moved(one, second)
    assert moved is not None
    there = [relay.peer_id for relay in moved.facts.relays]
    assert there[0] == third
    assert len(set(there) - {first, second}) == 3
    assert moved.facts.cone == one.facts.cone
    assert setup.reach.moved(moved, second) is None
    assert all(one.peer_id in setup.reach.gone(peer_id) for peer_id in there)


@pytest.mark.full
def test_a_swarm_of_undialable_volunteers_serves_and_its_relays_carry_some_of_it() -> None:
    world = ran()
    row, relays = swarm_row(world, "swarm"), relay_row(world, "swarm")
    assert row.completed > 0
    assert relays is not None
    assert 0 < relays.relayed_links <= relays.links
    assert relays.links_most >= 1
    assert relays.mbps_most >= relays.mbps_mean > 0
    assert relays.undialable > relays.dialable
    assert world.relaying is not None
    assert not any(load.pairs for load in world.relaying.loads.values())


@pytest.mark.full
def test_the_same_seed_gives_the_same_relays_and_the_same_figures() -> None:
    few = replace(SETTINGS, peers=16, duration_s=40.0)
    again = SwarmWorld(random_setup(few, LONG_LAYERS, bundled_matrix(), TRACE), few)
    again.run()
    assert again.accounts.ended
    assert relay_row(again, "swarm") == relay_row(ran(few), "swarm")
    assert swarm_row(again, "swarm") == swarm_row(ran(few), "swarm")


@pytest.mark.full
def test_routers_and_the_simulated_relays_speak_of_the_same_bandwidth() -> None:
    setup = random_setup(SETTINGS, LONG_LAYERS, bundled_matrix(), TRACE)
    assert setup.reach is not None
    idle = relay_offers(notice.view(0.0) for notice in ran().bulletin.notices())
    for peer_id, offer in setup.reach.offers().items():
        volunteer = next(one for one in setup.volunteers if one.peer_id == peer_id)
        assert offer.mbps == relayed_mbps(volunteer.uplink_mbps)
        assert peer_id not in idle or idle[peer_id].mbps <= offer.mbps


SMALL = (
    "--peers",
    "12",
    "--hours",
    "0.02",
    "--rate",
    "0.2",
    "--gateways",
    "2",
    "--model",
    "qwen2-7b",
    "--json",
)


@pytest.mark.full
def test_json_has_relays_only_where_somebody_cannot_be_dialled(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(app, "molink-simnet", ["swarm", *SMALL, "--undialable", "0.9"]) == 0
    document = json.loads(capsys.readouterr().out)
    (relays,) = document["relays"]
    assert document["parameters"]["undialable"] == 0.9
    assert relays["dialable"] + relays["undialable"] >= 12
    assert run_app(app, "molink-simnet", ["swarm", *SMALL]) == 0
    without = json.loads(capsys.readouterr().out)
    assert "relays" not in without
    assert "undialable" not in without["parameters"]


@pytest.mark.parametrize("part", ["-0.1", "1.5"])
def test_a_part_that_is_none_is_one_sentence(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(app, "molink-simnet", ["swarm", *SMALL, "--undialable", part]) == 2
    assert "must be from 0 to 1" in capsys.readouterr().err
