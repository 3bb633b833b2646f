"""What the tests on real peers share: known circuits, what transformers generates, and programs run to their end."""

import asyncio
import os
import random
import socket
import sys
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from support.models.tiny_models import load_reference
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel

from molink.client.api.generation import Generation
from molink.client.api.swarm import AsyncSwarm
from molink.client.local.local_swarm import LocalPeer
from molink.dht.records.records import PeerView
from molink.peer.memory.memory import common_spans
from molink.shards.checkpoint import catalog
from molink.shards.spec import Span

BUNDLED = "molink/tiny-shakespeare"
PROGRAM_TIMEOUT_S = 120.0
FORMATION_TIMEOUT_S = 90.0
GENERATION_TIMEOUT_S = 120.0
CHOSEN_PORTS = (20_000, 32_768)
"""Below those that Linux, macOS and Windows choose of."""


def bundled_folder() -> Path:
    return catalog.resolve(BUNDLED)


@cache
def _model(folder: Path) -> PreTrainedModel:
    return load_reference(folder)


class References:
    """Greedy float32 tokens as transformers generates them; each is computed once."""

    def __init__(self) -> None:
        self._known: dict[tuple[Path, tuple[int, ...], int, float], tuple[int, ...]] = {}

    def ids(self, folder: Path, text: str) -> tuple[int, ...]:
        return tuple(AutoTokenizer.from_pretrained(folder, local_files_only=True).encode(text))

    def chat_ids(self, folder: Path, messages: list[dict[str, str]]) -> tuple[int, ...]:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        return tuple(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))

    def text(self, folder: Path, token_ids: Sequence[int]) -> str:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        return str(tokenizer.decode(token_ids, skip_special_tokens=True))

    def greedy(
        self, folder: Path, prompt: Sequence[int], tokens: int, repetition_penalty: float = 1.0
    ) -> tuple[int, ...]:
        """The new tokens only; ends after the model's own stop token."""
        key = (folder, tuple(prompt), tokens, repetition_penalty)
        if key not in self._known:
            model = _model(folder)
            settings = GenerationConfig(
                do_sample=False,
                max_new_tokens=tokens,
                eos_token_id=model.generation_config.eos_token_id,
                pad_token_id=0,
                repetition_penalty=repetition_penalty,
            )
            ids = torch.tensor([list(prompt)])
            with torch.inference_mode():
                out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
            self._known[key] = tuple(int(token) for token in out[0, len(prompt) :])
        return self._known[key]

    def logprobs(self, folder: Path, prompt: Sequence[int]) -> torch.Tensor:
        """[tokens - 1, vocabulary]: log-probabilities of what comes behind each token of the prompt but the last."""
        with torch.inference_mode():
            return _model(folder)(torch.tensor([list(prompt)])).logits[0, :-1].double().log_softmax(-1)


def free_ports(count: int) -> tuple[int, ...]:
    """TCP ports of 127.0.0.1 that nobody listens on now, and that no system gives to whoever asks for any port."""
    ports: set[int] = set()
    while len(ports) < count:
        port = random.SystemRandom().randrange(*CHOSEN_PORTS)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports.add(port)
    return tuple(ports)


def rows_at(port: int) -> int:
    """Token rows that the peer with metrics at that port has computed."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PROGRAM_TIMEOUT_S) as response:
        lines = response.read().decode().splitlines()
    (value,) = (line.split()[1] for line in lines if line.startswith("molink_rows_total "))
    return int(float(value))


async def rows_computed(ports: Sequence[int]) -> list[int]:
    """As `rows_at`, of each peer."""
    return list(await asyncio.gather(*(asyncio.to_thread(rows_at, port) for port in ports)))


@contextmanager
def circuit_of(client: AsyncSwarm, spans: Mapping[LocalPeer, tuple[int, int]]) -> Iterator[None]:
    """While it is open, the client knows these peers only, each with the given part of what it holds or may hold.

    So the router has one circuit to find. The peers themselves know nothing of it.
    """
    connection = client.connection
    whole_view = connection.snapshot
    known = {peer.peer_id: Span(*span) for peer, span in spans.items()}

    def narrow_view(model_hash: str | None = None) -> tuple[PeerView, ...]:
        return tuple(
            _narrowed(view, known[view.peer_id]) for view in whole_view(model_hash) if view.peer_id in known
        )

    connection.snapshot = narrow_view  # type: ignore[method-assign]
    try:
        yield
    finally:
        del connection.snapshot  # type: ignore[method-assign]


def _narrowed(view: PeerView, span: Span) -> PeerView:
    return replace(
        view,
        facts=replace(view.facts, span_limit=span),
        state=replace(view.state, spans=common_spans(view.state.spans, span)),
    )


def hops_of(generation: Generation) -> list[tuple[str, int, int]]:
    """(name, start, stop) of each hop."""
    return [(hop.name, hop.start, hop.stop) for hop in generation.circuit.hops]


def mostly_right(tokens: Sequence[int], wrong_every: int = 3) -> list[int]:
    """A prediction of these tokens of which every so many is wrong, from the second one on: whatever times have a head
    send, of its guesses some are right and some are not."""
    return [one ^ 1 if at % wrong_every == 1 else one for at, one in enumerate(tokens)]


async def generate(
    client: AsyncSwarm, prompt: str | Sequence[int], tokens: int, **options: object
) -> Generation:
    """One generation with a deadline on all of it."""
    async with asyncio.timeout(GENERATION_TIMEOUT_S):
        return await client.generate(
            prompt,
            max_new_tokens=tokens,
            timeout_s=FORMATION_TIMEOUT_S,
            **options,  # type: ignore[arg-type]
        )


async def check_that_it_serves(client: AsyncSwarm, references: References) -> None:
    folder = bundled_folder()
    generation = await generate(client, "ROMEO:", 8)
    assert generation.token_ids == references.greedy(folder, references.ids(folder, "ROMEO:"), 8)


@dataclass(frozen=True, slots=True)
class Ended:
    """A program that has ended."""

    status: int
    out: str
    err: str


async def run_program(module: str, *arguments: str, environment: Mapping[str, str] | None = None) -> Ended:
    """Runs `python -m MODULE ARGUMENTS` to its end. A program that does not end is killed and fails the test."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
    )
    try:
        async with asyncio.timeout(PROGRAM_TIMEOUT_S):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return Ended(process.returncode or 0, out.decode(), err.decode())
