"""Log-probabilities of a prompt's tokens as they travel, with the first token behind the prompt.

Little-endian, one kind behind the other: float32 of each token from the second one on; uint32 ids of the likeliest
tokens at each of these places; float32 of those.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

_NUMBER: Final = np.dtype("<f4")
_TOKEN_ID: Final = np.dtype("<u4")


@dataclass(frozen=True, slots=True, eq=False)
class PromptLogprobs:
    """Log-probabilities of a prompt's tokens from the second one on, each given those before it."""

    logprobs: NDArray[np.floating]
    """[tokens - 1], natural."""
    likeliest_ids: NDArray[np.number]
    """[tokens - 1, likeliest]: the most likely tokens at each place, the likeliest first."""
    likeliest: NDArray[np.floating]
    """[tokens - 1, likeliest]: theirs."""

    def packed(self) -> bytes:
        """Returns it as it travels."""
        parts = (
            self.logprobs.astype(_NUMBER),
            self.likeliest_ids.astype(_TOKEN_ID),
            self.likeliest.astype(_NUMBER),
        )
        return b"".join(part.tobytes() for part in parts)


def unpacked(content: bytes, prompt_tokens: int, likeliest: int | None = None) -> PromptLogprobs:
    """Reads what `PromptLogprobs.packed` made of a prompt of so many tokens, with so many of the likeliest at each
    place, or as many as its length says. Raises ValueError where it has another length."""
    rows = prompt_tokens - 1
    if likeliest is None:
        each = len(content) // max(1, rows) - _NUMBER.itemsize
        likeliest = max(0, each) // (_TOKEN_ID.itemsize + _NUMBER.itemsize)
    ids_from = rows * _NUMBER.itemsize
    top_from = ids_from + rows * likeliest * _TOKEN_ID.itemsize
    if len(content) != top_from + rows * likeliest * _NUMBER.itemsize:
        raise ValueError(f"{len(content)} bytes are no log-probabilities of {prompt_tokens} prompt tokens")
    return PromptLogprobs(
        np.frombuffer(content, _NUMBER, rows),
        np.frombuffer(content, _TOKEN_ID, rows * likeliest, ids_from).reshape(rows, likeliest),
        np.frombuffer(content, _NUMBER, rows * likeliest, top_from).reshape(rows, likeliest),
    )
