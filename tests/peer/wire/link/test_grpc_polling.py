"""How gRPC polls is said before anything of the product imports gRPC, and by the operator if they will."""

import os
import subprocess
import sys

import pytest
from support.deadline import DEADLINE_S

AT_IMPORT = """
import importlib, os, sys

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "grpc":
            print(os.environ.get("GRPC_EXPERIMENTS"))

sys.meta_path.insert(0, Watch())
importlib.import_module(sys.argv[1])
"""
"""Prints what the environment says when gRPC is imported."""
WANTED = "-event_engine_listener" if sys.platform == "linux" else "None"


def at_import(module: str, **environment: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if name != "GRPC_EXPERIMENTS"}
    command = [sys.executable, "-c", AT_IMPORT, module]
    done = subprocess.run(
        command, env=inherited | environment, capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    return done.stdout.strip()


@pytest.mark.parametrize(
    "module",
    [
        "molink.peer.wire.link.connection",
        pytest.param("molink.peer.daemon.peer", marks=pytest.mark.full),
        pytest.param("molink.client.api.swarm", marks=pytest.mark.full),
    ],
)
def test_grpc_is_told_how_to_poll_before_it_is_imported(module: str) -> None:
    assert at_import(module) == WANTED


def test_what_the_environment_says_of_grpc_stands() -> None:
    assert at_import("molink.peer.wire.link.connection", GRPC_EXPERIMENTS="tcp_rcv_lowat") == "tcp_rcv_lowat"


def test_this_version_of_grpc_knows_what_it_is_told() -> None:
    program = "import molink.peer.wire.link, grpc, grpc.aio; grpc.insecure_channel('127.0.0.1:1').close()"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    assert "Unknown experiment" not in done.stderr
