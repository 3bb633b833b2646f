"""Mutations of a source text: a comparison turned, a wait dropped, a check removed; and a draw of them by a seed."""

import ast
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

TURNED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
WAITS = ("wait", "sleep", "join", "drain", "acquire", "checkpoint")
UNBOUNDED = {"asyncio.timeout": "asyncio.timeout(None)", "trio.fail_after": "trio.CancelScope()"}
"""What takes the place of a deadline."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One changed place of one file."""

    path: str
    kind: str
    line: int
    """Of its first line, from 1."""
    before: str
    after: str
    start: int
    """Offset of `before` in the file's UTF-8 bytes."""

    @property
    def name(self) -> str:
        """Tells it from others, also when lines above it change."""
        return f"{self.path} | {self.kind} | {' '.join(self.before.split())}"

    def applied(self, source: str) -> str:
        encoded, before = source.encode(), self.before.encode()
        assert encoded[self.start : self.start + len(before)] == before
        return (encoded[: self.start] + self.after.encode() + encoded[self.start + len(before) :]).decode()


def mutants_of(path: str, source: str) -> Iterator[Mutant]:
    """Every mutation of a file, in the order of its lines."""
    encoded = source.encode()
    lines = [0]
    for line in encoded.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    found = [
        (node, kind, after)
        for node in _nodes(ast.parse(source))
        for kind, after in _changes(node)
        if isinstance(node, ast.expr | ast.stmt)
    ]
    for node, kind, after in sorted(found, key=lambda one: (one[0].lineno, one[0].col_offset)):
        start = lines[node.lineno - 1] + node.col_offset
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        end = lines[node.end_lineno - 1] + node.end_col_offset
        yield Mutant(path, kind, node.lineno, encoded[start:end].decode(), after, start)


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those within f-strings, whose places Python 3.11 does not know."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.JoinedStr):
            yield from _nodes(child)


def _changes(node: ast.AST) -> Iterator[tuple[str, str]]:
    match node:
        case ast.Compare(left, [operator], [right]):
            turned = ast.Compare(left, [TURNED[type(operator)]()], [right])
            yield "comparison turned", f"({ast.unparse(turned)})"
        case ast.Expr(ast.Await(ast.Call(function))):
            name = ast.unparse(function).rpartition(".")[2]
            if name.startswith(WAITS):
                yield "wait dropped", "pass"
        case ast.Call(function) if (name := ast.unparse(function)) in UNBOUNDED:
            yield "wait dropped", UNBOUNDED[name]
        case ast.Call(function, [awaited, _]) if ast.unparse(function) == "asyncio.wait_for":
            yield "wait dropped", f"asyncio.wait_for({ast.unparse(awaited)}, None)"
        case ast.If(test, [ast.Raise()], []):
            yield "check removed", f"if {ast.unparse(test)}:\n{' ' * (node.col_offset + 4)}pass"


def draw(seed: int, count: int, packages: Mapping[str, Sequence[Mutant]], left_out: set[str]) -> list[Mutant]:
    """Draws as many mutants, equally over packages, and within one over kinds; those that are left out are drawn
    again."""
    source = random.Random(seed)
    names = sorted(packages)
    source.shuffle(names)
    drawn: list[Mutant] = []
    for at in range(count):
        mutants = packages[names[at % len(names)]]
        choice = [one for one in mutants if one not in drawn and one.name not in left_out]
        kind = source.choice(sorted({mutant.kind for mutant in choice}))
        drawn.append(source.choice([mutant for mutant in choice if mutant.kind == kind]))
    return drawn
