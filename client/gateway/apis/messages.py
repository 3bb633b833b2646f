"""Requests in Anthropic's Messages API, and what they mean for a swarm."""

from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from molink.client.errors import InvalidRequest
from molink.client.gateway.apis.chat_input import (
    Arguments,
    ChatInput,
    FunctionDescription,
    FunctionName,
    Listed,
    NamedChoice,
    ToolChoice,
    called,
    demanded_calls,
    offered,
)
from molink.shards.spec import SamplingError, SamplingParams

_NEUTRAL: Final[dict[str, tuple[object, ...]]] = {
    "container": (),
    "mcp_servers": ([],),
    "thinking": ({"type": "disabled"},),
}
"""Parameters that would change the result but that a swarm does not have, with the values that change nothing."""


class TextBlock(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Literal["text"]
    text: str


class ToolUseBlock(BaseModel):
    """A call that the model made before."""

    model_config = ConfigDict(strict=True)

    type: Literal["tool_use"]
    id: str
    name: FunctionName
    input: Arguments


class ToolResultBlock(BaseModel):
    """What the tool answered."""

    model_config = ConfigDict(strict=True)

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Listed[TextBlock] | None = None
    is_error: bool | None = False

    @property
    def text(self) -> str:
        text = _joined(self.content or "")
        return f"Error: {text}" if self.is_error else text


Block = Annotated[TextBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]


class ConversationTurn(BaseModel):
    """A turn of the conversation."""

    model_config = ConfigDict(strict=True)

    role: Literal["user", "assistant"]
    content: str | Listed[Block]

    @model_validator(mode="after")
    def _blocks_fit_the_role(self) -> "ConversationTurn":
        wrong = "tool_result" if self.role == "assistant" else "tool_use"
        if not isinstance(self.content, str) and any(block.type == wrong for block in self.content):
            raise ValueError(f"content of the {self.role} cannot hold a {wrong} block")
        return self

    def plain(self) -> Iterator[dict[str, Any]]:
        """As chat templates expect it: what tools answered goes before what the user says beside it."""
        if isinstance(self.content, str):
            yield {"role": self.role, "content": self.content}
            return
        text = _joined([block for block in self.content if isinstance(block, TextBlock)])
        calls = []
        for block in self.content:
            if isinstance(block, ToolResultBlock):
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": block.text}
            elif isinstance(block, ToolUseBlock):
                calls.append(called(block.id, block.name, block.input))
        if text or calls:
            yield {"role": self.role, "content": text, **({"tool_calls": calls} if calls else {})}


class MessageTool(BaseModel):
    """A tool that the model may call."""

    model_config = ConfigDict(strict=True)

    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: Arguments

    def function(self) -> FunctionDescription:
        return FunctionDescription(name=self.name, description=self.description, parameters=self.input_schema)


class MessageToolChoice(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = False

    @model_validator(mode="after")
    def _a_tool_has_its_name(self) -> "MessageToolChoice":
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("tool_choice has a name with the type tool, and with no other")
        return self

    def plain(self) -> ToolChoice:
        """As OpenAI's APIs have it."""
        if self.name is not None:
            return NamedChoice(type="function", name=self.name)
        match self.type:
            case "none":
                return "none"
            case "any":
                return "required"
        return "auto"


class CountRequest(BaseModel):
    """POST /v1/messages/count_tokens."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    model: str
    messages: Annotated[Listed[ConversationTurn], Field(min_length=1)]
    system: str | Listed[TextBlock] | None = None
    tools: Listed[MessageTool] | None = None
    tool_choice: MessageToolChoice | None = None

    @model_validator(mode="after")
    def _only_what_is_understood(self) -> "CountRequest":
        for name, value in (self.model_extra or {}).items():
            if name in _NEUTRAL and value is not None and value not in _NEUTRAL[name]:
                raise ValueError(f"{name} is not supported by this swarm; leave it out")
        self.chat()
        return self

    def chat(self) -> ChatInput:
        """What the chat template is given. Raises `ValueError` if the tools cannot be offered."""
        messages: list[dict[str, Any]] = []
        if self.system:
            messages.append({"role": "system", "content": _joined(self.system)})
        for message in self.messages:
            messages += message.plain()
        if not messages:
            raise ValueError("messages say nothing")
        choice, is_single = (
            None if self.tool_choice is None else self.tool_choice.plain(),
            self.most_calls == 1,
        )
        tools = offered([tool.function() for tool in self.tools or ()], choice)
        return ChatInput(tuple(messages), tools, demanded=demanded_calls(choice, is_single=is_single))

    @property
    def most_calls(self) -> int | None:
        """Calls that the answer may have; None: any number."""
        alone = self.tool_choice is not None and self.tool_choice.disable_parallel_tool_use
        return 1 if alone else None


class MessageRequest(CountRequest):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1, lt=2**31)]
    stop_sequences: Listed[str] | None = None
    stream: bool | None = False
    temperature: Annotated[float, Field(ge=0, le=1)] | None = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = 1.0
    top_k: Annotated[int, Field(ge=-1)] | None = 0

    def params(self) -> SamplingParams:
        """How the answer is drawn.

        Raises:
            InvalidRequest: a value is out of range.
        """
        try:
            return SamplingParams(
                max_new_tokens=self.max_tokens,
                temperature=1.0 if self.temperature is None else self.temperature,
                top_p=self.top_p or 1.0,
                top_k=max(0, self.top_k or 0),
                stop=tuple(stop for stop in self.stop_sequences or () if stop),
            )
        except SamplingError as error:
            name = {"max_new_tokens": "max_tokens", "stop": "stop_sequences"}.get(
                error.parameter, error.parameter
            )
            raise InvalidRequest(str(error), name) from error


def _joined(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)
