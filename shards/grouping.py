"""Which tensors are loaded together: a model's tensors by their names, as embeddings, layers and head."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

_LAYER: Final = re.compile(r"(?:^|\.)(?:layers|h|blocks|layer)\.(\d{1,5})\.")
_HEAD: Final = re.compile(
    r"lm_head|embed_out|project_out|output\.weight|(?:^|\.)(?:ln_f|norm_f|norm|final_\w*norm|embedding_norm)\."
)
_EMBED: Final = re.compile(r"emb|wte|wpe|project_in")
_OUTPUT: Final = re.compile(r"(?:^|\.)(?:lm_head|embed_out|output|output_layer)\.weight$")
_TOKEN_EMBEDDING: Final = re.compile(
    r"(?:embed_tokens|wte|word_embeddings|embed_in|tok_embeddings|(?:^|\.)embeddings)\.weight$"
)


@dataclass(frozen=True, slots=True)
class Groups:
    """The names of a model's tensors. One may be in two groups."""

    embed: tuple[str, ...]
    layers: Mapping[int, tuple[str, ...]]
    head: tuple[str, ...]


def layer_of(name: str) -> int | None:
    """The decoder layer that a tensor belongs to by its name; None for embeddings and head."""
    found = _LAYER.search(name)
    return int(found[1]) if found else None


def group_names(names: Iterable[str]) -> Groups:
    """The names as embeddings, layers and head."""
    layers: dict[int, list[str]] = {}
    embed: list[str] = []
    head: list[str] = []
    for name in names:
        index = layer_of(name)
        if index is not None:
            layers.setdefault(index, []).append(name)
        elif _EMBED.search(name) and not _HEAD.search(name):
            embed.append(name)
        else:
            head.append(name)
    if not any(map(_OUTPUT.search, head)):
        # Tied: the tail multiplies by the token embeddings, so it holds them as well.
        head += filter(_TOKEN_EMBEDDING.search, embed)
    return Groups(tuple(embed), {index: tuple(own) for index, own in layers.items()}, tuple(head))
