"""The demonstration: a swarm of real processes on this machine, from the first peer to the last token."""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, contextmanager
from itertools import pairwise
from types import FrameType
from typing import TYPE_CHECKING, Final

import httpx

from molink.client.api.generation import Generation
from molink.client.api.swarm import AsyncSwarm
from molink.client.commands.presentation import (
    SHORT_ID,
    console,
    counted,
    end_line,
    print_explanation,
    summary,
    write_text,
)
from molink.client.local.local_gateway import LocalGateway
from molink.client.local.local_swarm import LocalPeer, LocalSwarm
from molink.commands import CommandFailed, missing_extra
from molink.shards.checkpoint import catalog
from molink.signals import run_loop

if TYPE_CHECKING:
    from rich.console import Console

MODEL: Final = "molink/tiny-shakespeare"
LAYERS: Final = 12
PROMPT: Final = "ROMEO:"
QUESTION: Final = "Good morrow, fair Juliet! What news from Verona?"
NEW_TOKENS: Final = 64
FORMATION_TIMEOUT_S: Final = 60.0
HTTP_TIMEOUT_S: Final = 60.0


def run_demo(peers: int) -> None:
    """Shows a swarm of `peers` (1 to 12) processes on stdout, and leaves nothing behind.

    Raises:
        SwarmError, CommandFailed: something did not work; the sentence says what.
    """
    with _undisturbed():
        run_loop(_Demonstration(peers, console()).run())


