"""A peer whose owner needs the machine pauses: it holds nothing, its sessions go on elsewhere, and it comes back."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.swarms.forked_peers import ForkedSwarm
from support.swarms.live_swarms import BUNDLED, References, bundled_folder, circuit_of, generate

from molink.client.api.swarm import AsyncSwarm
from molink.client.local.local_swarm import LocalPeer, LocalSwarm, _until_ready
from molink.peer.daemon.control import call_peer

pytestmark = [pytest.mark.e2e, pytest.mark.anyio]

DEADLINE_S = 60.0
PROMPT = "KING RICHARD III:\nNow is the winter of our discontent"
NEW_TOKENS = 120
PAUSED_AFTER = 12
"""Tokens that the client has when the owner pulls the plug."""

PROGRAM = '''
import sys, threading, time

from molink.dht.host.lean_libp2p import load_lean_libp2p
from molink.shards.loading.lean_transformers import load_lean_transformers

load_lean_libp2p()
load_lean_transformers()

from molink.peer.commands import cli
from molink.peer.host_policy import rules as comfort
from molink.peer.host_policy import readings as machine_readings
from molink.peer.host_policy import pausing
from molink.peer.engine import stepping
from molink.peer.host_policy.rules import Readings

lines = []


def listen():
    for line in iter(sys.stdin.readline, ""):
        lines.append(line)


class Reader:
    """On battery after each other line on stdin."""

    def __init__(self, gpu, *, heeds_programs):
        pass

    def __call__(self):
        return Readings(0, on_battery=len(lines) % 2 == 1)


compute = stepping.compute


def compute_slowly(engine, inputs):
    time.sleep(0.02)
    return compute(engine, inputs)


threading.Thread(target=listen, daemon=True).start()
machine_readings.MachineReader = Reader
comfort.PAUSE_AFTER_S = comfort.RESUME_AFTER_S = 0.1
pausing.LOOK_EVERY_S, pausing.GRACE_S = 0.05, 0.0
stepping.compute = compute_slowly
cli.main(sys.argv[1:])
'''


class Volunteer:
    """A peer that pauses and resumes when it is told that the plug was pulled or put in, and computes slowly."""

    def __init__(self, peer: LocalPeer) -> None:
        self.peer = peer

    async def plug(self) -> None:
        """Pulls the plug, or puts it in."""
        assert self.peer.process.stdin is not None
        self.peer.process.stdin.write(b"\n")
        await self.peer.process.stdin.drain()

    async def says(self, beginning: str) -> str:
        """The next line that begins so."""
        assert self.peer.process.stdout is not None
        async with asyncio.timeout(DEADLINE_S):
            while line := (await self.peer.process.stdout.readline()).decode().rstrip():
                if line.startswith(beginning):
                    return line
        pytest.fail(f"it ended without {beginning!r}")

    async def status(self) -> dict[str, object]:
        return await call_peer(self.peer.state_dir, "status", DEADLINE_S)

    async def reaches(self, key: str, value: object) -> dict[str, object]:
        """Its status once it says so."""
        async with asyncio.timeout(DEADLINE_S):
            while (status := await self.status())[key] != value:  # noqa: ASYNC110 - it is another process
                await asyncio.sleep(0.05)
        return status


@asynccontextmanager
async def volunteer(swarm: LocalSwarm, folder: Path) -> AsyncIterator[Volunteer]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PROGRAM, "join", "--name", "volunteer", "--model", BUNDLED),
        *("--layers", "0:12", "--state-dir", str(folder), "--initial-peers", *swarm.addresses),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        async with asyncio.timeout(DEADLINE_S):
            lines = await _until_ready(process)
        assert lines[-1] == "ready"
        (invitation,) = (line for line in lines if line.startswith("Invite"))
        yield Volunteer(
            LocalPeer("volunteer", process, invitation.rpartition(" ")[2], folder, folder / "log", lines)
        )
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_a_peer_pauses_and_resumes_and_the_session_that_it_had_goes_on_elsewhere(
    tmp_path: Path, references: References
) -> None:
    expected = references.greedy(bundled_folder(), references.ids(bundled_folder(), PROMPT), NEW_TOKENS)
    async with ForkedSwarm() as swarm:
        await swarm.join("spare", "--model", BUNDLED, "--layers", "0:12")
        async with (
            volunteer(swarm, tmp_path / "volunteer") as owner,
            AsyncSwarm(BUNDLED, initial_peers=[owner.peer.address]) as client,
        ):
            narrow = circuit_of(client, {owner.peer: (0, 12)})
            narrow.__enter__()
            tokens: list[int] = []
            async for piece in client.stream_events(PROMPT, max_new_tokens=NEW_TOKENS):
                if len(tokens) < PAUSED_AFTER <= len(tokens) + len(piece.token_ids):
                    narrow.__exit__(None, None, None)
                    await owner.plug()
                tokens += piece.token_ids
                generation = piece.generation
            assert tuple(tokens) == expected
            assert generation is not None
            assert generation.epochs == 2
            assert [hop.name for hop in generation.circuit.hops] == ["spare"]

            assert await owner.says("Pauses") == "Pauses: on battery"
            status = await owner.reaches("spans", [])
            assert (status["paused"], status["sessions"], status["draining"]) == ("on battery", 0, True)

            await owner.plug()
            await owner.says("Resumes")
            status = await owner.reaches("spans", [[0, 12]])
            assert (status["paused"], status["draining"]) == (None, False)
            with circuit_of(client, {owner.peer: (0, 12)}):
                again = await generate(client, PROMPT, NEW_TOKENS)
            assert again.token_ids == expected
            assert [hop.name for hop in again.circuit.hops] == ["volunteer"]
