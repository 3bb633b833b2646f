"""`molink`: the commands of whoever uses a swarm. Whatever loads slowly is loaded only where it is needed."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from molink import commands
from molink.client.commands import options
from molink.client.commands.config_commands import config_app
from molink.client.text.early_text import early_process
from molink.commands import (
    EXIT_FAILURE,
    EXIT_USAGE,
    CommandFailed,
    example,
    loading_modules,
    run_app,
    start_logging,
    tell,
)
from molink.progress import Progress
from molink.signals import run_loop

if TYPE_CHECKING:
    from molink.client.api.generation import Explanation, Generation
    from molink.client.api.sampling import Sampling
    from molink.client.api.swarm import AsyncSwarm
    from molink.client.text.early_text import EarlyProcess

FORMATION_TIMEOUT_S = 30.0
EXAMPLE_PEER = "/ip4/203.0.113.7/tcp/4001/p2p/12D3KooW..."

app = typer.Typer(
    name="molink",
    help="Generate text with a swarm of peers.",
    epilog=example(f'molink generate "ROMEO:" --initial-peers {EXAMPLE_PEER}'),
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["--help", "-h"]},
)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A generation that a command asks for, and how its text is to be shown."""

    prompt: str
    timeout_s: float
    sampling: "Sampling"
    shown: Literal["stream", "whole", "json"]


app.add_typer(config_app)


@app.callback()
def _common(_version: commands.Version = False) -> None:
    """Generate text with a swarm of peers."""


@app.command(epilog=example(f'molink generate "ROMEO:" --initial-peers {EXAMPLE_PEER} --max-new-tokens 64'))
def generate(
    prompt: options.Prompt,
    model: options.Model = None,
    initial_peers: commands.InitialPeers = None,
    swarm_key: options.KeyFile = None,
    max_new_tokens: options.MaxNewTokens = 128,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    seed: options.Seed = None,
    stop: options.Stop = None,
    stream: options.Stream = True,
    timeout: options.Timeout = FORMATION_TIMEOUT_S,
    activation_codec: options.ActivationCodec = "none",
    as_json: commands.Json = False,
    verbose: commands.Verbose = False,
    debug: commands.Debug = False,
) -> None:
    """Go on from a text.

    Prints the new text only; `molink generate - < FILE` goes on from a file. Where the swarm is: --initial-peers, else
    MOLINK_INITIAL_PEERS, else the configuration file.
    """
    start_logging(verbose=verbose, debug=debug)
    sampling = _sampling(max_new_tokens, temperature, top_k, top_p, seed, stop)
    prompt = _prompt(prompt)
    with Progress() as progress, _explained():
        ask = partial(_swarm, model, initial_peers, swarm_key, activation_codec, progress)
        is_here = model is not None and Path(model).is_dir()  # then a thread tokenizes
        shown: Literal["stream", "whole", "json"] = "json" if as_json else "stream" if stream else "whole"
        run_loop(_generate(ask, progress, _Asked(prompt, timeout, sampling, shown), is_here=is_here))


@app.command(epilog=example('molink chat --system "You are a poet." --temperature 0.8'))
def chat(
    system: options.System = None,
    model: options.Model = None,
    initial_peers: commands.InitialPeers = None,
    swarm_key: options.KeyFile = None,
    max_new_tokens: options.MaxNewTokens = 256,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    seed: options.Seed = None,
    stop: options.Stop = None,
    timeout: options.Timeout = FORMATION_TIMEOUT_S,
    activation_codec: options.ActivationCodec = "none",
    markdown: options.MarkdownShown = True,
    history: options.History = True,
    verbose: commands.Verbose = False,
    debug: commands.Debug = False,
) -> None:
    """Talk with the model.

    Reads a line at a time, from the keyboard or a pipe, and prints the answers. Ctrl-C stops an answer. /bye, the
    end of the input (Ctrl-D; on Windows Ctrl-Z and Enter) or Ctrl-C in place of a question ends the chat. At a terminal
    Alt-Enter begins a new line, answers are shown as Markdown, and behind each stand its circuit and times.
    """
    start_logging(verbose=verbose, debug=debug)
    sampling = _sampling(max_new_tokens, temperature, top_k, top_p, seed, stop)
    with Progress() as progress, _explained():
        from molink.client.commands.conversation import ChatTerminal, converse

        swarm = _swarm(model, initial_peers, swarm_key, activation_codec, progress)
        terminal = ChatTerminal(markdown, _history_file() if history else None)
        if not converse(swarm, progress, system, timeout, terminal, **sampling):
            raise CommandFailed("no question was answered: the lines above say why")


@app.command(epilog=example(f'molink explain "ROMEO:" --initial-peers {EXAMPLE_PEER}'))
def explain(
    prompt: options.Prompt,
    model: options.Model = None,
    initial_peers: commands.InitialPeers = None,
    swarm_key: options.KeyFile = None,
    max_new_tokens: options.MaxNewTokens = 32,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    seed: options.Seed = None,
    timeout: options.Timeout = FORMATION_TIMEOUT_S,
    activation_codec: options.ActivationCodec = "none",
    as_json: commands.Json = False,
    verbose: commands.Verbose = False,
    debug: commands.Debug = False,
) -> None:
    """Show where a token's time goes.

    Generates, and shows for each hop of the circuit what it was predicted to take and what it took.
    """
    start_logging(verbose=verbose, debug=debug)
    sampling = _sampling(max_new_tokens, temperature, top_k, top_p, seed, None)
    prompt = _prompt(prompt)
    with Progress() as progress, _explained():
        swarm = _swarm(model, initial_peers, swarm_key, activation_codec, progress)
        name, explanation = run_loop(_explain(swarm, progress, prompt, timeout, sampling))
    from molink.client.commands.presentation import console, explanation_json, print_explanation, summary

    if as_json:
        _print_json(explanation_json(prompt, name, explanation))
        return
    print_explanation(explanation, console())
    print(summary(explanation.generation))


