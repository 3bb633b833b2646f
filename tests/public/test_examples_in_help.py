"""Every command and every group of commands has help with an example."""

from collections.abc import Iterator
from typing import Any

import pytest
import typer

from molink.client.commands.cli import app as molink
from molink.client.gateway.cli import _app as gateway
from molink.commands import run_app
from molink.peer.commands.cli import app as peer
from molink.simnet.cli import app as simnet

PROGRAMS = {"molink": molink, "molink-peer": peer, "molink-gateway": gateway, "molink-simnet": simnet}


def paths(group: Any, before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:  # noqa: ANN401 - click's
    yield before
    for name, command in getattr(group, "commands", {}).items():
        yield from paths(command, (*before, name))


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_command_and_group_has_help_with_an_example(
    program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    app = PROGRAMS[program]
    for path in paths(typer.main.get_command(app)):
        assert run_app(app, program, [*path, "--help"]) == 0
        assert "Example:" in capsys.readouterr().out, path
