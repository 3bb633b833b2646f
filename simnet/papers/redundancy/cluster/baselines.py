"""The two systems that the redundancy paper compares with, as its section 5.2 sets them up."""

from collections import deque
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from molink.simnet.papers.redundancy.cluster.cluster import PREFILL_TOKENS, Cluster, Computed, Step
from molink.simnet.papers.redundancy.cluster.handover import stream_prompts
from molink.simnet.papers.redundancy.cluster.jobs import Job

SPLITWISE_PREFILLERS: Mapping[int, int] = MappingProxyType({4: 1, 8: 2, 16: 4})
"""By instances. Of other numbers a quarter prefills."""


class Vllm:
    """Each instance for itself: the prompts that it has been given are computed together with its decodes.

    The paper does not say who gives them; here each instance has its turn. A prompt starts when there is room for the
    longest output.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._queues: tuple[deque[Job], ...] = tuple(deque() for _ in cluster.instances)
        self._turn = 0

    def arrive(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self._queues[self._turn].append(job)
            self._turn = (self._turn + 1) % len(self._queues)
        self._cluster.pump(*range(len(self._queues)))

    def next_step(self, number: int) -> Step | None:
        decodes = self._cluster.decodable(number)
        instance, queue = self._cluster.instances[number], self._queues[number]
        prefills: list[Job] = []
        while queue and may_join(queue[0], prefills) and instance.free_tokens >= queue[0].request.room_tokens:
            job = queue.popleft()
            self._cluster.hold(job, number)
            self._cluster.settle(job, number)
            prefills.append(job)
        return Step(tuple(prefills), decodes) if prefills or decodes else None

    def began(self, number: int, step: Step, end_s: float) -> None:
        """Nothing leaves the instance."""

    def computed(self, done: Computed) -> None:
        for job in done.step.prefills:
            self._cluster.handed_over(job)


class Splitwise:
    """Some instances only prefill, the others only decode; both take the instance with the least to do, as Splitwise's
    own scheduler does (section 4.1 of that paper), and a prompt starts when an instance that decodes has room."""

    def __init__(self, cluster: Cluster) -> None:
        instances = len(cluster.instances)
        prefillers = SPLITWISE_PREFILLERS.get(instances, max(1, instances // 4))
        self._cluster = cluster
        self._queues: tuple[deque[Job], ...] = tuple(deque() for _ in range(prefillers))
        self._decoders = cluster.instances[prefillers:]

    def arrive(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            min(self._queues, key=_waiting_tokens).append(job)
        self._cluster.pump(*range(len(self._queues)))

    def next_step(self, number: int) -> Step | None:
        if number >= len(self._queues):
            decodes = self._cluster.decodable(number)
            return Step(decodes=decodes) if decodes else None
        queue = self._queues[number]
        prefills: list[Job] = []
        while queue and may_join(queue[0], prefills) and self._took(queue[0], number):
            prefills.append(queue.popleft())
        return Step(prefills=tuple(prefills)) if prefills else None

    def began(self, number: int, step: Step, end_s: float) -> None:
        stream_prompts(self._cluster, number, step.prefills, end_s, self._there)

    def computed(self, done: Computed) -> None:
        if done.ended:
            self._cluster.pump(*range(len(self._queues)))

    def _took(self, job: Job, number: int) -> bool:
        room = job.request.room_tokens
        there = [one for one in self._decoders if one.free_tokens >= room]
        if not there or self._cluster.instances[number].free_tokens < room:
            return False
        self._cluster.hold(job, number)
        target = min(there, key=lambda one: (len(one.homes), one.number)).number
        self._cluster.hold(job, target)
        self._cluster.settle(job, target)
        return True

    def _there(self, jobs: Sequence[Job], source: int) -> None:
        for job in jobs:
            self._cluster.drop(job, source)
            self._cluster.handed_over(job)
        self._cluster.pump(*dict.fromkeys(job.home for job in jobs), *range(len(self._queues)))


def may_join(job: Job, prefills: Sequence[Job]) -> bool:
    """Whether a step that computes these prompts may compute that one too."""
    tokens = sum(one.request.prompt_tokens for one in prefills) + job.request.prompt_tokens
    return not prefills or tokens <= PREFILL_TOKENS


def _waiting_tokens(queue: deque[Job]) -> int:
    return sum(job.request.prompt_tokens for job in queue)
