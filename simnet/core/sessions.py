"""A generation in the simulated world."""

from collections import deque
from dataclasses import dataclass, field

from molink.peer.memory.leases import LeaseKey
from molink.peer.scheduling.pipeline import PipelineStage
from molink.peer.wire.transmission.decode_times import DecodePipeline
from molink.simnet.core.request_load import Request


@dataclass(slots=True)
class SimulatedSession:
    """What its client and the peers of its circuit know of it."""

    key: LeaseKey
    request: Request
    stages: tuple[PipelineStage, ...]
    """The circuit as predicted, as its descriptor has it."""
    circuit: DecodePipeline
    """The same, as the transmission paper's prediction takes it."""
    rows: list[int]
    """At each peer: tokens in its KV cache, those of the step that runs included."""
    due_s: list[float]
    """At each peer: when the prompt is due, on the virtual clock; 0 where nobody heeds it."""
    next_step: int = 0
    """At the head."""
    chunks: deque[int] = field(default_factory=deque)
    """At the head: the tokens of each chunk of the prompt that has not been queued."""
