"""What the commands of all programs have in common: options, logging, exit statuses, one line for each mistake.

Whoever asks for `--help` waits for nothing that is imported at the head of this module.
"""

import gc
import io
import logging
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from platformdirs import user_log_dir

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

InitialPeers = Annotated[
    list[str] | None,
    typer.Option("--initial-peers", metavar="MULTIADDR ...", help="Peers of the swarm to ask first."),
]
KeyFile = Annotated[Path | None, typer.Option(metavar="FILE", help="Key file of a private swarm.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens, on stderr.")]
Debug = Annotated[bool, typer.Option("--debug", help="Log everything, and show an error's traceback.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]


class CommandFailed(Exception):
    """A command could not do what it was asked; the message is one sentence for the user."""

    def __init__(self, message: str, status: int = EXIT_FAILURE) -> None:
        super().__init__(message)
        self.status = status


def example(command: str) -> str:
    """The last lines of a command's --help, unwrapped so that they can be copied."""
    return f"\b\nExample:\n  {command}"


def start_logging(*, verbose: bool, debug: bool) -> None:
    """This product's own log goes to stderr: warnings, and more for whoever asks."""
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("molink").setLevel(
        logging.DEBUG if debug else logging.INFO if verbose else logging.WARNING
    )


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


def run_app(app: typer.Typer, program: str, arguments: Sequence[str], *, bare: bool = False) -> int:
    """Runs one command line of `program` and returns its exit status: 0 done, 1 failed, 2 bad arguments.

    A user's mistake gives one line on stderr, never a traceback; an error of ours names the file that has it.
    `bare`: the program does something without any argument; otherwise that is a mistake and shows the help.
    """
    if not arguments and not bare:
        run_app(app, program, ["--help"])
        return EXIT_USAGE
    if isinstance(sys.stdout, io.TextIOWrapper):  # a model may write what this terminal's encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = app(spread_initial_peers(arguments), prog_name=program, standalone_mode=False)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - process boundary
        return _explain(program, error, debug="--debug" in arguments)
    return code if isinstance(code, int) else 0


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
    print(line, file=sys.stderr, flush=True)


def _explain(program: str, error: BaseException, *, debug: bool) -> int:
    from molink.configuration import SettingsError

    usage = getattr(error, "format_message", None)  # an error of the command line's parser
    if isinstance(error, (KeyboardInterrupt, typer.Abort)):
        return EXIT_INTERRUPTED
    if isinstance(error, CommandFailed):
        message, code = str(error), error.status
    elif isinstance(error, SettingsError):
        message, code = str(error), EXIT_USAGE
    elif usage is not None:
        command = getattr(getattr(error, "ctx", None), "command_path", program)
        message, code = f"{usage()} (`{command} --help` lists what there is)", EXIT_USAGE
    else:
        message, code = _unexpected(program, error, debug=debug), EXIT_FAILURE
    tell(f"{program}: {plain(message)}")
    return code


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
