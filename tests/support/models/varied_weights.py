"""How the weights of the tests' tiny models are drawn so that their text is varied.

`python tests/support/models/varied_weights.py --write`, with `tests` on PYTHONPATH, finds it anew.
"""

import json
import sys

from support.models.tiny_models import (
    ARCHITECTURES,
    LEAST,
    MONOTONOUS,
    VARIED,
    Drawn,
    find_varied,
    model_key,
    quietly,
    randomise,
    untrained,
    varied_weights,
    variety,
)

LONG = ("llama", "qwen2_sliding", "cohere2", "mistral", "gemma2", "gemma3", "gpt_oss", "falcon_alibi")
ALWAYS_MADE: tuple[tuple[str, int, dict[str, object]], ...] = (
    *((architecture, 0, {}) for architecture in ARCHITECTURES if architecture != MONOTONOUS),
    ("llama", 1, {}),
    ("llama", 2, {}),
    ("llama", 0, {"num_hidden_layers": 2}),
    ("llama", 0, {"num_hidden_layers": 8}),
    ("llama", 0, {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}),
    ("llama", 0, {"num_key_value_heads": 4, "num_hidden_layers": 2}),
    ("llama", 0, {"intermediate_size": 95, "num_hidden_layers": 2}),
    *((architecture, 0, {"max_position_embeddings": 2048}) for architecture in LONG),
)
"""Architecture, seed and changes of the configuration of those that most tests make."""


def find_all() -> dict[str, Drawn]:
    found = {}
    for architecture, seed, changes in ALWAYS_MADE:
        said = json.dumps(changes, sort_keys=True)
        model = untrained(architecture, seed, said)
        found[model_key(architecture, seed, said)] = find_varied(model, seed)
        print(architecture, seed, said, *found[model_key(architecture, seed, said)], flush=True)
    return found


def monotonous() -> list[str]:
    """Those of what is written down whose text is not varied."""
    found = []
    for key, drawn in varied_weights().items():
        architecture, seed, changes = key.split(maxsplit=2)
        model = untrained(architecture, int(seed), changes)
        randomise(model, *drawn)
        if variety(model, int(seed)) < LEAST:
            found.append(key)
    return found


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    lines = [f"  {json.dumps(key)}: {json.dumps(drawn)}" for key, drawn in quietly(find_all).items()]
    VARIED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
