"""`AsyncSwarm`: a swarm as a developer uses it from asyncio."""

import operator
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

from molink.client.api.explain import Tracer
from molink.client.api.generation import Explanation, Generation, TextPiece
from molink.client.api.overview import overview
from molink.client.api.pieces import assemble
from molink.client.api.sampling import Sampling, checked_params
from molink.client.circuit.circuit_builder import CircuitBuilder
from molink.client.circuit.connection import SwarmConnection
from molink.client.circuit.session import ClientSession
from molink.client.errors import InvalidRequest, SwarmUnavailable
from molink.client.models.model_resolver import ResolvedModel, load_tokenizer, open_model
from molink.client.text.text_processes import TextProcesses
from molink.client.text.text_work import OpenTextWork, TextWork, TextWorkInThreads
from molink.configuration import (
    SettingsError,
    configured_http_proxy,
    configured_initial_peers,
    read_configuration,
)
from molink.dht.identity.key_file import KeyFileError
from molink.dht.identity.swarm_key import SwarmKey
from molink.dht.records.records import ServedModel
from molink.shards.spec import ACTIVATION_CODECS, ModelSpec, SamplingParams
from molink.shards.text.tokenizer import Tokenizer, TokenizerError

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


class AsyncSwarm:
    """A connection to a swarm, and one model in it. Open between `__aenter__` and `__aexit__`.

    Args:
        model: `molink/tiny-shakespeare`, a local folder in Hugging Face format, the name under which peers serve a
            model, or at least 8 digits of its hash. None: of the models that are served whole, that of the initial
            peers, else the one that is served in most networks.
        initial_peers: multiaddresses of living peers, one is enough. None: MOLINK_INITIAL_PEERS, else the
            configuration file.
        dtype, quantization: only a swarm that serves the model so. None: however it is served.
        swarm_key: key file of a private swarm.
        activation_codec: `float16`, `bfloat16` or `int8` lets activations take fewer bytes on links between peers
            that take part in it; tokens may then differ. `none`: the model's own numbers, nothing is lost.
        report: called with a line of progress while circuits form.
        text_work: what turns text into tokens. None: a thread for a model of this machine, and a process with limits
            of time and memory for one that peers handed out.

    Sampling arguments of the methods are the fields of `SamplingParams`; or give a whole one as `params`. Greedy
    decoding in float32 gives the tokens that transformers gives; in other dtypes, those of some batch composition.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        initial_peers: Sequence[str] | None = None,
        dtype: str | None = None,
        quantization: str | None = None,
        swarm_key: str | os.PathLike[str] | None = None,
        activation_codec: str = "none",
        report: Callable[[str], None] | None = None,
        text_work: OpenTextWork | None = None,
    ) -> None:
        self._asked_model = model
        self._initial_peers = initial_peers
        self._dtype = dtype
        self._quantization = quantization
        self._swarm_key = swarm_key
        self._activation_codec = activation_codec
        self._report = report or _no_report
        self._own_text_work = text_work
        self._stack = AsyncExitStack()
        self._connection: SwarmConnection | None = None
        self._access: ResolvedModel | None = None
        self._circuit_builder: CircuitBuilder | None = None
        self._text: TextWork | None = None
        self._tokenizer: Tokenizer | None = None

    async def __aenter__(self) -> Self:
        """Raises:
        InvalidRequest: there is no such activation codec.
        SwarmUnavailable: no initial peer is configured, or none answers.
        ModelNotFound: neither the swarm nor this machine has the model.
        """
        if self._activation_codec not in ACTIVATION_CODECS:
            raise InvalidRequest(
                f"activation_codec must be one of {', '.join(ACTIVATION_CODECS)}, got {self._activation_codec!r}",
                "activation_codec",
            )
        connection = SwarmConnection(self._addresses(), self._key(), self._http_proxy())
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(connection)
            access = await open_model(
                connection, self._asked_model, self._dtype, self._quantization, report=self._report
            )
            text, tokenizer = await self._open_tokenizer(access, stack)
            self._stack = stack.pop_all()
        self._connection, self._access, self._text, self._tokenizer = connection, access, text, tokenizer
        self._circuit_builder = CircuitBuilder(connection, access.spec)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection = self._access = self._circuit_builder = self._text = self._tokenizer = None
        await self._stack.aclose()

    @property
    def model(self) -> ModelSpec:
        """What is known of the model."""
        return self._open()[1].spec

    @property
    def is_served(self) -> bool:
        """Whether a living peer is known that serves the model. It says nothing of whether all layers are there."""
        connection, access, _ = self._open()
        return bool(connection.snapshot(access.spec.model_hash))

    async def models(self) -> tuple[ServedModel, ...]:
        """The models that peers of this swarm serve now."""
        served = {view.facts.model.model_hash: view.facts.model for view in self._open()[0].snapshot()}
        return tuple(served[model_hash] for model_hash in sorted(served))

    async def generate(
        self,
        prompt: Prompt,
        *,
        params: SamplingParams | None = None,
        timeout_s: float = 30.0,
        **sampling: Unpack[Sampling],
    ) -> Generation:
        """The whole generation.

        Args:
            prompt: text, or token ids.
            timeout_s: how long a circuit may take to form.

        Raises:
            InvalidRequest: the prompt or an argument cannot be served.
            NoCircuit, SwarmUnavailable: no circuit formed within `timeout_s`.
            PeerLost: a peer was lost in mid-generation and no other circuit formed.
        """
        return await _whole(self.stream_events(prompt, params=params, timeout_s=timeout_s, **sampling))

    async def stream(
        self,
        prompt: Prompt,
        *,
        params: SamplingParams | None = None,
        timeout_s: float = 30.0,
        **sampling: Unpack[Sampling],
    ) -> AsyncGenerator[str, None]:
        """The text as soon as it is certain. Arguments and errors as for `generate`."""
        async for text in _texts(self.stream_events(prompt, params=params, timeout_s=timeout_s, **sampling)):
            yield text

    async def chat(
        self,
        messages: Messages,
        *,
        params: SamplingParams | None = None,
        timeout_s: float = 30.0,
        **sampling: Unpack[Sampling],
    ) -> Generation:
        """The model's answer to a chat, in the form of its chat template. Errors as for `generate`."""
        return await _whole(self.stream_chat_events(messages, params=params, timeout_s=timeout_s, **sampling))

    async def stream_chat(
        self,
        messages: Messages,
        *,
        params: SamplingParams | None = None,
        timeout_s: float = 30.0,
        **sampling: Unpack[Sampling],
    ) -> AsyncGenerator[str, None]:
        """As `chat`, the text as soon as it is certain."""
        async for text in _texts(
            self.stream_chat_events(messages, params=params, timeout_s=timeout_s, **sampling)
        ):
            yield text

    def stream_events(
        self,
        prompt: Prompt,
        *,
        params: SamplingParams | None = None,
        timeout_s: float = 30.0,
        **sampling: Unpack[Sampling],
    ) -> AsyncGenerator[TextPiece, None]:
        """As `stream`, with token ids and log-probabilities; the last piece carries the whole generation."""
        self._open()
        return self._events(lambda: self._encoded(prompt), checked_params(params, sampling), timeout_s)

    def stream_chat_events(
        self,
        messages: Messages,
        *,
        params: SamplingParams | None = None,
        timeout_s: float = 30.0,
        **sampling: Unpack[Sampling],
    ) -> AsyncGenerator[TextPiece, None]:
        """As `stream_events`, for a chat."""
        if not all(isinstance(message, Mapping) for message in messages):
            raise InvalidRequest(
                "messages must be mappings such as {'role': 'user', 'content': 'Hi'}", "messages"
            )
        if not messages:
            raise InvalidRequest("a chat needs at least one message", "messages")
        self._open()
        return self._events(lambda: self._encoded_chat(messages), checked_params(params, sampling), timeout_s)

    async def explain(
        self, prompt: Prompt, *, timeout_s: float = 30.0, **sampling: Unpack[Sampling]
    ) -> Explanation:
        """Generates, and says for each hop what it was predicted to take and what it took."""
        access = self._open()[1]
        ids = await self._encoded(prompt)
        params = checked_params(None, {"max_new_tokens": 32, **sampling})
        _check_prompt(ids, access.spec)
        _check_timeout(timeout_s)
        session = self._session(ids, params, trace=True)
        tracer = Tracer()
        session.watch = tracer.see
        generation = await _whole(assemble(session, self._open_text()[1], params, len(ids), timeout_s))
        return tracer.explain(generation, session.log)

    async def snapshot(self) -> dict[str, object]:
        """Peers, spans, links and whether a circuit can be formed now; JSON-ready."""
        connection, access, _ = self._open()
        return overview(connection.snapshot(), access.spec)

    async def _events(
        self, encoded: Callable[[], Awaitable[tuple[int, ...]]], params: SamplingParams, timeout_s: float
    ) -> AsyncGenerator[TextPiece, None]:
        access = self._open()[1]
        _check_timeout(timeout_s)
        ids = await encoded()
        _check_prompt(ids, access.spec)
        session = self._session(ids, params)
        pieces = assemble(session, self._open_text()[1], params, len(ids), timeout_s)
        try:
            async for piece in pieces:
                yield piece
        finally:
            await pieces.aclose()

    async def _encoded(self, prompt: Prompt) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            try:
                return tuple(map(operator.index, prompt))
            except TypeError as error:
                raise InvalidRequest(f"the prompt must be text or token ids: {error}", "prompt") from error
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                "the prompt is not valid text: it holds half of a character", "prompt"
            ) from error
        try:
            return await self._open_text()[0].encode(prompt)
        except TokenizerError as error:
            raise InvalidRequest(f"the prompt cannot be turned into tokens: {error}", "prompt") from error

    async def _encoded_chat(self, messages: Messages) -> tuple[int, ...]:
        try:
            return await self._open_text()[0].encode_chat(messages)
        except (TokenizerError, TypeError) as error:  # the tokenizer's TypeError is half of a character
            raise InvalidRequest(f"the messages cannot be turned into tokens: {error}", "messages") from error

    def _session(self, ids: tuple[int, ...], params: SamplingParams, *, trace: bool = False) -> ClientSession:
        connection, access, circuit_builder = self._open()
        codec, report = self._activation_codec, self._report
        return ClientSession(
            connection,
            circuit_builder,
            access.spec,
            ids,
            params,
            trace=trace,
            activation_codec=codec,
            report=report,
        )

    def _open(self) -> tuple[SwarmConnection, ResolvedModel, CircuitBuilder]:
        if self._connection is None or self._access is None or self._circuit_builder is None:
            raise RuntimeError(
                "the swarm is not open: use it inside `with Swarm(...)` or `async with AsyncSwarm(...)`"
            )
        return self._connection, self._access, self._circuit_builder

    def _open_text(self) -> tuple[TextWork, Tokenizer]:
        if self._text is None or self._tokenizer is None:
            raise RuntimeError("the swarm was closed while a generation began")
        return self._text, self._tokenizer

    async def _open_tokenizer(
        self, access: ResolvedModel, stack: AsyncExitStack
    ) -> tuple[TextWork, Tokenizer]:
        """What makes tokens of text, open on `stack`, and what makes text of tokens."""
        if self._own_text_work is None and not access.from_peers:
            tokenizer = await load_tokenizer(access, None)
            return TextWorkInThreads(tokenizer), tokenizer
        open_text = self._own_text_work or TextProcesses
        text = await stack.enter_async_context(open_text(access.tokenizer_files))
        return text, await load_tokenizer(access, text)

    def _addresses(self) -> tuple[str, ...]:
        try:
            addresses = configured_initial_peers(self._initial_peers)
        except SettingsError as error:
            raise InvalidRequest(str(error), "initial_peers") from error
        if not addresses:
            raise SwarmUnavailable(
                "no swarm is configured: give initial_peers (--initial-peers in commands), set MOLINK_INITIAL_PEERS, "
                "or start one with `molink-peer join --new-swarm`, which prints its address"
            )
        return addresses

    def _http_proxy(self) -> str | None:
        try:
            return configured_http_proxy()
        except SettingsError as error:
            raise InvalidRequest(str(error), "http_proxy") from error

    def _key(self) -> SwarmKey | None:
        path = self._swarm_key or read_configuration().swarm_key
        if path is None:
            return None
        try:
            return SwarmKey.load(Path(path))
        except (KeyFileError, OSError) as error:
            raise InvalidRequest(f"the swarm key cannot be used: {error}", "swarm_key") from error


