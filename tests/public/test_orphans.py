"""Processes end with whoever started them, however that one ends."""

import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest
from support.deadline import DEADLINE_S

CHILD = """
import asyncio, os, typer
from molink.commands import run_app
from molink.signals import run_loop
app = typer.Typer()
@app.command()
def wait():
    assert "MOLINK_ENDS_WITH_STDIN" not in os.environ
    async def for_ever():
        try:
            print("waits", flush=True)
            await asyncio.Event().wait()
        finally:
            print("goodbye", flush=True)
    run_loop(for_ever())
raise SystemExit(run_app(app, "test", [], bare=True))
"""
PARENT = f"""
import asyncio, os, signal, sys
from molink.commands import ENDS_WITH_STDIN
if "background" in sys.argv:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
async def main():
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", {CHILD!r}, stdin=asyncio.subprocess.PIPE, env=os.environ | {{ENDS_WITH_STDIN: '1'}})
    print(child.pid, flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.fixture(params=["terminal", "background"])
def parent(request: pytest.FixtureRequest) -> Iterator["subprocess.Popen[str]"]:
    """What shells start in the background ignores SIGINT, and so does all that it starts."""
    command = [sys.executable, "-c", PARENT, request.param]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def test_a_child_says_goodbye_when_its_parent_is_killed(parent: "subprocess.Popen[str]") -> None:
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    assert parent.stdout.readline() == "waits\n"
    parent.kill()
    assert parent.stdout.readline() == "goodbye\n"
    child.wait(DEADLINE_S)


def test_who_is_not_held_does_not_look_at_its_stdin() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from molink.commands import run_app; import typer\n"
         "app = typer.Typer(); app.command()(lambda: print('done'))\n"
         "raise SystemExit(run_app(app, 'test', [], bare=True))"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
