"""A simulated session goes over to a better circuit of other spans as a real client's does: the same core decides."""

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from molink.client.epochs import successor_core
from molink.shards.spec import Span
from molink.simnet.core.traces import TraceRequest
from molink.simnet.devices.model_shapes import QWEN2_7B
from molink.simnet.swarm.factory import snapshot_setup
from molink.simnet.swarm.members.accounts import SessionOutcome
from molink.simnet.swarm.population.snapshot_file import parse_snapshot
from molink.simnet.swarm.population.volunteers import Volunteer
from molink.simnet.swarm.settings import Churn, SwarmSettings
from molink.simnet.swarm.world import SwarmWorld

PROMPT = 400
COMES_S = 20.0
"""One newcomer in so many seconds, on average."""


def world_of(
    new_tokens: int, *, stay_s: float = float("inf"), crashes: bool = True, layers: int | None = None
) -> SwarmWorld:
    """One session over two slow peers with half of the layers each. Meanwhile fast peers come, with room for all or
    for so many layers, and stay for so long."""
    one = {
        "model": "any", "model_hash": "ab", "free_kv_bytes": 10**10, "sessions": 0, "queued": 0, "draining": False,
        "device": "cpu", "uplink_mbps": None,
    }  # fmt: skip
    slow = [{"spans": [[0, 14]]}, {"spans": [[14, 28]]}]
    room_bytes = 10**12 if layers is None else QWEN2_7B.spec().weight_bytes(Span(28 - layers, 28))
    peers = [*slow, *({"spans": []} for _ in range(20))]
    rows = [
        {
            **one, **peer, "peer_id": f"p{at}", "name": f"p{at}", "layer_ms": 4.0 if peer in slow else 0.5,
            "free_weight_bytes": 0 if peer in slow else room_bytes,
        }
        for at, peer in enumerate(peers)
    ]  # fmt: skip
    text = json.dumps({"models": [{"model": "any", "model_hash": "ab", "layers": 28}], "peers": rows})
    its = SwarmSettings(2, 2 * COMES_S, gateways=1, rate_rps=1e-3, churn=Churn(2 * COMES_S), partners=True)
    cast = snapshot_setup(
        its, parse_snapshot(text, "live.json", QWEN2_7B), (TraceRequest(0.0, PROMPT, new_tokens),)
    )
    *first, newcomers = cast.volunteers[0], cast.volunteers[1], cast.volunteers[2:]
    coming: Iterator[Volunteer] = (replace(each, stay_s=stay_s, crashes=crashes) for each in newcomers)
    return SwarmWorld(replace(cast, volunteers=first, recruit=lambda: next(coming)), its)


def ran(world: SwarmWorld) -> SwarmWorld:
    world.run()
    (ended,) = world.accounts.ended
    assert ended.outcome is SessionOutcome.COMPLETED
    return world


def test_a_session_goes_over_to_a_better_circuit_of_other_spans_without_a_pause() -> None:
    world = ran(world_of(1000))
    (ended,) = world.accounts.ended
    assert world.accounts.joined >= 1
    assert (world.accounts.succeeded, world.accounts.successors_given_up) == (1, 0)
    assert (ended.hops, ended.tokens, ended.losses, ended.attempts) == (1, 1000, 0, 1)
    assert world.accounts.stalls_s == []


def test_a_session_goes_over_to_better_peers_at_the_same_spans_hop_by_hop() -> None:
    """Newcomers have room for half of the layers."""
    world = ran(world_of(1000, layers=14))
    (ended,) = world.accounts.ended
    assert world.accounts.gone_over >= 1
    assert (ended.hops, ended.tokens, ended.losses, ended.attempts) == (2, 1000, 0, 1)
    assert world.accounts.stalls_s == []


def test_a_session_of_which_little_is_to_come_stays() -> None:
    world = ran(world_of(successor_core.WORTH_TOKENS))
    assert (world.accounts.succeeded, world.accounts.successors_given_up) == (0, 0)


@pytest.mark.parametrize("crashes", [True, False])
def test_a_circuit_that_is_gone_while_it_computes_a_session_anew_costs_the_session_nothing(
    crashes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(successor_core, "STARTS", 10**6)
    world = ran(world_of(1000, stay_s=22.0, crashes=crashes))
    (ended,) = world.accounts.ended
    assert world.accounts.succeeded == 0
    assert 1 <= world.accounts.successors_given_up <= successor_core.MOST_GIVEN_UP
    assert (ended.hops, ended.losses) == (2, 0)
