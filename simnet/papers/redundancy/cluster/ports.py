"""The line of an instance to the others."""

from molink.simnet.core.wire import AccountedUplink


class Port(AccountedUplink):
    """Bytes leave one after the other, at one rate, to whichever instance. What arrives is not limited."""

    def __init__(self, bytes_per_s: float) -> None:
        super().__init__()
        self._bytes_per_s = bytes_per_s
        self.free_s = 0.0
        """When all that was given to it has left."""
        self.busy_s = 0.0
        """That bytes took, up to `free_s`."""

    def send(self, size_bytes: int, now_s: float) -> float:
        """When so many bytes are there."""
        return self._taken(size_bytes, max(now_s, self.free_s))

    def stream(self, size_bytes: int, layers: int, start_s: float, end_s: float) -> float:
        """When everything is there that is computed from `start_s` to `end_s`, each layer sent as soon as it is
        computed (section 4.2.4): the last one leaves when it is computed and those before it have left."""
        layer_s = (end_s - start_s) / layers
        begin_s = max(start_s + layer_s, self.free_s)
        last_s = size_bytes / layers / self._bytes_per_s
        begin_s = max(begin_s, end_s + last_s - size_bytes / self._bytes_per_s)
        return self._taken(size_bytes, begin_s)

    def _taken(self, size_bytes: int, begin_s: float) -> float:
        """A stream that waits for layers leaves gaps, in which nothing else is sent: it counts as its bytes alone."""
        self._sent_bytes += size_bytes
        taken_s = size_bytes / self._bytes_per_s
        self.busy_s += taken_s
        self.free_s = begin_s + taken_s
        return self.free_s
