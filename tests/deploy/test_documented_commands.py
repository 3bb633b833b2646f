"""Every command line of this product that a document shows is one that its program takes."""

from pathlib import Path

import pytest
from support.deployment.command_lines import commands_in, fault_of, shell_blocks

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
SHOWN = [
    (path.name, words)
    for path in DOCUMENTS
    for block in shell_blocks(path.read_text("utf-8"))
    for words in commands_in(block)
]


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that documents name, where the commands look for them."""
    monkeypatch.chdir(tmp_path)
    for name in ("friends.key", "FILE"):
        (tmp_path / name).touch()


def test_documents_show_commands() -> None:
    assert len(SHOWN) >= 50
    assert {name for name, _ in SHOWN} >= {
        "README.md",
        "QUICKSTART.md",
        "OPERATIONS.md",
        "GATEWAY.md",
        "USING.md",
    }


@pytest.mark.parametrize(
    ("document", "words"), SHOWN, ids=lambda value: value if isinstance(value, str) else None
)
def test_each_command_that_a_document_shows_is_taken(document: str, words: list[str]) -> None:
    assert fault_of(words) is None, (document, words)
