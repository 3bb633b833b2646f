"""Collective operations as messages between ranks: rings (Thakur et al., 2005), and a gather to one rank."""

from collections.abc import Sequence
from dataclasses import dataclass

from molink.simnet.papers.communication.operations import Kind, Phase
from molink.simnet.papers.communication.ranks import Program, Ranks, Receive


@dataclass(frozen=True, slots=True)
class Communicator:
    """Communicator: a group of ranks, and which of them calls (MPI, 1994, chapter 5)."""

    ranks: Ranks
    group: Sequence[int]
    place: int
    """Of the caller, in the group."""

    @property
    def own(self) -> int:
        return self.group[self.place]


def ring_all_reduce(among: Communicator, phase: Phase, elements: int, element_bytes: int) -> Program:
    """Every rank of the group ends with the sum: t - 1 turns of adding parts, and t - 1 of passing sums on."""
    turns = 2 * (len(among.group) - 1)
    return _ring(among, phase, "Allreduce", turns, elements, element_bytes)


def ring_all_gather(among: Communicator, phase: Phase, elements: int, element_bytes: int) -> Program:
    """Every rank of the group has a part of `elements` and ends with all: t - 1 turns of passing parts on."""
    return _ring(among, phase, "Allgather", len(among.group) - 1, elements, element_bytes)


def gather(among: Communicator, phase: Phase, elements: int, element_bytes: int) -> Program:
    """The group's first rank ends with the parts of all."""
    ranks, group = among.ranks, among.group
    ranks.call(among.own, phase, "Gather")
    if among.place == 0:
        for source in group[1:]:
            yield Receive(source)
    else:
        part = part_sizes(elements, len(group))[among.place]
        ranks.send(among.own, group[0], phase, "Gather", part * element_bytes)


def part_sizes(elements: int, parts: int) -> tuple[int, ...]:
    """As even as whole elements allow, the larger ones first."""
    size, rest = divmod(elements, parts)
    return tuple(size + (part < rest) for part in range(parts))


def _ring(
    among: Communicator, phase: Phase, kind: Kind, turns: int, elements: int, element_bytes: int
) -> Program:
    """In each turn a rank sends its right neighbour one part and takes another from its left one."""
    ranks, group, place = among.ranks, among.group, among.place
    ranks.call(among.own, phase, kind)
    members = len(group)
    sizes = part_sizes(elements, members)
    right, wanted = group[(place + 1) % members], Receive(group[place - 1])
    for turn in range(turns):
        part = sizes[(place - turn) % members]
        ranks.send(among.own, right, phase, kind, part * element_bytes)
        yield wanted
