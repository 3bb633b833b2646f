"""Ours: pairs hold keys and values twice as AcceLLM's do, and both of a pair compute pieces of prompts as they decode.

What is computed in a step and who decodes what is decided in `peer/`. No role is taken or given back, so that nobody
waits for a partner's step; two copies serve to balance what is decoded in a pair, at no cost.
"""

from collections.abc import Sequence

from molink.peer.redundancy.partners import Copy, PairRoom, spread
from molink.peer.redundancy.prompt_pieces import next_pieces, piece_tokens, prompt_order
from molink.simnet.devices.devices import Work
from molink.simnet.papers.redundancy.cluster.cluster import PREFILL_TOKENS, Cluster, Computed, Step
from molink.simnet.papers.redundancy.cluster.groups import GroupPlacement
from molink.simnet.papers.redundancy.cluster.instances import InstanceProfile
from molink.simnet.papers.redundancy.cluster.jobs import Job
from molink.simnet.papers.redundancy.cluster.pair_copies import PairCopies


class Molink:
    """Pairs whose instances do the same. A prompt is decoded where it was computed, or where balance takes it."""

    def __init__(self, cluster: Cluster) -> None:
        """Raises ValueError if instances are left without a partner."""
        numbers = range(len(cluster.instances))
        if len(numbers) % 2:
            raise ValueError(f"pairs need an even number of instances, got {len(numbers)}")
        self._cluster = cluster
        self._pairs = tuple((number, number + 1) for number in numbers[::2])
        self._queues = self._new_queues()
        """By instance, the prompts that it takes from."""
        self._begun: dict[int, Job] = {}
        self._placing = GroupPlacement(cluster)
        self._copies = PairCopies(cluster, self)
        self._piece = _piece(cluster.profile)
        self.short_requests = 0
        """Prompts whose copy had no room when they were begun."""

    def arrive(self, jobs: Sequence[Job]) -> None:
        instances = self._cluster.instances
        rooms = [
            PairRoom(
                place,
                sum(instances[at].free_tokens for at in pair),
                len(self._waiting(pair)) + sum(instances[at].prefilling for at in pair),
            )
            for place, pair in enumerate(self._pairs)
        ]
        for job, place in zip(jobs, spread(rooms, [job.request.room_tokens for job in jobs]), strict=True):
            self._queue_in(self._pairs[place]).append(job)
        for queue in self._queues.values():
            queue.sort(key=_order)
        self._cluster.pump(*range(len(instances)))
        self._copies.begin()

    def next_step(self, number: int) -> Step | None:
        decodes = self._cluster.decodable(number)
        prompts = self._prompts(number, self._piece_beside(len(decodes)))
        ends = [job for job, tokens in prompts if job.begun_tokens + tokens == job.request.prompt_tokens]
        part = prompts[-1] if len(ends) < len(prompts) else None
        if part is not None:
            self._begun[number] = part[0]
        return Step(tuple(ends), decodes, part) if prompts or decodes else None

    def began(self, number: int, step: Step, end_s: float) -> None:
        """Keys and values go to the partner layer by layer; nothing waits for them."""
        timeline, port, profile = self._cluster.timeline, self._cluster.ports[number], self._cluster.profile
        sent = [
            (job, tokens * profile.kv_token_bytes) for job, tokens in step.prompts if job.copy_to is not None
        ]
        if not sent:
            return

        def arrived() -> None:
            for job, size_bytes in sent:
                (port.lost if job.ended else port.received)(size_bytes)
                if job in step.prefills and not job.ended:
                    self._copies.arrived(job, Copy(job.request.number, number, number ^ 1, goes_over=False))

        size_bytes = sum(one for _, one in sent)
        timeline.call_at(port.stream(size_bytes, profile.shape.layers, timeline.now_s, end_s), arrived)

    def computed(self, done: Computed) -> None:
        for job in done.step.prefills:
            self._cluster.handed_over(job)
        self._copies.computed(done)
        if self._may_balance(done):
            self._balance(done.number)
        self._cluster.pump(*self._pairs[done.number // 2])

    def has_prompts(self, number: int) -> bool:
        return bool(self._waiting(self._pairs[number // 2]))

    @property
    def copying_pairs(self) -> Sequence[tuple[int, int]]:
        return self._pairs

    def copied(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._balance(number)
            self._cluster.pump(*self._pairs[number // 2])

    def _new_queues(self) -> dict[int, list[Job]]:
        """One for both of a pair."""
        queues: dict[int, list[Job]] = {}
        for pair in self._pairs:
            shared: list[Job] = []
            queues |= dict.fromkeys(pair, shared)
        return queues

    def _queue_in(self, pair: tuple[int, int]) -> list[Job]:
        """That of the pair in which a request goes that comes now."""
        return self._queues[pair[0]]

    def _waiting(self, pair: tuple[int, int]) -> list[Job]:
        """The prompts that the pair has not begun."""
        return self._queues[pair[0]]

    def _piece_beside(self, decodes: int) -> int:  # noqa: ARG002 - who decodes elsewhere computes larger ones
        """Tokens of prompts in a step with so many decodes."""
        return self._piece

    def _may_balance(self, done: Computed) -> bool:
        return bool(done.step.prefills or done.ended)

    def _prompts(self, number: int, piece: int) -> list[tuple[Job, int]]:
        """Those of the next step, with the tokens of each; there is room for them."""
        queue, begun = self._queues[number], self._begun.pop(number, None)
        left = 0 if begun is None else begun.request.prompt_tokens - begun.begun_tokens
        found = []
        for tokens in next_pieces(left, [job.request.prompt_tokens for job in queue], piece, 2):
            if begun is not None:
                found.append((begun, tokens))
                begun = None
            elif self._took(queue[0], number):
                found.append((queue.pop(0), tokens))
            else:
                break
        return found

    def _took(self, job: Job, number: int) -> bool:
        if not self._placing.made_room(number, job):
            return False
        self._cluster.hold(job, number)
        self._cluster.settle(job, number)
        partner = self._cluster.instances[number ^ 1]
        if partner.free_tokens >= job.request.room_tokens:
            partner.reserve(job)
            job.copy_to, job.copied_tokens = partner.number, job.tokens
        else:
            self.short_requests += 1
        return True

    def _balance(self, number: int) -> None:
        """Once the pair has computed its prompts: who changes waits for the other's step, which is longer before."""
        pair = self._pairs[number // 2]
        if not self._waiting(pair) and not any(at in self._begun for at in pair):
            self._placing.balance(pair, pair)


def _order(job: Job) -> tuple[float, int, int]:
    return prompt_order(job.request.arrival_s, job.request.prompt_tokens, job.request.number)


def _piece(profile: InstanceProfile) -> int:
    return piece_tokens(
        lambda rows: profile.step_s(Work(rows, rows, rows * (rows + 1) // 2), 1), PREFILL_TOKENS
    )
