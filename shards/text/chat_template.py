"""A model's chat template: Jinja from a stranger, rendered in a sandbox as transformers renders it."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_RENDERED_CHARACTERS: Final = 2**24
_REASONING_KEYS: Final = ("reasoning_content", "thinking", "reasoning")

Message = Mapping[str, Any]


class ChatTemplateError(ValueError):
    """The template is broken, or it refuses the messages."""


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; here its content is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _PlainNamespace(Namespace):
    """A namespace whose names cannot reach into Python."""

    def __init__(self, /, *args: Any, **names: Any) -> None:  # noqa: ANN401 - Jinja's own signature
        attributes = dict(*args, **names)
        for name in attributes:
            _refuse_underscore(name)
        super().__init__(attributes)

    def __setitem__(self, name: str, value: object) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


class _PlainDict:
    """`dict(...)` without the methods of the class."""

    def __call__(self, *args: Any, **items: Any) -> dict[Any, Any]:  # noqa: ANN401 - as dict itself
        return dict(*args, **items)


class ChatTemplate:
    """A compiled chat template."""

    def __init__(self, source: str) -> None:
        """Raises `ChatTemplateError` if it is no Jinja template."""
        self._template = _compile(source)

    def render(
        self,
        messages: Sequence[Message],
        special_tokens: Mapping[str, str],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Renders the text to encode.

        Args:
            messages: the chat, at least one message.
            special_tokens: those that the template may name, such as bos_token.
            add_generation_prompt: whether the text ends with the beginning of an answer.
            tools: what the model may call, each a function's description as transformers takes it.
            variables: further variables of the template, such as enable_thinking; none of those above.

        Raises:
            ChatTemplateError: the template refuses the messages, fails, or writes without end.
        """
        if not messages:
            raise ChatTemplateError("a chat needs at least one message")
        values: dict[str, Any] = {
            **_plain(variables or {}, "a variable of the chat template"),
            **special_tokens,
        }
        values.update(
            messages=[_plain_message(message) for message in messages],
            tools=_plain(list(tools), "a tool") or None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
        )
        pieces: list[str] = []
        written = 0
        try:
            for piece in self._template.generate(values):
                written += len(piece)
                if written > MAX_RENDERED_CHARACTERS:
                    raise ChatTemplateError(f"it writes over {MAX_RENDERED_CHARACTERS} characters")
                pieces.append(piece)
        except ChatTemplateError:
            raise
        except Exception as error:
            raise ChatTemplateError(f"the model's chat template refuses these messages: {error}") from error
        return "".join(pieces)


def _compile(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=_strftime_now,
        dict=_PlainDict(),
        namespace=_PlainNamespace,
    )
    try:
        return environment.from_string(source)
    except (TemplateError, RecursionError) as error:
        raise ChatTemplateError(f"the model's chat template is not valid: {error}") from error


def _plain_message(message: Message) -> dict[str, Any]:
    """A copy out of plain JSON values, without absent ones; reasoning is there under each of its names."""
    plain = _plain({key: value for key, value in message.items() if value is not None}, "a chat message")
    reasoning = next((plain[key] for key in _REASONING_KEYS if plain.get(key) is not None), None)
    if reasoning is None:
        return dict(plain)
    return {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _plain(value: Any, what: str) -> Any:  # noqa: ANN401 - JSON
    """A copy out of plain JSON values."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise ChatTemplateError(f"{what} must be made of JSON values: {error}") from error


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:  # noqa: A002 - templates may name the argument
    return datetime.now().astimezone().strftime(format)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter of this name escapes for HTML, which no model has seen."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise TemplateError(
            f"a namespace cannot hold {name!r}: names with an underscore first are Python's own"
        )
