"""The swarm and the machine are shown whole, and what a stranger wrote cannot command the terminal."""

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.dht.records.description import describe_peer, describe_swarm, disjoint_circuits
from molink.dht.records.records import (
    PROTOCOL_VERSION,
    DeviceProperties,
    LayerLatency,
    PeerFacts,
    PeerState,
    PeerView,
    ServedModel,
)
from molink.peer.commands.overview import print_local, print_machine, print_swarm
from molink.peer.device.machine import measure_disk, network_addresses
from molink.shards.spec import Span

MODEL = ServedModel("a" * 64, "b" * 64, "molink/test", "llama", "float32", "none", 8)


def view(peer_id: str, *spans: Span, name: str = "home", draining: bool = False) -> PeerView:
    facts = PeerFacts(
        peer_id=peer_id,
        public_key=bytes(32),
        sequence=1,
        ttl_s=60,
        protocol_version=PROTOCOL_VERSION,
        version="0.1.0",
        name=name,
        addresses=(f"/ip4/127.0.0.1/tcp/1/p2p/{peer_id}",),
        grpc_addresses=(),
        certificate=b"",
        device=DeviceProperties("cpu", "Processor", 1, 8_000_000_000, "Linux x86_64", 2),
        model=MODEL,
        span_limit=None,
        layer_latencies=(LayerLatency(1, 1.25), LayerLatency(2, 2.0)),
        embed_ms=0.1,
        head_ms=0.2,
        load_bytes_per_s=1e6,
    )
    state = PeerState(peer_id, 2, 60, 1, spans, 1_500_000_000, 500_000_000, 3, 1, draining)
    return PeerView(facts, state, 4.26)


def test_a_peer_is_described_in_json_values() -> None:
    described = describe_peer(view("peer-one", Span(0, 4), Span(6, 8)))
    assert json.loads(json.dumps(described)) == described
    assert described["spans"] == [[0, 4], [6, 8]]
    assert described["layer_ms"] == 1.25
    assert described["uplink_mbps"] is None
    assert described["age_s"] == 4.3


def test_layers_that_nobody_holds_are_named_for_each_model() -> None:
    swarm = describe_swarm([view("b", Span(6, 8)), view("a", Span(0, 4)), view("c")])
    assert [peer["peer_id"] for peer in swarm["peers"]] == ["a", "b", "c"]  # type: ignore[index, attr-defined]
    assert swarm["models"] == [
        {
            "model": "molink/test",
            "model_hash": "a" * 64,
            "layers": 8,
            "peers": 3,
            "missing": [[4, 6]],
            "complete": False,
            "circuits": [],
        }
    ]
    assert describe_swarm([]) == {"models": [], "peers": []}


def test_a_peer_of_another_version_is_shown_but_does_not_complete_a_model(
    capsys: pytest.CaptureFixture[str],
) -> None:
    old = view("old", Span(0, 8))
    old = dataclasses.replace(old, facts=dataclasses.replace(old.facts, protocol_version=0))
    swarm = describe_swarm([old, view("new", Span(0, 4))])
    assert [model["missing"] for model in swarm["models"]] == [[[4, 8]]]  # type: ignore[index, attr-defined]
    print_swarm(swarm)
    assert "home (speaks another version)" in capsys.readouterr().out


def test_the_table_has_a_row_for_each_peer_and_a_line_for_each_model(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_swarm(describe_swarm([view("x" * 44 + "the-id-1", Span(0, 4), draining=True), view("y" * 52)]))
    out = capsys.readouterr().out
    assert "home (takes nothing new)" in out
    assert "the-id-1" in out
    assert "none yet" in out
    assert "2.0 GB" in out
    assert "molink/test: 2 peers, nobody holds layers 4:8" in out


def test_a_complete_model_is_said_to_be_so(capsys: pytest.CaptureFixture[str]) -> None:
    print_swarm(describe_swarm([view("a", Span(0, 8))]))
    assert "molink/test: 1 peer, complete" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["\x1b[2J\x1b]0;owned\x07", "[bold red]x[/bold red]", "[/]", "a\nb"])
def test_a_strangers_name_cannot_command_the_terminal(capsys: pytest.CaptureFixture[str], name: str) -> None:
    print_swarm(describe_swarm([view("a", Span(0, 8), name=name)]))
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\x07" not in out
    assert "".join(character if character.isprintable() else "?" for character in name) in out


def test_a_local_status_is_printed_whatever_it_holds(capsys: pytest.CaptureFixture[str]) -> None:
    swarm = describe_swarm([view("a", Span(0, 8))])
    print_local({"peer_id": "me", "addresses": ["/a", "/b"], **swarm})
    out = capsys.readouterr().out
    assert "peer id: me\naddresses: /a, /b\n" in out
    assert "complete" in out
    print_local({"ready": True, "draining": False, "paused": None, "spans": [[0, 4], [6, 8]]})
    assert capsys.readouterr().out == "ready: yes\ndraining: no\npaused: no\nspans: 0:4, 6:8\n"
    print_local({"paused": "quiet hours 22:00-07:00"})
    assert capsys.readouterr().out == "paused: quiet hours 22:00-07:00\n"
    print_local({"peers": "not a list", "models": 7, "state": {"x": 1}})
    assert "state: {'x': 1}" in capsys.readouterr().out


