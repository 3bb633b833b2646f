"""Answers in OpenAI's completions and chat APIs, whole and in chunks."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from molink.client.api.generation import Generation, PromptToken, TextPiece, TokenLogprob
from molink.client.gateway.apis.answer import Answer, Json, ServerSentEvent, TokenUsage, new_id
from molink.client.gateway.error_handlers import ApiError
from molink.client.text.tool_calls import ToolCall
from molink.shards.spec import ModelSpec

ScoredToken = TokenLogprob | PromptToken


class OpenAIAnswer(Answer):
    """What both APIs share: the head of each document, usage, and how a stream ends."""

    def __init__(
        self, spec: ModelSpec, kind: str, prefix: str, choices_per_prompt: int, *, with_usage: bool
    ) -> None:
        """`with_usage`: whether the last chunk of a stream has the token counts."""
        self._head: Json = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": spec.name,
            "system_fingerprint": f"molink-{spec.model_hash[:12]}",
        }
        self._choices_per_prompt = choices_per_prompt
        self._with_usage = with_usage

    def closing(self, generations: Sequence[Generation]) -> list[ServerSentEvent]:
        usage = ServerSentEvent(self._document([], generations))
        return [*([usage] if self._with_usage else []), ServerSentEvent("[DONE]")]

    def failed(self, failure: ApiError) -> list[ServerSentEvent]:
        return [ServerSentEvent(failure.body())]

    def _document(self, choices: list[Json], generations: Sequence[Generation]) -> Json:
        usage = TokenUsage.of(generations, self._choices_per_prompt)
        counts = {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
            "completion_tokens_details": {
                "accepted_prediction_tokens": usage.accepted_tokens,
                "rejected_prediction_tokens": usage.rejected_tokens,
            },
        }
        return self._head | {"choices": choices, "usage": counts}

    def _chunk(self, choice: Json) -> ServerSentEvent:
        return ServerSentEvent(
            self._head | {"choices": [choice]} | ({"usage": None} if self._with_usage else {})
        )


@dataclass(frozen=True, slots=True)
class Echoes:
    """Echoes of prompts before what is generated."""

    texts: Sequence[str]
    """Of each choice; empty: none."""
    scored: bool = False
    """Whether the prompt's tokens have log-probabilities."""
    alone: bool = False
    """Whether nothing comes behind them."""


class CompletionAnswer(OpenAIAnswer):
    """POST /v1/completions."""

    def __init__(self, spec: ModelSpec, choices_per_prompt: int, echoes: Echoes, *, with_usage: bool) -> None:
        super().__init__(spec, "text_completion", "cmpl", choices_per_prompt, with_usage=with_usage)
        self._echoes = echoes
        self._offsets = [0] * len(echoes.texts)

    def whole(self, generations: Sequence[Generation]) -> Json:
        choices = []
        for index, done in enumerate(map(self._told, generations)):
            scored: tuple[ScoredToken, ...] = (*done.prompt_logprobs, *done.logprobs)
            text = self._echoes.texts[index] + done.text
            choices.append(self._choice(index, text, scored, done.finish_reason))
        return self._document(choices, generations)

    def opening(self, choice: int) -> list[ServerSentEvent]:
        echo = "" if self._echoes.scored else self._echoes.texts[choice]
        return [self._chunk(self._choice(choice, echo, (), None))] if echo else []

    def chunks(self, choice: int, piece: TextPiece) -> list[ServerSentEvent]:
        echo = self._echoes.texts[choice] if piece.prompt_logprobs else ""
        told = TextPiece("") if self._echoes.alone else piece
        scored: tuple[ScoredToken, ...] = (*piece.prompt_logprobs, *told.logprobs)
        if not echo and not told.text and not scored and piece.finish_reason is None:
            return []
        finish = "length" if self._echoes.alone and piece.finish_reason else piece.finish_reason
        return [self._chunk(self._choice(choice, echo + told.text, scored, finish))]

    def _document(self, choices: list[Json], generations: Sequence[Generation]) -> Json:
        return super()._document(choices, [self._told(one) for one in generations])

    def _told(self, done: Generation) -> Generation:
        """The generation without the token that was generated because one has to be."""
        if not self._echoes.alone:
            return done
        return replace(done, text="", token_ids=(), logprobs=(), finish_reason="length")

    def _choice(self, index: int, text: str, logprobs: Sequence[ScoredToken], finish: str | None) -> Json:
        scored = self._scored(index, logprobs) if logprobs else None
        return {"index": index, "text": text, "logprobs": scored, "finish_reason": finish}

    def _scored(self, index: int, logprobs: Sequence[ScoredToken]) -> Json:
        offsets = []
        for scored in logprobs:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(scored.token)
        return {
            "tokens": [scored.token for scored in logprobs],
            "token_logprobs": [scored.logprob for scored in logprobs],
            "top_logprobs": [_likeliest(scored) for scored in logprobs],
            "text_offset": offsets,
        }


