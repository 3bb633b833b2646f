"""Do the tests fail when the product is broken? `make mutations`, or `python tests/mutations [--seed N] [--count N]`.

A seed draws mutations equally over the top packages. Each is applied to a copy of the last commit, never to the working
tree, and the tests run against it until one fails: first the test files that run the mutated line, those that run the
fewest files of the product first, then the rest of `make test`, then the tests that are marked `full`. A test that also
fails without the mutation does not count. Mutations that change nothing that can be seen are named in `equivalent.json`
with the reason, and drawn again.

Coverage and results are kept in `build/mutations`: an interrupted run goes on where it was.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from pathlib import Path

import coverage

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from mutations.mutants import Mutant, draw, mutants_of

TOPS = ("public", "shards", "dht", "routing", "peer", "client", "simnet")
NOT_RUN_HERE = re.compile(r"_pb2|triton|cuda|migrations")
"""Files that protoc wrote, or that take a GPU."""
WORK = ROOT / "build" / "mutations"
EQUIVALENT = Path(__file__).with_name("equivalent.json")
MOST_EQUIVALENT = 6
PYTEST = (sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider")
NOT_REAL = ("-m", "not real", "-n", "auto")
REAL = ("-m", "real", "-n", "1", "tests/e2e", "tests/attack", "tests/dht/node", "tests/simnet/emulate")
LIMIT_S = 3 * 3600
"""A run of the tests that lasts longer hangs because of the mutation."""
FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)


class Copy:
    """The files of one commit; its tests import its product."""

    def __init__(self, commit: str) -> None:
        self.root = WORK / commit[:12]
        self.data = self.root.with_name(f"{commit[:12]}-covered")
        self.spoilt: set[str] = set()
        """Tests that fail without a mutation."""

    def make(self, commit: str) -> None:
        if (self.root / "library").exists():
            return
        shutil.rmtree(self.root, ignore_errors=True)
        self.root.mkdir(parents=True)
        files = subprocess.check_output(["git", "archive", commit], cwd=ROOT)
        with tarfile.open(fileobj=BytesIO(files)) as archive:
            archive.extractall(self.root, filter="data")
        (self.root / ".venv").symlink_to(ROOT / ".venv")
        package = self.root / "library" / "molink"
        package.mkdir(parents=True)
        for entry in (self.root / "public").iterdir():
            (package / entry.name).symlink_to(entry)
        for top in TOPS[1:]:
            (package / top).symlink_to(self.root / top)

    def pytest(self, *arguments: str) -> tuple[int | None, str]:
        """Runs the tests; returns pytest's status, None where it did not end, and what it printed."""
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join((str(self.root / "library"), str(self.root / "tests"))),
            "PYTHONDONTWRITEBYTECODE": "1",
            "MOLINK_MUTATED": " ".join(TOPS),
        }
        try:
            ended = subprocess.run(
                [*PYTEST, *arguments],
                cwd=self.root, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return None, ""
        return ended.returncode, ended.stdout + ended.stderr

    def covering(self) -> dict[str, dict[int, list[str]]]:
        """Returns for each file of the product the test files that run a line. They are found by one run of all
        tests."""
        if not self.data.exists():
            recorded = self.data.with_name(f"{self.data.name}.new")
            shutil.rmtree(recorded, ignore_errors=True)
            recorded.mkdir(parents=True)
            plugin = ("-p", "mutations.covered_files", f"--covered={recorded}")
            _, said = self.pytest(*NOT_REAL, *plugin, "--timeout=1800")
            print(said[-2000:])
            recorded.rename(self.data)
        found: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
        for file in self.data.iterdir():
            data = coverage.CoverageData(str(file))
            data.read()
            for measured in data.measured_files():
                name = Path(measured).relative_to(self.root).as_posix()
                for line, contexts in data.contexts_by_lineno(measured).items():
                    found[name][line] += [context for context in contexts if context]
        return found


def covering_tests(mutant: Mutant, covering: Mapping[str, Mapping[int, Sequence[str]]]) -> list[str]:
    """Test files that run the mutated line, or its file if none does; those that run the fewest files come first."""
    run_files = Counter(
        test for lines in covering.values() for test in {one for tests in lines.values() for one in tests}
    )
    lines = covering.get(mutant.path, {})
    tests = set(lines.get(mutant.line, ())) or {test for some in lines.values() for test in some}
    return sorted(tests, key=lambda test: (run_files[test], test))


def seen_by(copy: Copy, mutant: Mutant, covered_by: Sequence[str]) -> str:
    """The suite that fails with the mutation: `make test`, `make test-full`, or none."""
    others = [option for test in covered_by for option in ("--ignore", test)]
    usual = ("--randomly-dont-reorganize", "--no-loadscope-reorder", *NOT_REAL, *covered_by)
    stages = [("make test", usual)] if covered_by else []
    stages += [("make test", (*NOT_REAL, *others)), ("make test", REAL)]
    long = ("--full", "--hypothesis-profile=full", "--timeout=900")
    stages += [("make test-full", (*long, *usual))] if covered_by else []
    stages += [("make test-full", (*long, *NOT_REAL, *others)), ("make test-full", (*long, *REAL))]
    file = copy.root / mutant.path
    original, times = file.read_text(encoding="utf-8"), file.stat()
    try:
        for suite, arguments in stages:
            while True:
                file.write_text(mutant.applied(original), encoding="utf-8")
                status, said = copy.pytest("-x", *arguments, *(f"--deselect={test}" for test in copy.spoilt))
                if status in (0, 5):
                    break
                file.write_text(original, encoding="utf-8")
                failed = set(FAILED.findall(said))
                if not failed and status is not None and copy.pytest("--collect-only", *arguments)[0] != 0:
                    raise SystemExit(f"pytest cannot run the tests:\n{said[-2000:]}")
                if failed <= copy.spoilt or copy.pytest(*failed)[0] == 0:
                    return suite
                copy.spoilt |= failed
    finally:
        file.write_text(original, encoding="utf-8")
        os.utime(file, (times.st_atime, times.st_mtime))
    return "none"


def all_mutants(root: Path) -> dict[str, list[Mutant]]:
    """Those of each top package of a tree."""
    return {
        top: [
            mutant
            for path in sorted((root / top).rglob("*.py"))
            if not NOT_RUN_HERE.search(path.relative_to(root).as_posix())
            for mutant in mutants_of(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8"))
        ]
        for top in TOPS
    }


def print_table(rows: Iterable[tuple[Mutant, str]]) -> None:
    rows = list(rows)
    print("\n| seen by | mutation | was | is |\n| --- | --- | --- | --- |")
    for mutant, suite in rows:
        was, now = (" ".join(text.split()) for text in (mutant.before, mutant.after))
        print(f"| {suite} | {mutant.path}:{mutant.line} {mutant.kind} | `{was}` | `{now}` |")
    print(*(f"{suite}: {count}" for suite, count in Counter(suite for _, suite in rows).items()), sep=", ")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, help="what draws the mutations (default: random)")
    parser.add_argument("--count", type=int, default=40, help="mutations to draw (default: 40)")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else int.from_bytes(os.urandom(3))
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()
    print(f"Seed {seed}, commit {commit[:12]}: python tests/mutations --seed {seed} goes on", flush=True)
    copy = Copy(commit)
    copy.make(commit)
    equivalent = json.loads(EQUIVALENT.read_text(encoding="utf-8"))
    if len(equivalent) > MOST_EQUIVALENT:
        print(f"{EQUIVALENT} names more than {MOST_EQUIVALENT} mutations: draw with another seed")
        return 1
    mutants = draw(seed, options.count, all_mutants(copy.root), set(equivalent))
    covering = copy.covering()
    results = WORK / f"{commit[:12]}-{seed}.json"
    done: dict[str, str] = json.loads(results.read_text()) if results.exists() else {}
    for at, mutant in enumerate(mutants, 1):
        if (key := f"{mutant.name} | {mutant.line}") not in done:
            done[key] = seen_by(copy, mutant, covering_tests(mutant, covering))
            results.write_text(json.dumps(done, indent=1))
        print(f"{at}/{len(mutants)} {key}: {done[key]}", flush=True)
    print_table((mutant, done[f"{mutant.name} | {mutant.line}"]) for mutant in mutants)
    return 0


if __name__ == "__main__":
    sys.exit(main())
