"""When this peer dials the neighbours that descriptors name, and when it does not. Pure: the time is an argument.

A client says who the hops of its circuit are. Each hop's addresses are signed by that hop, whose identity cost nothing:
so clients could have volunteers knock at any door. A door that stays shut is not tried again soon, whoever names it.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import TypeVar

from molink.shards.backoff import Backoff

Key = TypeVar("Key")
Value = TypeVar("Value")

BACKOFF = Backoff(first_s=2.0, longest_s=300.0)
SHARED_FAILURES = 2
"""An address that so many identities claim in vain is left alone, whoever claims it next."""
MOST_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class DialFailures:
    """Of dials to one target since one last went well."""

    count: int = 0
    not_before_s: float = 0.0

    def and_one(self, now: float) -> "DialFailures":
        return DialFailures(self.count + 1, now + BACKOFF.after(self.count + 1))


class DialBackoff:
    """What is known of targets: of each identity at its addresses, and of each address, whoever claims it."""

    def __init__(self) -> None:
        self._claims: OrderedDict[tuple[str, str], DialFailures] = OrderedDict()
        self._addresses: OrderedDict[str, DialFailures] = OrderedDict()
        self._proven: OrderedDict[tuple[str, str], None] = OrderedDict()
        """Identities that have answered at an address."""

    def may_dial(self, peer_id: str, address: str, now: float) -> bool:
        """Whether an identity is worth a try at an address."""
        if now < self._claims.get((peer_id, address), DialFailures()).not_before_s:
            return False
        if (peer_id, address) in self._proven:
            return True
        shared = self._addresses.get(address, DialFailures())
        return shared.count < SHARED_FAILURES or now >= shared.not_before_s

    def failed(self, peer_id: str, address: str, now: float) -> None:
        """Nobody answered there, or not that identity. Whoever else has waited for the same dial says the same, and it
        counts once."""
        claim = peer_id, address
        if now < self._claims.get(claim, DialFailures()).not_before_s:
            return
        _remember(self._claims, claim, self._claims.get(claim, DialFailures()).and_one(now))
        if claim not in self._proven:
            _remember(self._addresses, address, self._addresses.get(address, DialFailures()).and_one(now))

    def answered(self, peer_id: str, address: str) -> None:
        """The identity has proven itself there."""
        self._claims.pop((peer_id, address), None)
        self._addresses.pop(address, None)
        _remember(self._proven, (peer_id, address), None)


def _remember(kept: OrderedDict[Key, Value], key: Key, value: Value) -> None:
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > MOST_REMEMBERED:
        kept.popitem(last=False)
