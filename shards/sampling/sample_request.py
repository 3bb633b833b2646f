"""How one token is to be chosen, as a value."""

from dataclasses import dataclass

from molink.shards.sampling.token_history import SeenTokens
from molink.shards.spec import SamplingParams


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """How to choose the token at `position` of a session's sequence, the prompt counted."""

    params: SamplingParams
    seed: int
    """In [0, 2**64)."""
    position: int
    """In [0, 2**64)."""
    seen: SeenTokens | None = None
    """What penalties count; None where there are none."""
    left_out: tuple[int, ...] = ()
    """Tokens that are not drawn."""
    allowed: bytes | None = None
    """A bit for each token, from the lowest one of the first byte on: those whose bit is not set, or who have none, are
    not drawn. None: all are allowed."""

    @property
    def is_constrained(self) -> bool:
        """Whether it is drawn from other logits than those with the bias."""
        is_cut = self.params.min_p > 0 and self.params.temperature > 0
        return self.seen is not None or bool(self.left_out) or self.allowed is not None or is_cut
