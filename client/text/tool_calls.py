"""Parser of tool calls: functions that a model calls, out of its text as it streams. Pure.

Each family of models writes calls in a form of its own, which its chat template shows. The form is found by the marks
that stand in the template; what stands between them is read by what it looks like. Text that begins like a call and is
none comes out as text.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from molink.shards.text.text_stream import overlap

_NAME: Final = re.compile(r"[\w.:-]{1,256}")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Tool call: a function and its arguments."""

    name: str
    arguments: str
    """A JSON object as text."""


Types = Mapping[tuple[str, str], str]
"""The JSON type of a parameter, by the function's name and its own, where the schema says one."""


@dataclass(frozen=True, slots=True)
class ToolCallForm:
    """Form of tool calls: what stands before and behind one, and how what is between is read."""

    begin: str
    """Empty: the whole answer is calls, if it begins as JSON does."""
    end: str
    """Empty: calls go on to the end of the answer."""
    read: Callable[[str, Types], Sequence[ToolCall]]
    """Raises `ValueError`, `TypeError` or `KeyError` where it is no call."""
    marks: tuple[str, ...] = ()
    """Further tokens that must be seen in the text, although they are special."""


def form_of(template: str) -> ToolCallForm | None:
    """Returns the form in which a model with this chat template calls tools; None: its template takes none."""
    if not re.search(r"\btools\b", template):
        return None
    return next((form for form in FORMS if form.begin and form.begin in template), BARE)


def types_of(tools: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], str]:
    """The declared types of the parameters of all functions."""
    types: dict[tuple[str, str], str] = {}
    for tool in tools:
        function = tool.get("function")
        if not isinstance(function, Mapping):
            continue
        schema = function.get("parameters")
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        for name, one in properties.items() if isinstance(properties, Mapping) else ():
            if isinstance(one, Mapping) and isinstance(one.get("type"), str):
                types[str(function["name"]), name] = one["type"]
    return types


class ToolCallStream:
    """Tool call stream: splits one answer's text, piece by piece, into text and calls."""

    def __init__(self, form: ToolCallForm, types: Types) -> None:
        self._form = form
        self._types = types
        self._held = ""
        """Text of which it is not certain yet what it is."""
        self._inside = False
        """Whether it stands behind the beginning of a call."""
        self._searched = 0
        """Characters of it in which the end of the call does not begin."""
        self._plain = False
        """Whether all that comes is text."""

    def token_ids(self, id_of: Callable[[str], int | None]) -> frozenset[int]:
        """The ids of the form's marks, of those that are tokens: they count although they may be special."""
        texts = filter(None, (self._form.begin, self._form.end, *self._form.marks))
        return frozenset(found for text in texts if (found := id_of(text)) is not None)

    def push(self, text: str) -> tuple[str, tuple[ToolCall, ...]]:
        """The text that is certain now, and the calls that are complete."""
        self._held += text
        if self._plain:
            return self._take(len(self._held)), ()
        if not self._form.begin:
            return self._push_bare(), ()
        out: list[str] = []
        calls: list[ToolCall] = []
        while True:
            if not self._inside:
                at = self._held.find(self._form.begin)
                if at < 0:
                    out.append(self._take(len(self._held) - overlap(self._held, self._form.begin)))
                    return "".join(out), tuple(calls)
                out.append(self._take(at))
                self._take(len(self._form.begin))
                self._inside, self._searched = True, 0
            end = self._end()
            if end < 0:
                return "".join(out), tuple(calls)
            body = self._take(end)
            closed = self._take(len(self._form.end))
            self._inside = False
            content, made = self._read(body, closed)
            out.append(content)
            calls.extend(made)

    def finish(self) -> tuple[str, tuple[ToolCall, ...]]:
        """What is left at the end of the answer: a call that only the end of the text ends, or text."""
        body = self._take(len(self._held))
        is_calls = self._inside or (not self._form.begin and not self._plain)
        self._inside, self._plain = False, True
        return self._read(body, "") if is_calls and body else (body, ())

    def _push_bare(self) -> str:
        begun = self._held.lstrip()
        starts = ("{", "[", *self._form.marks)
        self._plain = not any(begun.startswith(start) or start.startswith(begun) for start in starts)
        return self._take(len(self._held)) if self._plain else ""

    def _end(self) -> int:
        if not self._form.end:
            return -1
        at = self._held.find(self._form.end, self._searched)
        if at < 0:
            self._searched = max(0, len(self._held) - len(self._form.end) + 1)
        return at

    def _take(self, characters: int) -> str:
        taken, self._held = self._held[:characters], self._held[characters:]
        return taken

    def _read(self, body: str, closed: str) -> tuple[str, tuple[ToolCall, ...]]:
        try:
            calls = tuple(self._form.read(body, self._types))
        except (ValueError, TypeError, KeyError, RecursionError):
            calls = ()
        return ("", calls) if calls else (self._form.begin + body + closed, ())


def _json_calls(body: str, _: Types) -> list[ToolCall]:
    """Reads objects with a name and arguments: one, several behind one another, or lists of them."""
    calls: list[ToolCall] = []
    for value in _json_values(body):
        calls += [_json_call(one) for one in (value if isinstance(value, list) else [value])]
    return calls


def _json_values(text: str) -> Iterator[Any]:
    decoder, text = json.JSONDecoder(), text.strip(_BLANKS)
    at = 0
    while at < len(text):
        value, at = decoder.raw_decode(text, at)
        yield value
        while at < len(text) and text[at] in _BLANKS:
            at += 1


