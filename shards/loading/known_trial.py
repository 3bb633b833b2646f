"""What the trial step of a span has shown, so that a later start with the same weights and software makes none: it
reads every weight once, before anybody asks for a token."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch

from molink.shards.kv.kv_memory import LayerLayout
from molink.shards.spec import Span
from molink.shards.store.store_notes import replace_file

_NUMBERS: Final = ("key_heads", "key_dim", "value_heads", "value_dim", "index_dim")


@dataclass(frozen=True, slots=True)
class KnownTrial:
    """The trial of one span, in a file. What layers keep beside keys and values is not remembered, but tried."""

    path: Path
    span: Span

    @classmethod
    def of(cls, folder: Path, span: Span, what: Sequence[object]) -> "KnownTrial":
        """`what` is all that the outcome depends on beside the span, as JSON values."""
        digest = hashlib.sha256(json.dumps([*what, span.start, span.stop]).encode()).hexdigest()
        return cls(folder / f"trial-{digest}.json", span)

    def find(self) -> dict[int, LayerLayout] | None:
        """What each layer caches; None: nothing is remembered, or nothing that can be read."""
        try:
            content = json.loads(self.path.read_bytes())
            found = {int(layer): _layout(said) for layer, said in content.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
        return found if list(found) == list(self.span) else None

    def remember(self, layouts: Mapping[int, LayerLayout]) -> None:
        """Takes down what a trial has shown that found nothing wrong. On a full disk it is made again."""
        if any(layout.states for layout in layouts.values()):
            return
        content = {str(layer): asdict(layout) | {"dtype": _name(layout)} for layer, layout in layouts.items()}
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self.path, json.dumps(content).encode())


def _name(layout: LayerLayout) -> str:
    return str(layout.dtype).removeprefix("torch.")


def _layout(said: Any) -> LayerLayout:  # noqa: ANN401 - out of a file
    """Raises ValueError, KeyError or TypeError where it is none."""
    dtype, expands, window = getattr(torch, said["dtype"]), said["expands"], said["window"]
    numbers = {name: said[name] for name in _NUMBERS}
    counts = [*numbers.values(), *([] if window is None else [window])]
    if any(type(count) is not int or count < 0 for count in counts) or type(expands) is not bool:
        raise ValueError("no layout")
    if not isinstance(dtype, torch.dtype) or said["states"]:
        raise ValueError("no layout")
    return LayerLayout(dtype=dtype, expands=expands, window=window, **numbers)
