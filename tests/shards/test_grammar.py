"""A grammar is text of a known kind and bounded length, and nothing else becomes one."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.shards.grammar import KINDS, MAX_GRAMMAR_BYTES, Grammar, GrammarError
from molink.shards.spec import SamplingError, SamplingParams

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)


@given(st.dictionaries(st.text(max_size=5), JSON, max_size=4))
def test_a_schema_is_kept_as_it_is(schema: dict[str, object]) -> None:
    grammar = Grammar.json_schema(schema)
    assert (grammar.kind, json.loads(grammar.text)) == ("json_schema", schema)
    asked = {"type": "json_schema", "json_schema": {"name": "any", "strict": True, "schema": schema}}
    assert Grammar.from_response_format(asked) == grammar


def test_response_formats_are_those_of_openai() -> None:
    assert Grammar.from_response_format(None) is None
    assert Grammar.from_response_format({"type": "text"}) is None
    assert Grammar.from_response_format({"type": "json_object"}) == Grammar.json_object()


@given(JSON)
def test_any_other_response_format_is_refused(value: object) -> None:
    if value is not None:
        with pytest.raises(GrammarError):
            Grammar.from_response_format(value)


@pytest.mark.parametrize("kind", KINDS)
def test_the_longest_grammar_has_64_kib(kind: str) -> None:
    empty = json.dumps({"const": ""})
    longest = empty.replace('""', f'"{"a" * (MAX_GRAMMAR_BYTES - len(empty))}"')
    assert Grammar(kind, longest).text == longest
    with pytest.raises(GrammarError, match="65536 bytes"):
        Grammar(kind, longest + " ")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", "[]"),
        ("json_schema", "{"),
        ("json_schema", "[" * 30_000),
        ("regex", ""),
        ("yaml", "a"),
        ("regex", "\ud800"),
    ],
    ids=["no object", "no JSON", "deep", "empty", "unknown kind", "no Unicode"],
)
def test_what_is_no_grammar_is_refused(kind: str, text: str) -> None:
    with pytest.raises(GrammarError):
        Grammar(kind, text)


def test_a_text_with_a_grammar_has_an_end() -> None:
    with pytest.raises(SamplingError, match="ignore_eos must be False with a grammar") as refused:
        SamplingParams(grammar=Grammar.json_object(), ignore_eos=True)
    assert refused.value.parameter == "ignore_eos"
