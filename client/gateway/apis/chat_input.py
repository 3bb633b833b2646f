"""Chat input: what a chat template is given, whatever API it was asked in."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, model_validator

from molink.client.text.demanded_calls import DemandedCalls

MAX_TOOLS: Final = 128
MAX_TOOLS_BYTES: Final = 2**17
"""Of the descriptions of all tools of a request together: they are part of the prompt."""

MOST_NAMED: Final = 300
"""Entries of an object whose values are looked at one by one."""


def _few(value: object) -> object:
    if isinstance(value, dict) and len(value) > MOST_NAMED:
        raise ValueError(f"an object has at most {MOST_NAMED} entries here, not {len(value)}")
    return value


T = TypeVar("T")
Listed = Annotated[list[T], Field(fail_fast=True)]
"""A list of which the first wrong item alone is told: each error takes a thousand times the bytes of what is wrong."""
Named = Annotated[dict[str, T], BeforeValidator(_few)]
"""An object with few entries, for the same reason."""
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


class NamedFunction(BaseModel):
    model_config = ConfigDict(strict=True)

    name: FunctionName


class NamedChoice(BaseModel):
    """The choice of one function, as both of OpenAI's APIs write it."""

    model_config = ConfigDict(strict=True)

    type: Literal["function"]
    name: FunctionName | None = None
    function: NamedFunction | None = None

    @model_validator(mode="after")
    def _names_one(self) -> "NamedChoice":
        if (self.name is None) == (self.function is None):
            raise ValueError("a choice of a function has its name")
        return self

    @property
    def chosen(self) -> str:
        return self.name or (self.function.name if self.function else "")


ToolChoice = Literal["none", "auto", "required"] | NamedChoice


@dataclass(frozen=True, slots=True)
class ChatInput:
    """Chat input: messages, tools and further variables, as chat templates expect them."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    demanded: DemandedCalls | None = None
    """Calls that the answer must be; None: the model decides."""

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
        ValueError: they are too many or too long, two have one name, or one is demanded that is not there.
    """
    tools = tools or ()
    if len(tools) > MAX_TOOLS:
        raise ValueError(f"tools are at most {MAX_TOOLS}")
    if len({tool.name for tool in tools}) < len(tools):
        raise ValueError("tools have names of their own: two are called the same")
    plain = tuple(tool.plain() for tool in tools)
    if len(json.dumps(plain)) > MAX_TOOLS_BYTES:
        raise ValueError(f"tools take at most {MAX_TOOLS_BYTES} bytes: shorten their descriptions")
    if choice == "required" and not tools:
        raise ValueError("tool_choice is required, and there are no tools")
    if isinstance(choice, NamedChoice) and choice.chosen not in {tool.name for tool in tools}:
        raise ValueError(f"tool_choice names {choice.chosen!r}, which is not among the tools")
    return () if choice == "none" else plain


def demanded_calls(choice: ToolChoice | None, *, is_single: bool) -> DemandedCalls | None:
    """The calls that the answer must be; None: the model decides. `is_single`: one call at most is asked for."""
    if isinstance(choice, NamedChoice):
        return DemandedCalls(choice.chosen, is_single=True)
    return DemandedCalls(is_single=is_single) if choice == "required" else None


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
