"""Forming a circuit: all hops or none, away from who refused, until the deadline and no longer."""

import asyncio
from typing import cast

import pytest
from support.links.data_plane import SPEC, asynchronous, soon, until
from support.swarms.swarm_of_fakes import FakeConnection, FakePeer, template

from molink.client.circuit import reserving
from molink.client.circuit.circuit_builder import ActiveCircuit, CircuitBuilder
from molink.client.circuit.circuit_core import Begin, CircuitCore
from molink.client.circuit.connection import SwarmConnection
from molink.client.circuit.quarantine import SHUN_S, Quarantine
from molink.client.epochs.circuit_events import AVOID_S
from molink.client.epochs.kept_leases import KeptLeases
from molink.client.errors import InvalidRequest, NoCircuit, SwarmUnavailable
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.shards.spec import Span

WHOLE = SPEC.whole
LOW, HIGH = Span(0, 3), Span(3, 6)
LONG_S = 5.0
SHORT_S = 1.0
"""The pauses between attempts soon exceed it: a swarm that keeps saying no is given up at once."""


class Forming:
    """One client over fakes."""

    def __init__(self, *peers: FakePeer) -> None:
        self.connection = FakeConnection(*peers)
        self.circuit_builder = CircuitBuilder(cast("SwarmConnection", self.connection), SPEC)
        self.template = template()
        self.told: list[str] = []

    async def form(self, within_s: float = LONG_S) -> ActiveCircuit:
        now_s = asyncio.get_running_loop().time()
        circuit = CircuitCore()
        (plan,) = circuit.handle(Begin(now_s + within_s), now_s)
        return await soon(
            self.circuit_builder.build(
                circuit, plan, self.template, self.template.prompt_tokens, KeptLeases(), self.told.append
            )
        )


def refusal(code: str, *, retry_after_ms: int = 0, peer_id: str = "") -> pb.Refusal:
    return pb.Refusal(code=code, detail=f"{code} it is", retry_after_ms=retry_after_ms, peer_id=peer_id)


@asynchronous
async def test_a_circuit_stands_when_every_hop_has_granted_and_is_ready() -> None:
    low, high = FakePeer(LOW), FakePeer(HIGH)
    high.polls_until_ready = 2
    forming = Forming(high, low)
    formed = await forming.form()
    assert [(hop.peer_id, hop.span) for hop in formed.route.hops] == [
        (low.peer_id, LOW),
        (high.peer_id, HIGH),
    ]
    assert [link.peer_id for link in formed.links] == [low.peer_id, high.peer_id]
    assert formed.head.peer_id == low.peer_id
    assert low.reserved == high.reserved == [formed.descriptor]
    assert (low.released, high.released) == ([], [])
    assert sum("loads its layers" in line for line in forming.told) == 2


@asynchronous
async def test_hops_that_hold_their_layers_are_asked_once_and_others_and_older_ones_twice() -> None:
    both = ["reserve", "await_ready"]
    low, high = FakePeer(LOW), FakePeer(HIGH)
    await Forming(low, high).form()
    assert low.asked == high.asked == ["reserve"]
    older = FakePeer(HIGH)
    older.says_ready = False
    await Forming(low, older).form()
    assert (low.asked[1:], older.asked) == (["reserve"], both)
    cold = FakePeer(free_weight_bytes=2**40)
    await Forming(cold).form()
    assert cold.asked == both


@asynchronous
async def test_the_descriptor_says_who_serves_what_and_proves_who_they_are() -> None:
    low, high = FakePeer(LOW), FakePeer(HIGH)
    formed = await Forming(low, high).form()
    descriptor = formed.descriptor
    assert [(hop.start, hop.stop, hop.quantization) for hop in descriptor.hops] == [
        (0, 3, "none"),
        (3, 6, "none"),
    ]
    assert [hop.facts for hop in descriptor.hops] == [low.view.facts_record, high.view.facts_record]
    assert (descriptor.session, descriptor.epoch) == (b"s" * 16, 1)
    assert (descriptor.prompt_tokens, descriptor.capacity_tokens) == (3, 10)


