"""Answers in OpenAI's Responses API, whole and as events."""

import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeAlias

from molink.client.api.generation import Generation, TextPiece, TokenLogprob
from molink.client.gateway.apis.answer import Answer, Json, ServerSentEvent, TokenUsage, new_id
from molink.client.gateway.apis.chat_input import arguments_of, called
from molink.client.gateway.apis.openai_answers import scored_token
from molink.client.gateway.apis.responses import ResponseRequest
from molink.client.gateway.error_handlers import ApiError
from molink.client.text.tool_calls import ToolCall
from molink.shards.spec import ModelSpec

Keep: TypeAlias = Callable[[Json], Awaitable[None]]
"""Keeps a complete response."""


class ResponseAnswer(Answer):
    """POST /v1/responses: one message, or part of one, and the calls of tools behind it."""

    def __init__(self, spec: ModelSpec, asked: ResponseRequest, keep: Keep | None = None) -> None:
        """`keep` keeps the complete response; None: nothing is kept."""
        self._head = _head(spec, asked) | {"store": keep is not None}
        self._keep = keep
        self._complete: Json = {}
        self._most_calls = None if asked.parallel_tool_calls is not False else 1
        self._sequence = 0
        self._output: list[Json] = []
        """Items that are complete."""
        self._message: Json | None = None
        """The one that grows, as it will be when it is complete."""
        self._text: list[str] = []
        self._logprobs: list[Json] = []

    def whole(self, generations: Sequence[Generation]) -> Json:
        (done,) = generations
        calls = [_call_item(call) for call in done.tool_calls[: self._most_calls]]
        scored = [_scored(one) for one in done.logprobs]
        status = "completed" if calls else _status(done)  # what is cut off is the last item
        output = [_message(new_id("msg"), done.text, scored, status)] if done.text or not calls else []
        return self._response(output + calls, done)

    async def keep(self) -> None:
        """Keeps the complete response, where that was asked for."""
        if self._keep is not None:
            await self._keep(self._complete)

    def opening(self, choice: int) -> list[ServerSentEvent]:
        del choice
        begun = self._head | {"status": "in_progress"}
        return [
            self._event("response.created", response=begun),
            self._event("response.in_progress", response=begun),
        ]

    def chunks(self, choice: int, piece: TextPiece) -> list[ServerSentEvent]:
        del choice
        made: list[ServerSentEvent] = []
        if piece.text or piece.logprobs:
            made += self._open_message()
            scored = [_scored(one) for one in piece.logprobs]
            self._text.append(piece.text)
            self._logprobs += scored
            made.append(self._part_event("response.output_text.delta", delta=piece.text, logprobs=scored))
        for call in piece.tool_calls:
            if self._most_calls is None or self._calls < self._most_calls:
                made += self._close_message()
                made += self._call_events(_call_item(call))
        return made

    def closing(self, generations: Sequence[Generation]) -> list[ServerSentEvent]:
        (done,) = generations
        made = [] if self._output or self._message else list(self._open_message())
        made += self._close_message(_status(done))
        response = self._response(self._output, done)
        return [*made, self._event(f"response.{response['status']}", response=response)]

    def failed(self, failure: ApiError) -> list[ServerSentEvent]:
        code = failure.code or failure.type
        error = {"code": code, "message": failure.message}
        response = self._head | {"status": "failed", "error": error, "output": self._output}
        return [self._event("response.failed", response=response)]

    @property
    def _calls(self) -> int:
        return sum(item["type"] == "function_call" for item in self._output)

    def _event(self, kind: str, /, **fields: Any) -> ServerSentEvent:  # noqa: ANN401 - JSON
        event = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return ServerSentEvent(event, kind)

    def _part_event(self, kind: str, /, **fields: Any) -> ServerSentEvent:  # noqa: ANN401 - JSON
        """An event about the text of the message that grows."""
        message_id = "" if self._message is None else self._message["id"]
        return self._event(
            kind, item_id=message_id, output_index=len(self._output), content_index=0, **fields
        )

    def _open_message(self) -> Iterator[ServerSentEvent]:
        if self._message is not None:
            return
        self._message = _message(new_id("msg"), "", [])
        begun = self._message | {"status": "in_progress", "content": []}
        yield self._event("response.output_item.added", output_index=len(self._output), item=begun)
        yield self._part_event("response.content_part.added", part=_part("", []))

    def _close_message(self, status: str = "completed") -> Iterator[ServerSentEvent]:
        if self._message is None:
            return
        text = "".join(self._text)
        message = _message(self._message["id"], text, self._logprobs, status)
        yield self._part_event("response.output_text.done", text=text, logprobs=self._logprobs)
        yield self._part_event("response.content_part.done", part=message["content"][0])
        yield self._event("response.output_item.done", output_index=len(self._output), item=message)
        self._output.append(message)
        self._message, self._text, self._logprobs = None, [], []

    def _call_events(self, item: Json) -> Iterator[ServerSentEvent]:
        at = {"item_id": item["id"], "output_index": len(self._output)}
        begun = item | {"arguments": "", "status": "in_progress"}
        yield self._event("response.output_item.added", output_index=at["output_index"], item=begun)
        yield self._event("response.function_call_arguments.delta", **at, delta=item["arguments"])
        yield self._event(
            "response.function_call_arguments.done", **at, name=item["name"], arguments=item["arguments"]
        )
        yield self._event("response.output_item.done", output_index=at["output_index"], item=item)
        self._output.append(item)

    def _response(self, output: list[Json], done: Generation) -> Json:
        usage = TokenUsage.of([done])
        status = _status(done)
        self._complete = self._head | {
            "status": status,
            "incomplete_details": None if status == "completed" else {"reason": "max_output_tokens"},
            "output": output,
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        }
        return self._complete


