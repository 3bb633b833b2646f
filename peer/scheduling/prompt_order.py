"""Whose prompt goes first where several wait for an engine or an uplink: the one that is due first. Pure.

A prompt is due when it has waited for `PATIENCE` times as long as it would take alone. So a short one overtakes a long
one that came shortly before, where first come, first served makes it wait for all of it; but nothing overtakes a prompt
that comes after it was due, so that nobody starves. This is earliest deadline first (Liu and Layland, 1973), with
deadlines that are a multiple of what a prompt asks for.
"""

from collections.abc import Sequence

from molink.routing.cost.pipeline import PipelineStage

PATIENCE = 10.0
"""Ten seconds is about how long people stay with what they wait for, one second what does not interrupt them (Nielsen,
Usability Engineering, 1993): a prompt that takes one may be overtaken for ten."""


def due_s(stages: Sequence[PipelineStage], prompt_tokens: int, arrived_s: float) -> float:
    """When a prompt of so many tokens is due that came at `arrived_s`, in seconds on the same clock.

    Alone it would take as long as it occupies that engine or uplink of its circuit which it occupies longest, as
    predicted: the others work at the same time.
    """
    alone_ms = [max(stage.prefill_ms(prompt_tokens), stage.transfer_ms(prompt_tokens)) for stage in stages]
    return arrived_s + PATIENCE * max(alone_ms, default=0.0) / 1000
