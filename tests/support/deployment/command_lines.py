"""Command lines of this product that files and documents hold, and whether its programs take them."""

import re
import shlex
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import import_module
from typing import Any

import typer
from typer.main import get_command

from molink.commands import spread_initial_peers
from molink.configuration import SettingsError, check_given
from molink.options import declared_options

PROGRAMS = {
    "molink": ("molink.client.commands.cli", "app"),
    "molink-peer": ("molink.peer.commands.cli", "app"),
    "molink-gateway": ("molink.client.gateway.cli", "_app"),
}
_ENDS = frozenset({"|", "||", "&&", ";", "&", ">", ">>", "<", "2>", "#"})


@cache
def _command(program: str) -> Any:  # noqa: ANN401 - typer's own kind of click
    module, name = PROGRAMS[program]
    found: typer.Typer = getattr(import_module(module), name)
    return get_command(found)


def fault_of(words: Sequence[str]) -> str | None:
    """What the program says of a command line that it does not take; None if it does. Nothing is run."""
    program, *arguments = words
    command, parent, rest = _command(program), None, spread_initial_peers(arguments)
    try:
        while True:
            context = command.make_context(command.name or program, list(rest), parent=parent)
            values = {
                name: value for name, value in context.params.items() if value not in (None, (), [], False)
            }
            check_given({n: v for n, v in values.items() if n in declared_options()}, "the command line")
            rest = [*getattr(context, "_protected_args", ()), *context.args]
            if not rest or not hasattr(command, "resolve_command"):
                return None
            _, command, rest = command.resolve_command(context, rest)
            parent = context
    except SettingsError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - the parser's own errors; --help and --version end it as well
        if type(error).__name__ == "Exit":
            return None
        return str(getattr(error, "message", "") or repr(error))


def commands_in(text: str) -> Iterator[list[str]]:
    """The command lines of this product in a shell's text: lines that are continued are one, and what follows in a
    pipe, or is a comment, is none of it."""
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        for part in re.split(r"\$\(|;|&&|\|\||\|| -- ", line.removeprefix("$ ")):
            words = _words(part)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                del words[0]
            at = next((at for at, word in enumerate(words) if word.rpartition("/")[2] in PROGRAMS), None)
            if at is not None and not words[:at]:
                end = next((end for end, word in enumerate(words) if word in _ENDS), len(words))
                yield [words[0].rpartition("/")[2], *words[1:end]]


def _words(part: str) -> list[str]:
    lexer = shlex.shlex(part, posix=True, punctuation_chars="<>|&;")
    lexer.whitespace_split, lexer.commenters = True, "#"
    try:
        return list(lexer)
    except ValueError:  # an apostrophe in prose
        return []


def shell_blocks(markdown: str) -> Iterator[str]:
    """What a document's blocks of shell commands hold; of a transcript the lines behind its prompt."""
    for kind, block in re.findall(
        r"^```(bash|console|powershell)\n(.*?)^```", markdown, re.DOTALL | re.MULTILINE
    ):
        lines = block.splitlines()
        yield "\n".join(line for line in lines if kind != "console" or line.startswith("$ "))
