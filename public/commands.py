"""What the commands of all programs have in common: options, logging, exit statuses, one line for each mistake.

Whoever asks for `--help` waits for nothing that is imported at the head of this module.
"""

import errno
import gc
import importlib.util
import inspect
import io
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from platformdirs import user_log_dir

from molink.logs import as_logged, log_to_stderr
from molink.options import Declared, declared_options
from molink.safe_import import import_refusal

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
_FULL = frozenset({errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)})
ENDS_WITH_STDIN = "MOLINK_ENDS_WITH_STDIN"
"""Variable of a process that is to end with its parent: its stdin is a pipe, whose other end the parent holds. However
the parent ends, the system closes that."""
LEAVES_WITHIN_S = 10.0
"""A process whose parent is gone may still say goodbye for so long."""
EXTRAS = {
    "aiosqlite": "gateway",
    "alembic": "gateway",
    "asyncpg": "postgresql",
    "fastapi": "gateway",
    "sqlalchemy": "gateway",
    "starlette": "gateway",
    "uvicorn": "gateway",
    "highspy": "simnet",
    "matplotlib": "simnet",
}
"""Packages that only some commands need, and which extra of ours brings them."""


def option(name: str) -> object:
    """The command line's option for a field of `Configuration`. Its value is checked with those of other sources."""
    declared = declared_options()[name]
    shown, bounds, words = declared.option, declared.option.bounds, option_words(declared)
    return typer.Option(
        f"--{name.replace('_', '-')}",
        metavar=shown.metavar or "|".join(declared.choices) or None,
        help=shown.help,
        min=bounds.ge,
        max=bounds.le,
        autocompletion=(lambda incomplete: _beginning(words, incomplete)) if words else None,
    )


def option_words(declared: Declared) -> tuple[str, ...]:
    """The words that an option takes among its values, which a shell may offer."""
    shown = declared.choices or tuple(declared.option.metavar.split("|"))
    return tuple(word for word in shown if word.islower()) if len(shown) > 1 else ()


def _beginning(words: Sequence[str], incomplete: str) -> list[str]:
    return [word for word in words if word.startswith(incomplete)]


