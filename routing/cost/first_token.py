"""Time to first token of a circuit: its head's own cut of the prompt, and what those chunks take. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from molink.routing.cost.cost import CostModel
from molink.routing.cost.pipeline import PipelineStage
from molink.routing.cost.prefill import prefill_ms
from molink.routing.cost.prefill_chunks import chunk_lengths, most_chunk_tokens


def prompt_chunks(stages: Sequence[PipelineStage], prompt_tokens: int) -> tuple[int, ...]:
    """The lengths of the chunks that a head of these stages cuts a prompt of so many tokens into."""
    return chunk_lengths(
        stages, prompt_tokens, most_chunk_tokens([stage.facts.step_tokens for stage in stages])
    )


def first_token_ms(
    stages: Sequence[PipelineStage], lengths: Sequence[int], waits_ms: float, cost: CostModel
) -> float:
    """Milliseconds from the client's start of a ready circuit to the first token at the client.

    `lengths` are `prompt_chunks`, and `waits_ms` what the prompt waits for besides: devices that are busy, the head's
    service, and the way from the client and back. An uplink that nobody has measured is taken to be as `cost` assumes;
    for the head that cuts, it takes no time.
    """
    assumed = [
        replace(stage, uplink_mbps=stage.uplink_mbps or cost.unknown_bandwidth_mbps) for stage in stages
    ]
    return waits_ms + prefill_ms(assumed, lengths)
