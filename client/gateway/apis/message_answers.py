"""Answers in Anthropic's Messages API, whole and as events."""

import json
from collections.abc import Iterator, Sequence

from molink.client.api.generation import Generation, TextPiece
from molink.client.gateway.apis.answer import Answer, Json, ServerSentEvent, TokenUsage, new_id
from molink.client.gateway.error_handlers import ApiError
from molink.client.text.tool_calls import ToolCall
from molink.shards.spec import ModelSpec


class MessageAnswer(Answer):
    """POST /v1/messages: blocks of text and of calls, one after the other."""

    def __init__(self, spec: ModelSpec, prompt_tokens: int, most_calls: int | None) -> None:
        """`prompt_tokens` are known before the answer begins; `most_calls`: calls beyond them are left out."""
        self._head: Json = {
            "id": new_id("msg"),
            "type": "message",
            "role": "assistant",
            "model": spec.name,
            "stop_sequence": None,
        }
        self._prompt_tokens = prompt_tokens
        self._most_calls = most_calls
        self._blocks = 0
        """Blocks that have begun."""
        self._is_open = False
        """Whether the last of them is one of text that goes on."""
        self._calls = 0

    def whole(self, generations: Sequence[Generation]) -> Json:
        (done,) = generations
        blocks: list[Json] = [{"type": "text", "text": done.text}] if done.text else []
        blocks += [_tool_use(call) for call in done.tool_calls[: self._most_calls]]
        return self._head | {"content": blocks, **_stop(done), "usage": _usage(done)}

    def opening(self, choice: int) -> list[ServerSentEvent]:
        del choice
        usage = {"input_tokens": self._prompt_tokens, "output_tokens": 0}
        begun = self._head | {"content": [], "stop_reason": None, "usage": usage}
        return [_event("message_start", message=begun)]

    def chunks(self, choice: int, piece: TextPiece) -> list[ServerSentEvent]:
        del choice
        made: list[ServerSentEvent] = []
        if piece.text:
            if not self._is_open:
                made.append(self._begin({"type": "text", "text": ""}))
                self._is_open = True
            made.append(self._delta({"type": "text_delta", "text": piece.text}))
        for call in piece.tool_calls:
            if self._most_calls is None or self._calls < self._most_calls:
                made += [*self._close(), *self._call_events(call)]
        return made

    def closing(self, generations: Sequence[Generation]) -> list[ServerSentEvent]:
        (done,) = generations
        ended = _event("message_delta", delta=_stop(done), usage=_usage(done))
        return [*self._close(), ended, _event("message_stop")]

    def failed(self, failure: ApiError) -> list[ServerSentEvent]:
        return [ServerSentEvent(failure.anthropic_body(), "error")]

    def _call_events(self, call: ToolCall) -> Iterator[ServerSentEvent]:
        self._calls += 1
        yield self._begin(_tool_use(call) | {"input": {}})
        yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})
        yield _event("content_block_stop", index=self._blocks - 1)

    def _begin(self, block: Json) -> ServerSentEvent:
        self._blocks += 1
        return _event("content_block_start", index=self._blocks - 1, content_block=block)

    def _delta(self, delta: Json) -> ServerSentEvent:
        return _event("content_block_delta", index=self._blocks - 1, delta=delta)

    def _close(self) -> list[ServerSentEvent]:
        if not self._is_open:
            return []
        self._is_open = False
        return [_event("content_block_stop", index=self._blocks - 1)]


def _event(kind: str, /, **fields: object) -> ServerSentEvent:
    return ServerSentEvent({"type": kind, **fields}, kind)


def _tool_use(call: ToolCall) -> Json:
    return {"type": "tool_use", "id": new_id("toolu"), "name": call.name, "input": json.loads(call.arguments)}


def _stop(done: Generation) -> Json:
    if done.tool_calls:
        reason = "tool_use"
    elif done.finish_reason == "length":
        reason = "max_tokens"
    else:
        reason = "end_turn" if done.stop_string is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": done.stop_string}


def _usage(done: Generation) -> Json:
    """Cached tokens are not counted among the others, as that API has it."""
    usage = TokenUsage.of([done])
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
    }
