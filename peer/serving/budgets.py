"""What strangers may ask of a peer in a time: of each identity, of each network, and of all together. Pure.

Each is a token bucket (RFC 2697, section 2, gives one): so many at once, and so many more a second.
"""

from collections import OrderedDict
from dataclasses import dataclass

KEPT_PART = 10
"""One in so many of what all may ask together is kept for those who are known."""
MOST_BUCKETS = 4096
"""Of identities, and of networks. Beyond, those that have asked least lately are forgotten, whose buckets are full or
soon will be."""


@dataclass(frozen=True, slots=True)
class RequestRate:
    """How much may be asked."""

    per_s: float
    at_once: float


@dataclass(frozen=True, slots=True)
class RequestRates:
    """How much may be asked by one identity, by one network, and by all."""

    identity: RequestRate
    network: RequestRate
    everybody: RequestRate


@dataclass(frozen=True, slots=True)
class Bucket:
    """What was left at a time."""

    left: float
    at_s: float

    def filled(self, rate: RequestRate, now: float) -> "Bucket":
        """What is left now. A clock that goes back adds nothing."""
        return Bucket(min(rate.at_once, self.left + max(0.0, now - self.at_s) * rate.per_s), now)

    def wait_s(self, amount: float, rate: RequestRate, kept: float = 0.0) -> float:
        """How long until so much is left above `kept`; 0 if it is now."""
        return max(0.0, min(amount, rate.at_once - kept) + kept - self.left) / rate.per_s

    def less(self, amount: float) -> "Bucket":
        return Bucket(self.left - amount, self.at_s)


class Budget:
    """Owner of the buckets for one kind of request."""

    def __init__(self, rates: RequestRates) -> None:
        self._rates = rates
        self._identities: OrderedDict[str, Bucket] = OrderedDict()
        self._networks: OrderedDict[str, Bucket] = OrderedDict()
        self._everybody = Bucket(rates.everybody.at_once, 0.0)

    @property
    def known(self) -> tuple[int, int]:
        """Identities and networks of which it is remembered what they have spent."""
        return len(self._identities), len(self._networks)

    def spend(
        self, identity: str, network: str, now: float, amount: float = 1.0, *, known: bool = False
    ) -> float:
        """Takes `amount` for an identity in a network (empty: nobody knows which), or says in how many seconds that
        will be possible; 0: it is done. What is refused costs nothing. Who is known may use what strangers may not."""
        rates = self._rates
        kept = 0.0 if known else rates.everybody.at_once / KEPT_PART
        mine = _bucket(self._identities, identity, rates.identity, now)
        near = _bucket(self._networks, network, rates.network, now) if network else None
        self._everybody = self._everybody.filled(rates.everybody, now)
        wait_s = max(
            mine.wait_s(amount, rates.identity), self._everybody.wait_s(amount, rates.everybody, kept)
        )
        if near is not None:
            wait_s = max(wait_s, near.wait_s(amount, rates.network))
        if wait_s:
            return wait_s
        self._identities[identity] = mine.less(amount)
        if near is not None:
            self._networks[network] = near.less(amount)
        self._everybody = self._everybody.less(amount)
        return 0.0


def _bucket(buckets: OrderedDict[str, Bucket], name: str, rate: RequestRate, now: float) -> Bucket:
    """The bucket of that name as it is now."""
    bucket = buckets.get(name, Bucket(rate.at_once, now)).filled(rate, now)
    buckets[name] = bucket
    buckets.move_to_end(name)
    if len(buckets) > MOST_BUCKETS:
        buckets.popitem(last=False)
    return bucket
