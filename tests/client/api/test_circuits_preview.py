"""Previews: each circuit in what those before leave, over peers that meet what is required, and what is missing."""

from dataclasses import replace
from typing import Any

import pytest
from support.circuits.circuit_cases import MODEL, peer

from molink.client.api.circuits_preview import preview_circuits
from molink.client.api.peer_requirements import ANY_PEER, PeerRequirements
from molink.client.circuit.quarantine import Quarantine
from molink.dht.records.records import PeerView

TOKENS = 64
KV_BYTES = MODEL.kv_bytes(MODEL.whole, TOKENS)


def with_device(view: PeerView, region: str = "", **changes: Any) -> PeerView:  # noqa: ANN401 - fields of several types
    device = replace(view.facts.device, **changes)
    return replace(view, facts=replace(view.facts, device=device, region=region))


def gpu(name: str, region: str = "", count: int = 1) -> PeerView:
    return with_device(peer(name, (0, 8)), region, kind="cuda", name=f"NVIDIA {name}", count=count)


def test_each_circuit_takes_of_what_those_before_have_left() -> None:
    views = [peer("a", (0, 8), free_kv_bytes=2 * KV_BYTES)]
    shown = preview_circuits(views, MODEL, ANY_PEER, 2, TOKENS)
    assert (shown.is_possible, len(shown.routes), shown.load_bytes) == (True, 2, 0)
    short = preview_circuits(views, MODEL, ANY_PEER, 3, TOKENS)
    assert (short.is_possible, len(short.routes)) == (False, 2)
    assert short.reason
    told = short.describe()
    assert (told["possible"], told["circuits_wanted"], len(told["circuits"])) == (False, 3, 2)
    assert told["circuits"][0]["hops"] == [
        {"peer_id": "a", "start": 0, "stop": 8, "load_bytes": 0, "kv_bytes": KV_BYTES}
    ]


def test_layers_that_would_be_loaded_are_counted_once() -> None:
    views = [peer("a", (0, 4)), peer("b", free_weight_bytes=10**8)]
    shown = preview_circuits(views, MODEL, ANY_PEER, 3, TOKENS)
    assert shown.is_possible
    missing = MODEL.weight_bytes(MODEL.whole) - MODEL.weight_bytes(type(MODEL.whole)(0, 4))
    assert missing <= shown.load_bytes <= MODEL.weight_bytes(MODEL.whole)


@pytest.mark.parametrize("views", [[], [peer("a", (0, 4))]])
def test_a_model_that_fits_nowhere_says_how_many_bytes_are_missing(views: list[PeerView]) -> None:
    shown = preview_circuits(views, MODEL, ANY_PEER, 1, TOKENS)
    assert not shown.is_possible
    assert shown.routes == ()
    least = sum(MODEL.layer_bytes[4 if views else 0 :]) + MODEL.head_bytes
    assert shown.missing_bytes >= least
    assert preview_circuits(
        [*views, peer("z", free_weight_bytes=shown.missing_bytes)], MODEL, ANY_PEER, 1, TOKENS
    ).is_possible


@pytest.mark.parametrize(
    ("requirements", "chosen"),
    [
        (PeerRequirements(gpu="rtx 4090"), {"RTX 4090"}),
        (PeerRequirements(gpu="H200"), set[str]()),
        (PeerRequirements(regions=("de",)), {"L40"}),
        (PeerRequirements(regions=("DE", "US"), gpu="4090"), {"RTX 4090"}),
        (PeerRequirements(memory_bytes=10**11), set[str]()),
        (PeerRequirements(gpu="4090", gpu_count=2), {"RTX 4090"}),
        (PeerRequirements(gpu="4090", gpu_count=3), set[str]()),
        (PeerRequirements(gpu_count=4), {"RTX 4090", "L40", "cpu"}),
    ],
)
def test_circuits_go_over_peers_that_meet_what_is_required(
    requirements: PeerRequirements, chosen: set[str]
) -> None:
    views = [gpu("RTX 4090", "US", 2), gpu("L40", "DE"), gpu("L40S", "FR"), peer("cpu", (0, 8))]
    shown = preview_circuits(views, MODEL, requirements, 1, TOKENS)
    used = {hop.peer_id for route in shown.routes for hop in route.hops}
    assert used <= chosen | {"L40S"} if requirements.gpu_count == 4 else used <= chosen
    assert shown.is_possible is bool(chosen)
    if requirements.gpu_count == 3:
        assert shown.reason.startswith("1 of 3 4090 GPUs are missing")


def test_peers_that_may_not_be_on_a_circuit_are_never_taken_back() -> None:
    views = [peer("a", (0, 8)), peer("b", (0, 8))]
    quarantine = Quarantine(is_eligible=lambda view: view.peer_id == "a")
    quarantine.quarantine_peer(views[0].facts, now_s=0.0, seconds=60.0)
    assert quarantine.excluded_peers(views, 10.0) == ({"a", "b"}, {"b"})
