"""Requests in OpenAI's API, and what they mean for a swarm."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from molink.client.api.sampling import checked_prediction, read_response_format
from molink.client.errors import InvalidRequest
from molink.client.gateway.apis.chat_input import (
    Arguments,
    ChatInput,
    FunctionDescription,
    FunctionName,
    Listed,
    Named,
    ToolChoice,
    arguments_of,
    called,
    demanded_calls,
    offered,
)
from molink.shards.grammar import Grammar, GrammarError
from molink.shards.spec import SamplingError, SamplingParams

MAX_CHOICES: Final = 16
COMPLETION_TOKENS: Final = 16
"""OpenAI's own default for completions."""
CHAT_TOKENS: Final = 512
"""Chat has no limit by default; here it has, because a circuit reserves memory for all that may come."""
_NEUTRAL: Final[Mapping[str, Sequence[object]]] = {
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "reasoning_effort": (),
    "suffix": ("",),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}
"""Parameters that would change the result but that a swarm does not have, with the values that change
nothing.
"""
_REFUSED_PREFIXES: Final = ("guided_",)
_BIAS_DIGITS: Final = 10

TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class StreamOptions(BaseModel):
    include_usage: bool = False


class TextPart(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Literal["text"]
    text: str


class PredictedOutput(BaseModel):
    """What is likely to be generated: the tokens that it has right come sooner."""

    model_config = ConfigDict(strict=True)

    type: Literal["content"]
    content: str | Listed[TextPart]

    @property
    def text(self) -> str:
        content = self.content
        return content if isinstance(content, str) else "".join(part.text for part in content)


class SamplingRequest(BaseModel):
    """Sampling fields that completions and chat share. Beside OpenAI's own those that other servers have: top_k, min_p,
    repetition_penalty, min_tokens, ignore_eos, stop_token_ids.
    """

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    model: str
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = 1
    stop: str | Listed[str] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = 1.0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    logit_bias: Named[float] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = 0
    ignore_eos: bool | None = False
    stop_token_ids: Listed[TokenId] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = 1.0
    min_p: Annotated[float, Field(ge=0, le=1)] | None = 0.0
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = 0
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    prediction: PredictedOutput | None = None

    @model_validator(mode="after")
    def _only_what_is_understood(self) -> "SamplingRequest":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only for stream=true")
        for name, value in (self.model_extra or {}).items():
            refuse_unsupported(name, value)
        return self

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def predicted(self) -> str | None:
        """The prediction's text, for each choice. Raises InvalidRequest where it is too large."""
        if self.prediction is None:
            return None
        checked_prediction(self.prediction.text)
        return self.prediction.text

    def sampling(self, choice: int, max_new_tokens: int, logprobs: int | None) -> SamplingParams:
        """The parameters of one choice. With a seed, each choice draws with its own, so that they differ.

        Raises:
            InvalidRequest: a value is out of range.
        """
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        try:
            return SamplingParams(
                max_new_tokens=max_new_tokens,
                temperature=1.0 if self.temperature is None else self.temperature,
                top_k=max(0, self.top_k or 0),
                top_p=self.top_p or 1.0,
                seed=None if self.seed is None else (self.seed + choice) % 2**64,
                stop=tuple(stop for stop in stops if stop),
                stop_token_ids=tuple(self.stop_token_ids or ()),
                ignore_eos=bool(self.ignore_eos),
                logprobs=logprobs,
                logit_bias=_bias(self.logit_bias or {}),
                frequency_penalty=self.frequency_penalty or 0.0,
                presence_penalty=self.presence_penalty or 0.0,
                repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
                min_p=self.min_p or 0.0,
                min_tokens=self.min_tokens or 0,
                grammar=self._grammar(),
            )
        except SamplingError as error:
            raise InvalidRequest(str(error), error.parameter) from error

    def _grammar(self) -> Grammar | None:
        """As OpenAI has it, or as vLLM has what OpenAI has not: `structured_outputs` with `json`, `json_object`,
        `regex` or `grammar` (Lark)."""
        if self.structured_outputs is None:
            return read_response_format(self.response_format)
        if self.response_format not in (None, {"type": "text"}):
            raise InvalidRequest("give either structured_outputs or response_format", "structured_outputs")
        try:
            match self.structured_outputs:
                case {"json": str() | dict() as schema, **rest} if not rest:
                    return Grammar.json_schema(schema)
                case {"json_object": True, **rest} if not rest:
                    return Grammar.json_object()
                case {"regex": str(pattern), **rest} if not rest:
                    return Grammar.regex(pattern)
                case {"grammar": str(text), **rest} if not rest:
                    return Grammar.lark(text)
        except GrammarError as error:
            raise InvalidRequest(f"structured_outputs: {error}", "structured_outputs") from error
        raise InvalidRequest(
            "structured_outputs has one of json, json_object, regex and grammar", "structured_outputs"
        )


class CompletionRequest(SamplingRequest):
    """POST /v1/completions."""

    prompt: str | Listed[str] | Listed[TokenId] | Listed[Listed[TokenId]]
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = COMPLETION_TOKENS
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: bool | None = False
    best_of: int | None = None

    @model_validator(mode="after")
    def _choices_are_possible(self) -> "CompletionRequest":
        prompts = self.prompts
        if not prompts or not all(prompts):
            raise ValueError("prompt must not be empty: there is nothing to continue")
        if len(prompts) * self.choices > MAX_CHOICES:
            raise ValueError(f"n counts for each prompt, and one request has at most {MAX_CHOICES} choices")
        if self.best_of not in (None, 1, self.choices):
            raise ValueError("best_of is not supported; ask for n choices and choose among them")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens of 0 is only for echo=true: nothing would come back")
        is_free = self.structured_outputs is None and self.response_format in (None, {"type": "text"})
        if self.scores_prompt and not is_free:
            raise ValueError("echo with logprobs is not supported with response_format or structured_outputs")
        return self

    @property
    def scores_prompt(self) -> bool:
        """Whether the prompt's own tokens are to have log-probabilities."""
        return bool(self.echo) and self.logprobs is not None

    @property
    def prompts(self) -> list[str | list[int]]:
        """One text or list of token ids for each prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if all(isinstance(part, int) for part in self.prompt):
            return [[part for part in self.prompt if isinstance(part, int)]] if self.prompt else []
        return [part for part in self.prompt if not isinstance(part, int)]

    def params(self, choice: int) -> SamplingParams:
        """As `sampling`. Where nothing is to be generated one token is, which `CompletionAnswer` leaves out."""
        limit = COMPLETION_TOKENS if self.max_tokens is None else max(1, self.max_tokens)
        params = self.sampling(choice, limit, self.logprobs)
        return replace(params, prompt_logprobs=self.logprobs) if self.scores_prompt else params


class CalledFunction(BaseModel):
    model_config = ConfigDict(strict=True)

    name: FunctionName
    arguments: str


class EarlierCall(BaseModel):
    """A call that the model made before."""

    model_config = ConfigDict(strict=True)

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(BaseModel):
    """Message of a chat: who said what, in text; what tools the model called, and what they answered."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Listed[TextPart] | None = None
    name: str | None = None
    tool_calls: Listed[EarlierCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _only_text_parts(cls, message: object) -> object:
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind != "text":
                raise ValueError(
                    "content may hold text only: images, sound and files are not supported, "
                    "not even for models that could take them"
                )
        return message

    @model_validator(mode="after")
    def _says_what_its_role_says(self) -> "ChatMessage":
        for name in ("function_call", "audio"):
            if (self.model_extra or {}).get(name):
                raise ValueError(f"{name} is not supported: the models here only speak and call tools")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls are the assistant's")
        if self.role == "tool" and not self.tool_call_id:
            raise ValueError("tool_call_id says which call a tool's message answers")
        if self.content is None and not self.tool_calls:
            raise ValueError("content must be there: only an assistant that calls tools may say nothing")
        return self

    def plain(self) -> dict[str, Any]:
        """As chat templates expect it: text parts joined, and developer under its older name, system."""
        content = self.content
        if isinstance(content, list):
            content = "\n".join(part.text for part in content)
        plain: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role}
        plain["content"] = content or ""
        if self.tool_calls:
            plain["tool_calls"] = [
                called(one.id, one.function.name, arguments_of(one.function.arguments))
                for one in self.tool_calls
            ]
        for key in ("name", "tool_call_id"):
            if getattr(self, key) is not None:
                plain[key] = getattr(self, key)
        return plain


class Tool(BaseModel):
    """A tool that the model may call: a function."""

    model_config = ConfigDict(strict=True)

    type: Literal["function"]
    function: FunctionDescription


class ChatRequest(SamplingRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[Listed[ChatMessage], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Listed[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = True
    chat_template_kwargs: Arguments | None = None

    @model_validator(mode="after")
    def _tools_can_be_offered(self) -> "ChatRequest":
        self.offered_tools()
        return self

    def offered_tools(self) -> tuple[dict[str, Any], ...]:
        """The tools that the model is told of. Raises `ValueError` if they cannot be offered."""
        return offered([tool.function for tool in self.tools or ()], self.tool_choice)

    def chat(self) -> ChatInput:
        """What the chat template is given."""
        messages = tuple(message.plain() for message in self.messages)
        demanded = demanded_calls(self.tool_choice, is_single=self.parallel_tool_calls is False)
        return ChatInput(messages, self.offered_tools(), self.chat_template_kwargs or {}, demanded)

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is only for logprobs=true")
        return self

    def params(self, choice: int) -> SamplingParams:
        limit = self.max_completion_tokens or self.max_tokens or CHAT_TOKENS
        return self.sampling(choice, limit, (self.top_logprobs or 0) if self.logprobs else None)


def refuse_unsupported(name: str, value: Any) -> None:  # noqa: ANN401 - whatever the client sent
    """Raise `ValueError` for a parameter that would change the result here if it were known; ignore harmless
    ones.
    """
    if value is None:
        return
    known = name in _NEUTRAL
    if (known and value not in _NEUTRAL[name]) or name.startswith(_REFUSED_PREFIXES):
        raise ValueError(f"{name} is not supported by this swarm; leave it out")


def _bias(logit_bias: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    pairs = []
    for key, bias in logit_bias.items():
        # int() refuses thousands of digits with an error of its own
        if len(key) > _BIAS_DIGITS or not key.isascii() or not key.isdigit() or int(key) >= 2**31:
            raise InvalidRequest("logit_bias maps token ids to numbers", "logit_bias")
        pairs.append((int(key), bias))
    return tuple(pairs)
