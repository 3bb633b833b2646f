"""Progress watch of a link: ends one whose other end lives, holds this end's memory, and does nothing. Pure."""

from molink.peer.wire.transport.keepalive import TICK_S
from molink.peer.wire.transport.reassembly import PROGRESS_S


class ProgressWatch:
    """Progress watch: for how long nothing has come of a message, or nothing was acknowledged, while this end was
    awake."""

    __slots__ = ("_awake_s", "_looked_s")

    def __init__(self, now_s: float) -> None:
        self._looked_s = self._awake_s = now_s

    def stalled(self, begun_s: float | None, unanswered_s: float, now_s: float) -> str | None:
        """Why the link is to be ended; None: there is no reason. To be asked every TICK_S.

        Args:
            begun_s: when the last chunk came of the message of which none has come for longest, if any is not whole.
            unanswered_s: since when nothing was acknowledged though something was sent; infinite if nothing was.
        """
        if now_s - self._looked_s > 2 * TICK_S:
            self._awake_s = now_s  # this end slept, and the other one with it for all it knows
        self._looked_s = now_s
        if now_s - self._awake_s < PROGRESS_S:
            return None
        if begun_s is not None and now_s - begun_s > PROGRESS_S:
            return f"nothing more has come of a message for {PROGRESS_S:g} s"
        if now_s - unanswered_s > PROGRESS_S:
            return f"nothing was acknowledged for {PROGRESS_S:g} s"
        return None
