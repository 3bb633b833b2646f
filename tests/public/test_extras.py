"""What only some commands need is an extra: all else works without it, and they say what to type."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support.deadline import DEADLINE_S

from molink.commands import EXTRAS

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
HOMES = ("client/gateway/", "routing/baselines/highs.py", "simnet/presentation/drawing.py")
ROOMS = ("public", "shards", "dht", "routing", "peer", "client", "simnet")
BARE = f"import sys\nfor name in {sorted(EXTRAS)!r}:\n    sys.modules[name] = None\n"


def bare(program: str, *arguments: str, timeout_s: float = DEADLINE_S) -> "subprocess.CompletedProcess[str]":
    """In a process in which no extra is installed."""
    return subprocess.run(
        [sys.executable, "-c", BARE + program, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def command(module: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return bare(f"from {module} import main\nmain(sys.argv[1:])", *arguments)


def imported(path: Path) -> set[str]:
    """Of a file that names no extra, nothing: it is not parsed."""
    found: set[str] = set()
    text = path.read_text(encoding="utf-8")
    if not any(package in text for package in EXTRAS):
        return found
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found


def test_extras_bring_what_they_are_said_to_and_the_rest_does_not() -> None:
    assert not any(line.startswith(tuple(EXTRAS)) for line in PROJECT["dependencies"])
    for package, extra in EXTRAS.items():
        lines = PROJECT["optional-dependencies"][extra]
        assert package == "starlette" or any(line.startswith(package) for line in lines)


def test_only_their_homes_import_them() -> None:
    users = {
        path.relative_to(ROOT).as_posix()
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
        if imported(path) & EXTRAS.keys()
    }
    assert users
    assert [user for user in users if not user.startswith(HOMES)] == []


@pytest.mark.full
def test_without_extras_peers_clients_and_all_command_lines_are_there() -> None:
    modules = (
        *("molink.client.api.swarm", "molink.client.commands.cli", "molink.client.gateway.cli"),
        *("molink.peer.commands.cli", "molink.peer.daemon.peer", "molink.routing", "molink.simnet.cli"),
    )
    lean = (
        "from molink.dht.host.lean_libp2p import load_lean_libp2p\n"
        "from molink.shards.loading.lean_transformers import load_lean_transformers\n"
        "load_lean_libp2p()\nload_lean_transformers()\n"  # as the command lines do
    )
    done = bare(f"{lean}import importlib\nfor name in {modules!r}:\n    importlib.import_module(name)")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.full
def test_the_simulator_prints_without_extras_and_needs_one_to_draw(tmp_path: Path) -> None:
    printed = command("molink.simnet.cli", "cost", "--table", "3")
    assert (printed.returncode, printed.stderr) == (0, "")
    drawn = command("molink.simnet.cli", "cost", "--output", str(tmp_path / "out"))
    assert drawn.returncode == 1
    assert drawn.stderr == (
        "molink-simnet: --output draws figures: this needs matplotlib, which is not installed: pip install "
        "'molink[simnet]'\n"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("module", "arguments", "package", "extra"),
    [
        ("molink.simnet.cli", ("schedule", "--seeds", "1", "--algorithms", "ilp"), "highspy", "simnet"),
        ("molink.client.gateway.cli", ("--port", "0", "--model", "molink/tiny-shakespeare"), "", "gateway"),
        pytest.param("molink.client.commands.cli", ("demo",), "uvicorn", "gateway", marks=pytest.mark.full),
    ],
)
def test_a_command_whose_extra_is_missing_says_in_one_sentence_what_to_type(
    module: str, arguments: tuple[str, ...], package: str, extra: str
) -> None:
    done = command(module, *arguments)
    assert done.returncode == 1
    assert f"needs {package}" in done.stderr
    assert done.stderr.endswith(f"which is not installed: pip install 'molink[{extra}]'\n")
    assert done.stderr.count("\n") == 1
