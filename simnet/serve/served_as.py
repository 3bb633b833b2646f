"""What a transmission policy stands for: a whole system, with its own micro-batches and steps of prompts."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

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


_OURS = ServedAs("molink", None)


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
