"""Instances that compute one step after the other in virtual time. What they compute is a policy's decision."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from molink.simnet.core.timeline import Timeline
from molink.simnet.devices.devices import Work
from molink.simnet.papers.redundancy.cluster.instances import InstanceProfile
from molink.simnet.papers.redundancy.cluster.jobs import Instance, Job
from molink.simnet.papers.redundancy.cluster.ports import Port
from molink.simnet.papers.redundancy.cluster.workloads import RedundancyRequest

PREFILL_TOKENS = 4096
"""Of prompts, in one step: vLLM's default for a model of that context length. A longer prompt is computed alone."""


@dataclass(frozen=True, slots=True)
class Step:
    """What an instance computes at once."""

    prefills: tuple[Job, ...] = ()
    """Prompts, up to their last tokens."""
    decodes: tuple[Job, ...] = ()
    part: tuple[Job, int] | None = None
    """A prompt of which so many tokens are computed now, and the last one is not."""

    @property
    def prompts(self) -> tuple[tuple[Job, int], ...]:
        """With the tokens of each that are computed now."""
        whole = tuple((job, job.request.prompt_tokens - job.begun_tokens) for job in self.prefills)
        return whole if self.part is None else (*whole, self.part)


@dataclass(frozen=True, slots=True)
class Computed:
    """A step that an instance has computed."""

    number: int
    step: Step
    ended: tuple[Job, ...]
    """Those that have all of their tokens."""


class ClusterPolicy(Protocol):
    """Decides who computes what."""

    def arrive(self, jobs: Sequence[Job]) -> None:
        """Requests that come at the same time."""

    def next_step(self, number: int) -> Step | None:
        """For an instance that has nothing to do; None: it waits until it is asked again. The prompts of the step are
        already held where their keys and values go to."""

    def began(self, number: int, step: Step, end_s: float) -> None:
        """It computes a step with prompts until then."""

    def computed(self, done: Computed) -> None:
        """An instance has nothing to do any more."""


