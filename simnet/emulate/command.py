"""`molink-simnet emulate`: real peer processes serve a trace of requests over shaped lines."""

from pathlib import Path
from typing import Annotated, Literal

from molink.peer.wire.transmission.policies import POLICIES
from molink.simnet.core.guessing import OFF
from molink.simnet.core.matrices import latencies_between, mean_link_ms, read_matrix
from molink.simnet.core.request_load import MOST_NEW_TOKENS, MOST_PROMPT_TOKENS, LengthLimits, kept
from molink.simnet.core.traces import BUNDLED, bundled_trace, read_trace
from molink.simnet.devices.model_shapes import MODEL_SHAPES
from molink.simnet.devices.named_devices import CHOICES
from molink.simnet.presentation.experiments import Run
from molink.simnet.presentation.options import (
    MICRO_BATCHES,
    LineLatencies,
    Tensors,
    Trace,
    WarmUp,
    option,
    require_not_negative,
    require_positive,
)
from molink.simnet.presentation.results import Findings

COMPARED = "concurrent,zeromq,paper,molink"
"""What is compared if nobody says otherwise: the transmission paper's two baselines, its own, and ours."""
DELAY_MS = 30.0
MOST_PEERS = 16
"""Each is a process of its own on this machine."""
EXAMPLE = "molink-simnet emulate --peers 3 --bandwidth-mbps 100 --delay-ms 30 --rate 0.2,0.3 --output results"


def emulate_serving(
    peers: Annotated[int, option("Peer processes, one circuit.", "N", least=1, most=MOST_PEERS)] = 3,
    bandwidth_mbps: Annotated[float, option("Uplink of every peer.", "MBPS")] = 100.0,
    delay_ms: Annotated[
        float | None, option(f"From peer to peer, one way. Default: {DELAY_MS:g}.", "MS")
    ] = None,
    policy: Annotated[
        str, option(f"How peers send, one after the other, with commas: {', '.join(POLICIES)}.", "NAMES")
    ] = COMPARED,
    rate: Annotated[str, option("Requests a second; several with commas.", "RATES")] = "0.2,0.3",
    micro_batches: Annotated[
        str | None, option(f"{MICRO_BATCHES}. Default: that of the system that a policy stands for.", "RULE")
    ] = None,
    prefill_chunk: Annotated[
        int | None,
        option(
            "Cut prompts into such steps. Default: whole prompts, but molink's heads choose.",
            "TOKENS",
            least=1,
        ),
    ] = None,
    speculation: Annotated[
        str,
        option(
            "Guessed tokens of a trip: auto, draft (a draft model too), off or a number; with commas, one after the "
            "other. Timed tails draw what the bundled model once did.",
            "auto|draft|off|K",
        ),
    ] = OFF,
    duration: Annotated[
        float, option("So long requests come that are measured; the paper has 1800.", "S", least=0.1)
    ] = 300.0,
    warm_up: WarmUp = 60.0,
    compute: Annotated[
        Literal["timed", "real"],
        option("timed: peers take the time of --device; real: they compute, on this machine."),
    ] = "timed",
    model: Annotated[
        str | None,
        option(f"timed: {', '.join(MODEL_SHAPES)}; real: any model, by default the bundled one.", "NAME"),
    ] = None,
    device: Annotated[str, option(f"What timed peers are: {CHOICES}.", "NAME")] = "rtx-4090",
    tensors_per_boundary: Tensors = 1,
    latency_matrix: LineLatencies = None,
    trace: Trace = None,
    max_prompt_tokens: Annotated[
        int, option("Longer prompts are left out.", "N", least=1)
    ] = MOST_PROMPT_TOKENS,
    max_new_tokens: Annotated[int, option("Longer answers are left out.", "N", least=1)] = MOST_NEW_TOKENS,
    seed: Annotated[int, option("Where in the trace to begin, and what prompts say.", "S", least=0)] = 0,
) -> Run:
    """Serve a trace on peer processes over shaped lines.

    Real peers, each a process of its own behind an uplink of its own, serve requests over one circuit of even spans,
    once for each policy and rate. A policy stands for a system: its peers send, circulate micro-batches and compute
    prompts as that system does (concurrent: vLLM, zeromq: Helix, paper: that paper's MoLink). Shows averages of time
    to first token (TTFT), time per output token (TPOT) and latency, beside those of the transmission paper (its Table
    2) where it prints them.
    """
    latency_ms = None
    if latency_matrix is not None:
        if delay_ms is not None:
            raise ValueError("--latency-matrix says how far peers are apart: leave out --delay-ms")
        latency_ms = latencies_between(read_matrix(latency_matrix), peers)
        delay_ms = mean_link_ms(latency_ms)
    delay_ms = DELAY_MS if delay_ms is None else delay_ms
    requests = bundled_trace() if trace is None else read_trace(trace)
    # real peers and their engines take seconds to load, which other commands and their processes need not wait for
    from molink.simnet.emulate.rows import serving_rows, serving_table, usage_table, whose
    from molink.simnet.emulate.run import Emulation
    from molink.simnet.emulate.serving import all_runs, cells_of, judge, parameters_of, spec_of
    from molink.simnet.serve.output.figures import table_figure

    cells = cells_of(policy, rate, peers, micro_batches, prefill_chunk, speculation)
    require_positive("--bandwidth-mbps", bandwidth_mbps)
    require_not_negative("--delay-ms", delay_ms)
    require_positive("--duration", duration)
    require_not_negative("--warm-up", warm_up)
    spec = spec_of(compute, model, device, tensors_per_boundary)
    emulation = Emulation(
        spec=spec,
        device=device if compute == "timed" else None,
        tensors_per_boundary=tensors_per_boundary,
        peers=peers,
        bandwidth_mbps=bandwidth_mbps,
        delay_ms=delay_ms,
        trace=kept(requests, LengthLimits(max_prompt_tokens, max_new_tokens), spec),
        warm_up_s=warm_up,
        duration_s=duration,
        seed=seed,
        latency_ms=latency_ms,
    )
    parameters = parameters_of(emulation, cells, BUNDLED if trace is None else str(trace))
    parameters["latency_matrix"] = None if latency_matrix is None else str(latency_matrix)

    def run(folder: Path | None) -> Findings:
        runs = all_runs(emulation, cells, parameters, folder)
        rows = serving_rows(emulation, runs)
        caption = "Averages over requests, by rate and policy"
        return Findings(
            "emulate",
            f"{spec.name} served by {peers} peer processes over shaped lines",
            parameters,
            rows,
            [serving_table(emulation, rows), usage_table(rows)],
            figures=lambda: [table_figure(rows, whose(emulation), caption)],
            judge=lambda: judge(emulation, runs),
        )

    return run
