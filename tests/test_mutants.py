"""Mutations are what they are called, leave the rest of a file alone, and are drawn equally."""

import ast
from pathlib import Path

import pytest
from mutations.mutants import Mutant, draw, mutants_of

ROOT = Path(__file__).parents[1]
SOURCE = """
async def serve(peer, ä, timeout_s):
    if ä == "ü" and peer.load < 1:
        raise ValueError("full")
    async with asyncio.timeout(timeout_s):
        await peer.changed.wait()
        done = await asyncio.wait_for(peer.read(), 5.0)
    await peer.close()
    return 0 < done < 9
"""


def changes(kind: str) -> list[tuple[str, str]]:
    return [(one.before, one.after) for one in mutants_of("peer.py", SOURCE) if one.kind == kind]


def test_each_kind_is_found_where_it_stands() -> None:
    assert changes("comparison turned") == [('ä == "ü"', "(ä != 'ü')"), ("peer.load < 1", "(peer.load >= 1)")]
    assert changes("wait dropped") == [
        ("asyncio.timeout(timeout_s)", "asyncio.timeout(None)"),
        ("await peer.changed.wait()", "pass"),
        ("asyncio.wait_for(peer.read(), 5.0)", "asyncio.wait_for(peer.read(), None)"),
    ]
    assert [after for _, after in changes("check removed")] == [
        "if ä == 'ü' and peer.load < 1:\n        pass"
    ]


def test_a_mutant_changes_its_place_alone() -> None:
    for mutant in mutants_of("peer.py", SOURCE):
        mutated = mutant.applied(SOURCE)
        assert mutated == SOURCE.replace(mutant.before, mutant.after, 1)
        ast.parse(mutated)


@pytest.mark.parametrize(
    "path", ["peer/engine/stepping.py", "dht/node/discovery.py", "client/circuit/session.py"]
)
def test_mutants_of_the_product_can_be_parsed(path: str) -> None:
    source = (ROOT / path).read_text(encoding="utf-8")
    mutants = list(mutants_of(path, source))
    original = ast.dump(ast.parse(source))
    assert mutants
    assert all(ast.dump(ast.parse(mutant.applied(source))) != original for mutant in mutants)


def test_a_seed_draws_equally_and_leaves_out_what_is_named() -> None:
    packages = {
        name: [
            Mutant(f"{name}.py", kind, at, f"a < {at}", "", 0) for at in range(9) for kind in ("one", "other")
        ]
        for name in "abc"
    }
    drawn = draw(7, 9, packages, set())
    assert drawn == draw(7, 9, packages, set())
    assert sorted(mutant.path for mutant in drawn) == sorted(["a.py", "b.py", "c.py"] * 3)
    assert len({mutant.name for mutant in drawn}) == 9
    again = draw(7, 9, packages, {drawn[0].name})
    assert drawn[0] not in again
    assert len(again) == 9
