"""Makes docs/API.md from the gateway's own description, `/openapi.json`; without --write, checks that it is current."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parent))

from support.swarms.fake_swarm import FakeSwarm

from molink.client.gateway.accounts.opening import open_to_anybody
from molink.client.gateway.app import add_kept_responses, create_app
from molink.client.gateway.models.served_models import ServedModels
from molink.client.gateway.nodes.node_routes import add_nodes
from molink.client.gateway.services.service_routes import add_services

PATH = Path(__file__).resolve().parent.parent / "docs/API.md"
HEAD = """\
# API of the gateway

Made from `/openapi.json` by `tests/generate_api.py --write`; a running gateway has the same, with every detail of each
type. What a parameter does that other servers know too is as OpenAI's and Anthropic's own references say; what would
change an answer and is not there is refused by name.

A key is shown as `Authorization: Bearer KEY` or `x-api-key: KEY`, where the gateway asks for one. Each answer has an
`X-Request-Id`. Refusals (4xx) and failures (5xx) are `{"error": {"message", "type", "param", "code"}}`, under
`/v1/messages` Anthropic's `{"type": "error", "error": {"type", "message"}}`. A chat with a model that has no
chat template is refused with the code `no_chat_template`: such a model goes on with a text.
"""
Json = dict[str, Any]


def document() -> str:
    """The whole page."""
    models, gatekeeper = ServedModels(FakeSwarm()), open_to_anybody()
    app = create_app(models, gatekeeper=gatekeeper)
    add_services(app, cast("Any", None), models, gatekeeper)  # nothing is asked of them
    add_nodes(app, cast("Any", None))
    add_kept_responses(app, cast("Any", None))
    described = app.openapi()
    schemas = described["components"]["schemas"]
    parts = [HEAD]
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            parts.append(f"## {method.upper()} {path}\n\n{operation['description']}\n")
            parts += _sections(operation, schemas)
    return "\n".join(parts)


def _sections(operation: Json, schemas: Json) -> Iterator[str]:
    query = [one for one in operation.get("parameters", ()) if one["in"] == "query"]
    if query:
        rows = [(one["name"], one["schema"], one.get("required", False)) for one in query]
        yield _table("parameter of the query", rows)
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    if body is not None:
        yield _table("field of the request", _fields(body, schemas))
    done = next(response for status, response in operation["responses"].items() if status.startswith("2"))
    for kind, content in done.get("content", {}).items():
        if "$ref" in content.get("schema", {}):
            lines = ["| field of the answer | type |", "| --- | --- |"]
            lines += [f"| `{name}` | {_kind(one)} |" for name, one, _ in _fields(content["schema"], schemas)]
            yield "\n".join(lines) + "\n"
        elif kind == "text/event-stream":
            yield "As events (`text/event-stream`), if it is asked to stream.\n" if body else "Events.\n"


def _fields(reference: Json, schemas: Json) -> list[tuple[str, Json, bool]]:
    schema = schemas[reference["$ref"].rpartition("/")[2]]
    required = schema.get("required", ())
    return [(name, one, name in required) for name, one in schema["properties"].items()]


def _table(heading: str, rows: list[tuple[str, Json, bool]]) -> str:
    lines = [f"| {heading} | type | without it |", "| --- | --- | --- |"]
    for name, schema, required in rows:
        default = (
            "" if "default" not in schema or schema["default"] is None else f"`{_word(schema['default'])}`"
        )
        lines.append(f"| `{name}` | {_kind(schema)} | {'refused' if required else default} |")
    return "\n".join(lines) + "\n"


def _kind(schema: Json) -> str:
    """A type in words. What is one of a document's own is named by that."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_kind(one) for one in schema["anyOf"] if one.get("type") != "null"))
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{word}`" for word in schema.get("enum", [schema.get("const")]))
    kind = str(schema.get("type", "any"))
    if kind == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    bounds = _bounds(schema)
    return f"{kind} {bounds}" if bounds else kind


def _bounds(schema: Json) -> str:
    least, most = schema.get("minimum"), schema.get("maximum")
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    said = [
        f"from {least:g}" if least is not None and abs(least) < 2**31 else "",
        f"above {above:g}" if above is not None else "",
        f"to {most:g}" if most is not None else "",
        f"below {below:g}" if below is not None and below < 2**31 else "",
    ]
    return " ".join(one for one in said if one)


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def main() -> int:
    made = document()
    if "--write" in sys.argv[1:]:
        PATH.write_text(made, encoding="utf-8")
        print(f"wrote {PATH.name}")
        return 0
    if PATH.read_text(encoding="utf-8") == made:
        return 0
    print(f"{PATH.name} is not current: {sys.executable} {__file__} --write", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
