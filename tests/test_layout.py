"""The tree is as the packaging says: every folder is listed and typed, imports are light, files stay small."""

import ast
import gc
import importlib
import json
import re
import runpy
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS: dict[str, str] = SETTINGS["tool"]["setuptools"]["package-dir"]
PACKAGES: list[str] = SETTINGS["tool"]["setuptools"]["packages"]
TOP_FOLDERS = {folder.split("/")[0] for folder in FOLDERS.values()}
MOST_LINES = 400
LEAST_LINES = 30
MOST_TEST_LINES = 500
MOST_ATTRIBUTES = 12
MOST_METHODS = 20
SMALL_FOR_A_REASON = {
    "client/gateway/accounts/migrations/env.py": "alembic looks for it by this name",
    "client/gateway/accounts/migrations/versions/v0004_nodes.py": "a revision changes what it has to",
    "client/gateway/accounts/migrations/versions/v0005_kept_responses.py": "a revision changes what it has to",
    "client/gateway/accounts/migrations/versions/v0006_circuit_leases.py": "a revision changes what it has to",
    "dht/errors.py": "everybody may import it, and nothing else with it",
    "peer/scheduling/prompt_order.py": "one rule, with its source",
    "routing/placement/neighbourhood.py": "one rule, with its source",
    "public/lazy_names.py": "one rule that two packages share",
    "public/signals.py": "all programs run their loops by it",
    "public/sizes.py": "one rule that two packages share",
    "shards/backoff.py": "a value that all worlds share",
    "shards/device/garbage.py": "a peer calls it before torch is there",
    "shards/batching/ways.py": "a value that ranks, profiles and engines share",
    "simnet/suggestions.py": "a sentence that all of its rooms say",
}
"""Files below LEAST_LINES, and why each is one."""
TABLES = {
    "Configuration", "PeerFacts", "ModelSpec", "ModelShape", "DiscoveryTiming", "CircuitProblem", "JoiningMachine",
    "ServingRow", "OperationRow", "RedundancyRow", "RedundancyRun", "Row", "ServeRow", "RelayRow", "SwarmRow",
    "SimulatedCircuit", "Accounts", "Job", "Instance", "Generation", "ResponseRequest",
    "SamplingParams", "Sampling", "SamplingRequest", "SessionPlan", "SessionLog", "PeerConfiguration",
    "CostModel", "EndedSession", "ServiceDocument",
}  # fmt: skip
"""Values with as many fields as what they describe has: a message, a request, a row of a table, a model's shape."""
ONE_METHOD_EACH = {"HopCore", "Stepper"}
"""A method for each kind of event, and for each kind of effect."""
LARGE_FOR_A_REASON = {
    "SequenceCache": "a session's length, blocks and states change together in a step, a swap and an export, and"
    " `RankedCache` stands in for all of it",
    "Acceptor": "who proves itself and who is linked share one limiter and one table of guests",
    "Membership": "one lock over the directory, for whoever asks from another thread",
    "Link": "one end over all its connections: suspending, resuming and closing exclude each other",
    "ClientSession": "circuit, moves, standbys and losses of one generation change together in one loop",
    "AsyncSwarm": "what a user may ask of a swarm, each by its name",
    "Links": "dialled, accepted and spare links to one peer take each other's place",
}
"""Classes with more attributes or methods than that, and why each is one: none is added without a reason."""
MOST_FILES = 16
NOT_LOADED = ("torch", "transformers", "grpc", "libp2p", "trio", "fastapi")


@pytest.fixture(scope="module", autouse=True)
def _trees_are_no_garbage() -> Iterator[None]:
    """A million nodes are kept until the last test here has read them."""
    gc.disable()
    yield
    nodes_of.cache_clear()
    classes_of.cache_clear()
    gc.enable()


