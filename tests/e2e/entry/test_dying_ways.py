"""A peer on whose machine a native way kills its process says so in a sentence and serves by another."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.devices import failing_ways
from support.swarms.forked_peers import ForkedSwarm, start_program
from support.swarms.live_swarms import BUNDLED, generate

from molink.client.api.swarm import AsyncSwarm
from molink.peer.compute.native_ways import WaysRecord
from molink.shards.native.compiling import user_folder
from molink.shards.native.native_way import NativeWay

pytestmark = [pytest.mark.real, pytest.mark.full, pytest.mark.anyio]

PROGRAM = Path(failing_ways.__file__)
INT8 = ("--model", BUNDLED, "--dtype", "bfloat16", "--quantization", "int8")


class DyingSwarm(ForkedSwarm):
    """On its machine torch's product with bytes ends the process."""

    async def launch(self, arguments: Sequence[str], log: Path) -> asyncio.subprocess.Process:
        return await start_program(PROGRAM, arguments, log)


async def test_a_peer_whose_way_dies_serves_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(PROGRAM.parents[2]))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    async with DyingSwarm() as swarm:
        peer = await swarm.join("volunteer", *INT8)
        said = [line for line in peer.lines if "is not used here" in line]
        assert len(said) == 1
        assert said[0].startswith(
            f"Note: {NativeWay.TORCH_BYTES} is not used here, because in a trial it ended"
        )
        assert "SIGSEGV with 4 rows" in said[0]
        async with AsyncSwarm(BUNDLED, initial_peers=swarm.addresses) as client:
            generation = await generate(client, "KING RICHARD III:", 8)
            assert len(generation.token_ids) == 8
        assert peer.alive
    record = WaysRecord.read(user_folder())
    assert [dropped.name for dropped in record.dropped] == [NativeWay.TORCH_BYTES]
    assert record.tried
