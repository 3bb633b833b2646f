"""An opened swarm: the connection, the model, and what makes tokens of text, together for as long as they are open."""

import logging
import operator
import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from molink.client.api.assembler import assemble
from molink.client.api.generation import TextPiece
from molink.client.api.held_circuits import HeldCircuits
from molink.client.api.overview import SwarmOverview
from molink.client.api.peer_requirements import ANY_PEER, PeerRequirements
from molink.client.api.running_sessions import RunningSessions
from molink.client.api.sampling import Sampling, checked_prediction, checked_speculation
from molink.client.circuit.circuit_builder import CircuitBuilder
from molink.client.circuit.connection import SwarmConnection
from molink.client.circuit.session import ClientSession
from molink.client.circuit.session_request import (
    GUESS_SCOPE,
    SPECULATES,
    SessionRequest,
    Speculation,
    begin_at_once,
    check_session,
)
from molink.client.epochs.shared_prompt import PromptTurn
from molink.client.errors import InvalidRequest, SwarmUnavailable
from molink.client.models.model_resolver import ResolvedModel, load_tokenizer, open_model
from molink.client.text.demanded_calls import CallChoice, DemandedCalls, grammar_of_calls
from molink.client.text.text_processes import TextProcesses
from molink.client.text.text_work import PLAIN_CHAT, ChatOptions, OpenTextWork, TextWork, TextWorkInThreads
from molink.client.text.tool_calls import BARE, ToolCallStream, form_of, types_of
from molink.configuration import (
    SettingsError,
    configured_http_proxy,
    configured_initial_peers,
    heeds_local_network,
    read_configuration,
)
from molink.dht.identity.identity import Identity
from molink.dht.identity.key_file import KeyFileError
from molink.dht.identity.swarm_key import SwarmKey
from molink.dht.node.local_network import find_local_peers
from molink.shards.spec import ACTIVATION_CODECS, DTYPE_BYTES, QUANTIZATIONS, ModelSpec, SamplingParams
from molink.shards.text.tokenizer import Tokenizer, TokenizerError

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]
"""Functions that a model may call: `{"type": "function", "function": {"name", "description", "parameters"}}`."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SwarmOptions:
    """Options of a client: the arguments of `AsyncSwarm`, where they are described."""

    model: str | None
    initial_peers: Sequence[str] | None
    dtype: str | None
    quantization: str | None
    swarm_key: str | os.PathLike[str] | None
    activation_codec: str
    partners: str
    report: Callable[[str], None]
    speculation: str = "auto"


@dataclass(frozen=True, slots=True, eq=False)
class OpenedSwarm:
    """Opened swarm: begins sessions on one model. Open for as long as the stack that `open_swarm` was given."""

    options: SwarmOptions
    connection: SwarmConnection
    access: ResolvedModel
    circuit_builder: CircuitBuilder
    text: TextWork
    tokenizer: Tokenizer
    running: RunningSessions
    overview: SwarmOverview
    held: HeldCircuits
    requirements: PeerRequirements = ANY_PEER

    @property
    def spec(self) -> ModelSpec:
        return self.access.spec

    async def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Returns the prompt's token ids.

        Raises:
            InvalidRequest: it is empty or too long, or no text, or its ids are not the model's.
        """
        return _checked(await self._encoded(prompt), self.spec)

    async def encode_chat(self, messages: Messages, chat: ChatOptions = PLAIN_CHAT) -> tuple[int, ...]:
        """Returns the token ids of a chat, by the model's chat template.

        Raises:
            InvalidRequest: as for `encode`, or the model's template refuses such messages, or it has none: then with
                the code `no_chat_template`.
        """
        try:
            ids = await self.text.encode_chat(messages, chat)
        except (TokenizerError, TypeError) as error:  # the tokenizer's TypeError is half of a character
            raise InvalidRequest(
                f"the messages cannot be turned into tokens: {error}",
                "messages",
                None if self.tokenizer.chat_source else "no_chat_template",
            ) from error
        return _checked(ids, self.spec)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of the ids, special tokens as they are written.

        Raises:
            InvalidRequest: one is none of the model's.
        """
        if any(not 0 <= token_id < self.spec.vocabulary_size for token_id in ids):
            raise InvalidRequest(f"token ids must be in [0, {self.spec.vocabulary_size})", "tokens")
        return self.tokenizer.decode_written(ids)

    async def speculation(self, sampling: Sampling) -> Speculation:
        """Returns what the keyword arguments of a generation say of guesses, or the swarm's own options.

        Raises:
            InvalidRequest: an argument is of another type, out of range, or not the model's.
        """
        wanted = checked_speculation(sampling.get("speculation") or self.options.speculation)
        predicted = checked_prediction(sampling.get("prediction"))
        ids = await self._encoded(predicted, "prediction") if predicted and wanted else ()
        if any(not 0 <= token_id < self.spec.vocabulary_size for token_id in ids):
            raise InvalidRequest(f"token ids must be in [0, {self.spec.vocabulary_size})", "prediction")
        return Speculation(wanted, ids, GUESS_SCOPE.get())

    def session(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        speculation: Speculation = SPECULATES,
        *,
        trace: bool = False,
        trace_context: bytes = b"",
        turn: PromptTurn | None = None,
    ) -> ClientSession:
        """Makes a session that has not begun. It begins where the prompt of its `turn` was computed, else on a circuit
        that is held, if there is one.

        Raises:
            InvalidRequest: the session cannot be described (`describe_session`).
        """
        asked = SessionRequest(
            ids,
            params,
            trace or bool(trace_context) or self.running.are_timed,
            self.options.activation_codec,
            self.options.partners == "auto",
            speculation,
            trace_context,
            None if turn is None else turn.computed_on,
            begin_at_once if turn is None else turn.stand,
        )
        check_session(self.spec, asked)  # what cannot be served takes no circuit
        if asked.begins_on is None:
            asked = replace(asked, begins_on=self.held.take())
        return ClientSession(self.circuit_builder, asked, self.options.report)

    def tool_calls(self, tools: Tools) -> ToolCallStream | None:
        """Makes what finds calls of these tools in an answer; None: there are no tools.

        Raises:
            InvalidRequest: the model's chat template knows no tools.
        """
        if not tools:
            return None
        form = form_of(self.tokenizer.chat_source)
        if form is None:
            raise InvalidRequest(
                f"tools are not supported by {self.spec.name}: its chat template has no place for them",
                "tools",
            )
        return ToolCallStream(form, types_of(tools))

    def demanding_calls(self, params: SamplingParams, choice: CallChoice, tools: Tools) -> SamplingParams:
        """How an answer is drawn that has to call tools, if that is the choice.

        Raises:
            InvalidRequest: they cannot be demanded of this model, or beside another grammar.
        """
        demanded = DemandedCalls.of(choice)
        if demanded is None:
            return params
        if params.grammar is not None:
            raise InvalidRequest("a demanded call is all of the answer: leave out the grammar", "tool_choice")
        template = self.tokenizer.chat_source
        try:
            grammar = grammar_of_calls(
                demanded, tools, form_of(template) or BARE, template, self.tokenizer.token_id
            )
        except ValueError as error:
            raise InvalidRequest(f"tool_choice: {error}", "tool_choice") from error
        return replace(params, grammar=grammar)

    async def pieces(
        self,
        session: ClientSession,
        params: SamplingParams,
        timeout_s: float,
        calls: ToolCallStream | None = None,
    ) -> AsyncGenerator[TextPiece, None]:
        """Yields the session's text as it grows, and the calls that are found in it."""
        with self.running.following(session, self.spec.name):
            async with aclosing(assemble(session, self.tokenizer, params, timeout_s, calls)) as pieces:
                async for piece in pieces:
                    yield piece

    async def _encoded(self, prompt: Prompt, parameter: str = "prompt") -> tuple[int, ...]:
        if not isinstance(prompt, str):
            try:
                return tuple(map(operator.index, prompt))
            except TypeError as error:
                raise InvalidRequest(
                    f"the {parameter} must be text or token ids: {error}", parameter
                ) from error
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"the {parameter} is not valid text: it holds half of a character", parameter
            ) from error
        try:
            return await self.text.encode(prompt)
        except TokenizerError as error:
            raise InvalidRequest(
                f"the {parameter} cannot be turned into tokens: {error}", parameter
            ) from error


