"""Documents that the HTTP APIs answer with, as `/openapi.json` describes them. Answers are made elsewhere
(`openai_answers.py` and its neighbours), and tests hold them against these."""

from typing import Any, Final, Literal

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, JsonValue

EVENTS: Final = {"text/event-stream": {"schema": {"type": "string"}}}
"""Of an answer that is asked for with `stream`."""


SECURITY_SCHEMES: Final = {
    "key": {"type": "http", "scheme": "bearer", "description": "A key of this gateway, if it asks for keys."},
    "x-api-key": {
        "type": "apiKey",
        "in": "header",
        "name": "x-api-key",
        "description": "The same, as Anthropic's.",
    },
}


class Document(BaseModel):
    """A document with these fields and no others."""

    model_config = ConfigDict(extra="forbid")


class ErrorDetail(Document):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorDocument(Document):
    """Why a request was refused, in OpenAI's shape."""

    error: ErrorDetail


class MessagesErrorDetail(Document):
    type: str
    message: str


class MessagesErrorDocument(Document):
    """Why a request was refused, in Anthropic's shape."""

    type: Literal["error"]
    error: MessagesErrorDetail


class ModelDocument(Document):
    """A model that may be asked for: its name, and its hash, by which it may be asked for too."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    model_hash: str
    context_length: int | None


class ModelListDocument(Document):
    object: Literal["list"]
    data: list[ModelDocument]


class CachedDetail(Document):
    cached_tokens: int


class GuessedDetail(Document):
    """Of the tokens that were guessed, those that became tokens of the answer, and the others."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class UsageDetail(Document):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedDetail
    completion_tokens_details: GuessedDetail


class CompletionLogprobs(Document):
    tokens: list[str]
    token_logprobs: list[float | None]
    """None: of the first token of a prompt that is echoed."""
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Document):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]


class CompletionDocument(Document):
    """A completion. As events, each has a part of it; the last one is `[DONE]`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: UsageDetail


class ScoredToken(Document):
    token: str
    logprob: float
    bytes: list[int]


class ScoredChoiceToken(ScoredToken):
    top_logprobs: list[ScoredToken]


class ChatLogprobs(Document):
    content: list[ScoredChoiceToken]
    refusal: None


class CalledFunctionDocument(Document):
    name: str
    arguments: str


class ToolCallDocument(Document):
    id: str
    type: Literal["function"]
    function: CalledFunctionDocument


class ChatMessageDocument(BaseModel):
    model_config = ConfigDict(extra="forbid")

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCallDocument] = []


class ChatChoice(Document):
    index: int
    message: ChatMessageDocument
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatDocument(Document):
    """An answer in a chat. As events, each has a part of it (`chat.completion.chunk`); the last one is `[DONE]`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: UsageDetail


class ResponseDocument(BaseModel):
    """A response in OpenAI's Responses API; as events, those of that API."""

    model_config = ConfigDict(extra="allow")

    id: str
    object: Literal["response"]
    status: Literal["completed", "incomplete"]
    model: str
    output: list[dict[str, JsonValue]]
    usage: dict[str, JsonValue]


class DeletedDocument(Document):
    """What is not kept any longer."""

    id: str
    object: Literal["response.deleted"]
    deleted: bool


class MessagesUsage(Document):
    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    output_tokens: int


class MessageDocument(Document):
    """A message in Anthropic's Messages API; as events, those of that API."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, JsonValue]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessagesUsage


class CountDocument(Document):
    input_tokens: int


class TokensDocument(Document):
    """The token ids of a text or a chat."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class TextDocument(Document):
    """The text of token ids."""

    prompt: str


class UsageDayDocument(Document):
    """What one key has used of one model in one day (UTC)."""

    day: str
    model: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class UsageDocument(Document):
    object: Literal["usage"]
    data: list[UsageDayDocument]


class StatusDocument(Document):
    status: Literal["ok", "ready"]


REFUSED: Final[dict[int | str, dict[str, Any]]] = {
    "4XX": {
        "model": ErrorDocument,
        "description": "The request was refused: `error.param` names what to change.",
    },
    "5XX": {"model": ErrorDocument, "description": "The swarm or the gateway could not answer."},
}


def answers(document: type[BaseModel], *, events: bool = False, status: int = 200) -> dict[str, Any]:
    """What a route is declared with that answers with a document; `events`: in a stream too, where it is asked to."""
    described: dict[str, Any] = {"model": document, "description": _said(document)}
    done = described | ({"content": EVENTS} if events else {})
    return {"responses": {status: done}, "response_model": None, "status_code": status}


def messages_answers(document: type[BaseModel], *, events: bool = False) -> dict[str, Any]:
    """As `answers`, for routes that refuse in Anthropic's shape."""
    refused = {status: described | {"model": MessagesErrorDocument} for status, described in REFUSED.items()}
    declared = answers(document, events=events)
    return declared | {"responses": declared["responses"] | refused}


def describe_api(app: FastAPI) -> None:
    """Has `/openapi.json` say besides how a key is shown, and that refusals are JSON whatever a route answers else."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = plain()
            schema.setdefault("components", {})["securitySchemes"] = SECURITY_SCHEMES
            schema["security"] = [{}, *({name: []} for name in SECURITY_SCHEMES)]
            for operations in schema["paths"].values():
                for operation in operations.values():
                    for status in REFUSED:
                        described = operation["responses"][str(status)]
                        described["content"] = {"application/json": next(iter(described["content"].values()))}
        return plain()

    app.openapi = openapi  # type: ignore[method-assign]


def _said(document: type[BaseModel]) -> str:
    return " ".join((document.__doc__ or "As asked.").split())
