"""Log-probabilities of a prompt's own tokens: what the model gives for each of them, given those before it."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from molink.shards.sampling.weights import weighing_dtype

MOST_LOGITS = 2**22
"""That are there at once: 16 MiB of them, and a few times as much while they are weighed."""


class PromptScores:
    """Owner of the log-probabilities of one prompt, as its steps find them. On the engine's thread."""

    def __init__(self, prompt_tokens: int, likeliest: int, vocabulary: int) -> None:
        """`likeliest`: with so many of the most likely tokens at each place."""
        self.token_ids: Sequence[int] = ()
        """The prompt, as far as it is known; told before its steps are computed."""
        self._prompt_tokens = prompt_tokens
        self._likeliest = min(likeliest, vocabulary)
        self._rows_at_once = max(1, MOST_LOGITS // vocabulary)
        self._found = np.full((prompt_tokens - 1, 1 + 2 * self._likeliest), np.nan)

    def score(self, position: int, hidden: Tensor, logits_of: Callable[[Tensor], Tensor]) -> None:
        """Finds them for the tokens behind the rows of `hidden` [1, rows, hidden size], the first of which is at that
        position. `logits_of` gives float32 logits [rows, vocabulary].

        Raises:
            ValueError: the tokens are not known, or the logits are no numbers.
        """
        count = max(0, min(hidden.shape[1], self._prompt_tokens - 1 - position))
        behind = self.token_ids[position + 1 : position + 1 + count]
        if len(behind) < count:
            raise ValueError(f"the prompt's tokens behind position {position} are not known")
        for first in range(0, count, self._rows_at_once):
            stop = min(count, first + self._rows_at_once)
            found = _scored(logits_of(hidden[:, first:stop]), behind[first:stop], self._likeliest)
            if not np.isfinite(found[:, 0]).all():
                raise ValueError("log-probabilities of the prompt are no finite numbers")
            self._found[position + first : position + stop] = found

    def found(self) -> NDArray[np.float64]:
        """All of them [prompt tokens - 1, 1 + 2 * likeliest]: of each token from the second one on its own, the ids of
        the likeliest at its place, the lowest first among equals, and theirs.

        Raises:
            ValueError: some have not been found.
        """
        missing = np.flatnonzero(np.isnan(self._found[:, 0]))
        if len(missing):
            raise ValueError(f"the prompt's token behind position {missing[0]} was not scored")
        return self._found


def _scored(logits: Tensor, behind: Sequence[int], likeliest: int) -> NDArray[np.float64]:
    """Rows of `PromptScores.found`."""
    weighed = logits.to(weighing_dtype(logits.device))
    logprobs = weighed - weighed.logsumexp(-1, keepdim=True)
    chosen = logprobs.gather(1, torch.tensor(behind, device=logits.device)[:, None])
    ids = logprobs.topk(likeliest).indices.sort(dim=-1).values
    among = logprobs.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    parts = chosen, ids.gather(1, among.indices).to(logprobs.dtype), among.values
    found: NDArray[np.float64] = torch.cat(parts, 1).to("cpu", torch.float64).numpy()
    return found
