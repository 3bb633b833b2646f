"""Programs of the distribution that tests start: as another user than root, in folders and on ports of their own."""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

STARTS_WITHIN_S = 120.0
_LOOKS_EVERY_S = 0.05


def program(name: str, package: str) -> str:
    """Where a program of the distribution is; a test fails where there is none, saying how to get it."""
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    assert found, f"{name} is missing: apt-get install -y {package}"
    return found


@contextmanager
def folder_of_its_own() -> Iterator[Path]:
    """A folder in which a program that is started as `user()` may write."""
    with tempfile.TemporaryDirectory(prefix="molink-", ignore_cleanup_errors=True) as name:
        owner = user()
        if owner is not None:
            shutil.chown(name, owner)
        yield Path(name)


def user() -> str | None:
    """Whom a program is started as: nobody, where tests run as root."""
    return "nobody" if os.name != "nt" and os.geteuid() == 0 else None


@contextmanager
def started(command: Sequence[str | Path], folder: Path, answers: Callable[[], bool]) -> Iterator[None]:
    """The program while the block lasts, from when it answers."""
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen(command, user=user(), cwd=folder, stdout=log, stderr=log) as process,
    ):
        try:
            ends_s = time.monotonic() + STARTS_WITHIN_S
            while not answers():
                said = (folder / "log").read_text(errors="replace")
                assert process.poll() is None, f"it ended: {said}"
                assert time.monotonic() < ends_s, f"it did not answer in time: {said}"
                time.sleep(_LOOKS_EVERY_S)
            yield
        finally:
            process.terminate()
            process.wait(STARTS_WITHIN_S)


def answers_at(url: str, *, well: bool = False) -> bool:
    """Whether something answers there, whatever it says; or `well`, with a status of success."""
    try:
        answer = httpx.get(url, timeout=STARTS_WITHIN_S)
    except httpx.TransportError:
        return False
    return answer.is_success or not well
