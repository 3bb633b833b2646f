"""One cell of the redundancy paper's figures: a policy serves a workload at a rate, and what came of it."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from molink.peer.redundancy.pair_roles import Roles
from molink.simnet.core.timeline import Timeline
from molink.simnet.papers.redundancy.cluster.accellm import Accellm
from molink.simnet.papers.redundancy.cluster.baselines import Splitwise, Vllm
from molink.simnet.papers.redundancy.cluster.cluster import Cluster, ClusterPolicy
from molink.simnet.papers.redundancy.cluster.instances import SEQUENCE_MS, instance_profile
from molink.simnet.papers.redundancy.cluster.molink import Molink
from molink.simnet.papers.redundancy.cluster.molink_pairs import MolinkPairs
from molink.simnet.papers.redundancy.cluster.workloads import WORKLOADS, TokenCounts, requests

POLICIES: Mapping[str, Callable[[Cluster], ClusterPolicy]] = MappingProxyType(
    {
        "vllm": Vllm,
        "splitwise": Splitwise,
        "accellm": Accellm,
        "molink": Molink,
        "molink-pairs": partial(MolinkPairs, roles=Roles.PAIRS),
        "molink-auto": partial(MolinkPairs, roles=Roles.AUTO),
    }
)
"""By the name that commands take. The last two are ours with roles, as peers take them."""
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class RedundancyCell:
    """What is simulated."""

    policy: str
    device: str
    workload: str
    instances: int
    rate_rps: float
    interconnect_gbps: float
    """From an instance to the others, in each direction."""
    warm_up_s: float
    duration_s: float
    arrivals: str
    sequence_ms: float = SEQUENCE_MS
    seed: int = 0
    recorded: tuple[TokenCounts, ...] = ()
    """Lengths of prompts and outputs, of a workload that is no drawn one."""


@dataclass(frozen=True, slots=True)
class RedundancyRun:
    """What came of it, of the requests that came after the warm-up; times are averages over them."""

    cell: RedundancyCell
    requests: int
    ttft_s: float
    ttft_max_s: float
    tbt_s: float
    """From a token to the next one."""
    tbt_max_s: float
    jct_s: float
    tokens_per_instance_s: float
    """Tokens drawn while they came."""
    peak_kv_gb: float
    """Keys and values of the instance that held the most at any time."""
    peak_memory_gb: float
    """The same with weights."""
    capacity_kv_gb: float
    instance_busy: float
    """Part of the time in which an instance computed, over all instances, up to when the last request came."""
    link_busy: float
    """Of the busiest line, up to the end."""
    sent_gb: float
    lost_gb: float
    short_requests: int
    """Begun while memory was too short for two of everything, the warm-up's included."""
    events: int


def simulate(cell: RedundancyCell) -> RedundancyRun:
    """Runs until every request has ended.

    Raises:
        ValueError: no such policy, device or workload, or numbers that cannot be.
        AssertionError: something that must be conserved was not.
    """
    if cell.policy not in POLICIES or not (cell.recorded or cell.workload in WORKLOADS):
        raise ValueError(f"no policy {cell.policy} or no workload {cell.workload}")
    if not (0 < cell.interconnect_gbps < math.inf and cell.instances > 1 and cell.warm_up_s >= 0):
        raise ValueError(f"a cluster has two instances or more and a line between them: {cell}")
    timeline = Timeline()
    profile = instance_profile(cell.device, cell.sequence_ms)
    cluster = Cluster(timeline, profile, cell.instances, cell.interconnect_gbps * 1e9 / 8)
    until_s = cell.warm_up_s + cell.duration_s
    lengths = cell.recorded or WORKLOADS[cell.workload]
    coming = requests(lengths, cell.rate_rps, until_s, cell.arrivals, cell.seed)
    policy = POLICIES[cell.policy](cluster)
    cluster.arrive(coming, policy)
    timeline.run(until_s)
    busy = sum(instance.busy_s for instance in cluster.instances) / (cell.instances * until_s)
    timeline.run()
    check_conserved(cluster)
    short = policy.short_requests if isinstance(policy, Accellm | Molink) else 0
    return _measured(cell, cluster, busy, short)


def check_conserved(cluster: Cluster) -> None:
    """Raises AssertionError if a request did not end once, bytes appeared or vanished, a line carried more than it can,
    or memory was overfull or is still held."""
    for job in cluster.jobs:
        generated = job.tokens - job.request.prompt_tokens + 1
        if not job.ended or job.left or generated != job.request.output_tokens:
            raise AssertionError(f"request {job.request.number} has {generated} tokens: {job.request}")
    for port in cluster.ports:
        port.account.check()
        if port.account.on_the_way_bytes or port.busy_s > cluster.timeline.now_s * (1 + _ROUNDING):
            raise AssertionError(f"a line carried {port.account} in {port.busy_s} s")
    for one in cluster.instances:
        left = (one.reserved_tokens, one.kept_tokens, one.held_tokens, len(one.homes), len(one.held))
        if any(left) or one.busy or one.peak_tokens > one.capacity_tokens:
            raise AssertionError(f"instance {one.number} ended with {left}, at most {one.peak_tokens}")


def _measured(cell: RedundancyCell, cluster: Cluster, busy: float, short_requests: int) -> RedundancyRun:
    jobs = [job for job in cluster.jobs if job.request.arrival_s >= cell.warm_up_s]
    if not jobs:
        raise ValueError(f"nothing came in {cell.duration_s:g} s at {cell.rate_rps:g} requests/s")
    ttft_s = [job.first_s - job.request.arrival_s for job in jobs]
    seconds = range(math.ceil(cell.warm_up_s), math.floor(cell.warm_up_s + cell.duration_s))
    tokens = sum(cluster.tokens[second] for second in seconds)
    token_gb = cluster.profile.kv_token_bytes / 1e9
    peak_gb = token_gb * max(instance.peak_tokens for instance in cluster.instances)
    accounts = [port.account for port in cluster.ports]
    return RedundancyRun(
        cell=cell,
        requests=len(jobs),
        ttft_s=_mean(ttft_s),
        ttft_max_s=max(ttft_s),
        tbt_s=sum(job.last_s - job.first_s for job in jobs)
        / sum(job.request.output_tokens - 1 for job in jobs),
        tbt_max_s=max(job.longest_gap_s for job in jobs),
        jct_s=_mean([job.last_s - job.request.arrival_s for job in jobs]),
        tokens_per_instance_s=tokens / len(seconds) / cell.instances,
        peak_kv_gb=peak_gb,
        peak_memory_gb=peak_gb + cluster.profile.weight_bytes / 1e9,
        capacity_kv_gb=token_gb * cluster.profile.capacity_tokens,
        instance_busy=busy,
        link_busy=max(port.busy_s for port in cluster.ports) / cluster.timeline.now_s,
        sent_gb=sum(account.sent_bytes for account in accounts) / 1e9,
        lost_gb=sum(account.lost_bytes for account in accounts) / 1e9,
        short_requests=short_requests,
        events=cluster.timeline.events,
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
