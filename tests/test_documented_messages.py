"""Messages that documents explain are those that the programs print."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("shards", "dht", "routing", "peer", "client", "public")
PARTS = re.compile(r"\.\.\.|[\[\](),:;`0-9]")
ASSEMBLED = frozenset({"refused within"})
"""Words that the code puts together of several texts."""


def tables() -> list[tuple[str, str]]:
    """The first cells of both tables' rows, with the document of each."""
    operations = (ROOT / "docs/OPERATIONS.md").read_text("utf-8").partition("\n## Messages\n")[2]
    troubleshooting = (ROOT / "docs/TROUBLESHOOTING.md").read_text("utf-8")
    return [
        (name, cell)
        for name, text in (("OPERATIONS", operations), ("TROUBLESHOOTING", troubleshooting))
        for cell in re.findall(r"^\| ([^|]+) \|", text, re.MULTILINE)
    ]


MESSAGES = sorted(
    {
        (name, message)
        for name, cell in tables()
        for message in re.findall(r"`([^`]+)`", cell)
        if len(message.split()) >= 3 or message.endswith("...")
    }
)


@cache
def said_in_code() -> str:
    """All texts of the code, a line each; what is put into them is left out."""
    said = []
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            if not path.name.endswith("_pb2.py"):
                said += [_text(node) for node in ast.walk(ast.parse(path.read_text("utf-8")))]
    return "\n".join(filter(None, said))


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.JoinedStr):
        return "\0".join(part.value for part in node.values if isinstance(part, ast.Constant))
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def fixed_words(message: str) -> list[str]:
    """The parts of a message that are the same each time that it is printed, those of several words."""
    parts = (" ".join(part.split()) for part in PARTS.split(message))
    return [part for part in parts if len(part.split()) >= 2]


def test_both_tables_explain_messages() -> None:
    assert {name for name, _ in MESSAGES} == {"OPERATIONS", "TROUBLESHOOTING"}
    assert len(MESSAGES) >= 20


@pytest.mark.parametrize(("name", "message"), MESSAGES)
def test_the_words_of_a_message_that_a_document_explains_are_printed_by_the_code(
    name: str, message: str
) -> None:
    del name
    words = fixed_words(message)
    assert words
    assert [part for part in words if part not in said_in_code() and part not in ASSEMBLED] == []


def test_a_message_that_nobody_prints_would_be_noticed() -> None:
    assert fixed_words("nobody ever said, layers [...] are gone with it") == [
        "nobody ever said",
        "are gone with it",
    ]
    assert "are gone with it" not in said_in_code()
