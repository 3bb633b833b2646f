"""Invitations that a peer follows which stays at relays. Pure: the time is an argument.

Each has this peer dial somebody: the relay that passes the invitation on, or the relay that the asker says it is. What
relays and askers say is not proven by then, so neither has more than a part of what is followed, and an address at
which no relay has proven itself is dialled by one invitation at a time and then left alone, whoever claims it next.
"""

from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import TypeVar

from molink.peer.serving.budgets import Budget, RequestRate, RequestRates

MOST_FOLLOWED = 16
"""At once."""
MOST_OF_A_RELAY = 8
INVITATIONS = RequestRates(RequestRate(1.0, 16.0), RequestRate(2.0, 24.0), RequestRate(8.0, 64.0))
"""Of each asker, passed on by each relay, and of all."""
LEFT_ALONE_S = 60.0
"""An address where no relay has proven itself."""
MOST_ADDRESSES = 1024

ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True)
class Invitation:
    """Invitation that is followed."""

    relay: str
    """Peer id of who passed it on."""
    address: str
    """Where this peer comes to."""


class InvitationLimiter:
    """Limiter of the invitations that one peer follows."""

    def __init__(self) -> None:
        self._budget = Budget(INVITATIONS)
        self._followed: Counter[Invitation] = Counter()
        self._left_alone: OrderedDict[str, float] = OrderedDict()
        """Until when, by address."""
        self._proven: OrderedDict[str, None] = OrderedDict()
        """Addresses where a relay has proven itself."""

    def admit(self, relay: str, asker: str, now_s: float) -> str | None:
        """Takes one that `relay` passes on for `asker` off what they may, or says why it is not followed. Asked before
        anything is looked up for it."""
        if self._followed.total() >= MOST_FOLLOWED:
            return "as many are followed as may be"
        of_relay = sum(count for one, count in self._followed.items() if one.relay == relay)
        if of_relay >= MOST_OF_A_RELAY:
            return "as many of that relay's are followed as may be"
        if self._budget.spend(asker, relay, now_s):
            return "there were more of them than may be"
        return None

    def follow(self, invitation: Invitation, now_s: float) -> str | None:
        """Begins with an invitation that was just admitted, to be ended by `end`; or says why it is not followed."""
        is_proven = invitation.address in self._proven
        if not is_proven and self._left_alone.get(invitation.address, 0.0) > now_s:
            return "no relay has proven itself there"
        self._followed[invitation] += 1
        if not is_proven:
            _remember(self._left_alone, invitation.address, now_s + LEFT_ALONE_S)
        return None

    def end(self, invitation: Invitation) -> None:
        """Ends with an invitation that was followed."""
        self._followed[invitation] -= 1
        if not self._followed[invitation]:
            del self._followed[invitation]

    def record_proof(self, address: str) -> None:
        """Records that a relay has proven itself at an address."""
        self._left_alone.pop(address, None)
        _remember(self._proven, address, None)


def _remember(memory: OrderedDict[str, ValueT], address: str, value: ValueT) -> None:
    memory[address] = value
    memory.move_to_end(address)
    if len(memory) > MOST_ADDRESSES:
        memory.popitem(last=False)
