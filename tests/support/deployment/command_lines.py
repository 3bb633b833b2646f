"""Command lines of this product that files and documents hold, and whether its programs take them."""

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import import_module
from typing import Any
from unittest.mock import patch

import typer
from typer.main import get_command

from molink.commands import spread_initial_peers
from molink.configuration import COMMAND_LINE, SettingsError, check_given
from molink.options import declared_options

PROGRAMS = {
    "molink": ("molink.client.commands.cli", "app"),
    "molink-peer": ("molink.peer.commands.cli", "app"),
    "molink-gateway": ("molink.client.gateway.cli", "_app"),
}
_ASSIGNS = re.compile(r"[A-Z_]+=.*")
_ENDS = frozenset({"|", "||", "&&", ";", "&", ">", ">>", "<", "2>", "#"})


@cache
def _command(program: str) -> Any:  # noqa: ANN401 - typer's own kind of click
    module, name = PROGRAMS[program]
    found: typer.Typer = getattr(import_module(module), name)
    return get_command(found)


def fault_of(words: Sequence[str]) -> str | None:
    """What the program says of a command line that it does not take; None if it does. Nothing is run. What is assigned
    before the program is its environment."""
    at = next(at for at, word in enumerate(words) if not _ASSIGNS.fullmatch(word))
    environment = dict(word.split("=", 1) for word in words[:at])
    with patch.dict(os.environ, environment):
        try:
            _parse(words[at], spread_initial_peers(words[at + 1 :]))
        except SettingsError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 - the parser's own errors; --help and --version end it as well
            kind = type(error).__name__
            return None if kind == "Exit" else f"{kind}: {getattr(error, 'message', '') or error!r}"
    return None


def _parse(program: str, arguments: Sequence[str]) -> None:
    """Raises what the parser or the check of options does."""
    command, parent, rest = _command(program), None, list(arguments)
    while True:
        context = command.make_context(command.name or program, list(rest), parent=parent)
        values = {name: value for name, value in context.params.items() if value not in (None, (), [], False)}
        given = {name: value for name, value in values.items() if name in declared_options()}
        check_given(given, COMMAND_LINE)
        rest = [*getattr(context, "_protected_args", ()), *context.args]
        if not rest or not hasattr(command, "resolve_command"):
            return
        _, command, rest = command.resolve_command(context, rest)
        parent = context


def commands_in(text: str) -> Iterator[list[str]]:
    """The command lines of this product in a shell's text: lines that are continued are one, and what follows in a
    pipe, or is a comment, is none of it."""
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        for part in re.split(r"\$\(|;|&&|\|\||\|| -- ", line.removeprefix("$ ")):
            words = _words(part)
            at = next((at for at, word in enumerate(words) if not _ASSIGNS.fullmatch(word)), None)
            if at is not None and words[at].rpartition("/")[2] in PROGRAMS:
                end = next((end for end, word in enumerate(words) if word in _ENDS), len(words))
                yield [*words[:at], words[at].rpartition("/")[2], *words[at + 1 : end]]


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