InitialPeers = Annotated[list[str] | None, option("initial_peers")]
KeyFile = Annotated[Path | None, option("swarm_key")]
StateFolder = Annotated[Path | None, option("state_dir")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens, on stderr.")]
Debug = Annotated[bool, typer.Option("--debug", help="Log everything, and show an error's traceback.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]


def _print_version(context: typer.Context, asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"{context.find_root().info_name} {version('molink')}")
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True),
]


class CommandFailed(Exception):
    """A command could not do what it was asked; the message is one sentence for the user."""

    def __init__(self, message: str, status: int = EXIT_FAILURE) -> None:
        super().__init__(message)
        self.status = status


def with_logging(command: Callable[..., None]) -> Callable[..., None]:
    """The command with --verbose and --debug after its own options; its log is started before it runs."""

    def run(*, verbose: bool, debug: bool, **options: object) -> None:
        start_logging(verbose=verbose, debug=debug)
        command(**options)

    own = inspect.signature(command, eval_str=True).parameters.values()
    return _shown_as(command, run, [*own, _parameter("verbose", Verbose), _parameter("debug", Debug)])


def with_all_options(command: Callable[[Mapping[str, object]], None]) -> Callable[..., None]:
    """The command with an option for each field of `Configuration`; it gets those that were given, by their names."""

    def run(**options: object) -> None:
        given = {name: value for name, value in options.items() if value not in (None, [])}
        command({name: value for name, value in given.items() if value is not False})

    declared = declared_options().items()
    return _shown_as(
        command, run, [_parameter(name, Annotated[_kind(one), option(name)]) for name, one in declared]
    )


def _kind(declared: Declared) -> Any:  # noqa: ANN401 - an annotation
    """What the command line takes for the option; a choice is text to it, checked with those of other sources."""
    if declared.takes_several:
        return list[str] | None
    if declared.choices:
        return str | None
    return declared.kinds[0] if bool in declared.kinds else declared.kinds[0] | None


def _parameter(name: str, annotation: object) -> inspect.Parameter:
    """Of a flag that is off unless it is given, or of an option that is None."""
    default = False if get_args(annotation)[0] is bool else None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _shown_as(
    command: Callable[..., None], run: Callable[..., None], parameters: Sequence[inspect.Parameter]
) -> Callable[..., None]:
    """`run` under the command's name and description, and with these options."""
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def example(command: str) -> str:
    """The last lines of a command's --help, unwrapped so that they can be copied."""
    return f"\b\nExample:\n  {command}"


def start_logging(*, verbose: bool, debug: bool) -> None:
    """This product's own log goes to stderr: warnings, and more for whoever asks."""
    log_to_stderr(logging.DEBUG if debug else logging.INFO if verbose else logging.WARNING)


@contextmanager
def loading_modules() -> Iterator[None]:
    """No garbage is collected within: what modules make when they are loaded stays, and to walk through it over and
    over takes a fourth of the time that torch, transformers and libp2p need."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()


def plain(text: str) -> str:
    """The text in one line without control sequences: peers choose names and reasons, terminals obey them."""
    return "".join(character if character.isprintable() else "?" for character in " ".join(text.split()))


def missing_extra(package: str) -> str | None:
    """What to type if the package is not installed and one of `EXTRAS` brings it; None for any other."""
    package = package.partition(".")[0]
    if package not in EXTRAS or importlib.util.find_spec(package) is not None:
        return None
    return f"this needs {package}, which is not installed: pip install 'molink[{EXTRAS[package]}]'"


def run_app(app: typer.Typer, program: str, arguments: Sequence[str], *, bare: bool = False) -> int:
    """Runs one command line of `program` and returns its exit status: 0 done, 1 failed, 2 bad arguments.

    A user's mistake gives one line on stderr, never a traceback; an error of ours names the file that has it.
    `bare`: the program does something without any argument; otherwise that is a mistake and shows the help.
    """
    if not arguments and not bare and not _completes(program):
        run_app(app, program, ["--help"])
        return EXIT_USAGE
    if os.environ.pop(ENDS_WITH_STDIN, ""):  # its own children are not told
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # shells have it so in the background
            signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Thread(target=_end_with_stdin, name="parent", daemon=True).start()
    if "--debug" in arguments:  # otherwise links silence it
        os.environ.setdefault("GRPC_VERBOSITY", "INFO")
    os.environ.setdefault(
        "PYDANTIC_DISABLE_PLUGINS", "__all__"
    )  # they are looked for in all installed packages
    if isinstance(sys.stdout, io.TextIOWrapper):  # a model may write what this terminal's encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    too_old = import_refusal(
        "numpy", "use another machine, or `pip install 'numpy<2.4'`, which asks for less"
    )
    if too_old is not None:
        print(f"{program}: {too_old}", file=sys.stderr)
        return EXIT_FAILURE
    try:
        code = app(spread_initial_peers(arguments), prog_name=program, standalone_mode=False)
        sys.stdout.flush()  # what cannot be written is a failure, and told here
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - process boundary
        return _explain(program, error, debug="--debug" in arguments)
    finally:
        _give_up_stdout()
    return code if isinstance(code, int) else 0


def _end_with_stdin() -> None:
    """Reads the descriptor, not `sys.stdin`, whose lock would hold up the interpreter's end."""
    with suppress(OSError):
        while os.read(0, 4096):
            pass
    # As Ctrl-C: a goodbye, and temporary files are removed. A main thread that waits hears only what it is sent itself.
    if sys.platform == "win32":
        signal.raise_signal(signal.SIGINT)
    else:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
    time.sleep(LEAVES_WITHIN_S)
    os._exit(EXIT_FAILURE)


def _completes(program: str) -> bool:
    """Whether a shell asks what the words so far may go on with."""
    return f"_{program}_COMPLETE".replace("-", "_").upper() in os.environ


def _give_up_stdout() -> None:
    """What stdout would not take is not tried again by the interpreter when it ends."""
    try:
        sys.stdout.flush()
    except OSError:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123 - it stays open to the end


def spread_initial_peers(arguments: Sequence[str]) -> list[str]:
    """The same command line with `--initial-peers A B` written as `--initial-peers A --initial-peers B`.

    Only words that begin with a slash, as multiaddresses do, are taken for further peers.
    """
    spread: list[str] = []
    follows = False
    for position, word in enumerate(arguments):
        if follows and word.startswith("/") and arguments[position - 1] != "--initial-peers":
            spread.append("--initial-peers")
        elif not (follows and word.startswith("/")):
            follows = word == "--initial-peers" or word.startswith("--initial-peers=")
        spread.append(word)
    return spread


def tell(line: str) -> None:
    """One line on stderr, flushed."""
    print(as_logged(line), file=sys.stderr, flush=True)


def _explain(program: str, error: BaseException, *, debug: bool) -> int:
    from molink.configuration import SettingsError

    usage = getattr(error, "format_message", None)  # an error of the command line's parser
    if isinstance(error, (KeyboardInterrupt, typer.Abort)):
        return EXIT_INTERRUPTED
    lacking = missing_extra(error.name or "") if isinstance(error, ModuleNotFoundError) else None
    lacking = lacking or _broken(error)
    if lacking is not None:
        message, code = lacking, EXIT_FAILURE
    elif isinstance(error, CommandFailed):
        message, code = str(error), error.status
    elif isinstance(error, SettingsError):
        message, code = str(error), EXIT_USAGE
    elif isinstance(error, BrokenPipeError):
        message, code = "whoever read the output has gone away, so the rest is not written", EXIT_FAILURE
    elif isinstance(error, OSError) and error.errno in _FULL:
        where = f" for {error.filename}" if error.filename else ""
        message, code = f"there is no room left{where} on the disk: make room, and try again", EXIT_FAILURE
    elif usage is not None:
        command = getattr(getattr(error, "ctx", None), "command_path", program)
        message, code = f"{usage()} (`{command} --help` lists what there is)", EXIT_USAGE
    else:
        message, code = _unexpected(program, error, debug=debug), EXIT_FAILURE
    tell(f"{program}: {plain(message)}")
    return code


def _broken(error: BaseException) -> str | None:
    from molink.requirements import broken_library

    return broken_library(error)


def _unexpected(program: str, error: BaseException, *, debug: bool) -> str:
    """What to say of an error of ours; its traceback goes to a file, or to stderr for whoever debugs."""
    what = f"unexpected error: {type(error).__name__}: {error}"
    if debug:
        traceback.print_exception(error)
        return what
    log = Path(user_log_dir("molink", appauthor=False)) / f"{program}-error.log"
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
    except OSError:
        return f"{what}; run it again with --debug to see where"
    return f"{what}; {log} says where: please report it"
