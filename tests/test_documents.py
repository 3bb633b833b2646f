"""What the documents say of the code is so."""

import re
import subprocess
import sys
from pathlib import Path

import generate_api
import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
FOLDERS = ("shards", "dht", "routing", "peer", "client", "simnet", "public")


def anchor_of(heading: str) -> str:
    """The anchor that a Markdown page gives to a heading: lower case, hyphens for blanks, no punctuation."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def anchors(document: Path) -> set[str]:
    """The anchors of all headings of a document."""
    return {
        anchor_of(heading)
        for heading in re.findall(r"^#+ (.+)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    }


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)\)", document.read_text(encoding="utf-8"))
    assert [target for target in targets if not (document.parent / target).exists()] == []


def test_sections_that_links_lead_to_exist() -> None:
    lost = [
        (document.name, target, anchor)
        for document in DOCUMENTS
        for target, anchor in re.findall(
            r"\]\((?!https?:)([^)#]*)#([^)]+)\)", document.read_text(encoding="utf-8")
        )
        if anchor not in anchors(document.parent / target if target else document)
    ]
    assert lost == []


def test_sections_of_benchmarks_that_code_and_documents_name_exist() -> None:
    sources = [*DOCUMENTS, *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))]
    named = {
        (page, " ".join(section.split()))
        for path in sources
        for page, section in re.findall(
            r"docs/(benchmarks/\w+|BENCHMARKS)\.md,\s+\"([^\"]+)\"", path.read_text(encoding="utf-8")
        )
    }
    assert named
    assert {
        (page, section)
        for page, section in named
        if anchor_of(section) not in anchors(ROOT / f"docs/{page}.md")
    } == set()


def test_files_that_the_architecture_names_exist() -> None:
    text = (ROOT / "docs/ARCHITECTURE.md").read_text(encoding="utf-8")
    names = set(re.findall(r"`([\w/]+\.py)`", text))
    everywhere = {str(path.relative_to(ROOT)) for path in ROOT.glob("*/**/*.py") if ".venv" not in path.parts}
    assert names
    assert {name for name in names if not any(path.endswith(name) for path in everywhere)} == set()


def test_rooms_that_the_map_of_the_architecture_names_are_those_that_exist() -> None:
    text = (ROOT / "docs/ARCHITECTURE.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)/` \| [^|]* \|([^|]*)\|", text, re.MULTILINE)
    assert {top for top, _ in rows} == set(FOLDERS)
    named = {f"{top}/{room}" for top, rooms in rows for room in re.findall(r"`(\w+)/`", rooms)}
    assert named == {
        f"{top}/{package.parent.name}" for top in FOLDERS for package in (ROOT / top).glob("*/__init__.py")
    }


def test_files_that_contributing_names_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = re.findall(r"`(\w[\w.]*/[\w./]*)`", text)
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_reference_of_the_api_is_what_the_gateway_says_of_itself() -> None:
    assert (ROOT / "docs/API.md").read_text(encoding="utf-8") == generate_api.document()


def test_the_example_of_routing_as_a_library_runs() -> None:
    text = (ROOT / "docs/SIMULATOR.md").read_text(encoding="utf-8")
    example = next(
        code for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "CircuitProblem" in code
    )
    answer = subprocess.run(
        [sys.executable, "-c", example], capture_output=True, text=True, timeout=180, check=False
    )
    assert "tpot_ms=" in answer.stdout, answer.stderr
