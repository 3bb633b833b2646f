# ruff: noqa: S108 - rows mount these folders in namespaces of their own
"""Two peers and a client generate the same tokens in whatever environment they are started in.

As root on Linux: each row is set up in namespaces and control groups of its own. One that cannot be set up fails.
"""

import json
import os
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.swarms.live_swarms import References, bundled_folder

pytestmark = [pytest.mark.environments, pytest.mark.timeout(1800)]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
GROUPS = Path("/sys/fs/cgroup")
NOBODY = 65534
MIB = 1 << 20
HOUR_S = 3600
PROMPT = "ROMEO:"
NEW_TOKENS = 16
STOPPED_S = 300.0


@dataclass
class World:
    """The processes of a row, and what they have said."""

    process: "subprocess.Popen[str]"
    clock: Path
    errors: Path
    seen: dict[str, Any] = field(default_factory=dict)
    generated: list[dict[str, Any]] = field(default_factory=list)

    def hear(self) -> dict[str, Any]:
        """The next document; fails where there is none."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.errors.read_text(errors="replace")
        document: dict[str, Any] = json.loads(line)
        return document

    def generate(self) -> None:
        """Has the client generate once more."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.generated.append(self.hear())

    def set_clock(self, off_s: int) -> None:
        """Sets by how much the wall clocks of processes with a shim are off."""
        with self.clock.open("r+b") as file:
            file.write(struct.pack("=q", off_s * 10**9))

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """No process of the row runs meanwhile."""
        os.killpg(self.process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(self.process.pid, signal.SIGCONT)

    @property
    def logs(self) -> list[str]:
        """All that peers and gateway have written to stderr."""
        lines: list[str] = self.generated[-1]["logs"]
        return lines


def jump(world: World) -> None:
    for off_s in (HOUR_S, 0):
        world.set_clock(off_s)
        world.generate()
        world.generate()


def suspend(world: World) -> None:
    """The wall clock goes on while all else stands still."""
    with world.stopped():
        world.set_clock(8 * HOUR_S)
    world.generate()


def stop(world: World) -> None:
    with world.stopped():
        time.sleep(STOPPED_S)
    world.generate()


def wait_for_warning(world: World) -> None:
    while not any("clock is 7" in line for line in world.logs):
        world.generate()


@dataclass(frozen=True, kw_only=True)
class Row:
    """One environment."""

    name: str
    setup: tuple[str, ...] = ()
    """Lines of a shell, as root in namespaces of the row's own; $ROW is its folder."""
    launcher: str = ""
    network: bool = False
    """In a network of its own, of which only loopback is up."""
    environment: Mapping[str, str] = field(default_factory=dict)
    shims: tuple[bool, bool] = (False, False)
    """Which peers see the row's wall clock."""
    clock_s: int = 0
    """How wrong it is at first."""
    groups: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Limits by controller, in the files of version 2."""
    folder: str = "state"
    options: tuple[str, ...] = ()
    gateway: bool = False
    holds: Callable[[dict[str, Any]], bool] = lambda _: True
    """Whether the row's processes see what was set up."""
    change: Callable[[World], None] = lambda _: None
    """What happens after the first generation."""
    said: str = ""
    """What lines in the logs may say; any other fails."""


def locale_setup(language: str, charset: str) -> tuple[str, ...]:
    return (f'localedef -i {language} -f {charset} "$ROW/locales/{language}.{charset}"',)


def mounted(folder: str, options: str) -> tuple[str, ...]:
    return (f"mount -t tmpfs -o {options} tmpfs {folder}",)


NO_IPV6 = "echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6"
ONLY_IPV4 = (
    "ip link add outer type veth peer name inner",
    "echo 1 > /proc/sys/net/ipv6/conf/outer/disable_ipv6",
    "ip address add 192.0.2.1/24 dev outer",
    "ip link set outer up",
    "ip link set inner up",
)
WRONG = "clock is 7|others hold words of this peer"

ROWS = [
    Row(name="plain", gateway=True),
    Row(
        name="no IPv6",
        network=True,
        setup=(NO_IPV6,),
        environment={"ENVIRONMENT_NO_IPV6": "1"},
        gateway=True,
        holds=lambda seen: not seen["ipv6"],
    ),
    Row(
        name="IPv6 on loopback only",
        network=True,
        setup=ONLY_IPV4,
        options=("--listen", "0.0.0.0"),  # noqa: S104 - in a network of its own
        gateway=True,
        holds=lambda seen: bool(seen["ipv6"]),
    ),
    Row(
        name="not root",
        launcher=f"setpriv --reuid={NOBODY} --regid={NOBODY} --clear-groups --inh-caps=-all",
        gateway=True,
        holds=lambda seen: seen["uid"] == NOBODY,
    ),
    Row(name="umask 077", setup=("umask 077",), holds=lambda seen: seen["umask"] == 0o077),
    Row(name="C locale", environment={"LC_ALL": "C"}, gateway=True, holds=lambda seen: seen["locale"] == "C"),
    Row(
        name="Turkish locale",
        setup=locale_setup("tr_TR", "UTF-8"),
        environment={"LC_ALL": "tr_TR.UTF-8"},
        gateway=True,
        holds=lambda seen: seen["locale"] == "tr_TR.UTF-8",
    ),
    Row(
        name="Latin-1 locale",
        setup=locale_setup("de_DE", "ISO-8859-1"),
        environment={"LC_ALL": "de_DE.ISO-8859-1"},
        folder="Zustände",
        gateway=True,
        holds=lambda seen: seen["charset"] == "ISO-8859-1",
    ),
    Row(
        name="a folder with spaces and umlauts",
        folder="Zustände von Jörg",
        gateway=True,
        holds=lambda seen: seen["folder"].endswith("Zustände von Jörg"),
    ),
    Row(
        name="tmp of 16 MB",
        setup=mounted("/tmp", "size=16m,mode=1777"),
        gateway=True,
        holds=lambda seen: seen["sizes"]["/tmp"] == 16 * MIB,
    ),
    Row(
        name="shm of 64 MB",
        setup=mounted("/dev/shm", "size=64m,mode=1777"),
        holds=lambda seen: seen["sizes"]["/dev/shm"] == 64 * MIB,
    ),
    Row(
        name="shm read-only",
        setup=mounted("/dev/shm", "ro"),
        holds=lambda seen: bool(seen["read_only"]),
    ),
    Row(
        name="256 descriptors",
        setup=("ulimit -n 256",),
        gateway=True,
        holds=lambda seen: seen["descriptors"] == 256,
    ),
    Row(name="one core", launcher="taskset -c 0", holds=lambda seen: seen["processors"] == 1),
    Row(
        name="half a core",
        groups={"cpu": {"cpu.max": "50000 100000"}},
        holds=lambda seen: seen["processors"] == 1,
    ),
    Row(
        name="a group of 1.5 GB",
        groups={"memory": {"memory.max": str(1500 * MIB)}},
        holds=lambda seen: seen["memory"] == 1500 * MIB,
    ),
    Row(
        name="clock two hours behind",
        shims=(False, True),
        clock_s=-2 * HOUR_S,
        change=wait_for_warning,
        said=WRONG,
    ),
    Row(
        name="clock two hours ahead",
        shims=(False, True),
        clock_s=2 * HOUR_S,
        change=wait_for_warning,
        said=WRONG,
    ),
    Row(name="clock jumps", shims=(True, False), change=jump),
    Row(name="suspended", shims=(True, True), change=suspend),
    Row(name="stopped for five minutes", change=stop),
]


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled shim, readable by everybody."""
    library = tmp_path_factory.mktemp("shim") / "shim.so"
    command = ["gcc", "-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-o", str(library), str(HERE / "shim.c")]
    subprocess.run([*command, "-ldl"], check=True)
    return library


@pytest.fixture(scope="session")
def references() -> References:
    return References()


@pytest.fixture(params=[pytest.param(row, id=row.name) for row in ROWS])
def row(request: pytest.FixtureRequest) -> Row:
    found: Row = request.param
    return found


@pytest.fixture
def world(row: Row, shim: Path) -> Iterator[World]:
    """The row's processes after the first generation."""
    folder = Path(tempfile.mkdtemp(prefix="environment-", dir="/var/tmp"))
    state, clock, errors = folder / row.folder, folder / "clock", folder / "errors"
    (folder / "locales").mkdir()
    shutil.copy(shim, folder / "shim.so")
    clock.write_bytes(struct.pack("=q", row.clock_s * 10**9))
    if "setpriv" in row.launcher:
        os.chown(folder, NOBODY, NOBODY)
    shimmed = {"LD_PRELOAD": str(folder / "shim.so"), "ENVIRONMENT_CLOCK": str(clock)}
    asked = {
        "folder": str(state),
        "peers": [shimmed if shim else {} for shim in row.shims],
        "options": row.options,
        "gateway": row.gateway,
        "prompt": PROMPT,
        "new_tokens": NEW_TOKENS,
    }
    environment = dict(row.environment)
    if "ENVIRONMENT_NO_IPV6" in environment:
        environment["LD_PRELOAD"] = shimmed["LD_PRELOAD"]
    if row.setup and "LC_ALL" in environment:
        environment["LOCPATH"] = str(folder / "locales")
    own = (f"{name}={shlex.quote(value)}" for name, value in environment.items())
    command = (
        "exec",
        "env",
        *own,
        row.launcher,
        shlex.quote(sys.executable),
        shlex.quote(str(HERE / "scenario.py")),
    )
    with control_groups(row.groups) as joins, errors.open("w") as stderr:
        network = ("ip link set lo up",) if row.network else ()
        lines = ["set -e", *joins, *network, *row.setup, *_reachable(row)]
        lines.append(f'{" ".join(command)} "$1"')
        namespaces = ["unshare", "--mount", *(["--net"] if row.network else [])]
        process = subprocess.Popen(
            [*namespaces, "bash", "-c", "\n".join(lines), "bash", json.dumps(asked)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True,
            env=os.environ | {"HOME": str(folder), "ROW": str(folder)}, cwd="/",
        )  # fmt: skip
        try:
            world = World(process, clock, errors)
            world.seen = world.hear()
            world.generated.append(world.hear())
            yield world
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.close()
            process.stdout.read()
            process.stdout.close()
            shutil.rmtree(folder)


def _reachable(row: Row) -> Sequence[str]:
    """Shows Python to a user who is not root: it may lie in root's home. There it stays, and of that home nothing
    else is seen."""
    if "setpriv" not in row.launcher:
        return ()
    lines = []
    for wanted in (Path(sys.base_prefix), ROOT):
        closed = [folder for folder in wanted.parents if not folder.stat().st_mode & 0o001]
        if closed:
            lines += [
                'mkdir -p "$ROW/kept"',
                f'mount --bind {wanted} "$ROW/kept"',
                f"mount -t tmpfs -o mode=755 tmpfs {closed[-1]}",
                f"mkdir -p {wanted}",
                f'mount --move "$ROW/kept" {wanted}',
            ]
    return lines


@contextmanager
def control_groups(limits: Mapping[str, Mapping[str, str]]) -> Iterator[list[str]]:
    """Groups with these limits, of whichever version this machine has; yields the lines that enter them."""
    made: list[Path] = []
    try:
        for controller, files in limits.items():
            made.append(_made_group(controller, files))
        yield [f"echo $$ > {group}/cgroup.procs" for group in made]
    finally:
        for group in made:
            while (group / "cgroup.procs").read_text():  # what was killed is on its way out
                time.sleep(0.1)
            group.rmdir()


def _made_group(controller: str, files: Mapping[str, str]) -> Path:
    unified = controller in _read(GROUPS / "cgroup.controllers").split()
    if unified:
        (GROUPS / "cgroup.subtree_control").write_text(f"+{controller}")
    group = (GROUPS if unified else GROUPS / controller) / f"molink-environment-{os.getpid()}"
    group.mkdir()
    for name, value in files.items():
        older = {
            "cpu.max": dict(zip(("cpu.cfs_quota_us", "cpu.cfs_period_us"), value.split(), strict=False)),
            "memory.max": {"memory.limit_in_bytes": value},
        }
        for file, text in ({name: value} if unified else older[name]).items():
            (group / file).write_text(text)
    return group


def _read(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def test_a_swarm_generates(row: Row, world: World, references: References) -> None:
    assert row.holds(world.seen), world.seen
    row.change(world)
    ids = references.ids(bundled_folder(), PROMPT)
    expected = list(references.greedy(bundled_folder(), ids, NEW_TOKENS))
    text = references.text(bundled_folder(), expected) if row.gateway else ""
    for generated in world.generated:
        assert (generated["tokens"], generated["text"]) == (expected, text)
    strange = [line for line in world.logs if not (row.said and re.search(row.said, line))]
    assert strange == []
    assert not row.said or any(re.search(row.said, line) for line in world.logs)
    assert world.process.stdin is not None
    world.process.stdin.close()
    assert world.process.wait(300) == 0
    assert world.errors.read_text() == ""
