"""Copy lag: what the copy of a hop's KV cache lacks, and whether its standby will ever have it. Pure.

A standby computes in its idle moments what it does not get as keys and values. An engine that has none of these falls
behind by as much as tokens come; what it announces of its load may be older than that, so it is looked at as well.
"""

from dataclasses import dataclass

BEHIND_TOKENS = 128
"""A copy that lacks no more is as good as whole: so many are computed again in one step."""


@dataclass(slots=True)
class CopyLag:
    """Lag of one copy, as its standby says now and then how far it has come."""

    lacking_tokens: int | None = None
    """At the latest look; None: nobody has looked."""

    def record(self, history_tokens: int, kept_tokens: int) -> bool:
        """Records a look. Returns whether the copy does not catch up: it lacks many tokens, and no fewer than at the
        look before."""
        before, self.lacking_tokens = self.lacking_tokens, max(0, history_tokens - kept_tokens)
        return before is not None and self.lacking_tokens >= max(before, BEHIND_TOKENS + 1)


@dataclass(frozen=True, slots=True)
class HopCopy:
    """A copy of a hop's KV cache."""

    peer_id: str
    """Of who keeps it."""
    form: str
    """In which it comes: keys_and_values, inputs, token_ids."""
    behind_tokens: int | None
    """That it lacked at the latest look; None: nobody has looked."""