async def open_swarm(
    options: SwarmOptions,
    text_work: OpenTextWork | None,
    stack: AsyncExitStack,
    identity: Identity | None = None,
) -> OpenedSwarm:
    """Connects to the swarm and opens the model; both are closed by `stack`. `identity`: as `SwarmConnection`.

    Raises:
        InvalidRequest: an option is none of its choices, or a setting cannot be used.
        SwarmUnavailable: no initial peer is configured, or none answers.
        ModelNotFound: neither the swarm nor this machine has the model.
    """
    _check(options)
    swarm_key = _swarm_key(options.swarm_key)
    addresses = await _addresses(options.initial_peers, private=swarm_key is not None)
    connection = SwarmConnection(addresses, swarm_key, _http_proxy(), identity=identity)
    async with AsyncExitStack() as opening:
        await opening.enter_async_context(connection)
        access = await open_model(
            connection, options.model, options.dtype, options.quantization, report=options.report
        )
        text, tokenizer = await _open_tokenizer(access, text_work, opening)
        stack.push_async_exit(opening.pop_all())
    opened = _opened(options, connection, access, (text, tokenizer), ANY_PEER, RunningSessions())
    stack.callback(opened.held.keep_at_most, 0)
    return opened


async def open_beside(
    opened: OpenedSwarm,
    options: SwarmOptions,
    requirements: PeerRequirements,
    text_work: OpenTextWork | None,
    stack: AsyncExitStack,
) -> OpenedSwarm:
    """Opens another model of the same swarm, or the same one with other `options`, over the same connection, on peers
    that meet the requirements; what belongs to the model is closed by `stack`.

    Raises:
        InvalidRequest: an option is none of its choices.
        SwarmUnavailable: no peer hands out the model's description.
        ModelNotFound: neither the swarm nor this machine has the model.
    """
    _check(options)
    connection = opened.connection
    async with AsyncExitStack() as opening:
        access = await open_model(
            connection, options.model, options.dtype, options.quantization, report=options.report
        )
        text, tokenizer = await _open_tokenizer(access, text_work, opening)
        stack.push_async_exit(opening.pop_all())
    # who watches the swarm over one connection sees all that runs over it
    beside = _opened(options, connection, access, (text, tokenizer), requirements, opened.running)
    stack.callback(beside.held.keep_at_most, 0)
    return beside


