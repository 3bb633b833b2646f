"""Grammars of tool calls that are demanded: the answer is calls, in the form that the model's chat template shows.

What a model would write of its own accord has its form by training; where it must call a tool, a grammar leaves it
nothing else. The grammar is drawn by where tokens are drawn (decision 0048), so only marks and JSON stand in it.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self, TypeAlias

from molink.client.text.tool_calls import (
    CALL_BEGIN,
    CALL_END,
    SEPARATOR,
    ToolCallForm,
)
from molink.shards.grammar import Grammar

_ANY_OBJECT: Final[Mapping[str, Any]] = {"type": "object"}
_WRITTEN_OUT: Final = ("<function=", "<arg_key>")
"""In templates whose arguments are written parameter by parameter, and not as JSON."""


@dataclass(frozen=True, slots=True)
class DemandedCalls:
    """Calls that an answer must be."""

    name: str = ""
    """Of the one function that is called; empty: any of those that are there."""
    is_single: bool = False
    """Whether one call is all."""

    @classmethod
    def of(cls, choice: "str | DemandedCalls | None") -> Self | None:
        """Reads what users write: `auto` or nothing: none is demanded; `required`: any; else a function's name."""
        if choice is None or choice == "auto":
            return None
        if isinstance(choice, DemandedCalls):
            return cls(choice.name, choice.is_single)
        return cls() if choice == "required" else cls(choice, is_single=True)


CallChoice: TypeAlias = str | DemandedCalls
"""As users write it (`DemandedCalls.of`), or as a value."""


def grammar_of_calls(
    demanded: DemandedCalls,
    tools: Sequence[Mapping[str, Any]],
    form: ToolCallForm,
    template: str,
    id_of: Callable[[str], int | None],
) -> Grammar:
    """Returns the grammar of calls of the tools.

    Args:
        demanded: which of them are called, and how often.
        tools: as OpenAI describes them.
        form: in which the model calls.
        template: the chat template that the form is of.
        id_of: the id of a text that is one token; None: it is none.

    Raises:
        ValueError: there is no such tool, or the template's form is not one of JSON.
        GrammarError: it would be too long.
    """
    functions = [_function(tool) for tool in tools]
    if demanded.name:
        functions = [one for one in functions if one["name"] == demanded.name]
    if not functions:
        what = f"there is no tool {demanded.name!r}" if demanded.name else "there are no tools"
        raise ValueError(f"{what} to call")
    if form.begin == "<tool_call>" and any(mark in template for mark in _WRITTEN_OUT):
        raise ValueError(
            "the model writes arguments one by one, which cannot be demanded: leave tool_choice at auto"
        )

    def mark(text: str) -> str:
        """A mark as its token, where it is one: as text, no special token would be taken for it."""
        token_id = id_of(text)
        return json.dumps(text, ensure_ascii=False) if token_id is None else f"<[{token_id}]>"

    rules: tuple[str, ...]
    match form.begin:
        case "<tool_call>":
            newline = '"\\n"'
            one = f"{mark(form.begin)} {newline} object {newline} {mark(form.end)}"
            rules = _repeated(newline, demanded), f"call: {one}", _objects(functions, "arguments")
        case "[TOOL_CALLS]" if "[ARGS]" in template:
            calls = [
                f"{mark(form.begin)} {json.dumps(one['name'])} {mark('[ARGS]')} {_json(one['parameters'])}"
                for one in functions
            ]
            rules = _repeated("", demanded), f"call: {' | '.join(calls)}"
        case "[TOOL_CALLS]" | "<|tool_call|>":
            listed = f"{mark(form.begin)} {_json(_list_of(functions, demanded))}"
            rules = (f"start: {listed}",)
        case "":
            key = "parameters" if '"parameters"' in template else "arguments"
            rules = "start: object", _objects(functions, key)
        case _:
            calls = [_fenced(one, mark) for one in functions]
            body = _repeated('"\\n"', demanded).removeprefix("start: ")
            rules = f"start: {mark(form.begin)} {body} {mark(form.end)}", f"call: {' | '.join(calls)}"
    return Grammar.lark("\n".join(rules))


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError("a tool has a function with a name")
    return {"name": function["name"], "parameters": function.get("parameters") or _ANY_OBJECT}


def _repeated(between: str, demanded: DemandedCalls) -> str:
    return "start: call" if demanded.is_single or demanded.name else f"start: call ({between} call)*"


def _call_schema(function: Mapping[str, Any], key: str, place: str = "#") -> dict[str, Any]:
    """The schema of a call, which is at that place of a schema. What the parameters refer to is in themselves."""
    parameters = _moved(function["parameters"], f"{place}/properties/{key}")
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, key: parameters},
        "required": ["name", key],
        "additionalProperties": False,
    }


def _moved(schema: object, place: str) -> Any:  # noqa: ANN401 - JSON
    """The same schema at another place: references within it begin there."""
    if isinstance(schema, list):
        return [_moved(one, place) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        name: place + value[1:]
        if name == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value, place)
        for name, value in schema.items()
    }


def _objects(functions: Sequence[Mapping[str, Any]], key: str) -> str:
    return "object: " + " | ".join(_json(_call_schema(one, key)) for one in functions)


def _list_of(functions: Sequence[Mapping[str, Any]], demanded: DemandedCalls) -> dict[str, Any]:
    schema: dict[str, Any] = {
        "type": "array",
        "items": {
            "anyOf": [
                _call_schema(one, "arguments", f"#/items/anyOf/{at}") for at, one in enumerate(functions)
            ]
        },
        "minItems": 1,
    }
    return schema | ({"maxItems": 1} if demanded.is_single or demanded.name else {})


def _fenced(function: Mapping[str, Any], mark: Callable[[str], str]) -> str:
    head, name = mark(CALL_BEGIN), json.dumps(f"{function['name']}\n```json\n")
    return f'{head} "function" {mark(SEPARATOR)} {name} {_json(function["parameters"])} "\\n```" {mark(CALL_END)}'


def _json(schema: Mapping[str, Any]) -> str:
    """A rule's part for JSON of the schema. Between two marks is one space at most: spaces without end are JSON too."""
    options = {"x-guidance": {"whitespace_pattern": " ?"}}
    return "%json " + json.dumps({**schema, **options}, ensure_ascii=False)