class ChatAnswer(OpenAIAnswer):
    """POST /v1/chat/completions. `most_calls`: tool calls beyond them are left out of a choice; None: none are."""

    def __init__(
        self, spec: ModelSpec, choices: int, *, stream: bool, with_usage: bool, most_calls: int | None = None
    ) -> None:
        kind = "chat.completion.chunk" if stream else "chat.completion"
        super().__init__(spec, kind, "chatcmpl", choices, with_usage=with_usage)
        self._most_calls = most_calls
        self._called = [0] * choices

    def whole(self, generations: Sequence[Generation]) -> Json:
        choices = []
        for index, done in enumerate(generations):
            calls = done.tool_calls[: self._most_calls]
            message: Json = {"role": "assistant", "content": done.text, "refusal": None}
            if calls:
                message |= {"content": done.text or None, "tool_calls": [_call(one) for one in calls]}
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": _chat_logprobs(done.logprobs),
                    "finish_reason": "tool_calls" if calls else done.finish_reason,
                }
            )
        return self._document(choices, generations)

    def opening(self, choice: int) -> list[ServerSentEvent]:
        return [self._delta(choice, {"role": "assistant", "content": ""}, (), None)]

    def chunks(self, choice: int, piece: TextPiece) -> list[ServerSentEvent]:
        made = []
        if piece.text or piece.logprobs:
            made.append(self._delta(choice, {"content": piece.text}, piece.logprobs, None))
        for one in piece.tool_calls:
            if self._most_calls is None or self._called[choice] < self._most_calls:
                call = {"index": self._called[choice], **_call(one)}
                made.append(self._delta(choice, {"tool_calls": [call]}, (), None))
                self._called[choice] += 1
        if piece.finish_reason is not None:
            finish = "tool_calls" if self._called[choice] else piece.finish_reason
            made.append(self._delta(choice, {}, (), finish))
        return made

    def _delta(
        self, choice: int, delta: Json, logprobs: Sequence[TokenLogprob], finish: str | None
    ) -> ServerSentEvent:
        scored = _chat_logprobs(logprobs)
        return self._chunk({"index": choice, "delta": delta, "logprobs": scored, "finish_reason": finish})


def _likeliest(scored: ScoredToken) -> Json | None:
    """The likeliest tokens at a place, with the one that is there; None where nothing comes before."""
    return None if scored.logprob is None else dict(scored.top) | {scored.token: scored.logprob}


def _call(call: ToolCall) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": new_id("call"), "type": "function", "function": function}


def _chat_logprobs(logprobs: Sequence[TokenLogprob]) -> Json | None:
    if not logprobs:
        return None
    content = [
        scored_token(scored.token, scored.logprob)
        | {"top_logprobs": [scored_token(token, value) for token, value in scored.top]}
        for scored in logprobs
    ]
    return {"content": content, "refusal": None}


def scored_token(token: str, logprob: float) -> Json:
    """A token with its log-probability, as OpenAI's APIs show it."""
    return {"token": token, "logprob": logprob, "bytes": list(token.encode())}
