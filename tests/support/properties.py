"""How many examples a property is tried with that needs another number of them than its profile says."""

from hypothesis import settings

WHOLE = 100
"""Examples of a property in `make test-full`, where it says nothing of its own."""
LEAST = 4


def examples(most: int) -> int:
    """`most` in `make test-full`; elsewhere the share of them that the profile has of WHOLE, at least LEAST."""
    return max(min(most, LEAST), most * settings().max_examples // WHOLE)
