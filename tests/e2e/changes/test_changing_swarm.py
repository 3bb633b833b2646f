"""Peers that come and go change the circuit; nothing else has to be started again."""

import pytest
from support.swarms.forked_peers import ForkedSwarm
from support.swarms.live_swarms import BUNDLED, References, bundled_folder, generate, hops_of, run_program

from molink.client.api.swarm import AsyncSwarm
from molink.client.errors import NoCircuit, SwarmUnavailable

pytestmark = [pytest.mark.real, pytest.mark.anyio]


@pytest.mark.portable
async def test_joining_and_leaving_changes_the_circuit_under_a_client(
    anyio_backend: str, references: References
) -> None:
    """One client lives through it all: front and back, back replaced and gone by Ctrl-C, its successor by `leave`."""
    folder = bundled_folder()
    expected = references.greedy(folder, references.ids(folder, "ROMEO:"), 12)
    async with ForkedSwarm() as swarm:
        await swarm.join("front", "--model", BUNDLED, "--layers", "0:6")
        async with AsyncSwarm(BUNDLED, initial_peers=swarm.addresses) as client:
            with pytest.raises(NoCircuit) as caught:
                await client.generate("ROMEO:", max_new_tokens=12, timeout_s=1.0)
            assert [(span.start, span.stop) for span in caught.value.missing_layers] == [(6, 12)]
            assert caught.value.missing_bytes > 0
            assert "[6, 12)" in str(caught.value)
            assert "MB" in str(caught.value)

            back = await swarm.join("back", "--model", BUNDLED, "--layers", "6:12")
            first = await generate(client, "ROMEO:", 12)
            assert hops_of(first) == [("front", 0, 6), ("back", 6, 12)]

            successor = await swarm.join("successor", "--model", BUNDLED, "--layers", "6:12")
            assert await swarm.stop(back) == 0
            second = await generate(client, "ROMEO:", 12)
            assert hops_of(second) == [("front", 0, 6), ("successor", 6, 12)]

            left = await run_program("molink.peer", "leave", "--state-dir", str(successor.state_dir))
            assert (left.status, left.err) == (0, "")
            assert await successor.process.wait() == 0
            # Whether or not its farewell has reached the client: nobody is there in its place.
            with pytest.raises((NoCircuit, SwarmUnavailable)):
                await client.generate("ROMEO:", max_new_tokens=12, timeout_s=1.0)
    assert [one.token_ids for one in (first, second)] == [expected] * 2


@pytest.mark.full
async def test_leave_without_a_peer_is_one_sentence(tmp_path: object) -> None:
    ended = await run_program("molink.peer", "leave", "--state-dir", str(tmp_path))
    assert ended.status == 1
    assert len(ended.err.splitlines()) == 1
    assert "no peer" in ended.err.lower()
