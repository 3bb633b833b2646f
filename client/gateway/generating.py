"""Generating for requests: slots are taken, generations run, and their answer goes out whole or as a stream."""

import asyncio
import hashlib
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, Final, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from molink.client.api.generation import Generation, TextPiece
from molink.client.circuit.session_request import GUESS_SCOPE
from molink.client.epochs.shared_prompt import SharedPrompt
from molink.client.errors import SwarmError, SwarmUnavailable
from molink.client.gateway.accounts.admitted import AdmittedRequest, estimated_tokens, tokens_of_bytes
from molink.client.gateway.accounts.errors import QuotaExceeded
from molink.client.gateway.accounts.gatekeeper import Caller, Gatekeeper
from molink.client.gateway.apis.answer import WAITING, Answer
from molink.client.gateway.apis.chat_input import ChatInput
from molink.client.gateway.apis.kept_responses import KeptResponses, continued
from molink.client.gateway.apis.message_answers import MessageAnswer
from molink.client.gateway.apis.messages import MessageRequest
from molink.client.gateway.apis.openai import ChatRequest, CompletionRequest
from molink.client.gateway.apis.openai_answers import ChatAnswer, CompletionAnswer, Echoes
from molink.client.gateway.apis.response_answers import ResponseAnswer
from molink.client.gateway.apis.responses import ResponseRequest
from molink.client.gateway.error_handlers import ApiError, failure_of
from molink.client.gateway.models.served_models import ServedModels
from molink.client.gateway.models.swarm_protocol import FORMATION_TIMEOUT_S, ServingSwarm
from molink.client.gateway.page.swarm_feed import SwarmFeed
from molink.client.gateway.shares import user_of
from molink.client.gateway.slots import GatewayStopping, Slots
from molink.client.gateway.streams import Choices, ClientGone, EventStream, until_gone
from molink.client.gateway.telemetry.metrics import Metrics
from molink.client.gateway.tokenizing import chat_tokens, require_possible, require_possible_prompt
from molink.shards.spec import ModelSpec, SamplingParams

_LENGTHS: Final = ("max_tokens", "max_completion_tokens", "max_output_tokens")
"""What APIs call the most tokens of an answer."""
UNSERVED_S: Final = 3.0
"""For so long it waits where no peer is known that serves the model."""
LOOKS_EVERY_S: Final = 0.5
OPENS_AFTER_S: Final = 5.0
"""A stream of which nothing has come for so long says that it goes on; the first time, that decides that the answer is
a stream and no error with a status of its own."""
SHARED_PROMPT_BYTES: Final = 512
"""Choices of a prompt of so much text, or so many tokens, begin once it was computed; of a shorter one at once."""


Asked = TypeVar("Asked", CompletionRequest, ChatRequest, ResponseRequest, MessageRequest)