@app.command(epilog=example("molink demo --peers 2"))
def demo(peers: options.Peers = 4, verbose: commands.Verbose = False, debug: commands.Debug = False) -> None:
    """Show a whole swarm on this machine.

    Starts peers and a gateway, generates text through Python and through HTTP, shows the circuit and the
    time of each hop, and stops everything. Needs no network and no GPU.
    """
    start_logging(verbose=verbose, debug=debug)
    with _explained():
        from molink.client.commands.demo import run_demo

        run_demo(peers)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `molink`."""
    sys.exit(run_app(app, "molink", sys.argv[1:] if arguments is None else arguments))


async def _generate(
    ask: "Callable[[EarlyProcess | None], AsyncSwarm]",
    progress: Progress,
    asked: _Asked,
    *,
    is_here: bool,
) -> None:
    generation: Generation | None = None
    shown = ""
    async with AsyncExitStack() as stack:
        early = None if is_here else await stack.enter_async_context(early_process())
        swarm = await stack.enter_async_context(ask(early))
        from molink.client.commands.presentation import end_line, generation_json, summary, write_text

        try:
            async for piece in swarm.stream_events(asked.prompt, timeout_s=asked.timeout_s, **asked.sampling):
                if asked.shown == "stream" and piece.text:
                    progress.end()
                    write_text(piece.text)
                    shown = piece.text
                generation = piece.generation
        finally:
            progress.end()
            if shown:
                end_line(shown)
        if generation is None:
            raise CommandFailed("the generation ended without its last piece; please report it")
        if asked.shown == "json":
            _print_json(generation_json(asked.prompt, swarm.model.name, generation))
        elif asked.shown == "whole":
            write_text(generation.text)
            end_line(generation.text)
    if sys.stderr.isatty() and asked.shown != "json":
        tell(summary(generation))


async def _explain(
    swarm: "AsyncSwarm", progress: Progress, prompt: str, timeout_s: float, sampling: "Sampling"
) -> tuple[str, "Explanation"]:
    async with swarm:
        explanation = await swarm.explain(prompt, timeout_s=timeout_s, **sampling)
        progress.end()
        return swarm.model.name, explanation


def _swarm(
    model: str | None,
    initial_peers: list[str] | None,
    swarm_key: Path | None,
    activation_codec: str,
    progress: Progress,
    early: "EarlyProcess | None" = None,
) -> "AsyncSwarm":
    with loading_modules():
        from molink.configuration import configured_initial_peers
        from molink.dht.host.lean_libp2p import load_lean_libp2p

    addresses = configured_initial_peers(initial_peers)
    progress.begin("Asking the swarm")
    with loading_modules():
        load_lean_libp2p()
        from molink.client.api.swarm import AsyncSwarm
        from molink.client.text.text_processes import TextProcesses

    swarm = AsyncSwarm(
        model,
        initial_peers=addresses,
        swarm_key=swarm_key,
        activation_codec=activation_codec,
        report=progress.report,
    )
    swarm.text_work = None if early is None else partial(TextProcesses, early=early)
    return swarm


def _history_file() -> Path:
    """Where what was said in chats is kept: this user's alone."""
    from platformdirs import user_state_dir

    return Path(user_state_dir("molink", appauthor=False)) / "chat_history"


def _prompt(given: str) -> str:
    """The prompt; of `-`, what stdin holds. Bytes of a command line that are no text arrive as halves of characters,
    which no tokenizer takes."""
    try:
        prompt = sys.stdin.read() if given == "-" else given
        prompt.encode()
    except (UnicodeEncodeError, UnicodeDecodeError):
        raise CommandFailed(
            "PROMPT is not valid text: it holds bytes that are no characters in this terminal's encoding",
            EXIT_USAGE,
        ) from None
    return prompt


def _sampling(
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int | None,
    stop: list[str] | None,
) -> "Sampling":
    return {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
        "stop": stop,
    }


@contextmanager
def _explained() -> Iterator[None]:
    """Ends the command with one sentence for what a swarm could not do; the caller's own mistake with status 2."""
    try:
        yield
    except Exception as error:
        from molink.client.errors import (  # nobody who succeeds waits for them
            InvalidRequest,
            SwarmError,
            SwarmUnavailable,
        )

        if not isinstance(error, SwarmError):
            raise
        if isinstance(error, SwarmUnavailable) and error.late:
            raise CommandFailed(f"{error}: allow it more seconds with --timeout") from error
        status = EXIT_USAGE if isinstance(error, InvalidRequest) else EXIT_FAILURE
        raise CommandFailed(str(error), status) from error


def _print_json(content: dict[str, object]) -> None:
    print(json.dumps(content, indent=2))
