"""A command of `molink-simnet`: options from its command line, `--set` and a scenario's file; findings to everywhere.

A command is a function of its options. It checks them, which may raise ValueError, and returns what runs.
"""

import inspect
import shlex
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from molink.commands import EXIT_USAGE, CommandFailed, Debug, Json, Verbose, example, start_logging
from molink.simnet.presentation.results import Findings, deliver, output_folder
from molink.simnet.suggestions import did_you_mean

Run = Callable[[Path | None], Findings]
"""Does it; the folder is where its results will be."""
_FIRST = 5
"""Of a command's own options, those that `--help` has first: with what all commands have, ten."""
_COMMON = ("scenario", "settings", "output", "as_json", "help")
_NOT_SETTINGS = {*_COMMON, "verbose", "debug"}


def _read_scenario(context: typer.Context, path: Path | None) -> Path | None:
    """Values that neither the command line nor `--set` has."""
    if path is not None:
        try:
            given = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise typer.BadParameter(f"{path} cannot be read: {error.strerror or error}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise typer.BadParameter(f"{path} is no TOML: {error}") from error
        context.default_map = {**_by_option(context, given.items()), **(context.default_map or {})}
    return path


def _read_settings(context: typer.Context, texts: list[str] | None) -> list[str] | None:
    """Values that the command line does not have; they go before a scenario's."""
    pairs = []
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals:
            raise typer.BadParameter(f"it must be like rate=0.2, got {text!r}")
        pairs.append((name.strip(), value.strip()))
    context.default_map = {**(context.default_map or {}), **_by_option(context, pairs)}
    return texts


Scenario = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.toml",
        help="Values of any options, such as rate = 0.2; those given here go before them.",
        callback=_read_scenario,
        is_eager=True,
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Any option, as if it were given; again for others.",
        callback=_read_settings,
        is_eager=True,
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="Write report.html, result.json, and each figure as .csv and .png, there."
    ),
]


class ExperimentCommand(TyperCommand):
    """Its help has what is asked for most first, and the rest below."""

    def format_options(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401 - typer's own, which it does not name
        """Two groups: a command's first options with what all have, and the others."""
        params = self.get_params(ctx)
        own = [one.name for one in params if one.name not in _NOT_SETTINGS]
        first = {*own[:_FIRST], *_COMMON}
        for title, here in (("Options", True), ("More options", False)):
            records = [one.get_help_record(ctx) for one in params if (one.name in first) is here]
            with formatter.section(title):
                formatter.write_dl([record for record in records if record is not None])


def add_experiment(app: typer.Typer, prepare: Callable[..., Run], name: str, shown: str) -> None:
    """Makes a command of a function with options; `shown` is its example."""

    def command(context: typer.Context, **values: Any) -> None:  # noqa: ANN401 - whatever options hold
        common = {
            key: values.pop(key, None)
            for key in ("scenario", "settings", "output", "as_json", "verbose", "debug")
        }
        start_logging(verbose=bool(common["verbose"]), debug=bool(common["debug"]))
        try:
            run = prepare(**values)
        except ValueError as error:
            raise CommandFailed(str(error), EXIT_USAGE) from error
        folder = output_folder(common["output"])
        deliver(run(folder), _command_line(context), as_json=bool(common["as_json"]), folder=folder)

    parameters = [
        _parameter("context", typer.Context, inspect.Parameter.empty),
        *inspect.signature(prepare).parameters.values(),
    ]
    for key, kind, default in (
        ("scenario", Scenario, None), ("settings", Settings, None), ("output", Output, None),
        ("as_json", Json, False), ("verbose", Verbose, False), ("debug", Debug, False),
    ):  # fmt: skip
        parameters.append(_parameter(key, kind, default))
    command.__doc__ = prepare.__doc__
    command.__dict__["__signature__"] = inspect.Signature(parameters)
    app.command(name, cls=ExperimentCommand, epilog=example(shown))(command)


def _parameter(name: str, kind: Any, default: object) -> inspect.Parameter:  # noqa: ANN401 - a type
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=kind)


def _by_option(context: typer.Context, given: Any) -> Mapping[str, object]:  # noqa: ANN401 - pairs
    """Values by the names of parameters; raises BadParameter for what is no option."""
    options = {
        text.removeprefix("--"): one
        for one in context.command.params
        for text in one.opts
        if text.startswith("--") and one.name not in ("scenario", "settings")
    }
    found: dict[str, Any] = {}
    for key, value in given:
        name = str(key).replace("_", "-")
        if name not in options:
            raise typer.BadParameter(f"there is no option --{name}{did_you_mean(name, options)}")
        option: Any = options[name]
        if isinstance(value, Mapping):
            raise typer.BadParameter(f"{name} must be a value or several, not a table")
        several = value if isinstance(value, list) else [value]
        if getattr(option, "multiple", False):
            found[option.name] = [*found.get(option.name, ()), *map(str, several)]
        else:
            found[option.name] = ",".join(map(str, several)) if isinstance(value, list) else value
    return found


def _command_line(context: typer.Context) -> str:
    """What does the same again, with what a scenario's file says in it."""
    words = context.command_path.split()
    for one in context.command.params:
        name, value = str(one.name), context.params.get(str(one.name))
        source = context.get_parameter_source(name)
        if (
            name in ("scenario", "settings", "verbose", "debug")
            or source is None
            or source.name in ("DEFAULT", "ENVIRONMENT")
        ):
            continue
        if isinstance(value, bool):
            words += [one.opts[0]] * value
        else:
            several: Sequence[object] = value if isinstance(value, list | tuple) else (value,)
            words += [word for each in several for word in (one.opts[0], str(each))]
    return shlex.join(words)
