"""Uplink rate estimation: the rate of the uplink that all links share, from what each of them measured. Pure.

By this end's own clock alone: bytes whose acknowledgements came, over the time in which they came. A receiver can
still hold them back, and what is then measured on its link is not the uplink's slowness. So each link has an estimate
of its own, of what the uplink carried over all links while bulk waited on that one; and the uplink is taken to carry
the most of these. A slow receiver says something of its own link only. What a link has shown is not for ever, for a
line may become slower while the link has nothing to send: it holds until other links have carried OUTWEIGHED times as
many bytes. So one link's word weighs as much as its bytes.
"""

from molink.peer.wire.estimation.bottleneck_model import BottleneckModel
from molink.peer.wire.estimation.estimator import RateEstimator

SPAN_S = 0.030
"""The uplink is measured by the times at which acks come, which are coarser than the receivers' stamps."""
OUTWEIGHED = 4.0
"""A link that lies has carried less than those that do not: this many times what they have is more than chance."""
HOLDS_S = 10.0
"""Bytes count as those of so many seconds at the rate that was shown, at most: after that a line may have changed."""
RISE = 1.5
"""An uplink that is found to be so many times as fast has carried what was put on it sooner than was thought."""


class LinkEvidence:
    """Evidence that one link has given of the uplink's rate."""

    __slots__ = ("acked_bytes", "carried_bytes", "is_busy", "rate", "sent_bytes")

    def __init__(self, acked_bytes: int = 0) -> None:
        """Its link counts what has arrived from `acked_bytes` on."""
        self.rate = RateEstimator(SPAN_S)
        """Of all links together while bulk waited on this one. What was sent between two of its chunks went between
        them, whenever the receivers of others say that it arrived: those bytes count, not what others acknowledge."""
        self.sent_bytes = 0
        """What had been sent over all links when that was sent which last arrived over this one."""
        self.acked_bytes = acked_bytes
        """What had arrived over this one when it was last measured."""
        self.carried_bytes = 0.0
        """By which its word still outweighs that of others."""
        self.is_busy = False
        """Bulk waits on it now: what is thought of the uplink matters to it."""


class UplinkRate:
    """Estimator of an uplink's rate in bytes a second, owner of its links' evidence."""

    def __init__(self, bottleneck: BottleneckModel) -> None:
        """`bottleneck` is the model of the uplink's queue, which is corrected when the uplink proves to be faster."""
        self.bytes_per_s: float | None = None
        """The estimate; None until bulk was measured once."""
        self._bottleneck = bottleneck
        self._evidence: list[LinkEvidence] = []
        """Of links that have shown something, and at most one that is gone."""
        self._gone: LinkEvidence | None = None

    @property
    def heard(self) -> int:
        """Links whose evidence counts."""
        return len(self._evidence)

    def record_measurement(self, evidence: LinkEvidence, acked_bytes: int, now_s: float) -> None:
        """A measurement counts for a link over which so much has arrived so far: its word gains what it has carried
        since the last one, the others' lose as much."""
        rate, own_bytes = evidence.rate.bytes_per_s, acked_bytes - evidence.acked_bytes
        evidence.acked_bytes = acked_bytes
        if rate is None:
            return
        if evidence not in self._evidence:
            self._evidence.append(evidence)
        for other in self._evidence:
            if other is not evidence:
                other.carried_bytes = max(0.0, other.carried_bytes - own_bytes / OUTWEIGHED)
        evidence.carried_bytes = min(evidence.carried_bytes + own_bytes, HOLDS_S * rate)
        self._settle(now_s)

    def bulk_begins(self, evidence: LinkEvidence, now_s: float) -> None:
        """Bulk waits on a link."""
        evidence.is_busy = True
        known = evidence.rate.bytes_per_s
        if known is not None and self.bytes_per_s is not None and known > self.bytes_per_s:
            self._settle(now_s)

    def forget_link(self, evidence: LinkEvidence) -> None:
        """A link is gone. Of those that are, the word of the one that has shown the most holds on."""
        evidence.is_busy = False
        if evidence not in self._evidence:
            return
        gone, self._gone = self._gone, evidence
        if gone is not None:
            if gone.carried_bytes and _rate(gone) > _rate(evidence):
                gone, self._gone = evidence, gone
            self._evidence.remove(gone)

    def _settle(self, now_s: float) -> None:
        """The most that any link has shown whose word holds, or to which it matters now."""
        counting = [
            _rate(evidence) for evidence in self._evidence if evidence.is_busy or evidence.carried_bytes
        ]
        most = max(counting, default=0.0)
        if not most:
            return
        known = self.bytes_per_s
        self.bytes_per_s = most
        if known is not None and most > RISE * known:
            self._bottleneck.speed_up(most / known, now_s)


def _rate(evidence: LinkEvidence) -> float:
    return evidence.rate.bytes_per_s or 0.0
