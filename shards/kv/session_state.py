"""What layers keep of a session beside keys and values: a state of fixed size, whatever the session's length.

Convolutions keep their last inputs, linear attention and state-space layers a recurrent state (Mamba, Gu and Dao
2023, section 3.5.2; Gated DeltaNet, Yang et al. 2024). Such a state cannot go back to an earlier token, so the one
before the latest step is kept beside it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer


class StateKind(Enum):
    """Of what a layer keeps a state."""

    CONVOLUTION = "convolution"
    RECURRENCE = "recurrence"


@dataclass(frozen=True, slots=True)
class StateLayout:
    """One state of one layer, without the dimension of sessions. Learnt by running the layer once."""

    kind: StateKind
    number: int
    """Layers may have several states of a kind."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        elements = 1
        for size in self.shape:
            elements *= size
        return elements * self.dtype.itemsize


def layouts_in(layer: LinearAttentionLayer) -> tuple[StateLayout, ...]:
    """What a layer's cache keeps after it has run."""
    return tuple(
        StateLayout(kind, number, tuple(state.shape[1:]), state.dtype)
        for kind in StateKind
        for number, state in _states_of(layer, kind).items()
        if state is not None
    )


def filled_layer(layouts: Sequence[StateLayout], states: Sequence[Tensor] | None) -> LinearAttentionLayer:
    """A layer's cache that continues from `states` [sessions, *shape], which it will change; None: from nothing."""
    numbers = max((layout.number for layout in layouts), default=0) + 1
    layer = LinearAttentionLayer(number_of_states=numbers)
    for layout, state in zip(layouts, states or (), strict=states is not None):
        _states_of(layer, layout.kind)[layout.number] = state
        layer.has_previous_state[layout.number] = True
        if layout.kind is StateKind.CONVOLUTION:
            layer.is_conv_states_initialized[layout.number] = True
            layer.conv_kernel_size[layout.number] = layout.shape[-1]
            layer.dtype, layer.device = state.dtype, state.device
        else:
            layer.is_recurrent_states_initialized[layout.number] = True
    return layer


def states_in(layer: LinearAttentionLayer, layouts: Sequence[StateLayout]) -> tuple[Tensor, ...]:
    """What a layer's cache keeps now, [sessions, *shape] of each.

    Raises ValueError where it is something else than the layouts say.
    """
    states = []
    for layout in layouts:
        state = _states_of(layer, layout.kind)[layout.number]
        if state is None or tuple(state.shape[1:]) != layout.shape or state.dtype != layout.dtype:
            raise ValueError(f"a layer's {layout.kind.value} keeps something else than it did at first")
        states.append(state)
    return tuple(states)


def _states_of(layer: LinearAttentionLayer, kind: StateKind) -> dict[int, Tensor | None]:
    found: dict[int, Tensor | None] = (
        layer.conv_states if kind is StateKind.CONVOLUTION else layer.recurrent_states
    )
    return found


class StateMemory:
    """The states of some layers for a number of sessions. Those of equal shape share one tensor."""

    __slots__ = ("_places", "buffers")

    def __init__(
        self, layouts: Mapping[int, Sequence[StateLayout]], sessions: int, device: torch.device
    ) -> None:
        counts: dict[tuple[tuple[int, ...], torch.dtype], int] = {}
        self._places: dict[int, list[tuple[tuple[tuple[int, ...], torch.dtype], int]]] = {}
        for layer, states in layouts.items():
            places = self._places[layer] = []
            for state in states:
                key = state.shape, state.dtype
                places.append((key, counts.get(key, 0)))
                counts[key] = counts.get(key, 0) + 1
        self.buffers = {
            (shape, dtype): torch.empty(count, sessions, *shape, dtype=dtype, device=device)
            for (shape, dtype), count in counts.items()
        }
        """By shape and dtype: states of that kind, [states, sessions, *shape]."""

    def views(self, session: int) -> dict[int, tuple[Tensor, ...]]:
        """The states of each layer, [1, *shape]."""
        return {
            layer: tuple(self.buffers[key][place, session : session + 1] for key, place in places)
            for layer, places in self._places.items()
        }

    def copy_from(self, source: "StateMemory", source_session: int, session: int, sessions: int) -> None:
        """Takes over the states of sessions from memory of the same layouts."""
        for key, ours in self.buffers.items():
            theirs = source.buffers[key]
            ours.narrow(1, session, sessions).copy_(theirs.narrow(1, source_session, sessions))


def raw_states(views: Mapping[int, Sequence[Tensor]]) -> bytes:
    """All states as bytes, one after the other."""
    return b"".join(
        bytes(state.to("cpu").contiguous().view(-1).view(torch.uint8).numpy().data)
        for states in views.values()
        for state in states
    )


def write_raw_states(views: Mapping[int, Sequence[Tensor]], raw: memoryview) -> None:
    """The reverse: as many bytes as the states have."""
    offset = 0
    for states in views.values():
        for state in states:
            held = torch.empty(state.nbytes, dtype=torch.uint8)
            held.numpy().data[:] = raw[offset : offset + state.nbytes]
            state.copy_(held.view(state.dtype).view(state.shape))
            offset += state.nbytes
