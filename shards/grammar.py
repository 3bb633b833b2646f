"""What generated text has to be, as a value: a JSON schema, a regular expression, or a grammar."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

MAX_GRAMMAR_BYTES: Final = 64 * 1024
"""It goes to every hop, and is a stranger's input at the last one."""
KINDS: Final = ("json_schema", "regex", "lark")
_ANY_OBJECT: Final = '{"type":"object"}'


class GrammarError(ValueError):
    """It is no grammar, or a longer one than is taken; the message says why."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """Grammar of all generated text, from its first character to its end. Use one of the methods that make one.

    What of it is understood is told by who draws: llguidance has JSON Schema, the regular expressions of Rust's regex
    crate (no look-around), and a dialect of Lark.
    """

    kind: str
    """One of KINDS."""
    text: str
    """At most MAX_GRAMMAR_BYTES in UTF-8."""

    def __post_init__(self) -> None:
        """Raises GrammarError."""
        if self.kind not in KINDS or not isinstance(self.text, str):
            raise GrammarError(f"a grammar is text of one of {', '.join(KINDS)}")
        try:
            size = len(self.text.encode())
        except UnicodeEncodeError as error:
            raise GrammarError("a grammar is sound Unicode text") from error
        if not 0 < size <= MAX_GRAMMAR_BYTES:
            raise GrammarError(f"a grammar has 1 to {MAX_GRAMMAR_BYTES} bytes, this one {size}")
        if self.kind == "json_schema" and not isinstance(_parsed(self.text), dict):
            raise GrammarError("a JSON schema is an object")

    @classmethod
    def json_object(cls) -> Self:
        """Returns the grammar of any JSON object."""
        return cls("json_schema", _ANY_OBJECT)

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> Self:
        """Returns the grammar of JSON that is valid for the schema, which may be text already.

        Raises:
            GrammarError: it is no schema, or too long.
        """
        if isinstance(schema, str):
            return cls("json_schema", schema)
        try:
            return cls("json_schema", json.dumps(dict(schema), ensure_ascii=False, separators=(",", ":")))
        except (TypeError, ValueError, RecursionError) as error:
            raise GrammarError(f"a JSON schema is an object of JSON: {error}") from error

    @classmethod
    def regex(cls, pattern: str) -> Self:
        """Returns the grammar of text that matches the regular expression as a whole. Raises GrammarError."""
        return cls("regex", pattern)

    @classmethod
    def lark(cls, text: str) -> Self:
        """Returns a grammar in llguidance's dialect of Lark; its rule `start` is the text. Raises GrammarError."""
        return cls("lark", text)

    @classmethod
    def from_response_format(cls, response_format: object) -> Self | None:
        """Returns the grammar that OpenAI's `response_format` asks for; None for plain text.

        Raises:
            GrammarError: it is not of that form.
        """
        match response_format:
            case None | {"type": "text"}:
                return None
            case {"type": "json_object"}:
                return cls.json_object()
            case {"type": "json_schema", "json_schema": {"schema": Mapping() as schema}}:
                return cls.json_schema(schema)
        raise GrammarError(
            'it is {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": '
            '{"name": ..., "schema": {...}}}'
        )


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"this is no JSON: {error}") from error
