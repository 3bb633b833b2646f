"""Ours with roles: sessions go over to the partner of an instance that computes prompts, as peers suggest it.

Which sessions do, and when, is `going_over`, the very decision of `molink-peer join --roles pairs|auto`, upon the same
values: what each of the two decodes, what it has yet to compute, and who holds what. A prompt is computed by the one of
the pair that decodes least when it comes, as a router sees it.
"""

from molink.peer.redundancy.pair_balance import HeldSequence
from molink.peer.redundancy.pair_roles import (
    HERE,
    LOOK_EVERY_S,
    QUIET_S,
    THERE,
    HolderLoad,
    RoleCosts,
    Roles,
    going_over,
)
from molink.simnet.devices.devices import Work
from molink.simnet.papers.redundancy.cluster.cluster import PREFILL_TOKENS, Cluster, Computed
from molink.simnet.papers.redundancy.cluster.jobs import Job
from molink.simnet.papers.redundancy.cluster.molink import Molink


class MolinkPairs(Molink):
    """Pairs of which one computes prompts while the other decodes, wherever both hold the keys and values."""

    def __init__(self, cluster: Cluster, roles: Roles) -> None:
        """Raises ValueError if instances are left without a partner."""
        super().__init__(cluster)
        self._roles = roles
        self._looked_s = dict.fromkeys(self._pairs, 0.0)
        self._prompted_s = dict.fromkeys(self._pairs, 0.0)
        """When a pair had a prompt last."""

    def _new_queues(self) -> dict[int, list[Job]]:
        return {number: [] for pair in self._pairs for number in pair}

    def _queue_in(self, pair: tuple[int, int]) -> list[Job]:
        instances = self._cluster.instances
        return self._queues[min(pair, key=lambda at: (len(self._queues[at]), len(instances[at].homes), at))]

    def _waiting(self, pair: tuple[int, int]) -> list[Job]:
        return [job for number in pair for job in self._queues[number]]

    def _piece_beside(self, decodes: int) -> int:
        return self._piece if decodes else PREFILL_TOKENS

    def _may_balance(self, done: Computed) -> bool:
        pair = self._pairs[done.number // 2]
        return self._cluster.timeline.now_s >= self._looked_s[pair] + LOOK_EVERY_S

    def _balance(self, number: int) -> None:
        """Both of the pair look which of their sessions should go over to the other."""
        pair, now_s = self._pairs[number // 2], self._cluster.timeline.now_s
        self._looked_s[pair] = now_s
        loads = {at: self._load(at) for at in pair}
        if any(load.prompt_tokens for load in loads.values()):
            self._prompted_s[pair] = now_s
        is_quiet = now_s - self._prompted_s[pair] >= QUIET_S
        for here, there in (pair, pair[::-1]):
            homes = dict(self._cluster.instances[here].homes)
            copied = [_seen(job, here, now_s) for job in homes.values() if job.ready_s <= now_s]
            costs = self._costs(loads[here])
            going = going_over(self._roles, loads[here], loads[there], copied, costs, is_quiet=is_quiet)
            for one in going:
                self._cluster.settle(homes[one], there)
            if going:
                loads = {at: self._load(at) for at in pair}

    def _load(self, number: int) -> HolderLoad:
        now_s = self._cluster.timeline.now_s
        homes = self._cluster.instances[number].homes.values()
        waiting = [job.request.prompt_tokens for job in self._queues[number]]
        begun = [job.request.prompt_tokens - job.begun_tokens for job in homes if job.ready_s > now_s]
        return HolderLoad(
            tuple(job.tokens for job in homes if job.ready_s <= now_s), sum(waiting) + sum(begun)
        )

    def _costs(self, here: HolderLoad) -> RoleCosts:
        profile, context = self._cluster.profile, max(here.decoding_tokens, default=0)

        def decode_s(rows: int) -> float:
            return profile.step_s(Work(rows, rows * context, rows * context), rows)

        count = here.prompt_tokens
        prompt_s = profile.step_s(Work(count, count, count * (count + 1) // 2), 1) if count else 0.0
        # who goes over waits for the end of the other's step
        return RoleCosts(decode_s, prompt_s, decode_s(max(1, len(here.decoding_tokens))) / 2)


def _seen(job: Job, here: int, now_s: float) -> HeldSequence:
    seen = job.seen(now_s)
    holders = tuple(HERE if holder == here else THERE for holder in seen.holders)
    return HeldSequence(seen.number, seen.tokens, seen.room_tokens, HERE, holders)