class Gateway:
    """The routes' work, and what of it is under way."""

    def __init__(
        self, models: ServedModels, metrics: Metrics, slots: Slots, feed: SwarmFeed, gatekeeper: Gatekeeper
    ) -> None:
        self._models = models
        self._gatekeeper = gatekeeper
        self._feed = feed
        self._metrics = metrics
        self._slots = slots
        self._since = int(time.time())
        self._scope_key = secrets.token_bytes(32)
        """With which users are told apart to peers, without saying who they are."""
        self._running: set[Choices] = set()
        self._responses: KeptResponses | None = None

    def keep_responses(self, kept: KeptResponses) -> None:
        """Has responses kept from now on, unless they say that they are not to be."""
        self._responses = kept

    def stop(self) -> None:
        """Begins nothing more. What runs goes on; what waits for its turn is refused."""
        self._slots.stop()
        self._feed.stop()

    def end(self) -> None:
        """Ends what runs: each answer says that the gateway stops."""
        for choices in tuple(self._running):
            choices.fail(GatewayStopping())

    async def models(self, caller: Caller) -> list[dict[str, Any]]:
        """The models that the caller can ask for here, in OpenAI's shape."""
        return [self._in_shape(entry) for entry in await self._models.listed(caller)]

    async def describe_model(self, asked: str, caller: Caller) -> dict[str, Any]:
        """One of them, by its name, hash or alias. Raises ModelNotFound."""
        return self._in_shape(await self._models.describe(asked, caller))

    def _in_shape(self, entry: dict[str, Any]) -> dict[str, Any]:
        return {"object": "model", "created": self._since, "owned_by": "swarm"} | entry

    async def complete(self, body: CompletionRequest, request: Request) -> Response:
        """POST /v1/completions."""
        swarm, body = await self._asked(body, request)
        prompts = body.prompts
        for prompt in prompts:
            require_possible_prompt(prompt, swarm.model)
        jobs = [(prompt, body.params(choice)) for prompt in prompts for choice in range(body.choices)]
        echoed = [_text_of(swarm, prompt) if body.echo else "" for prompt in prompts]
        texts = [text for text in echoed for _ in range(body.choices)]
        echoes = Echoes(texts, body.scores_prompt, alone=body.max_tokens == 0)
        answer = CompletionAnswer(swarm.model, body.choices, echoes, with_usage=body.include_usage)
        shared = [_shared_prompt(body.choices, len(prompt)) for prompt in prompts]
        streams = [
            swarm.stream_events(
                prompt,
                params=params,
                timeout_s=FORMATION_TIMEOUT_S,
                prediction=body.predicted,
                shared_prompt=shared[at // body.choices],
            )
            for at, (prompt, params) in enumerate(jobs)
        ]
        choices = Choices(streams)
        estimates = [estimated_tokens(prompt) for prompt in prompts]
        admitted = await self._admit(request, swarm.model, estimates, [params for _, params in jobs])
        return await self._answer(request, swarm, admitted, answer, choices, stream=bool(body.stream))

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """POST /v1/chat/completions."""
        swarm, body = await self._asked(body, request)
        answer = ChatAnswer(
            swarm.model,
            body.choices,
            stream=bool(body.stream),
            with_usage=body.include_usage,
            most_calls=1 if body.parallel_tool_calls is False else None,
        )
        params = [body.params(choice) for choice in range(body.choices)]
        chat = body.chat()
        choices = _chat_choices(swarm, chat, params, "messages", body.predicted)
        admitted = await self._admit(request, swarm.model, [tokens_of_bytes(chat.text_bytes)], params)
        return await self._answer(request, swarm, admitted, answer, choices, stream=bool(body.stream))

    async def respond(self, body: ResponseRequest, request: Request) -> Response:
        """POST /v1/responses."""
        swarm, body = await self._asked(body, request)
        before, keep = await continued(self._responses, body, request.state.caller)
        chat, params = body.chat(before), [body.params()]
        choices = _chat_choices(swarm, chat, params, "input")
        answer = ResponseAnswer(swarm.model, body, keep)
        admitted = await self._admit(request, swarm.model, [tokens_of_bytes(chat.text_bytes)], params)
        return await self._answer(request, swarm, admitted, answer, choices, stream=bool(body.stream))

    async def message(self, body: MessageRequest, request: Request) -> Response:
        """POST /v1/messages."""
        swarm, body = await self._asked(body, request)
        chat, params = body.chat(), [body.params()]
        choices = _chat_choices(swarm, chat, params, "messages")
        admitted = await self._admit(request, swarm.model, [tokens_of_bytes(chat.text_bytes)], params)
        try:
            prompt_tokens = len(await chat_tokens(swarm, chat)) if body.stream else 0
        except BaseException:
            admitted.end()
            raise
        answer = MessageAnswer(swarm.model, prompt_tokens, body.most_calls)
        return await self._answer(request, swarm, admitted, answer, choices, stream=bool(body.stream))

    async def is_ready(self) -> ApiError | None:
        """None if a circuit could be formed now, else why not."""
        try:
            snapshot = await self._models.first.snapshot()
        except SwarmError as error:
            return failure_of(error)
        if snapshot.get("ready", bool(snapshot.get("peers"))):
            return None
        reason = snapshot.get("reason") or "the peers that are known do not cover the model"
        return ApiError(503, f"No circuit could be formed now: {reason}.", "server_error", "not_ready")

    async def _asked(self, body: Asked, request: Request) -> tuple[ServingSwarm, Asked]:
        """The model that is asked for, and the request with what its service says where the request does not."""
        swarm = await self._models.get(body.model, request.state.caller)
        return swarm, with_defaults(body, self._models.parameters(body.model))

    async def _admit(
        self, request: Request, spec: ModelSpec, prompts: Sequence[int], asked: Sequence[SamplingParams]
    ) -> AdmittedRequest:
        """Lets the request in as far as its key goes; `_answer` ends it. A prompt, of which there is an estimate of its
        tokens, counts once, however many choices it has."""
        choices = len(asked) // len(prompts)
        estimates = [0 if choice else prompt for prompt in prompts for choice in range(choices)]
        caller: Caller = request.state.caller
        new_tokens = max(params.max_new_tokens for params in asked)
        try:
            admitted = await self._gatekeeper.admit(caller, spec, estimates, new_tokens)
        except QuotaExceeded as error:
            self._metrics.refused(error.kind)
            raise
        request.state.rate_limits = admitted.headers()
        return admitted

    async def _answer(
        self,
        request: Request,
        swarm: ServingSwarm,
        admitted: AdmittedRequest,
        answer: Answer,
        choices: Choices,
        *,
        stream: bool,
    ) -> Response:
        caller: Caller = request.state.caller
        user = caller.user or user_of(request.client.host if request.client else None)
        GUESS_SCOPE.set(hashlib.blake2b(user.encode(), key=self._scope_key, digest_size=16).digest())
        async with AsyncExitStack() as stack:
            stack.callback(admitted.end)
            try:
                asked_s = time.monotonic()
                taken = await until_gone(request.receive, self._slots.take(user, choices.count))
                self._metrics.queued(time.monotonic() - asked_s)
                stack.callback(self._slots.give, user, taken)
                choices.watch(admitted)
                await stack.enter_async_context(choices)
                self._running.add(choices)
                stack.callback(self._running.discard, choices)
                if not stream:
                    generations = await until_gone(request.receive, self._collect(swarm, choices))
                    whole = answer.whole(generations)
                    await _keep(answer)
                    return JSONResponse(whole)
                # The first piece decides whether the answer is a stream or an error with its own status.
                batches = _items(swarm, choices)
                first = await until_gone(request.receive, _next(batches))
            except ClientGone:
                return Response(status_code=499)
            except SwarmError as error:
                admitted.fail(error)
                failure = failure_of(error)
                self._metrics.generations.failed(failure.code or failure.type)
                return failure.response(request.url.path)
            kept = stack.pop_all()
        return EventStream(
            self._events(kept, admitted, batches, first, answer, (swarm.model.name, choices.count))
        )

    async def _collect(self, swarm: ServingSwarm, choices: Choices) -> list[Generation]:
        generations: dict[int, Generation] = {}
        async for items in _items(swarm, choices):
            for choice, piece in items:
                self._note(generations, swarm.model.name, choice, piece)
        return [generations[choice] for choice in range(choices.count)]

    async def _events(
        self,
        kept: AsyncExitStack,
        admitted: AdmittedRequest,
        batches: AsyncGenerator[list[tuple[int, TextPiece]], None],
        first: list[tuple[int, TextPiece]],
        answer: Answer,
        asked: tuple[str, int],
    ) -> AsyncGenerator[bytes, None]:
        """The events of a stream of so many choices of a model. A failure is its last one."""
        model, count = asked
        generations: dict[int, Generation] = {}
        opened: set[int] = set()
        async with kept:
            items = first
            try:
                while len(generations) < count:
                    events = []
                    for choice, piece in items:
                        events += [] if choice in opened else answer.opening(choice)
                        opened.add(choice)
                        events += answer.chunks(choice, piece)
                        self._note(generations, model, choice, piece)
                    if events or not items:
                        yield b"".join(event.encoded() for event in events or [WAITING])
                    items = await anext(batches, [])
                closing = answer.closing([generations[choice] for choice in range(count)])
                await _keep(answer)
                for event in closing:
                    yield event.encoded()
            except Exception as error:  # noqa: BLE001 - the boundary of a stream: the client is told
                admitted.fail(error)
                failure = failure_of(error)
                self._metrics.generations.failed(failure.code or failure.type)
                for event in answer.failed(failure):
                    yield event.encoded()
            finally:
                await batches.aclose()

    def _note(self, generations: dict[int, Generation], model: str, choice: int, piece: TextPiece) -> None:
        if piece.finish_reason is None:
            return
        if piece.generation is None:
            raise RuntimeError("a generation ended without its result")
        generations[choice] = piece.generation
        self._metrics.generations.finished(piece.generation, model)


async def _keep(answer: Answer) -> None:
    """Keeps what is complete, where that was asked for, before the client is told that it is."""
    if isinstance(answer, ResponseAnswer):
        await answer.keep()


async def _items(swarm: ServingSwarm, choices: Choices) -> AsyncGenerator[list[tuple[int, TextPiece]], None]:
    """Yields the pieces that have come together, with their choices' numbers, and none where nothing has come for a
    while. Where nobody serves the model, nobody waits for a circuit."""
    clock = asyncio.get_running_loop().time
    waited_s = last_served_s = clock()
    begun = False
    while choices.left:
        try:
            async with asyncio.timeout(LOOKS_EVERY_S) as look:
                items = await choices.next()
        except TimeoutError:
            if not look.expired():
                raise
            if begun or swarm.is_served:
                last_served_s = clock()
            elif clock() - last_served_s > UNSERVED_S:
                raise SwarmUnavailable("no peer serves the model") from None
            if clock() - waited_s >= OPENS_AFTER_S:
                waited_s = clock()
                yield []
            continue
        begun, waited_s = True, clock()
        yield items


def _chat_choices(
    swarm: ServingSwarm,
    chat: ChatInput,
    params: Sequence[SamplingParams],
    parameter: str,
    prediction: str | None = None,
) -> Choices:
    """Generations of one chat, one for each way to draw. `parameter` is what its text came in."""
    require_possible(chat.text_bytes, swarm.model, parameter)
    shared = _shared_prompt(len(params), chat.text_bytes)
    streams = [
        swarm.stream_chat_events(
            chat.messages,
            tools=chat.tools,
            tool_choice=chat.demanded or "auto",
            chat_template_kwargs=chat.variables,
            params=one,
            timeout_s=FORMATION_TIMEOUT_S,
            prediction=prediction,
            shared_prompt=shared,
        )
        for one in params
    ]
    return Choices(streams)


def _text_of(swarm: ServingSwarm, prompt: str | Sequence[int]) -> str:
    """Raises InvalidRequest where an id is none of the model's."""
    return prompt if isinstance(prompt, str) else swarm.detokenize(prompt)


def _shared_prompt(choices: int, size: int) -> SharedPrompt | None:
    """Returns what choices of a prompt of that size have in common; None: they begin at once."""
    return SharedPrompt() if choices > 1 and size >= SHARED_PROMPT_BYTES else None


async def _next(batches: AsyncGenerator[list[tuple[int, TextPiece]], None]) -> list[tuple[int, TextPiece]]:
    return await anext(batches, [])


def with_defaults(body: Asked, defaults: Mapping[str, object]) -> Asked:
    """Returns the request with these parameters, as far as its API has them and it does not say anything of them.

    Args:
        body: a request that was checked.
        defaults: checked values, by OpenAI's names of chat completions.
    """
    known, given = type(body).model_fields, body.model_fields_set
    named = dict(defaults)
    if _LENGTHS[0] in named:
        most = named.pop(_LENGTHS[0])
        names = [name for name in _LENGTHS if name in known]
        if names and not given.intersection(names):
            named[names[0]] = most
    added = {name: value for name, value in named.items() if name in known and name not in given}
    return body.model_copy(update=added) if added else body
