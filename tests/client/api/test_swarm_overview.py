"""What a gateway and `molink` say of the swarm: the circuit that a generation would get now, and who keeps copies."""

from dataclasses import replace
from typing import Any

from support.circuits.circuit_cases import MODEL, peer

from molink.client.api.overview import overview
from molink.dht.records.records import Coordinate, PeerView


def volunteer(peer_id: str, span: tuple[int, int]) -> PeerView:
    """A peer at a home of its own whose line carries any copy."""
    coordinate = Coordinate((0.0, 0.0, 0.0, 0.0), 5.0, 0.1)
    view = peer(peer_id, span, coordinate=coordinate)
    model = replace(view.facts.model, model_hash=MODEL.model_hash)
    facts = replace(view.facts, uplink_mbps=1000.0, grpc_addresses=(f"{peer_id}.example:1",), model=model)
    return replace(view, facts=facts)


def hops_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    (circuit,) = found["circuits"]
    hops: list[dict[str, Any]] = circuit["hops"]
    return hops


def test_each_hop_of_the_circuit_names_who_would_keep_its_copy_and_in_which_form() -> None:
    views = [volunteer("a", (0, 4)), volunteer("b", (4, 8)), volunteer("c", (0, 4)), volunteer("d", (4, 8))]
    head, tail = hops_of(overview(views, MODEL))
    assert {head["peer_id"], head["partner"]} == {"a", "c"}
    assert {tail["peer_id"], tail["partner"]} == {"b", "d"}
    assert head["copy_form"] in {"token_ids", "keys_and_values"}
    assert tail["copy_form"] in {"inputs", "keys_and_values"}
    assert (head["no_partner"], tail["no_partner"]) == (None, None)


def test_a_hop_that_nobody_else_holds_says_why_it_has_no_partner() -> None:
    head, tail = hops_of(overview([volunteer("a", (0, 4)), volunteer("b", (4, 8))], MODEL))
    assert (head["partner"], head["copy_form"], head["no_partner"]) == (None, None, "span")
    assert tail["no_partner"] == "span"


def test_without_a_circuit_there_is_a_reason() -> None:
    found = overview([volunteer("a", (0, 4))], MODEL)
    assert (found["ready"], found["circuits"]) == (False, [])
    assert "4" in str(found["reason"])