def sources(folder: Path) -> list[Path]:
    """Its Python files, what protoc wrote left out."""
    return [path for path in folder.rglob("*.py") if not path.stem.endswith("_pb2")]


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def statements_of(node: ast.AST) -> Iterator[ast.AST]:
    """The statements within, those in statements too; expressions, which are most of a tree, are not looked into."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield child
            yield from statements_of(child)


@cache
def classes_of(path: Path) -> tuple[ast.ClassDef, ...]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return tuple(node for node in statements_of(tree) if isinstance(node, ast.ClassDef))


def loaded_by(statement: str, where: Path) -> list[str]:
    """The modules that are loaded after `statement`, in a fresh interpreter."""
    script = f"{statement}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=where, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return [str(name) for name in json.loads(done.stdout)]


def test_every_folder_with_code_is_a_package() -> None:
    with_code = {
        path.parent.relative_to(ROOT).as_posix()
        for top in TOP_FOLDERS
        for path in (ROOT / top).rglob("*.py")
        if ROOT / "shards" / "models" not in path.parents
    }
    assert with_code == set(FOLDERS.values())
    assert set(PACKAGES) == set(FOLDERS)


def test_packages_are_named_after_their_folders() -> None:
    assert FOLDERS["molink"] not in {"molink", "src"}
    for package, folder in FOLDERS.items():
        if package != "molink":
            assert package == "molink." + folder.replace("/", ".")


def test_every_top_folder_of_the_design_that_holds_code_is_packaged() -> None:
    named = {"peer", "dht", "routing", "shards", "client", "simnet"}
    holding = {name for name in named if any((ROOT / name).glob("*.py"))}
    assert holding <= TOP_FOLDERS


@pytest.mark.parametrize("folder", sorted(FOLDERS.values()))
def test_every_package_is_typed_and_has_an_init(folder: str) -> None:
    assert (ROOT / folder / "py.typed").is_file()
    assert (ROOT / folder / "__init__.py").is_file()


def test_test_folders_are_no_packages_and_their_files_have_names_of_their_own() -> None:
    files = list((ROOT / "tests").rglob("*.py"))
    assert not [path for path in files if path.name == "__init__.py"]
    names = [path.name for path in files if path.name not in ("conftest.py", "__main__.py")]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize(
    "module", ["molink", "molink.shards.spec", "molink.routing", "molink.dht.records.records"]
)
def test_what_only_decides_or_describes_loads_nothing_heavy(module: str, tmp_path: Path) -> None:
    loaded = loaded_by(f"import {module}", tmp_path)
    assert module in loaded
    assert [name for name in loaded if name.split(".")[0] in NOT_LOADED] == []


def test_the_public_names_are_there_and_are_what_they_are_called(tmp_path: Path) -> None:
    script = (
        "import molink\n"
        "from molink import AsyncSwarm, SamplingParams, Swarm\n"
        "for name in molink.__all__:\n"
        "    assert getattr(molink, name).__name__ == name, name\n"
        "assert set(molink.__all__) <= set(dir(molink))\n"
        "import molink.routing\n"
        "assert set(molink.routing.__all__) == set(dir(molink.routing))\n"
        "assert issubclass(molink.NoCircuit, molink.SwarmError)\n"
        "SamplingParams(max_new_tokens=1)\n"
    )
    loaded = loaded_by(script, tmp_path)
    assert "molink.client.api.swarm" in loaded


def test_what_is_not_public_is_an_attribute_error() -> None:
    import molink

    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = molink.Nothing  # type: ignore[attr-defined]


def test_no_module_is_loaded_under_its_folders_bare_name() -> None:
    imports = "\n".join(f"import {package}" for package in PACKAGES)
    entry_points = [target.split(":")[0] for target in SETTINGS["project"]["scripts"].values()]
    script = imports + "\n" + "\n".join(f"import {module}" for module in entry_points)
    loaded = loaded_by(script, ROOT)
    assert {name.split(".")[0] for name in loaded} & TOP_FOLDERS == set()
    assert set(PACKAGES) <= set(loaded)


def test_folders_hold_no_more_files_than_can_be_looked_over() -> None:
    files = [path for top in (*TOP_FOLDERS, "tests") for path in sources(ROOT / top)]
    crowded = {
        str(folder.relative_to(ROOT)): count
        for folder, count in Counter(path.parent for path in files).items()
        if count > MOST_FILES
    }
    assert crowded == {}


@pytest.mark.parametrize("folder", sorted(FOLDERS.values()))
def test_every_package_says_what_is_in_it(folder: str) -> None:
    said = ast.get_docstring(ast.parse((ROOT / folder / "__init__.py").read_text(encoding="utf-8")))
    assert said
    assert said.count(".") >= 2


def test_real_peers_are_tested_where_make_looks_for_them() -> None:
    parts = runpy.run_path(str(ROOT / "tests" / "parts"))
    peers = [ROOT / folder for folder in (*parts["PEERS"], *parts["ATTACKED"])]
    marked = [
        path
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"pytest\.mark\.e2e", path.read_text("utf-8"))
    ]
    assert len(marked) > 20
    assert [path for path in marked if not any(folder in path.parents for folder in peers)] == []


def test_files_stay_small_enough_to_read() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for top, most in [*((folder, MOST_LINES) for folder in TOP_FOLDERS), ("tests", MOST_TEST_LINES)]
        for path in sources(ROOT / top)
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > most
    }
    assert long == {}


def test_no_file_is_a_crumb_without_a_reason() -> None:
    small = {
        str(path.relative_to(ROOT))
        for top in TOP_FOLDERS
        for path in sources(ROOT / top)
        if path.name not in ("__init__.py", "__main__.py")
        and len(path.read_text(encoding="utf-8").splitlines()) < LEAST_LINES
    }
    assert small == set(SMALL_FOR_A_REASON)


def targets_of(statement: ast.AST) -> list[ast.expr]:
    """What it assigns to."""
    match statement:
        case ast.Assign():
            return statement.targets
        case ast.AnnAssign() | ast.AugAssign() | ast.For() | ast.AsyncFor():
            return [statement.target]
        case ast.With() | ast.AsyncWith():
            return [item.optional_vars for item in statement.items if item.optional_vars is not None]
        case _:
            return []


def attributes_of(node: ast.ClassDef) -> set[str]:
    """The fields that its body declares, and whatever its methods assign to `self`."""
    declared = {
        one.target.id
        for one in node.body
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
    }
    assigned = {
        one.attr
        for statement in statements_of(node)
        for target in targets_of(statement)
        for one in ast.walk(target)
        if isinstance(one, ast.Attribute)
        and isinstance(one.ctx, ast.Store)
        and isinstance(one.value, ast.Name)
        and one.value.id == "self"
    }
    return declared | assigned


def test_classes_own_little_enough_to_be_understood() -> None:
    large = {
        node.name
        for top in TOP_FOLDERS
        for path in sources(ROOT / top)
        for node in classes_of(path)
        if (
            len(attributes_of(node)) > MOST_ATTRIBUTES
            or sum(isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) for one in node.body)
            > MOST_METHODS
        )
    }
    assert TABLES.isdisjoint(LARGE_FOR_A_REASON)
    assert large == TABLES | ONE_METHOD_EACH | set(LARGE_FOR_A_REASON), (
        "a class that has become small leaves the list"
    )


NAMED_TWICE_IN_PUBLIC = {
    "Hop": "of a problem's circuit it has a machine, of a generation's a peer: users know both by that name",
    "NoCircuit": "a user catches the one among swarm errors, and the other from `plan_circuit`",
}
"""Class names that two public packages have, and why each stays."""


def test_no_class_name_stands_twice() -> None:
    standing = Counter(
        node.name for top in TOP_FOLDERS for path in sources(ROOT / top) for node in classes_of(path)
    )
    assert {name: count for name, count in standing.items() if count > 1} == dict.fromkeys(
        NAMED_TWICE_IN_PUBLIC, 2
    )


def names_of(path: Path) -> set[str]:
    """What a module defines or imports at its top, and what it offers by `__getattr__`: everything then."""
    found: set[str] = set()
    for node in nodes_of(path):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(one.asname or one.name).partition(".")[0] for one in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def lazy_names_of(file: Path) -> list[str]:
    """The public names of a package that are loaded when they are asked for: strings of its `__init__`."""
    if file.name != "__init__.py" or not file.exists():
        return []
    tree = nodes_of(file)
    return [node.value for node in tree if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def test_what_no_test_runs_imports_only_what_there_is() -> None:
    """Benchmarks, and the cases for machines with a GPU."""
    missing: list[str] = []
    for folder in ("bench", "gpu"):
        for path in sources(ROOT / "tests" / folder):
            for node in nodes_of(path):
                if not isinstance(node, ast.ImportFrom) or not str(node.module).startswith("molink."):
                    continue
                place = ROOT.joinpath(*str(node.module).split(".")[1:])
                place = place if place.is_dir() else place.with_suffix(".py")
                place = place if place.exists() else ROOT / "public" / place.name
                file = place / "__init__.py" if place.is_dir() else place
                defined = names_of(file) if file.exists() else set()
                modules = {one.stem for one in place.iterdir()} if place.is_dir() else set()
                missing += [
                    f"{path.name}: {node.module}.{one.name}"
                    for one in node.names
                    if one.name not in defined | modules | set(lazy_names_of(file))
                ]
    assert missing == []


PROGRAMS = [
    path.relative_to(ROOT / "tests").with_suffix("")
    for path in sources(ROOT / "tests" / "support")
    if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("program", PROGRAMS, ids=[path.name for path in PROGRAMS])
def test_what_programs_that_only_long_tests_run_replace_is_there(program: Path) -> None:
    """They name it while they are loaded."""
    assert importlib.import_module(".".join(program.parts)).__doc__
