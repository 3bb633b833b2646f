"""Where hidden states enter a span and leave it, whatever a base model does before its first layer and behind its last.

Some scale embeddings, add positions or normalize before the first layer. What has been through other layers has been
through all that, so that it goes straight into the first layer of the span, and comes straight out of the last one.
"""

import copy
from typing import Any

from torch import Tensor, nn


class Boundary:
    """What goes into the first of some layers and comes out of the last, in one step."""

    __slots__ = ("entering", "leaving")

    def __init__(self) -> None:
        self.entering: Tensor | None = None
        """What the first layer takes instead of what it is given."""
        self.leaving: Tensor | None = None
        """What the last layer gave, if it ran."""

    def install(self, layers: nn.ModuleList, *, starts: bool, ends: bool) -> None:
        """In the list of a view's own. `starts` and `ends`: whether these are the first and last of the model, whose
        other ends stay as they are."""
        if not starts:
            layers[0] = self._entered(layers[0])
        if not ends:
            layers[-1] = self._left(layers[-1])

    def _entered(self, layer: nn.Module) -> nn.Module:
        forward = layer.forward

        def enter(*args: object, **named: object) -> Any:  # noqa: ANN401 - what the layer returns
            if args:
                return forward(self.entering, *args[1:], **named)
            return forward(**(named | {"hidden_states": self.entering}))

        return _otherwise(layer, enter)

    def _left(self, layer: nn.Module) -> nn.Module:
        forward = layer.forward

        def leave(*args: object, **named: object) -> Any:  # noqa: ANN401 - as above
            output = forward(*args, **named)
            self.leaving = output[0] if isinstance(output, tuple) else output
            return output

        return _otherwise(layer, leave)


def _otherwise(layer: nn.Module, forward: Any) -> nn.Module:  # noqa: ANN401 - any function
    """The same layer, run by another function."""
    other = copy.copy(layer)
    other.__dict__["forward"] = forward
    return other
