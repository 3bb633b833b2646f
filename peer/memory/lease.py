"""What a peer and its clients agree on: a lease, its key, and the two answers to who asks for one. Values."""

from dataclasses import dataclass
from typing import NamedTuple

from molink.shards.spec import Span


class LeaseKey(NamedTuple):
    """One attempt of one generation: its client alone numbers the epochs, upward. A tuple, since each step of each
    session is looked up by it several times."""

    session: bytes
    epoch: int


@dataclass(frozen=True, slots=True)
class Lease:
    """A promise: this peer serves the span to the session, for so many tokens, until it expires."""

    key: LeaseKey
    span: Span
    tokens: int
    kv_bytes: int
    expires_s: float
    owner: str
    """The client's peer id."""
    network: str = ""
    """Where the client is, as far as that tells people apart; empty: nobody knows."""

    def is_near(self, other: "Lease") -> bool:
        """Whether one client holds both, or one network."""
        return self.owner == other.owner or (self.network != "" and self.network == other.network)

    def answer(self, key: LeaseKey, span: Span, tokens: int, owner: str) -> "Granted | Refused | None":
        """To another request for its session, or None if this is its next epoch."""
        if self.owner != owner:
            return Refused("epoch", "this session is another client's: choose a new session id", 0.0)
        if key.epoch > self.key.epoch:
            return None
        if key.epoch < self.key.epoch:
            return Refused("epoch", f"epoch {key.epoch} is over, the session is in {self.key.epoch}", 0.0)
        if (self.span, self.tokens) != (span, tokens):
            held = f"{self.span} for {self.tokens} tokens"
            detail = f"epoch {key.epoch} has a lease on {held}: ask for another in a new epoch"
            return Refused("epoch", detail, 0.0)
        return Granted(self, ())


@dataclass(frozen=True, slots=True)
class Granted:
    lease: Lease
    to_load: tuple[Span, ...]
    """What must be loaded before the lease is ready and nobody has ordered yet; () if warm or on its way."""
    replaced: Lease | None = None
    """The session's lease of an older epoch, which ended with this grant: free its KV cache first."""
    evicted: tuple[Lease, ...] = ()
    """Leases that nobody used, and that ended to make room for this one."""
    promoted: Lease | None = None
    """The copy that has become this lease: what it holds is the session's."""


@dataclass(frozen=True, slots=True)
class Refused:
    code: str
    """`memory`: too little is free. `busy`: too many sessions, or the peer is paused. `draining`: it is
    leaving. `span`: it does not serve such a span, or so many tokens. `epoch`: the session has moved on, or
    is another client's."""
    detail: str
    retry_after_s: float
    """When asking the same again is worth it; 0 where it never is (`draining`, `span`, `epoch`)."""