def cut_evenly(layers: int, parts: int) -> list[tuple[int, int]]:
    """[start, stop) of `parts` spans that cover `layers` in order, their lengths at most one apart."""
    cuts = [layers * part // parts for part in range(parts + 1)]
    return list(pairwise(cuts))


class _Demonstration:
    """Its steps, in order."""

    def __init__(self, peers: int, out: "Console") -> None:
        self._spans = cut_evenly(LAYERS, peers)
        self._out = out
        self._step = 0

    async def run(self) -> None:
        lacking = missing_extra("uvicorn")
        if lacking is not None:
            raise CommandFailed(f"the demonstration ends with a gateway: {lacking}")
        started_s = time.monotonic()
        peers = counted(len(self._spans), "peer")
        self._out.print(f"[bold]MoLink swarm[/bold]: {peers} and a gateway on this machine, with {MODEL}")
        async with LocalSwarm() as local:
            await self._start_peers(local)
            async with AsyncSwarm(MODEL, initial_peers=local.addresses) as swarm:
                generation = await self._generate(swarm)
                await self._compare(generation)
                await self._serve(local)
                await self._explain(swarm)
            self._head(f"Stopping the {peers}")
            with self._busy("they finish what they do, and leave"):
                await asyncio.gather(*(local.stop(peer) for peer in local.peers))
        self._say(f"all processes have ended; the demonstration took {time.monotonic() - started_s:.0f} s")

    async def _start_peers(self, local: LocalSwarm) -> None:
        """The first one founds the swarm, the others join it side by side."""
        share = (
            "each holds a part of the model, so all are needed"
            if len(self._spans) > 1
            else "it holds all layers"
        )
        self._head(f"Starting {counted(len(self._spans), 'peer')}: {share}")
        with self._busy("the first peer loads its layers"):
            peers = [await self._join(local, 0)]
        try:
            with self._busy("the others load theirs"):
                async with asyncio.TaskGroup() as group:
                    joining = [group.create_task(self._join(local, i)) for i in range(1, len(self._spans))]
        except ExceptionGroup as problems:
            raise problems.exceptions[0] from problems
        peers += [task.result() for task in joining]
        self._say(f"another machine would join with `molink-peer join --initial-peers {peers[0].address}`")

    async def _join(self, local: LocalSwarm, index: int) -> LocalPeer:
        started_s = time.monotonic()
        start, stop = self._spans[index]
        options = ("--model", MODEL, "--layers", f"{start}:{stop}", "--device", "cpu", "--dtype", "float32")
        peer = await local.join(f"peer-{index + 1}", *options)
        self._say(
            f"{peer.name} is ready: layers {start}:{stop}, id ...{peer.peer_id[-SHORT_ID:]}, process "
            f"{peer.process.pid}, after {time.monotonic() - started_s:.1f} s"
        )
        return peer

    async def _generate(self, swarm: AsyncSwarm) -> Generation:
        """Through Python, streaming."""
        self._head(f'Generating through Python: AsyncSwarm("{MODEL}").stream_events("{PROMPT}")')
        started = False
        async for piece in swarm.stream_events(
            PROMPT, max_new_tokens=NEW_TOKENS, timeout_s=FORMATION_TIMEOUT_S
        ):
            if not started:
                write_text(PROMPT)
                started = True
            write_text(piece.text)
            if piece.generation is not None:
                end_line(piece.generation.text)
                self._say(summary(piece.generation))
                self._require_all(piece.generation)
                return piece.generation
        raise CommandFailed("the generation ended without its last piece; please report it")

    def _require_all(self, generation: Generation) -> None:
        spans = [(hop.start, hop.stop) for hop in generation.circuit.hops]
        if spans != self._spans:
            raise CommandFailed(
                f"the circuit has the spans {spans} where {self._spans} were served; please report it"
            )

    async def _compare(self, generation: Generation) -> None:
        self._head("Comparing with one process: transformers, float32, the whole model")
        with self._busy("transformers generates the same"):
            expected = await asyncio.to_thread(_reference)
        if generation.token_ids != expected:
            raise CommandFailed(
                f"the swarm gave the tokens {list(generation.token_ids)}, transformers gives {list(expected)}: "
                "please report it"
            )
        self._say(f"all {len(expected)} tokens are the same")

    async def _serve(self, local: LocalSwarm) -> None:
        """Through HTTP, streaming."""
        self._head("Starting a gateway, and asking it over HTTP as any OpenAI client would")
        async with AsyncExitStack() as stack:
            with self._busy("the gateway joins the swarm"):
                gateway = LocalGateway(local.addresses, local.folder / "gateway.log", "--model", MODEL)
                await stack.enter_async_context(gateway)
            self._say(f"POST {gateway.url}/v1/chat/completions")
            self._out.print(f"user: {QUESTION}", markup=False)
            try:
                await _show_chat(gateway.url)
            except CommandFailed as error:
                raise CommandFailed(f"{error}; the last line of its log: {gateway.last_words()}") from error

    async def _explain(self, swarm: AsyncSwarm) -> None:
        self._head("Explaining where the time goes")
        explanation = await swarm.explain(PROMPT, timeout_s=FORMATION_TIMEOUT_S, max_new_tokens=NEW_TOKENS)
        print_explanation(explanation, self._out)
        if not explanation.hops:
            raise CommandFailed("the hops did not say how long they took; please report it")

    def _head(self, line: str) -> None:
        self._step += 1
        self._out.print(f"\n[bold cyan]{self._step}.[/bold cyan] [bold]{line}[/bold]", soft_wrap=True)

    def _say(self, line: str) -> None:
        self._out.print(f"   {line}", style="dim", markup=False, soft_wrap=True)

    @contextmanager
    def _busy(self, line: str) -> Iterator[None]:
        """In a terminal, a line that moves for as long as the work takes."""
        if not self._out.is_terminal:
            yield
            return
        with self._out.status(line):
            yield


def _reference() -> tuple[int, ...]:
    """The new tokens of one process that holds the whole model."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    folder = catalog.resolve(MODEL)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = AutoTokenizer.from_pretrained(folder)(PROMPT, return_tensors="pt")
    tokens = model.generate(**prompt, max_new_tokens=NEW_TOKENS, do_sample=False)[0]
    return tuple(tokens.tolist()[prompt["input_ids"].shape[1] :])


async def _show_chat(url: str) -> None:
    text = ""
    async for piece in _chat(url):
        write_text(piece if text else f"assistant: {piece}")
        text += piece
    end_line(text)
    if not text:
        raise CommandFailed("the gateway gave an empty answer; please report it")


async def _chat(url: str) -> AsyncGenerator[str, None]:
    """The answer's text as the gateway streams it.

    Raises:
        CommandFailed: the answer is no stream, or ends with an error or before its end.
    """
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": NEW_TOKENS,
        "temperature": 0,
        "stream": True,
    }
    try:
        async with (
            httpx.AsyncClient(timeout=HTTP_TIMEOUT_S, trust_env=False) as client,
            client.stream("POST", f"{url}/v1/chat/completions", json=body) as response,
        ):
            if response.status_code != httpx.codes.OK:
                answer = (await response.aread()).decode(errors="replace")
                raise CommandFailed(f"the gateway answered with status {response.status_code}: {answer}")
            async for line in response.aiter_lines():
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    return
                text = _delta(data) if data else ""
                if text:
                    yield text
    except httpx.HTTPError as error:
        raise CommandFailed(f"the gateway did not answer: {error!r}") from error
    raise CommandFailed("the gateway's stream ended before its end; please report it")


def _delta(data: str) -> str:
    """The text of one event of a stream."""
    event = json.loads(data)
    if "error" in event:
        raise CommandFailed(f"the gateway's stream failed: {event['error'].get('message')}")
    return "".join(choice["delta"].get("content") or "" for choice in event["choices"])


@contextmanager
def _undisturbed() -> Iterator[None]:
    """The user's configuration does not change what is shown, and SIGTERM stops everything as Ctrl-C does."""
    before = {name: os.environ.get(name) for name in ("MOLINK_CONFIG", "MOLINK_INITIAL_PEERS")}
    os.environ.update({"MOLINK_CONFIG": os.devnull, "MOLINK_INITIAL_PEERS": ""})
    handler = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _interrupt(_: int, __: FrameType | None) -> None:
    signal.raise_signal(signal.SIGINT)