class Cluster:
    """Owner of instances, their lines and the jobs on them."""

    def __init__(
        self, timeline: Timeline, profile: InstanceProfile, instances: int, bytes_per_s: float
    ) -> None:
        self.timeline = timeline
        self.profile = profile
        capacity = profile.capacity_tokens
        self.instances = tuple(Instance(number, capacity) for number in range(instances))
        self.ports = tuple(Port(bytes_per_s) for _ in range(instances))
        self.jobs: list[Job] = []
        self.policy: ClusterPolicy | None = None
        self.tokens: Counter[int] = Counter()
        """Drawn in each second."""

    def arrive(self, requests: Sequence[RedundancyRequest], policy: ClusterPolicy) -> None:
        """Each at its time, all of one time together."""
        self.policy = policy
        together: dict[float, list[Job]] = {}
        for request in requests:
            job = Job(request, tokens=request.prompt_tokens, left=request.output_tokens)
            self.jobs.append(job)
            together.setdefault(request.arrival_s, []).append(job)
        for at_s, jobs in together.items():
            self.timeline.call_at(at_s, lambda jobs=jobs: policy.arrive(jobs))  # type: ignore[misc]

    def pump(self, *numbers: int) -> None:
        """Those that have nothing to do get something."""
        for number in numbers:
            if self.policy is None or self.instances[number].busy:
                continue
            step = self.policy.next_step(number)
            if step is not None:
                self._begin(number, step)

    def hold(self, job: Job, number: int) -> None:
        """The instance gets, or has, all of its keys and values."""
        self.instances[number].reserve(job)
        job.holders.append(number)

    def drop(self, job: Job, number: int) -> None:
        """It overwrites them."""
        job.holders.remove(number)
        self.instances[number].give_up(job, job.tokens)

    def settle(self, job: Job, number: int) -> None:
        """From now on it is decoded there."""
        if job.home >= 0:
            self._unsettle(job)
        job.home = number
        instance = self.instances[number]
        instance.homes[job.request.number] = job
        instance.kept_tokens += job.request.room_tokens

    def handed_over(self, job: Job) -> None:
        """It can be decoded at its home."""
        job.ready_s = self.timeline.now_s
        job.last_on = job.home

    def decodable(self, number: int) -> tuple[Job, ...]:
        """The jobs at home there whose newest line is there. If only lines are missing, it is asked again."""
        now_s = self.timeline.now_s
        found, earliest_s = [], math.inf
        for job in self.instances[number].homes.values():
            if job.running_on is not None or job.ready_s > now_s:
                continue
            if job.last_on != number and (until_s := self.instances[job.last_on].lines_until_s) > now_s:
                earliest_s = min(earliest_s, until_s)
                continue
            found.append(job)
        if not found and earliest_s < math.inf:
            self.timeline.call_at(earliest_s, lambda: self.pump(number))
        return tuple(found)

    def send_lines(self, number: int, lines: int) -> None:
        """So many new lines of keys and values leave the instance at once."""
        if not lines:
            return
        port, size_bytes = self.ports[number], lines * self.profile.kv_token_bytes
        there_s = self.instances[number].lines_until_s = port.send(size_bytes, self.timeline.now_s)
        self.timeline.call_at(there_s, lambda: port.received(size_bytes))

    def _begin(self, number: int, step: Step) -> None:
        instance = self.instances[number]
        instance.busy = True
        rows = tokens = attended = 0
        for job in step.decodes:
            job.running_on = number
            tokens += job.tokens + 1
        rows, attended = len(step.decodes), tokens
        for job, new in step.prompts:
            job.running_on = number
            rows, tokens = rows + new, tokens + job.begun_tokens + new
            attended += new * job.begun_tokens + new * (new + 1) // 2
        instance.prefilling = len(step.prompts)
        sequences = len(step.decodes) + len(step.prompts)
        taken_s = self.profile.step_s(Work(rows, tokens, attended), sequences)
        if step.prompts and self.policy is not None:
            self.policy.began(number, step, self.timeline.now_s + taken_s)
        self.timeline.call(taken_s, lambda: self._computed(number, step, taken_s))

    def _computed(self, number: int, step: Step, taken_s: float) -> None:
        now_s = self.timeline.now_s
        instance = self.instances[number]
        instance.busy_s += taken_s
        instance.busy, instance.prefilling, instance.has_prefilled = False, 0, bool(step.prefills)
        for job, new in step.prompts:
            job.running_on = None
            job.begun_tokens += new
        for job in step.prefills:
            job.first_s = job.last_s = now_s
            job.left -= 1
        ended = self._decoded(number, step.decodes, now_s)
        self.tokens[int(now_s)] += len(step.prefills) + len(step.decodes)
        for job in ended:
            self._end(job)
        if self.policy is not None:
            self.policy.computed(Computed(number, step, tuple(ended)))
        self.pump(number)

    def _decoded(self, number: int, decodes: Sequence[Job], now_s: float) -> list[Job]:
        """One more token for each; those that have theirs all."""
        ended = []
        lines = [0] * len(self.instances)
        for job in decodes:
            gap_s = now_s - job.last_s
            if gap_s > job.longest_gap_s:
                job.longest_gap_s = gap_s
            job.last_s = now_s
            job.last_on = number
            job.running_on = None
            job.tokens += 1
            job.left -= 1
            for holder in job.holders:
                lines[holder] += 1
            if not job.left:
                ended.append(job)
        for holder, tokens in enumerate(lines):
            if tokens:
                self.instances[holder].grow(tokens)
        self.send_lines(number, sum(lines) - lines[number])
        return ended

    def _end(self, job: Job) -> None:
        if job.ended:
            raise AssertionError(f"request {job.request.number} ended twice")
        job.ended = True
        self._unsettle(job)
        for number in tuple(job.holders):
            self.drop(job, number)
        if job.copy_to is not None:
            self.instances[job.copy_to].give_up(job, job.copied_tokens)
            job.copy_to = None

    def _unsettle(self, job: Job) -> None:
        instance = self.instances[job.home]
        del instance.homes[job.request.number]
        instance.kept_tokens -= job.request.room_tokens
