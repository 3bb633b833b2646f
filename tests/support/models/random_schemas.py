"""Random JSON schemas whose documents are short, from a seed."""

import random
from typing import Any

WORDS = ("king", "queen", "sword", "crown", "love", "night", "day", "rose")


def random_schema(seed: int, depth: int = 2) -> dict[str, Any]:
    """An object's schema."""
    return _object(random.Random(seed), depth)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(WORDS, rng.randint(1, 3))
    return {
        "type": "object",
        "properties": {name: _any(rng, depth - 1) for name in names},
        "required": sorted(rng.sample(names, rng.randint(0, len(names)))),
        "additionalProperties": False,
    }


def _any(rng: random.Random, depth: int) -> dict[str, Any]:
    leaves = (
        _integer,
        _string,
        _pattern,
        _enum,
        _number,
        lambda _: {"type": rng.choice(["boolean", "null"])},
    )
    inner = (_object, _array, _choice) if depth > 0 else ()
    make = rng.choice((*leaves, *inner))
    return make(rng, depth) if make in inner else make(rng)


def _integer(rng: random.Random) -> dict[str, Any]:
    least = rng.randint(-50, 50)
    return {"type": "integer", "minimum": least, "maximum": least + rng.randint(0, 100)}


def _number(rng: random.Random) -> dict[str, Any]:
    return {"type": "number", "multipleOf": 1, "minimum": 0, "exclusiveMaximum": rng.randint(1, 10)}


def _string(rng: random.Random) -> dict[str, Any]:
    least = rng.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 8)}


def _pattern(rng: random.Random) -> dict[str, Any]:
    return {
        "type": "string",
        "pattern": rng.choice(["^[a-z]{2,6}$", "^(to be|not to be)$", "^[0-9]{4}-[0-9]{2}$"]),
    }


def _enum(rng: random.Random) -> dict[str, Any]:
    return {"enum": [*rng.sample(WORDS, 2), rng.randint(0, 9), None]}


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "array", "items": _any(rng, depth - 1), "minItems": rng.randint(0, 1), "maxItems": 2}


def _choice(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_any(rng, depth - 1), _any(rng, depth - 1)]}