def _json_call(value: object) -> ToolCall:
    if not isinstance(value, Mapping):
        raise TypeError("a call is a JSON object")
    function = value.get("function")
    if isinstance(function, Mapping):
        value = function
    key = next(key for key in (*_ARGUMENTS, "") if key in value or not key)
    arguments = value[key] if key else {}
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    return _call(value["name"], arguments)


def _call(name: object, arguments: object) -> ToolCall:
    if not isinstance(name, str) or not _NAME.fullmatch(name.strip()):
        raise ValueError("a call has the name of a function")
    if not isinstance(arguments, Mapping):
        raise TypeError("arguments are a JSON object")
    written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    written.encode()  # half of a character, which no answer can be made of, is no text
    return ToolCall(name.strip(), written)


def _tagged_calls(body: str, types: Types) -> list[ToolCall]:
    """Reads what stands in tags: JSON, `<function=NAME><parameter=KEY>`, or a name with `<arg_key>` and so on."""
    begun = body.lstrip()
    if begun.startswith(("{", "[")):
        return _json_calls(body, types)
    if begun.startswith("<function="):
        return [
            _typed_call(name, tuple(_elements(_PARAMETER, "</parameter>", inside)), types)
            for name, inside in _elements(_FUNCTION, "</function>", body)
        ]
    name = begun.partition("<arg_key>")[0].strip()
    return [_typed_call(name, tuple(_argument_pairs(body)), types)]


def _elements(begin: re.Pattern[str], end: str, text: str) -> Iterator[tuple[str, str]]:
    """Names of elements, and what is in them up to the first end. In one pass over a text that a client can have a
    model write: a pattern for both ends looks for the one that is missing from each beginning anew."""
    at = 0
    while (begun := begin.search(text, at)) is not None:
        at = text.find(end, begun.end())
        if at < 0:
            return
        yield begun[1], text[begun.end() : at]


def _argument_pairs(text: str) -> Iterator[tuple[str, str]]:
    """Keys and values, likewise; a key without a value behind it is none."""
    at = 0
    while (key := text.find("<arg_key>", at)) >= 0:
        at = text.find("</arg_key>", key)
        if at < 0:
            return
        value = _ARGUMENT_VALUE.match(text, at)
        if value is None:
            continue
        name, at = text[key + len("<arg_key>") : at], text.find("</arg_value>", value.end())
        if at < 0:
            return
        yield name, text[value.end() : at]


def _typed_call(name: str, pairs: Sequence[tuple[str, str]], types: Types) -> ToolCall:
    arguments = {
        key.strip(): _typed(value.strip("\n"), types.get((name.strip(), key.strip()), ""))
        for key, value in pairs
    }
    return _call(name, arguments)


def _typed(text: str, kind: str) -> object:
    """The value of a parameter that was written as text: what its schema says, or text where it does not read so."""
    if kind == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _named_calls(body: str, types: Types) -> list[ToolCall]:
    """Reads a JSON list of calls, or `NAME[ARGS]{...}` once or several times, each behind the mark."""
    if "[ARGS]" not in body:
        return _json_calls(body, types)
    calls = []
    for part in body.split("[TOOL_CALLS]"):
        name, _, arguments = part.partition("[ARGS]")
        calls.append(_call(name.partition("[CALL_ID]")[0], json.loads(arguments)))
    return calls


def _separated_calls(body: str, _: Types) -> list[ToolCall]:
    """Reads calls of `NAME SEPARATOR ARGUMENTS`, or `function SEPARATOR NAME` with arguments in a fenced block."""
    calls = []
    for inside in re.findall(f"{CALL_BEGIN}(.*?)(?:{CALL_END}|$)", body, re.DOTALL):
        name, _, arguments = inside.partition(SEPARATOR)
        fenced = _FENCED.fullmatch(arguments.strip())
        if fenced is not None:
            name, arguments = fenced.groups()
        calls.append(_call(name, json.loads(arguments)))
    return calls


_ARGUMENTS: Final = ("arguments", "parameters", "args")
_BLANKS: Final = " \t\r\n;"
_FUNCTION: Final = re.compile(r"<function=([^>\n]{1,1024})>")
_PARAMETER: Final = re.compile(r"<parameter=([^>\n]{1,1024})>")
_ARGUMENT_VALUE: Final = re.compile(r"</arg_key>\s*<arg_value>")
CALL_BEGIN: Final = "<｜tool▁call▁begin｜>"
CALL_END: Final = "<｜tool▁call▁end｜>"
SEPARATOR: Final = "<｜tool▁sep｜>"
_TAG: Final = "<|python_tag|>"
_FENCED: Final = re.compile(r"([^\n]+)\n```json\n(.*?)\n```", re.DOTALL)

FORMS: Final = (
    ToolCallForm("<tool_call>", "</tool_call>", _tagged_calls),
    ToolCallForm("[TOOL_CALLS]", "", _named_calls, marks=("[ARGS]", "[CALL_ID]")),
    ToolCallForm(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        _separated_calls,
        marks=(CALL_BEGIN, CALL_END, SEPARATOR),
    ),
    ToolCallForm(
        "<|tool_call|>", "", lambda body, types: _json_calls(body.removesuffix("<|/tool_call|>"), types)
    ),
)
BARE: Final = ToolCallForm(
    "", "", lambda body, types: _json_calls(body.lstrip().removeprefix(_TAG), types), (_TAG,)
)
"""The whole answer is a call, if it is JSON: templates that say so in words."""
