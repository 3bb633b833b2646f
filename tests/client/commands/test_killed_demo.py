"""What a demonstration that was killed has left in the temporary folder goes when the next one begins."""

import asyncio
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from molink.client.local.local_swarm import LocalSwarm

OPEN = """
import asyncio
from molink.client.local.local_swarm import LocalSwarm
async def main():
    async with LocalSwarm() as swarm:
        (swarm.folder / "peer").mkdir()
        print(swarm.folder, flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""


def test_a_swarm_removes_what_killed_ones_left_and_nothing_of_those_that_live(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    others = [
        subprocess.Popen([sys.executable, "-c", OPEN], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    try:
        killed, living = (
            Path(str(process.stdout and process.stdout.readline().strip())) for process in others
        )
        others[0].kill()
        others[0].wait()
        assert killed.is_dir()

        async def open_and_close() -> Path:
            async with LocalSwarm() as swarm:
                assert swarm.folder.is_dir()
                assert not killed.exists()
                return swarm.folder

        own = asyncio.run(open_and_close())
        assert not own.exists()
        assert (living / "peer").is_dir()
        assert sorted(temporary.iterdir()) == [living, living.with_suffix(".lock")]
    finally:
        for process in others:
            process.kill()
            process.communicate()
