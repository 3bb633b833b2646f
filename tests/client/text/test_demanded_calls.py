"""Where calls are demanded, whatever masks let come is calls of the tools, in the form of the model's template."""

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from support.swarms.live_swarms import bundled_folder

from molink.client.text.demanded_calls import DemandedCalls, grammar_of_calls
from molink.client.text.tool_calls import ToolCall, ToolCallStream, form_of, types_of
from molink.shards.text.token_masks import MaskTokenizer, TokenMasks
from molink.shards.text.tokenizer import Tokenizer, read_files

STOP = 1
TEMPLATES = {
    "hermes": '{{ tools }}<tool_call>\n{"name": ..., "arguments": ...}\n</tool_call>',
    "mistral": '{{ tools }}[TOOL_CALLS] [{"name": ..., "arguments": ...}]',
    "mistral, later": "{{ tools }}[TOOL_CALLS]name[ARGS]{}",
    "deepseek": "{{ tools }}<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    "granite": "{{ tools }}<|tool_call|>[]",
    "bare, llama": '{{ tools }}{"name": ..., "parameters": ...}',
    "bare": '{{ tools }}{"name": ..., "arguments": ...}',
}
MARKS = (
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<|tool_call|>",
)  # fmt: skip
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"$ref": "#/$defs/City"},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"City": {"enum": ["Rome", 'Oslo "N"']}},
}
SWITCH = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}},
    "required": ["on"],
    "additionalProperties": False,
}
TOOLS = (
    {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "switch", "parameters": SWITCH}},
)
SCHEMAS = {"get_weather": PARAMETERS, "switch": SWITCH}


@pytest.fixture(scope="module")
def plain() -> Tokenizer:
    """Its marks are text like any other."""
    return Tokenizer.from_folder(bundled_folder())


@pytest.fixture(scope="module")
def marked() -> Tokenizer:
    """Its marks are special tokens."""
    files = read_files(bundled_folder())
    document = json.loads(files["tokenizer.json"])
    first = 1 + max(one["id"] for one in document["added_tokens"])
    first = max(first, 1 + max(document["model"]["vocab"].values()))
    document["added_tokens"] += [
        {"id": first + at, "content": mark, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}
        for at, mark in enumerate(MARKS)
    ]  # fmt: skip
    return Tokenizer.from_files({**files, "tokenizer.json": json.dumps(document).encode()})


def written(
    tokenizer: Tokenizer, template: str, demanded: DemandedCalls, seed: int
) -> tuple[str, tuple[ToolCall, ...]]:
    """The text and the calls of any answer that masks let come."""
    form = form_of(template)
    assert form is not None
    grammar = grammar_of_calls(demanded, TOOLS, form, template, tokenizer.token_id)
    size = tokenizer.vocabulary_size
    rng, masks = random.Random(seed), TokenMasks(MaskTokenizer(tokenizer, size, [STOP]), grammar)
    stream = ToolCallStream(form, types_of(TOOLS))
    counted = stream.token_ids(tokenizer.token_id)
    ids: list[int] = []
    while True:
        mask, _ = masks.next()
        token = rng.choice([one for one in range(size) if mask[one // 8] >> one % 8 & 1])
        if token == STOP:
            break
        ids.append(token)
        masks.follow([token])
        assert len(ids) < 2000
    text = _text(tokenizer, ids, counted)
    before, calls = stream.push(text)
    after, more = stream.finish()
    return before + after, calls + more


def _text(tokenizer: Tokenizer, ids: Sequence[int], counted: frozenset[int]) -> str:
    parts: list[str] = []
    run: list[int] = []
    for one in ids:
        if one in counted:
            parts += [tokenizer.decode_raw(run), tokenizer.token_text(one)]
            run = []
        else:
            run.append(one)
    return "".join([*parts, tokenizer.decode_raw(run)])


@pytest.mark.parametrize("kind", ["plain", "marked"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_every_answer_is_calls_of_the_tools_with_arguments_of_their_schemas(
    name: str, kind: str, request: pytest.FixtureRequest
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    for seed in range(3):
        text, calls = written(tokenizer, TEMPLATES[name], DemandedCalls(), seed)
        assert text.strip() == ""
        assert calls
        for call in calls:
            Draft202012Validator(SCHEMAS[call.name]).validate(json.loads(call.arguments))


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_function_that_is_named_is_called_once(name: str, plain: Tokenizer) -> None:
    for seed in range(3):
        _, calls = written(plain, TEMPLATES[name], DemandedCalls("switch", is_single=True), seed)
        assert [call.name for call in calls] == ["switch"]


@pytest.mark.parametrize(
    ("demanded", "tools", "template", "reason"),
    [
        (DemandedCalls("fly"), TOOLS, TEMPLATES["hermes"], "there is no tool 'fly'"),
        (DemandedCalls(), (), TEMPLATES["hermes"], "there are no tools"),
        (DemandedCalls(), TOOLS, "{{ tools }}<tool_call><function=name>", "arguments one by one"),
        (DemandedCalls(), ({"type": "function"},), TEMPLATES["bare"], "a function with a name"),
    ],
)
def test_what_cannot_be_demanded_is_said(
    demanded: DemandedCalls, tools: tuple[dict[str, Any], ...], template: str, reason: str
) -> None:
    form = form_of(template)
    assert form is not None
    with pytest.raises(ValueError, match=reason):
        grammar_of_calls(demanded, tools, form, template, lambda _: None)


def test_users_write_words_or_names() -> None:
    assert DemandedCalls.of("auto") is DemandedCalls.of(None) is None
    assert DemandedCalls.of("required") == DemandedCalls()
    assert DemandedCalls.of("switch") == DemandedCalls("switch", is_single=True)
    assert DemandedCalls.of(DemandedCalls("switch")) == DemandedCalls("switch")
