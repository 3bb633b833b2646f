"""Decisions are values: they import nothing that computes, waits, talks or reads a clock.

What third parties import for themselves (networkx reads clocks, say) is not ours to bar; torch, grpc and
libp2p are barred for everyone. One process imports each decision, without what it has of ours from the one before.
"""

import json
import subprocess
import sys

import pytest
from support.deadline import DEADLINE_S

PROGRAM = """
import builtins, importlib, json, pkgutil, sys, traceback

BARRED = {"torch", "grpc", "libp2p", "trio"}
BARRED_FOR_US = {"asyncio", "time", "datetime", "random", "secrets", "socket", "threading", "subprocess"}
original = builtins.__import__


def guarded(name, globals=None, locals=None, fromlist=(), level=0):
    root = name.partition(".")[0]
    importer = (globals or {}).get("__name__", "")
    if root in BARRED or (root in BARRED_FOR_US and importer.partition(".")[0] == "molink"):
        raise ImportError(f"{importer} imports {name}, which a decision must not")
    return original(name, globals, locals, fromlist, level)


builtins.__import__ = guarded
errors = {}
for name in sys.argv[1:]:
    for loaded in [one for one in sys.modules if one.partition(".")[0] == "molink"]:
        del sys.modules[loaded]
    try:
        module = importlib.import_module(name)
        for found in pkgutil.walk_packages(getattr(module, "__path__", ()), name + "."):
            importlib.import_module(found.name)
        assert not BARRED & set(sys.modules), BARRED & set(sys.modules)
        errors[name] = ""
    except Exception:
        errors[name] = traceback.format_exc()
print(json.dumps(errors))
"""

DECISIONS = [
    "molink.client.circuit.blame",
    "molink.client.circuit.circuit_core",
    "molink.client.circuit.peer_history",
    "molink.client.epochs.moves_core",
    "molink.client.epochs.patience",
    "molink.client.epochs.successor_core",
    "molink.dht.node.hearing",
    "molink.dht.membership.announcing_core",
    "molink.dht.membership.failure_detector",
    "molink.dht.membership.neighbours",
    "molink.dht.membership.places",
    "molink.dht.gossip.iwants",
    "molink.dht.gossip.spreading",
    "molink.dht.membership.swarm_clock",
    "molink.dht.membership.timing",
    "molink.shards.kv.block_allocator",
    "molink.shards.kv.extents",
    "molink.shards.kv.prefix",
    "molink.shards.spec",
    "molink.shards.hub.ranges",
    "molink.peer.announcing.placement_core",
    "molink.peer.models.choosing",
    "molink.routing.cost.encodings",
    "molink.peer.scheduling.in_flight_rules",
    "molink.peer.scheduling.in_flight_limit",
    "molink.peer.scheduling.step_limit",
    "molink.peer.speculation",
    "molink.peer.host_policy.reloading",
    "molink.peer.host_policy.rules",
    "molink.peer.wire.transport.acknowledgements",
    "molink.peer.wire.transport.keepalive",
    "molink.peer.memory.lease_rules",
    "molink.peer.memory.lease_table",
    "molink.peer.memory.leases",
    "molink.shards.address_ranges",
    "molink.peer.wire.transport.line_quality",
    "molink.peer.memory.memory",
    "molink.peer.daemon.partner_terms",
    "molink.peer.memory.copy_leases",
    "molink.peer.redundancy.copy_intake",
    "molink.peer.redundancy.copy_sending",
    "molink.peer.redundancy.pair_balance",
    "molink.peer.redundancy.pair_roles",
    "molink.peer.redundancy.partners",
    "molink.peer.scheduling.decoding_sessions",
    "molink.peer.scheduling.prompt_gathering",
    "molink.peer.scheduling.prompt_order",
    "molink.peer.redundancy.prompt_pieces",
    "molink.peer.redundancy.roles",
    "molink.peer.scheduling.microbatch",
    "molink.peer.wire.protocol.packets",
    "molink.peer.wire.transport.message_memory",
    "molink.peer.wire.transport.reassembly",
    "molink.peer.wire.transport.shared_uplink",
    "molink.peer.wire.transport.packet_engine",
    "molink.peer.wire.transport.packet_sender",
    "molink.peer.wire.transport.progress_watch",
    "molink.peer.wire.transport.sent_memory",
    "molink.peer.wire.transmission.send_queue",
    "molink.peer.scheduling.prefill_slices",
    "molink.peer.scheduling.prefill_window",
    "molink.peer.hop.hop_core",
    "molink.peer.profiling.profile",
    "molink.peer.profiling.step_times",
    "molink.peer.device.thread_choice",
    "molink.peer.wire.transmission.classes",
    "molink.peer.wire.transmission.decode_times",
    "molink.peer.wire.estimation.estimator",
    "molink.peer.wire.transmission.flight",
    "molink.peer.wire.transmission.just_in_time",
    "molink.peer.wire.transmission.line_model",
    "molink.peer.wire.estimation.bottleneck_model",
    "molink.peer.wire.transmission.policies",
    "molink.peer.wire.transmission.weighted_fair_queue",
    "molink.peer.wire.estimation.decode_intervals",
    "molink.peer.wire.estimation.slow_start",
    "molink.peer.wire.transmission.state",
    "molink.peer.wire.transmission.round_robin",
    "molink.peer.wire.transmission.uplink",
    "molink.peer.wire.transmission.values",
    "molink.peer.wire.transport.retransmit_buffer",
    "molink.routing",
    "molink.routing.cost.first_token",
    "molink.routing.cost.prefill_chunks",
    "molink.simnet.papers.communication.fabric",
    "molink.simnet.papers.communication.printed",
    "molink.simnet.devices.devices",
    "molink.simnet.devices.layer_shapes",
    "molink.simnet.devices.model_shapes",
    "molink.simnet.papers.redundancy.cluster.instances",
]


DRIVERS = ["molink.peer.wire.link.link", "molink.peer.engine.stepping"]
"""What drives decisions, last: it may leave behind what is barred."""


@pytest.fixture(scope="module")
def errors() -> dict[str, str]:
    """By module, why it cannot be imported; else nothing."""
    command = [sys.executable, "-c", PROGRAM, *DECISIONS, *DRIVERS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("module", DECISIONS)
def test_a_decision_imports_nothing_that_computes_waits_or_reads_a_clock(
    errors: dict[str, str], module: str
) -> None:
    assert errors[module] == ""


@pytest.mark.parametrize("module", DRIVERS)
def test_what_drives_the_decisions_is_caught_by_the_same_guard(errors: dict[str, str], module: str) -> None:
    assert "which a decision must not" in errors[module]