@pytest.mark.parametrize("code", ["memory", "busy", "draining", "span", "load"])
@pytest.mark.parametrize("asked", ["reserve", "await_ready"])
@asynchronous
async def test_a_refusal_leads_to_another_circuit(code: str, asked: str) -> None:
    first, second = FakePeer(WHOLE, layer_ms=1.0), FakePeer(WHOLE, layer_ms=5.0)
    first.refuse[asked] = refusal(code, retry_after_ms=60_000)
    forming = Forming(first, second)
    formed = await forming.form()
    assert formed.route.peer_ids == (second.peer_id,)
    assert len(first.reserved) == 1
    assert any(f"{code} it is" in line for line in forming.told)


@asynchronous
async def test_a_peer_that_cannot_be_reached_is_avoided() -> None:
    first, second = FakePeer(WHOLE, layer_ms=1.0), FakePeer(WHOLE, layer_ms=5.0)
    first.reachable = False
    forming = Forming(first, second)
    assert (await forming.form()).route.peer_ids == (second.peer_id,)
    first.reachable = True
    assert (await forming.form()).route.peer_ids == (second.peer_id,)
    first.announce_anew()
    assert (await forming.form()).route.peer_ids == (first.peer_id,)


@pytest.mark.parametrize("asked", ["reserve", "await_ready"])
@asynchronous
async def test_a_standing_circuit_whose_memory_another_client_took_ends_in_a_new_plan(asked: str) -> None:
    first, second = FakePeer(WHOLE, layer_ms=1.0), FakePeer(WHOLE, layer_ms=5.0)
    forming = Forming(first, second)
    assert (await forming.form()).route.peer_ids == (first.peer_id,)
    first.refuse[asked] = refusal("memory", retry_after_ms=60_000)
    assert (await forming.form()).route.peer_ids == (second.peer_id,)
    assert len(first.released) == 1
    first.refuse.clear()
    first.announce_anew()
    assert (await forming.form()).route.peer_ids == (first.peer_id,)


@asynchronous
async def test_the_peer_at_fault_is_avoided_and_not_the_one_that_says_so() -> None:
    low, high, spare = FakePeer(LOW), FakePeer(HIGH, layer_ms=1.0), FakePeer(HIGH, layer_ms=5.0)
    forming = Forming(low, high, spare)
    first = (await forming.form()).route.peer_ids[1]
    last = ({high.peer_id, spare.peer_id} - {first}).pop()
    low.refuse_once["await_ready"] = refusal("link", peer_id=first)
    assert (await forming.form()).route.peer_ids == (low.peer_id, last)


@asynchronous
async def test_one_refusal_gives_every_other_hop_back() -> None:
    low, high = FakePeer(LOW), FakePeer(HIGH)
    high.refuse["reserve"] = refusal("span")
    forming = Forming(low, high)
    with pytest.raises(NoCircuit):
        await forming.form(SHORT_S)
    assert len(low.reserved) == 1
    assert low.released == [(b"s" * 16, 1)]


@asynchronous
async def test_a_hop_that_does_not_get_ready_gives_all_back() -> None:
    low, high = FakePeer(LOW), FakePeer(HIGH)
    low.refuse["await_ready"] = refusal("load")
    high.polls_until_ready = 10**6
    with pytest.raises(NoCircuit):
        await Forming(low, high).form(SHORT_S)
    assert low.released == high.released == [(b"s" * 16, 1)]


@pytest.mark.full
@asynchronous
async def test_a_warm_hop_that_does_not_get_ready_is_left_for_another_while_there_is_time() -> None:
    low, high, spare = FakePeer(LOW), FakePeer(HIGH), FakePeer(HIGH, layer_ms=5.0)
    high.polls_until_ready = 10**6
    formed = await Forming(low, high, spare).form(1.5)
    assert formed.route.peer_ids == (low.peer_id, spare.peer_id)
    assert high.released == [(b"s" * 16, 1)]


@asynchronous
async def test_a_warm_hop_that_says_that_its_engine_stands_still_is_left_at_its_first_word() -> None:
    low, high, spare = FakePeer(LOW), FakePeer(HIGH), FakePeer(HIGH, layer_ms=5.0)
    high.polls_until_ready, high.computing_ms, high.expected_ms = 10**6, 1500, 20
    formed = await Forming(low, high, spare).form(60.0)
    assert formed.route.peer_ids == (low.peer_id, spare.peer_id)
    assert high.asked.count("await_ready") == 1