def _head(spec: ModelSpec, asked: ResponseRequest) -> Json:
    """What the response says of the request, in each of its states."""
    return {
        "id": new_id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "metadata": asked.metadata or {},
        "model": spec.name,
        "output": [],
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "previous_response_id": asked.previous_response_id,
        "reasoning": {"effort": None, "summary": None},
        "temperature": 1.0 if asked.temperature is None else asked.temperature,
        "text": {"format": asked.text_format.plain()},
        "tool_choice": asked.plain_choice,
        "tools": [tool.model_dump() for tool in asked.tools or ()],
        "top_logprobs": asked.top_logprobs or 0,
        "top_p": asked.top_p or 1.0,
        "truncation": "disabled",
        "usage": None,
    }


def _status(done: Generation) -> str:
    return "completed" if done.finish_reason == "stop" else "incomplete"


def _message(message_id: str, text: str, logprobs: list[Json], status: str = "completed") -> Json:
    return {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [_part(text, logprobs)],
    }


def _part(text: str, logprobs: list[Json]) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _call_item(call: ToolCall) -> Json:
    return {
        "id": new_id("fc"),
        "type": "function_call",
        "call_id": new_id("call"),
        "name": call.name,
        "arguments": call.arguments,
        "status": "completed",
    }


def _scored(scored: TokenLogprob) -> Json:
    top = [scored_token(token, value) for token, value in scored.top]
    return scored_token(scored.token, scored.logprob) | {"top_logprobs": top}


def assistant_message(response: Json) -> Json:
    """What a complete response says and calls, as the chat template is given it in the next turn."""
    texts: list[str] = []
    calls: list[Json] = []
    for item in response["output"]:
        if item["type"] == "message":
            texts += [part["text"] for part in item["content"]]
        else:
            calls.append(called(item["call_id"], item["name"], arguments_of(item["arguments"])))
    return {"role": "assistant", "content": "".join(texts), **({"tool_calls": calls} if calls else {})}
