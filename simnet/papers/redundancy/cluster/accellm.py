"""AcceLLM: pairs that hold keys and values twice, and change roles. Who does what is decided in `peer/`."""

from collections.abc import Sequence

from molink.peer.redundancy.partners import PairRoom, spread
from molink.peer.redundancy.roles import is_short, prefiller, prefills_next
from molink.simnet.papers.redundancy.cluster.baselines import may_join
from molink.simnet.papers.redundancy.cluster.cluster import Cluster, Computed, Step
from molink.simnet.papers.redundancy.cluster.groups import Group, GroupPlacement
from molink.simnet.papers.redundancy.cluster.handover import stream_prompts
from molink.simnet.papers.redundancy.cluster.jobs import Job
from molink.simnet.papers.redundancy.cluster.pair_copies import PairCopies


class Accellm:
    """Pairs; two pairs are one group of four while they cannot hold everything twice (section 4.2.5)."""

    def __init__(self, cluster: Cluster) -> None:
        """Raises ValueError if instances are left without a partner."""
        numbers = range(len(cluster.instances))
        if len(numbers) % 2:
            raise ValueError(f"pairs need an even number of instances, got {len(numbers)}")
        self._cluster = cluster
        self._pairs = tuple((number, number + 1) for number in numbers[::2])
        self._quads = tuple(zip(*(iter(numbers),) * 4, strict=False))
        self._groups = {pair[0]: Group(pair) for pair in self._pairs}
        self._group_of = {number: self._groups[number - number % 2] for number in numbers}
        self._placing = GroupPlacement(cluster)
        self._copies = PairCopies(cluster, self)
        self.short_requests = 0
        """Prompts that were computed while memory was short."""

    def arrive(self, jobs: Sequence[Job]) -> None:
        arriving_tokens = sum(job.request.room_tokens for job in jobs)
        for quad in self._quads:
            self._regroup(quad, arriving_tokens * len(quad) // len(self._group_of))
        groups = tuple(self._groups.values())
        rooms = [
            PairRoom(place, self._placing.free_tokens(group), self._placing.taken(group))
            for place, group in enumerate(groups)
        ]
        for job, place in zip(jobs, spread(rooms, [job.request.room_tokens for job in jobs]), strict=True):
            groups[place].queue.append(job)
        for group in groups:
            self._assign(group)
        self._copies.begin()

    def next_step(self, number: int) -> Step | None:
        group = self._group_of[number]
        decodes = self._cluster.decodable(number)
        if group.prefiller == number and prefills_next(
            was_prefilling=self._cluster.instances[number].has_prefilled, waiting=len(decodes)
        ):
            prefills: list[Job] = []
            while group.queue and may_join(group.queue[0], prefills):
                if not self._placing.took(group.queue[0], group):
                    break
                prefills.append(group.queue.popleft())
            if prefills:
                self.short_requests += len(prefills) if group.is_short else 0
                return Step(prefills=tuple(prefills))
        return Step(decodes=decodes) if decodes else None

    def began(self, number: int, step: Step, end_s: float) -> None:
        stream_prompts(self._cluster, number, step.prefills, end_s, self._there)

    def computed(self, done: Computed) -> None:
        self._copies.computed(done)
        if done.step.prefills or done.ended:
            for quad in self._quads[done.number // 4 : done.number // 4 + 1]:
                self._regroup(quad, 0)
            self._assign(self._group_of[done.number])
        else:
            self._cluster.pump(*self._group_of[done.number].instances)

    def has_prompts(self, number: int) -> bool:
        return bool(self._group_of[number].queue)

    @property
    def copying_pairs(self) -> Sequence[tuple[int, int]]:
        return [pair for pair in self._pairs if not self._group_of[pair[0]].is_short]

    def copied(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._assign(self._group_of[number])

    def _there(self, jobs: Sequence[Job], source: int) -> None:
        """All of their keys and values are at their homes."""
        for job in jobs:
            self._cluster.handed_over(job)
            if job.home != source and not self._placing.keeps(job, source, self._group_of[source]):
                self._cluster.drop(job, source)
        self._assign(self._group_of[source])
        self._cluster.pump(*dict.fromkeys(job.home for job in jobs))

    def _assign(self, group: Group) -> None:
        """Who prefills, and who decodes what."""
        prefilling = self._placing.prefilling(group)
        instances = [self._cluster.instances[at] for at in group.instances]
        if not group.queue:
            group.prefiller = None
        elif prefilling:
            group.prefiller = prefilling[0]
        else:
            room = group.queue[0].request.room_tokens
            roomy = [one.standing() for one in instances if one.could_keep(room)]
            if group.prefiller not in [one.instance for one in roomy]:
                group.prefiller = prefiller(roomy) if roomy else None
        away = {group.prefiller, *prefilling}
        self._placing.balance(group.instances, [at for at in group.instances if at not in away])
        self._cluster.pump(*group.instances)

    def _regroup(self, quad: tuple[int, ...], arriving_tokens: int) -> None:
        """Two pairs become a group of four, or are pairs again."""
        was_short = self._group_of[quad[0]].is_short
        standings = [self._cluster.instances[at].standing() for at in quad]
        if is_short(standings, arriving_tokens, was_short=was_short) == was_short:
            return
        left = {id(group): group for group in (self._group_of[at] for at in quad)}
        waiting = [job for group in left.values() for job in group.queue]
        groups = [Group(quad[:2]), Group(quad[2:])] if was_short else [Group(quad)]
        for place, job in enumerate(sorted(waiting, key=lambda one: one.request.number)):
            groups[place % len(groups)].queue.append(job)
        for at in quad:
            self._groups.pop(at, None)
        for group in groups:
            self._groups[group.instances[0]] = group
            self._group_of |= dict.fromkeys(group.instances, group)