def _check_prompt(ids: Sequence[int], spec: ModelSpec) -> None:
    if not ids:
        raise InvalidRequest("the prompt is empty: give at least one token", "prompt")
    if len(ids) >= spec.context_length:
        raise InvalidRequest(
            f"the prompt has {len(ids)} tokens, and {spec.name} takes {spec.context_length - 1} at most: shorten it",
            "prompt",
        )
    if min(ids) < 0 or max(ids) >= spec.vocabulary_size:
        raise InvalidRequest(f"token ids must be in [0, {spec.vocabulary_size})", "prompt")


def _check_timeout(timeout_s: float) -> None:
    if not timeout_s >= 0:
        raise InvalidRequest(f"timeout_s must be 0 or more, got {timeout_s}", "timeout_s")


async def _whole(pieces: AsyncIterator[TextPiece]) -> Generation:
    async for piece in pieces:
        if piece.generation is not None:
            return piece.generation
    raise RuntimeError("a generation ended without its last piece")


async def _texts(pieces: AsyncGenerator[TextPiece, None]) -> AsyncGenerator[str, None]:
    try:
        async for piece in pieces:
            if piece.text:
                yield piece.text
    finally:
        await pieces.aclose()


def _no_report(_: str) -> None:
    """Nobody wants to know."""
