"""`molink config`: what is written down about swarms and this machine's peer, shown and changed."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from molink.commands import CommandFailed, Json, example, option_words, tell

config_app = typer.Typer(
    name="config",
    help="Show and change what is written down.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)


def _names(incomplete: str) -> list[str]:
    from molink.options import declared_options

    return [name for name in declared_options() if name.startswith(incomplete.replace("-", "_"))]


def _values(context: typer.Context, incomplete: str) -> list[str]:
    from molink.options import declared_options

    declared = declared_options().get(str(context.params.get("name")))
    return (
        [] if declared is None else [word for word in option_words(declared) if word.startswith(incomplete)]
    )


Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help="An option of `molink-peer join`: memory, or --memory.", autocompletion=_names
    ),
]


@config_app.callback(invoke_without_command=True, epilog=example("molink config set memory 10GB"))
def show(
    context: typer.Context,
    everything: Annotated[bool, typer.Option("--all", help="Defaults too.")] = False,
    as_json: Json = False,
) -> None:
    """Show and change what is written down.

    Without a command: what holds on this machine for peers, clients and gateways unless a command line says otherwise,
    and who says so, the environment or the file. At a terminal, where there is no file yet, it asks what to write.
    """
    if context.invoked_subcommand is not None:
        return
    from molink.configuration import configuration_path
    from molink.configuration_file import settings_in_force

    path = configuration_path()
    if not path.exists() and not as_json and sys.stdin.isatty() and sys.stdout.isatty():
        _ask()
    settings = settings_in_force()
    shown = {
        name: (value, source)
        for name, (value, source) in settings.items()
        if everything or source != "default"
    }
    if as_json:
        options = {
            name: {"value": _plain(value), "source": source} for name, (value, source) in shown.items()
        }
        print(json.dumps({"file": str(path), "options": options}, indent=2))
        return
    print(f"# {path}{'' if path.exists() else ' (not there yet)'}")
    width = max(map(len, shown), default=0)
    for name, (value, source) in shown.items():
        print(f"{name:<{width}}  {_text(value)}  ({source})")
    if not shown:
        print(
            "Nothing is written down: `molink config set NAME VALUE` does, `molink config --all` shows what there is"
        )


@config_app.command("get", epilog=example("molink config get memory"))
def get(name: Name) -> None:
    """Print one option's value; exit status 1 if it has none."""
    from molink.configuration_file import named_option, settings_in_force

    name = named_option(name)
    value, _ = settings_in_force()[name]
    if value is None:
        raise CommandFailed(f"{name} is not set, and has no default")
    print(_text(value))


@config_app.command("set", epilog=example("molink config set quiet_hours 22:00-07:00"))
def set_option(
    name: Name,
    values: Annotated[
        list[str],
        typer.Argument(
            metavar="VALUE", help="Its value; several, where it takes several.", autocompletion=_values
        ),
    ],
) -> None:
    """Write one option into the file."""
    from molink.configuration import configuration_path
    from molink.configuration_file import named_option, write_option

    name = named_option(name)
    written = write_option(name, values)
    tell(f"{name} = {_text(written)}, in {configuration_path()}")


@config_app.command("unset", epilog=example("molink config unset memory"))
def unset_option(name: Name) -> None:
    """Take one option out of the file."""
    from molink.configuration import configuration_path
    from molink.configuration_file import named_option, remove_option

    name = named_option(name)
    if not remove_option(name):
        raise CommandFailed(f"{name} does not stand in {configuration_path()}")
    tell(f"{name} is taken out of {configuration_path()}")


@config_app.command("path", epilog=example("$EDITOR $(molink config path)"))
def path() -> None:
    """Print where the file is."""
    from molink.configuration import configuration_path

    print(configuration_path())


def _ask() -> None:
    """The two things that most people want to say, once; an empty answer leaves each as it is."""
    from molink.configuration import SettingsError
    from molink.configuration_file import write_option

    for name, question in (
        ("initial_peers", "Address of a peer of your swarm (from its line `Invite others:`)"),
        ("memory", "Most memory that a peer of yours may take, such as 10GB"),
    ):
        while answer := typer.prompt(
            f"{question}; Enter for none", default="", show_default=False, err=True
        ).strip():
            try:
                write_option(name, answer.split())
            except SettingsError as error:
                tell(str(error))
            else:
                break


def _plain(value: object) -> Any:  # noqa: ANN401 - JSON
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Path) else value


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return "-" if value is None else str(value)
