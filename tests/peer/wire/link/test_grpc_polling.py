"""The way in which gRPC polls and logs is said before anything of the product imports gRPC, and by the operator if
they will."""

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
            print(os.environ.get("GRPC_EXPERIMENTS"), os.environ.get("GRPC_VERBOSITY"))

sys.meta_path.insert(0, Watch())
importlib.import_module(sys.argv[1])
"""
"""Prints what the environment says when gRPC is imported."""
WANTED = ["-event_engine_listener" if sys.platform == "linux" else "None", "NONE"]


def without_grpc() -> dict[str, str]:
    """The environment without what it says of gRPC."""
    return {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}


def at_import(module: str, **environment: str) -> list[str]:
    command = [sys.executable, "-c", AT_IMPORT, module]
    done = subprocess.run(
        command,
        env=without_grpc() | environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    return done.stdout.split()


@pytest.mark.parametrize(
    "module",
    [
        "molink.peer.wire.link.connection",
        pytest.param("molink.peer.daemon.peer", marks=pytest.mark.full),
        pytest.param("molink.client.api.swarm", marks=pytest.mark.full),
    ],
)
def test_grpc_is_told_how_to_poll_and_log_before_it_is_imported(module: str) -> None:
    assert at_import(module) == WANTED


def test_what_the_environment_says_of_grpc_stands() -> None:
    said = {"GRPC_EXPERIMENTS": "tcp_rcv_lowat", "GRPC_VERBOSITY": "INFO"}
    assert at_import("molink.peer.wire.link.connection", **said) == ["tcp_rcv_lowat", "INFO"]


def test_this_version_of_grpc_knows_what_it_is_told() -> None:
    program = "import molink.peer.wire.link, grpc, grpc.aio; grpc.insecure_channel('127.0.0.1:1').close()"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    assert "Unknown experiment" not in done.stderr


IDLE = """
import asyncio
import molink.peer.wire.link
import grpc, grpc.aio

class Echo(grpc.GenericRpcHandler):
    def service(self, _):
        async def answer(request, context):
            return request
        return grpc.unary_unary_rpc_method_handler(answer)

async def main():
    server = grpc.aio.server([], [Echo()], options=[("grpc.max_connection_idle_ms", 100)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await channel.unary_unary("/test/Echo")(b"")
        while (state := channel.get_state()) is grpc.ChannelConnectivity.READY:
            await channel.wait_for_state_change(state)
    await server.stop(None)

asyncio.run(main())
"""
"""A connection that its server ends, because no call is made over it. gRPC has a line for that."""


@pytest.mark.parametrize(("said", "lines"), [({}, 0), ({"GRPC_VERBOSITY": "INFO"}, 1)])
def test_an_idle_connection_ends_without_a_word_of_grpc(said: dict[str, str], lines: int) -> None:
    command = [sys.executable, "-c", IDLE]
    done = subprocess.run(
        command, env=without_grpc() | said, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stderr.count("Got goaway") == lines, done.stderr
    assert lines > 0 or done.stderr == ""
