"""Groups of instances that share requests, and where in them keys and values go."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from molink.peer.redundancy.pair_balance import balanced, is_balanced
from molink.peer.redundancy.roles import keeps_copy
from molink.simnet.papers.redundancy.cluster.cluster import Cluster
from molink.simnet.papers.redundancy.cluster.jobs import Instance, Job

PAIR = 2


@dataclass(slots=True, eq=False)
class Group:
    """A pair, or two while memory is short."""

    instances: tuple[int, ...]
    queue: deque[Job] = field(default_factory=deque)
    prefiller: int | None = None

    @property
    def is_short(self) -> bool:
        return len(self.instances) > PAIR


class GroupPlacement:
    """Finds room in a group; copies give way to what has no other place."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def free_tokens(self, group: Group) -> int:
        """Of all instances of the group."""
        return sum(self._cluster.instances[at].free_tokens for at in group.instances)

    def prefilling(self, group: Group) -> list[int]:
        """Its instances that compute prompts."""
        return [at for at in group.instances if self._cluster.instances[at].prefilling]

    def taken(self, group: Group) -> int:
        """Prompts that it has taken and not computed."""
        return len(group.queue) + sum(self._cluster.instances[at].prefilling for at in group.instances)

    def took(self, job: Job, group: Group) -> bool:
        """Sets room aside where the group's prefiller computes it, and where it is to be decoded.

        That is the other instance of a pair, or of several the one with the fewest sequences; if none has room, the
        prefiller itself.
        """
        if group.prefiller is None or not self.made_room(group.prefiller, job):
            return False
        here = self._cluster.instances[group.prefiller]
        others = [self._cluster.instances[at] for at in group.instances if at != here.number]
        others.sort(key=lambda one: (len(one.homes), -one.free_tokens, one.number))
        self._cluster.hold(job, here.number)
        target = next((one for one in others if self.made_room(one.number, job)), here)
        if target is not here:
            self._cluster.hold(job, target.number)
        self._cluster.settle(job, target.number)
        return True

    def keeps(self, job: Job, source: int, group: Group) -> bool:
        """Whether the instance that has computed the prompt keeps a copy of its keys and values."""
        if not group.is_short:
            return True
        origin = self._cluster.instances[job.home]
        copied = sum(
            one.request.room_tokens
            for one in origin.homes.values()
            if source in one.holders and one is not job
        )
        room = job.request.room_tokens
        return keeps_copy(len(group.instances) - 1, origin.kept_tokens - room, copied, room)

    def balance(self, numbers: Sequence[int], decoding: Sequence[int]) -> None:
        """What these instances hold is decoded by those of them that decode."""
        now_s, instances = self._cluster.timeline.now_s, self._cluster.instances
        homes = [instances[at].homes.values() for at in decoding]
        loads = [(len(jobs), sum(job.tokens for job in jobs)) for jobs in homes]
        if len(decoding) == len(numbers) and is_balanced(loads):
            return
        jobs = {job.request.number: job for at in numbers for job in instances[at].homes.values()}
        for number, home in balanced([job.seen(now_s) for job in jobs.values()], decoding).items():
            if jobs[number].home != home:
                self._cluster.settle(jobs[number], home)

    def made_room(self, number: int, job: Job) -> bool:
        """Whether the instance has room for it now; copies have given way if need be."""
        instance, room = self._cluster.instances[number], job.request.room_tokens
        if instance.free_tokens >= room:
            return True
        if not instance.could_keep(room):
            return False
        for copy in sorted(_overwritable(instance), key=lambda one: (-one.tokens, one.request.number)):
            self._cluster.drop(copy, number)
            if instance.free_tokens >= room:
                return True
        return False


def _overwritable(instance: Instance) -> list[Job]:
    """Copies that nothing is being made of: neither the next token nor another copy, nor the first one elsewhere."""
    return [
        job
        for job in instance.held.values()
        if job.home != instance.number
        and job.running_on != instance.number
        and job.copy_to is None
        and job.ready_s < math.inf
    ]