def test_a_local_status_leaves_out_what_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    print_local({"spans": [], "sessions": 0, "operators": [], "kept_copies": 0, "prediction_error": None})
    assert capsys.readouterr().out == "spans: none\nsessions: 0\n"
    print_local({"kept_copies": 2, "prediction_error": 0.0})
    assert capsys.readouterr().out == "kept copies: 2\nprediction error: 0.0\n"


def test_the_machine_is_printed_with_its_units(capsys: pytest.CaptureFixture[str]) -> None:
    print_machine(
        {
            "device": {"name": "Processor [x]", "kind": "cpu", "system": "Linux", "processors": 4},
            "memory": {"free_bytes": 8_000_000_000, "default_bytes": 4_000_000_000},
            "model": "molink/test",
            "dtype": "float32",
            "threads": 3,
            "layer_ms": {"1": 1.5, "2": 1.75},
            "decode_layer_ms_by_dtype": {"float32": 2.5, "bfloat16": 1.25},
            "fastest_dtype": "bfloat16",
            "embed_ms": 0.25,
            "head_ms": 0.5,
            "load_bytes_per_s": 2e9,
            "disk": {"read_bytes_per_s": 1e9, "write_bytes_per_s": 5e8, "cached": True},
            "network": [{"interface": "lo", "address": "127.0.0.1", "loopback": True}],
        }
    )
    out = capsys.readouterr().out
    for part in (
        "Processor [x]",
        "8.0 GB",
        "4.0 GB",
        "1.750 ms",
        "2.500 ms ",
        "1.250 ms, the fastest here",
        "2.0 GB/s",
        "1.0 GB/s (maybe from memory)",
        "127.0.0.1",
    ):
        assert part in out
    assert any("threads" in line and " 3 " in line for line in out.splitlines())


def test_the_disk_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    speed = measure_disk(tmp_path, 8 * 1024 * 1024)
    assert min(speed.read_bytes_per_s, speed.write_bytes_per_s) > 0
    assert list(tmp_path.iterdir()) == []


def test_addresses_of_other_machines_reach_come_first() -> None:
    addresses = network_addresses()
    assert "127.0.0.1" in [address.address for address in addresses]
    assert [address.loopback for address in addresses] == sorted(address.loopback for address in addresses)


def test_who_does_not_answer_is_marked_and_its_layers_do_not_count(
    capsys: pytest.CaptureFixture[str],
) -> None:
    gone = dataclasses.replace(view("b", Span(4, 8), name="gone"), answers=False)
    swarm = describe_swarm([view("a", Span(0, 4)), gone])
    (model,) = swarm["models"]  # type: ignore[misc]
    assert (model["peers"], model["missing"], model["complete"]) == (1, [[4, 8]], False)
    print_swarm(swarm)
    shown = capsys.readouterr().out
    assert "gone (does not answer)" in shown
    assert "nobody holds layers 4:8" in shown


def shown_circuits(*views: PeerView) -> list[str]:
    return [
        " ".join(f"{hop['peer_id']} {hop['start']}:{hop['stop']}" for hop in circuit["hops"])
        for circuit in describe_swarm(views)["models"][0]["circuits"]
    ]


def test_circuits_have_no_peer_in_common_and_are_as_many_as_the_rarest_layer_has_holders() -> None:
    held = (view("a", Span(0, 6)), view("b", Span(0, 3)), view("c", Span(2, 8)), view("d", Span(5, 8)))
    assert shown_circuits(*held) == ["b 0:3 c 3:8", "a 0:6 d 6:8"]
    assert shown_circuits(*held[:3]) == ["a 0:6 c 6:8"]
    assert shown_circuits(*held[:2]) == []


def test_who_drains_or_does_not_answer_is_in_no_circuit() -> None:
    gone = dataclasses.replace(view("a", Span(0, 8)), answers=False)
    assert shown_circuits(gone, view("b", Span(0, 8), draining=True), view("c", Span(0, 8))) == ["c 0:8"]


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(1, 8)), max_size=12))
def test_every_circuit_covers_the_model_within_what_its_peers_hold(ends: list[tuple[int, int]]) -> None:
    held = {f"p{at}": Span(start, stop) for at, (start, stop) in enumerate(ends) if start < stop}
    found = disjoint_circuits([view(name, span) for name, span in held.items()], 8)
    assert len(found) == min(sum(layer in span for span in held.values()) for layer in range(8))
    assert len({name for circuit in found for name, _ in circuit}) == sum(map(len, found))
    for circuit in found:
        assert [layer for _, hop in circuit for layer in hop] == list(range(8))
        assert all(held[name].start <= hop.start < hop.stop <= held[name].stop for name, hop in circuit)


def test_people_see_circuits_of_the_swarm_and_of_this_peer(capsys: pytest.CaptureFixture[str]) -> None:
    swarm = describe_swarm([view("x" * 44 + "the-id-1", Span(0, 4), name=""), view("y" * 52, Span(4, 8))])
    hops = swarm["models"][0]["circuits"][0]["hops"]
    print_local({"circuits": [{"sessions": 2, "hops": hops}], **swarm})
    shown = capsys.readouterr().out
    assert "circuit of 2 sessions: the-id-1 0:4 → home 4:8" in shown
    assert "molink/test: 2 peers, complete, 1 circuit without a peer in common" in shown
    assert "  the-id-1 0:4 → home 4:8" in shown
