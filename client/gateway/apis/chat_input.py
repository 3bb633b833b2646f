"""Chat input: what a chat template is given, whatever API it was asked in."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

MAX_TOOLS: Final = 128
MAX_TOOLS_BYTES: Final = 2**17
"""Of the descriptions of all tools of a request together: they are part of the prompt."""

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
Arguments = dict[str, JsonValue]


class FunctionDescription(BaseModel):
    """A function that the model may call; `parameters` is a JSON schema."""

    model_config = ConfigDict(strict=True)

    name: FunctionName
    description: str | None = None
    parameters: Arguments | None = None

    def plain(self) -> dict[str, Any]:
        """As chat templates expect it."""
        function: dict[str, Any] = {"name": self.name, "description": self.description or ""}
        function["parameters"] = self.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


class NamedChoice(BaseModel):
    """A choice of tools that is more than a word."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: str


ToolChoice = Literal["none", "auto", "required"] | NamedChoice


@dataclass(frozen=True, slots=True)
class ChatInput:
    """Chat input: messages, tools and further variables, as chat templates expect them."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text_bytes(self) -> int:
        """The size of all that is said in it."""
        parts = [message.get("content") or "" for message in self.messages]
        parts += [json.dumps(self.tools, ensure_ascii=False)] if self.tools else []
        return sum(len(part.encode(errors="replace")) for part in parts)


def offered(
    tools: Sequence[FunctionDescription] | None, choice: ToolChoice | None
) -> tuple[dict[str, Any], ...]:
    """The tools that the model is told of: none if it is not to call any.

    Raises:
        ValueError: they are too many or too long, two have one name, or a call is demanded.
    """
    tools = tools or ()
    if len(tools) > MAX_TOOLS:
        raise ValueError(f"tools are at most {MAX_TOOLS}")
    if len({tool.name for tool in tools}) < len(tools):
        raise ValueError("tools have names of their own: two are called the same")
    plain = tuple(tool.plain() for tool in tools)
    if len(json.dumps(plain)) > MAX_TOOLS_BYTES:
        raise ValueError(f"tools take at most {MAX_TOOLS_BYTES} bytes: shorten their descriptions")
    if isinstance(choice, NamedChoice) or choice == "required":
        raise ValueError(
            "tool_choice is auto or none: that the model must call a tool cannot be demanded in this version"
        )
    return () if choice == "none" else plain


def arguments_of(text: str) -> Arguments | str:
    """Arguments of a call that was made before, as chat templates expect them: an object where the text is one."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def called(call_id: str, name: str, arguments: Arguments | str) -> dict[str, Any]:
    """A call that was made before, as chat templates expect it."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
