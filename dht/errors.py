"""Errors of entering a swarm. Importing this loads no libp2p."""

from collections.abc import Sequence


class PortInUse(OSError):
    """The port to listen on is taken."""


class BootstrapUnreachable(ConnectionError):
    """None of the initial peers answered."""

    def __init__(self, attempts: Sequence[tuple[str, str]]) -> None:
        """`attempts`: each address tried, and why it failed."""
        self.attempts = tuple(attempts)
        tried = "; ".join(f"{address}: {reason}" for address, reason in self.attempts)
        super().__init__(
            f"none of the initial peers answered ({tried}). Check that one of them is running, that its "
            f"address is reachable from here, and, if the swarm is private, that you use its swarm key"
        )
