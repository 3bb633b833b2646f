"""What the documents say of the code is so."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)\)", document.read_text(encoding="utf-8"))
    assert [target for target in targets if not (document.parent / target).exists()] == []


def test_files_that_the_architecture_names_exist() -> None:
    text = (ROOT / "docs/ARCHITECTURE.md").read_text(encoding="utf-8")
    names = set(re.findall(r"`([\w/]+\.py)`", text))
    everywhere = {str(path.relative_to(ROOT)) for path in ROOT.glob("*/**/*.py") if ".venv" not in path.parts}
    assert names
    assert {name for name in names if not any(path.endswith(name) for path in everywhere)} == set()


def test_the_readmes_example_of_routing_runs() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    example = next(
        code for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "CircuitProblem" in code
    )
    answer = subprocess.run(
        [sys.executable, "-c", example], capture_output=True, text=True, timeout=60, check=False
    )
    assert "tpot_ms=" in answer.stdout, answer.stderr
