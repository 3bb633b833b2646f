"""A PostgreSQL server of its own for a test: Debian's, on a free port of loopback, as another user than root."""

import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

STARTS_WITHIN_S = 120.0
PLACES = "/usr/lib/postgresql"
NEEDED = "PostgreSQL's server is missing: apt-get install -y postgresql"


def server_programs() -> Path:
    """The folder of the newest `initdb` and `postgres` there are; a test fails where there are none."""
    found = sorted(Path(PLACES).glob("*/bin/initdb"), key=lambda path: float(path.parts[-3]))
    on_path = shutil.which("initdb")
    if not found and on_path is None:
        raise AssertionError(NEEDED)
    return (found[-1] if found else Path(str(on_path))).parent


@contextmanager
def postgresql_server() -> Iterator[str]:
    """The URL of a database, in a server that ends with the block and leaves nothing."""
    programs = server_programs()
    with tempfile.TemporaryDirectory(prefix="molink-pg-", ignore_cleanup_errors=True) as folder:
        user = _unprivileged_user(Path(folder))
        data = Path(folder) / "data"
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        subprocess.run(
            [programs / "initdb", "-D", data, "-U", "molink", "-A", "trust", "-E", "UTF8", "--no-sync"],
            user=user, check=True, capture_output=True, timeout=STARTS_WITHIN_S, cwd=folder,
        )  # fmt: skip
        with subprocess.Popen(
            [programs / "postgres", "-D", data, "-p", str(port), "-k", folder, "-h", "127.0.0.1", "-F"],
            user=user, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder,
        ) as server:  # fmt: skip
            try:
                _wait_until_ready(programs, port, server)
                yield f"postgresql://molink@127.0.0.1:{port}/postgres"
            finally:
                server.terminate()
                server.wait(STARTS_WITHIN_S)


def fresh_database(server: str) -> str:
    """The URL of a new and empty database in that server."""
    name = f"d{secrets.token_hex(8)}"
    address = urlsplit(server)
    subprocess.run(
        [server_programs() / "createdb", "-h", "127.0.0.1", "-p", str(address.port), "-U", "molink", name],
        check=True, capture_output=True, timeout=STARTS_WITHIN_S,
    )  # fmt: skip
    return address._replace(path=f"/{name}").geturl()


def _unprivileged_user(folder: Path) -> str | None:
    """PostgreSQL refuses to run as root: then it is the user that its package has made."""
    if os.name == "nt" or os.geteuid() != 0:
        return None
    shutil.chown(folder, "postgres")
    return "postgres"


def _wait_until_ready(programs: Path, port: int, server: "subprocess.Popen[bytes]") -> None:
    ends_s = time.monotonic() + STARTS_WITHIN_S
    asked = [programs / "pg_isready", "-h", "127.0.0.1", "-p", str(port), "-t", "5"]
    while subprocess.run(asked, capture_output=True, check=False, timeout=STARTS_WITHIN_S).returncode != 0:
        assert server.poll() is None, "the server ended"
        assert time.monotonic() < ends_s, "the server did not answer in time"