@asynchronous
async def test_a_hop_that_falls_silent_when_it_has_granted_is_left_for_another_while_there_is_time() -> None:
    low, high, spare = FakePeer(LOW), FakePeer(HIGH), FakePeer(HIGH, layer_ms=5.0)
    high.says_ready, high.silent = False, {"await_ready"}
    formed = await Forming(low, high, spare).form(3.0)
    assert formed.route.peer_ids == (low.peer_id, spare.peer_id)
    assert high.released == [(b"s" * 16, 1)]


@asynchronous
async def test_a_hop_whose_answer_does_not_come_is_given_back_too() -> None:
    low, high = FakePeer(LOW), FakePeer(HIGH)
    high.silent.add("reserve")
    with pytest.raises(NoCircuit):
        await Forming(low, high).form(SHORT_S)
    assert low.released == high.released == [(b"s" * 16, 1)]


@pytest.mark.parametrize("asked", ["reserve", "await_ready"])
@asynchronous
async def test_when_nobody_else_is_left_the_error_says_who_refused_and_why(asked: str) -> None:
    low, high = FakePeer(LOW), FakePeer(HIGH)
    high.refuse[asked] = refusal("load")
    forming = Forming(low, high)
    for _ in range(2):  # it is left out from the beginning of the second time
        with pytest.raises(NoCircuit, match=f"peer {high.peer_id} is left out for now: load it is") as caught:
            await forming.form(SHORT_S)
        assert (caught.value.refused_by, caught.value.refusal) == (high.peer_id, "load it is")


@asynchronous
async def test_a_peer_that_did_not_answer_is_named_with_its_span_missing() -> None:
    low, high = FakePeer(LOW), FakePeer(HIGH)
    high.reachable = False
    with pytest.raises(NoCircuit) as caught:
        await Forming(low, high).form(SHORT_S)
    assert caught.value.missing_layers == (HIGH,)
    assert (caught.value.refused_by, caught.value.refusal) == (high.peer_id, "nobody answers there")


@pytest.mark.parametrize("asked", ["reserve", "await_ready"])
@asynchronous
async def test_a_request_that_a_hop_calls_wrong_is_invalid_at_once(asked: str) -> None:
    low, high = FakePeer(LOW), FakePeer(HIGH)
    high.refuse[asked] = refusal("request")
    forming = Forming(low, high)
    with pytest.raises(InvalidRequest, match=f"{high.peer_id}: request it is"):
        await forming.form()
    assert forming.connection.refreshes == 0
    assert low.released == high.released == [(b"s" * 16, 1)]


@asynchronous
async def test_a_request_that_fits_no_message_is_invalid_and_reserves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    low, high = FakePeer(LOW), FakePeer(HIGH)
    forming = Forming(low, high)
    monkeypatch.setattr(reserving, "MAX_HEADER_BYTES", 500)
    with pytest.raises(InvalidRequest, match=r"2 hops of its circuit take .* 500 fit into a message"):
        await forming.form()
    assert low.reserved == high.reserved == []


@pytest.mark.parametrize("asked", ["reserve", "await_ready"])
@asynchronous
async def test_a_client_that_changes_its_mind_leaves_nothing_reserved(asked: str) -> None:
    low, high = FakePeer(LOW), FakePeer(HIGH)
    high.silent.add(asked)
    high.hang = asyncio.Event()
    forming = asyncio.create_task(Forming(low, high).form())
    await soon(high.hang.wait())
    forming.cancel()
    with pytest.raises(asyncio.CancelledError):
        await forming
    assert low.released == high.released == [(b"s" * 16, 1)]


@asynchronous
async def test_every_attempt_is_an_epoch_of_its_own() -> None:
    first, second = FakePeer(WHOLE, layer_ms=1.0), FakePeer(WHOLE, layer_ms=5.0)
    first.refuse["reserve"] = refusal("span")
    forming = Forming(first, second)
    formed = await forming.form()
    assert [one.epoch for one in (*first.reserved, *second.reserved)] == [1, 2]
    assert forming.template.epoch == formed.descriptor.epoch == 2