def _check(options: SwarmOptions) -> None:
    """Raises InvalidRequest for an option that is none of its choices."""
    for parameter, value, choices in (
        ("activation_codec", options.activation_codec, ACTIVATION_CODECS),
        ("partners", options.partners, ("auto", "off")),
        ("dtype", options.dtype, (None, "auto", *DTYPE_BYTES)),
        ("quantization", options.quantization, (None, *QUANTIZATIONS)),
    ):
        if value not in choices:
            named = ", ".join(one for one in choices if one is not None)
            raise InvalidRequest(f"{parameter} must be one of {named}, got {value!r}", parameter)
    checked_speculation(options.speculation)


def _opened(
    options: SwarmOptions,
    connection: SwarmConnection,
    access: ResolvedModel,
    text: tuple[TextWork, Tokenizer],
    requirements: PeerRequirements,
    running: RunningSessions,
) -> OpenedSwarm:
    builder = CircuitBuilder(connection, access.spec, connection.prefix_key)
    if requirements != ANY_PEER:
        builder.quarantine.is_eligible = lambda view: requirements.met_by(view.facts)
    overview = SwarmOverview(access.spec, connection.snapshot, running, builder.quarantine)
    held = HeldCircuits(builder)
    return OpenedSwarm(options, connection, access, builder, *text, running, overview, held, requirements)


async def _open_tokenizer(
    access: ResolvedModel, text_work: OpenTextWork | None, stack: AsyncExitStack
) -> tuple[TextWork, Tokenizer]:
    """Opens what makes tokens of text on `stack`, and loads what makes text of tokens."""
    if text_work is None and not access.from_peers:
        tokenizer = await load_tokenizer(access, None)
        return TextWorkInThreads(tokenizer), tokenizer
    text = await stack.enter_async_context((text_work or TextProcesses)(access.tokenizer_files))
    return text, await load_tokenizer(access, text)


def _checked(ids: tuple[int, ...], spec: ModelSpec) -> tuple[int, ...]:
    if not ids:
        raise InvalidRequest("the prompt is empty: give at least one token", "prompt")
    if len(ids) >= spec.context_length:
        raise InvalidRequest(
            f"the prompt has {len(ids)} tokens, and {spec.name} takes {spec.context_length - 1} at most: shorten it",
            "prompt",
        )
    if min(ids) < 0 or max(ids) >= spec.vocabulary_size:
        raise InvalidRequest(f"token ids must be in [0, {spec.vocabulary_size})", "prompt")
    return ids


async def _addresses(initial_peers: Sequence[str] | None, *, private: bool) -> tuple[str, ...]:
    """Those given or configured, else peers of the local network whose swarm is as `private` as the client is."""
    try:
        addresses = configured_initial_peers(initial_peers)
        searches = not addresses and heeds_local_network()
    except SettingsError as error:
        raise InvalidRequest(str(error), "initial_peers") from error
    if addresses:
        return addresses
    found = [peer for peer in await find_local_peers() if peer.private == private] if searches else []
    if not found:
        raise SwarmUnavailable(
            "no swarm is configured: name one of its peers with --initial-peers (`initial_peers` in Python) or in "
            "MOLINK_INITIAL_PEERS, or start one with `molink-peer join --new-swarm`, which prints its address"
            + ("; none answered on the local network either" if searches else "")
        )
    addresses = tuple(address for peer in found for address in peer.addresses)
    _log.warning("no swarm is configured: asking the one on the local network, %s", addresses[0])
    return addresses


def _http_proxy() -> str | None:
    try:
        return configured_http_proxy()
    except SettingsError as error:
        raise InvalidRequest(str(error), "http_proxy") from error


def _swarm_key(given: str | os.PathLike[str] | None) -> SwarmKey | None:
    path = given or read_configuration().swarm_key
    if path is None:
        return None
    try:
        return SwarmKey.load(Path(path))
    except (KeyFileError, OSError) as error:
        raise InvalidRequest(f"the swarm key cannot be used: {error}", "swarm_key") from error
