"""Answers in OpenAI's API, whole and in chunks."""

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from molink.client.api.generation import Generation, TextPiece, TokenLogprob
from molink.shards.spec import ModelSpec

Json = dict[str, Any]


class Answer(ABC):
    """One request's answer. Choices are numbered over all prompts."""

    def __init__(self, spec: ModelSpec, kind: str, prefix: str, choices_per_prompt: int) -> None:
        self._head: Json = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": spec.name,
            "system_fingerprint": f"molink-{spec.model_hash[:12]}",
        }
        self._choices_per_prompt = choices_per_prompt

    @abstractmethod
    def whole(self, generations: Sequence[Generation]) -> Json:
        """The answer to a request that does not stream."""

    @abstractmethod
    def opening(self, choice: int) -> list[Json]:
        """Chunks that come before the first piece of a choice."""

    @abstractmethod
    def chunks(self, choice: int, piece: TextPiece) -> list[Json]:
        """The chunks of one piece."""

    def usage_chunk(self, generations: Sequence[Generation]) -> Json:
        """The last chunk, for those who asked for it."""
        return self._chunk([]) | {"usage": self._usage(generations)}

    def _chunk(self, choices: list[Json]) -> Json:
        return self._head | {"choices": choices}

    def _usage(self, generations: Sequence[Generation]) -> Json:
        """A prompt counts once, however many choices it has."""
        prompt = sum(generation.prompt_tokens for generation in generations[:: self._choices_per_prompt])
        completion = sum(len(generation.token_ids) for generation in generations)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }


class CompletionAnswer(Answer):
    """POST /v1/completions. `echoes` has the text to repeat before each choice."""

    def __init__(self, spec: ModelSpec, choices_per_prompt: int, echoes: Sequence[str]) -> None:
        super().__init__(spec, "text_completion", "cmpl", choices_per_prompt)
        self._echoes = echoes
        self._offsets = [0] * len(echoes)

    def whole(self, generations: Sequence[Generation]) -> Json:
        choices = [
            self._choice(index, self._echoes[index] + done.text, done.logprobs, done.finish_reason)
            for index, done in enumerate(generations)
        ]
        return self._chunk(choices) | {"usage": self._usage(generations)}

    def opening(self, choice: int) -> list[Json]:
        echo = self._echoes[choice]
        return [self._chunk([self._choice(choice, echo, (), None)])] if echo else []

    def chunks(self, choice: int, piece: TextPiece) -> list[Json]:
        if not piece.text and not piece.logprobs and piece.finish_reason is None:
            return []
        return [self._chunk([self._choice(choice, piece.text, piece.logprobs, piece.finish_reason)])]

    def _choice(self, index: int, text: str, logprobs: Sequence[TokenLogprob], finish: str | None) -> Json:
        scored = self._scored(index, logprobs) if logprobs else None
        return {"index": index, "text": text, "logprobs": scored, "finish_reason": finish}

    def _scored(self, index: int, logprobs: Sequence[TokenLogprob]) -> Json:
        offsets = []
        for scored in logprobs:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(scored.token)
        return {
            "tokens": [scored.token for scored in logprobs],
            "token_logprobs": [scored.logprob for scored in logprobs],
            "top_logprobs": [dict(scored.top) | {scored.token: scored.logprob} for scored in logprobs],
            "text_offset": offsets,
        }


class ChatAnswer(Answer):
    """POST /v1/chat/completions."""

    def __init__(self, spec: ModelSpec, choices: int, *, stream: bool) -> None:
        kind = "chat.completion.chunk" if stream else "chat.completion"
        super().__init__(spec, kind, "chatcmpl", choices)

    def whole(self, generations: Sequence[Generation]) -> Json:
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": done.text, "refusal": None},
                "logprobs": _chat_logprobs(done.logprobs),
                "finish_reason": done.finish_reason,
            }
            for index, done in enumerate(generations)
        ]
        return self._chunk(choices) | {"usage": self._usage(generations)}

    def opening(self, choice: int) -> list[Json]:
        return [self._delta(choice, {"role": "assistant", "content": ""}, (), None)]

    def chunks(self, choice: int, piece: TextPiece) -> list[Json]:
        made = []
        if piece.text or piece.logprobs:
            made.append(self._delta(choice, {"content": piece.text}, piece.logprobs, None))
        if piece.finish_reason is not None:
            made.append(self._delta(choice, {}, (), piece.finish_reason))
        return made

    def _delta(self, choice: int, delta: Json, logprobs: Sequence[TokenLogprob], finish: str | None) -> Json:
        scored = _chat_logprobs(logprobs)
        return self._chunk([{"index": choice, "delta": delta, "logprobs": scored, "finish_reason": finish}])


def _chat_logprobs(logprobs: Sequence[TokenLogprob]) -> Json | None:
    if not logprobs:
        return None
    content = [
        _scored(scored.token, scored.logprob)
        | {"top_logprobs": [_scored(token, value) for token, value in scored.top]}
        for scored in logprobs
    ]
    return {"content": content, "refusal": None}


def _scored(token: str, logprob: float) -> Json:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode())}