@asynchronous
async def test_no_circuit_names_the_missing_layers() -> None:
    forming = Forming(FakePeer(Span(0, 2)), FakePeer(Span(4, 6)))
    with pytest.raises(NoCircuit) as caught:
        await forming.form(SHORT_S)
    assert caught.value.missing_layers == (Span(2, 4),)
    assert caught.value.missing_bytes > 0
    assert (caught.value.model, caught.value.peers) == (SPEC.name, 2)
    assert "[2, 4)" in str(caught.value)
    assert set(forming.told) == {
        "no circuit yet: layers [2, 4) are missing; looking again"
    }  # not the error twice


@asynchronous
async def test_a_circuit_forms_when_the_missing_peer_joins() -> None:
    forming = Forming(FakePeer(LOW))
    forming.connection.newcomer = FakePeer(HIGH)
    assert len((await forming.form()).route.hops) == 2
    assert forming.connection.refreshes == 1


@asynchronous
async def test_an_empty_swarm_is_unavailable_and_not_busy() -> None:
    with pytest.raises(SwarmUnavailable, match="no peer that serves") as caught:
        await Forming().form(SHORT_S)
    assert not caught.value.busy


@asynchronous
async def test_a_full_swarm_is_busy_and_says_when_to_come_back() -> None:
    only = FakePeer(WHOLE)
    only.refuse["reserve"] = refusal("memory", retry_after_ms=2500)
    with pytest.raises(SwarmUnavailable) as caught:
        await Forming(only).form(SHORT_S)
    assert caught.value.busy
    assert caught.value.retry_after_s == 2.5


@asynchronous
async def test_a_swarm_that_is_full_at_one_place_is_busy_too_and_one_that_lacks_layers_is_not() -> None:
    low, high = FakePeer(LOW), FakePeer(HIGH)
    high.refuse["reserve"] = refusal("busy", retry_after_ms=2500)
    with pytest.raises(SwarmUnavailable) as caught:
        await Forming(low, high).form(SHORT_S)
    assert caught.value.busy
    assert caught.value.retry_after_s == 2.5


@asynchronous
async def test_a_swarm_that_lacks_layers_is_not_busy_though_a_peer_that_it_has_is_full() -> None:
    low, high = FakePeer(LOW), FakePeer(HIGH)
    low.refuse["reserve"] = refusal("busy")
    forming = Forming(low, high)
    forming_task = asyncio.create_task(forming.form(SHORT_S))
    await until(lambda: len(low.reserved) > 0)
    forming.connection.peers.remove(high)
    with pytest.raises(NoCircuit) as caught:
        await forming_task
    assert HIGH in caught.value.missing_layers or WHOLE in caught.value.missing_layers


@asynchronous
async def test_the_only_peer_is_asked_again_when_it_was_full() -> None:
    only = FakePeer(WHOLE)
    only.refuse["reserve"] = refusal("memory")
    forming = Forming(only)
    attempt = asyncio.create_task(forming.form())
    await until(lambda: len(only.reserved) >= 3)
    only.refuse.clear()
    formed = await attempt
    assert formed.route.peer_ids == (only.peer_id,)
    assert formed.descriptor.epoch >= 4


def test_a_peer_that_failed_is_avoided_for_a_while_or_until_it_says_something_new() -> None:
    peer, other = FakePeer(WHOLE), FakePeer(WHOLE)
    views = (peer.view, other.view)
    avoidance = Quarantine()
    avoidance.quarantine_peer(peer.view.facts, 100.0, AVOID_S)
    both = frozenset({peer.peer_id})
    assert avoidance.excluded_peers(views, 100.0) == (both, both)
    assert avoidance.excluded_peers(views, 100.0 + SHUN_S) == (both, frozenset())
    assert avoidance.excluded_peers(views, 100.0 + AVOID_S) == (frozenset(), frozenset())
    peer.announce_anew()
    assert avoidance.excluded_peers((peer.view, other.view), 100.0) == (frozenset(), frozenset())
