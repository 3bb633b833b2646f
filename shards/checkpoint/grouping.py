"""Which tensors are loaded together: a model's tensors by their names, as embeddings, layers and head."""

import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

_LAYER: Final = re.compile(r"(?:^|\.)(?:layers|h|blocks|layer)\.(\d{1,5})\.")
_HEAD: Final = re.compile(
    r"lm_head|embed_out|project_out|output\.weight|(?:^|\.)(?:ln_f|norm_f|norm|final_\w*norm|embedding_norm)\."
)
_OTHER_INPUTS: Final = re.compile(r"(?:^|\.)embed_tokens_extend\.")
_EMBED: Final = re.compile(r"emb|wte|wpe|project_in")
_EMBED_NORM: Final = re.compile(r"(?:^|\.)embeddings\.norm\.")
_HEAD_ALONE: Final = re.compile(r"(?:^|\.)(?:lm_head|embed_out|output_layer)\.")
_OUTPUT: Final = re.compile(r"(?:^|\.)(?:lm_head|embed_out|output|output_layer|decoder)\.weight$")
_TOKEN_EMBEDDING: Final = re.compile(
    r"(?:embed_tokens|wte|word_embeddings|embed_in|tok_embeddings|(?:^|\.)embeddings)\.weight$"
)


_OTHER_PARTS: Final = ("text_config", "vision_config", "audio_config")
"""Keys of configurations of models that take more than text."""


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


def group_names(names: Iterable[str], configuration: Mapping[str, object] | None = None) -> Groups:
    """The names as embeddings, layers and head.

    Of a model that takes more than text, as its `configuration` says, only those of the text part.
    """
    if any(isinstance((configuration or {}).get(key), Mapping) for key in _OTHER_PARTS):
        names = _of_text(list(names))
    layers: dict[int, list[str]] = {}
    embed: list[str] = []
    head: list[str] = []
    for name in names:
        if _OTHER_INPUTS.search(name):
            continue
        index = layer_of(name)
        if index is not None:
            layers.setdefault(index, []).append(name)
        elif _EMBED_NORM.search(name) or (_EMBED.search(name) and not _HEAD.search(name)):
            embed.append(name)
        else:
            head.append(name)
    if not any(map(_OUTPUT.search, head)):
        # Tied: the tail multiplies by the token embeddings, so it holds them as well.
        head += filter(_TOKEN_EMBEDDING.search, embed)
    return Groups(tuple(embed), {index: tuple(own) for index, own in layers.items()}, tuple(head))


def _of_text(names: list[str]) -> list[str]:
    """The names of the text part: of all lists of layers it is the one that lies next to an embedding of tokens."""
    lists = dict.fromkeys(name[: found.start()] for name in names if (found := _LAYER.search(name)))
    embeddings = [name[: found.start()] for name in names if (found := _TOKEN_EMBEDDING.search(name))]
    pairs = [(above, beside) for above in lists for beside in embeddings]
    if not pairs:
        return names
    above, beside = max(pairs, key=lambda pair: len(_common(*pair)))
    text = _common(above, beside)
    foreign = tuple(f"{other}." for other in lists if other != above and other.startswith(text))
    return [
        name
        for name in names
        if (_is_inside(name, text) and not name.startswith(foreign)) or _HEAD_ALONE.search(name)
    ]


def _common(one: str, other: str) -> str:
    """The modules in which both lie, as a dotted name."""
    pairs = zip(one.split("."), other.split("."), strict=False)
    return ".".join(part for part, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _is_inside(name: str, module: str) -> bool:
    return not module or name.startswith(f"{module}.")
