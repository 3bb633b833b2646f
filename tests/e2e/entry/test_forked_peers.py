"""What the tests fork peers from has loaded what a peer needs, and is as lean as the command that it stands for."""

import sys
from pathlib import Path

import pytest
from support.swarms.forked_peers import start_program

pytestmark = [pytest.mark.real, pytest.mark.full, pytest.mark.anyio]

THERE = ("molink.peer.daemon.peer", "transformers.models.llama.modeling_llama")
LEFT_OUT = ("torch._dynamo.utils", "torch.distributed.tensor", "torch._inductor", "accelerate")
PROGRAM = f"""
import sys
print(*(name in sys.modules for name in {THERE + LEFT_OUT}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peers are started where processes cannot be forked")
async def test_a_forked_process_begins_with_what_peers_load_and_without_what_they_leave_out(
    tmp_path: Path,
) -> None:
    program = tmp_path / "what_is_there.py"
    program.write_text(PROGRAM, encoding="utf-8")
    process = await start_program(program, (), tmp_path / "log")
    assert process.stdout is not None
    said = await process.stdout.read()
    await process.wait()
    assert said.decode().split() == ["True"] * len(THERE) + ["False"] * len(LEFT_OUT)
