"""Serving timeouts: how long a data plane waits for its neighbours, its clients and its own threads."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServingTimeouts:
    """Serving timeouts, in seconds."""

    unreached_s: float = 5.0
    """A neighbour that is not reached is given up after so long, however soon that was clear."""
    silent_s: float = 10.0
    """One that announces no address has so long to dial this peer."""
    whole_s: float = 1.0
    """Behind the first rows of an epoch a copy has to be whole within this time."""
    prepared_s: float = 60.0
    """An epoch that has not begun by then is forgotten."""
    expiry_check_s: float = 2.0
    """Between two looks for leases and epochs that have expired."""
    load_ends_s: float = 30.0
    """The thread of a load that was given up has so long to end, before the peer closes without it."""


TIMEOUTS = ServingTimeouts()
