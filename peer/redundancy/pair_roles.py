"""What the two holders of a span do: which of one's sessions are better decoded by the other, which has copies. Pure.

Sections 4.1.2, 4.1.3 and 4.2.2 of the redundancy paper (AcceLLM). While one of two computes prompts, the other decodes
what it has copies of; while neither does, both decode, evenly. Nobody decides for both: each does for the
sessions that are at home with it, by what the other has said last.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from molink.peer.redundancy.pair_balance import HeldSequence, balanced

HERE, THERE = 0, 1
"""Of the two holders: the one that decides, and its partner."""
LOOK_EVERY_S = 0.1
"""Which sessions should go over is looked at so often."""
QUIET_S = 1.0
"""After the last prompt of either, sessions stay where they are so long: the next one may be on its way."""
WORTH_TOKENS = 32
"""Prompts that are shorter together, and generations of which less is left, are over before a session has gone over."""
BETTER_PART = 0.8
"""Roles are taken if what decode loses by them is less than so much of what it loses by pieces."""
SHORTER_PART = 0.9
"""Sessions are balanced if the longer steps of the two become so much shorter by it."""


class Roles(StrEnum):
    """What a peer's owner lets it do."""

    AUTO = "auto"
    """Pairs where these are predicted to cost decode less than pieces."""
    OFF = "off"
    PAIRS = "pairs"
    PIECES = "pieces"
    """Prompts go in pieces beside decode, and each session stays where it is: as with `OFF`, but partners hear what is
    decoded here."""


@dataclass(frozen=True, slots=True)
class HolderLoad:
    """What one of the two does now."""

    decoding_tokens: tuple[int, ...] = ()
    """Of each session that it decodes: what its KV cache holds."""
    prompt_tokens: int = 0
    """That it has yet to compute."""


@dataclass(frozen=True, slots=True)
class RoleCosts:
    """What decides between pairs and pieces, as it is predicted."""

    decode_s: Callable[[int], float]
    """Of a decode step with so many sessions."""
    prompt_s: float
    """Of the prompts that wait, alone."""
    move_s: float
    """What a session waits longer for one token when it goes over."""
    is_computed_twice: bool = False
    """Whether the partner makes its copies by computing the prompts as well."""


def prefers_pairs(costs: RoleCosts, here: int, there: int) -> bool:
    """Whether `here` sessions wait less if they go over to the partner, which decodes `there`, than if their holder
    computes its prompts in pieces between their steps.

    In pieces the whole of the prompts comes between two tokens or other of each session. If sessions go over, all wait
    for longer steps as long as prompts take, and those that went for going there and, once more, back.
    """
    if not here:
        return False
    if costs.is_computed_twice:
        return False
    together_s = costs.decode_s(here + there)
    lost_part = here * (1 - costs.decode_s(here) / together_s)
    if there:
        lost_part += there * (1 - costs.decode_s(there) / together_s)
    pairs_s = lost_part * costs.prompt_s + 2 * here * costs.move_s
    return pairs_s < BETTER_PART * here * costs.prompt_s


def _pays(costs: RoleCosts, here: HolderLoad, there: HolderLoad) -> bool:
    """Whether steps of as many sessions at both are shorter than those of the sessions here."""
    mine, others = len(here.decoding_tokens), len(there.decoding_tokens)
    if mine <= others:
        return False
    return costs.decode_s(-(-(mine + others) // 2)) < SHORTER_PART * costs.decode_s(mine)


def is_worth_copying(prompt_tokens: int, most_tokens: int) -> bool:
    """Whether a session of so many tokens at most, its prompt included, may go over at all."""
    return most_tokens - prompt_tokens >= WORTH_TOKENS


def _lasts(sequence: HeldSequence) -> bool:
    return sequence.room_tokens - sequence.tokens >= WORTH_TOKENS


def going_over(
    roles: Roles,
    here: HolderLoad,
    there: HolderLoad,
    copied: Sequence[HeldSequence],
    costs: RoleCosts | None,
    *,
    is_quiet: bool,
) -> tuple[int, ...]:
    """The numbers of those sessions that should go over to the partner now. Without `costs` nothing can be predicted.

    Args:
        copied: Sessions that are decoded here; the partner is among their holders if it has, or can have, all of their
            keys and values, and their home if they are on their way there.
        is_quiet: Neither has had a prompt for a while.
    """
    if roles in (Roles.OFF, Roles.PIECES) or there.prompt_tokens:
        return ()
    if here.prompt_tokens:
        if here.prompt_tokens < WORTH_TOKENS:
            return ()
        if roles is Roles.AUTO and not (
            costs and prefers_pairs(costs, len(here.decoding_tokens), len(there.decoding_tokens))
        ):
            return ()
        decoding: tuple[int, ...] = (THERE,)
    elif is_quiet and (roles is Roles.PAIRS or (costs and _pays(costs, here, there))):
        decoding = (HERE, THERE)
    else:
        return ()
    copied = [one if _lasts(one) else replace(one, holders=(one.home,)) for one in copied]
    last = max((one.number for one in copied), default=-1)
    fixed = [
        HeldSequence(last + at, tokens, tokens, THERE, (THERE,))
        for at, tokens in enumerate(there.decoding_tokens, start=1)
    ]
    homes = balanced([*copied, *fixed], decoding)
    return tuple(one.number for one in copied if one.home == HERE and homes[one.number] == THERE)
