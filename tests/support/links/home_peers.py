"""Peers and clients of the product in namespaces: `molink-peer join`, and a client that streams what it is asked."""

import json
import re
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.links.namespaces import Internet
from support.swarms.live_swarms import BUNDLED

LEAVES_WITHIN_S = 300.0
CLIENT = f"""
import asyncio, json, sys, time
from molink import SamplingParams
from molink.client.api.swarm import AsyncSwarm

async def main():
    async with AsyncSwarm({BUNDLED!r}, initial_peers=sys.argv[1:], dtype="float32") as swarm:
        print("open", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            prompt, tokens = json.loads(line)
            params = SamplingParams(max_new_tokens=tokens, temperature=0.0)
            async for piece in swarm.stream_events(prompt, params=params, timeout_s=300, speculation="off"):
                whole = piece.generation
                hops = [hop.peer_id for hop in whole.circuit.hops] if whole else None
                print(json.dumps([time.monotonic(), piece.token_ids, hops]), flush=True)

asyncio.run(main())
"""


class HomePeer:
    """A `molink-peer join` in a namespace, until the stack is closed."""

    def __init__(
        self, stack: ExitStack, net: Internet, name: str, folder: Path, *options: str, command: str = "join"
    ) -> None:
        """`command`: another one of `molink-peer` that serves."""
        self.name, self.folder = name, folder
        self.said: list[str] = []
        self.said_s: list[float] = []
        """When each of these lines came, on the machine's monotonic clock."""
        program = [sys.executable, "-m", "molink.peer", command, "--state-dir", str(folder), *options]
        if command == "join":
            program += ["--priority", "normal"]
        log = stack.enter_context((folder.parent / f"{folder.name}.log").open("wb"))
        self._process = subprocess.Popen(
            net.command(name, *program, "--model", BUNDLED),
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        stack.callback(self._process.communicate)
        stack.callback(self._process.kill)

    def ready(self) -> list[str]:
        """What it has printed by the time it is ready."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.said.append(line.rstrip())
            self.said_s.append(time.monotonic())
            if self.said[-1] == "ready":
                return self.said
        raise AssertionError(f"it ended: {self.said}")

    def left(self) -> int:
        """Its exit status, once it has ended by itself."""
        self.said += (self._process.communicate(timeout=LEAVES_WITHIN_S)[0] or "").splitlines()
        return self._process.returncode

    def kill(self) -> None:
        """Ends it without a word."""
        self._process.kill()
        self._process.wait()


def invited_by(said: list[str]) -> str:
    """The multiaddress at which a peer that is ready invites others."""
    return re.findall(r"--initial-peers (\S+)", "\n".join(said))[0]


@dataclass(frozen=True, slots=True)
class StreamedPiece:
    """What a client has got at once, and when, on the machine's monotonic clock."""

    at_s: float
    token_ids: tuple[int, ...]
    hops: tuple[str, ...] | None
    """Peer ids of the circuit; None: more will come."""


class HomeClient:
    """A client in a namespace, until the stack is closed."""

    def __init__(self, stack: ExitStack, net: Internet, name: str, *invited: str) -> None:
        self._process = subprocess.Popen(
            net.command(name, sys.executable, "-c", CLIENT, *invited),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        stack.callback(self._process.communicate)
        stack.callback(self._process.kill)
        assert self._line() == "open"

    def ask(self, prompt: str, tokens: int) -> None:
        """Begins a generation. The one before must have ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([prompt, tokens]) + "\n")
        self._process.stdin.flush()

    def piece(self) -> StreamedPiece:
        """The next piece of the generation."""
        at_s, token_ids, hops = json.loads(self._line())
        return StreamedPiece(at_s, tuple(token_ids), None if hops is None else tuple(hops))

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        assert line, "the client has ended"
        return line


def reach_of(net: Internet, peer: HomePeer) -> dict[str, Any]:
    """What `molink-peer status --json` says of a running peer's reach."""
    command = net.command(
        peer.name, sys.executable, "-m", "molink.peer", "status", "--json", "--state-dir", str(peer.folder)
    )
    done = subprocess.run(command, capture_output=True, text=True, timeout=LEAVES_WITHIN_S, check=True)
    return dict(json.loads(done.stdout)["reach"])
