"""Simulated swarms guess by the product's own objects: their sessions take fewer trips, and are conserved as others."""

from dataclasses import replace
from functools import cache

import pytest

from molink.peer.speculation.session_guesses import SessionGuesses
from molink.simnet.core import guessing
from molink.simnet.core.guessing import SimulatedSpeculation
from molink.simnet.core.matrices import bundled_matrix
from molink.simnet.core.traces import TraceRequest
from molink.simnet.devices.model_shapes import QWEN2_7B
from molink.simnet.swarm.factory import random_setup
from molink.simnet.swarm.report import SwarmRow, swarm_row
from molink.simnet.swarm.sessions import guessed_trips
from molink.simnet.swarm.sessions.guessed_trips import NOTHING_GUESSED, GuessedTrips, load_of
from molink.simnet.swarm.settings import Churn, SwarmSettings
from molink.simnet.swarm.world import SwarmWorld

LONG_LAYERS = replace(QWEN2_7B, name="wide", intermediate_size=60_000)
"""So large that a circuit has several hops."""
TRACE = tuple(TraceRequest(at * 3.0, 40 + 10 * (at % 7), 30 + 20 * (at % 5)) for at in range(40))
SETTLED = SwarmSettings(peers=30, duration_s=60.0, gateways=2, rate_rps=0.2, seed=3)


@cache
def row(speculation: str, *, churns: bool = False) -> SwarmRow:
    """Of a run, which raises NotConserved if anything was lost or came twice."""
    churn = Churn(200.0, crash_share=0.6) if churns else Churn()
    its = replace(SETTLED, churn=churn, speculation=SimulatedSpeculation.named(speculation))
    world = SwarmWorld(random_setup(its, LONG_LAYERS, bundled_matrix(), TRACE), its)
    world.run()
    return swarm_row(world, speculation)


@pytest.mark.full
def test_with_guesses_trips_bring_more_tokens_and_a_token_takes_less() -> None:
    off, auto = row("off"), row("auto")
    assert auto.completed == off.completed > 0
    assert off.tokens_per_trip == pytest.approx(1.0)
    assert auto.tokens_per_trip is not None
    assert 1.2 < auto.tokens_per_trip < 4
    assert off.tpot_mean_ms is not None
    assert auto.tpot_mean_ms is not None
    assert auto.tpot_mean_ms < 0.9 * off.tpot_mean_ms


@pytest.mark.full
def test_as_many_as_pay_are_about_as_good_as_the_best_fixed_number() -> None:
    fixed = [row(number).tpot_mean_ms or 0.0 for number in ("1", "2", "4")]
    assert (row("auto").tpot_mean_ms or 0.0) <= 1.05 * min(fixed)


@pytest.mark.full
def test_sessions_with_guesses_survive_losses_and_are_conserved() -> None:
    churned = row("auto", churns=True)
    assert churned.losses > 0
    assert churned.completed > 0
    assert churned.tokens_per_trip is not None
    assert churned.tokens_per_trip > 1.2


def test_guesses_are_made_and_counted_by_the_products_own_objects() -> None:
    assert guessed_trips.TapeGuesser is guessing.TapeGuesser
    assert guessing.SessionGuesses is SessionGuesses
    load = load_of((NOTHING_GUESSED, GuessedTrips(2.2, 4.6)), 100.0, ())
    assert [(one.rows, one.tokens) for one in load.others] == [(1, 1.0), (5, 2.2)]
    assert load.waited_ms == 100.0
