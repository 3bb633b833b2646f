"""Which prompts a step computes beside the sequences that it decodes, and how much of each. Pure.

The redundancy paper (AcceLLM) never computes both in one step. A step that does reads the weights once for both, as
long as the prompts' part of it is small: prompts are cut into pieces, as in Sarathi.
"""

from collections.abc import Callable, Sequence

LONGER = 2.0
"""Times the shortest step there is: what a piece alone may take, which bounds the time between two tokens."""


def piece_tokens(step_s: Callable[[int], float], most_tokens: int) -> int:
    """The largest piece, up to `most_tokens`, that takes at most `LONGER` times as long as a single token.

    Args:
        step_s: Seconds for a step of so many tokens of one prompt; it never falls.

    Raises:
        ValueError: `most_tokens` is below 1.
    """
    if most_tokens < 1:
        raise ValueError(f"a piece has a token or more, got at most {most_tokens}")
    longest_s = LONGER * step_s(1)
    least, beyond = 1, most_tokens + 1
    while beyond - least > 1:
        middle = (least + beyond) // 2
        if step_s(middle) <= longest_s:
            least = middle
        else:
            beyond = middle
    return least


def prompt_order(arrived_s: float, prompt_tokens: int, number: int) -> tuple[float, int, int]:
    """Prompts are computed in the order of this: of those that came together the shortest first."""
    return arrived_s, prompt_tokens, number


def next_pieces(begun_tokens: int, waiting: Sequence[int], piece: int, instances: int) -> tuple[int, ...]:
    """Tokens of each prompt for the next step: first of the begun one, then of those that wait, in their order.

    They are `piece` tokens in all at most, and only the last may be less than is left of its prompt. Of what waits,
    the instance leaves the others their share: a step takes as long for prompts as for one of their length together.

    Args:
        begun_tokens: What is left of the prompt that the instance has begun; 0: none.
        waiting: Tokens of the prompts that nobody of its pair has begun.
        piece: The most tokens.
        instances: Of the pair.
    """
    share = -(-len(waiting) // instances)
    left, found = piece, []
    for tokens in (*([begun_tokens] if begun_tokens else []), *waiting[:share]):
        if not left:
            break
        found.append(min(tokens, left))
        left -= found[-1]
    return tuple(found)
