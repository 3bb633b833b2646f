"""Bounds in `pyproject.toml` are those of releases that the lists of `tests/dependencies` name, and so were tried."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
UNTRIED = {"molink", "amdsmi", "triton-windows"}
"""Requirements without bounds: this package's extras, and what needs other hardware or another system."""
PRIVATE = ("transformers", "torch", "bitsandbytes")
"""Packages whose private parts the product uses."""


def stated() -> dict[str, Requirement]:
    """Requirements of a user's installation with all extras, by name."""
    extras = [
        line for name, lines in PROJECT["optional-dependencies"].items() if name != "dev" for line in lines
    ]
    found = {one.name: one for one in map(Requirement, PROJECT["dependencies"] + extras)}
    return {name: one for name, one in found.items() if name not in UNTRIED}


def listed(name: str) -> dict[str, set[Version]]:
    """Versions of each package in a list; several where they differ by Python or system."""
    text = (ROOT / "tests" / "dependencies" / f"{name}.txt").read_text(encoding="utf-8")
    found: dict[str, set[Version]] = {}
    for package, version in re.findall(r"^([\w.-]+)==([^\s;]+)", text, re.MULTILINE):
        found.setdefault(package, set()).add(Version(version))
    return found


@pytest.mark.parametrize("package", sorted(stated()))
def test_a_lower_bound_is_the_release_that_was_tried(package: str) -> None:
    (lowest,) = [Version(one.version) for one in stated()[package].specifier if one.operator in (">=", "==")]
    assert listed("lowest")[package] == {lowest}


@pytest.mark.parametrize("package", sorted(stated()))
def test_the_newest_release_tried_is_within_the_bounds(package: str) -> None:
    assert all(version in stated()[package].specifier for version in listed("newest")[package])


@pytest.mark.parametrize("package", PRIVATE)
def test_where_private_parts_are_used_the_next_minor_is_excluded(package: str) -> None:
    newest = max(listed("newest")[package])
    (upper,) = [one.version for one in stated()[package].specifier if one.operator == "<"]
    assert upper == f"{newest.major}.{newest.minor + 1}"


def test_make_takes_the_pythons_that_are_allowed() -> None:
    (line,) = re.findall(r"^TRIED := (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    tried = line.split()
    oldest, newest = tried[-1], tried[0]
    beyond = f"3.{int(newest.partition('.')[2]) + 1}"
    assert PROJECT["requires-python"] == f">={oldest},<{beyond}"


def test_the_tested_versions_are_within_the_bounds() -> None:
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    versions = {name.lower().replace("_", "-"): version for name, version in pins.items()}
    assert all(versions[name] in one.specifier for name, one in stated().items())
