"""Guesses that a session's tail has made: what its grammar lets come where that is little choice. Pure."""

from collections.abc import Sequence


class ExpectedTokens:
    """Holds what the tail expects behind the sequence."""

    def __init__(self) -> None:
        self._expected: tuple[int, ...] = ()

    def begin_with(self, tokens: Sequence[int]) -> None:
        """The sequence begins with these, behind which nothing is expected yet."""

    def extend(self, _tokens: Sequence[int]) -> None:
        """The sequence has these tokens more: what was expected lies behind."""
        self._expected = ()

    def expect(self, tokens: Sequence[int]) -> None:
        """These probably come next."""
        self._expected = tuple(tokens)

    def begin(self) -> "ExpectedChain":
        """Guesses of what comes behind the sequence."""
        return ExpectedChain(self._expected)


class ExpectedChain:
    """A row of them, one after the other."""

    def __init__(self, expected: tuple[int, ...]) -> None:
        self._left = expected

    def guess(self) -> tuple[int, int] | None:
        """The next token, of the only strength that there is; None: nothing is expected."""
        return (self._left[0], 0) if self._left else None

    def follow(self, token: int) -> None:
        """The sequence goes on with this token: with another than the one that was expected nothing is known."""
        self._left = self._left[1:] if self._left and self._left[0] == token else ()
