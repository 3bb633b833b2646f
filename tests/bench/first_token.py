"""First token over homes: `python tests/bench/first_token.py [--homes 3 --delay-ms 30 --mbps 100]`.

Peers that really compute the bundled model, each a process behind an uplink of its own, and a client behind another
one. Links stand before anything is measured. Prints from the request to its first token, and how long a lone token's
way round the circuit takes, which is the least that the second half of it could.
"""

import argparse
import asyncio
import statistics
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.this_machine import processor

from molink.client.circuit.circuit_builder import CircuitBuilder
from molink.client.circuit.connection import SwarmConnection
from molink.client.circuit.session import ClientSession
from molink.client.circuit.session_request import SessionRequest
from molink.shards.spec import ModelSpec, SamplingParams
from molink.simnet.devices.model_shapes import even_spans
from molink.simnet.emulate.driver import KnownPeers
from molink.simnet.emulate.processes.child_process import LinesProcess, PeerProcess
from molink.simnet.emulate.processes.lines import LinesConfiguration
from molink.simnet.emulate.processes.peer import PeerConfiguration
from molink.simnet.emulate.serving import spec_of

WARM_ROUNDS = 3
TIMEOUT_S = 30.0


async def run(options: argparse.Namespace, spec: ModelSpec) -> None:
    """Prints a line for each round, then the medians."""
    async with AsyncExitStack() as stack:
        lines = await stack.enter_async_context(
            LinesProcess(LinesConfiguration(options.homes + 1, options.mbps, options.delay_ms))
        )
        spans = even_spans(spec.layers, options.homes)
        peers = []
        for number, span in enumerate(spans):
            configuration = PeerConfiguration(
                name=f"{number + 1}",
                model=spec.name,
                tensors_per_boundary=1,
                device=None,
                start=span.start,
                stop=span.stop,
                http_proxy=lines.proxies[number],
                uplink_mbps=options.mbps,
                delay_ms=options.delay_ms,
                policy="molink",
                micro_batches="molink",
                prefill_chunk_tokens=None,
            )
            peers.append(await stack.enter_async_context(PeerProcess(configuration)))
        views = tuple(peer.view for peer in peers)
        await lines.settle([*(view.facts.grpc_addresses for view in views), ()])
        connection = await stack.enter_async_context(
            SwarmConnection((), None, http_proxy=lines.proxies[-1], view=KnownPeers(views))
        )
        builder = CircuitBuilder(connection, spec)
        firsts: list[float] = []
        trips: list[float] = []
        for turn in range(options.rounds + WARM_ROUNDS):
            prompt = [2 + (31 * turn + 7 * at) % (spec.vocabulary_size - 2) for at in range(options.tokens)]
            params = SamplingParams(max_new_tokens=4, ignore_eos=True)
            session = ClientSession(builder, SessionRequest(tuple(prompt), params))
            began_s = time.perf_counter()
            came_s = [time.perf_counter() async for _ in session.tokens(TIMEOUT_S)]
            if turn >= WARM_ROUNDS:
                firsts.append(came_s[0] - began_s)
                trips.append((came_s[-1] - came_s[0]) / (len(came_s) - 1))
                print(f"  first token after {firsts[-1]:.3f} s, then {trips[-1]:.3f} s a token", flush=True)
    print(
        f"first token of {options.tokens}: {statistics.median(firsts):.3f} s "
        f"({min(firsts):.3f} to {max(firsts):.3f}), {statistics.median(trips):.3f} s a token"
    )


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--homes", type=int, default=3)
    parser.add_argument("--delay-ms", type=float, default=30.0, help="from home to home, one way (30)")
    parser.add_argument("--mbps", type=float, default=100.0)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    print(f"{processor()}\npython tests/bench/first_token.py {' '.join(sys.argv[1:])}", flush=True)
    asyncio.run(run(options, spec_of("real", None, "", 1)))


if __name__ == "__main__":
    main()
