"""Numbers of exponential races, by (seed, position) and token id: the same in tensors and in arrays. Pure.

Each token of a row runs a race with a number of its own, exponentially distributed, and wins if its weight over that
number is largest: with probability weight / sum of weights (Gumbel-max; Maddison et al. 2014, A* Sampling, section 2).
Two distributions at a distance d in total variation that race with the same numbers agree with probability
(1 - d) / (1 + d) at least (Daliri et al. 2024, Coupling without communication, arXiv 2408.07978): so a draft model that
knows the seed guesses far more of what will be drawn than its likeliest token is.
"""

import hashlib
import struct
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    IntegersT = TypeVar("IntegersT", Tensor, NDArray[np.int64])

KEY_BITS = 48
NUMBER_BITS = 52
NUMBER_STEP = 2.0**-NUMBER_BITS
SPLITMIX_STEP = 0x9E3779B97F4A7C15 - 2**64
"""SplitMix64's constants (Steele et al. 2014, Fast splittable pseudorandom number generators), as signed numbers."""
SPLITMIX_FIRST, SPLITMIX_SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64

_KEYS: Final = hashlib.blake2b(digest_size=KEY_BITS // 8, person=b"molink.race")


def race_key(seed: int, position: int) -> int:
    """Which race a token is drawn in, below 2**KEY_BITS; seed and position are in [0, 2**64)."""
    digest = _KEYS.copy()  # setting it up takes longer than hashing
    digest.update(struct.pack("<QQ", seed, position))
    return int.from_bytes(digest.digest(), "little")


def race_numbers(keys: "IntegersT", token_ids: "IntegersT") -> "IntegersT":
    """Uniform whole numbers below 2**NUMBER_BITS for these tokens in these races, of the shape that both have
    together. A token runs with the exponentially distributed -log1p(-(number + 0.5) * NUMBER_STEP), which is exact
    where it is small, and so where tokens win."""
    # SplitMix64: products of 64 bits wrap around; shifts of signed numbers are made those of unsigned ones by masks
    mixed = token_ids * SPLITMIX_STEP + keys
    mixed ^= (mixed >> 30) & (2**34 - 1)
    mixed *= SPLITMIX_FIRST
    mixed ^= (mixed >> 27) & (2**37 - 1)
    mixed *= SPLITMIX_SECOND
    mixed ^= (mixed >> 31) & (2**33 - 1)
    mixed >>= 64 - NUMBER_BITS
    mixed &= 2**NUMBER_BITS - 1
    return mixed
