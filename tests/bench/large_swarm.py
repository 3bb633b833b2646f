"""What a client's plan, its partners and a newcomer's choice of layers take in a large swarm:
`python tests/bench/large_swarm.py`.

Volunteers are drawn and settled as `molink-simnet swarm` does it. The same plan is made of a problem of all peers and
of one of the shortlist, each in a process of its own, since their memory is compared. `--peers 10000` needs 5 GB.
"""

import argparse
import multiprocessing
import resource
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.this_machine import processor

from molink.dht.records.records import PeerView
from molink.routing import Criteria, IncumbentRoute, Snapshot, choose_partners, preview_join, replan_incumbent
from molink.routing.cost.terms import Demand
from molink.routing.routes.shortlist import Shortlist, SnapshotPeers, replan_incumbent_among
from molink.simnet.core.matrices import bundled_matrix
from molink.simnet.core.traces import bundled_trace
from molink.simnet.devices.model_shapes import shape_named
from molink.simnet.swarm.factory import random_setup
from molink.simnet.swarm.members.initial_placement import InitialPlacement
from molink.simnet.swarm.members.member import Member
from molink.simnet.swarm.settings import SwarmSettings

TOKENS, PROMPT_TOKENS = 400, 200
PLANS = 3
ANNOUNCED_S = 5.0
CRITERIA = Criteria(algorithm="refined", time_limit_s=0.05)
"""As a client's first circuit is searched for."""


def swarm(peers: int, seed: int) -> tuple[Snapshot, Member]:
    """What a router knows, and a newcomer."""
    cast = random_setup(
        SwarmSettings(peers + 1, seed=seed), shape_named("llama-2-70b"), bundled_matrix(), bundled_trace()
    )
    *members, last = InitialPlacement(cast.model).place_all(cast.volunteers)
    views = tuple(PeerView(one.volunteer.facts, one.state(), ANNOUNCED_S) for one in members)
    return Snapshot(views, cast.model), Member(last.volunteer, cast.model)


def plans(peers: int, seed: int, shortlisted: bool) -> str:
    """One plan after another of the same swarm."""
    snapshot, _ = swarm(peers, seed)
    standing: IncumbentRoute | None = None
    shortlist: Shortlist | None = None
    spent_s: list[float] = []
    for number in range(PLANS):
        began_s = time.perf_counter()
        if shortlisted:
            standing, shortlist = replan_incumbent_among(
                standing, shortlist, SnapshotPeers(snapshot), TOKENS,
                prompt_tokens=PROMPT_TOKENS, now_s=float(number), criteria=CRITERIA,
            )  # fmt: skip
        else:
            standing = replan_incumbent(
                standing, snapshot, TOKENS, prompt_tokens=PROMPT_TOKENS, criteria=CRITERIA
            )
        spent_s.append(time.perf_counter() - began_s)
    assert standing is not None
    return _told("shortlist" if shortlisted else "all peers", peers, spent_s, standing.route.objective_ms)


def partners(peers: int, seed: int) -> str:
    """Partners for the hops of a plan, from its shortlist."""
    snapshot, _ = swarm(peers, seed)
    known = SnapshotPeers(snapshot)
    standing, shortlist = replan_incumbent_among(
        None, None, known, TOKENS, prompt_tokens=PROMPT_TOKENS, now_s=0.0, criteria=CRITERIA
    )
    few = snapshot if shortlist is None else known.snapshot({*shortlist.posed, *standing.route.peer_ids})
    spent_s: list[float] = []
    for _ in range(PLANS):
        began_s = time.perf_counter()
        chosen = choose_partners(few, standing.route, Demand.of(TOKENS, PROMPT_TOKENS))
        spent_s.append(time.perf_counter() - began_s)
    after_ms = [one.tpot_ms for one in chosen if one.tpot_ms is not None]
    told = _told("partners", peers, spent_s, sum(after_ms) / len(after_ms) if after_ms else None)
    reasons = ", ".join(sorted(str(one.reason) for one in chosen if one.reason is not None))
    return f"{told}, {len(after_ms)} of {len(chosen)} hops {reasons}"


def joins(peers: int, seed: int) -> str:
    """A newcomer's choice of layers."""
    snapshot, newcomer = swarm(peers, seed)
    began_s = time.perf_counter()
    preview = preview_join(snapshot, newcomer.joining())
    return _told("newcomer", peers, [time.perf_counter() - began_s], preview.tpot_after_ms)


def _told(what: str, peers: int, spent_s: list[float], found_ms: float | None) -> str:
    most_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    times = ", ".join(f"{one:.3f}" for one in spent_s)
    found = "none" if found_ms is None else f"{found_ms:.1f} ms"
    return f"{peers:>6} {what:<10} {times:<22} s   circuit {found:<10} process {most_mb} MB"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", default="300,2000,10000")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(f"{processor()}; one process, {PLANS} plans after another")
    for peers in map(int, arguments.peers.split(",")):
        for job in ((plans, True), (plans, False), (partners,), (joins,)):
            run, *more = job
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                print(pool.submit(run, peers, arguments.seed, *more).result(), flush=True)


if __name__ == "__main__":
    main()
