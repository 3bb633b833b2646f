"""Keys and values on their way: those of prompts while they are computed, and copies in the background."""

from collections.abc import Callable, Sequence

from molink.peer.redundancy.partners import Copy
from molink.simnet.papers.redundancy.cluster.cluster import Cluster
from molink.simnet.papers.redundancy.cluster.jobs import Job

COPY_PIECES = 10
"""Of a copy: a token's lines wait for one of them at most."""


def stream_prompts(
    cluster: Cluster,
    number: int,
    prefills: Sequence[Job],
    end_s: float,
    there: Callable[[Sequence[Job], int], None],
) -> None:
    """Sends each layer's keys and values as it is computed; what is at home elsewhere is `there` when its last layer
    is, the rest when it is computed."""
    near = [job for job in prefills if job.home == number]
    away = [job for job in prefills if len(job.holders) > 1]
    here = [job for job in near if len(job.holders) == 1]
    profile, timeline = cluster.profile, cluster.timeline
    if here:
        timeline.call_at(end_s, lambda: there(here, number))
    if not away:
        return
    size_bytes = sum(job.tokens for job in away) * profile.kv_token_bytes
    port = cluster.ports[number]
    there_s = port.stream(size_bytes, profile.shape.layers, timeline.now_s, end_s)

    def arrived() -> None:
        port.received(size_bytes)
        there(away, number)

    timeline.call_at(there_s, arrived)


class BackgroundCopies:
    """Copies that are being made. Each goes in pieces, and only while nothing else leaves the instance."""

    def __init__(self, cluster: Cluster, complete: Callable[[Job, Copy], None]) -> None:
        """`complete` is called when all that a job had when its copy began is there."""
        self._cluster = cluster
        self._complete = complete
        self.sources: set[int] = set()
        """Instances that make one."""

    def start(self, job: Job, copy: Copy) -> None:
        """Sets its room aside, and sends it."""
        self._cluster.instances[copy.target].reserve(job)
        job.copy_to, job.copied_tokens = copy.target, job.tokens
        self.sources.add(copy.source)
        self._send(job, copy, COPY_PIECES)

    def _send(self, job: Job, copy: Copy, pieces: int) -> None:
        timeline, port = self._cluster.timeline, self._cluster.ports[copy.source]
        if job.ended or job.copy_to != copy.target:
            self.sources.discard(copy.source)
            return
        if port.free_s > timeline.now_s:
            timeline.call_at(port.free_s, lambda: self._send(job, copy, pieces))
            return
        size_bytes = job.copied_tokens * self._cluster.profile.kv_token_bytes // COPY_PIECES

        def arrived() -> None:
            if job.ended:
                port.lost(size_bytes)
            else:
                port.received(size_bytes)
            if pieces > 1:
                self._send(job, copy, pieces - 1)
            else:
                self.sources.discard(copy.source)
                if not job.ended:
                    self._complete(job, copy)

        timeline.call_at(port.send(size_bytes, timeline.now_s), arrived)
