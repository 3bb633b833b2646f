"""What a transmission policy stands for: a whole system, with its own micro-batches and steps of prompts."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from molink.peer.scheduling.microbatch import BatchLimits, batch_limits
from molink.routing.cost.prefill_chunks import Cut, chunk_lengths, equal_chunks
from molink.shards.spec import ModelSpec
from molink.simnet.core.guessing import OFF

PETALS = "petals"
"""Not a way to send: the client stands between the servers, and every session steps alone."""
WHOLE_PROMPT_TOKENS = 2048
"""Longer prompts, which the transmission paper leaves out, are cut in any case: a step's output has to fit a frame."""


@dataclass(frozen=True, slots=True)
class ServedAs:
    """How peers serve, beside how they send."""

    micro_batches: str
    """The rule by which they circulate (`molink.peer.scheduling.in_flight_rules`)."""
    prefill_chunk_tokens: int | None
    """Prompts are computed in equal chunks of at most so many tokens, each in one step; None: as our peers do it. The
    head chooses the chunks, those that come at once are gathered, and beside decode they are computed in slices."""
    speculation: str = OFF
    """How many guessed tokens travel with a trip: auto, off, or a number."""
    temperature: float = 0.0
    """Of the recorded generations that are guessed."""


MOST_SESSIONS = 256
"""On a peer, as servers of one model commonly allow."""
_OURS = ServedAs("molink", None)


def limits_of(spec: ModelSpec, prefill_chunk_tokens: int | None) -> BatchLimits:
    """How much steps together: room for a whole chunk and the decode steps that ride along."""
    usual = BatchLimits()
    if prefill_chunk_tokens is None:
        return batch_limits(spec)
    return batch_limits(spec, replace(usual, max_tokens=prefill_chunk_tokens + usual.max_sessions))


def cut_of(prefill_chunk_tokens: int | None) -> Cut:
    """How prompts are cut."""
    return chunk_lengths if prefill_chunk_tokens is None else equal_chunks(prefill_chunk_tokens)


def usual(policy: str, stages: int) -> ServedAs:
    """As the system serves that the policy stands for.

    vLLM and Helix have as many micro-batches on their way as there are stages; the MoLink system paper adds them while
    the bubble has room (section 4.1), the transmission paper searches from N to 2 N (section 4.3). All of them compute
    a prompt in one step unless they are told otherwise: the chunks of these papers are of what is sent. Ours predicts
    both. A policy that stands for no system serves as vLLM does.
    """
    fixed = ServedAs(str(stages), WHOLE_PROMPT_TOKENS)
    return _USUAL.get(policy, fixed)


_USUAL: Mapping[str, ServedAs] = MappingProxyType(
    {
        "molink": _OURS,
        "paper": ServedAs("transmission", WHOLE_PROMPT_TOKENS),
        "fixed-chunk": ServedAs("system", WHOLE_PROMPT_TOKENS),
    }
)
