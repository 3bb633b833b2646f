"""Address book of a process: peers claim addresses, and only a link proves one.

Identities cost nothing, so many of them may claim one address: a machine that answers nobody, or somebody else's. It is
dialled once for all of them. If nobody answers there, the others' claims wait; if somebody else answers, his
certificate says whose claim is true, and the others are not dialled at all.
"""

from dataclasses import dataclass, field

REMEMBERED_S = 10.0
"""How long what was found at an address counts: a peer may start anew there at any time."""
MOST_ADDRESSES = 4096


@dataclass(frozen=True, slots=True)
class DialFailure:
    """Dial failure: what a dial to an address found."""

    at_s: float
    asked_for: str
    """The peer that was to be there."""
    certificate: bytes | None = None
    """Of who answers there; None if nobody does, or it is not known."""


@dataclass(slots=True)
class AddressBook:
    """Address book of one process. Times are seconds of any one clock."""

    proven: dict[str, str] = field(default_factory=dict)
    """Peer ids by address: who has proven last that it is there."""
    found: dict[str, DialFailure] = field(default_factory=dict)
    """The latest failure at each address."""

    def record_proof(self, address: str, peer_id: str) -> None:
        """Records that a peer has proven that it is at an address."""
        self.found.pop(address, None)
        self.proven.pop(address, None)
        self.proven[address] = peer_id
        _shorten(self.proven)

    def record_failure(self, address: str, found: DialFailure) -> None:
        """Records that nobody answered at an address, or not the one who was to."""
        self.found.pop(address, None)
        self.found[address] = found
        _shorten(self.found)

    def why_not(self, address: str, peer_id: str, certificate: bytes, now_s: float) -> str | None:
        """Why that peer need not be dialled there; None: it may be there."""
        found = self.found.get(address)
        if self.proven.get(address) == peer_id or found is None or now_s - found.at_s >= REMEMBERED_S:
            return None
        if found.certificate is not None:
            return None if found.certificate == certificate else "another one answers at its address"
        return None if found.asked_for == peer_id else "nobody answers at its address"


def _shorten(entries: dict[str, str] | dict[str, DialFailure]) -> None:
    while len(entries) > MOST_ADDRESSES:
        del entries[next(iter(entries))]
