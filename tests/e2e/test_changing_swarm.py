"""Peers that come and go change the circuit; nothing else has to be started again."""

import pytest
from live_swarms import BUNDLED, References, bundled_folder, generate, hops_of, run_program

from molink.client.local_swarm import LocalSwarm
from molink.client.swarm import AsyncSwarm

pytestmark = [pytest.mark.e2e, pytest.mark.anyio]


async def test_joining_and_leaving_changes_the_circuit_under_a_client(
    anyio_backend: str, references: References
) -> None:
    """One client lives through it all: front and back, back replaced, back gone by Ctrl-C, front by `leave`."""
    folder = bundled_folder()
    expected = references.greedy(folder, references.ids(folder, "ROMEO:"), 12)
    async with LocalSwarm() as swarm:
        front = await swarm.join("front", "--model", BUNDLED, "--layers", "0:6")
        back = await swarm.join("back", "--model", BUNDLED, "--layers", "6:12")
        async with AsyncSwarm(BUNDLED, initial_peers=swarm.addresses) as client:
            first = await generate(client, "ROMEO:", 12)
            assert hops_of(first) == [("front", 0, 6), ("back", 6, 12)]

            successor = await swarm.join("successor", "--model", BUNDLED, "--layers", "6:12")
            assert await swarm.stop(back) == 0
            second = await generate(client, "ROMEO:", 12)
            assert hops_of(second) == [("front", 0, 6), ("successor", 6, 12)]

            await swarm.join("whole", "--model", BUNDLED, "--layers", "0:12")
            left = await run_program("molink.peer", "leave", "--state-dir", str(front.state_dir))
            assert (left.status, left.err) == (0, "")
            assert await front.process.wait() == 0
            third = await generate(client, "ROMEO:", 12)
            assert hops_of(third) == [("whole", 0, 12)]

            assert await swarm.stop(successor) == 0
            fourth = await generate(client, "ROMEO:", 12)
            assert hops_of(fourth) == [("whole", 0, 12)]
    assert [one.token_ids for one in (first, second, third, fourth)] == [expected] * 4


async def test_leave_without_a_peer_is_one_sentence(tmp_path: object) -> None:
    ended = await run_program("molink.peer", "leave", "--state-dir", str(tmp_path))
    assert ended.status == 1
    assert len(ended.err.splitlines()) == 1
    assert "no peer" in ended.err.lower()
