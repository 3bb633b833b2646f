"""Calls of tools are found in the forms in which families of models write them, however the text is cut."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.client.text.tool_calls import (
    BARE,
    FORMS,
    ToolCall,
    ToolCallForm,
    ToolCallStream,
    form_of,
    types_of,
)

TAGGED, LISTED, SEPARATED, PIPED = FORMS
WEATHER = ToolCall("weather", '{"city": "Bern", "days": 3}')
CLOCK = ToolCall("clock", "{}")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    }
]
TYPES = types_of(TOOLS)
TOOL_CALLS = "<｜tool▁calls▁begin｜>"
WRITTEN = [
    (
        TAGGED,
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern", "days": 3}}\n</tool_call>',
        [WEATHER],
    ),
    (
        TAGGED,
        'Let me see. <tool_call>{"name": "weather", "arguments": {"city": "Bern", "days": 3}}</tool_call>\n'
        '<tool_call>{"name": "clock", "arguments": {}}</tool_call>',
        [WEATHER, CLOCK],
    ),
    (
        TAGGED,
        "<tool_call>\n<function=weather>\n<parameter=city>\nBern\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>",
        [WEATHER],
    ),
    (
        TAGGED,
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bern</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>",
        [WEATHER],
    ),
    (TAGGED, "<tool_call>clock\n</tool_call>", [CLOCK]),
    (
        LISTED,
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Bern", "days": 3}}, {"name": "clock"}]',
        [WEATHER, CLOCK],
    ),
    (
        LISTED,
        '[TOOL_CALLS]weather[ARGS]{"city": "Bern", "days": 3}[TOOL_CALLS]clock[ARGS]{}',
        [WEATHER, CLOCK],
    ),
    (
        SEPARATED,
        f"{TOOL_CALLS}<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        '{"city": "Bern", "days": 3}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        [WEATHER],
    ),
    (
        SEPARATED,
        f"{TOOL_CALLS}<｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
        '{"city": "Bern", "days": 3}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>clock<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [WEATHER, CLOCK],
    ),
    (PIPED, '<|tool_call|>[{"name": "weather", "arguments": {"city": "Bern", "days": 3}}]', [WEATHER]),
    (PIPED, '<|tool_call|>[{"name": "clock"}]<|/tool_call|>', [CLOCK]),
    (BARE, '{"name": "weather", "parameters": {"city": "Bern", "days": 3}}', [WEATHER]),
    (
        BARE,
        '<|python_tag|>{"name": "clock", "parameters": {}}; {"name": "clock", "parameters": {}}',
        [CLOCK, CLOCK],
    ),
]
TEXTS = [
    (TAGGED, "I would write <tool_call>nothing at all, {</tool_call> here."),
    (TAGGED, 'An unfinished <tool_call>{"name": "clo'),
    (TAGGED, "a < b and <tool is no call"),
    (LISTED, "[TOOL_CALLS] none"),
    (BARE, "{a brace is how this sentence begins."),
    (BARE, '["a", "list"]'),
    (BARE, 'Words, then {"name": "clock", "parameters": {}}'),
    (PIPED, ""),
    (BARE, '{"name": "clock", "parameters": {"at": NaN}}'),
    (BARE, '{"name": "clock", "parameters": {"at": 1e999}}'),
    (BARE, '{"name": "clock", "parameters": {"at": "\\ud83d"}}'),
]


def split(stream: ToolCallStream, pieces: list[str]) -> tuple[str, list[ToolCall]]:
    texts, calls = [], []
    for text, made in (*map(stream.push, pieces), stream.finish()):
        texts.append(text)
        calls += made
    return "".join(texts), calls


def cut(text: str, at: list[int]) -> list[str]:
    ends = sorted({min(one, len(text)) for one in at} | {0, len(text)})
    return [text[start:stop] for start, stop in pairwise(ends)]


@pytest.mark.parametrize(("form", "text", "calls"), WRITTEN, ids=lambda value: str(value)[:24])
@given(at=st.lists(st.integers(0, 200), max_size=20))
def test_a_call_is_found_however_the_text_is_cut(
    form: ToolCallForm, text: str, calls: list[ToolCall], at: list[int]
) -> None:
    content, found = split(ToolCallStream(form, TYPES), cut(text, at))
    assert found == calls
    assert content.strip() in ("", "Let me see.")


@pytest.mark.parametrize(("form", "text"), TEXTS, ids=lambda value: str(value)[:24])
@given(at=st.lists(st.integers(0, 100), max_size=20))
def test_text_that_is_no_call_comes_out_as_it_was(form: ToolCallForm, text: str, at: list[int]) -> None:
    assert split(ToolCallStream(form, TYPES), cut(text, at)) == (text, [])


@given(
    form=st.sampled_from([*FORMS, BARE]),
    text=st.text(max_size=300),
    marks=st.lists(
        st.sampled_from(
            [
                "<tool_call>",
                "</tool_call>",
                "[TOOL_CALLS]",
                "[ARGS]",
                TOOL_CALLS,
                "<|tool_call|>",
                "<function=",
                "{",
                "}",
                "[",
            ]
        ),
        max_size=6,
    ),
    at=st.lists(st.integers(0, 300), max_size=8),
)
def test_whatever_a_model_writes_each_call_has_a_name_and_arguments(
    form: ToolCallForm, text: str, marks: list[str], at: list[int]
) -> None:
    for place, mark in zip(at, marks, strict=False):
        text = text[:place] + mark + text[place:]
    content, calls = split(ToolCallStream(form, TYPES), cut(text, at))
    assert calls or content == text
    for call in calls:
        assert call.name
        assert isinstance(json.loads(call.arguments), dict)


@pytest.mark.parametrize(
    "body",
    [
        "x" + "<arg_key></arg_key><arg_value>" * 5_000,
        "x" + "<arg_key>" * 20_000,
        "<function=a>" * 20_000,
        "<function=a>" + "<parameter=b>" * 20_000 + "</function>",
        "[] " * 20_000,
    ],
    ids=lambda body: body[:12],
)
def test_what_a_model_was_made_to_write_is_read_in_one_pass(body: str) -> None:
    """Where each beginning looks for its end anew these take hours."""
    content, calls = split(ToolCallStream(TAGGED, TYPES), ["<tool_call>" + body + "</tool_call>"])
    assert calls in ([], [ToolCall("x", "{}")], [ToolCall("a", "{}")])
    assert calls or content


def test_the_form_is_the_one_that_the_template_shows() -> None:
    assert form_of("{{ tools }} <tool_call>") is TAGGED
    assert form_of("{% if tools %}[TOOL_CALLS]{% endif %}") is LISTED
    assert form_of('{{ tools }} reply with {"name": function name}') is BARE
    assert form_of("{{ messages }}") is None
    assert form_of("no toolset") is None


def test_a_parameter_is_of_the_type_that_its_schema_says() -> None:
    text = (
        "<tool_call>weather\n<arg_key>city</arg_key><arg_value>3</arg_value>\n"
        "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>"
    )
    [call] = split(ToolCallStream(TAGGED, TYPES), [text])[1]
    assert json.loads(call.arguments) == {"city": "3", "days": 3}
