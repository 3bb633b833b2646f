"""What a gateway says of the swarm: the circuit that a generation would get now, who keeps copies, and no addresses."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from support.circuits.circuit_cases import MODEL, peer

from molink.client.api import overview
from molink.client.api.overview import SwarmOverview, planned_circuit
from molink.client.api.running_sessions import RunningSessions
from molink.dht.records.records import Coordinate, PeerView


def volunteer(peer_id: str, span: tuple[int, int]) -> PeerView:
    """A peer at a home of its own whose line carries any copy."""
    coordinate = Coordinate((0.0, 0.0, 0.0, 0.0), 5.0, 0.1)
    view = peer(peer_id, span, coordinate=coordinate)
    model = replace(view.facts.model, model_hash=MODEL.model_hash)
    facts = replace(view.facts, uplink_mbps=1000.0, grpc_addresses=(f"{peer_id}.example:1",), model=model)
    return replace(view, facts=facts)


def planned_hops(views: list[PeerView]) -> list[dict[str, Any]]:
    return [dict(hop) for hop in planned_circuit(views, MODEL).hops]


def test_each_hop_of_the_circuit_names_who_would_keep_its_copy_and_in_which_form() -> None:
    views = [volunteer("a", (0, 4)), volunteer("b", (4, 8)), volunteer("c", (0, 4)), volunteer("d", (4, 8))]
    head, tail = planned_hops(views)
    assert {head["peer_id"], head["partner"]} == {"a", "c"}
    assert {tail["peer_id"], tail["partner"]} == {"b", "d"}
    assert head["copy_form"] in {"token_ids", "keys_and_values"}
    assert tail["copy_form"] in {"inputs", "keys_and_values"}
    assert (head["no_partner"], tail["no_partner"]) == (None, None)


def test_a_hop_that_nobody_else_holds_says_why_it_has_no_partner() -> None:
    head, tail = planned_hops([volunteer("a", (0, 4)), volunteer("b", (4, 8))])
    assert (head["partner"], head["copy_form"], head["no_partner"]) == (None, None, "span")
    assert tail["no_partner"] == "span"


@pytest.mark.anyio
async def test_without_a_circuit_there_is_a_reason() -> None:
    found = await SwarmOverview(MODEL, lambda: [volunteer("a", (0, 4))], RunningSessions()).describe()
    assert (found["ready"], found["planned"], found["circuits"]) == (False, None, [])
    assert "4" in str(found["reason"])


@pytest.mark.anyio
async def test_nobody_is_told_where_peers_are_dialled() -> None:
    views = [volunteer("a", (0, 4)), volunteer("b", (4, 8))]
    found = await SwarmOverview(MODEL, lambda: views, RunningSessions()).describe()
    assert [peer["peer_id"] for peer in found["peers"]] == ["a", "b"]
    said = str(found)
    for view in views:
        for address in (*view.facts.addresses, *view.facts.grpc_addresses):
            assert address not in said
    assert "addresses" not in said


@pytest.mark.anyio
async def test_a_hundred_questions_at_once_plan_once(monkeypatch: pytest.MonkeyPatch) -> None:
    views = [volunteer("a", (0, 8))]
    planned = []

    def counting(*of: Any) -> overview.PlannedCircuit:  # noqa: ANN401 - as it is called
        planned.append(of)
        return planned_circuit(*of)

    monkeypatch.setattr(overview, "planned_circuit", counting)
    asked = SwarmOverview(MODEL, lambda: views, RunningSessions())
    answers = await asyncio.gather(*(asked.describe() for _ in range(100)))
    assert len(planned) == 1
    assert all(answer["ready"] for answer in answers)


@pytest.mark.anyio
async def test_the_part_that_peers_had_is_counted_for_each() -> None:
    sessions = RunningSessions()
    sessions.tokens_served.update({"a": 7})
    views = [volunteer("a", (0, 4)), volunteer("b", (4, 8))]
    found = await SwarmOverview(MODEL, lambda: views, sessions).describe()
    assert [peer["tokens_served"] for peer in found["peers"]] == [7, 0]
