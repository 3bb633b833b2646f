"""A peer whose owner needs the machine pauses: it holds nothing, its sessions go on elsewhere, and it comes back."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.swarms.forked_peers import ForkedSwarm, start_program
from support.swarms.live_swarms import BUNDLED, References, bundled_folder, circuit_of, generate

from molink.client.api.swarm import AsyncSwarm
from molink.client.local.local_swarm import LocalPeer
from molink.peer.daemon.control import call_peer

pytestmark = [pytest.mark.real, pytest.mark.full, pytest.mark.anyio]

DEADLINE_S = 120.0
PROMPT = "KING RICHARD III:\nNow is the winter of our discontent"
NEW_TOKENS = 60
PAUSED_AFTER = 12
"""Tokens that the client has when the owner pulls the plug."""

PROGRAM = Path(__file__).parents[2] / "support" / "devices" / "owned_peer.py"


class OwnersSwarm(ForkedSwarm):
    """Its peer `volunteer` has an owner who pulls plugs, and computes slowly."""

    async def launch(self, arguments: Sequence[str], log: Path) -> asyncio.subprocess.Process:
        if "volunteer" in arguments:
            return await start_program(PROGRAM, arguments, log)
        return await super().launch(arguments, log)


class Volunteer:
    """A peer that pauses and resumes when it is told that the plug was pulled or put in, and computes slowly."""

    def __init__(self, peer: LocalPeer) -> None:
        self.peer = peer

    def plug(self) -> None:
        """Pulls the plug, or puts it in."""
        unplugged = self.peer.state_dir.with_suffix(".unplugged")
        if unplugged.exists():
            unplugged.unlink()
        else:
            unplugged.touch()

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


async def test_a_peer_pauses_and_resumes_and_the_session_that_it_had_goes_on_elsewhere(
    references: References,
) -> None:
    expected = references.greedy(bundled_folder(), references.ids(bundled_folder(), PROMPT), NEW_TOKENS)
    async with OwnersSwarm() as swarm:
        await swarm.join("spare", "--model", BUNDLED, "--layers", "0:12")
        owner = Volunteer(await swarm.join("volunteer", "--model", BUNDLED, "--layers", "0:12"))
        async with AsyncSwarm(BUNDLED, initial_peers=[owner.peer.address]) as client:
            narrow = circuit_of(client, {owner.peer: (0, 12)})
            narrow.__enter__()
            tokens: list[int] = []
            async for piece in client.stream_events(PROMPT, max_new_tokens=NEW_TOKENS, timeout_s=DEADLINE_S):
                if len(tokens) < PAUSED_AFTER <= len(tokens) + len(piece.token_ids):
                    narrow.__exit__(None, None, None)
                    owner.plug()
                tokens += piece.token_ids
                generation = piece.generation
            assert tuple(tokens) == expected
            assert generation is not None
            assert generation.epochs >= 2
            assert [hop.name for hop in generation.circuit.hops] == ["spare"]

            assert await owner.says("Pauses") == "Pauses: on battery"
            status = await owner.reaches("spans", [])
            assert (status["paused"], status["sessions"], status["draining"]) == ("on battery", 0, True)

            owner.plug()
            await owner.says("Resumes")
            status = await owner.reaches("spans", [[0, 12]])
            assert (status["paused"], status["draining"]) == (None, False)
            with circuit_of(client, {owner.peer: (0, 12)}):
                again = await generate(client, PROMPT, NEW_TOKENS)
            assert again.token_ids == expected
            assert [hop.name for hop in again.circuit.hops] == ["volunteer"]
