"""Copies of keys and values that pairs make in the background: a second one in a pair, or one for another pair."""

from collections.abc import Sequence
from typing import Protocol

from molink.peer.redundancy.partners import Copy, PairLoad, next_copy
from molink.simnet.papers.redundancy.cluster.cluster import Cluster, Computed
from molink.simnet.papers.redundancy.cluster.handover import BackgroundCopies
from molink.simnet.papers.redundancy.cluster.jobs import Job

COPYING_S = 0.25
"""Between two looks at what could be copied."""


class PairOwner(Protocol):
    """A policy whose pairs make copies."""

    def has_prompts(self, number: int) -> bool:
        """Whether prompts wait for this instance's pair: their keys and values need its line."""

    @property
    def copying_pairs(self) -> Sequence[tuple[int, int]]:
        """Those that make copies wherever there is room for them."""

    def copied(self, numbers: Sequence[int]) -> None:
        """These instances hold something else than before."""


class PairCopies:
    """Looks for what could be copied, now and then while there is anything."""

    def __init__(self, cluster: Cluster, owner: PairOwner) -> None:
        self._cluster = cluster
        self._owner = owner
        self._background = BackgroundCopies(cluster, self.arrived)
        self._complete: dict[int, Copy] = {}
        self._looking = False

    def begin(self) -> None:
        """Something has come."""
        if not self._looking:
            self._looking = True
            self._cluster.timeline.call(COPYING_S, self._look)

    def computed(self, done: Computed) -> None:
        """What its step has kept from being moved is moved now."""
        if not self._complete:
            return
        for job in (*done.step.prefills, *done.step.decodes):
            if (copy := self._complete.pop(job.request.number, None)) is not None and not job.ended:
                self.arrived(job, copy)

    def arrived(self, job: Job, copy: Copy) -> None:
        """A copy is complete but for the lines that came since, which are sent now. It is moved between two steps."""
        cluster = self._cluster
        if job.running_on is not None:
            self._complete[job.request.number] = copy
            return
        since = job.tokens - job.copied_tokens
        job.copy_to = None
        cluster.instances[copy.target].grow(since)
        job.holders.append(copy.target)
        cluster.send_lines(copy.source, since)
        if copy.goes_over:
            cluster.settle(job, copy.target)
            for holder in tuple(job.holders):
                if holder != copy.target:
                    cluster.drop(job, holder)
            self._start([pair for pair in self._owner.copying_pairs if copy.target in pair])
        self._owner.copied((copy.source, copy.target))

    def _look(self) -> None:
        instances = self._cluster.instances
        self._looking = any(one.homes or self._owner.has_prompts(one.number) for one in instances)
        if self._looking:
            self._cluster.timeline.call(COPYING_S, self._look)
            self._start(self._owner.copying_pairs)

    def _start(self, pairs: Sequence[tuple[int, ...]]) -> None:
        """In or between these pairs, as many as there are lines with nothing to send."""
        now_s, instances = self._cluster.timeline.now_s, self._cluster.instances
        loads = [self._load(pair, now_s) for pair in pairs]
        while True:
            idle = {
                one.number
                for one in instances
                if self._cluster.ports[one.number].free_s <= now_s
                and one.number not in self._background.sources
                and not self._owner.has_prompts(one.number)
            }
            copy = next_copy(loads, {one.number: one.free_tokens for one in instances}, idle)
            if copy is None:
                return
            self._background.start(instances[copy.source].homes[copy.number], copy)
            loads = [_without(load, copy.number) for load in loads]

    def _load(self, pair: tuple[int, ...], now_s: float) -> PairLoad:
        homes = [job for at in pair for job in self._cluster.instances[at].homes.values()]
        settled = [job for job in homes if job.ready_s <= now_s and job.copy_to is None]
        return PairLoad(pair, tuple(job.seen(now_s) for job in settled))


def _without(load: PairLoad, number: int) -> PairLoad:
    """What is being copied is no candidate for another copy."""
    return PairLoad(load.instances, tuple(one for one in load.sequences if one.number != number))
