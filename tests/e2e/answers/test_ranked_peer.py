"""A peer on two devices serves as any other, and ends clearly when one of them does."""

import asyncio
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from support.peer_findings import remind
from support.swarms.forked_peers import start_program
from support.swarms.live_swarms import (
    BUNDLED,
    FORMATION_TIMEOUT_S,
    PROGRAM_TIMEOUT_S,
    References,
    bundled_folder,
)

from molink import AsyncSwarm

pytestmark = [pytest.mark.real, pytest.mark.full, pytest.mark.anyio]

PROGRAM = Path(__file__).parents[2] / "support" / "devices" / "ranked_peer.py"
PROMPT = "ROMEO: But soft"
TOKENS = 24


def ranks_of(peer: psutil.Process) -> list[psutil.Process]:
    """Its children that compute, whatever else it starts for a while."""
    ranks = []
    for child in peer.children():
        with suppress(psutil.NoSuchProcess):
            if "molink.peer.ranks" in child.cmdline():
                ranks.append(child)
    return ranks


async def test_a_peer_on_two_devices_serves_exact_tokens_and_ends_with_a_sentence_when_one_is_lost(
    references: References, tmp_path: Path
) -> None:
    arguments = ["join", "--new-swarm", "--model", BUNDLED, "--dtype", "float32", "--layers", "0:12"]
    log, state = tmp_path / "log", tmp_path / "state"
    remind(state)
    process = await start_program(PROGRAM, [*arguments, "--state-dir", str(state)], log)
    assert process.stdout is not None
    try:
        said: list[str] = []
        async with asyncio.timeout(PROGRAM_TIMEOUT_S):
            while "ready" not in said:
                line = await process.stdout.readline()
                assert line, (said, log.read_text())
                said.append(line.decode().strip())
        assert any(line.startswith("Predicted for") and "TP=2 PP=1" in line for line in said)
        address = next(line for line in said if line.startswith("Invite others")).split()[-1]
        async with AsyncSwarm(BUNDLED, initial_peers=[address]) as swarm:
            result = await swarm.generate(PROMPT, max_new_tokens=TOKENS, timeout_s=FORMATION_TIMEOUT_S)
        folder = bundled_folder()
        assert result.token_ids == references.greedy(folder, references.ids(folder, PROMPT), TOKENS)
        ranks = ranks_of(psutil.Process(process.pid))
        assert len(ranks) == 2
        ranks[1].kill()
        async with asyncio.timeout(PROGRAM_TIMEOUT_S):
            await process.wait()
        assert process.returncode == 1
        assert "the devices cannot go on together: rank" in log.read_text()
        assert "Traceback" not in log.read_text()
        _, alive = psutil.wait_procs(ranks, timeout=PROGRAM_TIMEOUT_S)
        assert not alive
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
