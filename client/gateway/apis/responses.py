"""Requests in OpenAI's Responses API, and what they mean for a swarm."""

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from molink.client.errors import InvalidRequest
from molink.client.gateway.apis.chat_input import (
    Arguments,
    ChatInput,
    FunctionDescription,
    FunctionName,
    Listed,
    Named,
    NamedChoice,
    ToolChoice,
    arguments_of,
    called,
    demanded_calls,
    offered,
)
from molink.client.gateway.apis.openai import CHAT_TOKENS
from molink.shards.grammar import Grammar, GrammarError
from molink.shards.spec import SamplingError, SamplingParams

_NEUTRAL: Final[dict[str, tuple[object, ...]]] = {
    "background": (False,),
    "conversation": (),
    "include": ([],),
    "max_tool_calls": (),
    "prompt": (),
    "reasoning": ({}, {"effort": None}, {"effort": "none"}),
    "truncation": ("disabled",),
}
"""Parameters that would change what happens but that are not there, with the values that change nothing."""


class InputText(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Literal["input_text", "output_text", "text"]
    text: str


class InputMessage(BaseModel):
    """A message of the conversation."""

    model_config = ConfigDict(strict=True)

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Listed[InputText]

    def plain(self) -> dict[str, Any]:
        content = self.content if isinstance(self.content, str) else "\n".join(p.text for p in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class FunctionCall(BaseModel):
    """A call that the model made before."""

    model_config = ConfigDict(strict=True)

    type: Literal["function_call"]
    call_id: str
    name: FunctionName
    arguments: str

    def plain(self) -> dict[str, Any]:
        call = called(self.call_id, self.name, arguments_of(self.arguments))
        return {"role": "assistant", "content": "", "tool_calls": [call]}


class FunctionCallOutput(BaseModel):
    """What the function answered."""

    model_config = ConfigDict(strict=True)

    type: Literal["function_call_output"]
    call_id: str
    output: str | Listed[InputText]

    def plain(self) -> dict[str, Any]:
        output = self.output if isinstance(self.output, str) else "\n".join(p.text for p in self.output)
        return {"role": "tool", "tool_call_id": self.call_id, "content": output}


class ReasoningItem(BaseModel):
    """What the model thought before, which chat templates leave out of later turns."""

    type: Literal["reasoning"]

    def plain(self) -> None:
        return None


def _kind(item: object) -> str:
    """Which kind of item it is; a message need not say so."""
    stated = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return str(stated or "message")


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
]


class ResponseTool(FunctionDescription):
    """A tool that the model may call: a function."""

    type: Literal["function"]
    strict: bool | None = None


class TextFormat(BaseModel):
    """The form of the text: any, a JSON object, or JSON of a schema."""

    model_config = ConfigDict(strict=True)

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: Annotated[Arguments | None, Field(alias="schema")] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _a_schema_has_its_own_type(self) -> "TextFormat":
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError("schema is there with the type json_schema, and with no other")
        return self

    def grammar(self) -> Grammar | None:
        """What the text is to follow; None: nothing.

        Raises:
            InvalidRequest: the schema is too long.
        """
        try:
            if self.schema_ is not None:
                return Grammar.json_schema(self.schema_)
            return Grammar.json_object() if self.type == "json_object" else None
        except GrammarError as error:
            raise InvalidRequest(f"text.format: {error}", "text.format") from error

    def plain(self) -> dict[str, object]:
        """As the response repeats it."""
        return self.model_dump(by_alias=True, exclude_none=True)


class TextSettings(BaseModel):
    model_config = ConfigDict(strict=True)

    format: TextFormat | None = None
    verbosity: None = None


class ResponseRequest(BaseModel):
    """POST /v1/responses."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    model: str
    input: Annotated[str, Field(min_length=1)] | Annotated[Listed[InputItem], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = 1.0
    stream: bool | None = False
    tools: Listed[ResponseTool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = True
    text: TextSettings | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    metadata: Named[str] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    chat_template_kwargs: Arguments | None = None
    store: bool | None = None
    previous_response_id: Annotated[str, Field(min_length=1, max_length=64)] | None = None

    @model_validator(mode="after")
    def _only_what_is_understood(self) -> "ResponseRequest":
        for name, value in (self.model_extra or {}).items():
            if name in _NEUTRAL and value is not None and value not in _NEUTRAL[name]:
                raise ValueError(f"{name} is not supported: leave it out")
        offered(self.tools, self.tool_choice)
        if not self.chat().messages:
            raise ValueError("input has no message")
        return self

    def require_nothing_kept(self) -> None:
        """Raises `InvalidRequest` where something would have to be kept."""
        if self.store:
            raise InvalidRequest("nothing is kept here: send store=false, or leave it out", "store")
        if self.previous_response_id is not None:
            raise InvalidRequest(
                "nothing is kept here: send the whole conversation as input", "previous_response_id"
            )

    def conversation(self, before: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
        """What was said before, and what is said now, as chat templates take it. Calls that follow one another are one
        message of the assistant's."""
        messages = list(before)
        items = [InputMessage(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        for item in items:
            plain = item.plain()
            if plain is None:
                continue
            last = messages[-1] if messages else {}
            if "tool_calls" in plain and last.get("role") == "assistant":
                calls = [*last.get("tool_calls", ()), *plain["tool_calls"]]
                messages[-1] = last | {"tool_calls": calls}
            else:
                messages.append(plain)
        return messages

    def chat(self, before: Sequence[dict[str, Any]] = ()) -> ChatInput:
        """What the chat template is given. Instructions are of this request alone."""
        instructions = [{"role": "system", "content": self.instructions}] if self.instructions else []
        tools = offered(self.tools, self.tool_choice)
        demanded = demanded_calls(self.tool_choice, is_single=self.parallel_tool_calls is False)
        messages = (*instructions, *self.conversation(before))
        return ChatInput(messages, tools, self.chat_template_kwargs or {}, demanded)

    @property
    def plain_choice(self) -> str | dict[str, str]:
        """The choice of tools, as the response repeats it."""
        if isinstance(self.tool_choice, NamedChoice):
            return {"type": "function", "name": self.tool_choice.chosen}
        return self.tool_choice or "auto"

    @property
    def text_format(self) -> TextFormat:
        """The form of the text that is asked for."""
        asked = None if self.text is None else self.text.format
        return asked or TextFormat()

    def params(self) -> SamplingParams:
        """How the answer is drawn.

        Raises:
            InvalidRequest: a value is out of range.
        """
        try:
            return SamplingParams(
                max_new_tokens=self.max_output_tokens or CHAT_TOKENS,
                temperature=1.0 if self.temperature is None else self.temperature,
                top_p=self.top_p or 1.0,
                seed=None if self.seed is None else self.seed % 2**64,
                logprobs=self.top_logprobs or None,
                grammar=self.text_format.grammar(),
            )
        except SamplingError as error:
            raise InvalidRequest(str(error), error.parameter) from error
