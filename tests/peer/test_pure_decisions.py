"""Decisions are values: they import nothing that computes, waits, talks or reads a clock.

What third parties import for themselves (networkx reads clocks, say) is not ours to bar; torch, grpc and
libp2p are barred for everyone.
"""

import subprocess
import sys

import pytest

PROGRAM = """
import builtins, importlib, pkgutil, sys

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
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    for found in pkgutil.iter_modules(getattr(module, "__path__", ()), name + "."):
        importlib.import_module(found.name)
assert not BARRED & set(sys.modules), BARRED & set(sys.modules)
"""

DECISIONS = [
    "molink.client.blame",
    "molink.client.own_sessions",
    "molink.client.patience",
    "molink.dht.hearing",
    "molink.dht.losses",
    "molink.dht.neighbours",
    "molink.dht.places",
    "molink.dht.spreading",
    "molink.dht.swarm_clock",
    "molink.dht.timing",
    "molink.shards.block_allocator",
    "molink.shards.prefix",
    "molink.shards.spec",
    "molink.shards.ranges",
    "molink.peer.models.choosing",
    "molink.peer.codecs",
    "molink.peer.scheduling.circulation",
    "molink.peer.scheduling.circulation_limit",
    "molink.peer.comfort.rules",
    "molink.peer.link.acknowledging",
    "molink.peer.link.keepalive",
    "molink.peer.leases",
    "molink.shards.address_ranges",
    "molink.peer.link.line_quality",
    "molink.peer.memory",
    "molink.peer.redundancy.pair_balance",
    "molink.peer.redundancy.partners",
    "molink.peer.scheduling.decoding_sessions",
    "molink.peer.scheduling.prompt_order",
    "molink.peer.scheduling.prompt_pieces",
    "molink.peer.redundancy.roles",
    "molink.peer.scheduling.microbatch",
    "molink.peer.protocol.packets",
    "molink.peer.link.message_memory",
    "molink.peer.link.reassembly",
    "molink.peer.link.shared_uplink",
    "molink.peer.link.traffic",
    "molink.peer.transmission.backlog",
    "molink.peer.scheduling.pipeline",
    "molink.peer.scheduling.prefill_chunks",
    "molink.peer.scheduling.prefill_pieces",
    "molink.peer.scheduling.prefill_window",
    "molink.peer.serving.prompts",
    "molink.peer.profiling.profile",
    "molink.peer.profiling.step_times",
    "molink.peer.profiling.thread_choice",
    "molink.peer.transmission.classes",
    "molink.peer.transmission.decode_times",
    "molink.peer.transmission.estimator",
    "molink.peer.transmission.just_in_time",
    "molink.peer.transmission.line",
    "molink.peer.transmission.policies",
    "molink.peer.transmission.shares",
    "molink.peer.transmission.spacing",
    "molink.peer.transmission.starting",
    "molink.peer.transmission.state",
    "molink.peer.transmission.turns",
    "molink.peer.transmission.uplink",
    "molink.peer.transmission.values",
    "molink.peer.link.unacknowledged",
    "molink.routing",
    "molink.simnet.communication.fabric",
    "molink.simnet.communication.printed",
    "molink.simnet.devices",
    "molink.simnet.layer_shapes",
    "molink.simnet.model_shapes",
    "molink.simnet.redundancy.instances",
]


def import_guarded(module: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, module], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("module", DECISIONS)
def test_a_decision_imports_nothing_that_computes_waits_or_reads_a_clock(module: str) -> None:
    finished = import_guarded(module)
    assert finished.returncode == 0, finished.stderr


@pytest.mark.parametrize("module", ["molink.peer.link.link", "molink.peer.serving.stepping"])
def test_what_drives_the_decisions_is_caught_by_the_same_guard(module: str) -> None:
    finished = import_guarded(module)
    assert finished.returncode != 0
    assert "which a decision must not" in finished.stderr
