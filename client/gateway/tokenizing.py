"""Turning text into tokens for requests, and back: counts before a generation, and the routes that do nothing else."""

from collections.abc import Sequence
from typing import Any, Final

from fastapi import Request

from molink.client.errors import InvalidRequest
from molink.client.gateway.accounts.errors import QuotaExceeded
from molink.client.gateway.accounts.gatekeeper import Caller, Gatekeeper
from molink.client.gateway.apis.chat_input import ChatInput
from molink.client.gateway.apis.messages import CountRequest
from molink.client.gateway.apis.tokens import DetokenizeRequest, TokenizeRequest
from molink.client.gateway.models.served_models import ServedModels
from molink.client.gateway.models.swarm_protocol import ServingSwarm
from molink.client.gateway.telemetry.metrics import Metrics
from molink.shards.spec import ModelSpec

MAX_TOKEN_BYTES: Final = 128
"""Of text that one token stands for: the longest of known vocabularies are rows of so many spaces."""


class Tokenizing:
    """The routes' work that generates nothing."""

    def __init__(self, models: ServedModels, gatekeeper: Gatekeeper, metrics: Metrics) -> None:
        self._models = models
        self._gatekeeper = gatekeeper
        self._metrics = metrics

    async def count_tokens(self, body: CountRequest, request: Request) -> dict[str, Any]:
        """POST /v1/messages/count_tokens."""
        swarm = await self._admitted(body.model, request)
        return {"input_tokens": len(await chat_tokens(swarm, body.chat()))}

    async def tokenize(self, body: TokenizeRequest, request: Request) -> dict[str, Any]:
        """POST /tokenize."""
        swarm = await self._admitted(body.model, request)
        chat, spec = body.chat(), swarm.model
        if chat is not None:
            tokens = await chat_tokens(swarm, chat)
        else:
            text = body.prompt or ""
            require_possible(len(text.encode(errors="replace")), spec, "prompt")
            tokens = await swarm.tokenize(text)
        texts = [swarm.detokenize((token,)) for token in tokens] if body.return_token_strs else None
        return {
            "count": len(tokens),
            "max_model_len": spec.context_length,
            "tokens": list(tokens),
            "token_strs": texts,
        }

    async def detokenize(self, body: DetokenizeRequest, request: Request) -> dict[str, Any]:
        """POST /detokenize."""
        swarm = await self._admitted(body.model, request)
        return {"prompt": swarm.detokenize(body.tokens)}

    async def _admitted(self, model: str | None, request: Request) -> ServingSwarm:
        """The model that is asked for, or else the first one. It costs the key a request, and no tokens."""
        caller: Caller = request.state.caller
        swarm = await self._models.get(self._models.first.model.name if model is None else model, caller)
        try:
            admitted = await self._gatekeeper.admit(caller, swarm.model, (), 0)
        except QuotaExceeded as error:
            self._metrics.refused(error.kind)
            raise
        request.state.rate_limits = admitted.headers()
        admitted.end()
        return swarm


async def chat_tokens(swarm: ServingSwarm, chat: ChatInput) -> tuple[int, ...]:
    require_possible(chat.text_bytes, swarm.model, "messages")
    return await swarm.tokenize_chat(chat.messages, tools=chat.tools, chat_template_kwargs=chat.variables)


def require_possible(text_bytes: int, spec: ModelSpec, parameter: str) -> None:
    """Refuses what cannot fit into the context, before the work of finding out how many tokens it has."""
    if text_bytes > MAX_TOKEN_BYTES * spec.context_length:
        raise InvalidRequest(
            f"a text of {text_bytes} bytes is more than {spec.name} takes with its {spec.context_length - 1} tokens "
            "at most: shorten it",
            parameter,
        )


def require_possible_prompt(prompt: str | Sequence[int], spec: ModelSpec) -> None:
    """Refuses, likewise, the prompt of a completion, which may be token ids."""
    if isinstance(prompt, str):
        require_possible(len(prompt.encode(errors="replace")), spec, "prompt")
    elif len(prompt) >= spec.context_length:
        raise InvalidRequest(
            f"the prompt has {len(prompt)} tokens, and {spec.name} takes {spec.context_length - 1} at most: shorten it",
            "prompt",
        )
